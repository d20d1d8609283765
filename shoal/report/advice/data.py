"""Slow data: training waits for samples.

1. Loading keeps ahead as soon as it is waited for (data/loading/pace.py), so a step takes the longer of what it does
   with a batch and what filling one takes, divided by the threads that fill: max(used, fill / threads).
2. Wanted are as many threads as make the second a little shorter than the first: fill / (0.8 used).
3. Threads that compute need cores: where filling a batch keeps its thread's core busy, more threads than cores bring
   nothing, and the advice is to prepare the samples once instead (`shoal pack`).

Example: a step uses a batch for 30 ms, and one thread fills one in 100 ms: 70% of the step is waiting. 100 / 24, so 5
threads fill one in 20 ms: a step then takes 30 ms, 3.3 times as many a second.
"""

import math

from shoal.report.advice.advice import NOTICED, Advice, percent, times
from shoal.report.advice.evidence import Busy, Evidence
from shoal.report.logs.facts import Loading

_HEADROOM = 0.8
_MOST_THREADS = 64
_LEAST_S = 1e-6
"""What a batch is used for at least: of a step that was nothing but waiting, no time is left."""
_COMPUTING = 0.5
"""From this fraction of its time on, a thread that loads computes rather than waits for storage."""


def on_data(run: Evidence) -> Advice | None:
    """Return how many threads would be enough."""
    worker = max(run.workers, key=lambda each: each.split["data"])
    loading = run.loading.get(worker.rank)
    if worker.share("data") < NOTICED or loading is None or not loading.steps:
        return None
    used_s = max(worker.total_s - worker.split["data"], _LEAST_S)
    fill_s = loading.batch_s
    wanted = math.ceil(min(fill_s / (_HEADROOM * used_s), _most_threads(loading, run)))
    said = f"{percent(worker.share('data'))} of each step is spent waiting for data"
    if wanted <= loading.threads:
        return _prepared(worker, run, said) if _computes(loading) else None
    field, word = ("workers", "process") if run.plan.loading.workers else ("threads", "thread")
    change: dict[str, object] = {f"loading.{field}": wanted}
    gain = run.gain(_others_s(run, worker, max(used_s, fill_s / wanted)))
    more = wanted - loading.threads
    threads = f"{more} more loader {word}{('es' if word == 'process' else 's') * (more > 1)}"
    sentence = f"{said}; {threads} {'are' if more > 1 else 'is'} predicted to bring {times(gain)}."
    return Advice("data", worker.share("data"), sentence, change, gain)


def _prepared(worker: Busy, run: Evidence, said: str) -> Advice:
    """Return the advice where all cores load already: what is done once is not done in every epoch."""
    gain = run.gain(worker.total_s - worker.split["data"])
    sentence = (
        f"{said}, and the threads that load have all the cores they can get: prepare the samples once (shoal pack), "
        f"which brings {times(gain)} at most."
    )
    return Advice("data", worker.share("data"), sentence, None, gain)


def _most_threads(loading: Loading, run: Evidence) -> int:
    return max(1, int(run.cores)) if _computes(loading) else _MOST_THREADS


def _computes(loading: Loading) -> bool:
    return loading.fill_cpu_s > _COMPUTING * loading.fill_s


def _others_s(run: Evidence, worker: Busy, seconds: float) -> float:
    """Return what a step takes where this worker takes `seconds`: no less than the others are busy."""
    return max([seconds, *(each.busy_s - each.split["data"] for each in run.workers if each is not worker)])
