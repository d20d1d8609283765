"""One worker of four made four times slower: what each way for gradients to meet makes of it.

    python benchmarks/sync/straggler.py               each worker a core of its own, or where there are fewer, an equal
                                                      part of them (quota.py, as root); the slow one shares its core or
                                                      part with 3 busy loops
    python benchmarks/sync/straggler.py --simulate    for anybody: a sample is a sleep, 4 times as long there
    python benchmarks/sync/straggler.py --cases undisturbed shares --steps 100

The cases take turns, `--rounds` times. Four workers of which one does a quarter could do 3.25 workers' worth: that is
the ideal, 3.25/4 of what plain DDP does undisturbed. Shown is how much of it is reached in the second half of the steps
(and in all of them: live shares change nothing before 20 steps are done), and by how much the loss over held-out
samples, after equally many steps, is off that of the undisturbed run. Samples are counted from the events of all
workers: those that were trained on. Exit 1: live shares below 85%, deadline or asynchronous servers below 70%; or a
loss off by more than 1% or 3%.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script: shoal/ and benchmarks/ are there

from benchmarks.sync.quota import available, own_cores, quotas
from benchmarks.sync.straggler_worker import SLOW, TIMES, WORKERS, Setting
from shoal.core.events import EventReader
from shoal.core.run_folder import RunFolder
from shoal.core.toml import write_toml
from shoal.spec.plan import Batch, Mesh, Plan
from shoal.spec.sync import Sync

IDEAL = (WORKERS - 1 + 1 / TIMES) / WORKERS
WARM_STEPS = 5
_LEFT_CORES = 0.2
"""For whoever starts the workers, and the system."""
TIMEOUT_S = 900.0
JOB = Path(__file__).with_name("straggler_worker.py")
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Case:
    """One way to train."""

    title: str
    plan: Plan | None = None
    """None: plain DDP."""
    is_disturbed: bool = True
    least: float = 0.0
    """How much of the ideal it must reach."""
    off: float = float("inf")
    """By how much its loss may be off."""


def plan_of(sync: Sync, *, live: bool = False) -> Plan:
    """Return the plan of a case."""
    return Plan(mesh=Mesh(replicate=WORKERS), sync=sync, batch=Batch(live=live), timeout_s=120)


CASES = {
    "undisturbed": Case("DDP, undisturbed", is_disturbed=False),
    "ddp": Case("DDP"),
    "all-reduce": Case("all-reduce, shares fixed", plan_of(Sync())),
    "shares": Case("all-reduce, live shares", plan_of(Sync(), live=True), least=0.85, off=0.01),
    "deadline": Case("deadline", plan_of(Sync(mode="deadline")), least=0.70, off=0.03),
    "server": Case("server, synchronous", plan_of(Sync(mode="server", servers=2))),
    "asynchronous": Case(
        "server, asynchronous", plan_of(Sync(mode="server", servers=2, asynchronous=True)), least=0.70, off=0.03
    ),
    "local": Case("local, 8 steps", plan_of(Sync(mode="local", local_steps=8))),
}
DEFAULT = ("undisturbed", "ddp", "shares", "deadline", "asynchronous")


@dataclass(frozen=True)
class Measured:
    """What one training came to."""

    samples_per_s: float
    """In the second half of its steps."""
    whole_per_s: float
    """In all of them but the first few."""
    loss: float


def main() -> int:
    """Do all, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=DEFAULT, choices=CASES)
    parser.add_argument("--simulate", action="store_true", help="a sample is a sleep")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--batch", type=int, help="samples of a global batch (default: 2048, simulated 32)")
    parser.add_argument("--width", type=int, help="of the model (default: 1024, simulated 64)")
    parser.add_argument("--step-s", type=float, default=0.1, help="simulated: seconds of an undisturbed step")
    parser.add_argument("--json", type=Path, help="write the figures there")
    asked = parser.parse_args()
    setting = setting_of(asked)
    found: dict[str, list[Measured]] = {name: [] for name in asked.cases}
    for _ in range(asked.rounds):
        for name in asked.cases:
            found[name].append(measure(CASES[name], setting, is_simulated=asked.simulate))
            print(f"{CASES[name].title:28} {found[name][-1].samples_per_s:9.1f} samples/s", file=sys.stderr, flush=True)
    if asked.json:
        asked.json.write_text(json.dumps({name: [asdict(one) for one in all_] for name, all_ in found.items()}))
    return show(found)


def setting_of(asked: argparse.Namespace) -> Setting:
    """Return what all cases have in common."""
    batch = asked.batch or (32 if asked.simulate else 2048)
    width = asked.width or (64 if asked.simulate else 1024)
    if asked.simulate:
        return Setting(asked.steps, batch, width, sample_s=asked.step_s * WORKERS / batch)
    if not own_cores(WORKERS) and not available():
        sys.exit("dealing out cores needs root, and Linux's control groups. Use --simulate.")
    return Setting(asked.steps, batch, width)


def measure(case: Case, setting: Setting, *, is_simulated: bool) -> Measured:
    """Train once, and return what came of it."""
    if is_simulated:
        return _train(case, replace(setting, slow=SLOW if case.is_disturbed else -1))
    count = case.is_disturbed * (TIMES - 1)
    if cores := own_cores(WORKERS):
        with busy_loops(f"os.sched_setaffinity(0, {{{cores[SLOW]}}})", count=count):
            return _train(case, replace(setting, cores=cores))
    part = min(1.0, (len(os.sched_getaffinity(0)) - _LEFT_CORES) / WORKERS)
    with quotas(WORKERS, cores=part) as groups, busy_loops(_join(groups[SLOW]), count=count):
        return _train(case, replace(setting, groups=groups))


def _join(group: str) -> str:
    return f"open({group!r}, 'w').write(str(os.getpid()))"


def _train(case: Case, setting: Setting) -> Measured:
    env = {
        **os.environ,
        **setting.environment(),
        "PYTHONPATH": os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
    }
    return train_ddp(setting, env) if case.plan is None else train_shoal(case.plan, setting, env)


@contextmanager
def busy_loops(joining: str, *, count: int) -> Iterator[None]:
    """Have a worker's core shared by so many loops, for the length of a `with` block. `joining` brings one there."""
    code = f"import os\n{joining}\nwhile True: pass"
    loops = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait(10)


def train_ddp(setting: Setting, env: dict[str, str]) -> Measured:
    """Train by plain DDP."""
    meet = {"WORLD_SIZE": str(WORKERS), "GLOO_SOCKET_IFNAME": "lo"}
    meet["SHOAL_BENCH_MEET"] = tempfile.mktemp()  # noqa: S306 - torch makes the file, and removes it
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.sync.straggler_worker"],
            env={**env, **meet, "RANK": str(index)},
            cwd=_ROOT,
            stdout=subprocess.PIPE if index == 0 else subprocess.DEVNULL,
            text=True,
        )
        for index in range(WORKERS)
    ]
    try:
        said = json.loads(workers[0].communicate(timeout=TIMEOUT_S)[0])
    finally:
        for worker in workers:
            worker.kill()
            worker.wait(10)
    counted = [(moment, setting.batch_size) for moment in said["moments"]]
    return rates(counted, said["moments"], said["loss"])


def train_shoal(plan: Plan, setting: Setting, env: dict[str, str]) -> Measured:
    """Train by `shoal train`."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_toml(folder / "plan.toml", plan)
        command = [sys.executable, "-m", "shoal", "train", str(JOB), "--plan", str(folder / "plan.toml")]
        command += ["--runs", str(folder), "--name", "run", "--steps", str(setting.steps), "--json"]
        done = subprocess.run(
            command, check=False, env=env, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S
        )
        if done.returncode:
            sys.exit(f"{plan.sync}: exit code {done.returncode}\n{done.stderr[-3000:]}")
        return measured_of(RunFolder(folder / "run"))


def measured_of(folder: RunFolder) -> Measured:
    """Return what the events of a run say."""
    counted, moments, loss = [], [], float("nan")
    for path in sorted(folder.events.glob("rank-*.jsonl")):
        for event in EventReader(path).poll():
            if event["kind"] == "step" and event["weight"]:
                counted.append((event["time"], event["samples"]))
                if path.stem == "rank-0":
                    moments.append(event["time"])
            elif event["kind"] == "eval":
                loss = event["metrics"]["loss"]
    return rates(counted, moments, loss)


def rates(counted: Sequence[tuple[float, int]], moments: Sequence[float], loss: float) -> Measured:
    """Return samples per second, by when samples were trained on and when worker 0 was done with its steps."""

    def rate(begin_s: float) -> float:
        return sum(some for moment, some in counted if begin_s < moment <= moments[-1]) / (moments[-1] - begin_s)

    return Measured(rate(moments[len(moments) // 2]), rate(moments[WARM_STEPS]), loss)


def show(found: dict[str, list[Measured]]) -> int:
    """Print the table, and return the exit code."""
    alike = {name: _middle(all_) for name, all_ in found.items()}
    base = alike.get("undisturbed")
    print(f"\n{'':28} {'samples/s':>10} {'of the ideal':>13} {'all steps':>10} {'loss':>8} {'off':>7}")
    is_good = True
    for name, one in alike.items():
        case, line = CASES[name], f"{CASES[name].title:28} {one.samples_per_s:10.1f}"
        if base is not None:
            ideal = IDEAL * base.samples_per_s
            reached, off = one.samples_per_s / ideal, one.loss / base.loss - 1
            good = reached >= case.least and abs(off) <= case.off
            is_good = is_good and good
            bar = f"  (at least {case.least:.0%}, within {case.off:.0%})" if case.least else ""
            line += f" {reached:13.1%} {one.whole_per_s / ideal:10.1%} {one.loss:8.4f} {off:+7.2%}{bar}"
            line += "" if good else "  NOT ok"
        print(line)
    if base is not None and "ddp" in alike:
        print(f"The slow worker made DDP {base.samples_per_s / alike['ddp'].samples_per_s:.2f} times slower.")
    return 0 if is_good else 1


def _middle(all_: Sequence[Measured]) -> Measured:
    names = ("samples_per_s", "whole_per_s", "loss")
    return Measured(*(statistics.median(getattr(one, name) for one in all_) for name in names))


if __name__ == "__main__":
    sys.exit(main())
