"""Train, fine-tune and evaluate models of every task.

Configs are read and checked before torch is imported, so that a wrong setting is reported at once.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from detr_bf.commands.arguments import split_settings
from detr_bf.common.errors import InputError
from detr_bf.common.files import CONFIG_FILE, is_file, is_folder
from detr_bf.common.text import printable, safe_message
from detr_bf.config import load_config, packaged_configs, saved_config


def main(options: argparse.Namespace) -> int:
    """Train, resume or evaluate."""
    files, overrides = split_settings([*options.config, *options.settings])
    if not files:
        raise InputError("give a config: a YAML file, or a name that 'detr-bf recipes' lists")
    if options.eval_only + options.resume + options.auto_resume + options.dry_run > 1:
        raise InputError("--eval-only, --resume, --auto-resume and --dry-run exclude each other")
    config = load_config(files, overrides)
    from detr_bf.tasks import task_of
    from detr_bf.tasks.run import dry_run_training, evaluate_only, evaluation_source, train

    task = task_of(config)
    if options.dry_run:
        return _done(dry_run_training(task))
    if options.eval_only:
        named = any(override.partition("=")[0].strip() == "init_from" for override in overrides)
        return _done(evaluate_only(task, evaluation_source(config, named)))
    return _done(train(task, resume=options.resume, resume_if_possible=options.auto_resume))


def _done(outcome: object) -> int:
    if outcome is not None:  # on rank 0
        print(safe_message(outcome))
    return 0


def evaluate(options: argparse.Namespace) -> int:
    """Evaluate a run, a checkpoint or published weights, on the images of the run or of a folder."""
    folders = [text for text in options.settings if is_folder(text) and text not in packaged_configs()]
    if len(folders) > 1:
        raise InputError(f"give one folder to evaluate on, not {len(folders)}")
    files, overrides = split_settings([text for text in options.settings if text not in folders])
    if files:
        load_config(files, overrides)  # a wrong setting is reported before torch is imported
    elif is_file(Path(options.run) / CONFIG_FILE):
        saved_config(Path(options.run) / CONFIG_FILE, overrides)
    from detr_bf.common.progress import setup_logging
    from detr_bf.inference.loading import evaluated_run
    from detr_bf.tasks import task_of
    from detr_bf.tasks.run import evaluate_only

    setup_logging()
    config, source, checkpoint = evaluated_run(options.run, files, overrides, folders[0] if folders else None)
    return _done(evaluate_only(task_of(config), source, checkpoint))


def fine_tune(options: argparse.Namespace) -> int:
    """Train a detector on a folder with the settings that :func:`detr_bf.finetune` chooses."""
    files, overrides = split_settings(options.settings)
    if files:
        raise InputError(f"{printable(files[0])} is no setting key=value; a recipe is given as --model")
    if not is_folder(options.folder):
        raise InputError(
            f"there is no folder {printable(options.folder)}: give the folder of a data set (docs/data.md)"
        )
    output = options.output or str(Path("runs") / (options.folder.resolve().name or "mine"))
    from detr_bf.inference.finetuning import fine_tuned

    return _done(
        fine_tuned(
            options.folder,
            output=output,
            model=options.model,
            init_from=options.init_from,
            augment=options.augment,
            masks=options.masks,
            lora=options.lora,
            resume=options.resume,
            overrides=overrides,
            dry_run=options.dry_run,
        )[1]
    )
