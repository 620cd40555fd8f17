"""Reader of the file that an offline run of Weights & Biases leaves: blocks as in LevelDB's log, with protobufs."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

BLOCK, HEADER = 32_768, 7  # bytes


def wandb_rows(folder: Path) -> list[dict[str, Any]]:
    """Return what was logged, in order, over all processes that logged to ``folder/wandb``.

    The first record of a process comes as ``{"config": ...}``; values inside a picture have keys such as
    ``pictures/validation.path``.
    """
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # its service writes the last records when it ends
    rows: list[dict[str, Any]] = []
    files = folder.glob("wandb/offline-run-*/*.wandb")
    for path in sorted(files, key=lambda path: path.stat().st_mtime_ns):  # names have seconds only
        for content in _contents(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(content)
            kind = record.WhichOneof("record_type")
            if kind == "history":
                items = record.history.item
                rows.append({".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items})
            elif kind == "run" and record.run.config.update:
                rows.append({"config": {item.key: json.loads(item.value_json) for item in record.run.config.update}})
    return rows


def _contents(data: bytes) -> list[bytes]:
    found, part, at = [], b"", HEADER
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + HEADER])
        part += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):  # the whole of a record, or its end
            found.append(part)
            part = b""
    return found
