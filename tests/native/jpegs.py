"""JPEGs for the tests: photograph-like noise in every kind of file."""

import io
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Pixels = NDArray[np.uint8]


def picture(width: int, height: int, seed: int = 0) -> Pixels:
    """Return pixels [h, w, 3] with large and small shapes in every colour, as photographs have."""
    random = np.random.default_rng(seed)
    total = np.zeros((height, width, 3))
    for cell, strength in ((64, 70), (16, 40), (4, 25), (1, 12)):
        small = random.normal(0, strength, (height // cell + 2, width // cell + 2, 3))
        total += np.kron(small, np.ones((cell, cell, 1)))[:height, :width]
    return np.clip(total + 128, 0, 255).astype(np.uint8)


def encode(pixels: Pixels, sampling: str = "4:2:0", quality: int = 88, **options: Any) -> bytes:
    """Return a JPEG; `sampling` is Pillow's, or "grey" or "4:4:0"."""
    if sampling == "4:4:0":
        return _encode_440(pixels, quality)
    image, to = Image.fromarray(pixels), io.BytesIO()
    if sampling == "grey":
        image.convert("L").save(to, "JPEG", quality=quality, **options)
    else:
        image.save(to, "JPEG", quality=quality, subsampling=sampling, **options)
    return to.getvalue()


def _encode_440(pixels: Pixels, quality: int) -> bytes:
    """Return 4:4:0, which Pillow does not write: a 4:2:2 file with as many blocks, whose header then says otherwise."""
    height, width = pixels.shape[:2]
    across, down = -(-width // 8), -(-height // 16)
    jpeg = bytearray(encode(picture(16 * across, 8 * down, seed=3), "4:2:2", quality))
    frame = jpeg.index(b"\xff\xc0")
    assert jpeg[frame + 11] == 0x21
    jpeg[frame + 5 : frame + 9] = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    jpeg[frame + 11] = 0x12
    return bytes(jpeg)


def two_sizes(width: int, height: int) -> bytes:
    """Return a file that hides one of 16x16 pixels, which libjpeg finds, in a marker that is none, `FF 00`.

    Whoever takes that for a marker with a length steps over the small image, and reads the large size behind it.
    """
    small = encode(picture(16, 16), progressive=True)[2:]
    planes = bytes([1, 0x22, 0, 2, 0x11, 1, 3, 0x11, 1])
    frame = struct.pack(">HHBHHB", 0xFFC2, 17, 8, height, width, 3) + planes
    scan = struct.pack(">HHB", 0xFFDA, 12, 3) + bytes([1, 0, 2, 0x11, 3, 0x11, 0, 63, 0]) + bytes(8)
    return b"\xff\xd8\xff\x00" + struct.pack(">H", len(small) + 2) + small + frame + scan + b"\xff\xd9"


def reference(jpeg: bytes) -> Pixels:
    """Return the pixels [h, w, 3] as Pillow decodes them."""
    with Image.open(io.BytesIO(jpeg)) as image:
        return np.asarray(image.convert("RGB"))


def column(rows: list[bytes]) -> tuple[list[Pixels], list[NDArray[np.int64]]]:
    """Return variable rows as a part of a pack has them: one buffer, and offsets."""
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    return [np.frombuffer(b"".join(rows), np.uint8)], [offsets]
