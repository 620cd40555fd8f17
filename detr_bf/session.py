"""What the command lines do, as functions: train a run or evaluate a checkpoint, and leave all of it in a folder."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torchvision.ops import box_convert

from detr_bf import distributed
from detr_bf.build import (
    build_classification,
    build_evaluation,
    build_model,
    build_trainer,
    build_val_data,
    data_source,
    device_of,
    read_initial_weights,
)
from detr_bf.config import Config, config_from_dict, config_to_dict, config_to_yaml
from detr_bf.config.schema import SplitConfig
from detr_bf.data.coco import SampleKey, read_annotations
from detr_bf.data.doctor import Report, examine
from detr_bf.detectors import detector_named
from detr_bf.engine import Checkpoint, Evaluation, RunFolder, checkpoint_of, is_checkpoint, load_checkpoint, load_strict
from detr_bf.engine.logs import setup_logging
from detr_bf.errors import InputError
from detr_bf.evaluation import PanopticFile, Result, write_results
from detr_bf.files import remove_unfinished, write_json, write_text
from detr_bf.report import PanopticSheetRow, SheetRow, machine_info, save_panoptic_sheet, save_sheet, write_report
from detr_bf.structures import ClassMap, Target

logger = logging.getLogger(__name__)

CLASS_BIAS = "decoder.heads.classes.0.bias"


@dataclass(frozen=True)
class Outcome:
    """The numbers of a run and where they are shown."""

    result: Result
    report: Path

    def __str__(self) -> str:
        return f"{self.result}  report {self.report}"


def train(config: Config, *, resume: bool = False, resume_if_possible: bool = False) -> Outcome | None:
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
    folder = RunFolder(Path(config.output_dir))
    with distributed.joined(device_of(config), config.train.timeout_minutes), _prepared(folder) as start:
        checkpoint = distributed.on_main(
            lambda: _checked(config, folder, resume, resume_if_possible or _is_started_anew(folder))
        )
        with distributed.failing_together():
            trainer = build_trainer(config, folder, checkpoint)
        distributed.on_main(lambda: _describe_training(folder, config))
        start()
        try:
            result = trainer.train()
        finally:
            if trainer.metrics is not None:
                trainer.metrics.close()
        return _report(folder, config, result, trainer.evaluate)


def evaluate_only(config: Config, source: Path) -> Outcome | None:
    """Evaluate ``source``, a checkpoint of ours or foreign weights, with the model and validation data of ``config``.

    Called by every process of a group; all but the first get None.

    Raises:
        InputError: as :func:`load_strict` when the weights are another model's.
    """
    folder = RunFolder(Path(config.output_dir))
    device = device_of(config)
    with distributed.joined(device, config.train.timeout_minutes), _prepared(folder) as start:
        with distributed.failing_together():
            weights, classes = _weights_and_classes(config, source)
            plain, weights = _without_batch_former(config, weights)
            model = build_model(plain, classes.num_classes, pretrained=False)
            load_strict(model, weights, str(source))
            evaluation = build_evaluation(config, classes, device, folder)
        # the folder of a training run keeps that run's config
        distributed.on_main(lambda: None if folder.holds_a_run() else _describe(folder, config))
        start()
        return _report(folder, config, evaluation(model.to(device)), evaluation)


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


def _checked(config: Config, folder: RunFolder, resume: bool, resume_if_possible: bool) -> Checkpoint | None:
    """Everything that can be known before the model is built, and the checkpoint to go on from."""
    if resume:
        folder.check_resumable()
    elif not resume_if_possible:
        folder.check_unused()
    checkpoint = _newest_checkpoint(folder) if folder.holds_a_run() else None
    detector_named(config.model.name)  # before all images are read
    check_data(config)
    remove_unfinished(folder.path)
    if checkpoint is not None:
        _tell_changes(config, checkpoint)
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


def _weights_and_classes(config: Config, source: Path) -> tuple[dict[str, Tensor], ClassMap]:
    """A checkpoint of ours says its classes.

    Bare weights do not: as many classes as the annotations have are taken to be those, in the order of their ids; more
    are taken to be numbered by category id, as in the authors' files.

    Raises:
        InputError: neither can be.
    """
    if is_checkpoint(source):
        checkpoint = load_checkpoint(source)
        return checkpoint.weights, checkpoint.classes
    weights = read_initial_weights(source)
    if CLASS_BIAS not in weights:
        raise InputError(f"{source} holds no class head: these are not the weights of a whole detector")
    listed = read_annotations(data_source(config, "val").annotations).class_map
    count = len(weights[CLASS_BIAS]) - build_classification(config).num_logits(0)
    if count == listed.num_classes:
        logger.warning("%s does not say its classes: taken to be the %d of the annotations, by id", source, count)
        return weights, listed
    if count <= max(listed.category_ids):
        raise InputError(
            f"{source} holds {count} classes and does not say which; the annotations have {listed.num_classes}, with "
            f"ids up to {max(listed.category_ids)}: evaluate a run folder or its checkpoint, which knows its classes"
        )
    logger.warning("%s does not say its classes: its %d are taken to be category ids from 0", source, count)
    known = dict(zip(listed.category_ids, zip(listed.names, listed.is_thing, strict=True), strict=True))
    names, is_thing = zip(*(known.get(number, (f"id {number}", True)) for number in range(count)), strict=True)
    return weights, ClassMap(tuple(range(count)), names, is_thing)


def _without_batch_former(config: Config, weights: dict[str, Tensor]) -> tuple[Config, dict[str, Tensor]]:
    """The model and the weights that evaluation reads: only mini-batch inference uses batch attention."""
    if config.batch_former.enabled and config.batch_former.mode == "mini_batch_inference":
        return config, weights
    plain = copy.deepcopy(config)
    plain.batch_former.enabled = False
    return plain, {name: value for name, value in weights.items() if "batch_former" not in name.split(".")}


def evaluation_source(config: Config) -> Path:
    """The checkpoint ``--eval-only`` means: ``init_from``, else the best or last of the run folder."""
    source = checkpoint_of(config.init_from or config.output_dir)
    if not source.is_file():
        raise InputError(
            f"nothing to evaluate: {source} is no checkpoint. "
            "Give one with init_from=FILE, or the output_dir of a trained run"
        )
    return source


def check_data(config: Config) -> None:
    """Examine both splits unless ``data.check`` is off; errors stop the run."""
    if not config.data.check:
        return
    report = examine_data(config)
    if report.errors:
        raise InputError(f"the data cannot be trained on\n{report}")
    logger.info("%s", report)


def examine_data(config: Config) -> Report:
    """What the doctor finds in the data of a config."""
    return examine(
        data_source(config, "train"),
        None if config.data.val == SplitConfig() else data_source(config, "val"),
        num_queries=config.model.num_queries,
        masks=config.model.masks,
        workers=max(1, config.data.workers),
    )


def _describe_training(folder: RunFolder, config: Config) -> None:
    _describe(folder, config)
    write_text(folder.launch, distributed.launch())


def _describe(folder: RunFolder, config: Config) -> None:
    write_text(folder.config, config_to_yaml(config))
    write_json(folder.machine, machine_info())


def _tell_changes(config: Config, checkpoint: Checkpoint) -> None:
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


def _report(folder: RunFolder, config: Config, result: Result, evaluation: Evaluation) -> Outcome | None:
    """Results, pictures and the page that shows them, by the main process."""
    if not distributed.is_main():
        return None
    write_json(folder.evaluation, result.to_dict())
    write_results(folder.results, evaluation.detections, evaluation.class_map)
    if config.eval.pictures:
        rows = list(_sheet_rows(config, evaluation))
        save_sheet(folder.sheet, rows, evaluation.class_map.names, config.eval.picture_threshold)
        if evaluation.panoptic:
            panoptic_rows = list(_panoptic_rows(folder, config, evaluation))
            save_panoptic_sheet(folder.panoptic_sheet, panoptic_rows, evaluation.class_map.names)
    return Outcome(result, write_report(folder.path))


def _sheet_rows(config: Config, evaluation: Evaluation) -> Iterator[SheetRow]:
    """Images spread evenly over the validation split, with what they hold and what was found."""
    found = {detections.image_id: detections for detections in evaluation.detections}
    for image, target in _shown_images(config, evaluation.class_map):
        height, width = target.size
        boxes = box_convert(target.boxes, "cxcywh", "xyxy") * torch.tensor([width, height, width, height])
        yield SheetRow(image, boxes, target.labels, found[target.image_id], target.file_name)


def _panoptic_rows(folder: RunFolder, config: Config, evaluation: Evaluation) -> Iterator[PanopticSheetRow]:
    """The same images with both panoptic maps."""
    class_map, val = evaluation.class_map, config.data.val
    truth = PanopticFile(val.annotations, val.panoptic, class_map)
    found = PanopticFile(folder.panoptic_results, folder.panoptic, class_map)
    for image, target in _shown_images(config, class_map):
        yield PanopticSheetRow(image, truth[target.image_id], found[target.image_id], target.file_name)


def _shown_images(config: Config, class_map: ClassMap) -> Iterator[tuple[Tensor, Target]]:
    """Images spread evenly over the validation split, as they are in their files."""
    data = build_val_data(config, class_map, transform=lambda sample: sample)
    for place in torch.linspace(0, len(data) - 1, min(config.eval.pictures, len(data))).tolist():
        yield data[SampleKey(0, round(place))]
