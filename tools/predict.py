"""Detect objects in images: draws them and writes JSON. With --panoptic: panoptic maps.

python tools/predict.py --checkpoint runs/demo --output predictions photo.jpg folder/
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image

import detr_bf
from detr_bf.cli import run_tool
from detr_bf.data.images import read_image
from detr_bf.engine import RunFolder
from detr_bf.errors import InputError
from detr_bf.evaluation import write_panoptic
from detr_bf.files import write_json
from detr_bf.progress import progress_bar
from detr_bf.report import draw_boxes, draw_panoptic, save_picture
from detr_bf.structures import ClassMap, Detections, PanopticMap


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", metavar="RUN_OR_FILE", required=True, help="run folder or checkpoint file")
    parser.add_argument("--output", metavar="DIR", type=Path, required=True, help="for pictures and predictions.json")
    parser.add_argument("--threshold", type=float, default=0.5, help="least score that is kept (default 0.5)")
    parser.add_argument("--panoptic", action="store_true", help="panoptic maps instead of boxes (needs a mask head)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("inputs", nargs="+", metavar="IMAGE_OR_FOLDER", type=Path)
    options = parser.parse_args(arguments)

    def run() -> int:
        RunFolder(options.output).create()
        predictor = detr_bf.load(options.checkpoint, options.device)
        files = list(image_files(options.inputs, options.output))
        if options.panoptic:
            write_panoptic_maps(options.output, predictor, files)
            print(f"panoptic maps of {len(files)} images: {options.output}")
            return 0
        entries = []
        for number, file in enumerate(progress_bar(files, desc="predicting", unit="image")):
            image = read_image(file)
            found = above(predictor(image), options.threshold)
            picture = draw_boxes(image, found.boxes, found.labels, predictor.class_map.names, found.scores)
            save_picture(options.output / f"{number:04d}_{file.stem}.png", picture)
            entries.append(as_json(file, found, predictor.class_map))
        write_json(options.output / "predictions.json", entries)
        print(f"{sum(len(entry['objects']) for entry in entries)} objects in {len(files)} images: {options.output}")
        return 0

    return run_tool(run)


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
