"""The layer against torch's own, whose parameters it has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from detr_bf.batchformer import BatchFormerLayer
from detr_bf.batchformer.mixers import BatchEncoderLayer
from tests.kernels import compile_whole, compilers

IMAGES, TOKENS, DIM, HEADS = 3, 50, 32, 4
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


@pytest.fixture(autouse=True)
def _on_both_backends(backend: str) -> None:
    torch.manual_seed(0)


def pair(dropout: float, dtype: torch.dtype = torch.float32) -> tuple[nn.TransformerEncoderLayer, BatchEncoderLayer]:
    """Torch's layer and ours with its parameters, none of them zero."""
    stock = nn.TransformerEncoderLayer(DIM, HEADS, dim_feedforward=DIM, dropout=dropout, dtype=dtype)
    for parameter in stock.parameters():
        nn.init.normal_(parameter, std=0.3)
    ours = BatchEncoderLayer(DIM, HEADS, feedforward_dim=DIM, dropout=dropout).to(dtype)
    ours.load_state_dict(stock.state_dict())
    return stock, ours


def output_and_gradients(
    layer: nn.Module, tokens: Tensor, unseen: Tensor | None, **settings: Tensor | None
) -> list[Tensor]:
    """Positions that are ``unseen`` by all images do not count."""
    tokens = tokens.clone().requires_grad_()
    output = layer(tokens, **settings)
    seen = output if unseen is None else output[~unseen.all(0).expand(len(unseen), -1)]
    loss = (seen * torch.linspace(-1, 1, seen.numel(), dtype=seen.dtype).view(seen.shape)).sum()
    return [seen, *torch.autograd.grad(loss, [tokens, *layer.parameters()])]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_result_and_gradients_are_those_of_torch(dtype: torch.dtype, masked: bool, training: bool) -> None:
    """Masked: at a quarter of the positions nobody is left, and the layer around passes the tokens through."""
    stock, ours = (layer.train(training) for layer in pair(0.0, dtype))
    tokens = torch.randn(IMAGES, TOKENS, DIM, dtype=dtype)
    ignored = torch.rand(IMAGES, TOKENS) < 0.5 if masked else None
    unmasked = {} if ignored is None else {"src_key_padding_mask": (ignored & ~ignored.all(0)).T}
    expected = output_and_gradients(stock, tokens, ignored, **unmasked)
    found = output_and_gradients(ours, tokens, ignored, ignored=ignored)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= TOLERANCE[dtype] * other.abs().max().clamp(min=1)


def test_names_and_shapes_are_those_of_torch() -> None:
    stock, ours = pair(0.5)
    assert {name: value.shape for name, value in ours.state_dict().items()} == {
        name: value.shape for name, value in stock.state_dict().items()
    }
    assert "layers.0.self_attn.in_proj_weight" in BatchFormerLayer(DIM).state_dict()


def test_evaluation_drops_nothing() -> None:
    stock, ours = (layer.eval() for layer in pair(0.5))
    tokens = torch.randn(IMAGES, TOKENS, DIM)
    torch.testing.assert_close(ours(tokens), stock(tokens))


def test_dropout_has_the_distribution_of_torch() -> None:
    """Mean and variance of every output over 4,000 equal positions: five standard errors of their difference.

    No norms, which would hide a wrong scale.
    """
    stock, ours = (layer.double().train() for layer in pair(0.5))
    for layer in (stock, ours):
        layer.norm1, layer.norm2 = nn.Identity(), nn.Identity()
    tokens = torch.randn(IMAGES, 1, DIM, dtype=torch.float64).expand(-1, 4000, -1).contiguous()
    results = [layer(tokens) for layer in (ours, stock)]
    for moment in (results, [(result - result.mean(1, keepdim=True)).square() for result in results]):
        difference = moment[0].mean(1) - moment[1].mean(1)
        error = (sum(result.var(1) for result in moment) / 4000).sqrt()
        assert (difference.abs() <= 5 * error).all()


def test_dropout_changes_with_every_call_and_repeats_with_the_seed() -> None:
    _, ours = pair(0.5)
    tokens = torch.randn(IMAGES, TOKENS, DIM)
    torch.manual_seed(1)
    first, second = ours(tokens), ours(tokens)
    torch.manual_seed(1)
    assert torch.equal(ours(tokens), first)
    assert not torch.equal(first, second)


def test_gradient_with_dropout_is_that_of_the_pass_it_belongs_to() -> None:
    """Finite differences under one seed, by a checkpointed pass too."""
    _, ours = pair(0.3, torch.float64)
    tokens = torch.randn(2, 3, DIM, dtype=torch.float64, requires_grad=True)

    def seeded(x: Tensor, again: bool) -> Tensor:
        torch.manual_seed(5)
        return checkpoint(ours, x, use_reentrant=False) if again else ours(x)

    assert torch.autograd.gradcheck(lambda x: seeded(x, False), tokens)
    gradients = [torch.autograd.grad(seeded(tokens, again).square().sum(), tokens)[0] for again in (False, True)]
    assert torch.equal(*gradients)


def test_autocast() -> None:
    _, ours = pair(0.0)
    tokens = torch.randn(IMAGES, TOKENS, DIM, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        output = ours(tokens)
    assert (output - ours(tokens)).abs().max() < 0.1
    output.sum().backward()
    assert tokens.grad.isfinite().all()


@compilers
def test_compile(backend: str, compiler: str) -> None:
    if backend == "reference":
        pytest.skip("takes long; tests/ops compile the reference")
    _, ours = pair(0.5)
    compiled = compile_whole(ours, compiler)
    for images in (2, 3):
        tokens = torch.randn(images, TOKENS, DIM)
        torch.manual_seed(images)
        expected = ours(tokens)
        torch.manual_seed(images)
        torch.testing.assert_close(compiled(tokens), expected)
