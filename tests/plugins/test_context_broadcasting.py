"""Context Broadcasting compared with a loop: position in the block, blocks, and padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import ParallelScalingBlock
from torch import Tensor, nn

from detr_bf.common.errors import InputError
from detr_bf.common.structures import TokenBatch
from detr_bf.plugins import add_context_broadcasting
from detr_bf.plugins.context_broadcasting import broadcast_context
from tests.plugins import tiny

ROWS, TOKENS, DIM = 2, 5, 4
MODELS: list[Callable[[], Any]] = [tiny.vit, tiny.deit, tiny.pit, tiny.mixer]
every_model = pytest.mark.parametrize("build", MODELS)


def tokens() -> Tensor:
    return torch.randn(ROWS, TOKENS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_as_a_loop_over_tokens(scaled: bool, padded: bool) -> None:
    x = tokens()
    scale = torch.randn(DIM, dtype=torch.float64) if scaled else None
    mask = torch.arange(TOKENS) >= torch.tensor([TOKENS, 3])[:, None] if padded else None
    result = broadcast_context(x, scale, mask)
    for row in range(ROWS):
        seen = [x[row, j] for j in range(TOKENS) if mask is None or not mask[row, j]]
        mean = sum(seen) / len(seen)
        for i in range(TOKENS):
            expected = (x[row, i] + mean) / 2 if scale is None else x[row, i] + scale * mean
            torch.testing.assert_close(result[row, i], expected)


def test_mean_is_kept_and_distances_from_it_are_halved() -> None:
    x = tokens()
    mean, result = x.mean(1, keepdim=True), broadcast_context(x)
    torch.testing.assert_close(result.mean(1, keepdim=True), mean)
    torch.testing.assert_close(result - mean, (x - mean) / 2)


def test_gradients_are_those_of_finite_differences() -> None:
    x, scale = tokens().requires_grad_(), torch.randn(DIM, dtype=torch.float64, requires_grad=True)
    mask = torch.arange(TOKENS) >= torch.tensor([TOKENS, 3])[:, None]
    assert torch.autograd.gradcheck(broadcast_context, (x,))
    assert torch.autograd.gradcheck(lambda x, scale: broadcast_context(x, scale, mask), (x, scale))


def test_padded_image_without_a_valid_token_stays_finite() -> None:
    assert broadcast_context(tokens(), None, torch.ones(ROWS, TOKENS, dtype=torch.bool)).isfinite().all()


@every_model
def test_scales_of_zero_are_the_identity(build: Callable[[], Any]) -> None:
    model = build()
    plugin = add_context_broadcasting(model, "all", scaled=True)
    assert len(plugin.scales) == 4
    assert torch.equal(model(tiny.images()), build()(tiny.images()))
    nn.init.ones_(plugin.scales["0"])
    assert not torch.allclose(model(tiny.images()), build()(tiny.images()))


@pytest.mark.parametrize("scaled", [False, True])
@every_model
def test_stands_at_the_end_of_the_feed_forward_networks_of_the_upper_half(
    build: Callable[[], Any], scaled: bool
) -> None:
    """Compare with a model whose chosen feed-forward networks add the mean explicitly."""
    model, plain = build(), build()
    plugin = add_context_broadcasting(model, scaled=scaled)
    assert plugin.layers == (2, 3)
    for layer in plugin.layers:
        scale = nn.init.normal_(plugin.scales[str(layer)]) if scaled else None
        block, name = network_of(plain, layer)
        setattr(block, name, Outright(getattr(block, name), scale))
    for mode in (True, False):
        torch.testing.assert_close(model.train(mode)(tiny.images()), plain.train(mode)(tiny.images()))


class Outright(nn.Module):
    def __init__(self, network: nn.Module, scale: Tensor | None) -> None:
        super().__init__()
        self.network, self.scale = network, scale

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        out = self.network(x, **kwargs)
        mean = out.sum(1, keepdim=True) / out.shape[1]
        return 0.5 * out + 0.5 * mean if self.scale is None else out + self.scale * mean


def network_of(model: Any, layer: int) -> tuple[nn.Module, str]:
    if hasattr(model, "transformers"):  # PiT: 1, 2 and 1 blocks
        stage, block = ((0, 0), (1, 0), (1, 1), (2, 0))[layer]
        return model.transformers[stage].blocks[block], "mlp"
    return model.blocks[layer], "mlp_channels" if hasattr(model, "stem") else "mlp"


POSITIONS = ["front", "mid", "attention", "both"]


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("build", [tiny.vit, tiny.deit, tiny.pit])
def test_other_positions_as_a_model_with_the_mean_written_out(build: Callable[[], Any], position: str) -> None:
    model, plain = build(), build()
    plugin = add_context_broadcasting(model, [0, 2], position=position)
    for layer in (0, 2):
        block, _ = network_of(plain, layer)
        if position in ("front", "mid"):
            block.mlp = Handmade(block.mlp, position)
        else:
            block.attn = Outright(block.attn, None)
        if position == "both":
            block.mlp = Outright(block.mlp, None)
    for mode in (True, False):
        expected = plain.train(mode)(tiny.images())
        torch.testing.assert_close(model.train(mode)(tiny.images()), expected)
    plugin.remove()
    torch.testing.assert_close(model(tiny.images()), build()(tiny.images()))


class Handmade(nn.Module):
    """timm's Mlp, token by token, with the mean of all tokens before its first or its second linear layer."""

    def __init__(self, mlp: Any, position: str) -> None:
        super().__init__()
        self.mlp, self.position = mlp, position

    def forward(self, x: Tensor) -> Tensor:
        rows = []
        for tokens in x:
            tokens = self.mean_added(list(tokens)) if self.position == "front" else list(tokens)
            hidden = [self.mlp.act(self.mlp.fc1.weight @ token + self.mlp.fc1.bias) for token in tokens]
            hidden = self.mean_added(hidden) if self.position == "mid" else hidden
            rows.append(torch.stack([self.mlp.fc2.weight @ token + self.mlp.fc2.bias for token in hidden]))
        return torch.stack(rows)

    def mean_added(self, tokens: list[Tensor]) -> list[Tensor]:
        mean = sum(tokens) / len(tokens)
        return [(token + mean) / 2 for token in tokens]


def test_weights_do_not_load_into_a_model_with_another_position() -> None:
    states = {}
    for position in ("end", *POSITIONS):
        model = tiny.vit()
        add_context_broadcasting(model, [1], position=position)
        states[position] = model.state_dict()
        for other, state in states.items():
            missing, unexpected = model.load_state_dict(state, strict=False)
            assert bool(missing or unexpected) == (other != position)
    assert "plugins.context_broadcasting.block_1" in states["end"]


def test_positions_that_do_not_exist_are_refused() -> None:
    with pytest.raises(InputError, match="position='begin': give one of end, mid"):
        add_context_broadcasting(tiny.vit(), position="begin")
    with pytest.raises(InputError, match="learned at the end only"):
        add_context_broadcasting(tiny.vit(), position="mid", scaled=True)
    for position in ("attention", "both"):
        model = tiny.mixer()
        with pytest.raises(InputError, match=r"MixerBlock.*none of attn, attention"):
            add_context_broadcasting(model, position=position)
        assert not hasattr(model, "plugins")


@pytest.mark.parametrize(("name", "first", "blocks"), [("pit_b_224", 6, 13), ("mixer_s16_224", 4, 8)])
def test_upper_half_of_the_networks_of_table_11(name: str, first: int, blocks: int) -> None:
    """PiT-B's blocks are counted through its stages of 3, 6 and 4."""
    with torch.device("meta"):
        model = timm.create_model(name)
    assert add_context_broadcasting(model).layers == tuple(range(first, blocks))


def test_mid_of_the_network_is_as_good_as_its_end_without_dropout() -> None:
    """A mean commutes with the second linear layer."""
    mlp = tiny.vit().blocks[0].mlp
    x = torch.randn(ROWS, TOKENS, tiny.DIM, dtype=torch.float64)
    hidden = mlp.act(mlp.fc1(x))
    torch.testing.assert_close(mlp.fc2(broadcast_context(hidden)), broadcast_context(mlp.fc2(hidden)))


def test_attention_that_is_uniform_is_the_steepest() -> None:
    """Reason given in the paper: the softmax Jacobian's nuclear norm is lambda (1 - sum a^2)."""
    scale, norms = 0.7, []
    for logits in (torch.zeros(6), torch.tensor([2.0, 0, 0, 1, 0, -1]), torch.tensor([9.0, 0, 0, 0, 0, 0])):
        logits = logits.double() / scale
        jacobian = torch.autograd.functional.jacobian(lambda x: F.softmax(scale * x, -1), logits)
        attention = F.softmax(scale * logits, -1)
        norms.append(torch.linalg.matrix_norm(jacobian, "nuc"))
        torch.testing.assert_close(norms[-1], scale * (1 - (attention**2).sum()))
    assert norms[0] > norms[1] > norms[2]
    torch.testing.assert_close(norms[0], torch.tensor(scale * (1 - 1 / 6), dtype=torch.float64))


def test_scaled_in_all_blocks_has_the_published_number_of_parameters() -> None:
    """DeiT-S: 0.02 % of 22.05 million parameters."""
    model = tiny.vit(embed_dim=384, depth=12)
    plugin = add_context_broadcasting(model, "all", scaled=True)
    added = sum(p.numel() for p in plugin.parameters())
    assert added == 12 * 384
    assert round(100 * added / 22.05e6, 2) == 0.02


def test_blocks_that_a_pyramid_reads_can_be_skipped() -> None:
    with pytest.raises(InputError, match=r"skip=\[4\]: there is no block 4; the model has 0 to 3"):
        add_context_broadcasting(tiny.vit(), skip=[4])
    assert add_context_broadcasting(tiny.vit(), "all", skip=[0, 2]).layers == (1, 3)
    with pytest.raises(InputError, match="leaves no block"):
        add_context_broadcasting(tiny.vit(), skip=[2, 3])


@pytest.mark.parametrize("layers", [[4], []])
def test_blocks_that_do_not_exist_are_refused(layers: list[int]) -> None:
    with pytest.raises(InputError, match="4 blocks"):
        add_context_broadcasting(tiny.vit(), layers)


def test_blocks_without_feed_forward_network_are_refused() -> None:
    with pytest.raises(InputError, match="ParallelScalingBlock"):
        add_context_broadcasting(tiny.vit(block_fn=ParallelScalingBlock))


def padded_batch() -> TokenBatch:
    generator = torch.Generator().manual_seed(2)
    x, position = torch.randn(2, ROWS, TOKENS, tiny.DIM, dtype=torch.float64, generator=generator)
    mask = torch.arange(TOKENS) >= torch.tensor([TOKENS, 3])[:, None]
    return TokenBatch(x, {"padding_mask": mask, "position": position}, {"spatial_shapes": ((1, TOKENS),)})


@pytest.mark.parametrize("position", ["end", *POSITIONS])
def test_in_our_encoder_padding_changes_nothing(position: str) -> None:
    """An image with padding gives the same as without padding, cropped to its size."""
    encoder, batch = tiny.encoder(), padded_batch()
    add_context_broadcasting(encoder, "all", position=position)
    companions = {name: value[1:, :3] for name, value in batch.per_sample.items()}
    alone = TokenBatch(batch.tokens[1:, :3], companions, {"spatial_shapes": ((1, 3),)})
    memory = encoder(batch).tokens
    torch.testing.assert_close(memory[1:, :3], encoder(alone).tokens)
    assert not torch.allclose(memory, tiny.encoder()(batch).tokens)


@pytest.mark.parametrize("recompute", [False, True])
def test_in_our_encoder_as_said_outright(recompute: bool) -> None:
    """Also holds when layers are recomputed in the backward pass."""
    grads = []
    for outright in (True, False):
        encoder, batch = tiny.encoder(activation_checkpointing=recompute and not outright).train(), padded_batch()
        if outright:
            for layer in list(encoder.layers)[2:]:
                network = layer.feed_forward
                layer.feed_forward = Masked(network, batch.per_sample["padding_mask"])
        else:
            add_context_broadcasting(encoder)
        (encoder(batch).tokens[:, :3] ** 2).sum().backward()
        grads.append([parameter.grad for parameter in encoder.parameters()])
    for expected, got in zip(*grads, strict=True):
        torch.testing.assert_close(got, expected)


class Masked(nn.Module):
    def __init__(self, network: nn.Module, mask: Tensor) -> None:
        super().__init__()
        self.network, self.mask = network, mask

    def forward(self, x: Tensor) -> Tensor:
        out = self.network(x)
        means = [rows[~mask].mean(0, keepdim=True) for rows, mask in zip(out, self.mask, strict=True)]
        return (out + torch.stack(means)) / 2
