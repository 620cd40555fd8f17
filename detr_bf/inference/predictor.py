"""A trained detector ready for images."""

from __future__ import annotations

import logging
import numbers
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias, TypedDict, cast, overload

import torch
from torch import Tensor

from detr_bf.assembly import build_eval_transform, build_panoptic_postprocess, build_pixel_format, build_postprocess
from detr_bf.common.errors import InputError
from detr_bf.common.progress import progress_bar
from detr_bf.common.structures import Batch, ClassMap
from detr_bf.common.text import printable
from detr_bf.config import DetectionConfig
from detr_bf.data.batches import SameSizeBatches
from detr_bf.data.coco import CocoAnnotations, CocoDetection, read_annotations
from detr_bf.data.images import MAX_PIXELS, RGB, PixelFormat, displayed
from detr_bf.data.inputs import ImageLike, by_size, check_batch_size, chunks, image_files, image_pixels, is_url
from detr_bf.data.loader import make_loader
from detr_bf.data.references import own_references
from detr_bf.data.transforms import SampleTransform, eval_sample
from detr_bf.data.video import VideoFrame, read_frames
from detr_bf.detectors import Detector
from detr_bf.evaluation import DEFAULT_THRESHOLD, CocoEvaluator, Result, ScoreThresholds
from detr_bf.export import export_detector
from detr_bf.export.graph import Exported, ExportSignature
from detr_bf.export.parity import Comparison, PairSample
from detr_bf.export.sharing import SourceCheckpoint, save_shared
from detr_bf.inference.backends import Backend
from detr_bf.inference.export_pairs import calibration_pairs, compared_pairs
from detr_bf.inference.prediction import FramePrediction, PanopticPrediction, PictureList, Prediction, summary
from detr_bf.inference.references import NO_REFERENCES, GivenReferences, ReferenceLike, check_given, names_folder
from detr_bf.inference.tiling import TilePlace, check_tile, join_tiles, tiles_of
from detr_bf.interop.hub import send_folder
from detr_bf.interop.transformers_folder import write_transformers_folder
from detr_bf.losses.postprocess import PanopticPostprocess, Postprocess

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger(__name__)

NumberedImages: TypeAlias = list[tuple[int, ImageLike]]


class ReadImage(NamedTuple):
    """An image that was read."""

    number: int
    given: ImageLike
    pixels: Tensor  # (C, H, W)
    reference: Tensor | None = None  # likewise


class PanopticOptions(TypedDict, total=False):
    """Keyword arguments of :meth:`Predictor.panoptic`."""

    batch_size: int
    device: str | torch.device | None
    half: bool
    bgr: bool
    reference: ReferenceLike | None


class CallOptions(PanopticOptions, total=False):
    """Keyword arguments of :meth:`Predictor.__call__`."""

    tile: tuple[int, int] | None


@dataclass(frozen=True)
class _Call:
    """Checked arguments of a call of the predictor."""

    backend: Backend
    least: Tensor  # score from which the detections of each class are returned
    batch_size: int
    half: bool
    tile: tuple[int, int] | None


@dataclass(frozen=True)
class Predictor:
    """Images in, :class:`~detr_bf.inference.prediction.Prediction` out, in pixels of the image given.

    With a mask head the predictions have masks, and :meth:`panoptic` gives
    :class:`~detr_bf.inference.prediction.PanopticPrediction`. What is taken as an image is
    said by :func:`~detr_bf.data.inputs.image_pixels`; none may have more than ``max_pixels`` pixels, the run's
    data.max_pixels.

    Only detections with a score of at least ``threshold`` are returned: a number, ``"class"`` for the stored threshold
    of each class, or None for the stored threshold of all classes (0.5 if the checkpoint has none). Stored
    thresholds are those with the highest F1 in the last evaluation before the checkpoint was written; with 0 all
    ``eval.max_detections`` of an image, or of each part with ``tile``, are returned.

    Arguments of several methods:

    - ``bgr``: arrays and tensors have the channel order blue, green, red (OpenCV's).
    - ``half``: compute in float16 on a GPU and in bfloat16 on a CPU, where autocast allows it.
    - ``tile``: (size, overlap) in pixels: detect in square parts of a large image and join the objects at their
      borders, see :mod:`detr_bf.inference.tiling`.
    - ``reference``: of a detector that compares each image with its reference, an aligned image of the same size: one
      image for all, one for each in their order, or a folder in which the reference of an image file has its name.
    """

    backend: Backend  # computes batches
    class_map: ClassMap
    transform: SampleTransform
    postprocess: Postprocess
    panoptic_postprocess: PanopticPostprocess
    max_pixels: int = MAX_PIXELS  # of an image
    pixel_format: PixelFormat = RGB  # of the images
    thresholds: ScoreThresholds | None = None  # of the checkpoint
    origin: SourceCheckpoint | None = None  # the checkpoint; None: no weights that could be saved, or exported
    kind: ClassVar[str] = "a detector"  # in messages
    __repr__ = summary

    @classmethod
    def from_config(cls, backend: Backend, config: DetectionConfig, class_map: ClassMap, **fields: Any) -> Predictor:
        """Return the predictor of a detector with the settings of its run; ``fields`` are others of the class."""
        transform, postprocess = build_eval_transform(config), build_postprocess(config)
        panoptic, data = build_panoptic_postprocess(config, class_map), config.data
        parts = (transform, postprocess, panoptic, data.max_pixels, build_pixel_format(data))
        return cls(backend, class_map, *parts, **fields)

    @property
    def model(self) -> Detector:
        """Detector of torch, or :class:`~detr_bf.export.runtime.FileDetector`, which is called like one."""
        return cast("Detector", self.backend.model)

    @property
    def device(self) -> torch.device:
        """Device of the outputs."""
        return self.backend.device

    @overload
    def __call__(
        self, image: ImageLike, threshold: float | str | None = None, **options: Unpack[CallOptions]
    ) -> Prediction: ...
    @overload
    def __call__(
        self,
        image: list[ImageLike] | tuple[ImageLike, ...],
        threshold: float | str | None = None,
        **options: Unpack[CallOptions],
    ) -> list[Prediction]: ...
    def __call__(
        self,
        image: Any,
        threshold: float | str | None = None,
        *,
        batch_size: int = 1,
        device: str | torch.device | None = None,
        half: bool = False,
        tile: tuple[int, int] | None = None,
        bgr: bool = False,
        reference: ReferenceLike | None = None,
    ) -> Prediction | list[Prediction]:
        """Detect in one image; in a list or tuple of images, or in a folder, as :meth:`predict` does.

        Args:
            image, threshold: see the class.
            batch_size, device, half, tile, bgr, reference: as of :meth:`predict`.

        Returns:
            A prediction, or a list of them.

        Raises:
            InputError: it is no image, or cannot be read; an argument has a wrong value.
        """
        if isinstance(image, (list, tuple)) or names_folder(image):
            same = partial(self.predict, device=device, half=half, tile=tile, bgr=bgr, reference=reference)
            return PictureList(same(image, batch_size, threshold))
        check_batch_size(batch_size)
        call = _Call(self.backend.on(device), self.least_scores(threshold), batch_size, half, check_tile(tile))
        references = self.references(reference, image, bgr=bgr)
        (found,) = self._predict(self._read(iter([[(0, image)]]), references, bgr=bgr, single=True), call)
        return found

    @overload
    def panoptic(self, image: ImageLike, **options: Unpack[PanopticOptions]) -> PanopticPrediction: ...
    @overload
    def panoptic(
        self, image: list[ImageLike] | tuple[ImageLike, ...], **options: Unpack[PanopticOptions]
    ) -> list[PanopticPrediction]: ...
    def panoptic(
        self,
        image: Any,
        *,
        batch_size: int = 1,
        device: str | torch.device | None = None,
        half: bool = False,
        bgr: bool = False,
        reference: ReferenceLike | None = None,
    ) -> PanopticPrediction | list[PanopticPrediction]:
        """Return the panoptic map of one image, or a list of those of a list, tuple or folder.

        Args:
            image, batch_size, device, half, bgr, reference: as of :meth:`predict`.

        Raises:
            InputError: the detector has no mask head, or as :meth:`__call__`.
        """
        if self.model.mask_head is None:
            raise InputError("this detector has no mask head: train one with model.masks=true, on data with masks")
        check_batch_size(batch_size)
        references = self.references(reference, image, bgr=bgr)
        several, from_folder = isinstance(image, (list, tuple)), names_folder(image)
        given = list(image_files([Path(image)])) if from_folder else image if several else [image]
        single, backend = not (several or from_folder), self.backend.on(device)
        compute = partial(backend.compute, convert=self.panoptic_postprocess, half=half)
        found = []
        for images in self._read(chunks(given, batch_size), references, bgr=bgr, skip=from_folder, single=single):
            samples = [self._sample(each, (0, 0, each.pixels.shape[-1], each.pixels.shape[-2])) for each in images]
            maps = by_size(samples, compute, together=backend.mixes_images)
            for each, read in zip(maps, images, strict=True):
                found.append(PanopticPrediction(**vars(each), **self._image_fields(read)))
        return found[0] if single else PictureList(found)

    def predict(
        self,
        images: Iterable[ImageLike] | str | Path,
        batch_size: int = 1,
        threshold: float | str | None = None,
        *,
        device: str | torch.device | None = None,
        half: bool = False,
        tile: tuple[int, int] | None = None,
        bgr: bool = False,
        reference: ReferenceLike | None = None,
    ) -> Iterator[Prediction]:
        """Detect in many images, one after the other, in their order; ``image_id`` is the index, from 0.

        Args:
            images: images, or a folder: its image files and those of its subfolders, by name. Files of a folder that
                cannot be read, or have no reference, are left out, and listed in a warning at the end.
            batch_size: images, or with ``tile`` parts, that are detected together. Those that are resized to one size
                share a forward pass, so that no image is padded and none depends on the others.
            threshold, half, tile, bgr, reference: see the class.
            device: where to compute, by default on the predictor's device; for another, a copy of the model is made
                at the first call and kept.

        Raises:
            InputError: ``images`` is a single image, one of them is no image or cannot be read, or an argument has a
                wrong value; a reference is missing, has another size than its image, or nothing reads it.
        """
        call = _Call(self.backend.on(device), self.least_scores(threshold), batch_size, half, check_tile(tile))
        from_folder = names_folder(images)
        given: Any = list(image_files([Path(images)])) if from_folder else images  # type: ignore[arg-type]
        numbered = chunks(given, batch_size if tile is None else 1)  # the parts of one image are many
        references = self.references(reference, images, bgr=bgr)
        return self._predict(self._read(numbered, references, bgr=bgr, skip=from_folder), call)

    def predict_video(
        self,
        video: str | Path | int,
        every: int = 1,
        batch_size: int = 1,
        threshold: float | str | None = None,
        *,
        live: bool | None = None,
        reconnect: bool = False,
        device: str | torch.device | None = None,
        half: bool = False,
        tile: tuple[int, int] | None = None,
        reference: ImageLike | None = None,
    ) -> Iterator[FramePrediction]:
        """Detect in the frames of a video file, a stream or a camera, in their order; needs ``pip install av``.

        Args:
            video: file, address (http, https, rtsp, rtmp), or number of a camera (Linux).
            every: detect only in frames whose number, from 0, is a multiple of it.
            live, reconnect: as of :func:`~detr_bf.data.video.read_frames`; by default only the newest frame of a live
                source is taken, and those that came during a detection are left out.
            batch_size, threshold, device, half, tile: as of :meth:`predict`.
            reference: one image for all frames.

        Raises:
            InputError: as :func:`~detr_bf.data.video.read_frames`, also after the last readable frame of a damaged
                file; or an argument has a wrong value.
        """
        check_batch_size(batch_size)
        call = _Call(self.backend.on(device), self.least_scores(threshold), batch_size, half, check_tile(tile))
        self.pixel_format.check_rgb("frames of videos are")
        if names_folder(reference):
            raise InputError(f"{printable(reference)} is a folder: give one reference image for all frames of a video")
        references = self.references(reference, str(video))
        frames = read_frames(video, every=every, live=live, reconnect=reconnect, max_pixels=self.max_pixels)
        source = f"camera {video}" if isinstance(video, int) else str(video)
        return self._predict_frames(frames, call, source, references)

    def _predict_frames(
        self, frames: Iterator[VideoFrame], call: _Call, source: str, references: GivenReferences
    ) -> Iterator[FramePrediction]:
        damage: list[InputError] = []

        def until_damage() -> Iterator[tuple[VideoFrame, ReadImage]]:  # the frames before it are a batch as well
            try:
                for frame in frames:
                    given, name = frame.pixels, f"frame {frame.number}"
                    yield frame, ReadImage(frame.number, given, given, references(frame.number, given, given, name))
            except InputError as error:
                damage.append(error)

        readable = until_damage()
        while batch := list(islice(readable, call.batch_size if call.tile is None else 1)):
            found = self._predictions([image for _, image in batch], call)
            for (frame, _), each in zip(batch, found, strict=True):
                fields = {**vars(each), "source": source}
                yield FramePrediction(**fields, frame=frame.number, seconds=frame.seconds)
        if damage:
            raise damage[0]

    def evaluate(
        self,
        annotations: str | Path | CocoAnnotations,
        images: str | Path,
        *,
        batch_size: int = 8,
        workers: int = 0,
        half: bool = False,
        references: str | Path | None = None,
    ) -> Result:
        """Evaluate on annotated images as ``detr-bf evaluate`` does; boxes, and masks of a detector with a mask head.

        Args:
            annotations: COCO JSON file with the classes of the detector, or its content.
            images: folder of its image files.
            batch_size: images of a forward pass; only images of one size are in a batch.
            workers: processes that read images.
            half: see the class.
            references: of a detector that compares each image with its reference: the folder of the files that the
                key ``template`` of the images names, or that have the names of the images; None: ``images``.

        Returns:
            Average precision, overall and by class, with the thresholds of the highest F1. ``print`` shows one line.

        Raises:
            InputError: a file cannot be read or is not valid, or the classes are others; no image has a reference,
                or nothing reads them.
        """
        content = read_annotations(Path(annotations) if isinstance(annotations, str) else annotations)
        masks = self.model.mask_head is not None
        check_batch_size(batch_size)
        own = None
        if self.backend.reads_references:
            folder = None if references is None else Path(references)
            own = own_references(content.images, Path(images), folder, "the images")
        else:
            check_given(False, references)
        limits = self._limits
        data = CocoDetection(Path(images), content, self.transform, self.class_map, references=own, **limits)
        most = self.postprocess.max_detections
        boxes = CocoEvaluator(content, self.class_map, max_detections=most, images=data.folder, masks=masks)
        batches = SameSizeBatches(data.sizes, batch_size)
        loader = make_loader(data, batches, collate=Batch.collate, workers=workers)
        for batch in progress_bar(loader, total=len(batches), desc="evaluating", unit="batch", leave=False):
            boxes.update(self.backend.compute(batch, self.postprocess, half))
        return Result(boxes.summarize(), boxes.summarize_masks() if masks else None)

    def save(self, folder: str | Path, *, name: str = "", license: str | None = None) -> None:
        """Write a folder to give to others, which :func:`detr_bf.load` reads.

        It holds ``model.safetensors``, ``config.json`` (settings, classes, threshold, metrics, no paths) and
        ``README.md``, a model card with what the run's folder says of data and metrics.

        Args:
            folder: new folder, or one without these files.
            name: title of the model card; by default the name of the folder.
            license: of the weights, as the Hugging Face Hub abbreviates it, such as ``apache-2.0``.

        Raises:
            InputError: one of the files exists or cannot be written, or the predictor was not loaded from a file.
        """
        origin, title, folder = self._checkpoint("saved"), printable(name or Path(folder).name), Path(folder)
        licence, reads = None if license is None else printable(license), self.backend.reads_references
        given = (self.model.state_dict(), self.class_map, self.thresholds, origin)
        save_shared(folder, *given, name=title, licence=licence, reads_references=reads)

    def push_to_hub(self, repository: str, *, private: bool = False, name: str = "", license: str | None = None) -> str:
        """Send the folder of :meth:`save` to the Hugging Face Hub, and return the address of the commit.

        Needs huggingface_hub (``pip install 'detr_bf[hub]'``) and a token (``hf auth login``, or HF_TOKEN).

        Args:
            repository: ``user/name``; it is made if it does not exist.
            private: of a new repository.
            name, license: as of :meth:`save`; the default of ``name`` is that of the repository.

        Raises:
            InputError: a package or a token is missing, or the Hub refuses.
        """
        with tempfile.TemporaryDirectory() as folder:
            self.save(Path(folder) / "detector", name=name or repository.rpartition("/")[2], license=license)
            return send_folder(Path(folder) / "detector", repository, private=private)

    def to_huggingface(self, folder: str | Path) -> None:
        """Write a folder that ``from_pretrained`` of transformers reads: weights, settings and preprocessing.

        Batch attention is left out. transformers reads the folder and gives the outputs of this detector on a random
        image before anything has its final name.

        Args:
            folder: new folder, or one without these files.

        Raises:
            InputError: transformers is not installed, has no such detector or gives other outputs; or a file exists or
                cannot be written.
        """
        config = self._checkpoint("written for transformers").config
        self.pixel_format.check_rgb("detectors of transformers get")
        left_out = write_transformers_folder(Path(folder), self.model, self.class_map, config)
        logger.info(
            "%s: transformers gives the same outputs%s",
            printable(folder),
            f"; {len(left_out)} tensors of batch attention left out" if left_out else "",
        )

    def export(
        self,
        path: str | Path,
        *,
        batch: int | None = None,
        size: tuple[int, int] | None = None,
        postprocess: bool = False,
        images: Iterable[ImageLike] | None = None,
        references: Iterable[ImageLike] | None = None,
        license: str | None = None,
        precision: str = "float32",
        calibration: str | Path | None = None,
        calibration_references: str | Path | None = None,
        evaluate: Callable[[Path], Mapping[str, Any]] | None = None,
        device: str = "cpu",
    ) -> list[Comparison]:
        """Write a file for another program, or a compiled package, after comparing its outputs with torch's.

        :func:`detr_bf.load` reads it. docs/export.md names the extra of each format.

        Args:
            path: new file; its suffix is the format, see :func:`detr_bf.export.export_detector`.
            batch, size: number of images, and height and width of the padded images; None: any.
            postprocess: the outputs are detections instead of logits.
            images, references: images to compare with, by default synthetic, and their references, if these are read.
            license: of the weights.
            precision: ``float32``; for ONNX and OpenVINO also ``float16`` or ``int8``.
            calibration: folder with images; up to 100 of them, evenly spaced by name, set the scales of int8.
            calibration_references: folder of their references, by name; None: those that the data of the run name.
            evaluate: see :func:`detr_bf.export.export_detector`.
            device: ``cpu``, or ``cuda`` for a package that computes on a GPU.

        Returns:
            The differences for each batch; :func:`detr_bf.export.parity_table` makes a table of them.

        Raises:
            InputError, ParityError: see :func:`detr_bf.export.export_detector`; images without references although the
                detector reads them, references that nothing reads, calibration without or beside int8.
        """
        config = self._checkpoint("exported").config
        read: Callable[[Any, str], Tensor] = partial(image_pixels, **self._limits)
        reads = self.backend.reads_references
        given, source = compared_pairs(images or (), references or (), read, reads, self.pixel_format)
        files, others = calibration_pairs(precision, calibration, calibration_references, config if reads else None)
        paired = GivenReferences(others or None, read, files)
        exported = Exported(self.model, self.class_map, self.transform, self.postprocess, self.thresholds, config)
        return export_detector(
            Path(path),
            exported,
            ExportSignature(batch, size, postprocess),
            given,
            source=source,
            license=license,
            precision=precision,
            calibration=(each[2:] for part in self._read(chunks(files, 1), paired, skip=True) for each in part),
            evaluate=evaluate,
            device=device,
        )

    def _checkpoint(self, purpose: str) -> SourceCheckpoint:
        """Return the checkpoint, or raise an InputError that names the purpose for which it is needed."""
        if self.origin is None:
            raise InputError(f"only a detector that detr_bf.load has read from a checkpoint can be {purpose}")
        return self.origin

    def references(
        self, given: ReferenceLike | None, images: object, folders: Sequence[Path] = (), *, bgr: bool = False
    ) -> GivenReferences:
        """Return the references of images, read as images are; the arguments are those of the returned class.

        Raises:
            InputError: as there; the detector reads references and none is given, or the reverse.
        """
        check_given(self.backend.reads_references, given)
        return GivenReferences(given, partial(image_pixels, bgr=bgr, **self._limits), images, folders)

    def _read(
        self,
        lists: Iterator[NumberedImages],
        references: GivenReferences = NO_REFERENCES,
        *,
        bgr: bool = False,
        skip: bool = False,
        single: bool = False,
    ) -> Iterator[list[ReadImage]]:
        """Yield the images of each list; with ``skip`` those that cannot be read are left out."""
        unreadable, count = [], 0
        for chunk in lists:
            read: list[ReadImage] = []
            for number, image in chunk:
                name = "the image" if single else f"image {number}"
                try:
                    pixels = image_pixels(image, name, bgr=bgr, **self._limits)
                    read.append(ReadImage(number, image, pixels, references(number, image, pixels, name)))
                except InputError as error:
                    if not skip:
                        raise
                    unreadable.append(printable(error, limit=1000))
            count += len(read)
            yield read
        if unreadable and not count:
            raise InputError("\n  ".join(["no image can be read:", *unreadable]))
        if unreadable:
            total, listed = len(unreadable) + count, "\n  ".join(unreadable)
            logger.warning("%d of %d %s and were left out:\n  %s", len(unreadable), total, references.unusable, listed)

    def _image_fields(self, image: ReadImage) -> dict[str, Any]:
        """Return the fields of a :class:`~detr_bf.inference.prediction.PredictedImage`."""
        given, pixels = image.given, image.pixels
        source = str(given) if isinstance(given, (str, os.PathLike)) else ""
        return {
            "class_map": self.class_map,
            "given": Path(source) if source and not is_url(source) else displayed(pixels),
            "source": source,
            "size": (pixels.shape[-2], pixels.shape[-1]),
            **self._limits,
        }

    @property
    def _limits(self) -> dict[str, Any]:
        """Return the arguments with which images are read."""
        return {"max_pixels": self.max_pixels, "pixel_format": self.pixel_format}

    def _predict(self, lists: Iterable[Sequence[ReadImage]], call: _Call) -> Iterator[Prediction]:
        """Yield the predictions of lists of images, of which each image may be divided into several samples."""
        for images in lists:
            yield from self._predictions(images, call)

    def _predictions(self, images: Sequence[ReadImage], call: _Call) -> Iterator[Prediction]:
        sizes = [(image.pixels.shape[-2], image.pixels.shape[-1]) for image in images]
        parts = [tiles_of(size, call.tile) for size in sizes]
        samples = (self._sample(image, place) for image, places in zip(images, parts, strict=True) for place in places)
        detect = partial(call.backend.compute, convert=self.postprocess, half=call.half)
        found = (
            each.above(call.least)
            for batch in iter(lambda: list(islice(samples, call.batch_size)), [])
            for each in by_size(batch, detect, together=call.backend.mixes_images)
        )
        for image, size, places in zip(images, sizes, parts, strict=True):
            joined, fields = join_tiles([(place, next(found)) for place in places], size), self._image_fields(image)
            if not (joined.boxes.isfinite().all() and joined.scores.isfinite().all()):
                raise InputError(
                    f"{printable(fields['source']) or f'image {image.number}'}: the detector's boxes or scores are not "
                    f"finite: {'give half=False' if call.half else 'take an earlier checkpoint, or train it anew'}"
                )
            yield Prediction(**vars(joined), **fields)

    def _sample(self, image: ReadImage, place: TilePlace) -> PairSample:
        """Return a part of an image, transformed, with its target and the same part of the reference, if it has one."""
        x0, y0, x1, y1 = place
        pixels, target = eval_sample(self.transform, image.pixels[:, y0:y1, x0:x1], image.number)
        if image.reference is None:
            return pixels, target
        return pixels, target, eval_sample(self.transform, image.reference[:, y0:y1, x0:x1], image.number)[0]

    def least_scores(self, threshold: float | str | None = None) -> Tensor:
        """Return the score from which the detections of each class are returned, (K,) float64 on the CPU.

        Raises:
            InputError: ``threshold`` is not a number from 0 to 1, ``"class"`` or None.
        """
        stored = self.thresholds or ScoreThresholds.same(DEFAULT_THRESHOLD, self.class_map.num_classes)
        if isinstance(threshold, str) and threshold == "class":
            return torch.tensor(stored.by_class, dtype=torch.float64)
        if threshold is None:
            threshold = stored.overall
        if isinstance(threshold, (bool, str)) or not (isinstance(threshold, numbers.Real) and 0 <= threshold <= 1):
            raise InputError(
                f"a threshold must be a number from 0 to 1, or 'class' for the stored threshold of each class; "
                f"got {printable(repr(threshold))}"
            )
        return torch.full((self.class_map.num_classes,), float(threshold), dtype=torch.float64)
