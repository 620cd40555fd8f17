"""Analyse trained models: writes OUTPUT/NAME.csv and a picture that compares the runs."""

from __future__ import annotations

import argparse
import csv
import io
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch.utils.data import Dataset

from detr_bf.analysis.batch_attention import (
    PlaceAttention,
    attention_at,
    choose_places,
    draw_batch_attention,
    draw_reference_attention,
    place_in,
)
from detr_bf.analysis.classification import ANALYSES, EPSILONS, Analysis, Pixels, Subject
from detr_bf.analysis.corruptions import corrupted_scores, draw_corruptions
from detr_bf.analysis.detection import (
    compare_mini_batch_inference,
    draw_queries,
    feature_maps_of,
    look_of_queries,
    panoptic_rows,
)
from detr_bf.analysis.images import draw_feature_maps
from detr_bf.analysis.inspected import InspectedDetector, InspectedRun, load_inspected, task_of_checkpoint
from detr_bf.classification.assembly import build_classifier_criterion
from detr_bf.classification.assembly_data import build_image_eval_transform, build_image_splits, read_image_splits
from detr_bf.classification.batch import LabelledImage, LabelledImages
from detr_bf.classification.data import LabelledImageSet
from detr_bf.common.devices import device_of
from detr_bf.common.errors import InputError
from detr_bf.common.files import check_output_file, write_text
from detr_bf.common.progress import progress_bar
from detr_bf.common.text import counted, csv_cell, printable, safe_message
from detr_bf.data.batches import IndexBatches
from detr_bf.data.loader import make_loader
from detr_bf.engine import EvaluationLoop
from detr_bf.report import class_labels, save_picture
from detr_bf.report.figures import save_figure
from detr_bf.report.panoptic import panoptic_comparison
from detr_bf.segmentation.assembly import build_segmentation_data, segmentation_loop
from detr_bf.segmentation.batch import SegmentationBatch
from detr_bf.segmentation.criterion import SegmentationEvaluator
from detr_bf.tasks import read_trained

logger = logging.getLogger(__name__)

BATCH_ATTENTION, QUERIES, PANOPTIC = "batch-attention", "queries", "panoptic"
FEATURE_MAPS, MINI_BATCH, CORRUPTED = "feature-maps", "mini-batch-inference", "corruptions"
BATCH_SIZE = 64  # images, of classifiers
IMAGES_SHOWN = 6  # images
QUERY_IMAGES = 200  # whose boxes are collected
PLACES = 3  # images with a marked position
BATCH_SHOWN = 8  # most images of a batch, unless asked for more


def main(options: argparse.Namespace) -> int:
    """Analyse runs, and write the table and the picture; options that the analysis would ignore are errors."""
    named = {BATCH_ATTENTION: _batch_attention, QUERIES: _queries, PANOPTIC: _panoptic, MINI_BATCH: _mini_batch}
    named[CORRUPTED] = _corruptions
    if options.name == FEATURE_MAPS and task_of_checkpoint(Path(options.runs[0])) == "detection":
        named[FEATURE_MAPS] = _feature_maps
    if options.name in named and options.split != "val":
        raise InputError(f"--split {options.split}: {options.name} takes validation images, leave it out")
    if options.format and options.name == MINI_BATCH:
        raise InputError(f"--format {options.format}: {MINI_BATCH} writes a table without a picture, leave it out")
    if options.name not in named and not ANALYSES[options.name].images:
        given = {"--images": options.images, "--batch-size": options.batch_size, "--seed": options.seed}
        unused = [name for name, value in given.items() if value is not None]
        if unused := unused + ["--split"] * (options.split != "val"):
            raise InputError(f"{options.name} takes no images: leave out {', '.join(unused)}")
    options.seed = options.seed or 0
    if not 0 <= options.seed < 2**63:
        raise InputError(f"--seed must be from 0 to 2^63 - 1, got {options.seed}")
    return named.get(options.name, _run)(options)


def _inspected(options: argparse.Namespace) -> list[InspectedRun]:
    """Return all runs; they must have the same validation images."""
    overrides = [*options.overrides, f"device={options.device}"]
    runs = [
        load_inspected(name, source, overrides)
        for name, source in run_names([Path(run) for run in options.runs]).items()
    ]
    for other in runs[1:]:
        if list(other.names) != list(runs[0].names):
            raise InputError(
                f"{runs[0].name} and {other.name} have different validation images: give both the same data with "
                "data.root=DIR, or analyse them one by one"
            )
    return runs


def _detectors(options: argparse.Namespace) -> list[InspectedDetector]:
    runs = _inspected(options)
    found = [run for run in runs if isinstance(run, InspectedDetector)]
    if len(found) < len(runs):
        raise InputError(f"{options.name} is an analysis of detectors, and one of the runs is a classifier")
    return found


def _indices(options: argparse.Namespace, run: InspectedRun, default: int) -> list[int]:
    """Return the image that is named, or random ones, which are the same for one seed."""
    if options.images is not None and options.images < 1:
        raise InputError(f"--images must be 1 or more, got {options.images}")
    if options.image:
        return [run.find(options.image)]
    order = torch.randperm(len(run.names), generator=torch.Generator().manual_seed(options.seed))
    return order[: options.images or default].tolist()


def _feature_maps(options: argparse.Namespace) -> int:
    """Draw feature maps of both streams of detectors."""
    table, picture = _outputs(options)
    runs = _detectors(options)
    indices = _indices(options, runs[0], IMAGES_SHOWN)
    found = {run.name: feature_maps_of(run, indices, layer=options.layer, level=options.level) for run in runs}
    return _write(table, picture, draw_feature_maps(found), {name: maps.rows() for name, maps in found.items()})


def _queries(options: argparse.Namespace) -> int:
    """Draw where the queries of detectors look."""
    table, picture = _outputs(options)
    runs = _detectors(options)
    others = _indices(argparse.Namespace(images=options.images, image=None, seed=options.seed), runs[0], QUERY_IMAGES)
    index = runs[0].find(options.image) if options.image else others[0]
    found = {run.name: look_of_queries(run, index, others) for run in runs}
    return _write(table, picture, draw_queries(found), {name: own.rows() for name, own in found.items()})


def _panoptic(options: argparse.Namespace) -> int:
    """Draw images beside their panoptic maps: ground truth and all runs."""
    if options.format not in (None, "png"):
        raise InputError(f"--format {options.format}: panoptic maps are drawn as png")
    table, picture = _outputs(options)
    runs = _detectors(options)
    rows = panoptic_rows(runs, _indices(options, runs[0], IMAGES_SHOWN))
    titles = ["Ground truth", *(run.name for run in runs)]
    save_picture(picture, panoptic_comparison(rows, titles, class_labels(runs[0].data.class_map)))
    write_table(
        table,
        [
            {"image": name, "map": title, "segments": len(panoptic.segments)}
            for _, name, maps in rows
            for title, panoptic in zip(titles, maps, strict=True)
        ],
    )
    print(safe_message(f"{counted(len(rows), 'image')} of {counted(len(runs), 'run')}: {table}, {picture.name}"))
    return 0


def _mini_batch(options: argparse.Namespace) -> int:
    """Print metrics of detectors without and with batch attention in evaluation, and write them."""
    table, _ = _outputs(options)
    _check_counts(options)
    rows: list[dict[str, object]] = []
    for run in _detectors(options):
        found = compare_mini_batch_inference(
            run, batch_size=options.batch_size, images=options.images, seed=options.seed
        )
        rows += [{"run": run.name, "seed": options.seed, **row} for row in found.rows()]
        print(safe_message(f"{run.name}, mini-batch inference, seed {options.seed}: {found}"))
    write_table(table, rows)
    print(safe_message(table))
    return 0


def _corruptions(options: argparse.Namespace) -> int:
    """Measure mIoU of segmentation networks on images with noise and blur."""
    table, picture = _outputs(options)
    _check_counts(options)
    found = {}
    for name, source in run_names([Path(run) for run in options.runs]).items():
        task, model, classes = read_trained(source, ("segmentation",), options.overrides, device_of(options.device))
        config = task.config
        config.eval.batch_size = options.batch_size or config.eval.batch_size
        data = build_segmentation_data(config)
        if data.class_map.names != classes.names:
            raise InputError(f"{source} was trained on other classes than its data now have")
        count = min(options.images or len(data.val), len(data.val))
        chosen = torch.randperm(len(data.val), generator=torch.Generator().manual_seed(options.seed))[:count]
        loop = segmentation_loop(config, data.val.subset(sorted(chosen.tolist())), device_of(options.device))
        loop = replace(loop, make_batches=partial(_with_progress, loop, f"{options.name}, {name}"))
        found[name] = corrupted_scores(model, loop, partial(SegmentationEvaluator, classes), seed=options.seed)
    return _write(table, picture, draw_corruptions(found), {name: own.rows() for name, own in found.items()})


def _with_progress(loop: EvaluationLoop, description: str, start: int) -> Iterator[SegmentationBatch]:
    return iter(progress_bar(loop.make_batches(start), total=loop.num_batches, desc=description, unit="batch"))


def _check_counts(options: argparse.Namespace) -> None:
    for name, count in (("--batch-size", options.batch_size), ("--images", options.images)):
        if count is not None and count < 1:
            raise InputError(f"{name} must be 1 or more, got {count}")


def _batch_attention(options: argparse.Namespace) -> int:
    """Draw the batch attention of some places in all runs."""
    table, picture = _outputs(options)
    if options.auto is not None and options.auto < 1:
        raise InputError(f"--auto must be 1 or more, got {options.auto}")
    if options.image and options.auto:
        raise InputError("--image names one image and --auto chooses some: give one of them")
    if options.point and not options.image:
        raise InputError("--point is a point of the image that --image names: give both")
    subjects = _inspected(options)
    size = options.images or max(2, min(BATCH_SHOWN, subjects[0].config.train.batch_size))
    if len({each.attends_to_references for each in subjects}) > 1:
        raise InputError("one of the runs reads references and another does not: analyse them one at a time")
    if options.images and subjects[0].attends_to_references:
        raise InputError(f"--images {options.images}: each image attends to its reference alone, leave it out")
    places = choose_places(subjects[0], options.auto or PLACES, size, options.seed)
    if options.image:
        places = [place_in(subjects[0], options.image, parse_point(options.point), size, options.seed)]
    found: dict[str, list[PlaceAttention]] = {}
    for subject in subjects:
        models = {f"{subject.name}, untrained": subject.untrained()} if options.untrained else {}
        for name, model in (models | {subject.name: subject.model}).items():
            found[name] = [
                attention_at(subject, place, model=model, layer=options.layer, level=options.level)
                for place in progress_bar(places, desc=name, unit="image", leave=False)
            ]
    draw = draw_reference_attention if subjects[0].attends_to_references else draw_batch_attention
    rows = {name: [row for place in own for row in place.rows()] for name, own in found.items()}
    return _write(table, picture, draw(found), rows)


def _run(options: argparse.Namespace) -> int:
    """Analyse every run, write the table and the picture."""
    table, picture = _outputs(options)
    _check_counts(options)
    analysis = ANALYSES[options.name]
    results = {
        name: analysis.run(make_subject(source, analysis, options))
        for name, source in run_names([Path(run) for run in options.runs]).items()
    }
    return _write(table, picture, analysis.draw(results), {name: result.rows() for name, result in results.items()})


def _outputs(options: argparse.Namespace) -> tuple[Path, Path]:
    """Return the paths of the table and the picture, checked."""
    table, picture = (options.output / f"{options.name}.{suffix}" for suffix in ("csv", options.format or "png"))
    for path in (table, picture):
        check_output_file(path, "--output")
    return table, picture


def _write(table: Path, picture: Path, figure: Figure, results: Mapping[str, Sequence[Mapping[str, object]]]) -> int:
    """Write the rows of each run, and the figure."""
    rows = [{"run": name, **row} for name, own in results.items() for row in own]
    write_table(table, rows)
    save_figure(picture, figure)
    print(safe_message(f"{counted(len(rows), 'row')} of {counted(len(results), 'run')}: {table}, {picture.name}"))
    return 0


def run_names(sources: Sequence[Path]) -> dict[str, Path]:
    """Name runs by folder, or by folder and file; if two names are equal, by the differing parts of their paths."""
    if len({source.resolve() for source in sources}) < len(sources):
        raise InputError(f"the same RUN is given twice in {', '.join(map(str, sources))}")
    names = [f"{source.parent.name}/{source.stem}" if source.is_file() else source.resolve().name for source in sources]
    return dict(zip(names if len(set(names)) == len(names) else differences(sources), sources, strict=True))


def differences(sources: Sequence[Path]) -> list[str]:
    """Return each path without the common parts at the beginning and the end."""
    parts = [list(source.resolve().parts) for source in sources]
    for end in (0, -1):
        while all(len(path) > 1 for path in parts) and len({path[end] for path in parts}) == 1:
            for path in parts:
                path.pop(end)
    return ["/".join(path) for path in parts]


def make_subject(source: Path, analysis: Analysis, options: argparse.Namespace) -> Subject:
    """Load a run's model, and images of a split of its data if the analysis needs any."""
    device = device_of(options.device)
    task, model, class_map = read_trained(source, ("classification",), options.overrides, device)
    config = task.config
    pixels = Pixels(config.data.transforms.mean, config.data.transforms.std)
    if not analysis.images:
        return Subject(model, (), class_map.names, (), pixels)
    splits = build_image_splits(config)
    if splits.class_map != class_map:
        raise InputError(
            f"{source} was trained on the classes {', '.join(class_map.names)}, but its data has now "
            f"{', '.join(splits.class_map.names)}: give the data that it was trained on with data.root=DIR"
        )
    criterion = build_classifier_criterion(config, model, splits.class_counts).to(device)
    count = options.images or analysis.images
    images = splits.val
    if options.split == "train":  # splits.train augments its images
        images = LabelledImageSet(
            read_image_splits(config).train, class_map, build_image_eval_transform(config.data.transforms)
        )
    indices = torch.randperm(len(images), generator=torch.Generator().manual_seed(options.seed))[:count]
    batches = [part.tolist() for part in indices.split(options.batch_size or BATCH_SIZE)]
    return Subject(
        model=model,
        batches=load_batches(images, IndexBatches(batches), config.data.workers, f"{options.name}, {source}"),
        class_names=class_map.names,
        class_counts=splits.class_counts,
        pixels=pixels,
        loss=criterion.loss.criterion,
        epsilons=parse_epsilons(options.epsilons),
        patch=options.patch,
    )


def load_batches(
    images: Dataset[LabelledImage], sampler: IndexBatches, workers: int, description: str
) -> Iterator[LabelledImages]:
    """Load batches with a progress bar."""
    loader = make_loader(images, sampler, collate=LabelledImages.collate, workers=workers)
    for batch in progress_bar(loader, total=len(sampler), desc=description, unit="batch", leave=False):
        for reason in batch.replaced:
            logger.warning("unreadable image replaced by another: %s", reason)
        yield batch


def parse_point(text: str | None) -> tuple[float, float] | None:
    """Parse ``120,80``, in pixels."""
    if text is None:
        return None
    try:
        x, y = (float(number) for number in text.split(","))
    except ValueError as error:
        raise InputError(f"--point must be two numbers such as 120,80; got '{printable(text)}'") from error
    return x, y


def parse_epsilons(text: str | None) -> Sequence[float]:
    """Parse ``0,1,2``, in 255ths."""
    if text is None:
        return EPSILONS
    try:
        return [float(number) / 255 for number in text.split(",")]
    except ValueError as error:
        raise InputError(f"--epsilons must be numbers separated by commas, such as 0,1,2; got '{text}'") from error


def write_table(path: Path, rows: Sequence[dict[str, object]]) -> None:
    """Write CSV; None is an empty cell, and text is escaped so that a spreadsheet does not run it."""
    text = io.StringIO()
    table = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    table.writeheader()
    for row in rows:
        table.writerow({key: csv_cell(safe_message(x)) if isinstance(x, str) else x for key, x in row.items()})
    write_text(path, text.getvalue())
