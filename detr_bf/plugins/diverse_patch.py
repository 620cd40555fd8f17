"""DiversePatch: patches of the last layer shall stay different (Gong et al. 2021, arXiv 2104.12753).

Shape legend: B images, R rows (images, or streams x images), P patches, C channels, K classes.

Of a Swin transformer the patches are the tokens of its last stage, such as 32 x 32 pixels, and the contrastive loss is
not for it: they are not those that enter the first block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from detr_bf.batchformer import repeat_targets
from detr_bf.errors import InputError
from detr_bf.layers.precision import full_precision
from detr_bf.losses.classification import at_least_float32, check_labels
from detr_bf.plugins.plugin import Plugin, patches_of, refused, require_vit


def cosine_loss(last: Tensor) -> Tensor:
    """(R, P, C) -> (): the mean of |cos| over all ordered pairs of different patches of an image (section 4.1).

    Raises:
        InputError: P is 1.
    """
    patches = last.shape[1]
    _check_several(patches)
    unit = F.normalize(at_least_float32(last), dim=-1)
    similarity = (unit @ unit.transpose(1, 2)).abs()
    own = similarity.diagonal(dim1=1, dim2=2).sum()
    return (similarity.sum() - own) / (len(last) * patches * (patches - 1))


def contrastive_loss(first: Tensor, last: Tensor) -> Tensor:
    """Patches (R, P, C) of the first and last layer -> (): patch i shall be nearer to its own beginning (section 4.2).

    The mean over i of softplus(h1_i . (m_i - hL_i)), with m_i the mean of the other patches hL_j. It has the printed
    formula's and the released code's m_i; no gradient reaches ``first``.

    Raises:
        InputError: P is 1.
    """
    patches = last.shape[1]
    _check_several(patches)
    first, last = at_least_float32(first.detach()), at_least_float32(last)
    away = (last.mean(1, keepdim=True) - last) * (patches / (patches - 1))  # m_i - hL_i
    return F.softplus((first * away).sum(-1)).mean()


def mixing_loss(logits: Tensor, patch_labels: Tensor) -> Tensor:
    """Logits (R, P, K) of each patch and the class (R, P) of the image it came from -> () (section 4.3)."""
    return F.cross_entropy(at_least_float32(logits).flatten(0, 1), patch_labels.flatten())


def _check_several(patches: int) -> None:
    if patches < 2:
        raise InputError(
            "diverse_patch: each image is a single patch, which differs from no other: take larger images or a smaller "
            "patch size"
        )


@dataclass(frozen=True)
class PatchMix:
    """A batch after CutMix along the edges of patches."""

    images: Tensor  # (B, 3, H, W)
    soft_labels: Tensor  # (B, K) float32, the share of each class in the image
    patch_labels: Tensor  # (B, P) int64, the class of the image each patch came from


def patch_cutmix(
    images: Tensor,
    labels: Tensor,
    *,
    patch_size: tuple[int, int],
    num_classes: int,
    smoothing: float = 0.0,
    generator: torch.Generator | None = None,
) -> PatchMix:
    """CutMix (Yun et al. 2019, arXiv 1905.04899) with a rectangle of whole patches, the same for all images.

    Args:
        images: (B, 3, H, W).
        labels: (B,) int64.
        patch_size: height and width in pixels.
        num_classes: K.
        smoothing: of the images' targets, not of the patches'.
        generator: of random numbers, on the CPU.

    Raises:
        InputError: patches do not fill the image, or labels are outside the classes.
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
    """A grid (rows, columns) bool with one rectangle whose area before clipping is uniform, anywhere."""
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
    """The three losses of DiversePatch on the patches of the last forward pass in training; evaluation is untouched.

    The first layer's patches are what enters the first block, the last layer's what leaves the final norm. Of a Swin
    transformer the first ones only say how many images there are.
    """

    name = "diverse_patch"

    def __init__(self, dim: int, num_classes: int, *, cosine: float, contrastive: float, mixing: float) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.weights = {"cosine": cosine, "contrastive": contrastive, "mixing": mixing}
        self.patch_head = nn.Linear(dim, num_classes) if mixing else None
        self.prefix_tokens = 0

    def attach(self, model: nn.Module) -> None:
        """Hang on what stands before the first and behind the last block."""
        host: Any = _require_host(model)
        swin = isinstance(host, SwinTransformer)
        self.prefix_tokens = 0 if swin else host.num_prefix_tokens
        self.join(host, self._hooks(host.patch_embed if swin else host.norm_pre, host.norm))

    def _hooks(self, first: nn.Module, last: nn.Module) -> Iterator[RemovableHandle]:
        yield first.register_forward_hook(self._keep_first)
        yield last.register_forward_hook(self._keep_last)

    def _keep_first(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if self.training:
            self._kept["first"] = output.detach()

    def _keep_last(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if self.training:
            self._kept["last"] = output

    def forward(
        self, patch_labels: Tensor | None = None, num_streams: int = 1, *, weighted: bool = True
    ) -> dict[str, Tensor]:
        """``cosine``, ``contrastive`` and ``mixing``, each times its weight, in float32; those of weight 0 left out.

        Args:
            patch_labels: (B, P) int64, as :func:`patch_cutmix` gives them.
            num_streams: how many streams the model's last layer holds, :func:`detr_bf.plugins.num_streams`.
            weighted: False gives the losses without their weights.

        Raises:
            InputError: the model was not called before, it has another number of streams, or labels are missing,
                outside the classes or of other patches.
        """
        first, last = (self._patches(self._take(which)) for which in ("first", "last"))
        if len(last) != len(first) * num_streams:
            raise InputError(
                f"num_streams={num_streams}, but {len(first)} images have left {len(last)} rows: "
                "give what detr_bf.plugins.num_streams(model) says"
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

    def _patches(self, tokens: Tensor) -> Tensor:
        """(R, S, C), or Swin's (R, H, W, C) -> (R, P, C)."""
        return patches_of(tokens.flatten(1, -2), self.prefix_tokens)

    def _checked(self, labels: Tensor | None, images: int, patches: int) -> Tensor:
        given = None if labels is None else tuple(labels.shape)
        if labels is None or given != (images, patches):
            raise InputError(
                f"patch_labels: got {given}, expected ({images}, {patches}), the class of every patch: "
                "mix the images with patch_cutmix and give its patch_labels, or set the weight of mixing to 0"
            )
        check_labels(labels, self.num_classes)
        return labels


def add_diverse_patch(
    model: nn.Module, num_classes: int, *, cosine: float = 1.0, contrastive: float = 1.0, mixing: float = 1.0
) -> DiversePatchLoss:
    """DiversePatch for a timm ViT, DeiT or Swin.

    Call what it returns after the model, and add its losses to the model's.

    Args:
        model: the bare model.
        num_classes: K of the patches' classifier, one linear layer of its own.
        cosine, contrastive, mixing: weights; 0 leaves a loss out. Of Swin ``contrastive`` must be 0.

    Raises:
        InputError: another model, one without a norm behind the last block or with a single patch an image, a Swin
            with the contrastive loss, or it has one already.
    """
    host = _require_host(model)
    if contrastive and isinstance(host, SwinTransformer):
        raise InputError(
            f"contrastive={contrastive:g}: it compares each patch with its own beginning, but each of the last tokens "
            "of a Swin transformer is merged of many first ones, with other channels: set contrastive=0 "
            "(plugins.diverse_patch.contrastive=0)"
        )
    _check_several(_num_patches(host))
    plugin = DiversePatchLoss(host.num_features, num_classes, cosine=cosine, contrastive=contrastive, mixing=mixing)
    plugin.attach(model)
    return plugin


def mixing_patch_size(model: nn.Module) -> tuple[int, int]:
    """Height and width in pixels of the patches that :func:`patch_cutmix` keeps whole for this model's DiversePatch.

    Raises:
        InputError: another model than :func:`add_diverse_patch` takes, or these patches do not fill its images.
    """
    host: Any = _require_host(model)
    stages = host.layers if isinstance(host, SwinTransformer) else ()
    merged = 2 ** sum(not isinstance(stage.downsample, nn.Identity) for stage in stages)  # along a side
    height, width = (merged * side for side in host.patch_embed.patch_size)
    if host.patch_embed.strict_img_size:  # else images may have any
        _check_filled(host.patch_embed.img_size, (height, width))
    return height, width


def _require_host(model: nn.Module) -> VisionTransformer | SwinTransformer:
    if not isinstance(model, VisionTransformer | SwinTransformer):
        raise refused(model, "VisionTransformer (ViT, DeiT) or SwinTransformer")
    host = model if isinstance(model, SwinTransformer) else require_vit(model)
    if isinstance(host.norm, nn.Identity):
        raise InputError(
            "DiversePatch works on the patches behind the final norm, and this model has none there, as timm's have "
            "that pool by the mean: build it with fc_norm=False and its final norm (model.options.fc_norm=false)"
        )
    return host


def _num_patches(host: Any) -> int:
    """Of an image of the size that the model was built for."""
    swin = isinstance(host, SwinTransformer)
    return math.prod(host.layers[-1].output_resolution if swin else host.patch_embed.grid_size)
