"""Detect objects in images, or classify images, and write pictures and JSON; with --panoptic write panoptic maps.

detr-bf predict --checkpoint runs/demo --output predictions photo.jpg folder/

With a classifier's run, the five most probable classes of each image are printed and written as JSON and one sheet.

Unreadable images are skipped and listed at the end, and the exit code is 1. In the output folder, which may also hold
the images, only files that this command wrote before are replaced.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from detr_bf.cli import run_tool
from detr_bf.data.images import read_image
from detr_bf.data.inputs import image_files, real_path
from detr_bf.errors import InputError
from detr_bf.evaluation import DEFAULT_THRESHOLD, write_panoptic
from detr_bf.files import (
    check_output_file,
    check_output_folder,
    make_output_folder,
    read_json,
    remove_empty,
    write_json,
)
from detr_bf.models import load_predictor
from detr_bf.predictor import Predictor
from detr_bf.progress import progress_bar, setup_logging
from detr_bf.report import ProbableClasses, class_labels, draw_boxes, draw_panoptic, prediction_sheet, save_picture
from detr_bf.structures import ClassMap, Detections, PanopticMap
from detr_bf.text import printable

if TYPE_CHECKING:
    from detr_bf.classification.predictor import ClassifierPredictor

SHOWN_CLASSES = 5  # of an image
MOST_ON_SHEET = 60  # images
WRITTEN = ".detr_bf_predict.json"  # lists the files that this command has written in the output folder
LONGEST_STEM = 150  # bytes of an input's name in the name of its picture


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 1 if images were left out because they cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", metavar="RUN_OR_FILE", required=True, help="run folder or checkpoint file")
    parser.add_argument("--output", metavar="DIR", type=Path, required=True, help="for pictures and predictions.json")
    parser.add_argument(
        "--threshold",
        metavar="SCORE",
        help="least score that is kept, or 'class' for one of each class (default: the one with the highest F1 in the "
        f"evaluation of the checkpoint, {DEFAULT_THRESHOLD} without an evaluation; for classifiers 0)",
    )
    parser.add_argument("--panoptic", action="store_true", help="panoptic maps instead of boxes (needs a mask head)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("inputs", nargs="+", metavar="IMAGE_OR_FOLDER", type=Path)
    options = parser.parse_args(arguments)
    return run_tool(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    """Predict, write, print."""
    setup_logging()
    threshold = _threshold(options.threshold)
    output = Output(options.output)
    files = list(image_files(options.inputs, output.written))
    predictor = load_predictor(options.checkpoint, options.device)
    images = InputImages(files, predictor.max_pixels)
    if not isinstance(predictor, Predictor):
        if options.panoptic:
            raise InputError(f"{options.checkpoint} is of a classifier, and --panoptic needs a detector with masks")
        if isinstance(threshold, str):
            raise InputError(f"{options.checkpoint} is of a classifier: give a number to --threshold")
        done = write_classes(output, predictor, images, threshold or 0.0)
    elif options.panoptic:
        done = write_panoptic_maps(output, predictor, images)
    else:
        done = write_objects(output, predictor, images, threshold)
    for line in done:
        print(line)
    if images.unreadable:
        count = f"{len(images.unreadable)} of {len(images.files)} images cannot be read and were left out"
        print(f"{count}:", *images.unreadable, sep="\n  ", file=sys.stderr)
    return 1 if images.unreadable else 0


def _threshold(text: str | None) -> float | str | None:
    """Return what --threshold means: a number, 'class', or None if it is not given."""
    if text is None or text == "class":
        return text
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise InputError(f"--threshold must be a number from 0 to 1, or 'class'; got {printable(text)}")
    return number


class InputImages:
    """Image files, and the reasons why some of them could not be read."""

    def __init__(self, files: Sequence[Path], max_pixels: int) -> None:
        self.files = files
        self.max_pixels = max_pixels
        self.unreadable: list[str] = []

    def __iter__(self) -> Iterator[tuple[int, Path, Tensor]]:
        """Yield index, file and pixels of the readable images.

        Raises:
            InputError: no image is readable.
        """
        for number, file in enumerate(progress_bar(self.files, desc="predicting", unit="image")):
            try:
                pixels = read_image(file, max_pixels=self.max_pixels)
            except InputError as error:
                self.unreadable.append(printable(error, limit=1000))
                continue
            yield number, file, pixels
        if len(self.unreadable) == len(self.files):
            lines = self.unreadable if len(self.files) == 1 else ["no image can be read:", *self.unreadable]
            raise InputError("\n  ".join(lines))

    def picture_names(self) -> dict[int, str]:
        """Return the name of the picture of each image, made of its index and its file name."""
        return {number: f"{number:04d}_{_stem(file)}.png" for number, file in enumerate(self.files)}


class Output:
    """Output folder, in which only files that this command wrote before are replaced.

    Raises:
        InputError: files cannot be written there.
    """

    def __init__(self, folder: Path) -> None:
        check_output_folder(folder, "--output")
        check_output_file(folder / WRITTEN, "--output")
        self.folder = folder
        listed = _listed(folder / WRITTEN)
        self._before = {name for name, stamp in listed.items() if stamp is not None and _stamp(folder / name) == stamp}

    @property
    def written(self) -> set[Path]:
        """Files that earlier predictions wrote and that have not changed since."""
        return {real_path(self.folder) / name for name in self._before}

    @contextmanager
    def writing(self, names: Sequence[str], images: InputImages) -> Iterator[None]:
        """Check that files may be written, and record those that were; new folders that stay empty are removed.

        Raises:
            InputError: a file is an input, or exists and was not written by this command.
        """
        inputs = {real_path(file) for file in images.files}
        for name in names:
            path, other = self.folder / name, "give another folder with --output"
            if real_path(path) in inputs:
                raise InputError(f"{printable(path)} is an input and would be replaced; {other}")
            if name not in self._before and (path.exists() or path.is_symlink()):
                raise InputError(f"{printable(path)} exists and was not written by this command; move it, or {other}")
        folders = [self.folder, *self.folder.parents]
        new = [self.folder / "panoptic", *folders[: sum(not folder.exists() for folder in folders)]]
        before = {name: _stamp(self.folder / name) for name in names}
        make_output_folder(self.folder, "--output")
        try:
            yield
        finally:
            stamps = {name: _stamp(self.folder / name) for name in names}
            done = {name: stamp for name, stamp in stamps.items() if stamp not in (None, before[name])}
            with suppress(OSError):
                if done:  # keep the entries of other predictions
                    write_json(self.folder / WRITTEN, _listed(self.folder / WRITTEN) | done)
            remove_empty(new)


def write_objects(
    output: Output, predictor: Predictor, images: InputImages, threshold: float | str | None
) -> list[str]:
    """Write a picture of each image and ``predictions.json``; return the lines to print."""
    entries = []
    names, labels = images.picture_names(), class_labels(predictor.class_map)
    with output.writing([*names.values(), "predictions.json"], images):
        for number, file, image in images:
            found = predictor(image, threshold)
            picture = draw_boxes(image, found.boxes, found.labels, labels, found.scores)
            save_picture(output.folder / names[number], picture)
            entries.append(as_json(file, found, predictor.class_map))
        write_json(output.folder / "predictions.json", entries)
    count = sum(len(entry["objects"]) for entry in entries)
    least = sorted(set(predictor.least_scores(threshold).tolist()))
    scores = f"{least[0]:.3g}" if len(least) == 1 else f"{least[0]:.3g} to {least[-1]:.3g} by class"
    return [f"{count} objects in {len(entries)} images, scores from {scores}: {printable(output.folder)}"]


def write_classes(output: Output, predictor: ClassifierPredictor, images: InputImages, threshold: float) -> list[str]:
    """Write the most probable classes of each image as JSON and on a sheet; return the lines to print."""
    entries: list[dict[str, Any]] = []
    shown: list[ProbableClasses] = []
    labels = dict(zip(predictor.class_map.category_ids, class_labels(predictor.class_map), strict=True))
    with output.writing(["predictions.json", "sheet.png"], images):
        for _, file, image in images:
            found = most_probable(predictor(image), predictor.class_map, threshold)
            entries.append({"file": str(file), "classes": found})
            if len(shown) < MOST_ON_SHEET:
                names = tuple(labels[each["category_id"]] for each in found)
                shown.append(ProbableClasses(image, names, tuple(each["score"] for each in found), file.name))
        write_json(output.folder / "predictions.json", entries)
        save_picture(output.folder / "sheet.png", prediction_sheet(shown))
    lines = [
        f"{printable(entry['file'], limit=1000)}: "
        + ", ".join(f"{printable(each['name'])} {each['score']:.1%}" for each in entry["classes"])
        for entry in entries
    ]
    where = printable(output.folder)
    return [*lines, f"classes of {len(entries)} images, {len(shown)} of them on the sheet: {where}"]


def most_probable(probabilities: Tensor, class_map: ClassMap, threshold: float) -> list[dict[str, Any]]:
    """Return category id, name and probability of the most probable classes, from probabilities (K,), best first."""
    scores, labels = (values.tolist() for values in probabilities.topk(min(SHOWN_CLASSES, len(probabilities))))
    return [
        {"category_id": class_map.category_ids[label], "name": class_map.names[label], "score": score}
        for score, label in zip(scores, labels, strict=True)
        if score >= threshold
    ]


def write_panoptic_maps(output: Output, predictor: Predictor, images: InputImages) -> list[str]:
    """Write pictures and COCO panoptic results: ``panoptic.json`` with PNG files of segment ids in ``panoptic``.

    ``image_id`` is the index in ``images``, which is the number at the start of the file names.
    """
    names, labels = images.picture_names(), class_labels(predictor.class_map)
    folder = output.folder

    def maps() -> Iterator[PanopticMap]:
        for number, _, image in images:
            found = replace(predictor.panoptic(image), image_id=number)
            save_picture(folder / names[number], draw_panoptic(image, found, labels))
            yield found

    with output.writing([*names.values(), *(f"panoptic/{name}" for name in names.values()), "panoptic.json"], images):
        write_panoptic(folder / "panoptic.json", folder / "panoptic", maps(), predictor.class_map, names)
    return [f"panoptic maps of {len(images.files) - len(images.unreadable)} images: {printable(folder)}"]


def _stem(file: Path) -> str:
    """Return a file's name without suffix, cut to the limit, with underscores for unprintable letters."""
    stem = "".join(letter if letter.isprintable() else "_" for letter in file.stem)
    return stem.encode()[:LONGEST_STEM].decode(errors="ignore")


def _listed(file: Path) -> dict[str, list[int]]:
    """Return the written files with size and time; empty if the list is missing or is not a list."""
    try:
        content = read_json(file, limit=2**27)
    except (FileNotFoundError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _stamp(file: Path) -> list[int] | None:
    """Return size and modification time in nanoseconds; None for a missing file."""
    try:
        status = file.stat()
    except (OSError, ValueError):
        return None
    return [status.st_size, status.st_mtime_ns]


def as_json(file: Path, detections: Detections, class_map: ClassMap) -> dict[str, Any]:
    """Return the objects of an image: category id and name, score, box as x, y, width, height, mask."""
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
