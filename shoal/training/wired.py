"""What a worker of a run is built of: its part of the model, how it meets the others, and the engine between both."""

from dataclasses import dataclass

import torch
from torch.distributed import Store

from shoal.comm.alive import Watch
from shoal.comm.mesh import Position, device_mesh, position_of
from shoal.comm.rank import Rank
from shoal.comm.shm.group import SharedGroup
from shoal.core.run_folder import RunFolder
from shoal.core.toml import write_toml
from shoal.fault.same import check_same_model
from shoal.spec.job import Job
from shoal.spec.plan import Plan
from shoal.sync.compressed import compress_shards
from shoal.training.clock import StepClock
from shoal.training.engine import build_engine
from shoal.training.links import Place, known_links
from shoal.training.meeting import Meeting, no_meeting, open_meeting, open_shards
from shoal.training.pieces import Cutter
from shoal.training.recording import Recording
from shoal.training.state import TrainState, build_state
from shoal.training.step import Engine, Stepper


@dataclass
class Wired:
    """One worker's model, optimizer, engine and meeting, which fit together."""

    position: Position
    state: TrainState
    cutter: Cutter
    meeting: Meeting
    engine: Engine
    device: torch.device
    clock: StepClock
    shards: SharedGroup | None
    """The workers of its shard axis, where these meet in shared memory."""

    def stepper(self, job: Job, plan: Plan, *, rank: Rank, recording: Recording | None) -> Stepper:
        """Return what does the steps, where workers meet in each of them."""
        return Stepper(
            self.state,
            job,
            plan,
            self.engine,
            position=self.position,
            index=rank.number,
            device=self.device,
            clock=self.clock,
            cutter=self.cutter,
            recording=recording,
        )

    @property
    def shares_memory(self) -> bool:
        """Whether some of its memory is that of other workers, too."""
        return self.shards is not None or self.meeting.shared is not None

    def close(self) -> None:
        """Leave the meetings."""
        self.meeting.close()
        if self.shards is not None:
            self.shards.close()


def wire(
    job: Job,
    plan: Plan,
    folder: RunFolder,
    *,
    rank: Rank,
    store: Store | None,
    device: torch.device,
    clock: StepClock,
    watch: Watch | None,
) -> Wired:
    """Build it all, in the order in which one part needs the other. Called by every worker."""
    position = position_of(plan.mesh, rank.index)
    mesh = device_mesh(plan.mesh, device, timeout_s=plan.timeout_s) if rank.workers > 1 else None
    shards = open_shards(plan, position, rank=rank, store=store, device=device)
    state = build_state(job, plan, position=position, mesh=mesh, device=device, waiting=clock.waiting, shared=shards)
    check_same_model(store, rank, state.layout, plan, watch)
    place = Place(rank=rank, store=store, device=device, watch=watch, known=known_links(folder))
    shapes = [parameter.shape for parameter in state.layout.parameters.values()]
    # Deadline and server have their own ways from worker to worker.
    meets = plan.sync.mode in ("all-reduce", "local")
    meeting = open_meeting(plan, place, shapes=shapes, seed=job.seed) if meets else no_meeting(plan.sync.mode)
    if meeting.feedback is not None and not plan.mesh.keeps_whole:
        for root in state.layout.roots:
            compress_shards(root, meeting.feedback, watch=watch)
    if rank.index == 0:
        write_toml(folder.communication_toml, meeting.communication)
    engine = build_engine(state, job, plan, device=device, clock=clock, meeting=meeting)
    cutter = Cutter(job, plan, device=device, meets=state.layout.meets)
    return Wired(position, state, cutter, meeting, engine, device, clock, shards)
