"""The C loops of loading beside their peers, in one run: `python benchmarks/native_loading.py [rows tokens images]`.

Rows of 128 float32 at random from 1 GB; windows of 1,025 from 200M uint16; random-resized-crops to 224x224 of
photographs of about 450x350. Peers: NumPy and torch for what is gathered; Pillow, and simplejpeg with cv2 where they
are installed.
"""

import argparse
import io
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.native import jpeg
from shoal.native.gather import Parts, gather_rows, gather_windows

SECONDS = 1.0  # of each measurement; the best of three


def rate(call: Callable[[int], Any], per_call: int) -> float:
    """Return items a second: the best of three."""
    best, call_number = 0.0, 0
    call(0)
    for _ in range(3):
        begin, calls = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - begin) < SECONDS:
            call(call_number := call_number + 1)
            calls += 1
        best = max(best, calls * per_call / elapsed)
    return best


def say(name: str, found: float, peer: float | None = None) -> float:
    """Print one line, with the ratio to a peer; return the rate."""
    print(f"  {name:52} {found:14,.0f}/s" + (f"  {found / peer:5.2f}x" if peer else ""), flush=True)
    return found


def rows(threads: int) -> None:
    """Rows at random, in batches of 1,024, and 16 batches a call."""
    source = np.zeros((2_000_000, 128), np.float32)
    source += np.arange(128, dtype=np.float32)
    order = np.random.default_rng(0).permutation(len(source))
    out = np.zeros((16384, 128), np.float32)

    def at(call: int, count: int) -> NDArray[np.int64]:
        begin = call * count % (len(order) - count)
        return order[begin : begin + count]

    print(f"Rows of 128 float32 from {source.nbytes / 1e9:.1f} GB")
    take = rate(lambda n: np.take(source, at(n, 1024), axis=0, out=out[:1024], mode="clip"), 1024)
    say("numpy.take, one thread", take)
    tensor, to = torch.from_numpy(source), torch.from_numpy(out)
    torch.set_num_threads(threads)
    select = rate(lambda n: torch.index_select(tensor, 0, torch.from_numpy(at(n, 16384)), out=to), 16384)
    say(f"torch.index_select, {threads} threads, 16 batches a call", select, take)
    say("gather_rows, one thread", rate(lambda n: gather_rows(source, at(n, 1024), out[:1024]), 1024), take)
    many = rate(lambda n: gather_rows(source, at(n, 16384), out, threads=threads), 16384)
    say(f"gather_rows, {threads} threads, 16 batches a call", many, take)


def tokens(threads: int) -> None:
    """Windows of tokens, in batches of 64, and 16 batches a call."""
    random = np.random.default_rng(0)
    stream = random.integers(0, 50_000, 200_000_000, dtype=np.uint16)
    starts, width = random.integers(0, len(stream) - 1025, 500_000), np.arange(1025)
    out = np.zeros((1024, 1025), np.int64)

    def at(call: int, count: int) -> NDArray[np.int64]:
        begin = call * count % (len(starts) - count)
        return starts[begin : begin + count]

    print("Windows of 1,025 tokens from 200M uint16, as int64")
    peer = say("numpy, one thread", rate(lambda n: stream[at(n, 64)[:, None] + width].astype(np.int64), 64))
    say("gather_windows, one thread", rate(lambda n: gather_windows([stream], None, at(n, 64), out[:64]), 64), peer)
    many = rate(lambda n: gather_windows([stream], None, at(n, 1024), out, threads=threads), 1024)
    say(f"gather_windows, {threads} threads, 16 batches a call", many, peer)


def photographs(count: int) -> list[bytes]:
    """Return JPEGs of about 450x350 and 45 KB: cut from scikit-learn's two photographs (pip install scikit-learn)."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    random, found = np.random.default_rng(0), []
    pictures = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    for i in range(count):
        width, height, scale = random.integers(420, 481), random.integers(320, 381), random.uniform(1.0, 1.2)
        picture = pictures[i % 4 == 3]
        w, h = min(int(width * scale), picture.width), min(int(height * scale), picture.height)
        x, y = random.integers(0, picture.width - w + 1), random.integers(0, picture.height - h + 1)
        to = io.BytesIO()
        crop = picture.crop((int(x), int(y), int(x + w), int(y + h))).resize((int(width), int(height)))
        crop.save(to, "JPEG", quality=88)
        found.append(to.getvalue())
    return found


def random_box(random: np.random.Generator, width: int, height: int) -> tuple[int, int, int, int]:
    """Return what a random-resized-crop takes: 8% to 100% of the area, 3:4 to 4:3."""
    for _ in range(10):
        area, ratio = width * height * random.uniform(0.08, 1), np.exp(random.uniform(np.log(3 / 4), np.log(4 / 3)))
        w, h = round(np.sqrt(area * ratio)), round(np.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return int(random.integers(0, width - w + 1)), int(random.integers(0, height - h + 1)), int(w), int(h)
    return 0, 0, width, height


def column(values: list[bytes]) -> tuple[Parts, Parts]:
    """Return rows as a part of a pack has them."""
    offsets = np.concatenate([[0], np.cumsum([len(value) for value in values])]).astype(np.int64)
    return Parts([np.frombuffer(b"".join(values), np.uint8)]), Parts([offsets])


def images(threads: int, restart_blocks: int) -> None:
    """Random-resized-crops, in batches of 64."""
    originals = photographs(512)
    begin = time.perf_counter()
    cut = [jpeg.transcode(original, restart_blocks) for original in originals]
    elapsed, random = time.perf_counter() - begin, np.random.default_rng(1)
    before, after = sum(map(len, originals)), sum(len(image) + len(index) for image, index in cut)
    segments = (*column([image for image, _ in cut]), *column([index for _, index in cut]))
    whole = (*column(originals), None, None)
    found = [jpeg.size_of(original) for original in originals]
    boxes, flips = np.array([random_box(random, *size) for size in found]), random.integers(0, 2, len(found))
    mean_KB = before / len(found) / 1000  # noqa: N806
    print(f"Random-resized-crops to 224x224 of {len(found)} JPEGs of {mean_KB:.0f} KB, K = {restart_blocks}")
    print(f"  transcoding {len(found) / elapsed:,.0f}/s on one core; the pack grows by {after / before - 1:.1%}")
    peer = _peers(originals, boxes.astype(int), threads)
    out = np.zeros((64, 3, 224, 224), np.uint8)

    def batch(columns: Any, antialias: bool, number: int) -> Callable[[int], None]:
        def call(n: int) -> None:
            at = np.arange(64) + n % 8 * 64
            said = jpeg.crop_resize_batch(
                *columns, None, at, boxes[at], flips[at], out, antialias=antialias, threads=number
            )
            assert not said, said

        return call

    for antialias in (False, True):
        name = "antialiased" if antialias else "bilinear"
        say(f"no index, {name}, {threads} threads", rate(batch(whole, antialias, threads), 64), peer)
        say(f"segments, {name}, one thread", rate(batch(segments, antialias, 1), 64), peer)
        say(f"segments, {name}, {threads} threads", rate(batch(segments, antialias, threads), 64), peer)


def _peers(originals: list[bytes], boxes: NDArray[Any], threads: int) -> float:
    """Print what the peers do with the same boxes; return Pillow's rate."""
    from PIL import Image

    def with_pillow(i: int) -> Any:
        x, y, w, h = boxes[i].tolist()
        with Image.open(io.BytesIO(originals[i])) as image:
            box = (x, y, x + w, y + h)
            return np.asarray(image.convert("RGB").resize((224, 224), Image.Resampling.BILINEAR, box=box))

    with ThreadPoolExecutor(threads) as pool:
        peer = say("Pillow (antialiased)", rate(lambda _: list(pool.map(with_pillow, range(64))), 64))
        try:
            import cv2
            import simplejpeg
        except ImportError:
            return peer
        cv2.setNumThreads(1)

        def with_simplejpeg(i: int) -> Any:
            x, y, w, h = boxes[i].tolist()
            return cv2.resize(simplejpeg.decode_jpeg(originals[i])[y : y + h, x : x + w], (224, 224))

        decode = rate(lambda _: list(pool.map(lambda i: simplejpeg.decode_jpeg(originals[i]), range(64))), 64)
        say("simplejpeg, decoding whole, no resize", decode, peer)
        say("simplejpeg, cv2 LINEAR", rate(lambda _: list(pool.map(with_simplejpeg, range(64))), 64), peer)
    return peer


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["rows", "tokens", "images"], help="rows, tokens, images")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--restart-blocks", type=int, default=2)
    asked = parser.parse_args()
    for what in asked.what:
        if what == "images":
            images(asked.threads, asked.restart_blocks)
        else:
            {"rows": rows, "tokens": tokens}[what](asked.threads)


if __name__ == "__main__":
    main()
