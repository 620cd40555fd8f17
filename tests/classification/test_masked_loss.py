"""The loss of a masked autoencoder."""

from __future__ import annotations

import pytest
import torch

from detr_bf.classification.masked_loss import MaskedCriterion, Reconstructed

PATCHES, NUMBERS = 5, 6


def example(rows: int, num_streams: int = 1) -> Reconstructed:
    generator = torch.Generator().manual_seed(0)
    predicted, wanted = torch.randn(2, rows, PATCHES, NUMBERS, generator=generator, dtype=torch.float64)
    masked = torch.zeros(rows, PATCHES, dtype=torch.bool)
    masked[:, [1, 4]] = masked[0, 2] = True
    return Reconstructed(predicted.requires_grad_(), wanted, masked, num_streams)


def test_as_the_plain_loop_over_masked_patches() -> None:
    result = example(3)
    for row in range(3):
        errors = [
            sum((float(p) - float(w)) ** 2 for p, w in zip(guess, wanted, strict=True)) / NUMBERS
            for guess, wanted, masked in zip(
                result.predicted[row].detach(), result.wanted[row], result.masked[row], strict=True
            )
            if masked
        ]
        assert result.loss_per_image[row].item() == pytest.approx(sum(errors) / len(errors), rel=1e-12)


def test_a_perfect_guess_costs_nothing_and_one_off_by_one_costs_one() -> None:
    result = example(3)
    for shift in (0.0, 1.0):
        guess = Reconstructed(result.wanted + shift, result.wanted, result.masked)
        torch.testing.assert_close(guess.loss_per_image, torch.full((3,), shift, dtype=torch.float64))


def test_gradients_are_those_of_finite_differences() -> None:
    result = example(2)

    def loss(predicted: torch.Tensor) -> torch.Tensor:
        return MaskedCriterion()(Reconstructed(predicted, result.wanted, result.masked)).total

    assert torch.autograd.gradcheck(loss, (result.predicted,))


def test_the_loss_is_the_mean_of_the_streams_and_each_is_logged() -> None:
    result = example(4, num_streams=2)
    report = MaskedCriterion()(result, None)
    per_image = result.loss_per_image
    torch.testing.assert_close(report.total, per_image.mean())
    torch.testing.assert_close(report.losses["loss_reconstruction"], per_image.mean())
    assert set(report.logged) == {"stream/clean", "stream/batchformer"}
    torch.testing.assert_close(report.logged["stream/clean"], per_image[:2].mean().detach())
    torch.testing.assert_close(report.logged["stream/batchformer"], per_image[2:].mean().detach())
    assert not any(value.requires_grad for value in report.logged.values())
    assert not MaskedCriterion()(example(4)).logged


def test_half_precision_is_computed_in_float32() -> None:
    result = example(3)
    half = Reconstructed(result.predicted.half(), result.wanted.float(), result.masked)
    assert half.loss_per_image.dtype == torch.float32
    torch.testing.assert_close(half.loss_per_image.double(), result.loss_per_image, rtol=1e-2, atol=0)
