"""Masked autoencoder on timm's vision transformer (He et al. 2022, CVPR, arXiv 2111.06377), with batch attention.

Shape legend: B images, R rows (streams x images, clean stream first), P patches of p x q pixels, n = 3 p q numbers of a
patch, V visible patches, T class and other tokens before the patches, S = T + P, C channels of the encoder, D of the
decoder.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from timm.layers.pos_embed_sincos import build_sincos2d_pos_embed
from timm.models import checkpoint_seq
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from detr_bf.batchformer import BatchFormerV2, repeat_targets
from detr_bf.common.errors import InputError
from detr_bf.common.structures import TokenBatch
from detr_bf.losses import STREAM_NAMES, LossReport
from detr_bf.losses.classification import at_least_float32
from detr_bf.plugins.plugin import require_vit
from detr_bf.transformer import Encoder

EVALUATION_SEED = 0
VARIANCE_FLOOR = 1e-6  # added to the variance of a patch


@dataclass(frozen=True)
class Reconstructed:
    """Predicted patches and their targets."""

    predicted: Tensor  # (R, P, n)
    wanted: Tensor  # (R, P, n) float32 or better, without gradient
    masked: Tensor  # (R, P) bool, True = hidden from the encoder
    num_streams: int = 1

    @property
    def loss_per_image(self) -> Tensor:
        """Mean squared error over the masked patches of each image, (R,) in float32 or better."""
        error = (at_least_float32(self.predicted) - self.wanted).square().mean(-1)
        return (error * self.masked).sum(1) / self.masked.sum(1)


def reconstruction_loss(outputs: Reconstructed, targets: object = None) -> LossReport:
    """Return the mean over the images, which is that of the streams; the image is the target, ``targets`` is unused."""
    streams = outputs.loss_per_image.unflatten(0, (outputs.num_streams, -1)).mean(1)
    logged = {}
    if outputs.num_streams > 1:
        logged = {f"stream/{name}": loss for name, loss in zip(STREAM_NAMES, streams.detach(), strict=True)}
    return LossReport({"loss_reconstruction": streams.mean()}, {"loss_reconstruction": 1.0}, logged)


def into_patches(images: Tensor, size: tuple[int, int]) -> Tensor:
    """(B, 3, H, W) -> (B, P, n): patches row by row, the pixels of a patch row by row, the colours of a pixel last."""
    grid = images.unflatten(3, (-1, size[1])).unflatten(2, (-1, size[0]))  # (B, 3, H/p, p, W/q, q)
    return grid.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def into_images(patches: Tensor, size: tuple[int, int], grid: tuple[int, int]) -> Tensor:
    """(R, P, n) -> (R, 3, H, W): the inverse of :func:`into_patches`, for a ``grid`` of H/p x W/q patches."""
    pixels = patches.unflatten(2, (*size, -1)).unflatten(1, grid)  # (R, H/p, W/q, p, q, 3)
    return pixels.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)


def patch_moments(patches: Tensor) -> tuple[Tensor, Tensor]:
    """(B, P, n) -> mean and standard deviation of each patch, both (B, P, 1), from the unbiased variance."""
    variance = patches.var(-1, keepdim=True) + VARIANCE_FLOOR
    return patches.mean(-1, keepdim=True), variance.sqrt()


def visible_indices(order: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Numbers (B, P) -> indices (B, count) int64 of the smallest, and the mask (B, P) bool of all others."""
    indices = order.argsort(1)[:, :count]
    return indices, torch.ones_like(order, dtype=torch.bool).scatter(1, indices, False)


def sine_positions(grid: tuple[int, int], dim: int, prefix: int) -> Tensor:
    """Return the fixed sine-cosine positions of the paper's code, (1, prefix + P, dim); 0 for the prefix tokens.

    Raises:
        InputError: ``dim`` is not divisible by 4.
    """
    if dim % 4:
        raise InputError(f"the sine-cosine position embedding needs a width divisible by 4, got {dim}")
    rows_first = build_sincos2d_pos_embed(list(grid), dim, interleave_sin_cos=True)
    return torch.cat([torch.zeros(prefix, dim), rows_first.roll(dim // 2, dims=1)])[None]


@torch.no_grad()
def initialize_as_published(module: nn.Module) -> None:
    """Initialise as the paper's code: Xavier for linear maps and patch projection, 0 for biases, 0.02 for class tokens.

    For an encoder without pretrained weights; the decoder is always initialised like this.
    """
    for name, parameter in module.named_parameters():
        if name.rpartition(".")[2] in ("cls_token", "dist_token", "reg_token", "mask_token"):
            nn.init.normal_(parameter, std=0.02)
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(part.weight.view(len(part.weight), -1))  # a convolution as a linear map
            if part.bias is not None:
                nn.init.zeros_(part.bias)


class BlockLayer(nn.Module):
    """A timm block as a layer of :class:`~detr_bf.transformer.Encoder`."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, batch: TokenBatch) -> Tensor:
        tokens: Tensor = self.block(batch.tokens)
        return tokens


class MaskedAutoencoder(nn.Module):
    """Masked autoencoder: the decoder predicts the patches that are hidden from ``encoder``.

    In training the visible patches of each image are drawn from torch's generator. In evaluation they are fixed and the
    same for every image, so that a loss depends neither on order nor on batch size. Position embeddings are fixed.

    Args:
        encoder: the bare model, built with ``num_classes=0``; its position embedding is replaced. Its state dict,
            with the prefix ``encoder.`` in this module, loads into the plain model.
        decoder_dim, decoder_depth, decoder_heads: width D, blocks and heads of the decoder; 512, 8 and 16 in the paper.
        mask_ratio: share of the patches hidden from the encoder.
        norm_pix_loss: predict patches normalised to mean 0 and variance 1 each.
        batch_former: batch attention among the decoder's blocks, of width D and made for ``decoder_depth`` layers.

    Raises:
        InputError: ``encoder`` is another model or has parts that would not be trained, the decoder or the mask is
            impossible, or batch attention is at a block that the decoder lacks.
    """

    decoder_position: Tensor
    evaluation_order: Tensor

    def __init__(
        self,
        encoder: nn.Module,
        *,
        decoder_dim: int,
        decoder_depth: int,
        decoder_heads: int,
        mask_ratio: float,
        norm_pix_loss: bool,
        batch_former: BatchFormerV2 | None = None,
    ) -> None:
        super().__init__()
        self.encoder = _checked(encoder)
        embed = self.encoder.patch_embed
        self.patch_size, self.grid, self.image_size = embed.patch_size, embed.grid_size, embed.img_size
        self.num_visible = _num_visible(embed.num_patches, mask_ratio)
        self.norm_pix_loss = norm_pix_loss
        self.prefix = self.encoder.num_prefix_tokens
        fixed = cast("nn.Parameter", self.encoder.pos_embed).requires_grad_(False)
        prefix = 0 if self.encoder.no_embed_class else self.prefix
        fixed.data.copy_(sine_positions(self.grid, self.encoder.embed_dim, prefix))
        if batch_former is not None and max(batch_former.insertions) >= decoder_depth:
            raise InputError(
                f"batch_former.layers={list(batch_former.insertions)}: the decoder has {decoder_depth} blocks, counted "
                f"from 0; give indices from 0 to {decoder_depth - 1}"
            )
        if decoder_dim % decoder_heads:
            raise InputError(f"model.decoder_heads={decoder_heads} must divide model.decoder_dim={decoder_dim}")
        self.decoder_embed = nn.Linear(self.encoder.embed_dim, decoder_dim)
        self.mask_token = nn.Parameter(torch.empty(1, 1, decoder_dim))
        blocks = [BlockLayer(Block(decoder_dim, decoder_heads, qkv_bias=True)) for _ in range(decoder_depth)]
        self.decoder = Encoder(blocks, norm=nn.LayerNorm(decoder_dim, eps=1e-6))
        self.decoder_prediction = nn.Linear(decoder_dim, 3 * math.prod(self.patch_size))
        nn.init.normal_(self.mask_token, std=0.02)
        for part in (self.decoder_embed, self.decoder, self.decoder_prediction):
            initialize_as_published(part)
        self.decoder.batch_former = batch_former
        order = torch.randperm(embed.num_patches, generator=torch.Generator().manual_seed(EVALUATION_SEED))
        self.register_buffer("decoder_position", sine_positions(self.grid, decoder_dim, self.prefix), persistent=False)
        self.register_buffer("evaluation_order", order[None], persistent=False)

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters without weight decay, like timm's models."""
        return {"mask_token", *(f"encoder.{name}" for name in self.encoder.no_weight_decay())}

    def forward(self, images: Tensor) -> Reconstructed:
        """Images (B, 3, H, W) -> R = 2B rows in training with two streams, else R = B.

        Raises:
            InputError: the images have another size than the encoder's.
        """
        if images.shape[-2:] != self.image_size:
            raise InputError(
                f"got images of {tuple(images.shape[-2:])} pixels, expected {self.image_size}: resize them, or build "
                "the encoder with another img_size"
            )
        visible, masked = visible_indices(self._order(images), self.num_visible)
        decoded = self._decode(self._encode(images, visible), visible)
        predicted = self.decoder_prediction(decoded.tokens[:, self.prefix :])
        streams = decoded.num_streams
        return Reconstructed(
            predicted, repeat_targets(self._wanted(images), streams), repeat_targets(masked, streams), streams
        )

    def _order(self, images: Tensor) -> Tensor:
        """Return numbers (B, P) whose smallest are the visible patches: random in training, else fixed."""
        if self.training:
            return torch.rand(len(images), self.evaluation_order.shape[1], device=images.device)
        return self.evaluation_order.expand(len(images), -1)

    @torch.no_grad()
    def _wanted(self, images: Tensor) -> Tensor:
        """Return the target patches (B, P, n)."""
        patches = into_patches(images, self.patch_size)
        if not self.norm_pix_loss:
            return patches
        mean, deviation = patch_moments(patches)
        return (patches - mean) / deviation

    def _encode(self, images: Tensor, visible: Tensor) -> Tensor:
        """Images (B, 3, H, W) and indices of visible patches (B, V) -> (B, T + V, C)."""
        vit = self.encoder
        tokens = vit._pos_embed(vit.patch_embed(images))
        patches = tokens[:, self.prefix :].gather(1, visible[..., None].expand(-1, -1, tokens.shape[2]))
        tokens = vit.norm_pre(torch.cat([tokens[:, : self.prefix], patches], dim=1))
        tokens = checkpoint_seq(vit.blocks, tokens) if vit.grad_checkpointing else vit.blocks(tokens)
        return cast("Tensor", vit.norm(tokens))

    def _decode(self, encoded: Tensor, visible: Tensor) -> TokenBatch:
        """Encoded tokens (B, T + V, C) and indices of visible patches (B, V) -> (R, S, D)."""
        tokens = self.decoder_embed(encoded)
        hidden = self.mask_token.to(tokens.dtype).expand(len(tokens), self.evaluation_order.shape[1], -1)
        patches = hidden.scatter(1, visible[..., None].expand(-1, -1, tokens.shape[2]), tokens[:, self.prefix :])
        tokens = torch.cat([tokens[:, : self.prefix], patches], dim=1) + self.decoder_position
        batch: TokenBatch = self.decoder(TokenBatch(tokens))
        return batch

    @torch.no_grad()
    def pictures(self, images: Tensor, result: Reconstructed) -> tuple[Tensor, Tensor]:
        """Return ``images`` with masked patches set to 0, and with masked patches predicted by the clean stream.

        Both are (B, 3, H, W). Normalised predictions are scaled back with the patch's own mean and deviation.
        """
        patches = into_patches(images, self.patch_size)
        masked = result.masked[: len(images), :, None]
        predicted = result.predicted[: len(images)].to(patches.dtype)
        if self.norm_pix_loss:
            mean, deviation = patch_moments(patches)
            predicted = predicted * deviation + mean
        return self.unpatchify(patches.masked_fill(masked, 0)), self.unpatchify(torch.where(masked, predicted, patches))

    def unpatchify(self, patches: Tensor) -> Tensor:
        """(R, P, n) -> (R, 3, H, W)."""
        return into_images(patches, self.patch_size, self.grid)


def _checked(encoder: nn.Module) -> VisionTransformer:
    """Return ``encoder`` if it is a ViT of which every part is trained."""
    vit = require_vit(encoder)
    if vit.num_classes or vit.attn_pool is not None or isinstance(vit.norm, nn.Identity):
        raise InputError(
            "the encoder has a classifier, a pooling with parameters or a norm after its pooling, and none of them "
            "would be trained: build it with num_classes=0, global_pool='token' and its final norm"
        )
    embed = vit.patch_embed
    if any(side % patch for side, patch in zip(embed.img_size, embed.patch_size, strict=True)):
        raise InputError(
            f"patches of {embed.patch_size} pixels do not fill images of {embed.img_size}: choose another img_size or "
            "patch_size of the encoder"
        )
    if vit.pos_embed is None:
        raise InputError("the encoder has no position embedding, so it cannot locate visible patches: give it one")
    return vit


def _num_visible(patches: int, mask_ratio: float) -> int:
    visible = round(patches * (1 - mask_ratio))
    if not 0 < visible < patches:
        raise InputError(
            f"model.mask_ratio={mask_ratio} leaves {visible} of {patches} patches visible: choose a ratio that leaves "
            "at least one, and hides at least one"
        )
    return visible
