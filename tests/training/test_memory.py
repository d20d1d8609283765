"""What workers really hold, beside what the plan and the planner say of it."""

import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal.comm.rank import Rank
from shoal.comm.store import connect
from shoal.core.events import EventLog, EventReader
from shoal.core.run_folder import RunFolder
from shoal.parallel.exact.dropout import ExactDropout
from shoal.parallel.layout import Layout
from shoal.planner.catalog import read_device
from shoal.planner.memory.peak import peaks_of_stages
from shoal.planner.search.shares import cut_batch
from shoal.profile.layers import find_layers
from shoal.spec.job import Job
from shoal.spec.plan import Batch, Mesh, Plan
from shoal.training.jobfile import load_job
from shoal.training.memory import PeakMemory, state_bytes
from shoal.training.opening import open_run
from shoal.training.resolve import resolve_plan
from tests.support.jobs import EXAMPLES
from tests.support.ranks import RankPool
from tests.support.training import bare_folder

BATCH = 8


def gpt(width: int, layers: int) -> Job:
    source: Any = load_job(EXAMPLES / "gpt.py")
    return Job(
        model=lambda: source.model(layers=layers, width=width, heads=4),
        inputs=source.inputs,
        loss=source.loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4),
        data=source.data,
        batch_size=BATCH,
        steps=3,  # DDP lays out its buckets anew in the second: all their pages are there in the third
    )


def hold(rank: Rank, *, folder: Path, width: int, layers: int) -> dict[str, Any]:
    """Train, and return what this worker held at the moments of its last step. Runs in the pool."""
    log = EventLog(RunFolder(folder).events_of(rank.index))
    store = connect(rank, timeout_s=60) if rank.workers > 1 else None
    found: dict[str, Any] = {}
    with open_run(gpt(width, layers), RunFolder(folder), rank=rank, store=store, log=log) as run:
        found["build_bytes"] = run.memory.read()
        optimizer = run._state.optimizer

        def note(moment: str) -> None:
            found[moment] = state_bytes(run.layout, optimizer)

        optimizer.register_step_pre_hook(lambda *_: note("optimizer"))
        # Once a micro-batch, before the engine gathers: the last call stays.
        run.layout.roots[0].register_forward_pre_hook(lambda *_: note("accumulating"), prepend=True)
        for batch in run.batches():
            run.advance(batch)
            note("rest")
    log.close()
    return found


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_holds_a_quarter_of_the_optimizer_then_of_gradients_then_of_parameters(
    ranks: RankPool, tmp_path: Path, zero: int
) -> None:
    plan = Plan(mesh=Mesh(shard=4), zero=zero, batch=Batch(micro_batch=1))
    held = ranks.run(hold, workers=4, folder=bare_folder(tmp_path, plan), width=64, layers=3)
    whole = sum(parameter.nbytes for parameter in gpt(64, 3).model().parameters())
    quarter = near(whole / 4)
    for worker in held:
        accumulating, stepping, rest = (worker[moment] for moment in ("accumulating", "optimizer", "rest"))
        for now in (accumulating, stepping, rest):
            assert now["parameters"] == quarter
            assert now["optimizer"] == near(2 * whole / 4)  # AdamW keeps two numbers for each
        assert stepping["gradients"] == quarter
        assert accumulating["gradients"] == (near(whole) if zero == 1 else quarter)
        assert accumulating["gathered"] == (0 if zero == 3 else near(whole))
        assert (stepping["gathered"], rest["gathered"], rest["gradients"]) == (0, 0, 0)


def near(num_bytes: float) -> Any:
    # 5%, as promised; the rest are AdamW's counts of steps, 4 bytes a parameter tensor.
    return pytest.approx(num_bytes, rel=0.05)


def test_what_is_tied_counts_once_and_what_is_frozen_is_there() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    model(torch.ones(1, 4)).sum().backward()
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    dropout = ExactDropout(find_layers(model)[0], seed=0)
    layout = Layout(model, [model], parameters, {}, parameters, dropout=dropout, meets=False)
    held = state_bytes(layout, torch.optim.SGD(parameters.values(), lr=0.1))
    assert held == {"parameters": 64 + 16, "gathered": 0, "gradients": 64, "optimizer": 0}


def leave_copies_out(_: Rank, *, copies: int, tensors: int) -> list[int]:
    """Return what is read after copies, tensors beside them, the copies' end, and tensors of twice the size."""
    memory, found = PeakMemory(torch.device("cpu"), divided=False), []
    memory.leave_out(copies)
    held = mmap.mmap(-1, copies)
    held.madvise(23)  # MADV_POPULATE_WRITE: resident now
    found.append(max(memory.read(), memory.now()))
    trained = torch.ones(tensors // 4)
    found.append(memory.read())
    del trained
    held.close()
    memory.leave_out(0)
    found.append(memory.read())
    torch.ones(tensors // 2)
    found.append(memory.read())
    return found


def test_copies_of_the_state_are_no_part_of_the_peak() -> None:
    tensors = 100_000_000
    pool = RankPool()  # fresh: of a process that has long been idle, the host may take back code at any moment
    try:
        ((copied, trained, left, more),) = pool.run(leave_copies_out, workers=1, copies=200_000_000, tensors=tensors)
    finally:
        pool.close()
    assert copied < tensors / 2
    assert (trained, left) == pytest.approx((tensors, tensors), rel=0.2)
    assert more == pytest.approx(2 * tensors, rel=0.2)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(mesh=Mesh(replicate=2)),
        Plan(mesh=Mesh(shard=2), zero=3),
        Plan(mesh=Mesh(pipeline=2), batch=Batch(micro_batch=2)),
    ],
    ids=["replicate", "shard", "pipeline"],
)
def test_a_process_grows_by_the_predicted_peak(tmp_path: Path, plan: Plan) -> None:
    job = gpt(512, 6)
    plan, profile = resolve_plan(job, plan)
    assert profile is not None
    folder = bare_folder(tmp_path, plan)
    pool = RankPool()  # fresh: in a warm one the code that a step uses is resident already, and does not count
    try:
        held = pool.run(hold, workers=2, folder=folder, width=512, layers=6)
    finally:
        pool.close()
    peaks = peaks_of_stages(profile, plan, samples=cut_batch(plan, BATCH)[0], device=read_device("cpu-host"))
    for worker in range(2):
        measured_bytes = EventReader(RunFolder(folder).events_of(worker)).poll()[-1]["peak_bytes"]
        predicted = peaks[worker if plan.mesh.pipeline > 1 else 0]
        # 10%, as promised: the least that depends on the machine is what its kernels keep for themselves.
        assert predicted.peak_bytes == pytest.approx(measured_bytes, rel=0.1)
    if plan.mesh.shard > 1 or plan.mesh.pipeline > 1:
        whole = sum(parameter.nbytes for parameter in job.model().parameters())
        assert max(worker["build_bytes"] for worker in held) < 0.9 * whole  # half, 20 MB of code, one parameter
