"""Damaged JPEGs and indexes by the thousand: `python -m tests.native.fuzz_jpegs 3000` ends with 0, or a crash."""

import sys

import numpy as np

from shoal.core.errors import DataError
from shoal.native import jpeg
from tests.native.jpegs import column, encode, picture


def damaged(data: bytes, random: np.random.Generator) -> bytes:
    """Return the data with a few bytes changed, cut off, or taken out."""
    broken = bytearray(data)
    kind = random.integers(0, 4)
    if kind == 0:
        del broken[random.integers(0, len(broken)) :]
    elif kind == 1:
        at = int(random.integers(0, len(broken)))
        del broken[at : at + int(random.integers(1, 50))]
    else:
        where = len(broken) if kind == 2 else min(len(broken), 700)  # everywhere, or in the headers
        for at in random.integers(0, where, random.integers(1, 6)):
            broken[at] = random.integers(0, 256)
    return bytes(broken)


def originals() -> list[tuple[bytes, bytes]]:
    """Return images of every kind, with their indexes."""
    pixels = picture(67, 53)
    kinds = [encode(pixels, sampling) for sampling in ("4:2:0", "4:2:2", "4:4:4", "4:4:0", "grey")]
    kinds += [encode(pixels, progressive=True), encode(pixels, "4:4:4", keep_rgb=True)]
    own = [encode(pixels, "4:2:0", restart_marker_blocks=3), encode(pixels, "4:2:2", optimize=True)]
    return [*(jpeg.transcode(one) for one in kinds), *((one, b"") for one in (*own, *kinds[:5]))]


def try_one(image: bytes, index: bytes, random: np.random.Generator) -> int:
    """Hand a damaged image to everything that reads one; return how often it was refused."""
    refused = 0
    for call in (lambda: jpeg.transcode(image), lambda: jpeg.decode(image, index), lambda: jpeg.decode(image)):
        try:
            call()
        except DataError:
            refused += 1
    values, offsets = column([image])
    box = np.concatenate([random.uniform(0, 20, 2), random.uniform(1, 60, 2)])[None]
    out = np.zeros((1, 3, 24, 24), np.uint8)
    row = np.zeros(1, np.int64)
    for segments in (index, b""):
        columns = (values, offsets, *column([segments]))
        refused += bool(jpeg.crop_resize_batch(*columns, None, row, box, None, out, antialias=True))
    return refused


def main(count: int) -> None:
    """Try `count` damaged images."""
    random, kinds, refused = np.random.default_rng(0), originals(), 0
    for i in range(count):
        image, index = kinds[i % len(kinds)]
        if index and random.integers(0, 3) == 0:
            index = damaged(index, random)
        refused += try_one(damaged(image, random), index, random)
    print(f"{count} images, {refused} times refused")


if __name__ == "__main__":
    main(int(sys.argv[1]))
