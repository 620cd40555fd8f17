"""Names, shapes and initialisation of the full-size published models, one file of ``14_state_dict_keys`` each.

Both sides are built without memory (the meta device), but for the initialisation, which leaves the backbone out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from detr_bf.backbones import Backbone, VitOptions, build_backbone
from detr_bf.detectors import Detector
from detr_bf.interop.formats import format_of, from_foreign, to_foreign
from tests.golden.cases import KEY_LISTS, Case, detector, family, flat_dfine, flat_rtdetr, options

CLASSES = {"coco": 91, "coco_panoptic": 250}  # the largest category id and one more
OTHER_CLASSES = 20  # of any other data set
LEARNED = ("v3", "learned")  # their names of the learned position encoding
PRIOR = 0.01  # initial score of every class
# Not in our models: buffers of RT-DETRv2 for one image size, and what RF-DETR does not use
NOT_OURS = (
    *("decoder.anchors", "decoder.valid_mask"),
    *("_kp_active_mask", "backbone.0.encoder.encoder.embeddings.mask_token"),
)
CONSTANTS = ("decoder.up", "decoder.reg_scale")  # parameters without gradients in D-FINE, buffers in ours
EXTREMES_FROM = 2000  # size from which the largest value characterises the distribution
Shapes = dict[str, tuple[int, ...]]


class Stats(NamedTuple):
    """Summary of the values of one tensor."""

    mean: float
    std: float
    smallest: float
    largest: float

    @classmethod
    def of(cls, tensor: Tensor, correction: int) -> Stats:
        x = tensor.double()
        std = x.std(correction=correction).item() if x.numel() > 1 else 0.0
        return cls(x.mean().item(), std, x.min().item(), x.max().item())


@pytest.fixture
def listed(golden: Sequence[Path], request: pytest.FixtureRequest) -> Case:
    """Key list as a case with the arguments of our detectors."""
    if request.param is None:
        pytest.skip(f"no key lists in {KEY_LISTS} of {', '.join(map(str, golden))}")
    manifest = json.loads(request.param.read_text())
    args = manifest["args"]
    if "PResNet" in args:
        cfg = flat_rtdetr(args) | {"num_classes": args["num_classes"]}
    elif "HGNetv2" in args:
        cfg = flat_dfine(args) | {"num_classes": args["num_classes"]}
    elif "projector_scale" in args:
        cfg = args | {
            "num_classes": args["num_classes"] + 1,
            "dim_feedforward": manifest["defaults"]["dim_feedforward"],
        }
    else:
        cfg = args | {"num_classes": CLASSES.get(args["dataset_file"], OTHER_CLASSES)}
    return Case(request.param.stem, {}, manifest | {"cfg": cfg})


def strides(case: Case) -> list[int]:
    if family(case) == "dino":
        return [4 * 2**stage for stage in case.cfg["return_interm_indices"]]
    if "backbone_strides" in case.cfg:
        return list(case.cfg["backbone_strides"])
    several = "num_feature_levels" in case.cfg and family(case) not in ("dab_detr", "dn_detr")
    if family(case) == "smca_multi_scale" or (several and case.cfg["num_feature_levels"] > 1):
        return [8, 16, 32]
    return [16 if case.cfg["dilation"] else 32]


def ours(case: Case, *, whole: bool) -> Detector:
    """Build our detector from the arguments of the case; with ``whole`` including the backbone, on the meta device."""
    with torch.device("meta" if whole else "cpu"):
        backbone = windowed_dinov2(case) if family(case) == "rfdetr" else convolutional(case)
        chosen = replace(
            options(case),
            class_prior=None if family(case) == "detr" else PRIOR,
            position_encoding="learned" if case.cfg.get("position_embedding") in LEARNED else "sine",
        )
        channels = list(backbone.channels)
        if family(case) == "smca_multi_scale":
            channels = channels[-1:]  # build_backbone derives the other levels from it
        return detector(case)(backbone if whole else nn.Identity(), channels, chosen)


def convolutional(case: Case) -> Backbone:
    return build_backbone(
        case.cfg["backbone"],
        weights="none",
        strides=strides(case),
        dilation=case.cfg["dilation"],
        frozen_stages=case.cfg.get("frozen_stages", 0),
        frozen_norm=case.cfg.get("frozen_norm", True),
    )


def windowed_dinov2(case: Case) -> Backbone:
    """Build the backbone of RF-DETR; blocks that see the whole image follow from the recorded ones in windows."""
    patch, stages = case.cfg["patch_size"], case.cfg["out_feature_indexes"]
    options = VitOptions(
        global_blocks=case.manifest["full_attention_blocks"],
        maps=[stage - 1 for stage in stages],
        windows=case.cfg["num_windows"],
        options={"patch_size": patch, "img_size": patch * case.cfg["positional_encoding_size"]},
    )
    name = f"timm:vit_{case.cfg['encoder'].rpartition('_')[2]}_patch14_dinov2"
    return build_backbone(
        name, weights="none", strides=[patch], dilation=False, frozen_stages=0, frozen_norm=False, vit=options
    )


def shapes(state: Mapping[str, Tensor]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


in_default_tier = pytest.mark.default_tier(
    "detr_resnet50_panoptic",
    "rtdetrv2_r50vd_6x_coco",
    "bf_deformable_resnet50_i0_shared",
    "dino_resnet50_4scale",
    "smca_resnet50_type3",
    "dfine_hgnetv2_n_coco",
    "dfine_hgnetv2_x_coco",
    "deim_r18vd_120e_coco",
    "rf_detr_nano",
)


def their_shapes(case: Case) -> Shapes:
    state = case.manifest["state_dict"].items()
    return {name: tuple(shape) for name, shape in state if name not in NOT_OURS}


def random_state(case: Case) -> dict[str, Tensor]:
    """Return random tensors by the reference's names; tied names share one tensor."""
    torch.manual_seed(0)
    state = {name: torch.randn(shape, dtype=torch.float16) for name, shape in their_shapes(case).items()}
    for first, *others in case.manifest["tied_keys"]:
        state |= dict.fromkeys(others, state[first])
    return state


@in_default_tier
def test_every_key_has_its_place_in_our_model(listed: Case) -> None:
    with torch.device("meta"):
        state = {name: torch.empty(shape) for name, shape in their_shapes(listed).items()}
    mapped = from_foreign(state, listed.name)
    assert shapes(mapped) == shapes(ours(listed, whole=True).state_dict())


@in_default_tier
def test_our_model_has_exactly_their_keys(listed: Case) -> None:
    theirs = their_shapes(listed)
    state = ours(listed, whole=True).state_dict()
    form = format_of(dict.fromkeys(theirs, torch.empty(0)))
    assert form is not None
    assert shapes(to_foreign(state, form.name)) == theirs


@in_default_tier
def test_round_trip_to_the_bit(listed: Case) -> None:
    state = random_state(listed)
    form = format_of(state)
    assert form is not None
    mapped = from_foreign(state, listed.name)
    back = to_foreign(mapped, form.name)
    assert back.keys() == state.keys()
    assert [name for name, tensor in state.items() if not torch.equal(back[name], tensor)] == []


def test_frozen_parameters(listed: Case) -> None:
    """Compare the parameters without gradients, where the arguments tell how many stages of the backbone are frozen."""
    if "frozen_stages" not in listed.cfg:
        pytest.skip("frozen by the training script")
    model = ours(listed, whole=True)
    state = model.state_dict(keep_vars=True).items()
    frozen = {name: isinstance(x, nn.Parameter) and not x.requires_grad for name, x in state}
    theirs = to_foreign({name: x if frozen[name] else torch.empty(0) for name, x in state}, family(listed))
    found = [name for name, x in theirs.items() if x.shape != (0,)]
    assert sorted(found) == sorted(set(listed.manifest["frozen_parameters"]) - set(CONSTANTS))


@pytest.mark.default_tier("detr_resnet50", "rtdetr_r18vd_6x_coco", "bf_deformable_resnet50_i0_nonshared")
def test_initialisation(listed: Case) -> None:
    """Compare with the statistics of one model of theirs, within sampling error; constant values exactly."""
    form = format_of(dict.fromkeys(their_shapes(listed), torch.empty(0)))
    assert form is not None
    states = []
    for seed in range(2):
        torch.manual_seed(seed)
        state = to_foreign(ours(listed, whole=False).state_dict(), form.name)
        kept = {key: x for key, x in state.items() if not key.startswith("backbone.")}  # of RF-DETR: its projector
        states.append({key: x for key, x in kept.items() if x.is_floating_point()})  # no counters of batch norms
    stats = listed.manifest["init_stats"].items()
    recorded = {key: Stats(*value) for key, value in stats if key != "what" and key in their_shapes(listed)}
    tied = {name for first, *others in listed.manifest["tied_keys"] if first in recorded for name in others}
    later = "left out" in listed.manifest["init_stats"]["what"]  # lists without usual values, and with unbiased std
    left_out = {key for key, x in states[0].items() if torch.equal(x, usual_value(listed, key, x))} if later else set()
    assert recorded.keys() | tied <= states[0].keys() <= recorded.keys() | tied | left_out
    wrong = {}
    for key, theirs in recorded.items():
        tensor = states[0][key]
        own = Stats.of(tensor, correction=int(later))
        same = equal(own, theirs) if torch.equal(tensor, states[1][key]) else alike(own, theirs, tensor.numel())
        if not same:
            wrong[key] = f"ours {own}, theirs {theirs}"
    assert wrong == {}


def usual_value(case: Case, name: str, tensor: Tensor) -> Tensor:
    """Return the first values of a norm or of a bias, and the argument that is stored as a tensor."""
    value = case.cfg["reg_scale"] if name.endswith("reg_scale") else name.endswith(("weight", "running_var"))
    return torch.full_like(tensor, float(value))


def equal(own: Stats, theirs: Stats) -> bool:
    """Compare up to the recorded digits."""
    return own == pytest.approx(theirs, rel=1e-4, abs=1e-5)


def alike(own: Stats, theirs: Stats, count: int) -> bool:
    """Compare as two samples of ``count`` values of one distribution."""
    error = max(own.std, theirs.std) / count**0.5
    if abs(own.mean - theirs.mean) > 8 * error or abs(own.std - theirs.std) > 5 * error or theirs.std == 0:
        return False
    widths = [stats.largest - stats.smallest for stats in (own, theirs)]
    return count < EXTREMES_FROM or max(widths) < 1.4 * min(widths)  # compares uniform or normal shape, and scale
