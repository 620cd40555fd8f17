"""RF-DETR (Robinson et al. 2025, arXiv 2511.09554), which continues LW-DETR (Chen et al. 2024, arXiv 2406.03459).

Shape legend: R rows (streams x images), Q queries of a group, G groups, S tokens of all levels, K class logits,
C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from detr_bf.common.boxes import scaled_boxes
from detr_bf.common.errors import InputError
from detr_bf.common.settings import setting
from detr_bf.common.structures import GROUP, Outputs, Queries, Target, TokenBatch
from detr_bf.detectors.dab_detr import AnchorPosition
from detr_bf.detectors.declaration import declare
from detr_bf.detectors.deformable_detr import DeformableMemoryAttention
from detr_bf.detectors.detector import Detector, Options
from detr_bf.detectors.parts import class_head, decoder_layer, query_attention, zero_init_box_head
from detr_bf.detectors.product_masks import ProductMaskHead
from detr_bf.detectors.projector import ProjectedLevels
from detr_bf.detectors.two_stage import anchor_boxes, check_tokens
from detr_bf.transformer import Decoder, Encoder, Heads, in_groups
from detr_bf.transformer.attention import DeformableAttention
from detr_bf.transformer.blocks import full_precision


@dataclass(frozen=True)
class RfdetrOptions:
    """Options of RF-DETR beside the shared ones; the defaults are those of its sizes Nano to Large.

    Args:
        levels: of the tokens, see :class:`~detr_bf.detectors.projector.ProjectedLevels`.
        layer_norm: layer norms in the projector instead of batch norms.
        cross_heads: heads of the attention to the tokens; those between the queries are ``heads``.
        points: sampling points per head and level.
        refine: each decoder layer refines the boxes of the previous one; false: all refine the first ones.
        scaled_boxes: boxes in units of the boxes that they refine, which may lie outside the image
            (:func:`~detr_bf.common.boxes.scaled_boxes`); false: sums of logits, as of Deformable DETR.
        mask_head: kind of the mask head, ``rfdetr`` (:class:`~detr_bf.detectors.product_masks.ProductMaskHead`) or
            ``detr``, which is that of the shared options.
        mask_stride: pixels per cell of the masks of ``rfdetr``.
    """

    levels: Sequence[str] = setting("rfdetr.levels", ())  # empty: P4
    layer_norm: bool = setting("rfdetr.layer_norm", True)
    cross_heads: int = setting("rfdetr.cross_heads", 16)
    points: int = setting("rfdetr.points", 2)
    refine: bool = setting("rfdetr.refine", False)
    scaled_boxes: bool = setting("rfdetr.scaled_boxes", True)
    mask_head: str = setting("rfdetr.mask_head", "rfdetr")
    mask_stride: int = setting("rfdetr.mask_stride", 4)


@declare(RfdetrOptions, no_object=False, from_tokens=True, grouped=True, encoder_width="hidden_dim", bounded=False)
def rfdetr(backbone: nn.Module, channels: Sequence[int], options: Options, own: RfdetrOptions) -> Detector:
    """Build RF-DETR: a projector without encoder layers, and learned queries at the boxes of the best tokens.

    Raises:
        InputError: encoder layers, maps of several strides, or levels that are not known.
    """
    dim, levels = options.hidden_dim, own.levels or ("P4",)
    if options.encoder_layers:
        raise InputError(f"encoder_layers={options.encoder_layers}: this detector has none; set encoder_layers=0")
    if len(set(options.strides or ())) > 1:
        raise InputError(
            f"strides: this detector has maps of one stride, got {list(options.strides or ())}; give one stride, and "
            "levels=[P3,P4,P5] for tokens of several"
        )
    layers = [
        decoder_layer(
            options,
            query_attention(options),
            DeformableMemoryAttention(
                DeformableAttention(dim, heads=own.cross_heads, levels=len(levels), points=own.points)
            ),
        )
        for _ in range(options.decoder_layers)
    ]
    relative = scaled_boxes if own.scaled_boxes else None
    heads = Heads([class_head(options)], [zero_init_box_head(options)], relative=relative)
    mask_head = options.mask_head
    if options.masks and own.mask_head == "rfdetr":
        mask_head = ProductMaskHead(dim, layers=options.decoder_layers, stride=own.mask_stride)
    return Detector(
        backbone,
        tokens=ProjectedLevels(channels, dim, levels, layer_norm=own.layer_norm),
        encoder=EncoderWithoutLayers([], batch_former=options.batch_former),
        decoder=Decoder(
            layers,
            queries=GroupedQueries(options, heads, with_states=isinstance(mask_head, ProductMaskHead)),
            heads=heads,
            norm=nn.LayerNorm(dim),
            update_queries=AnchorPosition(dim, once=not own.refine),
            refine=own.refine,
            refine_before_norm=own.refine,
            look_forward_twice=own.refine,
            batch_former=options.query_batch_former,
            aux_loss=options.aux_loss,
        ),
        mask_head=mask_head,
        levels=len(channels),
    )


class EncoderWithoutLayers(Encoder):
    """Encoder without layers: the tokens themselves, after batch attention if enabled."""

    def forward(self, batch: TokenBatch) -> TokenBatch:
        former = self.batch_former
        return batch if former is None else former(batch, layer=0, position=former.position)


class TokenHeads(nn.Module):
    """Projection, class head and box head over the tokens, of one group."""

    def __init__(self, dim: int, heads: Heads) -> None:
        super().__init__()
        self.project = nn.Linear(dim, dim)
        nn.init.xavier_uniform_(self.project.weight)
        self.norm = nn.LayerNorm(dim)
        self.class_head, self.box_head = deepcopy(heads.classes[0]), deepcopy(heads.boxes[0])

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens (R, S, C) -> states (R, S, C), class logits (R, S, K) and outputs of the box head (R, S, 4)."""
        states = self.norm(self.project(tokens))
        return states, full_precision(self.class_head, states), full_precision(self.box_head, states)


class GroupedQueries(nn.Module):
    """Learned queries, each at the box of one of the best tokens; every group chooses with heads of its own.

    A token is as good as its best class. The box of a query is the token's, without gradient, with a learned change.
    The proposals are those of the chosen tokens.

    Args:
        heads: of the decoder, whose weights those of the groups begin with.
        with_states: the proposals have states, for their masks.
    """

    def __init__(self, options: Options, heads: Heads, *, with_states: bool = False) -> None:
        super().__init__()
        self.with_states = with_states
        dim, self.num_queries = options.hidden_dim, options.num_queries
        self.groups = options.groups
        parts = 1 + sum(group.parts for group in options.groups)
        if any(group.name != GROUP for group in options.groups):
            raise InputError("groups.one_to_many: this detector has groups of equal size only; use groups.group_detr")
        self.parts = nn.ModuleList(TokenHeads(dim, heads) for _ in range(parts))
        self.content = nn.Embedding(parts * self.num_queries, dim)
        self.change = nn.Embedding(parts * self.num_queries, 4)
        nn.init.zeros_(self.change.weight)
        self.relative = heads.relative

    def forward(self, memory: TokenBatch, targets: Sequence[Target] = ()) -> Queries:
        """Memory (R, S, C) -> queries (R, G Q, C) with reference boxes (R, G Q, 4); evaluation has one group.

        Raises:
            InputError: there are fewer tokens than queries.
        """
        check_tokens(memory, self.num_queries)
        anchors, usable = anchor_boxes(memory)
        # Tokens that are not usable have no extent, or cover the image if boxes are logits.
        anchors = anchors.masked_fill(~usable, 0.0 if self.relative is scaled_boxes else 1.0)
        tokens = memory.tokens.masked_fill(~usable, 0.0)
        groups = self.groups if self.training else ()
        chosen = [self._chosen(part, tokens, anchors) for part in (self.parts if groups else self.parts[:1])]
        logits, boxes, *states = (torch.cat(each, dim=1) for each in zip(*chosen, strict=True))
        count = boxes.shape[1]
        reference = self.relative(self.change.weight[:count].expand_as(boxes), boxes.detach())
        content = self.content.weight[:count].expand(boxes.shape[0], -1, -1).to(memory.tokens.dtype)
        queries = Queries(content, torch.zeros_like(content), reference)
        main, others = (
            Outputs(
                logits[None, :, part],
                boxes[None, :, part],
                memory.num_streams,
                states=tuple(x[:, part] for x in states),
            )
            for part in (slice(self.num_queries), slice(self.num_queries, None))
        )
        proposals = replace(main, groups=tuple((group, others) for group in groups))
        return in_groups(replace(queries, proposals=proposals), groups)

    def _chosen(self, heads: nn.Module, tokens: Tensor, anchors: Tensor) -> tuple[Tensor, ...]:
        """Return class logits (R, Q, K) and boxes (R, Q, 4) of the best tokens, and states (R, Q, C) if needed."""
        states, logits, changes = heads(tokens)
        best = logits.max(-1).values.topk(self.num_queries, dim=1).indices[..., None]
        parts = (logits, changes, anchors, *((states,) if self.with_states else ()))
        logits, changes, anchors, *kept = (x.gather(1, best.expand(-1, -1, x.shape[-1])) for x in parts)
        return logits, self.relative(changes, anchors), *kept
