"""Compare the annotations to check of trained detectors with labels that other people made of the same images.

python benchmarks/label_errors.py DATA OTHER RUN... --output benchmarks/results/label_errors_bccd.json

DATA is the folder that the runs were evaluated on, OTHER the same photographs with other labels, under any file names:
an image of OTHER is the image of DATA of the same size whose thumbnail correlates with its own by 0.999 or more. Each
entry of ``suspects`` in ``errors.json`` of the runs is looked up in OTHER: a detection without an object, or with one
of another class, is confirmed by a box of its class with an IoU of 0.5 or more; an object that was never found is
confirmed if no box of OTHER has an IoU of 0.5 with it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torchvision.ops import box_convert, box_iou

from command import write_record
from detr_bf.common.progress import progress_bar
from detr_bf.common.terminal import run_tool
from detr_bf.data.formats import read_folder
from detr_bf.data.images import read_image

SAME_IMAGE, SAME_OBJECT = 0.999, 0.5  # least correlation, least IoU
Labels = tuple[list[str], torch.Tensor]  # names of the classes, boxes (N, 4) x0, y0, x1, y1 in pixels


def main() -> int:
    """Run the comparison and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", metavar="DATA")
    parser.add_argument("other", metavar="OTHER")
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    return run_tool(lambda: run(options))


def run(options: argparse.Namespace) -> int:
    """Match the images, look all suspects up, print and write."""
    data, reviewed = Path(options.data), Path(options.other)
    own, other = labels_of(data), labels_of(reviewed)
    same = same_images(data, list(own), reviewed, list(other))
    changes: Counter[str] = Counter()
    for name, match in same.items():
        overlaps = box_iou(own[name][1], other[match][1])
        changes["objects"] += len(own[name][0])
        changes["other objects"] += len(other[match][0])
        changes["added"] += int((best(overlaps.T) < SAME_OBJECT).sum())
        changes["removed"] += int((best(overlaps) < SAME_OBJECT).sum())
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for folder in options.runs:
        errors = json.loads((Path(folder) / "errors.json").read_text())
        for suspect in errors["suspects"]:
            counterpart = same.get(suspect["file"])
            kind = kind_of(suspect)
            found[kind]["listed"] += 1
            if counterpart is not None:
                found[kind]["in both"] += 1
                found[kind]["confirmed"] += is_confirmed(kind, suspect, errors["classes"], other[counterpart])
    record = {"labels": {"images": len(own), "images in both": len(same), **changes}, "suspects": found}
    print(json.dumps(record, indent=1))
    write_record(options, **record)
    return 0


def labels_of(root: Path) -> dict[str, Labels]:
    """Read the boxes of all images of a folder, by file name."""
    content = read_folder(root).content
    names = {category["id"]: category["name"] for category in content.categories}
    objects: dict[int, list[Mapping[str, Any]]] = {image["id"]: [] for image in content.images}
    for annotation in content.annotations:
        objects[annotation["image_id"]].append(annotation)
    return {
        image["file_name"]: (
            [names[each["category_id"]] for each in objects[image["id"]]],
            box_convert(torch.tensor([each["bbox"] for each in objects[image["id"]]]).reshape(-1, 4), "xywh", "xyxy"),
        )
        for image in content.images
    }


def same_images(one: Path, names: list[str], other: Path, other_names: list[str]) -> dict[str, str]:
    """Return for images of a folder the same image of another one."""
    sizes, thumbnails = thumbnails_of(one, names)
    other_sizes, other_thumbnails = thumbnails_of(other, other_names)
    correlation = thumbnails @ other_thumbnails.T
    correlation[[[size != each for each in other_sizes] for size in sizes]] = -1
    nearest = correlation.argmax(1)
    pairs = zip(names, nearest, correlation.max(1), strict=True)
    return {name: other_names[index] for name, index, value in pairs if value >= SAME_IMAGE}


def thumbnails_of(root: Path, names: list[str]) -> tuple[list[tuple[int, int]], np.ndarray]:
    """Return sizes, and grey thumbnails with mean 0 and length 1 (N, P)."""
    sizes, values = [], []
    for name in progress_bar(names, desc=str(root), unit="image"):
        image = read_image(root / name)
        sizes.append((image.shape[2], image.shape[1]))
        grey = image.float().mean(0, keepdim=True)[None]
        values.append(F.interpolate(grey, (24, 32), mode="area").double().numpy().ravel())
    centred = np.stack(values) - np.mean(values, axis=1, keepdims=True)
    return sizes, centred / np.maximum(np.linalg.norm(centred, axis=1, keepdims=True), 1e-9)


def best(overlaps: torch.Tensor) -> torch.Tensor:
    """Return the largest value of each row, 0 of an empty one."""
    return overlaps.amax(1) if overlaps.shape[1] else overlaps.new_zeros(len(overlaps))


def kind_of(suspect: Mapping[str, Any]) -> str:
    """Return the kind of an entry of ``suspects``."""
    if suspect["score"] is None:
        return "never found"
    return "no object" if suspect["annotated"] is None else "other class"


def is_confirmed(kind: str, suspect: Mapping[str, Any], classes: list[str], labels: Labels) -> bool:
    """Return True if the other labels say what the suspect says."""
    names, boxes = labels
    near = box_iou(torch.tensor([suspect["box"]]), boxes)[0] >= SAME_OBJECT
    if kind == "never found":
        return not bool(near.any())
    return any(hit and name == classes[suspect["label"]] for hit, name in zip(near.tolist(), names, strict=True))


if __name__ == "__main__":
    sys.exit(main())
