"""Near-duplicates among images: pairs whose perceptual hashes differ in few bits.

The threshold lies between the pairs of the blood cells and the playing cards of docs/data.md (66,000 pairs each) that
show the same scene, whose hashes differ in at most 24 bits, and all others, which differ in 54 and more. Mirrored or
strongly cropped copies are not found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.fft import dctn
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

MAX_DISTANCE = 40  # bits of 255 in which the hashes of near-duplicates may differ
_SIDE, _KEPT = 64, 16  # pixels of the reduced image, and its lowest frequencies, along each axis
_LEAST_RANGE = 8  # grey levels of the reduced image; a more even one has no hash, as noise would determine it
_ROWS = 256  # of a block of distances


def perceptual_hash(image: Image.Image) -> str:
    """Return 64 hexadecimal digits that change little when the image is scaled, compressed or brightened.

    The hash is the sign, relative to their median, of the 255 lowest frequencies but the mean of the discrete cosine
    transform of the grey image, reduced to 64 x 64 pixels ("pHash", Zauner 2010, "Implementation and benchmarking of
    perceptual image hash functions", section 3.2.1). It is written here because ImageHash (4.3) needs PyWavelets for
    its other hashes. An image of almost one colour has no hash: an empty string.
    """
    step = max(1, min(image.size) // (2 * _SIDE))  # in a large image a part of the pixels is enough, and faster
    thinned = image.resize((image.width // step, image.height // step), Image.Resampling.NEAREST)
    small = thinned.convert("L").resize((_SIDE, _SIDE), Image.Resampling.BOX)
    levels = np.asarray(small, dtype=np.float32)
    if np.ptp(levels) < _LEAST_RANGE:
        return ""
    waves = dctn(levels, norm="ortho")[:_KEPT, :_KEPT].ravel()
    bits = waves > np.median(waves[1:])
    bits[0] = False
    return np.packbits(bits).tobytes().hex()


def nearest(first: Sequence[str], second: Sequence[str]) -> list[tuple[int, int]]:
    """Return the positions in both sequences of near-duplicates: for each hash of the first the nearest of the second.

    A hash of the first that differs from all of the second in more than ``MAX_DISTANCE`` bits is left out. No hash may
    be empty.
    """
    found: list[tuple[int, int]] = []
    for start, distances in _distances(first, second) if second else ():
        best = distances.argmin(axis=1)
        rows = np.flatnonzero(distances[np.arange(len(best)), best] <= MAX_DISTANCE)
        found += [(start + row, best[row]) for row in rows.tolist()]
    return found


def near_groups(records: Mapping[str, Any]) -> list[list[str]]:
    """Return the groups of two and more names that are linked by equal files or near-duplicates.

    ``records`` are :class:`~detr_bf.data.checks.files.ImageRecord` by name.
    """
    names = sorted(records)
    by_content: dict[str, int] = {}
    owners = np.array(
        [by_content.setdefault(records[name].sha256 or name, number) for number, name in enumerate(names)],
        dtype=np.int64,
    )
    hashed = np.array([number for number, name in enumerate(names) if records[name].phash], dtype=np.int64)
    hashes = [records[names[number]].phash for number in hashed]
    for start, distances in _distances(hashes, hashes):
        rows, columns = np.nonzero(distances <= MAX_DISTANCE)
        owners = _merged(owners, hashed[rows + start], hashed[columns])
    groups: dict[int, list[str]] = {}
    for name, owner in zip(names, owners.tolist(), strict=True):
        groups.setdefault(owner, []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def _merged(owners: NDArray[np.int64], rows: NDArray[np.int64], columns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return group numbers (N,) after linking ``rows`` (P,) with ``columns`` (P,)."""
    starts = np.concatenate([np.arange(len(owners)), rows])
    links = coo_array((np.ones(len(starts), dtype=bool), (starts, np.concatenate([owners, columns]))))
    links.resize(len(owners), len(owners))
    found: NDArray[np.int64] = connected_components(links, directed=False)[1].astype(np.int64)
    # a group is named by its first member, because the next call links members with names
    return np.unique(found, return_index=True)[1][found]


def _distances(first: Sequence[str], second: Sequence[str]) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Yield blocks of distances (rows, N) in bits, with the position of their first row."""
    rows, columns = _signs(first), _signs(second)
    for start in range(0, len(rows), _ROWS):
        yield start, (rows.shape[1] - rows[start : start + _ROWS] @ columns.T) / 2


def _signs(hashes: Sequence[str]) -> NDArray[np.float32]:
    """Return the bits (N, 256) as -1 and 1, so that products give distances."""
    bits = np.unpackbits(np.frombuffer(bytes.fromhex("".join(hashes)), dtype=np.uint8)).reshape(-1, _KEPT * _KEPT)
    return bits.astype(np.float32) * 2 - 1
