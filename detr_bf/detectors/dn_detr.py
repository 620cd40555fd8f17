"""DN-DETR: Accelerate DETR Training by Introducing Query DeNoising (Li et al. 2022, arXiv 2203.01305).

Shape legend: B images, R rows (streams x images), G denoising groups, T objects of the image with most of them, C
channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from detr_bf.common.boxes import inverse_sigmoid
from detr_bf.common.devices import send
from detr_bf.common.settings import setting
from detr_bf.common.structures import PaddedTargets, Queries, QueryGroup, Target, TokenBatch
from detr_bf.detectors.dab_detr import EPS, AnchorQueries, DabOptions, dab_detr
from detr_bf.detectors.declaration import declare
from detr_bf.detectors.detector import Detector, Options
from detr_bf.transformer import append_queries


@dataclass(frozen=True)
class DnOptions(DabOptions):
    """Options of DN-DETR beside the shared ones, see :class:`DenoisingQueries`."""

    groups: int = setting("denoising.groups", 5)
    label_noise: float = setting("denoising.label_noise", 0.2)
    box_noise: float = setting("denoising.box_noise", 0.4)


@declare(DnOptions, no_object=False)
def dn_detr(backbone: nn.Module, channels: Sequence[int], options: Options, own: DnOptions) -> Detector:
    """Build DN-DETR: DAB-DETR that in training also restores objects from noised labels and boxes."""
    queries = DenoisingQueries(
        options.num_queries, options.hidden_dim, num_labels=options.num_logits, **vars(own), further=options.groups
    )
    return dab_detr.build(backbone, channels, options, own, queries)


class DenoisingQueries(AnchorQueries):
    """Anchor queries, in training followed by groups of noised objects (sections 4.2 to 4.4).

    The content is the embedding of a label, in the last channel 1 for a noised object and 0 for an anchor; anchors have
    a label of their own. Each group holds every object of an image once; images with fewer than T objects are filled
    with queries of content zero, to which the others of the group attend.

    Args:
        num_labels: noised labels are drawn from 0 to ``num_labels`` - 1.
        groups: G.
        label_noise: probability that a label is replaced by a random one, possibly itself.
        box_noise: largest shift of a centre as a multiple of half the width or height, and largest relative change of
            width and height.
        patterns, random_points, further: as of :class:`AnchorQueries`.
    """

    def __init__(
        self,
        num_anchors: int,
        dim: int,
        num_labels: int,
        *,
        groups: int = 5,
        label_noise: float = 0.2,
        box_noise: float = 0.4,
        patterns: int = 0,
        random_points: bool = False,
        further: Sequence[QueryGroup] = (),
    ) -> None:
        super().__init__(num_anchors, dim, patterns=patterns, random_points=random_points, further=further)
        self.labels = nn.Embedding(num_labels + 1, dim - 1)  # the last is that of the anchors
        self.groups = groups
        self.label_noise = label_noise
        self.box_noise = box_noise

    def content_of_anchors(self) -> Tensor:
        label = self.labels.weight[-1].expand(self.anchors.num_embeddings, -1)
        return torch.cat([label, label.new_zeros(len(label), 1)], dim=-1)

    def forward(self, memory: TokenBatch, targets: Sequence[Target] = ()) -> Queries:
        """Memory of R rows, targets of B images, or none -> queries; in training with a group, possibly empty."""
        queries = super().forward(memory)
        if not self.training:
            return queries
        images, device = len(memory.tokens) // memory.num_streams, memory.tokens.device
        objects = PaddedTargets.of(targets or [Target.without_objects(device)] * images)
        exists = objects.exists
        noise = draw_noise((images, self.groups, exists.shape[1]), self.labels.num_embeddings - 1, device)
        labels, boxes = noised(objects.labels[:, None], objects.boxes[:, None], noise, self.label_noise, self.box_noise)
        content = torch.cat([self.labels(labels), boxes.new_ones(*labels.shape, 1)], dim=-1)
        filled = send(~exists, device)[:, None, :, None]
        reference = inverse_sigmoid(boxes, EPS).sigmoid().masked_fill(filled, 0.5)
        assigned = torch.arange(labels.shape[2], device=exists.device).masked_fill(~exists, -2)
        assigned = assigned[:, None].expand(labels.shape).flatten(1)
        streams = memory.num_streams
        group = QueryGroup("dn", assigned.shape[1], assigned.repeat(streams, 1), parts=max(self.groups, 1))
        content = content.masked_fill(filled, 0.0).flatten(1, 2).repeat(streams, 1, 1)
        reference = reference.flatten(1, 2).repeat(streams, 1, 1)
        return append_queries(queries, content, group, reference=reference, sees_main=True)


class Noise(NamedTuple):
    """Random numbers of one training step."""

    choice: Tensor  # (B, G, T) in [0, 1): the label is replaced if it is below the probability
    labels: Tensor  # (B, G, T) int64, replacements
    shift: Tensor  # (B, G, T, 4) in [-1, 1), of the boxes


def draw_noise(shape: tuple[int, int, int], num_labels: int, device: torch.device) -> Noise:
    """Draw uniform noise for ``shape`` B, G, T and labels from 0 to ``num_labels`` - 1."""
    return Noise(
        torch.rand(shape, device=device),
        torch.randint(num_labels, shape, device=device),
        torch.rand(*shape, 4, device=device) * 2 - 1,
    )


def noised(labels: Tensor, boxes: Tensor, noise: Noise, label_noise: float, box_noise: float) -> tuple[Tensor, Tensor]:
    """Return labels (B, G, T) and boxes (B, G, T, 4) of labels (B, 1, T) and boxes (B, 1, T, 4) in cx, cy, w, h.

    Boxes are clamped to [0, 1] in each coordinate. Label noise is applied with probability ``label_noise``; the centre
    moves by at most ``box_noise`` / 2 of width and height, which change by at most the share ``box_noise``.
    """
    labels = torch.where(noise.choice < label_noise, noise.labels, labels)
    size = boxes[..., 2:]
    extent = torch.cat([size / 2, size], dim=-1)
    return labels, (boxes + noise.shift * extent * box_noise).clamp(0, 1)
