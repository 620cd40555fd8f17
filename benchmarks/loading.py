"""Time of COCO evaluation against pycocotools, and of the training loader against DETR's.

python benchmarks/loading.py evaluation --rounds 3 --output benchmarks/results/evaluation_cpu.json
python benchmarks/loading.py loader --images DIR --annotations FILE --detr DIR \\
    --output benchmarks/results/loader_cpu.json

``evaluation``: random objects with about COCO's statistics, 100 detections an image. ``pycocotools`` reads the
annotation file and a list of results, ``ours`` the same file and tensors, which it checks; ours also finds the type of
each error and the best thresholds. It has read the file before, so a file of 16 MB or more (5,000 images) comes from
its cache; ``ours, first`` has no cache yet. ``metrics`` is ours (cached) without errors and thresholds; ``errors``
makes and writes errors.json after ``ours``. The twelve numbers must be identical, else the exit code is 1.

``loader``: an epoch of the first ``--count`` images, with DETR's training transforms and the start of the workers.
``DETR`` is its data set and loader, imported from a checkout; its images are normalised, ours are bytes that the model
normalises. ``ours, normalised`` does this in the main process. Without ``--detr`` ours alone is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torchvision
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Subset

from command import CONFIGS, cells, make_parser, print_header, run_benchmark, write_record
from detr_bf.assembly.data import build_loader, build_train_data
from detr_bf.backbones.backbone import MEAN, STD, normalize
from detr_bf.common.errors import InputError
from detr_bf.common.files import write_json
from detr_bf.common.structures import Batch, ClassMap, Detections
from detr_bf.common.timing import Spread, alternate, paired_ratios
from detr_bf.config import load_config
from detr_bf.data.batches import EpochBatches
from detr_bf.evaluation import CocoEvaluator, to_coco_results
from detr_bf.evaluation.error_types import error_document, never_found
from detr_bf.evaluation.results import BOX_METRIC_NAMES

PYCOCOTOOLS, OURS, METRICS, ERRORS, DETR = "pycocotools", "ours", "metrics", "errors", "DETR"
FIRST, NORMALISED = "ours, first", "ours, normalised"
CLASSES = ClassMap(tuple(range(1, 81)), tuple(f"class {number}" for number in range(1, 81)))
WIDTH, HEIGHT = 640, 480
OBJECTS, DETECTIONS = 7.3, 100  # an image
CROWDS = 0.01  # share of the objects


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit code."""
    parser = make_parser(__doc__, rounds=3, devices=("cpu",))
    parser.add_argument("part", choices=("evaluation", "loader"))
    parser.add_argument("--count", type=int, metavar="N", help="images; default 5000, for the loader all")
    parser.add_argument("--images", metavar="DIR", help="folder of photographs")
    parser.add_argument("--annotations", metavar="FILE", help="their COCO JSON")
    parser.add_argument("--detr", metavar="DIR", help="checkout of facebookresearch/detr")
    parser.add_argument("--workers", type=int, nargs="+", default=(0, 1, 2), metavar="N", help="default 0 1 2")
    parser.add_argument("--batch-size", type=int, default=2, metavar="B", help="default %(default)s")
    options = parser.parse_args(arguments)
    return run_benchmark({"evaluation": run_evaluation, "loader": run_loader}[options.part], options)


def run_evaluation(options: argparse.Namespace) -> int:
    """Measure, compare, print and write the evaluation.

    Raises:
        InputError: too few images.
    """
    count = 5000 if options.count is None else options.count
    if count < 1:
        raise InputError(f"--count must be 1 or more; got {count}")
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, DETR_BF_HOME=folder):
        path = Path(folder) / "annotations.json"
        content, detections = random_detections(count)
        write_json(path, content)
        del content
        case = Evaluations(path, detections)
        seconds = alternate(case.ways, options.rounds, warmup=0, description="evaluation")
    seconds["ours + errors"] = [sum(each) for each in zip(seconds[OURS], seconds[ERRORS], strict=True)]
    same = case.numbers[PYCOCOTOOLS] == case.numbers[OURS] == case.numbers[METRICS]
    print(f"{count:,} images, {len(case.results):,} detections; AP {case.numbers[OURS][0]:.4f}, ", end="")
    print(f"the twelve numbers are {'identical' if same else 'DIFFERENT'}")
    print_header("way", "s", "pycocotools / way", "10th to 90th")
    for way, times in seconds.items():
        ratio = Spread.of(paired_ratios(seconds, PYCOCOTOOLS, way))
        print(f"| {way} | {Spread.of(times).median:.2f} | {cells(ratio)}", flush=True)
    rows = [{"way": way, "seconds": times} for way, times in seconds.items()]
    write_record(options, count=count, numbers=case.numbers, identical=same, rows=rows)
    return 0 if same else 1


class Evaluations:
    """Ways to evaluate the same detections; each one keeps its twelve numbers."""

    def __init__(self, path: Path, detections: Sequence[Detections]) -> None:
        self.path, self.detections = path, detections
        self.results = to_coco_results(detections, CLASSES)
        self.numbers: dict[str, list[float]] = {}
        self.ways: dict[str, Callable[[], None]] = {
            PYCOCOTOOLS: self.pycocotools,
            METRICS: self.metrics,
            FIRST: self.first,
            OURS: self.ours,
            ERRORS: self.errors,
        }
        self.evaluator = self._updated()
        self.evaluator.summarize()  # for errors, and imports what it needs

    def pycocotools(self) -> None:
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval

        with contextlib.redirect_stdout(io.StringIO()):
            truth = COCO(str(self.path))
            found = truth.loadRes([dict(result) for result in self.results])  # it changes them
            evaluation = COCOeval(truth, found, "bbox")
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
        self.numbers[PYCOCOTOOLS] = evaluation.stats.tolist()

    def metrics(self) -> None:
        summary, _ = self._updated()._summary("bbox", CLASSES, partial=False)
        self.numbers[METRICS] = [getattr(summary, name) for name in BOX_METRIC_NAMES]

    def ours(self) -> None:
        self.evaluator = self._updated()
        summary = self.evaluator.summarize()
        self.numbers[OURS] = [getattr(summary, name) for name in BOX_METRIC_NAMES]

    def first(self) -> None:
        for cache in self.path.parent.rglob("*.columns"):
            cache.unlink()
        self.ours()

    def errors(self) -> None:
        images, precision = self.evaluator.errors, self.evaluator.precision
        assert precision is not None, "the evaluator has summarized"
        sizes: dict[int, tuple[int, int] | None] = {image.image_id: (HEIGHT, WIDTH) for image in images}
        missing = set(never_found(images))
        document = error_document(images, sizes, precision, CLASSES.distinct_names, 0.5, 12, missing)
        write_json(self.path.with_name("errors.json"), document)

    def _updated(self) -> CocoEvaluator:
        evaluator = CocoEvaluator(self.path, CLASSES, "hotcoco")
        evaluator.update(self.detections)
        return evaluator


def random_detections(count: int) -> tuple[dict[str, Any], list[Detections]]:
    """Return a COCO data set of random objects, and detections of ``count`` images: some right, most wrong."""
    random = np.random.default_rng(0)
    frequencies = 1 / np.arange(1, CLASSES.num_classes + 1)
    frequencies /= frequencies.sum()
    annotations: list[dict[str, Any]] = []
    found = []
    for image_id in range(1, count + 1):
        objects = int(min(random.geometric(1 / (1 + OBJECTS)) - 1, 60))
        boxes, labels = _random_boxes(random, objects), random.choice(CLASSES.num_classes, objects, p=frequencies)
        crowds = random.random(objects) < CROWDS
        outlines = (np.tile(boxes[:, :2], 20) + random.random((objects, 40)) * np.tile(boxes[:, 2:], 20)).round(2)
        columns = boxes.round(2).tolist(), labels, crowds, outlines.tolist()
        annotations += [
            {
                "id": len(annotations) + number,
                "image_id": image_id,
                "category_id": CLASSES.category_ids[label],
                "bbox": box,
                "area": box[2] * box[3] * (1 if crowd else 0.6),
                "iscrowd": int(crowd),
                "segmentation": [outline],
            }
            for number, (box, label, crowd, outline) in enumerate(zip(*columns, strict=True), 1)
        ]
        copies = np.repeat(np.arange(objects), random.binomial(2, 0.6, objects))[:DETECTIONS]  # 0 to 2 of each object
        near = boxes[copies] * (1 + random.normal(0, 0.08, (len(copies), 4)))
        other = random.choice(CLASSES.num_classes, DETECTIONS, p=frequencies)
        right = random.random(len(copies)) < 0.85
        other[: len(copies)] = np.where(right, labels[copies], other[: len(copies)])
        xywh = np.concatenate([near, _random_boxes(random, DETECTIONS - len(copies))])
        far = random.beta(1, 12, DETECTIONS - len(copies))
        scores = np.concatenate([random.beta(2, 1.5, len(copies)), far])
        corners = np.concatenate([xywh[:, :2], xywh[:, :2] + xywh[:, 2:]], axis=1)
        corner, score, label = (torch.from_numpy(v) for v in (corners.astype("f4"), scores.astype("f4"), other))
        found.append(Detections(image_id, corner, score, label))
    images = [
        {"id": number, "file_name": f"{number:012d}.jpg", "height": HEIGHT, "width": WIDTH}
        for number in range(1, count + 1)
    ]
    categories = [{"id": key, "name": name} for key, name in zip(CLASSES.category_ids, CLASSES.names, strict=True)]
    return {"images": images, "annotations": annotations, "categories": categories}, found


def _random_boxes(random: np.random.Generator, count: int) -> np.ndarray:
    """Return boxes (count, 4) x, y, width, height in pixels; two in five are small, one in four large."""
    sides = np.exp(random.normal(4.0, 1.1, (count, 1)) + random.normal(0, 0.35, (count, 2)))
    sides = np.clip(sides, 4, (WIDTH, HEIGHT))
    return np.concatenate([random.random((count, 2)) * ((WIDTH, HEIGHT) - sides), sides], axis=1)


def run_loader(options: argparse.Namespace) -> int:
    """Measure, print and write the loaders, one number of workers after the other.

    Raises:
        InputError: paths are missing, or the checkout is not DETR's.
    """
    if options.images is None or options.annotations is None:
        raise InputError("the loader needs --images DIR and --annotations FILE")
    if options.batch_size < 1 or min(options.workers) < 0:
        raise InputError("--batch-size must be 1 or more, --workers 0 or more")
    paths = [f"data.train.images={options.images}", f"data.train.annotations={options.annotations}"]
    config = load_config(CONFIGS / "detr" / "detr_r50.yaml", paths, task="detection")
    data = build_train_data(config)
    batches = min(options.count or len(data), len(data)) // options.batch_size
    if batches < 1:
        raise InputError(f"--count gives no batch of {options.batch_size} images: {len(data)} images are there")
    count = batches * options.batch_size
    peer = None if options.detr is None else detr_loader(options, count)
    rows = []
    print(f"{count} images, batch {options.batch_size}")
    print_header("workers", "way", "images/s", "DETR / way", "10th to 90th")
    for workers in options.workers:
        config.data.workers = workers
        make = build_loader(config, torch.device("cpu"))
        epoch = EpochBatches(count, options.batch_size, seed=0, epoch=0)
        ways = {OURS: partial(_exhaust, make(data, epoch)), NORMALISED: partial(_normalise, make(data, epoch))}
        if peer is not None:
            ways[DETR] = partial(_exhaust, peer(workers))
        seconds = alternate(ways, options.rounds, warmup=1, description=f"{workers} workers")
        for way, times in seconds.items():
            ratio = cells(Spread.of(paired_ratios(seconds, DETR, way))) if peer else "| |"
            print(f"| {workers} | {way} | {count / Spread.of(times).median:.1f} | {ratio}", flush=True)
        rows.append({"workers": workers, "seconds": seconds})
        write_record(options, count=count, rows=rows)
    return 0


def _exhaust(loader: Iterable[object]) -> None:
    for _ in loader:
        pass


def _normalise(loader: Iterable[Batch]) -> None:
    mean, std = (255 * torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    for batch in loader:
        normalize(batch.images, batch.padding_mask, mean, std)


def detr_loader(options: argparse.Namespace, count: int) -> Callable[[int], Iterable[object]]:
    """Return a function from a number of workers to DETR's training loader of the first ``count`` images.

    Older checkouts compare the first characters of torchvision's version with 0.7, so 0.29 is hidden from the import.
    """
    version = torchvision.__version__
    sys.path.insert(0, options.detr)
    torchvision.__version__ = "0.9.0"
    try:
        coco, misc = importlib.import_module("datasets.coco"), importlib.import_module("util.misc")
    except ImportError as error:
        raise InputError(f"--detr {options.detr} is no checkout of facebookresearch/detr ({error})") from error
    finally:
        torchvision.__version__ = version
        sys.path.remove(options.detr)
    with contextlib.redirect_stdout(io.StringIO()):
        transforms = coco.make_coco_transforms("train")
        data = coco.CocoDetection(options.images, options.annotations, transforms, return_masks=False)
    part = Subset(data, range(count))

    def loader(workers: int) -> Iterable[object]:
        batches = BatchSampler(RandomSampler(part), options.batch_size, drop_last=True)
        return DataLoader(part, batch_sampler=batches, collate_fn=misc.collate_fn, num_workers=workers)

    return loader


if __name__ == "__main__":
    sys.exit(main())
