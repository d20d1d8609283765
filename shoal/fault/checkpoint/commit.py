"""Committing a checkpoint: only when every worker has said that its part is on the disk.

1. Each worker says in the store what it has written, as its part of the manifest, or why it could not.
2. Worker 0 waits for all, writes manifest and COMMIT, and says how it ended. Then only it removes what is not kept any
   more; if that fails, what was just committed stays, and a note says so.
3. All wait for that. Whatever went wrong on any worker, nothing is committed, and all learn the same sentence.
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import Store

from shoal.comm.told import told
from shoal.core.units import format_bytes
from shoal.fault import inject
from shoal.fault.checkpoint.manifest import committed, folder_of, prune, remove, step_of, write_manifest


class Commits:
    """The commits of one worker's checkpoints, with those of the others."""

    def __init__(
        self,
        checkpoints: Path,
        *,
        index: int,
        number: int,
        workers: int,
        store: Store | None,
        timeout_s: float,
        keep: int,
        best: str,
        highest: bool,
        tick: Callable[[], None] = lambda: None,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        """`number` is what this worker, the one at `index`, is called in sentences.

        `tick` raises if nobody wants the checkpoint any more; so does `on_wait`, and also if a worker is lost: it is
        called while this waits for the others.
        """
        self._checkpoints, self._index, self._number, self.workers = checkpoints, index, number, workers
        self._store, self._timeout_s, self._tick, self._on_wait = store, timeout_s, tick, on_wait
        self._keep, self._best, self._highest = keep, best, highest

    def commit(self, key: str, step: int, said: dict[str, Any]) -> tuple[str, str]:
        """Commit what all have written of `step`; return why it is not there ("" if it is), and what else to say.

        `said` is of this worker: "pieces", its parts of the manifest, or "error"; and a "note", if there is one. `key`
        is another word for each call on one store. Called by every worker.
        """
        if self._store is None:
            return self._finish(step, [said])
        self._store.set(f"{key}/{self._index}", json.dumps(said))
        if self._index == 0:
            keys = [f"{key}/{worker}" for worker in range(self.workers)]
            found = self.wait_for(keys)
            outcome = self._finish(step, [json.loads(value) for value in found])
            self._store.set(f"{key}/outcome", json.dumps(outcome))
            for each in keys:
                self._store.delete_key(each)
            return outcome
        error, note = json.loads(self.wait_for([f"{key}/outcome"])[0])
        return error, note

    def wait_for(self, keys: Sequence[str]) -> list[str]:
        """Return what stands in the store under `keys`, as soon as all are there."""
        assert self._store is not None
        return told(self._store, keys, timeout_s=self._timeout_s, check=self._on_wait)

    def sentence(self, step: int, error: Exception, num_bytes: int) -> str:
        """Return in a sentence that this worker could not write the checkpoint of `step`, and what there is."""
        what = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
        there = [step_of(path) for path in committed(self._checkpoints) if step_of(path) != step]
        rest = f" That of step {there[-1]} is still there." if there else " There is none before it."
        return (
            f"the checkpoint of step {step} could not be written to {self._checkpoints} by worker {self._number}: "
            f"{what.rstrip('.')}{_room(self._checkpoints, num_bytes)}.{rest}"
        )

    def _finish(self, step: int, said: Sequence[dict[str, Any]]) -> tuple[str, str]:
        """Commit what all workers have written, or remove it. Raises nothing but GivenUp: all wait for the outcome."""
        self._tick()
        path = folder_of(self._checkpoints, step)
        notes = [one["note"] for one in said if one.get("note")][:1]
        error = next((one["error"] for one in said if "error" in one), "")
        if not error:
            try:
                inject.at("checkpoint: committing", step, path)
                write_manifest(path, [piece for one in said for piece in one["pieces"]], step=step)
            except Exception as failure:
                error = self.sentence(step, failure, 0)
        if error:
            with contextlib.suppress(OSError):  # a disk that failed may refuse this, too: what is left has no COMMIT
                remove(path)
        else:
            notes += self._prune(step)
        return error, " ".join(notes)

    def _prune(self, step: int) -> list[str]:
        """Remove what is not kept, now that `step` is committed; return what to say if that failed."""
        try:
            prune(self._checkpoints, keep=self._keep, best=self._best, highest=self._highest)
        except Exception as failure:
            return [f"The checkpoint of step {step} is there, but an older one could not be removed: {failure}."]
        return []


def _room(path: Path, num_bytes: int) -> str:
    """Return what is left where checkpoints go, if that is less than what one takes."""
    try:
        while not path.exists() and path != path.parent:
            path = path.parent
        free = shutil.disk_usage(path).free
    except OSError:
        return ""
    return f" ({format_bytes(num_bytes)} to write, {format_bytes(free)} free)" if free < num_bytes else ""
