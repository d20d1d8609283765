"""Which way gradients take: the algorithm that the measured links make the fastest, and whether a codec pays.

Of the algorithms that know no hosts, the fastest for a bucket (buckets.py) on the slowest link; where hosts have
several workers, two levels against it: shared memory inside, and between hosts a slice for each worker.

Example: 4 hosts of 1 worker at 12.5 MB/s and 0.2 ms: buckets of 1 MiB, for which halving-doubling takes 4 * 0.2 ms +
1.5 * 84 ms, the fastest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.planner.collectives.allreduce import Cost, halving_doubling
from shoal.planner.collectives.buckets import bucket_bytes
from shoal.planner.collectives.codecs import CODECS, codec_for
from shoal.planner.collectives.compression import Setting, exchange, weigh
from shoal.planner.collectives.crowd import STEPS, crowded
from shoal.planner.collectives.winners import fastest
from shoal.spec.device import Link

_CANDIDATES = tuple(name for name in STEPS if name != "naive")
"""What is chosen from. The naive way sends as many messages as a tree, in as many steps or more: it is there to compare
with, and could only win by an error of measurement."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """An algorithm, what a bucket takes by it, and what it would take by others."""

    name: str
    bucket_bytes: int
    seconds: dict[str, float]

    def reason(self) -> str:
        """Return why, in a sentence."""
        others = sorted(((s, name) for name, s in self.seconds.items() if name != self.name))[:2]
        ms = 1e3 * self.seconds[self.name]
        than = ", ".join(f"{name} {1e3 * seconds:.3g} ms" for seconds, name in others)
        return f"{self.name}: {self.bucket_bytes / 2**20:.3g} MiB in {ms:.3g} ms" + (f"; {than}" if than else "")


def choose_way(*, workers: int, per_host: int, inside: Link | None, between: Link, bucket: int = 0) -> Way:
    """Return the fastest way among hosts of `per_host` workers; `bucket` bytes, or as many as fit the link."""
    size = bucket or bucket_bytes(between, workers)
    # The workers of a host share its adapter.
    costs = {name: crowded(name, size, workers, between) for name in _CANDIDATES}
    if inside is not None and 1 < per_host < workers and workers % per_host == 0:
        costs["two-level"] = _two_level(size, workers // per_host, per_host, inside, between)
    return Way(name=fastest(costs), bucket_bytes=size, seconds={name: cost.seconds for name, cost in costs.items()})


def _two_level(num_bytes: float, hosts: int, per_host: int, inside: Link, between: Link) -> Cost:
    """Return what it takes where the slices of a host go over its one adapter together."""
    outer = halving_doubling(num_bytes, hosts, between.bytes_per_s, between.latency_s)
    inner_bytes = 2 * (per_host - 1) / per_host * num_bytes
    seconds = outer.seconds + 2 * inside.latency_s + inner_bytes / inside.bytes_per_s
    return Cost(outer.steps + 2, outer.bytes_per_worker / per_host + inner_bytes, seconds, inner_bytes)


@dataclass(frozen=True, kw_only=True)
class CodecRate:
    """What a codec costs on this machine, and what it costs in steps."""

    encode_bytes_per_s: float
    decode_bytes_per_s: float
    iterations: float
    """Steps to the same loss, over those without it."""


@dataclass(frozen=True, kw_only=True)
class CodecChoice:
    """A codec, or none, and why."""

    name: str
    why: str
    totals_s: dict[str, float]
    """T * I of every codec: what one uncompressed step becomes."""


def choose_codec(
    setting: Setting,
    rates: Mapping[str, CodecRate],
    *,
    shapes: Sequence[tuple[int, ...]] = (),
    exchange_s: float | None = None,
) -> CodecChoice:
    """Return the codec with the least T * I, if that is less than uncompressed; so any other must beat 16 bits (bf16).

    `shapes` are those of the gradients: how small low rank makes them depends on these. `exchange_s` is what the
    exchange takes uncompressed, by the way that was chosen for it; by default, by the fastest closed form.
    """
    totals = {
        name: weigh(
            codec_for(name, shapes),
            setting,
            encode_bytes_per_s=rate.encode_bytes_per_s,
            decode_bytes_per_s=rate.decode_bytes_per_s,
            iterations=rate.iterations,
        ).compressed.total_s
        for name, rate in rates.items()
    }
    plain = exchange(CODECS["none"], setting)
    plain_s = plain.total_s
    if exchange_s is not None:
        plain_s += max(0.0, exchange_s - setting.overlap_s) - plain.exposed_s
    best = min(totals, key=lambda name: totals[name])
    said = [f"{1e3 * totals[best]:.3g} ms a step and loss", f"{1e3 * plain_s:.3g} ms uncompressed"]
    if totals[best] >= plain_s:
        return CodecChoice(name="none", why=f"no codec pays here: {best} {', '.join(said)}", totals_s=totals)
    if best != "bf16" and "bf16" in totals:
        said.insert(1, f"{1e3 * totals['bf16']:.3g} ms with 16 bits")
    return CodecChoice(name=best, why=f"{best} pays: {', '.join(said)}", totals_s=totals)
