"""Batch mixers: the layer compared with torch's, and a toy mixer registered by name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from detr_bf.assembly import build_criterion, build_model
from detr_bf.batchformer import BATCH_MIXERS, BatchFormerLayer
from detr_bf.batchformer.mixers import BatchEncoderLayer
from detr_bf.common.structures import Batch, Target
from detr_bf.config import load_config
from tests.kernels import compile_whole, compilers

IMAGES, TOKENS, DIM, HEADS = 3, 50, 32, 4
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


@pytest.fixture(autouse=True)
def _on_both_backends(backend: str) -> None:
    torch.manual_seed(0)


def pair(dropout: float, dtype: torch.dtype = torch.float32) -> tuple[nn.TransformerEncoderLayer, BatchEncoderLayer]:
    """Return torch's layer and ours with the same non-zero parameters."""
    stock = nn.TransformerEncoderLayer(DIM, HEADS, dim_feedforward=DIM, dropout=dropout, dtype=dtype)
    for parameter in stock.parameters():
        nn.init.normal_(parameter, std=0.3)
    ours = BatchEncoderLayer(DIM, HEADS, feedforward_dim=DIM, dropout=dropout).to(dtype)
    ours.load_state_dict(stock.state_dict())
    return stock, ours


def output_and_gradients(
    layer: nn.Module, tokens: Tensor, unseen: Tensor | None, **settings: Tensor | None
) -> list[Tensor]:
    """Return output and gradients without the positions that are ``unseen`` by all images."""
    tokens = tokens.clone().requires_grad_()
    output = layer(tokens, **settings)
    seen = output if unseen is None else output[~unseen.all(0).expand(len(unseen), -1)]
    loss = (seen * torch.linspace(-1, 1, seen.numel(), dtype=seen.dtype).view(seen.shape)).sum()
    return [seen, *torch.autograd.grad(loss, [tokens, *layer.parameters()])]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_result_and_gradients_are_those_of_torch(dtype: torch.dtype, masked: bool, training: bool) -> None:
    """With a mask, a quarter of the positions have no image left; BatchFormer passes those tokens through."""
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
    """Compare mean and variance of every output over 4,000 equal positions, within five standard errors.

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
    """Check gradients by finite differences under one seed, also with activation checkpointing."""
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


class MeanMixer(nn.Module):
    """Toy mixer: adds a projection of the mean over the batch."""

    def __init__(self, dim: int, *, heads: int, dropout: float, num_layers: int) -> None:
        super().__init__()
        self.project = nn.Linear(dim, dim)

    def forward(self, tokens: Tensor, padding_mask: Tensor | None = None, exchange: object = None) -> Tensor:
        return tokens + self.project(tokens.mean(0, keepdim=True))


def test_a_registered_mixer_is_built_by_name_and_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BATCH_MIXERS, "mean", MeanMixer)
    settings = ["model.hidden_dim=32", "model.heads=2", "model.encoder_layers=1", "model.decoder_layers=1"]
    settings += ["model.feedforward_dim=16", "model.num_queries=3", "model.backbone.name=resnet18"]
    config = load_config(None, [*settings, "model.backbone.weights=none", "batch_former={enabled: true, mixer: mean}"])
    torch.manual_seed(0)
    model = build_model(config, num_classes=3).train()
    mixer = model.encoder.batch_former.mixers["shared"]
    assert isinstance(mixer, MeanMixer)
    before = mixer.project.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pixels = torch.randint(256, (2, 3, 64, 64), dtype=torch.uint8)
    box, label = torch.tensor([[0.3, 0.4, 0.2, 0.3]]), torch.tensor([1])
    targets = tuple(Target(number, box, label, (64, 64), (64, 64)) for number in range(2))
    outputs = model(Batch(pixels, torch.zeros(2, 64, 64, dtype=torch.bool)))
    assert outputs.num_streams == 2
    build_criterion(config)(outputs, targets).total.backward()
    optimizer.step()
    assert not torch.equal(mixer.project.weight, before)
