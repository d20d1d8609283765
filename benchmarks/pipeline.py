"""The bubble of each pipeline schedule, measured beside its theory.

    python benchmarks/pipeline.py [--stages 2 --steps 12]

With as many cores as stages, the bubble is what the stages' clocks say: the time of a step's forward and backward in
which a stage did not compute because what it needs was not computed yet. Waiting for a message that is under way, and
the engine's own work between two actions, is told apart, as `sending`. With fewer cores the stages take turns on them,
and clocks say nothing: then the order in which each stage really took its micro-batches is replayed, with the same
duration for every forward and backward.

Theory: (p - 1) / (m + p - 1) of the time for p equal stages and m micro-batches with gpipe and 1f1b; divided by the
pieces a stage for interleaved, in the small; for zero-bubble what `planner.time.simulate` finds for equal stages. Each
is computed by that simulation, which gives the same for the first two.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from shoal.comm.rank import Rank
from shoal.comm.store import connect
from shoal.core.events import EventLog
from shoal.core.host import usable_cores
from shoal.core.run_folder import RunFolder
from shoal.core.toml import write_toml
from shoal.planner.time.simulate import Piece, simulate_pipeline
from shoal.spec.job import Job
from shoal.spec.plan import Batch, Mesh, Plan
from shoal.training.opening import open_run
from shoal.training.resolve import resolve_plan
from tests.support.ranks import RankPool

WIDTH, LAYERS = 1024, 8
SAMPLES = 128
"""Of a micro-batch. A piece computes 100 times as long as sending its 0.5 MB takes: theory knows no sending."""


class Layer(nn.Module):
    """A layer that costs the same wherever it stands."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` with a little added."""
        return x + self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


def job(steps: int, micro_batches: int) -> Job:
    """Return a job of equal layers, with micro-batches of SAMPLES."""
    x = torch.randn(SAMPLES * micro_batches, WIDTH, generator=torch.Generator().manual_seed(0))
    return Job(
        model=lambda: nn.Sequential(*(Layer() for _ in range(LAYERS))),
        loss=lambda output, batch: ((output - batch[0]) ** 2).mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        data=torch.utils.data.TensorDataset(x),
        batch_size=len(x),
        steps=steps,
    )


def measure_part(rank: Rank, *, steps: int, micro_batches: int, folder: Path) -> list[list[Any]]:
    """Be one stage; return what it did in each step, and how long forward and backward took it."""
    torch.set_num_threads(1)
    run_folder = RunFolder(folder)
    log = EventLog(run_folder.events_of(rank.index))
    seen = []
    with open_run(job(steps, micro_batches), run_folder, rank=rank, store=connect(rank, timeout_s=60), log=log) as run:
        torch.set_num_threads(1)
        for batch in run.batches():
            run.step(batch)
            seen.append([tuple(action) for action in run.engine.actions])
    log.close()
    return seen


def measure(pool: RankPool, plan: Plan, *, steps: int, micro_batches: int) -> list[list[list[Any]]]:
    """Return what each stage did in each step."""
    plan, _ = resolve_plan(job(steps, micro_batches), plan)
    with tempfile.TemporaryDirectory() as folder:
        run_folder = RunFolder.create(Path(folder), None, stem="run")
        write_toml(run_folder.plan_toml, plan)
        arguments = {"steps": steps, "micro_batches": micro_batches, "folder": run_folder.path}
        return pool.run(measure_part, workers=plan.workers, **arguments)


def by_clock(stages: list[list[list[Any]]], *, pieces: int) -> tuple[float, float]:
    """Return the medians, over the steps, of the parts of the pipeline's time that are bubble, and sending."""
    bubbles, sendings = [], []
    for step in range(3, len(stages[0])):
        actions = [stage[step] for stage in stages]
        begin_s = min(each[3] for stage in actions for each in stage)
        end_s = max(each[4] for stage in actions for each in stage)
        done = {tuple(each[:3]): each[4] for stage in actions for each in stage}
        bubble_s = sum(_bubble_s(stage, done, begin_s, end_s, pieces) for stage in actions)
        busy_s = sum(each[4] - each[3] for stage in actions for each in stage)
        all_s = len(actions) * (end_s - begin_s)
        bubbles.append(bubble_s / all_s)
        sendings.append(1 - (busy_s + bubble_s) / all_s)
    return statistics.median(bubbles), statistics.median(sendings)


def _bubble_s(
    stage: list[Any], done: dict[tuple[str, int, int], float], begin_s: float, end_s: float, pieces: int
) -> float:
    """Return how long a stage waited for what others had still to compute, and for their end."""
    seconds, free_s = 0.0, begin_s
    for kind, number, piece, start_s, stop_s in stage:
        before = {"forward": piece - 1, "backward": piece + 1}.get(kind, -1)
        if 0 <= before < pieces:
            seconds += min(max(0.0, done[kind, number, before] - free_s), max(0.0, start_s - free_s))
        free_s = stop_s
    return seconds + end_s - free_s


def by_order(stages: list[list[list[Any]]], *, pieces: int) -> float:
    """Return the same, for the order of the last step with a duration of 1 for a forward."""
    orders = [[(kind, number, piece) for kind, number, piece, *_ in stage[-1]] for stage in stages]
    split = any(kind == "weights" for order in orders for kind, *_ in order)
    lasts = {"forward": 1.0, "backward": 1.0 if split else 2.0, "weights": 1.0}
    done: dict[tuple[str, int, int], float] = {}
    now, turns = [0.0] * len(orders), [0] * len(orders)
    while any(turn < len(order) for turn, order in zip(turns, orders, strict=True)):
        before = sum(turns)
        for stage, order in enumerate(orders):
            while turns[stage] < len(order):
                kind, number, piece = order[turns[stage]]
                needs = [("forward", number, piece - 1)] if kind == "forward" and piece else []
                needs += [("backward", number, piece + 1)] if kind == "backward" and piece + 1 < pieces else []
                if any(need not in done for need in needs):
                    break
                now[stage] = max([now[stage], *(done[need] for need in needs)]) + lasts[kind]
                done[kind, number, piece] = now[stage]
                turns[stage] += 1
        assert sum(turns) > before, "the schedule waits for itself"
    busy = sum(lasts[kind] for order in orders for kind, *_ in order)
    return 1 - busy / (len(orders) * max(now))


def in_theory(plan: Plan, micro_batches: int, *, backward: float) -> float:
    """Return the same as the planner simulates it, for equal pieces whose backward takes `backward` forwards."""
    pieces = [Piece(forward_s=1.0, backward_s=backward, weights_s=backward / 2) for _ in range(plan.pieces)]
    timeline = simulate_pipeline(pieces, stages=plan.mesh.pipeline, micro_batches=micro_batches, schedule=plan.schedule)
    return sum(timeline.bubble_s) / (plan.mesh.pipeline * timeline.makespan_s)


def main() -> None:
    """Measure every schedule, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    pool = RankPool()
    print("stages schedule     micro-batches  theory measured  ratio  sending  how")
    try:
        for stages in arguments.stages:
            for schedule, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1)):
                for micro_batches in (stages, 2 * stages):
                    print(_row(pool, stages, schedule, chunks, micro_batches, steps=arguments.steps), flush=True)
    finally:
        pool.close()


def _row(pool: RankPool, stages: int, schedule: str, chunks: int, micro_batches: int, *, steps: int) -> str:
    plan = Plan(mesh=Mesh(pipeline=stages), schedule=schedule, chunks=chunks, batch=Batch(micro_batch=SAMPLES))
    has_cores = usable_cores() >= stages
    seen = measure(pool, plan, steps=steps if has_cores else 1, micro_batches=micro_batches)
    if has_cores:
        forward_s, backward_s = (_mean_s(seen, kinds) for kinds in (("forward",), ("backward", "weights")))
        theory, how = in_theory(plan, micro_batches, backward=backward_s / forward_s), "clock"
        measured, sending = by_clock(seen, pieces=plan.pieces)
    else:
        theory, how = in_theory(plan, micro_batches, backward=2.0), "order"
        measured, sending = by_order(seen, pieces=plan.pieces), 0.0
    return (
        f"{stages:6} {schedule:12} {micro_batches:13} {theory:7.1%} {measured:8.1%} {measured / theory:6.2f} "
        f"{sending:8.1%}  {how}"
    )


def _mean_s(stages: list[list[list[Any]]], kinds: tuple[str, ...]) -> float:
    return sum(e[4] - e[3] for stage in stages for step in stage[3:] for e in step if e[0] in kinds)


if __name__ == "__main__":
    main()
