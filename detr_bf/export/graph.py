"""ONNX graph of a detector, its metadata, and detectors that onnxruntime computes.

Shape legend: B images, H x W pixels of the padded batch, Q queries, K class logits, N detections, h x w cells of a
mask.
"""

from __future__ import annotations

import copy
import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import box_convert
from torchvision.transforms.v2 import functional as transforms

from detr_bf.batchformer import BatchFormerV2
from detr_bf.data.transforms import Sample, SampleTransform
from detr_bf.detectors import Detector
from detr_bf.errors import InputError
from detr_bf.evaluation import DEFAULT_THRESHOLD, ScoreThresholds
from detr_bf.files import read_regular
from detr_bf.losses import CrossEntropy
from detr_bf.ops.library import reference_operators
from detr_bf.postprocess import Postprocess
from detr_bf.sharing import without_paths
from detr_bf.structures import Batch, ClassMap, Masks, Outputs
from detr_bf.text import printable
from detr_bf.transformer import unpadded

ONNX_FORMAT = "detr_bf onnx 1"
LEAST_SIDE = 32  # pixels of a fixed size
OPSET = 20
MAX_BYTES = 2**31  # of a protocol buffer
EXAMPLE_SIDE = 256  # least pixels of the shorter side of the images that the graph is traced with


@dataclass(frozen=True)
class Form:
    """Inputs and outputs of a file.

    Args:
        batch: number of images; None: any.
        size: height and width of the padded images; None: any.
        postprocess: the outputs are detections instead of logits.
    """

    batch: int | None = None
    size: tuple[int, int] | None = None
    postprocess: bool = False

    def __post_init__(self) -> None:
        if self.batch is not None and self.batch < 1:
            raise InputError(f"batch={self.batch} must be 1 or more, or None for any number of images")
        if self.size is not None and min(self.size) < LEAST_SIDE:
            raise InputError(f"size={self.size} must be (height, width) from {LEAST_SIDE} pixels, or None for any size")

    def pads(self, square: int | None) -> bool:
        """Return True if images can be padded: the file then has the input ``sizes``."""
        return square is None and (self.batch != 1 or self.size is not None)


@dataclass(frozen=True)
class Exported:
    """A detector to be written, with what its user needs to know."""

    model: Detector
    class_map: ClassMap
    transform: SampleTransform
    postprocess: Postprocess
    thresholds: ScoreThresholds | None
    config: Mapping[str, Any]


class FitResize:
    """Resize images to the largest size within (height, width) that keeps the aspect ratio."""

    def __init__(self, size: tuple[int, int]) -> None:
        self.size = size

    def __call__(self, sample: Sample) -> Sample:
        height, width = sample.image.shape[-2:]
        scale = min(self.size[0] / height, self.size[1] / width)
        sides = [max(1, round(side * scale)) for side in (height, width)]  # at most the limits: one is met exactly
        return sample._replace(image=transforms.resize(sample.image, sides, antialias=True))


class ExportGraph(nn.Module):
    """Detector as a function of tensors.

    Without ``postprocess`` the outputs are class logits (B, Q, K), boxes (B, Q, 4) cx, cy, w, h in fractions of the
    unpadded image and, with a mask head, mask logits (B, Q, h, w) over the padded image. With it they are scores
    (B, N), labels (B, N) int64, boxes (B, N, 4) x0, y0, x1, y1 in fractions of the image and mask logits (B, N, h, w)
    of at most ``max_detections`` detections, best first.
    """

    def __init__(self, model: Detector, postprocess: Postprocess | None) -> None:
        super().__init__()
        self.model = model
        self.postprocess = postprocess

    def forward(self, images: Tensor, sizes: Tensor | None = None) -> tuple[Tensor, ...]:
        """Padded images (B, 3, H, W) uint8; ``sizes`` (B, 2) int64, height and width without padding, None: the whole.

        Images lie in the upper left corner.
        """
        outputs = self.model(Batch(images, self._padding_mask(images, sizes)))
        logits, boxes = outputs.logits[-1], outputs.boxes[-1]
        masks = None if outputs.masks is None else outputs.masks.all()
        if self.postprocess is None:
            return (logits, boxes) if masks is None else (logits, boxes, masks)
        scores, query, labels = self._best(self.postprocess.classification.scores(logits), self.postprocess)
        corners = box_convert(boxes, "cxcywh", "xyxy").gather(1, query[..., None].expand(-1, -1, 4))
        if masks is None:
            return scores, labels, corners
        index = query[..., None, None].expand(-1, -1, *masks.shape[2:])
        return scores, labels, corners, masks.gather(1, index)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the outputs."""
        masks = () if self.model.mask_head is None else ("masks",)
        return (*(("logits", "boxes") if self.postprocess is None else ("scores", "labels", "boxes")), *masks)

    def _padding_mask(self, images: Tensor, sizes: Tensor | None) -> Tensor:
        height, width = images.shape[-2:]
        if sizes is None:
            return images.new_zeros(images.shape[0], height, width, dtype=torch.bool)
        below = torch.arange(height, device=images.device) >= sizes[:, :1]
        right = torch.arange(width, device=images.device) >= sizes[:, 1:]
        return below[:, :, None] | right[:, None]

    def _best(self, scores: Tensor, postprocess: Postprocess) -> tuple[Tensor, Tensor, Tensor]:
        """Return score, query and class (B, N) of the best detections from scores (B, Q, classes)."""
        queries, classes = scores.shape[1:]
        if isinstance(postprocess.classification, CrossEntropy):  # as its candidates(): one class for each query
            scores, label = scores.max(-1)
            best, query = scores.topk(min(postprocess.max_detections, queries), dim=1)
            return best, query, label.gather(1, query)
        best, index = scores.flatten(1).topk(min(postprocess.max_detections, queries * classes), dim=1)
        return best, index // classes, index % classes


class OnnxDetector:
    """Detector that onnxruntime computes on the CPU; called like a :class:`~detr_bf.detectors.Detector`.

    Args:
        content: bytes or path of the file.
        source: its name, for messages.

    Raises:
        InputError: onnxruntime is not installed, or the file is damaged or was not written by this package.
    """

    def __init__(self, content: bytes | str, source: str) -> None:
        runtime = imported("onnxruntime")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3  # errors
        self.source = printable(source)
        try:
            self.session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
            found = self.session.get_modelmeta().custom_metadata_map
        except Exception as error:  # onnxruntime has a class of exceptions for each of its codes
            raise InputError(f"{self.source} cannot be read by onnxruntime: {printable(error, 500)}") from error
        if found.get("format") != ONNX_FORMAT:
            raise InputError(f"{self.source} is not of the form '{ONNX_FORMAT}': write it with 'detr-bf export'")
        try:
            self.metadata: dict[str, Any] = {
                name: value if name == "format" else json.loads(value) for name, value in found.items()
            }
            batch, size, postprocess = (self.metadata["form"][name] for name in ("batch", "size", "postprocess"))
            self.form = Form(batch, None if size is None else (int(size[0]), int(size[1])), postprocess)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise InputError(f"the metadata of {self.source} are damaged: {printable(repr(error))}") from error
        self.padded = "sizes" in {each.name for each in self.session.get_inputs()}
        self.names = [each.name for each in self.session.get_outputs()]
        self.mask_head = True if "masks" in self.names else None

    def __call__(self, batch: Batch) -> Outputs:
        """Return logits, boxes and masks of a batch.

        Raises:
            InputError: the file has detections as outputs, or see :meth:`run`.
        """
        found = self.run(batch)
        if "logits" not in found:
            raise InputError(f"{self.source} was exported with postprocessing: it has no logits")
        masks = None if "masks" not in found else self.masks_over(batch, found["masks"])
        return Outputs(found["logits"][None], found["boxes"][None], masks=masks)

    def run(self, batch: Batch) -> dict[str, Tensor]:
        """Return the outputs of the file by name, for a batch that is padded to the form of the file.

        More images than a file takes at a time are computed in parts.

        Raises:
            InputError: the images do not fit the form, or onnxruntime fails.
        """
        count, most = len(batch), self.form.batch
        if most is not None and count > most:
            pieces = zip(batch.images.split(most), batch.padding_mask.split(most), strict=True)
            parts = [self.run(Batch(images, mask)) for images, mask in pieces]
            return {name: torch.cat([part[name] for part in parts]) for name in self.names}
        fed = self.fitted(batch)
        feeds = self.feeds(fed)
        try:
            values = self.session.run(self.names, feeds)
        except Exception as error:
            size = " x ".join(map(str, fed.images.shape[2:]))
            raise InputError(
                f"{self.source}: onnxruntime failed for {len(fed)} images of {size} pixels: {printable(error, 500)}"
            ) from error
        return {name: torch.from_numpy(value)[:count] for name, value in zip(self.names, values, strict=True)}

    def feeds(self, fitted: Batch) -> dict[str, Any]:
        """Return the inputs of the file by name, as NumPy arrays, for a batch of :meth:`fitted`.

        Raises:
            InputError: the images are padded, and the file takes no padded images.
        """
        feeds = {"images": fitted.images.numpy()}
        if self.padded:
            feeds["sizes"] = unpadded(fitted.padding_mask).flip(-1).long().numpy()
        elif fitted.padding_mask.any():
            raise InputError(f"{self.source} takes no padded images: give one image at a time, or images of one size")
        return feeds

    def fitted(self, batch: Batch) -> Batch:
        """Pad a batch of at most as many images as the file takes, and fill it up with its last image."""
        images, mask = batch.images, batch.padding_mask
        if self.form.size is not None:
            extra = [limit - side for limit, side in zip(self.form.size, mask.shape[1:], strict=True)]
            if min(extra) < 0:
                raise InputError(f"{self.source} takes images of {self.form.size}, got {tuple(mask.shape[1:])}")
            images = F.pad(images, (0, extra[1], 0, extra[0]))
            mask = F.pad(mask, (0, extra[1], 0, extra[0]), value=True)
        missing = 0 if self.form.batch is None else self.form.batch - len(images)
        images, mask = (torch.cat([part, part[-1:].expand(missing, *part.shape[1:])]) for part in (images, mask))
        return Batch(images.contiguous(), mask)

    def masks_over(self, batch: Batch, logits: Tensor) -> Masks:
        """Wrap mask logits (B, Q, h, w) over images of the size of the file as those over the images of ``batch``."""
        if self.form.size is None:
            return Masks.known(logits)
        whole, (height, width) = self.form.size, batch.padding_mask.shape[1:]

        def of(row: Tensor, query: Tensor) -> Tensor:
            resized = F.interpolate(logits[row, query][:, None], size=whole, mode="bilinear")
            return resized[:, 0, :height, :width]

        return Masks(of, *logits.shape[:2])


def onnx_content(path: Path) -> bytes:
    """Return the content of an ONNX file.

    Raises:
        InputError: it cannot be read.
    """
    try:
        return read_regular(path, MAX_BYTES)
    except (FileNotFoundError, ValueError) as error:
        raise InputError(f"{printable(path)} cannot be read: {printable(error)}") from error


def imported(name: str) -> Any:
    """Return a package of the extra ``export``.

    Raises:
        InputError: it is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise InputError(f"ONNX files need the package {name}: pip install 'detr_bf[export]'") from error


def fixed_transform(transform: SampleTransform, form: Form, square: int | None) -> SampleTransform:
    """Return the transform of the images of a file: the detector's own, or :class:`FitResize` for a fixed size.

    Raises:
        InputError: the detector was trained with squares, and the size is another one.
    """
    if form.size is None:
        return transform
    if square is not None:
        if form.size != (square, square):
            raise InputError(f"the detector was trained with squares: give the size {square}x{square}, or dynamic")
        return transform
    return FitResize(form.size)


def export_graph(exported: Exported, form: Form) -> ExportGraph:
    """Return a copy of the detector on the CPU whose decoder returns the last layer only."""
    model = copy.deepcopy(exported.model).cpu().float().eval()
    for module in model.modules():
        if isinstance(module, BatchFormerV2) and module.mode == "mini_batch_inference":
            raise InputError(
                "batch_former.mode=mini_batch_inference: the images of a batch attend to each other in evaluation; "
                "only detectors of single images are exported"
            )
    model.decoder.aux_loss = False  # type: ignore[assignment]
    return ExportGraph(model, exported.postprocess if form.postprocess else None).eval()


def traced(graph: ExportGraph, form: Form, *, padded: bool, short_side: int) -> Any:
    """Return the graph as an ONNX model.

    Raises:
        InputError: a part of the detector has a fixed size.
    """
    if form.size is None and any(type(module).__name__.endswith("Same") for module in graph.modules()):
        raise InputError(
            "the backbone pads by the size of its input (timm's Conv2dSame, as in tf_efficientnet networks): give "
            "the size as HEIGHTxWIDTH"
        )
    short = max(short_side, EXAMPLE_SIDE)
    height, width = form.size or (short, short * 5 // 4)
    count = form.batch or 2
    images = torch.zeros(count, 3, height, width, dtype=torch.uint8)
    arguments = (images, torch.tensor([[height, width]] * count)) if padded else (images,)
    dynamic = torch.export.Dim.DYNAMIC
    axes = {0: "batch"} if form.batch is None else {}
    sides = {2: "height", 3: "width"} if form.size is None else {}
    shapes = (dict.fromkeys((*axes, *sides), dynamic), dict.fromkeys(axes, dynamic))[: len(arguments)]
    with torch.no_grad(), reference_operators(), _quiet():
        try:
            program = torch.export.export(graph, arguments, dynamic_shapes=shapes, strict=False)
        except torch._dynamo.exc.UserError as error:
            raise InputError(
                f"a part of the detector allows no dynamic batch or size; give both as numbers: {printable(error, 500)}"
            ) from error
        names = ["images", "sizes"][: len(arguments)]
        converted = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=OPSET,
            input_names=names,
            output_names=list(graph.names),
            verbose=False,
        )
    assert converted is not None, "torch.onnx.export returns a program"
    given = converted.model.graph.inputs[0].shape
    assert given is not None, "the images have a shape"
    converted.rename_axes({given[axis]: name for axis, name in {**axes, **sides}.items()})  # type: ignore[misc]
    return converted.model_proto


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out the warnings of torch.onnx about itself."""
    levels = {name: logging.getLogger(name).level for name in ("torch.onnx", "onnxscript", "onnx_ir")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for name in levels:
                logging.getLogger(name).setLevel(logging.ERROR)
            yield
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)


def file_metadata(exported: Exported, form: Form, license: str | None) -> dict[str, Any]:
    """Return the metadata of a file, without the comparison; every value is written as JSON."""
    classes, backbone = exported.class_map, exported.model.backbone
    thresholds = exported.thresholds or ScoreThresholds.same(DEFAULT_THRESHOLD, classes.num_classes)
    settings = exported.config["data"]["transforms"]
    if form.size is not None and settings["square"] is None:
        resize: dict[str, Any] = {"rule": "fit", "height": form.size[0], "width": form.size[1]}
    elif settings["square"] is not None:
        resize = {"rule": "square", "side": settings["square"]}
    else:
        resize = {"rule": "shorter_side", "side": settings["eval_short_side"], "longest": settings["max_size"]}
    softmax = isinstance(exported.postprocess.classification, CrossEntropy)
    return {
        "form": asdict(form),
        "classes": list(classes.names),
        "category_ids": list(classes.category_ids),
        "is_thing": list(classes.is_thing),
        "threshold": thresholds.overall,
        "thresholds": list(thresholds.by_class),
        "measured_thresholds": exported.thresholds is not None,
        "scores": "softmax" if softmax else "sigmoid",
        "max_detections": exported.postprocess.max_detections,
        "mask_threshold": exported.postprocess.mask_threshold,
        "resize": resize,
        **{name: _channels(backbone, name) for name in ("mean", "std")},
        "license": license,
        "versions": {name: version(name) for name in ("detr_bf", "torch", "onnx", "onnxscript", "onnxruntime")},
        "config": without_paths(exported.config),
    }


def _channels(backbone: nn.Module, name: str) -> list[float] | None:
    """Return ``mean`` or ``std`` of a backbone in units of 0 to 255; None if it has none."""
    values = getattr(backbone, name, None)
    return values.flatten().tolist() if isinstance(values, Tensor) else None


def set_metadata(onnx_model: Any, values: Mapping[str, Any]) -> None:
    """Write values as JSON into the metadata of a model, in place."""
    for name, value in {"format": ONNX_FORMAT, **values}.items():
        found = next((each for each in onnx_model.metadata_props if each.key == name), None)
        entry = found or onnx_model.metadata_props.add()
        entry.key, entry.value = name, value if name == "format" else json.dumps(value)
