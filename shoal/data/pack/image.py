"""Encoded images on their way into a pack: whole, and JPEGs with restart segments where the native code is there."""

import importlib
from typing import Any

from shoal.core.errors import DataError

_SOS = 0xDA
_NO_LENGTH = {0x01, *range(0xD0, 0xD9)}


def native_jpeg() -> Any | None:
    """Return shoal's own JPEG code, or None where shoal was installed without it."""
    try:
        jpeg = importlib.import_module("shoal.native.jpeg")
    except ImportError:
        return None
    return jpeg if jpeg.available() else None


def encode_image(data: bytes, restart_blocks: int) -> tuple[bytes, bytes]:
    """Return what a pack stores for an encoded image, and the index of its restart segments (empty: it has none)."""
    check_whole(data)
    jpeg = native_jpeg() if restart_blocks > 0 and data.startswith(b"\xff\xd8") else None
    if jpeg is None:
        return data, b""
    stored, index = jpeg.transcode(data, restart_blocks)
    return stored, index


def check_whole(data: bytes) -> None:
    """Raise what an image lacks at its end, by what its format says; the pixels are not decoded."""
    if len(data) == 0:
        raise DataError("the image is empty")
    if data.startswith(b"\xff\xd8"):
        _check_jpeg(data)
    elif data.startswith(b"\x89PNG"):
        if data.find(b"IEND", max(0, len(data) - 4096)) < 0:
            raise DataError(f"the PNG is truncated: its {len(data):,} bytes have no IEND at their end")
    elif data.startswith(b"RIFF") and int.from_bytes(data[4:8], "little") + 8 > len(data):
        said = int.from_bytes(data[4:8], "little") + 8
        raise DataError(f"the WebP is truncated: it has {len(data):,} bytes, its header says {said:,}")


def _check_jpeg(data: bytes) -> None:
    """A JPEG is marker segments up to the first scan, which only the end marker ends: data inside has no 0xFFD9."""
    place = 2
    while place + 4 <= len(data):
        if data[place] != 0xFF:
            raise DataError(f"the JPEG is damaged: there is no marker at byte {place:,}")
        marker = data[place + 1]
        if marker == 0xFF:
            place += 1
        elif marker in _NO_LENGTH:
            place += 2
        elif marker == _SOS:
            if data.rfind(b"\xff\xd9", place) < 0:
                raise DataError(f"the JPEG is truncated: its {len(data):,} bytes have no end marker")
            return
        else:
            place += 2 + int.from_bytes(data[place + 2 : place + 4], "big")
    raise DataError(f"the JPEG is truncated: its {len(data):,} bytes hold no image data")
