"""``report.html``: one self-contained page about a run, made from the files of its folder.

Nothing is loaded from elsewhere and no script runs: styles are inline, pictures are embedded.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from detr_bf.config import Config, load_config
from detr_bf.errors import InputError
from detr_bf.evaluation import ClassResult, CocoSummary, PanopticClassResult, PanopticSummary, Result
from detr_bf.evaluation.summary import SIZE_NAMES
from detr_bf.files import write_text
from detr_bf.report.curves import draw_curves
from detr_bf.report.metrics import Metrics, read_metrics
from detr_bf.report.style import STYLE

CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
EVALUATION_FILE = "evaluation.json"
MACHINE_FILE = "machine.json"
CURVES_FILE = "pictures/curves.svg"
SHEET_FILE = "pictures/validation.png"
PANOPTIC_SHEET_FILE = "pictures/panoptic.png"
REPORT_FILE = "report.html"
_MEDIA_TYPES = {".png": "image/png", ".svg": "image/svg+xml"}
_NO_VALUE = "—"


def write_report(run_dir: str | Path, title: str = "") -> Path:
    """Write ``report.html`` into a run folder from what lies there, and return its path.

    Read are ``config.yaml``, ``metrics.jsonl``, ``evaluation.json`` (:meth:`Result.to_dict`),
    ``pictures/validation.png`` and ``machine.json`` (:func:`~detr_bf.report.machine.machine_info`). The curves are
    drawn from the metrics to ``pictures/curves.svg``. A section whose file is missing says so in one sentence.

    Args:
        run_dir: the folder of the run.
        title: heading of the page; the folder's name if empty.

    Raises:
        InputError: the folder does not exist, or a file in it cannot be read as what it should be.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise InputError(f"run folder not found: {run_dir}. Give the output_dir of a run")
    config_file, machine_file = run_dir / CONFIG_FILE, run_dir / MACHINE_FILE
    config = load_config(config_file) if config_file.is_file() else None
    metrics = read_metrics(run_dir / METRICS_FILE) if (run_dir / METRICS_FILE).is_file() else Metrics()
    result = _read_result(run_dir / EVALUATION_FILE)
    boxes, masks, panoptic = (result.boxes, result.masks, result.panoptic) if result else (None, None, None)
    heading = title or run_dir.resolve().name
    body = "\n".join(
        [
            f"<header><h1>{escape(heading)}</h1>{_lead(config, metrics)}</header>",
            *([_section("Panoptic segmentation", _panoptic_headline(panoptic))] if panoptic else []),
            *([_section("Masks", _headline(masks, "mask"))] if masks else []),
            _section("Boxes" if masks else "Validation", _headline(boxes, "box")),
            _section("Curves", _curves(run_dir, metrics)),
            *([_section("Panoptic maps", _sheet(run_dir / PANOPTIC_SHEET_FILE))] if panoptic else []),
            _section("Validation images", _sheet(run_dir / SHEET_FILE)),
            *([_section("Classes, panoptic", _panoptic_table(panoptic))] if panoptic else []),
            _section("Classes", _class_table(boxes)),
            _section("Config", _config(_read_text(config_file))),
            _section("Machine", _machine(_read_text(machine_file), machine_file)),
        ]
    )
    write_text(run_dir / REPORT_FILE, _page(heading, body))
    return run_dir / REPORT_FILE


def batch_former_line(config: Config) -> str:
    """One sentence: whether batch attention was on, where, and in which mode."""
    settings = config.batch_former
    if not settings.enabled or not settings.layers:
        return "BatchFormerV2 is off."
    layers = ", ".join(map(str, settings.layers))
    place = f"{settings.position} encoder {'layer' if len(settings.layers) == 1 else 'layers'} {layers}"
    weights = " with shared weights" if settings.shared and len(settings.layers) > 1 else ""
    return (
        f"BatchFormerV2 {place}{weights}, mode {settings.mode.replace('_', ' ')}, {settings.heads} heads, "
        f"dropout {settings.dropout:g}, batches of {config.train.batch_size}."
    )


def _page(title: str, body: str) -> str:
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>\n{content}</section>"


def _missing(file_name: str, what: str) -> str:
    return f'<p class="faint">This run has no {escape(what)}: {escape(file_name)} is missing or empty.</p>'


def _lead(config: Config | None, metrics: Metrics) -> str:
    sentences = []
    if config:
        sentences += [f"{config.model.name.upper()} with {config.model.backbone.name}.", batch_former_line(config)]
    if metrics.train:
        last = metrics.train[-1]
        sentences.append(f"Trained for {last['step']:,} steps, {last['epoch']:.3g} epochs.")
    return f'<p class="lead">{escape(" ".join(sentences))}</p>'


def _headline(summary: CocoSummary | None, kind: str) -> str:
    if summary is None:
        return _missing(EVALUATION_FILE, "evaluation")
    sizes = zip(SIZE_NAMES, (summary.APs, summary.APm, summary.APl), strict=True)
    small = [(f"AP {name}", value, _objects(summary.num_objects_by_size[name])) for name, value in sizes]
    small.append((f"AR, {summary.max_detections} detections", summary.AR100, "recall"))
    large = [
        ("AP", summary.AP, "IoU 0.50 to 0.95"),
        ("AP50", summary.AP50, "IoU 0.50"),
        ("AP75", summary.AP75, "IoU 0.75"),
    ]
    return (
        f'<div class="cards large">{_cards(large)}</div>\n<div class="cards">{_cards(small)}</div>\n'
        f'<p class="faint">COCO {kind} metrics in percent on {summary.num_images:,} images, '
        f"{summary.num_detections:,} detections, computed with {escape(summary.engine)}.</p>"
    )


def _panoptic_headline(summary: PanopticSummary) -> str:
    large = [
        ("PQ", summary.PQ, "panoptic quality"),
        ("SQ", summary.SQ, "overlap of what was found"),
        ("RQ", summary.RQ, "F1 of what was found"),
    ]
    small = [
        (f"{name} {group}", summary.metrics[f"{name}_{suffix}"], "")
        for group, suffix in (("things", "th"), ("stuff", "st"))
        for name in ("PQ", "SQ", "RQ")
    ]
    return (
        f'<div class="cards large">{_cards(large)}</div>\n<div class="cards">{_cards(small)}</div>\n'
        f'<p class="faint">Panoptic quality in percent on {summary.num_images:,} images.</p>'
    )


def _panoptic_table(summary: PanopticSummary) -> str:
    ordered = sorted(summary.per_class.items(), key=lambda item: -1.0 if item[1].PQ is None else item[1].PQ)
    rows = "".join(_panoptic_row(name, result) for name, result in reversed(ordered))
    titles = "".join(f'<th scope="col">{title}</th>' for title in ("PQ", "SQ", "RQ", "Found", "Wrong", "Missed"))
    return (
        f'<div class="scroll"><table>\n<thead><tr><th scope="col">Class</th><th></th>{titles}</tr></thead>\n'
        f"<tbody>\n{rows}</tbody></table></div>"
    )


def _panoptic_row(name: str, result: PanopticClassResult) -> str:
    kind = "" if result.is_thing else ' <span class="faint">stuff</span>'
    values = "".join(f"<td>{_percent(value)}</td>" for value in (result.PQ, result.SQ, result.RQ))
    counts = "".join(f"<td>{count:,}</td>" for count in (result.tp, result.fp, result.fn))
    return (
        f'<tr><th scope="row">{escape(name)}{kind}</th>'
        f'<td class="bar"><i style="width:{100 * (result.PQ or 0):.1f}%"></i></td>{values}{counts}</tr>\n'
    )


def _cards(cards: Iterable[tuple[str, float | None, str]]) -> str:
    return "".join(
        f'<div class="card"><span>{escape(name)}</span><strong>{_percent(value)}</strong>'
        f"<small>{escape(note)}</small></div>"
        for name, value, note in cards
    )


def _class_table(summary: CocoSummary | None) -> str:
    if summary is None:
        return _missing(EVALUATION_FILE, "evaluation")
    ordered = sorted(summary.per_class.items(), key=lambda item: -1.0 if item[1].AP is None else item[1].AP)
    rows = "".join(_class_row(name, result) for name, result in reversed(ordered))
    return (
        '<div class="scroll"><table>\n<thead><tr><th scope="col">Class</th><th></th><th scope="col">AP</th>'
        f'<th scope="col">AP50</th><th scope="col">Objects</th></tr></thead>\n<tbody>\n{rows}</tbody></table></div>'
    )


def _class_row(name: str, result: ClassResult) -> str:
    return (
        f'<tr><th scope="row">{escape(name)}</th>'
        f'<td class="bar"><i style="width:{100 * (result.AP or 0):.1f}%"></i></td>'
        f"<td>{_percent(result.AP)}</td><td>{_percent(result.AP50)}</td><td>{result.num_objects:,}</td></tr>\n"
    )


def _curves(run_dir: Path, metrics: Metrics) -> str:
    if not (metrics.train or metrics.val):
        return _missing(METRICS_FILE, "metrics")
    draw_curves(run_dir / METRICS_FILE, run_dir / CURVES_FILE)
    return _picture(run_dir / CURVES_FILE, "Training loss, its terms, and validation AP over epochs")


def _sheet(path: Path) -> str:
    if not path.is_file():
        return _missing(SHEET_FILE, "validation pictures")
    return _picture(path, "Validation images with ground truth and predictions side by side")


def _picture(path: Path, description: str) -> str:
    content = base64.b64encode(path.read_bytes()).decode("ascii")
    source = f"data:{_MEDIA_TYPES[path.suffix]};base64,{content}"
    return f'<figure><img alt="{escape(description)}" src="{source}"></figure>'


def _config(text: str | None) -> str:
    if text is None:
        return _missing(CONFIG_FILE, "config")
    return f"<details><summary>The resolved config, every setting</summary><pre>{escape(text)}</pre></details>"


def _machine(text: str | None, path: Path) -> str:
    if text is None:
        return _missing(MACHINE_FILE, "record of its machine")
    rows = "".join(
        f'<tr><th scope="row">{escape(str(name))}</th><td>{escape(str(value))}</td></tr>\n'
        for name, value in _parse_json(text, path).items()
    )
    return f'<div class="scroll"><table class="facts"><tbody>\n{rows}</tbody></table></div>'


def _percent(value: float | None) -> str:
    return _NO_VALUE if value is None else f"{100 * value:.1f}"


def _objects(count: int) -> str:
    return f"{count:,} object{'' if count == 1 else 's'}"


def _read_text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _read_result(path: Path) -> Result | None:
    text = _read_text(path)
    if text is None:
        return None
    try:
        return Result.from_dict(_parse_json(text, path))
    except (KeyError, TypeError) as error:
        raise InputError(
            f"{path} is not an evaluation summary of this version: {error}. Run --eval-only again"
        ) from error


def _parse_json(text: str, path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content
