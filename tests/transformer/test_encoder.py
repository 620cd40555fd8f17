"""Encoder layer compared with torch's attention and norms, and the loop without batch attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detr_bf.batchformer import BatchFormerV2
from detr_bf.common.structures import TokenBatch
from detr_bf.ops import relu_dropout, residual_dropout
from detr_bf.transformer import Encoder, EncoderLayer, TokenAttention
from tests.references.attention import packed_attention

ROWS, TOKENS, DIM = 3, 5, 8


def layer(**changes: object) -> EncoderLayer:
    module = EncoderLayer(TokenAttention(DIM, heads=2), dim=DIM, feedforward_dim=12, **changes).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def example() -> TokenBatch:
    torch.manual_seed(0)
    tokens, position = torch.randn(2, ROWS, TOKENS, DIM, dtype=torch.float64)
    mask = torch.arange(TOKENS) >= torch.tensor([TOKENS, 3, 4])[:, None]
    return TokenBatch(tokens, {"padding_mask": mask, "position": position}, {"spatial_shapes": ((1, TOKENS),)})


def norm(module: nn.LayerNorm, x: Tensor) -> Tensor:
    return F.layer_norm(x, (DIM,), module.weight, module.bias)


def feed_forward(module: EncoderLayer, x: Tensor) -> Tensor:
    parts = module.feed_forward
    hidden = F.linear(x, parts.expand.weight, parts.expand.bias).clamp(min=0)
    return F.linear(hidden, parts.contract.weight, parts.contract.bias)


@pytest.mark.parametrize("pre_norm", [False, True])
def test_layer_as_torch_attention_and_norms(pre_norm: bool) -> None:
    batch = example()
    module = layer(pre_norm=pre_norm)
    attention = packed_attention(module.attention.attention)
    norm1, norm2 = module.attention_residual.norm, module.feed_forward_residual.norm

    def attend(x: Tensor) -> Tensor:
        located = x + batch.per_sample["position"]
        return attention(located, located, x, key_padding_mask=batch.per_sample["padding_mask"])[0]

    x = batch.tokens
    if pre_norm:
        x = x + attend(norm(norm1, x))
        x = x + feed_forward(module, norm(norm2, x))
    else:
        x = norm(norm1, x + attend(x))
        x = norm(norm2, x + feed_forward(module, x))
    torch.testing.assert_close(module(batch), x)


def test_layers_in_turn_then_the_norm() -> None:
    batch, layers, last = example(), [layer(), layer(), layer()], nn.LayerNorm(DIM).double()
    out = Encoder(layers, norm=last)(batch)
    tokens = batch.tokens
    for module in layers:
        tokens = module(batch.with_tokens(tokens))
    torch.testing.assert_close(out.tokens, norm(last, tokens))
    torch.testing.assert_close(Encoder(layers)(batch).tokens, tokens)


def test_without_batch_attention_everything_but_the_tokens_passes_through() -> None:
    batch = example()
    out = Encoder([layer(), layer()]).train()(batch)
    assert out.num_streams == 1
    assert out.per_sample is batch.per_sample
    assert out.static is batch.static


def test_images_do_not_see_each_other() -> None:
    batch, encoder = example(), Encoder([layer(), layer()]).train()
    edited = batch.tokens.clone()
    edited[1] += torch.randn(TOKENS, DIM)
    changed = (encoder(batch.with_tokens(edited)).tokens != encoder(batch).tokens).flatten(1).any(1)
    assert changed.tolist() == [False, True, False]


def test_padded_tokens_do_not_influence_others() -> None:
    batch, encoder = example(), Encoder([layer(), layer()])
    mask = batch.per_sample["padding_mask"]
    edited = batch.tokens.masked_fill(mask[..., None], 7.0)
    before, after = encoder(batch).tokens, encoder(batch.with_tokens(edited)).tokens
    assert torch.equal(before[~mask], after[~mask])
    assert not torch.equal(before[mask], after[mask])


class Dropping(nn.Module):
    """Layer of our own operators, which draw seeds from torch's generator, and of torch's dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM).double()
        self.calls = 0

    def forward(self, batch: TokenBatch) -> Tensor:
        self.calls += 1
        hidden = F.dropout(relu_dropout(self.linear(batch.tokens), 0.3), 0.3)
        return residual_dropout(batch.tokens, hidden, 0.3) * batch.per_sample["position"]


@pytest.mark.usefixtures("backend")
def test_recomputed_layers_draw_the_same_random_numbers() -> None:
    found = []
    for recompute in (False, True):
        torch.manual_seed(1)
        encoder = Encoder([Dropping(), Dropping()], activation_checkpointing=recompute).train()
        batch = example()
        batch = batch.with_tokens(batch.tokens.requires_grad_())
        out = encoder(batch).tokens
        out.square().sum().backward()
        assert [module.calls for module in encoder.layers] == [1 + recompute] * 2
        found.append([out, batch.tokens.grad, torch.rand(2), *(p.grad for p in encoder.parameters())])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_recomputation_keeps_only_what_enters_the_layers() -> None:
    kept = {}
    for recompute in (False, True):
        encoder, batch = Encoder([layer(), layer(), layer()], activation_checkpointing=recompute).train(), example()
        batch = batch.with_tokens(batch.tokens.requires_grad_())
        known = {parameter.data_ptr() for parameter in encoder.parameters()}
        kept[recompute] = []

        def pack(tensor: Tensor, seen: list[tuple[int, ...]] = kept[recompute], known: set[int] = known) -> Tensor:
            if tensor.numel() and tensor.data_ptr() not in known:
                seen.append(tuple(tensor.shape))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            encoder(batch)
    assert kept[True] == [(ROWS, TOKENS, DIM)] * 3
    assert len(kept[False]) > 20


def test_batch_attention_is_not_computed_twice() -> None:
    former = BatchFormerV2(DIM, layers=[0, 1], num_encoder_layers=2, heads=2, dropout=0.0).double()
    calls = []
    former.mixers["shared"].register_forward_hook(lambda *_: calls.append(None))
    encoder = Encoder([Dropping(), Dropping()], batch_former=former, activation_checkpointing=True).train()
    encoder(example()).tokens.sum().backward()
    assert len(calls) == 2
    assert [module.calls for module in encoder.layers] == [2, 2]
