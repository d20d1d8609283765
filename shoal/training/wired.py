"""What a worker of a run is built of: its part of the model, how it meets the others, and the engine between both."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from shoal.comm.collectives import sum_together
from shoal.comm.mesh import Position, device_mesh, position_of
from shoal.comm.rank import Rank
from shoal.comm.shm.group import SharedGroup
from shoal.comm.traffic import TRAFFIC
from shoal.compress.feedback import ErrorFeedback
from shoal.core.run_folder import RunFolder
from shoal.core.toml import write_toml
from shoal.fault.same import check_same_model
from shoal.parallel.deepspeed.start import lay_out, start_engine
from shoal.parallel.gradients import local_gradient
from shoal.parallel.layout import Layout
from shoal.spec.job import Job
from shoal.spec.plan import Plan
from shoal.sync.compressed import compress_shards
from shoal.training.clock import StepClock
from shoal.training.deepspeed import DeepSpeed, DeepSpeedStepper
from shoal.training.engine import build_engine
from shoal.training.links import Place
from shoal.training.meeting import Meeting, open_meeting, open_shards
from shoal.training.pieces import Cutter
from shoal.training.recording import Recording
from shoal.training.state import TrainState, build_state, state_of_layout
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
        kind = DeepSpeedStepper if plan.engine == "deepspeed" else Stepper
        return kind(
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

    def notes(self, plan: Plan) -> Iterator[str]:
        """Yield what the user is told of how it was built."""
        if self.state.layout.why_whole:
            yield f"Each worker held the whole model while building it: {self.state.layout.why_whole}."
        met = self.meeting.communication
        if plan.sync.codec == "auto" and met.codec_why:
            yield f"sync.codec = 'auto' is {met.codec!r} here: {met.codec_why}."

    @property
    def shares_memory(self) -> bool:
        """Whether some of its memory is that of other workers, too."""
        return self.shards is not None or self.meeting.shared is not None

    def close(self) -> None:
        """Leave the meetings, and let go of what must not outlive the group."""
        self.meeting.close()
        self.state.layout.close()
        if self.shards is not None:
            self.shards.close()


def wire(job: Job, plan: Plan, folder: RunFolder, place: Place, *, clock: StepClock) -> Wired:
    """Build it all, in the order in which one part needs the other. Called by every worker."""
    rank, store, device = place.rank, place.store, place.device
    position = position_of(plan.mesh, rank.index)
    TRAFFIC.link = _link(rank, device)
    mesh = device_mesh(plan.mesh, device, timeout_s=plan.timeout_s) if rank.workers > 1 else None
    if plan.engine == "deepspeed":
        return _wire_deepspeed(job, plan, folder, place, position=position, mesh=mesh, clock=clock)
    shards = open_shards(plan, position, rank=rank, store=store, device=device)
    state = build_state(job, plan, position=position, mesh=mesh, device=device, waiting=clock.waiting, shared=shards)
    check_same_model(store, rank, state.layout, plan, place.watch)
    shapes = [parameter.shape for parameter in state.layout.parameters.values()]
    meeting = open_meeting(plan, place, shapes=shapes, seed=job.seed)
    if meeting.feedback is not None and not plan.mesh.keeps_whole:
        for root in state.layout.roots:
            compress_shards(root, meeting.feedback, watch=place.watch)
    if meeting.feedback is not None and plan.mesh.data == 1:
        state.layout.take_over = _taking_over(meeting.feedback, state.layout, plan)
    if meeting.feedback is not None and plan.mesh.tensor > 1:
        state.layout.agree = _agreeing(state.layout)
    if rank.index == 0:
        write_toml(folder.communication_toml, meeting.communication)
    engine = build_engine(state, job, plan, device=device, clock=clock, meeting=meeting)
    cutter = Cutter(job, plan, device=device, meets=state.layout.meets)
    return Wired(position, state, cutter, meeting, engine, device, clock, shards)


def _wire_deepspeed(
    job: Job,
    plan: Plan,
    folder: RunFolder,
    place: Place,
    *,
    position: Position,
    mesh: DeviceMesh | None,
    clock: StepClock,
) -> Wired:
    """Build it on DeepSpeed, which exchanges what its workers hold by itself. Called by every worker."""
    rank, device = place.rank, place.device
    layout = lay_out(job, plan, position=position, mesh=mesh, device=device)
    check_same_model(place.store, rank, layout, plan, place.watch)
    state = state_of_layout(job, layout, position=position)  # before DeepSpeed has the parameters: shapes are whole
    start_engine(layout, job, plan, state.optimizer, local_index=rank.local_index, device=device, waiting=clock.waiting)
    meeting = open_meeting(plan, place, shapes=(), seed=job.seed)
    if rank.index == 0:
        write_toml(folder.communication_toml, meeting.communication)
    cutter = Cutter(job, plan, device=device, meets=layout.meets)
    engine = DeepSpeed(layout, job, plan, clock=clock)
    return Wired(position, state, cutter, meeting, engine, device, clock, shards=None)


def _taking_over(feedback: ErrorFeedback, layout: Layout, plan: Plan) -> Callable[[], None]:
    """Return what gives the single part of a batch what was pending when there were several (saved_codec.py)."""
    prefix = "model." if plan.mesh.keeps_whole else ""  # as it was saved under the names of replicas, of shards
    parameters = {prefix + name: p for root in layout.roots for name, p in root.named_parameters()}
    return lambda: feedback.take_over(lambda name: local_gradient(parameters[name]))


def _agreeing(layout: Layout) -> Callable[[], None]:
    """Return what gives the workers of the tensor axis the mean of what each has of gradients that they hold alike.

    Each sends its slices through a codec by itself: what it rounds, and what it leaves for later, depends on what lies
    beside it, and that is another slice on each. The mean leaves out nothing: what is pending of them is the mean, too.
    """
    assert layout.division is not None
    assert layout.mesh is not None
    alike = [p for name, p in layout.parameters.items() if name not in layout.division.cuts]
    group = layout.mesh.get_group("tensor")

    def agree() -> None:
        gradients = [gradient for parameter in alike if (gradient := local_gradient(parameter)) is not None]
        sum_together(gradients, group)
        for gradient in gradients:
            gradient.div_(group.size())

    return agree


def _link(rank: Rank, device: torch.device) -> str:
    """Return what joins the workers: the slowest of it, where they are several."""
    if rank.local_workers < rank.workers:
        return "network"
    return "gpu" if device.type == "cuda" and rank.local_workers <= torch.cuda.device_count() else "host"
