"""What TensorBoard shows of a folder: its files read in their order, as TensorBoard does."""

import struct
from pathlib import Path
from typing import Any

from tensorboardX.proto.event_pb2 import Event, SessionLog


def events(path: Path) -> list[Any]:
    """Return the events of a file: records of (length, crc, bytes, crc)."""
    found, offset, data = [], 0, path.read_bytes()
    while offset < len(data):
        (length,) = struct.unpack_from("<Q", data, offset)
        found.append(Event.FromString(data[offset + 12 : offset + 12 + length]))
        offset += 12 + length + 4
    return found


def shown(folder: Path) -> tuple[dict[str, list[tuple[int, float]]], dict[str, str]]:
    """Return the curves and the texts; at a new session, what is from its step on is forgotten."""
    curves: dict[str, list[tuple[int, float]]] = {}
    texts: dict[str, str] = {}
    for path in sorted(folder.iterdir()):
        for event in events(path):
            if event.session_log.status == SessionLog.START:
                curves = {tag: [p for p in curve if p[0] < event.step] for tag, curve in curves.items()}
            for value in event.summary.value:
                if value.WhichOneof("value") == "simple_value":
                    curves.setdefault(value.tag, []).append((event.step, value.simple_value))
                else:
                    texts[value.tag] = value.tensor.string_val[0].decode()
    return curves, texts
