"""Train what a config describes: a detector, a classifier or a masked autoencoder.

detr-bf train detr_r50_bfv2 data.train.images=DIR data.train.annotations=FILE ...
detr-bf train configs/demo.yaml mine.yaml train.epochs=12 output_dir=runs/mine
detr-bf train mine.yaml --dry-run          # everything up to the first step
torchrun --nproc-per-node=8 -m detr_bf train detr_r50_bfv2 train.batch_size=2
"""

from __future__ import annotations

import argparse
import fnmatch
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from detr_bf.cli import run_tool
from detr_bf.commands import add_config_arguments, configs_and_overrides
from detr_bf.config import DetectionConfig, RunConfig, load_config, packaged_configs
from detr_bf.errors import InputError
from detr_bf.published import PublishedWeights, list_weights, published
from detr_bf.run import dry_run_training, evaluate_only, evaluation_source, train
from detr_bf.tasks import task_of
from detr_bf.text import printable, safe_message

MOST_IMAGES = 100  # on a sheet of augmentations
_EVALUATE = """Evaluate the run in output_dir, or the weights given as init_from=FILE.

detr-bf evaluate detr_r50_bfv2 output_dir=runs/mine
detr-bf evaluate detr_r50 init_from=detr-r50-e632da11.pth output_dir=runs/official
"""
_CHECK = """Check the data of a config and print all errors and warnings; exit code 2 if there are errors.

detr-bf check rtdetr_r50 finetune data.root=DIR data.val_fraction=0.2
detr-bf check mine.yaml --fix corrected            # a copy of the annotations without errors
detr-bf check mine.yaml --show-augmented sheet.png
"""
_RECIPES = """List the packaged configs and their files, or published weights.

detr-bf recipes
detr-bf recipes 'deformable_detr*'
detr-bf recipes --weights
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, resume or evaluate, and return the exit code."""
    parser = _parser(__doc__)
    parser.add_argument("--resume", action="store_true", help="resume from output_dir/last.pt")
    parser.add_argument("--auto-resume", action="store_true", help="resume if output_dir has a checkpoint, else start")
    parser.add_argument(
        "--dry-run", action="store_true", help="do everything up to the first step, and write nothing to output_dir"
    )
    parser.add_argument("--eval-only", action="store_true", help="evaluate, as detr-bf evaluate does")
    options = parser.parse_intermixed_args(arguments)
    return run_tool(lambda: _run(options))


def evaluate(arguments: Sequence[str] | None = None) -> int:
    """Evaluate the run in output_dir, or ``init_from=FILE``, and return the exit code."""
    parser = _parser(_EVALUATE)
    parser.set_defaults(eval_only=True, resume=False, auto_resume=False, dry_run=False)
    options = parser.parse_intermixed_args(arguments)
    return run_tool(lambda: _run(options))


def check(arguments: Sequence[str] | None = None) -> int:
    """Check the data of a config, print all errors and warnings, and return 2 if there are errors."""
    parser = _parser(_CHECK)
    parser.add_argument(
        "--show-augmented", type=Path, metavar="DIR|FILE.png", help="also draw training images with each augmentation"
    )
    parser.add_argument("--images", type=int, metavar="N", help="training images that --show-augmented draws (4)")
    parser.add_argument(
        "--fix",
        type=Path,
        metavar="OUT",
        help="also write annotations without errors to a new folder; see docs/data.md",
    )
    options = parser.parse_intermixed_args(arguments)

    def run() -> int:
        files, overrides = configs_and_overrides(options)
        config = load_config(files, overrides)
        sheet = _augmented_sheet(config, options.show_augmented, options.images)
        if options.fix is not None:
            if sheet is not None:
                raise InputError("--fix and --show-augmented exclude each other")
            given = [text for text in (*options.config, *options.settings) if text not in overrides]
            return _fix(config, options.fix, given, overrides)
        task = task_of(config)
        task.check_settings()
        report = task.examine()
        print(safe_message("\n".join(filter(None, (str(report), task.settings_text())))))
        if report.errors:
            return 2
        if sheet is not None:
            print(safe_message(sheet()))
        return 0

    return run_tool(run)


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
    from detr_bf.tasks.corrected import SETTINGS_FILE, check_new_folder, write_corrected  # not needed for training

    check_new_folder(output, config)
    try:
        print(safe_message(task_of(config).examine()), flush=True)
    except InputError as error:  # a file that the checks cannot read may still be corrected
        print(safe_message(error), flush=True)
    print(safe_message(write_corrected(config, output)))
    paths = ("data.root", "data.format", "data.train.", "data.val", "data.fold", "data.split_seed")
    kept = [each for each in overrides if not each.strip().startswith(paths)]
    print(printable(f"next: {shlex.join(['detr-bf', 'train', *given, str(output / SETTINGS_FILE), *kept])}"))
    return 0


def recipes(arguments: Sequence[str] | None = None) -> int:
    """List the packaged configs, or published weights, whose names match one of the patterns; return the exit code."""
    parser = argparse.ArgumentParser(description=_RECIPES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pattern", nargs="*", default=["*"], metavar="PATTERN", help="such as '*bfv2'; default: all")
    parser.add_argument(
        "--weights", action="store_true", help="names for init_from and --checkpoint, with size, licence and page"
    )
    options = parser.parse_args(arguments)

    def run() -> int:
        lines = (
            {name: _about(published(name)) for name in list_weights()}
            if options.weights
            else {name: str(path) for name, path in packaged_configs().items()}
        )
        for name, text in lines.items():
            if any(fnmatch.fnmatch(name, pattern) for pattern in options.pattern):
                print(f"{name:<48} {text}")
        return 0

    return run_tool(run)


def _about(weights: PublishedWeights | None) -> str:
    """Return size, licence and page of published weights."""
    assert weights is not None
    size = f"{weights.megabytes:g} MB" if weights.megabytes else "" if weights.url else "by hand"
    return f"{size:<8} {weights.licence or 'no licence stated':<18} {weights.source}"


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_config_arguments(parser)
    return parser


def _run(options: argparse.Namespace) -> int:
    files, overrides = configs_and_overrides(options)
    if not files:
        raise InputError("give a config: a YAML file, or a name that 'detr-bf recipes' lists")
    if options.eval_only + options.resume + options.auto_resume + options.dry_run > 1:
        raise InputError("--eval-only, --resume, --auto-resume and --dry-run exclude each other")
    task = task_of(load_config(files, overrides))
    outcome: object
    if options.dry_run:
        outcome = dry_run_training(task)
    elif options.eval_only:
        named = any(override.partition("=")[0].strip() == "init_from" for override in overrides)
        outcome = evaluate_only(task, evaluation_source(task.config, named))
    else:
        outcome = train(task, resume=options.resume, resume_if_possible=options.auto_resume)
    if outcome is not None:  # on rank 0
        print(safe_message(outcome))
    return 0
