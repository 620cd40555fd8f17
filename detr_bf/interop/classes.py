"""Convert class heads and labels: between COCO's category ids and contiguous classes, and between data sets by name.

The authors' heads have a row for every id: 91 for boxes (ids 0 to 90), 250 for panoptic maps (ids 0 to 249), including
unused ids; with cross-entropy a last row is added for no object. Contiguous heads have a row for each of the 80
classes, or 133 with stuff, sorted by id, and the same last row. Weights are under our names.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from detr_bf.common.errors import InputError
from detr_bf.common.structures import ClassMap
from detr_bf.common.text import listed

logger = logging.getLogger(__name__)

NUMBERINGS = ("contiguous", "ids")
THING_IDS = tuple(i for i in range(1, 91) if i not in (12, 26, 29, 30, 45, 66, 68, 69, 71, 83))
STUFF_IDS = (
    *(92, 93, 95, 100, 107, 109, 112, 118, 119, 122, 125, 128, 130, 133, 138, 141, 144, 145, 147, 148, 149, 151),
    *(154, 155, 156, 159, 161, 166, 168, 171, 175, 176, 177, 178, 180, 181, *range(184, 201)),
)
_STUFF_NAMES = (  # of COCO's panoptic_coco_categories.json
    *("banner", "blanket", "bridge", "cardboard", "counter", "curtain", "door-stuff", "floor-wood", "flower"),
    *("fruit", "gravel", "house", "light", "mirror-stuff", "net", "pillow", "platform", "playingfield"),
    *("railroad", "river", "road", "roof", "sand", "sea", "shelf", "snow", "stairs", "tent", "towel"),
    *("wall-brick", "wall-stone", "wall-tile", "wall-wood", "water-other", "window-blind", "window-other"),
    *("tree-merged", "fence-merged", "ceiling-merged", "sky-other-merged", "cabinet-merged", "table-merged"),
    *("floor-other-merged", "pavement-merged", "mountain-merged", "grass-merged", "dirt-merged"),
    *("paper-merged", "food-other-merged", "building-other-merged", "rock-merged", "wall-other-merged"),
    "rug-merged",
)
COCO_IDS = (THING_IDS, (*THING_IDS, *STUFF_IDS))  # contiguous classes in order: boxes, panoptic maps
NEVER = -100.0  # bias of unused ids
_HEAD = re.compile(r"decoder\.(?:heads\.classes\.\d+|queries\.(?:parts\.\d+\.)?class_head)\.(?:weight|bias)")
_PROPOSALS = "decoder.queries.class_head."
_ONE_CLASS = "decoder.queries.embed.weight"  # only in proposals of which class 0 means any object
_LABELS = "decoder.queries.labels.weight"  # a row for each class, with rows of no object, and a last row for no label


@dataclass(frozen=True)
class _Table:
    """Rows of a head with ids that belong to the rows of a contiguous head."""

    count: int  # rows with ids
    rows: tuple[int, ...]  # row for each contiguous class

    def contiguous(self, head: Tensor, rows: tuple[int, ...]) -> Tensor:
        return head[torch.tensor(rows)]

    def by_id(self, head: Tensor, rows: tuple[int, ...]) -> Tensor:
        """Expand a contiguous head; unused ids get zero weights and the bias ``NEVER``."""
        whole = head.new_full((self.count, *head.shape[1:]), NEVER if head.dim() == 1 else 0.0)
        whole[torch.tensor(rows)] = head
        return whole


_TABLES = tuple(
    _Table(count + no_object, (*ids, *[count] * no_object))
    for ids, count in zip(COCO_IDS, (91, 250), strict=True)
    for no_object in (0, 1)
)
_BY_COUNT = {
    "contiguous": {table.count: table for table in _TABLES},
    "ids": {len(table.rows): table for table in _TABLES},
}


def coco_classes(*, stuff: bool = False) -> ClassMap:
    """Return the 80 classes of COCO's boxes, or with ``stuff`` the 133 of its panoptic maps."""
    from torchvision.models.detection import FasterRCNN_ResNet50_FPN_Weights  # its list of names by id

    by_id = FasterRCNN_ResNet50_FPN_Weights.COCO_V1.meta["categories"]
    names = tuple(by_id[number] for number in THING_IDS)
    if not stuff:
        return ClassMap(THING_IDS, names)
    is_thing = (True,) * len(THING_IDS) + (False,) * len(STUFF_IDS)
    return ClassMap((*THING_IDS, *STUFF_IDS), (*names, *_STUFF_NAMES), is_thing)


def class_rows(weights: Mapping[str, Tensor]) -> int:
    """Return the number of rows of the class heads (InputError: no class head, or class heads of different size)."""
    found = sorted({len(tensor) for name, tensor in weights.items() if _HEAD.fullmatch(name)})
    if len(found) != 1:
        said = f"class heads of {found} rows, expected one size" if found else "no class head, expected a detector"
        raise InputError(f"the weights hold {said}: use the weights of one whole detector under our names")
    return found[0]


def renumbered(weights: Mapping[str, Tensor], numbering: str) -> dict[str, Tensor]:
    """Return the weights with all class heads and the embedding of noised labels converted to ``numbering``.

    Two-stage proposals of Deformable DETR and H-DETR keep row 0, which means any object in both numberings; those of
    DINO and RT-DETR have classes. The last label, which means none, stays the last. Converting from contiguous classes
    to ids and back is exact.

    Args:
        weights: weights of a detector on COCO, under our names.
        numbering: ``contiguous``: 91, 92, 250 or 251 rows become 80, 81, 133 or 134. ``ids``: the inverse; unused ids
            get zero weights and the bias ``NEVER``, so that they are never predicted.

    Raises:
        InputError: unknown numbering, or heads or labels with another number of rows.
    """
    if numbering not in NUMBERINGS:
        raise InputError(f"no numbering '{numbering}' of classes: expected {' or '.join(NUMBERINGS)}")
    rows, known = class_rows(weights), _BY_COUNT[numbering]
    if rows not in known:
        other = rows in {count for counts in _BY_COUNT.values() for count in counts}
        said = f"have the numbering '{numbering}' already" if other else "have neither numbering of COCO's classes"
        raise InputError(
            f"class heads of {rows} rows {said}; '{numbering}' is made from {', '.join(map(str, sorted(known)))} rows"
        )
    table = known[rows]
    convert = table.contiguous if numbering == "contiguous" else table.by_id
    any_object = _PROPOSALS if _ONE_CLASS in weights else None
    changed = {
        name: convert(tensor, (0, *table.rows[1:]) if any_object and name.startswith(any_object) else table.rows)
        for name, tensor in weights.items()
        if _HEAD.fullmatch(name)
    }
    if _LABELS in weights:
        labels = weights[_LABELS]
        if len(labels) != rows + 1:
            raise InputError(f"{_LABELS} has {len(labels)} rows, expected one more than the {rows} of the class heads")
        changed[_LABELS] = torch.cat([convert(labels[:-1], table.rows), labels[-1:]])
    return {name: changed.get(name, tensor) for name, tensor in weights.items()}


def with_coco_classes(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], ClassMap]:
    """Return the weights of a detector on COCO with contiguous classes, and these classes.

    They are the 80 of boxes or the 133 of panoptic maps, by the number of rows of the class heads.

    Raises:
        InputError: the heads have another number of rows.
    """
    if class_rows(weights) not in _BY_COUNT["ids"]:
        weights = renumbered(weights, "contiguous")
    return dict(weights), coco_classes(stuff=class_rows(weights) >= len(THING_IDS + STUFF_IDS))


def rows_by_name(
    weights: Mapping[str, Tensor],
    own: Mapping[str, Tensor],
    tensors: Collection[str],
    before: ClassMap,
    after: ClassMap,
) -> tuple[dict[str, Tensor], str]:
    """Return the weights with the rows of the classes ``after``, and a text about them; empty if they have no such row.

    Rows are matched by class name. Classes that are not in ``before`` have the rows of ``own``; rows after those of the
    classes, such as no object, are the last ones of the weights. Tensors with another number of such rows, those of
    another classification loss, are left out. Proposals whose class 0 means any object keep row 0.

    Args:
        weights: under our names, of the classes ``before``.
        tensors: names of those with a row for each class.
    """
    rows = {name: index for index, name in enumerate(before.distinct_names)}
    found = [(index, rows[name]) for index, name in enumerate(after.distinct_names) if name in rows]
    result, unfit = dict(weights), []
    shared = [name for name in tensors if name in weights and name in own]
    for name in shared:
        old, new = weights[name], own[name].detach().clone()
        more = len(new) - after.num_classes
        if len(old) - before.num_classes != more or old.shape[1:] != new.shape[1:]:
            unfit.append(name)
            del result[name]
            continue
        one_class = name.startswith(_PROPOSALS) and _ONE_CLASS in weights
        for target, source in [(0, 0)] if one_class else found:
            new[target] = old[source]
        new[after.num_classes :] = old[before.num_classes :]
        result[name] = new
    if not shared:
        return result, ""
    new_names = [name for name in after.distinct_names if name not in rows]
    kept = [name for name in after.distinct_names if name in rows]
    text = f"{len(found)} of {after.num_classes} classes by name"
    text += f" ({listed(kept)})" if kept and new_names else ""
    text += f", {len(new_names)} new"
    text += f": {listed(new_names)}" if new_names else ""
    return result, text + (f"; of another classification loss and not loaded: {listed(unfit)}" if unfit else "")


def with_own_labels(weights: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Return the weights without labels for noise beyond the classes: DINO has ``dn_labelbook_size`` + 1 of them.

    The labels of the classes and the last one, which means none, are kept; a warning names ``source``.
    """
    rows = {len(tensor) for name, tensor in weights.items() if _HEAD.fullmatch(name)}
    labels = weights.get(_LABELS)
    if labels is None or len(rows) != 1 or len(labels) <= max(rows) + 1:
        return dict(weights)
    (count,) = rows
    logger.warning(
        "%s: of %d labels of noised objects, those of the %d classes and the last are kept", source, len(labels), count
    )
    return {**weights, _LABELS: torch.cat([labels[:count], labels[-1:]])}


def renumbered_to(weights: Mapping[str, Tensor], rows: int) -> dict[str, Tensor] | None:
    """Return the weights with class heads of ``rows`` rows, renumbered if necessary; None if impossible."""
    found = class_rows(weights)
    for numbering, known in _BY_COUNT.items():
        if found in known and rows == (len(known[found].rows) if numbering == "contiguous" else known[found].count):
            return renumbered(weights, numbering)
    return dict(weights) if found == rows else None
