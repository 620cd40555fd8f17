"""Write a detector for ONNX, OpenVINO, phones or as machine code, and compare its outputs with those of torch."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor

from detr_bf.assembly.data import data_source, references_folder, references_of_run
from detr_bf.common.errors import InputError
from detr_bf.common.files import file_size
from detr_bf.common.progress import setup_logging
from detr_bf.common.text import printable, safe_message
from detr_bf.config import DetectionConfig, config_from_dict
from detr_bf.data.coco import read_annotations
from detr_bf.data.inputs import image_files, image_pixels
from detr_bf.data.references import named_references
from detr_bf.export import ParityError, file_names, parity_table
from detr_bf.export.graph import ONNX_SUFFIX
from detr_bf.export.parity import COMPARED_BATCH
from detr_bf.export.tensorrt import tensorrt_line
from detr_bf.inference.export_pairs import read_pairs
from detr_bf.inference.loading import load
from detr_bf.inference.predictor import Predictor


def main(options: argparse.Namespace) -> int:
    """Export a detector; the exit code is 1 if an output differs by more than its tolerance."""
    try:
        return _run(options)
    except ParityError as error:
        print(safe_message(error), file=sys.stderr)
        return 1


def _run(options: argparse.Namespace) -> int:
    """Load, export and print the comparison."""
    setup_logging()
    batch, size, count = _batch(options.batch), _size(options.size), _count(options.evaluate)
    if options.half and options.int8 is not None:
        raise InputError("--half and --int8 exclude each other: give one of them")
    predictor = load(options.run, "cpu", options.overrides)
    if options.references is not None and options.images is None and options.int8 is None:
        raise InputError("--references gives the references of the images of --images or --int8: give one of them")
    images, references, source = _images(predictor, options.images, options.references)
    found: dict[str, Any] = {}

    def evaluate(file: Path) -> Mapping[str, Any]:
        found.update(compared_ap(predictor, file, count or 0))
        return found

    compared = predictor.export(
        options.output,
        batch=batch,
        size=size,
        postprocess=options.with_postprocess,
        images=images,
        references=references,
        license=options.license,
        precision="float16" if options.half else "float32" if options.int8 is None else "int8",
        calibration=options.int8,
        calibration_references=None if options.int8 is None else options.references,
        evaluate=None if count is None else evaluate,
        device=options.device,
    )
    if compared:
        print(f"largest differences between the file and torch, {source}:")
        print(parity_table(compared))
    else:
        print("the outputs are not compared with those of torch: macOS and iOS compute Core ML files")
    if options.output.suffix == ONNX_SUFFIX:
        print(tensorrt_line(options.output))
    if "not_compared" in found:
        print(f"AP is not compared: {found['not_compared']}")
    elif found:
        print(f"AP on {found['images']} validation images: torch {found['torch']:.3f}, file {found['file']:.3f}")
    for file in file_names(options.output):
        parts = [each for each in file.rglob("*") if each.is_file()] if file.is_dir() else [file]
        print(f"{sum(map(file_size, parts)) / 1e6:.1f} MB: {printable(file)}")
    return 0


def _batch(text: str) -> int | None:
    if text == "dynamic":
        return None
    if not re.fullmatch(r"[1-9]\d{0,5}", text):
        raise InputError(f"--batch must be 'dynamic' or a whole number from 1; got {printable(text)}")
    return int(text)


def _size(text: str) -> tuple[int, int] | None:
    if text == "dynamic":
        return None
    if not (found := re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", text)):
        raise InputError(f"--size must be 'dynamic' or HEIGHTxWIDTH in pixels, such as 640x640; got {printable(text)}")
    return int(found[1]), int(found[2])


def _count(text: str | None) -> int | None:
    if text is not None and not re.fullmatch(r"\d{1,9}", text, re.ASCII):
        raise InputError(f"--evaluate must be a whole number from 0 (all images); got {printable(text)}")
    return None if text is None else int(text)


def compared_ap(predictor: Predictor, file: Path, count: int) -> dict[str, Any]:
    """Return the AP of boxes of torch and of a file on the first validation images of the run, 0: on all.

    Returns:
        ``images``, ``torch`` and ``file``; or ``not_compared``, the reason.
    """
    try:
        config = _config(predictor)
        source = data_source(config, "val")
        content = read_annotations(source.annotations)
        if config.model.masks and content.maps is not None:
            raise InputError("the score of a panoptic run is PQ, not AP: evaluate it with 'detr-bf evaluate'")
        chosen = content.images[: count or None]
        known = {image["id"] for image in chosen}
        objects = [each for each in content.annotations if each["image_id"] in known]
        if not objects:
            raise InputError(f"the validation images ({len(chosen)}) have no objects")
        part, data = replace(content, images=chosen, annotations=objects), config.data
        if config.references_in_evaluation and (data.reference != "own" or data.reference_shift):
            raise InputError(
                f"the run is evaluated with data.reference={data.reference} and data.reference_shift="
                f"{data.reference_shift}, not with the references as they are: evaluate it with 'detr-bf evaluate'"
            )
        references = references_folder(config, "val") if config.references_in_evaluation else None
        both = (predictor, load(file))
        scores = [each.evaluate(part, source.images, references=references).boxes.AP for each in both]
    except InputError as error:
        return {"not_compared": printable(str(error).replace("\n", " "))}
    if None in scores:
        return {"not_compared": "the validation images have no objects that count"}
    return {"images": len(chosen), "torch": scores[0], "file": scores[1]}


def _images(
    predictor: Predictor, folder: Path | None, references: Path | None
) -> tuple[list[Tensor] | None, list[Tensor] | None, str]:
    """Return a few images to compare with and their references, None for synthetic ones, and their description."""
    if folder is not None:
        files = list(islice(image_files([folder]), COMPARED_BATCH))
        if references is not None:
            others = named_references(files, folder, references)
        else:
            others = _known_references(predictor, files)
        return *_read(predictor, files, others), f"images of {printable(folder)}"
    try:
        source = data_source(_config(predictor), "val")
        entries = read_annotations(source.annotations).images[:COMPARED_BATCH]
        files = [source.images / str(entry["file_name"]) for entry in entries]
        if files:
            return *_read(predictor, files, _known_references(predictor, files)), "validation images"
        reason = "the validation split has no images"
    except InputError as error:
        reason = printable(error)
    return None, None, f"synthetic images ({reason})"


def _read(predictor: Predictor, files: Sequence[Path], references: Sequence[Path]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the pixels of images and of their references, if there are any."""
    read = partial(image_pixels, max_pixels=predictor.max_pixels, pixel_format=predictor.pixel_format)
    pairs = read_pairs(files, references, read)
    return [image for image, _ in pairs], [other for _, other in pairs if other is not None]


def _known_references(predictor: Predictor, files: Sequence[Path]) -> list[Path]:
    """Return the references of images of the run; none if the detector reads none."""
    return references_of_run(_config(predictor), files) if predictor.model.reads_references else []


def _config(predictor: Predictor) -> DetectionConfig:
    """Return the settings of the run (InputError: the predictor is not of a checkpoint, or they are not valid)."""
    if predictor.origin is None:
        raise InputError("only a detector that detr_bf.load has read from a checkpoint can be exported")
    config = config_from_dict(predictor.origin.config, source="the config of the checkpoint")
    assert isinstance(config, DetectionConfig), "a predictor is of a detector"
    return config
