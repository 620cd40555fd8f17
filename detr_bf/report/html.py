"""``report.html``: one self-contained page about a run, made from the files of its folder.

Nothing is loaded from elsewhere and no script runs: styles are inline, pictures are embedded. What the page says of a
detector, a classifier and a masked autoencoder stands in a module of its own each.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from detr_bf.classification.report import masked
from detr_bf.classification.report import page as classification
from detr_bf.config import saved_config
from detr_bf.errors import InputError
from detr_bf.files import CONFIG_FILE, CURVES_FILE, EVALUATION_FILE, MACHINE_FILE, METRICS_FILE, REPORT_FILE, write_text
from detr_bf.report import detection
from detr_bf.report.curves import draw_curves
from detr_bf.report.elements import drawn, missing, section, shown
from detr_bf.report.metrics import Metrics, read_metrics, series
from detr_bf.report.style import STYLE
from detr_bf.report.task_page import TaskPage
from detr_bf.text import printable

_PAGES: Mapping[str, TaskPage] = {
    "detection": detection.PAGE,
    "classification": classification.PAGE,
    "masked_autoencoding": masked.PAGE,
}


def write_report(run_dir: str | Path, title: str = "") -> Path:
    """Write ``report.html`` into a run folder from what lies there, and return its path.

    Read are ``config.yaml``, ``metrics.jsonl``, ``evaluation.json`` (``to_dict`` of a result),
    ``pictures/validation.png`` and ``machine.json`` (:func:`~detr_bf.report.machine.machine_info`). The task of the
    config decides what is shown; without config it is a detector's page. The curves are drawn from the metrics to
    ``pictures/curves.svg``. A section whose file is missing says so in one sentence, and so does one whose picture
    cannot be drawn, which is logged.

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
    config = saved_config(config_file) if config_file.is_file() else None
    task = _PAGES[config.task if config else "detection"]
    metrics = read_metrics(run_dir / METRICS_FILE) if (run_dir / METRICS_FILE).is_file() else Metrics()
    result = _read_result(run_dir / EVALUATION_FILE, task)
    heading = title or printable(run_dir.resolve().name)
    sentences = [*(task.sentences(config) if config else []), *_length(metrics)]
    lead = f'<p class="lead">{shown(" ".join(sentences))}</p>'
    body = "\n".join(
        [
            f"<header><h1>{shown(heading)}</h1>{lead}</header>",
            *task.results(result),
            section("Curves", _curves(run_dir, metrics, task)),
            *task.details(run_dir, result),
            section("Config", _config(_read_text(config_file))),
            section("Machine", _machine(_read_text(machine_file), machine_file)),
        ]
    )
    write_text(run_dir / REPORT_FILE, _page(heading, body))
    return run_dir / REPORT_FILE


def _page(title: str, body: str) -> str:
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{shown(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _length(metrics: Metrics) -> list[str]:
    if not metrics.train:
        return []
    last = metrics.train[-1]
    return [f"Trained for {last['step']:,} steps, {last['epoch']:.3g} epochs.", *_best_and_last(metrics)]


def _best_and_last(metrics: Metrics) -> list[str]:
    """One sentence; none where no evaluation has a score."""
    epochs, scores = series(metrics.val, "score")
    if not scores:
        return []
    best, last = scores.index(max(scores)), float(metrics.val[-1]["epoch"])
    if epochs[best] == last:
        return [f"The last epoch, {last:g}, is the best (score {scores[best]:.4f})."]
    last_score = f"score {scores[-1]:.4f}" if epochs[-1] == last else "no score"
    best_score = f"score {scores[best]:.4f}"
    return [
        f"Best epoch {epochs[best]:g} (best.pt, {best_score}), last epoch {last:g} (last.pt, {last_score}); "
        "the results on this page are those of the last."
    ]


def _curves(run_dir: Path, metrics: Metrics, task: TaskPage) -> str:
    if not (metrics.train or metrics.val):
        return missing(METRICS_FILE, "metrics")
    file = run_dir / CURVES_FILE
    return drawn(file, task.curves_description, lambda path: draw_curves(metrics, path, task.curves))


def _config(text: str | None) -> str:
    if text is None:
        return missing(CONFIG_FILE, "config")
    return f"<details><summary>The resolved config, every setting</summary><pre>{shown(text)}</pre></details>"


def _machine(text: str | None, path: Path) -> str:
    if text is None:
        return missing(MACHINE_FILE, "record of its machine")
    rows = "".join(
        f'<tr><th scope="row">{shown(name)}</th><td>{shown(value)}</td></tr>\n'
        for name, value in _parse_json(text, path).items()
    )
    return f'<div class="scroll"><table class="facts"><tbody>\n{rows}</tbody></table></div>'


def _read_text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _read_result(path: Path, task: TaskPage) -> Any:
    text = _read_text(path)
    if text is None:
        return None
    try:
        return task.read_result(_parse_json(text, path))
    except (KeyError, TypeError) as error:
        raise InputError(
            f"{path} is not an evaluation summary of this version: {error}. Repeat the run's command with --resume"
        ) from error


def _parse_json(text: str, path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content
