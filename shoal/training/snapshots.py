"""What a worker keeps in memory of its last step, so that no worker's death costs more than that step.

1. After each step a worker notes what the next forward pass will change: buffers, random states, what a codec keeps.
   With these its live parameters and optimizer are the state after that step, until the next update begins.
2. The state is copied to memory of the host that outlives the processes (fault/snapshot.py), after every step if that
   costs at most 1% of it (replicas: 0.5%), else after every so many. Where workers hold slices, those of one that dies
   are nowhere else. Replicas are copies of each other, and need this only when all die at once: on one host each copies
   a part, what it would save (`Shard.is_mine`); on several hosts nothing, unless the plan says how often.
3. Where there are several hosts, each worker's copy is sent on to another one (fault/snapshot_neighbour.py), while the
   steps until the next are done.
4. Where workers may be apart (sync.mode), only what is the run's state counts, and nothing is copied to the host's
   memory. With local steps that is the state of the last meeting, with servers that after the last boundary: of
   these each keeps a copy of its own.
5. When workers are lost or join, those of the next generation bring the newest whole state together (`take_over`).
"""

import dataclasses
import operator
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.comm.alive import Watch
from shoal.comm.messages import GroupWire, gather_values
from shoal.comm.reach import address_towards
from shoal.comm.shm.kept import Room
from shoal.comm.store import LOOPBACK
from shoal.core.events import EventLog
from shoal.core.host import usable_cores
from shoal.fault.checkpoint.manifest import committed, step_of
from shoal.fault.exchange import StateLost, offer
from shoal.fault.shards import Shard
from shoal.fault.snapshot import Held, Snapshots, path_of, remove_older
from shoal.fault.snapshot_neighbour import Address, Receiver, neighbours
from shoal.training.saved import changing, fixed, go_on_from, live_shards
from shoal.training.snapshot_noted import Noted, StateCopy, meets_to_save, part_of
from shoal.training.snapshot_pace import Pace

if TYPE_CHECKING:
    from shoal.training.run import Run

_SOURCE = "the workers' memory"


@dataclasses.dataclass(frozen=True)
class Keeping:
    """How the workers of a generation keep their states, and what they hold from before."""

    room: Room | None
    """Where snapshots lie; None where the host has no memory for them."""
    generation: int
    every: str | int = "auto"
    """auto, never, or after how many steps a snapshot is taken."""
    held: Sequence[Held] = ()
    """What this worker held at the end of the generation before; a worker that joins holds nothing."""


class RunSnapshots:
    """The snapshots of one worker of a run. Without `keeping` there are none, and nothing is done."""

    def __init__(self, run: "Run", keeping: Keeping | None, log: EventLog, watch: Watch | None) -> None:
        self._run, self._keeping, self._log = run, keeping, log
        self._check = watch.check if watch is not None else lambda: None
        self._step = -1  # that of the live state; -1 where there is none, as in the middle of an update
        self._noted = Noted(run)
        self._shards: list[Shard] = []
        self._is_cut_off, self._is_divided = False, False
        self._state: list[Any] = []
        self._copy = StateCopy() if run.plan.sync.mode in ("local", "server") else None
        self._files: Snapshots | None = None
        self._receiver: Receiver | None = None
        self._pace: Pace | None = None
        if keeping is None:
            return
        self._fixed = {**fixed(run), "metrics": {}}
        self._hook = run.state.optimizer.register_step_pre_hook(lambda *_: self._before_update())
        every = keeping.every
        self._has_copies = run.plan.mesh.keeps_whole and run.plan.workers > 1
        if every != "never" and run.loose is None:
            is_busy = run.device.type == "cpu" and run.rank.local_workers * torch.get_num_threads() >= usable_cores()
            asked = every if isinstance(every, int) else 0
            self._pace = Pace(asked, is_busy=is_busy, has_copies=self._has_copies)

    def take_over(self) -> int | None:
        """Go on from what the members of this generation hold together, and return the step; None if that is nothing.

        Called by every member. In the first generation there is nothing to go on from.
        """
        keeping, run = self._keeping, self._run
        if keeping is None or keeping.generation == 0:
            return None
        offers = offer(keeping.held, GroupWire(), keeping.room)
        saved = self._gather([step_of(path) for path in committed(run.folder.checkpoints)][-1:])[0]
        if offers.newest is None or (saved and saved[0] > offers.step):
            return None
        try:
            go_on_from(run, offers, offers.fill, source=_SOURCE, say=run.say)
        except StateLost as lost:
            run.say(str(lost))
            run.state.optimizer.state.clear()
            return None
        finally:
            self._keeping = dataclasses.replace(keeping, held=())  # memory of a model that is not trained any more
        return run.step_count

    def begin(self) -> None:
        """Note where training begins, or goes on. Called by every worker, once the state is there."""
        if self._keeping is None:
            return
        self._note()
        if self._pace is not None and self._run.step_count > 0:
            self._take()
            self._wait()
            self._wait_delivered()
        if self._keeping.generation > 0:
            self._gather("")  # all have theirs: what generations before have left is needed no more
            if self._keeping.room is not None:
                remove_older(self._keeping.room, self._keeping.generation)

    def after_step(self) -> None:
        """Note the state after the step that was just done, and copy it if that is due. Called by every worker."""
        if self._keeping is None or (self._run.loose is not None and not self._run.loose.is_common):
            return
        self._note()
        if self._pace is not None and self._pace.is_due(self._step):
            self._take()
            if self._pace is not None and self._pace.is_to_decide:
                self._decide()

    def held(self) -> list[Held]:
        """Return the live state of this worker, if it is not in the middle of an update. Called after the last step."""
        if self._keeping is None:
            return []
        generation, worker = self._keeping.generation, self._run.rank.index
        part, parts = part_of(self._run, is_divided=False)
        own = self._noted.random.own()
        if self._copy is not None and self._copy.step >= 0:
            return [Held(generation, self._copy.step, worker, part, parts, self._copy.shards, own, self._copy.alike)]
        if self._step < 0 or meets_to_save(self._run.state.optimizer):
            return []
        shards = self._noted.put_into(live_shards(self._run))
        return [Held(generation, self._step, worker, part, parts, shards, own, self._alike())]

    def change(self) -> None:
        """Know that the state is about to change otherwise than by the optimizer's step."""
        self._step = -1

    def reach(self, step: int) -> None:
        """Know that the state is that after `step`, while the step is not over yet."""
        if self._keeping is not None and self._copy is None:
            self._noted.take()
            self._step = step

    def finish(self) -> None:
        """Write down what snapshots cost, and remove them: the run has ended in order."""
        if self._files is not None and self._pace is not None:
            self._wait()
            self._write_down()
            self._files.close(removes=True)
            self._files = None
        if self._receiver is not None:
            self._gather("")  # all have sent what they had to
            self._receiver.close(removes=True)
            self._receiver = None

    def close(self) -> None:
        """Let the copy under way end; snapshots stay in the host's memory. Can be called again."""
        if self._files is not None:
            self._files.close()
            self._files = None
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
        if self._keeping is not None:
            self._hook.remove()
        self._keeping, self._pace, self._shards, self._state, self._copy = None, None, [], [], None

    def _before_update(self) -> None:
        """The state is about to change: wait for the copy of it."""
        self._wait()
        if self._pace is not None and self._pace.is_due(self._run.step_count + 2):
            self._wait_delivered()  # the next step is copied over what others may need until this is delivered
        self._step = -1  # only now: a loss that is noticed while waiting leaves the state whole

    def _wait_delivered(self) -> None:
        why = self._files.wait_delivered() if self._files is not None else ""
        if why and not self._is_cut_off:
            self._is_cut_off = True
            print(
                f"Worker {self._run.rank.index} has no copy of its state on another host any more: {why}.",
                file=sys.stderr,
            )

    def _wait(self) -> None:
        if self._files is not None:
            self._files.wait()

    def _note(self) -> None:
        self._noted.take()
        self._step = self._run.step_count
        if self._copy is not None:
            self._copy.take(self._noted.put_into(live_shards(self._run)), self._step, self._alike())

    def _alike(self) -> dict[str, Any]:
        return {**self._fixed, **changing(self._run)}

    def _take(self) -> None:
        """Begin to copy the state to the host's memory. Called by every worker at the same step."""
        began = time.perf_counter()
        self._wait()
        if self._files is None:
            self._open()
        else:
            self._refresh()
        if self._files is None or self._pace is None:
            return
        common, states = self._alike(), self._noted.random
        before = self._files.spent
        text = lambda: {"own": states.own(), "common": common}  # noqa: E731
        self._files.take(self._shards, self._step, text, began=began)
        self._pace.note(self._step, before)

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
        assert keeping is not None
        rooms = self._gather(keeping.room.id if keeping.room is not None else "")
        if self._has_copies and keeping.every == "auto" and len(set(rooms)) > 1:
            self._pace = None
            return
        self._is_divided = len(set(rooms)) == 1
        self._refresh()
        why, files = "this host has no shared memory for snapshots", None
        if keeping.room is not None:
            part, parts = part_of(run, is_divided=self._is_divided)
            whose = {"generation": keeping.generation, "worker": run.rank.index, "part": part, "parts": parts}
            files = Snapshots(keeping.room, **whose, timeout_s=run.plan.timeout_s, check=self._check)
            why = files.prepare(self._shards, {"own": self._noted.random.own(), "common": self._alike()})
        reasons = [each for each in self._gather(why) if each]
        if reasons or files is None or keeping.room is None:
            after = "all workers die at once" if self._has_copies else "a worker dies"
            run.say(f"No snapshots are kept: {reasons[0]}. If {after}, training goes on from the last checkpoint.")
            if files is not None:
                files.close(removes=True)
            self._pace = None
            return
        files.meet([worker for worker, room in enumerate(rooms) if room == keeping.room.id])
        self._files = files
        if len(set(rooms)) > 1:
            self._open_between(files, keeping.room, rooms)

    def _open_between(self, files: Snapshots, room: Room, rooms: Sequence[str]) -> None:
        """Have each worker's snapshots sent to another host. Called by every worker."""
        assert self._pace is not None
        rank = self._run.rank
        host = address_towards(rank.store_host, rank.store_port) or LOOPBACK
        self._receiver = Receiver(room, host, lambda generation, worker: path_of(room, generation, worker))
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

    def _decide(self) -> None:
        """Agree on how often snapshots are taken. Called by every worker at the same step."""
        assert self._pace is not None
        asked = self._gather(self._pace.asked())
        if self._pace.decide(max(asked)) and self._run.rank.index == 0:
            self._run.say(self._pace.sentence())
        self._write_down()

    def _write_down(self) -> None:
        assert self._pace is not None
        num_bytes = self._files.num_bytes if self._files is not None else 0
        self._log.write("snapshot", step=self._step, bytes=num_bytes, **self._pace.figures())
