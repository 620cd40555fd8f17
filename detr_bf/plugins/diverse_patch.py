"""DiversePatch: losses that keep the patches of the last layer different (Gong et al. 2021, arXiv 2104.12753).

Shape legend: B images, R rows (images, or streams x images), P patches, C channels, K classes.

The first representation of a patch is its embedding, before the position embedding; the last one is the output of the
final norm. The patches of a Swin transformer are the tokens of its last stage, such as 32 x 32 pixels. The contrastive
loss does not apply to it, because they are not its embedded patches (section 5.3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from detr_bf.batchformer import repeat_targets
from detr_bf.common.errors import InputError
from detr_bf.losses.classification import at_least_float32, check_labels
from detr_bf.plugins.plugin import Plugin, patches_of, refused, require_vit
from detr_bf.transformer.blocks import full_precision

_PAIR_ROWS = 1024  # patches compared with all others at a time


def patch_cosine(patches: Tensor) -> Tensor:
    """(R, P, C) -> (R,): the mean of |cos| over all ordered pairs of different patches of an image (section 3).

    P must be 2 or more. Only a few rows of the P x P pairs are in memory at a time, if no gradient is needed.
    """
    count = patches.shape[1]
    unit = F.normalize(at_least_float32(patches), dim=-1)
    sums = [(rows @ unit.transpose(1, 2)).abs().sum((1, 2)) for rows in unit.split(_PAIR_ROWS, 1)]
    return (torch.stack(sums).sum(0) - unit.square().sum((1, 2))) / (count * (count - 1))


def cosine_loss(last: Tensor) -> Tensor:
    """(R, P, C) -> (): the mean of :func:`patch_cosine` over the images (L_cos, section 4); InputError if P is 1."""
    _check_several(last.shape[1])
    return patch_cosine(last).mean()


def contrastive_loss(first: Tensor, last: Tensor) -> Tensor:
    """Patches (R, P, C) of the first and last layer -> (): each last patch is drawn to its own first one (section 4).

    The mean over i of softplus(h1_i . (m_i - hL_i)), with m_i the mean of the other patches hL_j, which equals the
    printed -log(exp(h1_i . hL_i) / (exp(h1_i . hL_i) + exp(h1_i . m_i))). No gradient flows to ``first``.

    Raises:
        InputError: P is 1.
    """
    patches = last.shape[1]
    _check_several(patches)
    first, last = at_least_float32(first.detach()), at_least_float32(last)
    away = (last.mean(1, keepdim=True) - last) * (patches / (patches - 1))  # m_i - hL_i
    return F.softplus((first * away).sum(-1)).mean()


def mixing_loss(logits: Tensor, patch_labels: Tensor) -> Tensor:
    """Logits (R, P, K) of each patch and the class (R, P) of its source image -> () (L_mixing, section 4)."""
    return F.cross_entropy(at_least_float32(logits).flatten(0, 1), patch_labels.flatten())


def _check_several(patches: int) -> None:
    if patches < 2:
        raise InputError(
            "diverse_patch: each image has a single patch, but the losses compare patches: use larger images or a "
            "smaller patch size"
        )


@dataclass(frozen=True)
class PatchMix:
    """Batch after CutMix of whole patches."""

    images: Tensor  # (B, 3, H, W)
    soft_labels: Tensor  # (B, K) float32, the share of each class in the image
    patch_labels: Tensor  # (B, P) int64, the class of each patch's source image


def patch_cutmix(
    images: Tensor,
    labels: Tensor,
    *,
    patch_size: tuple[int, int],
    num_classes: int,
    smoothing: float = 0.0,
    generator: torch.Generator | None = None,
) -> PatchMix:
    """Apply CutMix (Yun et al. 2019, arXiv 1905.04899) with a rectangle of whole patches, the same for all images.

    Args:
        images: (B, 3, H, W).
        labels: (B,) int64.
        patch_size: height and width in pixels.
        num_classes: K.
        smoothing: of ``soft_labels``, not of ``patch_labels``.
        generator: of random numbers, on the CPU.

    Raises:
        InputError: patches do not fill the images, or labels are outside the classes.
    """
    check_labels(labels, num_classes)
    height, width = images.shape[-2:]
    _check_filled((height, width), patch_size)
    inside = _rectangle(height // patch_size[0], width // patch_size[1], generator)
    partner = torch.randperm(len(images), generator=generator).to(images.device)
    share = inside.double().mean().item()
    inside = inside.to(images.device)
    pixels = inside.repeat_interleave(patch_size[0], 0).repeat_interleave(patch_size[1], 1)
    classes = F.one_hot(labels, num_classes).float() * (1 - smoothing) + smoothing / num_classes
    return PatchMix(
        torch.where(pixels, images[partner], images),
        (1 - share) * classes + share * classes[partner],
        torch.where(inside.flatten(), labels[partner, None], labels[:, None]),
    )


def _check_filled(size: tuple[int, int], patch_size: tuple[int, int]) -> None:
    if size[0] % patch_size[0] or size[1] % patch_size[1]:
        raise InputError(f"patches of {patch_size} pixels do not fill images of {size}: choose other sizes")


def _rectangle(rows: int, columns: int, generator: torch.Generator | None) -> Tensor:
    """Draw a grid (rows, columns) bool with one rectangle at a random position, its area uniform before clipping."""
    side = math.sqrt(torch.rand((), generator=generator).item())  # Beta(1, 1) is the uniform distribution
    grid = torch.zeros(rows, columns, dtype=torch.bool)
    spans = []
    for length in (rows, columns):
        extent = round(length * side)
        start = int(torch.randint(length, (), generator=generator)) - extent // 2
        spans.append(slice(max(start, 0), start + extent))
    grid[spans[0], spans[1]] = True
    return grid


class DiversePatchLoss(Plugin):
    """The three losses of DiversePatch on the patches of the last forward pass in training; evaluation does not change.

    The first layer's patches are the patch embeddings, which depend on their own pixels alone; the last layer's are the
    output of the final norm. For a Swin transformer the first ones are only used to count the images.
    """

    name = "diverse_patch"

    def __init__(
        self, dim: int, num_classes: int, *, cosine: float, contrastive: float, mixing: float, prefix_tokens: int = 0
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.weights = {"cosine": cosine, "contrastive": contrastive, "mixing": mixing}
        self.patch_head = nn.Linear(dim, num_classes) if mixing else None
        self.prefix_tokens = prefix_tokens

    def keep(self, name: str, module: nn.Module, args: Any, output: Tensor) -> None:
        if self.training:
            self._kept[name] = output.detach() if name == "first" else output

    def forward(
        self, patch_labels: Tensor | None = None, num_streams: int = 1, *, weighted: bool = True
    ) -> dict[str, Tensor]:
        """Return ``cosine``, ``contrastive`` and ``mixing``, in float32, times their weights; weight 0 removes a loss.

        Args:
            patch_labels: (B, P) int64, from :func:`patch_cutmix`.
            num_streams: streams in the last layer, from :func:`detr_bf.plugins.num_streams`.
            weighted: False: return the losses without their weights.

        Raises:
            InputError: the model was not called before, it has another number of streams, or labels are missing,
                outside the classes or of another shape.
        """
        first, last = (self._take(key).flatten(1, -2) for key in ("first", "last"))  # from (R, S, C) or (R, H, W, C)
        last = patches_of(last, self.prefix_tokens)
        if len(last) != len(first) * num_streams:
            raise InputError(
                f"num_streams={num_streams}, but {len(first)} images have {len(last)} rows in the last layer: "
                "give detr_bf.plugins.num_streams(model)"
            )
        with torch.autocast(last.device.type, enabled=False):
            losses = {}
            if self.weights["cosine"]:
                losses["cosine"] = cosine_loss(last)
            if self.weights["contrastive"]:
                losses["contrastive"] = contrastive_loss(repeat_targets(first, num_streams), last)
            if self.patch_head is not None:
                labels = self._checked(patch_labels, len(first), last.shape[1])
                losses["mixing"] = mixing_loss(
                    full_precision(self.patch_head, last), repeat_targets(labels, num_streams)
                )
            return {name: self.weights[name] * loss for name, loss in losses.items()} if weighted else losses

    def _checked(self, labels: Tensor | None, images: int, patches: int) -> Tensor:
        given = None if labels is None else tuple(labels.shape)
        if labels is None or given != (images, patches):
            raise InputError(
                f"patch_labels: got {given}, expected ({images}, {patches}), the class of every patch: "
                "mix the images with patch_cutmix and give its patch_labels, or set the weight of mixing to 0"
            )
        if labels.device.type == "cpu":  # reading them would wait for a GPU
            check_labels(labels, self.num_classes)
        return labels


def add_diverse_patch(
    model: nn.Module, num_classes: int, *, cosine: float = 1.0, contrastive: float = 1.0, mixing: float = 1.0
) -> DiversePatchLoss:
    """Add DiversePatch to a timm ViT, DeiT or Swin.

    Call the returned module after the model, and add its losses to the loss.

    Args:
        model: the bare model.
        num_classes: K of the classifier of patches, a separate linear layer.
        cosine, contrastive, mixing: weights; 0 removes a loss. For Swin ``contrastive`` must be 0.

    Raises:
        InputError: the model is unsupported, has no norm after the last block, a single patch per image or already
            this plug-in, or is a Swin with the contrastive loss.
    """
    host: Any = _require_host(model)
    swin = isinstance(host, SwinTransformer)
    if contrastive and swin:
        raise InputError(
            f"contrastive={contrastive:g}: it compares each patch with the same patch of the first layer, but Swin "
            "merges many first patches into each of its last ones: set contrastive=0 "
            "(plugins.diverse_patch.contrastive=0)"
        )
    _check_several(math.prod(host.layers[-1].output_resolution if swin else host.patch_embed.grid_size))
    plugin = DiversePatchLoss(
        host.num_features,
        num_classes,
        cosine=cosine,
        contrastive=contrastive,
        mixing=mixing,
        prefix_tokens=0 if swin else host.num_prefix_tokens,
    )
    sources = {"first": host.patch_embed, "last": host.norm}
    plugin.join(host, (part.register_forward_hook(partial(plugin.keep, name)) for name, part in sources.items()))
    return plugin


def mixing_patch_size(model: nn.Module) -> tuple[int, int]:
    """Return height and width in pixels of the patches of this model's DiversePatch, for :func:`patch_cutmix`.

    Raises:
        InputError: :func:`add_diverse_patch` does not support the model, or these patches do not fill its images.
    """
    host: Any = _require_host(model)
    stages = host.layers if isinstance(host, SwinTransformer) else ()
    merged = 2 ** sum(not isinstance(stage.downsample, nn.Identity) for stage in stages)  # along a side
    height, width = (merged * side for side in host.patch_embed.patch_size)
    if host.patch_embed.strict_img_size:  # else images may have any size
        _check_filled(host.patch_embed.img_size, (height, width))
    return height, width


def _require_host(model: nn.Module) -> VisionTransformer | SwinTransformer:
    if not isinstance(model, VisionTransformer | SwinTransformer):
        raise refused(model, "VisionTransformer (ViT, DeiT) or SwinTransformer")
    host = model if isinstance(model, SwinTransformer) else require_vit(model)
    if isinstance(host.norm, nn.Identity):
        raise InputError(
            "DiversePatch needs the patches after the final norm, and this model has no final norm, like timm's models "
            "with mean pooling: build it with fc_norm=False and its final norm (model.options.fc_norm=false)"
        )
    return host
