"""Train or evaluate a task and write everything to its output folder; the training commands call this."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from detr_bf.acceleration.allocator import keep_freed_memory
from detr_bf.assembly.training import resolved_text
from detr_bf.common import distributed
from detr_bf.common.devices import device_of, float32_products
from detr_bf.common.errors import InputError, TrainingError
from detr_bf.common.files import CHOSEN_SETTINGS, check_output_folder, make_output_folder, write_json, write_text
from detr_bf.common.progress import setup_logging
from detr_bf.common.text import counted, duration, listed
from detr_bf.config import RunConfig, config_from_dict, config_to_dict, config_to_yaml, flatten_settings
from detr_bf.engine import (
    Checkpoint,
    CreatedFiles,
    Evaluation,
    EvaluationResult,
    MetricsLog,
    RunFolder,
    RunMarker,
    Trainer,
    check_loggers,
    checkpoint_of,
    load_checkpoint,
)
from detr_bf.evaluation import CocoEvaluator
from detr_bf.interop.published import find_weights
from detr_bf.report import machine_info, process_memory, tolerating, write_report
from detr_bf.tasks import Task

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """Result of a run and the files that show it."""

    result: EvaluationResult
    folder: Path
    report: Path | None  # None if it was not asked for, or could not be written
    epochs: str = ""  # of training: the last and the best epoch
    no_report: str = "no report"  # why there is none

    def __str__(self) -> str:
        shown = f"report {self.report}" if self.report else f"{self.no_report}; results in {self.folder}"
        return "  ".join(filter(None, (str(self.result), shown, self.epochs)))


def train(task: Task[Any], *, resume: bool = False, resume_if_possible: bool = False) -> Outcome | None:
    """Check the data, train, evaluate and write the report. Every rank calls this; ranks other than 0 get None.

    Args:
        resume_if_possible: resume if there is a checkpoint. A rank that torchrun restarts always resumes a run that the
            same launch started.

    Raises:
        InputError: before the first step, for anything that the user can correct.
        TrainingError, Interrupted: see :meth:`detr_bf.engine.Trainer.train`.
    """
    config, folder = task.config, RunFolder(Path(task.config.output_dir))
    with ExitStack() as stack:
        stack.enter_context(distributed.process_group(device_of(config.device), config.train.timeout_minutes))
        stack.enter_context(float32_products(device_of(config.device), config.train.float32_matmul))
        distributed.run_on_main(lambda: check_loggers(config.train.loggers))
        created = stack.enter_context(_locked(folder))
        setup_logging()

        def prepare() -> tuple[Checkpoint | None, Mapping[str, Any] | None]:
            _check_folder(folder, resume, resume_if_possible)
            _begin(folder, created, RunMarker.of_this_process("training"))
            checkpoint = _newest_checkpoint(folder) if folder.holds_a_run() else None
            statistics = _check(task, folder, checkpoint)
            created.check_not_overwriting(*folder.logged)
            return checkpoint, statistics

        checkpoint, statistics = distributed.run_on_main(prepare)
        if checkpoint is not None:
            task.adopt_settings(checkpoint)
        with distributed.raise_on_all_ranks():
            try:
                trainer = task.build_trainer(folder, checkpoint)
            finally:
                created.add(*folder.logged_files())
            if trainer.metrics is not None:
                stack.enter_context(trainer.metrics)
        steps = trainer.settings.epochs * trainer.steps_per_epoch
        chosen = "" if trainer.settings.minutes else resolved_text(config, steps)
        distributed.run_on_main(lambda: _describe(folder, created, config, statistics, chosen))
        created.keep()
        result = trainer.train()
        return _report(task, folder, result, trainer.evaluate, trainer.evaluation_model, trainer)


def dry_run_training(task: Task[Any]) -> str | None:
    """Do everything up to the first step of a new run, and return what was found; ``output_dir`` is not created.

    Data and folder are checked, model, optimizer and evaluation are built, weights are loaded, the first batch is read,
    and the time of a few steps is measured, without keeping anything of them. Loggers are not started. Every rank calls
    this; ranks other than 0 get None.

    Raises:
        InputError: as :func:`train` does before the first step.
        TrainingError: one of the steps failed.
    """
    config, folder = task.config, RunFolder(Path(task.config.output_dir))
    with ExitStack() as stack:
        stack.enter_context(distributed.process_group(device_of(config.device), config.train.timeout_minutes))
        stack.enter_context(float32_products(device_of(config.device), config.train.float32_matmul))
        setup_logging()

        def prepare() -> None:
            check_loggers(config.train.loggers)
            check_output_folder(folder.path, "output_dir")
            _check_folder(folder, False, False)
            task.check_settings()
            task.check_start()
            task.check()

        distributed.run_on_main(prepare)
        with distributed.raise_on_all_ranks():
            scratch = RunFolder(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="detr_bf-dry-run-"))))
            quiet = replace(config, train=replace(config.train, loggers=[]))
            trainer = type(task)(quiet).build_trainer(scratch)
            if trainer.metrics is not None:
                stack.enter_context(trainer.metrics)
            batch = next(iter(trainer.make_batches(0, 0, 0))).to(device_of(config.device))
        try:
            seconds = trainer.measure_step()
        except TrainingError as error:
            failed = TrainingError(f"a step of the dry run failed: {error}")
            raise (distributed.on_all_ranks(failed) if error.on_all_ranks else failed) from error
        trained = sum(each.numel() for each in trainer.model.parameters() if each.requires_grad)
        lines = (
            f"model: {sum(each.numel() for each in trainer.model.parameters()):,} parameters, {trained:,} of them "
            f"trained, on {device_of(config.device)}",
            task.settings_text(),
            f"first batch: {listed(batch.names, 4)}",
            *_length(trainer, config, seconds),
            f"dry run: nothing was written; a run would be written to {folder.path}",
        )
        return "\n".join(filter(None, lines)) if distributed.is_main() else None


def _length(trainer: Trainer, config: RunConfig, seconds: float) -> Iterator[str]:
    """Yield the steps of a run, the settings that they choose, and its time, by the measured ``seconds`` of a step."""
    settings, per_epoch = trainer.settings, trainer.steps_per_epoch
    steps = settings.epochs * per_epoch
    measured = f"{seconds:.3g} s a step (measured)"
    if settings.minutes is not None:
        steps = max(1, round(60 * settings.minutes / seconds))
        yield f"steps: about {steps:,} in train.minutes={settings.minutes:g}, {per_epoch:,} an epoch"
        yield f"time: {measured}; evaluations and checkpoints come on top"
    else:
        total = min(steps, settings.max_steps or steps)
        yield f"steps: {total:,}, {per_epoch:,} an epoch"
        yield f"time: {measured}, {duration(total * seconds)} for the run without evaluations and checkpoints"
    if text := resolved_text(config, steps):
        yield f"chosen for {counted(steps, 'step')}: {text}"


def evaluate_only(task: Task[Any], source: Path, checkpoint: Checkpoint | None = None) -> Outcome | None:
    """Evaluate ``source``, a checkpoint of ours or foreign weights, with the model and validation data of the task.

    The results are written to ``output_dir``, or to ``output_dir/eval-NAME`` if ``output_dir`` holds a run or the
    evaluation of other weights or settings. Every rank calls this; ranks other than 0 get None.

    Args:
        checkpoint: content of ``source`` if it is a file of another form.

    Raises:
        InputError: the weights are another model's.
    """
    config = task.config

    def find_folder() -> tuple[RunFolder, str]:
        key = _evaluation_key(config, source)
        return RunFolder(_evaluation_folder(Path(config.output_dir), source, key)), key

    with (
        distributed.process_group(device_of(config.device), config.train.timeout_minutes),
        float32_products(device_of(config.device), config.train.float32_matmul),
    ):
        folder, key = distributed.run_on_main(find_folder)
        with _locked(folder) as created:
            setup_logging()

            def prepare() -> None:
                folder.check_no_foreign_files()
                marker = folder.read_marker()
                if marker is not None and marker.evaluated != key:
                    raise InputError(f"{folder.path} is now used by another evaluation: repeat the command")
                _begin(folder, created, RunMarker.of_this_process("evaluation", key))
                folder.remove_unfinished()

            distributed.run_on_main(prepare)
            with distributed.raise_on_all_ranks():
                model, classes = task.load_evaluated(source, checkpoint)
                evaluate = task.build_evaluation(classes, folder)
                model.to(device_of(config.device))
                keep_freed_memory(large=True)

            def describe() -> None:
                statistics = None
                with tolerating(str(folder.data)):
                    statistics = task.describe_data(("val",))
                _describe(folder, created, config, statistics)

            distributed.run_on_main(describe)
            created.keep()
            logger.info("evaluating %s", source)
            return _report(task, folder, evaluate(model), evaluate, model)


def evaluate_command(
    task: Task[Any], command: Mapping[str, Any], find: Callable[[RunFolder, CocoEvaluator], None]
) -> Outcome | None:
    """Evaluate the detections of a command of the user, and write the files of a finished run to ``output_dir``.

    Args:
        command: content of ``command.json``, which says that ``output_dir/output`` is ours.
        find: runs the command in the folder, which is locked, and gives its detections to the evaluator.

    Raises:
        InputError: the data have errors, or the folder holds another run, an evaluation, or files of the user.
    """
    config, folder = task.config, RunFolder(Path(task.config.output_dir))
    with _locked(folder) as created:
        setup_logging()
        folder.check_no_foreign_files()
        before, marker = folder.read_marker(), RunMarker.of_this_process("evaluation", "command")
        if before is not None and (before.kind, before.evaluated) != (marker.kind, marker.evaluated):
            raise InputError(
                f"output_dir {folder.path} holds another {before.kind}: choose another folder with output_dir=DIR"
            )
        _begin(folder, created, marker)
        folder.remove_unfinished()
        if folder.command.exists():  # of an unfinished run
            folder.remove_output()
        write_json(folder.command, command)
        created.add(folder.command)
        make_output_folder(folder.output, "output_dir")
        created.add(folder.output)
        _describe(folder, created, config, task.check())
        evaluation = task.build_evaluation(task.load_data().class_map, folder)
        assert isinstance(evaluation, Evaluation), "a detector's"
        created.keep()
        evaluation.evaluator = evaluation.make_evaluator()
        find(folder, evaluation.evaluator.boxes)
        result = evaluation.evaluator.summarize()
        with MetricsLog(folder.metrics) as metrics:
            metrics.write("val", 0, {"epoch": 0, "score": result.score, **result.metrics})
        return _report(task, folder, result, evaluation, nn.Identity())


@contextmanager
def _locked(folder: RunFolder) -> Iterator[CreatedFiles]:
    """Hold the lock of the folder, see :meth:`RunFolder.locked`; only rank 0 accesses the folder."""
    with ExitStack() as stack:
        entered: list[CreatedFiles] = []  # not the result of run_on_main, which all ranks would get
        distributed.run_on_main(lambda: entered.append(stack.enter_context(folder.locked())))
        yield entered[0] if entered else CreatedFiles(frozenset())


def _check_folder(folder: RunFolder, resume: bool, resume_if_possible: bool) -> None:
    """Check that a run may start or resume in the folder.

    Raises:
        InputError: the folder holds another run, an evaluation, or files of the user.
    """
    marker = folder.read_marker()
    restarted = distributed.restart_count() > 0 and marker is not None and marker.launch == distributed.launch_id()
    holds_a_run = folder.holds_a_run()
    if marker is not None and marker.kind != "training":
        raise InputError(f"output_dir {folder.path} holds an evaluation: choose another folder with output_dir=DIR")
    if resume and not holds_a_run:
        raise InputError(f"nothing to resume: {folder.last} does not exist. Start the run without --resume")
    if not (resume or resume_if_possible or restarted) and holds_a_run and marker is not None:
        raise InputError(
            f"output_dir {folder.path} already holds a run: continue it with --resume, or choose another with "
            "output_dir=DIR"
        )
    if marker is None and holds_a_run and (resume or resume_if_possible):
        _newest_checkpoint(folder)  # a copied run has no marker: its checkpoint must be ours
    else:
        folder.check_no_foreign_files()


def _begin(folder: RunFolder, created: CreatedFiles, marker: RunMarker) -> None:
    """Mark the folder and start its log file (InputError: the folder cannot be written)."""
    try:
        folder.mark(marker)
        created.add(folder.marker)
        created.check_not_overwriting(folder.log)
        setup_logging(folder.log)
        created.add(folder.log)
    except OSError as error:
        raise _not_writable(folder, error) from error


def _check(task: Task[Any], folder: RunFolder, checkpoint: Checkpoint | None) -> Mapping[str, Any] | None:
    """Check everything that can be known before the model is built; return the statistics of the data."""
    task.check_settings()
    if checkpoint is not None:
        _check_same_task(task.config, checkpoint, folder)
        task.adopt_settings(checkpoint)  # before the data are read
    else:
        task.check_start()
        if task.config.init_from:
            find_weights(task.config.init_from)  # downloads published ones before the data are read
    if text := task.settings_text():
        logger.info("%s", text)
    statistics = task.check()
    folder.remove_unfinished()
    if checkpoint is not None:
        _log_changes(task.config, checkpoint, folder)
    return statistics


def _newest_checkpoint(folder: RunFolder) -> Checkpoint:
    """Return the last checkpoint, or the previous one if the last is damaged or missing."""
    try:
        return load_checkpoint(folder.last)
    except InputError as error:
        if not folder.previous.exists():
            raise
        checkpoint = load_checkpoint(folder.previous)
        if folder.last.exists():
            folder.last.replace(folder.damaged)
        logger.error("%s\nTraining resumes from the older %s instead.", error, folder.previous)
        return checkpoint


def evaluation_source(config: RunConfig, named: bool) -> Path:
    """Return the checkpoint that ``--eval-only`` evaluates: the run's best or else last, or the one named.

    Args:
        named: True if ``init_from`` was given on the command line. In a config file it is the start of training.

    Raises:
        InputError: there is no such file.
    """
    source = checkpoint_of(find_weights(config.init_from) if named and config.init_from else config.output_dir)
    if not source.is_file():
        training_only = f"; init_from={config.init_from} in the config file is only the start of training"
        raise InputError(
            f"nothing to evaluate: {source} is no checkpoint{training_only if config.init_from and not named else ''}. "
            "Give output_dir=DIR of a trained run, or name the weights on the command line with init_from=FILE"
        )
    return source


def _evaluation_key(config: RunConfig, source: Path) -> str:
    """Return a hash of the weights and of the settings that an evaluation depends on."""
    others = ("output_dir", "init_from", "report")
    settings = {key: value for key, value in config_to_dict(config).items() if key not in others}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    with source.open("rb") as weights:
        while chunk := weights.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def _evaluation_folder(output: Path, source: Path, evaluated: str) -> Path:
    """Return ``output`` if it holds no run and no other evaluation, else the first such folder ``output/eval-NAME``."""
    marker, is_own = RunFolder(output).read_marker(), source.parent.resolve() == output.resolve()
    if marker.evaluated == evaluated if marker else not is_own:
        return output
    name = source.stem if is_own else f"{source.resolve().parent.name}-{source.stem}"
    name, number = re.sub(r"[^A-Za-z0-9._-]+", "_", name)[:80], 1
    while True:
        folder = output / (f"eval-{name}" if number == 1 else f"eval-{name}-{number}")
        marker = RunFolder(folder).read_marker()
        if marker.evaluated == evaluated if marker else not folder.exists():
            return folder
        number += 1


def _describe(
    folder: RunFolder, created: CreatedFiles, config: RunConfig, statistics: Mapping[str, Any] | None, chosen: str = ""
) -> None:
    """Write the settings, the description of the machine, and the statistics of the data if there are any.

    Args:
        chosen: settings with numbers for ``auto``, written beside the machine.

    Raises:
        InputError: the files cannot be written.
    """
    created.check_not_overwriting(folder.config, folder.machine, folder.data)
    try:
        write_text(folder.config, config_to_yaml(config))
        created.add(folder.config)
        write_json(folder.machine, machine_info() | ({CHOSEN_SETTINGS: chosen} if chosen else {}))
        created.add(folder.machine)
        if statistics is not None:
            write_json(folder.data, statistics)
            created.add(folder.data)
    except OSError as error:
        raise _not_writable(folder, error) from error


def _not_writable(folder: RunFolder, error: OSError) -> InputError:
    return InputError(
        f"output_dir {folder.path} cannot be written ({error.strerror or error}): free some space, or choose another "
        "folder with output_dir=DIR"
    )


def _log_changes(config: RunConfig, checkpoint: Checkpoint, folder: RunFolder) -> None:
    """Log the settings that differ from those of the start of the run."""
    before = flatten_settings(
        config_to_dict(config_from_dict(checkpoint.config, source=f"the config in {folder.last}"))
    )
    changed = [
        f"{key}: {before.get(key)} -> {value}"
        for key, value in flatten_settings(config_to_dict(config)).items()
        if before.get(key) != value
    ]
    if changed:
        logger.warning("resuming with settings that differ from the start of the run: %s", "; ".join(changed))


def _check_same_task(config: RunConfig, checkpoint: Checkpoint, folder: RunFolder) -> None:
    before = config_from_dict(checkpoint.config, source=f"the config in {folder.last}")
    if type(before) is not type(config):
        raise InputError(
            f"{folder.last} is of the task {before.task}, not of {config.task}: resume with the config that started "
            "it, or choose another folder with output_dir=DIR"
        )


def _report(
    task: Task[Any],
    folder: RunFolder,
    result: EvaluationResult,
    evaluate: Any,
    model: nn.Module,
    trainer: Trainer | None = None,
) -> Outcome | None:
    """Write results, pictures and report (rank 0 only); the loggers of the trainer get the new pictures.

    ``evaluation.json`` is written after the other results, so a folder that has it has all of them.

    Raises:
        TrainingError: the results cannot be written. A failing report is a warning.
    """
    if not distributed.is_main():
        return None
    before = _pictures(folder)
    try:
        if trainer is not None:
            write_json(folder.cost, process_memory(device_of(task.config.device)))
        task.write_outputs(folder, evaluate, model)
        write_json(folder.evaluation, result.to_dict())
    except OSError as error:
        raise TrainingError(
            f"the results ({result}) cannot be written to {folder.path} ({error.strerror or error}): free "
            "some space, then repeat the command with --resume, or the evaluation"
        ) from error
    report = None
    if task.config.report:
        with tolerating(str(folder.report)):
            report = write_report(folder.path, task.page)
    else:
        folder.report.unlink(missing_ok=True)  # that of an earlier evaluation
    if trainer is not None and trainer.metrics is not None:
        for path, _ in sorted(_pictures(folder) - before):
            trainer.metrics.write_picture(path.stem, trainer.progress.step, path)
    reason = "no report, see the log" if task.config.report else "no report"
    return Outcome(result, folder.path, report, trainer.epochs_text if trainer else "", reason)


def _pictures(folder: RunFolder) -> set[tuple[Path, int]]:
    """Return the PNG and JPEG files of the report with the times of their last changes."""
    found = (path for path in folder.pictures.glob("*") if path.suffix in (".png", ".jpg") and path.is_file())
    return {(path, path.stat().st_mtime_ns) for path in found}
