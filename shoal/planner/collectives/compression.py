"""Whether to compress gradients: T_comp * I_comp < T_orig * I_orig?

T is the time of a step, I how many steps it takes to reach the same loss. Compressed gradients travel faster, but are
encoded and decoded in each step, and may need more steps.

    T_orig = compute + exposed(all-reduce of n bytes)
    T_comp = compute + n / encode rate + decoded bytes / decode rate + exposed(exchange of ratio * n bytes)

Exposed is what does not hide behind `overlap_s` of computing. How encoded gradients are exchanged depends on the codec:

1. Those that can be added while encoded go through the engine's all-reduce, and their sum is decoded once (PowerSGD).
2. Dense ones (bf16, int8, int4, sign) go in slices: worker j is sent slice j by all, adds them up, encodes the sum, and
   all gather that: 2 (p-1)/p ratio n bytes. For 2 workers it is the same as to gather.
3. Sparse ones (top-k, threshold) are gathered: each worker receives those of all p, (p-1) ratio n bytes, and decodes
   them; or they go in slices in bf16, where that is less.
4. Under ZeRO each worker wants its slice of the sum alone: what is encoded goes to whose slice it is, (p-1)/p ratio n
   bytes, and nothing is gathered. Uncompressed that is a reduce-scatter, half of an all-reduce.

What all send to all, the workers of a host send over its one adapter: with h on each of them h (p-h)/p of the bytes of
a worker go through it. A ring goes through each adapter once, however many they are.

Example: 400 MB, 16 workers, 10 Gb/s, a step of 300 ms. The all-reduce takes 600 ms, so T_orig = 900 ms. The top 1% of
the values with their places are 4 MB: 48 ms to gather. With 200 ms to encode (2 GB/s) and 32 to decode, T_comp =
580 ms. It pays if it needs less than 1.55 times as many steps.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.planner.collectives.allreduce import ALLREDUCE, Algorithm, doubling_all_gather, ring, ring_all_gather
from shoal.planner.collectives.codecs import CODECS, Codec
from shoal.planner.collectives.winners import changes, fastest_allreduce

SLOWEST_BYTES_PER_S, FASTEST_BYTES_PER_S = 1e3, 1e15
"""Between these the link's break-even speed is looked for."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side of the inequality: a step, and how many of them."""

    compute_s: float
    exchange: str
    """What carries the gradients: the name of an all-reduce algorithm, or all-gather."""
    bytes_per_worker: float
    exchange_s: float
    exposed_s: float
    """The part of `exchange_s` that does not hide behind computing."""
    encode_s: float = 0.0
    decode_s: float = 0.0
    iterations: float = 1.0
    """Steps to the same loss, over those without compression."""

    @property
    def step_s(self) -> float:
        """How long a step takes: T."""
        return self.compute_s + self.encode_s + self.exposed_s + self.decode_s

    @property
    def total_s(self) -> float:
        """What one step without compression has become: T * I."""
        return self.step_s * self.iterations

    def as_json(self) -> dict[str, Any]:
        """Return all figures."""
        return dataclasses.asdict(self) | {"step_s": self.step_s, "total_s": self.total_s}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where the question is asked: the gradients, who exchanges them, over what, and the rest of a step."""

    num_bytes: float
    workers: int
    link_bytes_per_s: float
    latency_s: float
    compute_s: float
    overlap_s: float = 0.0
    """Computing behind which an exchange can hide."""
    per_host: int = 1
    """Workers of a host, who share what has the rate above: its adapter."""
    scatters: bool = False
    """Whether each worker wants its slice of the sum alone (ZeRO)."""
    algorithms: Mapping[str, Algorithm] | None = None
    """The all-reduces to take the fastest of; None: all, and the engine's for what that carries."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Both sides, and where the answer would change."""

    original: Side
    compressed: Side
    break_even_iterations: float
    """The growth of the number of steps at which it no longer pays."""
    paying_links: tuple[tuple[float, float], ...]
    """The speeds of links on which it pays, in bytes per second: from 0 or above, to inf or below."""

    @property
    def break_even_link_bytes_per_s(self) -> float | None:
        """The speed of the link at which the answer changes, if it does so once."""
        edges = {edge for ends in self.paying_links for edge in ends} - {0.0, math.inf}
        return edges.pop() if len(edges) == 1 else None

    @property
    def pays(self) -> bool:
        """Whether T_comp * I_comp < T_orig * I_orig."""
        return self.compressed.total_s < self.original.total_s

    def as_json(self) -> dict[str, Any]:
        """Return all figures; null stands for what has no end."""
        links = [[low, None if math.isinf(high) else high] for low, high in self.paying_links]
        growth = self.break_even_iterations
        return {
            "pays": self.pays,
            "original": self.original.as_json(),
            "compressed": self.compressed.as_json(),
            "break_even_iterations": None if math.isinf(growth) else growth,
            "break_even_link_bytes_per_s": self.break_even_link_bytes_per_s,
            "paying_links_bytes_per_s": links,
        }


def weigh(
    codec: Codec,
    setting: Setting,
    *,
    encode_bytes_per_s: float = math.inf,
    decode_bytes_per_s: float = math.inf,
    iterations: float = 1.0,
) -> Verdict:
    """Return whether `codec` pays in `setting`; the rates count the bytes of gradients that it reads and writes."""

    def sides(link_bytes_per_s: float) -> tuple[Side, Side]:
        here = dataclasses.replace(setting, link_bytes_per_s=link_bytes_per_s)
        compressed = dataclasses.replace(
            exchange(codec, here),
            encode_s=setting.num_bytes / encode_bytes_per_s,
            decode_s=_decoded_bytes(codec, setting) / decode_bytes_per_s,
            iterations=iterations,
        )
        return exchange(CODECS["none"], here), compressed

    def pays(link_bytes_per_s: float) -> bool:
        original, compressed = sides(link_bytes_per_s)
        return compressed.total_s < original.total_s

    original, compressed = sides(setting.link_bytes_per_s)
    return Verdict(
        original=original,
        compressed=compressed,
        break_even_iterations=original.step_s / compressed.step_s if compressed.step_s else math.inf,
        paying_links=_ranges(changes(pays, SLOWEST_BYTES_PER_S, FASTEST_BYTES_PER_S)),
    )


def exchange(codec: Codec, setting: Setting) -> Side:
    """Return a step whose gradients travel as `codec` leaves them; what encoding and decoding take is not in it."""
    travel = _scatter if setting.scatters else _TRAVELS[codec.travels]
    name, seconds, sent_bytes = travel(codec, setting)
    return Side(
        compute_s=setting.compute_s,
        exchange=name,
        bytes_per_worker=sent_bytes,
        exchange_s=seconds,
        exposed_s=max(0.0, seconds - setting.overlap_s),
    )


def decoded_bytes(codec: Codec, num_bytes: float, workers: int) -> float:
    """Return what a worker decodes in a step: one sum; its slice of all, and the sums; or what all have sent."""
    if codec.travels == "sparse":
        return num_bytes * codec.ratio * workers
    if codec.travels == "gathered":
        return num_bytes * workers
    return num_bytes if codec.travels == "summed" else num_bytes * (1 + (workers - 1) / workers)


def _decoded_bytes(codec: Codec, setting: Setting) -> float:
    if setting.scatters:  # what the others say of its slice
        return setting.num_bytes * (setting.workers - 1) / setting.workers
    return decoded_bytes(codec, setting.num_bytes, setting.workers)


def _sum(codec: Codec, setting: Setting) -> tuple[str, float, float]:
    algorithms = setting.algorithms
    if algorithms is None:
        algorithms = {"ring": ring} if codec.by_engine else ALLREDUCE
    name, cost = fastest_allreduce(
        setting.num_bytes * codec.ratio / codec.rounds,
        setting.workers,
        setting.link_bytes_per_s,
        setting.latency_s,
        algorithms=algorithms,
    )
    return name, codec.rounds * cost.seconds, codec.rounds * cost.bytes_per_worker


def _gather(codec: Codec, setting: Setting) -> tuple[str, float, float]:
    all_bytes = setting.num_bytes * codec.ratio * setting.workers
    cost = doubling_all_gather(all_bytes, setting.workers, setting.link_bytes_per_s, setting.latency_s)
    return "all-gather", cost.seconds, cost.bytes_per_worker


def _slice(codec: Codec, setting: Setting) -> tuple[str, float, float]:
    num_bytes = setting.num_bytes * codec.ratio
    gathered = ring_all_gather(num_bytes, setting.workers, setting.link_bytes_per_s, setting.latency_s)
    return "slices", _all_to_all_s(num_bytes, setting) + gathered.seconds, 2 * gathered.bytes_per_worker


def _scatter(codec: Codec, setting: Setting) -> tuple[str, float, float]:
    num_bytes = setting.num_bytes * codec.ratio
    ring = ring_all_gather(num_bytes, setting.workers, setting.link_bytes_per_s, setting.latency_s)
    if codec.travels == "summed":
        return "ring", ring.seconds, ring.bytes_per_worker
    return "slices", _all_to_all_s(num_bytes, setting), ring.bytes_per_worker


def _all_to_all_s(num_bytes: float, setting: Setting) -> float:
    """Return how long it takes that each of the workers has sent a slice of `num_bytes` to each other one."""
    workers, per_host = setting.workers, setting.per_host
    through = per_host * (workers - per_host) if workers > per_host else workers - 1
    return (workers - 1) * setting.latency_s + through / workers * num_bytes / setting.link_bytes_per_s


def _sparse(codec: Codec, setting: Setting) -> tuple[str, float, float]:
    dense = CODECS["bf16"]
    return _gather(codec, setting) if codec.ratio * setting.workers <= 2 * dense.ratio else _slice(dense, setting)


_TRAVELS = {"summed": _sum, "gathered": _gather, "sliced": _slice, "sparse": _sparse}


def _ranges(found: list[tuple[float, bool]]) -> tuple[tuple[float, float], ...]:
    """Return the stretches on which it pays; the first begins at 0 and the last does not end."""
    starts = [0.0, *(rate for rate, _ in found[1:])]
    ends = [*starts[1:], math.inf]
    return tuple((start, end) for start, end, (_, pays) in zip(starts, ends, found, strict=True) if pays)
