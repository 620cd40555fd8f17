"""Weights and folders of other projects: read, write, download.

The names are imported at their first use: the command line looks up downloads and folders of the Hub without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from detr_bf.interop.classes import (
        COCO_IDS,
        NUMBERINGS,
        class_rows,
        coco_classes,
        renumbered,
        renumbered_to,
        rows_by_name,
    )
    from detr_bf.interop.formats import (
        NAMES,
        format_named,
        format_of,
        from_foreign,
        is_ours,
        to_foreign,
        without_wrapper,
    )
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

_MODULES = {
    "COCO_IDS": "classes",
    "NUMBERINGS": "classes",
    "class_rows": "classes",
    "coco_classes": "classes",
    "renumbered": "classes",
    "renumbered_to": "classes",
    "rows_by_name": "classes",
    "NAMES": "formats",
    "format_named": "formats",
    "format_of": "formats",
    "from_foreign": "formats",
    "is_ours": "formats",
    "to_foreign": "formats",
    "without_wrapper": "formats",
    "SUFFIXES": "weights",
    "read_content": "weights",
    "read_state": "weights",
    "read_weights": "weights",
    "state_in": "weights",
    "under_our_names": "weights",
    "write_weights": "weights",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'detr_bf.interop' has no attribute '{name}'")
    return getattr(import_module(f"detr_bf.interop.{_MODULES[name]}"), name)
