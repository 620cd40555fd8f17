"""Reader of recorded reference outputs; builds our modules from the arguments of a case."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from detr_bf.batchformer import BatchFormerV2
from detr_bf.common.masks import Masks
from detr_bf.common.structures import FeatureMap, Outputs, PaddedTargets, QueryGroup, Target, resize_mask
from detr_bf.detectors import DETECTORS, Detector, MaskHead, Options
from detr_bf.detectors.denoising import ContrastiveDenoising
from detr_bf.detectors.groups import ONE_TO_MANY, query_groups
from detr_bf.interop.formats import from_foreign, to_foreign
from detr_bf.losses import CrossEntropy, Focal, HungarianMatcher, SetCriterion
from detr_bf.losses.matcher import Matches

SHARED = Path(__file__).parents[3] / "shared"
FOLDERS = tuple(SHARED / name for name in ("golden", "golden_successors", "golden_dfine"))  # read without --golden
WITH_NO_OBJECT = ("detr", "smca", "smca_multi_scale")  # detectors with a last class for no object
WITH_GIOU_EPS = ("dab_detr", "dab_deformable_detr", "dn_detr", "dino")
FORMATS = {"dn_detr": "dab_detr"}  # names of checkpoint formats that are not the detector's
DEIM_KEYS = ("activation", "mlp_act", "query_pos_method")  # arguments of its decoder of RT-DETRv2
KEY_LISTS = "14_state_dict_keys"  # folder in them with the names and shapes of full-size models


@dataclass(frozen=True)
class Case:
    """One recorded run."""

    name: str
    tensors: dict[str, Tensor]
    manifest: dict[str, Any]

    @classmethod
    def load(cls, path: Path) -> Case:
        """Read the case of a manifest; its tensors lie beside it."""
        stored = load_file(path.with_suffix(".safetensors"))
        tensors = {key: value.float() if value.dtype == torch.float16 else value for key, value in stored.items()}
        return cls(path.stem, tensors, json.loads(path.read_text()))

    @property
    def cfg(self) -> dict[str, Any]:
        return self.manifest["cfg"]

    def below(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors whose names start with ``prefix``, without the prefix."""
        return {name.removeprefix(prefix): x for name, x in self.tensors.items() if name.startswith(prefix)}


def build(case: Case, weights: str = "weights.") -> Detector:
    """Build our detector with the arguments of the case and its weights, renamed by the name tables."""
    assert_supported(case)
    channels = case.cfg["backbone_num_channels"]
    model = detector(case)(nn.Identity(), channels if isinstance(channels, list) else [channels], options(case))
    model.load_state_dict(from_foreign(case.below(weights), case.name))
    return model


def assert_supported(case: Case) -> None:
    """Assert the values of options that our detectors have no argument for, or that repeat another option."""
    cfg, family_name = case.cfg, family(case)
    supported: dict[str, tuple[Any, ...]] = {
        "dropout": (0.0,),
        "iter_update": (True,),  # boxes refined by every layer
        "query_dim": (4,),  # anchors are boxes, not points
        "two_stage_type": ("standard",),  # DINO's
        "dn_labelbook_size": (cfg["num_classes"],),
        **({} if family_name == "dfine" else {"eval_idx": (-1, cfg["dec_layers"] - 1)}),  # the last layer predicts
        "eval_spatial_size": (None, case.manifest.get("padded_hw")),  # ours computes the anchors for every size
    }
    if family_name == "dab_deformable_detr":
        supported["two_stage"] = (False,)
    for name, values in supported.items():
        value = cfg.get(name, values[0])
        assert value in values, f"{case.name}: {name}={value!r}; {family_name} is compared with {values} only"
    weights = case.manifest.get("weight_dict", {})
    for name, value in cfg.get("coef", {}).items():
        assert weights[name] == value, f"{case.name}: coef has {name}={value}, weight_dict {weights[name]}"


def num_select(case: Case) -> int:
    """Return the number of detections per image, which must be that of the recorded ones if there are any."""
    number: int = case.cfg["num_select"]
    scores = case.tensors.get("post.out.0.scores")
    assert scores is None or len(scores) == number, f"{case.name}: num_select={number}, recorded {len(scores)}"
    return number


def options(case: Case) -> Options:
    cfg = case.cfg
    return Options(
        num_logits=cfg["num_classes"] + (1 if family(case) in WITH_NO_OBJECT else 0),
        hidden_dim=cfg["hidden_dim"],
        heads=cfg["sa_nheads" if "sa_nheads" in cfg else "nheads"],
        encoder_layers=cfg["num_encoder_layers"] if "num_encoder_layers" in cfg else cfg.get("enc_layers", 0),
        decoder_layers=cfg["dec_layers"],
        feedforward_dim=cfg["dim_feedforward"],
        dropout=0.0,
        pre_norm=cfg.get("pre_norm", False),
        activation=cfg["transformer_activation"]
        if family(case) in ("dab_detr", "dn_detr")
        else cfg.get("activation", "relu"),
        num_queries=cfg["num_queries_one2one"] if "num_queries_one2one" in cfg else cfg["num_queries"],
        groups=further_queries(case),
        position_temperature=position_temperature(case),
        aux_loss=cfg.get("aux_loss", True),
        batch_former=batch_former(case),
        mask_head=mask_head(case),
    )


def further_queries(case: Case) -> tuple[QueryGroup, ...]:
    """Return H-DETR's one-to-many queries, or RF-DETR's groups."""
    cfg = case.cfg
    if "group_detr" in cfg:
        return query_groups(cfg["num_queries"], group_detr=cfg["group_detr"])
    if "num_queries_one2many" not in cfg:
        return ()
    return query_groups(
        cfg["num_queries_one2one"],
        one_to_many=cfg["num_queries_one2many"],
        repeats=cfg["k_one2many"],
        weight=cfg["lambda_one2many"],
    )


def position_temperature(case: Case) -> float:
    if family(case) not in ("dab_detr", "dino", "dn_detr"):
        return 10000.0
    assert case.cfg["pe_temperatureH"] == case.cfg["pe_temperatureW"], "we have one temperature for both axes"
    return float(case.cfg["pe_temperatureH"])


def mask_head(case: Case) -> MaskHead | None:
    """Build the mask head; the recorded ones read the maps of a ResNet-50."""
    cfg = case.cfg
    if not cfg.get("masks"):
        return None
    return MaskHead(cfg["hidden_dim"], heads=cfg["nheads"], finer_channels=cfg.get("fpn_dims", [1024, 512, 256]))


def family(case: Case) -> str:
    """Return the name of our detector for a recorded one."""
    repository = json.dumps(case.manifest["upstream"]).lower()
    if "/dino" in repository:
        return "dino"
    if "d-fine" in repository or "/deim" in repository:
        return case.cfg.get("detector", "dfine")  # DEIM is a recipe of both
    if "rf-detr" in repository:
        return "rfdetr"
    if "rt-detr" in repository:
        return "rtdetrv2" if "rtdetrv2" in repository else "rtdetr"
    if "dab-detr" in repository:
        return case.cfg.get("modelname", "dab_deformable_detr" if "enc_n_points" in case.cfg else "dab_detr")
    if "dn-detr" in repository:
        return "dn_detr"
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
                mixed_selection=cfg.get("mixed_selection", False),
                look_forward_twice=cfg.get("look_forward_twice", False),
            )
        if kind == "dino":
            return DETECTORS[kind](backbone, channels, chosen, **dino_options(case, len(channels)))
        if kind in ("rtdetr", "rtdetrv2"):
            return DETECTORS[kind](backbone, channels, chosen, **rtdetr_settings(cfg))
        if kind == "dfine":
            return DETECTORS[kind](backbone, channels, chosen, **dfine_settings(cfg))
        if kind == "rfdetr":
            return DETECTORS[kind](backbone, channels, chosen, **rfdetr_settings(cfg))
        anchors = {"patterns": cfg.get("num_patterns"), "random_points": cfg.get("random_refpoints_xy")}
        if kind == "dab_detr":
            return DETECTORS[kind](backbone, channels, chosen, **anchors)
        if kind == "dn_detr":
            return DETECTORS[kind](backbone, channels, chosen, **anchors, **denoising(case))
        if kind == "dab_deformable_detr":
            return DETECTORS[kind](
                backbone,
                channels,
                chosen,
                **anchors,
                extra_levels=cfg["num_feature_levels"] - len(channels),
                encoder_points=cfg["enc_n_points"],
                decoder_points=cfg["dec_n_points"],
                box_refine=cfg.get("with_box_refine", True),
            )
        if kind == "smca":
            return DETECTORS[kind](backbone, channels, chosen, dynamic_scale=cfg["dynamic_scale"], smooth=cfg["smooth"])
        if kind == "smca_multi_scale":
            widths = [channels[0] // 4, channels[0] // 2, channels[0]]
            assert cfg["dynamic_scale"] == "type3", "the reference runs with no other"
            return DETECTORS[kind](backbone, widths, chosen, smooth=cfg["smooth"])
        return DETECTORS[kind](backbone, channels, chosen)

    return make


def dino_options(case: Case, maps: int) -> dict[str, Any]:
    """Return the arguments of :func:`detr_bf.detectors.dino.dino`; others as in DINO's configs."""
    cfg = case.cfg
    return {
        "extra_levels": cfg["num_feature_levels"] - maps,
        "encoder_points": cfg["enc_n_points"],
        "decoder_points": cfg["dec_n_points"],
        "mixed_selection": cfg["embed_init_tgt"],
        "layer_class_heads": not cfg.get("dec_pred_class_embed_share", True),
        "layer_box_heads": not cfg.get("dec_pred_bbox_embed_share", True),
        "token_class_head": not cfg.get("two_stage_class_embed_share", False),
        "label_book": cfg.get("dn_labelbook_size"),
        "token_box_head": not cfg.get("two_stage_bbox_embed_share", False),
        "denoising": ContrastiveDenoising(
            queries=cfg["dn_number"],
            # Below 50 DINO's code takes twice the number for that of the groups.
            groups=2 * cfg["dn_number"] if cfg["dn_number"] < 50 else None,
            label_noise=cfg["dn_label_noise_ratio"],
            box_noise=cfg["dn_box_noise_scale"],
        ),
    }


def rtdetr_settings(cfg: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of RT-DETR for those of a recorded one."""
    assert cfg["num_feature_levels"] == len(cfg["backbone_num_channels"]), "the reference runs with no other"
    assert cfg["use_encoder_idx"] == [len(cfg["backbone_num_channels"]) - 1], "attention on the last map only"
    assert cfg.get("query_select_method", "default") == "default"
    return {
        "encoder_dim": cfg.get("enc_hidden_dim"),
        "encoder_feedforward_dim": cfg["enc_dim_feedforward"],
        "expansion": cfg["expansion"],
        "fusion_blocks": round(3 * cfg["depth_mult"]),
        "points": cfg["dec_n_points"],
        "sampling": "discrete" if cfg.get("cross_attn_method") == "discrete" else "bilinear",
        "learned_content": cfg["learnt_init_query"],
        "head_activation": cfg.get("mlp_act", "relu"),
        "deep_position": cfg.get("query_pos_method") == "as_reg",
        "deim_noise": cfg.get("kind") == "deim",
        "denoising": ContrastiveDenoising(
            queries=cfg["num_denoising"], label_noise=cfg["label_noise_ratio"], box_noise=cfg["box_noise_scale"]
        ),
        "as_released": True,
    }


def dfine_settings(cfg: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of D-FINE for those of a recorded one."""
    assert cfg["num_feature_levels"] == len(cfg["backbone_num_channels"]), "the reference runs with no other"
    return {
        "encoder_dim": cfg.get("enc_hidden_dim"),
        "encoder_feedforward_dim": cfg["enc_dim_feedforward"],
        "expansion": cfg["expansion"],
        "fusion_blocks": round(3 * cfg["depth_mult"]),
        "attention_levels": cfg["use_encoder_idx"],
        "points": cfg["dec_n_points"],
        "sampling": "discrete" if cfg["cross_attn_method"] == "discrete" else "bilinear",
        "selection": {"default": "tokens", "one2many": "pairs"}[cfg["query_select_method"]],
        "learned_content": cfg["learnt_init_query"],
        "head_activation": cfg.get("mlp_act", "relu"),
        "eval_layer": cfg["eval_idx"] % cfg["dec_layers"],
        "layer_scale": cfg["layer_scale"],
        "reg_max": cfg["reg_max"],
        "reg_scale": cfg["reg_scale"],
        "denoising": ContrastiveDenoising(  # box_noise_scale is not used by the authors' code
            queries=cfg["num_denoising"], label_noise=cfg["label_noise_ratio"]
        ),
        "as_released": True,
    }


def rfdetr_settings(cfg: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of RF-DETR for those of a recorded one."""
    assert cfg["two_stage"], "the reference runs with no other"
    return {
        "levels": cfg["projector_scale"],
        "layer_norm": cfg["layer_norm"],
        "cross_heads": cfg["ca_nheads"],
        "points": cfg["dec_n_points"],
        "refine": not cfg["lite_refpoint_refine"],
        "scaled_boxes": cfg["bbox_reparam"],
    }


def assert_same_pairs(case: Case, names: str, matches: Matches, layer: int, rows: int) -> None:
    """Compare the pairs of a layer with the recorded ones, ``names.ROW.src`` and ``names.ROW.tgt``, in their order."""
    for row in range(rows):
        here = (matches.layer == layer) & (matches.row == row)
        expected = case.below(f"{names}.{row}.")
        assert torch.equal(matches.query[here], expected["src"])
        assert torch.equal(matches.target[here], expected["tgt"])


def _of_hybrid_encoder(hybrid: dict[str, Any], decoder: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a hybrid encoder, and those of the decoder that it shares."""
    return {
        "backbone_num_channels": hybrid["in_channels"],
        "num_feature_levels": decoder["num_levels"],
        "position_embedding": "sine",
        "hidden_dim": decoder["hidden_dim"],
        "enc_hidden_dim": hybrid["hidden_dim"],
        "nheads": hybrid["nhead"],
        "num_encoder_layers": hybrid["num_encoder_layers"],
        "use_encoder_idx": hybrid["use_encoder_idx"],
        "enc_dim_feedforward": hybrid["dim_feedforward"],
        "expansion": hybrid["expansion"],
        "depth_mult": hybrid["depth_mult"],
    }


def flat_rtdetr(args: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a full-size RT-DETR, nested in a key list, by the names of the small cases."""
    body, hybrid = args["PResNet"], args["HybridEncoder"]
    decoder = args.get("RTDETRTransformerv2") or args["RTDETRTransformer"]
    return {
        "backbone": f"resnet{body['depth']}vd",
        "dilation": False,
        "frozen_norm": body["freeze_norm"],
        "frozen_stages": body["freeze_at"] + 1,
        **_of_hybrid_encoder(hybrid, decoder),
        "dim_feedforward": 1024,  # their default, which no recipe changes
        "dec_layers": decoder.get("num_decoder_layers", decoder.get("num_layers")),
        "dec_n_points": decoder.get("num_points", 4),
        "cross_attn_method": decoder.get("cross_attn_method", "default"),
        "learnt_init_query": False,
        "num_queries": decoder["num_queries"],
        "num_denoising": decoder["num_denoising"],
        "label_noise_ratio": 0.5,
        "box_noise_scale": 1.0,
    } | (
        {"kind": "deim", "detector": "rtdetrv2"} | {key: decoder[key] for key in DEIM_KEYS}
        if "mlp_act" in decoder
        else {}
    )


def flat_dfine(args: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a full-size D-FINE, nested in a key list, by the names of the small cases."""
    body, hybrid, decoder = args["HGNetv2"], args["HybridEncoder"], args["DFINETransformer"]
    assert body.get("freeze_stem_only", True), "no recipe freezes the first stage"
    return {
        "backbone": f"hgnetv2_{body['name'].lower()}",
        "backbone_strides": hybrid["feat_strides"],
        "dilation": False,
        "frozen_norm": body["freeze_norm"],
        "frozen_stages": body["freeze_at"] + 1,
        **_of_hybrid_encoder(hybrid, decoder),
        "dim_feedforward": decoder.get("dim_feedforward", 1024),
        "dec_layers": decoder["num_layers"],
        "dec_n_points": decoder["num_points"],
        "learnt_init_query": False,
        **{key: decoder[key] for key in _SAME_IN_BOTH},
    }


_SAME_IN_BOTH = (  # names of arguments in full-size D-FINE and the small cases
    *("num_queries", "num_denoising", "label_noise_ratio", "box_noise_scale", "reg_max", "reg_scale"),
    *("cross_attn_method", "query_select_method", "layer_scale", "eval_idx"),
)


def denoising(case: Case) -> dict[str, Any]:
    cfg = case.cfg
    return {
        "groups": cfg["scalar"],
        "label_noise": cfg["label_noise_scale"],
        "box_noise": cfg["box_noise_scale"],
    }


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
    strides = case.cfg.get("backbone_strides", [case.cfg["stride"]] if "stride" in case.cfg else [])
    for x, stride in zip(maps[-len(strides) :], strides, strict=False):  # a mask head has further, finer maps
        sizes = tuple(math.ceil(size / stride) for size in samples_mask(case).shape[-2:])
        assert x.shape[-2:] == sizes, f"{case.name}: map {tuple(x.shape)} at stride {stride}, expected {sizes}"
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
    counts = case.manifest.get("cfg", {}).get("target_counts", {}).get(prefix.removeprefix("input.targets.")[:-1])
    found = [len(tensors[f"{i}.labels"]) for i in range(count)]
    assert counts in (None, found), f"{case.name}: {found} objects at {prefix}, target_counts has {counts}"
    return [
        Target(i, tensors[f"{i}.boxes"], tensors[f"{i}.labels"], (1, 1), (1, 1), masks=tensors.get(f"{i}.masks"))
        for i in range(count)
    ]


def assert_close(actual: Tensor, expected: Tensor, relative: float = 1e-5, *, least: float = 1.0) -> None:
    """Assert differences of at most ``relative`` times the largest value, which counts as ``least`` or more."""
    largest = max(expected.abs().max().item(), least) if expected.numel() else least
    torch.testing.assert_close(actual, expected, rtol=0, atol=relative * largest)


def draws(given: dict[str, Tensor], label_noise: float, box_noise: float) -> tuple[list[Tensor], list[Tensor]]:
    """Return the recorded random numbers of labels (2 tensors) and of boxes; none of a part whose noise is 0."""
    tensors = [given[str(index)] for index in range(len(given))]
    labels, boxes = (tensors[:2], tensors[2:]) if label_noise else ([], tensors)
    assert bool(boxes) == bool(box_noise), f"{len(tensors)} recorded draws, label noise {label_noise}, box {box_noise}"
    return labels, boxes


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


def named_outputs(outputs: Outputs, case: Case | None = None) -> dict[str, Tensor]:
    """Return every output by the name that most references give it, or that of ``case``; not of empty groups."""
    named = {}
    for kind, stacked in (("pred_logits", outputs.logits), ("pred_boxes", outputs.boxes)):
        *auxiliary, named[kind] = stacked
        named |= {f"aux_outputs.{layer}.{kind}": x for layer, x in enumerate(auxiliary)}
    if outputs.masks is not None:
        named["pred_masks"] = outputs.masks.all()
    if outputs.proposals is not None:
        named |= {f"enc_outputs.{name}": x for name, x in named_outputs(outputs.proposals).items()}
    for group, predicted in outputs.groups:
        if group.size:
            named |= {f"{group.name}.{name}": x for name, x in named_outputs(predicted).items()}
    return {their_output(case, name): x for name, x in named.items()} if case else named


def their_output(case: Case, name: str) -> str:
    """Return the reference's name of an output."""
    if family(case) == "dino":
        return name.replace("enc_outputs", "interm_outputs")
    if name.startswith(f"{ONE_TO_MANY}."):
        layer, _, kind = name.removeprefix(f"{ONE_TO_MANY}.").rpartition(".")
        return f"{layer.replace('aux_outputs', 'aux_outputs_one2many')}.{kind}" if layer else f"{kind}_one2many"
    return name


def probe(named: dict[str, Tensor]) -> Tensor:
    """Return the recorded scalar: the sum of every named output times cosines of its index in sorted order."""
    terms = []
    for index, name in enumerate(sorted(named)):
        x = named[name].double()
        terms.append((x * torch.cos(0.7 * torch.arange(x.numel(), dtype=torch.float64) + index).view_as(x)).sum())
    return torch.stack(terms).sum()


def assert_gradients(case: Case, model: nn.Module, maps: list[FeatureMap], scalar: str, relative: float = 1e-4) -> None:
    """Compare gradients of ``probe`` or ``loss_grads`` with respect to the maps and to every parameter.

    Rounding of float32 is up to 4e-5 in the gradients of parameters, 1e-5 in those of the maps; in the successors it
    depends on the processor, up to 4.3e-4, so that they are computed in float64. Of a parameter, norm
    and weighted sum are compared by the reference's name. Differences are relative to the norm, or to 1e-3 of the
    largest norm of the model: some gradients are sums of terms that cancel.
    """
    prefix = {"probe": "grad.features", "loss_grads": "step.out.grad.features"}[scalar]
    for level, feature in enumerate(maps):
        assert feature.tensor.grad is not None
        assert_close(feature.tensor.grad.float(), case.tensors[f"{prefix}.{level}"], relative, least=0.0)
    theirs = gradients_by_their_name(case, model)
    expected = case.manifest[scalar]["param_grads"]
    tied = {name for names in case.manifest.get("tied_keys", []) for name in names}  # recorded by one name
    assert set(theirs) - set(expected) <= tied, set(theirs) - set(expected) - tied
    least = 1e-3 * max(numbers[0] for numbers in expected.values() if numbers is not None)
    for name, numbers in expected.items():
        gradient = theirs.get(name, torch.zeros(1))
        weights = torch.cos(0.7 * torch.arange(gradient.numel(), dtype=torch.float64))
        found = gradient.norm().item(), (gradient.flatten().double() * weights).sum().item()
        norm, weighted = numbers or (0.0, 0.0)  # None: a parameter without gradient
        tolerance = relative * max(norm, least) if numbers else 0.0
        assert math.isclose(found[0], norm, rel_tol=0, abs_tol=tolerance), (name, found, numbers)
        assert math.isclose(found[1], weighted, rel_tol=0, abs_tol=tolerance), (name, found, numbers)


def gradients_by_their_name(case: Case, model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients that there are by the reference's names."""
    parameters = model.named_parameters(remove_duplicate=False)
    ours = {name: parameter.grad for name, parameter in parameters if parameter.grad is not None}
    scales = {name: x for name, x in model.named_buffers() if name.endswith(".scale")}  # RT-DETRv2 is known by them
    layout = FORMATS.get(family(case), "detr_panoptic" if case.cfg.get("masks") else family(case))
    theirs = to_foreign(ours | scales, layout)
    for tied in case.manifest.get("tied_keys", []):  # recorded by one name
        theirs |= {name: theirs[known] for known in tied if known in theirs for name in tied}
    return {name: x for name, x in theirs.items() if not name.endswith("num_points_scale")}


def set_criterion(case: Case) -> SetCriterion:
    """Build the criterion with the reference's costs and weights.

    Focal losses weigh the class by 2 in the cost; in the loss too, unless the case has its own weights.
    """
    if family(case) == "detr":
        weight = case.manifest.get("eos_coef", case.manifest.get("cfg", {}).get("eos_coef"))
        classification = CrossEntropy(weight)
        return SetCriterion(classification, HungarianMatcher(classification))
    classification = Focal()
    matcher = HungarianMatcher(classification, 2.0, giou_eps=1e-6 if family(case) in WITH_GIOU_EPS else 0.0)
    own = case.manifest.get("weight_dict", {})
    weights = [own.get(name, weight) for name, weight in (("loss_ce", 2.0), ("loss_bbox", 5.0), ("loss_giou", 2.0))]
    return SetCriterion(classification, matcher, *weights)


def assert_matches(
    case: Case,
    sub: str,
    outputs: Outputs,
    targets: PaddedTargets,
    matcher: HungarianMatcher,
    calls: list[str] | None = None,
) -> None:
    matches = matcher(outputs, targets)
    layers, rows = outputs.logits.shape[:2]
    for layer, call in enumerate(calls or [*(f"aux_{index}" for index in range(layers - 1)), "last"]):
        for row in range(rows):
            here = (matches.layer == layer) & (matches.row == row)
            assert torch.equal(matches.query[here], case.tensors[f"{sub}.out.indices.{call}.{row}.src"])
            assert torch.equal(matches.target[here], case.tensors[f"{sub}.out.indices.{call}.{row}.tgt"])
