"""What being ready for faults costs a run in which none happens: one run, with all of it and without, taking turns.

    python benchmarks/faults/overhead.py [--rounds 41] [--steps 2] [--only replicas] [--job examples/gpt.py]

2 workers train a job as `shoal train` does. Turns with everything on, and turns with everything off, alternate within
the same run: the same processes, model and memory. On means:

    watch        beats in the store twice a second, and looks at those of the others; hangs are explained
    membership   a thread that waits for news of the others; after each step, a look whether somebody waits to be let in
    preempt      a thread that waits for signals; after each step, a look whether somebody was asked to stop
    snapshots    after each step the state is noted; where workers hold slices, it is copied to the host's memory

The watch and the other threads have no switch: overhead_worker.py stops them by patching what they wait in. What is not
switched: torch's record of collectives (a few a step here), and the comparison before the first step (`same`), which is
timed by itself. The ratio is taken within each round; printed are the median and the bounds that hold it 95 times in
100. Beside it, as shares of the time: how long the training thread is in what is called for it at each step (hooks),
and what the threads beside it compute. Exit 1: the ratio is more than 1.02.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script: shoal/ and benchmarks/ are there

from shoal.bench.step import median_bounds
from shoal.core.run_folder import RunFolder
from shoal.launch.local import Watch, launch_local
from shoal.launch.starting import Spawning
from shoal.spec.plan import Mesh, Plan
from shoal.training.host import measured_host
from shoal.training.jobfile import load_job
from shoal.training.prepare import write_run
from shoal.training.resolve import resolve_plan

PLANS = {"replicas": Plan(mesh=Mesh(replicate=2)), "ZeRO-3": Plan(mesh=Mesh(shard=2), zero=3)}
LIMIT = 1.02
WARM_STEPS = 12
"""By then it is decided how often snapshots are taken."""
_ROOT = Path(__file__).parents[2]


def measure(plan: Plan, job_file: Path, *, rounds: int, steps: int, runs: Path) -> list[dict[str, Any]]:
    """Return what each worker measured."""
    job = load_job(job_file).with_steps(WARM_STEPS + 2 * steps * (rounds + 1))
    plan, _ = resolve_plan(job, plan)
    folder = RunFolder.create(runs, None, stem="overhead")
    write_run(folder, job, plan, measured_host(), file=job_file)
    worker = Path(__file__).with_name("overhead_worker.py")
    command = Spawning([sys.executable, "-W", "ignore", str(worker), str(folder.path), str(rounds), str(steps)])
    lines: list[str] = []
    watch = Watch(on_line=lambda index, line: lines.append(f"[worker {index}] {line}"))
    ended = launch_local(command, workers=plan.workers, timeout_s=plan.timeout_s, watch=watch, on_loss=plan.on_loss)
    texts = [folder.path / f"turns-{index}.json" for index in range(plan.workers)]
    if any(worker.exit_code for worker in ended) or not all(text.exists() for text in texts):
        raise SystemExit("\n".join(lines[-60:]))
    return [json.loads(text.read_text()) for text in texts]


def show(title: str, found: list[dict[str, Any]]) -> bool:
    """Print a line for a plan; return whether the bar is met."""
    # They meet in every step: a turn is over when the slower worker is.
    on, off = ([max(times) for times in zip(*(each[side] for each in found), strict=True)] for side in ("on", "off"))
    ratios = [with_all / without for with_all, without in zip(on, off, strict=True)]
    low, high = median_bounds(ratios)
    ratio = statistics.median(ratios)
    most = lambda name: max(each[name] for each in found)  # noqa: E731
    every = next((event["every"] for each in found for event in each["snapshots"]), 0)
    copied = f"copied every {every} steps" if every else "nothing to copy"
    print(
        f"{title:10} {statistics.median(off) * 1e3:8.1f} ms {statistics.median(on) * 1e3:8.1f} ms {ratio:8.4f} "
        f"{low:.4f} to {high:.4f}  {most('hooks'):8.3%} {most('threads'):8.3%} {most('same_s') * 1e3:7.0f} ms   "
        f"{copied}, {len(ratios)} rounds",
        flush=True,
    )
    return ratio <= LIMIT


def main() -> int:
    """Print the table; return 1 if the bar is not met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--steps", type=int, default=2, help="of each turn")
    parser.add_argument("--only", default="", help="the plans with this in their name")
    parser.add_argument("--job", type=Path, default=_ROOT / "examples" / "gpt.py")
    asked = parser.parse_args()
    print(f"{asked.job.name}, 2 workers")
    print(
        f"{'':10} {'off':>11} {'on':>11} {'ratio':>8} {'95%':>16}  {'hooks':>8} {'threads':>8} {'same':>10}   snapshots"
    )
    is_good = True
    for title, plan in PLANS.items():
        if asked.only in title:
            with tempfile.TemporaryDirectory() as runs:
                found = measure(plan, asked.job, rounds=asked.rounds, steps=asked.steps, runs=Path(runs))
            is_good &= show(title, found)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
