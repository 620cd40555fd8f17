"""Cells that a command of the user trains: its variables, its process, and its results."""

from __future__ import annotations

import logging
import math
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from detr_bf.assembly.data import data_source
from detr_bf.common.errors import InputError, Interrupted, TrainingError
from detr_bf.common.files import read_json, write_json
from detr_bf.common.structures import Detections
from detr_bf.common.text import listed, printable
from detr_bf.comparison.experiment import COMMAND_VARIABLE, check_program, flat_settings
from detr_bf.comparison.records import changed_settings, run_settings
from detr_bf.config import DetectionConfig
from detr_bf.data.formats.folder import coco_document
from detr_bf.engine import RunFolder
from detr_bf.engine.step import DeferredSignals
from detr_bf.evaluation import CocoEvaluator, check_results
from detr_bf.tasks import task_of
from detr_bf.tasks.run import Outcome, evaluate_command

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
_GRACE_SECONDS = 10  # between SIGTERM and SIGKILL
_WALL_FACTOR = 10  # seconds of a clock for each second of the limit of processor time


def train_by_command(config: DetectionConfig, own: Mapping[str, Any]) -> Outcome | None:
    """Run the command of a cell in ``output_dir``, evaluate its results, and write the files of a finished run.

    A finished run is left as it is (None); an unfinished one starts over in an empty folder ``output_dir/output``.

    Args:
        own: ``command`` and perhaps ``seconds``, as in :class:`~detr_bf.comparison.experiment.Experiment`.

    Raises:
        InputError: the data or the results of the command are wrong, or ``output_dir`` holds something else.
        TrainingError: the command failed.
        Interrupted: SIGINT or SIGTERM was received; the command was stopped.
    """
    check_program(own["command"])
    folder = RunFolder(Path(config.output_dir))
    if folder.command.exists() and folder.evaluation.exists():
        if changed := changed_settings({**flat_settings(config), **own}, run_settings(folder)):
            raise InputError(f"{folder.path} holds a finished run with other settings ({listed(changed)})")
        logger.info("%s is finished", folder.path)
        return None

    def find(folder: RunFolder, evaluator: CocoEvaluator) -> None:
        _run(_filled(own, config, folder), folder, _limit(own.get("seconds"), len(evaluator.ground_truth["images"])))
        evaluator.update(_detections(folder.output / folder.results.name, evaluator))

    return evaluate_command(task_of(config), own, find)


def _filled(own: Mapping[str, Any], config: DetectionConfig, folder: RunFolder) -> list[str]:
    """Return the words of a command with the values of its variables; data of other forms are written as COCO files."""
    values = {"python": sys.executable, "seed": config.seed, "output": folder.output.absolute()}
    for split in ("train", "val"):
        source = data_source(config, split)
        annotations = source.annotations
        if not isinstance(annotations, Path):
            path = folder.output / f"{split}.json"
            try:
                write_json(path, coco_document(annotations))
            except ValueError as error:  # NaN in a COCO file
                where = printable(annotations.path)
                raise InputError(f"{where} has values that JSON cannot hold: {error}") from error
            annotations = path
        values |= {f"{split}_images": source.images.absolute(), f"{split}_annotations": annotations.absolute()}
    seconds = own.get("seconds", 0)  # without them the command does not use the variables
    values |= {"seconds": f"{seconds:g}", "minutes": f"{seconds / 60:g}"}
    return [COMMAND_VARIABLE.sub(lambda found: str(values[found[1]]), word) for word in shlex.split(own["command"])]


def _limit(seconds: float | None, images: int) -> int | None:
    """Return the processor seconds after which a command is stopped: its own are those of training alone."""
    return None if seconds is None else torch.get_num_threads() * int(2 * seconds + 60 + images)


def _run(words: list[str], folder: RunFolder, limit: int | None) -> None:
    """Run a command to its end and write its cost.

    Raises:
        TrainingError, Interrupted: see :func:`train_by_command`.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    logger.info("running %s", printable(shlex.join(words), limit=2000))
    deadline = math.inf if limit is None else time.monotonic() + _WALL_FACTOR * limit
    with DeferredSignals() as signals:
        try:
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True)
        except OSError as error:
            raise InputError(f"the command cannot be started ({error.strerror}): {printable(words[0])}") from None
        if limit is not None and hasattr(resource, "prlimit"):  # Linux; elsewhere it is told afterwards
            hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
            with suppress(OSError, ValueError):  # another user's process, a lower limit of the machine
                resource.prlimit(process.pid, resource.RLIMIT_CPU, (limit, hard))
        try:
            while process.poll() is None:
                if signals.received is not None:
                    raise Interrupted(signals.received, "stopped: this cell has to start over")
                if limit is not None and time.monotonic() > deadline:
                    raise TrainingError(
                        f"the command ran for more than {_WALL_FACTOR * limit} s, {_WALL_FACTOR} times its limit of "
                        "processor time, and was stopped: it waits for something that does not come, or needs more "
                        "seconds"
                    )
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_SECONDS)
        finally:
            _end(process)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    write_json(folder.cost, {"train_seconds": round(used, 2)})
    if limit is not None and (process.returncode == -signal.SIGXCPU or used > limit):
        raise TrainingError(
            f"the command took {used:.0f} s of processor time, more than twice its seconds, one minute, and one second "
            f"for each validation image ({limit} s): it has to keep to {{seconds}}"
        )
    if process.returncode:
        code = process.returncode
        how = f"ended with exit code {code}" if code > 0 else f"was killed by signal {-code}"
        raise TrainingError(f"the command {how}; its output is above this line")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stop a process unless it has ended, and those that it has started in any case.

    Until it has ended, signals to this process have no effect, so that they cannot leave it running.
    """
    if process.poll() is None:
        for number in DeferredSignals.SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        with suppress(subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(_GRACE_SECONDS)
    with suppress(ProcessLookupError, PermissionError, subprocess.TimeoutExpired):  # none is left
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(_GRACE_SECONDS)


def _detections(path: Path, evaluator: CocoEvaluator) -> list[Detections]:
    """Return the detections of each validation image in the file of a command.

    Raises:
        InputError: it did not write one, or not in COCO's results format.
    """
    try:
        results = read_json(path)
    except FileNotFoundError:
        raise InputError(f"the command ended without writing {printable(path)}, its detections") from None
    except ValueError as error:
        raise InputError(f"the command wrote a file that cannot be read: {printable(path)} ({error})") from error
    check_results(results, evaluator.ground_truth, printable(path))
    for number, result in enumerate(results):
        if min(result["bbox"][2:]) < 0:  # not refused above: detectors of ours may predict such boxes
            raise InputError(
                f"{printable(path)}: entry {number} has a box of negative width or height: expected "
                '"bbox": [x, y, width, height]'
            )
    found: dict[int, list[Mapping[str, Any]]] = {image["id"]: [] for image in evaluator.ground_truth["images"]}
    for result in results:
        found[result["image_id"]].append(result)
    detections = []
    for image_id, own in found.items():
        boxes = torch.tensor([each["bbox"] for each in own], dtype=torch.float64).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        scores = torch.tensor([each["score"] for each in own], dtype=torch.float64)
        labels = torch.tensor([evaluator.class_map.index[each["category_id"]] for each in own], dtype=torch.int64)
        detections.append(Detections(image_id, boxes, scores, labels))
    return detections
