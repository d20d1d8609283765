"""DeepSpeed as the engine of a plan: the same model is trained as in one process, and a run can go on elsewhere."""

import dataclasses
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.cli.main import main
from shoal.comm.rank import Rank
from shoal.core.errors import JobError
from shoal.core.events import STEP_PARTS, EventReader
from shoal.core.run_folder import RunFolder
from shoal.fault.checkpoint.manifest import committed
from shoal.parallel.deepspeed import private
from shoal.parallel.deepspeed.load import load_deepspeed
from shoal.spec.job import Job
from shoal.spec.plan import Batch, Checkpoints, Mesh, Plan
from shoal.training.verify import compare_runs
from tests.support.files import job_file
from tests.support.jobs import Padder, linear, padded
from tests.support.parallel import record
from tests.support.ranks import RankPool
from tests.support.training import bare_folder, build, largest_difference, train_part
from tests.support.training import reference as plain_loop
from tests.training import test_resume as resume

STEPS = 4  # the third batch is the partial one of an epoch
TWO = Mesh(shard=2)
TIED = f"{__name__}:tied"
PLANS = {
    "ZeRO-1": ("gpt", Plan(engine="deepspeed", zero=1, mesh=TWO, batch=Batch(micro_batch=3))),
    "ZeRO-2, tied weights": (TIED, Plan(engine="deepspeed", zero=2, mesh=TWO, batch=Batch(micro_batch=3))),
    "ZeRO-3, dropout, parameters of the root": ("vit", Plan(engine="deepspeed", zero=3, mesh=TWO)),
    "ZeRO-3, unequal shares": (
        "gpt", Plan(engine="deepspeed", zero=3, mesh=TWO, batch=Batch(micro_batch=2, shares=(0.75, 0.25))),
    ),
    "ZeRO-2, offload, recompute": ("gpt", Plan(engine="deepspeed", zero=2, mesh=TWO, offload=True, recompute="full")),
    "ZeRO-3, offload, one worker": ("gpt", Plan(engine="deepspeed", zero=3, offload=True)),
}  # fmt: skip
_REFERENCES: dict[str, RunFolder] = {}


def tied(steps: int, layers: int) -> Job:
    """A model whose output layer has the weight of its embedding."""

    def model() -> Padder:
        made = Padder()
        made.out.weight = made.embed.weight
        return made

    return dataclasses.replace(padded(steps=steps), model=model, clip_norm=1.0)


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    """One of its own: after DeepSpeed in the same pool test_parallel.py saw a gradient 1.5e-4 off; why is unknown."""
    pool = RankPool()
    yield pool
    pool.close()


def reference(ranks: RankPool, case: str, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Return the run of one process, made once."""
    if case not in _REFERENCES:
        _REFERENCES[case] = record(ranks, case, Plan(), folder=tmp_path_factory.mktemp("one"), steps=STEPS, layers=2)
    return _REFERENCES[case]


@pytest.mark.parametrize(("model", "plan"), PLANS.values(), ids=PLANS)
def test_deepspeed_trains_the_same_model_as_one_process(
    model: str, plan: Plan, ranks: RankPool, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    case = model if ":" in model else f"benchmarks.parallel_cases:{model}"
    one = reference(ranks, case, tmp_path_factory)
    ours = record(ranks, case, plan, folder=tmp_path, steps=STEPS, layers=2)
    verdict = compare_runs(one, ours)
    # What is seen is rounding, about 1e-6.
    assert verdict.equal, verdict.first
    assert verdict.loss < 1e-5
    events = EventReader(ours.events_of(0)).poll()
    steps = [event for event in events if event["kind"] == "step"]
    assert all(event[name] >= 0 for event in steps for name in STEP_PARTS)
    assert plan.workers == 1 or any(event["comm_s"] > 0 for event in steps)
    ops = {call["op"] for event in events if event["kind"] == "comm" for call in event["calls"]}
    assert plan.workers == 1 or {"all-reduce", "all-gather"} & ops


@pytest.mark.parametrize(
    ("job", "zero"),
    [("padded", 2), ("clipped", 3), ("batch_norm", 1)],
    ids=["weighed by tokens", "clipped, with a schedule", "batch norm"],
)
def test_losses_are_those_of_the_obvious_loop(job: str, zero: int, ranks: RankPool, tmp_path: Path) -> None:
    plan = Plan(engine="deepspeed", zero=zero, mesh=TWO)
    options: dict[str, Any] = {"builder": f"tests.support.jobs:{job}", "arguments": {"steps": 8}, "plan": plan}
    traces = ranks.run(train_part, workers=2, folder=bare_folder(tmp_path, plan), **options)
    expected = plain_loop(build(options["builder"], steps=8), 8)
    assert largest_difference(traces[0].losses, expected.losses) < 1e-5
    assert traces[0].losses == traces[1].losses


def test_a_stream_is_trained_on_as_by_the_obvious_loop(ranks: RankPool, tmp_path: Path) -> None:
    plan = Plan(engine="deepspeed", zero=1, mesh=TWO)
    builder, steps = "tests.support.given:job", 3
    arguments = {"form": "stream", "steps": steps}
    traces = ranks.run(
        train_part, workers=2, builder=builder, arguments=arguments, plan=plan, folder=bare_folder(tmp_path, plan)
    )
    expected = plain_loop(build(builder, form="dataset", steps=steps, shuffle=False), steps)
    assert largest_difference(traces[0].losses, expected.losses) < 1e-5


def missing_names(rank: Rank) -> list[str]:
    """Return what DeepSpeed no longer has of what private.py uses. Runs in the pool, as it imports DeepSpeed."""
    load_deepspeed(torch.device("cpu"))
    wanted = {
        "deepspeed.comm.comm": ["cdb"],
        "deepspeed.utils.groups": ["_release_process_group_references"],
        "deepspeed.accelerator": ["get_accelerator", "set_accelerator"],
        "deepspeed.accelerator.cpu_accelerator": ["CPU_Accelerator.create_op_builder"],
        "deepspeed.comm.torch": ["TorchBackend._reduce_op", *(f"TorchBackend.{name}" for name in private._NAMES)],
        "deepspeed.runtime.zero.parameter_offload": ["DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__"],
        "deepspeed.runtime.zero.partition_parameters": ["Init.param_id"],
        "deepspeed.runtime.zero.stage3": [
            "DeepSpeedZeroOptimizer_Stage3.get_param_id",
            "DeepSpeedZeroOptimizer_Stage3._get_fp32_opt_state_partition",
        ],
    }
    missing: list[str] = []
    for module, names in wanted.items():
        for name in names:
            found: Any = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part, missing)
            missing += [f"{module}.{name}"] if found is missing else []
    return missing


def test_deepspeed_still_has_what_is_used_of_it_undocumented(ranks: RankPool) -> None:
    assert ranks.run(missing_names, workers=1) == [[]]


RESUMED = {
    "ZeRO-1 by DeepSpeed": Plan(engine="deepspeed", zero=1, mesh=TWO),
    "one process": Plan(),
    "ZeRO-3 by DeepSpeed": Plan(engine="deepspeed", zero=3, mesh=Mesh(shard=3)),
    "ZeRO-2 by torch": Plan(zero=2, mesh=TWO),
    "ZeRO-2 by DeepSpeed, offload": Plan(engine="deepspeed", zero=2, mesh=TWO, offload=True),
}


def test_a_run_goes_on_with_any_engine_and_number_of_workers(ranks: RankPool, tmp_path: Path) -> None:
    """Each goes on from the checkpoint of the one before, two steps each; the losses are those of never stopping."""
    every = Checkpoints(every_steps=1, keep=100)
    whole = resume.begun(tmp_path / "whole", Plan())
    expected = resume.trained(ranks, whole, Plan(), steps=10)
    checkpoint: Path | None = None
    found: dict[int, float] = {}
    for number, plan in enumerate(RESUMED.values(), start=1):
        folder = resume.begun(tmp_path, plan, checkpoint=checkpoint, settings=every)
        found |= resume.trained(ranks, folder, plan, steps=2 * number)
        checkpoint = committed(folder.checkpoints)[-1]
    assert list(found) == list(expected)
    assert largest_difference(list(found.values()), list(expected.values())) < 1e-5


def refused(rank: Rank, *, builder: str, folder: Path) -> str:
    """Return why a worker does not train. Runs in the pool."""
    try:
        train_part(rank, builder=builder, arguments={"steps": 2}, plan=Plan(), folder=folder)
    except JobError as error:
        return str(error)
    return ""


def with_adagrad(steps: int) -> Job:
    return linear(steps=steps, optimizer=torch.optim.Adagrad)


def with_adafactor(steps: int) -> Job:
    return linear(steps=steps, optimizer=torch.optim.Adafactor)


@pytest.mark.parametrize(
    ("builder", "words"),
    [
        ("tests.support.jobs:unused", "2 parameter(s) got no gradient at step 1: spare.weight, spare.bias."),
        (f"{__name__}:with_adagrad", "the optimizer Adagrad, which DeepSpeed replaces by one of its own"),
        (f"{__name__}:with_adafactor", "the optimizer Adafactor, which may look at whole parameters"),
    ],
)
def test_a_job_that_deepspeed_would_train_otherwise_is_refused(
    builder: str, words: str, ranks: RankPool, tmp_path: Path
) -> None:
    folder = bare_folder(tmp_path, Plan(engine="deepspeed", zero=2, mesh=TWO))
    for said in ranks.run(refused, workers=2, builder=builder, folder=folder):
        assert words in said


def test_the_bench_times_both_engines_and_reads_the_memory_of_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--zero", "1", "--rounds", "3", "--steps", "1", "--json"]
    assert main(["bench", "engines", str(job_file(tmp_path)), *options]) == 0
    (figures,) = json.loads(capsys.readouterr().out)
    assert (figures["workers"], figures["zero"], figures["rounds"]) == (2, 1, 3)
    assert 0 < figures["step_ratio_low"] <= figures["step_ratio"] <= figures["step_ratio_high"]
    assert min(figures["torch_step_s"], figures["deepspeed_step_s"]) > 0
    for side in ("torch", "deepspeed"):
        assert len(figures[f"{side}_peak_bytes"]) == 2
        assert min(figures[f"{side}_peak_bytes"]) > 0
    assert figures["peak_ratio"] > 0


def test_the_example_plan_is_verified_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    examples = Path(__file__).parents[2] / "examples"
    options = ["--plan", str(examples / "deepspeed.toml"), "--zero", "3", "--offload", "--micro-batch", "16"]
    options += ["--steps", "2", "--runs", str(tmp_path), "--json"]
    assert main(["verify", str(examples / "digits.py"), *options]) == 0
    assert json.loads(capsys.readouterr().out)["equal"]
