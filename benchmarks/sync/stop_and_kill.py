"""Workers stopped for 10 seconds, killed, and started again, at random moments: does every run end, and count right?

    python benchmarks/sync/stop_and_kill.py [--faults 20] [--modes deadline local] [--seed 0] [--keep FOLDER]

`shoal train` runs of 4 workers, one for each way to meet, are disturbed from outside, `--faults` times each: some
seconds after the last fault, a worker drawn by chance gets SIGSTOP and, 10 seconds later, SIGCONT; or SIGKILL; or
SIGSTOP and, 10 seconds later, SIGKILL. The launcher starts another in the place of one that is gone. Each run must end
by itself, without an error, before it has stood still for a minute; and its samples must have been counted right
(stop_and_kill_count.py says how that is told). Exit 1: something was not so.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script: shoal/ and benchmarks/ are there

from benchmarks.faults.hundred import make_pack
from benchmarks.sync.stop_and_kill_count import Counted, count, segments_of
from shoal.core.run_folder import RunFolder
from shoal.core.toml import write_toml
from shoal.spec.on_loss import OnLoss
from shoal.spec.plan import Checkpoints, Mesh, Plan
from shoal.spec.sync import Sync

WORKERS = 4
STOP_S, STILL_S, START_S = 10.0, 60.0, 90.0
PAUSE_S = (1.0, 5.0)
"""How long after a fault is over the next one comes, at least and at most."""
STEP_S = 0.05
FAULT_S = 9.0
"""How many seconds of steps a run has for each of its faults, so that they come before its end."""
CHECKPOINT_STEPS = 100
JOB = Path(__file__).parents[1] / "faults" / "hundred_job.py"
_ROOT = Path(__file__).parents[2]
MODES = {
    "all-reduce": (Sync(), "exact"),
    "deadline": (Sync(mode="deadline"), "listed"),
    "local": (Sync(mode="local", local_steps=8), "exact"),
    "server": (Sync(mode="server", servers=2), "listed"),
    "asynchronous": (Sync(mode="server", servers=2, asynchronous=True), "tickets"),
}


@dataclass
class Disturbed:
    """A run, and what was done to it."""

    process: "subprocess.Popen[bytes]"
    folder: RunFolder
    stops: int = 0
    kills: int = 0
    wrong: list[str] = field(default_factory=list)
    longest_s: float = 0.0
    """For how long no step was done, at most."""
    _moment: float = 0.0
    _newest: float = 0.0

    def wait(self, seconds: float) -> bool:
        """Look at the run for so long; return False where it has ended, or stands still."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.process.poll() is not None:
                return False
            if self.still_s() > (STILL_S if self._newest else START_S):
                self.wrong.append(f"no step for {STILL_S:g} s")
                return False
            time.sleep(0.2)
        return True

    def still_s(self) -> float:
        """Return for how long no step was done."""
        paths = list(self.folder.events.glob("rank-*.jsonl"))
        newest = max((path.stat().st_mtime for path in paths), default=0.0)
        self._moment = self._moment or time.monotonic()
        if newest > self._newest:
            if self._newest:
                self.longest_s = max(self.longest_s, time.monotonic() - self._moment)
            self._newest, self._moment = newest, time.monotonic()
        return time.monotonic() - self._moment

    def processes(self) -> list[int]:
        """Return the processes that are workers now."""
        last = {segment.worker: segment.process for segment in segments_of(self.folder)}
        return [process for process in last.values() if Path(f"/proc/{process}").is_dir()]

    def stop(self, process: int) -> None:
        """Stop a worker for a while."""
        self.stops += 1
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGSTOP)
            self.wait(STOP_S)
            os.kill(process, signal.SIGCONT)

    def stop_and_kill(self, process: int) -> None:
        """Kill a worker that has been stopped for a while."""
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGSTOP)
        self.stops += 1
        self.wait(STOP_S)
        self.kill(process)

    def kill(self, process: int) -> None:
        """Kill a worker."""
        self.kills += 1
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)

    def end(self) -> int:
        """Return the exit code; a run that still goes is ended, with all of its processes."""
        if self.process.poll() is None:
            self.process.kill()
        for process in self.processes():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        return self.process.wait(30)


def disturb(name: str, *, faults: int, steps: int, samples: Path, folder: Path, chance: random.Random) -> bool:
    """Train under `faults` by the mode `name`, print a line of the table, and return whether all was right."""
    sync, kind = MODES[name]
    notes = folder / "notes"
    notes.mkdir(parents=True)
    run = Disturbed(start(sync, steps=steps, samples=samples, folder=folder, notes=notes), RunFolder(folder / "run"))
    began = time.monotonic()
    try:
        while run.wait(0.2) and not (len(run.processes()) == WORKERS and any(s.steps for s in segments_of(run.folder))):
            pass
        kinds = [(run.stop_and_kill, run.stop, run.kill)[number % 3] for number in range(faults)]
        chance.shuffle(kinds)
        for strike in kinds:
            if not run.wait(chance.uniform(*PAUSE_S)):
                break
            if found := run.processes():
                strike(chance.choice(found))
        while run.wait(10.0):
            pass
    finally:
        code = run.end()
    if code:
        run.wrong.append(f"exit code {code}: {(folder / 'said.txt').read_text().strip()[-700:]}")
    counted = count(run.folder, notes, kind=kind, steps=steps)
    show(name, run, counted, took_s=time.monotonic() - began)
    return not run.wrong and not counted.wrong


def start(sync: Sync, *, steps: int, samples: Path, folder: Path, notes: Path) -> "subprocess.Popen[bytes]":
    """Return a `shoal train`, just started."""
    checkpoint = Checkpoints(every_steps=CHECKPOINT_STEPS)
    on_loss = OnLoss(restarts=1000)
    mesh = Mesh(replicate=WORKERS)
    write_toml(
        folder / "plan.toml",
        Plan(mesh=mesh, sync=sync, checkpoint=checkpoint, on_loss=on_loss, timeout_s=45, staging="off"),
    )
    command = [sys.executable, "-m", "shoal", "train", str(JOB), "--plan", str(folder / "plan.toml")]
    command += ["--steps", str(steps), "--runs", str(folder), "--name", "run"]
    env = {**os.environ, "SHOAL_BENCH_PACK": str(samples), "SHOAL_BENCH_SEEN": str(notes), "PYTHONPATH": str(_ROOT)}
    env |= {"SHOAL_BENCH_STEP_S": str(STEP_S), "OMP_NUM_THREADS": "1"}
    with (folder / "said.txt").open("wb") as said:
        return subprocess.Popen(command, env=env, cwd=folder, stdout=said, stderr=said)


def show(name: str, run: Disturbed, counted: Counted, *, took_s: float) -> None:
    """Print a line of the table."""
    wrong = run.wrong + counted.wrong
    print(
        f"{name:14} {run.stops:5} {run.kills:5} {counted.generations:11} {run.longest_s:9.1f} s {took_s:7.0f} s "
        f"{counted.samples:9} of {counted.expected:<8} {'; '.join(wrong[:3]) or 'ok'}",
        flush=True,
    )


def main() -> int:
    """Do all, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=20, help="of each run")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="where runs go, and stay (default: a temporary folder)")
    asked = parser.parse_args()
    steps = max(100, round(asked.faults * FAULT_S / STEP_S))
    heads = f"{'stops':>5} {'kills':>5} {'generations':>11} {'still':>11} {'took':>9} {'samples counted':>16}"
    print(f"{'':14} {heads}")
    bad = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        samples = make_pack(folder)
        for name in asked.modes:
            chance = random.Random(f"{asked.seed} {name}")  # noqa: S311 - a schedule, no secret
            settings = {"faults": asked.faults, "steps": steps, "samples": samples, "folder": folder / name}
            bad += not disturb(name, chance=chance, **settings)
    print(f"{len(asked.modes)} runs with {asked.faults} faults each: {f'{bad} NOT ok' if bad else 'all ok'}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
