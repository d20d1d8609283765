"""What a plan and Lightning cannot do together is refused in a sentence; what is private of Lightning is there."""

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from shoal.comm.rank import Rank
from shoal.core.errors import ShoalError
from shoal.spec.plan import Batch, Mesh, Plan
from shoal.spec.sync import Sync
from tests.lightning.modules import Numbers, as_lightning, loader, module_of, refusal
from tests.support.ranks import RankPool

TWO = Plan(mesh=Mesh(replicate=2))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(8))


def streamed() -> Any:
    return DataLoader(Stream(), batch_size=4)


class Endless:
    def __iter__(self) -> Any:
        return iter(range(8))


def endless() -> Any:
    return Endless()


def already_divided() -> Any:
    return DataLoader(Numbers(), batch_size=4, sampler=DistributedSampler(Numbers(), num_replicas=2, rank=0))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"plan": TWO}, "the plan has 2 workers, and the Trainer starts 1. Write Trainer(devices=2)"),
        ({"plan": Plan(batch=Batch(micro_batch=3))}, "write batch_size=3 and Trainer(accumulate_grad_batches=3)"),
        ({"plan": Plan(), "precision": "64-true"}, "'64-true') is none that a plan has"),
        ({"plan": Plan(), "precision": "bf16-mixed"}, "Write precision='bf16' into the plan"),
        ({"plan": "auto", "load": streamed}, "an IterableDataset cannot be divided among workers"),
        ({"plan": "auto", "load": endless}, "what a Endless gives cannot be divided among workers"),
        ({"plan": "auto", "load": already_divided}, "Leave it out: ShoalStrategy gives each worker its part"),
    ],
)
def test_what_cannot_be_is_refused(ranks: RankPool, arguments: dict[str, Any], sentence: str) -> None:
    assert sentence in ranks.run(refusal, workers=1, **arguments)[0]


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        (Plan(mesh=Mesh(pipeline=2)), "training_step runs all of it at once"),
        (Plan(mesh=Mesh(replicate=2), sync=Sync(mode="local", local_steps=4)), "gradients meet in every step"),
        (Plan(compile=True), "torch.compile(self.net)"),
        (Plan(engine="deepspeed", zero=2, mesh=Mesh(shard=2)), "engine='deepspeed': under ShoalStrategy torch's own"),
        (Plan(engine="deepspeed", zero=3, offload=True), "with offload=true: under ShoalStrategy torch's own engines"),
    ],
)
def test_plans_that_training_step_cannot_run_are_refused(ranks: RankPool, plan: Plan, sentence: str) -> None:
    assert sentence in ranks.run(refusal, workers=1, plan=plan)[0]


def under_two_plans(rank: Rank) -> str:
    """Train a module under one plan, and then under another; return the sentence that this is refused with."""
    import pytorch_lightning as pl

    from shoal.lightning import ShoalStrategy

    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    with as_lightning(rank):
        module = module_of()
        for plan in (Plan(mesh=Mesh(shard=2), zero=3), TWO):
            strategy = ShoalStrategy(plan)
            trainer = pl.Trainer(
                accelerator="cpu", devices=2, strategy=strategy, max_steps=1, enable_checkpointing=False, **quiet
            )
            try:
                trainer.fit(module, loader())
            except ShoalError as error:
                return str(error)
    return ""


def test_a_module_that_is_cut_is_not_laid_out_again(ranks: RankPool) -> None:
    for said in ranks.run(under_two_plans, workers=2):
        assert said.startswith("the module holds slices already, of another plan")


def private_things(rank: Rank, folder: str) -> list[str]:
    import pytorch_lightning as pl
    from lightning_fabric.plugins.environments.lightning import LightningEnvironment

    from shoal.lightning import names

    launcher = names.script_launcher(LightningEnvironment(), workers=2, nodes=1)
    with as_lightning(rank):
        trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, default_root_dir=folder)
        names.leave_samplers(trainer)
        names.set_rank(0)
        left = trainer._accelerator_connector.use_distributed_sampler
    return [type(launcher).__name__, str(callable(launcher.launch)), str(left)]


def test_the_private_parts_of_lightning_that_a_strategy_needs_are_there(ranks: RankPool, tmp_path: Path) -> None:
    (found,) = ranks.run(private_things, workers=1, folder=str(tmp_path))
    assert found == ["_SubprocessScriptLauncher", "True", "False"]
