"""Schedules of random faults from a seed: the same on every machine, so that a run that fails can be run again.

1. Faults come in waves, each in one step: one worker, or several at once, at a point drawn by its weight.
2. Steps of two waves lie `apart` steps from each other, more or less by half of that: a schedule can leave the time in
   which replacements of the workers lost before have come.
3. No wave strikes all workers: somebody must be left who knows the state. With `spares`, that somebody is the same for
   some waves, and the one to follow is spared in the last of them: so it holds also where replacements come late.

Example: 4 workers, 400 steps, 5 faults, 100 apart may give worker 2 in step 31 (backward), workers 0 and 3 in step 204
(all-reduce), worker 1 in step 318 (all-reduce) and worker 3 in step 318 (recovery): while the others recover from that.
"""

import random

from shoal.core.errors import ConfigError
from shoal.fault.inject import Fault, fail_at

_POINTS = {
    "step begins": 4,
    "backward": 3,
    "all-reduce": 4,
    "checkpoint: copying": 1,
    "checkpoint: writing": 2,
    "checkpoint: committing": 1,
    "recovery": 2,
    "start": 1,
}
"""How often each point is drawn: most time is spent in steps, and most of what goes wrong lies elsewhere."""
_TOGETHER = 0.25
"""How often a worker is struck together with others."""
_FIRST_STEP = 2
_SPARED_WAVES = 3
"""How many waves spare the same worker."""


def random_faults(
    seed: int, workers: int, steps: int, count: int, *, apart: int = 1, spares: bool = False
) -> list[Fault]:
    """Return `count` kills for a run of `workers` workers and `steps` steps, in the order of their steps.

    A fault at "start" waits for step 0; one at "recovery" goes with one in the same step, which causes that recovery.
    """
    waves = (steps - _FIRST_STEP) // apart + 1
    draw = random.Random(seed)  # noqa: S311 - a schedule, no secret
    spared = [draw.randrange(workers) for _ in range(waves // _SPARED_WAVES + 2)] if spares else []
    most = [workers - max(1, len(_safe(wave, spared))) for wave in range(waves)]
    if workers < 2 or steps < _FIRST_STEP or not 0 <= count <= sum(most):
        raise ConfigError(
            f"{count} random faults do not fit a run of {workers} workers and {steps} steps: give it more steps; every "
            f"{apart} can lose all workers but one, from the second step on."
        )
    first = [_FIRST_STEP + number * apart + draw.randint(0, (apart - 1) // 2) for number in range(waves)]
    faults: list[Fault] = []
    while len(faults) < count:
        point = draw.choices(list(_POINTS), weights=list(_POINTS.values()))[0]
        wave = draw.randrange(waves)
        step = 0 if point == "start" else min(steps, first[wave])
        struck = {fault.worker for fault in faults if fault.step == step} | _safe(0 if step == 0 else wave, spared)
        free = draw.sample(sorted(set(range(workers)) - struck), k=workers - len(struck))
        most_now = min(count - len(faults), len(free) - (0 if spares else 1))
        faults += _wave(draw, point, step, free, most=most_now)
    return sorted(faults, key=lambda fault: fault.step)


def _safe(wave: int, spared: list[int]) -> set[int]:
    """Return whom the wave must not strike."""
    block, number = divmod(wave, _SPARED_WAVES)
    return set(spared[block : block + (2 if number == _SPARED_WAVES - 1 else 1)])


def _wave(draw: random.Random, point: str, step: int, free: list[int], *, most: int) -> list[Fault]:
    """Return the faults of one wave, on `most` workers of `free`; none if that cannot be."""
    is_alone = point in ("start", "checkpoint: committing")
    together = 1
    if point == "recovery" or (not is_alone and draw.random() < _TOGETHER):
        together = draw.randint(2, max(2, len(free) - 1))
    victims = free[:together]
    if point == "checkpoint: committing":  # worker 0 does that
        victims = [worker for worker in free if worker == 0]
    if not 0 < len(victims) <= most:
        return []
    points = ["all-reduce", *[point] * (len(victims) - 1)] if point == "recovery" else [point] * len(victims)
    return [fail_at(victim, step, point=each) for victim, each in zip(victims, points, strict=True)]
