"""Gradients of two ranks equal those of one process with the whole batch, in float64; deferred signals."""

from __future__ import annotations

import math
import re
import signal
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from detr_bf.assembly.model import train_low_rank
from detr_bf.common import distributed
from detr_bf.common.structures import Batch, Target
from detr_bf.detectors import MaskHead
from detr_bf.detectors.denoising import ContrastiveDenoising
from detr_bf.engine.step import DeferredSignals, TrainingStep, reduce_flags, sync_gradients, wrap_ddp
from detr_bf.losses import CrossEntropy, Focal, HungarianMatcher, SetCriterion
from tests.detectors import tiny
from tests.processes import run_together

NAMES = ["detr", "deformable_detr_refine", "deformable_detr_two_stage"]
SIZES = (2, 1)  # images of each rank


def step(name: str, masks: bool = False, batch_former: bool = False, lora: int = 0) -> TrainingStep:
    classification = CrossEntropy() if name == "detr" else Focal()
    changes: dict[str, Any] = {"batch_former": tiny.batch_former(gather=True, dropout=0.0)} if batch_former else {}
    if masks:
        changes["mask_head"] = MaskHead(tiny.DIM, heads=2, finer_channels=[])
    model = tiny.shaken(tiny.model(name, dropout=0.0, **changes), std=0.1).double().train()
    if lora:
        train_low_rank(model, lora)
    criterion = SetCriterion(classification, HungarianMatcher(classification))
    return TrainingStep(model, criterion, torch.device("cpu"), torch.float32)


def batch(start: int, stop: int, objects: tuple[int, ...] = (3, 0, 1)) -> Batch:
    """Return images ``start`` to ``stop`` of a set of three, each 32 x 48 pixels with masks."""
    generator = torch.Generator().manual_seed(3)
    pixels = torch.randint(256, (3, tiny.CHANNELS, 32, 48), generator=generator, dtype=torch.uint8)
    targets = []
    for number, count in enumerate(objects):
        boxes = 0.3 + 0.3 * torch.rand(count, 4, generator=generator, dtype=torch.float64)
        labels = torch.randint(tiny.LOGITS - 1, (count,), generator=generator)
        masks = torch.rand(count, 32, 48, generator=generator) < 0.5
        targets.append(Target(number, boxes, labels, (32, 48), (32, 48), masks=masks))
    padding = torch.zeros(3, 32, 48, dtype=torch.bool)
    return Batch(pixels[start:stop], padding[start:stop], tuple(targets[start:stop]))


def gradients(module: torch.nn.Module, parts: list[Batch]) -> dict[str, Tensor]:
    torch.set_default_dtype(torch.float64)
    total = 0.0
    for number, part in enumerate(parts, start=1):
        with sync_gradients(module, number == len(parts)):
            loss = module(part).total / len(parts)
            loss.backward()
            total += loss.item()
    found = {name.removeprefix("module."): p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {**found, "loss": torch.tensor(total)}


def of_this_rank(options: dict[str, Any], objects: tuple[int, ...], unused: bool = False) -> dict[str, Tensor]:
    start = sum(SIZES[: distributed.rank()])
    parallel = wrap_ddp(step(**options), unused_parameters=unused)
    return gradients(parallel, [batch(start, start + SIZES[distributed.rank()], objects)])


def assert_equal(parts: list[dict[str, Tensor]], whole: dict[str, Tensor]) -> None:
    for name, expected in whole.items():
        if name == "loss":
            assert sum(part["loss"] for part in parts) / len(parts) == pytest.approx(expected.item(), abs=1e-9)
            continue
        for part in parts:
            assert torch.equal(part[name], parts[0][name]), "all ranks have the same gradient"
        torch.testing.assert_close(parts[0][name], expected, rtol=0, atol=1e-9)


@pytest.fixture(autouse=True)
def _default_dtype() -> Any:
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.default_tier("objects0-detr", "objects1-deformable_detr_two_stage", "objects2-deformable_detr_refine")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("objects", [(3, 0, 1), (0, 0, 0), (0, 0, 1)])
def test_gradients_are_those_of_all_images_in_one_process(name: str, objects: tuple[int, ...]) -> None:
    """Also holds if a rank has no object: the divisors count the objects of all ranks."""
    options = {"name": name}
    assert_equal(run_together(2, of_this_rank, options, objects), gradients(step(**options), [batch(0, 3, objects)]))


@pytest.mark.parametrize("options", [{"masks": True}, {"batch_former": True}, {"lora": 3}])
def test_gradients_of_masks_of_gathered_batch_attention_and_of_low_rank_changes_are_too(
    options: dict[str, Any],
) -> None:
    options = {"name": "detr", **options}
    whole = gradients(step(**options), [batch(0, 3)])
    assert any(re.search("mask_head|batch_former|lora_b", name) for name in whole)
    assert_equal(run_together(2, of_this_rank, options, (3, 0, 1)), whole)


def without_auxiliary_losses() -> dict[str, Tensor]:
    model = tiny.shaken(tiny.model("deformable_detr_refine", dropout=0.0, aux_loss=False)).double().train()
    criterion = SetCriterion(Focal(), HungarianMatcher(Focal()))
    whole = TrainingStep(model, criterion, torch.device("cpu"), torch.float32)
    parallel = wrap_ddp(whole, unused_parameters=True)
    for _ in range(2):  # a parameter without a gradient would stop the second step
        found = gradients(parallel, [batch(0, 3)])
    return found


def test_unused_parameters_are_allowed_with_the_setting() -> None:
    alone = without_auxiliary_losses()
    for part in run_together(2, without_auxiliary_losses):
        torch.testing.assert_close(part["loss"], alone["loss"])


def accumulated() -> tuple[dict[str, Tensor], int]:
    parallel = wrap_ddp(step("detr"))
    exchanges = 0

    def count(state, bucket):  # type: ignore[no-untyped-def]  # torch looks at annotations and takes no strings
        nonlocal exchanges
        exchanges += bucket.is_last()
        torch.distributed.all_reduce(bucket.buffer())
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer() / distributed.world_size())
        return future

    parallel.register_comm_hook(None, count)
    rank = distributed.rank()
    return gradients(parallel, [batch(rank, rank + 1), batch(rank + 1, rank + 2)]), exchanges


def test_accumulation_exchanges_gradients_once() -> None:
    answers = run_together(2, accumulated)
    assert [exchanges for _, exchanges in answers] == [1, 1]
    whole = gradients(step("detr"), [batch(0, 2), batch(1, 3)])
    for found, _ in answers:
        for name, value in whole.items():
            if name != "loss":
                torch.testing.assert_close(found[name], value, rtol=0, atol=1e-9)


def reduced() -> tuple[float, ...]:
    rank = distributed.rank()
    loss = torch.tensor([2.0, float("nan")][rank])
    flags = reduce_flags(loss, stop=rank == 1, save=rank == 0, replaced=2 * rank, seconds=[2.5, 0.0][rank])
    return tuple(flags.tolist())


def test_every_rank_gets_the_same_flags() -> None:
    assert run_together(2, reduced) == [(2.0, 1.0, 1.0, 1.0, 2.0, 2.5)] * 2


@pytest.mark.default_tier("detr", "rtdetr", "deformable_detr_two_stage", "dn_detr")
@pytest.mark.parametrize("name", tiny.DETECTORS)
@pytest.mark.parametrize("objects", [(3, 0, 1), (0, 0, 0)])
def test_every_parameter_gets_a_gradient_in_every_step(name: str, objects: tuple[int, ...]) -> None:
    """DistributedDataParallel waits for each of them."""
    torch.set_default_dtype(torch.float64)
    whole = step(name, batch_former=True)
    whole(batch(0, 3, objects)).total.backward()
    assert [n for n, p in whole.named_parameters() if p.grad is None] == []


WITHOUT_DENOISING = {
    name: partial(tiny.DETECTORS[name].make, denoising=ContrastiveDenoising(queries=0))
    for name in ("dino", "dino_shared_heads", "rtdetr", "rtdetrv2", "dfine")
}


@pytest.mark.parametrize("name", WITHOUT_DENOISING)
def test_every_trained_parameter_gets_a_gradient_without_denoising(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiny.DETECTORS, name, tiny.DETECTORS[name]._replace(make=WITHOUT_DENOISING[name]))
    assert_all_are_trained(name)


@pytest.mark.parametrize("name", tiny.DETECTORS)
def test_every_trained_parameter_gets_a_gradient_with_one_layer(name: str) -> None:
    assert_all_are_trained(name, encoder_layers=1, decoder_layers=1)
    if name.startswith(("dab_detr", "dn_detr")):
        assert_all_are_trained(name, encoder_layers=0)


def assert_all_are_trained(name: str, **changes: Any) -> None:
    torch.set_default_dtype(torch.float64)
    model = tiny.shaken(tiny.model(name, **changes)).double().train()
    SetCriterion(Focal(), HungarianMatcher(Focal()))(model(batch(0, 3)), batch(0, 3).targets).total.backward()
    assert [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None] == []


def with_all_trained(name: str, changes: dict[str, Any]) -> float:
    if name in WITHOUT_DENOISING:
        tiny.DETECTORS[name] = tiny.DETECTORS[name]._replace(make=WITHOUT_DENOISING[name])
    torch.set_default_dtype(torch.float64)
    model = tiny.shaken(tiny.model(name, dropout=0.0, **changes), std=0.1).double().train()
    criterion = SetCriterion(Focal(), HungarianMatcher(Focal()))
    parallel = wrap_ddp(TrainingStep(model, criterion, torch.device("cpu"), torch.float32))
    rank = distributed.rank()
    found = [gradients(parallel, [batch(rank, rank + 1)]) for _ in range(2)]
    return found[1]["loss"].item()


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "changes"), [("dino", {}), ("rtdetr", {}), ("dfine", {}), ("dab_detr", {"decoder_layers": 1})]
)
def test_two_ranks_take_two_steps_with_parts_that_have_nothing_to_learn(name: str, changes: dict[str, Any]) -> None:
    """DistributedDataParallel stops in the second step if a trained parameter got no gradient in the first."""
    assert all(map(math.isfinite, run_together(2, with_all_trained, name, changes)))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_that_come_together_are_one_request(number: int) -> None:
    """A terminal signals the whole group, and torchrun forwards its own signal."""
    with DeferredSignals() as signals:
        signal.raise_signal(number)
        signal.raise_signal(signal.SIGTERM)
        assert signals.received == number


def test_a_later_signal_acts_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("detr_bf.engine.step.SAME_SIGNAL_SECONDS", -1.0)
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    try:
        with DeferredSignals():
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, usual)


def test_handlers_are_restored() -> None:
    before = [signal.getsignal(number) for number in DeferredSignals.SIGNALS]
    with DeferredSignals():
        assert signal.getsignal(signal.SIGTERM) != before[1]
    assert [signal.getsignal(number) for number in DeferredSignals.SIGNALS] == before
