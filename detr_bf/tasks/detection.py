"""Detection: training a detector, or its mask head, on COCO files."""

from __future__ import annotations

import copy
import json
import logging
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from detr_bf.assembly.data import (
    augmented_epochs,
    build_loader,
    build_pixel_format,
    build_train_data,
    build_val_data,
    check_enough_tokens,
    data_root,
    data_source,
    data_sources,
    groups_read,
    reference_folders,
    references_folder,
    training_amount,
)
from detr_bf.assembly.model import (
    TRAINED_WITH_LOW_RANK,
    build_classification,
    build_criterion,
    build_detector_criterion,
    build_model,
    build_panoptic_postprocess,
    build_postprocess,
    fit_channels,
    num_detections,
    train_low_rank,
)
from detr_bf.assembly.training import (
    adopt_pixels,
    build_groups,
    choose_grey_bits,
    choose_normalization,
    epoch_batches,
    precision_of,
    read_initial_weights,
    warn_of_other_division,
)
from detr_bf.common import distributed
from detr_bf.common.devices import device_of
from detr_bf.common.errors import InputError
from detr_bf.common.structures import Batch, ClassMap
from detr_bf.common.text import printable
from detr_bf.config import DetectionConfig, config_from_dict, config_to_dict
from detr_bf.data.batches import SameSizeBatches, aspect_buckets, derive_seed, object_features, warn_of_mixed_batches
from detr_bf.data.checks.annotations import CORRECTED, Report, examine
from detr_bf.data.checks.report import Split
from detr_bf.data.checks.statistics import describe_splits
from detr_bf.data.coco import CocoDetection, Source, check_annotations, read_annotations
from detr_bf.data.columns import values_of
from detr_bf.data.images import pixel_values
from detr_bf.data.references import own_files
from detr_bf.data.transforms import mixup
from detr_bf.detectors import Detector
from detr_bf.engine import (
    Checkpoint,
    DetectionEvaluator,
    Evaluation,
    EvaluationLoop,
    PanopticEvaluation,
    RunFolder,
    build_and_load,
    build_optimizer,
    is_checkpoint,
    load_checkpoint,
    load_fitting,
    load_strict,
)
from detr_bf.engine.step import Criterion
from detr_bf.evaluation import CocoEvaluator, PanopticEvaluator, encode, write_encoded, write_results
from detr_bf.interop.classes import with_coco_classes
from detr_bf.interop.published import published_source
from detr_bf.report import DETECTION_PAGE
from detr_bf.tasks.outputs import write_errors_and_pictures
from detr_bf.tasks.task import Evaluate, MakeBatches, Task

logger = logging.getLogger(__name__)

CLASS_BIAS = "decoder.heads.classes.0.bias"
BATCH_FORMER = "batch_former"
RANDOM_SIDE = 256  # least pixels of a side of the random images


class DetectionTask(Task[DetectionConfig]):
    """A detector with boxes, and with masks where ``model.masks`` is set."""

    kind = "a detector"
    page = DETECTION_PAGE
    deploy_option = "--strip-batchformer"
    batch_type = Batch

    @property
    def unused_parameters(self) -> bool:
        return not self.config.model.aux_loss or self.config.batch_former.until_epoch is not None

    def examine(self, sources: Mapping[str, Source] | None = None) -> Report:
        """Return the problems of the data of the config, or of ``sources``: train and perhaps val."""
        given = data_sources(self.config) if sources is None else sources
        report = examine(
            given["train"],
            given.get("val"),
            num_queries=num_detections(self.config.model),
            masks=self.config.model.masks,
            train_masks=self.config.data.augment.copy_paste > 0,
            joined=(4 if self.config.data.augment.mosaic else 1) * (2 if self.config.data.mixup.prob else 1),
            max_detections=self.config.eval.max_detections,
            workers=max(1, self.config.data.workers),
            max_pixels=self.config.data.max_pixels,
            pixel_format=build_pixel_format(self.config.data),
            training=training_amount(self.config),
            references=reference_folders(self.config),
        )
        for split, source in given.items():
            groups_read(self.config, split, source.annotations)
        if sources is not None or not self.config.data.root:
            return report
        from detr_bf.data.formats import read_folder  # not needed for COCO files

        found = read_folder(data_root(self.config.data), self.config.data.format)
        return replace(report, contents=(str(found), *report.contents))

    def check(self) -> Mapping[str, Any] | None:
        for split in ("train", "val"):  # without a validation split there is no best checkpoint
            data_source(self.config, split)
        return super().check()

    def advice(self, report: Report, given: str = "") -> str:
        data = self.config.data
        if data.train.panoptic or not any(each.code in CORRECTED for each in report.errors):
            return ""
        shown = given or (printable(shlex.quote(data.root)) if data.root else "CONFIG")
        return (
            f"to correct the data: 'detr-bf check {shown} --fix OUT' writes a folder without these errors, which all "
            "commands read (docs/data.md)"
        )

    def describe_data(self, splits: Sequence[str] = ("train", "val")) -> Mapping[str, Any] | None:
        """Return the statistics of the splits whose annotations can be read; None without any."""
        found, masks = [], self.config.model.masks
        for name in splits:
            try:
                source = data_source(self.config, name)
                content = read_annotations(source.annotations)
                check_annotations(content, content.class_map.index, masks and source.panoptic is not None)
            except InputError as error:
                logger.warning("no statistics of data.%s: %s", name, error)
            else:
                found.append(Split(name, source.images, content, {}, num_detections(self.config.model)))
        return describe_splits(found) if found else None

    def load_data(self) -> CocoDetection:
        source = data_source(self.config, "train")
        images = read_annotations(source.annotations).images
        folders = [(source.images, values_of(images, "file_name"))]
        if self.config.data.reference == "own":
            own = references_folder(self.config, "train")
            files = [file for file in own_files(images, source.images, own) if file is not None]
            folders.append((own or source.images, [str(file.relative_to(own or source.images)) for file in files]))
        if self.config.data.depth == 8 and self.config.data.channels in (1, 3):
            choose_grey_bits(self.config.data, *folders)
        choose_normalization(self.config.data, *folders[0], self.config.init_from)
        data = build_train_data(self.config)
        check_enough_tokens(self.config, data, "train")
        return data

    def fingerprints(self, data: CocoDetection | None = None) -> dict[str, dict[str, Any]]:
        quick, train = data is not None, data or build_train_data(self.config)
        val = build_val_data(self.config, train.class_map, masks=quick and self.config.model.masks)
        return {"train": train.fingerprint(quick=quick), "val": val.fingerprint(quick=quick)}

    def build_model(self, num_classes: int, *, pretrained: bool = False) -> Detector:
        return build_model(self.config, num_classes, pretrained=pretrained)

    def check_start(self) -> None:
        if self.config.freeze.detector and self.config.model.masks and not self.config.init_from:
            raise InputError(
                "freeze.detector=true needs init_from=RUN_OR_FILE: a detector trained on boxes of these classes"
            )
        if self.config.freeze.lora and not self.config.init_from:
            raise InputError(
                f"freeze.lora={self.config.freeze.lora} trains small changes of a trained detector, and there is none "
                "to start from: give init_from=RUN_OR_FILE_OR_NAME ('detr-bf recipes --weights' lists names), or "
                "freeze.lora=null to train all weights"
            )

    def initialize(self, model: torch.nn.Module, classes: ClassMap) -> None:
        """Load ``init_from``, except for the mask head if the detector is frozen; frozen weights must be in it."""
        config, frozen = self.config, self.config.freeze.detector
        trained = r"mask_head\." if frozen else TRAINED_WITH_LOW_RANK if config.freeze.lora else None
        if config.init_from:
            read = read_initial_weights(Path(config.init_from))
            weights = fit_channels(model, read, config.data.channels, config.init_from)
            if trained and weights is not read and config.data.channels != 1:
                raise InputError(
                    f"init_from: {config.init_from} was trained on RGB, and the first convolution, which must learn "
                    f"data.channels={config.data.channels}, is frozen: leave out freeze.lora or freeze.detector"
                )
            before = None
            if published_source(config.init_from):
                try:
                    weights, before = with_coco_classes(weights)
                except InputError as error:
                    raise InputError(
                        f"init_from: {config.init_from}: {error}. It is the copy of published weights, which have the "
                        "classes of COCO: delete it to download it again"
                    ) from error
            weights = self.fit_classes(model, weights, classes, frozen=frozen, before=before)
            logger.info(load_fitting(model, weights, config.init_from, trained))

    def prepare_training(self, model: Detector) -> Detector:
        if self.config.freeze.lora:
            train_low_rank(model, self.config.freeze.lora)
        return model

    def adopt_settings(self, checkpoint: Checkpoint) -> None:
        """Take over what the run chose: how pixels are read and normalised, and the batch size for the same steps.

        Its ``init_from`` stays too: learning rates that are ``auto`` depend on it.

        Raises:
            InputError: the parts that are trained, or the channels or depth of the images, are others.
        """
        stored = config_from_dict(checkpoint.config)
        if self.config.freeze.lora != stored.freeze.lora:
            rank, before = (json.dumps(each.freeze.lora) for each in (self.config, stored))
            raise InputError(
                f"freeze.lora={rank}: the run was started with freeze.lora={before}; resume with that, or start a new "
                "run from its last checkpoint with init_from and another output_dir"
            )
        for name in ("channels", "depth"):
            now, before = getattr(self.config.data, name), getattr(stored.data, name)
            if now != before:
                raise InputError(
                    f"data.{name}={now}: the run was started with data.{name}={before}; resume with that, or start a "
                    "new run from its last checkpoint with init_from and another output_dir"
                )
        given, self.config.init_from = self.config.init_from, stored.init_from
        if given not in (None, stored.init_from):
            text = "init_from=%s is not used: the run started from %s, and goes on from its last checkpoint"
            logger.warning(text, given, stored.init_from or "the weights of the backbone")
        adopt_pixels(self.config.data, stored.data)
        train, before = self.config.train, stored.train
        images, then = (each.batch_size * each.accumulate for each in (train, before))
        if train.auto_batch and before.auto_batch and images == then:
            train.batch_size, train.accumulate = before.batch_size, before.accumulate

    def fit_to_device(self, model: torch.nn.Module, data: CocoDetection, device: torch.device) -> None:
        if self.config.train.auto_batch:
            from detr_bf.planning.batch import fit_batch  # traces the model

            assert isinstance(model, Detector)
            fit_batch(self.config, model, data, device)

    def build_criterion(self, model: torch.nn.Module, class_counts: Sequence[int] | None = None) -> Criterion:
        return build_detector_criterion(self.config, model)

    def build_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        assert isinstance(model, Detector)
        return build_optimizer(build_groups(self.config, model))

    def train_batches(self, data: CocoDetection, device: torch.device) -> tuple[MakeBatches, int, int]:
        buckets = aspect_buckets(data.sizes, self.config.data.aspect_buckets)
        buckets = buckets if data.groups is None else list(data.groups)
        features = object_features(data.class_counts_of_images) if self.config.data.sampler == "similar" else None
        batches = epoch_batches(self.config, len(data), buckets=buckets, features=features)
        if data.groups is not None:
            warn_of_mixed_batches(data.groups, batches(epoch=0))
        loader = build_loader(self.config, device)

        def make_batches(epoch: int, start: int, phase: int | None = None) -> Iterator[Batch]:
            phase = epoch if phase is None else phase
            plain = phase >= self.config.train.epochs - self.config.data.plain_last_epochs
            sides = () if plain else tuple(self.config.data.batch_sides)
            loaded = iter(loader(data, batches(epoch=epoch, start_batch=start, sides=sides, phase=phase)))
            mixes = self.config.data.mixup.prob and phase in augmented_epochs(self.config)[1]
            return mixed_batches(self.config, loaded, epoch, start) if mixes else loaded

        return make_batches, len(batches(epoch=0)), len(data)

    def build_evaluation(self, class_map: ClassMap, folder: RunFolder, data: CocoDetection | None = None) -> Evaluate:
        return build_evaluation(self.config, class_map, device_of(self.config.device), folder)

    def load_evaluated(self, source: Path, checkpoint: Checkpoint | None = None) -> tuple[Detector, ClassMap]:
        if checkpoint is None:
            weights, classes = _weights_and_classes(self.config, source)
        else:
            weights, classes = checkpoint.weights, checkpoint.classes
        data = self.config.data
        if not (data.is_rgb or data.mean):
            raise InputError(
                f"neither {source} nor the config says the data.mean and data.std of data.channels={data.channels} and "
                f"data.depth={data.depth}, with which the detector was trained: give both"
            )
        unused = training_only(self.config)
        plain = copy.deepcopy(self.config)
        plain.plugins.relative_localization.enabled = False
        plain.batch_former.enabled = plain.batch_former.enabled and BATCH_FORMER not in unused
        model = build_model(plain, classes.num_classes, pretrained=False)
        load_strict(model, _without(weights, unused), str(source))
        return model, classes

    def write_outputs(
        self, folder: RunFolder, evaluate: Evaluation[DetectionEvaluator], model: torch.nn.Module
    ) -> None:
        found = evaluate.evaluator
        assert found is not None, "rank 0 has evaluated"
        write_results(folder.results, found.detections, found.class_map)
        write_errors_and_pictures(folder, self.config, found)

    def deploy(self, checkpoint: Checkpoint, source: Path, target: Path) -> str:
        """Write the checkpoint without batch attention, the better of raw and averaged weights, and no training state.

        Raises:
            InputError: the detector has no batch attention, or evaluation uses it.
        """
        from detr_bf.interop.conversion import CHECKPOINT_SUFFIXES, same_outputs, writing  # not needed for training

        if target.suffix not in CHECKPOINT_SUFFIXES:
            raise InputError(
                f"{target}: a checkpoint holds more than tensors, so its name must end in "
                f"{', '.join(CHECKPOINT_SUFFIXES)}"
            )
        if not self.config.batch_former.enabled:
            raise InputError(f"{source} was trained without batch attention: there is nothing to strip")
        if BATCH_FORMER not in training_only(self.config):
            raise InputError(
                f"{source} was trained with batch_former.mode={self.config.batch_former.mode}: its evaluation uses "
                "batch attention and would change without it"
            )
        plain = copy.deepcopy(self.config)
        plain.batch_former.enabled = False
        kept = _without(checkpoint.weights, {BATCH_FORMER})
        stripped = replace(checkpoint, model=kept, ema=None, training=None, config=config_to_dict(plain))
        batch, classes = random_batch(self.config), checkpoint.classes.num_classes
        whole = build_and_load(lambda: self.build_model(classes), checkpoint.weights, source)
        bare = build_and_load(lambda: DetectionTask(plain).build_model(classes), kept, source)
        if not same_outputs(whole, bare, batch):
            raise InputError(f"{source}: evaluation changes without batch attention, so nothing was written")
        with writing(target):
            stripped.save(target)
        removed = len(checkpoint.weights) - len(kept)
        return f"{removed} tensors of batch attention left out, evaluation is the same to the bit: {target}"


def mixed_batches(config: DetectionConfig, batches: Iterator[Batch], epoch: int, start: int) -> Iterator[Batch]:
    """Yield the batches of an epoch from number ``start`` on, with mixup.

    The mixup of a batch is a function of (seed, epoch, number, rank).
    """
    settings = config.data.mixup
    for number, batch in enumerate(batches, start):
        generator = torch.Generator().manual_seed(derive_seed(config.seed, epoch, number, distributed.rank()))
        draw, position = torch.rand(2, generator=generator).tolist()
        share = 0.5 + settings.spread * (2 * position - 1)
        yield mixup(batch, share) if draw < settings.prob else batch


def training_only(config: DetectionConfig) -> set[str]:
    """Return the names of the modules that evaluation does not use.

    Relative localization is a training loss; some modes of batch attention are used in training only.
    """
    return {"relative_localization"} | (set() if config.batch_former.in_evaluation else {BATCH_FORMER})


def _without(weights: dict[str, Tensor], modules: set[str]) -> dict[str, Tensor]:
    """Return the weights that belong to none of the modules."""
    return {name: value for name, value in weights.items() if modules.isdisjoint(name.split("."))}


def random_batch(config: DetectionConfig) -> Batch:
    """Return two random images of different sizes, large enough for the queries of the model.

    They have references if the config has; evaluation may read them.
    """
    cells = math.ceil(math.sqrt(config.model.num_queries))
    side = 32 * math.ceil(max(RANDOM_SIDE, min(config.model.all_strides) * cells) / 32)
    generator = torch.Generator().manual_seed(0)
    images = pixel_values(build_pixel_format(config.data).random_pixels(2, side, side + 32, generator=generator))
    padding_mask = torch.zeros(2, side, side + 32, dtype=torch.bool)
    padding_mask[1, side - 40 :] = True
    padding_mask[1, :, side - 72 :] = True
    images = images.masked_fill(padding_mask[:, None], 0)
    return Batch(images, padding_mask, references=None if config.data.reference == "none" else 255 - images)


def _weights_and_classes(config: DetectionConfig, source: Path) -> tuple[dict[str, Tensor], ClassMap]:
    """Return weights and classes; a checkpoint of ours holds its classes, a file of weights does not.

    ``data.grey_bits``, ``data.mean`` and ``data.std`` become those of the checkpoint if not given (in-place).

    Weights with as many classes as the annotations are taken to have those, in the order of the ids; weights with more
    are taken to be numbered by category id, as in the authors' files.

    Raises:
        InputError: the classes cannot be found out.
    """
    if is_checkpoint(source):
        checkpoint = load_checkpoint(source)
        stored = config_from_dict(checkpoint.config, source=f"the config in {source}")
        if isinstance(stored, DetectionConfig):
            adopt_pixels(config.data, stored.data)
        if config.data.val_fraction or config.data.folds:
            val = build_val_data(config, checkpoint.classes).fingerprint(quick=True)
            warn_of_other_division(val, checkpoint, source)
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


def build_evaluation(
    config: DetectionConfig, class_map: ClassMap, device: torch.device, folder: RunFolder
) -> Evaluation[DetectionEvaluator]:
    """Return the evaluation on the validation split; it writes panoptic maps to ``folder``."""
    masks = config.model.masks and config.eval.loss
    data, source = build_val_data(config, class_map, masks=masks), data_source(config, "val")
    check_enough_tokens(config, data, "val")
    given = "train" if config.data.folds or config.data.val_fraction else "val"  # images left out before a division
    num_skipped = len(data_source(config, given).skipped)
    loader = build_loader(config, device)
    postprocess, panoptic = build_postprocess(config), _panoptic_evaluation(config, data, folder)
    # where the images of a batch see each other: batches must not depend on their sizes
    one_size = config.data.transforms.square is not None or config.batch_former.mixes_evaluated_images
    sizes = [(0, 0)] * len(data) if one_size else data.sizes
    batches = partial(
        SameSizeBatches, sizes, config.eval.batch_size, rank=distributed.rank(), world_size=distributed.world_size()
    )
    return Evaluation(
        loop=EvaluationLoop(
            make_batches=lambda start: iter(loader(data, batches(start_batch=start))),
            num_batches=len(batches()),
            device=device,
            precision=precision_of(config, device),
        ),
        make_evaluator=lambda: DetectionEvaluator(
            CocoEvaluator(
                source.annotations,
                class_map,
                config.eval.engine,
                config.eval.max_detections,
                images=source.images,
                masks=config.model.masks,
                panoptic=source.panoptic,
                max_pixels=config.data.max_pixels,
            ),
            postprocess,
            class_map,
            masks=config.model.masks,
            panoptic=panoptic,
            never_found=folder.never_found,
            criterion=build_criterion(config, local=True) if config.eval.loss else None,
            num_skipped=num_skipped,
        ),
    )


def _panoptic_evaluation(config: DetectionConfig, data: CocoDetection, folder: RunFolder) -> PanopticEvaluation | None:
    """Return the panoptic evaluation, None without masks or panoptic annotations."""
    source = data_source(config, "val")
    if not (config.model.masks and source.panoptic):
        return None
    assert isinstance(source.annotations, Path), "panoptic data are files"
    return PanopticEvaluation(
        postprocess=build_panoptic_postprocess(config, data.class_map),
        make_evaluator=partial(
            PanopticEvaluator, source.annotations, source.panoptic, data.class_map, config.data.max_pixels
        ),
        encode=partial(
            encode, class_map=data.class_map, file_names=dict(zip(data.image_ids, data.file_names, strict=True))
        ),
        write=partial(write_encoded, folder.panoptic_results, folder.panoptic, class_map=data.class_map),
    )
