"""Pipelines of real processes, held against one process: every schedule, tied weights, DDP and FSDP on top."""

import itertools
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import GradBucket, all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from shoal.comm.group import joined
from shoal.comm.rank import Rank
from shoal.comm.store import connect
from shoal.core.errors import PlanError
from shoal.parallel.pipeline.rehearsal import find_blocks
from shoal.parallel.pipeline.schedule import Pipeline, TiedGradients
from shoal.parallel.pipeline.split import split_model
from shoal.parallel.pipeline.stage import Stage
from shoal.parallel.pipeline.torch_private import Marks
from shoal.planner.time.schedules import stage_order
from tests.parallel.pipeline.models import MODELS, call, numbers_of, on_meta
from tests.support.ranks import RankPool

# The same float32 sums, over micro-batches in an order that may differ: rounding of some 1e-7 for each of ten.
TOLERANCE = 2e-6
CPU = torch.device("cpu")


def micro_batches(model: str, count: int, *, part: int = 0) -> list[Any]:
    """Return micro-batches of different numbers, and the last one of a different size."""
    made = []
    for number in range(count):
        torch.manual_seed(100 * part + number)
        made.append(MODELS[model].batch(1 if number == count - 1 else 2))
    return made


def one_process(model: str, batches: list[Any]) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    module = MODELS[model].build()
    losses = [MODELS[model].loss(call(module, batch)) for batch in batches]
    torch.autograd.backward(losses)
    return [loss.item() for loss in losses], {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


def wrapped(stage: Stage, engine: str, mesh: Any) -> nn.Module:
    if engine in ("fsdp", "fsdp-reshard"):
        is_resharded = engine == "fsdp-reshard"
        blocks = [m for m in stage.modules() if type(m).__name__ in ("Block", "GPT2Block")]
        for block in [*blocks, stage]:
            fully_shard(block, mesh=mesh, reshard_after_forward=is_resharded)
        for part in stage.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)
    if engine == "ddp":
        replica = DistributedDataParallel(stage, process_group=mesh.get_group(), gradient_as_bucket_view=True)
        replica.register_comm_hook(None, _summed)
        return replica
    return stage


def fill_shards(stage: Stage, real: Any) -> None:
    stage.to_empty(device=CPU)
    for name, places in stage.places.items():
        shard: Any = places[0][0].get_parameter(places[0][1])
        with torch.no_grad():
            shard.copy_(distribute_tensor(real(name), shard.device_mesh, shard.placements))
    stage.materialise_rest(real)


def _summed(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    assert state is None
    work: Any = all_reduce(bucket.buffer(), group=_DATA[0], async_op=True)
    summed: torch.futures.Future[Tensor] = work.get_future().then(lambda future: future.value()[0])
    return summed


_DATA: list[Any] = []


def run_pipeline(
    rank: Rank, *, model: str, schedule: str, count: int, chunks: int, engine: str, pipeline: int, steps: int
) -> Any:
    with joined(rank, connect(rank, timeout_s=60), device=CPU, timeout_s=60):
        mesh = init_device_mesh("cpu", (pipeline, rank.workers // pipeline), mesh_dim_names=("pipeline", "data"))
        _DATA[:] = [mesh["data"].get_group()]
        return _steps(rank, mesh, model, schedule, count, chunks, engine, steps)


def _steps(
    rank: Rank, mesh: Any, model: str, schedule: str, count: int, chunks: int, engine: str, steps: int
) -> dict[str, Any]:
    torch.manual_seed(0)
    full = MODELS[model].build()
    group = mesh["pipeline"].get_group()
    meta, blocks = on_meta(full), find_blocks(full)
    pieces = chunks * group.size()
    cuts = [blocks[len(blocks) * k // pieces] for k in range(1, pieces)]
    batches = micro_batches(model, count, part=mesh["data"].get_local_rank())
    split = split_model(call, meta, batches[0], boundaries=cuts)
    actions: list[Any] = []
    stages = [Stage(meta, split, piece, call=call, device=CPU) for piece in range(group.rank(), pieces, group.size())]
    modules = []
    for stage in stages:
        if engine.startswith("fsdp"):  # sharded without numbers; then each worker fills its shards
            modules.append(wrapped(stage, engine, mesh["data"]))
            fill_shards(stage, numbers_of(full))
        else:
            stage.materialise(numbers_of(full))
            modules.append(wrapped(stage, engine, mesh["data"]))
    line = Pipeline(modules, schedule=schedule, group=group, device=CPU, on_action=lambda *a: actions.append(a))
    tied = TiedGradients(modules, split, group=group)
    loss = lambda output, number: MODELS[model].loss(output)  # noqa: E731
    scores = line.evaluate(batches, loss)
    for _ in range(steps):
        for module in modules:
            module.zero_grad()
        losses = line.step(batches, loss)
        tied.sum()
    gradients = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            gradient: Any = parameter.grad
            if gradient is not None:
                gradients[stage.names[name]] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    as_numbers = [None if values is None else [value.item() for value in values] for values in (scores, losses)]
    return {"scores": as_numbers[0], "losses": as_numbers[1], "gradients": gradients, "actions": actions}


def assert_equal_to_one_process(
    ranks: RankPool,
    *,
    model: str = "gpt",
    schedule: str = "1f1b",
    workers: int = 2,
    data: int = 1,
    count: int = 4,
    chunks: int = 1,
    engine: str = "none",
) -> list[Any]:
    answers = ranks.run(
        run_pipeline,
        workers=workers * data,
        model=model,
        schedule=schedule,
        count=count,
        chunks=chunks,
        engine=engine,
        pipeline=workers,
        steps=2,
    )
    expected: dict[str, Tensor] = defaultdict(lambda: torch.zeros(()))
    for part in range(data):
        losses, gradients = one_process(model, micro_batches(model, count, part=part))
        answer = answers[(workers - 1) * data + part]
        assert answer["losses"] == pytest.approx(losses, rel=TOLERANCE)
        assert answer["scores"] == pytest.approx(losses, rel=TOLERANCE)
        for name, gradient in gradients.items():
            expected[name] = expected[name] + gradient
    seen = set()
    for answer in answers:
        for name, gradient in answer["gradients"].items():
            torch.testing.assert_close({name: gradient}, {name: expected[name]}, rtol=1e-5, atol=TOLERANCE)
            seen.add(name)
    assert seen == set(expected)
    return answers


# The even number of micro-batches, 4, is that of the order of actions, below.
@pytest.mark.parametrize("count", [3, 1], ids=lambda n: f"{n} micro-batches")
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_a_step_on_two_workers_has_the_gradients_of_one_process(ranks: RankPool, schedule: str, count: int) -> None:
    assert_equal_to_one_process(ranks, schedule=schedule, count=count)


@pytest.mark.parametrize("count", [6, 2], ids=lambda n: f"{n} micro-batches")
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_a_step_on_four_workers_has_the_gradients_of_one_process(ranks: RankPool, schedule: str, count: int) -> None:
    assert_equal_to_one_process(ranks, schedule=schedule, workers=4, count=count)


@pytest.mark.parametrize("count", [5, 1], ids=lambda n: f"{n} micro-batches")
def test_two_pieces_a_worker_have_the_gradients_of_one_process(ranks: RankPool, count: int) -> None:
    assert_equal_to_one_process(ranks, schedule="interleaved", chunks=2, count=count)


# The other schedules have tied weights in the tests of data parallelism, below.
@pytest.mark.parametrize("schedule", ["zero-bubble", "interleaved"])
def test_tied_weights_get_the_sum_of_both_gradients(ranks: RankPool, schedule: str) -> None:
    chunks = 2 if schedule == "interleaved" else 1
    assert_equal_to_one_process(ranks, model="gpt2", schedule=schedule, chunks=chunks)


@pytest.mark.parametrize("model", ["t5 encoder", "vit", "llama", "biased"])
def test_other_models_have_the_gradients_of_one_process(ranks: RankPool, model: str) -> None:
    assert_equal_to_one_process(ranks, model=model, schedule="zero-bubble", workers=4)


ENGINES = ("none", "ddp", "fsdp", "fsdp-reshard")
SCHEDULES = ("gpipe", "1f1b", "zero-bubble", "interleaved")
# Zero-bubble makes the gradients of weights apart, where DDP does not see them, and after zero=3 has put weights away:
# pipelines run with parameters that stay gathered (parallel/apply.py).
WRONG = [("zero-bubble", "ddp"), ("zero-bubble", "fsdp-reshard")]
TOGETHER = [(s, e) for e in ENGINES[1:] for s in SCHEDULES if (s, e) not in WRONG]


@pytest.mark.parametrize(("schedule", "engine"), TOGETHER)
def test_data_parallelism_on_top_has_the_gradients_of_one_process(ranks: RankPool, schedule: str, engine: str) -> None:
    # gpt2 has a tied weight; gpt reads its positions without calling their layer, which two pieces see differently.
    model, chunks = ("gpt", 2) if schedule == "interleaved" else ("gpt2", 1)
    assert_equal_to_one_process(ranks, model=model, schedule=schedule, chunks=chunks, data=2, engine=engine)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_action_is_told_in_the_order_that_the_planner_expects(ranks: RankPool, schedule: str) -> None:
    chunks = 2 if schedule == "interleaved" else 1
    answers = assert_equal_to_one_process(ranks, schedule=schedule, chunks=chunks)
    for worker, answer in enumerate(answers):
        evaluation, steps = answer["actions"][: 4 * chunks], answer["actions"][4 * chunks :]
        assert {kind for kind, *_ in evaluation} == {"forward"}
        assert all(start_s <= end_s for *_, start_s, end_s in steps)
        assert all(before[4] <= after[3] for before, after in itertools.pairwise(steps))
        expected = stage_order(schedule, stage=worker, stages=2, micro_batches=4, chunks=chunks)
        assert [(kind, number, piece // 2) for kind, number, piece, *_ in steps] == 2 * [
            tuple(task) for task in expected
        ]


def test_several_pieces_a_worker_go_with_the_interleaved_schedule_only() -> None:
    class Alone:
        def rank(self) -> int:
            return 0

        def size(self) -> int:
            return 1

    model = MODELS["gpt"].build()
    batch = MODELS["gpt"].batch(2)
    split = split_model(call, model, batch, boundaries=["blocks.2"])
    stages = [Stage(model, split, piece, call=call, device=CPU) for piece in range(2)]
    with pytest.raises(PlanError, match="schedule='1f1b' with 2 pieces a worker"):
        Pipeline(stages, schedule="1f1b", group=Alone(), device=CPU)


def test_marks_follow_what_depends_on_a_tensor_and_nothing_else() -> None:
    marks = Marks()
    x, y = torch.ones(3), torch.ones(3)
    marks.add(x, "x")
    with marks:
        rounded, shaped, summed = (x.detach() > 0).long(), torch.zeros_like(x), torch.ones(3)
        summed[1:].add_(x[1:])
        apart = y + 1
    assert [marks.of(t) for t in (rounded, summed)] == [frozenset({"x"})] * 2
    assert [marks.of(t) for t in (shaped, apart)] == [frozenset()] * 2


def test_torch_still_has_the_parts_of_a_stage_that_are_made_afresh() -> None:
    for name in (
        "forward_one_chunk",
        "forward_maybe_with_nosync",
        "backward_one_chunk",
        "backward_weight_one_chunk",
        "_prepare_forward_infra",
        "_prepare_backward_infra",
    ):
        assert hasattr(PipelineStage, name), f"PipelineStage.{name} is gone: MicroBatchStage stands on it"
