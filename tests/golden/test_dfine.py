"""D-FINE and DEIM against the authors' code: outputs, distributions, losses, matchings and gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from detr_bf.common.structures import Outputs, PaddedTargets, Target
from detr_bf.detectors import Detector
from detr_bf.detectors.denoising import NoiseDraws
from detr_bf.interop.formats import from_foreign, to_foreign
from detr_bf.losses import Focal, HungarianMatcher, MatchabilityAware, SetCriterion, Varifocal
from detr_bf.losses.distributions import bins_around, side_distances
from detr_bf.losses.postprocess import Postprocess
from tests.golden.cases import (
    Case,
    assert_close,
    assert_gradients,
    assert_same_pairs,
    build,
    detector,
    family,
    features,
    gradients_by_their_name,
    num_select,
    options,
    probe,
    samples_mask,
    targets_of,
)
from tests.golden.test_denoising import rtdetr_draws
from tests.golden.test_dfine_encoder import tiny_backbone

RUNS = ("step", "step_empty", "step_none", "step_many")


def run_or_skip(case: Case, run: str) -> None:
    if not case.below(f"{run}.out.loss."):
        pytest.skip(f"{case.name} has no run {run}")


@pytest.fixture
def model(dfine_case: Case, monkeypatch: pytest.MonkeyPatch) -> Detector:
    """Detector of the case, with a backbone if pixels were recorded instead of its maps."""
    if "input.images" not in dfine_case.tensors:
        return build(dfine_case)
    backbone = tiny_backbone(dfine_case, monkeypatch)
    built: Detector = detector(dfine_case)(backbone, dfine_case.cfg["backbone_num_channels"], options(dfine_case))
    built.load_state_dict(from_foreign(dfine_case.below("weights."), dfine_case.name))
    return built


def inputs(case: Case) -> list[Tensor]:
    """Return images of 0 to 1, or the maps of the backbone."""
    images = case.tensors.get("input.images")
    return [feature.tensor for feature in features(case)] if images is None else [images.clone()]


def detected(case: Case, model: Detector, given: Sequence[Tensor], targets: Sequence[Target] = ()) -> Outputs:
    mask = samples_mask(case)
    if "input.images" in case.tensors:
        return model.detect(model.backbone(255 * given[0], mask), mask, targets)
    maps = [replace(feature, tensor=x) for feature, x in zip(features(case), given, strict=True)]
    return model.detect(maps, mask, targets)


def outputs_of_run(
    case: Case, run: str, monkeypatch: pytest.MonkeyPatch, model: Detector, given: Sequence[Tensor] | None = None
) -> Outputs:
    """Run a training step's forward pass with the recorded random numbers."""
    if case.below(f"input.noise.{run}."):
        monkeypatch.setattr(NoiseDraws, "draw", lambda *_: rtdetr_draws(case, run))
    given = inputs(case) if given is None else given
    return detected(case, model.train(), given, targets_of(case, f"input.targets.{run}."))


def parts_of(case: Case, outputs: Outputs) -> list[tuple[str, Outputs, int]]:
    """Return the reference's prefix of the names, our outputs and the layer of all predictions."""
    *_, last = range(len(outputs.logits))
    rows = [("" if i == last else f"aux_outputs.{i}.", outputs, i) for i in range(last + 1)]
    assert outputs.proposals is not None
    rows.append(("enc_aux_outputs.0.", outputs.proposals, 0))
    for group, predicted in outputs.groups:
        if group.name == "dn":
            rows += [(f"dn_outputs.{i}.", predicted, i) for i in range(last + 1)]
        else:
            rows.append((f"{group.name}_outputs.", predicted, 0))
    if case.cfg["kind"] == "deim":  # without denoising of no objects
        rows = [row for row in rows if row[1].logits.shape[2]]
    return rows


def tensors_of(part: Outputs) -> dict[str, Tensor]:
    """Return the stacked tensors of an output by the reference's names."""
    named = {"pred_logits": part.logits, "pred_boxes": part.boxes}
    if part.distributions is not None:
        named["pred_corners"] = part.distributions.logits.flatten(3)
        named["ref_points"] = part.distributions.boxes.expand_as(part.boxes)
    return named


def named(case: Case, outputs: Outputs) -> dict[str, Tensor]:
    """Return the tensors of all layers by the reference's names."""
    return {
        prefix + name: stacked[layer]
        for prefix, part, layer in parts_of(case, outputs)
        for name, stacked in tensors_of(part).items()
    }


def criterion(case: Case) -> SetCriterion:
    """Build the authors' criterion; the focal loss of the matching costs has its own alpha and gamma."""
    cfg, weights = case.cfg, case.manifest["weight_dict"]
    if "mal" in cfg["losses"]:
        alpha = cfg["mal_alpha"]
        classification = MatchabilityAware(quality_gamma=cfg["gamma"], background=1.0 if alpha is None else alpha)
    else:
        classification = Varifocal(gamma=cfg["gamma"], background=cfg["alpha"])
    return SetCriterion(
        classification,
        HungarianMatcher(Focal(), 2, 5, 2),
        class_weight=weights[f"loss_{cfg['losses'][0]}"],
        bbox_weight=weights["loss_bbox"],
        giou_weight=weights["loss_giou"],
        fgl_weight=weights.get("loss_fgl", 0.0),
        ddf_weight=weights.get("loss_ddf", 0.0),
        union=cfg.get("use_uni_set", True),
        box_weighting=cfg["boxes_weight_format"] or "none",
    )


def assert_all_close(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], relative: float = 1e-5) -> None:
    assert sorted(actual) == sorted(expected)
    for name, value in expected.items():
        assert_close(actual[name], value, relative)


def test_evaluation(dfine_case: Case, model: Detector) -> None:
    """Compare the predictions, and boxes and distributions of all layers."""
    case = dfine_case
    outputs = detected(case, model.eval(), inputs(case))
    assert_close(outputs.logits[-1], case.tensors["eval.pred_logits"])
    assert_close(outputs.boxes[-1], case.tensors["eval.pred_boxes"])
    assert not outputs.groups
    if outputs.distributions is None:
        return
    given, distributions = case.below("mid.eval."), outputs.distributions
    assert_close(distributions.boxes, given["ref_points_initial"])
    assert_close(distributions.distances * case.cfg["reg_scale"], given["project"])
    for layer, boxes in enumerate(outputs.boxes):
        assert_close(boxes, given[f"boxes.{layer}"])
        assert_close(distributions.logits[layer].flatten(2), given[f"corners.{layer}"])
    assert f"boxes.{len(outputs.boxes)}" not in given


@pytest.mark.parametrize("run", RUNS)
def test_training_outputs(dfine_case: Case, model: Detector, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_or_skip(dfine_case, run)
    outputs = outputs_of_run(dfine_case, run, monkeypatch, model)
    expected = dfine_case.below("train." if run == "step" else f"{run}.out.outputs.")
    found = {name: x for name, x in named(dfine_case, outputs).items() if run == "step" or "corners" not in name}
    assert_all_close(found, expected)


@pytest.mark.parametrize("run", RUNS)
def test_losses_and_matchings(dfine_case: Case, model: Detector, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare weighted losses; the terms that the reference leaves out are 0 in ours."""
    run_or_skip(dfine_case, run)
    outputs = outputs_of_run(dfine_case, run, monkeypatch, model)
    targets = targets_of(dfine_case, f"input.targets.{run}.")
    report = criterion(dfine_case)(outputs, targets)
    found = {their_term(dfine_case, name): x for name, x in report.weighted().items()}
    expected = dfine_case.below(f"{run}.out.loss.")
    for name in set(found) - set(expected):
        assert found.pop(name) == 0, name
    assert_all_close(found, expected, 2e-5)  # 1.1e-5 on an Intel Xeon, below 1e-5 on AMD EPYC
    assert_close(report.total, dfine_case.tensors[f"{run}.out.weighted_total"], 2e-5)
    assert_matchings(dfine_case, run, outputs, targets)


@pytest.mark.parametrize("run", RUNS)
def test_targets_of_distributions(dfine_case: Case, model: Detector, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the bins of the recorded pairs of each image, or the last layer's, and of the denoising queries."""
    run_or_skip(dfine_case, run)
    outputs = outputs_of_run(dfine_case, run, monkeypatch, model)
    if outputs.distributions is None:
        return
    targets = targets_of(dfine_case, f"input.targets.{run}.")
    call = "go" if dfine_case.cfg.get("use_uni_set", True) else "last"
    pairs = [dfine_case.below(f"{run}.out.indices.{call}.{row}.") for row in range(len(targets))]
    parts = {"fgl": (outputs.distributions, [(x["src"], x["tgt"]) for x in pairs])}
    for group, predicted in outputs.groups:
        if group.name == "dn" and group.size:
            known = [(objects >= 0).nonzero()[:, 0] for objects in group.assigned]
            parts["fgl_dn"] = (
                predicted.distributions,
                [(x, objects[x]) for x, objects in zip(known, group.assigned, strict=True)],
            )
    for name, (distributions, of_images) in parts.items():
        recorded = dfine_case.below(f"{run}.out.{name}.")
        first = torch.cat([distributions.boxes[row, query] for row, (query, _) in enumerate(of_images)])
        wanted = torch.cat([targets[row].boxes[target] for row, (_, target) in enumerate(of_images)])
        left, weight = bins_around(side_distances(first, wanted), distributions.distances)
        assert_close(left.flatten() + weight.flatten(), recorded["bins"].floor() + recorded["weight_right"], 1e-4)
        assert_close(recorded["weight_left"], 1 - recorded["weight_right"])


def their_term(case: Case, name: str) -> str:
    """Return the reference's name of a term of ours: loss_ce_0 is loss_vfl_aux_0, loss_ce_dn is loss_vfl_dn_2."""
    kind, _, rest = name.removeprefix("loss_").partition("_")
    kind = case.cfg["losses"][0] if kind == "ce" else kind
    endings = {"": "", "enc": "_enc_0", "pre": "_pre", "dn_pre": "_dn_pre", "dn": f"_dn_{case.cfg['dec_layers'] - 1}"}
    ending = endings.get(rest, f"_{rest}" if rest.startswith("dn") else f"_aux_{rest}")
    return f"loss_{kind}{ending}"


def assert_matchings(case: Case, run: str, outputs: Outputs, targets: list[Target]) -> None:
    """Compare the pairs of all layers, first boxes and proposals, and their union."""
    matcher, padded = criterion(case).matcher, PaddedTargets.of(targets)
    assert outputs.proposals is not None
    calls = [f"aux_{layer}" for layer in range(len(outputs.logits) - 1)] + ["last"]
    parts = [(calls, outputs), (["enc"], outputs.proposals)]
    parts += [(["pre"], predicted) for group, predicted in outputs.groups if group.name == "pre"]
    found, union = matcher.match_united([(part, padded, 1) for _, part in parts])
    for (names, _), matches in zip(parts, found, strict=True):
        for layer, call in enumerate(names):
            assert_same_pairs(case, f"{run}.out.indices.{call}", matches, layer, len(targets))
    for row in range(len(targets)):
        pairs = case.below(f"{run}.out.indices.go.{row}.")
        recorded = set(zip(pairs["src"].tolist(), pairs["tgt"].tolist(), strict=True))
        assert {(query, target) for image, query, target in union.T.tolist() if image == row} == recorded


@pytest.mark.parametrize("run", RUNS)
def test_gradients_of_the_loss(dfine_case: Case, model: Detector, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare gradients with respect to all outputs; of run ``step`` also to inputs and parameters."""
    run_or_skip(dfine_case, run)
    given = [x.requires_grad_() for x in inputs(dfine_case)]
    outputs = with_leaves(outputs_of_run(dfine_case, run, monkeypatch, model, given))
    criterion(dfine_case)(outputs, targets_of(dfine_case, f"input.targets.{run}.")).total.backward()
    expected = dfine_case.below(f"{run}.out.grad.")
    expected = {name: x for name, x in expected.items() if not name.startswith(("features.", "images"))}
    for name, gradient in named(dfine_case, gradients_of(outputs)).items():
        if name in expected:
            assert_close(gradient, expected.pop(name), 1e-4)
        elif "ref_points" not in name:
            assert not gradient.any(), name
    assert not expected
    if run == "step":
        assert_gradients_of_inputs(dfine_case, model, given, "loss_grads")
        assert_whole_gradients(dfine_case, model)
        assert_statistics(dfine_case, model)


def assert_gradients_of_inputs(case: Case, model: Detector, given: Sequence[Tensor], scalar: str) -> None:
    """Compare the gradients of parameters and of maps, or of pixels if they were recorded.

    From pixels, those of the scales in the backbone are sums that cancel, with a larger rounding error.
    """
    if "input.images" not in case.tensors:
        maps = [replace(feature, tensor=x) for feature, x in zip(features(case), given, strict=True)]
        assert_gradients(case, model, maps, scalar)
        return
    assert_gradients(case, model, [], scalar, relative=1e-3)
    recorded = case.tensors.get("step.out.grad.images")
    if scalar == "loss_grads" and recorded is not None:
        assert_close(given[0].grad, recorded, 1e-4, least=0.0)


def assert_whole_gradients(case: Case, model: Detector) -> None:
    """Compare the gradients that were recorded as a whole."""
    found = gradients_by_their_name(case, model)
    expected = case.below("step.out.param_grad.")
    assert sorted(expected) == sorted(case.manifest["full_param_grads"])
    for name, gradient in expected.items():
        assert_close(found[name], gradient, 1e-4)


def assert_statistics(case: Case, model: Detector) -> None:
    """Compare running statistics of batch norms after the step."""
    found = to_foreign(model.state_dict(), family(case))
    expected = case.below("step.out.bn.")
    assert len(expected) == 2 * len(case.manifest["bn_after_step"])
    assert_all_close({name: found[name] for name in expected}, expected)


def test_gradients_of_all_outputs(dfine_case: Case, model: Detector, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the gradients of a fixed scalar of all outputs, which show where gradients are stopped."""
    given = [x.requires_grad_() for x in inputs(dfine_case)]
    total = probe(named(dfine_case, outputs_of_run(dfine_case, "step", monkeypatch, model, given)))
    total.backward()
    assert total.item() == pytest.approx(dfine_case.manifest["probe"]["loss"], rel=1e-4, abs=1e-3)
    assert_gradients_of_inputs(dfine_case, model, given, "probe")


def test_postprocess(dfine_case: Case) -> None:
    sizes = dfine_case.tensors["post.in.orig_target_sizes_wh"].flip(1)
    assert_detections(dfine_case, Postprocess(Varifocal(), num_select(dfine_case)), sizes)


def assert_detections(case: Case, convert: Postprocess, sizes: Tensor) -> None:
    """Compare the detections in images of ``sizes`` (B, 2), height and width."""
    given = case.below("eval.")
    outputs = Outputs(given["pred_logits"][None], given["pred_boxes"][None])
    shapes = [(int(height), int(width)) for height, width in sizes.tolist()]
    images = [Target(i, torch.empty(0, 4), torch.empty(0), shape, shape) for i, shape in enumerate(shapes)]
    for found in convert(outputs, images):
        expected = case.below(f"post.out.{found.image_id}.")
        assert_close(found.scores, expected["scores"])
        assert torch.equal(found.labels, expected["labels"])
        assert_close(found.boxes, expected["boxes"])


@pytest.mark.parametrize("run", RUNS)
def test_inputs_of_denoising(dfine_case: Case, model: Detector, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare contents, boxes, objects and mask of the denoising queries, with which theirs begin."""
    run_or_skip(dfine_case, run)
    if dfine_case.below(f"input.noise.{run}."):
        monkeypatch.setattr(NoiseDraws, "draw", lambda *_: rtdetr_draws(dfine_case, run))
    found = []
    model.decoder.queries.register_forward_hook(lambda *passed: found.append(passed[2]))
    detected(dfine_case, model.train(), inputs(dfine_case), targets_of(dfine_case, f"input.targets.{run}."))
    (queries,) = found
    ((group,), main), recorded = (queries.groups, dfine_case.cfg["num_queries"]), dfine_case.below(f"{run}.dn.")
    counts = dfine_case.manifest["dn"][run] or {"dn_num_split": [0, main]}
    assert counts["dn_num_split"] == [group.size, main]
    if not group.size:
        return
    assert group.parts == counts["dn_num_group"]
    assert_close(queries.content[:, main:], recorded["input_query_class"])
    assert_close(queries.reference[:, main:], recorded["input_query_bbox"].sigmoid())
    assert torch.equal(queries.blocked.roll((group.size, group.size), (0, 1)), recorded["attn_mask"])
    for image, positive in enumerate(group.assigned >= 0):
        assert positive.nonzero().flatten().tolist() == recorded[f"positive_idx.{image}"].tolist()


def with_leaves(outputs: Outputs) -> Outputs:
    """Return the outputs with gradients kept."""
    for part in (outputs, outputs.proposals, *(part for _, part in outputs.groups)):
        part.logits.retain_grad()
        part.boxes.retain_grad()
        if part.distributions is not None:
            part.distributions.logits.retain_grad()
    return outputs


def gradients_of(outputs: Outputs) -> Outputs:
    """Return the gradients in the places of the tensors, 0 where there are none."""

    def gradient(x: Tensor) -> Tensor:
        return torch.zeros_like(x) if x.grad is None else x.grad

    def gradients(part: Outputs) -> Outputs:
        kept = part.distributions and replace(part.distributions, logits=gradient(part.distributions.logits))
        return Outputs(gradient(part.logits), gradient(part.boxes), distributions=kept)

    groups = tuple((group, gradients(part)) for group, part in outputs.groups)
    return replace(gradients(outputs), proposals=gradients(outputs.proposals), groups=groups)
