"""RF-DETR against the authors' code: outputs, parts of the backbone, losses, matchings and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from detr_bf.backbones.vit import interpolated_positions
from detr_bf.backbones.windowed_vit import WindowedViT, in_windows
from detr_bf.common.boxes import corners_of, generalized_iou, iou, relative_boxes, scaled_boxes
from detr_bf.common.structures import FeatureMap, Outputs, PaddedTargets, Target, TokenBatch
from detr_bf.detectors import Detector
from detr_bf.detectors.two_stage import anchor_boxes
from detr_bf.interop.formats import from_foreign
from detr_bf.losses import Classification, Focal, HungarianMatcher, IouAware, SetCriterion, Varifocal
from detr_bf.losses.classification import one_hot
from detr_bf.losses.postprocess import Postprocess
from detr_bf.transformer.position import sine_of_coordinates
from tests.golden.cases import (
    Case,
    assert_close,
    assert_gradients,
    detector,
    gradients_by_their_name,
    num_select,
    options,
    probe,
    samples_mask,
    targets_of,
)
from tests.golden.test_dfine import assert_all_close, assert_detections

RUNS = ("step", "step_empty", "step_none")


class LwDetrVarifocal(Varifocal):
    """Varifocal loss of the reference, which no size uses.

    The weights of the background have a gradient, and a matched query without overlap is background.
    """

    def loss(self, logits: Tensor, classes: Tensor, num_boxes: Tensor, *, quality: Tensor | None = None) -> Tensor:
        assert quality is not None
        target = one_hot(classes, logits) * quality[..., None]
        weight = torch.where(target > 0, target, self.background * logits.sigmoid() ** self.gamma)
        entropy = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
        return (entropy * weight).sum((1, 2, 3)) / num_boxes


LOSSES = {"ia_bce": IouAware(), "varifocal": LwDetrVarifocal(), "focal": Focal()}


class Body(nn.Module):
    """The network of a backbone, below its name in a detector."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        cfg = case.cfg
        settings, side, depth = cfg["dinov2"], cfg["positional_encoding_size"], cfg["dinov2"]["num_hidden_layers"]
        vit = VisionTransformer(
            img_size=side * cfg["patch_size"],
            patch_size=cfg["patch_size"],
            embed_dim=settings["hidden_size"],
            depth=depth,
            num_heads=settings["num_attention_heads"],
            mlp_ratio=settings["mlp_ratio"],
            init_values=1.0,
            num_classes=0,
            reg_tokens=settings["num_register_tokens"],
        )
        vit.pos_embed = nn.Parameter(torch.zeros(1, 1 + side**2, settings["hidden_size"]))  # registers have none
        stages = cfg["out_feature_indexes"]
        whole = {stage for stage in stages if stage < depth}
        self.body = WindowedViT(
            vit, [stage - 1 for stage in stages], windows=cfg["num_windows"], whole=whole, antialias=True
        )


@pytest.fixture
def model(rfdetr_case: Case) -> Detector:
    cfg, has_pixels = rfdetr_case.cfg, "input.images" in rfdetr_case.tensors
    widths = [cfg["dinov2"]["hidden_size"] if has_pixels else width for width in cfg["backbone_num_channels"]]
    body = Body(rfdetr_case) if has_pixels else nn.Identity()
    channels = widths[: len(cfg["out_feature_indexes"])]
    built: Detector = detector(rfdetr_case)(body, channels, options(rfdetr_case))
    built.load_state_dict(from_foreign(rfdetr_case.below("weights."), rfdetr_case.name))
    return built


def inputs(case: Case) -> list[Tensor]:
    """Return normalised images, or the maps of the backbone."""
    images = case.tensors.get("input.images")
    features = case.below("input.features.")
    return [features[str(index)].clone() for index in range(len(features))] if images is None else [images.clone()]


def detected(case: Case, model: Detector, given: Sequence[Tensor], targets: Sequence[Target] = ()) -> Outputs:
    mask = samples_mask(case)
    if "input.images" in case.tensors:
        given = model.backbone.body(given[0], mask)
    return model.detect([FeatureMap(x, mask) for x in given], mask, targets)


def targets_of_run(case: Case, run: str) -> list[Target]:
    return targets_of(case, f"input.targets.{run.removesuffix('_eval')}.")


def parts_of(outputs: Outputs) -> dict[str, list[Outputs]]:
    """Return the outputs of all groups, one layer each, by the reference's prefix of their names."""
    proposals = outputs.proposals
    assert proposals is not None
    groups = [outputs, *(part for _, part in outputs.groups)]
    *_, last = range(len(outputs.logits))
    parts = {"" if i == last else f"aux_outputs.{i}.": [layer_of(part, i) for part in groups] for i in range(last + 1)}
    return parts | {"enc_outputs.": [proposals, *(part for _, part in proposals.groups)]}


def layer_of(outputs: Outputs, layer: int) -> Outputs:
    return Outputs(outputs.logits[layer : layer + 1], outputs.boxes[layer : layer + 1])


def named(outputs: Outputs) -> dict[str, Tensor]:
    """Return the tensors of all layers by the reference's names, the groups one after another."""
    found = {}
    for prefix, groups in parts_of(outputs).items():
        found[f"{prefix}pred_logits"] = torch.cat([part.logits[0] for part in groups], dim=1)
        found[f"{prefix}pred_boxes"] = torch.cat([part.boxes[0] for part in groups], dim=1)
    return found


def classification(case: Case) -> Classification:
    return LOSSES[case.cfg["classification"]]


def criterion(case: Case) -> SetCriterion:
    assert case.manifest["weight_dict"]["loss_ce"] == case.cfg["cls_loss_coef"]
    return SetCriterion(
        classification(case),
        HungarianMatcher(Focal(), 2, 5, 2),
        class_weight=case.cfg["cls_loss_coef"],
        bbox_weight=case.manifest["weight_dict"]["loss_bbox"],
        giou_weight=case.manifest["weight_dict"]["loss_giou"],
        mean_of_groups=not case.cfg["sum_group_losses"],
    )


def test_evaluation(rfdetr_case: Case, model: Detector) -> None:
    outputs = detected(rfdetr_case, model.eval(), inputs(rfdetr_case))
    assert not outputs.groups
    assert_all_close(named(outputs), rfdetr_case.below("eval."))


def test_backbone(rfdetr_case: Case, model: Detector) -> None:
    expected = rfdetr_case.below("mid.eval.backbone.map.")
    if not expected:
        pytest.skip(f"{rfdetr_case.name} begins with maps")
    maps = model.eval().backbone.body(inputs(rfdetr_case)[0], samples_mask(rfdetr_case))
    assert_all_close({str(index): each for index, each in enumerate(maps)}, expected)


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_parts_of_the_model(rfdetr_case: Case, model: Detector, mode: str) -> None:
    """Compare levels, queries and the output of every decoder layer."""
    found: dict[str, Tensor] = {}
    for level, project in enumerate(model.tokens.projections):
        project.register_forward_hook(lambda _, __, out, level=level: found.update({f"projector_out.{level}": out}))
    for index, layer in enumerate(model.decoder.layers):
        layer.register_forward_hook(lambda _, __, out, i=index: found.update({f"decoder_layer_out.{i}": out}))
        layer.register_forward_pre_hook(lambda _, given, i=index: found.update({f"query_pos.{i}": given[0].position}))
    model.decoder.queries.register_forward_hook(
        lambda _, __, out: found.update({"decoder_in.target": out.content, "decoder_in.refpoints": out.reference})
    )
    detected(rfdetr_case, model.train(mode == "train"), inputs(rfdetr_case), targets_of_run(rfdetr_case, "step"))
    expected = rfdetr_case.below(f"mid.{mode}.")
    assert {name.partition(".")[0] for name in expected} >= {"projector_out", "decoder_layer_out", "query_pos"}
    for name, value in found.items():
        if name in expected:
            assert_close(value, expected[name])
        else:
            assert name.startswith("query_pos"), name  # computed once


@pytest.mark.parametrize("run", RUNS)
def test_losses_and_matchings(rfdetr_case: Case, model: Detector, run: str) -> None:
    assert_losses(rfdetr_case, run, detected(rfdetr_case, model.train(), inputs(rfdetr_case)))
    if run == "step":
        outputs = detected(rfdetr_case, model.train(), inputs(rfdetr_case))
        assert_all_close(named(outputs), rfdetr_case.below("train."))


def test_losses_of_evaluation(rfdetr_case: Case, model: Detector) -> None:
    assert_losses(rfdetr_case, "step_eval", detected(rfdetr_case, model.eval(), inputs(rfdetr_case)))


def assert_losses(case: Case, run: str, outputs: Outputs) -> None:
    """Compare the losses over all groups, and the pairs of every group."""
    targets, own = targets_of_run(case, run), criterion(case)
    report = own(outputs, targets)
    weighted = report.weighted()
    expected = case.below(f"{run}.out.loss.")
    weights = case.manifest["weight_dict"]
    found: dict[str, Tensor] = {}
    for name, value in weighted.items():
        whole = name.replace("_group", "")
        found[whole] = found.get(whole, torch.zeros(())) + value / weights[whole]
    assert_all_close(found, {name: x for name, x in expected.items() if name.startswith("loss_")})
    assert_close(report.total, case.tensors[f"{run}.out.weighted_total"])
    count, padded = case.cfg["num_queries"], PaddedTargets.of(targets)
    for prefix, groups in parts_of(outputs).items():
        call = {"": "last", "enc_outputs.": "enc"}.get(prefix, prefix.replace("outputs.", "").strip("."))
        pairs: list[set[tuple[int, int]]] = [set() for _ in targets]
        logits, boxes = (torch.cat(each, dim=2) for each in zip(*((x.logits, x.boxes) for x in groups), strict=True))
        for group, part in enumerate(zip(logits.split(count, 2), boxes.split(count, 2), strict=True)):
            matches = own.matcher(Outputs(*part), padded)
            for row, query, target in zip(matches.row, matches.query, matches.target, strict=True):
                pairs[int(row)].add((int(query) + group * count, int(target)))
        for row, of_image in enumerate(pairs):
            recorded = case.below(f"{run}.out.indices.{call}.{row}.")
            assert of_image == set(zip(recorded["src"].tolist(), recorded["tgt"].tolist(), strict=True))


@pytest.mark.parametrize("run", RUNS)
def test_gradients_of_the_loss(rfdetr_case: Case, model: Detector, run: str) -> None:
    """Compare gradients with respect to all outputs; of run ``step`` also to inputs and parameters."""
    case = rfdetr_case
    given = [x.requires_grad_() for x in inputs(case)]
    outputs = detected(case, model.train(), given)
    leaves = {
        name: x
        for part in groups_of(outputs)
        for name, x in ((f"{id(part)}l", part.logits), (f"{id(part)}b", part.boxes))
    }
    for leaf in leaves.values():
        leaf.retain_grad()
    criterion(case)(outputs, targets_of_run(case, run)).total.backward()
    found = named(with_gradients(outputs))
    assert_all_close(found, {k: x for k, x in case.below(f"{run}.out.grad.").items() if "pred" in k}, 1e-4)
    if run == "step":
        assert_gradients_of_inputs(case, model, given, "loss_grads")
        whole = gradients_by_their_name(case, model)
        for name, gradient in case.below("step.out.param_grad.").items():
            assert_close(whole[name], gradient, 1e-4)


def groups_of(outputs: Outputs) -> list[Outputs]:
    assert outputs.proposals is not None
    parts = (outputs, outputs.proposals)
    return [each for part in parts for each in (part, *(group for _, group in part.groups))]


def with_gradients(outputs: Outputs) -> Outputs:
    """Return the gradients in the places of the tensors."""

    def gradients(part: Outputs) -> Outputs:
        groups = tuple((group, gradients(each)) for group, each in part.groups)
        return replace(part, logits=part.logits.grad, boxes=part.boxes.grad, groups=groups, proposals=None)

    assert outputs.proposals is not None
    return replace(gradients(outputs), proposals=gradients(outputs.proposals))


def assert_gradients_of_inputs(case: Case, model: Detector, given: Sequence[Tensor], scalar: str) -> None:
    """Compare the gradients of parameters and of maps, or of pixels if they were recorded."""
    if "input.images" not in case.tensors:
        assert_gradients(case, model, [FeatureMap(x, samples_mask(case)) for x in given], scalar)
        return
    assert_gradients(case, model, [], scalar)
    recorded = case.tensors.get("step.out.grad.images")
    if scalar == "loss_grads" and recorded is not None:
        assert_close(given[0].grad, recorded, 1e-4, least=0.0)


def test_gradients_of_all_outputs(rfdetr_case: Case, model: Detector) -> None:
    """Compare the gradients of a fixed scalar of all outputs, which show where gradients are stopped."""
    given = [x.requires_grad_() for x in inputs(rfdetr_case)]
    total = probe(named(detected(rfdetr_case, model.train(), given)))
    total.backward()
    assert total.item() == pytest.approx(rfdetr_case.manifest["probe"]["loss"], rel=1e-4, abs=1e-3)
    assert_gradients_of_inputs(rfdetr_case, model, given, "probe")


def test_postprocess(rfdetr_case: Case) -> None:
    convert = Postprocess(classification(rfdetr_case), num_select(rfdetr_case), clamp=True)
    assert_detections(rfdetr_case, convert, rfdetr_case.tensors["post.in.target_sizes"])


def test_boxes(rfdetr_functions_case: Case) -> None:
    """Compare refinement with its gradients, and overlaps; the reference's sums of logits are boxes in ours."""
    case = rfdetr_functions_case
    delta, reference = (case.tensors[f"refine.in.{part}"] for part in ("delta", "reference"))
    assert_close(relative_boxes(delta, reference.sigmoid()), case.tensors["refine.out.plain"].sigmoid())
    found = scaled_boxes(delta.requires_grad_(), reference.requires_grad_())
    assert_close(found, case.tensors["refine.out.reparam"])
    (found * torch.cos(0.7 * torch.arange(found.numel()).float()).view_as(found)).sum().backward()
    assert_close(delta.grad, case.tensors["refine.out.reparam.grad_delta"])
    assert_close(reference.grad, case.tensors["refine.out.reparam.grad_reference"])
    predicted, target = (corners_of(case.tensors[f"boxes.in.{name}"]) for name in ("pred", "target"))
    assert_close(iou(predicted[:, None], target), case.tensors["boxes.out.iou"])
    assert_close(generalized_iou(predicted[:, None], target), case.tensors["boxes.out.giou"])


def test_encoding_of_boxes(rfdetr_functions_case: Case) -> None:
    boxes, expected = rfdetr_functions_case.tensors["sine.in.boxes"], rfdetr_functions_case.below("sine.out.")
    assert_close(sine_of_coordinates(boxes[..., [1, 0]], 128), expected["y_x"])
    assert_close(sine_of_coordinates(boxes[..., [1, 0, 2, 3]], 128), expected["y_x_w_h"])


def test_proposals(rfdetr_functions_case: Case) -> None:
    """Compare the boxes of all tokens, and which are usable; ours are not logits."""
    case = rfdetr_functions_case
    given, shapes = case.below("proposals.in."), case.tensors["proposals.in.shapes"].tolist()
    for name, mask in (("reparam", given["mask"].bool()), ("reparam_no_mask", torch.zeros_like(given["mask"]).bool())):
        ratios, start = [], 0
        for height, width in shapes:
            valid = ~mask[:, start : start + height * width].unflatten(1, (height, width))
            start += height * width
            ratios.append(torch.stack([valid[:, 0].sum(1) / width, valid[:, :, 0].sum(1) / height], dim=-1))
        tokens = TokenBatch(
            given["memory"],
            {"padding_mask": mask, "valid_ratios": torch.stack(ratios, dim=1)},
            {"spatial_shapes": tuple(map(tuple, shapes))},
        )
        anchors, usable = anchor_boxes(tokens)
        assert_close(anchors.masked_fill(~usable, 0.0), case.tensors[f"proposals.out.{name}.boxes"])
        assert_close(given["memory"].masked_fill(~usable, 0.0), case.tensors[f"proposals.out.{name}.memory"])


def test_class_losses(rfdetr_functions_case: Case) -> None:
    """Compare values and gradients; the position-supervised loss, which no released size uses, is not ours."""
    case = rfdetr_functions_case
    assert set(case.manifest["settings"]) == {*LOSSES, "position", "windows"}
    for name, loss in LOSSES.items():
        given, expected = case.below(f"{name}.in."), case.below(f"{name}.out.")
        classes = torch.full(given["logits"].shape[:2], -1)
        quality = torch.zeros(classes.shape)
        for row, target in enumerate(targets_of(case, f"{name}.in.targets.")):
            src, tgt = given[f"indices.{row}.src"], given[f"indices.{row}.tgt"]
            classes[row, src] = target.labels[tgt]
            quality[row, src] = iou(corners_of(given["boxes"][row, src]), corners_of(target.boxes[tgt]))
        logits = given["logits"][None].requires_grad_()
        count = torch.tensor(case.manifest["settings"][name]["num_boxes"])
        (found,) = loss.loss(logits, classes[None], count, quality=quality[None])
        assert_close(found, expected["loss"])
        found.backward()
        assert_close(logits.grad[0], expected["grad_logits"])
    logits, cost = case.tensors["class_cost.in.logits"], case.tensors["class_cost.out.cost"]
    assert_close(Focal().match_cost(logits[None], torch.arange(logits.shape[1])[None])[0], cost)


def test_interpolated_positions(rfdetr_functions_case: Case) -> None:
    case = rfdetr_functions_case
    table = case.tensors["interpolate.in.position_embeddings"].requires_grad_()
    for height, width in ((37, 37), (40, 40), (24, 24), (20, 28)):
        padding = torch.zeros(1, height, width, dtype=torch.bool)
        found = interpolated_positions(table[0, 1:].unflatten(0, (37, 37)), padding, antialias=True).flatten(1, 2)
        expected = case.tensors[f"interpolate.out.h{height}_w{width}"]
        assert_close(found, expected[:, 1:])
        gradient = case.tensors.get(f"interpolate.out.h{height}_w{width}.grad_position_embeddings")
        if gradient is not None:
            whole = torch.cat([table[:, :1], found], dim=1)
            (whole * torch.cos(0.7 * torch.arange(whole.numel()).float()).view_as(whole)).sum().backward()
            assert_close(table.grad, gradient, 1e-4)  # the weights are cosines of large numbers


def test_windows(rfdetr_functions_case: Case) -> None:
    """Compare the order of the patches of two images in their windows; the tokens before them are negative."""
    for name, expected in rfdetr_functions_case.below("windows.out.").items():
        count, height, width = (int(part[1:]) for part in name.split("_"))
        cells = torch.arange(2 * height * width).view(2, height, width, 1)
        wanted = [row[row >= 0].tolist() for row in expected]
        assert in_windows(cells, count)[..., 0].tolist() == wanted
