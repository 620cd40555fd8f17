"""RT-DETR and RT-DETRv2 against the authors' code: outputs, losses, matchings, gradients, positions and sampling."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from detr_bf.common.boxes import inverse_sigmoid
from detr_bf.common.structures import Outputs, PaddedTargets, Target
from detr_bf.detectors import Detector
from detr_bf.detectors.denoising import NoiseDraws
from detr_bf.detectors.hybrid_encoder import cell_position
from detr_bf.losses import Focal, HungarianMatcher, LossReport, SetCriterion, Varifocal
from detr_bf.losses.postprocess import Postprocess
from detr_bf.ops import ms_deform_attn
from detr_bf.transformer.attention import DeformableAttention, gather_cells, nearest_cells
from tests.golden.cases import (
    Case,
    assert_close,
    assert_gradients,
    assert_same_pairs,
    build,
    family,
    features,
    num_select,
    samples_mask,
    targets_of,
)
from tests.golden.test_denoising import rtdetr_draws

RUNS = ("step", "step_empty", "step_none")
TERMS = {"loss_ce": "loss_vfl", "loss_bbox": "loss_bbox", "loss_giou": "loss_giou"}


def outputs_of_run(case: Case, run: str, monkeypatch: pytest.MonkeyPatch, model: Detector) -> Outputs:
    """Run a training step's forward pass with the recorded random numbers."""
    if case.below(f"input.noise.{run}."):
        monkeypatch.setattr(NoiseDraws, "draw", lambda *_: rtdetr_draws(case, run))
    return model.train().detect(features(case), samples_mask(case), targets_of(case, f"input.targets.{run}."))


def named(case: Case, outputs: Outputs) -> dict[str, Tensor]:
    """Return the tensors of all layers by the reference's names; version 1 has the encoder's as last auxiliary."""
    *_, last = range(len(outputs.logits))
    rows = [("" if i == last else f"aux_outputs.{i}.", outputs, i) for i in range(last + 1)]
    assert outputs.proposals is not None
    encoder = f"aux_outputs.{last}." if family(case) == "rtdetr" else "enc_aux_outputs.0."
    rows.append((encoder, outputs.proposals, 0))
    for group, predicted in outputs.groups:
        rows += [(f"dn_aux_outputs.{i}.", predicted, i) for i in range(last + 1) if group.size]
    return {
        name + kind: stacked[layer]
        for name, part, layer in rows
        for kind, stacked in (("pred_logits", part.logits), ("pred_boxes", part.boxes))
    }


def criterion(case: Case) -> SetCriterion:
    """Build the authors' criterion; the focal loss of the matching costs has its own alpha and gamma."""
    classification = Varifocal(gamma=case.cfg["gamma"], background=case.cfg["alpha"])
    weights = case.manifest["weight_dict"]
    return SetCriterion(classification, HungarianMatcher(Focal(), 2, 5, 2), *(weights[name] for name in TERMS.values()))


def assert_all_close(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], relative: float = 1e-5) -> None:
    assert sorted(actual) == sorted(expected)
    for name, value in expected.items():
        assert_close(actual[name], value, relative)


def test_evaluation(rtdetr_case: Case) -> None:
    outputs = build(rtdetr_case).eval().detect(features(rtdetr_case), samples_mask(rtdetr_case))
    assert_close(outputs.logits[-1], rtdetr_case.tensors["eval.pred_logits"])
    assert_close(outputs.boxes[-1], rtdetr_case.tensors["eval.pred_boxes"])
    assert not outputs.groups


@pytest.mark.parametrize("run", RUNS)
def test_training_outputs(rtdetr_case: Case, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = outputs_of_run(rtdetr_case, run, monkeypatch, build(rtdetr_case))
    expected = rtdetr_case.below("train." if run == "step" else f"{run}.out.outputs.")
    assert_all_close(named(rtdetr_case, outputs), expected)


@pytest.mark.parametrize("run", RUNS)
def test_losses_and_matchings(rtdetr_case: Case, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare weighted losses; ours without denoising queries are zeros that the reference leaves out."""
    outputs = outputs_of_run(rtdetr_case, run, monkeypatch, build(rtdetr_case))
    targets = targets_of(rtdetr_case, f"input.targets.{run}.")
    report = criterion(rtdetr_case)(outputs, targets)
    empty = [name for name in report.losses if "_dn" in name and not any(group.size for group, _ in outputs.groups)]
    assert all(report.losses[name] == 0 for name in empty)
    found = {their_term(rtdetr_case, name): x for name, x in report.weighted().items() if name not in empty}
    assert_all_close(found, rtdetr_case.below(f"{run}.out.loss."))
    assert_close(report.total, rtdetr_case.tensors[f"{run}.out.weighted_total"])
    assert_matchings(rtdetr_case, run, outputs, targets)


def their_term(case: Case, name: str) -> str:
    """Return the reference's name of a term of ours: loss_ce_dn_0 is loss_vfl_dn_0, loss_ce_0 is loss_vfl_aux_0."""
    last = case.cfg["dec_layers"] - 1
    kind, _, rest = name.removeprefix("loss_").partition("_")
    encoder = f"_aux_{last}" if family(case) == "rtdetr" else "_enc_0"
    ending = {"": "", "enc": encoder, "dn": f"_dn_{last}"}.get(rest)
    if ending is None:
        ending = f"_{rest}" if rest.startswith("dn") else f"_aux_{rest}"
    return TERMS[f"loss_{kind}"] + ending


def assert_matchings(case: Case, run: str, outputs: Outputs, targets: list[Target]) -> None:
    matcher, padded = criterion(case).matcher, PaddedTargets.of(targets)
    assert outputs.proposals is not None
    calls = [f"aux_{layer}" for layer in range(len(outputs.logits) - 1)] + ["last"]
    for names, part in ((calls, outputs), (["enc"], outputs.proposals)):
        matches = matcher(part, padded)
        for layer, call in enumerate(names):
            assert_same_pairs(case, f"{run}.out.indices.{call}", matches, layer, len(targets))


@pytest.mark.parametrize("run", RUNS)
def test_gradients_of_the_loss(rtdetr_case: Case, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare gradients with respect to all outputs; of run ``step`` also to features and parameters."""
    model, maps = build(rtdetr_case), features(rtdetr_case)
    for feature in maps:
        feature.tensor.requires_grad_()
    monkeypatch.setattr("tests.golden.test_rtdetr.features", lambda case: maps)
    outputs = outputs_of_run(rtdetr_case, run, monkeypatch, model)
    parts = [outputs, outputs.proposals, *(part for _, part in outputs.groups)]
    for part in parts:
        part.logits.retain_grad()
        part.boxes.retain_grad()
    report: LossReport = criterion(rtdetr_case)(outputs, targets_of(rtdetr_case, f"input.targets.{run}."))
    report.total.backward()
    expected = rtdetr_case.below(f"{run}.out.grad.")
    expected = {name: x for name, x in expected.items() if not name.startswith("features.")}
    for name, gradient in gradients_by_name(rtdetr_case, outputs).items():
        if name in expected:
            assert_close(gradient, expected.pop(name))
        else:
            assert not gradient.any(), name
    assert not expected
    if run == "step":
        assert_gradients(rtdetr_case, model, maps, "loss_grads")


def gradients_by_name(case: Case, outputs: Outputs) -> dict[str, Tensor]:
    def gradients(part: Outputs) -> Outputs:
        logits, boxes = (torch.zeros_like(x) if x.grad is None else x.grad for x in (part.logits, part.boxes))
        return Outputs(logits, boxes)

    groups = tuple((group, gradients(part)) for group, part in outputs.groups)
    first = gradients(outputs)
    return named(case, Outputs(first.logits, first.boxes, proposals=gradients(outputs.proposals), groups=groups))


def test_gradients_of_all_outputs(rtdetr_case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the gradients of a fixed scalar of all outputs, which show where gradients are stopped."""
    model, maps = build(rtdetr_case), features(rtdetr_case)
    for feature in maps:
        feature.tensor.requires_grad_()
    monkeypatch.setattr("tests.golden.test_rtdetr.features", lambda case: maps)
    tensors = named(rtdetr_case, outputs_of_run(rtdetr_case, "step", monkeypatch, model))
    total = torch.stack([weighted_sum(tensors[name], index) for index, name in enumerate(sorted(tensors))]).sum()
    total.backward()
    assert total.item() == pytest.approx(rtdetr_case.manifest["probe"]["loss"], rel=1e-4, abs=1e-3)
    assert_gradients(rtdetr_case, model, maps, "probe")


def weighted_sum(x: Tensor, offset: int = 0) -> Tensor:
    return (x.flatten().double() * torch.cos(0.7 * torch.arange(x.numel(), dtype=torch.float64) + offset)).sum()


def test_postprocess(rtdetr_case: Case) -> None:
    given = rtdetr_case.below("eval.")
    outputs = Outputs(given["pred_logits"][None], given["pred_boxes"][None])
    sizes = rtdetr_case.tensors["post.in.orig_target_sizes_wh"].flip(1).tolist()
    empty = torch.empty(0, 4), torch.empty(0)
    targets = [Target(i, *empty, tuple(size), tuple(size)) for i, size in enumerate(sizes)]
    for found in Postprocess(Varifocal(), num_select(rtdetr_case))(outputs, targets):
        expected = rtdetr_case.below(f"post.out.{found.image_id}.")
        assert_close(found.scores, expected["scores"])
        assert torch.equal(found.labels, expected["labels"])
        assert_close(found.boxes, expected["boxes"])


def test_positions(rtdetr_functions_case: Case) -> None:
    """Compare the scrambled positions of the reference; ours equal them on square maps only."""
    for name, expected in rtdetr_functions_case.below("position.out.").items():
        width, height, dim = (int(part.strip("wh")) for part in name.split("_"))
        ours, theirs = (
            cell_position(height, width, dim, temperature=10000.0, released=released) for released in (False, True)
        )
        assert_close(theirs, expected[0])
        assert torch.allclose(ours, theirs, atol=1e-6) == (height == width)


def test_inverse_sigmoid(rtdetr_functions_case: Case) -> None:
    given = rtdetr_functions_case.tensors["inverse_sigmoid.in.x"]
    assert_close(inverse_sigmoid(given), rtdetr_functions_case.tensors["inverse_sigmoid.out.y"])


@pytest.mark.parametrize("discrete", [False, True])
def test_sampling(rtdetr_functions_case: Case, discrete: bool) -> None:
    """Compare sampling with its gradients; discrete sampling with the reference's limit of both coordinates."""
    given = rtdetr_functions_case.below("core.in.")
    shapes, counts = given["spatial_shapes"].tolist(), given["points"].tolist()
    value, locations, weights = (given[name].requires_grad_() for name in ("value", "locations", "weights"))
    module = DeformableAttention(8, heads=2, levels=len(counts), points=counts)
    points, shares = module._by_level(locations), module._by_level(weights[..., None])[..., 0]
    if discrete:
        found = gather_cells(value, nearest_cells(points, shapes, released=True), shares)
    else:
        found = ms_deform_attn(value, shapes, None, points, shares)
    weighted_sum(found).backward()
    expected = rtdetr_functions_case.below(f"core.out.{'discrete' if discrete else 'default'}")
    assert_close(found, expected[""])
    for name, leaf in (("value", value), ("weights", weights), ("locations", locations)):
        if f".grad_{name}" in expected:
            assert_close(leaf.grad, expected[f".grad_{name}"])
        else:
            assert leaf.grad is None
