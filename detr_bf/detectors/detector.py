"""The detector module, its shared options, and the parts that several detectors use.

Images -> feature maps -> tokens -> memory -> classes and boxes.

Shape legend: B images, R rows (streams x images), L decoder layers, Q queries, K class logits, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from detr_bf.batchformer import BatchFormerV2
from detr_bf.common.errors import InputError
from detr_bf.common.structures import Batch, FeatureMap, Outputs, QueryGroup, Target
from detr_bf.detectors.mask_head import MaskHead
from detr_bf.transformer import (
    Decoder,
    DecoderLayer,
    Encoder,
    EncoderLayer,
    FeatureTokens,
    Heads,
    QueryAttention,
    TokenAttention,
)
from detr_bf.transformer.blocks import MLP
from detr_bf.transformer.position import LearnedPosition, SinePosition

NORM_GROUPS = 32  # of Deformable DETR (Zhu et al. 2021, arXiv 2010.04159)


@dataclass(frozen=True)
class Options:
    """Options shared by all detectors; defaults are DETR's.

    Args:
        num_logits: K; with cross-entropy the classes and, last, no-object.
        class_prior: initial score of every class, for sigmoid scores.
        groups: further queries in training, see :func:`detr_bf.detectors.groups.query_groups`.
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
    mask_head: MaskHead | None = None
    activation_checkpointing: bool = False


class Detector(nn.Module):
    """Detector assembled from a backbone, tokens, an encoder and a decoder.

    Args:
        backbone: (images, padding_mask) -> feature maps.
        tokens: (feature maps, padding_mask) -> tokens.
        encoder: tokens -> memory, as :class:`detr_bf.transformer.Encoder`.
        decoder: memory -> outputs, as :class:`detr_bf.transformer.Decoder`.
        mask_head: computes a mask for every query, or None.
        levels: number of the deepest backbone maps that become tokens; the mask head reads all maps.
    """

    def __init__(
        self,
        backbone: nn.Module,
        *,
        tokens: nn.Module,
        encoder: nn.Module,
        decoder: nn.Module,
        mask_head: MaskHead | None = None,
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
        """Padded uint8 images (B, 3, H, W) with their mask -> logits (L, R, Q, K) and boxes (L, R, Q, 4) in [0, 1]."""
        return self.detect(self.backbone(batch.images, batch.padding_mask), batch.padding_mask, batch.targets)

    def detect(self, features: Sequence[FeatureMap], padding_mask: Tensor, targets: Sequence[Target] = ()) -> Outputs:
        """Run all parts after the backbone; mask (B, H, W) and targets of B images, which are read in training only."""
        tokens = self.tokens(features[-self.levels :], padding_mask)
        memory = self.encoder(tokens)
        outputs: Outputs = self.decoder(memory, targets if self.decoder.training else ())
        if self.mask_head is None:
            return outputs
        assert outputs.states is not None, "a decoder returns its states"
        return replace(outputs, masks=self.mask_head(outputs.states, outputs.boxes[-1], tokens, memory, features))

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
            for module in self.encoder.modules():
                if isinstance(module, BatchFormerV2):
                    module.training = mode  # whether it forks the batch; its layers stay in evaluation mode
        return self


def single_level_detector(
    backbone: nn.Module,
    channels: Sequence[int],
    options: Options,
    decoder: Decoder,
    position_scale: nn.Module | None = None,
) -> Detector:
    """Build a detector with DETR's encoder over the tokens of one feature map; ``position_scale`` is the encoder's.

    Raises:
        InputError: the backbone has several feature maps.
    """
    if len(channels) != 1:
        raise InputError(
            f"strides: this detector uses one feature map, got {len(channels)}; give one stride, or use deformable_detr"
        )
    tokens = FeatureTokens([projection(channels[0], options, norm=options.input_norm)], position(options))
    layers = [
        encoder_layer(options, TokenAttention(options.hidden_dim, heads=options.heads, dropout=options.dropout))
        for _ in range(options.encoder_layers)
    ]
    loop = encoder(options, layers, position_scale)
    return Detector(backbone, tokens=tokens, encoder=loop, decoder=decoder, mask_head=options.mask_head)


def encoder_layer(options: Options, attention: nn.Module) -> EncoderLayer:
    """Build an encoder layer around ``attention``."""
    return EncoderLayer(
        attention,
        dim=options.hidden_dim,
        feedforward_dim=options.feedforward_dim,
        dropout=options.dropout,
        pre_norm=options.pre_norm,
        activation=options.activation,
    )


def decoder_layer(options: Options, self_attention: nn.Module, cross_attention: nn.Module) -> DecoderLayer:
    """Build a decoder layer around its two attentions."""
    return DecoderLayer(
        self_attention,
        cross_attention,
        dim=options.hidden_dim,
        feedforward_dim=options.feedforward_dim,
        dropout=options.dropout,
        pre_norm=options.pre_norm,
        activation=options.activation,
    )


def encoder(options: Options, layers: Sequence[nn.Module], position_scale: nn.Module | None = None) -> Encoder:
    """Build the encoder loop over ``layers``, with batch attention if enabled and a last norm for pre-norm layers."""
    return Encoder(
        layers,
        norm=nn.LayerNorm(options.hidden_dim) if options.pre_norm else None,
        batch_former=options.batch_former,
        activation_checkpointing=options.activation_checkpointing,
        position_scale=position_scale,
    )


def projection(in_channels: int, options: Options, *, norm: bool, kernel: int = 1, stride: int = 1) -> nn.Module:
    """Build a convolution to ``hidden_dim`` channels, followed by a group norm if ``norm``."""
    convolution = nn.Conv2d(in_channels, options.hidden_dim, kernel, stride, padding=kernel // 2)
    if norm and options.hidden_dim % NORM_GROUPS:
        raise InputError(f"hidden_dim must be divisible by {NORM_GROUPS}, got {options.hidden_dim} (group norm)")
    return nn.Sequential(convolution, nn.GroupNorm(NORM_GROUPS, options.hidden_dim)) if norm else convolution


def position(options: Options, *, offset: float = 0.0) -> nn.Module:
    """Build the position encoding of a feature map by name."""
    if options.position_encoding == "sine":
        return SinePosition(options.hidden_dim, temperature=options.position_temperature, offset=offset)
    if options.position_encoding == "learned":
        return LearnedPosition(options.hidden_dim)
    raise InputError(f"position_encoding must be sine or learned; got '{options.position_encoding}'")


def query_attention(options: Options) -> QueryAttention:
    """Build DETR's attention between the queries."""
    return QueryAttention(options.hidden_dim, heads=options.heads, dropout=options.dropout)


def shared_heads(options: Options, box: nn.Module | None = None, *, eps: float = 1e-5) -> Heads:
    """Build one class head and one box head for all decoder layers."""
    return Heads([class_head(options)], [box or box_head(options)], eps=eps)


def class_head(options: Options) -> nn.Linear:
    """Build the class head; its bias is initialised to ``class_prior`` if given (Lin et al. 2017, arXiv 1708.02002)."""
    head = nn.Linear(options.hidden_dim, options.num_logits)
    if options.class_prior is not None:
        nn.init.constant_(head.bias, math.log(options.class_prior / (1 - options.class_prior)))
    return head


def box_head(options: Options) -> MLP:
    """Build the box head, a three-layer perceptron."""
    return MLP([options.hidden_dim] * 3 + [4])


def zero_init_box_head(options: Options, *, size_logit: float = 0.0) -> MLP:
    """Build a box head that initially returns the reference itself; ``size_logit`` is added to width and height."""
    head = box_head(options)
    *_, weight, bias = head.parameters()
    nn.init.zeros_(weight)
    bias.data.copy_(torch.tensor([0.0, 0.0, size_logit, size_logit]))
    return head
