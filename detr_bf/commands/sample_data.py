"""Build a sample data set of composites as COCO JSON and image files."""

from __future__ import annotations

import argparse

from detr_bf.commands.arguments import SAMPLE_OPTIONS
from detr_bf.common.text import printable
from detr_bf.data.samples import build_digits, build_scenes, digits
from detr_bf.data.samples.writing import MANIFEST

SETS = {"digits": build_digits, "scenes": build_scenes}


def main(options: argparse.Namespace) -> int:
    """Build the set and print its files and licence."""
    given = {key: value for key in SAMPLE_OPTIONS if (value := getattr(options, key)) is not None}
    folder, licence = SETS[options.name](options.output, progress=True, **given), digits.LICENCE
    annotations = sorted(path.name for path in folder.glob("*.json") if path.name != MANIFEST)
    print(f"{printable(folder)}: {', '.join(annotations)} and their images\n{licence['name']} ({licence['url']})")
    return 0
