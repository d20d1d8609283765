"""A plan held against what Lightning can do with it: what cannot run is refused, what is Lightning's part is said."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

from shoal.core.errors import ConfigError, PlanError
from shoal.core.toml import read_toml
from shoal.lightning.loaders import Taken
from shoal.spec.plan import Mesh, Plan

_LIGHTNINGS = {
    "checkpoint": "callbacks=[ModelCheckpoint(every_n_train_steps=...)]",
    "checkpoint_s": "callbacks=[ModelCheckpoint(train_time_interval=...)]",
    "on_loss": "a launcher that starts the script anew, with trainer.fit(ckpt_path='last')",
    "weights": "module.load_state_dict(...) before trainer.fit",
    "loading": "DataLoader(num_workers=...)",
    "staging": "shoal stage PACK before the script starts",
}
"""What of a plan Lightning itself does, and how one says it there."""


def read_plan(plan: Plan | str | Path) -> Plan | None:
    """Return the plan that was asked for; None for "auto"."""
    if plan == "auto":
        return None
    asked = plan if isinstance(plan, Plan) else read_toml(Plan, Path(plan))
    if asked.engine != "torch":
        offload = " with offload=true" if asked.offload else ""
        raise PlanError(
            f"engine={asked.engine!r}{offload}: under ShoalStrategy torch's own engines shard. Use engine='torch', "
            "which has the same stages of ZeRO; Lightning's own DeepSpeedStrategy; or a shoal.Job (shoal train)."
        )
    if asked.mesh.pipeline > 1:
        raise PlanError(
            f"mesh.pipeline={asked.mesh.pipeline}: a pipeline runs pieces of a model by turns, and training_step runs "
            "all of it at once. Use shard and tensor axes, or a shoal.Job (shoal train) for pipelines."
        )
    if asked.sync.mode != "all-reduce":
        raise PlanError(
            f"sync.mode={asked.sync.mode!r}: under Lightning gradients meet in every step. Use sync.mode='all-reduce', "
            "or a shoal.Job (shoal train)."
        )
    if asked.compile:
        raise PlanError("compile=True: under Lightning, compile the model inside the module: torch.compile(self.net).")
    return asked


def planned_for(asked: Plan | None, *, workers: int, precision: str) -> Plan:
    """Return the plan for so many workers, with the precision decided."""
    if asked is None:
        return Plan(mesh=Mesh(replicate=workers), precision=precision)
    if asked.workers != workers:
        raise ConfigError(
            f"the plan has {asked.workers} workers, and the Trainer starts {workers}. Write "
            f"Trainer(devices={asked.workers}), or num_nodes and devices whose product is {asked.workers}."
        )
    return dataclasses.replace(asked, precision=precision)


def say_left_out(plan: Plan) -> None:
    """Say what of the plan is Lightning's to do."""
    usual = Plan(mesh=plan.mesh, zero=plan.zero)
    for name, instead in _LIGHTNINGS.items():
        if getattr(plan, name) != getattr(usual, name):
            print(f"ShoalStrategy: the plan's {name} is not used. Under Lightning, write {instead}.", file=sys.stderr)


def check_module(module: Any, *, workers: int) -> None:
    """Refuse a module whose gradients cannot be brought together exactly."""
    if workers > 1 and not module.automatic_optimization:
        raise ConfigError(
            "automatic_optimization=False: only Lightning's own loop says which backward is the last before a step. "
            "Use automatic optimization, or shoal.start for a loop of your own."
        )


def check_micro_batch(plan: Plan, taken: Taken, *, accumulated: int) -> None:
    """Refuse a part that is larger than the plan's micro-batch: Lightning gives training_step all of it."""
    most = plan.batch.micro_batch
    if most is not None and taken.part_samples > most:
        size = most * plan.mesh.data
        times = accumulated * -(-taken.batch_samples // size)
        raise PlanError(
            f"micro_batch={most}, and training_step is given {taken.part_samples} samples. Lightning accumulates over "
            f"batches of the loader: write batch_size={size} and Trainer(accumulate_grad_batches={times})."
        )
