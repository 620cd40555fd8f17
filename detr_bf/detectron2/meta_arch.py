"""All detectors as one architecture of detectron2, and its settings in yacs configs.

``MODEL.DETR_BF`` mirrors :mod:`detr_bf.config`: the same names in upper case, the same defaults and checks. Settings
that detectron2 already has are read from there: ``MODEL.MASK_ON`` (a mask head), ``TEST.DETECTIONS_PER_IMAGE``,
``INPUT``, ``SOLVER``.

Shape legend: B images, H x W pixels of the padded batch, N detections.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from detectron2.config import CfgNode, configurable
from detectron2.modeling import META_ARCH_REGISTRY, build_backbone, detector_postprocess
from detectron2.structures import Boxes, ImageList, Instances
from detectron2.utils.events import get_event_storage, has_event_storage
from omegaconf import OmegaConf
from torch import Tensor, nn

from detr_bf.common.errors import InputError
from detr_bf.common.structures import Detections, Outputs, Target
from detr_bf.config import DetectionConfig, config_from_dict
from detr_bf.config.detection import BackboneConfig
from detr_bf.detectors import Detector
from detr_bf.detectron2.parts import Detectron2Backbone, build_parts, check_classes
from detr_bf.detectron2.tensors import batch_of, cropped, fields_of, output_target, panoptic_of, target_of
from detr_bf.engine.step import Criterion
from detr_bf.losses import LossReport
from detr_bf.losses.postprocess import PanopticPostprocess, Postprocess

Inputs = Sequence[Mapping[str, Any]]

DETECTRON2 = "detectron2"  # MODEL.DETR_BF.BACKBONE.NAME that selects build_backbone(cfg)
SECTIONS = {  # sections of MODEL.DETR_BF and their groups in DetectionConfig
    "LOSS": "loss",
    "BATCHFORMER": "batch_former",
    "PLUGINS": "plugins",
    "FREEZE": "freeze",
}


def add_detr_bf_config(cfg: CfgNode) -> None:
    """Add ``MODEL.DETR_BF`` and the other settings of DETR to detectron2's default config.

    The defaults are DETR on COCO without batch attention. ``MODEL.DETR_BF.BACKBONE`` names one of our backbones; with
    the name ``detectron2`` the backbone of ``MODEL.BACKBONE`` is used, with its maps of ``STRIDES``.
    """
    defaults = DetectionConfig()
    node = CfgNode({"ARCHITECTURE": defaults.model.name, "NUM_CLASSES": 80})
    node.update({name: value for name, value in _node(defaults.model).items() if name not in ("NAME", "MASKS")})
    for section, ours in SECTIONS.items():
        node[section] = _node(getattr(defaults, ours))
    node.PANOPTIC = CfgNode({"ENABLED": False, **_node(defaults.eval.panoptic)})
    node.MASK_THRESHOLD = defaults.eval.mask_threshold
    node.NMS = defaults.eval.nms
    node.NMS_ACROSS_CLASSES = defaults.eval.nms_across_classes
    node.RECOMPUTE_ENCODER = defaults.train.recompute_encoder
    cfg.MODEL.DETR_BF = node
    cfg.SOLVER.OPTIMIZER = "ADAMW"
    cfg.SOLVER.BACKBONE_MULTIPLIER = 0.1
    cfg.SOLVER.POINT_MULTIPLIER = 1.0  # for the layers that predict reference points and sampling offsets
    cfg.SOLVER.DECAY_VECTORS = True  # apply WEIGHT_DECAY to biases and norms as well; False in RT-DETR
    cfg.DATASETS.REGISTER_COCO = ()  # (name, images, annotations) each; panoptic data: (..., folder of the PNGs)
    cfg.INPUT.CROP_PROBABILITY = 0.5  # if INPUT.CROP.ENABLED
    cfg.INPUT.CROP_SHORT_SIDES = (400, 500, 600)  # pixels of the shorter side before cropping


def core_config(cfg: CfgNode) -> DetectionConfig:
    """Convert the model and loss settings of ``cfg`` to a ``DetectionConfig``.

    Raises:
        InputError: a value is out of range, or has no effect on a backbone of detectron2.
    """
    _check_backbone(cfg.MODEL.DETR_BF.BACKBONE)
    tree = _lower(cfg.MODEL.DETR_BF)
    sections = {ours: tree.pop(section.lower()) for section, ours in SECTIONS.items()}
    panoptic = tree.pop("panoptic")
    del panoptic["enabled"], tree["num_classes"]
    evaluation = {
        "panoptic": panoptic,
        "mask_threshold": tree.pop("mask_threshold"),
        "nms": tree.pop("nms"),
        "nms_across_classes": tree.pop("nms_across_classes"),
        "max_detections": cfg.TEST.DETECTIONS_PER_IMAGE,
    }
    train = {"recompute_encoder": tree.pop("recompute_encoder")}
    model = {"name": tree.pop("architecture"), "masks": cfg.MODEL.MASK_ON, **tree}
    settings = {"model": model, **sections, "eval": evaluation, "train": train}
    config: DetectionConfig = config_from_dict(settings, source="MODEL.DETR_BF (in lower case)")
    return config


def _check_backbone(node: CfgNode) -> None:
    defaults = _node(BackboneConfig())
    ours = ("DILATION", "FROZEN_STAGES", "FROZEN_NORM")
    ignored = [name for name in ours if node[name] != defaults[name]]
    if node.NAME == DETECTRON2 and ignored:
        raise InputError(
            f"MODEL.DETR_BF.BACKBONE.{', '.join(ignored)} has no effect with NAME {DETECTRON2}; "
            "use MODEL.BACKBONE, MODEL.RESNETS and MODEL.WEIGHTS"
        )


def _node(settings: Any) -> CfgNode:
    """Convert a settings dataclass to a node with upper-case names."""
    found = {field.name.upper(): getattr(settings, field.name) for field in dataclasses.fields(settings)}
    return CfgNode({name: _node(value) if dataclasses.is_dataclass(value) else value for name, value in found.items()})


def _lower(node: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a node to dictionaries with lower-case names."""
    return {name.lower(): _lower(value) if isinstance(value, Mapping) else value for name, value in node.items()}


@META_ARCH_REGISTRY.register()
class DetrBf(nn.Module):
    """A detector of this package, optionally with batch attention and a mask head.

    In training it takes detectron2's dictionaries with ``image`` (3, H, W) and ``instances`` and returns the weighted
    losses, to be summed; other scalars go to the event storage. In evaluation it returns ``instances`` for each image
    and, with ``panoptic``, ``panoptic_seg``, in pixels of ``height`` x ``width``. Only ``detector`` has a state.

    Args:
        detector: one of our detectors.
        criterion: its losses.
        postprocess: converts outputs to detections.
        num_classes: class k is the contiguous id k of the data set.
        panoptic: converts outputs to panoptic maps; then only detections of things are returned as instances.
        input_format: channel order, RGB or BGR.
        batches_meet: images of a batch interact in evaluation (mini_batch_inference). Otherwise images of different
            sizes are evaluated separately, so that a result does not depend on the other images of the batch.
    """

    @configurable
    def __init__(
        self,
        *,
        detector: Detector,
        criterion: Criterion,
        postprocess: Postprocess,
        num_classes: int,
        panoptic: PanopticPostprocess | None = None,
        input_format: str = "RGB",
        batches_meet: bool = False,
    ) -> None:
        super().__init__()
        self.detector = detector
        self.criterion = criterion
        self.postprocess = postprocess
        self.num_classes = num_classes
        self.panoptic = panoptic
        self.flip_channels = input_format == "BGR" and not isinstance(detector.backbone, Detectron2Backbone)
        self.batches_meet = batches_meet

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        """Return the constructor arguments for ``build_model(cfg)``."""
        settings = cfg.MODEL.DETR_BF
        foreign = settings.BACKBONE.NAME == DETECTRON2
        datasets = (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST)
        check_classes(datasets, settings.NUM_CLASSES)
        if settings.PANOPTIC.ENABLED and not datasets:
            raise InputError(
                "MODEL.DETR_BF.PANOPTIC.ENABLED needs the metadata of a data set (things and stuff): name one in "
                "DATASETS.TRAIN or DATASETS.TEST"
            )
        return build_parts(
            core_config(cfg),
            settings.NUM_CLASSES,
            backbone=build_backbone(cfg) if foreign else None,
            pixel_mean=cfg.MODEL.PIXEL_MEAN,
            pixel_std=cfg.MODEL.PIXEL_STD,
            input_format=cfg.INPUT.FORMAT,
            panoptic_dataset=datasets[0] if settings.PANOPTIC.ENABLED else None,
            pretrained=not cfg.MODEL.WEIGHTS,
        )

    @property
    def device(self) -> torch.device:
        return next(self.detector.parameters()).device

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights as ``nn.Module`` does.

        Raises:
            InputError: no tensor has a name of this model; detectron2 would silently continue with random weights.
        """
        if self.state_dict().keys().isdisjoint(state_dict):
            raise InputError(
                f"none of the {len(state_dict)} tensors has a name of this model. Weights of the core, the authors or "
                "Hugging Face are read by DetrBfCheckpointer and DetrBfTrainer; for detectron2's own checkpointer "
                "convert them with tools/convert_checkpoint.py --to detectron2. Weights of a detectron2 backbone need "
                "MODEL.DETR_BF.BACKBONE.NAME detectron2"
            )
        return super().load_state_dict(state_dict, strict, assign)

    def forward(self, batched_inputs: Inputs) -> dict[str, Tensor] | list[dict[str, Any]]:
        """Return the losses in training, the predictions in evaluation.

        Raises:
            InputError: see :func:`detr_bf.detectron2.tensors.target_of`.
        """
        if self.training:
            return self._losses(batched_inputs)
        with torch.no_grad():
            return self._predictions(batched_inputs)

    def _losses(self, inputs: Inputs) -> dict[str, Tensor]:
        if missing := [number for number, each in enumerate(inputs) if "instances" not in each]:
            raise InputError(f"images {missing} of the batch have no 'instances': use a mapper that keeps them")
        targets = [
            target_of(
                each["instances"].to(self.device),
                num_classes=self.num_classes,
                masks=self.detector.mask_head is not None,
                number=number,
            )
            for number, each in enumerate(inputs)
        ]
        outputs = self._outputs(inputs, targets)
        with torch.autocast(self.device.type, enabled=False):
            report = self.criterion(outputs, targets)
        _store(report)
        return report.weighted()

    def _predictions(self, inputs: Inputs) -> list[dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        for group in self._groups(inputs):
            found |= zip(group, self._predict([inputs[number] for number in group]), strict=True)
        return [found[number] for number in range(len(inputs))]

    def _groups(self, inputs: Inputs) -> list[list[int]]:
        """Indices of the images that are evaluated together."""
        numbers = range(len(inputs))
        if self.batches_meet:
            return [list(numbers)]
        shapes = [tuple(each["image"].shape[-2:]) for each in inputs]
        return [list(group) for _, group in groupby(sorted(numbers, key=shapes.__getitem__), key=shapes.__getitem__)]

    def _predict(self, inputs: Inputs) -> list[dict[str, Any]]:
        outputs = self._outputs(inputs)
        targets = []
        for number, each in enumerate(inputs):
            height, width = each["image"].shape[-2:]
            output_size = each.get("height", height), each.get("width", width)
            targets.append(output_target(number, (height, width), output_size))
        things = None if self.panoptic is None else self.panoptic.is_thing
        predictions: list[dict[str, Any]] = [
            {"instances": _instances(found, target.original_size, things)}
            for found, target in zip(self.postprocess(outputs, targets), targets, strict=True)
        ]
        if self.panoptic is not None:
            for prediction, panoptic in zip(predictions, self.panoptic(outputs, targets), strict=True):
                prediction["panoptic_seg"] = panoptic_of(panoptic, self.panoptic.is_thing)
        return predictions

    def _outputs(self, inputs: Inputs, targets: Sequence[Target] = ()) -> Outputs:
        body = self.detector.backbone.body
        images = ImageList.from_tensors(
            [each["image"].to(self.device) for each in inputs],
            getattr(body, "size_divisibility", 0),
            padding_constraints=getattr(body, "padding_constraints", None),
        )
        pixels = images.tensor.flip(1) if self.flip_channels else images.tensor
        outputs: Outputs = self.detector(batch_of(pixels, images.image_sizes, targets))
        height, width = pixels.shape[-2:]
        largest = max(h for h, _ in images.image_sizes), max(w for _, w in images.image_sizes)
        if outputs.masks is None or largest == (height, width):
            return outputs
        return dataclasses.replace(outputs, masks=cropped(outputs.masks, (height, width), largest))


def build_detr_bf(
    *,
    num_classes: int,
    model: Mapping[str, Any] | None = None,
    loss: Mapping[str, Any] | None = None,
    batch_former: Mapping[str, Any] | None = None,
    plugins: Mapping[str, Any] | None = None,
    freeze: Mapping[str, Any] | None = None,
    eval: Mapping[str, Any] | None = None,
    train: Mapping[str, Any] | None = None,
    backbone: nn.Module | None = None,
    pixel_mean: Sequence[float] = (123.675, 116.28, 103.53),
    pixel_std: Sequence[float] = (58.395, 57.12, 57.375),
    input_format: str = "RGB",
    panoptic_dataset: str | None = None,
    pretrained: bool = True,
) -> DetrBf:
    """Build the architecture from keyword arguments, for LazyConfig: ``L(build_detr_bf)(num_classes=80, ...)``.

    Args:
        num_classes: without no-object.
        model, loss, batch_former, plugins, freeze, eval, train: settings that differ from the defaults of
            :mod:`detr_bf.config`.
        backbone: a backbone of detectron2; None: ours, from ``model["backbone"]``.
        pixel_mean, pixel_std: for a backbone of detectron2, in channel order and units of 0 to 255.
        input_format: channel order, RGB or BGR.
        panoptic_dataset: registered data set whose metadata list things and stuff; None: no panoptic maps.
        pretrained: load the weights named in the settings of our backbone.

    Raises:
        InputError: a setting is unknown or out of range.
    """
    groups = {
        "model": model,
        "loss": loss,
        "batch_former": batch_former,
        "plugins": plugins,
        "freeze": freeze,
        "eval": eval,
        "train": train,
    }
    tree = {name: OmegaConf.to_container(OmegaConf.create(dict(group))) for name, group in groups.items() if group}
    return DetrBf(
        **build_parts(
            config_from_dict(tree, source="build_detr_bf"),
            num_classes,
            backbone=backbone,
            pixel_mean=pixel_mean,
            pixel_std=pixel_std,
            input_format=input_format,
            panoptic_dataset=panoptic_dataset,
            pretrained=pretrained,
        )
    )


def _instances(found: Detections, size: tuple[int, int], kept_classes: Sequence[bool] | None) -> Instances:
    """Convert detections to ``Instances``, clipped to the output and without empty boxes."""
    boxes, scores, classes, masks = fields_of(found, size, kept_classes)
    index = torch.arange(len(boxes))  # masks already have the output size: they must not be resized
    raw = Instances(size, pred_boxes=Boxes(boxes), scores=scores, pred_classes=classes, index=index)
    instances = detector_postprocess(raw, *size)
    if masks is not None:
        instances.pred_masks = masks[instances.index]
    instances.remove("index")
    return instances


def _store(report: LossReport) -> None:
    """Log scalars to the event storage in one device transfer."""
    if not (report.logged and has_event_storage()):
        return
    values = torch.stack([value.detach().float() for value in report.logged.values()]).tolist()
    get_event_storage().put_scalars(**dict(zip(report.logged, values, strict=True)))
