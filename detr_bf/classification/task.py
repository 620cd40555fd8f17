"""Tasks of classifiers of timm, and of their pre-training: masked autoencoders and contrastive learning."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from detr_bf.backbones.weights import with_resized_positions
from detr_bf.classification.assembly import (
    TRAINING_ONLY,
    build_classifier,
    build_classifier_criterion,
    build_contrastive,
    build_masked_autoencoder,
    image_optimizer,
)
from detr_bf.classification.assembly_data import (
    ImageConfig,
    ImageSplits,
    build_image_splits,
    check_image_data,
    read_image_splits,
    train_batches,
    val_loop,
)
from detr_bf.classification.batch import LabelledImages, ViewPairs
from detr_bf.classification.config import ClassifierConfig, PixelsConfig, PluginsConfig
from detr_bf.classification.contrastive import MomentumContrast, momentum_contrast_loss
from detr_bf.classification.contrastive_config import ContrastiveConfig
from detr_bf.classification.data import FileImages, LabelledImageSet
from detr_bf.classification.error_summary import classification_errors, likely_label_errors
from detr_bf.classification.masked_autoencoder import MaskedAutoencoder, reconstruction_loss
from detr_bf.classification.masked_config import MaskedConfig
from detr_bf.classification.metrics import (
    ClassificationEvaluator,
    ContrastiveEvaluator,
    Predictions,
    ReconstructionEvaluator,
    write_predictions,
)
from detr_bf.classification.network import check_batch_norm, read_network_weights
from detr_bf.classification.page import CLASSIFICATION_PAGE, CONTRASTIVE_PAGE, MASKED_PAGE
from detr_bf.classification.sheet import ClassifiedImage, classification_sheet, reconstruction_sheet
from detr_bf.common import distributed
from detr_bf.common.devices import device_of
from detr_bf.common.errors import InputError, prefix_errors
from detr_bf.common.files import SUSPECTS_FILE, write_json
from detr_bf.common.structures import ClassMap
from detr_bf.common.weights import ENCODER, PLUGINS, read_state
from detr_bf.config import config_from_dict
from detr_bf.data.batches import SampleKey
from detr_bf.data.checks.annotations import Report
from detr_bf.engine import (
    Checkpoint,
    Evaluation,
    RunFolder,
    build_and_load,
    checkpoint_of,
    is_checkpoint,
    load_checkpoint,
    load_fitting,
    load_strict,
)
from detr_bf.engine.step import Criterion
from detr_bf.interop.conversion import same_outputs, save_weights
from detr_bf.plugins import without_plugins
from detr_bf.report import class_labels, save_picture, tolerating
from detr_bf.tasks.task import MOST_ERROR_PICTURES, Evaluate, MakeBatches, Task

logger = logging.getLogger(__name__)

ImageConfigT = TypeVar("ImageConfigT", ClassifierConfig, MaskedConfig, ContrastiveConfig)


class ImageTask(Task[ImageConfigT]):
    """Data and optimizer of models that are trained on whole images."""

    batch_type = LabelledImages
    _splits: ImageSplits | None = None

    def examine(self) -> Report:
        return check_image_data(self.config)

    def load_data(self) -> ImageSplits:
        """Return both splits, which are read once."""
        if self._splits is None:
            self._splits = build_image_splits(self.config)
        return self._splits

    def fingerprints(self, data: ImageSplits | None = None) -> dict[str, dict[str, Any]]:
        if data is not None:
            return {"train": data.train.fingerprint(), "val": data.val.fingerprint()}
        found = read_image_splits(self.config)
        names = found.class_map.names
        return {"train": found.train.fingerprint(names), "val": found.val.fingerprint(names)}

    def adopt_settings(self, checkpoint: Checkpoint) -> None:
        """Take over the depth of 16-bit grey images that the run chose."""
        if self.config.data.grey_bits is None:
            self.config.data.grey_bits = config_from_dict(checkpoint.config).data.grey_bits

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return image_optimizer(self.config, model)

    def train_batches(self, data: ImageSplits, device: torch.device) -> tuple[MakeBatches, int, int]:
        return *train_batches(self.config, data, device), len(data.train)


class ClassificationTask(ImageTask[ClassifierConfig]):
    """A classifier of timm's or a residual network of CIFAR."""

    kind = "a classifier"
    page = CLASSIFICATION_PAGE
    deploy_option = "--strip-plugins"

    def build_model(self, num_classes: int, *, pretrained: bool = False) -> nn.Module:
        return build_classifier(self.config, num_classes, pretrained=pretrained)

    def check_start(self) -> None:
        model = self.config.model
        if (model.linear_probe or model.frozen) and not (model.pretrained or self.config.init_from):
            setting = "linear_probe" if model.linear_probe else "frozen"
            raise InputError(
                f"model.{setting}=true needs a trained network: give init_from=RUN_OR_FILE, or model.pretrained=true"
            )

    def initialize(self, model: nn.Module, classes: ClassMap) -> None:
        """Load ``init_from``; for a linear probe everything except the head."""
        config = self.config
        if config.init_from:
            weights = with_resized_positions(model, read_network_weights(Path(config.init_from)), config.init_from)
            weights = self.fit_classes(model, weights, classes)
            logger.info(
                load_fitting(model, weights, config.init_from, r"head\." if config.model.linear_probe else None)
            )

    def check_model(self, model: nn.Module, data: ImageSplits) -> None:
        rows = min(self.config.train.batch_size, len(data.train) // distributed.world_size())
        check_batch_norm(model, image_size=self.config.data.transforms.size, rows=rows)

    def build_criterion(self, model: nn.Module, class_counts: Sequence[int] | None = None) -> Criterion:
        """Return the loss; those for long tails read the training split for the counts, if they are not given."""
        if class_counts is None:
            class_counts = () if self.config.loss.name == "cross_entropy" else self.load_data().class_counts
        return build_classifier_criterion(self.config, model, class_counts)

    def build_evaluation(self, class_map: ClassMap, folder: RunFolder, data: ImageSplits | None = None) -> Evaluate:
        splits, settings = data or self.load_data(), self.config.eval
        evaluator = partial(
            ClassificationEvaluator,
            splits.class_map,
            splits.class_counts,
            many=settings.many,
            few=settings.few,
            label_sets=splits.val.label_sets,
            scored_classes=splits.val.present_classes if self.config.data.val_subset else None,
        )
        return Evaluation(val_loop(self.config, splits, device_of(self.config.device)), evaluator)

    def load_evaluated(self, source: Path, checkpoint: Checkpoint | None = None) -> tuple[nn.Module, ClassMap]:
        stored = load_checkpoint(source) if is_checkpoint(source) else None
        if stored is not None:
            self.adopt_settings(stored)  # before the images are read
        classes = self.load_data().class_map
        if stored is not None:
            with prefix_errors(str(source)):
                _check_classes(stored.classes, classes)
        plain = copy.deepcopy(self.config)
        for name in TRAINING_ONLY:
            getattr(plain.plugins, name).enabled = False
        model = build_classifier(plain, classes.num_classes, pretrained=False)
        prefixes = tuple(f"{PLUGINS}.{name}." for name in TRAINING_ONLY)
        weights = {name: x for name, x in read_network_weights(source).items() if not name.startswith(prefixes)}
        load_strict(model, weights, str(source))
        return model, classes

    def write_outputs(self, folder: RunFolder, evaluate: Evaluation[ClassificationEvaluator], model: nn.Module) -> None:
        assert evaluate.evaluator is not None, "rank 0 has evaluated"
        predictions, classes = evaluate.evaluator.predictions(), evaluate.evaluator.class_map
        write_predictions(folder.predictions, predictions, classes)
        self._write_errors(folder, predictions, classes)
        if not self.config.eval.pictures:
            return
        with tolerating(str(folder.sheet)):
            folder.sheet.unlink(missing_ok=True)
            half = -(-self.config.eval.pictures // 2)
            rows = [*predictions.most_confident(False, half), *predictions.most_confident(True, half)]
            if rows:  # none if no logits are finite
                save_picture(folder.sheet, classification_sheet(self._shown(predictions, rows), class_labels(classes)))

    def _write_errors(self, folder: RunFolder, predictions: Predictions, classes: ClassMap) -> None:
        """Write ``errors.json`` and the picture of labels to check."""
        suspects_file = folder.path / SUSPECTS_FILE
        for path in (folder.errors, suspects_file):
            path.unlink(missing_ok=True)
        most, images = min(self.config.eval.pictures, MOST_ERROR_PICTURES), self.load_data().val.images
        with tolerating(str(folder.errors)):
            content = classification_errors(predictions, classes.distinct_names, most)
            for entry in (*content["mistakes"], *content["suspects"]):
                entry["file"] = images.names[entry["index"]] if isinstance(images, FileImages) else None
            write_json(folder.errors, content)
        if suspects := likely_label_errors(predictions, classes.num_classes)[:most]:
            with tolerating(str(suspects_file)):
                shown_images = self._shown(predictions, suspects)
                sheet = classification_sheet(shown_images, class_labels(classes), "Labels to check")
                save_picture(suspects_file, sheet)

    def _shown(self, predictions: Predictions, rows: Sequence[int]) -> list[ClassifiedImage]:
        """Return the validation images of some predictions."""
        val = self.load_data().val
        return [
            ClassifiedImage(
                shown(pixels(val, int(predictions.indices[row])), self.config.data.transforms),
                int(predictions.labels[row]),
                int(predictions.predicted[row]),
                float(predictions.scores[row]),
            )
            for row in rows
        ]

    def deploy(self, checkpoint: Checkpoint, source: Path, target: Path) -> str:
        """Write the averaged weights, or else the last, for the network alone, under its own names.

        Raises:
            InputError: evaluation uses more than the network has.
        """
        config, num_classes = self.config, checkpoint.classes.num_classes
        if config.plugins.context_broadcasting.enabled:
            raise InputError(
                f"{source} was trained with plugins.context_broadcasting, which evaluation uses too: without it the "
                "outputs would differ. Deploy the run itself (detr_bf.load_classifier), or add the plug-in to timm's "
                "network with detr_bf.plugins.add_context_broadcasting"
            )
        if config.model.linear_probe:
            raise InputError(
                f"{source} was trained with model.linear_probe=true: its head has a batch norm, which the plain "
                "network does not have. Deploy the run itself (detr_bf.load_classifier)"
            )
        for setting, usual in (("experts", 1), ("variant", "plain")):
            if (value := getattr(config.model, setting)) != usual:
                raise InputError(
                    f"{source} has model.{setting}={value}, which no network of timm has. Deploy the run itself "
                    "(detr_bf.load_classifier)"
                )
        plain, kept = replace(config, plugins=PluginsConfig()), without_plugins(checkpoint.weights)
        bare = build_and_load(lambda: build_classifier(plain, num_classes, pretrained=False), kept, source)
        whole = build_and_load(lambda: self.build_model(num_classes), checkpoint.weights, source)
        if not same_outputs(whole, bare, random_images(config)):
            raise InputError(f"{source}: evaluation changes without plug-ins, so nothing was written")
        save_weights(target, kept)
        removed = len(checkpoint.weights) - len(kept)
        return (
            f"{removed} tensors of plug-ins left out, evaluation is the same to the bit; the other {len(kept)} load "
            f"into the plain {config.model.name} of {num_classes} classes: {target}"
        )


class PretrainingTask(ImageTask[ImageConfigT]):
    """Training of an encoder without labels."""

    deploy_option = "--encoder"

    def load_evaluated(self, source: Path, checkpoint: Checkpoint | None = None) -> tuple[nn.Module, ClassMap]:
        model = self.build_model(0)
        load_strict(model, read_state(source), str(source))
        return model, ClassMap((), ())  # it has no classes

    def deploy(self, checkpoint: Checkpoint, source: Path, target: Path) -> str:
        """Write the better of raw and averaged weights of the encoder for timm's network, under its own names."""
        whole: Any = build_and_load(lambda: self.build_model(0), checkpoint.weights, source)
        kept = {name.removeprefix(ENCODER): x for name, x in checkpoint.weights.items() if name.startswith(ENCODER)}
        encoder = build_and_load(lambda: cast("Any", self.build_model(0)).encoder, kept, source)
        if not same_outputs(whole.encoder, encoder, random_images(self.config)):
            raise InputError(f"{source}: the encoder alone gives other outputs, so nothing was written")
        save_weights(target, kept)
        return (
            f"{len(kept)} tensors of the encoder load into the plain {self.config.model.name} without classes: {target}"
        )


class MaskedTask(PretrainingTask[MaskedConfig]):
    """A masked autoencoder (He et al. 2022, arXiv 2111.06377)."""

    kind = "a masked autoencoder"
    page = MASKED_PAGE

    def build_model(self, num_classes: int, *, pretrained: bool = False) -> MaskedAutoencoder:
        """Return the autoencoder; both arguments are ignored."""
        return build_masked_autoencoder(self.config)

    def initialize(self, model: nn.Module, classes: ClassMap) -> None:
        """Load ``init_from`` if it is set."""
        if self.config.init_from:
            weights = initial_weights(Path(self.config.init_from))
            logger.info(load_fitting(model, weights, self.config.init_from))

    def build_criterion(self, model: nn.Module, class_counts: Sequence[int] | None = None) -> Criterion:
        return reconstruction_loss

    def build_evaluation(self, class_map: ClassMap, folder: RunFolder, data: ImageSplits | None = None) -> Evaluate:
        loop = val_loop(self.config, data or self.load_data(), device_of(self.config.device))
        return Evaluation(loop, ReconstructionEvaluator)

    @torch.no_grad()
    def write_outputs(self, folder: RunFolder, evaluate: Evaluation[ReconstructionEvaluator], model: nn.Module) -> None:
        count = self.config.eval.pictures
        if not count:
            return
        with tolerating(str(folder.sheet)):
            folder.sheet.unlink(missing_ok=True)
            val, transforms = self.load_data().val, self.config.data.transforms
            indices = torch.linspace(0, len(val) - 1, min(count, len(val))).round().long().tolist()
            device = next(model.parameters()).device
            images = torch.stack([pixels(val, index) for index in indices]).to(device)
            autoencoder = cast("Any", model.eval())
            seen, guessed = autoencoder.pictures(images, autoencoder(images))
            seen, guessed = shown(seen, transforms), shown(guessed, transforms)
            save_picture(folder.sheet, reconstruction_sheet(shown(images, transforms), seen, guessed))


class ContrastiveTask(PretrainingTask[ContrastiveConfig]):
    """Contrastive pre-training, MoCo v3 (Chen et al. 2021, arXiv 2104.02057)."""

    kind = "contrastive pre-training"
    batch_type = ViewPairs
    page = CONTRASTIVE_PAGE

    def build_model(self, num_classes: int, *, pretrained: bool = False) -> MomentumContrast:
        """Return the network with its momentum encoder; both arguments are ignored."""
        return build_contrastive(self.config)

    def initialize(self, model: nn.Module, classes: ClassMap) -> None:
        """Load ``init_from`` if it is set; a plain network becomes the encoder and the momentum encoder."""
        if self.config.init_from:
            weights = initial_weights(Path(self.config.init_from))
            if not any(name.startswith("momentum_encoder.") for name in weights):
                weights |= {f"momentum_{name}": x for name, x in weights.items() if name.startswith(ENCODER)}
            logger.info(load_fitting(model, weights, self.config.init_from))

    def check_model(self, model: nn.Module, data: ImageSplits) -> None:
        if min(self.config.train.batch_size, len(data.train) // distributed.world_size()) < 2:
            raise InputError(
                "contrastive pre-training tells images of a batch apart: give train.batch_size=2 or more, and at "
                "least two training images for each process"
            )

    def build_criterion(self, model: nn.Module, class_counts: Sequence[int] | None = None) -> Criterion:
        loss = self.config.loss
        return partial(momentum_contrast_loss, temperature=loss.temperature, loss_scale=loss.stream_scale)

    def build_evaluation(self, class_map: ClassMap, folder: RunFolder, data: ImageSplits | None = None) -> Evaluate:
        loop = val_loop(self.config, data or self.load_data(), device_of(self.config.device))
        return Evaluation(loop, partial(ContrastiveEvaluator, self.config.loss.temperature))

    def write_outputs(self, folder: RunFolder, evaluate: Evaluation[ContrastiveEvaluator], model: nn.Module) -> None:
        """Write nothing: there are no predictions."""


def initial_weights(path: Path) -> dict[str, Tensor]:
    """Return the weights of a run of pre-training, or of a plain network as those of the encoder, without positions."""
    weights = read_state(checkpoint_of(path))
    if any(name.startswith(ENCODER) for name in weights):
        return weights
    if "pos_embed" in weights:
        logger.info("init_from %s: pos_embed is ignored, pre-training has fixed sine positions", path)
    return {ENCODER + name: value for name, value in weights.items() if name != "pos_embed"}


def random_images(config: ImageConfig) -> Tensor:
    """Return two random images of the size of the config, (2, 3, H, W) float32."""
    side = config.data.transforms.size
    return torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))


def pixels(data: LabelledImageSet, index: int) -> Tensor:
    """Return an image as the model gets it, (3, H, W) float32, normalised."""
    return data[SampleKey(0, index)].pixels


def shown(images: Tensor, transforms: PixelsConfig) -> Tensor:
    """Return normalised images (..., 3, H, W) as uint8."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (transforms.mean, transforms.std))
    return ((images.cpu().float() * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)


def _check_classes(trained: ClassMap, found: ClassMap) -> None:
    """Refuse data with other classes than the weights: labels are indices into the classes of the data."""
    if trained.names == found.names:
        return
    pairs = zip(trained.names, found.names, strict=False)
    first = next((pair for pair in pairs if pair[0] != pair[1]), None)
    difference = f"class '{first[0]}' is '{first[1]}' there" if first else "the others are missing"
    raise InputError(
        f"the weights were trained on {trained.num_classes} classes, the data has {found.num_classes} and "
        f"{difference}: evaluate on the classes of the training"
    )
