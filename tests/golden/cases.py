"""Reader of recorded reference outputs; builds our modules from the arguments of a case."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from detr_bf.batchformer import BatchFormerV2
from detr_bf.detectors import DETECTORS, Detector, MaskHead, Options
from detr_bf.interop import from_foreign
from detr_bf.structures import FeatureMap, Masks, Outputs, Target, resize_mask


@dataclass(frozen=True)
class Case:
    """One recorded run."""

    name: str
    tensors: dict[str, Tensor]
    manifest: dict[str, Any]

    @classmethod
    def load(cls, folder: Path, name: str) -> Case:
        stored = load_file(folder / f"{name}.safetensors")
        tensors = {key: value.float() if value.dtype == torch.float16 else value for key, value in stored.items()}
        return cls(name, tensors, json.loads((folder / f"{name}.json").read_text()))

    @property
    def cfg(self) -> dict[str, Any]:
        return self.manifest["cfg"]

    def below(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors whose names start with ``prefix``, without the prefix."""
        return {name.removeprefix(prefix): x for name, x in self.tensors.items() if name.startswith(prefix)}


def build(case: Case, weights: str = "weights.") -> Detector:
    """Build our detector with the arguments of the case and its weights, renamed by the name tables."""
    cfg = case.cfg
    channels = cfg["backbone_num_channels"]
    model = detector(case)(nn.Identity(), channels if isinstance(channels, list) else [channels], options(case))
    model.load_state_dict(from_foreign(case.below(weights), case.name))
    return model


def options(case: Case) -> Options:
    cfg = case.cfg
    return Options(
        num_logits=cfg["num_classes"] + (0 if family(case) in ("conditional_detr", "deformable_detr") else 1),
        hidden_dim=cfg["hidden_dim"],
        heads=cfg["nheads"],
        encoder_layers=cfg["enc_layers"],
        decoder_layers=cfg["dec_layers"],
        feedforward_dim=cfg["dim_feedforward"],
        dropout=0.0,
        pre_norm=cfg.get("pre_norm", False),
        num_queries=cfg["num_queries"],
        batch_former=batch_former(case),
        mask_head=mask_head(case),
    )


def mask_head(case: Case) -> MaskHead | None:
    """Build the mask head; the recorded ones read the maps of a ResNet-50."""
    cfg = case.cfg
    if not cfg.get("masks"):
        return None
    return MaskHead(cfg["hidden_dim"], heads=cfg["nheads"], finer_channels=cfg.get("fpn_dims", [1024, 512, 256]))


def family(case: Case) -> str:
    """Return the name of our detector for a recorded one."""
    repository = json.dumps(case.manifest["upstream"]).lower()
    if "deformable" in repository:
        return "deformable_detr"
    if "conditional" in repository:
        return "conditional_detr"
    if "smca" in repository:
        return "smca_multi_scale" if "Multi_scale" in json.dumps(case.manifest["upstream"]) else "smca"
    return "detr"


def detector(case: Case) -> Any:
    cfg = case.cfg
    kind = family(case)

    def make(backbone: nn.Module, channels: list[int], chosen: Options) -> Detector:
        if kind == "deformable_detr":
            return DETECTORS[kind](
                backbone,
                channels,
                chosen,
                extra_levels=cfg["num_feature_levels"] - len(channels),
                encoder_points=cfg["enc_n_points"],
                decoder_points=cfg["dec_n_points"],
                box_refine=cfg["with_box_refine"],
                two_stage=cfg["two_stage"],
            )
        if kind == "smca":
            return DETECTORS[kind](backbone, channels, chosen, dynamic_scale=cfg["dynamic_scale"], smooth=cfg["smooth"])
        if kind == "smca_multi_scale":
            widths = [channels[0] // 4, channels[0] // 2, channels[0]]
            assert cfg["dynamic_scale"] == "type3", "the reference runs with no other"
            return DETECTORS[kind](backbone, widths, chosen, smooth=cfg["smooth"])
        return DETECTORS[kind](backbone, channels, chosen)

    return make


def batch_former(case: Case) -> BatchFormerV2 | None:
    """Build batch attention from the forks' flags; --bf 3 of DETR's and --bf 1 of Deformable's mean the same."""
    cfg = case.cfg
    if not cfg.get("bf"):
        return None
    after_encoder = cfg["bf"] == 1 and family(case) == "detr"
    return BatchFormerV2(
        cfg["hidden_dim"],
        layers=[cfg["enc_layers"] - 1] if after_encoder else cfg["insert_idx"],
        num_encoder_layers=cfg["enc_layers"],
        position="after",
        shared=bool(cfg["share_bf"]),
        mode="single_stream" if cfg["bf"] == 7 else "two_stream",
        num_layers=cfg.get("bt_num_layers", 1),
        dropout=0.0,
    )


def samples_mask(case: Case) -> Tensor:
    """Return the padding mask (B, H, W), True = padding."""
    sizes = case.cfg["image_sizes_hw"]
    mask = torch.ones(len(sizes), max(h for h, _ in sizes), max(w for _, w in sizes), dtype=torch.bool)
    for row, (height, width) in enumerate(sizes):
        mask[row, :height, :width] = False
    return mask


def features(case: Case, prefix: str = "input.") -> list[FeatureMap]:
    """Return the maps that our detector reads; multi-scale SMCA never reads the first."""
    maps = [x for _, x in sorted(case.below(f"{prefix}features.").items(), key=lambda item: int(item[0]))]
    if family(case) == "smca_multi_scale":
        maps = maps[-3:]
    return [FeatureMap(x, resize_mask(samples_mask(case), x.shape[-2:])) for x in maps]


def recorded(case: Case, prefix: str) -> Outputs:
    """Return the recorded outputs with stacked auxiliary layers and the proposals of the encoder."""
    tensors = case.below(prefix)
    count = sum(name.startswith("aux_outputs.") and name.endswith("pred_boxes") for name in tensors)
    layers = [f"aux_outputs.{layer}." for layer in range(count)] + [""]
    logits, boxes = (torch.stack([tensors[layer + kind] for layer in layers]) for kind in ("pred_logits", "pred_boxes"))
    proposals = None
    if "enc_outputs.pred_logits" in tensors:
        logits_and_boxes = (tensors[f"enc_outputs.pred_{kind}"][None] for kind in ("logits", "boxes"))
        proposals = Outputs(*logits_and_boxes, one_class=True)
    masks = Masks.known(tensors["pred_masks"]) if "pred_masks" in tensors else None
    return Outputs(logits, boxes, proposals=proposals, masks=masks)


def targets_of(case: Case, prefix: str) -> list[Target]:
    tensors = case.below(prefix)
    count = sum(name.endswith(".labels") for name in tensors)
    return [
        Target(i, tensors[f"{i}.boxes"], tensors[f"{i}.labels"], (1, 1), (1, 1), masks=tensors.get(f"{i}.masks"))
        for i in range(count)
    ]


def assert_close(actual: Tensor, expected: Tensor, relative: float = 1e-5) -> None:
    """Assert differences of at most ``relative`` times the largest value."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=relative * max(expected.abs().max().item(), 1.0))


def assert_outputs(outputs: Outputs, expected: Outputs) -> None:
    """Compare all layers, and the proposals if there are any."""
    assert_close(outputs.logits, expected.logits)
    assert_close(outputs.boxes, expected.boxes)
    assert (outputs.masks is None) == (expected.masks is None)
    if outputs.masks is not None and expected.masks is not None:
        assert_close(outputs.masks.all(), expected.masks.all())
    assert (outputs.proposals is None) == (expected.proposals is None)
    if outputs.proposals is not None and expected.proposals is not None:
        assert_outputs(outputs.proposals, expected.proposals)
