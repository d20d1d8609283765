"""What codecs cost: how fast this machine encodes and decodes, timed in a moment, and how many more steps they need."""

import time
from collections.abc import Callable, Sequence

import torch

from shoal.compress.bucket import Bucket, padded
from shoal.compress.codec import Turn
from shoal.compress.codecs import codec_named
from shoal.planner.collectives.choice import CodecRate

ITERATIONS = {
    "bf16": 1.0,
    "int8": 1.0,
    "int4": 26 / 25,
    "sign": 41 / 25,
    "topk": 160 / 25,
    "threshold": 104 / 25,
    "powersgd": 26 / 25,
}
"""Steps to the loss of uncompressed training, over its 25: examples/gpt.py, 4 workers (docs/communication.md, by
benchmarks/time_to_loss.py --rate none --steps 30 --most 160, 2026-11-18). `topk` was not there after 160, so that its
figure is the least that it can be: it is taken only where nothing else comes near its few bytes. Other models may need
other numbers of steps; whoever knows them names the codec."""
_NUMEL = 1 << 20
_ROWS = 1 << 10


class Alone:
    """Collectives of two workers of which the other has sent the same: what is timed is encoding and decoding."""

    index, count = 0, 2

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Add nothing."""

    def all_gather(self, tensor: torch.Tensor, sizes: Sequence[int] | None = None) -> list[torch.Tensor]:  # noqa: ARG002
        """Return the same twice."""
        return [tensor, tensor]

    def all_to_all(self, parts: Sequence[torch.Tensor], sizes: Sequence[int] | None = None) -> list[torch.Tensor]:  # noqa: ARG002
        """Return what would have been sent."""
        return [parts[0], parts[1]]


def measured_rates(
    names: Sequence[str], device: torch.device, agree_least: Callable[[float], float]
) -> dict[str, CodecRate]:
    """Return what each codec costs here, the same on every worker: that of the slowest. Called by every worker."""
    rates = {}
    for name in names:
        # Encoding and decoding are timed together; half of the time is taken for each.
        bytes_per_s = agree_least(2 * 4 * _NUMEL / _seconds(name, device))
        rates[name] = CodecRate(
            encode_bytes_per_s=bytes_per_s, decode_bytes_per_s=bytes_per_s, iterations=ITERATIONS[name]
        )
    return rates


def _seconds(name: str, device: torch.device) -> float:
    """Return the seconds of one exchange with nobody, the second fastest of four."""
    codec = codec_named(name)
    bucket = Bucket(("weight",), ((_ROWS, _NUMEL // _ROWS),))
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(padded(_NUMEL, 2), generator=generator).to(device)
    memory: dict[str, torch.Tensor] = {}
    times = []
    for number in range(4):
        pending, out = gradient.clone(), torch.empty(_NUMEL, device=device)
        turn = Turn(bucket, 0, number, 0, memory)
        begin_s = time.perf_counter()
        codec.observe(gradient[:_NUMEL], turn)
        codec.sum(pending, out, turn, Alone())
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin_s)
    return sorted(times)[1]
