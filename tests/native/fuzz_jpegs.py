"""Damaged JPEGs and indexes by the thousand: `python -m tests.native.fuzz_jpegs 3000` ends with 0, or a crash.

With --sanitize the C code is compiled anew, so that a byte that is read or written outside of what was asked for, and
arithmetic that C does not define, ends it with a message. `make fuzz` does that with 30,000 images.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import build_native
from shoal.core.errors import DataError
from shoal.native import jpeg, jpeg_library, library
from tests.native.jpegs import column, encode, picture, two_sizes

SANITIZE = ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def damaged(data: bytes, random: np.random.Generator) -> bytes:
    """Return the data with a few bytes changed, cut off, taken out, or put in a second time elsewhere."""
    broken = bytearray(data)
    kind = random.integers(0, 5)
    if kind == 0:
        del broken[random.integers(0, len(broken)) :]
    elif kind == 1:
        at = int(random.integers(0, len(broken)))
        del broken[at : at + int(random.integers(1, 50))]
    elif kind == 4:
        at, to = random.integers(0, min(len(broken), 700), 2).tolist()
        broken[to:to] = broken[at : at + int(random.integers(1, 200))]
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
    whole = [*own, *kinds[:5], two_sizes(600, 500)]
    return [*(jpeg.transcode(one) for one in kinds), *((one, b"") for one in whole)]


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
    if random.integers(0, 2):
        box = _inside(image, random)[None]
    out = np.zeros((1, 3, 24, 24), np.uint8)
    row, flips = np.zeros(1, np.int64), random.integers(0, 2, 1)
    antialias, portable = (bool(chosen) for chosen in random.integers(0, 2, 2))
    for segments in (index, b""):
        batch = (values, offsets, *column([segments]), None, row, box, flips, out)
        refused += bool(jpeg.crop_resize_batch(*batch, antialias=antialias, portable=portable))
    return refused


def _inside(image: bytes, random: np.random.Generator) -> NDArray[np.float64]:
    """Return a box that is inside the image, by the size that it says it has."""
    try:
        size = np.array(jpeg.size_of(image))
    except DataError:
        size = np.array([80, 80])
    begin = random.uniform(0, 1, 2) * (size - 1)
    return np.concatenate([begin, random.uniform(0, 1, 2) * (size - begin)])


def main(count: int) -> None:
    """Try every image as it is, and `count` damaged ones."""
    random, kinds, refused = np.random.default_rng(0), originals(), 0
    for image, index in kinds * 20:  # as they are, each with other boxes
        try_one(image, index, random)
    for i in range(count):
        image, index = kinds[i % len(kinds)]
        if index and random.integers(0, 3) == 0:
            index = damaged(index, random)
        refused += try_one(damaged(image, random), index, random)
    print(f"{count} images, {refused} times refused")


def sanitized(count: int) -> int:
    """Try `count` damaged images with libraries that were compiled for it; return the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [*SANITIZE, "-DSHOAL_EXACT_ROOMS"]
        native, whole = Path(folder, library.LIBRARY.name), Path(folder, jpeg_library.LIBRARY.name)
        for problem in (
            build_native.compile_native(native, flags=flags),
            build_native.compile_jpeg(whole, flags=flags),
        ):
            if problem is not None:
                raise SystemExit(problem)
        runtime = subprocess.run(
            [os.environ.get("CC", "cc"), "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
        )
        env = {
            **os.environ,
            "LD_PRELOAD": runtime.stdout.strip(),  # it must be there before Python's own first allocation
            "PYTHONMALLOC": "malloc",  # so that each image has a place of its own, with an end
            "ASAN_OPTIONS": "detect_leaks=0,allocator_may_return_null=1",
        }
        command = [sys.executable, "-m", "tests.native.fuzz_jpegs", str(count), "--libraries", folder]
        return subprocess.run(command, env=env, check=False).returncode


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("count", type=int)
    parser.add_argument("--sanitize", action="store_true")
    parser.add_argument("--libraries", type=Path)
    asked = parser.parse_args()
    if asked.sanitize:
        sys.exit(sanitized(asked.count))
    if asked.libraries is not None:
        library.LIBRARY = asked.libraries / library.LIBRARY.name
        jpeg_library.LIBRARY = asked.libraries / jpeg_library.LIBRARY.name
    main(asked.count)
