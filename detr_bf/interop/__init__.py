"""Checkpoints of other implementations, read and written."""

from detr_bf.interop.formats import NAMES, format_of, from_foreign, is_ours, to_foreign, without_wrapper
from detr_bf.interop.weights import SUFFIXES, read_state, read_weights, write_weights

__all__ = [
    "NAMES",
    "SUFFIXES",
    "format_of",
    "from_foreign",
    "is_ours",
    "read_state",
    "read_weights",
    "to_foreign",
    "without_wrapper",
    "write_weights",
]
