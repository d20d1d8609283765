"""Copies of a worker's state in memory of hosts, which outlives its process: made when due, at a pace all agree on.

1. All workers make room for them, or none (`_open`), after the first step that is due. Replicas of one host copy a part
   each, what they would save (`Shard.is_mine`); those of several hosts nothing, unless the plan says how often.
2. A thread copies (fault/snapshot.py) while forward and backward run. The update waits for it (`wait`).
3. Where there are several hosts, each worker's copy is sent on to another one (fault/snapshot_neighbour.py), while the
   steps until the next are done.
4. Whatever goes wrong with copies is no reason to end a training: that worker keeps none any more, and says so; the
   others of its host learn it when they would have to wait for it, all others when they agree on the pace again.
"""

import functools
import operator
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.comm.failure import is_peer_failure
from shoal.comm.messages import GroupWire, gather_values
from shoal.comm.others import first_line
from shoal.comm.reach import address_towards
from shoal.comm.shm.kept import Room
from shoal.comm.store import LOOPBACK
from shoal.core.errors import PeerLost
from shoal.core.events import EventLog
from shoal.core.host import usable_cores
from shoal.fault.shards import Shard
from shoal.fault.snapshot import Snapshots, Spent
from shoal.fault.snapshot_neighbour import Address, Receiver, neighbours
from shoal.fault.snapshot_place import NoneKept, path_of
from shoal.training.saved import live_shards
from shoal.training.snapshot_noted import Noted, meets_to_save, part_of
from shoal.training.snapshot_pace import Pace

if TYPE_CHECKING:
    from shoal.training.run import Run
    from shoal.training.snapshots import Keeping


class HostCopies:
    """The copies of one worker of a run. All calls from one thread."""

    def __init__(
        self,
        run: "Run",
        keeping: "Keeping",
        noted: Noted,
        *,
        alike: Callable[[], dict[str, Any]],
        log: EventLog,
        check: Callable[[], None],
    ) -> None:
        """`noted` has what forward changes, `alike` returns what all workers have alike, `check` raises at a loss."""
        self._run, self._keeping, self._noted, self._alike = run, keeping, noted, alike
        self._log, self._check = log, check
        self._has_copies = run.plan.mesh.keeps_whole and run.plan.workers > 1
        is_busy = run.device.type == "cpu" and run.rank.local_workers * torch.get_num_threads() >= usable_cores()
        every = keeping.every if isinstance(keeping.every, int) else 0
        self._pace: Pace | None = Pace(every, is_busy=is_busy, has_copies=self._has_copies)
        """None where no copies are made any more, on any worker."""
        self._shards: list[Shard] = []
        self._state: list[Any] = []
        self._is_divided, self._is_cut_off, self._is_given_up = False, False, False
        self._files: Snapshots | None = None
        self._receiver: Receiver | None = None

    def is_due(self, step: int) -> bool:
        """Return whether the state after `step` is to be copied: the same on all workers."""
        return self._pace is not None and self._pace.is_due(step)

    def take(self, step: int) -> None:
        """Begin to copy the state after `step`. Called by every worker at the same step, when one is due."""
        began, before = time.perf_counter(), Spent()
        self.wait()
        try:
            if self._files is not None:
                self._refresh()
            elif not self._is_given_up:
                self._open()
            if self._files is not None:
                before = self._files.spent
                self._copy(self._files, step, began)
        except Exception as error:
            self._give_up(error)
        if self._pace is None:
            return
        self._pace.note(step, before)
        if self._pace.is_to_decide:
            self._decide(step)

    def wait(self) -> None:
        """Wait until the copy under way is complete. Raises PeerLost if another worker is lost meanwhile."""
        try:
            if self._files is not None:
                self._files.wait()
        except Exception as error:
            self._give_up(error)

    def wait_delivered(self) -> None:
        """Wait until it is on the other host, where it is sent to one."""
        why = self._files.wait_delivered() if self._files is not None else ""
        if why and not self._is_cut_off:
            self._is_cut_off = True
            self._say(f"has no copy of its state on another host any more: {why}.")

    def finish(self, step: int) -> None:
        """Write down what they cost, and remove them: the run has ended in order, after `step`. By every worker."""
        self.wait()
        if self._files is not None:
            self._write_down(step)
            self._files.close(removes=True)
            self._files = None
        if self._receiver is not None:
            self._gather("")  # all have sent what they had to
            self._receiver.close(removes=True)
            self._receiver = None

    def close(self) -> None:
        """Let the copy under way end; what is complete stays. Can be called again."""
        if self._files is not None:
            self._files.close()
            self._files = None
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
        self._pace, self._shards, self._state = None, [], []

    def _give_up(self, error: Exception) -> None:
        """Keep no copies any more; but raise what is a loss of others."""
        if isinstance(error, PeerLost) or is_peer_failure(error):
            raise error
        self._is_given_up = True
        if self._files is not None:
            self._files.close(removes=True)
            self._files = None
        if not isinstance(error, NoneKept):  # else that one has said so
            self._say(f"keeps no snapshots any more ({first_line(error)}). {self._consequence()}")

    def _say(self, what: str) -> None:
        print(f"Worker {self._run.rank.number} {what}", file=sys.stderr)

    def _consequence(self) -> str:
        after = "all workers die at once" if self._has_copies else "a worker dies"
        return f"If {after}, training goes on from the last checkpoint."

    def _copy(self, files: Snapshots, step: int, began: float) -> None:
        common, states = self._alike(), self._noted.random
        files.take(self._shards, step, lambda: {"own": states.own(), "common": common}, began=began)

    def _refresh(self) -> None:
        """List the slices of the state, unless those listed before are still it."""
        now = [value for state in self._run.state.optimizer.state.values() for value in state.values()]
        is_same = len(now) == len(self._state) and all(map(operator.is_, now, self._state))
        if (
            is_same
            and self._shards
            and all(isinstance(v, Tensor) for v in now)
            and not meets_to_save(self._run.state.optimizer)
        ):
            return
        self._state = now
        shards = self._noted.put_into(live_shards(self._run))
        self._shards = [shard for shard in shards if shard.is_mine] if self._is_divided else shards

    def _open(self) -> None:
        """Make room for snapshots, on all workers or none. Called by every worker."""
        keeping, run = self._keeping, self._run
        rooms = self._gather(keeping.room.id if keeping.room is not None else "")
        if self._has_copies and keeping.every == "auto" and len(set(rooms)) > 1:
            self._pace = None
            return
        self._is_divided = len(set(rooms)) == 1
        files, why = self._made_room()
        reasons = [each for each in self._gather(why) if each]
        if reasons or files is None or keeping.room is None:
            run.say(f"No snapshots are kept: {reasons[0]}. {self._consequence()}")
            if files is not None:
                files.close(removes=True)
            self._pace = None
            return
        files.meet([worker for worker, room in enumerate(rooms) if room == keeping.room.id])
        self._files = files
        if len(set(rooms)) > 1:
            self._open_between(files, keeping.room, rooms)

    def _made_room(self) -> tuple[Snapshots | None, str]:
        """Make room for this worker's copies; return them, or why there are none. Whatever goes wrong, all go on."""
        keeping, run = self._keeping, self._run
        if keeping.room is None:
            return None, "this host has no shared memory for snapshots"
        part, parts = part_of(run, is_divided=self._is_divided)
        whose = {"generation": keeping.generation, "worker": run.rank.index, "part": part, "parts": parts}
        leave_out, timeout_s = run.memory.leave_out, run.plan.timeout_s
        files = Snapshots(keeping.room, **whose, timeout_s=timeout_s, check=self._check, on_room=leave_out)
        try:
            self._refresh()
            return files, files.prepare(self._shards, {"own": self._noted.random.own(), "common": self._alike()})
        except Exception as error:
            if isinstance(error, PeerLost) or is_peer_failure(error):
                raise
            return files, f"worker {run.rank.number}: {first_line(error)}"

    def _open_between(self, files: Snapshots, room: Room, rooms: Sequence[str]) -> None:
        """Have each worker's snapshots sent to another host. Called by every worker."""
        assert self._pace is not None
        rank, timeout_s = self._run.rank, self._run.plan.timeout_s
        host = address_towards(rank.store_host, rank.store_port) or LOOPBACK
        self._receiver = Receiver(room, host, functools.partial(path_of, room), timeout_s=timeout_s)
        addresses = self._gather(self._receiver.address)
        neighbour = neighbours(rooms)[rank.index]
        why = files.send_to(Address(*addresses[neighbour])) if neighbour is not None else ""
        reasons = [f"worker {worker}: {each}" for worker, each in enumerate(self._gather(why)) if each]
        if reasons:
            self._run.say(f"Not all workers have copies of their state on another host. {reasons[0]}.")
        self._pace.keep_apart(2)

    def _gather(self, value: Any) -> list[Any]:
        """Return what each worker says. Called by every worker."""
        return gather_values(GroupWire(), value)

    def _decide(self, step: int) -> None:
        """Agree on how often copies are made, or that none are: one that lacks makes the others useless. By all."""
        assert self._pace is not None
        asked = self._gather(None if self._is_given_up else self._pace.asked())
        if None in asked:
            self._give_up(NoneKept("others keep none any more"))
            self._pace = None
            return
        if self._pace.decide(max(asked)) and self._run.rank.index == 0:
            self._run.say(self._pace.sentence())
        self._write_down(step)

    def _write_down(self, step: int) -> None:
        assert self._pace is not None
        num_bytes = self._files.num_bytes if self._files is not None else 0
        self._log.write("snapshot", step=step, bytes=num_bytes, **self._pace.figures())
