"""Read and write checkpoints of other implementations."""

from detr_bf.interop.classes import (
    COCO_IDS,
    NUMBERINGS,
    class_rows,
    coco_classes,
    renumbered,
    renumbered_to,
    rows_by_name,
)
from detr_bf.interop.formats import NAMES, format_named, format_of, from_foreign, is_ours, to_foreign, without_wrapper
from detr_bf.interop.weights import (
    SUFFIXES,
    read_content,
    read_state,
    read_weights,
    state_in,
    under_our_names,
    write_weights,
)

__all__ = [
    "COCO_IDS",
    "NAMES",
    "NUMBERINGS",
    "SUFFIXES",
    "class_rows",
    "coco_classes",
    "format_named",
    "format_of",
    "from_foreign",
    "is_ours",
    "read_content",
    "read_state",
    "read_weights",
    "renumbered",
    "renumbered_to",
    "rows_by_name",
    "state_in",
    "to_foreign",
    "under_our_names",
    "without_wrapper",
    "write_weights",
]
