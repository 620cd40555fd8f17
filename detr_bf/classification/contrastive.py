"""MoCo v3 on networks of timm (Chen et al. 2021, ICCV, arXiv 2104.02057), with BatchFormer before the projectors.

Shape legend: B images, A images of all ranks, R rows (streams x images, clean stream first), C channels of the encoder,
D of an embedding, H x W pixels. The axis of length 2 holds the two views of an image.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from detr_bf.batchformer import BatchFormer, contrast_streams
from detr_bf.classification.masked_autoencoder import sine_positions
from detr_bf.common import distributed
from detr_bf.common.errors import InputError
from detr_bf.losses import LossReport
from detr_bf.losses.classification import at_least_float32


@dataclass(frozen=True)
class Embedded:
    """Embeddings of both views of the images."""

    queries: Tensor  # (2, R, D), of the predictor
    keys: Tensor  # (2, R, D), of the momentum encoder, without gradient
    num_streams: int = 1

    def of_images(self) -> tuple[Tensor, Tensor]:
        """Return queries and keys of the clean stream, both (B, 2, D)."""
        clean = slice(self.queries.shape[1] // self.num_streams)
        return self.queries[:, clean].transpose(0, 1), self.keys[:, clean].transpose(0, 1)


def similarities(queries: Tensor, keys: Tensor) -> Tensor:
    """Queries (B, D) and keys (A, D) -> cosines (B, A), in float32 or better."""
    return F.normalize(at_least_float32(queries), dim=1) @ F.normalize(at_least_float32(keys), dim=1).T


def info_nce(queries: Tensor, keys: Tensor, *, temperature: float, first: int = 0) -> Tensor:
    """Return the loss of queries (B, D) among keys (A, D), of which row ``first`` + i belongs to query i: ().

    Cross-entropy times twice the temperature (section 3 and Algorithm 1).
    """
    labels = torch.arange(first, first + len(queries), device=queries.device)
    return 2 * temperature * F.cross_entropy(similarities(queries, keys) / temperature, labels)


def momentum_contrast_loss(
    outputs: Embedded, targets: object = None, *, temperature: float, loss_scale: float = 1.0
) -> LossReport:
    """Return the loss of both directions, each view's queries among the other view's keys of all ranks.

    The image is the target, ``targets`` is unused. ``instance_accuracy`` is logged: the share of the clean queries of
    this rank that are nearest to their own key.

    Args:
        loss_scale: with two streams the factor of the mean over their four pairs.
    """
    streams = outputs.num_streams
    by_image = outputs.keys.unflatten(1, (streams, -1)).permute(2, 0, 1, 3)  # (B, 2, streams, D)
    gathered, first = distributed.all_gather_rows(by_image)
    keys = gathered.permute(1, 2, 0, 3).flatten(1, 2)  # (2, streams x A, D)
    contrast = partial(info_nce, temperature=temperature, first=first)
    pairs = list(zip(outputs.queries, keys.flip(0), strict=True))
    if streams == 1:
        losses = [contrast(*pair) for pair in pairs]
    else:
        losses = [contrast_streams(contrast, *pair, loss_scale=loss_scale) for pair in pairs]
    with torch.no_grad():
        count = len(gathered)
        own = torch.arange(first, first + len(by_image), device=keys.device)
        nearest = [similarities(query[: len(own)], key[:count]).argmax(1) for query, key in pairs]
        accuracy = torch.stack([(found == own).double().mean() for found in nearest]).mean()
    return LossReport(
        {"loss_contrastive": torch.stack(losses).sum()}, {"loss_contrastive": 1.0}, {"instance_accuracy": accuracy}
    )


def normed_mlp(layers: int, dim: int, hidden: int, out: int, *, last_norm: bool) -> nn.Sequential:
    """Return linear layers without bias, with batch norm and ReLU between them: (R, dim) -> (R, out).

    Args:
        last_norm: end with a batch norm without parameters.
    """
    parts: list[nn.Module] = []
    for _ in range(layers - 1):
        parts += [nn.Linear(dim, hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU(inplace=True)]
        dim = hidden
    parts.append(nn.Linear(dim, out, bias=False))
    return nn.Sequential(*parts, *([nn.BatchNorm1d(out, affine=False)] if last_norm else []))


class MomentumContrast(nn.Module):
    """Encoder, projector and predictor, and a momentum encoder with its own projector, which gives the keys.

    A vision transformer gets the fixed sine positions of the paper's code, a projector of three layers and a batch norm
    at the end of its predictor; other networks have two layers and no such norm, as the ResNets of the paper's code.

    Args:
        encoder: the bare network of timm, built with ``num_classes=0``: images (B, 3, H, W) -> features (B, C). Its
            state dict, with the prefix ``encoder.`` in this module, loads into the plain network.
        hidden, dim: channels of the hidden layers and of an embedding, D.
        momentum: share of the momentum encoder that an optimizer step keeps.
        cosine: raise this share to 1 over the run, with half a cosine.
        freeze_patches: do not train the patch projection of a vision transformer (section 4.2).
        batch_former: one module before both projectors, in training.
        freeze_batch_former: keep its initial weights, as the released code of BatchFormer does.

    Raises:
        InputError: the encoder returns no pooled features, or has no position embedding.
    """

    def __init__(
        self,
        encoder: nn.Module,
        *,
        hidden: int,
        dim: int,
        momentum: float,
        cosine: bool = True,
        freeze_patches: bool = True,
        batch_former: BatchFormer | None = None,
        freeze_batch_former: bool = False,
    ) -> None:
        super().__init__()
        self.momentum, self.cosine = momentum, cosine
        transformer = isinstance(encoder, VisionTransformer)
        if isinstance(encoder, VisionTransformer):
            _prepare(encoder, freeze_patches)
        self.encoder = encoder
        channels = cast("int", encoder.head_hidden_size)
        self.projector = normed_mlp(3 if transformer else 2, channels, hidden, dim, last_norm=True)
        self.predictor = normed_mlp(2, dim, hidden, dim, last_norm=transformer)
        self.momentum_encoder = copy.deepcopy(self.encoder).requires_grad_(False)
        self.momentum_projector = copy.deepcopy(self.projector).requires_grad_(False)
        self.batch_former = batch_former
        if batch_former is not None and freeze_batch_former:
            batch_former.requires_grad_(False)

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters without weight decay, like timm's models."""
        names: set[str] = getattr(self.encoder, "no_weight_decay", set)()
        return {f"encoder.{name}" for name in names}

    def forward(self, views: Tensor) -> Embedded:
        """(B, 2, 3, H, W) -> R = 2B rows in training with BatchFormer, else R = B.

        Raises:
            InputError: the features of the encoder are not pooled.
        """
        pair = views.unbind(1)
        queries = [self.predictor(self._project(self.encoder(view), self.projector)) for view in pair]
        with torch.no_grad():
            keys = [self._project(self.momentum_encoder(view), self.momentum_projector) for view in pair]
        streams = 1 if self.batch_former is None else self.batch_former.num_streams
        return Embedded(torch.stack(queries), torch.stack(keys), streams)

    def _project(self, features: Tensor, projector: nn.Module) -> Tensor:
        """(B, C) -> (R, D)."""
        if features.dim() != 2:
            raise InputError(
                f"the encoder returns features of shape {tuple(features.shape)}, expected (images, channels): remove "
                "what changes the pooling from model.options, such as global_pool"
            )
        projected: Tensor = projector(features if self.batch_former is None else self.batch_former(features))
        return projected

    @torch.no_grad()
    def begin_step(self, share: float) -> None:
        """Move the momentum encoder towards the encoder, before the first batch of an optimizer step.

        Batch norms keep statistics of their own. BatchFormer, which both sides share, does not move.

        Args:
            share: of the run that is done, from 0 to 1.
        """
        momentum = self.momentum
        if self.cosine:
            momentum = 1 - (1 - momentum) * (1 + math.cos(math.pi * share)) / 2
        slow: list[Tensor] = [*self.momentum_encoder.parameters(), *self.momentum_projector.parameters()]
        own: list[Tensor] = [*self.encoder.parameters(), *self.projector.parameters()]
        torch._foreach_lerp_(slow, own, 1 - momentum)


def _prepare(vit: VisionTransformer, freeze_patches: bool) -> None:
    """Set the fixed positions and the initial weights of the paper's code (in-place).

    They are Xavier's, for queries, keys and values each on their own. InputError without a position embedding.
    """
    if vit.pos_embed is None:
        raise InputError("the encoder has no position embedding, so fixed ones cannot replace it: give it one")
    vit.init_weights("moco")
    prefix = 0 if vit.no_embed_class else vit.num_prefix_tokens
    vit.pos_embed.requires_grad_(False)
    vit.pos_embed.data.copy_(sine_positions(vit.patch_embed.grid_size, vit.embed_dim, prefix))
    projection = vit.patch_embed.proj
    nn.init.xavier_uniform_(projection.weight.view(len(projection.weight), -1))  # a convolution as a linear map
    if projection.bias is not None:
        nn.init.zeros_(projection.bias)
    if freeze_patches:
        projection.requires_grad_(False)
