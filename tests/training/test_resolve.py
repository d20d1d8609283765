"""Bad plans are refused before any process starts, in one sentence that says what would work."""

import dataclasses

import pytest
from torch import nn

from benchmarks.parallel_cases import gpt, gpt2, llama
from shoal.core.errors import PlanError
from shoal.spec.job import Job
from shoal.spec.plan import Batch, Mesh, Plan
from shoal.spec.sync import Sync
from shoal.training.resolve import one_process, resolve_plan
from tests.support import jobs

TWO = Batch(micro_batch=2)


@pytest.mark.parametrize(
    ("job", "plan", "words"),
    [
        (gpt(), Plan(mesh=Mesh(tensor=3)), r"tensor=3 does not divide num_heads=8.*Use tensor=1, 2, 4 or 8"),
        (llama(), Plan(mesh=Mesh(tensor=8)), r"tensor=8 does not divide.*4.*Use tensor=1, 2 or 4"),
        (jobs.linear(), Plan(mesh=Mesh(tensor=2)), r"tensor=2"),
        (gpt(), Plan(mesh=Mesh(pipeline=8), batch=TWO), r"8 pieces.* 4 layers.*Use pipeline"),
        (gpt(), Plan(mesh=Mesh(pipeline=4), batch=Batch(micro_batch=3)), r"does not divide.*Use micro_batch="),
        (gpt(), Plan(mesh=Mesh(pipeline=4), batch=Batch(micro_batch=8)), r"2 micro-batches for pipeline=4.*Use micro_"),
        (
            gpt(),
            Plan(mesh=Mesh(pipeline=2, replicate=2), batch=Batch(micro_batch=2, shares=(0.75, 0.25))),
            r"replicas of a pipeline take equally many",
        ),
        (
            gpt(),
            Plan(mesh=Mesh(replicate=2), sync=Sync(mode="server", servers=3)),
            r"servers=3 for 2 workers.*at most 2",
        ),
        (
            gpt(),
            Plan(mesh=Mesh(replicate=2), sync=Sync(mode="deadline", quorum=3)),
            r"quorum=3 of 2 workers.*at most 2",
        ),
        (gpt(), Plan(mesh=Mesh(replicate=2), sync=Sync(mode="server", codec="int8")), r"sends gradients as they are"),
        (gpt(), Plan(sequence=True), r"sequence=true needs mesh.tensor of 2 or more"),
        (jobs.batch_norm(steps=2), Plan(batch=TWO), r"batch norm"),
        (gpt(), Plan(mesh=Mesh(replicate=32)), r"32 workers for a global batch of 16"),
        (
            gpt(),
            Plan(mesh=Mesh(pipeline=2), stages=("blocks.9",), batch=TWO),
            r"'blocks.9', which is no layer to cut at",
        ),
    ],
    ids=lambda value: "" if isinstance(value, (Job, Plan)) else value[:24],
)
def test_what_cannot_run_is_refused_with_what_would(job: Job, plan: Plan, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        resolve_plan(job, plan)


def test_a_pipeline_is_cut_into_pieces_of_equal_cost() -> None:
    job = dataclasses.replace(gpt(), model=lambda: jobs.GPT(layers=6, width=16, heads=2))
    plan, _ = resolve_plan(job, Plan(mesh=Mesh(pipeline=2), batch=TWO))
    # The head over 256 bytes costs as much as several blocks of width 16, so the first stage gets more of them.
    assert plan.stages in (("blocks.4",), ("blocks.5",))


def test_a_job_says_where_its_stages_begin() -> None:
    job = dataclasses.replace(gpt(), stages=["blocks.1"])
    assert resolve_plan(job, Plan(mesh=Mesh(pipeline=2), batch=TWO))[0].stages == ("blocks.1",)
    with pytest.raises(PlanError, match="names 1 modules for the 4 pieces"):
        resolve_plan(job, Plan(mesh=Mesh(pipeline=4), batch=TWO))


def test_tied_weights_of_a_hugging_face_model_can_be_cut() -> None:
    plan, _ = resolve_plan(gpt2(), Plan(mesh=Mesh(pipeline=2), batch=TWO))
    assert plan.stages[0].startswith("transformer.h.")


class Skips(nn.Module):
    """Adds what its first block returns to what its last one does: that goes around every boundary between them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(4))
        self.out = nn.Linear(5, 1)

    def forward(self, x: object) -> object:
        first = x = self.blocks[0](x)
        for block in list(self.blocks)[1:]:
            x = block(x)
        return self.out(x + first)


def test_what_stands_in_the_way_of_a_cut_is_named_with_its_line() -> None:
    with pytest.raises(PlanError, match=r"Skips \(.*test_resolve.py:\d+\) uses what 'blocks.0.*' returns again"):
        resolve_plan(jobs.linear(model=Skips), Plan(mesh=Mesh(pipeline=2), batch=Batch(micro_batch=2)))


def test_one_process_has_the_micro_batches_and_the_precision_of_the_plan() -> None:
    plan = one_process(Plan(mesh=Mesh(shard=2), zero=3, precision="bf16", batch=TWO), None)
    assert (plan.workers, plan.precision, plan.batch.micro_batch) == (1, "bf16", 2)
