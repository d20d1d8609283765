"""What measuring costs a run: one run, with all that the report needs and without, taking turns.

    python benchmarks/report/cost.py [--rounds 201] [--workers 2] [--only digits]

Workers train a job as `shoal train` does. Turns with everything on, and turns with everything off, alternate within the
same run: the same processes, model and memory. On means:

    clock      the moments of each step: what it waited for, computed, exchanged and saved
    traffic    each collective, with its size and its moments
    events     a line a step and worker, and every 100 steps what travelled and what was loaded
    outliers   each step is held against the median of the last ones
    loading    how long threads compute while they load

Off, none of that is called: cost_worker.py puts calls that do nothing in its place. TensorBoard's scalars, which the
report does not need, are written in both. The ratio is taken within each
round; printed are the median and the bounds that hold it 95 times in 100. Beside it the same ratio
of the processor time of all workers ("cpu", which says more where others keep the machine busy), and how much of the
time with everything on the training thread is in writing events and looking for outliers ("inside").
Exit 1: the ratio is more than 1.01.
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
from shoal.spec.plan import Batch, Mesh, Plan
from shoal.training.host import measured_host
from shoal.training.jobfile import load_job
from shoal.training.prepare import write_run
from shoal.training.resolve import resolve_plan

LIMIT = 1.01
SIDES = ("on", "off")
WARM_STEPS = 20
"""By then it is decided how often snapshots are taken, and how far ahead batches are loaded."""
TURN_STEPS = {"gpt": 1, "digits": 20}
"""Steps of a turn: a tenth of a second or two of either example. What else the machine does changes more slowly."""
_EXAMPLES = Path(__file__).parents[2] / "examples"


def measure(name: str, *, workers: int, rounds: int, runs: Path) -> list[dict[str, Any]]:
    """Return what each worker measured of the example `name`."""
    file, steps = _EXAMPLES / f"{name}.py", TURN_STEPS[name]
    job = load_job(file).with_steps(WARM_STEPS + 2 * steps * (rounds + 1))
    # Live shares would go by what the clock says in turns without it.
    plan, _ = resolve_plan(job, Plan(mesh=Mesh(replicate=workers), batch=Batch(live=False)))
    folder = RunFolder.create(runs, None, stem="cost")
    write_run(folder, job, plan, measured_host(), file=file)
    worker = Path(__file__).with_name("cost_worker.py")
    command = Spawning([sys.executable, "-W", "ignore", str(worker), str(folder.path), str(rounds), str(steps)])
    lines: list[str] = []
    watch = Watch(on_line=lambda index, line: lines.append(f"[worker {index}] {line}"))
    ended = launch_local(command, workers=workers, timeout_s=plan.timeout_s, watch=watch, on_loss=plan.on_loss)
    texts = [folder.path / f"turns-{index}.json" for index in range(workers)]
    if any(worker.exit_code for worker in ended) or not all(text.exists() for text in texts):
        raise SystemExit("\n".join(lines[-60:]))
    return [json.loads(text.read_text()) for text in texts]


def show(name: str, found: list[dict[str, Any]]) -> bool:
    """Print a line for a job; return whether the bar is met."""
    # They meet in every step: a turn is over when the slower worker is.
    on, off = ([max(times) for times in zip(*(each[side] for each in found), strict=True)] for side in SIDES)
    ratios = [with_all / without for with_all, without in zip(on, off, strict=True)]
    low, high = median_bounds(ratios)
    ratio = statistics.median(ratios)
    cpu_on, cpu_off = (
        [sum(each) for each in zip(*(one[f"cpu_{side}"] for one in found), strict=True)] for side in SIDES
    )
    cpu = statistics.median(with_all / without for with_all, without in zip(cpu_on, cpu_off, strict=True))
    print(
        f"{name:8} {len(found):7} {statistics.median(off) * 1e3:9.2f} ms {statistics.median(on) * 1e3:9.2f} ms "
        f"{ratio:8.4f} {low:.4f} to {high:.4f} {cpu:8.4f} {max(each['inside'] for each in found):8.3%} {len(ratios):6}",
        flush=True,
    )
    return ratio <= LIMIT


def main() -> int:
    """Print the table; return 1 if the bar is not met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=201)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", choices=TURN_STEPS, help="this example alone")
    asked = parser.parse_args()
    print(
        f"{'':8} {'workers':>7} {'off':>12} {'on':>12} {'ratio':>8} {'95%':>16} {'cpu':>8} {'inside':>8} {'rounds':>6}"
    )
    is_good = True
    for name in [asked.only] if asked.only else TURN_STEPS:
        with tempfile.TemporaryDirectory() as runs:
            found = measure(name, workers=asked.workers, rounds=asked.rounds, runs=Path(runs))
        is_good &= show(name, found)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
