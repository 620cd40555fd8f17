"""``report.html``: one self-contained page about a run, or about several side by side, from the files of their folders.

The parts of one task come from its :class:`TaskPage`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from detr_bf.common.errors import InputError
from detr_bf.common.files import (
    CONFIG_FILE,
    EVALUATION_FILE,
    MACHINE_FILE,
    MARKER_FILE,
    METRICS_FILE,
    REPORT_FILE,
    SHEET_FILE,
    WORST_FILE,
    is_file,
    is_number,
    write_text,
)
from detr_bf.common.text import counted, printable
from detr_bf.config import config_to_dict, flatten_settings, saved_config
from detr_bf.report.charts import chart_group
from detr_bf.report.curves import Metrics, curves, curves_of_runs, read_metrics, series
from detr_bf.report.detection import DETECTION_PAGE
from detr_bf.report.page import (
    PICTURE_BYTES,
    escaped,
    html_page,
    missing,
    number,
    percent,
    picture,
    section,
    value_table,
)
from detr_bf.report.task_page import TaskPage

_RUNS = "detr_bf runs"  # generator of pages of several runs
_RUN_PICTURES = 6  # most pictures of full size on a page of several runs


def write_report(run_dir: str | Path, page: TaskPage = DETECTION_PAGE, title: str = "") -> Path:
    """Write ``report.html`` into a run folder from the files in it, and return its path.

    The files are ``config.yaml``, ``metrics.jsonl``, ``evaluation.json`` (``to_dict`` of a result),
    ``pictures/validation.png`` and ``machine.json`` (:func:`~detr_bf.report.machine.machine_info`). A section whose
    file is missing says so in one sentence, and so does one whose picture cannot be drawn; the latter is logged.

    Args:
        run_dir: the folder of the run.
        page: the parts of the page that depend on the run's task.
        title: heading of the page; the folder's name if empty.

    Raises:
        InputError: the folder does not exist, a file in it has the wrong content, the run has another task, or
            ``report.html`` is of other origin.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise InputError(f"run folder not found: {run_dir}. Give the output_dir of a run")
    _check_own(run_dir / REPORT_FILE, "detr_bf")
    config_file, machine_file = run_dir / CONFIG_FILE, run_dir / MACHINE_FILE
    config = saved_config(config_file) if config_file.is_file() else None
    if config and config.task != page.task:
        raise InputError(f"{config_file} is of the task {config.task}, the page of {page.task}: pass the task's page")
    metrics = _read_metrics(run_dir)
    result = _read_result(run_dir / EVALUATION_FILE, page)
    heading = title or printable(run_dir.resolve().name)
    sentences = [*(page.sentences(config) if config else []), *_length(metrics)]
    body = "\n".join(
        [
            f'<header><h1>{escaped(heading)}</h1><p class="lead">{escaped(" ".join(sentences))}</p></header>',
            *page.results(result),
            *([] if _is_evaluation(run_dir) else [section("Curves", _curves(metrics, page))]),
            *page.details(run_dir, result),
            section("Config", _config(_read_text(config_file))),
            section("Machine", _machine(_read_text(machine_file), machine_file)),
        ]
    )
    write_text(run_dir / REPORT_FILE, html_page(heading, body))
    return run_dir / REPORT_FILE


def write_side_by_side(run_dirs: Sequence[str | Path], page: TaskPage, output: str | Path) -> Path:
    """Write a page with the results, curves and pictures of several runs of one task side by side; return its path.

    Raises:
        InputError: a folder is not that of a run of this task or is given twice, a file in it is damaged, or ``output``
            was not written by this function.
    """
    output, folders = Path(output), [Path(folder) for folder in run_dirs]
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise InputError("a run is given twice: name different run folders")
    _check_own(output, _RUNS)
    settings = {}
    for folder in folders:
        if not is_file(folder / CONFIG_FILE):
            raise InputError(
                f"{printable(folder)} is no run folder: {CONFIG_FILE} is missing. Give output_dir of a run"
            )
        config = saved_config(folder / CONFIG_FILE)
        if config.task != page.task:
            raise InputError(f"{printable(folder)} is a run of the task {config.task}, the first of {page.task}")
        settings[folder] = flatten_settings(config_to_dict(config))
    runs = dict(zip(_names(folders), folders, strict=True))
    body = "\n".join([_links(runs, output), *_compared(runs, settings, page)])
    write_text(output, html_page(f"{len(runs)} runs", body, generator=_RUNS))
    return output


def _check_own(page: Path, generator: str) -> None:
    """Refuse to replace a page that is not of this generator, see :func:`html_page`."""
    mark = f'<meta name="generator" content="{generator}">'
    if page.is_file() and mark not in page.read_text(encoding="utf-8", errors="replace"):
        raise InputError(f"{printable(page)} has other content and would be replaced: rename it, or name another file")


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that tell the folders apart."""
    parts = [folder.resolve().parts for folder in folders]
    length = next(n for n in range(1, 1 + max(map(len, parts))) if len({own[-n:] for own in parts}) == len(parts))
    return ["/".join(own[-length:]) for own in parts]


def _links(runs: Mapping[str, Path], output: Path) -> str:
    """Return the head of the page, with links to the reports of the runs that have one."""
    items = []
    for name, folder in runs.items():
        report = folder / REPORT_FILE
        address = quote(os.path.relpath(report.resolve(), output.resolve().parent), errors="surrogateescape")
        shown = escaped(printable(name))
        items.append(f'<a href="{address}">{shown}</a>' if report.is_file() else shown)
    return f'<header><h1>{len(runs)} runs side by side</h1><p class="lead">{", ".join(items)}</p></header>'


def _compared(runs: Mapping[str, Path], settings: Mapping[Path, Mapping[str, Any]], page: TaskPage) -> Iterator[str]:
    """Yield the sections of several runs."""
    results = {name: _read_result(folder / EVALUATION_FILE, page) for name, folder in runs.items()}
    metrics = {name: dict(result.metrics) if result else {} for name, result in results.items()}
    names = dict.fromkeys(name for own in metrics.values() for name, value in own.items() if value is not None)
    rows = {name: [number(own.get(name), 4) for own in metrics.values()] for name in names}
    yield section("Results", value_table("Metric", runs, rows) or missing(EVALUATION_FILE, "evaluation"))
    keys = dict.fromkeys(key for own in settings.values() for key in own if key != "output_dir")
    texts = {key: [json.dumps(own.get(key), default=str) for own in settings.values()] for key in keys}
    differing = {key: values for key, values in texts.items() if len(set(values)) > 1}
    same = '<p class="faint">The settings of the runs do not differ.</p>'
    yield section("Settings that differ", value_table("Setting", runs, differing) or same)
    found = curves_of_runs({name: _read_metrics(folder) for name, folder in runs.items()}, page.curves)
    yield section("Curves", chart_group(found) if found else missing(METRICS_FILE, "metrics"))
    classes = {name: page.classes(result) if result else {} for name, result in results.items()}
    rows = {
        name: [percent(own.get(name)) for own in classes.values()]
        for name in dict.fromkeys(name for own in classes.values() for name in own)
    }
    if rows:
        yield section("Classes", value_table("Class, main metric in percent", runs, rows))
    if costs := page.costs(runs):
        yield section("Errors", costs)
    limit = PICTURE_BYTES * _RUN_PICTURES // (2 * len(runs))
    for heading, file in (("Validation images", SHEET_FILE), ("Images with the most errors", WORST_FILE)):
        sheets = [
            f"<div><h3>{escaped(printable(name))}</h3>{picture(folder / file, f'{heading}, {name}', limit=limit)}</div>"
            for name, folder in runs.items()
            if (folder / file).is_file()
        ]
        if sheets:
            yield section(heading, f'<div class="sides">{"".join(sheets)}</div>')


def _length(metrics: Metrics) -> list[str]:
    """Return sentences with the length of the training and its best and last epoch."""
    if not metrics.train:
        return []
    record = metrics.train[-1]
    epochs_done = f"{record['epoch']:.3g}"
    length = f"Trained for {counted(record['step'], 'step')}, {epochs_done} epoch{'s' * (epochs_done != '1')}."
    epochs, scores = series(metrics.val, "score")
    if not scores:
        return [length]
    best, last = _best(metrics), float(metrics.val[-1]["epoch"])
    best_score = f"score {scores[best]:.4f}{_which(metrics, best)}"
    if epochs[best] == last:
        return [length, f"The last epoch, {last:g}, is the best ({best_score})."]
    last_score = f"score {scores[-1]:.4f}{_which(metrics, -1)}" if epochs[-1] == last else "no score"
    return [
        length,
        f"Best epoch {epochs[best]:g} (best.pt, {best_score}), last epoch {last:g} (last.pt, {last_score}); "
        "the results on this page are those of the last epoch.",
    ]


def _which(metrics: Metrics, index: int) -> str:
    """Return which weights have the score of an evaluation, if raw and averaged ones were evaluated."""
    record = [each for each in metrics.val if series([each], "score")[1]][index]
    scores = {name: record.get(f"score/{name}") for name in ("averaged", "raw")}
    if not all(map(is_number, scores.values())):
        return ""
    better, worse = sorted(scores, key=lambda name: float(scores[name] or 0), reverse=True)
    return f" with {better} weights, {scores[worse]:.4f} with {worse} ones"


def _best(metrics: Metrics) -> int:
    """Return the index of the best of the evaluations with a score, as training chooses it.

    Among equal scores it is the one with the lowest loss, and without losses, or among equal losses, the latest.
    """
    scored = [record for record in metrics.val if series([record], "score")[1]]
    best = 0
    for index, record in enumerate(scored):
        _, losses = series([scored[best], record], "loss")
        higher_loss = len(losses) == 2 and losses[1] > losses[0]
        if record["score"] > scored[best]["score"] or (record["score"] == scored[best]["score"] and not higher_loss):
            best = index
    return best


def _curves(metrics: Metrics, page: TaskPage) -> str:
    found = curves(metrics, page.curves)
    return chart_group(found) if found else missing(METRICS_FILE, "metrics")


def _is_evaluation(run_dir: Path) -> bool:
    """Return True for the folder of an evaluation, in which nothing was trained."""
    text = _read_text(run_dir / MARKER_FILE)
    return text is not None and _parse_json(text, run_dir / MARKER_FILE).get("kind") == "evaluation"


def _read_metrics(run_dir: Path) -> Metrics:
    return read_metrics(run_dir / METRICS_FILE) if (run_dir / METRICS_FILE).is_file() else Metrics()


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
