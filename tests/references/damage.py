"""Lines of a ``metrics.jsonl`` that hold no record."""

from __future__ import annotations

DAMAGED_LINES = (
    b"",
    b"{",
    b"[]",
    b"{}",
    b"null",
    b"7",
    b'{"kind": "train", "st',
    b'{"kind": "train"}',
    b'{"step": 5, "epoch": 1}',
    b'{"kind": "other", "step": 5, "epoch": 1}',
    b'{"kind": ["train"], "step": 5, "epoch": 1}',
    b'{"kind": "train", "step": "x", "epoch": 1}',
    b'{"kind": "train", "step": 5.5, "epoch": 1}',
    b'{"kind": "train", "step": true, "epoch": 1}',
    b'{"kind": "train", "step": -1, "epoch": 1}',
    b'{"kind": "train", "step": NaN, "epoch": 1}',
    b'{"kind": "train", "step": ' + b"9" * 400 + b', "epoch": 1}',
    b'{"kind": "train", "step": ' + b"9" * 5000 + b', "epoch": 1}',
    b'{"kind": "train", "step": 5, "epoch": ' + b"[" * 100_000,
    b'{"kind": "tr\xff\xfein", "step": 5, "epoch": 1}',
    b"\x00\x01\x02\xff" * 10,
    '{"kind": "train", "step": 5, "epoch": 1}'.encode("utf-16"),
)
