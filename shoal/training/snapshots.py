"""What a worker keeps in memory of its last step, so that no worker's death costs more than that step.

1. After each step a worker notes what the next forward pass will change: buffers, random states, what a codec keeps.
   With these its live parameters and optimizer are the state after that step, until the next update begins.
2. The state is copied to memory of hosts that outlives the processes (snapshot_copies.py), after every step if that
   costs at most 1% of it (replicas: 0.5%), else after every so many. Where workers hold slices, those of one that dies
   are nowhere else. Replicas are copies of each other, and need this only when all die at once.
3. Where workers may be apart (sync.mode), only what is the run's state counts, and nothing is copied to the host's
   memory. With local steps that is the state of the last meeting, with servers that after the last boundary: of
   these each keeps a copy of its own.
4. When workers are lost or join, those of the next generation bring the newest whole state together (`take_over`).
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shoal.comm.alive import Watch
from shoal.comm.messages import GroupWire, gather_values
from shoal.comm.shm.kept import Room
from shoal.core.events import EventLog
from shoal.fault.exchange import Offers, StateLost
from shoal.fault.snapshot import Held
from shoal.fault.snapshot_place import remove_older
from shoal.training.saved import changing, fixed, go_on_from, live_shards
from shoal.training.snapshot_copies import HostCopies
from shoal.training.snapshot_noted import Noted, StateCopy, meets_to_save, part_of

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
        self._run, self._keeping = run, keeping
        self._step = -1  # that of the live state; -1 where there is none, as in the middle of an update
        self._noted = Noted(run)
        self._copy = StateCopy() if run.plan.sync.mode in ("local", "server") else None
        self._copies: HostCopies | None = None
        if keeping is None:
            return
        self._fixed = {**fixed(run), "metrics": {}}
        self._hook = run.state.optimizer.register_step_pre_hook(lambda *_: self._before_update())
        if keeping.every != "never" and run.loose is None:
            check = watch.check if watch is not None else lambda: None
            self._copies = HostCopies(run, keeping, self._noted, alike=self._alike, log=log, check=check)

    def take_over(self, offers: Offers | None) -> int | None:
        """Go on from what the members of this generation hold together, and return the step; None if that is nothing.

        Called by every member.
        """
        keeping, run = self._keeping, self._run
        if keeping is None or offers is None:
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
        """Note where training begins or goes on; not at its end: some are gone before all meet. By every worker."""
        if self._keeping is None:
            return
        self._note()
        if self._copies is not None and 0 < self._run.step_count < self._run.job.total_steps:
            self._copies.take(self._step)
            self._copies.wait()
            self._copies.wait_delivered()
        if self._keeping.generation > 0:
            gather_values(GroupWire(), "")  # all have theirs: what generations before have left is needed no more
            if self._keeping.room is not None:
                remove_older(self._keeping.room, self._keeping.generation)

    def after_step(self) -> None:
        """Note the state after the step that was just done, and copy it if that is due. Called by every worker."""
        if self._keeping is None or (self._run.loose is not None and not self._run.loose.is_common):
            return
        self._note()
        if self._copies is not None and self._copies.is_due(self._step):
            self._copies.take(self._step)

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
        """Write down what copies cost, and remove them: the run has ended in order. Called by every worker."""
        if self._copies is not None:
            self._copies.finish(self._step)

    def close(self) -> None:
        """Let the copy under way end; copies stay in the host's memory. Can be called again."""
        if self._copies is not None:
            self._copies.close()
        if self._keeping is not None:
            self._hook.remove()
        self._keeping, self._copies, self._copy = None, None, None

    def _before_update(self) -> None:
        """The state is about to change: wait for the copy of it."""
        if self._copies is not None:
            self._copies.wait()
            if self._copies.is_due(self._run.step_count + 2):
                self._copies.wait_delivered()  # the next step is copied over what others may need until then
        self._step = -1  # only now: a loss that is noticed while waiting leaves the state whole

    def _note(self) -> None:
        self._noted.take()
        self._step = self._run.step_count
        if self._copy is not None:
            self._copy.take(self._noted.put_into(live_shards(self._run)), self._step, self._alike())

    def _alike(self) -> dict[str, Any]:
        return {**self._fixed, **changing(self._run)}
