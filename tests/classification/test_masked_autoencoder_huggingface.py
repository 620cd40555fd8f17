"""Masked autoencoder of Hugging Face transformers as an independent check, with the same weights and masks."""

from __future__ import annotations

import operator
import re
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.classification.masked import CLOSE, DEPTH, DIM, PATCHES, SIDE, autoencoder
from tests.plugins import tiny


def hugging_face() -> Any:
    """Build the masked autoencoder of transformers in the size of ours."""
    config = transformers.ViTMAEConfig(
        hidden_size=tiny.DIM,
        num_hidden_layers=tiny.DEPTH,
        num_attention_heads=tiny.HEADS,
        intermediate_size=4 * tiny.DIM,
        image_size=32,
        patch_size=SIDE,
        decoder_hidden_size=DIM,
        decoder_num_hidden_layers=DEPTH,
        decoder_num_attention_heads=2,
        decoder_intermediate_size=4 * DIM,
        layer_norm_eps=1e-6,
        norm_pix_loss=True,
    )
    return transformers.ViTMAEForPreTraining(config).double().eval()


OTHER_NAMES = {
    "vit.embeddings.": "encoder.",
    "position_embeddings": "pos_embed",
    "patch_embeddings.projection": "patch_embed.proj",
    "vit.layers.": "encoder.blocks.",
    "vit.layernorm.": "encoder.norm.",
    "decoder.mask_token": "mask_token",
    "decoder.decoder_pos_embed": "decoder_position",
    "decoder.decoder_embed": "decoder_embed",
    "decoder.decoder_norm": "decoder.norm",
    "decoder.decoder_pred": "decoder_prediction",
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    "attention.o_proj": "attn.proj",
}


def our_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    ours = {}
    for name, value in state.items():
        for theirs, other in OTHER_NAMES.items():
            name = name.replace(theirs, other)
        name = re.sub(r"decoder\.decoder_layers\.(\d+)\.", r"decoder.layers.\1.block.", name)
        ours[name] = value
    for name in [name for name in ours if "q_proj" in name]:
        parts = [ours.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        ours[name.replace("attention.q_proj", "attn.qkv")] = torch.cat(parts)
    return ours


def positions_of_transformers(other: Any) -> None:
    """Initialise the fixed positions, which its constructor does not set."""
    other.vit.embeddings.patch_embeddings.projection._is_hf_initialized = False
    other.vit.embeddings.initialize_weights()
    other.decoder.initialize_weights(PATCHES)


def test_as_that_of_transformers() -> None:
    """Compare positions, predictions, targets, loss and every parameter, with its weights and masks."""
    torch.manual_seed(4)
    other, model = hugging_face(), autoencoder()
    positions_of_transformers(other)
    state = our_names(other.state_dict())
    for name in ("encoder.pos_embed", "decoder_position"):
        torch.testing.assert_close(state[name], operator.attrgetter(name)(model), rtol=0, atol=1e-6)
    model.decoder_position.copy_(state.pop("decoder_position"))
    model.load_state_dict(state)
    order = torch.rand(tiny.IMAGES, PATCHES)
    model._order = lambda images: order  # type: ignore[method-assign]
    expected, result = other(tiny.images(), noise=order), model(tiny.images())
    torch.testing.assert_close(result.predicted, expected.logits, **CLOSE)
    assert torch.equal(result.masked, expected.mask.bool())
    torch.testing.assert_close(result.loss_per_image.mean(), expected.loss, **CLOSE)
