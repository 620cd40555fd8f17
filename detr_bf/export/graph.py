"""Graph of a detector as a model of ONNX or OpenVINO or as a package of machine code, and its metadata.

Shape legend: B images, H x W pixels of the padded batch, Q queries, K class logits, N detections, h x w cells of a
mask.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import shutil
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torchvision.ops import nms
from torchvision.transforms.v2 import functional as transforms

from detr_bf.batchformer import InsertedBatchFormer
from detr_bf.common.errors import InputError
from detr_bf.common.structures import Batch, ClassMap
from detr_bf.common.text import printable
from detr_bf.data.images import RGB, PixelFormat, pixel_values
from detr_bf.data.transforms import RandomResize, Sample, SampleTransform, rounded_side
from detr_bf.detectors import Detector
from detr_bf.evaluation import DEFAULT_THRESHOLD, ScoreThresholds
from detr_bf.export.sharing import without_paths
from detr_bf.losses import CrossEntropy
from detr_bf.losses.postprocess import Postprocess
from detr_bf.ops.library import reference_operators

ONNX_FORMAT = "detr_bf onnx 1"
ONNX_SUFFIX, PACKAGE_SUFFIX, OPENVINO_SUFFIX = ".onnx", ".pt2", ".xml"
EXECUTORCH_SUFFIX, LITERT_SUFFIX, COREML_SUFFIX = MOBILE_SUFFIXES = (".pte", ".tflite", ".mlpackage")
FILE_SUFFIXES = (ONNX_SUFFIX, PACKAGE_SUFFIX, OPENVINO_SUFFIX, *MOBILE_SUFFIXES)
WEIGHTS_SUFFIX = ".bin"  # of the weights beside an OpenVINO file, which has the graph
LEAST_SIDE = 32  # pixels of a fixed size
OPSET = 20
MAX_BYTES = 2**31  # of a protocol buffer
PACKAGE_FORMAT = "detr_bf package 1"
OPENVINO_FORMAT = "detr_bf openvino 1"
OPENVINO_METADATA = ["detr_bf", "metadata"]  # path of a JSON object in the runtime information of an OpenVINO file
PACKAGE_METADATA = "extra/detr_bf.json"  # within a package, below its folder; torch calls such files extra files
MOBILE_FORMATS = {
    EXECUTORCH_SUFFIX: "detr_bf executorch 1",
    LITERT_SUFFIX: "detr_bf litert 1",
    COREML_SUFFIX: "detr_bf coreml 1",
}
MOBILE_METADATA = "detr_bf.json"  # member of the ZIP archive at the end of a .pte or .tflite file
INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"  # environment variable of torch
_MOBILE_PACKAGES = ("executorch", "litert-torch", "ai-edge-litert", "coremltools")
_TALKATIVE = ("torch.onnx", "onnxscript", "onnx_ir", "coremltools", "torch.utils._pytree")  # loggers
EXAMPLE_SIDE = 256  # least pixels of the shorter side of the images that the graph is traced with


@dataclass(frozen=True)
class ExportSignature:
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

    @property
    def pixel_format(self) -> PixelFormat:
        """Format of the images."""
        data = self.config["data"]
        return PixelFormat(data.get("channels", RGB.channels), data.get("depth", RGB.depth))


class FitResize:
    """Resize images to the largest size within (height, width) that keeps the aspect ratio.

    The sides are then rounded to multiples of ``divisor``, of which height and width are multiples too.
    """

    def __init__(self, size: tuple[int, int], divisor: int = 1) -> None:
        self.size, self.divisor = size, divisor

    def __call__(self, sample: Sample) -> Sample:
        height, width = sample.image.shape[-2:]
        scale = min(self.size[0] / height, self.size[1] / width)
        limits = zip((height, width), self.size, strict=True)
        sides = [rounded_side(side * scale, self.divisor, limit) for side, limit in limits]
        return sample._replace(image=transforms.resize(sample.image, sides, antialias=True))


class ExportGraph(nn.Module):
    """Detector as a function of tensors.

    Without ``postprocess`` the outputs are class logits (B, Q, K), boxes (B, Q, 4) cx, cy, w, h in fractions of the
    unpadded image and, with a mask head, mask logits (B, Q, h, w) over the padded image. With it they are scores
    (B, N), labels (B, N) int64, boxes (B, N, 4) x0, y0, x1, y1 in fractions of the image and mask logits (B, N, h, w)
    of at most ``max_detections`` detections, best first. With ``postprocess.nms`` duplicates have the
    score 0 and stand at the end.
    """

    def __init__(self, model: Detector, postprocess: Postprocess | None, pixel_format: PixelFormat = RGB) -> None:
        super().__init__()
        self.model = model
        self.postprocess = postprocess
        self.pixel_format = pixel_format

    def forward(
        self, images: Tensor, sizes: Tensor | None = None, references: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Padded images (B, C, H, W); ``sizes`` (B, 2) int64, height and width without padding, None: the whole.

        Images lie in the upper left corner. ``references``, like the images, are given if they are read.
        """
        if references is not None:
            torch._check(references.shape == images.shape)  # tells the tracer that their open sizes are the same
        outputs = self.model(Batch(images, self._padding_mask(images, sizes), references=references))
        logits, boxes = outputs.logits[-1], outputs.boxes[-1]
        masks = None if outputs.masks is None else outputs.masks.all()
        if self.postprocess is None:
            return (logits, boxes) if masks is None else (logits, boxes, masks)
        scores, query, labels = self._best(self.postprocess.classification.scores(logits), self.postprocess)
        corners = self.postprocess.corners(boxes).gather(1, query[..., None].expand(-1, -1, 4))
        if self.postprocess.nms is not None:
            kept = self._without_duplicates(scores, labels, corners, self.postprocess)
            scores, order = kept.topk(kept.shape[1], dim=1)  # best first again
            query, labels = query.gather(1, order), labels.gather(1, order)
            corners = corners.gather(1, order[..., None].expand(-1, -1, 4))
        if masks is None:
            return scores, labels, corners
        index = query[..., None, None].expand(-1, -1, *masks.shape[2:])
        return scores, labels, corners, masks.gather(1, index)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the outputs."""
        masks = () if self.model.mask_head is None else ("masks",)
        return (*(("logits", "boxes") if self.postprocess is None else ("scores", "labels", "boxes")), *masks)

    @property
    def reads_references(self) -> bool:
        """True if the input ``references`` is needed."""
        return self.model.reads_references

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
        # a table instead of index // classes, which ONNX gets with operators that TensorRT has not, or in floats
        query = torch.arange(queries, device=scores.device)[:, None].expand(-1, classes).flatten()
        return best, query[index], index % classes

    def _without_duplicates(self, scores: Tensor, labels: Tensor, boxes: Tensor, postprocess: Postprocess) -> Tensor:
        """Return the scores (B, N), 0 for detections that ``postprocess.kept`` leaves out.

        All images are filtered at once. Boxes lie within -1.5 and 2.5 (D-FINE; others within -0.5 and 1.5), so those of
        other images and classes are moved by multiples of 4 and do not overlap.
        """
        assert postprocess.nms is not None
        column = torch.zeros_like(labels) if postprocess.nms_across_classes else labels
        row = torch.arange(labels.shape[0], device=labels.device)[:, None].expand_as(labels)
        apart = boxes + 4 * torch.stack([column, row, column, row], dim=-1)
        kept = nms(apart.flatten(0, 1), scores.flatten(), postprocess.nms)
        is_kept = torch.zeros_like(scores).flatten().index_fill(0, kept, 1).view_as(scores)
        return scores * is_kept


def imported(name: str, files: str = "ONNX files", extra: str = "export") -> Any:
    """Return a module of an extra, which ``files`` need (InputError: it is not installed)."""
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise InputError(f"{files} need the package {package}: pip install 'detr_bf[{extra}]'") from error


def imported_openvino() -> Any:
    """Return the package openvino, imported without its telemetry.

    On import, openvino sends an event to Google Analytics and writes an identifier into the folder ``~/intel``, unless
    the package openvino_telemetry is missing.

    Raises:
        InputError: it is not installed.
    """
    telemetry = "openvino_telemetry"
    hidden = telemetry not in sys.modules
    if hidden:
        sys.modules[telemetry] = None  # type: ignore[assignment]  # an import of it now raises ImportError
    try:
        return import_module("openvino")
    except ImportError as error:
        raise InputError("OpenVINO files need the package openvino: pip install 'detr_bf[openvino]'") from error
    finally:
        if hidden:
            sys.modules.pop(telemetry, None)  # another thread may have removed it


def fixed_transform(transform: SampleTransform, form: ExportSignature, square: int | None) -> SampleTransform:
    """Return the transform of the images of a file: the detector's own, or :class:`FitResize` for a fixed size.

    Raises:
        InputError: the detector was trained with squares, and the size is another one; or its sides are no multiples
            of the divisor of the detector's own.
    """
    if form.size is None:
        return transform
    if square is not None:
        if form.size != (square, square):
            raise InputError(f"the detector was trained with squares: give the size {square}x{square}, or dynamic")
        return transform
    divisor = size_divisor(transform)
    if any(side % divisor for side in form.size):
        near = "x".join(str(max(divisor, side // divisor * divisor)) for side in form.size)
        raise InputError(
            f"size={form.size[0]}x{form.size[1]}: the detector resizes images to multiples of {divisor} pixels "
            f"(data.transforms.size_divisor): give {near} for instance, or a dynamic size"
        )
    return FitResize(form.size, divisor)


def size_divisor(transform: SampleTransform) -> int:
    """Return the number of which the sides of resized images are multiples."""
    return transform.divisor if isinstance(transform, RandomResize) else 1


def export_graph(exported: Exported, form: ExportSignature, device: torch.device) -> ExportGraph:
    """Return a copy of the detector on a device, whose decoder returns the last layer only."""
    model = copy.deepcopy(exported.model).to(device).float().eval()
    for module in model.modules():
        if isinstance(module, InsertedBatchFormer) and module.mixes_evaluated_images:
            raise InputError(
                f"batch_former.mode={module.mode}: the images of a batch attend to each other in evaluation; only "
                "detectors of single images, or of images and their references (batch_former.references=true), are "
                "exported"
            )
    model.decoder.aux_loss = False  # type: ignore[assignment]
    return ExportGraph(model, exported.postprocess if form.postprocess else None, exported.pixel_format).eval()


def pads_by_size(model: nn.Module) -> bool:
    """Return True if convolutions pad by the size of their input, as TensorFlow's; the size must be known then."""
    return any(type(module).__name__.endswith("Same") for module in model.modules())


def traced(
    graph: nn.Module,
    form: ExportSignature,
    *,
    padded: bool,
    references: bool = False,
    pixel_format: PixelFormat = RGB,
    short_side: int = EXAMPLE_SIDE,
    device: torch.device | None = None,
    pixels: torch.dtype | None = None,
) -> torch.export.ExportedProgram:
    """Return the graph as a program, traced with images of the size of the form or, if that is open, of another one.

    Args:
        short_side: pixels of the shorter side of the images if the size is open.
        pixels: type of the images, whose values are 0 to 255; None: that of the pixel format.

    Raises:
        InputError: a part of the detector has a fixed size.
    """
    if form.size is None and pads_by_size(graph):
        raise InputError(
            "the backbone pads by the size of its input (timm's Conv2dSame, as in NASNet): give the size as "
            "HEIGHTxWIDTH"
        )
    height, width = form.size or (short_side, short_side * 5 // 4)
    count = form.batch or 2
    images = pixel_values(pixel_format.blank(height, width)).to(device, pixels).repeat(count, 1, 1, 1)
    sizes = torch.tensor([[height, width]] * count, device=device) if padded else None
    arguments = (images, sizes, images.clone()) if references else (images, sizes) if padded else (images,)
    dynamic = torch.export.Dim.DYNAMIC
    batch, sides = [0] if form.batch is None else [], [2, 3] if form.size is None else []
    of_images = dict.fromkeys([*batch, *sides], dynamic)
    shapes = (of_images, dict.fromkeys(batch, dynamic) if padded else None, of_images)
    with torch.no_grad(), reference_operators(), quiet_export():
        try:
            return torch.export.export(graph, arguments, dynamic_shapes=shapes[: len(arguments)], strict=False)
        except torch._dynamo.exc.UserError as error:
            raise InputError(
                f"a part of the detector allows no dynamic batch or size; give both as numbers: {printable(error, 500)}"
            ) from error


def onnx_model(
    program: torch.export.ExportedProgram,
    form: ExportSignature,
    outputs: Sequence[str],
    *,
    padded: bool,
    references: bool = False,
) -> Any:
    """Return a program of :func:`traced` as an ONNX model."""
    axes = {**({0: "batch"} if form.batch is None else {}), **({2: "height", 3: "width"} if form.size is None else {})}
    with torch.no_grad(), reference_operators(), quiet_export():
        converted = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=OPSET,
            input_names=["images", *["sizes"] * padded, *["references"] * references],
            output_names=list(outputs),
            verbose=False,
        )
    assert converted is not None, "torch.onnx.export returns a program"
    given = converted.model.graph.inputs[0].shape
    assert given is not None, "the images have a shape"
    converted.rename_axes({given[axis]: name for axis, name in axes.items()})  # type: ignore[misc]
    model = converted.model_proto
    _take_shapes_of_floats(model.graph)
    return model


def _take_shapes_of_floats(graph: Any) -> None:
    """Let an ONNX graph take the shape of an input in uint8 from its conversion to float: TensorRT's Shape needs that.

    The conversions become the first nodes, in place.
    """
    inputs = {each.name for each in graph.input}
    casts = {node.input[0]: node for node in graph.node if node.op_type == "Cast" and node.input[0] in inputs}
    for node in graph.node:
        if node.op_type == "Shape" and node.input[0] in casts:
            node.input[0] = casts[node.input[0]].output[0]
    nodes = [*casts.values(), *(node for node in graph.node if node not in casts.values())]
    del graph.node[:]
    graph.node.extend(nodes)


class SelectionGraph(nn.Module):
    """Graph with the indices of each of its ``topk`` as further outputs, to compare packages with."""

    def __init__(self, graph: ExportGraph) -> None:
        super().__init__()
        self.compared = graph  # not "graph", which torch.fx takes for its own

    def forward(
        self, images: Tensor, sizes: Tensor | None = None, references: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        with _Selections() as selected:
            outputs = self.compared(images, sizes, references)
        return (*outputs, *selected.indices)


class _Selections(TorchFunctionMode):
    """Note the indices of every ``topk``."""

    def __init__(self) -> None:
        super().__init__()
        self.indices: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (Tensor.topk, torch.topk):
            self.indices.append(result.indices)
        return result


def compile_package(program: torch.export.ExportedProgram, folder: Path) -> Path:
    """Compile a program of :func:`traced` to machine code for this computer, and return the file in ``folder``.

    Raises:
        InputError: AOTInductor cannot compile it, for example because there is no C++ compiler.
    """
    before = os.environ.get(INDUCTOR_CACHE)
    os.environ[INDUCTOR_CACHE] = str(folder / "cache")  # its files are as large as the package
    try:
        with torch.no_grad(), quiet_export():
            torch._inductor.aoti_compile_and_package(
                program,
                package_path=str(folder / "compiled.pt2"),
                # else the number of threads of this process would be compiled in
                inductor_configs={"cpp.dynamic_threads": True},
            )
            return folder / "compiled.pt2"
    except Exception as error:  # the compiler's errors have no common class
        raise InputError(
            f"AOTInductor cannot compile the detector; it needs a C++ compiler (for a GPU also the CUDA toolkit): "
            f"{printable(error, 1000)}"
        ) from error
    finally:
        del os.environ[INDUCTOR_CACHE]
        if before is not None:
            os.environ[INDUCTOR_CACHE] = before


def write_package(compiled: Path, path: Path, metadata: Mapping[str, Any]) -> None:
    """Write a compiled package with metadata to ``path``; the metadata come in a file of their own."""
    shutil.copyfile(compiled, path)
    with zipfile.ZipFile(path, "a") as archive:
        folder = archive.namelist()[0].split("/")[0]
        content = json.dumps({"format": PACKAGE_FORMAT, **metadata})
        archive.writestr(f"{folder}/{PACKAGE_METADATA}", content)


@contextmanager
def quiet_export() -> Iterator[None]:
    """Leave out the warnings of exporters about themselves."""
    levels = {name: logging.getLogger(name).level for name in _TALKATIVE}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for name in levels:
                logging.getLogger(name).setLevel(logging.ERROR)
            yield
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)


def file_metadata(exported: Exported, form: ExportSignature, license: str | None) -> dict[str, Any]:
    """Return the metadata of a file, without the comparison; every value is written as JSON."""
    classes, backbone = exported.class_map, exported.model.backbone
    thresholds = exported.thresholds or ScoreThresholds.same(DEFAULT_THRESHOLD, classes.num_classes)
    data = exported.config["data"]
    settings = data["transforms"]
    if form.size is not None and settings["square"] is None:
        resize: dict[str, Any] = {"rule": "fit", "height": form.size[0], "width": form.size[1]}
    elif settings["square"] is not None:
        resize = {"rule": "square", "side": settings["square"]}
    else:
        resize = {"rule": "shorter_side", "side": settings["eval_short_side"], "longest": settings["max_size"]}
    if settings["square"] is None:
        resize["multiple_of"] = size_divisor(exported.transform)
    softmax = isinstance(exported.postprocess.classification, CrossEntropy)
    versions = {}
    for name in ("detr_bf", "torch", "onnx", "onnxscript", "onnxruntime", "openvino", *_MOBILE_PACKAGES):
        with suppress(PackageNotFoundError):  # no format needs all of them; onnxruntime-gpu has another name
            versions[name] = version(name)
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
        "nms": exported.postprocess.nms,
        "nms_across_classes": exported.postprocess.nms_across_classes,
        "resize": resize,
        "grey_bits": data.get("grey_bits"),
        "channels": exported.pixel_format.channels,
        "depth": exported.pixel_format.depth,  # 16: the input is float32, value / 257
        **{name: _channels(backbone, name) for name in ("mean", "std")},
        "license": license,
        "versions": versions,
        "config": without_paths(exported.config),
    }


def _channels(backbone: nn.Module, name: str) -> list[float] | None:
    """Return ``mean`` or ``std`` of a backbone in units of 0 to 255; None if it has none."""
    values = getattr(backbone, name, None)
    return values.flatten().tolist() if isinstance(values, Tensor) else None


def write_openvino(model: Any, path: Path, metadata: Mapping[str, Any], *, half: bool) -> None:
    """Write a model of OpenVINO with metadata to ``path``, and its weights beside it.

    Args:
        half: the weights are stored in float16.

    Raises:
        InputError: a file cannot be written.
    """
    content = json.dumps({"format": OPENVINO_FORMAT, **metadata})
    model.set_rt_info(content, OPENVINO_METADATA)
    try:
        imported_openvino().save_model(model, path, compress_to_fp16=half)
    except RuntimeError as error:
        raise InputError(
            f"OpenVINO cannot write to {printable(path.parent)}: is there space? TMPDIR names another folder for "
            f"temporary files. {printable(error, 300)}"
        ) from error


def set_metadata(onnx_model: Any, values: Mapping[str, Any]) -> None:
    """Write values as JSON into the metadata of a model, in place."""
    for name, value in {"format": ONNX_FORMAT, **values}.items():
        found = next((each for each in onnx_model.metadata_props if each.key == name), None)
        entry = found or onnx_model.metadata_props.add()
        entry.key, entry.value = name, value if name == "format" else json.dumps(value)
