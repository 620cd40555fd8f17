"""Section of ``report.html`` about the training and validation data of a detector, from ``data_statistics.json``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from detr_bf.common.files import DATA_FILE, read_json
from detr_bf.data.checks.statistics import NAMES
from detr_bf.report.figures import FAINT, INK, SKY, VERMILION, clear_lines, save_figure, title
from detr_bf.report.page import escaped, missing, percent, picture, reading, row, section, table

_PICTURE = "pictures/data.svg"
_SPLITS = {"train": "training", "val": "validation"}
_MOST_LABELS = 7  # of the edges of a histogram


def data_section(run_dir: Path) -> Iterator[str]:
    """Yield the section about the data; one sentence if the run has no ``data_statistics.json``."""
    path = run_dir / DATA_FILE
    if not path.is_file():
        yield section("Data", missing(DATA_FILE, "statistics of its data"))
        return
    with reading(path):
        yield section("Data", _content(run_dir, read_json(path)))


def _content(run_dir: Path, document: Mapping[str, Any]) -> str:
    drawn = picture(
        run_dir / _PICTURE,
        f"Distributions of {', '.join(NAMES.values())}",
        lambda file: save_figure(file, _histograms(document)),
    )
    sentences = [f"{text[:1].upper()}{text[1:]}." for text in document["statements"]]
    if len(document["splits"]) == 2 and not sentences:
        sentences = ["The splits differ in no distribution by more than chance."]
    found = "".join(f"<p>{escaped(sentence)}</p>" for sentence in sentences)
    note = (
        "Shares of each split. Objects are counted without crowds; their size is the root of the share of the image's "
        "area that the box covers. Small objects have at most 32 x 32 pixels, medium ones at most 96 x 96."
    )
    return f'{_numbers_table(document["splits"])}{found}{drawn}<p class="faint">{note}</p>{_classes_table(document)}'


def _numbers_table(splits: Mapping[str, Mapping[str, Any]]) -> str:
    rows, images = [], sum(split["images"] for split in splits.values())
    for name, split in splits.items():
        sizes = [percent(number / max(1, split["objects"])) for number in split["objects_by_size"].values()]
        numbers = [f"{split[key]:,}" for key in ("images", "images_without_objects", "objects", "crowds")]
        rows.append(row(_SPLITS[name], split["images"] / max(1, images), [*numbers, *sizes]))
    return table(
        ("Split", "Images", "Without objects", "Objects", "Crowds", "Small (%)", "Medium (%)", "Large (%)"), rows
    )


def _classes_table(document: Mapping[str, Any]) -> str:
    """Return the classes with their objects and images in each split, most objects first."""
    splits, classes = document["splits"], document["classes"]
    shares = {
        split: [entry[split]["objects"] / max(1, numbers["objects"]) for entry in classes]
        for split, numbers in splits.items()
    }
    (first, of_first), *_ = shares.items()
    titles = ["Class"]
    for name in (_SPLITS[split] for split in splits):
        titles += [f"{name.capitalize()} objects", "Images", "Share (%)"]
    rows = []
    for at in sorted(range(len(classes)), key=lambda at: -classes[at][first]["objects"]):
        values: list[str] = []
        for split in splits:
            entry = classes[at][split]
            values += [f"{entry['objects']:,}", f"{entry['images']:,}", percent(shares[split][at])]
        rows.append(row(classes[at]["name"], of_first[at] / (max(of_first) or 1), values))
    return table(titles, rows)


def _histograms(document: Mapping[str, Any]) -> Figure:
    figure = Figure(figsize=(11, 6.2), layout="constrained", facecolor="white")
    grid = figure.subplots(2, 3).ravel()
    splits = document["splits"]
    for axes, (name, heading) in zip(grid, NAMES.items(), strict=False):
        counts = {split: np.array(numbers["histograms"][name]) for split, numbers in splits.items()}
        counted = "images" if name.startswith("image") or name == "objects_per_image" else "objects"
        _plot_bins(axes, heading, counted, counts, document["edges"][name])
    sizes = {split: np.array([*numbers["objects_by_size"].values()]) for split, numbers in splits.items()}
    _plot_bins(grid[5], "COCO's sizes of the objects", "objects", sizes, ())
    grid[5].set_xticks(range(3), [*splits[next(iter(splits))]["objects_by_size"]])
    handles, labels = grid[5].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside upper right", ncols=2, frameon=False, fontsize=9)
    return figure


def _plot_bins(
    axes: Axes, heading: str, counted: str, counts: Mapping[str, np.ndarray], edges: Sequence[float]
) -> None:
    """Draw the shares of the bins in use: bars for the training split, a line of steps for the other."""
    used = np.flatnonzero(sum(counts.values()))
    low, high = (max(0, int(used[0]) - 1), int(used[-1]) + 1) if len(used) else (0, 0)
    for split, each in counts.items():
        shares, at = 100 * each / max(1, each.sum()), np.arange(len(each))
        if split == "train":
            axes.bar(at, shares, 0.94, color=SKY, alpha=0.7, label=_SPLITS[split])
        else:
            axes.stairs(shares, np.arange(len(each) + 1) - 0.5, color=VERMILION, linewidth=1.8, label=_SPLITS[split])
    title(axes, f"{heading[:1].upper()}{heading[1:]}")
    axes.set_xlim(low - 0.5, min(high, len(next(iter(counts.values()))) - 1) + 0.5)
    axes.set_ylim(bottom=0)
    shown = range(low, min(high, len(edges)))
    step = -(-len(shown) // _MOST_LABELS) or 1
    ticks = shown[::step]
    digits = [2 if edges[at] < 0.1 else 3 if edges[at] < 1000 else 4 for at in ticks]
    names = [f"{edges[at]:.{most}g}" for at, most in zip(ticks, digits, strict=True)]
    axes.set_xticks([at + 0.5 for at in ticks], names)
    axes.set_ylabel(f"{counted} (%)", color=INK)
    axes.tick_params(labelsize=8)
    axes.grid(axis="y", color=FAINT, linewidth=0.5)
    clear_lines(axes)
