"""What each codec costs and what it loses: rates of encoding and decoding, bytes, and the error of a sum.

    python benchmarks/codecs.py [--mb 25 --workers 4 --steps 20]
    python benchmarks/codecs.py --blocks

Rates are GB of float32 gradient a second of one core's time, in memory. A worker encodes its gradient once in an
exchange and decodes it once or twice. "1 Gb/s" is the time of an exchange at that speed, with encoding and decoding,
over that of bf16, which is the 16-bit baseline; below 1 it pays there.

Errors are of the sum over real workers (over Gloo) to the true sum, relative: of the mean over all steps of a gradient
that is partly the same in every step and partly noise, with error feedback and without; the first column is one step.

--blocks: the error of int4 and int8 for blocks of 64 to 4,096 elements, which is why a block has 256.
"""

import argparse
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from shoal.compress.bucket import Bucket, padded
from shoal.compress.codec import Turn
from shoal.compress.codecs import CODECS, codec_named
from shoal.compress.feedback import ErrorFeedback
from tests.compress.counted import Counted, with_every_codec
from tests.support.ranks import RankPool

SIDE = 512
ROUNDS = 7
LINK_BYTES_PER_S = 1e9 / 8


def bucket_of_bytes(num_bytes: int) -> Bucket:
    """Return a bucket of square matrices, `num_bytes` in all or a little less."""
    count = max(1, num_bytes // (4 * SIDE * SIDE))
    return Bucket(tuple(f"w{index}" for index in range(count)), ((SIDE, SIDE),) * count)


def gradient_of(bucket: Bucket, *, worker: int, step: int) -> Tensor:
    """Return numbers like a gradient's: of low rank and noise, with magnitudes that differ from row to row."""
    fixed, moving = (torch.Generator().manual_seed(seed) for seed in (worker, 10_000 + 100 * step + worker))
    shape = (len(bucket.names), SIDE, SIDE)
    rows = torch.randn(shape[0], SIDE, 1, generator=fixed).exp()
    low = torch.randn(shape[0], SIDE, 8, generator=fixed) @ torch.randn(shape[0], 8, SIDE, generator=fixed) / 8**0.5
    return (rows * (low + torch.randn(shape, generator=moving))).flatten()


class _Others:
    """The workers of an exchange of which only this one's work is timed: the others' messages are copies of its own."""

    def __init__(self, count: int) -> None:
        self.index, self.count = 0, count

    def all_reduce(self, tensor: Tensor) -> None:
        """Leave it as it is."""

    def all_gather(self, tensor: Tensor, sizes: Any = None) -> list[Tensor]:  # noqa: ARG002
        """Return it from everybody."""
        return [tensor] * self.count

    def all_to_all(self, parts: list[Tensor], sizes: Any = None) -> list[Tensor]:  # noqa: ARG002
        """Return what is sent to the second from everybody."""
        return [parts[min(1, self.count - 1)]] * self.count


def exchange_s(name: str, bucket: Bucket, workers: int) -> float:
    """Return the seconds in which one worker compensates, encodes and decodes in an exchange, without the wire."""
    feedback = ErrorFeedback(codec_named(name))
    gradient, others, seconds = gradient_of(bucket, worker=0, step=0), _Others(workers), []
    out = torch.empty_like(gradient)
    for _ in range(ROUNDS):
        out.copy_(gradient)
        begin = time.process_time()
        feedback.sum(bucket, out, others)
        seconds.append(time.process_time() - begin)
    return statistics.median(seconds[1:])


def coding_s(name: str, bucket: Bucket) -> tuple[float, float]:
    """Return the seconds of encoding the bucket, and of decoding one message about it."""
    codec: Any = codec_named(name)
    if not hasattr(codec, "encode"):
        return math.nan, math.nan
    values = gradient_of(bucket, worker=0, step=0)
    turn = Turn(bucket, 0, 0, 0, {})
    codec.observe(values, turn)
    encode, decode, into = [], [], torch.zeros(padded(bucket.width, 1))
    for _ in range(ROUNDS):
        pending = torch.zeros(len(into))
        pending[: bucket.width] = values
        begin = time.process_time()
        message = codec.encode(pending, turn)
        middle = time.process_time()
        codec.add(message, into)
        encode.append(middle - begin)
        decode.append(time.process_time() - middle)
    return statistics.median(encode), statistics.median(decode)


def errors(workers: Counted, codec: Any, *, num_bytes: int, steps: int) -> tuple[float, float, float]:
    """Return the error of one sum, and of the mean over all steps with feedback and without. Runs in the pool."""
    bucket = bucket_of_bytes(num_bytes)
    found = []
    for forgets in (False, True):
        feedback, arrived, true = ErrorFeedback(codec, forgets=forgets), torch.zeros(bucket.width), 0
        for step in range(steps):
            own = [gradient_of(bucket, worker=worker, step=step) for worker in range(workers.count)]
            true = true + torch.stack(own).sum(0)
            feedback.sum(bucket, own[workers.index], workers)
            arrived += own[workers.index]
            if step == 0 and not forgets:
                found.append(float((arrived - true).norm() / true.norm()))
        found.append(float((arrived - true).norm() / true.norm()))
    return found[0], found[1], found[2]


def blocks() -> None:
    """Print the error of rounding at random for blocks of several lengths."""
    values = gradient_of(bucket_of_bytes(2**22), worker=0, step=0)
    print(f"{'block':>6} {'int8':>8} {'int4':>8}   {'bytes int8':>10} {'bytes int4':>10}")
    for block in (64, 128, 256, 512, 1024, 4096):
        found = []
        for levels in (127, 7):
            step = values.view(-1, block).abs().amax(1, keepdim=True) / levels
            part = values.view(-1, block) / step
            error = ((part - part.floor()) * (part.ceil() - part)).clamp_(min=0).sqrt() * step  # of one rounding
            found.append(float(error.norm() / values.norm()))
        ratios = [(code_bytes + 2 / block) / 4 for code_bytes in (1, 0.5)]
        print(f"{block:>6} {found[0]:>8.4f} {found[1]:>8.4f}   {ratios[0]:>10.4f} {ratios[1]:>10.4f}")


def table(num_bytes: int, workers: int, steps: int) -> None:
    """Print a line for each codec."""
    bucket = bucket_of_bytes(num_bytes)
    torch.set_num_threads(1)
    pool = RankPool()
    small = {"num_bytes": 2**20, "steps": steps}
    lost = pool.run(
        with_every_codec, workers=workers, exercise="benchmarks.codecs:errors", names=list(CODECS), usual=True, **small
    )[0]
    pool.close()
    print(f"{4 * bucket.width / 1e6:.1f} MB of float32, {workers} workers, torch {torch.__version__}, 1 core")
    print(
        f"{'codec':<10} {'encode':>7} {'decode':>7} {'exchange':>8} {'ratio':>7} {'1 Gb/s':>7} {'1 step':>8} "
        f"{f'{steps} steps':>9} {'without':>8}"
    )
    baseline = None
    for name in CODECS:
        encode_s, decode_s = coding_s(name, bucket)
        busy_s = exchange_s(name, bucket, workers)
        sent = codec_named(name).sent_bytes(bucket.width, workers, bucket.shapes)
        plain = 2 * (workers - 1) / workers * 4 * bucket.width
        total_s = busy_s + sent / LINK_BYTES_PER_S
        baseline = baseline or total_s
        rates = [f"{4 * bucket.width / seconds / 1e9:.2f}" for seconds in (encode_s, decode_s, busy_s)]
        print(
            f"{name:<10} {rates[0]:>7} {rates[1]:>7} {rates[2]:>8} {sent / plain:>7.4f} {total_s / baseline:>7.2f} "
            + " ".join(f"{error:>8.4f}" for error in lost[name])
        )


def main() -> None:
    """Read the flags and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=25, help="the size of the bucket")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--blocks", action="store_true")
    flags = parser.parse_args()
    if flags.blocks:
        blocks()
    else:
        table(flags.mb * 10**6, flags.workers, flags.steps)


if __name__ == "__main__":
    main()
