"""When a run saves its state, and from where it goes on.

1. A run folder with checkpoints is gone on with, by whatever workers open it: from the last one without damage.
2. After a step that is due, the state is saved (fault/checkpoint/writer.py); so is that after the last step.
3. With `checkpoint_s`, worker 0 says in the store after how many steps the next one is due, by what steps have taken.
4. How a checkpoint ended is looked at after each step, and written down. Where it failed the run goes on; or it stops,
   if the plan says so, after a step on which the workers agree.
5. Where workers may be apart (sync.mode), all this is done after boundaries, on which they agree (boundaries.py).
6. After each step somebody may have asked to stop, too (fault/preempt.py): then the state is saved, and waited for.
"""

import dataclasses
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from torch.distributed import PrefixStore, Store

from shoal.comm.alive import Watch
from shoal.comm.failure import is_peer_failure
from shoal.comm.told import told
from shoal.core.errors import CheckpointError, PeerLost, PlanError, did_you_mean
from shoal.core.events import EventLog
from shoal.core.notice import read_notice_s
from shoal.fault.checkpoint.local import local_folder
from shoal.fault.checkpoint.manifest import remove_unfinished
from shoal.fault.checkpoint.reader import agreed_steps, choose
from shoal.fault.checkpoint.weights import read_weights
from shoal.fault.checkpoint.writer import Checkpointer
from shoal.fault.checkpoint.written import Written
from shoal.fault.preempt import Preemption, Reason, Together
from shoal.fault.shards import Found, Shard, fill
from shoal.training.saved import model_shards, restore, state_of

if TYPE_CHECKING:
    from shoal.training.run import Run

_FIRST_STEPS = 10
"""Steps after which it is known what one takes, and so how many are `checkpoint_s`."""


def _by_plain_names(shards: Iterable[Shard], found: Mapping[str, Found]) -> Iterator[Shard]:
    """Yield the parameters, and those buffers that are in `found`, as a file of weights calls both."""
    for shard in shards:
        name = f"model/{shard.name.partition('/')[2]}"
        if shard.name == name or name in found:
            yield dataclasses.replace(shard, name=name)


class Saving:
    """The checkpoints of one worker of a run."""

    def __init__(self, run: "Run", store: Store | None, log: EventLog, watch: Watch | None) -> None:
        plan, self._run, self._log = run.plan, run, log
        self._settings = plan.checkpoint
        metrics = ["loss", *(run.job.metrics if run.job.eval_data is not None else ())]
        if self._settings.best and self._settings.best not in metrics:
            hint = did_you_mean(self._settings.best, metrics)
            raise PlanError(f"checkpoint.best={self._settings.best!r} is no metric of the job's evaluation.{hint}")
        self._store = None if store is None else PrefixStore("checkpoints", store)
        self._check = watch.check if watch is not None else lambda: None
        self._writer = Checkpointer(
            run.folder.checkpoints,
            index=run.rank.index,
            number=run.rank.number,
            workers=run.rank.workers,
            store=self._store,
            timeout_s=plan.timeout_s,
            keep=self._settings.keep,
            best=self._settings.best,
            highest=self._settings.best_is == "highest",
            local=local_folder(self._settings.local, run.folder.path),
            check=self._check,
        )
        self._saved_step = -1
        self._there: set[int] = set()
        """Steps that are done again, and whose checkpoints are there: they are not written over."""
        self._failure = ""
        self._together: Together | None = None
        self._asked: Preemption | None = None
        self._next_step: int | None = None
        self._began = (0, time.monotonic())
        self._rounds = 0
        if run.loose is not None:
            run.loose.boundaries.next_save = lambda: self._next_step

    def begin(self, *, is_restored: bool = False) -> None:
        """Go on from the last checkpoint, if there is one; else from the weights that the plan names, if any.

        Where the state `is_restored` already, from the memory of workers, checkpoints are only gone on with.
        """
        run = self._run
        if run.rank.index == 0:
            for step in remove_unfinished(run.folder.checkpoints):
                run.say(f"The checkpoint of step {step} was never finished, and is removed.")
        self._writer.rescue(run.say)
        if is_restored:
            self._there = set(self._steps_there())
        else:
            self._restore()
        self._began = (run.step_count, time.monotonic())
        self._plan_next()

    def _steps_there(self) -> list[int]:
        run = self._run
        return agreed_steps(
            run.folder.checkpoints,
            index=run.rank.index,
            store=self._store,
            timeout_s=run.plan.timeout_s,
            check=self._check,
        )

    def _restore(self) -> None:
        run = self._run
        saved = choose(
            run.folder.checkpoints,
            index=run.rank.index,
            count=run.rank.workers,
            store=self._store,
            timeout_s=run.plan.timeout_s,
            say=run.say,
            check=self._check,
        )
        if saved is not None:
            restore(run, saved, say=run.say)
            self._saved_step = saved.step
            run.say(f"Going on after step {saved.step}, from {saved.path}.")
        elif run.plan.weights:
            found, source = read_weights(run.plan.weights)
            fill(list(_by_plain_names(model_shards(run), found)), found, source=source)

    @property
    def is_asked(self) -> bool:
        """Whether somebody may ask this run to stop."""
        return self._asked is not None

    def listen(self, preemption: Preemption | None) -> None:
        """Stop when `preemption` says so; None: no more."""
        self._asked = preemption

    def after_step(self) -> None:
        """Save the state if that is due, and stop if that was asked for. Called by every worker, between steps."""
        self._note(self._writer.ended())
        if self._failure:
            self._stop_together()
        is_together = self._run.loose is None or self._run.loose.is_settled
        if is_together and self._is_due():
            self.save()
            self._plan_next()
        elif is_together and self._next_step is not None and self._run.step_count == self._began[0] + 1:
            self._writer.prepare(state_of(self._run))  # not before: the optimizer makes its state in its first step
        self._stop_if_asked()

    def save(self, *, wait: bool = False) -> None:
        """Save the state now. Called by every worker, between steps.

        With `wait`, until it is on the disk; that it cannot be written there is an error then, whatever the plan says.
        """
        step, began = self._run.step_count, time.perf_counter()
        if step in self._there:
            return
        if wait and step == self._saved_step:
            failed = self._note(self._writer.wait())  # from here on all workers know the same
            self._saved_step = -1 if step in failed else step
        if step != self._saved_step:
            self._writer.make_way()
            self._writer.save(lambda: state_of(self._run), step, began=began)
            self._saved_step = step
        if wait:
            failed = self._note(self._writer.wait())
            if step in failed:
                self._saved_step = -1
                raise CheckpointError(failed[step])

    def finish(self) -> None:
        """Wait for the checkpoints under way. Called by every worker."""
        self._note(self._writer.wait())
        if self._failure:
            raise CheckpointError(self._failure)

    def close(self) -> None:
        """End the writing. What is under way is waited for, within the notice, so that no error loses a checkpoint.

        But not if that error is the loss of a worker, whose part does not come any more. Those who are left may write
        the same step next: this one is among them only when it writes nothing any more.
        """
        error = sys.exception()
        is_lost = error is not None and (isinstance(error, PeerLost) or is_peer_failure(error))
        if is_lost and self._run.rank.member:
            self._note(self._writer.close(wait_s=0.0, give_up_s=self._run.plan.timeout_s))
        else:
            self._note(self._writer.close(wait_s=0.0 if is_lost else read_notice_s()))

    def _stop_if_asked(self) -> None:
        run, asked = self._run, self._asked
        reason = self._requested(asked) if asked is not None else None
        if asked is not None and reason is not None and run.step_count < run.job.total_steps:
            asked.stop(reason, run.step_count, run.save, run=str(run.folder.path))

    def _requested(self, asked: Preemption) -> Reason | None:
        """Return why to stop now, if that is so: the same on all workers."""
        run, loose = self._run, self._run.loose
        if loose is None:
            return asked.requested(run.step_count)
        reason = asked.known(run.step_count)
        if reason is not None:
            loose.boundaries.stop.ask(run.step_count)
        return reason if loose.is_settled and loose.boundaries.stop.is_boundary(run.step_count) else None

    def _stop_together(self) -> None:
        """Raise that a checkpoint could not be written, after the same step on all workers."""
        run, store = self._run, self._store
        if run.loose is not None:
            run.loose.boundaries.fail.ask(run.step_count)
            if run.loose.is_settled and run.loose.boundaries.fail.is_boundary(run.step_count):
                raise CheckpointError(self._failure)
            return
        if store is not None and self._together is None:
            ahead = 2 if run.device.type == "cuda" else 1  # as for `loop.listening`
            self._together = Together(PrefixStore("failed", store), workers=run.rank.workers, ahead=ahead)
            self._together.count_armed()
        stop_after = self._together.stop_after(run.step_count) if self._together is not None else run.step_count
        if stop_after is not None and run.step_count >= stop_after:
            raise CheckpointError(self._failure)

    def _is_due(self) -> bool:
        step = self._run.step_count
        if self._next_step is None:
            return False
        if step == self._run.job.total_steps:
            return True
        if self._settings.every_steps == 0 and step == self._next_step and self._rounds == 0:
            self._plan_next()  # only now it is known what a step takes
        return step >= self._next_step

    def _plan_next(self) -> None:
        """Set the step of the next checkpoint."""
        step, seconds = self._run.step_count, self._run.plan.checkpoint_s
        if self._settings.every_steps:
            self._next_step = (step // self._settings.every_steps + 1) * self._settings.every_steps
        elif seconds is not None:
            first, since = self._began
            done = step - first
            wanted = step + (self._agreed_steps(seconds, done, since) if done else _FIRST_STEPS)
            every = self._run.plan.sync.local_steps  # where they meet anyway
            self._next_step = -(-wanted // every) * every

    def _agreed_steps(self, seconds: float, done: int, since: float) -> int:
        """Return how many steps are `seconds`, as worker 0 has measured them."""
        self._rounds += 1
        each_s = (time.monotonic() - since) / done
        steps = max(1, round(seconds / each_s) - (done if self._rounds == 1 else 0))
        if self._store is None:
            return steps
        key = f"steps/{self._rounds}"
        if self._run.rank.index == 0:
            self._store.set(key, str(steps))
        # They meet in every step: worker 0 has been here, or will be at once.
        return int(told(self._store, [key], timeout_s=self._run.plan.timeout_s, check=self._check)[0])

    def _note(self, ended: Iterable[Written]) -> dict[int, str]:
        """Write down how checkpoints ended; return why those failed that did, by their steps."""
        failed = {}
        for written in ended:
            self._log.write(
                "checkpoint",
                step=written.step,
                stall_s=round(written.stall_s, 6),
                write_s=round(written.write_s, 6),
                bytes=written.num_bytes,
                **({"local_s": round(written.local_s, 6)} if written.local_s is not None else {}),
                **({"error": written.error} if written.error else {}),
            )
            if written.note:
                self._run.say(f"{written.note[:1].upper()}{written.note[1:]}")
            if written.error:
                failed[written.step] = written.error
                self._judge(written.error)
        return failed

    def _judge(self, error: str) -> None:
        """Remember that the run is to stop at this `error`, or say that it goes on."""
        if self._settings.on_error == "stop":
            self._failure = self._failure or f"{error} The plan says to stop then (checkpoint.on_error)."
        else:
            self._run.say(f"{error[:1].upper()}{error[1:]} Training goes on.")
