"""A training step of every detector on a CPU and on a GPU, compared with plain PyTorch in float32 on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
from torch import Tensor, nn

from detr_bf.common.devices import float32_products
from detr_bf.engine.step import TrainingStep
from detr_bf.losses import CrossEntropy, Focal, HungarianMatcher, SetCriterion
from detr_bf.losses.matcher import Matches
from detr_bf.ops.library import reference_operators
from tests.detectors import tiny
from tests.engine.steps import batches
from tests.kernels import on_devices

CPU = torch.device("cpu")
SMALL = 1e-3  # of the largest gradient: smaller ones, some of them zero but for rounding, are not compared by their own
SCALE = 1024.0  # of the loss, so that gradients do not underflow in float16
T = TypeVar("T")


class Result(NamedTuple):
    losses: dict[str, float]
    gradients: dict[str, Tensor]  # float64 on the CPU

    @property
    def small(self) -> float:
        return SMALL * max(float(gradient.abs().max()) for gradient in self.gradients.values())


def step(name: str, device: torch.device, precision: torch.dtype = torch.float32) -> Result:
    """Run a training step with batch attention and without dropout, always with the same weights and images.

    All weights are random: those of the constructors put samples on cell centres, where derivatives jump.
    """
    former = tiny.batch_former(layers=[0, 1], dropout=0.0)
    model = tiny.shaken(tiny.model(name, dropout=0.0, batch_former=former), std=0.1).to(device).train()
    focal = "loss.classification=focal" in tiny.DETECTORS[name].settings
    classification = Focal() if focal else CrossEntropy()
    training = TrainingStep(model, SetCriterion(classification, HungarianMatcher(classification)), device, precision)
    torch.manual_seed(5)
    with float32_products(device, "highest"):
        report = training(batches()[0])
        (report.total * SCALE).backward()
    losses = {key: loss.item() for key, loss in report.losses.items()}
    return Result(losses, gradients_of(model))


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {key: parameter.grad.double().cpu() / SCALE for key, parameter in model.named_parameters()}


@pytest.fixture(autouse=True)
def _noise_drawn_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the denoising queries the same random numbers on every device."""
    for name in ("rand", "randint"):
        draw = getattr(torch, name)

        def draw_on_cpu(*sizes: Any, device: torch.device = CPU, draw: Any = draw, **settings: Any) -> Tensor:
            return draw(*sizes, **settings).to(device)

        monkeypatch.setattr(torch, name, draw_on_cpu)


@pytest.mark.default_tier("detr", "rtdetr", "deformable_detr_two_stage")
@on_devices
@pytest.mark.parametrize("name", tiny.DETECTORS)
def test_a_step_in_float32(device: torch.device, name: str) -> None:
    with reference_operators():
        expected = step(name, CPU)
    found = step(name, device)
    assert found.losses == pytest.approx(expected.losses, rel=1e-4, abs=1e-6)
    for key, gradient in expected.gradients.items():
        error = (found.gradients[key] - gradient).abs().max() / gradient.abs().max().clamp(min=expected.small)
        assert error < 1e-3, f"{key}: {error:.1e}"


class Choices:
    """Choices of proposals and matches in a step, repeated by later steps.

    Rounding to half floats may exchange scores or costs that are almost equal, and so change every gradient.
    """

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.index = 0

    def repeat(self, choose: Callable[[], T]) -> T:
        """Return the choice that the first step made at this point."""
        if self.index == len(self.made):
            self.made.append(choose())
        self.index += 1
        return self.made[self.index - 1]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        topk, match_all = Tensor.topk, HungarianMatcher.match_all

        def best(scores: Tensor, count: int, dim: int) -> Any:
            indices = self.repeat(lambda: topk(scores, count, dim).indices.cpu()).to(scores.device)
            return SimpleNamespace(indices=indices, values=scores.gather(dim, indices))

        def matched(matcher: HungarianMatcher, problems: Sequence[Any]) -> list[Matches]:
            device = problems[0][0].logits.device
            matches = self.repeat(lambda: match_all(matcher, problems))
            return [Matches(*(tensor.to(device) for tensor in vars(each).values())) for each in matches]

        monkeypatch.setattr(Tensor, "topk", best)
        monkeypatch.setattr(HungarianMatcher, "match_all", matched)


@pytest.mark.default_tier("detr", "rtdetr", "deformable_detr_two_stage")
@on_devices
@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", tiny.DETECTORS)
def test_a_step_in_half_floats(
    device: torch.device, precision: torch.dtype, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices = Choices()
    choices.install(monkeypatch)
    with reference_operators():
        expected = step(name, CPU)
    choices.index = 0
    found = step(name, device, precision)
    assert found.losses == pytest.approx(expected.losses, rel=0.01, abs=1e-4)
    assert all(gradient.isfinite().all() for gradient in found.gradients.values())
    cosines = [
        torch.cosine_similarity(found.gradients[key].flatten(), gradient.flatten(), dim=0)
        for key, gradient in expected.gradients.items()
        if gradient.abs().max() > expected.small
    ]
    assert torch.stack(cosines).mean() > 0.98
