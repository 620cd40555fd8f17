"""Detections of one image with their classes, in the formats that other programs read.

Shape legend: N objects, H x W pixels of the image.
"""

from __future__ import annotations

import csv
import io
import json
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from pycocotools import mask as coco_mask
from torch import Tensor, nn
from torchvision.transforms.v2 import functional as transforms

from detr_bf.common.errors import InputError
from detr_bf.common.structures import ClassMap, Detections, PanopticMap
from detr_bf.common.text import counted, listed, printable
from detr_bf.data.images import MAX_PIXELS, RGB, PixelFormat, displayed, read_image
from detr_bf.data.masks import joined, outlines
from detr_bf.evaluation import DEFAULT_THRESHOLD
from detr_bf.evaluation.panoptic import EncodedMap, encode
from detr_bf.losses.postprocess import encoded

if TYPE_CHECKING:
    import pandas as pd
    import supervision as sv

P = TypeVar("P", bound="PredictedImage")

COLUMNS = ("file", "category_id", "name", "score", "x", "y", "width", "height")  # of a table
_MASK_SHARE = 0.45  # of the colour over a mask


_SHOWN_SIDE = 1000  # pixels of a picture in a notebook
_SHOWN_PICTURES = 12  # of a list


def summary(predictor: Any) -> str:
    """Return a few lines about a predictor: model, classes, size of the images, threshold, device and file."""
    model, origin = predictor.model, getattr(predictor, "origin", None)
    head = f"{type(predictor).__name__}: {printable(type(model).__name__)}"
    if origin is not None:
        settings = origin.config["model"]
        head = f"{type(predictor).__name__}: {printable(settings['name'])} on {printable(settings['backbone']['name'])}"
    if isinstance(model, nn.Module):
        head += f", {sum(each.numel() for each in model.parameters()):,} parameters"
    names, transform = predictor.class_map.names, predictor.transform
    size = f"resized to {printable(getattr(transform, 'size', None) or transform)}"
    if sides := getattr(transform, "short_sides", None):
        size = f"shorter side {', '.join(map(str, sides))} pixels, longer side at most {transform.max_size}"
    lines = [head, f"{counted(len(names), 'class', 'classes')}: {listed(names, 12)}", f"images: {size}"]
    if hasattr(predictor, "thresholds"):
        stored = predictor.thresholds
        score = f"{DEFAULT_THRESHOLD:.2f}, as none is stored" if stored is None else f"{stored.overall:.2f}"
        lines.append(f"threshold: {score}")
    lines.append(f"device: {predictor.device}")
    return "\n".join(lines if origin is None else [*lines, f"from: {printable(origin.source)}"])


class PictureList(list[P]):
    """List of predictions, which a notebook shows as pictures."""

    def _repr_html_(self) -> str:
        shown = []
        for each in self[:_SHOWN_PICTURES]:
            content, caption = each.encoded_plot("JPEG", _SHOWN_SIDE // 2), escape(str(each))
            source = f"data:image/jpeg;base64,{b64encode(content).decode('ascii')}" if content else ""
            picture = f'<img style="max-width: 100%" src="{source}" alt="{caption}">' if source else ""
            shown.append(f"<figure>{picture}<figcaption>{caption}</figcaption></figure>")
        more = f"<p>and {len(self) - len(shown)} more</p>" if len(self) > len(shown) else ""
        return "".join(shown) + more or "no predictions"


@dataclass(frozen=True, kw_only=True)
class PredictedImage:
    """Image that something was predicted for, with the classes of the detector.

    Args:
        class_map: classes of the detector, which contiguous labels index into.
        given: the file of the image, which is read again when it is needed, or its pixels (C, H, W).
        source: path or URL of the image; "" if it was given as pixels.
        size: height and width of the image in pixels.
        max_pixels: largest image that is read.
        pixel_format: of the image.
    """

    class_map: ClassMap = field(repr=False)
    given: Path | Tensor = field(repr=False)
    source: str
    size: tuple[int, int]
    max_pixels: int = MAX_PIXELS
    pixel_format: PixelFormat = RGB

    @property
    def image(self) -> Tensor:
        """Picture (3, H, W) uint8, see :func:`~detr_bf.data.images.displayed`.

        Raises:
            InputError: its file was removed, or replaced by an image of another size.
        """
        if isinstance(self.given, Tensor):
            return displayed(self.given)
        pixels = read_image(self.given, max_pixels=self.max_pixels, pixel_format=self.pixel_format)
        if pixels.shape[1:] != self.size:
            raise InputError(f"{self.source} has changed since it was predicted: its size is another one")
        return displayed(pixels)

    @property
    def class_indices(self) -> list[int]:
        """Contiguous index of the class of each object or segment."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.class_indices)

    @property
    def names(self) -> list[str]:
        """Name of the class of each object or segment."""
        return [self.class_map.names[index] for index in self.class_indices]

    @property
    def category_ids(self) -> list[int]:
        """Id of the class of each object or segment in the annotations of the training data."""
        return [self.class_map.category_ids[index] for index in self.class_indices]

    def plot(self, class_names: Sequence[str] | None = None) -> Image.Image:
        """Draw what was found on the image."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return what was found as plain values."""
        raise NotImplementedError

    def to_json(self) -> str:
        """Return :meth:`to_dict` as one line of JSON."""
        return json.dumps(self.to_dict())

    def _repr_png_(self) -> bytes | None:
        """Return the picture that a notebook shows."""
        return self.encoded_plot("PNG", _SHOWN_SIDE)

    def encoded_plot(self, form: str, side: int) -> bytes | None:
        """Return :meth:`plot` as PNG or JPEG, at most ``side`` pixels wide and high; None if the image is gone."""
        try:
            picture = self.plot()
        except InputError:
            return None
        picture.thumbnail((side, side))
        stream = io.BytesIO()
        picture.save(stream, form)
        return stream.getvalue()


@dataclass(frozen=True, kw_only=True)
class PanopticPrediction(PredictedImage, PanopticMap):
    """Panoptic map of one image with its classes and the image; segments have no scores."""

    def __str__(self) -> str:
        return f"{printable(self.source) or 'image'}: {', '.join(self.names) or 'nothing found'}"

    @property
    def class_indices(self) -> list[int]:
        return [segment.label for segment in self.segments]

    def bitmaps(self) -> NDArray[np.bool_]:
        """Return the masks (N, H, W) bool of the segments, which do not overlap."""
        numbers = np.array([segment.id for segment in self.segments], dtype=np.int32)
        masks: NDArray[np.bool_] = self.ids.cpu().numpy() == numbers[:, None, None]
        return masks.reshape(-1, *self.size)

    def plot(self, class_names: Sequence[str] | None = None) -> Image.Image:
        """Tint, outline and name the segments on the image; arguments as of :meth:`Prediction.plot`."""
        from detr_bf.report import class_labels, draw_panoptic  # imports matplotlib

        names = class_labels(self.class_map) if class_names is None else class_names
        drawn: Image.Image = transforms.to_pil_image(draw_panoptic(self.image, self, names))
        return drawn

    def to_dict(self) -> dict[str, Any]:
        """Return ``file`` and ``segments``: COCO's entry of each, its name, and its mask as compressed run lengths."""
        entries = self.to_coco().annotation["segments_info"]
        segments = [
            {**entry, "name": name, "segmentation": encoded(self.ids == segment.id)}
            for entry, name, segment in zip(entries, self.names, self.segments, strict=True)
        ]
        return {"file": self.source, "segments": segments}

    def to_coco(self, image_id: int | None = None) -> EncodedMap:
        """Return ``annotation``, the entry of a COCO panoptic results file, and ``png``, the bytes of its PNG file.

        The PNG, to be written under ``annotation["file_name"]``, has id = red + 256 green + 65536 blue.
        """
        number = self.image_id if image_id is None else image_id
        name = Path(self.source).stem or str(number)
        return encode(PanopticMap(number, self.ids, self.segments), self.class_map, {number: name + ".png"})


@dataclass(frozen=True, kw_only=True)
class Prediction(PredictedImage, Detections):
    """Detections of one image, best first, with their classes and the image."""

    def __str__(self) -> str:
        found = ", ".join(f"{name} {score:.2f}" for name, score in zip(self.names, self.scores.tolist(), strict=True))
        return f"{printable(self.source) or 'image'}: {found or 'nothing found'}"

    @property
    def class_indices(self) -> list[int]:
        return list(self.labels.tolist())

    def bitmaps(self) -> NDArray[np.bool_] | None:
        """Return the masks (N, H, W) bool; None for a detector without mask head."""
        if self.masks is None:
            return None
        bitmaps = np.empty((len(self.masks), *self.size), dtype=bool)
        for bitmap, each in zip(bitmaps, self.masks, strict=True):
            bitmap[:] = coco_mask.decode(dict(each))
        return bitmaps

    def polygons(self) -> list[list[list[float]]] | None:
        """Return the outlines of each mask as polygons x1, y1, x2, y2, ... in pixels; None without a mask head.

        A mask has a polygon for each connected region, the largest first; holes are filled.
        """
        if self.masks is None:
            return None
        return [outlines(coco_mask.decode(dict(each)).astype(bool)) for each in self.masks]

    def plot(self, class_names: Sequence[str] | None = None) -> Image.Image:
        """Draw boxes, classes, scores and masks on the image; a small image is enlarged.

        Args:
            class_names: drawn name of each class, by default those of :func:`detr_bf.report.class_labels`.
        """
        from detr_bf.report import class_labels, draw_boxes  # imports matplotlib
        from detr_bf.report.drawing import class_colour

        image = self.image.permute(1, 2, 0).numpy().copy()
        for mask, label in reversed(list(zip(self.masks or (), self.labels.tolist(), strict=self.masks is not None))):
            bitmap = coco_mask.decode(dict(mask)).astype(bool)
            image[bitmap] = (1 - _MASK_SHARE) * image[bitmap] + _MASK_SHARE * np.array(class_colour(label))
        picture = torch.from_numpy(image).permute(2, 0, 1)
        names = class_labels(self.class_map) if class_names is None else class_names
        drawn: Image.Image = transforms.to_pil_image(draw_boxes(picture, self.boxes, self.labels, names, self.scores))
        return drawn

    def crop(self) -> list[Image.Image]:
        """Cut out each object with whole pixels around its box, at least one pixel."""
        image, (height, width) = transforms.to_pil_image(self.image), self.size
        crops = []
        for x0, y0, x1, y1 in self.boxes.tolist():
            left, top = min(max(int(x0), 0), width - 1), min(max(int(y0), 0), height - 1)
            right, bottom = max(min(-int(-x1 // 1), width), left + 1), max(min(-int(-y1 // 1), height), top + 1)
            crops.append(image.crop((left, top, right, bottom)))
        return crops

    def to_dict(self) -> dict[str, Any]:
        """Return ``file`` and ``objects``: category id, name, score, ``bbox`` and, with a mask head, ``segmentation``.

        Boxes are x, y, width, height in pixels; masks are COCO's compressed run lengths.
        """
        objects: list[dict[str, Any]] = []
        for number, (_, category_id, name, score, *box) in enumerate(self.rows()):
            found = {"category_id": category_id, "name": name, "score": score, "bbox": box}
            objects.append(found if self.masks is None else {**found, "segmentation": self.masks[number]})
        return {"file": self.source, "objects": objects}

    def to_coco(self, image_id: int | None = None) -> list[dict[str, Any]]:
        """Return the entries of a COCO results file, by default with the ``image_id`` of the prediction."""
        number = self.image_id if image_id is None else image_id
        return [
            {"image_id": number, **{key: value for key, value in each.items() if key != "name"}}
            for each in self.to_dict()["objects"]
        ]

    def to_yolo(self, scores: bool = False) -> str:
        """Return a YOLO label file: class index, centre, width and height in fractions of the image.

        Boxes are cut at the border of the image, and objects outside it are left out. With a mask head the class index
        is followed by the polygon of the mask, see :meth:`polygons`; its regions are joined by lines without width, and
        objects whose mask has no pixel are left out.

        Args:
            scores: add the score as the last column. Programs that read labels take such a line for a polygon.
        """
        (height, width), lines = self.size, []
        corners = (self.boxes.double() / torch.tensor([width, height, width, height])).clamp(0, 1)
        boxes = [
            [(x0 + x1) / 2, (y0 + y1) / 2, x1 - x0, y1 - y0] if x1 > x0 and y1 > y0 else []
            for x0, y0, x1, y1 in corners.tolist()
        ]
        if (polygons := self.polygons()) is not None:
            sides = np.array([width, height])
            boxes = [(np.reshape(joined(each), (-1, 2)) / sides).ravel().tolist() if each else [] for each in polygons]
        for label, score, values in zip(self.labels.tolist(), self.scores.tolist(), boxes, strict=True):
            if values:
                numbers = [*values, score] if scores else values
                lines.append(" ".join([str(label), *(f"{value:.6f}" for value in numbers)]))
        return "".join(f"{line}\n" for line in lines)

    def to_labelme(self, image_path: str = "") -> dict[str, Any]:
        """Return the content of a JSON file of labelme: rectangles, or with a mask head polygons.

        The polygons of an object have one ``group_id``. ``description`` is the score. Objects whose mask has no pixel
        are left out.

        Args:
            image_path: the image, relative to the folder of the JSON file; by default its file name.
        """
        polygons, shapes = self.polygons(), list[dict[str, Any]]()
        for number, (name, score, box) in enumerate(
            zip(self.names, self.scores.tolist(), self.boxes.tolist(), strict=True)
        ):
            found = [box] if polygons is None else polygons[number]
            common = {"label": name, "group_id": number + 1 if len(found) > 1 else None, "description": f"{score:.3f}"}
            kind = "rectangle" if polygons is None else "polygon"
            shapes += [
                {**common, "points": np.reshape(each, (-1, 2)).tolist(), "shape_type": kind, "flags": {}}
                for each in found
            ]
        height, width = self.size
        return {
            "version": "5.0.0",
            "flags": {},
            "shapes": shapes,
            "imagePath": image_path or Path(self.source).name,
            "imageData": None,
            "imageHeight": height,
            "imageWidth": width,
        }

    def rows(self) -> list[tuple[Any, ...]]:
        """Return the table of the objects, with the columns :data:`COLUMNS`."""
        places = zip(self.category_ids, self.names, self.scores.tolist(), self.boxes.tolist(), strict=True)
        return [
            (self.source, number, name, score, x0, y0, x1 - x0, y1 - y0)
            for number, name, score, (x0, y0, x1, y1) in places
        ]

    def to_csv(self, header: bool = True) -> str:
        """Return the table of the objects as CSV (RFC 4180, lines end in a line feed)."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if header:
            writer.writerow(COLUMNS)
        writer.writerows(self.rows())
        return text.getvalue()

    def to_pandas(self) -> pd.DataFrame:
        """Return the table of the objects as a data frame (InputError: pandas is not installed)."""
        try:
            import pandas as pd
        except ImportError as error:
            raise InputError("to_pandas needs the package pandas: pip install pandas") from error
        return pd.DataFrame(self.rows(), columns=list(COLUMNS))

    def to_supervision(self) -> sv.Detections:
        """Return a ``supervision.Detections``, with the names in ``data["class_name"]``.

        Raises:
            InputError: supervision is not installed.
        """
        try:
            import supervision as sv
        except ImportError as error:
            raise InputError("to_supervision needs the package supervision: pip install supervision") from error
        return sv.Detections(
            xyxy=self.boxes.cpu().numpy().astype(np.float32).reshape(-1, 4),
            confidence=self.scores.cpu().numpy(),
            class_id=self.labels.cpu().numpy().astype(int),
            mask=self.bitmaps(),
            data={"class_name": np.array(self.names, dtype=str)},
        )


@dataclass(frozen=True, kw_only=True)
class FramePrediction(Prediction):
    """Detections of one frame of a video."""

    frame: int  # number, from 0; also the ``image_id``
    seconds: float  # presentation time in the video

    def __str__(self) -> str:
        return f"frame {self.frame}, {self.seconds:.2f} s of {super().__str__()}"

    def to_dict(self) -> dict[str, Any]:
        """Return ``file``, ``frame``, ``seconds`` and ``objects``, see :meth:`Prediction.to_dict`."""
        content = super().to_dict()
        return {"file": content["file"], "frame": self.frame, "seconds": self.seconds, "objects": content["objects"]}
