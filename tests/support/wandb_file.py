"""What Weights & Biases has written of a run offline, read back from its .wandb files.

The library has no reader of its own any more: the file is a header of 7 bytes, then blocks of 32 KiB as LevelDB's logs
have them: each piece is (crc of 4 bytes, length of 2, kind of 1, bytes); kinds 1 to 4 are a whole record, its first,
middle and last piece. A record is the library's own protobuf message. This module is all that knows it.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK_BYTES, _HEADER_BYTES = 32768, 7
_WHOLE, _LAST = 1, 4


def records(path: Path) -> Iterator[Any]:
    """Yield the records of a .wandb file, as the library's messages."""
    from wandb.proto import wandb_internal_pb2

    messages: Any = wandb_internal_pb2  # it finds its names when it is imported
    data = path.read_bytes()
    assert data[:4] == b":W&B", "the format of .wandb files has changed"
    offset, record = 7, b""
    while offset + _HEADER_BYTES <= len(data):
        left = _BLOCK_BYTES - offset % _BLOCK_BYTES
        if left < _HEADER_BYTES:
            offset += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, offset)
        offset += _HEADER_BYTES
        record += data[offset : offset + length]
        offset += length
        if kind in (_WHOLE, _LAST):
            yield messages.Record.FromString(record)
            record = b""


def read_offline(folder: Path) -> tuple[set[str], dict[int, dict[str, float]], dict[str, Any], set[str]]:
    """Return all that the run in `folder`, of however many starts, has: its ids, its numbers by step, config, files."""
    ids, files = set(), set()
    config: dict[str, Any] = {}
    values: dict[int, dict[str, float]] = {}
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for record in records(path):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                ids.add(record.run.run_id)
                config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            elif kind == "history":
                items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                numbers = {name: float(json.loads(text)) for name, text in items.items() if not name.startswith("_")}
                values.setdefault(record.history.step.num, {}).update(numbers)
            elif kind == "files":
                files |= {file.path for file in record.files.files}
    return ids, values, config, files
