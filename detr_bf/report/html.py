"""``report.html``: one self-contained page about a run, made from the files of its folder.

The parts of one task come from its :class:`TaskPage`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from detr_bf.config import saved_config
from detr_bf.errors import InputError
from detr_bf.files import CONFIG_FILE, CURVES_FILE, EVALUATION_FILE, MACHINE_FILE, METRICS_FILE, REPORT_FILE, write_text
from detr_bf.report.curves import Metrics, draw_curves, read_metrics, series
from detr_bf.report.detection import DETECTION_PAGE
from detr_bf.report.page import TaskPage, escaped, html_page, missing, picture, section
from detr_bf.text import printable


def write_report(run_dir: str | Path, page: TaskPage = DETECTION_PAGE, title: str = "") -> Path:
    """Write ``report.html`` into a run folder from the files in it, and return its path.

    The files are ``config.yaml``, ``metrics.jsonl``, ``evaluation.json`` (``to_dict`` of a result),
    ``pictures/validation.png`` and ``machine.json`` (:func:`~detr_bf.report.machine.machine_info`). The curves are
    drawn to ``pictures/curves.svg``. A section whose file is missing says so in one sentence, and so does one whose
    picture cannot be drawn; the latter is logged.

    Args:
        run_dir: the folder of the run.
        page: the parts of the page that depend on the run's task.
        title: heading of the page; the folder's name if empty.

    Raises:
        InputError: the folder does not exist, a file in it has the wrong content, or the run has another task.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise InputError(f"run folder not found: {run_dir}. Give the output_dir of a run")
    config_file, machine_file = run_dir / CONFIG_FILE, run_dir / MACHINE_FILE
    config = saved_config(config_file) if config_file.is_file() else None
    if config and config.task != page.task:
        raise InputError(f"{config_file} is of the task {config.task}, the page of {page.task}: pass the task's page")
    metrics = read_metrics(run_dir / METRICS_FILE) if (run_dir / METRICS_FILE).is_file() else Metrics()
    result = _read_result(run_dir / EVALUATION_FILE, page)
    heading = title or printable(run_dir.resolve().name)
    sentences = [*(page.sentences(config) if config else []), *_length(metrics)]
    body = "\n".join(
        [
            f'<header><h1>{escaped(heading)}</h1><p class="lead">{escaped(" ".join(sentences))}</p></header>',
            *page.results(result),
            section("Curves", _curves(run_dir, metrics, page)),
            *page.details(run_dir, result),
            section("Config", _config(_read_text(config_file))),
            section("Machine", _machine(_read_text(machine_file), machine_file)),
        ]
    )
    write_text(run_dir / REPORT_FILE, html_page(heading, body))
    return run_dir / REPORT_FILE


def _length(metrics: Metrics) -> list[str]:
    """Return sentences with the length of the training and its best and last epoch."""
    if not metrics.train:
        return []
    record = metrics.train[-1]
    length = f"Trained for {record['step']:,} steps, {record['epoch']:.3g} epochs."
    epochs, scores = series(metrics.val, "score")
    if not scores:
        return [length]
    best, last = scores.index(max(scores)), float(metrics.val[-1]["epoch"])
    best_score = f"score {scores[best]:.4f}"
    if epochs[best] == last:
        return [length, f"The last epoch, {last:g}, is the best ({best_score})."]
    last_score = f"score {scores[-1]:.4f}" if epochs[-1] == last else "no score"
    return [
        length,
        f"Best epoch {epochs[best]:g} (best.pt, {best_score}), last epoch {last:g} (last.pt, {last_score}); "
        "the results on this page are those of the last epoch.",
    ]


def _curves(run_dir: Path, metrics: Metrics, page: TaskPage) -> str:
    if not (metrics.train or metrics.val):
        return missing(METRICS_FILE, "metrics")
    return picture(run_dir / CURVES_FILE, page.curves_description, lambda path: draw_curves(metrics, path, page.curves))


def _config(text: str | None) -> str:
    if text is None:
        return missing(CONFIG_FILE, "config")
    return f"<details><summary>All settings of this run</summary><pre>{escaped(text)}</pre></details>"


def _machine(text: str | None, path: Path) -> str:
    if text is None:
        return missing(MACHINE_FILE, "machine information")
    rows = "".join(
        f'<tr><th scope="row">{escaped(name)}</th><td>{escaped(value)}</td></tr>\n'
        for name, value in _parse_json(text, path).items()
    )
    return f'<div class="scroll"><table class="facts"><tbody>\n{rows}</tbody></table></div>'


def _read_text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _read_result(path: Path, page: TaskPage) -> Any:
    text = _read_text(path)
    if text is None:
        return None
    try:
        return page.read_result(_parse_json(text, path))
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
