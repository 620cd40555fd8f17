"""Postprocessing, position encodings, and deformable attention by itself."""

from __future__ import annotations

import re

import pytest
import torch
from pycocotools import mask as coco_mask
from torch import Tensor
from torchvision.ops import FrozenBatchNorm2d, box_convert

from detr_bf.common.boxes import generalized_iou, inverse_sigmoid
from detr_bf.common.masks import Masks
from detr_bf.common.structures import Outputs, Target, TokenBatch
from detr_bf.detectors.dab_detr import EPS, box_sine
from detr_bf.detectors.deformable_detr import cell_centres
from detr_bf.detectors.two_stage import anchor_boxes, inverse_of_anchors
from detr_bf.losses import CrossEntropy, Focal
from detr_bf.losses.postprocess import PanopticPostprocess, Postprocess
from detr_bf.ops import ms_deform_attn
from detr_bf.transformer import unpadded
from detr_bf.transformer.attention import DeformableAttention, initial_offsets
from detr_bf.transformer.position import LearnedPosition, sine_of_coordinates, sine_position
from tests.golden.cases import Case, assert_close, family


def outputs_of(case: Case, sub: str) -> Outputs:
    given = case.below(f"{sub}.in.")
    masks = Masks.known(given["pred_masks"]) if "pred_masks" in given else None
    return Outputs(given["pred_logits"][None], given["pred_boxes"][None], masks=masks)


def sized(sizes: Tensor, original_sizes: Tensor) -> list[Target]:
    """Return empty targets with these sizes (B, 2), height and width."""
    pairs = zip(sizes.tolist(), original_sizes.tolist(), strict=True)
    empty = torch.empty(0, 4), torch.empty(0)
    return [Target(i, *empty, tuple(size), tuple(original)) for i, (size, original) in enumerate(pairs)]


def postprocess(case: Case, sub: str) -> Postprocess:
    classification = CrossEntropy() if family(case) == "detr" else Focal()
    return Postprocess(classification, len(case.tensors[f"{sub}.out.0.scores"]))


def test_postprocess(postprocess_case: Case) -> None:
    sizes = postprocess_case.tensors["bbox.in.target_sizes"]
    found = postprocess(postprocess_case, "bbox")(outputs_of(postprocess_case, "bbox"), sized(sizes, sizes))
    for image, detections in enumerate(found):
        expected = postprocess_case.below(f"bbox.out.{image}.")
        order = expected["scores"].argsort(descending=True, stable=True)
        assert_close(detections.scores, expected["scores"][order])
        assert torch.equal(detections.labels, expected["labels"][order])
        assert_close(detections.boxes, expected["boxes"][order])


def test_mask_postprocess(mask_postprocess_case: Case) -> None:
    given = mask_postprocess_case.below("segm.in.")
    targets = sized(given["max_target_sizes"], given["orig_target_sizes"])
    found = postprocess(mask_postprocess_case, "segm")(outputs_of(mask_postprocess_case, "segm"), targets)
    for image, detections in enumerate(found):
        expected = mask_postprocess_case.below(f"segm.out.{image}.")
        order = expected["scores"].argsort(descending=True, stable=True)
        assert_close(detections.scores, expected["scores"][order])
        masks = torch.from_numpy(coco_mask.decode(list(detections.masks))).permute(2, 0, 1)
        assert torch.equal(masks, expected["masks"][order, 0])


def test_panoptic(panoptic_case: Case) -> None:
    """Compare image by image, because the reference scales padded masks to each image; stuff unmerged, ids from 0."""
    assert panoptic_case.manifest["is_thing_map"] == "{i: i <= 14 for i in range(30)}"
    things = tuple(i <= 14 for i in range(30))
    threshold = panoptic_case.manifest["threshold"]
    to_map = PanopticPostprocess(CrossEntropy(), things, threshold=threshold, merge_stuff=False)
    for place, expected in panoptic_case.manifest["segments_info"].items():
        sub, image = place.split(".")
        given = {name: x[int(image), None] for name, x in panoptic_case.below(f"{sub}.in.").items()}
        outputs = Outputs(given["pred_logits"][None], given["pred_boxes"][None], masks=Masks.known(given["pred_masks"]))
        (found,) = to_map(outputs, sized(given["processed_sizes"], given["target_sizes"]))
        assert torch.equal(found.ids, panoptic_case.tensors[f"{place.replace('.', '.out.')}.ids"] + bool(expected))
        assert [(segment.id, segment.label, segment.area) for segment in found.segments] == [
            (segment["id"] + 1, segment["category_id"], segment["area"]) for segment in expected
        ]


def as_map(tokens: Tensor, like: Tensor) -> Tensor:
    """Reshape (B, h * w, C) to (B, C, h, w)."""
    return tokens.mT.unflatten(2, like.shape[-2:])


def test_sine_positions(position_case: Case) -> None:
    dim = 2 * position_case.manifest["num_pos_feats"]
    for sub in ("sine", "sine_odd_mask"):
        mask = position_case.tensors[f"{sub}.in.mask"].bool()
        assert_close(as_map(sine_position(mask, dim), mask), position_case.tensors[f"{sub}.out.normalized"])


def test_learned_position(position_case: Case) -> None:
    module = LearnedPosition(2 * position_case.manifest["num_pos_feats"])
    column, row = (position_case.tensors[f"learned.in.{name}_embed"] for name in ("col", "row"))
    module.load_state_dict({"column.weight": column, "row.weight": row})
    mask = position_case.tensors["learned.in.mask"].bool()
    assert_close(as_map(module(mask), mask), position_case.tensors["learned.out.pos"])


def test_frozen_batch_norm(position_case: Case) -> None:
    """Compare torchvision's frozen batch norm, which our backbones use."""
    given = position_case.below("frozen_bn.in.")
    module = FrozenBatchNorm2d(len(given["weight"]))
    module.load_state_dict({name: given[name] for name in ("weight", "bias", "running_mean", "running_var")})
    assert_close(module(given["x"]), position_case.tensors["frozen_bn.out.y"])


def test_sine_positions_from_cell_centres(levels_case: Case) -> None:
    mask = levels_case.tensors["sine.in.mask"].bool()
    dim = 2 * levels_case.manifest["num_pos_feats"]
    assert_close(as_map(sine_position(mask, dim, offset=-0.5), mask), levels_case.tensors["sine.out.normalized"])


def memory_of(case: Case) -> TokenBatch:
    masks = [mask.bool() for _, mask in sorted(case.below("levels.in.mask.").items())]
    shapes = tuple((mask.shape[1], mask.shape[2]) for mask in masks)
    ratios = [unpadded(mask) / torch.tensor([mask.shape[2], mask.shape[1]]) for mask in masks]
    companions = {
        "padding_mask": torch.cat([mask.flatten(1) for mask in masks], dim=1),
        "valid_ratios": torch.stack(ratios, dim=1),
    }
    return TokenBatch(case.tensors["levels.in.memory"], companions, {"spatial_shapes": shapes})


def test_reference_points_of_the_encoder(levels_case: Case) -> None:
    memory = memory_of(levels_case)
    ratios = memory.per_sample["valid_ratios"]
    assert_close(ratios, levels_case.tensors["levels.out.valid_ratios"])
    centres = cell_centres(memory.static["spatial_shapes"], ratios)
    assert_close(centres, levels_case.tensors["levels.out.encoder_reference_points"])


def test_proposals(levels_case: Case) -> None:
    memory = memory_of(levels_case)
    anchors, usable = anchor_boxes(memory)
    expected = levels_case.tensors["levels.out.output_proposals"]
    logits = inverse_of_anchors(anchors, usable)
    assert torch.equal(logits.isinf(), expected.isinf())
    assert_close(logits[expected.isfinite()], expected[expected.isfinite()])
    kept = memory.tokens.masked_fill(~usable, 0.0)
    assert_close(kept, levels_case.tensors["levels.out.output_memory_before_projection"])


def test_embedding_of_proposals(levels_case: Case) -> None:
    boxes, expected = levels_case.tensors["proposal_pos.in.proposals_unact"].sigmoid(), "proposal_pos.out.embed_512"
    assert_close(sine_of_coordinates(boxes, 128), levels_case.tensors[expected])


def test_inverse_sigmoid(levels_case: Case) -> None:
    assert_close(
        inverse_sigmoid(levels_case.tensors["inverse_sigmoid.in.x"]), levels_case.tensors["inverse_sigmoid.out.y"]
    )


def test_sine_of_reference_points(sine_case: Case) -> None:
    points = sine_case.tensors["ref.in.points"].flip(-1)  # y before x
    assert_close(sine_of_coordinates(points, 128), sine_case.tensors["ref.out.embed_256"])


def test_op_and_its_gradients(op_case: Case) -> None:
    """Convert a case to float64."""
    for sub in {name.split(".")[0] for name in op_case.tensors}:
        given = op_case.below(f"{sub}.in.")
        names = ("value", "sampling_locations", "attention_weights")
        leaves = [given[name].requires_grad_() for name in names]
        shapes = [(height, width) for height, width in given["spatial_shapes"].tolist()]
        output = ms_deform_attn(leaves[0], shapes, None, *leaves[1:])
        assert_close(output, op_case.tensors[f"{sub}.out.output"], relative=1e-12)
        output.backward(given["grad_output"])
        for name, leaf in zip(names, leaves, strict=True):
            if f"{sub}.out.grad_{name}" in op_case.tensors:
                assert_close(leaf.grad, op_case.tensors[f"{sub}.out.grad_{name}"], relative=1e-11)


@pytest.mark.parametrize("reference", ["reference_2d", "reference_4d"])
@pytest.mark.parametrize("masked", [True, False])
def test_attention_module(attention_case: Case, reference: str, masked: bool) -> None:
    cfg, given = attention_case.cfg, attention_case.below("module.in.")
    module = DeformableAttention(cfg["d_model"], heads=cfg["n_heads"], levels=cfg["n_levels"], points=cfg["n_points"])
    ours = {"value_proj": "value", "output_proj": "out"}
    weights = attention_case.below("module.in.weights.")
    renamed = {".".join(ours.get(part, part) for part in name.split(".")): x for name, x in weights.items()}
    module.load_state_dict(renamed)
    out = module(
        given["query"],
        given[reference],
        given["input_flatten"],
        given["spatial_shapes"].tolist(),
        given["padding_mask"].bool() if masked else None,
    )
    assert_close(out, attention_case.tensors[f"module.out.{reference}" + ("" if masked else "_no_mask")])


def test_initial_offsets(attention_case: Case) -> None:
    """Read levels, heads and points from the notes of the case."""
    (numbers,) = re.findall(r"levels (\d+), heads (\d+), points (\d+)", " ".join(attention_case.manifest["notes"]))
    levels, heads, points = map(int, numbers)
    offsets = initial_offsets(heads, levels, points)
    assert_close(offsets.flatten(), attention_case.tensors["init.out.sampling_offsets_bias"])


def test_sine_of_anchors(anchor_case: Case) -> None:
    given = anchor_case.below("sine.")
    dim = given["out.embed_points_256"].shape[-1]
    assert_close(box_sine(given["in.anchors"], dim), given["out.embed_256"])
    points = sine_of_coordinates(given["in.points"].flip(-1), dim // 2)  # y before x
    assert_close(points, given["out.embed_points_256"])


def test_positions_at_a_low_temperature(anchor_case: Case) -> None:
    mask, expected = anchor_case.tensors["position.in.mask"], anchor_case.tensors["position.out.pos_256"]
    assert_close(as_map(sine_position(mask, expected.shape[1], temperature=20.0), mask), expected)


def test_inverse_sigmoid_with_a_large_eps(anchor_case: Case) -> None:
    given = anchor_case.below("inverse_sigmoid.")
    assert_close(inverse_sigmoid(given["in.x"], EPS), given["out.y"])


def test_generalized_iou_with_an_eps(anchor_case: Case) -> None:
    given = anchor_case.below("giou.")
    first, second = (box_convert(given[f"in.boxes{number}_cxcywh"], "cxcywh", "xyxy") for number in (1, 2))
    assert_close(generalized_iou(first[:, None], second, 1e-6), given["out.giou"])
