"""Fine-tuning of a detector on a folder of annotated images, from Python."""

from __future__ import annotations

import logging
import math
import shlex
from collections.abc import Sequence
from pathlib import Path

from detr_bf.config import DetectionConfig, load_config, packaged_configs
from detr_bf.data.formats import read_folder
from detr_bf.errors import InputError
from detr_bf.models import load, recipe_file
from detr_bf.predictor import Predictor
from detr_bf.run import train
from detr_bf.tasks import task_of
from detr_bf.text import printable

logger = logging.getLogger(__name__)

RUN_STEPS = 3000  # of a run whose length is not given
MOST_EPOCHS = 300
VAL_FRACTION = 0.2  # of a folder without validation split
TRAIN_NAMES = ("train", "train2017", "training")
VAL_NAMES = ("val", "valid", "validation", "val2017", "dev")


def finetune(
    data: str | Path,
    *,
    output: str | Path,
    model: str = "deformable_detr_r50_refine",
    init_from: str | Path | None = None,
    resume: bool = False,
    overrides: Sequence[str] = (),
) -> Predictor:
    """Train a detector on a folder and return the predictor of its best checkpoint.

    This is ``detr-bf train MODEL finetune data.root=DATA output_dir=OUTPUT ...``, and logs that command: the data are
    checked before the first step, and evaluation, results and a report are in ``output``. Splits named train and val
    (or valid, ...) are used; without them a fifth of the training images is for validation. The number of epochs gives
    about ``RUN_STEPS`` optimizer steps, at most ``MOST_EPOCHS`` epochs.

    Args:
        data: folder in one of the forms that docs/data.md lists, or the arguments of ``data.*`` in ``overrides``.
        output: new folder of the run, or with ``resume`` the folder of a run.
        model: name of a recipe (:func:`detr_bf.list_models`) or a YAML file.
        init_from: checkpoint or run to start from; by default the backbone's weights that the recipe names.
        resume: continue the run in ``output`` if there is one.
        overrides: settings as on the command line, which replace those chosen here.

    Raises:
        InputError: for anything that can be corrected, before the first step.
    """
    if not str(output).strip():
        raise InputError("finetune needs the folder of the run: output='runs/mine'")
    chosen = [*_data_settings(Path(data)), f"output_dir={output}"]
    if init_from is not None:
        chosen.append(f"init_from={init_from}")
    files, names = [recipe_file(model), packaged_configs()["finetune"]], {_name(each) for each in overrides}
    if "train.epochs" not in names:
        chosen.append(f"train.epochs={_epochs(files, [*chosen, *overrides], Path(data))}")
    chosen = [each for each in chosen if _name(each) not in names]
    command = shlex.join(["detr-bf", "train", model, "finetune", *chosen, *overrides])
    logger.info("same as: %s", printable(command, limit=2000))
    train(task_of(load_config(files, [*chosen, *overrides], task="detection")), resume_if_possible=resume)
    return load(output)


def _name(override: str) -> str:
    return override.partition("=")[0].strip()


def _data_settings(root: Path) -> list[str]:
    """Return the settings that read a folder, with its splits or a division of its images."""
    folder = read_folder(root)
    known = folder.split_names
    train, val = (next((each for each in names if each in known), "") for names in (TRAIN_NAMES, VAL_NAMES))
    settings = [f"data.root={root}"]
    if train and val:
        return [*settings, f"data.train.split={train}", f"data.val.split={val}"]
    return [*settings, *([f"data.train.split={train}"] if train else []), f"data.val_fraction={VAL_FRACTION}"]


def _epochs(files: Sequence[Path], settings: Sequence[str], root: Path) -> int:
    """Return the number of epochs for about ``RUN_STEPS`` optimizer steps."""
    config: DetectionConfig = load_config(files, list(settings), task="detection")
    data = config.data
    images = len(read_folder(root).split(data.train.split or "").images) * (1 - data.val_fraction)
    steps = max(1, math.ceil(images / (config.train.batch_size * config.train.accumulate)))
    return min(MOST_EPOCHS, math.ceil(RUN_STEPS / steps))
