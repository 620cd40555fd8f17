"""Arguments of the commands for data, training and runs, which are read without importing torch.

Each function reads the words after the name of a command. Help and wrong arguments end the program (SystemExit).
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from detr_bf.common.errors import InputError
from detr_bf.common.files import CONFIG_FILE, is_file, is_folder, readable_file
from detr_bf.common.text import printable
from detr_bf.config import SCHEMAS, packaged_configs
from detr_bf.config.data import DataConfig
from detr_bf.interop.hub import is_hub_address
from detr_bf.interop.published import find_weights, published

SHELLS = ("bash", "zsh")
SAMPLE_SETS = ("digits", "scenes", "pairs")
SAMPLE_OPTIONS = {
    "num_train": "training images",
    "num_val": "validation images",
    "image_size": "pixels of a side",
    "seed": "0 or larger",
    "contrast": "of pairs alone: levels of 255 by which a mark is lighter or darker",
}
TRAINED_HELP = "run folder, checkpoint, saved folder, or name of published weights"
RUN_HELP = f"exported file, {TRAINED_HELP}"
_DATA_FORMATS = next(each.metadata["choices"] for each in fields(DataConfig) if each.name == "format")


def command_parser(description: str, epilog: str | None = None) -> argparse.ArgumentParser:
    """Return a parser whose help keeps the lines of the description."""
    return argparse.ArgumentParser(
        description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def check_run(given: str) -> None:
    """Check that ``RUN`` is a file or folder, published weights, or an address of the Hugging Face Hub.

    Raises:
        InputError: it is none of them.
    """
    path = Path(given).expanduser()
    if is_file(path) or is_folder(path) or published(given) or is_hub_address(given):
        return
    find_weights(given)  # names that resemble published weights
    try:
        readable_file(path)
    except InputError as error:
        raise InputError(f"{error}; expected RUN: an {RUN_HELP} ('detr-bf recipes --weights')") from None


def folder_of_run(given: str) -> Path:
    """Return the folder of a run, which is given as the folder or as a checkpoint in it."""
    path = Path(given).expanduser()
    return path.parent if is_file(path) and is_file(path.parent / CONFIG_FILE) else path


def add_config_arguments(parser: argparse.ArgumentParser, metavar: str = "CONFIG|key=value") -> None:
    """Add configs, by ``--config`` or as positional arguments, and ``key=value`` overrides."""
    parser.add_argument(
        "--config", metavar="CONFIG", nargs="+", action="extend", default=[], help="the same as positional arguments"
    )
    parser.add_argument(
        "settings",
        nargs="*",
        metavar=metavar,
        help="YAML files or names of packaged configs, which are merged in order, and settings that replace theirs",
    )


def split_settings(given: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Return the config files and the overrides among the words of a command line.

    Raises:
        InputError: a config is neither a file nor the name of a packaged config.
    """
    if not all(text.strip() for text in given):
        raise InputError("an empty argument: expected a config, or an override such as train.epochs=12")
    overrides = [text for text in given if "=" in text and "/" not in text.partition("=")[0] and not _is_yaml(text)]
    return [_config_file(text) for text in given if text not in overrides], overrides


def _is_yaml(text: str) -> bool:
    """Return True for an existing YAML file, whose name may contain ``=``."""
    return text.endswith((".yaml", ".yml")) and os.path.isfile(text)  # noqa: PTH113  False for names that are too long


def _config_file(text: str) -> Path:
    path = Path(text)
    if os.path.isfile(path) or path.suffix in (".yaml", ".yml") or len(path.parts) != 1:  # noqa: PTH113
        return path  # the loader reports a missing file
    known = packaged_configs()
    if text not in known:
        near = difflib.get_close_matches(text, known, n=3, cutoff=0.4)
        hint = f"; nearest names: {', '.join(near)}" if near else ""
        raise InputError(
            f"'{printable(text)}' is neither a file or folder nor a packaged config{hint}. 'detr-bf recipes' lists all "
            f"{len(known)}; settings are given as key=value"
        )
    return known[text]


_TRAIN = """Train what a config describes: a detector, a classifier or its pre-training.

detr-bf train detr_r50_bfv2 data.train.images=DIR data.train.annotations=FILE ...
detr-bf train configs/demo.yaml mine.yaml train.epochs=12 output_dir=runs/mine
detr-bf train mine.yaml --dry-run          # all checks and the time of a step
torchrun --nproc-per-node=8 -m detr_bf train detr_r50_bfv2 train.batch_size=2
"""
_EVALUATE = """Evaluate a trained run, a checkpoint or published weights.

detr-bf evaluate runs/mine                             # its best checkpoint on its validation images
detr-bf evaluate runs/mine photos/                     # on the folder of another data set, or data.root=DIR
detr-bf evaluate detr_r50 data.val.images=DIR data.val.annotations=instances_val2017.json
detr-bf evaluate detr-r50-e632da11.pth detr_r50        # foreign weights: the config comes after them

The settings are those of the checkpoint; configs after RUN replace all of them. Of a folder that is not that of the
run, the split with the name of the run's validation split is evaluated, or else one named val, or else all images.
Results are written to the folder of the run, in eval-NAME, of published and saved weights to runs/evaluate-NAME;
output_dir=DIR names another folder.
"""
_FINETUNE = """Train a detector on a folder of labelled images, with settings that are chosen for it.

detr-bf finetune photos/                                     # the run is written to runs/photos
detr-bf finetune photos/ --output runs/mine --model dino_r50_4scale train.epochs=12
detr-bf finetune photos/ --model small train.minutes=15      # a small detector, without a GPU
detr-bf finetune photos/ --init-from detr_r50 --model detr_r50
detr-bf finetune photos/ --masks                             # boxes and instance masks, of labels with outlines
detr-bf finetune photos/ --init-from runs/mine --lora 8      # low-rank changes: less memory

FOLDER is read as data.root is (docs/data.md); photographs that cannot be decoded are left out. Training starts from the
weights published for the recipe, if they are in the cache or can be downloaded, and says so; init_from=null: from the
backbone's weights. detr_bf.finetune is the same in Python; 'detr-bf new' writes the settings to a file instead.
"""
_CHECK = """Check the data of a config or folder, and print all errors and warnings; exit code 2 if there are errors.

detr-bf check photos/                              # folder of labelled images, without a recipe
detr-bf check runs/mine                            # the data of a run
detr-bf check rtdetr_r50 finetune data.root=DIR data.val_fraction=0.2
detr-bf check mine.yaml --fix corrected            # a copy of the annotations without errors
detr-bf check mine.yaml --show-augmented sheet.png
"""
_RECIPES = """List the packaged configs with a line about each, or published weights.

detr-bf recipes
detr-bf recipes 'deformable_detr*'
detr-bf recipes --files                    # with the paths of the files instead
detr-bf recipes --weights
"""
_SETTINGS = """List settings: key, type, default, allowed values and meaning.

detr-bf settings                           # all settings of detectors
detr-bf settings optimizer                 # a group
detr-bf settings train.epochs data.root
detr-bf settings --task classification
"""
_COMPLETION = """Print a script that completes commands, options, recipes and settings of detr-bf in a shell.

detr-bf completion bash > ~/.local/share/bash-completion/completions/detr-bf
detr-bf completion zsh > ~/.detr-bf-completion.zsh    # then: source ~/.detr-bf-completion.zsh in ~/.zshrc

The script holds all names, so completing starts no program; write it again after an update. Settings are offered after
their first letter.
"""


def train_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the arguments of ``detr-bf train``."""
    parser = command_parser(_TRAIN)
    add_config_arguments(parser)
    parser.add_argument("--resume", action="store_true", help="resume from output_dir/last.pt")
    parser.add_argument("--auto-resume", action="store_true", help="resume if output_dir has a checkpoint, else start")
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything, time a few steps, and write nothing to output_dir"
    )
    parser.add_argument(
        "--eval-only", action="store_true", help="evaluate output_dir, or the weights given as init_from=FILE"
    )
    return parser.parse_intermixed_args(given)


def evaluate_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the arguments of ``detr-bf evaluate``."""
    parser = command_parser(_EVALUATE)
    parser.add_argument("run", metavar="RUN", help=TRAINED_HELP)
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="DIR|CONFIG|key=value",
        help="folder of another data set, configs instead of the settings of the checkpoint, and settings",
    )
    return parser.parse_intermixed_args(given)


def finetune_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the arguments of ``detr-bf finetune``."""
    parser = command_parser(_FINETUNE)
    _add_folder_and_model(parser)
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings that replace the chosen ones")
    parser.add_argument("--output", metavar="DIR", help="new folder of the run; default: runs/NAME for FOLDER NAME")
    parser.add_argument("--init-from", metavar="RUN", help=f"trained detector to start from: {TRAINED_HELP}")
    parser.add_argument("--augment", metavar="NAME", help="none, light or strong; default: by the length of the run")
    parser.add_argument("--masks", action="store_true", help="train masks with the boxes; every object must have one")
    parser.add_argument(
        "--lora", type=int, metavar="RANK", help="train low-rank changes of the detector to start from, such as 8"
    )
    parser.add_argument("--resume", action="store_true", help="continue the run in the folder if there is one")
    parser.add_argument("--dry-run", action="store_true", help="check everything, time a few steps, and write nothing")
    return parser.parse_intermixed_args(given)


def check_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the arguments of ``detr-bf check``."""
    parser = command_parser(_CHECK)
    add_config_arguments(parser, "CONFIG|DIR|RUN|key=value")
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
    return parser.parse_intermixed_args(given)


def recipes_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the arguments of ``detr-bf recipes``."""
    parser = command_parser(_RECIPES)
    parser.add_argument("pattern", nargs="*", default=["*"], metavar="PATTERN", help="such as '*bfv2'; default: all")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--files", action="store_true", help="paths of the configs")
    shown.add_argument(
        "--weights", action="store_true", help="names for init_from and RUN, with size, licence and page"
    )
    return parser.parse_args(given)


def settings_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the arguments of ``detr-bf settings``."""
    parser = command_parser(_SETTINGS)
    parser.add_argument("keys", nargs="*", metavar="KEY", help="setting or group, such as train.epochs or data")
    parser.add_argument("--task", choices=SCHEMAS, default="detection", help="default %(default)s")
    return parser.parse_args(given)


def completion_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the arguments of ``detr-bf completion``."""
    parser = command_parser(_COMPLETION)
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help="bash or zsh")
    return parser.parse_args(given)


_NEW = """Write a commented config for the folder of a data set, with what the data checks find.

detr-bf new photos/ --output mine.yaml                 # then: detr-bf train mine.yaml
detr-bf new photos/ --model dino_r50_4scale --output mine.yaml

FOLDER is read as data.root is: COCO, Roboflow, Pascal VOC, YOLO, labelme or CSV. The config states all settings that
differ from the defaults: those of the recipe and of the preset finetune, and those chosen for the data (splits, epochs,
augmentation, queries, published weights to start from, which are fetched). Exit code 1: the config is written, and the
data have errors to correct before training.
"""


def new_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the arguments of ``detr-bf new``."""
    parser = command_parser(_NEW)
    _add_folder_and_model(parser)
    parser.add_argument("--output", type=Path, metavar="FILE", help="the config; default: NAME.yaml for FOLDER NAME")
    return parser.parse_args(given)


def _add_folder_and_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="folder of the data set")
    parser.add_argument(
        "--model",
        default="rtdetr_r50",
        metavar="RECIPE",
        help="recipe of a detector, see detr-bf recipes, or a YAML file; default %(default)s",
    )


_PLAN = """Estimate what a training run needs: GPU memory, time and disk; report its batch attention and learning rates.

detr-bf plan --config configs/deformable_detr/deformable_detr_r50_bfv2.yaml --gpus 8 train.batch_size=3
"""


def plan_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the arguments of ``detr-bf plan``."""
    parser = command_parser(_PLAN)
    add_config_arguments(parser)
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="one process each; default %(default)s")
    parser.add_argument(
        "--gpu", default="h100", metavar="NAME", help="such as h200, a100, v100, l4, t4 or rtx4090; default %(default)s"
    )
    parser.add_argument("--gpu-memory", type=float, metavar="GB", help="memory of a GPU; default from its data sheet")
    parser.add_argument("--images", type=int, metavar="N", help="to train on; default those of data.root, else COCO's")
    parser.add_argument("--classes", type=int, metavar="N", help="likewise")
    parser.add_argument(
        "--published-batch", type=int, metavar="N", help="total batch of the published rates; default the file's"
    )
    time = parser.add_mutually_exclusive_group()
    time.add_argument("--seconds-per-step", type=float, metavar="X", help="measured step time, instead of an estimate")
    time.add_argument("--measured", type=Path, metavar="FILE", help="record of benchmarks/step.py, instead of that")
    time.add_argument("--tflops", type=float, metavar="X", help="rate that a GPU sustains, instead of peak rates")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the numbers, in bytes and seconds")
    return parser.parse_intermixed_args(given)


_COMPARE = """Compare training settings over seeds, folds and images.

detr-bf compare run FILE [key=value ...]    train every cell of an experiment file, then report
detr-bf compare report DIR                  report on the finished cells of an experiment, without training
detr-bf compare RUN RUN ...                 compare existing run folders; the settings of the first are the baseline
"""


def compare_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the arguments of ``detr-bf compare``."""
    words = list(sys.argv[1:] if given is None else given)
    if words[:1] == ["run"]:
        options = _experiment_parser().parse_intermixed_args(words[1:])
    elif words[:1] == ["report"]:
        options = _experiment_report_parser().parse_args(words[1:])
    elif words[:1] == ["command"]:
        options = _experiment_command_parser().parse_intermixed_args(words[1:])
    else:
        epilog = (
            "'detr-bf compare run --help' and 'detr-bf compare report --help' say more. A run folder of the name run, "
            "report or command is given as ./run."
        )
        parser = command_parser(_COMPARE, epilog)
        parser.add_argument("runs", nargs="+", metavar="RUN", help="finished run: its folder, or a checkpoint in it")
        _add_report_arguments(parser, "folder of the result, default ./comparison")
        options = parser.parse_args(words)
    options.action = words[0] if words[0] in ("run", "report", "command") else "compare"
    return options


def _experiment_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{Path(sys.argv[0]).name} run",
        description="Train every cell of an experiment file, then report. The same command goes on where it was "
        "stopped or killed; finished cells are not trained again.",
    )
    parser.add_argument("file", metavar="FILE", help="experiment file, or the name of a packaged one")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings of all cells, which win over others")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="folder of the experiment, default runs/compare/NAME"
    )
    parser.add_argument("--jobs", type=int, metavar="N", help="cells to train at a time, default as in the file, or 1")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads of each cell, default %(default)s")
    parser.add_argument("--quick", action="store_true", help="try the file out: 4 steps of every arm, in DIR-quick")
    parser.add_argument("--discard-weights", action="store_true", help="remove the checkpoints of finished cells")
    parser.add_argument("--print", action="store_true", help="only print the commands of the unfinished cells")
    return parser


def _experiment_report_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{Path(sys.argv[0]).name} report",
        description="Report on the finished cells of an experiment, without training. The folder needs only cells/, "
        "the records of its cells; those of finished runs are written if they are missing.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of an experiment")
    _add_report_arguments(parser, "folder of the result, default DIR")
    return parser


def _experiment_command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{Path(sys.argv[0]).name} command",
        description="Train one cell of an experiment by a command, as 'detr-bf compare run' does for such an arm.",
    )
    parser.add_argument("line", metavar="COMMAND", help="command line with variables, as in an experiment file")
    parser.add_argument("settings", nargs="*", metavar="CONFIG|key=value", help="settings of the cell")
    parser.add_argument("--seconds", type=float, metavar="N", help="value of {seconds}")
    return parser


def _add_report_arguments(parser: argparse.ArgumentParser, output: str) -> None:
    parser.add_argument("--output", type=Path, metavar="DIR", help=output)
    parser.add_argument("--baseline", metavar="ARM", help="arm that the others are compared with")
    parser.add_argument("--primary", metavar="METRIC", help="metric of the verdict, such as AP50")


_REPORT = """Write the report of a run again from the files of its folder, or put several runs side by side.

detr-bf report RUN                          write RUN/report.html again
detr-bf report RUN RUN ... --output FILE    results, settings, curves and pictures of several runs on one page
"""


def report_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the arguments of ``detr-bf report``."""
    parser = command_parser(_REPORT)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run: its folder, or a checkpoint in it")
    parser.add_argument("--output", type=Path, metavar="FILE", help="page of several runs, default ./runs.html")
    return parser.parse_args(given)


_REPLAY = """Run a captured training step again and report the first module whose output is not finite.

detr-bf replay runs/mine/captures/step_0000017_rank_0.pt
detr-bf replay FILE --device cpu --precision float32    # is it finite in full precision?

Exit code 0: it is not finite again; 3: everything is finite now; 2: bad input.
"""


def replay_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the arguments of ``detr-bf replay``."""
    parser = command_parser(_REPLAY)
    parser.add_argument("file", metavar="FILE", type=Path, help="written by a run whose step was not finite")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--precision", help="float32, bf16 or fp16; default: as in the run")
    parser.add_argument(
        "--anomaly",
        action="store_true",
        help="use torch's anomaly detection to find the operation whose gradient is NaN",
    )
    return parser.parse_args(given)


_SAMPLE_DATA = """Build a sample data set of composites as COCO JSON and image files.

detr-bf sample-data digits --output data/digits
detr-bf sample-data scenes --output data/scenes
detr-bf sample-data pairs --output data/pairs --contrast 16
"""


def sample_data_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the arguments of ``detr-bf sample-data``."""
    parser = command_parser(_SAMPLE_DATA)
    parser.add_argument(
        "name",
        choices=SAMPLE_SETS,
        help="digits: MNIST on photographs; scenes: MNIST on textures, panoptic; pairs: faint marks on photographs, "
        "with each photograph itself as the reference",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="new folder, or the same set")
    for option, meaning in SAMPLE_OPTIONS.items():
        parser.add_argument(
            f"--{option.replace('_', '-')}", type=int, metavar="N", help=f"{meaning}, default: the set's own"
        )
    return parser.parse_args(given)


_CONVERT_DATA = """Write the folder of a data set (COCO, Roboflow, Pascal VOC, YOLO, labelme, CSV) as COCO JSON files.

detr-bf convert-data data/bccd --output bccd                                 # all images: all.json
detr-bf convert-data data/bccd --split trainval --split test --output bccd   # trainval.json, test.json
detr-bf convert-data data/bccd --folds 5 --fold 0 --output bccd              # train.json, val.json, as data.folds=5
detr-bf convert-data data/pets --split train --val-fraction 0.2 --output pets

The images stay where they are; file_name is relative to ROOT. Training reads such folders directly (data.root).
The data are checked as by detr-bf check. Exit code 1: they have errors, and nothing is written.
"""


def convert_data_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the arguments of ``detr-bf convert-data``."""
    parser = command_parser(_CONVERT_DATA)
    parser.add_argument("root", metavar="ROOT", type=Path, help="folder of the data set")
    parser.add_argument("--output", required=True, metavar="DIR", type=Path, help="folder of the JSON files")
    parser.add_argument("--format", default="auto", choices=_DATA_FORMATS, help="of ROOT")
    parser.add_argument("--split", action="append", metavar="NAME", help="repeatable; default: all images")
    division = parser.add_mutually_exclusive_group()
    division.add_argument("--folds", type=int, metavar="N", help="divide the images into N folds; needs --fold")
    division.add_argument("--val-fraction", type=float, metavar="F", help="share of the images in val.json")
    parser.add_argument("--fold", type=int, metavar="K", help="fold in val.json, from 0 on")
    parser.add_argument(
        "--split-seed", type=int, default=0, metavar="S", help="of --folds and --val-fraction; default 0"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace JSON files that exist")
    options = parser.parse_args(given)
    if (options.folds is None) != (options.fold is None):
        parser.error("--folds and --fold go together")
    if options.split and len(options.split) > 1 and (options.folds or options.val_fraction):
        parser.error("--folds and --val-fraction divide one --split, or all images")
    return options
