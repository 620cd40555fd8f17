"""Fine-tuning of a detector on a folder of annotated images, from Python."""

from __future__ import annotations

import json
import logging
import math
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict, overload

import torch

from detr_bf.assembly.data import data_source
from detr_bf.assembly.training import LEAST_RATE, RUN_STEPS
from detr_bf.common import distributed
from detr_bf.common.errors import InputError
from detr_bf.common.files import CONFIG_FILE, file_size, is_file
from detr_bf.common.progress import setup_logging
from detr_bf.common.text import listed, printable
from detr_bf.config import DetectionConfig, load_config, own_settings, packaged_configs, saved_config
from detr_bf.config.common import AUTO
from detr_bf.data.coco import CocoAnnotations, read_annotations
from detr_bf.data.formats import MASK_SPLITS, read_folder
from detr_bf.data.image_headers import stored_format
from detr_bf.inference.loading import VAL_NAMES, load, recipe_file
from detr_bf.inference.predictor import Predictor
from detr_bf.interop.published import get_published, published_for
from detr_bf.tasks import task_of
from detr_bf.tasks.run import Outcome, dry_run_training, train

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger(__name__)

MOST_EPOCHS = 300
AUGMENTATION = ("none", "light", "strong")
SHORT_RUN = 10  # epochs at most without augmentation; docs/results.md has the measurements behind these numbers
ANSWER_SECONDS = 5.0  # seconds for the answer of a server that has published weights
_FREE_SETTINGS = ("model.num_queries", "model.dropout", "model.masks")  # weights of the same detector fit
VAL_FRACTION = 0.2  # of a folder without validation split
TRAIN_NAMES = ("train", "train2017", "training")
_OTHER_NAMES = ("trainval", "test", "test2017", "testing")  # they, too, show that a folder has splits
_PATH_SETTINGS = ("data.root=", "data.train.", "data.val.", "output_dir=")
_SPLIT_SETTINGS = ("data.train.", "data.val.", "data.val_fraction", "data.fold")


class FineTuneOptions(TypedDict, total=False):
    """Optional keyword arguments of :func:`finetune`, except ``dry_run``."""

    model: str
    init_from: str | Path | None
    augment: str | None
    masks: bool
    lora: int | None
    resume: bool
    overrides: Sequence[str]


@overload
def finetune(
    data: str | Path, *, output: str | Path, dry_run: Literal[False] = ..., **options: Unpack[FineTuneOptions]
) -> Predictor: ...


@overload
def finetune(
    data: str | Path, *, output: str | Path, dry_run: Literal[True], **options: Unpack[FineTuneOptions]
) -> None: ...


def finetune(
    data: str | Path,
    *,
    output: str | Path,
    model: str = "rtdetr_r50",
    init_from: str | Path | None = None,
    augment: str | None = None,
    masks: bool = False,
    lora: int | None = None,
    resume: bool = False,
    overrides: Sequence[str] = (),
    dry_run: bool = False,
) -> Predictor | None:
    """Train a detector on a folder and return the predictor of its best checkpoint.

    This is ``detr-bf train MODEL finetune augment_AUGMENT data.root=DATA output_dir=OUTPUT ...``, and logs that
    command: the data are checked before the first step, and evaluation, results and a report are in ``output``. Splits
    named train and val (or valid, ...) are used; of a folder without val a fifth of the training images is for
    validation, of a folder without splits a fifth of all images. The number of epochs gives about ``RUN_STEPS``
    optimizer steps, at most ``MOST_EPOCHS`` epochs. The number of steps that the run has after all overrides chooses
    the warm-up, the decay of the averaged weights, and for RT-DETR and D-FINE the learning rates (docs/fine_tuning.md).

    Args:
        data: folder in one of the forms that docs/data.md lists.
        output: new folder of the run, or with ``resume`` the folder of a run.
        model: name of a recipe (:func:`detr_bf.list_models`) or of another packaged config (``demo``), or a YAML file,
            whose own settings replace those of fine-tuning.
        init_from: checkpoint or run to start from; by default the weights published for the recipe, and without them
            (or with the override ``init_from=null``) the backbone's weights that the recipe names.
        augment: none, light or strong (``configs/augment_*.yaml``); by default light, and none in a run of
            ``SHORT_RUN`` epochs or fewer. Strong augmentation ends with the last tenth of the epochs.
        masks: train masks with the boxes (``model.masks=true``); every object must have a mask.
        lora: rank; train low-rank changes of attention and feed-forward layers (``freeze.lora``), which needs a
            trained detector to start from.
        resume: continue the run in ``output`` if there is one.
        overrides: settings as on the command line, which replace those chosen here.
        dry_run: do everything up to the first step, time a few steps, log what was found, write nothing; return None.

    Raises:
        InputError: for anything that can be corrected, before the first step.
    """
    config, outcome = fine_tuned(
        data,
        output=output,
        model=model,
        init_from=init_from,
        augment=augment,
        masks=masks,
        lora=lora,
        resume=resume,
        overrides=overrides,
        dry_run=dry_run,
    )
    if dry_run:
        logger.info("%s", outcome)  # ranks other than 0 log errors only
        return None
    return load(config.output_dir, config.device)


def fine_tuned(
    data: str | Path,
    *,
    output: str | Path,
    model: str,
    init_from: str | Path | None,
    augment: str | None,
    masks: bool,
    lora: int | None,
    resume: bool,
    overrides: Sequence[str],
    dry_run: bool,
) -> tuple[DetectionConfig, Outcome | str | None]:
    """Train or try as :func:`finetune` describes; return the config and the result (None on ranks other than 0).

    Raises:
        InputError: for anything that can be corrected, before the first step.
    """
    if not str(output).strip():
        raise InputError("finetune needs the folder of the run: output='runs/mine'")
    if dry_run and resume:
        raise InputError("dry_run=True and resume=True exclude each other: a dry run tries a new run")
    paths = {"data.root": data, "output_dir": output} | ({} if init_from is None else {"init_from": init_from})
    names = {each.partition("=")[0].strip() for each in overrides}
    # quoted, because the values of settings are YAML: 007 would be a number, and "a #1" end at the blank
    chosen = [
        f"{name}={json.dumps(str(Path(path).expanduser()), ensure_ascii=False)}"
        for name, path in paths.items()
        if name not in names
    ]
    chosen += ["model.masks=true"] if masks and "model.masks" not in names else []
    chosen += [f"freeze.lora={json.dumps(lora)}"] if lora is not None and "freeze.lora" not in names else []
    files, own = fine_tuning_files(model)
    setup_logging()
    chosen += _start(model, files, [*own, *chosen, *overrides], resume)
    augment, more = chosen_settings(files, [*own, *chosen, *overrides], augment)
    files, chosen = [*files, packaged_configs()[f"augment_{augment}"]], [*own, *chosen, *more]
    config: DetectionConfig = load_config(files, [*chosen, *overrides], task="detection")
    command = ["detr-bf", "train", model, "finetune", f"augment_{augment}", *chosen, *overrides]
    command += ["--auto-resume"] * resume + ["--dry-run"] * dry_run
    logger.info("same as: %s", printable(shlex.join(command), limit=2000))
    if dry_run:
        return config, dry_run_training(task_of(config))
    return config, train(task_of(config), resume_if_possible=resume)


def _start(model: str, files: Sequence[Path], given: Sequence[str], resume: bool) -> list[str]:
    """Return the setting of the weights to start from, and log it: those of the run to resume, or published ones.

    The main rank decides for all ranks.
    """
    config: DetectionConfig = load_config(files, given, task="detection")
    before = Path(config.output_dir) / CONFIG_FILE
    if resume and is_file(before) and "init_from" not in (each.partition("=")[0].strip() for each in given):
        stored: DetectionConfig = saved_config(before)
        return [f"init_from={json.dumps(stored.init_from)}"]
    with distributed.process_group(torch.device("cpu"), config.train.timeout_minutes):
        chosen, text = distributed.run_on_main(lambda: published_start(model, files, given))
    if text:
        logger.info("%s", text)
    return chosen


def fine_tuning_files(model: str) -> tuple[list[Path], list[str]]:
    """Return the configs of a detector and of fine-tuning, and the settings that win over both.

    These are the settings of a file of the user, without those it inherits and without paths of data and run. Of a
    packaged config there are none.

    Raises:
        InputError: there is no such config.
    """
    packaged = packaged_configs()
    path = packaged.get(model) or recipe_file(model, "small")
    own = [] if path in packaged.values() else own_settings(path)
    return [path, packaged["finetune"]], [setting for setting in own if not setting.startswith(_PATH_SETTINGS)]


def published_start(model: str, files: Sequence[Path], given: Sequence[str]) -> tuple[list[str], str]:
    """Return the setting of the published weights from which training starts, and a sentence about its start.

    There is no setting, and no sentence, if ``init_from`` is given. There is none if no weights are published for the
    model, it is given as another one, or the weights are neither in the cache nor can be downloaded.

    Args:
        model: name of a recipe; a file of the user has no published weights.
        files: configs of the detector and of fine-tuning.
        given: settings, which win over the files.
    """
    config: DetectionConfig = load_config(files, given, task="detection")
    names = {each.partition("=")[0].strip() for each in given}
    if config.init_from or "init_from" in names:
        return [], ""
    if config.data.root:
        read_folder(Path(config.data.root), config.data.format)  # its errors come before a download
    own = config.model.backbone.weights
    backbone = f"start: {'random weights' if own == 'none' else f'the weights of the backbone alone ({own})'}"
    weights = published_for(model)
    if weights is None:
        known = "'detr-bf recipes --weights' lists those that init_from=NAME starts from"
        return [], f"{backbone}, because no detector of COCO is published for {printable(model)}; {known}"
    named = f"the published weights {weights.name} (licence {weights.licence or 'not stated'}, trained on COCO"
    if others := sorted(name for name in names if name.startswith("model.") and name not in _FREE_SETTINGS):
        fits = f"because {listed(others)} may make another detector; init_from={weights.name} takes what fits"
        return [], f"{backbone} and not {named}), {fits}"
    try:
        path = get_published(weights, ANSWER_SECONDS)
    except InputError as error:
        place = shlex.quote(str(weights.path))
        size = f" ({weights.megabytes:g} MB)" if weights.megabytes else ""
        fetch = f" To start from them{size}: 'curl -fL --create-dirs -o {place} {weights.url}', or copy the file there"
        return [], f"{backbone} and not {named}): {error}{fetch if weights.url else ''}"
    source = weights.name if not Path(weights.name).exists() else str(path)
    size = f"{file_size(path) / 1e6:.3g} MB"
    return [f"init_from={json.dumps(source)}"], f"start: {named}, {size}, from {weights.source})"


def chosen_settings(files: Sequence[Path], given: Sequence[str], augment: str | None = None) -> tuple[str, list[str]]:
    """Return the name of the augmentation, and the settings chosen for the folder that are not among the given ones.

    These are the splits, the length of the run, and ``auto`` for the learning rates that follow from the length.

    Args:
        files: configs of the detector and of fine-tuning, without augmentation.
        given: settings, with data.root.
        augment: as in :func:`finetune`.

    Raises:
        InputError: the folder cannot be read, or has splits of which none is known to be for training; there is no such
            augmentation.
    """
    if augment is not None and augment not in AUGMENTATION:
        raise InputError(f"augment must be one of {', '.join(AUGMENTATION)}, or None; got {printable(repr(augment))}")
    names, chosen = {each.partition("=")[0].strip() for each in given}, list[str]()
    if not any(name.startswith(_SPLIT_SETTINGS) for name in names):
        chosen += folder_splits(load_config(files, given, task="detection"))
    chosen += stored_channels(load_config(files, [*given, *chosen], task="detection"), names)
    config: DetectionConfig = load_config(files, [*given, *chosen], task="detection")
    train, images = config.train, _train_images(config)
    steps = max(1, math.ceil(images / (train.batch_size * train.accumulate)))
    epochs = train.epochs if "train.epochs" in names else min(MOST_EPOCHS, math.ceil(RUN_STEPS / steps))
    augment = augment or ("none" if epochs <= SHORT_RUN else "light")
    settings: dict[str, float | str] = {"train.epochs": epochs, **_rates(config)}
    if augment == "strong":
        settings["data.plain_last_epochs"] = epochs // 10
    return augment, chosen + [f"{name}={value}" for name, value in settings.items() if name not in names]


def folder_splits(config: DetectionConfig) -> list[str]:
    """Return the settings of the splits of the folder ``data.root``, or of a division of its images.

    They replace the splits that a config has for the folder of its own. Without ``data.root`` there are none. With
    ``model.masks`` the splits whose images have masks are taken, if the folder has such (Pascal VOC).

    Raises:
        InputError: the folder has splits, and it is not clear which one is for training.
    """
    data = config.data
    if not data.root:
        return []
    folder = read_folder(Path(data.root), data.format)
    first = {name.split("/")[0] for name in folder.split_names} | set(folder.splits)
    of_masks = {name for name in folder.splits if name.startswith(MASK_SPLITS)}
    first = of_masks if config.model.masks and of_masks else first - of_masks
    known = {name.removeprefix(MASK_SPLITS).lower(): name for name in sorted(first)}
    train, val = (next((known[name] for name in names if name in known), "") for names in (TRAIN_NAMES, VAL_NAMES))
    if not train and (first & set(folder.splits) or any(name in known for name in (*VAL_NAMES, *_OTHER_NAMES))):
        raise InputError(
            f"{printable(data.root)} has no split train; its splits: {folder.known_splits}. Give "
            "overrides=['data.train.split=NAME', 'data.val.split=NAME'] (or data.val_fraction=0.2 for the second)"
        )
    chosen: dict[str, object] = {"data.train.split": train or None, "data.val.split": val or None}
    chosen |= {"data.val_fraction": 0.0 if val else VAL_FRACTION, "data.folds": 0, "data.fold": 0}
    before: dict[str, object] = {"data.train.split": data.train.split, "data.val.split": data.val.split}
    before |= {"data.val_fraction": data.val_fraction, "data.folds": data.folds, "data.fold": data.fold}
    return [f"{name}={json.dumps(value)}" for name, value in chosen.items() if value != before[name]]


def stored_channels(config: DetectionConfig, names: Collection[str]) -> list[str]:
    """Return the settings that read training images of other channels than RGB as stored; none for other images.

    The headers of up to 500 images decide, which must agree (:func:`~detr_bf.data.image_headers.stored_format`).

    Args:
        config: with the training split.
        names: of the settings that are given; none is chosen if the channels or the depth is among them.
    """
    if {"data.channels", "data.depth"} & set(names):
        return []
    folder, content = _given_images(config)
    found = stored_format(folder, [image["file_name"] for image in content.images])
    if found is None or found == (3, 8):
        return []
    chosen = [f"data.channels={found[0]}", f"data.depth={found[1]}"]
    if config.model.backbone.frozen_stages and "model.backbone.frozen_stages" not in names:
        chosen.append("model.backbone.frozen_stages=0")  # the first convolution must learn the channels
    logger.info("the images have %d channels of %d bits: %s", *found, ", ".join(chosen))
    return chosen


def _given_images(config: DetectionConfig) -> tuple[Path, CocoAnnotations]:
    """Return the folder of the training images and their annotations, before a division."""
    data = config.data
    if data.root:
        return Path(data.root), read_folder(Path(data.root), data.format).split(data.train.split or "")
    source = data_source(config, "train")
    return source.images, read_annotations(source.annotations)


def _train_images(config: DetectionConfig) -> float:
    """Return the number of training images, about as many of a divided folder."""
    data = config.data
    images = len(_given_images(config)[1].images)
    if not data.root:
        return images
    return images * ((data.folds - 1) / data.folds if data.folds else 1 - data.val_fraction)


def _rates(config: DetectionConfig) -> dict[str, str]:
    """Return ``auto`` for the learning rates of RT-DETR that are those of its recipes, and for those of D-FINE."""
    rates = {"optimizer.lr": (config.optimizer.lr, LEAST_RATE)}
    rates["optimizer.backbone_lr"] = (config.optimizer.backbone_lr, LEAST_RATE / 10)
    if config.model.name == "dfine":  # the rates of its recipes differ by size, so that they cannot be told by a number
        return dict.fromkeys(rates, AUTO)
    of_recipe = config.model.name in ("rtdetr", "rtdetrv2") and config.optimizer.lr == LEAST_RATE
    return {name: AUTO for name, (rate, published) in rates.items() if of_recipe and rate == published}
