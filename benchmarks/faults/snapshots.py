"""What keeping the last state in memory costs a training step, with and without, alternating.

    python benchmarks/faults/snapshots.py                  examples/gpt.py on 2 workers, replicas and ZeRO
    python benchmarks/faults/snapshots.py --copy           copying a state: one native call beside torch

All sides take turns in one run, some steps each; figures are medians of the rounds. "noted" copies only what forward
changes (buffers, random states), as replicas do. "every step" copies all that the worker holds after every step; "auto"
is what that comes to at the pace that shoal takes by itself, from what it measures of its copies (in brackets).
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

MB = 1_000_000
SIDES = ("without", "noted", "every step")


def steps_worker(rank: Any, *, folder: Path, width: int, rounds: int, steps: int) -> dict[str, Any]:
    """Return the seconds of a step of each side in each round. Runs in the pool."""
    from shoal.comm.shm.kept import open_room, remove_room
    from shoal.comm.store import connect
    from shoal.core.events import EventLog
    from shoal.core.run_folder import RunFolder
    from shoal.core.toml import read_toml
    from shoal.spec.plan import Plan
    from shoal.training.opening import opened
    from shoal.training.snapshot_pace import Pace
    from shoal.training.snapshots import Keeping

    run_folder = RunFolder(folder)
    log, room = EventLog(run_folder.events_of(rank.index)), open_room("benchmark")
    store, plan = connect(rank, timeout_s=60), read_toml(Plan, run_folder.plan_toml)
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    job = gpt(width, (rounds + 1) * steps * len(SIDES))
    with opened(job, plan, run_folder, rank=rank, store=store, log=log, keeping=Keeping(room, 0, 1)) as run:
        snapshots, after_step = run.snapshots, run.snapshots.after_step
        copies = snapshots._copies
        assert copies is not None
        auto = Pace(0, is_busy=True)
        batches = run.batches()
        for number in range(rounds + 1):
            for side in SIDES if number % 2 else SIDES[::-1]:
                snapshots.after_step = (lambda: None) if side == "without" else after_step  # type: ignore[method-assign]
                copies._pace = auto if side == "every step" else None
                auto._next_decision = 0  # never: every step it is
                began_s = time.perf_counter()
                for _ in range(steps):
                    run.step(next(batches))
                times[side].append((time.perf_counter() - began_s) / steps)
        num_bytes, asked, figures = copies._files.num_bytes if copies._files else 0, auto.asked(), auto.figures()
        copies.wait()
    room.close()
    if rank.index == 0:
        remove_room("benchmark")
    log.close()
    return {"times": {s: t[1:] for s, t in times.items()}, "bytes": num_bytes, **figures, "every": asked}


def gpt(width: int, steps: int) -> Any:
    """Return examples/gpt.py with another width."""
    import dataclasses

    from shoal.training.jobfile import load_job

    job = load_job(Path(__file__).parents[2] / "examples" / "gpt.py").with_steps(steps)
    built: Any = job.model
    return dataclasses.replace(job, model=lambda: built(layers=4, width=width, heads=4))


def train(*, width: int, rounds: int, steps: int) -> None:
    """Print what a step takes."""
    from shoal.core.run_folder import RunFolder
    from shoal.core.toml import write_toml
    from shoal.spec.plan import Mesh, Plan
    from shoal.training.resolve import resolve_plan
    from tests.support.ranks import RankPool

    plans = {"replicas": Plan(mesh=Mesh(replicate=2)), "ZeRO-3": Plan(mesh=Mesh(shard=2), zero=3)}
    pool = RankPool()
    print(f"examples/gpt.py, width {width}, 2 workers: ms a step (share of a step without), medians of {rounds} rounds")
    print(f"{'':10}{'without':>10}{'noted':>18}{'every step':>18}{'auto':>26}{'state':>12}")
    try:
        for name, plan in plans.items():
            with tempfile.TemporaryDirectory() as path:
                folder = RunFolder.create(Path(path), None, stem="run")
                write_toml(folder.plan_toml, resolve_plan(gpt(width, 1), plan)[0])
                found = pool.run(steps_worker, workers=2, folder=folder.path, width=width, rounds=rounds, steps=steps)[
                    0
                ]
            print(row(name, found))
    finally:
        pool.close()


def row(name: str, found: dict[str, Any]) -> str:
    """Return a line of the table."""
    base = statistics.median(found["times"]["without"])
    cells = []
    for side in SIDES[1:]:
        extra = statistics.median(b - a for a, b in zip(found["times"]["without"], found["times"][side], strict=True))
        cells.append(f"{1e3 * (base + extra):>9.1f} ({100 * extra / base:+5.1f}%)")
    taken_ms = 1e3 * (found["stall_s"] + found["copy_s"])
    auto = f"every {found['every']} ({taken_ms:.1f} ms): {100 * extra / base / found['every']:+.1f}%"
    return f"{name:10}{1e3 * base:>10.1f}{cells[0]:>18}{cells[1]:>18}{auto:>26}{found['bytes'] / 2 / MB:>9.1f} MB"


def copy(*, rounds: int) -> None:
    """Print what a copy of a state takes."""
    import torch

    from shoal.native.snapshot import pieces_copier

    torch.set_num_threads(1)
    print(f"copying a state on one core: GB/s, medians of {rounds} rounds")
    print(f"{'':24}{'torch, one by one':>20}{'native, with its sum':>24}")
    for count, numel in ((1000, 1000), (300, 100_000), (8, 8_000_000)):
        sources = [torch.rand(numel) for _ in range(count)]
        places = [torch.zeros(numel) for _ in range(count)]
        native = pieces_copier(places, sources)
        times: dict[str, list[float]] = {"torch": [], "native": []}
        for _ in range(rounds + 1):
            began_s = time.perf_counter()
            for place, source in zip(places, sources, strict=True):
                place.copy_(source)
            middle_s = time.perf_counter()
            native(0)
            times["torch"].append(middle_s - began_s)
            times["native"].append(time.perf_counter() - middle_s)
        rates = [count * numel * 4 / statistics.median(times[side][1:]) / 1e9 for side in ("torch", "native")]
        print(f"{count:>6} tensors of {numel:>9,}{rates[0]:>19.2f}{rates[1]:>24.2f}")


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copy", action="store_true", help="copies alone, without training")
    parser.add_argument("--width", type=int, default=192, help="of the model (default 192)")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5, help="steps of each side in a round")
    arguments = parser.parse_args()
    if arguments.copy:
        copy(rounds=arguments.rounds)
    else:
        train(width=arguments.width, rounds=arguments.rounds, steps=arguments.steps)


if __name__ == "__main__":
    main()
