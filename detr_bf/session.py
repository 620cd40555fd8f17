"""What the training commands do, as functions: train or evaluate, and leave all of it in a folder."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from detr_bf import distributed
from detr_bf.assembly import device_of
from detr_bf.cli import run_tool
from detr_bf.config import RunConfig, config_from_dict, config_to_dict, config_to_yaml, load_config
from detr_bf.engine import Checkpoint, Measured, RunFolder, checkpoint_of, load_checkpoint
from detr_bf.engine.logs import setup_logging
from detr_bf.errors import InputError
from detr_bf.files import remove_unfinished, write_json, write_text
from detr_bf.report import machine_info, write_report
from detr_bf.tasks import Task

logger = logging.getLogger(__name__)

C = TypeVar("C", bound=RunConfig)


@dataclass(frozen=True)
class Outcome:
    """The numbers of a run and where they are shown."""

    result: Measured
    report: Path

    def __str__(self) -> str:
        return f"{self.result}  report {self.report}"


def train(task: Task[Any], *, resume: bool = False, resume_if_possible: bool = False) -> Outcome | None:
    """Check the data, train, evaluate, report.

    Called by every process of a group; all but the first get None.

    Args:
        resume: go on from the checkpoint in the folder.
        resume_if_possible: the same if there is one. What its launcher starts anew goes on in any case, with the run
            that it was at and no other.

    Raises:
        InputError: before the first step, for anything the user can mend.
        TrainingError, Interrupted: see :meth:`detr_bf.engine.Trainer.train`.
    """
    config, folder = task.config, RunFolder(Path(task.config.output_dir))
    with distributed.joined(device_of(config), config.train.timeout_minutes), _prepared(folder) as start:
        checkpoint = distributed.on_main(
            lambda: _checked(task, folder, resume, resume_if_possible or _is_started_anew(folder))
        )
        with distributed.failing_together():
            trainer = task.build_trainer(folder, checkpoint)
        distributed.on_main(lambda: _describe_training(folder, config))
        start()
        try:
            result = trainer.train()
        finally:
            if trainer.metrics is not None:
                trainer.metrics.close()
        return _report(task, folder, result, trainer.evaluate, trainer.evaluation_model)


def evaluate_only(task: Task[Any], source: Path) -> Outcome | None:
    """Evaluate ``source``, a checkpoint of ours or foreign weights, with the model and validation data of the task.

    Called by every process of a group; all but the first get None.

    Raises:
        InputError: the weights are another model's.
    """
    config, folder = task.config, RunFolder(Path(task.config.output_dir))
    with distributed.joined(device_of(config), config.train.timeout_minutes), _prepared(folder) as start:
        with distributed.failing_together():
            model, evaluate = task.build_evaluation(source, folder)
        # the folder of a training run keeps that run's config
        distributed.on_main(lambda: None if folder.holds_a_run() else _describe(folder, config))
        start()
        return _report(task, folder, evaluate(model), evaluate, model)


@contextmanager
def _prepared(folder: RunFolder) -> Iterator[Callable[[], None]]:
    """Log into the folder; what was written there is taken back if an InputError comes before the function is called.

    Only the main process touches the folder.
    """
    with ExitStack() as preparation:
        distributed.on_main(lambda: preparation.enter_context(folder.left_as_it_was_on_bad_input()))
        setup_logging(folder.log if distributed.is_main() else None)
        yield preparation.close


def _is_started_anew(folder: RunFolder) -> bool:
    """Whether the launcher has started this process before, and for the run in the folder."""
    return distributed.restarts() > 0 and folder.is_of(distributed.launch())


def _checked(task: Task[Any], folder: RunFolder, resume: bool, resume_if_possible: bool) -> Checkpoint | None:
    """Everything that can be known before the model is built, and the checkpoint to go on from."""
    if resume:
        folder.check_resumable()
    elif not resume_if_possible:
        folder.check_unused()
    checkpoint = _newest_checkpoint(folder) if folder.holds_a_run() else None
    if checkpoint is not None:
        _check_same_task(task.config, checkpoint, folder)
    task.check()
    remove_unfinished(folder.path)
    if checkpoint is not None:
        _tell_changes(task.config, checkpoint)
    return checkpoint


def _newest_checkpoint(folder: RunFolder) -> Checkpoint:
    """The last one, or where that is damaged or missing the one before it."""
    try:
        return load_checkpoint(folder.last)
    except InputError as error:
        if not folder.previous.exists():
            raise
        checkpoint = load_checkpoint(folder.previous)
        if folder.last.exists():
            folder.last.replace(folder.damaged)
        logger.error("%s\nTraining goes on from %s instead, which is older.", error, folder.previous)
        return checkpoint


def evaluation_source(config: RunConfig) -> Path:
    """The checkpoint ``--eval-only`` means: ``init_from``, else the best or last of the run folder."""
    source = checkpoint_of(config.init_from or config.output_dir)
    if not source.is_file():
        raise InputError(
            f"nothing to evaluate: {source} is no checkpoint. "
            "Give one with init_from=FILE, or the output_dir of a trained run"
        )
    return source


def _describe_training(folder: RunFolder, config: RunConfig) -> None:
    _describe(folder, config)
    write_text(folder.launch, distributed.launch())


def _describe(folder: RunFolder, config: RunConfig) -> None:
    write_text(folder.config, config_to_yaml(config))
    write_json(folder.machine, machine_info())


def _tell_changes(config: RunConfig, checkpoint: Checkpoint) -> None:
    """Log which settings differ from those the run was started with."""
    before = _flat(config_to_dict(config_from_dict(checkpoint.config)))
    changed = [
        f"{key}: {before[key]} -> {value}"
        for key, value in _flat(config_to_dict(config)).items()
        if before[key] != value
    ]
    if changed:
        logger.warning("resuming with other settings than the run was started with: %s", "; ".join(changed))


def _flat(tree: dict[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _check_same_task(config: RunConfig, checkpoint: Checkpoint, folder: RunFolder) -> None:
    before = config_from_dict(checkpoint.config)
    if type(before) is not type(config):
        raise InputError(
            f"{folder.last} is of a {type(before).__name__}, not of a {type(config).__name__}: resume with the command "
            "that began it, or choose another folder with output_dir=DIR"
        )


def _report(task: Task[Any], folder: RunFolder, result: Measured, evaluate: Any, model: nn.Module) -> Outcome | None:
    """Results, pictures and the page that shows them, by the main process."""
    if not distributed.is_main():
        return None
    write_json(folder.evaluation, result.to_dict())
    task.leave(folder, evaluate, model)
    return Outcome(result, write_report(folder.path))


def training_command(
    make_task: Callable[[C], Task[C]], schema: type[C], description: str | None, arguments: Sequence[str] | None
) -> int:
    """The command line of one task: train, resume or evaluate; returns the exit code."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", metavar="FILE", required=True, help="YAML file, configs/demo.yaml for instance")
    parser.add_argument("--resume", action="store_true", help="go on from output_dir/last.pt")
    parser.add_argument("--auto-resume", action="store_true", help="the same if it is there, else start")
    parser.add_argument("--eval-only", action="store_true", help="evaluate init_from, or the run in output_dir")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of the file")
    options = parser.parse_intermixed_args(arguments)

    def run() -> int:
        task = make_task(load_config(options.config, options.overrides, schema=schema))
        if options.eval_only + options.resume + options.auto_resume > 1:
            raise InputError("--eval-only, --resume and --auto-resume exclude each other")
        if options.eval_only:
            outcome = evaluate_only(task, evaluation_source(task.config))
        else:
            outcome = train(task, resume=options.resume, resume_if_possible=options.auto_resume)
        if outcome is not None:  # the first process has it
            print(outcome)
        return 0

    return run_tool(run)
