"""DINO: DETR with Improved DeNoising Anchor Boxes (Zhang et al. 2022, arXiv 2203.03605).

Shape legend: B images, R rows (streams x images), Q queries, S denoising queries, K class logits, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from detr_bf.common.boxes import inverse_sigmoid
from detr_bf.common.errors import InputError
from detr_bf.common.settings import setting
from detr_bf.common.structures import Outputs, Queries, QueryGroup, Target, TokenBatch
from detr_bf.detectors.dab_detr import EPS, AnchorPosition
from detr_bf.detectors.declaration import declare
from detr_bf.detectors.deformable_detr import LevelOptions, deformable_decoder_layers, deformable_encoder, level_tokens
from detr_bf.detectors.denoising import (
    EMPTY,
    ContrastiveDenoising,
    DenoisingSlots,
    NoiseDraws,
    add_contrastive_noise,
    contrastive_slots,
    group_count,
)
from detr_bf.detectors.detector import Detector, Options
from detr_bf.detectors.parts import class_head, zero_init_box_head
from detr_bf.detectors.two_stage import TokenProposals
from detr_bf.transformer import Decoder, Heads, append_queries
from detr_bf.transformer.blocks import full_precision

DENOISING = ContrastiveDenoising()


@dataclass(frozen=True)
class DinoOptions(LevelOptions):
    """Options of DINO beside the shared ones.

    Args:
        mixed_selection, denoising: as of :class:`ContrastiveQueries`.
        layer_class_heads, layer_box_heads: give every decoder layer its own head instead of one for all.
        token_class_head, token_box_head: give the tokens their own head instead of that of the decoder's first layer.
        label_book: number of labels with an embedding (``dn_labelbook_size`` in the authors' code); None: all.
    """

    mixed_selection: bool = setting("dino.mixed_selection", True)
    layer_class_heads: bool = setting("dino.layer_class_heads", False)
    layer_box_heads: bool = setting("dino.layer_box_heads", False)
    token_class_head: bool = setting("dino.token_class_head", True)
    token_box_head: bool = setting("dino.token_box_head", True)
    denoising: ContrastiveDenoising = DENOISING
    label_book: int | None = None


@declare(DinoOptions, no_object=False, from_tokens=True)
def dino(backbone: nn.Module, channels: Sequence[int], options: Options, own: DinoOptions) -> Detector:
    """Build DINO: Deformable DETR with anchors from the encoder, look forward twice and contrastive denoising.

    Raises:
        InputError: ``label_book`` is less than the number of classes.
    """
    levels, dim = len(channels) + own.extra_levels, options.hidden_dim
    layers = deformable_decoder_layers(options, levels, own.decoder_points)
    classes = [class_head(options) for _ in range(len(layers) if own.layer_class_heads else 1)]
    boxes = [zero_init_box_head(options) for _ in range(len(layers) if own.layer_box_heads else 1)]
    return Detector(
        backbone,
        decoder=Decoder(
            layers,
            queries=ContrastiveQueries(
                options.num_queries,
                dim,
                options.num_logits,
                labels=_label_embedding(options, own.label_book),
                class_head=class_head(options) if own.token_class_head else classes[0],
                box_head=zero_init_box_head(options) if own.token_box_head else boxes[0],
                mixed_selection=own.mixed_selection,
                denoising=own.denoising,
            ),
            heads=Heads(classes, boxes, eps=EPS),
            norm=nn.LayerNorm(dim),
            update_queries=AnchorPosition(dim),
            refine=True,
            refine_before_norm=True,
            look_forward_twice=True,
            batch_former=options.query_batch_former,
            aux_loss=options.aux_loss,
        ),
        tokens=level_tokens(channels, levels, options, offset=0.0),
        encoder=deformable_encoder(options, levels, own.encoder_points),
        mask_head=options.mask_head,
        levels=len(channels),
    )


def _label_embedding(options: Options, count: int | None) -> nn.Embedding:
    """Build the embedding of ``count`` labels, by default all classes, and of a last one that is never used."""
    if count is not None and count < options.num_logits:
        raise InputError(f"label_book={count} must be at least the number of classes, {options.num_logits}")
    return nn.Embedding((count or options.num_logits) + 1, options.hidden_dim)


class ContrastiveQueries(TokenProposals):
    """Queries around the boxes of the best tokens, in training followed by groups of noised objects.

    A token is as good as its best class (sections 3.3 and 3.4). The proposals are those of the chosen tokens alone.

    Args:
        num_labels: number of labels that noise may replace a label with.
        labels: content of a noised object by its label.
        mixed_selection: learn the contents of the queries; otherwise they are those of the tokens, without gradient.
        dummy: give each image of a batch without objects one box without label (RT-DETRv2).
    """

    def __init__(
        self,
        num_queries: int,
        dim: int,
        num_labels: int,
        *,
        labels: nn.Embedding,
        class_head: nn.Module,
        box_head: nn.Module,
        mixed_selection: bool = True,
        denoising: ContrastiveDenoising = DENOISING,
        dummy: bool = False,
    ) -> None:
        super().__init__(dim, class_head=class_head, box_head=box_head)
        nn.init.xavier_uniform_(self.project.weight)
        self.num_queries = num_queries
        self.content = nn.Embedding(num_queries, dim) if mixed_selection else None
        if self.content is not None:
            nn.init.xavier_uniform_(self.content.weight)
        self.num_labels = num_labels
        self.labels = labels
        self.labels.requires_grad_(bool(denoising.queries))  # DistributedDataParallel waits for the gradients
        self.denoising = denoising
        self.dummy = dummy

    def forward(self, memory: TokenBatch, targets: Sequence[Target] = ()) -> Queries:
        """Memory of R rows, targets of B images, or none -> queries; in training with a group, possibly empty."""
        tokens, logits, anchors = self.propose(memory, self.num_queries)
        best = self.best(logits)[..., None]
        tokens, logits, anchors = (
            part.gather(1, best.expand(-1, -1, part.shape[-1])) for part in (tokens, logits, anchors)
        )
        box_logits = full_precision(self.box_head, tokens) + anchors
        content = tokens.detach() if self.content is None else self.content.weight.expand_as(tokens)
        queries = Queries(
            content,
            torch.zeros_like(content),
            box_logits.detach().sigmoid(),
            proposals=Outputs(logits[None], box_logits.sigmoid()[None], memory.num_streams),
        )
        if not self.training or not self.denoising.queries:
            return queries
        return self._with_noised_objects(queries, memory, targets)

    def best(self, logits: Tensor) -> Tensor:
        """Class logits (R, S, K) -> tokens (R, Q) that become queries."""
        return logits.max(-1).values.topk(self.num_queries, dim=1).indices

    def _with_noised_objects(self, queries: Queries, memory: TokenBatch, targets: Sequence[Target]) -> Queries:
        """Append the denoising group, with the same noise in both streams."""
        streams, settings = memory.num_streams, self.denoising
        targets = targets or [Target.without_objects(memory.tokens.device)] * (len(memory.tokens) // streams)
        groups = settings.groups or group_count(settings.queries, targets)
        slots = contrastive_slots(targets, groups, dummy=self.dummy)
        count = slots.labels.shape[1]
        draws = NoiseDraws.draw((len(targets), count), self.num_labels, slots.labels.device)
        slots = add_contrastive_noise(slots, draws, label_noise=settings.label_noise, box_noise=settings.box_noise)
        content, boxes = (x.repeat(streams, 1, 1) for x in self._noised_objects(slots))
        group = QueryGroup("dn", count, slots.objects.repeat(streams, 1), parts=slots.groups)
        return append_queries(queries, content, group, reference=boxes, sees_main=True)

    def _noised_objects(self, slots: DenoisingSlots) -> tuple[Tensor, Tensor]:
        """Return contents (B, S, C) and reference boxes (B, S, 4) of all slots."""
        empty = (slots.labels == EMPTY)[..., None]
        content = self.labels(slots.labels.clamp(min=0)).masked_fill(empty, 0.0)
        return content, inverse_sigmoid(slots.boxes, EPS).sigmoid().masked_fill(empty, 0.5)
