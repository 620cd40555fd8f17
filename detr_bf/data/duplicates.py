"""Near-duplicates among images: copies by their names, and pairs whose perceptual hashes differ in few bits.

The distance of two images is the smallest one over the eight flips and rotations by quarter turns of one of them. The
threshold lies between the pairs of the blood cells and the playing cards of docs/data.md (66,000 pairs each) that show
the same scene, whose hashes differ in at most 24 bits, and all others, which differ in 54 and more. Strongly cropped
copies are found by their names only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
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
_ROWS = 1024  # hashes that are compared with all later ones
_BLOCK = 2**20  # distances that are computed together
_EXPORTED = re.compile(r"(.+)\.rf\.[0-9A-Za-z]+\.[^.]+")  # STEM.rf.HASH.jpg


def perceptual_hash(image: Image.Image) -> str:
    """Return 64 hexadecimal digits that change little when the image is scaled, compressed or brightened.

    The hash is the sign of the 255 lowest frequencies but the mean of the discrete cosine transform of the grey image,
    reduced to 64 x 64 pixels ("pHash", Zauner 2010, "Implementation and benchmarking of perceptual image hash
    functions", section 3.2.1). The signs are relative to 0 instead of the median: a flip changes those of the odd
    frequencies along its axis and a transposition exchanges the axes, so the hash of an image gives those of its flips
    and rotations. It is written here because ImageHash (4.3) needs PyWavelets for its other hashes. An image of almost
    one colour has no hash: an empty string.
    """
    step = max(1, min(image.size) // (2 * _SIDE))  # in a large image a part of the pixels is enough, and faster
    thinned = image.resize((image.width // step, image.height // step), Image.Resampling.NEAREST)
    small = thinned.convert("L").resize((_SIDE, _SIDE), Image.Resampling.BOX)
    levels = np.asarray(small, dtype=np.float32)
    if np.ptp(levels) < _LEAST_RANGE:
        return ""
    waves = dctn(levels, norm="ortho")[:_KEPT, :_KEPT].ravel()
    bits = waves > 0
    bits[0] = False
    return np.packbits(bits).tobytes().hex()


def exported_from(name: str) -> str | None:
    """Return the name of the photograph that Roboflow exported as ``STEM.rf.HASH.jpg``; None for any other name.

    An export with augmentation has several copies of a photograph, cropped, rotated or with other colours.
    """
    found = _EXPORTED.fullmatch(PurePosixPath(name).name)
    return found and found[1]


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
    """Return the groups of two and more names that are linked by equal files, copies by name, or near-duplicates.

    ``records`` are :class:`~detr_bf.data.checks.files.ImageRecord` by name.
    """
    names = sorted(records)
    owners = np.arange(len(names))
    for keys in ([records[name].sha256 for name in names], [exported_from(name) for name in names]):
        first: dict[str, int] = {}
        linked = [first.setdefault(key, number) if key else number for number, key in enumerate(keys)]
        owners = _merged(owners, np.arange(len(names)), np.array(linked, dtype=np.int64))
    hashed = np.array([number for number, name in enumerate(names) if records[name].phash], dtype=np.int64)
    hashes = [records[names[number]].phash for number in hashed.tolist()]
    for begin in range(0, len(hashes), _ROWS):  # of two images one comes first
        for start, distances in _distances(hashes[begin : begin + _ROWS], hashes[begin:]):
            rows, columns = np.nonzero(distances <= MAX_DISTANCE)
            owners = _merged(owners, hashed[begin + start :][rows], hashed[begin:][columns])
    groups: dict[int, list[str]] = {}
    for name, owner in zip(names, owners.tolist(), strict=True):
        groups.setdefault(owner, []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def _merged(owners: NDArray[np.int64], rows: NDArray[np.int64], columns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return group numbers (N,) after linking ``rows`` (P,) with ``columns`` (P,)."""
    starts = np.concatenate([np.arange(len(owners)), rows])
    ends = np.concatenate([owners, columns])
    links = coo_array((np.ones(len(starts), dtype=bool), (starts, ends)), shape=(len(owners), len(owners)))
    found: NDArray[np.int64] = connected_components(links, directed=False)[1].astype(np.int64)
    # a group is named by its first member, because the next call links members with names
    return np.unique(found, return_index=True)[1][found]


def _distances(first: Sequence[str], second: Sequence[str]) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Yield blocks of distances (rows, N) in bits, with the position of their first row.

    A distance is the smallest over the flips and transpositions of the image of the second.
    """
    rows, columns = _signs(first), _signs(second)
    sides = _by_parity(columns), _by_parity(columns.swapaxes(1, 2))
    height = max(1, _BLOCK // max(1, len(columns)))
    for start in range(0, len(rows), height):
        block, best = _by_parity(rows[start : start + height]), np.float32(-_KEPT * _KEPT)
        for side in sides:
            even, across, down, odd = (one @ other.T for one, other in zip(block, side, strict=True))
            # a flip changes the signs of across and odd, the other one those of down and odd
            same = np.maximum(even + odd + np.abs(across + down), even - odd + np.abs(across - down))
            best = np.maximum(best, same)
        yield start, (_KEPT * _KEPT - best) / 2


def _by_parity(signs: NDArray[np.float32]) -> list[NDArray[np.float32]]:
    """Return the frequencies that are even along both axes, odd across, odd down, and odd along both, (N, 64) each."""
    return [signs[:, down::2, across::2].reshape(len(signs), _KEPT**2 // 4) for down in (0, 1) for across in (0, 1)]


def _signs(hashes: Sequence[str]) -> NDArray[np.float32]:
    """Return the bits (N, 16, 16), frequencies down and across, as -1 and 1, so that products give distances."""
    bits = np.unpackbits(np.frombuffer(bytes.fromhex("".join(hashes)), dtype=np.uint8)).reshape(-1, _KEPT, _KEPT)
    return bits.astype(np.float32) * 2 - 1
