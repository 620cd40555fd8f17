"""Detect objects in images, or classify images or pixels, and write pictures, JSON or maps."""

from __future__ import annotations

import argparse
import glob
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pycocotools import mask as coco_mask
from torch import Tensor

from detr_bf.acceleration.allocator import keep_freed_memory
from detr_bf.common.errors import InputError
from detr_bf.common.files import (
    atomic_write,
    check_output_file,
    check_output_folder,
    make_output_folder,
    read_json_object,
    remove_empty,
    write_json,
    write_text,
)
from detr_bf.common.progress import progress_bar, setup_logging
from detr_bf.common.structures import ClassMap, PanopticMap
from detr_bf.common.text import counted, printable
from detr_bf.data.images import read_image
from detr_bf.data.inputs import image_files, is_image_file, real_path
from detr_bf.data.video import VIDEO_SUFFIXES, is_video_stream
from detr_bf.evaluation import write_panoptic
from detr_bf.inference.loading import load_predictor
from detr_bf.inference.prediction import FramePrediction, Prediction
from detr_bf.inference.predictor import Predictor
from detr_bf.inference.references import NO_REFERENCES
from detr_bf.inference.segmentation import SegmentationPredictor
from detr_bf.inference.tiling import check_tile
from detr_bf.report import ProbableClasses, class_labels, draw_panoptic, prediction_sheet, save_picture
from detr_bf.segmentation.page import as_segments

if TYPE_CHECKING:
    from detr_bf.inference.classifier import ClassifierPredictor

SHOWN_CLASSES = 5  # of an image
MOST_ON_SHEET = 60  # images
WRITTEN = ".detr_bf_predict.json"  # lists the files that this command has written in the output folder
OBJECT_FORMATS = {  # file of each; "": a file for each image
    "json": "predictions.json",
    "jsonl": "predictions.jsonl",
    "csv": "predictions.csv",
    "coco": "coco.json",
    "yolo": "",
    "labelme": "",
}
LONGEST_STEM = 150  # bytes of an input's name in the name of its picture


def main(options: argparse.Namespace) -> int:
    """Predict, write, print."""
    setup_logging()
    threshold = threshold_of(options.threshold)
    options.tile = check_tile(options.tile)
    if options.panoptic:
        _check_unused(options, "--panoptic", threshold is not None)
    output = Output(options.output)
    keep_freed_memory(large=True)
    if any(is_video_stream(name) or name.lower().endswith(VIDEO_SUFFIXES) for name in options.inputs):
        return _run_video(options, output, threshold)
    for name, is_given in (
        ("every", options.every is not None),
        ("live", options.live is not None),
        ("reconnect", options.reconnect),
    ):
        if is_given:
            raise InputError(f"--{name} is for a video, and none is given")
    inputs = list(_inputs(options.inputs))
    files = list(image_files(inputs, output.written))
    predictor = load_predictor(options.run, options.device, options.overrides)
    images = InputImages(files, predictor, [path for path in inputs if path.is_dir()], options.reference)
    if isinstance(predictor, SegmentationPredictor):
        _check_unused(options, predictor.kind, threshold is not None, reference=options.reference is not None)
        if options.panoptic:
            raise InputError(f"{options.run} is of {predictor.kind}, and --panoptic needs a detector with masks")
        done = write_semantic_maps(output, predictor, images)
    elif not isinstance(predictor, Predictor):
        if options.panoptic:
            raise InputError(f"{options.run} is of a classifier, and --panoptic needs a detector with masks")
        if isinstance(threshold, str):
            raise InputError(f"{options.run} is of a classifier: give a number to --threshold")
        _check_unused(options, "a classifier", reference=options.reference is not None)
        done = write_classes(output, predictor, images, threshold or 0.0)
    elif options.panoptic:
        done = write_panoptic_maps(output, predictor, images)
    else:
        found = _detected(predictor, images, threshold, options)
        pictures = options.save_pictures is not False
        count = write_objects(output, predictor, images, found, options.format or "json", pictures)
        done = [f"{count}, {_scores(predictor, threshold)}: {printable(output.folder)}"]
    for line in done:
        print(line)
    if images.unreadable:
        count = f"{len(images.unreadable)} of {len(images.files)} {images.references.unusable} and were left out"
        print(f"{count}:", *images.unreadable, sep="\n  ", file=sys.stderr)
    return 1 if images.unreadable else 0


def _scores(predictor: Predictor, threshold: float | str | None) -> str:
    least = sorted(set(predictor.least_scores(threshold).tolist()))
    return f"scores from {least[0]:.3g}" + (f" to {least[-1]:.3g} by class" if len(least) > 1 else "")


def _run_video(options: argparse.Namespace, output: Output, threshold: float | str | None) -> int:
    """Write a line of JSON for each frame; the exit code is 1 if the video is damaged after some of them.

    Ctrl-C and SIGTERM end the video, as a stream has no other end: the frames before are written.

    Raises:
        InputError: another input is given, an option is for images, or no frame can be read.
    """
    if len(options.inputs) > 1:
        raise InputError("a video must be the only input: give one video, or images without it")
    if options.panoptic or options.save_pictures or options.format not in (None, "jsonl"):
        raise InputError("a video gives predictions.jsonl alone: leave out --panoptic, --save-pictures and --format")
    predictor, video, damage = load_predictor(options.run, options.device, options.overrides), options.inputs[0], ""
    if not isinstance(predictor, Predictor):
        raise InputError(f"{options.run} is of {predictor.kind}, and videos need a detector")
    every, name = 1 if options.every is None else options.every, OBJECT_FORMATS["jsonl"]
    asked = {name: getattr(options, name) for name in ("live", "reconnect", "tile", "half", "reference")}
    found = predictor.predict_video(video, every, threshold=threshold, **asked)
    frames, objects, read = 0, 0, [] if is_video_stream(video) else [Path(video)]
    read += [] if options.reference is None else [options.reference]
    with (
        _noted_signals() as interruption,
        output.writing([name], read),
        atomic_write(output.folder / name) as temporary,
        temporary.open("w", encoding="utf-8", errors="surrogateescape", newline="\n") as lines,
    ):
        try:
            for each in interruption.until_signal(progress_bar(found, desc="predicting", unit="frame")):
                lines.write(f"{each.to_json()}\n")
                frames, objects = frames + 1, objects + len(each)
        except InputError as error:
            if not frames:
                raise
            damage = printable(error, limit=1000)
    done = f"{counted(objects, 'object')} in {counted(frames, 'frame')}"
    print(f"{done}, {_scores(predictor, threshold)}: {printable(output.folder)}")
    if interruption.signal:
        print("interrupted: the frames before are written", file=sys.stderr)
        return 128 + interruption.signal
    if damage:
        print(damage, file=sys.stderr)
    return 1 if damage else 0


@dataclass
class _Interruption:
    """First SIGINT or SIGTERM that arrived."""

    signal: int = 0
    waits: bool = False  # for a frame: the signal ends the wait, as none may come from a stream

    def until_signal(self, frames: Iterable[FramePrediction]) -> Iterator[FramePrediction]:
        """Yield the frames before the signal."""
        following = iter(frames)
        while not self.signal:
            self.waits = True
            try:
                each = next(following, None)
            except KeyboardInterrupt:
                if not self.signal:
                    raise
                return
            finally:
                self.waits = False
            if each is None:
                return
            yield each


@contextmanager
def _noted_signals() -> Iterator[_Interruption]:
    """Note SIGINT or SIGTERM; a second signal ends the program."""
    interruption = _Interruption()

    def note(number: int, _: object) -> None:
        interruption.signal = number
        restore()
        if interruption.waits:
            raise KeyboardInterrupt
        print("ending after this frame; another signal ends at once, without the frames", file=sys.stderr)

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interruption
    finally:
        restore()


def _check_unused(options: argparse.Namespace, what: str, threshold: bool = False, *, reference: bool = False) -> None:
    """Raise an InputError for options that detection of objects alone has."""
    given = {
        "--format": options.format not in (None, "json"),
        "--no-save-pictures": options.save_pictures is False,
        "--tile": options.tile is not None,
        "--half": options.half,
        "--nms": any(each.startswith("eval.nms=") for each in options.overrides),
        "--nms-across-classes": "eval.nms_across_classes=true" in options.overrides,
        "--threshold": threshold,
        "--reference": reference,
    }
    if unused := [name for name, is_given in given.items() if is_given]:
        raise InputError(f"{what} does not use {', '.join(unused)}: leave it out")


def threshold_of(text: str | None) -> float | str | None:
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
    """Image files, and the reasons why some of them could not be read.

    Args:
        predictor: says how images are read.
        folders: those that were given.
        reference: file with the reference of all images, or folder of references, see
            :class:`~detr_bf.inference.references.GivenReferences`; None: a detector that needs them is refused.
    """

    def __init__(
        self,
        files: Sequence[Path],
        predictor: Predictor | ClassifierPredictor | SegmentationPredictor,
        folders: Sequence[Path] = (),
        reference: Path | None = None,
    ) -> None:
        self.files = files
        self._read = partial(read_image, max_pixels=predictor.max_pixels, pixel_format=predictor.pixel_format)
        self._folders = folders
        self.references = NO_REFERENCES
        if isinstance(predictor, Predictor):
            self.references = predictor.references(reference, files, folders)
            self.references.check_names(files)
        self.unreadable: list[str] = []

    @property
    def all_files(self) -> list[Path]:
        """Image files and files of references."""
        return [*self.files, *self.references.files]

    def __iter__(self) -> Iterator[tuple[int, Path, Tensor, Tensor | None]]:
        """Yield index, file, pixels and reference of the readable images (InputError: no image is readable)."""
        for number, file in enumerate(progress_bar(self.files, desc="predicting", unit="image")):
            try:
                pixels = self._read(file)
                reference = self.references(number, file, pixels, "the image")
            except InputError as error:
                self.unreadable.append(printable(error, limit=1000))
                continue
            yield number, file, pixels, reference
        if len(self.unreadable) == len(self.files):
            lines = self.unreadable if len(self.files) == 1 else ["no image can be read:", *self.unreadable]
            raise InputError("\n  ".join(lines))

    def picture_names(self) -> dict[int, str]:
        """Return the name of the picture of each image, made of its index and its file name."""
        return {number: f"{number:04d}_{_stem(file)}.png" for number, file in enumerate(self.files)}

    def label_names(self, suffix: str) -> dict[int, str]:
        """Return the name of the label file of each image.

        It is the path of the image below the given folder, with ``labels`` instead of the last folder ``images``, or
        else in ``labels``.

        Raises:
            InputError: two images would have the same label file, or one that of the class names.
        """
        images: dict[str, Path] = {}
        for file in self.files:
            base = next((folder for folder in self._folders if file.is_relative_to(folder)), file.parent)
            *parts, name = file.relative_to(base).with_suffix(suffix).parts
            at = max((index for index, part in enumerate(parts) if part == "images"), default=None)
            label = "/".join(
                ["labels", *parts, name] if at is None else [*parts[:at], "labels", *parts[at + 1 :], name]
            )
            other = images.setdefault(label, file)
            if other != file:
                raise InputError(
                    f"{printable(other)} and {printable(file)} would have the same label file {printable(label)}: give "
                    "the folder that holds both, rename one, or predict them one after the other"
                )
            if name == "classes.txt":
                raise InputError(f"the label file of {printable(file)} would be read as the class names: rename it")
        return dict(enumerate(images))


class Output:
    """Output folder, in which only files that this command wrote before are replaced.

    Raises:
        InputError: files cannot be written there.
    """

    def __init__(self, folder: Path) -> None:
        check_output_folder(folder, "--output")
        check_output_file(folder / WRITTEN, "--output")
        self.folder = folder
        listed = read_json_object(folder / WRITTEN)
        self._before = {name for name, stamp in listed.items() if stamp is not None and _stamp(folder / name) == stamp}

    @property
    def written(self) -> set[Path]:
        """Files that earlier predictions wrote and that have not changed since."""
        return {real_path(self.folder) / name for name in self._before}

    @contextmanager
    def writing(self, names: Sequence[str], inputs: Iterable[Path]) -> Iterator[None]:
        """Check that files may be written, and record those that were; new folders that stay empty are removed.

        Raises:
            InputError: a file is an input, or exists and was not written by this command.
        """
        inputs = {real_path(file) for file in inputs}
        for name in names:
            path, other = self.folder / name, "give another folder with --output"
            if real_path(path) in inputs:
                raise InputError(f"{printable(path)} is an input and would be replaced; {other}")
            if name not in self._before and (path.exists() or path.is_symlink()):
                raise InputError(f"{printable(path)} exists and was not written by this command; move it, or {other}")
        folders = [self.folder, *self.folder.parents]
        below = {self.folder / part for name in names for part in Path(name).parents if part.parts}
        parts = sorted((folder for folder in below if not folder.exists()), reverse=True)
        new = [*parts, *folders[: sum(not folder.exists() for folder in folders)]]
        before = {name: _stamp(self.folder / name) for name in names}
        make_output_folder(self.folder, "--output")
        try:
            yield
        finally:
            stamps = {name: _stamp(self.folder / name) for name in names}
            done = {name: stamp for name, stamp in stamps.items() if stamp not in (None, before[name])}
            with suppress(OSError):
                if done:  # keep the entries of other predictions
                    write_json(self.folder / WRITTEN, read_json_object(self.folder / WRITTEN) | done)
            remove_empty(new)


def _inputs(given: Sequence[str]) -> Iterator[Path]:
    """Yield files and folders: patterns are replaced by what they match, - by the lines of standard input.

    Raises:
        InputError: a pattern matches nothing, or there are no lines.
    """
    for text in given:
        if text == "-":
            lines = [line for line in os.fsdecode(sys.stdin.buffer.read()).split("\n") if line]
            if not lines:
                raise InputError("standard input has no file names: give one in each line, as 'find' prints them")
            yield from map(Path, lines)
        elif glob.has_magic(text) and not os.path.lexists(text):
            found = sorted(glob.glob(text, recursive=True))  # noqa: PTH207, Path.glob takes no absolute patterns
            if not found:
                raise InputError(f"no file matches {printable(text)}")
            files = [path for path in map(Path, found) if not path.is_dir()]
            folders = [path for path in map(Path, found) if path.is_dir() and not any(path in x.parents for x in files)]
            yield from [*folders, *filter(is_image_file, files)]
        else:
            yield Path(text)


def _detected(
    predictor: Predictor, images: InputImages, threshold: float | str | None, options: argparse.Namespace
) -> Iterator[tuple[int, Tensor, Prediction]]:
    """Yield index, pixels and prediction of each readable image."""
    for number, file, image, reference in images:
        found = predictor(image, threshold, tile=options.tile, half=options.half, reference=reference)
        yield number, image, replace(found, image_id=number, source=str(file))


def write_objects(
    output: Output,
    predictor: Predictor,
    images: InputImages,
    predictions: Iterable[tuple[int, Tensor, Prediction]],
    form: str,
    pictures: bool,
) -> str:
    """Write the objects in one of :data:`OBJECT_FORMATS`, and a picture of each image; return how many there are."""
    names, labels = images.picture_names(), class_labels(predictor.class_map)
    texts, files = dict[int, str](), [OBJECT_FORMATS[form]]
    if not OBJECT_FORMATS[form]:
        texts = images.label_names(".txt" if form == "yolo" else ".json")
        files = [*texts.values(), *(("classes.txt", "images.txt") if form == "yolo" else ())]
    found = []
    with output.writing([*(names.values() if pictures else ()), *files], images.all_files):
        for number, image, prediction in predictions:
            if pictures:
                save_picture(output.folder / names[number], replace(prediction, given=image).plot(labels))
            found.append(replace(prediction, given=Path(prediction.source)))  # its pixels need not be kept
        for name, content in _contents(form, found, predictor.class_map, texts, output.folder):
            make_output_folder((output.folder / name).parent, "--output")
            if not isinstance(content, str):
                write_json(output.folder / name, content)
                continue
            with atomic_write(output.folder / name) as temporary:
                temporary.write_text(content, encoding="utf-8", errors="surrogateescape", newline="\n")
    return f"{counted(sum(map(len, found)), 'object')} in {counted(len(found), 'image')}"


def _contents(
    form: str, found: Sequence[Prediction], class_map: ClassMap, texts: Mapping[int, str], folder: Path
) -> Iterator[tuple[str, Any]]:
    """Yield the files of a format, name and text or the content of a JSON file.

    ``texts`` are the names of the label files by image, relative to the output ``folder``.
    """
    if form == "labelme":
        for each in found:
            name = texts[each.image_id]
            source = Path(os.path.realpath(Path(each.source).parent), Path(each.source).name)
            yield name, each.to_labelme(os.path.relpath(source, os.path.realpath((folder / name).parent)))
    elif form == "yolo":
        yield from ((texts[each.image_id], each.to_yolo()) for each in found)
        for name, lines in (("classes.txt", class_map.names), ("images.txt", [each.source for each in found])):
            yield name, "".join(f"{line}\n" for line in lines)
    elif form == "csv":
        yield OBJECT_FORMATS[form], "".join(each.to_csv(header=number == 0) for number, each in enumerate(found))
    elif form == "jsonl":
        yield OBJECT_FORMATS[form], "".join(f"{each.to_json()}\n" for each in found)
    else:
        yield OBJECT_FORMATS[form], _coco(found, class_map) if form == "coco" else [each.to_dict() for each in found]


def _coco(found: Sequence[Prediction], class_map: ClassMap) -> dict[str, Any]:
    """Return a COCO data set whose annotations are the objects, each with its score."""
    images = [
        {"id": each.image_id, "file_name": each.source, "height": each.size[0], "width": each.size[1]} for each in found
    ]
    objects = [one for each in found for one in each.to_coco()]
    annotations = [{"id": number, **one, "area": _area(one), "iscrowd": 0} for number, one in enumerate(objects, 1)]
    categories = [
        {"id": number, "name": name} for number, name in zip(class_map.category_ids, class_map.names, strict=True)
    ]
    return {"images": images, "annotations": annotations, "categories": categories}


def _area(one: Mapping[str, Any]) -> float:
    """Return the pixels of the mask, or of the box of a detector without mask head."""
    if "segmentation" in one:
        return float(coco_mask.area(dict(one["segmentation"])))
    return float(one["bbox"][2] * one["bbox"][3])


def write_classes(output: Output, predictor: ClassifierPredictor, images: InputImages, threshold: float) -> list[str]:
    """Write the most probable classes of each image as JSON and on a sheet; return the lines to print."""
    entries: list[dict[str, Any]] = []
    shown: list[ProbableClasses] = []
    labels = dict(zip(predictor.class_map.category_ids, class_labels(predictor.class_map), strict=True))
    with output.writing(["predictions.json", "sheet.png"], images.all_files):
        for _, file, image, _ in images:
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
    return [*lines, f"classes of {counted(len(entries), 'image')}, {len(shown)} of them on the sheet: {where}"]


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
        for number, _, image, reference in images:
            found = replace(predictor.panoptic(image, reference=reference), image_id=number)
            save_picture(folder / names[number], draw_panoptic(image, found, labels))
            yield found

    maps_of_images = [f"panoptic/{name}" for name in names.values()]
    with output.writing([*names.values(), *maps_of_images, "panoptic.json"], images.all_files):
        write_panoptic(folder / "panoptic.json", folder / "panoptic", maps(), predictor.class_map, names)
    return [f"panoptic maps of {counted(len(images.files) - len(images.unreadable), 'image')}: {printable(folder)}"]


def write_semantic_maps(output: Output, predictor: SegmentationPredictor, images: InputImages) -> list[str]:
    """Write pictures, the maps as grey PNG files of class indices in ``maps``, and the names in ``classes.txt``."""
    names, labels, folder = images.picture_names(), class_labels(predictor.class_map), output.folder
    maps = {number: f"maps/{name}" for number, name in names.items()}
    with output.writing([*names.values(), *maps.values(), "classes.txt"], images.all_files):
        make_output_folder(folder / "maps", "--output")
        for number, _, image, _ in images:
            found = predictor(image)
            save_picture(folder / names[number], draw_panoptic(image, as_segments(found, number), labels))
            save_picture(folder / maps[number], found[None])
        write_text(folder / "classes.txt", "".join(f"{name}\n" for name in predictor.class_map.names))
    return [f"maps of {counted(len(images.files) - len(images.unreadable), 'image')}: {printable(folder)}"]


def _stem(file: Path) -> str:
    """Return a file's name without suffix, cut to the limit, with underscores for unprintable letters."""
    stem = "".join(letter if letter.isprintable() else "_" for letter in file.stem)
    return stem.encode()[:LONGEST_STEM].decode(errors="ignore")


def _stamp(file: Path) -> list[int] | None:
    """Return size and modification time in nanoseconds; None for a missing file."""
    try:
        status = file.stat()
    except (OSError, ValueError):
        return None
    return [status.st_size, status.st_mtime_ns]
