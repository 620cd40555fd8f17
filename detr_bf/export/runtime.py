"""Detectors of exported files: ONNX, OpenVINO, ExecuTorch, LiteRT, and packages compiled by AOTInductor.

Shape legend: B images, H x W pixels of the padded batch, Q queries, h x w cells of a mask.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import sys
import threading
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from detr_bf.common.errors import InputError
from detr_bf.common.files import file_sha256, read_regular, readable_file
from detr_bf.common.masks import Masks
from detr_bf.common.structures import Batch, Outputs
from detr_bf.common.text import printable
from detr_bf.export.graph import (
    COREML_SUFFIX,
    EXECUTORCH_SUFFIX,
    LITERT_SUFFIX,
    MAX_BYTES,
    MOBILE_FORMATS,
    MOBILE_METADATA,
    ONNX_FORMAT,
    OPENVINO_FORMAT,
    OPENVINO_METADATA,
    OPENVINO_SUFFIX,
    PACKAGE_FORMAT,
    PACKAGE_METADATA,
    PACKAGE_SUFFIX,
    WEIGHTS_SUFFIX,
    ExportSignature,
    imported,
    imported_openvino,
    quiet_export,
)
from detr_bf.transformer import unpadded

MAX_METADATA = 16 * 2**20  # bytes


class FileDetector(ABC):
    """Detector of a file, called like a :class:`~detr_bf.detectors.Detector`.

    Args:
        metadata: values that ``detr-bf export`` wrote.
        names: of the outputs, in the order of :meth:`_compute`.
        padded: the file has the input ``sizes``.

    The metadata say if it has the input ``references``.

    Raises:
        InputError: the metadata are damaged.
    """

    kind: ClassVar[str]  # of files
    engine: ClassVar[str]  # what computes them
    path: Path | None = None  # from which a pickled detector is read again

    def __init__(self, source: str, metadata: Mapping[str, Any], names: list[str], *, padded: bool) -> None:
        self.source, self.metadata = source, dict(metadata)
        with _damaged(source):
            batch, size, postprocess = (metadata["form"][name] for name in ("batch", "size", "postprocess"))
            self.form = ExportSignature(batch, None if size is None else (int(size[0]), int(size[1])), postprocess)
            needed = {"scores", "labels", "boxes"} if postprocess else {"logits", "boxes"}
            if not needed <= set(names):
                raise ValueError(f"the outputs are {names}")
            self.reads_references = bool(metadata["reads_references"])
        self.names, self.padded = names, padded
        self.device = torch.device("cpu")
        self.mask_head = True if "masks" in names else None

    def __reduce__(self) -> tuple[Any, ...]:
        if self.path is None:
            raise InputError(f"{self.source} cannot be pickled: only a detector that has a file can, see detr_bf.load")
        return _reopened, (self.path, self.metadata)

    @abstractmethod
    def _compute(self, feeds: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the outputs on the CPU for inputs on the CPU."""

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
            InputError: the images do not fit the form, or the computation fails.
        """
        count, most = len(batch), self.form.batch
        if most is not None and count > most:
            self._check_references(batch)
            references = batch.references_or_images.split(most) if self.reads_references else repeat(None)
            pieces = zip(batch.images.split(most), batch.padding_mask.split(most), references, strict=False)
            parts = [self.run(Batch(images, mask, references=others)) for images, mask, others in pieces]
            return {name: torch.cat([part[name] for part in parts]) for name in self.names}
        fed = self.fitted(batch)
        feeds = self.feeds(fed)
        try:
            values = self._compute(feeds)
        except Exception as error:  # both engines have many classes of exceptions
            size = " x ".join(map(str, fed.images.shape[2:]))
            raise InputError(
                f"{self.source}: {self.engine} failed for {len(fed)} images of {size} pixels: {printable(error, 500)}"
            ) from error
        return {name: value[:count] for name, value in zip(self.names, values, strict=True)}

    def feeds(self, fitted: Batch) -> dict[str, Tensor]:
        """Return the inputs of the file by name, for a batch of :meth:`fitted`.

        Raises:
            InputError: the images are padded, and the file takes no padded images.
        """
        feeds = {"images": fitted.images}
        if self.padded:
            feeds["sizes"] = unpadded(fitted.padding_mask).flip(-1).long()
        elif fitted.padding_mask.any():
            raise InputError(f"{self.source} takes no padded images: give one image at a time, or images of one size")
        if fitted.references is not None:
            feeds["references"] = fitted.references
        return feeds

    def fitted(self, batch: Batch) -> Batch:
        """Pad a batch of at most as many images as the file takes, and fill it up with its last image.

        An image without reference becomes its own, of which batch attention sees the same as of none.

        Raises:
            InputError: the images are too large; the file reads references and there are none, or it reads none.
        """
        self._check_references(batch)
        images, mask = batch.images, batch.padding_mask
        if self.reads_references:
            images = torch.cat([images, batch.references_or_images], dim=1)
        if self.form.size is not None:
            extra = [limit - side for limit, side in zip(self.form.size, mask.shape[1:], strict=True)]
            if min(extra) < 0:
                raise InputError(f"{self.source} takes images of {self.form.size}, got {tuple(mask.shape[1:])}")
            images = F.pad(images, (0, extra[1], 0, extra[0]))
            mask = F.pad(mask, (0, extra[1], 0, extra[0]), value=True)
        missing = 0 if self.form.batch is None else self.form.batch - len(images)
        images, mask = (torch.cat([part, part[-1:].expand(missing, *part.shape[1:])]) for part in (images, mask))
        channels = batch.images.shape[1]
        references = images[:, channels:].contiguous() if self.reads_references else None
        return Batch(images[:, :channels].contiguous(), mask, references=references)

    def _check_references(self, batch: Batch) -> None:
        """Raise InputError if references are read and the batch has none, or the other way round."""
        if self.reads_references and batch.references is None and batch.has_reference is None:
            raise InputError(
                f"{self.source} reads a reference of each image, and none is given: give references of the same sizes, "
                "aligned with the images"
            )
        if batch.references is not None and not self.reads_references:
            raise InputError(f"{self.source} reads no references, and some are given: leave them out")

    def masks_over(self, batch: Batch, logits: Tensor) -> Masks:
        """Wrap mask logits (B, Q, h, w) over images of the size of the file as those over the images of ``batch``."""
        if self.form.size is None:
            return Masks.known(logits)
        whole, (height, width) = self.form.size, batch.padding_mask.shape[1:]

        def of(row: Tensor, query: Tensor) -> Tensor:
            resized = F.interpolate(logits[row, query][:, None], size=whole, mode="bilinear")
            return resized[:, 0, :height, :width]

        return Masks(of, *logits.shape[:2])


class OnnxDetector(FileDetector):
    """Detector that onnxruntime computes on the CPU.

    Args:
        content: bytes or path of the file.

    Raises:
        InputError: onnxruntime is not installed, or the file is damaged or was not written by this package.
    """

    kind, engine = "ONNX files", "onnxruntime"

    def __init__(self, content: bytes | str, source: str) -> None:
        runtime = imported("onnxruntime")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        # its threads would go on waiting by spinning after a call, and take the cores from torch and other programs
        options.add_session_config_entry("session.force_spinning_stop", "1")
        options.enable_mem_pattern = False  # from the second call of a size on, about twice the memory, and no faster
        options.log_severity_level = 3  # errors
        source = printable(source)
        try:
            self.session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
            found = self.session.get_modelmeta().custom_metadata_map
        except Exception as error:  # onnxruntime has a class of exceptions for each of its codes
            raise InputError(f"{source} cannot be read by onnxruntime: {printable(error, 500)}") from error
        if found.get("format") != ONNX_FORMAT:
            raise InputError(f"{source} is not of the form '{ONNX_FORMAT}': write it with 'detr-bf export'")
        with _damaged(source):
            metadata = {name: value if name == "format" else json.loads(value) for name, value in found.items()}
        padded = "sizes" in {each.name for each in self.session.get_inputs()}
        super().__init__(source, metadata, [each.name for each in self.session.get_outputs()], padded=padded)

    def _compute(self, feeds: Mapping[str, Tensor]) -> list[Tensor]:
        values = self.session.run(self.names, {name: value.numpy() for name, value in feeds.items()})
        return [torch.from_numpy(value) for value in values]


class OpenVinoDetector(FileDetector):
    """Detector that OpenVINO computes on the CPU, in float32 or, for a file with int8 weights, in int8.

    Args:
        path: of the graph; the weights lie beside it.
        with_selections: the indices of chosen tokens and detections are further outputs.

    Raises:
        InputError: openvino is not installed, the weights are those of another file, or a file is damaged or was not
            written by this package.
    """

    kind, engine = "OpenVINO files", "OpenVINO"

    def __init__(self, path: Path, *, with_selections: bool = False) -> None:
        openvino = imported_openvino()
        source, weights = printable(path), path.with_suffix(WEIGHTS_SUFFIX)
        readable_file(path)
        try:
            readable_file(weights)
        except InputError as error:
            raise InputError(
                f"{error}; {source} has its weights in {printable(weights.name)}: copy both files"
            ) from None
        try:
            core = openvino.Core()
            core.set_property({"ENABLE_MMAP": False})  # else a change of the file would change or end this process
            model = core.read_model(path, weights)
            content = model.get_rt_info(OPENVINO_METADATA).value if model.has_rt_info(OPENVINO_METADATA) else "{}"
        except Exception as error:  # OpenVINO raises RuntimeError and others
            raise InputError(
                f"{source} and {printable(weights.name)} cannot be read by OpenVINO; use the two files of one export "
                f"of 'detr-bf export': {printable(error, 300)}"
            ) from error
        with _damaged(source):
            metadata = json.loads(content)
            known = metadata.get("format") == OPENVINO_FORMAT
        if not known:
            raise InputError(f"{source} is not of the form '{OPENVINO_FORMAT}': write it with 'detr-bf export'")
        with _damaged(source):
            digest = str(metadata["weights"])
            selections = [str(name) for name in metadata["selections"]] if with_selections else []
            names = [str(name) for name in metadata["outputs"]]
            if not set(names) <= {name for each in model.outputs for name in each.get_names()}:
                raise ValueError(f"the model has not all of the outputs {names}")
        if digest != file_sha256(weights):
            raise InputError(
                f"{printable(weights)} does not have the weights of {printable(path.name)}: it is damaged or of "
                "another export; copy both files, or write them with 'detr-bf export'"
            )
        padded = any("sizes" in each.get_names() for each in model.inputs)
        super().__init__(source, metadata, names + selections, padded=padded)
        settings = {
            "INFERENCE_PRECISION_HINT": "f32",  # the default is bfloat16 on processors that have it
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "NUM_STREAMS": 1,
            "ENABLE_CPU_PINNING": False,  # else the threads of all processes are bound to the same cores
        }
        try:
            model.add_outputs(selections)
            self.compiled = core.compile_model(model, "CPU", settings)
        except Exception as error:
            raise InputError(f"OpenVINO cannot compile {source}: {printable(error, 500)}") from error

    def _compute(self, feeds: Mapping[str, Tensor]) -> list[Tensor]:
        # a request of its own: calls of several threads would overwrite the results of a common one
        found = self.compiled.infer_new_request({name: value.numpy() for name, value in feeds.items()})
        return [torch.from_numpy(found[name]) for name in self.names]


class PackageDetector(FileDetector):
    """Detector that AOTInductor has compiled for the processors or GPUs of one kind.

    The package contains machine code, which runs when it is loaded: open only packages of a source that you trust.

    Raises:
        InputError: the file is damaged, was not written by this package, or was compiled for another machine.
    """

    kind, engine = "packages", "the compiled package"

    def __init__(self, path: Path) -> None:
        source = printable(path)
        metadata = package_metadata(path)
        with _damaged(source):
            names = [str(name) for name in metadata["outputs"]]
            asked, torch_version = dict(metadata["compiled_for"]), str(metadata["versions"]["torch"])
            device = str(metadata["device"])
            if device not in ("cpu", "cuda"):
                raise ValueError(f"device {device}")
        super().__init__(source, metadata, names, padded=bool(metadata.get("padded")))
        self.device = torch.device(device)
        here = machine_features()
        if missing := sorted(name for name, value in asked.items() if value and here.get(name) != value):
            raise InputError(
                f"{source} was compiled for another processor; this one differs in "
                f"{printable(', '.join(missing), 300)}: export it on a machine like this one"
            )
        if device == "cuda" and not torch.cuda.is_available():
            raise InputError(f"{source} was compiled for a GPU, and torch finds none: export it with --device cpu")
        try:
            self.compiled = torch._inductor.aoti_load_package(str(path))
        except Exception as error:  # errors of the archive, of the dynamic linker and of the package
            raise InputError(
                f"torch {torch.__version__} cannot load {source}, compiled by torch {printable(torch_version, 40)}: "
                f"{printable(error, 500)}"
            ) from error

    def _compute(self, feeds: Mapping[str, Tensor]) -> list[Tensor]:
        return [value.cpu() for value in self.compiled(*(each.to(self.device) for each in feeds.values()))]


def package_metadata(path: Path) -> dict[str, Any]:
    """Return the metadata of a package of AOTInductor, without loading its code.

    Raises:
        InputError: it cannot be read, or was not written by this package.
    """
    readable_file(path)
    try:
        with zipfile.ZipFile(path) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 for entry in archive.infolist()):
                raise ValueError("its members are compressed or encrypted")
            if (damaged := archive.testzip()) is not None:  # torch does not compare check sums
                raise ValueError(f"{damaged} is damaged")
            (entry,) = (each for each in archive.infolist() if each.filename.endswith(f"/{PACKAGE_METADATA}"))
            return _member(archive, entry, PACKAGE_FORMAT)
    except Exception as error:  # zipfile and json have many classes of exceptions for damaged content
        raise InputError(
            f"{printable(path)} is damaged or not of the form '{PACKAGE_FORMAT}' ({printable(error, 200)}): use "
            "another copy, or write it with 'detr-bf export'"
        ) from error


def _member(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, form: str) -> dict[str, Any]:
    """Return the metadata in a member of an archive (ValueError: they are too large, or of another form)."""
    with archive.open(entry) as member:
        content = member.read(MAX_METADATA + 1)
    if len(content) > MAX_METADATA:
        raise ValueError("its metadata are too large")
    values: dict[str, Any] = json.loads(content)
    if values["format"] != form:
        raise ValueError(f"its format is {values['format']}")
    return values


class MobileDetector(FileDetector):
    """Detector of a file for phones, computed on this CPU, by one thread at a time.

    Raises:
        InputError: the package of the runtime is not installed, or the file is damaged or was not written by this
            package.
    """

    def __init__(self, path: Path) -> None:
        program, metadata = mobile_program(path)
        source = printable(path)
        with _damaged(source):
            names, padded = [str(name) for name in metadata["outputs"]], bool(metadata["padded"])
        super().__init__(source, metadata, names, padded=padded)
        self.lock = threading.Lock()
        try:
            self._open(program)
        except InputError:
            raise
        except Exception as error:  # both runtimes raise RuntimeError, ValueError and others
            raise InputError(f"{source} cannot be read by {self.engine}: {printable(error, 500)}") from error

    @abstractmethod
    def _open(self, program: bytes) -> None:
        """Load the program."""


class ExecutorchDetector(MobileDetector):
    """Detector that ExecuTorch computes, with XNNPACK."""

    kind, engine = "ExecuTorch files", "ExecuTorch"

    def _open(self, program: bytes) -> None:
        with quiet_export():
            runtime = imported("executorch.runtime", self.kind, "executorch")
            library = imported("executorch.extension.pybindings.portable_lib", self.kind, "executorch")
        if library._threadpool_get_thread_count() != torch.get_num_threads():
            library._unsafe_reset_threadpool(torch.get_num_threads())
        self.program = runtime.Runtime.get().load_program(program)  # the method does not keep its memory
        self.method = self.program.load_method("forward")

    def _compute(self, feeds: Mapping[str, Tensor]) -> list[Tensor]:
        with self.lock:
            return list(self.method.execute(list(feeds.values())))


class LiteRTDetector(MobileDetector):
    """Detector that LiteRT computes."""

    kind, engine = "LiteRT files", "LiteRT"

    def _open(self, program: bytes) -> None:
        interpreter = imported("ai_edge_litert.interpreter", self.kind, "litert")
        self.interpreter = interpreter.Interpreter(model_content=program, num_threads=torch.get_num_threads())
        self.runner = self.interpreter.get_signature_runner()
        self.types = {name: each["dtype"] for name, each in self.runner.get_input_details().items()}

    def _compute(self, feeds: Mapping[str, Tensor]) -> list[Tensor]:
        with self.lock:
            given = {name: value.numpy().astype(self.types[name]) for name, value in feeds.items()}
            found = self.runner(**given)
        values = [torch.from_numpy(found[name]) for name in self.names]
        return [value if value.is_floating_point() else value.long() for value in values]


def mobile_program(path: Path) -> tuple[bytes, dict[str, Any]]:
    """Return the program and the metadata of a file ``.pte`` or ``.tflite``.

    Raises:
        InputError: it cannot be read, is damaged or was not written by this package.
    """
    readable_file(path)
    form = MOBILE_FORMATS[path.suffix]
    try:
        content = read_regular(path, MAX_BYTES)
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            (entry,) = (each for each in archive.infolist() if each.filename == MOBILE_METADATA)
            metadata = _member(archive, entry, form)
        program = content[: entry.header_offset]
        if hashlib.sha256(program).hexdigest() != metadata["program"]:
            raise ValueError("its program is not the one that was written")
    except Exception as error:  # zipfile and json have many classes of exceptions for damaged content
        raise InputError(
            f"{printable(path)} is damaged or not of the form '{form}' ({printable(error, 200)}): use another copy, or "
            "write it with 'detr-bf export'"
        ) from error
    return program, metadata


def machine_features() -> dict[str, Any]:
    """Return the system, the architecture and the instruction sets of this computer, as torch names them."""
    instructions = {name: True for name, value in torch.cpu.get_capabilities().items() if value is True}
    return {"system": sys.platform, "machine": platform.machine(), **instructions}


def file_detector(path: Path) -> FileDetector:
    """Return the detector of a file that ``detr-bf export`` wrote, by the suffix of its name.

    Raises:
        InputError: it cannot be read, or see the classes of detectors.
    """
    if path.suffix == COREML_SUFFIX:
        raise InputError(
            f"{printable(path)}: Core ML files are computed by macOS and iOS, not here: give the run, or a file of "
            "another format"
        )
    detector: FileDetector
    kinds: dict[str, Callable[[Path], FileDetector]] = {
        PACKAGE_SUFFIX: PackageDetector,
        OPENVINO_SUFFIX: OpenVinoDetector,
        EXECUTORCH_SUFFIX: ExecutorchDetector,
        LITERT_SUFFIX: LiteRTDetector,
    }
    if path.suffix in kinds:
        detector = kinds[path.suffix](path)
    else:
        try:
            content = read_regular(path, MAX_BYTES)
        except (FileNotFoundError, ValueError) as error:
            raise InputError(f"{printable(path)} cannot be read: {printable(error)}") from error
        detector = OnnxDetector(content, str(path))
    detector.path = path.absolute()
    return detector


def _reopened(path: Path, metadata: Mapping[str, Any]) -> FileDetector:
    """Return the detector of a pickle, which holds the path and the metadata of its file.

    Raises:
        InputError: the file is missing, or another one with other metadata.
    """
    detector = file_detector(path)
    if detector.metadata != metadata:
        raise InputError(f"{printable(path)} has changed since its detector was pickled: load it again")
    return detector


@contextmanager
def _damaged(source: str) -> Iterator[None]:
    """Raise InputError where metadata are missing or of another type."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise InputError(f"the metadata of {source} are damaged: {printable(repr(error))}") from error
