"""Share of padding in the training batches, with and without buckets of similar width / height (data.aspect_buckets).

python benchmarks/padding.py --annotations captions_val2017.json --output benchmarks/results/padding.json

DETR's training transforms run on meta tensors. The default sizes are those of the 5,000 images of COCO val2017, which
this command saved in the results; any COCO JSON whose images have width and height works.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torchvision.tv_tensors import BoundingBoxes, BoundingBoxFormat, Image
from tqdm import tqdm

from command import print_and_write, print_header
from detr_bf.common.errors import InputError
from detr_bf.common.terminal import run_tool
from detr_bf.common.timing import Spread
from detr_bf.config import load_config
from detr_bf.data.annotation_values import annotated_size
from detr_bf.data.batches import EpochBatches, aspect_buckets, derive_seed
from detr_bf.data.transforms import Sample, SampleTransform, train_transform

Epochs = Sequence[tuple[int, int, np.ndarray]]  # seed, epoch and sizes (images, 2) after the transforms
RECORD = Path(__file__).parent / "results" / "padding.json"


@dataclass(frozen=True)
class Sizes:
    """Image sizes of a data set."""

    source: str
    images: list[tuple[int, int]]  # (height, width) in pixels, ascending

    @classmethod
    def read(cls, path: Path) -> Sizes:
        """Read a COCO JSON, or an output of this benchmark.

        Raises:
            InputError: the file is neither, or an image has no size.
        """
        try:
            content = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise InputError(f"--annotations {path} cannot be read ({error}); expected a COCO JSON") from error
        content = content if isinstance(content, dict) else {}
        if "sizes" in content:
            counts = content["sizes"]
            return cls(content["source"], [(height, width) for height, width, images in counts for _ in range(images)])
        sizes = [annotated_size(image) for image in content.get("images", ())]
        known = sorted(size for size in sizes if size is not None)
        if len(known) < len(sizes) or len(known) < 2:
            raise InputError(
                f"--annotations {path} names {len(sizes)} images, {len(known)} of them with width and height; "
                "expected a COCO JSON of two images or more, all with both"
            )
        return cls(path.name, known)


@dataclass(frozen=True)
class Row:
    """Line of the table."""

    batch_size: int
    buckets: int
    mean: float  # share of padding in the batches' pixels
    spread: Spread  # over the epochs
    pixels: float  # of all batches, including padding, relative to those without buckets

    def __str__(self) -> str:
        low, high = self.spread.low, self.spread.high
        cells = f"{self.mean:.1%} | {low:.1%} to {high:.1%} | {self.pixels:.3f}"
        return f"| {self.batch_size} | {self.buckets} | {cells} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--annotations", type=Path, default=RECORD, metavar="FILE", help="default COCO val2017's sizes")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=(2, 4, 8, 16), metavar="B")
    parser.add_argument("--buckets", type=int, nargs="+", default=(1, 2, 4, 8), metavar="N")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="default %(default)s")
    parser.add_argument("--epochs", type=int, default=4, metavar="N", help="of each seed, default %(default)s")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write all numbers here, as JSON")
    options = parser.parse_args(arguments)
    return run_tool(lambda: run(options))


def run(options: argparse.Namespace) -> int:
    """Simulate, print and write."""
    if min(options.seeds, options.epochs) < 1 or options.seeds * options.epochs < 2:
        raise InputError(
            f"--seeds and --epochs must be 1 or more and their product 2 or more, for a spread; "
            f"got {options.seeds} and {options.epochs}"
        )
    sizes = Sizes.read(options.annotations)
    epochs = list(simulated_epochs(sizes, options.seeds, options.epochs))
    counts = [(*size, count) for size, count in Counter(sizes.images).items()]
    print_header("batch size", "buckets", "padding", "10th to 90th", "pixels / without buckets")
    rows = list(measure(sizes, epochs, options))  # the file may be the input of the next call: written once
    return print_and_write(rows, options, annotations=str(options.annotations), source=sizes.source, sizes=counts)


def measure(sizes: Sizes, epochs: Epochs, options: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of all batch sizes and numbers of buckets."""
    for batch_size in options.batch_sizes:
        without = shares(sizes, epochs, batch_size, 1)
        for buckets in options.buckets:
            found = shares(sizes, epochs, batch_size, buckets)
            pixels = statistics.fmean((1 - one) / (1 - other) for one, other in zip(without, found, strict=True))
            yield Row(batch_size, buckets, statistics.fmean(found), Spread.of(found), pixels)


def simulated_epochs(sizes: Sizes, seeds: int, epochs: int) -> Iterator[tuple[int, int, np.ndarray]]:
    """Return seed, epoch and the sizes (images, 2) of all images after DETR's training transforms."""
    settings = asdict(load_config(None, []).data.transforms)
    del settings["eval_short_side"]
    settings["size_divisor"] = 1  # DETR rounds no sides
    transform = train_transform(**settings)
    for number in range(seeds * epochs):
        seed, epoch = divmod(number, epochs)
        torch.manual_seed(derive_seed(seed, epoch))
        progress = tqdm(sizes.images, desc=f"seed {seed}, epoch {epoch}", unit="image", disable=None, leave=False)
        yield seed, epoch, np.array([transformed(size, transform) for size in progress])


def transformed(size: tuple[int, int], transform: SampleTransform) -> tuple[int, int]:
    """Return (height, width) of an image of ``size`` after the transform."""
    image = Image(torch.empty(3, *size, dtype=torch.uint8, device="meta"))
    boxes = BoundingBoxes(torch.zeros(0, 4), format=BoundingBoxFormat.XYXY, canvas_size=size)
    height, width = transform(Sample(image, boxes, torch.zeros(0, dtype=torch.int64))).image.shape[-2:]
    return height, width


def shares(sizes: Sizes, epochs: Epochs, batch_size: int, buckets: int) -> list[float]:
    """Return the share of padding in all batches of each epoch."""
    groups = aspect_buckets(sizes.images, buckets)
    found = []
    for seed, epoch, transformed_sizes in epochs:
        content = total = 0
        for batch in EpochBatches(len(sizes.images), batch_size, seed=seed, epoch=epoch, buckets=groups):
            images = transformed_sizes[[key.index for key in batch]]
            content += int(images.prod(axis=1).sum())
            total += len(images) * int(images.max(axis=0).prod())
        found.append(1 - content / total)
    return found


if __name__ == "__main__":
    sys.exit(main())
