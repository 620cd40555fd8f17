"""The report of a criterion: weighted sums, weights by term, and terms added by plug-ins."""

from __future__ import annotations

import pytest
import torch

from detr_bf.losses import LossReport


def report(*, streams: bool) -> LossReport:
    losses = {name: torch.tensor(value) for name, value in (("loss_ce_0", 4.0), ("loss_ce", 1.0), ("loss_ce_enc", 2.0))}
    logged = {"stream/clean": torch.tensor(16.0), "stream/batchformer": torch.tensor(12.0)} if streams else {}
    return LossReport(losses, dict.fromkeys(losses, 2.0), logged)


def test_weights_of_auxiliary_layers_and_proposals_are_left_out() -> None:
    added = report(streams=False).extended({"loss_localization": torch.tensor(3.0)}, {"loss_localization": 0.1})
    assert added.term_weights == {"loss_ce": 2.0, "loss_localization": 0.1}


@pytest.mark.parametrize("weight", [0.0, 0.25])
def test_added_terms_are_weighted_in_the_total_and_in_every_stream(weight: float) -> None:
    before, term = report(streams=True), torch.tensor(8.0, requires_grad=True)
    after = before.extended({"loss_localization": term}, {"loss_localization": weight})
    assert after.losses["loss_localization"] == 8
    assert after.total == 14 + 8 * weight
    assert (after.logged["stream/clean"], after.logged["stream/batchformer"]) == (16 + 8 * weight, 12 + 8 * weight)
    assert not after.logged["stream/clean"].requires_grad
    assert before.logged["stream/clean"] == 16, "the first report stays"


def test_without_streams_none_are_logged() -> None:
    after = report(streams=False).extended({"loss_localization": torch.tensor(8.0)}, {"loss_localization": 1.0})
    assert not after.logged
    assert report(streams=True).extended({}, {}).logged.keys() == report(streams=True).logged.keys()
