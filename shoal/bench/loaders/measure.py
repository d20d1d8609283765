"""Loaders on the same data, each in a process of its own, in turns.

1. Who is installed: each peer is looked for in its Python (`pythons`, else this one).
2. The pack's column is written as plain files (export.py), and from these each peer writes its own format.
3. Each is opened, gives its first batch, and has a try-out turn in which its memory is looked at. Of loaders that can
   work with and without worker processes, the faster way goes on (of torch's DataLoader both do).
4. Rounds: each has one turn in each, in an order that is turned round every time. Who has no turn stands still. A
   figure is the median over rounds.

Example: 10 loaders, 5 s each in 5 rounds: a turn warms up for 0.3 s and measures 1 s, a round takes 13 s.
"""

import importlib
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import ModuleType

from shoal.bench.loaders.export import export_sample
from shoal.bench.loaders.figures import Figures, Loaded
from shoal.bench.loaders.peers.task import Task
from shoal.bench.loaders.side import Side, ask, this_python
from shoal.core.errors import ConfigError, WorkerFailed, did_you_mean
from shoal.data.pack.reader import Pack

PEERS = {
    "shoal": "shoal_loader",
    "c-gather": "c_gather",
    "torch": "torch_loader",
    "torch-batched": "torch_batched",
    "ffcv": "ffcv_loader",
    "dali": "dali_loader",
    "webdataset": "webdataset_loader",
    "mosaic": "mosaic_loader",
    "litdata": "litdata_loader",
    "huggingface": "huggingface_loader",
    "grain": "grain_loader",
    "lmdb": "lmdb_loader",
}
_WARM_PART = 0.3
_TRY_OUT_S = 1.0
_PATIENCE_S = 600.0
"""How much longer than asked a writer may take that cannot stop early."""

Say = Callable[[str], None]


@dataclass
class _Entry:
    """One peer, and what is known of it so far."""

    name: str
    peer: ModuleType
    python: Path
    version: str
    folder: Path = Path()
    num_samples: int = 0
    write_s: float = 0.0
    disk_bytes: int = 0


@dataclass
class _Runner:
    """An open side, and its turns."""

    entry: _Entry
    side: Side
    has_choice: bool
    rates: list[float] = field(default_factory=list)

    def loaded(self) -> Loaded:
        entry, side = self.entry, self.side
        return Loaded(
            name=entry.peer.NAME,
            version=entry.version,
            workers=side.task.workers if self.has_choice else None,
            how=side.how,
            samples_per_s=statistics.median(self.rates),
            slowest=min(self.rates),
            fastest=max(self.rates),
            first_batch_s=side.first_batch_s,
            memory_bytes=side.memory_bytes,
            num_samples=entry.num_samples,
            write_s=entry.write_s,
            disk_bytes=entry.disk_bytes,
        )


def check_names(names: Sequence[str]) -> list[str]:
    """Return the names of peers, or say which is not one."""
    for name in names:
        if name not in PEERS:
            raise ConfigError(f"{name!r} is no loader that is known here.{did_you_mean(name, list(PEERS))}")
    return list(dict.fromkeys(names))


def bench_loaders(
    pack: Pack,
    tasks: Sequence[Task],
    *,
    seconds: float,
    rounds: int = 5,
    peers: Sequence[str] = tuple(PEERS),
    pythons: Mapping[str, Path] | None = None,
    most_bytes: int = 1_100_000_000,
    folder: Path | None = None,
    say: Say = lambda _: None,
) -> list[Figures]:
    """Return the figures of each task, measured for about `seconds` a loader; tasks differ in the filter only.

    Everything is written into a folder of its own inside `folder` (else the system's for temporary files), which is
    gone afterwards. `say` is told what is being done.
    """
    left_out: list[str] = []
    entries = _installed(check_names(peers), tasks[0], pythons or {}, left_out, say)
    with tempfile.TemporaryDirectory(prefix="shoal-bench-", dir=folder) as name:
        sample = Path(name) / "sample"
        sample.mkdir()
        say(f"writing {tasks[0].kind} of {pack.path.name} as plain files")
        sample_bytes = export_sample(pack, tasks[0], sample, most_bytes=most_bytes)
        entries = [
            entry for entry in entries if _written(entry, tasks[0], sample, Path(name), left_out=left_out, say=say)
        ]
        if not entries:
            raise WorkerFailed(" ".join(["no loader is left to be measured.", *left_out]))
        if not any(entry.num_samples for entry in entries):
            raise ConfigError(f"{pack.path} has no sample of {tasks[0].kind}. Use more data, or a shorter --window.")
        found = []
        for task in tasks:
            lost = list(left_out)
            loaded = _in_turns(entries, task, sample, rounds=rounds, turn_s=seconds / rounds, left_out=lost, say=say)
            found.append(
                Figures(
                    task=task,
                    num_samples=max(entry.num_samples for entry in entries),
                    sample_bytes=sample_bytes,
                    rounds=rounds,
                    turn_s=seconds / rounds,
                    loaded=loaded,
                    left_out=lost,
                )
            )
    return found


def _installed(
    names: Sequence[str], task: Task, pythons: Mapping[str, Path], left_out: list[str], say: Say
) -> list[_Entry]:
    found = []
    for name in names:
        peer = importlib.import_module(f"shoal.bench.loaders.peers.{PEERS[name]}")
        if task.kind not in peer.KINDS:
            continue
        say(f"looking for {peer.NAME}")
        python = pythons.get(name, this_python())
        try:
            answer = ask(python, "look", PEERS[name])
        except WorkerFailed as error:
            left_out.append(f"{peer.NAME} is left out: {error}")
            continue
        if "missing" in answer:
            where = f"{python} has no {answer['missing']}"
            left_out.append(f"{peer.NAME} is left out: {where}. {peer.INSTALL}; or --python {name}=PYTHON that has it.")
            continue
        found.append(_Entry(name, peer, python, answer["version"]))
    return found


def _written(entry: _Entry, task: Task, sample: Path, folder: Path, *, left_out: list[str], say: Say) -> bool:
    """Write the peer's format; return whether that went well."""
    say(f"writing for {entry.peer.NAME}")
    entry.folder = folder / entry.name
    entry.folder.mkdir()
    arguments = [PEERS[entry.name], json.dumps(asdict(task)), str(sample), str(entry.folder)]
    try:
        answer = ask(entry.python, "write", *arguments, timeout_s=task.write_s + _PATIENCE_S)
    except WorkerFailed as error:
        left_out.append(f"{entry.peer.NAME} is left out: its writer failed: {error}")
        return False
    entry.disk_bytes = sum(file.stat().st_size for file in entry.folder.rglob("*") if file.is_file())
    entry.num_samples, entry.write_s = answer["samples"], answer["seconds"] if entry.disk_bytes else 0.0
    return True


def _in_turns(
    entries: Sequence[_Entry],
    task: Task,
    sample: Path,
    *,
    rounds: int,
    turn_s: float,
    left_out: list[str],
    say: Say,
) -> list[Loaded]:
    what = f"{task.filter}, " if task.kind == "images" else ""
    with ExitStack() as stack:
        runners = [
            runner for entry in entries for runner in _opened(entry, task, sample, stack, left_out=left_out, say=say)
        ]
        for number in range(rounds):
            for runner in list(runners) if number % 2 == 0 else list(reversed(runners)):
                say(f"{what}round {number + 1} of {rounds}: {runner.entry.peer.NAME}")
                try:
                    runner.rates.append(runner.side.turn(warm_s=_WARM_PART * turn_s, seconds=turn_s))
                except WorkerFailed as error:
                    left_out.append(f"{runner.entry.peer.NAME} is left out: {error}")
                    runners.remove(runner)
        return [runner.loaded() for runner in runners]


def _opened(
    entry: _Entry, task: Task, sample: Path, stack: ExitStack, *, left_out: list[str], say: Say
) -> list[_Runner]:
    """Return the sides of a peer that go on after a try-out."""
    has_choice: bool = entry.peer.HAS_WORKERS
    tried: list[tuple[float, _Runner]] = []
    for workers in (0, task.threads) if has_choice else (0,):
        say(f"opening {entry.peer.NAME}" + (f" with {workers} workers" if workers else ""))
        try:
            side = Side(entry.python, PEERS[entry.name], replace(task, workers=workers), sample, entry.folder)
            stack.callback(side.end)
            rate = side.turn(warm_s=_WARM_PART, seconds=_TRY_OUT_S, watch=True)
        except (WorkerFailed, TimeoutError) as error:
            why = str(error) or "it gave no batch in time."
            left_out.append(f"{entry.peer.NAME}{f' with {workers} workers' if workers else ''} is left out: {why}")
            continue
        tried.append((rate, _Runner(entry, side, has_choice)))
    tried.sort(key=lambda pair: -pair[0])
    kept = tried if entry.name == "torch" else tried[:1]
    for _, runner in tried[len(kept) :]:
        runner.side.end()
    return [runner for _, runner in kept]
