"""Checkpoints that cannot be written, or are not what was written: what is said, and what is lost?

    python benchmarks/faults/bad_checkpoints.py [--only disk] [--json FILE]

A job of 40 steps, with a checkpoint every 10 and two kept, is trained by 2 workers. Cases of writing let something go
wrong at the checkpoint of step 20. Cases of reading train to the end, damage the checkpoint of step 40, and go on to
step 50. ok: one sentence says what is wrong; what was there before still loads; training went on or stopped as the plan
said; and wherever steps were trained, their losses are those of a run that nothing happened to.

Full and read-only disks are real ones, mounted for it: that takes root, and is left out without. Half a minute; exit 1:
one was not ok.
"""

import argparse
import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script: shoal/ and tests/ are two folders up

from shoal.comm.rank import Rank
from shoal.comm.store import connect
from shoal.core.errors import ShoalError
from shoal.core.events import EventLog, EventReader
from shoal.core.run_folder import RunFolder
from shoal.core.toml import write_toml
from shoal.fault import inject
from shoal.fault.checkpoint.manifest import committed, step_of
from shoal.fault.inject_kinds import flip
from shoal.spec.job import Job
from shoal.spec.plan import Checkpoints, Mesh, Plan
from shoal.training.loop import train_all
from shoal.training.opening import open_run
from tests.support.ranks import RankPool

STEPS, MORE, EVERY, WORKERS = 40, 50, 10, 2
WIDTH, OTHER_WIDTH = 2000, 2001  # 36,000 parameters: 140 KB of them, and 290 KB of Adam's
TOLERANCE = 1e-5
EVERY_10 = Checkpoints(every_steps=EVERY)
STOP = replace(EVERY_10, on_error="stop")


def job(width: int, steps: int) -> Job:
    """Return a small regression."""
    x = torch.randn(400, 16, generator=torch.Generator().manual_seed(7))
    return Job(
        model=lambda: nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, 1)),
        loss=lambda output, batch: ((output[:, 0] - batch[1]) ** 2).mean(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        data=TensorDataset(x, x.sum(1).sin()),
        batch_size=16,
        steps=steps,
    )


@dataclass(frozen=True)
class Outcome:
    """What came of a case."""

    code: int
    said: str
    """The line that says what was wrong."""
    there: list[int]
    """The checkpoints that are there at the end."""
    losses: dict[int, float]
    again: int
    """The exit code of going on with it once more, when nothing is wrong any more."""


@dataclass(frozen=True)
class Case:
    """Something that goes wrong, and what must come of it."""

    name: str
    words: str
    """What the sentence must hold."""
    code: int = 0
    settings: Checkpoints = EVERY_10
    disk: str = ""
    """What its checkpoints lie on: "full" and "read-only" disks become so after step 10."""
    faults: tuple[inject.Fault, ...] = ()
    damage: Callable[[Path], None] | None = None
    """What is done to the checkpoint of step 40, before the run is gone on with."""
    width: int = WIDTH
    there: tuple[int, ...] = ()
    """The checkpoints that must be there at the end."""


def _flipping(name: str) -> Callable[[Path], None]:
    return lambda path: flip(path / name)


def _truncate(path: Path) -> None:
    os.truncate(path / "worker-1.safetensors", (path / "worker-1.safetensors").stat().st_size // 2)


def _half_written(path: Path) -> None:
    """As after a crash in the middle: files without a manifest."""
    for name in ("COMMIT", "manifest.json", "worker-1.json"):
        (path / name).unlink()
    _truncate(path)


NOWHERE = replace(EVERY_10, local="/proc/nowhere")
CASES = [
    Case("disk full", "No space left on device", disk="full", there=(10,)),
    Case("disk full, stop", "No space left on device", code=74, settings=STOP, disk="full", there=(10,)),
    Case("disk full for one", "by worker 1: No space left", faults=(inject.fill_disk(1, 20),), there=(30, 40)),
    Case("folder read-only", "Read-only file system", disk="read-only", there=(10,)),
    Case("folder read-only, stop", "Read-only file system", code=74, settings=STOP, disk="read-only", there=(10,)),
    Case("node's folder", "could not write to", settings=NOWHERE, there=(30, 40)),
    Case("bit in tensors", "worker-0.safetensors is damaged", damage=_flipping("worker-0.safetensors"), there=(40, 50)),
    Case("bit in worker's", "worker-1.json is damaged", damage=_flipping("worker-1.json"), there=(40, 50)),
    Case("bit in common", "common.json is damaged", damage=_flipping("common.json"), there=(40, 50)),
    Case("bit in manifest", "step 40 was never finished", damage=_flipping("manifest.json"), there=(40, 50)),
    Case("bit in COMMIT", "step 40 was never finished", damage=_flipping("COMMIT"), there=(40, 50)),
    Case("truncated", "it is truncated", damage=_truncate, there=(40, 50)),
    Case("file lost", "cannot be read", damage=lambda path: (path / "worker-0.json").unlink(), there=(40, 50)),
    Case("no COMMIT", "never finished", damage=lambda path: (path / "COMMIT").unlink(), there=(40, 50)),
    Case("half written", "never finished", damage=_half_written, there=(40, 50)),
    Case("another model", "it is of another model", code=2, damage=lambda _: None, width=OTHER_WIDTH, there=(30, 40)),
]


def main() -> int:
    """Run the cases, print a line for each, and return 1 if one was not ok."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only the cases whose names have this in them")
    parser.add_argument("--json", type=Path, help="write what came of each there, too")
    arguments = parser.parse_args()
    found = []
    pool = RankPool()
    with tempfile.TemporaryDirectory() as name, contextlib.closing(pool):
        folder = Path(name)
        code, said = train(pool, folder / "whole", MORE)
        assert code == 0, said
        expected = losses(folder / "whole")
        code, said = train(pool, folder / "saved", STEPS)
        assert code == 0, said
        print(f"{'case':24}  {'ok':3}  {'exit':>4}  {'steps':>5}  {'there':8}  what is said")
        for case in CASES:
            if arguments.only in case.name and (not case.disk or os.geteuid() == 0):
                outcome = stage(case, folder, pool)
                faults = judge(case, outcome, expected)
                found.append({"case": case.name, "ok": not faults, "said": outcome.said, "faults": faults})
                show(case, outcome, faults)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2))
    return 0 if all(each["ok"] for each in found) else 1


def stage(case: Case, folder: Path, pool: RankPool) -> Outcome:
    """Let it go wrong; return what came of it, and whether it can be gone on with when all is well again."""
    run = folder / "case"
    shutil.rmtree(run, ignore_errors=True)
    if case.damage is not None:
        shutil.copytree(folder / "saved", run)
        case.damage(run / "checkpoints" / f"step-{STEPS:08d}")
        code, said = train(pool, run, MORE, settings=case.settings, width=case.width)
        there = steps_in(run)
    else:
        code, said = train(pool, run, EVERY, settings=case.settings)
        assert code == 0, said
        with _disk(case, folder, run):
            code, more = train(pool, run, STEPS, settings=case.settings, faults=case.faults)
            said, there = said + more, steps_in(run)
    trained = losses(run)
    again, _ = train(pool, run, MORE)
    line = next((line for line in said.splitlines() if case.words in line), "")
    return Outcome(code, line.replace(f"{run}/", ""), there, trained, again)


@contextmanager
def _disk(case: Case, folder: Path, run: Path) -> Iterator[None]:
    """Let the checkpoints lie on the disk that the case says; afterwards, on that of the run again."""
    if not case.disk:
        yield
        return
    disk, checkpoints, before = folder / "disk", run / "checkpoints", run / "before"
    disk.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "shoal", str(disk)], check=True, timeout=30)
    try:
        shutil.copytree(checkpoints, disk, dirs_exist_ok=True)
        checkpoints.rename(before)
        checkpoints.symlink_to(disk)
        if case.disk == "read-only":
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True, timeout=30)
        else:
            (disk / "filler").write_bytes(b"x" * (os.statvfs(disk).f_bavail * 4096 - 16 * 1024))
        yield
        checkpoints.unlink()
        shutil.rmtree(before)
        shutil.copytree(disk, checkpoints, ignore=shutil.ignore_patterns("filler"))
    finally:
        subprocess.run(["umount", str(disk)], check=True, timeout=30)


def train(
    pool: RankPool,
    run: Path,
    steps: int,
    *,
    settings: Checkpoints = EVERY_10,
    width: int = WIDTH,
    faults: tuple[inject.Fault, ...] = (),
) -> tuple[int, str]:
    """Train in the folder `run`, from its last checkpoint; return the exit code, and what was said on stderr."""
    folder = RunFolder(run)
    folder.events.mkdir(parents=True, exist_ok=True)
    write_toml(folder.plan_toml, Plan(mesh=Mesh(replicate=WORKERS), checkpoint=settings))
    answers = pool.run(part, workers=WORKERS, run=run, steps=steps, width=width, faults=faults)
    return max(code for code, _ in answers), "\n".join(said for _, said in answers)


def part(rank: Rank, *, run: Path, steps: int, width: int, faults: tuple[inject.Fault, ...]) -> tuple[int, str]:
    """Be a worker; return the exit code that it would end with, and what it said."""
    inject.begin(rank.index, faults)
    folder = RunFolder(run)
    log = EventLog(folder.events_of(rank.index))
    said, code = io.StringIO(), 0
    with contextlib.redirect_stderr(said), contextlib.closing(log):
        try:
            store = connect(rank, timeout_s=60)
            with open_run(job(width, steps), folder, rank=rank, store=store, log=log) as opened:
                train_all(opened)
        except ShoalError as error:
            code = error.exit_code
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
    inject.end()
    return code, said.getvalue()


def losses(run: Path) -> dict[int, float]:
    """Return the loss of each step."""
    events = EventReader(RunFolder(run).events_of(0)).poll()
    return {e["step"]: e["loss"] for e in events if e["kind"] == "step"}


def steps_in(run: Path) -> list[int]:
    """Return the steps of the checkpoints that are there."""
    return [step_of(path) for path in committed(run / "checkpoints")]


def judge(case: Case, outcome: Outcome, expected: dict[int, float]) -> list[str]:
    """Return what was not as it must be."""
    far = [s for s, loss in outcome.losses.items() if abs(loss - expected[s]) > TOLERANCE * abs(expected[s])]
    checks = {
        "nothing is said": bool(outcome.said),
        f"exit code {outcome.code}, not {case.code}": outcome.code == case.code,
        f"checkpoints {outcome.there}, not {list(case.there)}": outcome.there == list(case.there),
        f"losses differ from step {min(far, default=0)} on": not far,
        f"going on again ends with {outcome.again}": outcome.again == 0,
    }
    return [fault for fault, is_well in checks.items() if not is_well]


def show(case: Case, outcome: Outcome, faults: list[str]) -> None:
    """Print the line of a case."""
    there = " ".join(map(str, outcome.there))
    verdict = "ok" if not faults else "NO"
    steps = max(outcome.losses, default=0)
    print(f"{case.name:24}  {verdict:3}  {outcome.code:4}  {steps:5}  {there:8}  {outcome.said}", flush=True)
    for fault in faults:
        print(f"{'':24}  {fault}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
