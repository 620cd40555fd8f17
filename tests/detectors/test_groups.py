"""Further queries in training: one-to-many matching and Group DETR."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from detr_bf.common.errors import InputError
from detr_bf.common.structures import Outputs
from detr_bf.detectors.groups import query_groups
from detr_bf.detectors.two_stage import TokenProposals
from detr_bf.losses import Focal, HungarianMatcher, LossReport, SetCriterion
from tests.detectors.tiny import DETECTORS, QUERIES, images, model, shaken

GROUPS = 3
EMPTY = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)}
LEARNED = [
    name
    for name in DETECTORS
    if not isinstance(model(name).decoder.queries, TokenProposals) and not name.endswith("patterns")
]


def losses(outputs: Outputs) -> LossReport:
    classification = Focal()
    return SetCriterion(classification, HungarianMatcher(classification, 2.0))(outputs, images().targets)


@pytest.mark.parametrize("name", LEARNED)
def test_group_detr_trains_every_group_as_the_first_one(name: str) -> None:
    """With the same queries in all groups their outputs and losses are equal, so no group sees another one."""
    grouped = shaken(model(name, groups=query_groups(QUERIES, group_detr=GROUPS), dropout=0.0)).train()
    for embedding in grouped.decoder.queries.modules():
        if isinstance(embedding, nn.Embedding) and embedding.num_embeddings == GROUPS * QUERIES:
            embedding.weight.data.copy_(embedding.weight[:QUERIES].repeat(GROUPS, 1))
    for heads in getattr(grouped.decoder.queries, "parts", ()):  # of RF-DETR, which choose the tokens of a group
        heads.load_state_dict(grouped.decoder.queries.parts[0].state_dict())
    outputs = grouped(images())
    group, others = outputs.groups[0]
    assert (group.size, group.parts) == ((GROUPS - 1) * QUERIES, GROUPS - 1)
    for part in others.logits.chunk(GROUPS - 1, 2):
        torch.testing.assert_close(part, outputs.logits, rtol=1e-4, atol=1e-5)
    report = losses(outputs)
    for term in ("loss_ce", "loss_bbox", "loss_giou"):
        torch.testing.assert_close(report.losses[f"{term}_group"], report.losses[term], rtol=1e-4, atol=1e-5)
        assert report.weights[f"{term}_group"] == (GROUPS - 1) * report.weights[term]


@pytest.mark.parametrize("name", LEARNED)
def test_evaluation_uses_the_first_group(name: str) -> None:
    others = 0 if name == "rfdetr" else 2
    grouped = shaken(model(name, groups=query_groups(QUERIES, group_detr=GROUPS, one_to_many=others))).eval()
    outputs = grouped(images())
    assert outputs.logits.shape[2] == QUERIES
    assert outputs.groups == ()
    plain = model(name, groups=())
    state = grouped.state_dict()
    plain.load_state_dict({key: state[key][: len(value)] for key, value in plain.state_dict().items()})
    assert torch.equal(plain.eval()(images()).logits, outputs.logits)


@pytest.mark.parametrize("name", [*(name for name in LEARNED if name != "rfdetr"), "h_deformable_detr"])
def test_further_queries_do_not_change_the_main_ones(name: str) -> None:
    count = QUERIES - 1
    module = shaken(model(name, groups=query_groups(QUERIES, one_to_many=count, repeats=2), dropout=0.0)).train()
    before = module(replace(images(), targets=()))
    for embedding in module.decoder.queries.modules():
        if isinstance(embedding, nn.Embedding) and embedding.num_embeddings == QUERIES + count:
            embedding.weight.data[QUERIES:] += 1.0
    after = module(replace(images(), targets=()))
    torch.testing.assert_close(after.logits, before.logits, rtol=1e-5, atol=1e-6)
    changed = (before.groups[0][1].logits, after.groups[0][1].logits)
    assert not torch.allclose(*changed)


def test_rfdetr_has_groups_of_equal_size_alone() -> None:
    with pytest.raises(InputError, match=r"groups of equal size only; use groups\.group_detr"):
        model("rfdetr", groups=query_groups(QUERIES, one_to_many=2))


def test_the_mean_of_groups() -> None:
    """Divide each loss by the number of groups, also of a batch without objects, where a sum is divided by 1."""
    outputs = shaken(model("rfdetr", dropout=0.0)).train()(images())
    classification, groups = Focal(), 1 + sum(group.parts for group, _ in outputs.groups)
    for targets, factor in ((images().targets, groups), ([replace(x, **EMPTY) for x in images().targets], 1)):
        sums, means = (
            SetCriterion(classification, HungarianMatcher(classification), mean_of_groups=mean)(outputs, targets)
            for mean in (False, True)
        )
        assert {"loss_ce_enc", "loss_ce_group_enc", "loss_giou_group_0"} <= sums.losses.keys() == means.losses.keys()
        torch.testing.assert_close(means.total * factor, sums.total)


def test_the_mean_of_groups_leaves_other_groups_as_they_are() -> None:
    outputs = shaken(model("h_deformable_detr", dropout=0.0)).train()(images())
    sums, means = (
        SetCriterion(Focal(), HungarianMatcher(Focal()), mean_of_groups=mean)(outputs, images().targets)
        for mean in (False, True)
    )
    assert outputs.groups
    torch.testing.assert_close(means.total, sums.total)


def test_each_object_is_matched_with_several_queries() -> None:
    """Compare the one-to-many loss with a criterion of its own over repeated objects, times the weight."""
    groups = query_groups(QUERIES, one_to_many=7, repeats=3, weight=0.5)
    outputs = shaken(model("deformable_detr", groups=groups, dropout=0.0)).train()(images())
    report = losses(outputs)
    (_, further) = outputs.groups[0]
    repeated = [
        replace(target, boxes=target.boxes.repeat(3, 1), labels=target.labels.repeat(3)) for target in images().targets
    ]
    classification = Focal()
    expected = SetCriterion(classification, HungarianMatcher(classification, 2.0))(further, repeated)
    for term in ("loss_ce", "loss_bbox", "loss_giou"):
        torch.testing.assert_close(report.losses[f"{term}_one_to_many"], expected.losses[term])
        assert report.weights[f"{term}_one_to_many"] == 0.5 * report.weights[term]


def test_combinations_that_are_not_defined_are_errors() -> None:
    groups = query_groups(QUERIES, group_detr=2)
    for name in ("dino", "deformable_detr_two_stage", "dab_detr_patterns"):
        with pytest.raises(InputError, match="groups"):
            model(name, groups=groups)
    with pytest.raises(InputError, match="repeats=0"):
        query_groups(QUERIES, one_to_many=5, repeats=0)
