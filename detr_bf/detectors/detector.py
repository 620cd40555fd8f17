"""The detector module and its shared options; the parts that several detectors use are in ``parts.py``.

Images -> feature maps -> tokens -> memory -> classes and boxes.

Shape legend: B images, R rows (streams x images), L decoder layers, Q queries, K class logits, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from detr_bf.batchformer import BatchFormerV2, InsertedBatchFormer, QueryBatchFormer
from detr_bf.common.structures import Batch, FeatureMap, Outputs, QueryGroup, Target, TokenBatch
from detr_bf.transformer import without_updating_statistics


@dataclass(frozen=True)
class Options:
    """Options shared by all detectors; defaults are DETR's.

    Args:
        num_logits: K; with cross-entropy the classes and, last, no-object.
        class_prior: initial score of every class, for sigmoid scores.
        batch_former, query_batch_former: batch attention in the encoder, or in the decoder.
        groups: further queries in training, see :func:`detr_bf.detectors.groups.query_groups`.
        masks: with the mask head of the detector, if it has one of its own (RF-DETR).
        activation_checkpointing: recompute the encoder layers in the backward pass: less memory, more time.
    """

    num_logits: int
    hidden_dim: int = 256
    heads: int = 8
    encoder_layers: int = 6
    decoder_layers: int = 6
    feedforward_dim: int = 2048
    dropout: float = 0.1
    pre_norm: bool = False
    activation: str = "relu"
    num_queries: int = 100
    strides: Sequence[int] | None = None  # pixels per cell of the feature maps, if known
    position_encoding: str = "sine"
    position_temperature: float = 10000.0  # lower values separate neighbouring cells better
    input_norm: bool = False  # after the input projections, for features that are not of unit size
    aux_loss: bool = True
    class_prior: float | None = None
    groups: tuple[QueryGroup, ...] = ()
    batch_former: BatchFormerV2 | None = None
    query_batch_former: QueryBatchFormer | None = None
    masks: bool = False
    mask_head: nn.Module | None = None
    activation_checkpointing: bool = False


class Detector(nn.Module):
    """Detector assembled from a backbone, tokens, an encoder and a decoder.

    Args:
        backbone: (images, padding_mask) -> feature maps, of two streams if it has batch attention.
        tokens: (feature maps, padding_mask) -> tokens.
        encoder: tokens -> memory, as :class:`detr_bf.transformer.Encoder`.
        decoder: memory -> outputs, as :class:`detr_bf.transformer.Decoder`.
        mask_head: (outputs, tokens, memory, feature maps, size of the images) -> outputs with a mask for every query,
            as :class:`detr_bf.detectors.mask_head.MaskHead`, or None.
        levels: number of the deepest backbone maps that become tokens; the mask head reads all maps.
    """

    def __init__(
        self,
        backbone: nn.Module,
        *,
        tokens: nn.Module,
        encoder: nn.Module,
        decoder: nn.Module,
        mask_head: nn.Module | None = None,
        levels: int = 1,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.tokens = tokens
        self.encoder = encoder
        self.decoder = decoder
        self.mask_head = mask_head
        self.levels = levels
        self._fixed: tuple[nn.Module, ...] = ()  # stay in evaluation mode

    def forward(self, batch: Batch) -> Outputs:
        """Padded uint8 images (B, 3, H, W) with their mask -> logits (L, R, Q, K) and boxes (L, R, Q, 4).

        Boxes are fractions of the image; those of a detector that is not ``bounded`` may lie outside it.
        References are read if batch attention uses them or the backbone compares each image with its own; an image
        without one is then its own reference in the backbone, and attends to itself in batch attention.
        """
        images, padding_mask = batch.images, batch.padding_mask
        if getattr(self.backbone, "reference", "none") != "none":
            features = self.backbone(images, padding_mask, batch.references_or_images)
        elif batch.references is not None and self.attends_to_references:
            both = torch.cat([images, batch.references_or_images])  # missing ones enter the statistics of norms
            mask = padding_mask.repeat(2, 1, 1)
            return self.detect(self.backbone(both, mask), mask, batch.targets, batch)
        else:
            features = self.backbone(images, padding_mask)
        return self.detect(features, padding_mask, batch.targets)

    @property
    def attends_to_references(self) -> bool:
        """True if batch attention, in the current mode and epoch, uses the references of the images."""
        return any(isinstance(part, BatchFormerV2) and part.reads_references for part in self.encoder.modules())

    @property
    def reads_references(self) -> bool:
        """True if the forward pass, in the current mode and epoch, uses the references of the images in any way."""
        return getattr(self.backbone, "reference", "none") != "none" or self.attends_to_references

    def detect(
        self,
        features: Sequence[FeatureMap],
        padding_mask: Tensor,
        targets: Sequence[Target] = (),
        with_references: Batch | None = None,
    ) -> Outputs:
        """Run all parts after the backbone; mask (B, H, W) and targets of B images, which are read in training only.

        ``with_references`` is the batch if features and mask are those of its B images and, behind them, of their
        references.
        """
        tokens = self._tokens(features[-self.levels :], padding_mask)
        if with_references is not None:
            tokens = tokens.with_references(with_references.has_reference)
        memory = self.encoder(tokens)
        outputs: Outputs = self.decoder(memory, targets if self.decoder.training else ())
        if self.mask_head is None:
            return outputs
        if outputs.num_streams > memory.num_streams:  # the decoder forked
            memory = memory.fork(memory.tokens)
        if with_references is not None:
            count = with_references.images.shape[0]
            tokens = tokens.without_references()
            features = [FeatureMap(each.tensor[:count], each.padding_mask[:count]) for each in features]
        with_masks: Outputs = self.mask_head(outputs, tokens, memory, features, padding_mask.shape[1:])
        return with_masks

    def _tokens(self, features: Sequence[FeatureMap], padding_mask: Tensor) -> TokenBatch:
        """Return the tokens of all streams; a second one changes no statistics of batch norms.

        Maps of two streams come from a backbone with batch attention: ``Backbone.batch_former`` has forked the batch.
        """
        clean, *second = zip(*(feature.streams() for feature in features), strict=True)
        tokens: TokenBatch = self.tokens(clean, padding_mask)
        for stream in second:
            with without_updating_statistics(self.tokens):
                tokens = tokens.fork(self.tokens(stream, padding_mask).tokens)
        return tokens

    def freeze_all_but_masks(self, *, keep_dropout: bool = False) -> None:
        """Freeze all parts but the mask head, their buffers included.

        Args:
            keep_dropout: leave the frozen parts in training mode, as DETR's code does, except for batch norms and
                queries (no groups). Otherwise all stay in evaluation mode, but batch attention still forks the batch.
        """
        parts = (self.backbone, self.tokens, self.encoder, self.decoder)
        for part in parts:
            part.requires_grad_(False)
        norms = (module for part in parts for module in part.modules() if isinstance(module, _BatchNorm))
        self._fixed = (*norms, self.decoder.get_submodule("queries")) if keep_dropout else parts
        self.train(self.training)

    def train(self, mode: bool = True) -> Detector:
        """Set the training mode; frozen parts stay in evaluation mode."""
        super().train(mode)
        if self._fixed:
            for part in self._fixed:
                part.eval()
            for module in self.modules():
                if isinstance(module, InsertedBatchFormer):
                    module.training = mode  # whether it forks the batch; its layers stay in evaluation mode
        return self
