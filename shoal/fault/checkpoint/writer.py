"""Writing checkpoints while training goes on.

1. The loop waits until the memory of the checkpoint before is free: at most one is in memory. Then it copies what is
   this worker's to save into memory laid out as its file will be, and goes on.
2. A thread writes the file and brings it onto the disk: of the run folder, or of the node first (local.py), where the
   memory is free sooner, and the one before may still be on its way to the run folder.
3. When all workers have done so, worker 0 commits it (commit.py). Whatever goes wrong on any worker, nothing is
   committed, and all learn the same sentence.

`store` is one that no run has used before, as that of a process group is.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed import Store

from shoal.comm.calls import CALLS
from shoal.comm.torch_private import own_connection
from shoal.core.errors import PeerLost
from shoal.fault import inject
from shoal.fault.checkpoint.commit import Commits
from shoal.fault.checkpoint.direct import stepping_back
from shoal.fault.checkpoint.file_format import FileLayout
from shoal.fault.checkpoint.local import drop_committed, drop_older, note_part, remove_empty, rescue
from shoal.fault.checkpoint.manifest import COMMON, folder_of
from shoal.fault.checkpoint.memory import FileMemory, manifest_tensors
from shoal.fault.checkpoint.part import Files, copy_part, tensor_file, write_part
from shoal.fault.checkpoint.written import Written
from shoal.fault.shards import SavedState

_LOOK_EVERY_S = 0.001
_TICK_S = 0.05
_GIVE_UP_S = 2.0
"""How long a thread may take to notice that nobody wants its checkpoint: a piece of a file, on a slow disk."""


@dataclass
class _Writing:
    """A checkpoint under way."""

    step: int
    number: int
    layout: FileLayout
    texts: dict[str, str]
    tensors: dict[str, Any]
    stall_s: float
    before: "_Writing | None"
    """The one that may still be on its way to the run folder."""
    is_in_memory: bool = True
    local_s: float | None = None
    note: str = ""
    thread: threading.Thread = field(default_factory=threading.Thread)
    written: Written | None = None

    @property
    def num_bytes(self) -> int:
        return self.layout.num_bytes + sum(map(len, self.texts.values()))


class GivenUp(Exception):
    """Nobody wants the checkpoint any more."""


class Checkpointer:
    """Writes the checkpoints of one worker."""

    def __init__(
        self,
        checkpoints: Path,
        *,
        index: int,
        number: int,
        workers: int,
        store: Store | None,
        timeout_s: float,
        keep: int = 2,
        best: str = "",
        highest: bool = False,
        local: Path | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`number` is what this worker, the one at `index`, is called in sentences.

        `local` is a folder of this node, to write to first. `check` is called while the loop waits, and raises if a
        worker is lost.
        """
        self._checkpoints, self._index, self._number, self._workers = checkpoints, index, number, workers
        self._local, self._attempt, self._check = local, "", check
        self._store = own_connection(store) if store is not None else None
        self._commits = Commits(
            checkpoints,
            index=index,
            number=number,
            workers=workers,
            store=self._store,
            timeout_s=timeout_s,
            keep=keep,
            best=best,
            highest=highest,
            tick=self._tick,
            on_wait=self._on_wait,
        )
        self._memory = FileMemory()
        self._preparing: threading.Thread | None = None
        self._under_way: list[_Writing] = []
        self._is_given_up = False
        self._count = 0

    def rescue(self, say: Callable[[str], None]) -> None:
        """Bring into the run folder what an earlier attempt has left on the nodes. Called by every worker, first."""
        if self._local is None:
            return
        places = self._local, self._checkpoints
        try:
            self._attempt = rescue(*places, self._commits, index=self._index, store=self._store, say=say)
        except GivenUp:
            self._check()  # says who is lost
            raise

    def save(self, state: Callable[[], SavedState], step: int, *, began: float | None = None) -> None:
        """Begin to write a checkpoint of `step`, for which the loop has waited since `began` (of time.perf_counter).

        Called by every worker, between steps, after `make_way`. When it returns, the state may change again.
        """
        began = time.perf_counter() if began is None else began
        inject.at("checkpoint: copying", step, folder_of(self._checkpoints, step))
        saved = state()
        mine = [shard for shard in saved.shards if shard.is_mine]
        layout = self._memory.copy(mine)
        texts = {f"worker-{self._index}.json": json.dumps(saved.own, allow_nan=False)}
        if self._index == 0:
            texts[COMMON] = json.dumps({**saved.common, "step": step}, allow_nan=False)
        self._count += 1
        one = _Writing(
            step=step,
            number=self._count,
            layout=layout,
            texts=texts,
            tensors=manifest_tensors(mine, layout, tensor_file(self._index)),
            stall_s=time.perf_counter() - began,
            before=self._under_way[-1] if self._under_way else None,
        )
        one.thread = threading.Thread(target=self._write, args=(one,), name=f"checkpoint {step}", daemon=True)
        self._under_way.append(one)
        one.thread.start()

    def ended(self) -> list[Written]:
        """Return how those checkpoints ended that have, since this was asked the last time; without waiting."""
        found = []
        while self._under_way and not self._under_way[0].thread.is_alive():
            one = self._under_way.pop(0)
            if one.written is not None:  # else it was given up
                found.append(one.written)
        return found

    def make_way(self) -> None:
        """Wait until there is memory for another one, and at most one more is on its way."""
        self._wait_while(lambda: any(one.is_in_memory for one in self._under_way if one.thread.is_alive()))
        self._wait_while(lambda: sum(one.thread.is_alive() for one in self._under_way) > 1)

    def wait(self) -> list[Written]:
        """Wait for the checkpoints under way, and return how they ended."""
        self._wait_while(lambda: any(one.thread.is_alive() for one in self._under_way))
        return self.ended()

    def prepare(self, state: SavedState) -> None:
        """Get the memory for checkpoints of `state` ready, in the background: when first touched, it is slow."""
        if self._under_way:
            return  # one is being written: it has its memory
        self._memory.make_room([shard for shard in state.shards if shard.is_mine])
        self._preparing = threading.Thread(target=self._memory.touch, name="memory for checkpoints", daemon=True)
        self._preparing.start()

    def close(self, *, wait_s: float, give_up_s: float = _GIVE_UP_S) -> list[Written]:
        """Wait `wait_s` at most for the checkpoints under way, not any longer if a worker is lost; give up the rest.

        Returns how those ended that have. No file is written any more then, unless a disk holds a thread for longer
        than `give_up_s`.
        """
        end_s = time.monotonic() + wait_s
        with contextlib.suppress(PeerLost):  # its part does not come any more
            self._wait_while(lambda: time.monotonic() < end_s and any(one.thread.is_alive() for one in self._under_way))
        found = self.ended()
        self._is_given_up = True
        for one in self._under_way:
            one.thread.join(give_up_s)
        if self._local is not None:
            remove_empty(self._local)
        return found

    def _wait_while(self, is_under_way: Callable[[], bool]) -> None:
        if self._preparing is not None:
            self._preparing.join()  # it only writes to memory
            self._preparing = None
        while is_under_way():  # every wait inside has a timeout
            time.sleep(_LOOK_EVERY_S)
            self._check()

    @stepping_back
    def _write(self, one: _Writing) -> None:
        """Write, copy and commit a checkpoint: what its thread does."""
        began = time.perf_counter()
        said: dict[str, Any] = {}
        failure: Exception | None = None
        try:
            said = {"pieces": [{"files": self._write_files(one), "tensors": one.tensors}]}
        except GivenUp:
            return
        except Exception as error:
            failure = error
        one.is_in_memory = False
        try:
            self._await(one.before)
            if failure is not None:  # only now it is known whether the one before is there
                said = {"error": self._commits.sentence(one.step, failure, one.num_bytes)}
            outcome, note = self._commits.commit(f"save/{one.number}", one.step, {**said, "note": one.note})
            if self._local is not None and not outcome:
                drop_committed(self._local, one.step)
        except GivenUp:
            return
        except Exception as error:
            outcome, note = self._commits.sentence(one.step, error, 0), ""
        seconds = time.perf_counter() - began
        one.before = None
        one.written = Written(one.step, one.stall_s, seconds, one.num_bytes, one.local_s, outcome, note)

    def _write_files(self, one: _Writing) -> Files:
        """Bring this worker's files into the run folder, by way of the node's storage if there is a folder for it."""
        path, name = folder_of(self._checkpoints, one.step), tensor_file(self._index)
        inject.at("checkpoint: writing", one.step, path)
        memory = self._memory.bytes
        files = None if self._local is None else self._write_locally(one, self._local, memory)
        if files is None:
            return write_part(path, name, memory, one.texts, tick=self._on_piece)
        assert self._local is not None
        one.is_in_memory = False
        self._await(one.before)
        inject.at("checkpoint: copying out", one.step, path)
        copy_part(folder_of(self._local, one.step), path, files, tick=self._on_piece)
        return files

    def _write_locally(self, one: _Writing, local: Path, memory: Tensor) -> Files | None:
        """Write this worker's files to the node's storage; None if that cannot be, which is noted."""
        began, path = time.perf_counter(), folder_of(local, one.step)
        try:
            files = write_part(path, tensor_file(self._index), memory, one.texts, tick=self._on_piece)
            piece = {"files": files, "tensors": one.tensors}
            note_part(path, self._index, piece, workers=self._workers, attempt=self._attempt)
            kept = {one.step} | ({one.before.step} if one.before is not None else set())
            drop_older(local, self._index, kept=kept)
        except OSError as error:
            one.note = (
                f"worker {self._number} could not write to {local} ({error.strerror or error}), and wrote the "
                f"checkpoint of step {one.step} to {self._checkpoints} at once."
            )
            return None
        one.local_s = time.perf_counter() - began
        return files

    def _await(self, before: _Writing | None) -> None:
        """Wait for the one `before`: each is committed before the next."""
        while before is not None and before.thread.is_alive():  # every wait inside has a timeout
            before.thread.join(_TICK_S)
            self._tick()

    def _on_wait(self) -> None:
        """Called while it is waited for the others."""
        self._tick()
        try:
            self._check()
        except PeerLost as error:  # what it has not said, it will not say
            raise GivenUp("a worker is lost") from error

    def _on_piece(self) -> None:
        """Called between two pieces of a file."""
        CALLS.moves += 1  # a disk may take its time: that is no hang
        self._tick()

    def _tick(self) -> None:
        if self._is_given_up:
            raise GivenUp("it was given up")
