"""A detector of an exported file ready for images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from detr_bf.assembly.data import build_eval_transform
from detr_bf.assembly.model import build_panoptic_postprocess, build_postprocess
from detr_bf.common.errors import InputError
from detr_bf.common.structures import Batch, ClassMap, Detections, Outputs
from detr_bf.common.text import printable
from detr_bf.config import config_from_dict
from detr_bf.evaluation import ScoreThresholds
from detr_bf.export import file_detector, fixed_transform
from detr_bf.inference.predictor import Predictor


class ExportedPredictor(Predictor):
    """Predictor of an exported file, on the device and in the precision of the export."""

    def _on(self, device: str | torch.device | None) -> Predictor:
        runtime: Any = self.model
        if str(device or "auto") not in ("auto", runtime.device.type):
            where = "the CPU" if runtime.device.type == "cpu" else "the GPU"
            raise InputError(f"device={printable(str(device))}: {runtime.kind} like this one are computed on {where}")
        return self

    def _outputs(self, batch: Batch, half: bool) -> Outputs:
        _refuse_half(half, self.model)
        outputs: Outputs = self.model(batch)
        return outputs

    def _detect(self, batch: Batch, half: bool = False) -> list[Detections]:
        runtime: Any = self.model
        if not runtime.form.postprocess:
            return super()._detect(batch, half)
        _refuse_half(half, runtime)
        found, targets, detected = runtime.run(batch), batch.targets, []
        masks = runtime.masks_over(batch, found["masks"]) if "masks" in found else None
        for image, target in enumerate(targets):
            row, queries = torch.tensor([image]), torch.arange(found["scores"].shape[1])
            coded = None
            if masks is not None:
                coded = self.postprocess.coded_masks((masks.of(row, q)[0] for q in queries.split(1)), target, targets)
            boxes, scores, labels = (found[name][image] for name in ("boxes", "scores", "labels"))
            detected.append(self.postprocess.detections(boxes, scores, labels, coded, target))
        return detected


def _refuse_half(half: bool, runtime: Any) -> None:
    if half:
        precision = printable(str(runtime.metadata.get("precision", "float32")))
        raise InputError(f"{runtime.kind} are computed in the precision of the export, {precision}: leave half out")


def load_exported(path: Path, device: str = "auto") -> ExportedPredictor:
    """Return the detector of a file that ``detr-bf export`` wrote; the code in a package runs.

    Raises:
        InputError: onnxruntime or openvino is not installed, the file is damaged, of another program or compiled for
            another machine, or another device than that of the file is asked for.
    """
    runtime: Any = file_detector(path)
    values = runtime.metadata
    try:
        config = config_from_dict(values["config"], source=f"the config in {printable(path)}")
        classes = ClassMap(tuple(values["category_ids"]), tuple(values["classes"]), tuple(values["is_thing"]))
        thresholds = ScoreThresholds(float(values["threshold"]), tuple(map(float, values["thresholds"])))
        if not len(thresholds.by_class) == classes.num_classes:
            raise ValueError(f"{len(thresholds.by_class)} thresholds for {classes.num_classes} classes")
        transform = fixed_transform(build_eval_transform(config), runtime.form, config.data.transforms.square)
        predictor = ExportedPredictor(
            model=runtime,
            class_map=classes,
            transform=transform,
            postprocess=build_postprocess(config),
            panoptic_postprocess=build_panoptic_postprocess(config, classes),
            device=torch.device("cpu"),
            max_pixels=config.data.max_pixels,
            grey_bits=config.data.grey_bits,
            thresholds=thresholds if values["measured_thresholds"] else None,
        )
    except InputError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"the metadata of {printable(path)} are damaged: {printable(repr(error))}") from error
    predictor._on(device)
    return predictor
