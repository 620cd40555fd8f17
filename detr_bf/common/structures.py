"""Frozen dataclasses passed between packages.

Shape legend: B images, R rows (num_streams x B), L decoder layers, Q queries, K class logits, T objects of one image,
S tokens, C channels, H x W pixels of the padded batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from detr_bf.common.errors import InputError
from detr_bf.common.masks import Masks, ObjectMasks, ProductMasks
from detr_bf.common.text import printable

D = TypeVar("D", bound="Detections")


@dataclass(frozen=True)
class ClassMap:
    """Map between contiguous class indices and the category ids and names of the annotation file.

    Index i of the model's logits means ``category_ids[i]``; ids may be sparse, 1-based and in any order. ``names`` are
    cleaned on construction (:func:`detr_bf.common.text.printable`): one line of at most 200 characters without control
    characters, lone surrogates and surrounding blanks, so that they can be drawn, printed and written as UTF-8. A class
    without a name is named by its id. Classes are matched by id alone; the names of two class maps can be compared,
    because both are cleaned.
    """

    category_ids: tuple[int, ...]
    names: tuple[str, ...]
    is_thing: tuple[bool, ...] = ()  # True = countable objects; all True by default

    def __post_init__(self) -> None:
        pairs = zip(self.names, self.category_ids, strict=True)
        names = tuple(printable(str(name).strip()) or str(number) for name, number in pairs)
        object.__setattr__(self, "names", names)
        if not self.is_thing:
            object.__setattr__(self, "is_thing", (True,) * len(self.category_ids))

    @classmethod
    def from_categories(cls, categories: Sequence[Mapping[str, Any]]) -> ClassMap:
        """Read the ``categories`` list of a COCO file, sorted by id; ``isthing`` 0 is stuff, 1 or absent a thing."""
        ordered = sorted(categories, key=lambda category: int(category["id"]))
        return cls(
            tuple(int(c["id"]) for c in ordered),
            tuple("" if c.get("name") is None else str(c["name"]) for c in ordered),
            tuple(bool(c.get("isthing", True)) for c in ordered),
        )

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> ClassMap:
        """Inverse of :meth:`to_dict`."""
        return cls(tuple(state["category_ids"]), tuple(state["names"]), tuple(state.get("is_thing", ())))

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists, for checkpoints and JSON."""
        return {"category_ids": list(self.category_ids), "names": list(self.names), "is_thing": list(self.is_thing)}

    @property
    def num_classes(self) -> int:
        return len(self.category_ids)

    @cached_property
    def distinct_names(self) -> tuple[str, ...]:
        """Names of the classes; a name shared by several categories is followed by its id."""
        names = self.names
        for _ in names:  # repeat until all differ: "cat (3)" may be the name of another class
            count = Counter(names)
            if len(count) == len(names):
                break
            pairs = zip(names, self.category_ids, strict=True)
            names = tuple(name if count[name] == 1 else f"{name} ({category_id})" for name, category_id in pairs)
        return names

    @cached_property
    def index(self) -> dict[int, int]:
        """Category id -> contiguous index."""
        return {category_id: index for index, category_id in enumerate(self.category_ids)}


@dataclass(frozen=True)
class Target:
    """Ground truth of one image for the losses, without crowds."""

    image_id: int
    boxes: Tensor  # (T, 4) float32, centre x, centre y, width, height, in fractions of the unpadded image
    labels: Tensor  # (T,) int64, contiguous class indices
    size: tuple[int, int]  # height, width in pixels after the transforms, before padding
    original_size: tuple[int, int]  # height, width in pixels of the file (EXIF rotation applied)
    file_name: str = ""  # printable
    masks: Tensor | None = None  # (T, h, w) bool at `size`; None: not loaded
    replaced: str = ""  # if this image replaces an unreadable one: why that could not be read

    @classmethod
    def without_objects(cls, device: torch.device | str = "cpu") -> Target:
        """Return the target of an image of one pixel without objects."""
        labels = torch.zeros(0, dtype=torch.int64, device=device)
        return cls(0, torch.zeros(0, 4, device=device), labels, (1, 1), (1, 1))

    def copied(self, copy: Callable[[Tensor], Tensor]) -> Target:
        """Return the target with ``copy`` of its tensors."""
        masks = None if self.masks is None else copy(self.masks)
        return replace(self, boxes=copy(self.boxes), labels=copy(self.labels), masks=masks)

    def fits(self, padded: tuple[int, int], num_classes: int) -> bool:
        """Return True if the tensors have their documented shapes and types, within images of ``padded`` size."""
        count, (height, width) = len(self.boxes), self.size
        return (
            is_dense(self.boxes, (count, 4), torch.float32)
            and are_labels(self.labels, (count,), num_classes)
            and 0 < height <= padded[0]
            and 0 < width <= padded[1]
            and (self.masks is None or is_dense(self.masks, (count, height, width), torch.bool))
        )


@dataclass(frozen=True)
class PaddedTargets:
    """Objects of R rows, padded to one tensor; T is the number of objects of the row with most of them."""

    labels: Tensor  # (R, T) int64, 0 where there is no object
    boxes: Tensor  # (R, T, 4) float, 0 where there is no object
    counts: tuple[int, ...]  # objects of each row
    masks: ObjectMasks | None = None  # of the images, for a mask head whose losses are those of points

    @classmethod
    def of(cls, targets: Sequence[Target], num_streams: int = 1) -> PaddedTargets:
        """Pad the targets of B images and repeat them for every stream: R = num_streams x B."""
        labels = pad_sequence([target.labels for target in targets], batch_first=True)
        boxes = pad_sequence([target.boxes for target in targets], batch_first=True)
        counts = tuple(len(target.labels) for target in targets)
        return cls(labels.repeat(num_streams, 1), boxes.repeat(num_streams, 1, 1), counts * num_streams)

    @property
    def exists(self) -> Tensor:
        """(R, T) bool on the CPU, False in the padding."""
        counts = torch.tensor(self.counts, device="cpu")
        return torch.arange(self.labels.shape[1], device=counts.device) < counts[:, None]

    def repeated(self, count: int) -> PaddedTargets:
        """Repeat each row ``count`` times, next to itself."""
        counts = tuple(number for number in self.counts for _ in range(count))
        labels, boxes = (x.repeat_interleave(count, 0) for x in (self.labels, self.boxes))
        return replace(self, labels=labels, boxes=boxes, counts=counts)

    def of_one_class(self) -> PaddedTargets:
        """Set all labels to 0, the class of proposals."""
        return replace(self, labels=torch.zeros_like(self.labels))


def is_dense(value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Return True for a dense tensor of that shape and type with values."""
    return (
        isinstance(value, Tensor)
        and not (value.is_nested or value.is_meta)
        and value.layout == torch.strided
        and (value.shape, value.dtype) == (shape, dtype)
    )


def are_labels(value: Any, shape: tuple[int, ...], num_classes: int) -> bool:
    """Return True for an int64 tensor of that shape whose values are class indices."""
    return is_dense(value, shape, torch.int64) and bool(((value >= 0) & (value < num_classes)).all())


def padding_mask(
    sizes: Sequence[tuple[int, int]], padded: tuple[int, int], device: torch.device | str = "cpu"
) -> Tensor:
    """Return the padding mask (B, H, W) bool, True = padding, of B images in a batch of ``padded`` size.

    Sizes are height and width in pixels; images lie in the upper left corner.
    """
    mask = torch.ones(len(sizes), *padded, dtype=torch.bool, device=device)
    for row, (height, width) in zip(mask, sizes, strict=True):
        row[:height, :width] = False
    return mask


def resize_mask(padding_mask: Tensor, size: Sequence[int]) -> Tensor:
    """Resize a mask (B, H, W) bool to (B, h, w); each cell takes the value of its nearest pixel.

    The same pixels as those of ``F.interpolate(mode="nearest")``, which other runtimes round in other ways.
    """
    rows, columns = (
        (torch.arange(count, dtype=torch.float32, device=padding_mask.device) * (length / count)).long()
        for count, length in zip(size, padding_mask.shape[1:], strict=True)
    )
    return padding_mask[:, rows][:, :, columns]


@dataclass(frozen=True)
class Batch:
    """Images padded at the right and at the bottom to one size, and the reference image of each, if there are any."""

    images: Tensor  # (B, C, H, W) uint8, or float32 from 0 to 255; C is 3 except with other data.channels
    padding_mask: Tensor  # (B, H, W) bool, True = padding
    targets: tuple[Target, ...] = ()
    references: Tensor | None = None  # likewise, each of the size of its image; None: no image has one
    has_reference: Tensor | None = None  # (B,) bool; None: every image has one, or no references are read

    def __len__(self) -> int:
        return len(self.images)

    @property
    def replaced(self) -> tuple[str, ...]:
        """One message for each unreadable image that another image replaces."""
        return tuple(target.replaced for target in self.targets if target.replaced)

    @property
    def inputs(self) -> Batch:
        """Argument of the model."""
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """File names of the images, for messages."""
        return tuple(target.file_name for target in self.targets)

    @property
    def references_or_images(self) -> Tensor:
        """References (B, C, H, W); an image without one is its own."""
        if self.references is None or self.has_reference is None:
            return self.images if self.references is None else self.references
        return torch.where(self.has_reference[:, None, None, None], self.references, self.images)

    def not_finite(self) -> list[str]:
        """Return the names of the images whose boxes hold infinity or NaN."""
        return [target.file_name for target in self.targets if not target.boxes.isfinite().all()]

    @classmethod
    def collate(cls, samples: Sequence[tuple[Tensor, Target] | tuple[Tensor, Target, Tensor | None]]) -> Batch:
        """Pad ``(C, h, w)`` images, with or without references, to the largest height and width among them."""
        if not samples:
            raise InputError("a batch needs at least one image, got none")
        images, targets = [sample[0] for sample in samples], tuple(sample[1] for sample in samples)
        references = [sample[2] if len(sample) == 3 else None for sample in samples]
        sizes = [(image.shape[-2], image.shape[-1]) for image in images]
        height, width = (max(sides) for sides in zip(*sizes, strict=True))
        batch = cls(_padded(images, height, width), padding_mask(sizes, (height, width)), targets)
        present = [reference is not None for reference in references]
        if not any(present):
            read = any(len(sample) == 3 for sample in samples)
            return replace(batch, has_reference=torch.tensor(present)) if read else batch
        stacked = _padded([images[0][:, :0, :0] if each is None else each for each in references], height, width)
        return replace(batch, references=stacked, has_reference=None if all(present) else torch.tensor(present))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        return self._copied(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Copy all tensors to pinned memory; called by the DataLoader."""
        return self._copied(Tensor.pin_memory)

    def _copied(self, copy: Callable[[Tensor], Tensor]) -> Batch:
        targets = tuple(target.copied(copy) for target in self.targets)
        references, present = (None if each is None else copy(each) for each in (self.references, self.has_reference))
        return Batch(copy(self.images), copy(self.padding_mask), targets, references, present)

    def to_dict(self) -> dict[str, Any]:
        """Return tensors and plain values, for a capture of the step."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Batch:
        """Inverse of :meth:`to_dict`; file names are made printable. Check the result with :meth:`fits`."""
        targets = (Target(**{**target, "file_name": printable(target["file_name"])}) for target in content["targets"])
        return cls(**{**content, "targets": tuple(targets)})

    def fits(self, num_classes: int) -> bool:
        """Return True if the tensors have their documented shapes and types, and labels are below ``num_classes``."""
        rows, channels, height, width = self.images.shape
        kind = torch.float32 if self.images.is_floating_point() else torch.uint8
        return (
            is_dense(self.images, (rows, channels, height, width), kind)
            and is_dense(self.padding_mask, (rows, height, width), torch.bool)
            and len(self.targets) == rows
            and all(target.fits((height, width), num_classes) for target in self.targets)
            and (self.references is None or is_dense(self.references, (rows, channels, height, width), kind))
            and (self.has_reference is None or is_dense(self.has_reference, (rows,), torch.bool))
        )


def _padded(images: Sequence[Tensor], height: int, width: int) -> Tensor:
    """Return images (C, h, w) of one type as (B, C, H, W), each in the upper left corner."""
    padded = torch.zeros(len(images), len(images[0]), height, width, dtype=images[0].dtype)
    for row, image in zip(padded, images, strict=True):
        row[:, : image.shape[-2], : image.shape[-1]] = image
    return padded


@dataclass(frozen=True)
class FeatureMap:
    """One backbone level; with batch attention in the backbone it may have two streams, the clean one first."""

    tensor: Tensor  # (R, C, h, w)
    padding_mask: Tensor  # (R, h, w) bool, True = padding
    num_streams: int = 1

    def streams(self) -> tuple[FeatureMap, ...]:
        """Return a map of B rows for each stream."""
        if self.num_streams == 1:
            return (self,)
        parts = (each.chunk(self.num_streams) for each in (self.tensor, self.padding_mask))
        return tuple(FeatureMap(tensor, mask) for tensor, mask in zip(*parts, strict=True))


@dataclass(frozen=True)
class TokenBatch:
    """Tokens of an encoder layer, with all tensors that must keep the same number of rows.

    ``tokens`` is (R, S, C) with R = num_streams x B, clean stream first. ``per_sample`` holds tensors with one entry
    per row (``padding_mask`` (R, S), ``position`` (R, S, C), ...), ``static`` values shared by all
    rows (``spatial_shapes``). Within an encoder with batch attention to references, the last ``references`` of the rows
    are those of the reference images, which have one stream; ``per_sample`` then holds ``missing`` (R,) bool, True for
    the row of a reference that does not exist.
    """

    tokens: Tensor
    per_sample: Mapping[str, Tensor] = field(default_factory=dict)
    static: Mapping[str, Any] = field(default_factory=dict)
    num_streams: int = 1
    references: int = 0  # rows of reference images, B or 0

    @property
    def num_images(self) -> int:
        """Number of images B, without references."""
        return (self.tokens.shape[0] - self.references) // self.num_streams  # len() would fix it in an exported graph

    def with_tokens(self, tokens: Tensor) -> TokenBatch:
        """Replace the tokens; the rows stay the same."""
        return replace(self, tokens=tokens)

    def fork(self, second_stream: Tensor) -> TokenBatch:
        """Append a second stream (B, S, C), with references (2B, S, C); per-sample tensors of images are repeated."""
        assert self.num_streams == 1, "a batch forks once"
        images = self.num_images
        return replace(
            self,
            tokens=torch.cat([self.tokens[:images], second_stream]),
            per_sample={name: torch.cat([value[:images], value]) for name, value in self.per_sample.items()},
            num_streams=2,
        )

    def with_references(self, has_reference: Tensor | None) -> TokenBatch:
        """Declare the second half of the rows to be references; ``has_reference`` (B,) bool, None: all exist."""
        images = self.tokens.shape[0] // 2
        if has_reference is None:
            return replace(self, references=images)
        missing = torch.cat([torch.zeros_like(has_reference), ~has_reference])
        return replace(self, references=images, per_sample={**self.per_sample, "missing": missing})

    def without_references(self) -> TokenBatch:
        """Return the rows of the images."""
        rows = self.tokens.shape[0] - self.references
        per_sample = {name: value[:rows] for name, value in self.per_sample.items() if name != "missing"}
        return replace(self, tokens=self.tokens[:rows], per_sample=per_sample, references=0)


GROUP = "group"  # name of the further groups of Group DETR


@dataclass(frozen=True)
class QueryGroup:
    """Consecutive queries of a training step with their own assignment to the objects and their own loss terms.

    A group consists of ``parts`` of equal size, which do not attend to each other.
    """

    name: str  # end of the names of its loss terms; must not contain digits: `_0`, `_1` number the decoder layers
    size: int  # queries, possibly none
    assigned: Tensor | None = None  # (R, size) int64 on the CPU: object, -1 none, -2 not supervised; None: matched
    parts: int = 1  # of equal size; matched separately
    repeats: int = 1  # number of queries of one part that each object is matched with
    weight: float = 1.0  # of its loss terms, in relation to those of the main queries


@dataclass(frozen=True)
class Queries:
    """Queries of a decoder layer: their content and their position.

    The main queries, which alone exist in evaluation, come first; the queries of the groups follow in their order.
    """

    content: Tensor  # (R, Q, C)
    position: Tensor  # (R, Q, C), added to the content for attention
    reference: Tensor | None = None  # (R, Q, 2 or 4) points or boxes in fractions of the unpadded image
    modulation: Tensor | None = None  # (R, Q, C), position query of the cross-attention (Conditional DETR)
    proposals: Outputs | None = None  # the encoder's own predictions the queries were chosen from (two-stage)
    blocked: Tensor | None = None  # (Q, Q) bool, True = the query (row) does not attend to the query (column)
    groups: tuple[QueryGroup, ...] = ()  # of further queries, in training

    def fork(self, second_stream: Tensor) -> Queries:
        """Append a second stream with the content (B, Q, C); all else, groups and proposals included, is repeated."""
        parts = {name: getattr(self, name) for name in ("position", "reference", "modulation")}
        return replace(
            self,
            content=torch.cat([self.content, second_stream]),
            proposals=self.proposals and _twice(self.proposals),
            groups=tuple(
                group if group.assigned is None else replace(group, assigned=group.assigned.repeat(2, 1))
                for group in self.groups
            ),
            **{name: torch.cat([part, part]) for name, part in parts.items() if part is not None},
        )


def _twice(proposals: Outputs) -> Outputs:
    """Repeat the predictions of one stream for a second one."""
    logits, boxes = (torch.cat([each, each], 1) for each in (proposals.logits, proposals.boxes))
    groups = tuple((group, _twice(predicted)) for group, predicted in proposals.groups)
    states = tuple(torch.cat([each, each]) for each in proposals.states)
    return replace(proposals, logits=logits, boxes=boxes, num_streams=2, groups=groups, states=states)


@dataclass(frozen=True)
class Distributions:
    """Predicted distributions of the distances of the sides of boxes from those of a first box (D-FINE).

    Distances are outwards, in units of the width or height of the first box.
    """

    logits: Tensor  # (L, R, Q, 4, N) of the bins, for left, top, right and bottom side, all decoder layers stacked
    boxes: Tensor  # (R, Q, 4) first boxes, cx, cy, w, h, without gradient
    distances: Tensor  # (N,) of the bins, ascending


@dataclass(frozen=True)
class Outputs:
    """Predictions of a detector, all decoder layers stacked, the last layer last.

    Without auxiliary outputs L = 1. Rows hold ``num_streams`` streams of B images, clean stream first.
    """

    logits: Tensor  # (L, R, Q, K)
    boxes: Tensor  # (L, R, Q, 4) float, centre x, centre y, width, height in fractions of the unpadded image
    num_streams: int = 1
    proposals: Outputs | None = None  # of the encoder of a two-stage detector: one layer
    one_class: bool = False  # class 0 means any object (proposals)
    states: tuple[Tensor, ...] = ()  # (R, Q, C) each, inputs of the heads of all L layers; D-FINE: of the last alone
    masks: Masks | ProductMasks | None = None  # of the last layer; None without mask head
    layer_masks: tuple[ProductMasks, ...] = ()  # of all L layers, of a mask head that is trained in each (RF-DETR)
    # Further queries of a training step, all decoder layers; further predictions of queries (D-FINE's first boxes)
    groups: tuple[tuple[QueryGroup, Outputs], ...] = ()
    distributions: Distributions | None = None  # of the sides of the boxes (D-FINE)


@dataclass(frozen=True)
class Detections:
    """Scored boxes of one image in pixels of the original file."""

    image_id: int
    boxes: Tensor  # (N, 4) float32, x0, y0, x1, y1 in pixels
    scores: Tensor  # (N,) float32 in [0, 1]
    labels: Tensor  # (N,) int64, contiguous class indices
    masks: tuple[Mapping[str, Any], ...] | None = None  # N masks of the original file as COCO's compressed RLE

    def above(self: D, least: Tensor) -> D:
        """Return the detections whose scores reach the least score of their class, (K,); NaN is kept."""
        keep = ~(self.scores.cpu().double() < least[self.labels.cpu()])
        masks = self.masks and tuple(mask for mask, kept in zip(self.masks, keep, strict=True) if kept)
        boxes, scores, labels = (x[keep.to(x.device)] for x in (self.boxes, self.scores, self.labels))
        return replace(self, boxes=boxes, scores=scores, labels=labels, masks=masks)


@dataclass(frozen=True)
class Segment:
    """One region of a panoptic map."""

    id: int  # 1 or more, in the map
    label: int  # contiguous class index
    area: int  # pixels of the map
    is_crowd: bool = False  # of ground truth only


@dataclass(frozen=True)
class PanopticMap:
    """One image divided into segments that do not overlap."""

    image_id: int
    ids: Tensor  # (H, W) int32 at the size of the original file, 0 = no segment
    segments: tuple[Segment, ...]
