"""ONNX files of detectors: graph, metadata, comparison with torch, and detectors that onnxruntime computes.

Shape legend: B images, H x W pixels of the padded batch, Q queries, K class logits, N detections, h x w cells of a
mask.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from importlib.metadata import version
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torchvision.ops import box_convert
from torchvision.transforms.v2 import functional as transforms

from detr_bf.batchformer import BatchFormerV2
from detr_bf.data.transforms import Sample, SampleTransform, eval_sample
from detr_bf.detectors import Detector
from detr_bf.errors import CommandError, InputError
from detr_bf.evaluation import DEFAULT_THRESHOLD, ScoreThresholds
from detr_bf.files import atomic_write, check_output_file, read_regular
from detr_bf.losses import CrossEntropy
from detr_bf.ops.library import reference_operators
from detr_bf.postprocess import Postprocess
from detr_bf.sharing import without_paths
from detr_bf.structures import Batch, ClassMap, Masks, Outputs
from detr_bf.text import printable
from detr_bf.transformer import unpadded

logger = logging.getLogger(__name__)

ONNX_FORMAT = "detr_bf onnx 1"
ONNX_SUFFIX = ".onnx"
LEAST_SIDE = 32  # pixels of a fixed size
OPSET = 20
MAX_BYTES = 2**31  # of a protocol buffer
# Largest absolute differences; boxes are in fractions of the image.
TOLERANCES = {"logits": 1e-3, "boxes": 1e-4, "masks": 1e-2, "scores": 1e-3, "labels": 0.0, "selection": 1e-3}
COMPARED_SCALES = (1.0, 0.8, 0.6)  # of the images, so that batches have padding
COMPARED_BATCH = 3  # images of the larger batch, if the file takes any number
EXAMPLE_SIDE = 256  # least pixels of the shorter side of the images that the graph is traced with


class ParityError(CommandError, RuntimeError):
    """The outputs of onnxruntime differ from those of torch by more than the tolerance; the message has the table."""


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


@dataclass(frozen=True)
class Comparison:
    """Largest absolute difference of each output of onnxruntime from torch, for one batch."""

    images: int
    size: tuple[int, int]  # height, width of the padded batch
    padded: bool
    differences: Mapping[str, float]

    @property
    def beyond(self) -> list[str]:
        """Names of the outputs that differ by more than the tolerance; NaN does."""
        return [name for name, value in self.differences.items() if not value <= TOLERANCES[name]]


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
        feeds = {"images": fed.images.numpy()}
        if self.padded:
            feeds["sizes"] = unpadded(fed.padding_mask).flip(-1).long().numpy()
        elif fed.padding_mask.any():
            raise InputError(f"{self.source} takes no padded images: give one image at a time, or images of one size")
        try:
            values = self.session.run(self.names, feeds)
        except Exception as error:
            size = " x ".join(map(str, fed.images.shape[2:]))
            raise InputError(
                f"{self.source}: onnxruntime failed for {len(fed)} images of {size} pixels: {printable(error, 500)}"
            ) from error
        return {name: torch.from_numpy(value)[:count] for name, value in zip(self.names, values, strict=True)}

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


def export_onnx(
    path: Path, exported: Exported, form: Form, images: Sequence[Tensor], *, source: str, license: str | None = None
) -> list[Comparison]:
    """Write an ONNX file after comparing its outputs in onnxruntime with those of torch.

    Args:
        path: new file.
        exported: the detector.
        form: inputs and outputs.
        images: uint8 (3, h, w), to compare with.
        source: short description of the images, for the metadata.
        license: of the weights.

    Raises:
        InputError: a package is missing, the file exists or cannot be written, the images of a batch attend to each
            other, or the graph does not allow the form.
        ParityError: an output differs by more than its tolerance; nothing was written.
    """
    for name in ("onnx", "onnxscript", "onnxruntime"):
        imported(name)
    if path.suffix != ONNX_SUFFIX:
        raise InputError(f"{printable(path)}: the name of an ONNX file ends in {ONNX_SUFFIX}")
    check_output_file(path, "output")
    if path.exists() or path.is_symlink():
        raise InputError(f"{printable(path)} exists: give another name, or remove it")
    settings = exported.config["data"]["transforms"]
    transform = fixed_transform(exported.transform, form, settings["square"])
    graph = _graph(exported, form)
    short_side = settings["square"] or settings["eval_short_side"]
    onnx_model = _traced(graph, form, padded=form.pads(settings["square"]), short_side=short_side)
    _set_metadata(onnx_model, file_metadata(exported, form, license))
    batches = list(compared_batches(images, transform, form, settings["square"]))
    with atomic_write(path) as temporary:
        temporary.write_bytes(onnx_model.SerializeToString())
        compared = compare_outputs(graph, temporary, batches)
        if any(each.beyond for each in compared):
            raise ParityError(_refusal(path, compared))
        values = [asdict(each) for each in compared]
        _set_metadata(onnx_model, {"parity": {"images": source, "tolerances": TOLERANCES, "batches": values}})
        temporary.write_bytes(onnx_model.SerializeToString())
    return compared


def _graph(exported: Exported, form: Form) -> ExportGraph:
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


def _traced(graph: ExportGraph, form: Form, *, padded: bool, short_side: int) -> Any:
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


def _set_metadata(onnx_model: Any, values: Mapping[str, Any]) -> None:
    for name, value in {"format": ONNX_FORMAT, **values}.items():
        found = next((each for each in onnx_model.metadata_props if each.key == name), None)
        entry = found or onnx_model.metadata_props.add()
        entry.key, entry.value = name, value if name == "format" else json.dumps(value)


# ---- comparison ----


def compared_batches(
    images: Sequence[Tensor], transform: SampleTransform, form: Form, square: int | None
) -> Iterator[Batch]:
    """Yield batches of one image and of several that the form allows, of several sizes where it does."""
    samples = [eval_sample(transform, pixels, index) for index, pixels in enumerate(images)]
    if square is None:
        samples = [_scaled(*each, scale) for each, scale in zip(samples, cycle(COMPARED_SCALES), strict=False)]
    if form.batch in (None, 1):
        yield from (Batch.collate([sample]) for sample in samples)
    if form.batch != 1:
        yield Batch.collate(list(islice(cycle(samples), form.batch or COMPARED_BATCH)))


def _scaled(pixels: Tensor, target: Any, scale: float) -> tuple[Tensor, Any]:
    size = tuple(max(1, int(side * scale)) for side in target.size)
    return transforms.resize(pixels, list(size), antialias=True), replace(target, size=size)


def synthetic_images(count: int = COMPARED_BATCH) -> list[Tensor]:
    """Return images (3, h, w) uint8 of coloured patches in several aspect ratios."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(480, 640), (640, 480), (375, 500)]
    patches = (torch.randint(256, (3, 12, 16), generator=generator, dtype=torch.uint8) for _ in range(count))
    return [transforms.resize(patch, list(size)) for patch, size in zip(patches, cycle(sizes), strict=False)]


def compare_outputs(graph: ExportGraph, path: Path, batches: Sequence[Batch]) -> list[Comparison]:
    """Compare the outputs of the file in onnxruntime with those of torch.

    A detector that chooses among tokens or detections by their scores may choose others of nearly the same score in
    another program, and the order of the queries changes with it. torch is therefore given the choice of onnxruntime;
    the difference ``selection`` is by how much the chosen scores fall short of the best ones.

    Raises:
        InputError: the detector refuses all batches, because they have too few tokens.
    """
    content, selections = _with_selections(path)
    runtime = OnnxDetector(content, str(path))
    compared, refused = [], None
    for batch in batches:
        fed = runtime.fitted(batch)
        whole = fed.images, *((unpadded(fed.padding_mask).flip(-1).long(),) if runtime.padded else ())
        found = runtime.run(fed)
        given = GivenSelections([found[name] for name in selections])
        try:
            with torch.no_grad(), given:
                expected = graph(*whole)
        except InputError as error:
            refused = error
            logger.warning("a batch of %d x %d pixels is not compared: %s", *fed.images.shape[2:], error)
            continue
        values = {name: _difference(found[name], value) for name, value in zip(graph.names, expected, strict=True)}
        values |= {"selection": given.shortfall} if selections else {}
        size = (fed.images.shape[2], fed.images.shape[3])
        compared.append(Comparison(len(fed), size, bool(fed.padding_mask.any()), values))
    if compared:
        return compared
    raise refused or InputError("there are no images to compare the outputs with")


def _difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference; NaN if one of the values is not finite."""
    if found.shape != expected.shape:
        return float("nan")
    return float((found.double() - expected.double()).abs().max())


def _with_selections(path: Path) -> tuple[bytes, list[str]]:
    """Return an ONNX file with the indices of its TopK nodes as further outputs, and their names in order."""
    onnx = imported("onnx")
    model = onnx.load(str(path))
    names = [node.output[1] for node in model.graph.node if node.op_type == "TopK"]
    for name in names:
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT64, None))
    return model.SerializeToString(), names


class GivenSelections(TorchFunctionMode):
    """Replace the indices of every ``topk`` by given ones, and record by how much their values fall short."""

    def __init__(self, indices: Sequence[Tensor]) -> None:
        super().__init__()
        self.indices = list(indices)
        self.shortfall = 0.0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (Tensor.topk, torch.topk):
            return result
        given = self.indices.pop(0)
        difference = _difference(values := args[0].gather(-1, given), result.values)
        if not (math.isnan(self.shortfall) or difference <= self.shortfall):  # NaN stays
            self.shortfall = difference
        return torch.return_types.topk((values, given))


def parity_table(compared: Sequence[Comparison]) -> str:
    """Return the comparisons as a table of text."""
    names = list(compared[0].differences)
    rows = [["images", "height x width", "padded", *names]]
    for each in compared:
        values = [f"{each.differences[name]:.1e}" for name in names]
        rows.append([str(each.images), f"{each.size[0]} x {each.size[1]}", "yes" if each.padded else "no", *values])
    rows.append(["tolerance", "", "", *(f"{TOLERANCES[name]:.0e}" for name in names)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def _refusal(path: Path, compared: Sequence[Comparison]) -> str:
    names = sorted({name for each in compared for name in each.beyond})
    return (
        f"onnxruntime and torch differ by more than the tolerance in {', '.join(names)}; {printable(path)} was not "
        f"written. Please report it with this table.\n{parity_table(compared)}"
    )
