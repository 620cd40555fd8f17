"""Build a sample data set of composites as COCO JSON and image files.

detr-bf sample-data digits --output data/digits
detr-bf sample-data scenes --output data/scenes
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from detr_bf.cli import run_tool
from detr_bf.data.samples import build_digits, build_scenes, digits
from detr_bf.data.samples.writing import MANIFEST
from detr_bf.text import printable

SETS = {"digits": build_digits, "scenes": build_scenes}
MEANING = "digits: MNIST on photographs; scenes: MNIST on textures, panoptic"
OPTIONS = {
    "num_train": "training images",
    "num_val": "validation images",
    "image_size": "pixels of a side",
    "seed": "0 or larger",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 0, or 2 for bad input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(SETS), help=MEANING)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="new folder, or the same set")
    for option, meaning in OPTIONS.items():
        parser.add_argument(
            f"--{option.replace('_', '-')}", type=int, metavar="N", help=f"{meaning}, default: the set's own"
        )
    given = vars(parser.parse_args(arguments))
    build, licence = SETS[given["name"]], digits.LICENCE

    def run() -> int:
        folder = build(given["output"], progress=True, **{key: given[key] for key in OPTIONS if given[key] is not None})
        annotations = sorted(path.name for path in folder.glob("*.json") if path.name != MANIFEST)
        print(f"{printable(folder)}: {', '.join(annotations)} and their images\n{licence['name']} ({licence['url']})")
        return 0

    return run_tool(run)
