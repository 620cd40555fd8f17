"""Convert outputs to scored boxes, masks and panoptic maps in pixels of the original images.

Shape legend: Q queries, N detections, K class logits, h x w cells of a mask, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pycocotools import mask as coco_mask
from torch import Tensor
from torchvision.ops import batched_nms, box_convert, nms

from detr_bf.common.structures import Detections, Outputs, PanopticMap, Segment, Target
from detr_bf.losses.classification import Classification


@dataclass(frozen=True)
class Postprocess:
    """Scores and boxes of the last decoder layer, and masks if the detector has a mask head.

    With a softmax every query gives its best class (Carion et al. 2020); with sigmoid scores the best pairs of query
    and class are taken (Zhu et al. 2021, arXiv 2010.04159). At most ``max_detections`` per image, best first. A pixel
    belongs to a mask if its probability exceeds ``mask_threshold``. With ``nms``, detections are left out whose IoU
    with a better one of the same class, or with ``nms_across_classes`` of any class, is above it (non-maximum
    suppression). ``clamp`` cuts the boxes at the borders of the image (RF-DETR).
    """

    classification: Classification
    max_detections: int = 100
    mask_threshold: float = 0.5
    nms: float | None = None
    nms_across_classes: bool = False
    clamp: bool = False

    @torch.no_grad()
    def __call__(self, outputs: Outputs, targets: Sequence[Target]) -> list[Detections]:
        """Return one :class:`Detections` for each target, which gives image id and sizes."""
        assert outputs.num_streams == 1, "evaluation has one stream"
        all_scores = self.classification.scores(outputs.logits[-1].float())
        boxes = self.corners(outputs.boxes[-1])
        return [self._detections(all_scores[i], boxes[i], outputs, i, targets) for i in range(len(targets))]

    def corners(self, boxes: Tensor) -> Tensor:
        """Boxes (..., 4) cx, cy, w, h -> x0, y0, x1, y1, float32."""
        corners = box_convert(boxes.float(), "cxcywh", "xyxy")
        return corners.clamp(0, 1) if self.clamp else corners

    def _detections(
        self, scores: Tensor, boxes: Tensor, outputs: Outputs, image: int, targets: Sequence[Target]
    ) -> Detections:
        best, query, label = self.classification.candidates(scores, self.max_detections)
        kept = self.kept(boxes[query], best, label)
        best, query, label = best[kept], query[kept], label[kept]
        masks = None
        if outputs.masks is not None:
            distinct, index = query.unique(return_inverse=True)  # a query may be detected with several classes
            logits = outputs.masks.of(torch.full_like(distinct, image), distinct)
            coded = self.coded_masks(logits, targets[image], targets)
            masks = tuple(coded[i] for i in index.tolist())
        return self.detections(boxes[query], best, label, masks, targets[image])

    def kept(self, boxes: Tensor, scores: Tensor, labels: Tensor) -> Tensor:
        """Return the indices of the detections of an image that stay, best first; boxes (N, 4) x0, y0, x1, y1."""
        if self.nms is None:
            return torch.arange(len(scores), device=scores.device)
        if self.nms_across_classes:
            return nms(boxes, scores, self.nms)
        return batched_nms(boxes, scores, labels, self.nms)

    def detections(
        self,
        boxes: Tensor,
        scores: Tensor,
        labels: Tensor,
        masks: tuple[dict[str, Any], ...] | None,
        target: Target,
    ) -> Detections:
        """Return detections of an image with boxes (N, 4) x0, y0, x1, y1 in fractions of it."""
        height, width = target.original_size
        scale = boxes.new_tensor([width, height, width, height])
        return Detections(target.image_id, (boxes * scale).cpu(), scores.cpu(), labels.cpu(), masks)

    def coded_masks(
        self, logits: Iterable[Tensor], target: Target, targets: Sequence[Target]
    ) -> tuple[dict[str, Any], ...]:
        """Return run lengths of the masks of an image from logits (h, w) over the padded batch of ``targets``.

        Only one mask at a time has the size of the original image, which may be 25 MB.
        """

        def coded(logit: Tensor) -> dict[str, Any]:
            inside = (unpadded_masks(logit[None].float(), target, targets).sigmoid() > self.mask_threshold).byte()
            return encoded(F.interpolate(inside[:, None], target.original_size)[0, 0])

        return tuple(coded(each) for each in logits)


@dataclass(frozen=True)
class PanopticPostprocess:
    """Panoptic maps: each pixel goes to the query with the highest mask logit, among queries that predict an object.

    Carion et al. 2020, arXiv 2005.12872, section 4.4.

    Args:
        is_thing: for each class, by contiguous index.
        threshold: lowest score of a query that is used.
        min_area: segments with at most this many pixels of the original image are removed; their pixels go to the
            remaining queries.
        merge_stuff: merge the queries of one stuff class into one segment. False keeps only the first query of each
            stuff class, which is the effect of DETR's code: it merges them and then removes the merged ones as empty.
    """

    classification: Classification
    is_thing: tuple[bool, ...]
    threshold: float = 0.85
    min_area: int = 4
    merge_stuff: bool = True

    @torch.no_grad()
    def __call__(self, outputs: Outputs, targets: Sequence[Target]) -> list[PanopticMap]:
        """Return one :class:`PanopticMap` for each target, which gives image id and sizes."""
        assert outputs.num_streams == 1, "evaluation has one stream"
        assert outputs.masks is not None, "panoptic maps need a mask head"
        logits = outputs.logits[-1].float()
        labels = self.classification.scores(logits).argmax(-1)
        chosen = self.classification.is_object(logits, self.threshold)
        maps = []
        for image, target in enumerate(targets):
            query = chosen[image].nonzero()[:, 0]
            masks = outputs.masks.of(torch.full_like(query, image), query)
            maps.append(self._map(unpadded_masks(masks.float(), target, targets), labels[image, query], target))
        return maps

    def _map(self, masks: Tensor, labels: Tensor, target: Target) -> PanopticMap:
        """Return the map of one image from masks (Q, H, W) and their classes (Q,)."""
        classes = labels.tolist()  # a stuff pixel belongs to the first query of its class, any other to its own query
        owners = [query if self.is_thing[label] else classes.index(label) for query, label in enumerate(classes)]
        owner = torch.tensor(owners, dtype=torch.int64, device=labels.device)
        left = torch.arange(len(labels), device=labels.device)
        while len(left):
            strongest = left[masks[left].argmax(0)]
            resized = F.interpolate(owner[strongest][None, None].double(), target.original_size, mode="nearest-exact")
            ids = resized[0, 0].long()
            area = torch.bincount(ids.flatten(), minlength=len(labels))
            large = area[owner[left]] > self.min_area
            stays = large if self.merge_stuff else large & (owner[left] == left)
            if stays.all():
                return _as_map(ids, labels, area, target)
            left = left[stays]
        return PanopticMap(target.image_id, torch.zeros(target.original_size, dtype=torch.int32), ())


def _as_map(queries: Tensor, labels: Tensor, area: Tensor, target: Target) -> PanopticMap:
    """Number the queries (H, W) from 1 in their order."""
    present = area.nonzero()[:, 0]
    number = torch.zeros_like(area)
    number[present] = torch.arange(1, len(present) + 1, device=area.device)
    segments = tuple(
        Segment(segment, int(labels[query]), int(area[query]))
        for segment, query in enumerate(present.tolist(), start=1)
    )
    return PanopticMap(target.image_id, number[queries].to("cpu", torch.int32), segments)


def unpadded_masks(logits: Tensor, target: Target, targets: Sequence[Target]) -> Tensor:
    """Resize logits (N, h, w) over the padded batch to (N, H, W) over ``target``, at its size in the batch."""
    padded = tuple(max(other.size[side] for other in targets) for side in (0, 1))
    height, width = target.size
    return F.interpolate(logits[:, None], size=padded, mode="bilinear")[:, 0, :height, :width]


def encoded(mask: Tensor) -> dict[str, Any]:
    """Encode a mask (H, W) of 0 and 1 as COCO's compressed RLE, ready for JSON."""
    coded = coco_mask.encode(np.asfortranarray(mask.to("cpu", torch.uint8).numpy()))
    return {"size": coded["size"], "counts": coded["counts"].decode()}
