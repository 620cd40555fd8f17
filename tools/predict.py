"""Detect objects in images, or classify them: draws what is found and writes JSON. With --panoptic: panoptic maps.

python tools/predict.py --checkpoint runs/demo --output predictions photo.jpg folder/

A classifier's run gives the five most probable classes of each image: printed, as JSON and on one sheet.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

import detr_bf
from detr_bf.cli import run_tool
from detr_bf.data.images import read_image
from detr_bf.engine import RunFolder
from detr_bf.errors import InputError
from detr_bf.evaluation import write_panoptic
from detr_bf.files import write_json
from detr_bf.predictor import load_predictor
from detr_bf.progress import progress_bar
from detr_bf.report import draw_boxes, draw_panoptic, save_picture
from detr_bf.report.prediction_sheet import ProbableClasses, save_prediction_sheet
from detr_bf.structures import ClassMap, Detections, PanopticMap

DETECTION_THRESHOLD = 0.5
MOST_CLASSES = 5  # of an image
MOST_ON_SHEET = 60  # images


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", metavar="RUN_OR_FILE", required=True, help="run folder or checkpoint file")
    parser.add_argument("--output", metavar="DIR", type=Path, required=True, help="for pictures and predictions.json")
    parser.add_argument(
        "--threshold", type=float, help=f"least score that is kept (default {DETECTION_THRESHOLD}; of classes 0)"
    )
    parser.add_argument("--panoptic", action="store_true", help="panoptic maps instead of boxes (needs a mask head)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("inputs", nargs="+", metavar="IMAGE_OR_FOLDER", type=Path)
    options = parser.parse_args(arguments)
    return run_tool(lambda: run(options))


def run(options: argparse.Namespace) -> int:
    """Predict, write, print."""
    RunFolder(options.output).create()
    predictor = load_predictor(options.checkpoint, options.device)
    files = list(image_files(options.inputs, options.output))
    if isinstance(predictor, detr_bf.ClassifierPredictor):
        if options.panoptic:
            raise InputError(f"{options.checkpoint} is of a classifier, and --panoptic needs a detector with masks")
        write_classes(options.output, predictor, files, options.threshold or 0.0)
    elif options.panoptic:
        write_panoptic_maps(options.output, predictor, files)
        print(f"panoptic maps of {len(files)} images: {options.output}")
    else:
        threshold = DETECTION_THRESHOLD if options.threshold is None else options.threshold
        write_objects(options.output, predictor, files, threshold)
    return 0


def write_objects(output: Path, predictor: detr_bf.Predictor, files: Sequence[Path], threshold: float) -> None:
    """A picture of each image, and ``predictions.json``."""
    entries = []
    for number, file in enumerate(progress_bar(files, desc="predicting", unit="image")):
        image = read_image(file)
        found = above(predictor(image), threshold)
        picture = draw_boxes(image, found.boxes, found.labels, predictor.class_map.names, found.scores)
        save_picture(output / f"{number:04d}_{file.stem}.png", picture)
        entries.append(as_json(file, found, predictor.class_map))
    write_json(output / "predictions.json", entries)
    print(f"{sum(len(entry['objects']) for entry in entries)} objects in {len(files)} images: {output}")


def write_classes(
    output: Path, predictor: detr_bf.ClassifierPredictor, files: Sequence[Path], threshold: float
) -> None:
    """The most probable classes of each image: a line, an entry of ``predictions.json``, a place on ``sheet.png``."""
    entries: list[dict[str, Any]] = []
    shown: list[ProbableClasses] = []
    for file in progress_bar(files, desc="predicting", unit="image"):
        image = read_image(file)
        found = most_probable(predictor(image), predictor.class_map, threshold)
        entries.append({"file": str(file), "classes": found})
        if len(shown) < MOST_ON_SHEET:
            names, scores = tuple(each["name"] for each in found), tuple(each["score"] for each in found)
            shown.append(ProbableClasses(image, names, scores, file.name))
    write_json(output / "predictions.json", entries)
    save_prediction_sheet(output / "sheet.png", shown)
    for entry in entries:
        print(f"{entry['file']}: " + ", ".join(f"{each['name']} {each['score']:.1%}" for each in entry["classes"]))
    print(f"classes of {len(files)} images, {len(shown)} of them on the sheet: {output}")


def most_probable(probabilities: Tensor, class_map: ClassMap, threshold: float) -> list[dict[str, Any]]:
    """Of (K,): category id, name and probability of the first few that reach the threshold, best first."""
    scores, labels = (values.tolist() for values in probabilities.topk(min(MOST_CLASSES, len(probabilities))))
    return [
        {"category_id": class_map.category_ids[label], "name": class_map.names[label], "score": score}
        for score, label in zip(scores, labels, strict=True)
        if score >= threshold
    ]


def write_panoptic_maps(output: Path, predictor: detr_bf.Predictor, files: Sequence[Path]) -> None:
    """Pictures, and COCO panoptic results: ``panoptic.json`` with PNG files of segment ids in ``panoptic``.

    ``image_id`` is the place in ``files``, which is the number at the start of the file names.
    """
    names = {number: f"{number:04d}_{file.stem}.png" for number, file in enumerate(files)}

    def maps() -> Iterator[PanopticMap]:
        for number, file in enumerate(progress_bar(files, desc="predicting", unit="image")):
            image = read_image(file)
            found = replace(predictor.panoptic(image), image_id=number)
            save_picture(output / names[number], draw_panoptic(image, found, predictor.class_map.names))
            yield found

    write_panoptic(output / "panoptic.json", output / "panoptic", maps(), predictor.class_map, names)


def image_files(inputs: Sequence[Path], output: Path) -> Iterator[Path]:
    """The files given and the image files of the folders given, by name, without earlier pictures in ``output``."""
    readable = {suffix for suffix, name in Image.registered_extensions().items() if name in Image.OPEN}
    for path in inputs:
        if not path.exists():
            raise InputError(f"no such file or folder: {path}")
        if path.is_file():
            yield path
            continue
        found = sorted(
            file
            for file in path.rglob("*")
            if file.suffix.lower() in readable and file.is_file() and output.resolve() not in file.resolve().parents
        )
        if not found:
            raise InputError(f"no image files in {path}")
        yield from found


def above(detections: Detections, threshold: float) -> Detections:
    """Those with a score of at least ``threshold``."""
    keep = detections.scores >= threshold
    masks = detections.masks and tuple(mask for mask, kept in zip(detections.masks, keep, strict=True) if kept)
    boxes, scores, labels = (x[keep] for x in (detections.boxes, detections.scores, detections.labels))
    return Detections(detections.image_id, boxes, scores, labels, masks)


def as_json(file: Path, detections: Detections, class_map: ClassMap) -> dict[str, Any]:
    """One image's objects with category ids and names of the training annotations, boxes x, y, width, height."""
    objects: list[dict[str, Any]] = []
    masks = detections.masks
    for box, score, label in zip(
        *(x.tolist() for x in (detections.boxes, detections.scores, detections.labels)), strict=True
    ):
        x0, y0, x1, y1 = box
        category = {"category_id": class_map.category_ids[label], "name": class_map.names[label]}
        found = {**category, "score": score, "bbox": [x0, y0, x1 - x0, y1 - y0]}
        objects.append(found if masks is None else {**found, "segmentation": masks[len(objects)]})
    return {"file": str(file), "objects": objects}


if __name__ == "__main__":
    sys.exit(main())
