"""What was measured of each image, whatever process saw it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from detr_bf.errors import InputError


class ImageRows:
    """Columns of numbers with a row for every image, found by its place in the data set.

    Of several rows of one image the first stays: processes that share a split may see an image twice.
    """

    def __init__(self) -> None:
        self._parts: list[dict[str, Tensor]] = []

    def add(self, place: Tensor, **columns: Tensor) -> None:
        """Rows of the images at ``place`` (B,), every column (B,) on any device; the same columns in every call."""
        self._parts.append({name: column.detach().cpu() for name, column in {"place": place, **columns}.items()})

    def extend(self, other: ImageRows) -> None:
        """Add the rows of ``other``; those that are here come first."""
        self._parts += other._parts

    def joined(self) -> dict[str, Tensor]:
        """``place`` (N,) ascending and the other columns (N,): the same however the images were divided.

        Raises:
            InputError: there is no image.
        """
        if not any(len(part["place"]) for part in self._parts):
            raise InputError("no image was evaluated: the split is empty, or its batches were not given to update")
        columns = {name: torch.cat([part[name] for part in self._parts]) for name in self._parts[0]}
        _, first = np.unique(columns["place"].numpy(), return_index=True)
        return {name: column[torch.from_numpy(first)] for name, column in columns.items()}
