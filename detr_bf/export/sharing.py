"""Folder of a trained detector to give to others: safetensors weights, ``config.json`` and a model card.

The folder holds no paths of the machine that it was trained on and nothing that is executed when it is loaded.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor

from detr_bf.common.errors import InputError
from detr_bf.common.files import (
    DATA_FILE,
    METRICS_FILE,
    file_sha256,
    is_file,
    make_output_folder,
    read_json,
    read_records,
    read_safetensors,
    write_json,
    write_text,
)
from detr_bf.common.structures import ClassMap
from detr_bf.common.text import printable
from detr_bf.engine import Checkpoint
from detr_bf.evaluation import ScoreThresholds
from detr_bf.interop.weights import write_weights

WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
_FORMAT = "detr_bf detector 1"
_SHOWN_METRICS = ("AP", "AP50", "AP75", "APs", "APm", "APl", "mask/AP", "PQ")
_PRIVATE = {
    "data.root": "",
    "output_dir": "",
    "init_from": "",
    "data.val_fraction": 0.0,
    "data.folds": 0,
    "data.fold": 0,
}


@dataclass(frozen=True)
class SourceCheckpoint:
    """Checkpoint that a predictor was made of."""

    config: dict[str, Any]
    source: Path
    step: int | None  # optimizer steps done; None: not known


def is_shared(folder: Path) -> bool:
    """Return True for a folder that :func:`save_shared` wrote."""
    return is_file(folder / CONFIG) and is_file(folder / WEIGHTS)


def save_shared(
    folder: Path,
    weights: Mapping[str, Tensor],
    classes: ClassMap,
    thresholds: ScoreThresholds | None,
    origin: SourceCheckpoint,
    *,
    name: str,
    licence: str | None,
    reads_references: bool,
) -> None:
    """Write the folder; ``config.json`` is written last (InputError: one of the files exists, or cannot be written)."""
    for file in (WEIGHTS, CONFIG, CARD):
        if (folder / file).exists() or (folder / file).is_symlink():
            raise InputError(f"{printable(folder / file)} exists: give a new folder")
    metrics = _metrics_of(origin)
    make_output_folder(folder, "folder")
    write_weights(folder / WEIGHTS, weights)
    content = {
        "format": _FORMAT,
        "detr_bf": version("detr_bf"),
        "name": name,
        "license": licence,
        "classes": classes.to_dict(),
        "thresholds": None if thresholds is None else asdict(thresholds),
        "metrics": metrics,
        "weights": {"sha256": file_sha256(folder / WEIGHTS), "tensors": len(weights)},
        "config": without_paths(origin.config),
    }
    write_text(folder / CARD, _card(content, _statistics(origin), reads_references))
    write_json(folder / CONFIG, content)


def load_shared(folder: Path) -> Checkpoint:
    """Return the content of a folder as a checkpoint (InputError: a file is missing, damaged or of another program)."""
    path = folder / CONFIG
    try:
        content = read_json(path)
    except (FileNotFoundError, ValueError) as error:
        raise InputError(f"{printable(path)} cannot be read ({printable(error)}): get the folder again") from None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise InputError(f"{printable(path)} is not of the form '{_FORMAT}': it was written by another program")
    expected = content.get("weights")
    if not isinstance(expected, dict) or file_sha256(folder / WEIGHTS) != expected.get("sha256"):
        raise InputError(f"{printable(folder / WEIGHTS)} is not the file that was saved: get the folder again")
    try:
        weights, thresholds = read_safetensors(folder / WEIGHTS), content["thresholds"]
        found = Checkpoint(weights, content["classes"], content["config"], thresholds=thresholds)
        given = found.score_thresholds
        if given is not None and len(given.by_class) != found.classes.num_classes:
            raise ValueError(f"{len(given.by_class)} thresholds for {found.classes.num_classes} classes")
        return found
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{printable(path)} lacks a part or has a wrong one: {printable(error)}") from error


def without_paths(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config without the paths of the data, of the run and of its first weights."""
    shared = copy.deepcopy(dict(config))
    for key, value in _PRIVATE.items():
        *groups, last = key.split(".")
        part: Any = shared
        for group in groups:
            part = part[group]
        part[last] = value
    for split in ("train", "val"):
        shared["data"][split] = {"split": None, "images": "", "annotations": "", "panoptic": "", "references": ""}
    weights = shared["model"]["backbone"].get("weights")
    if isinstance(weights, str) and ("/" in weights or "\\" in weights):
        shared["model"]["backbone"]["weights"] = "none"
    return shared


def _metrics_of(origin: SourceCheckpoint) -> dict[str, float] | None:
    """Return the metrics of the evaluation at the step of the checkpoint, from the log beside it."""
    log = origin.source.parent / METRICS_FILE
    if origin.step is None or not is_file(log):
        return None
    records = [record for _, record in read_records(log) if record is not None]
    found = [record for record in records if record["kind"] == "val" and record["step"] == origin.step]
    if not found:
        return None
    return {
        key: value
        for key, value in found[-1].items()
        if isinstance(value, float) and math.isfinite(value) and not key.startswith("score/")
    }


def _statistics(origin: SourceCheckpoint) -> Mapping[str, Any]:
    """Return the images and objects of the splits of the run, as far as its folder says."""
    try:
        content = read_json(origin.source.parent / DATA_FILE)
        return {name: (split["images"], split["objects"]) for name, split in content["splits"].items()}
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _card(content: Mapping[str, Any], statistics: Mapping[str, Any], reads_references: bool) -> str:
    """Return the model card, with the front matter of the Hugging Face Hub."""
    config, metrics, thresholds = content["config"], content["metrics"], content["thresholds"]
    model, names = config["model"], content["classes"]["names"]
    front = ["---", "pipeline_tag: object-detection", "library_name: detr_bf"]
    front += [f"license: {content['license']}"] if content["license"] else []
    data = [f"| {name} | {images} | {objects} |" for name, (images, objects) in statistics.items()]
    given = '"photo.jpg", reference="reference.jpg"' if reads_references else '"photo.jpg"'
    values = [f"| {key} | {metrics[key]:.3f} |" for key in _SHOWN_METRICS if metrics and key in metrics]
    lines = [
        *(*front, "---", "", f"# {content['name']}", ""),
        f"{model['name']} with backbone {model['backbone']['name']}, trained with detr_bf {content['detr_bf']}"
        f"{', with batch attention (BatchFormerV2)' if config['batch_former']['enabled'] else ''}.",
        *("", "```python", "import detr_bf", "", f'found = detr_bf.load("FOLDER")({given})', "```", ""),
        f"**Classes ({len(names)}):** {', '.join(names)}",
        *("", "## Evaluation", ""),
        *(["| metric | validation split |", "|---|---|", *values] if values else ["Not evaluated at this checkpoint."]),
        "",
        f"Scores from {thresholds['overall']:.3g} have the highest F1 there; they are the default threshold."
        if thresholds
        else "No threshold was measured: the default is 0.5.",
        *("", "## Training data", ""),
        *(["| split | images | objects |", "|---|---|---|", *data] if data else ["Not recorded."]),
        *("", "## Limits", ""),
        "It finds the classes above in images like those it was trained on; the metrics hold for the validation split "
        "only, which also chose the checkpoint. "
        + ("" if content["license"] else "No licence was given for these weights."),
    ]
    return "\n".join(line.rstrip() for line in lines) + "\n"
