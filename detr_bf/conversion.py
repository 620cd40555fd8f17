"""Checkpoints turned into others: other names, no batch attention, or what of a run is deployed."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from detr_bf import interop
from detr_bf.assembly import build_classifier, build_masked_autoencoder, build_model
from detr_bf.assembly.network import ENCODER
from detr_bf.config import ClassifierConfig, DetectionConfig, MaskedConfig, config_from_dict, config_to_dict
from detr_bf.config.classification import PluginsConfig
from detr_bf.detectors import Detector
from detr_bf.engine import Checkpoint, build_and_load, checkpoint_of, is_checkpoint, load_checkpoint
from detr_bf.errors import InputError
from detr_bf.files import check_output_file, check_weights, readable_file
from detr_bf.plugins import without_plugins
from detr_bf.structures import Batch, ClassMap

BATCH_FORMER = "batch_former"
CHECKPOINT_SUFFIXES = (".pt", ".pth", ".bin")
SIDE = 256  # pixels of the random images, at least
_OPTIONS = {  # by the task of a checkpoint: what it is of, and what writes it without what only training needs
    "detection": ("a detector", "--strip-batchformer"),
    "classification": ("a classifier", "--strip-plugins"),
    "masked_autoencoding": ("a masked autoencoder", "--encoder"),
}


def convert(source: Path, target: Path, format_name: str | None = None, numbering: str | None = None) -> str:
    """Write the weights of ``source`` under our names or a foreign format's, and say what was done.

    ``numbering`` of COCO's classes is as in :func:`detr_bf.interop.renumbered`; None leaves the class heads alone.

    Raises:
        InputError: it is a checkpoint of another task or of other classes, or see :func:`detr_bf.interop.read_weights`,
            :func:`detr_bf.interop.write_weights` and :func:`detr_bf.interop.renumbered`; or weights are not finite.
    """
    source = readable_file(checkpoint_of(source))
    _check_target(source, target)
    foreign = format_name is not None and not interop.format_named(format_name).own
    if is_checkpoint(source):
        checkpoint = _read(source, "detection")
        if numbering is not None:
            _check_classes(checkpoint.classes, numbering, source)
    weights = interop.read_weights(source)
    if foreign and any("context_broadcasting" in name.split(".") for name in weights):
        raise InputError(
            f"{source} was trained with plugins.context_broadcasting, which no other format knows: its weights "
            "would be those of another model there"
        )
    weights = without_plugins(weights) if foreign else weights  # what is left of them only training reads
    weights = interop.renumbered(weights, numbering) if numbering else weights
    check_weights(weights, str(source))
    with _writing(target):
        interop.write_weights(target, weights, format_name)
    heads = f", class heads of {interop.class_rows(weights)} rows" if numbering else ""
    return f"{len(weights)} tensors of {source} written under {format_name or 'our'} names{heads}: {target}"


def strip_batch_former(source: Path, target: Path) -> str:
    """Write the checkpoint ``source`` without batch attention, if evaluation does without it, and say what was done.

    The averaged weights are taken where there are some; what is needed to go on training is left out.

    Raises:
        InputError: ``source`` is no checkpoint of ours, has no batch attention, or evaluation uses it.
    """
    source = readable_file(checkpoint_of(source))
    _check_target(source, target)
    if target.suffix not in CHECKPOINT_SUFFIXES:
        raise InputError(
            f"{target}: a checkpoint holds more than tensors, so its name must end in {', '.join(CHECKPOINT_SUFFIXES)}"
        )
    checkpoint = _read(source, "detection")
    config = config_from_dict(checkpoint.config, source=f"the config in {source}")
    _check_strippable(config, source)
    stripped = stripped_checkpoint(checkpoint, config)
    _check_same_evaluation(checkpoint, stripped, str(source))
    with _writing(target):
        stripped.save(target)
    removed = len(checkpoint.weights) - len(stripped.weights)
    return f"{removed} tensors of batch attention left out, evaluation is the same to the bit: {target}"


def strip_plugins(source: Path, target: Path) -> str:
    """Write the weights of a classifier's run for the network alone, under its own names, and say what was done.

    The averaged weights are taken where there are some.

    Raises:
        InputError: ``source`` is no checkpoint of a classifier, or evaluation uses more than the network has.
    """
    source = readable_file(checkpoint_of(source))
    _check_target(source, target)
    checkpoint = _read(source, "classification")
    config = config_from_dict(checkpoint.config, source=f"the config in {source}")
    _check_plugins_strippable(config, source)
    num_classes, kept = checkpoint.classes.num_classes, without_plugins(checkpoint.weights)
    whole = build_and_load(lambda: build_classifier(config, num_classes, pretrained=False), checkpoint.weights, source)
    plain = build_and_load(lambda: build_classifier(_plain(config), num_classes, pretrained=False), kept, source)
    _check_same_outputs(whole, plain, config, f"{source}: evaluation changes without plug-ins, so nothing was written")
    _write_for_network(target, kept)
    removed = len(checkpoint.weights) - len(kept)
    return (
        f"{removed} tensors of plug-ins left out, evaluation is the same to the bit; the other {len(kept)} load into "
        f"the plain {config.model.name} of {num_classes} classes: {target}"
    )


def write_encoder(source: Path, target: Path) -> str:
    """Write the encoder of a masked autoencoder's run for timm's network, under its own names, and say what was done.

    The averaged weights are taken where there are some.

    Raises:
        InputError: ``source`` is no checkpoint of a masked autoencoder.
    """
    source = readable_file(checkpoint_of(source))
    _check_target(source, target)
    checkpoint = _read(source, "masked_autoencoding")
    config = config_from_dict(checkpoint.config, source=f"the config in {source}")
    whole = build_and_load(lambda: build_masked_autoencoder(config), checkpoint.weights, source)
    kept = {name.removeprefix(ENCODER): x for name, x in checkpoint.weights.items() if name.startswith(ENCODER)}
    plain = build_and_load(lambda: build_masked_autoencoder(config).encoder, kept, source)
    _check_same_outputs(whole.encoder, plain, config, f"{source}: the encoder gives something else by itself")
    _write_for_network(target, kept)
    return f"{len(kept)} tensors of the encoder load into the plain {config.model.name} without classes: {target}"


def stripped_checkpoint(checkpoint: Checkpoint, config: DetectionConfig) -> Checkpoint:
    """``checkpoint`` without batch attention and without what only training needs."""
    config = copy.deepcopy(config)
    config.batch_former.enabled = False
    kept = {name: value for name, value in checkpoint.weights.items() if BATCH_FORMER not in name.split(".")}
    return replace(checkpoint, model=kept, ema=None, training=None, config=config_to_dict(config))


def random_batch(config: DetectionConfig) -> Batch:
    """Two random images of different sizes, large enough for as many queries as the model has."""
    cells = math.ceil(math.sqrt(config.model.num_queries))
    side = 32 * math.ceil(max(SIDE, min(config.model.backbone.strides) * cells) / 32)
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (2, 3, side, side + 32), generator=generator, dtype=torch.uint8)
    padding_mask = torch.zeros(2, side, side + 32, dtype=torch.bool)
    padding_mask[1, side - 40 :] = True
    padding_mask[1, :, side - 72 :] = True
    return Batch(images.masked_fill(padding_mask[:, None], 0), padding_mask)


def _check_target(source: Path, target: Path) -> None:
    check_output_file(target, "target")
    with suppress(FileNotFoundError):
        if target.samefile(source):
            raise InputError(f"{target} is the checkpoint that is read: name another file to write")


def _check_classes(classes: ClassMap, numbering: str, source: Path) -> None:
    """The classes of a checkpoint of ours are all of COCO's, and can only go to ids."""
    if numbering == "contiguous":
        raise InputError(f"{source} is a checkpoint of ours, whose classes are contiguous: leave --classes out")
    if classes.category_ids not in interop.COCO_IDS:
        raise InputError(
            f"{source} has {classes.num_classes} classes, which are not those of COCO (80, or 133 with stuff): "
            "leave --classes out"
        )


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    """Turn a failing write into an InputError.

    Torch raises RuntimeError for it, with a message about the position in the file.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise InputError(f"{target} cannot be written ({reason}): make room, or name another file") from error


def _read(source: Path, task: str) -> Checkpoint:
    """A checkpoint of ours.

    Raises:
        InputError: it is none, or of another task, whose option the message names.
    """
    checkpoint = load_checkpoint(source)
    found = checkpoint.config.get("task", "detection")  # earlier versions knew no other
    if isinstance(found, str) and found in _OPTIONS and found != task:
        kind, option = _OPTIONS[found]
        raise InputError(f"{source} is a checkpoint of {kind}, expected one of {_OPTIONS[task][0]}: use {option}")
    return checkpoint


def _write_for_network(target: Path, weights: Mapping[str, Tensor]) -> None:
    with _writing(target):
        interop.write_weights(target, weights)


def _check_plugins_strippable(config: ClassifierConfig, source: Path) -> None:
    if config.plugins.context_broadcasting.enabled:
        raise InputError(
            f"{source} was trained with plugins.context_broadcasting, which is a part of the network in evaluation, "
            "too: without it the outputs would be others. Deploy the run itself (detr_bf.load_classifier), or put it "
            "into timm's network with detr_bf.plugins.add_context_broadcasting"
        )
    if config.model.linear_probe:
        raise InputError(
            f"{source} was trained with model.linear_probe=true: its head has a batch norm, for which the plain "
            "network has no place. Deploy the run itself (detr_bf.load_classifier)"
        )


def _plain(config: ClassifierConfig) -> ClassifierConfig:
    """Without plug-ins."""
    return replace(config, plugins=PluginsConfig())


@torch.inference_mode()
def _check_same_outputs(
    whole: nn.Module, plain: nn.Module, config: ClassifierConfig | MaskedConfig, message: str
) -> None:
    """Both give the same bits for two random images."""
    side = config.data.transforms.size
    images = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))
    if not torch.equal(whole.eval()(images), plain.eval()(images)):
        raise InputError(message)


def _check_strippable(config: DetectionConfig, source: Path) -> None:
    if not config.batch_former.enabled:
        raise InputError(f"{source} was trained without batch attention: there is nothing to strip")
    if config.batch_former.mode == "mini_batch_inference":
        raise InputError(
            f"{source} was trained with batch_former.mode=mini_batch_inference: its evaluation uses batch attention, "
            "so it would be another one without it"
        )


def _check_same_evaluation(checkpoint: Checkpoint, stripped: Checkpoint, source: str) -> None:
    """Both give the same bits on a random batch."""
    batch = random_batch(config_from_dict(checkpoint.config))
    with torch.inference_mode():
        pairs = zip(_outputs(checkpoint, batch, source), _outputs(stripped, batch, source), strict=True)
        if not all(torch.equal(one, other) for one, other in pairs):
            raise InputError(f"{source}: evaluation changes without batch attention, so nothing was written")


def _outputs(checkpoint: Checkpoint, batch: Batch, source: str) -> Iterator[Tensor]:
    model = _model(checkpoint, source)
    outputs = model(batch)
    yield from (outputs.logits, outputs.boxes)
    if outputs.proposals is not None:
        yield from (outputs.proposals.logits, outputs.proposals.boxes)


def _model(checkpoint: Checkpoint, source: str) -> Detector:
    config = config_from_dict(checkpoint.config)
    num_classes = checkpoint.classes.num_classes
    build = partial(build_model, config, num_classes, pretrained=False)
    return build_and_load(build, checkpoint.weights, source).eval()
