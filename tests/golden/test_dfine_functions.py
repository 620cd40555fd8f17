"""Single functions of D-FINE and DEIM against the authors' code."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from detr_bf.common.boxes import corners_of, generalized_iou, inverse_sigmoid, iou
from detr_bf.common.structures import Distributions, PaddedTargets
from detr_bf.detectors.denoising import EMPTY, NoiseDraws, add_contrastive_noise, contrastive_slots, group_count
from detr_bf.detectors.distributions import DistributionHeads, Gate, bin_distances, moved_sides
from detr_bf.engine import LearningRate
from detr_bf.engine.state import AveragedWeights
from detr_bf.losses import MatchabilityAware, Varifocal
from detr_bf.losses.distributions import bins_around, distillation_loss, localization_loss, side_distances
from detr_bf.losses.matcher import Matches, united_pairs
from tests.golden.cases import Case, assert_close, targets_of
from tests.golden.test_denoising import blocked_with_two_queries


def cosine_sum(x: Tensor) -> Tensor:
    """Return the recorded scalar of an output, whose gradients were stored."""
    return (x * torch.cos(0.7 * torch.arange(x.numel()).float()).view_as(x)).sum()


def distances_of(settings: dict[str, float]) -> Tensor:
    """Return our distances of the bins, in sizes of the box."""
    up, scale = (torch.tensor([float(settings[name])]) for name in ("up", "reg_scale"))
    return bin_distances(int(settings["reg_max"]), up, scale)


def test_distances_of_bins(dfine_functions_case: Case) -> None:
    for index, settings in dfine_functions_case.manifest["settings"]["weighting"].items():
        found = distances_of(settings) * abs(settings["reg_scale"])
        for form in ("", ".deploy"):
            assert_close(found, dfine_functions_case.tensors[f"weighting.out.{index}{form}"])


def assert_bins(found: tuple[Tensor, Tensor], bins: Tensor, right_weight: Tensor, relative: float = 1e-5) -> None:
    """Compare positions between bins; one on a bin is both the right end of a gap and the left end of the next."""
    left, weight = found
    assert_close((left + weight).flatten(), bins.floor() + right_weight, relative)


def test_bins_around_distances(dfine_functions_case: Case) -> None:
    case = dfine_functions_case
    settings = case.manifest["settings"]["translate"]
    values = distances_of(settings) * settings["reg_scale"]
    given, expected = case.tensors["translate.in.gt"], case.below("translate.out.")
    assert_close(expected["weight_left"], 1 - expected["weight_right"])
    assert_bins(bins_around(given, values), expected["indices"], expected["weight_right"], 1e-4 / settings["reg_max"])


@pytest.mark.parametrize(("name", "scale"), [("", 4.0), ("_scale8", 8.0)])
def test_sides_and_their_distances(dfine_functions_case: Case, name: str, scale: float) -> None:
    case = dfine_functions_case
    given, expected = case.below(f"distance2bbox{name}.in."), case.below(f"distance2bbox{name}.out.")
    distance, points = given["distance"].requires_grad_(), given["points"].requires_grad_()
    boxes = moved_sides(points, distance / scale)
    assert (boxes[:2, 2:] < 0).any(-1).all()
    assert_close(boxes, expected["boxes"])
    cosine_sum(boxes).backward()
    assert_close(distance.grad, expected["grad_distance"])
    assert_close(points.grad, expected["grad_points"])
    given, expected = case.below(f"bbox2distance{name}.in."), case.below(f"bbox2distance{name}.out.")
    low, high = given["boxes_xyxy"].chunk(2, -1)
    wanted = torch.cat([(low + high) / 2, high - low], -1)
    bins = distances_of({"reg_max": 32, "up": 0.5, "reg_scale": scale})
    assert_bins(bins_around(side_distances(given["points"], wanted), bins), expected["bins"], expected["weight_right"])


def test_integral(dfine_functions_case: Case) -> None:
    corners = dfine_functions_case.tensors["integral.in.corners"].requires_grad_()
    bins = corners.unflatten(-1, (4, -1))
    values = distances_of({"reg_max": bins.shape[-1] - 1, "up": 0.5, "reg_scale": 4.0}) * 4
    distances = (bins.softmax(-1) * values).sum(-1)
    assert_close(distances, dfine_functions_case.tensors["integral.out.distances"])
    cosine_sum(distances).backward()
    assert_close(corners.grad, dfine_functions_case.tensors["integral.out.grad_corners"])


def test_gate(dfine_functions_case: Case) -> None:
    state, update = (dfine_functions_case.tensors[f"gate.in.x{index}"].requires_grad_() for index in (1, 2))
    gate = Gate(state.shape[-1])
    gate.load_state_dict(dfine_functions_case.below("gate.weights."))
    found = gate(state, lambda _: update)
    assert_close(found, dfine_functions_case.tensors["gate.out.y"])
    cosine_sum(found).backward()
    assert_close(state.grad, dfine_functions_case.tensors["gate.out.grad_x1"])
    assert_close(update.grad, dfine_functions_case.tensors["gate.out.grad_x2"])


def assert_quality(case: Case, activation: str) -> None:
    """Compare class logits with the quality, and the gradients."""
    scores, corners = (case.tensors[f"lqe.in.{name}"].requires_grad_() for name in ("scores", "corners"))
    heads = DistributionHeads([nn.Identity()], [nn.Identity()], first_box=nn.Identity(), activation=activation)
    heads.quality[0].load_state_dict(case.below("lqe.weights.reg_conf."))
    heads.classes[0] = nn.Linear(7, 7)
    nn.init.eye_(heads.classes[0].weight)
    nn.init.zeros_(heads.classes[0].bias)
    found = heads.scores(0, scores, corners.unflatten(-1, (4, -1)))
    assert_close(found, case.tensors["lqe.out.scores"])
    cosine_sum(found).backward()
    assert_close(scores.grad, case.tensors["lqe.out.grad_scores"])
    assert_close(corners.grad, case.tensors["lqe.out.grad_corners"])


def test_quality_of_dfine(dfine_functions_case: Case) -> None:
    assert_quality(dfine_functions_case, "relu")


def test_quality_of_deim(deim_functions_case: Case) -> None:
    assert_quality(deim_functions_case, "silu")


def test_union_of_matchings(dfine_functions_case: Case) -> None:
    """Compare objects of all queries but those that are paired with several equally often, of which one is taken."""
    for name, sizes in dfine_functions_case.manifest["settings"]["go"].items():
        given = [
            (image, *pair)
            for image in range(sizes["images"])
            for layer in range(sizes["layers"])
            for pair in pairs_in(dfine_functions_case, f"go.{name}.in.{layer}.{image}.")
        ]
        count, most = Counter(given), dict[tuple[int, int], int]()
        for image, query, target in given:
            most[image, query] = max(most.get((image, query), 0), count[image, query, target])
        found = united_pairs(torch.tensor(given, dtype=torch.int64).view(-1, 3).T)
        expected = {
            (image, query): target
            for image in range(sizes["images"])
            for query, target in pairs_in(dfine_functions_case, f"go.{name}.out.{image}.")
        }
        assert found[:2].T.tolist() == sorted(map(list, expected))
        for image, query, target in found.T.tolist():
            assert count[image, query, target] == count[image, query, expected[image, query]] == most[image, query]
            alone = [count[image, query, other] for other in range(100)].count(most[image, query]) == 1
            assert not alone or target == expected[image, query], name


def pairs_in(case: Case, prefix: str) -> list[tuple[int, int]]:
    """Return recorded pairs of query and object."""
    pairs = case.below(prefix)
    return list(zip(pairs["src"].tolist(), pairs["tgt"].tolist(), strict=True))


def matches_of(case: Case, prefix: str) -> Matches:
    """Return recorded pairs, the same in two layers."""
    images = sum(name.endswith(".src") for name in case.below(prefix))
    pairs = [(image, case.below(f"{prefix}{image}.")) for image in range(images)]
    stacked = [torch.stack([torch.full_like(x["src"], image), x["src"], x["tgt"]]) for image, x in pairs]
    return Matches.of_all_layers(torch.cat(stacked, 1), 2)


@pytest.mark.parametrize("part", ["plain", "dn"])
def test_losses_of_distributions(dfine_functions_case: Case, part: str) -> None:
    """Compare both losses of a layer before the last; those of denoising use the shares of the main queries."""
    case = dfine_functions_case
    settings, given = case.manifest["settings"]["local"], case.below(f"local.{part}.in.")
    corners = given["corners"].unflatten(-1, (4, -1)).requires_grad_()
    logits = torch.stack([corners, given["teacher_corners"].unflatten(-1, (4, -1))])
    matches = matches_of(case, f"local.{part}.in.indices.")
    padded = PaddedTargets.of(targets_of(case, f"local.{part}.in.targets."))
    wanted, index = padded.boxes[matches.row, matches.target], (matches.layer, matches.row, matches.query)
    overlaps = iou(corners_of(given["boxes"][index[1:]]), corners_of(wanted))
    predicted = Distributions(logits, given["ref_points"], distances_of(settings))
    per_pair = localization_loss(predicted, matches, wanted, overlaps)
    fgl = per_pair[matches.layer == 0].sum() / settings["num_boxes"]
    quality = overlaps.new_zeros(logits.shape[:3]).index_put(index, overlaps)
    matched = quality.new_zeros(quality.shape).index_put(index, torch.ones_like(overlaps)) > 0
    counts = [case.tensors[f"local.{part}.out.num_{kind}"].item() for kind in ("pos", "neg")]
    shares = (counts[0] / sum(counts), counts[1] / sum(counts))
    scores = given["teacher_logits"].sigmoid().amax(-1)
    ddf, last = distillation_loss(logits, quality, matched, scores, shares)
    assert last == 0
    for name, loss in (("fgl", fgl), ("ddf", ddf)):
        assert_close(loss, case.tensors[f"local.{part}.out.loss_{name}"])
        (gradient,) = torch.autograd.grad(loss, corners, retain_graph=True)
        assert_close(gradient.flatten(2), case.tensors[f"local.{part}.out.grad_loss_{name}"], least=1e-2)


def test_noise(dfine_functions_case: Case) -> None:
    """Compare the denoising queries of the official settings."""
    case, settings = dfine_functions_case, dfine_functions_case.manifest["settings"]["denoising"]
    targets, recorded = targets_of(case, "denoising.in.targets."), case.below("denoising.out.")
    slots = contrastive_slots(targets, group_count(settings["num_denoising"], targets))
    assert [slots.labels.shape[1], settings["num_queries"]] == settings["dn_num_split"]
    draws = NoiseDraws(*(case.tensors[f"denoising.in.noise.{index}"] for index in range(4)))
    found = add_contrastive_noise(slots, draws, label_noise=settings["label_noise_ratio"], box_noise=1.0)
    assert (found.boxes < 0).sum() == settings["coordinates_made_positive"]
    labels = found.labels.masked_fill(found.labels == EMPTY, settings["num_classes"])
    assert torch.equal(labels, recorded["noised_labels"].long())
    assert_close(found.boxes.abs(), recorded["noised_boxes"])
    assert_close(inverse_sigmoid(found.boxes.abs()), recorded["query_boxes_unact"])
    assert_close(case.tensors["denoising.weights.embed"][labels], recorded["query_class"])
    size = settings["dn_num_split"][0] + 2
    assert torch.equal(blocked_with_two_queries(found), recorded["attn_mask"][:size, :size])


def test_boxes(dfine_functions_case: Case) -> None:
    given, expected = dfine_functions_case.below("boxes.in."), dfine_functions_case.below("boxes.out.")
    corners, others = corners_of(given["pred"]), corners_of(given["target"])
    assert (given["pred"][:, 2:] < 0).any()
    assert_close(corners, expected["pred_xyxy"])
    assert_close(iou(corners[:, None], others), expected["iou"])
    assert_close(generalized_iou(corners[:, None], others), expected["giou"])
    logits = inverse_sigmoid(dfine_functions_case.tensors["inverse_sigmoid.in.x"])
    assert_close(logits, dfine_functions_case.tensors["inverse_sigmoid.out.y"])


def assert_classification(case: Case, name: str) -> None:
    settings, given = case.manifest["settings"][name], case.below(f"{name}.in.")
    logits, matches = given["logits"].requires_grad_(), matches_of(case, f"{name}.in.indices.")
    padded = PaddedTargets.of(targets_of(case, f"{name}.in.targets."))
    index, wanted = (matches.row, matches.query), (matches.row, matches.target)
    overlaps = iou(corners_of(given["boxes"][index]), corners_of(padded.boxes[wanted]))
    quality = overlaps.new_zeros(logits.shape[:2]).index_put(index, overlaps)
    classes = torch.full(logits.shape[:2], -1).index_put(index, padded.labels[wanted])
    if name == "vfl":
        kind = Varifocal(gamma=settings["gamma"], background=settings["alpha"])
    else:
        alpha = settings["mal_alpha"]
        kind = MatchabilityAware(quality_gamma=settings["gamma"], background=1.0 if alpha is None else alpha)
    loss = kind.loss(logits[None], classes[None], torch.tensor(settings["num_boxes"]), quality=quality[None])[0]
    assert_close(loss, case.tensors[f"{name}.out.loss"])
    loss.backward()
    assert_close(logits.grad, case.tensors[f"{name}.out.grad_logits"])


def test_classification_of_dfine(dfine_functions_case: Case) -> None:
    assert_classification(dfine_functions_case, "vfl")


@pytest.mark.parametrize("name", ["vfl", "mal", "mal_alpha", "mal_gamma2"])
def test_classification_of_deim(deim_functions_case: Case, name: str) -> None:
    assert_classification(deim_functions_case, name)


def test_learning_rates_of_deim(deim_functions_case: Case) -> None:
    """Compare the schedule; ours begins its warm-up one step later in the parabola, at a rate above 0."""
    for settings in deim_functions_case.manifest["settings"]["schedule"]:
        steps = {name: settings[f"{name}_epochs"] * settings["iter_per_epoch"] for name in ("flat", "no_aug")}
        rate = LearningRate(
            "flat_cosine",
            total_steps=settings["epochs"] * settings["iter_per_epoch"],
            warmup_steps=settings["warmup_iter"],
            warmup_power=2,
            min_factor=settings["lr_gamma"],
            flat_steps=steps["flat"],
            final_steps=steps["no_aug"],
        )
        for step, expected in zip(settings["iteration"], settings["value"], strict=True):
            tolerance = 2.5 / settings["warmup_iter"] if step < settings["warmup_iter"] else 1e-5
            assert rate(step) == pytest.approx(expected / settings["lr"], abs=tolerance)


def test_averages_of_dfine(dfine_functions_case: Case) -> None:
    """Compare the decay after some updates; the first update of ours copies the weights."""
    for settings in dfine_functions_case.manifest["settings"]["ema"]:
        for updates, expected in zip(settings["updates"], settings["value"], strict=True):
            model = nn.Linear(1, 1, bias=False)
            average = AveragedWeights(model, settings["decay"], settings["warmups"])
            average.n_averaged.fill_(updates - 1)
            nn.init.zeros_(average.module.weight)
            nn.init.ones_(model.weight)
            average.update_parameters(model)
            assert 1 - average.module.weight.item() == pytest.approx(expected if updates > 1 else 0.0, abs=1e-6)
