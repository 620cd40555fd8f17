"""Check the data of a config, a folder or a run; also correct its annotations, or draw its augmentations.

Configs are read and checked before torch is imported, so that a wrong setting is reported at once.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from detr_bf.commands.arguments import split_settings
from detr_bf.common.errors import InputError
from detr_bf.common.files import CONFIG_FILE, is_file, is_folder
from detr_bf.common.text import printable, safe_message
from detr_bf.config import DetectionConfig, RunConfig, load_config, packaged_configs, saved_config

MOST_IMAGES = 100  # on a sheet of augmentations


def main(options: argparse.Namespace) -> int:
    """Check the data of a config, a folder or a run, print all errors and warnings, and return 2 for errors."""
    config, given, overrides = _checked(options)
    sheet = _augmented_sheet(config, options.show_augmented, options.images)
    if options.fix is not None:
        if sheet is not None:
            raise InputError("--fix and --show-augmented exclude each other")
        return _fix(config, options.fix, given, overrides)
    from detr_bf.tasks import task_of

    task = task_of(config)
    task.check_settings()
    report = task.examine()
    print(safe_message("\n".join(filter(None, (str(report), task.settings_text())))))
    if report.errors:
        if text := task.advice(report, shlex.join([*options.config, *options.settings])):
            print(safe_message(text))
        return 2
    if sheet is not None:
        print(safe_message(sheet()))
    return 0


def _checked(options: argparse.Namespace) -> tuple[Any, list[str], list[str]]:
    """Return the config whose data are checked, the configs in the form of the command line, and the overrides.

    A run folder stands for the config in it, a folder of images for data.root with the splits of fine-tuning, and
    without a config for those that fine-tuning chooses.
    """
    words = [*options.config, *options.settings]
    if not words:
        raise InputError("give the folder of a data set, a config or a run to check (docs/data.md)")
    folders = [text for text in words if is_folder(text) and text not in packaged_configs()]
    if not folders:
        files, overrides = split_settings(words)
        return load_config(files, overrides), [text for text in words if text not in overrides], overrides
    files, overrides = split_settings([text for text in words if text not in folders])
    if len(folders) > 1:
        raise InputError(f"give one folder to check, not {len(folders)}")
    folder = Path(folders[0])
    if is_file(folder / CONFIG_FILE):
        if files:
            raise InputError(f"{printable(folder)} is a run with settings of its own: give no config beside it")
        return saved_config(folder / CONFIG_FILE, overrides), [str(folder / CONFIG_FILE)], overrides
    from detr_bf.inference.finetuning import folder_splits, stored_channels

    configs = files or [packaged_configs()["finetune"]]
    overrides = [f"data.root={json.dumps(str(folder), ensure_ascii=False)}", *overrides]
    overrides += folder_splits(load_config(configs, overrides, task="detection"))
    names = [each.partition("=")[0].strip() for each in overrides]
    overrides += stored_channels(load_config(configs, overrides, task="detection"), names)
    named = [text for text in words if text not in folders and text not in overrides]
    return load_config(configs, overrides, task="detection"), named, overrides


def _augmented_sheet(config: RunConfig, given: Path | None, count: int | None) -> Callable[[], str] | None:
    """Check the arguments of ``--show-augmented``; return the function that writes the sheet, None if not given."""
    if given is None:
        if count is not None:
            raise InputError("--images is the number of images that --show-augmented draws: give both")
        return None
    images = 4 if count is None else count
    if not isinstance(config, DetectionConfig):
        raise InputError(
            f"--show-augmented draws the training images of detectors, and this config is task={config.task}"
        )
    if not 1 <= images <= MOST_IMAGES:
        raise InputError(f"--images must be from 1 to {MOST_IMAGES}, got {images}")
    from detr_bf.tasks.augmented import sheet_path, write_augmented  # not needed for training

    return partial(write_augmented, config, sheet_path(given), images)


def _fix(config: RunConfig, output: Path, given: Sequence[str], overrides: Sequence[str]) -> int:
    """Check the data, write a corrected copy of the annotations, and return 0."""
    if not isinstance(config, DetectionConfig):
        raise InputError(f"--fix corrects the annotations of detectors, and this config is task={config.task}")
    from detr_bf.tasks import task_of
    from detr_bf.tasks.corrected import SETTINGS_FILE, check_new_folder, write_corrected  # not needed for training

    check_new_folder(output, config)
    config.data.skip_unreadable = 0.0  # what is left out is listed
    try:
        print(safe_message(task_of(config).examine()), flush=True)
    except InputError as error:  # a file that the checks cannot read may still be corrected
        print(safe_message(error), flush=True)
    print(safe_message(write_corrected(config, output)))
    paths = ("data.root", "data.format", "data.train.", "data.val", "data.fold", "data.split_seed")
    kept = [each for each in overrides if not each.strip().startswith(paths)]
    words = ["train", *given, str(output / SETTINGS_FILE)] if given else ["finetune", str(output)]
    print(safe_message(f"next: {shlex.join(['detr-bf', *words, *kept])}"))
    return 0
