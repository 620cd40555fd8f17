"""Build a sample data set of composites as COCO JSON and image files."""

from __future__ import annotations

import argparse

from detr_bf.commands.arguments import SAMPLE_OPTIONS
from detr_bf.common.errors import InputError
from detr_bf.common.text import printable
from detr_bf.data.samples import build_digits, build_pairs, build_scenes, digits, pairs
from detr_bf.data.samples.writing import MANIFEST

SETS = {"digits": build_digits, "scenes": build_scenes, "pairs": build_pairs}


def main(options: argparse.Namespace) -> int:
    """Build the set and print its files and licence."""
    given = {key: value for key in SAMPLE_OPTIONS if (value := getattr(options, key)) is not None}
    if options.name != "pairs" and "contrast" in given:
        raise InputError(f"--contrast is an option of pairs, not of {options.name}")
    folder = SETS[options.name](options.output, progress=True, **given)
    licence = pairs.PHOTO_LICENCE if options.name == "pairs" else digits.LICENCE
    annotations = sorted(path.name for path in folder.glob("*.json") if path.name != MANIFEST)
    print(f"{printable(folder)}: {', '.join(annotations)} and their images\n{licence['name']} ({licence['url']})")
    return 0
