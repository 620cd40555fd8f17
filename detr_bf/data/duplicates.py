"""Near-duplicates among images: pairs whose perceptual hashes differ in few bits.

The threshold lies between the pairs of the blood cells and the playing cards of docs/data.md (66,000 pairs each) that
show the same scene, whose hashes differ in at most 24 bits, and all others, which differ in 54 and more. Mirrored or
strongly cropped copies are not found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
_ROWS = 512  # of a block of distances


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


def near_pairs(first: Sequence[str], second: Sequence[str]) -> NDArray[np.int64]:
    """Return the positions (P, 2) in both sequences of the hashes that differ in at most ``MAX_DISTANCE`` bits.

    The pairs are ordered by the first, then the second position. Empty hashes are in no pair.
    """
    rows, columns = (_signs(hashes) for hashes in (first, second))
    found = [np.zeros((0, 2), dtype=np.int64)]
    for start in range(0, len(rows), _ROWS):
        distances = (rows.shape[1] - rows[start : start + _ROWS] @ columns.T) / 2
        found.append(np.argwhere(distances <= MAX_DISTANCE) + np.array([start, 0]))
    pairs = np.concatenate(found)
    named = np.array([bool(first[one] and second[other]) for one, other in pairs], dtype=bool)
    return pairs[named]


def near_groups(records: Mapping[str, Any]) -> list[list[str]]:
    """Return the groups of two and more names that are linked by equal files or near-duplicates.

    ``records`` are :class:`~detr_bf.data.checks.files.ImageRecord` by name.
    """
    names = sorted(records)
    by_content: dict[str, int] = {}
    same = [
        (number, by_content.setdefault(sha, number))
        for number, name in enumerate(names)
        if (sha := records[name].sha256)
    ]
    hashes = [records[name].phash for name in names]
    rows, columns = np.concatenate([np.array(same, dtype=np.int64).reshape(-1, 2), near_pairs(hashes, hashes)]).T
    links = coo_array((np.ones(len(rows), dtype=bool), (rows, columns)), shape=(len(names), len(names)))
    count, owners = connected_components(links, directed=False)
    groups: list[list[str]] = [[] for _ in range(count)]
    for name, owner in zip(names, owners, strict=True):
        groups[owner].append(name)
    return [group for group in groups if len(group) > 1]


def _signs(hashes: Sequence[str]) -> NDArray[np.float32]:
    """Return the bits (N, 256) as -1 and 1, so that products give distances; zeros for an empty hash."""
    data = b"".join(bytes.fromhex(each or "0" * (_KEPT * _KEPT // 4)) for each in hashes)
    bits = np.unpackbits(np.frombuffer(data, dtype=np.uint8)).reshape(-1, _KEPT * _KEPT)
    return bits.astype(np.float32) * 2 - 1
