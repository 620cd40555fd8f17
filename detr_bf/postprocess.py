"""Outputs -> scored boxes in pixels of the original images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchvision.ops import box_convert

from detr_bf.losses.classification import Classification
from detr_bf.structures import Detections, Outputs, Target


@dataclass(frozen=True)
class Postprocess:
    """Scores and boxes of the last decoder layer.

    With a softmax every query gives its best class (Carion et al. 2020); with sigmoid scores the best of all queries x
    classes are taken (Zhu et al. 2021, arXiv 2010.04159). At most ``max_detections`` of an image, best first.
    """

    classification: Classification
    max_detections: int = 100

    @torch.no_grad()
    def __call__(self, outputs: Outputs, targets: Sequence[Target]) -> list[Detections]:
        """One :class:`Detections` for each target, which gives image id and original size."""
        assert outputs.num_streams == 1, "evaluation has one stream"
        all_scores = self.classification.scores(outputs.logits[-1].float())
        boxes = box_convert(outputs.boxes[-1].float(), "cxcywh", "xyxy")
        return [
            self._detections(scores, image_boxes, target)
            for scores, image_boxes, target in zip(all_scores, boxes, targets, strict=True)
        ]

    def _detections(self, scores: Tensor, boxes: Tensor, target: Target) -> Detections:
        best, query, label = self.classification.candidates(scores, self.max_detections)
        height, width = target.original_size
        scale = boxes.new_tensor([width, height, width, height])
        return Detections(target.image_id, (boxes[query] * scale).cpu(), best.cpu(), label.cpu())
