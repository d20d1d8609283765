"""A run that goes on when it loses workers, and takes in those that come.

1. The members agree on who is there (fault/membership.py): that is a generation. The plan is resized for them.
2. They form groups, build their parts of the model anew, and bring the state together from what they hold in memory
   (training/snapshots.py); if that is not all of it, they read the last checkpoint.
3. They train. The generation ends with the job; or when a member is lost, which all hear at once; or, after a step that
   they agree on, because somebody waits to be let in. Then they keep what they hold, give up the groups, and go to 1.

The processes stay: a recovery imports nothing, and reads no file. What was in a step when a worker died is done again
by those who are left, on the same samples with the same seeds: the numbers are those of a run that lost nobody.

If a generation ends though nobody is dead, something else is wrong, such as collectives that do not match: the
run then ends with what the watch says of it.
"""

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch.distributed import Store

from shoal.comm.failure import is_peer_failure
from shoal.comm.group import barrier
from shoal.comm.others import first_line
from shoal.comm.rank import Rank
from shoal.comm.shm.kept import Room, open_room, token_of
from shoal.comm.torch_private import free_abandoned_groups
from shoal.core.errors import PeerLost, ShoalError, Stopped, WorkerFailed
from shoal.core.events import EventLog
from shoal.core.run_folder import RunFolder
from shoal.fault import inject
from shoal.fault.checkpoint.manifest import committed, step_of
from shoal.fault.generation import Generation
from shoal.fault.membership import Membership
from shoal.fault.membership_ear import Ear
from shoal.fault.preempt import Preemption
from shoal.fault.snapshot import Held
from shoal.spec.job import Job
from shoal.spec.plan import Plan
from shoal.spec.record import Recorded
from shoal.training.loop import is_evaluated, train_all
from shoal.training.opening import end, opened
from shoal.training.recovery import Recovery
from shoal.training.resized import fitting, fitting_at_last, resized
from shoal.training.run import Run
from shoal.training.snapshots import Keeping

_MOST_ALARMS = 2
"""How many generations in a row may end, before a step of theirs, without anybody being lost: a busy machine."""
_LET_GO_S, _LET_GO_STEPS = 30.0, 10.0


def train_elastic(
    job: Job,
    plan: Plan,
    folder: RunFolder,
    *,
    rank: Rank,
    store: Store,
    log: EventLog,
    preemption: Preemption | None,
    recorded: Recorded = "no",
) -> None:
    """Train the run in `folder` to its end as the member `rank.member`. Called by every worker.

    `recorded`: write down what `shoal verify` compares.
    """
    with _room(store) as room:
        elastic = Elastic(job, plan, folder, rank=rank, store=store, log=log, preemption=preemption, room=room)
        try:
            elastic.train(recorded=recorded)
        finally:
            elastic.close()


@contextmanager
def _room(store: Store) -> Iterator[Room | None]:
    """Have this host's memory for snapshots open for the length of a `with` block; None where there is none."""
    try:
        room = open_room(token_of(store))
    except OSError:
        yield None
        return
    try:
        yield room
    finally:
        room.close()


class Elastic:
    """One member of a run, from generation to generation."""

    def __init__(
        self,
        job: Job,
        plan: Plan,
        folder: RunFolder,
        *,
        rank: Rank,
        store: Store,
        log: EventLog,
        preemption: Preemption | None,
        room: Room | None,
    ) -> None:
        self._job, self._plan, self._folder = job, plan, folder
        self._log, self._preemption, self._room = log, preemption, room
        self._membership = Membership(
            store,
            rank,
            fits=lambda workers: fitting(plan, workers),
            fits_at_last=lambda workers: fitting_at_last(plan, workers) if plan.on_loss.replan else 0,
            timeout_s=plan.timeout_s,
            wait_s=plan.on_loss.wait_s,
        )
        self._held: Sequence[Held] = ()
        self._evaluated = -1
        self._error = ""
        """What ended the last generation, if not the members' own will."""
        self._ended_s = time.time()
        self._alarms = 0
        self._recovery: Recovery | None = None
        self._longest_s, self._stepped_s = 0.0, 0.0
        self._recorded: Recorded = "no"
        self._stagings: list[ExitStack] = []

    def train(self, *, recorded: Recorded = "no") -> None:
        """Train to the end of the job, or until somebody asks to stop."""
        self._recorded = recorded
        while True:
            step = max((held.step for held in self._held), default=-1)
            generation = self._membership.agree(step, self._evaluated, check=self._check_asked)
            if generation is None:  # the others have come to the end meanwhile
                if self._membership.current is None:
                    self._log.write("end", step=self._job.total_steps, peak_bytes=0, state_bytes={})
                self._membership.finish()
                return
            self._recovery = self._look_back(generation)
            if self._train_in(generation, self._recovery):
                return
            gc.collect()  # what is left of the model; before the groups that it was trained in
            free_abandoned_groups()

    def close(self) -> None:
        """Let go of the copies of packs."""
        for staging in self._stagings:
            staging.close()

    def _check_asked(self) -> None:
        """Raise Stopped if this process was asked to stop before it was in any generation."""
        if self._membership.current is None and self._preemption is not None:
            reason = self._preemption.requested(0)
            if reason is not None:
                raise Stopped(f"stopped by {reason} while it waited to be let in.")

    def _look_back(self, generation: Generation) -> Recovery | None:
        """Return what was lost and who came since the generation before; raise if nothing explains its end."""
        before = self._membership.closed(generation.number - 1)
        if before is None:
            return None
        lost = self._membership.lost_since(before, generation)
        if self._error and not lost:
            verdict = self._membership.verdict(before)
            self._alarms += 1
            if verdict or self._alarms > _MOST_ALARMS:
                error = PeerLost(verdict or self._error)
                error.exit_code = WorkerFailed.exit_code  # no loss that a replacement would mend
                raise error
        recovery = Recovery(before, generation, lost, me=self._membership.name, ended_s=self._ended_s)
        if self._recovery is not None:
            recovery.absorb(self._recovery)
        return recovery

    def _train_in(self, generation: Generation, recovery: Recovery | None) -> bool:
        """Train as a member of `generation`; return whether the job is done, and not only the generation."""
        rank = self._membership.rank_in(generation)
        plan = resized(self._plan, rank.numbers)
        keeping = Keeping(self._room, generation.number, plan.on_loss.snapshot_steps, self._held)
        ear = Ear(self._membership, generation, ahead=2, let_go_s=self._let_go_s)
        try:
            if generation.number > 0:
                inject.at("recovery")
            with opened(
                self._job,
                plan,
                self._folder,
                rank=rank,
                store=ear.store if rank.workers > 1 else None,
                log=self._log,
                recorded=self._recorded,
                on_watch=ear.watch_with,
                keeping=keeping,
                stagings=self._stagings,
            ) as run:
                del keeping
                self._held, self._error = (), ""
                with self._holding(run, ear, generation):
                    return self._train(run, ear, generation, recovery)
        except Exception as error:
            if not _is_loss(error, ear):
                if not isinstance(error, Stopped):
                    self._membership.fail()
                raise
            self._note_end(first_line(error) or type(error).__name__)
            self._membership.tell(generation, over=self._error)
            return False
        finally:
            ear.close()

    @contextmanager
    def _holding(self, run: Run, ear: Ear, generation: Generation) -> Iterator[None]:
        """Keep what this worker holds when a `with` block ends in a loss; the others hear of it first."""
        try:
            yield
        except Exception as error:
            if _is_loss(error, ear):
                self._note_end(first_line(error))
                self._membership.tell(generation, over=self._error)
                self._keep(run)
            raise

    def _train(self, run: Run, ear: Ear, generation: Generation, recovery: Recovery | None) -> bool:
        if recovery is not None:
            recovery.rebuilt(run)
        self._stepped_s = time.time()
        evaluated = max(member.evaluated for member in generation.members)
        owes = run.is_taken_over and is_evaluated(run) and evaluated < run.step_count

        def on_step() -> None:
            self._alarms = 0
            self._longest_s, self._stepped_s = max(self._longest_s, time.time() - self._stepped_s), time.time()
            if recovery is not None:
                recovery.note(self._log, run)

        def leaves(step: int) -> bool:
            return ear.leaves_after(step) if run.loose is None else run.loose.leaves(ear.is_armed)

        is_done = train_all(run, on_step=on_step, preemption=self._preemption, leaves=leaves, owes_evaluation=owes)
        if is_done:
            self._save_last(run)
            on_step()
            end(run)
            self._membership.finish()
        else:
            run.saving.finish()
            if run.rank.workers > 1:
                barrier()  # nobody leaves while another is still in the last step
            self._note_end("")
            self._keep(run)
        ear.close()  # others may end from now on
        return is_done

    def _save_last(self, run: Run) -> None:
        """Write the checkpoint of the last step again, if it was given up when a worker was lost."""
        wanted = run.plan.checkpoint.every_steps > 0 or run.plan.checkpoint_s is not None
        there = [step_of(path) for path in committed(self._folder.checkpoints)]
        if wanted and run.is_taken_over and run.step_count not in there:
            run.save(wait=False)

    def _let_go_s(self) -> float:
        """Return how long the main thread may take to be released from what it is in: many times the longest step."""
        longest_s = _LET_GO_STEPS * self._longest_s if self._longest_s else self._plan.timeout_s
        return min(self._plan.timeout_s, max(_LET_GO_S, longest_s))

    def _keep(self, run: Run) -> None:
        run.settle()  # on a GPU the last step that was done is not written down yet
        self._held = run.snapshots.held()
        self._evaluated = max(self._evaluated, run.evaluated[0] if run.evaluated[1] else -1)

    def _note_end(self, error: str) -> None:
        self._error = self._error or error
        self._ended_s = time.time()


def _is_loss(error: Exception, ear: Ear) -> bool:
    """Return whether `error` is the echo of another's end, which a next generation mends."""
    if isinstance(error, PeerLost) or is_peer_failure(error):
        return True
    return bool(ear.over) and not isinstance(error, ShoalError)
