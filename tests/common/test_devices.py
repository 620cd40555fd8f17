"""Copies to and from a device, and the precision of float32 products."""

from __future__ import annotations

import pytest
import torch

from detr_bf.common.devices import HostCopy, float32_products, send, tensor_on
from tests.kernels import A_GPU

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def precision() -> tuple[str, bool, bool]:
    backends = torch.backends
    return torch.get_float32_matmul_precision(), backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32


@pytest.mark.parametrize(("chosen", "tf32"), [("high", True), ("highest", False)])
def test_float32_products_of_a_gpu_are_chosen_and_restored(chosen: str, tf32: bool) -> None:
    before = precision()
    with float32_products(GPU, chosen):
        assert precision() == (chosen, tf32, tf32)
    assert precision() == before


@pytest.mark.parametrize("chosen", ["high", "highest"])
def test_float32_products_of_a_cpu_stay(chosen: str) -> None:
    before = precision()
    with float32_products(CPU, chosen):
        assert precision() == before


@pytest.mark.parametrize("device", [CPU, A_GPU])
def test_copies(device: torch.device) -> None:
    numbers = tensor_on(device, [[1, 2], [3, 4]], torch.float64)
    assert torch.equal(numbers, torch.tensor([[1, 2], [3, 4]], dtype=torch.float64, device=device))
    assert send(torch.arange(3), device).device.type == device.type
    assert HostCopy((numbers * 2).requires_grad_()).get().tolist() == [[2, 4], [6, 8]]


@pytest.mark.parametrize("device", [A_GPU])
def test_float32_products_on_a_gpu_are_what_the_setting_says(device: torch.device) -> None:
    a, b = (torch.randn(512, 512, device=device) for _ in range(2))
    exact = a.double() @ b.double()
    errors = {}
    for chosen in ("high", "highest"):
        with float32_products(device, chosen):
            errors[chosen] = float((a @ b - exact).abs().max() / exact.abs().max())
    assert errors["highest"] < 1e-6 < errors["high"] < 1e-2
