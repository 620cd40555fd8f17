"""The four detectors as one architecture of detectron2.

Shape legend: B images, H x W pixels of the padded batch, N detections.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from detectron2.config import CfgNode, configurable
from detectron2.modeling import META_ARCH_REGISTRY, build_backbone, detector_postprocess
from detectron2.structures import Boxes, ImageList, Instances
from detectron2.utils.events import get_event_storage, has_event_storage
from omegaconf import OmegaConf
from torch import Tensor, nn

from detr_bf.config import config_from_dict
from detr_bf.detectors import Detector
from detr_bf.engine.step import Criterion
from detr_bf.errors import InputError
from detr_bf.interop.detectron2.backbone import Detectron2Backbone
from detr_bf.interop.detectron2.config import DETECTRON2, core_config
from detr_bf.interop.detectron2.parts import check_classes, parts
from detr_bf.interop.detectron2.tensors import batch_of, cropped, fields_of, output_target, panoptic_of, target_of
from detr_bf.losses import LossReport
from detr_bf.postprocess import PanopticPostprocess, Postprocess
from detr_bf.structures import Outputs

Inputs = Sequence[Mapping[str, Any]]


@META_ARCH_REGISTRY.register()
class DetrBf(nn.Module):
    """DETR, Conditional DETR, SMCA or Deformable DETR, with batch attention and a mask head where they are on.

    In training it takes detectron2's dictionaries with ``image`` (3, H, W) and ``instances``, and returns the weighted
    losses, whose sum is the loss; what else is worth knowing goes to the event storage. In evaluation it returns for
    each image ``instances`` and, with ``panoptic``, ``panoptic_seg``, in pixels of ``height`` x ``width``. Its state is
    that of ``detector``.

    Args:
        detector: ours.
        criterion: its losses.
        postprocess: outputs to detections.
        num_classes: class k is the data set's contiguous id k.
        panoptic: outputs to panoptic maps; only the detections of things are returned as instances then.
        input_format: order of the channels, RGB or BGR.
        batches_meet: evaluation itself looks at the other images of a batch (mini_batch_inference). Else images of
            different sizes are evaluated apart, so that none depends on which others it is given with.
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
        """What ``build_model(cfg)`` makes it of."""
        settings = cfg.MODEL.DETR_BF
        foreign = settings.BACKBONE.NAME == DETECTRON2
        datasets = (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST)
        check_classes(datasets, settings.NUM_CLASSES)
        if settings.PANOPTIC.ENABLED and not datasets:
            raise InputError(
                "MODEL.DETR_BF.PANOPTIC.ENABLED True: the metadata of a data set tell things from stuff, and "
                "DATASETS.TRAIN and DATASETS.TEST name none"
            )
        return parts(
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
        """As of every module.

        Raises:
            InputError: no name is one of ours. Detectron2 loads what fits, and would go on with random weights.
        """
        if self.state_dict().keys().isdisjoint(state_dict):
            raise InputError(
                f"none of the {len(state_dict)} tensors has a name of this model. Weights of the core, the authors or "
                "Hugging Face are read by DetrBfCheckpointer and our Trainer; for detectron2's own, write them with "
                "tools/convert_checkpoint.py --to detectron2. Weights of a backbone of detectron2 need "
                "MODEL.DETR_BF.BACKBONE.NAME detectron2"
            )
        return super().load_state_dict(state_dict, strict, assign)

    def forward(self, batched_inputs: Inputs) -> dict[str, Tensor] | list[dict[str, Any]]:
        """Losses in training, predictions in evaluation.

        Raises:
            InputError: see :func:`detr_bf.interop.detectron2.tensors.target_of`.
        """
        if self.training:
            return self._losses(batched_inputs)
        with torch.no_grad():
            return self._predictions(batched_inputs)

    def _losses(self, inputs: Inputs) -> dict[str, Tensor]:
        if missing := [number for number, each in enumerate(inputs) if "instances" not in each]:
            raise InputError(f"images {missing} of the batch have no 'instances': train with a mapper that keeps them")
        targets = [
            target_of(
                each["instances"].to(self.device),
                num_classes=self.num_classes,
                masks=self.detector.mask_head is not None,
                number=number,
            )
            for number, each in enumerate(inputs)
        ]
        outputs = self._outputs(inputs)
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
        """The images that go through the detector together."""
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
            targets.append(
                output_target(number, (height, width), (each.get("height", height), each.get("width", width)))
            )
        things = None if self.panoptic is None else self.panoptic.is_thing
        predictions: list[dict[str, Any]] = [
            {"instances": _instances(found, target.original_size, things)}
            for found, target in zip(self.postprocess(outputs, targets), targets, strict=True)
        ]
        if self.panoptic is not None:
            for prediction, panoptic in zip(predictions, self.panoptic(outputs, targets), strict=True):
                prediction["panoptic_seg"] = panoptic_of(panoptic, self.panoptic.is_thing)
        return predictions

    def _outputs(self, inputs: Inputs) -> Outputs:
        body = self.detector.backbone.body
        images = ImageList.from_tensors(
            [each["image"].to(self.device) for each in inputs],
            getattr(body, "size_divisibility", 0),
            padding_constraints=getattr(body, "padding_constraints", None),
        )
        pixels = images.tensor.flip(1) if self.flip_channels else images.tensor
        outputs: Outputs = self.detector(batch_of(pixels, images.image_sizes))
        height, width = pixels.shape[-2:]
        largest = max(h for h, _ in images.image_sizes), max(w for _, w in images.image_sizes)
        if outputs.masks is None or largest == (height, width):
            return outputs
        return replace(outputs, masks=cropped(outputs.masks, (height, width), largest))


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
    """The architecture from keyword arguments, for LazyConfig: ``L(build_detr_bf)(num_classes=80, ...)``.

    Args:
        num_classes: of the data, without no-object.
        model, loss, batch_former, plugins, freeze, eval, train: settings that differ from the defaults, as in
            :mod:`detr_bf.config`.
        backbone: one of detectron2; None: ours, of ``model["backbone"]``.
        pixel_mean, pixel_std: for a backbone of detectron2, in the order of the channels and units of 0 to 255.
        input_format: order of the channels, RGB or BGR.
        panoptic_dataset: name of a registered data set whose metadata tell things from stuff; None: no panoptic maps.
        pretrained: our backbone starts with the weights its settings name.

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
        **parts(
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


def _instances(found: Any, size: tuple[int, int], kept_classes: Sequence[bool] | None) -> Instances:
    """Detections as detectron2 has them, clipped to the output and without empty boxes."""
    boxes, scores, classes, masks = fields_of(found, size, kept_classes)
    place = torch.arange(len(boxes))  # masks are of the whole output: they take no part in resizing
    raw = Instances(size, pred_boxes=Boxes(boxes), scores=scores, pred_classes=classes, place=place)
    instances = detector_postprocess(raw, *size)
    place = instances.get("place")
    instances.remove("place")
    if masks is not None:
        instances.pred_masks = masks[place]
    return instances


def _store(report: LossReport) -> None:
    """What is only looked at, fetched from the device at once."""
    if not (report.logged and has_event_storage()):
        return
    values = torch.stack([value.detach().float() for value in report.logged.values()]).tolist()
    get_event_storage().put_scalars(**dict(zip(report.logged, values, strict=True)))
