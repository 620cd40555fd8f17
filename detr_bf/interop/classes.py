"""Class heads whose rows are COCO's category ids, and those whose rows are its classes without gaps.

The authors' heads have a row for every id: 91 of ids 0 to 90 for boxes and 250 of ids 0 to 249 for panoptic maps, many
of which no class has; with cross-entropy one more, the last, for no object. The contiguous heads have a row for each of
the 80 classes, or 133 with the stuff, sorted by id, and the same last row. Weights are under our names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from detr_bf.errors import InputError

NUMBERINGS = ("contiguous", "ids")
THING_IDS = tuple(i for i in range(1, 91) if i not in (12, 26, 29, 30, 45, 66, 68, 69, 71, 83))
STUFF_IDS = (
    *(92, 93, 95, 100, 107, 109, 112, 118, 119, 122, 125, 128, 130, 133, 138, 141, 144, 145, 147, 148, 149, 151),
    *(154, 155, 156, 159, 161, 166, 168, 171, 175, 176, 177, 178, 180, 181, *range(184, 201)),
)
COCO_IDS = (THING_IDS, (*THING_IDS, *STUFF_IDS))  # in the order of the contiguous classes, of boxes and panoptic maps
NEVER = -100.0  # logit of an id that no class has
_HEAD = re.compile(r"decoder\.(?:heads\.classes\.\d+|queries\.class_head)\.(?:weight|bias)")
_PROPOSALS = "decoder.queries.class_head."


@dataclass(frozen=True)
class _Table:
    """The rows of a head of ids, out of ``count``, that a contiguous head has, in its order."""

    count: int
    rows: tuple[int, ...]

    def contiguous(self, head: Tensor, rows: tuple[int, ...]) -> Tensor:
        return head[torch.tensor(rows)]

    def by_id(self, head: Tensor, rows: tuple[int, ...]) -> Tensor:
        """Ids that no class has get weights of zero and the bias ``NEVER``."""
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


def class_rows(weights: Mapping[str, Tensor]) -> int:
    """How many rows the class heads have.

    Raises:
        InputError: there is no class head, or they do not have the same number of rows.
    """
    found = sorted({len(tensor) for name, tensor in weights.items() if _HEAD.fullmatch(name)})
    if len(found) != 1:
        said = f"class heads of {found} rows, expected one number" if found else "no class head, expected a detector"
        raise InputError(f"the weights hold {said}: use the weights of one whole detector under our names")
    return found[0]


def renumbered(weights: Mapping[str, Tensor], numbering: str) -> dict[str, Tensor]:
    """The weights with all class heads in the other numbering; nothing else is touched.

    The proposals of two stages keep row 0, which stands for any object in both numberings. Going back from ids to
    contiguous classes gives what there was, to the bit.

    Args:
        weights: of a detector on COCO, under our names.
        numbering: ``contiguous``: 91, 92, 250 or 251 rows become 80, 81, 133 or 134; ``ids``: the other way, where ids
            that no class has get weights of zero and a bias of ``NEVER``, so that they are never found.

    Raises:
        InputError: another numbering, or heads of another number of rows.
    """
    if numbering not in NUMBERINGS:
        raise InputError(f"no numbering '{numbering}' of classes: expected {' or '.join(NUMBERINGS)}")
    rows, known = class_rows(weights), _BY_COUNT[numbering]
    if rows not in known:
        other = rows in {count for counts in _BY_COUNT.values() for count in counts}
        said = f"are those of '{numbering}' already" if other else "belong to neither numbering of COCO's classes"
        raise InputError(
            f"class heads of {rows} rows {said}: to '{numbering}' go heads of {', '.join(map(str, sorted(known)))} rows"
        )
    table = known[rows]
    convert = table.contiguous if numbering == "contiguous" else table.by_id
    return {
        name: convert(tensor, _rows_of(name, table)) if _HEAD.fullmatch(name) else tensor
        for name, tensor in weights.items()
    }


def renumbered_to(weights: Mapping[str, Tensor], rows: int) -> dict[str, Tensor] | None:
    """The weights with class heads of ``rows`` rows, renumbered where that is what is between; else None."""
    found = class_rows(weights)
    for numbering, known in _BY_COUNT.items():
        if found in known and rows == (len(known[found].rows) if numbering == "contiguous" else known[found].count):
            return renumbered(weights, numbering)
    return dict(weights) if found == rows else None


def _rows_of(name: str, table: _Table) -> tuple[int, ...]:
    return (0, *table.rows[1:]) if name.startswith(_PROPOSALS) else table.rows
