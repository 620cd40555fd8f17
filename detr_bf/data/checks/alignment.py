"""Own references of the images of a split, with the records of their files, and how well they lie on their images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from detr_bf.common.progress import progress_bar
from detr_bf.data.checks.files import ImageRecord, check_files
from detr_bf.data.images import RGB, PixelFormat, pixel_values, read_image

LONGEST_SIDE = 640  # pixels; larger images are reduced by a whole number before they are compared
LEAST_SHIFT = 2  # pixels of the image
LEAST_DIFFERING = 0.01  # share of the pixels that must differ before a shift is looked at

Grey = NDArray[np.float32]  # (H, W)


class Alignment(NamedTuple):
    """Comparison of an image with its reference; shares are of the pixels where both overlap."""

    differing: float  # share of the pixels that differ
    shift: tuple[int, int]  # pixels down and to the right by which the reference fits best
    shifted: float  # share of the pixels that differ then

    @property
    def moved(self) -> bool:
        """True if the shift fits clearly better: by at least ``LEAST_SHIFT`` pixels, and a third fewer differ."""
        far = max(map(abs, self.shift)) >= LEAST_SHIFT
        return far and self.differing >= LEAST_DIFFERING and self.shifted <= self.differing * 2 / 3


@dataclass(frozen=True)
class OwnReferences:
    """Reference file of each image of a split, None for an image without one."""

    files: Sequence[Path | None]
    records: Mapping[Path, ImageRecord]  # of the files that exist
    workers: int  # threads that compare images
    max_pixels: int

    def alignments(
        self, pairs: Mapping[int, tuple[Path, tuple[int, int] | None]], *, pixel_format: PixelFormat, as_stored: bool
    ) -> dict[int, Alignment]:
        """Return the alignment of some images.

        Args:
            pairs: file and annotated size of an image by its index; image and reference can be read and have one size.
            pixel_format: of the images.
            as_stored: see :func:`read_image`.
        """

        def compare(index: int) -> Alignment:
            (file, size), reference = pairs[index], self.files[index]
            assert reference is not None, "it can be read"
            read = partial(read_image, max_pixels=self.max_pixels, pixel_format=pixel_format, as_stored=as_stored)
            return alignment(pixel_values(read(file, size)), pixel_values(read(reference, size)))

        with ThreadPool(max(1, self.workers)) as pool:
            found = pool.imap(compare, pairs)
            bar = progress_bar(found, total=len(pairs), desc="comparing images with references", unit="pair")
            return dict(zip(pairs, bar, strict=True))


def open_references(
    files: Sequence[Path | None],
    folder: Path,
    cache: Path,
    workers: int,
    max_pixels: int,
    pixel_format: PixelFormat = RGB,
) -> OwnReferences:
    """Read the records of reference files, which are paths below ``folder``."""
    names = {str(file.relative_to(folder)): file for file in files if file is not None}
    records = check_files(ImageRecord, folder, names, cache, workers, max_pixels, pixel_format)
    return OwnReferences(files, {names[name]: record for name, record in records.items()}, workers, max_pixels)


def alignment(image: Tensor, reference: Tensor) -> Alignment:
    """Compare an image with its reference, both (C, H, W) with values from 0 to 255.

    Pixels differ if their grey values are apart by more than half of the image's standard deviation and by more than 8
    of 255 levels, after the difference in mean brightness is removed. The shift is the peak of the phase correlation,
    at most a quarter of each side.
    """
    step = -(-max(image.shape[-2:]) // LONGEST_SIDE)
    first, second = (_grey(pixels, step) for pixels in (image, reference))
    threshold = max(8.0, float(first.std()) / 2)
    differing = _differing(first, second, (0, 0), threshold)
    if differing < LEAST_DIFFERING:
        return Alignment(differing, (0, 0), differing)
    down, right = _best_shift(first, second)
    return Alignment(differing, (down * step, right * step), _differing(first, second, (down, right), threshold))


def _grey(pixels: Tensor, step: int) -> Grey:
    """Return the grey values, each the mean of a square of ``step`` pixels, without their mean."""
    rows, columns = (min(step, side) for side in pixels.shape[-2:])
    height, width = pixels.shape[-2] // rows, pixels.shape[-1] // columns
    whole = pixels.numpy()[:, : height * rows, : width * columns].reshape(-1, height, rows, width, columns)
    reduced: Grey = whole.mean((0, 2, 4), dtype=np.float32)
    return reduced - reduced.mean()


def _best_shift(first: Grey, second: Grey) -> tuple[int, int]:
    """Return how far (down, right) the second image must be moved to fit the first, by phase correlation."""
    window = np.outer(*(np.hanning(side + 2)[1:-1] for side in first.shape))
    cross = np.fft.rfft2(first * window) * np.conj(np.fft.rfft2(second * window))
    correlation = np.fft.irfft2(cross / np.maximum(np.abs(cross), 1e-9), s=first.shape)
    far = [np.abs(np.fft.fftfreq(side, 1 / side)) > side / 4 for side in first.shape]
    correlation[far[0][:, None] | far[1][None]] = -np.inf
    down, right = np.unravel_index(int(correlation.argmax()), correlation.shape)
    height, width = first.shape
    return int(down) - height * bool(down > height / 2), int(right) - width * bool(right > width / 2)


def _differing(first: Grey, second: Grey, shift: tuple[int, int], threshold: float) -> float:
    """Return the share of pixels that differ by more than ``threshold`` when the second image is moved."""
    ours = tuple(slice(max(0, by), side + min(0, by)) for by, side in zip(shift, first.shape, strict=True))
    theirs = tuple(slice(max(0, -by), side + min(0, -by)) for by, side in zip(shift, first.shape, strict=True))
    return float((np.abs(first[ours] - second[theirs]) > threshold).mean())
