"""Writes FFCV's .beton format, version 2, as its public description has it: for tests of the reader."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

PAGE_BYTES = 1 << 12  # FFCV's are 2 MiB or more; nothing depends on it
_IMAGE = np.dtype([("mode", "<u1"), ("width", "<u2"), ("height", "<u2"), ("data_ptr", "<u8")])
_BYTES = np.dtype([("ptr", "<u8"), ("size", "<u8")])


def write_beton(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows: bytes that begin as a JPEG and arrays of pixels as images, others by their Python type."""
    fields = {name: _field(value) for name, value in rows[0].items()}
    descriptors = np.zeros(len(fields), [("type_id", "<u1"), ("name", "<u1", 16), ("arguments", "<u1", 1024)])
    for descriptor, (name, (number, _, arguments)) in zip(descriptors, fields.items(), strict=True):
        descriptor["type_id"] = number
        descriptor["name"][: len(name)] = np.frombuffer(name.encode(), "u1")
        descriptor["arguments"][: len(arguments)] = np.frombuffer(arguments, "u1")
    record = np.dtype([("", dtype) for _, dtype, _ in fields.values()], align=True)
    records, allocations, pages = np.zeros(len(rows), record), [], bytearray()
    begin = -(-(24 + descriptors.nbytes + records.nbytes) // PAGE_BYTES) * PAGE_BYTES
    for at, row in enumerate(rows):
        for field, value in enumerate(row.values()):
            number, data = fields[list(row)[field]][0], _stored(value)
            pointer = begin + len(pages)
            if data is not None:
                allocations.append((at, pointer, len(data)))
                pages += data
            records[at][field] = _entry(number, value, pointer, len(data or b""))
    header = np.zeros(1, [("v", "<u2"), ("fields", "<u2"), ("page", "<u4"), ("samples", "<u8"), ("table", "<u8")])
    header[0] = (2, len(fields), PAGE_BYTES, len(rows), begin + len(pages))
    front = header.tobytes() + descriptors.tobytes() + records.tobytes()
    table = np.array(allocations, [("sample_id", "<u8"), ("ptr", "<u8"), ("size", "<u8")]).tobytes()
    path.write_bytes(front.ljust(begin, b"\0") + bytes(pages) + table)


def _field(value: Any) -> tuple[int, Any, bytes]:
    if isinstance(value, float):
        return 0, "<f8", b""
    if isinstance(value, int):
        return 1, "<i8", b""
    if _is_image(value):
        return 2, _IMAGE, b""
    if isinstance(value, bytes):
        return 3, _BYTES, b""
    if isinstance(value, dict):
        return 5, _BYTES, b""
    shape = np.zeros(33, "<u8")
    text = json.dumps(value.dtype.descr).encode()
    shape[: value.ndim], shape[32] = value.shape, len(text)
    return 4, "<u8", shape.tobytes() + text


def _is_image(value: Any) -> bool:
    return (isinstance(value, bytes) and value.startswith(b"\xff\xd8")) or getattr(value, "dtype", None) == np.uint8


def _stored(value: Any) -> bytes | None:
    if isinstance(value, (int, float)):
        return None
    if isinstance(value, dict):
        return (json.dumps(value) + "\0").encode()
    return value if isinstance(value, bytes) else bytes(value.tobytes())


def _entry(number: int, value: Any, pointer: int, num_bytes: int) -> Any:
    if number in (0, 1):
        return value
    if number == 2:
        height, width = (0, 0) if isinstance(value, bytes) else value.shape[:2]
        return (0 if isinstance(value, bytes) else 1, width, height, pointer)
    return pointer if number == 4 else (pointer, num_bytes)
