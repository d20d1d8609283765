"""Slow link: workers wait for gradients on their way, not for each other.

1. What shows of the exchange was measured; what it takes by the measured link, the planner says (formulas of
   planner/collectives/compression.py). The difference is what computing hides, with any codec.
2. A codec sends fewer bytes, by the engine, and computes: what shows is max(0, its exchange - hidden) + encoding +
   decoding.
3. Only codecs are looked at with which training needs as many steps as without (bf16, int8: docs/communication.md).

Example: 8 MB of gradients, 2 hosts, 12.5 MB/s: 640 ms, and 600 of a step of 650 ms are seen waiting; so 40 are hidden.
int8 sends a quarter: 242 - 40 ms, and 40 ms to encode and decode: a step takes 292 ms, 2.2 times as many a second.
"""

from shoal.planner.collectives.codecs import CODECS, Codec
from shoal.planner.collectives.compression import Setting, decoded_bytes, exchange
from shoal.report.advice.advice import NOTICED, Advice, percent, times
from shoal.report.advice.evidence import Evidence

_AS_GOOD = ("bf16", "int8")
_ENGINE = 1.5
"""How much longer the engine takes for what a codec sends than the link would. Over 100 Mb/s, 1.4 for int4 and 4 hosts
(benchmarks/time_to_loss.py: 1.0 s beside computing, for 0.70 s of bytes); over 20 to 100 Mb/s, 1.5 to 1.6 for int8 and
2 hosts (benchmarks/report/bottlenecks.py); 2026-11."""
_CODEC_BYTES_PER_S = 5e8
"""What encoding and decoding reach on one core, at least: bf16 0.9 and int8 1.8 GB/s with both cores of a machine busy
(measured_rates, AMD EPYC, 2026-11); keeping what was lost for the next step reads and writes as much again."""


def on_link(run: Evidence) -> Advice | None:
    """Return which codec shortens the exchange most."""
    plan, met, num_bytes = run.plan, run.communication, run.gradient_bytes
    shown = min(worker.split["communication"] for worker in run.workers)
    is_plain = plan.sync.mode == "all-reduce" and plan.sync.codec == "none" and plan.mesh.keeps_whole
    if not is_plain or met is None or met.between is None or not num_bytes or shown < NOTICED * run.step_s:
        return None
    setting = Setting(
        num_bytes=num_bytes,
        workers=plan.mesh.data,
        link_bytes_per_s=met.between.bytes_per_s,
        latency_s=met.between.latency_s,
        compute_s=0.0,
    )
    shows = {name: _shown_s(CODECS[name], setting, shown) for name in _AS_GOOD}
    name = min(shows, key=lambda each: shows[each])
    change: dict[str, object] = {"sync.codec": name}
    gain = run.gain(run.step_s - shown + shows[name])
    sentence = (
        f"{percent(shown / run.step_s)} of each step is spent waiting for gradients on their way at "
        f"{met.between.bytes_per_s / 1e6:.3g} MB/s; sending them as {name} is predicted to bring "
        f"{times(gain)}."
    )
    return Advice("link", shown / run.step_s, sentence, change, gain)


def _shown_s(codec: Codec, setting: Setting, shown: float) -> float:
    """Return how long workers wait for gradients with `codec`, where they wait for `shown` seconds without."""
    plain_s, codec_s = exchange(CODECS["none"], setting).exchange_s, _ENGINE * exchange(codec, setting).exchange_s
    decoded = decoded_bytes(codec, setting.num_bytes, setting.workers)
    computed_s = (setting.num_bytes + decoded) / _CODEC_BYTES_PER_S
    if shown >= plain_s:  # the link is slower than it was measured to be: by as much with a codec
        return codec_s * shown / plain_s + computed_s
    return max(0.0, codec_s - (plain_s - shown)) + computed_s
