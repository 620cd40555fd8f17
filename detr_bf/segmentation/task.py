"""Task of semantic segmentation."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from detr_bf.common import distributed
from detr_bf.common.devices import device_of
from detr_bf.common.errors import InputError, prefix_errors
from detr_bf.common.structures import ClassMap
from detr_bf.common.weights import read_state
from detr_bf.config import config_from_dict
from detr_bf.data.batches import SampleKey
from detr_bf.data.checks.annotations import Report
from detr_bf.engine import (
    Checkpoint,
    Evaluation,
    RunFolder,
    build_and_load,
    checkpoint_of,
    is_checkpoint,
    load_checkpoint,
    load_fitting,
    load_strict,
)
from detr_bf.engine.step import Criterion
from detr_bf.interop.conversion import save_weights
from detr_bf.report import class_labels, panoptic_sheet, save_picture, tolerating
from detr_bf.report.panoptic import PanopticSheetRow
from detr_bf.segmentation.assembly import (
    SegmentationData,
    build_segmentation_data,
    build_segmenter,
    read_segmentation_splits,
    segmentation_batches,
    segmentation_loop,
    segmentation_optimizer,
)
from detr_bf.segmentation.batch import SegmentationBatch
from detr_bf.segmentation.checks import examine_maps
from detr_bf.segmentation.config import SegmentationConfig
from detr_bf.segmentation.criterion import SegmentationCriterion, SegmentationEvaluator
from detr_bf.segmentation.network import Segmenter
from detr_bf.segmentation.page import SEGMENTATION_PAGE, as_segments
from detr_bf.tasks.task import Evaluate, MakeBatches, Task

logger = logging.getLogger(__name__)

AUXILIARY = "auxiliary."  # of the names of the second head's weights


class SegmentationTask(Task[SegmentationConfig]):
    """UPerNet's head on a backbone."""

    kind = "a segmentation network"
    page = SEGMENTATION_PAGE
    deploy_option = "--strip-auxiliary"
    batch_type = SegmentationBatch
    _data: SegmentationData | None = None

    def examine(self) -> Report:
        return examine_maps(read_segmentation_splits(self.config), workers=max(1, self.config.data.workers))

    def load_data(self) -> SegmentationData:
        """Return both splits, whose files are listed once."""
        if self._data is None:
            self._data = build_segmentation_data(self.config)
        return self._data

    def fingerprints(self, data: SegmentationData | None = None) -> dict[str, dict[str, Any]]:
        found = data or self.load_data()
        return {
            name: split.files.fingerprint(found.class_map, quick=data is not None)
            for name, split in (("train", found.train), ("val", found.val))
        }

    def adopt_settings(self, checkpoint: Checkpoint) -> None:
        """Take over the depth of 16-bit grey images that the run chose."""
        if self.config.data.grey_bits is None:
            self.config.data.grey_bits = config_from_dict(checkpoint.config).data.grey_bits

    def build_model(self, num_classes: int, *, pretrained: bool = False) -> Segmenter:
        return build_segmenter(self.config, num_classes, pretrained=pretrained)

    def initialize(self, model: nn.Module, classes: ClassMap) -> None:
        """Load ``init_from`` if it is set."""
        if self.config.init_from:
            weights = self.fit_classes(model, read_state(checkpoint_of(self.config.init_from)), classes)
            logger.info(load_fitting(model, weights, self.config.init_from))

    def check_model(self, model: nn.Module, data: SegmentationData) -> None:
        weights, count = self.config.loss.class_weights, data.class_map.num_classes
        if weights and len(weights) != count:
            raise InputError(f"loss.class_weights has {len(weights)} numbers for {count} classes: give one for each")
        rows = min(self.config.train.batch_size, len(data.train) // distributed.world_size())
        if rows < 2 and 1 in self.config.model.bins:
            raise InputError(
                "train.batch_size=1: the batch norm of the head's map of one cell, model.bins, needs two images or "
                "more of one process: set train.batch_size=2, or remove 1 from model.bins"
            )

    def build_criterion(self, model: nn.Module, class_counts: Sequence[int] | None = None) -> Criterion:
        return SegmentationCriterion(self.config.model.auxiliary_weight, self.config.loss.class_weights)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return segmentation_optimizer(self.config, model)

    def train_batches(self, data: SegmentationData, device: torch.device) -> tuple[MakeBatches, int, int]:
        return *segmentation_batches(self.config, data, device), len(data.train)

    def build_evaluation(
        self, class_map: ClassMap, folder: RunFolder, data: SegmentationData | None = None
    ) -> Evaluate:
        loop = segmentation_loop(self.config, (data or self.load_data()).val, device_of(self.config.device))
        return Evaluation(loop, partial(SegmentationEvaluator, class_map))

    def load_evaluated(self, source: Path, checkpoint: Checkpoint | None = None) -> tuple[nn.Module, ClassMap]:
        stored = load_checkpoint(source) if is_checkpoint(source) else None
        if stored is not None:
            self.adopt_settings(stored)  # before the images are read
        classes = self.load_data().class_map
        if stored is not None and stored.classes.names != classes.names:
            with prefix_errors(str(source)):
                raise InputError(
                    f"it was trained on the classes {', '.join(stored.classes.names)}, the data has "
                    f"{', '.join(classes.names)}: evaluate on the classes of the training"
                )
        model = self.build_model(classes.num_classes)
        load_strict(model, read_state(source), str(source))
        return model, classes

    @torch.no_grad()
    def write_outputs(self, folder: RunFolder, evaluate: Evaluation[SegmentationEvaluator], model: nn.Module) -> None:
        """Write the validation sheet: images evenly spread over the split."""
        data, count = self.load_data(), self.config.eval.pictures
        if not count:
            return
        files, rows = data.val.files, []
        model.eval()
        with tolerating(str(folder.sheet)):
            folder.sheet.unlink(missing_ok=True)
            for index in sorted({round(n * (len(files) - 1) / max(count - 1, 1)) for n in range(count)}):
                batch = SegmentationBatch.collate([data.val[SampleKey(0, index)]])
                labels, [target] = batch.targets[0], batch.inputs.targets
                outputs = model(batch.inputs.to(device_of(self.config.device)))
                found = outputs.labels(0, target.size, target.original_size).cpu()
                image, _ = files.read(index)
                rows.append(
                    PanopticSheetRow(image, as_segments(labels, index), as_segments(found, index), target.file_name)
                )
            save_picture(folder.sheet, panoptic_sheet(rows, class_labels(data.class_map)))

    def deploy(self, checkpoint: Checkpoint, source: Path, target: Path) -> str:
        """Write the averaged weights, or else the last, without the second head, which evaluation does not use."""
        build_and_load(lambda: self.build_model(checkpoint.classes.num_classes), checkpoint.weights, source)
        kept = {name: value for name, value in checkpoint.weights.items() if not name.startswith(AUXILIARY)}
        save_weights(target, kept)
        removed = len(checkpoint.weights) - len(kept)
        return f"{removed} tensors of the second head left out, which evaluation does not use; {len(kept)} in {target}"
