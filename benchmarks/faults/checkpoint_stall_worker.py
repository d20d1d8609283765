"""A worker of checkpoint_stall.py: it trains one run, and saves it in one way after the other."""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from benchmarks.faults.checkpoint_stall import NONE, OURS
from shoal.comm.group import barrier, new_group
from shoal.comm.rank import read_rank
from shoal.comm.store import connect
from shoal.core.events import EventLog
from shoal.core.run_folder import RunFolder
from shoal.training.jobfile import load_job
from shoal.training.opening import open_run
from shoal.training.run import Run

_JOB = Path(__file__).parents[2] / "examples" / "gpt.py"
_TIMEOUT_S = 300.0
_WARM_STEPS = 3
Wait = Callable[[], None]


class Ways:
    """The ways to save the state of a run. Each is called between two steps, and returns what waits for its end."""

    def __init__(self, run: Run, folder: Path) -> None:
        self._run, self._folder = run, folder
        self._count = 0
        self._group = new_group()
        # On a processor there is no pinned memory and no other stream: what is left is memory that is kept.
        kept = {"use_pinned_memory": False, "use_non_blocking_copy": False}
        self._stagers = {
            "thread": DefaultStager(StagingOptions(use_shared_memory=False, use_async_staging=False, **kept)),
            "thread, staged": DefaultStager(StagingOptions(use_shared_memory=False, use_async_staging=True, **kept)),
            "process": DefaultStager(StagingOptions(use_shared_memory=True, use_async_staging=False, **kept)),
        }
        self._staging: Any = None
        run.state.optimizer.register_step_pre_hook(lambda *_: self._await_staging())

    def save(self, way: str) -> Wait:
        """Save by `way`."""
        self._count += 1
        if way == NONE:
            return lambda: None
        if way == OURS:
            self._run.save(wait=False)
            return self._run.saving.finish
        if way.startswith("torch.save"):
            return self._by_torch(is_synced=way.endswith("synced"))
        return self._by_dcp(way.removeprefix("DCP, "))

    def close(self) -> None:
        """End what runs beside."""
        for stager in self._stagers.values():
            stager.close()

    def _state(self) -> dict[str, Any]:
        return {"model": self._run.model.state_dict(), "optimizer": self._run.state.optimizer.state_dict()}

    def _by_torch(self, *, is_synced: bool) -> Wait:
        """Let worker 0 write everything; slices are gathered for it."""
        path = self._folder / f"torch-{self._count}.pt"
        state = tree_map(lambda value: value.full_tensor() if isinstance(value, DTensor) else value, self._state())
        if self._run.rank.index == 0:
            with path.open("wb") as file:
                torch.save(state, file)
                if is_synced:
                    file.flush()
                    os.fsync(file.fileno())
        return lambda: path.unlink(missing_ok=True)

    def _by_dcp(self, how: str) -> Wait:
        path = self._folder / f"dcp-{self._count}"
        kind = AsyncCheckpointerType.PROCESS if how == "process" else AsyncCheckpointerType.THREAD
        answer: Any = dcp.async_save(
            self._state(),
            storage_writer=dcp.FileSystemWriter(path),
            process_group=self._group,
            async_checkpointer_type=kind,
            async_stager=self._stagers[how],
        )
        done = answer
        if hasattr(answer, "upload_completion"):
            self._staging, done = answer.staging_completion, answer.upload_completion

        def wait() -> None:
            done.result()
            barrier()
            if self._run.rank.index == 0:
                shutil.rmtree(path)

        return wait

    def _await_staging(self) -> None:
        if self._staging is not None:
            self._staging.result()
            self._staging = None


def turns(run: Run, ways: Ways, names: list[str], *, rounds: int, steps: int) -> dict[str, list[dict[str, Any]]]:
    """Return for each way what each of its turns took, after one turn of each that does not count."""
    batches = run.batches()
    _advance(run, batches, _WARM_STEPS)
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in names}
    for number in range(rounds + 1):
        for way in names if number % 2 else reversed(names):
            barrier()
            began = time.perf_counter()
            wait = ways.save(way)
            saved = time.perf_counter()
            times = _advance(run, batches, steps)
            wait()
            # Of what was written beside the steps: at the earliest it is known here when it ended.
            found[way].append({"stall_s": saved - began, "steps_s": times, "write_s": time.perf_counter() - saved})
    batches.close()
    return {way: each[1:] for way, each in found.items()}


def _advance(run: Run, batches: Iterator[Any], steps: int) -> list[float]:
    """Do some steps, and return the seconds of each."""
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        run.step(next(batches))
        times.append(time.perf_counter() - began)
    return times


def main(path: str, rounds: str, steps: str, *names: str) -> None:
    """Be a worker of the run at `path`."""
    folder, rank = RunFolder(Path(path)), read_rank()
    assert rank is not None
    job = load_job(_JOB).with_steps(10**6)
    log = EventLog(folder.events_of(rank.index))
    with open_run(job, folder, rank=rank, store=connect(rank, timeout_s=_TIMEOUT_S), log=log) as run:
        ways = Ways(run, folder.path)
        found = turns(run, ways, [NONE, *names], rounds=int(rounds), steps=int(steps))
        ways.close()
        (folder.path / f"turns-{rank.index}.json").write_text(json.dumps(found))
        barrier()
        dist.destroy_process_group(ways._group)
    log.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
