"""Models by name, new from a recipe or trained from a run."""

from __future__ import annotations

import difflib
import fnmatch
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from detr_bf.assembly import build_model
from detr_bf.assembly.model import build_classification
from detr_bf.common.devices import device_of
from detr_bf.common.errors import InputError
from detr_bf.common.files import is_file, is_folder
from detr_bf.common.structures import ClassMap
from detr_bf.common.text import listed, printable
from detr_bf.config import DetectionConfig, RunConfig, config_from_dict, config_to_dict, load_config, packaged_configs
from detr_bf.data.formats import MASK_SPLITS, read_folder
from detr_bf.detectors import Detector
from detr_bf.engine import Checkpoint, build_and_load, checkpoint_of, load_checkpoint
from detr_bf.evaluation import ScoreThresholds
from detr_bf.export.graph import FILE_SUFFIXES, fixed_transform
from detr_bf.export.runtime import file_detector
from detr_bf.export.sharing import WEIGHTS as SHARED_WEIGHTS
from detr_bf.export.sharing import SourceCheckpoint, is_shared, load_shared
from detr_bf.inference.backends import FileBackend, TorchBackend
from detr_bf.inference.predictor import Predictor
from detr_bf.interop.classes import coco_classes, renumbered_to
from detr_bf.interop.hub import hub_folder, is_hub_address
from detr_bf.interop.published import (
    PublishedWeights,
    find_weights,
    get_published,
    is_transformers_folder,
    published,
)
from detr_bf.interop.transformers_folder import read_transformers_config
from detr_bf.interop.weights import read_weights

if TYPE_CHECKING:
    from detr_bf.inference.classifier import ClassifierPredictor
    from detr_bf.inference.segmentation import SegmentationPredictor


logger = logging.getLogger(__name__)

OVERRIDES = ("eval.nms", "eval.nms_across_classes", "eval.max_detections", "eval.mask_threshold")  # of load()
VAL_NAMES = ("val", "valid", "validation", "val2017", "dev")  # splits of folders that hold validation images


def list_models(pattern: str = "*") -> list[str]:
    """Return the sorted names for :func:`create_model` that match ``pattern``, such as ``"*_bfv2"``."""
    return sorted(name for name in _recipes() if fnmatch.fnmatch(name, pattern))


def create_model(
    name: str, *, num_classes: int, pretrained_backbone: bool = False, overrides: Sequence[str] = ()
) -> Detector:
    """Return the detector of the recipe ``configs/*/NAME.yaml`` with newly initialised weights.

    Args:
        name: see :func:`list_models`; or a YAML file.
        num_classes: number of classes of the data, without no-object.
        pretrained_backbone: load the backbone weights that the recipe names (ImageNet); may download them.
        overrides: ``key=value`` settings as on the command line, such as ``"model.num_queries=50"``.

    Raises:
        InputError: no such recipe, an unknown setting, an invalid number of classes, or missing weights.
    """
    return build_model(recipe_config(name, overrides), num_classes, pretrained=pretrained_backbone)


def recipe_config(name: str, overrides: Sequence[str] = ()) -> DetectionConfig:
    """Return the settings of the recipe ``configs/*/NAME.yaml`` (InputError: no such recipe, or an unknown setting)."""
    config: DetectionConfig = load_config(recipe_file(name), list(overrides), task="detection")
    return config


def recipe_file(name: str, *others: str) -> Path:
    """Return the file of a recipe of :func:`list_models`; ``name`` may also be that of a YAML file.

    Args:
        others: further names that the caller knows, for the error's suggestions.

    Raises:
        InputError: no such recipe.
    """
    if not isinstance(name, str):
        raise InputError(f"a model is the name of a recipe, see detr_bf.list_models(), not {printable(repr(name))}")
    if name.endswith((".yaml", ".yml")):
        return Path(name)  # the loader reports a missing file
    recipes = _recipes()
    if name not in recipes:
        shown = printable(name)
        near = difflib.get_close_matches(shown, [*recipes, *others], n=3, cutoff=0.4)
        hint = f"; nearest: {', '.join(near)}" if near else ""
        raise InputError(f"there is no model '{shown}'{hint}. detr_bf.list_models() names all {len(recipes)}")
    return recipes[name]


def _recipes() -> dict[str, Path]:
    """Return the recipes of detectors by name: ``configs/*/NAME.yaml``; those of other tasks are one folder deeper."""
    found = {name: path for name, path in packaged_configs().items() if path.parents[1].name == "configs"}
    return {name: path for name, path in found.items() if path.parent.name not in ("experiments", "segmentation")}


def load(path: str | Path, device: str = "auto", overrides: Sequence[str] = ()) -> Predictor:
    """Return the detector of a checkpoint, of a run folder's best (else last) checkpoint, or of a saved folder.

    It is in evaluation mode. ``path`` may also be a name of :func:`detr_bf.list_weights`, whose file is downloaded
    once; the detector then has the classes of COCO. It may be ``hf://user/name`` or ``hf://user/name@revision``: a
    folder on the Hugging Face Hub that :meth:`Predictor.save` or transformers wrote; they are also read from disk. A
    file ``.onnx`` of :meth:`Predictor.export` is computed by onnxruntime, ``.xml`` by OpenVINO, ``.pte`` by ExecuTorch
    and ``.tflite`` by LiteRT, all on the CPU; a package ``.pt2`` contains machine code, which runs: open only packages
    of a source that you trust.

    Args:
        overrides: settings of detections that win over those of the run, such as ``["eval.nms=0.7"]``; see
            ``OVERRIDES``.

    Raises:
        InputError: the file is missing, damaged or not a checkpoint of ours, or not a detector's; a download failed; or
            an override is wrong or another setting's.
    """
    predictor = load_predictor(path, device, overrides)
    if not isinstance(predictor, Predictor):
        use = {"a classifier": "detr_bf.load_classifier"}.get(predictor.kind, "detr-bf predict")
        raise InputError(f"{path} is of {predictor.kind}, expected a detector: use {use}")
    return predictor


def load_classifier(path: str | Path, device: str = "auto") -> ClassifierPredictor:
    """Return the classifier of a checkpoint or run folder in evaluation mode.

    Raises:
        InputError: see :func:`load`, or the checkpoint is not a classifier's.
    """
    from detr_bf.inference.classifier import ClassifierPredictor

    predictor = load_predictor(path, device)
    if not isinstance(predictor, ClassifierPredictor):
        use = "detr_bf.load" if isinstance(predictor, Predictor) else "detr-bf predict"
        raise InputError(f"{path} is of {predictor.kind}, expected a classifier: use {use}")
    return predictor


def load_predictor(
    path: str | Path, device: str = "auto", overrides: Sequence[str] = ()
) -> Predictor | ClassifierPredictor | SegmentationPredictor:
    """Return the detector, classifier or segmentation network of a checkpoint or run folder.

    Args:
        overrides: of a detector, see :func:`load`.

    Raises:
        InputError: see :func:`load`, or the model predicts nothing, such as a masked autoencoder.
    """
    if other := [name for each in overrides if (name := each.partition("=")[0].strip()) not in OVERRIDES]:
        raise InputError(
            f"{listed(other)} cannot be changed of a trained detector; overrides are {', '.join(OVERRIDES)}"
        )
    given = hub_folder(str(path)) if is_hub_address(str(path)) else Path(path).expanduser()
    if given.suffix in FILE_SUFFIXES:
        return _exported_predictor(given, device, overrides)
    source, checkpoint = _read_checkpoint(given)
    config = config_from_dict(checkpoint.config, source=f"the config in {source}")
    if isinstance(config, DetectionConfig):
        if overrides:
            config = config_from_dict(checkpoint.config, overrides, source=f"the config in {source}")
            checkpoint = replace(checkpoint, config=config_to_dict(config))
        config.device = device
        return _detection_predictor(config, checkpoint, source)
    if overrides:
        raise InputError(f"{listed(overrides)}: for a detector, and {printable(str(path))} is none")
    config.device = device
    if config.task == "segmentation":
        from detr_bf.inference.segmentation import segmentation_predictor

        return segmentation_predictor(config, checkpoint, source)
    from detr_bf.inference.classifier import classifier_predictor  # a detector needs nothing of classifiers

    return classifier_predictor(config, checkpoint, source)


def _detection_predictor(config: DetectionConfig, checkpoint: Checkpoint, source: Path) -> Predictor:
    """Return the trained detector of a checkpoint (InputError: the weights are another model's)."""
    classes, device = checkpoint.classes, device_of(config.device)
    model = build_and_load(
        lambda: build_model(config, classes.num_classes, pretrained=False), checkpoint.weights, source
    )
    if config.batch_former.mixes_evaluated_images:
        logger.warning(
            "%s was trained with batch_former.mode=%s: the images of a batch attend to each "
            "other, and an image that is predicted alone attends to itself, unlike in evaluation (batches of %d). "
            "detr-bf predict and Predictor.__call__ predict images alone; Predictor.predict takes batch_size",
            source,
            config.batch_former.mode,
            config.eval.batch_size,
        )
    origin = SourceCheckpoint(
        checkpoint.config, source, ((checkpoint.training or {}).get("progress") or {}).get("step")
    )
    backend, thresholds = TorchBackend(model.to(device).eval(), device), checkpoint.score_thresholds
    return Predictor.from_config(backend, config, classes, thresholds=thresholds, origin=origin)


def _exported_predictor(path: Path, device: str, overrides: Sequence[str]) -> Predictor:
    """Return the detector of a file that ``detr-bf export`` wrote; the code in a package runs.

    Raises:
        InputError: onnxruntime or openvino is not installed, the file is damaged, of another program or compiled
            for another machine, or another device than that of the file is asked for; or an override is of what
            its graph computes.
    """
    model = file_detector(path)
    values = model.metadata
    if overrides and model.form.postprocess:
        raise InputError(
            f"{listed(overrides)}: the graph of {printable(path)} computes the detections itself: export it again with "
            "these settings, or without postprocessing"
        )
    try:
        config = config_from_dict(values["config"], overrides, source=f"the config in {printable(path)}")
        classes = ClassMap(tuple(values["category_ids"]), tuple(values["classes"]), tuple(values["is_thing"]))
        thresholds = ScoreThresholds(float(values["threshold"]), tuple(map(float, values["thresholds"])))
        if not len(thresholds.by_class) == classes.num_classes:
            raise ValueError(f"{len(thresholds.by_class)} thresholds for {classes.num_classes} classes")
        measured = thresholds if values["measured_thresholds"] else None
        predictor = Predictor.from_config(FileBackend(model), config, classes, thresholds=measured)
        transform = fixed_transform(predictor.transform, model.form, config.data.transforms.square)
    except InputError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"the metadata of {printable(path)} are damaged: {printable(repr(error))}") from error
    return replace(predictor, transform=transform, backend=predictor.backend.on(device))


def evaluated_run(
    path: str | Path, configs: Sequence[Path] = (), overrides: Sequence[str] = (), folder: str | Path | None = None
) -> tuple[RunConfig, Path, Checkpoint | None]:
    """Return what ``detr-bf evaluate`` needs: the config, the file, and its content unless the task reads it.

    Args:
        path: as of :func:`load`, but no exported file; with ``configs`` also a file of foreign weights.
        configs: instead of the settings of the checkpoint.
        overrides: settings that win over both.
        folder: of another data set, whose images are evaluated.

    Raises:
        InputError: see :func:`load`; a setting is wrong; or the folder cannot be read.
    """
    given = hub_folder(str(path)) if is_hub_address(str(path)) else Path(path).expanduser()
    if given.suffix in FILE_SUFFIXES:
        raise InputError(
            f"{printable(given)} is an exported file, which 'detr-bf export --evaluate 0' evaluates beside torch: give "
            "the run that it was made from"
        )
    if folder is not None:
        overrides = [f"data.root={json.dumps(str(folder), ensure_ascii=False)}", *overrides]
    if configs:
        own, checkpoint = load_config(configs, overrides), None
        source = checkpoint_of(find_weights(given))
    else:
        try:
            source, checkpoint = _read_checkpoint(given)
        except InputError as error:
            if not is_file(given):
                raise
            raise InputError(f"{error}. For foreign weights give a config after the file, such as detr_r50") from error
        is_run = source == checkpoint_of(given)
        output = source.parent if is_run else Path("runs") / f"evaluate-{re.sub('[^A-Za-z0-9._-]+', '_', str(path))}"
        tree = {**checkpoint.config, "output_dir": str(output)}
        own = config_from_dict(tree, overrides, source=f"the config in {source}")
        checkpoint = None if is_run else checkpoint
    if not source.is_file():
        raise InputError(f"nothing to evaluate: {printable(source)} is no checkpoint; give a run folder that has one")
    if splits := _evaluated_split(own, overrides, folder):
        logger.info("images of another folder: %s", "  ".join(splits))
        own = config_from_dict(config_to_dict(own), splits, source=f"the config in {source}")
    return own, source, checkpoint


def _evaluated_split(config: RunConfig, overrides: Sequence[str], folder: str | Path | None) -> list[str]:
    """Return the settings of the validation images in another folder than that of the run.

    Raises:
        InputError: the config is not of a detector, or the folder cannot be read.
    """
    names = {override.partition("=")[0].strip() for override in overrides}
    if not isinstance(config, DetectionConfig):
        if folder is not None:
            raise InputError(f"a folder beside RUN is for detectors, and this is task={config.task}: give data.val=DIR")
        return []
    data = config.data
    chosen = any(name.startswith(("data.val", "data.fold")) for name in names - {"data.val.references"})
    stale = ["data.val.references=''"] * bool(data.val.references and "data.val.references" not in names)
    elsewhere = "data.root" in names and data.root
    if chosen or not elsewhere:
        return stale if elsewhere or "data.val.images" in names else []
    if folder is None and (data.folds or data.val_fraction):
        return []  # data.root=DIR: the images of the run in another place, divided as in training
    found = read_folder(Path(data.root), data.format)
    known = [*found.split_names, *(name.split("/")[0] for name in found.split_names)]
    names_of_val = [name for name in (data.val.split, *VAL_NAMES) if name]
    if config.model.masks:  # those whose images have masks (Pascal VOC)
        names_of_val = [*(MASK_SPLITS + name for name in names_of_val), *names_of_val]
    split = next((name for name in names_of_val if name in known), ".")
    return [
        f"data.val.split={json.dumps(split)}",
        *stale,  # they belong to the images of the run
        *(["data.train.split=null"] if data.train.split else []),
        *(["data.val_fraction=0"] if data.val_fraction else []),
        *(["data.folds=0", "data.fold=0"] if data.folds else []),
    ]


def _read_checkpoint(given: Path) -> tuple[Path, Checkpoint]:
    """Return the file and the content of a checkpoint, run folder, saved folder or published weights.

    Raises:
        InputError: see :func:`load`.
    """
    weights = None if is_file(given) or is_folder(given) else published(str(given))
    if weights is not None:
        return _published_checkpoint(weights)
    if is_transformers_folder(given):
        return _transformers_checkpoint(given)
    if is_shared(given):
        return given / SHARED_WEIGHTS, load_shared(given)
    source = checkpoint_of(find_weights(given))
    return source, load_checkpoint(source)


def published_config(weights: PublishedWeights) -> DetectionConfig:
    """Return the settings of the detector of published weights, in which the backbone's statistics are fixed."""
    fixed = ("model.backbone.frozen_norm=true", "init_from=null", "freeze.detector=false")
    return recipe_config(weights.recipe, [*weights.settings, *fixed])


def without_counters(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights without the counters of batch norm in the backbone, which fixed statistics do not have."""
    return {
        name: value
        for name, value in state.items()
        if not (name.startswith("backbone.") and name.endswith(".num_batches_tracked"))
    }


def _published_checkpoint(weights: PublishedWeights) -> tuple[Path, Checkpoint]:
    """Return the file of published weights and a checkpoint of its detector on COCO.

    Raises:
        InputError: the download failed, or the file is of another detector.
    """
    source, config = get_published(weights), published_config(weights)
    classes = coco_classes(stuff=config.model.masks)
    rows = build_classification(config).num_logits(classes.num_classes)
    try:
        state = renumbered_to(without_counters(read_weights(source)), rows)
    except InputError as error:
        raise InputError(
            f"{error}. It is the file of the published weights {weights.name}: delete it to download it again"
        ) from error
    if state is None:
        raise InputError(
            f"{source} does not have the classes of COCO, unlike the published weights {weights.name}: delete it to "
            "download it again"
        )
    return source, Checkpoint(state, classes.to_dict(), config_to_dict(config))


def _transformers_checkpoint(folder: Path) -> tuple[Path, Checkpoint]:
    """Return the weights file of a folder of transformers, and a checkpoint of its detector.

    Raises:
        InputError: the folder is damaged, or of a detector that is not here.
    """
    recipe, settings, classes = read_transformers_config(folder)
    config = recipe_config(recipe, [*settings, "model.backbone.frozen_norm=true"])
    source = find_weights(folder)
    return source, Checkpoint(without_counters(read_weights(source)), classes.to_dict(), config_to_dict(config))
