"""``report.html``: one self-contained page about a run, made from the files of its folder.

Styles are inline, pictures are embedded, and no script runs. The parts of one task come from its :class:`TaskPage`.
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
from detr_bf.report.page import TaskPage, escaped, missing, picture, section
from detr_bf.text import printable

_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1c1e22; --faint: #666d76; --line: #e2e5e9; --panel: #f6f7f9;
  --accent: #0072b2; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #15171a; --ink: #e7e9ec; --faint: #9aa1ab; --line: #2c3036; --panel: #1e2125; --accent: #56b4e9; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 48px 24px 96px; }
h1 { font-size: 2rem; line-height: 1.2; margin: 0 0 8px; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 0 0 16px; padding-top: 20px; border-top: 1px solid var(--line); }
section { margin-top: 44px; }
p { margin: 12px 0 0; }
.lead { font-size: 1.05rem; color: var(--faint); max-width: 75ch; }
.faint { color: var(--faint); font-size: 0.92rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin-top: 12px; }
.card { background: var(--panel); border: 1px solid var(--line); border-radius: 10px; padding: 12px 16px;
  display: flex; flex-direction: column; }
.card span, .card small { color: var(--faint); font-size: 0.86rem; }
.card strong { font-size: 1.4rem; font-weight: 650; font-variant-numeric: tabular-nums; }
.large .card strong { font-size: 2.4rem; line-height: 1.2; }
.large .card:first-child strong { color: var(--accent); }
figure { margin: 0; background: #ffffff; border: 1px solid var(--line); border-radius: 10px; padding: 12px; }
img { display: block; width: 100%; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 12px; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child { text-align: left; padding-left: 0; }
thead th { color: var(--faint); font-weight: 500; font-size: 0.86rem; }
tbody th { font-weight: 500; }
.bar { width: 45%; }
.bar i { display: block; height: 8px; border-radius: 4px; background: var(--accent); }
.facts th { width: 1%; color: var(--faint); vertical-align: top; }
.facts td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
summary { cursor: pointer; }
pre { background: var(--panel); border: 1px solid var(--line); border-radius: 10px; padding: 16px; overflow-x: auto;
  font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
@media print { main { padding: 0; } section { break-inside: avoid; } }
"""


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
    heading = escaped(title or printable(run_dir.resolve().name))
    sentences = [*(page.sentences(config) if config else []), *_length(metrics)]
    body = "\n".join(
        [
            f'<header><h1>{heading}</h1><p class="lead">{escaped(" ".join(sentences))}</p></header>',
            *page.results(result),
            section("Curves", _curves(run_dir, metrics, page)),
            *page.details(run_dir, result),
            section("Config", _config(_read_text(config_file))),
            section("Machine", _machine(_read_text(machine_file), machine_file)),
        ]
    )
    write_text(
        run_dir / REPORT_FILE,
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{heading}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n",
    )
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
