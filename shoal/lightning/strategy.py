"""The strategy: what Lightning's Trainer calls, step by step, and what of shoal answers."""

import atexit
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed import PrefixStore

from shoal.comm.group import is_joined, joined, world_store
from shoal.comm.rank import Rank, read_rank
from shoal.comm.store import connect
from shoal.core.errors import ConfigError
from shoal.lightning.laid_strategy import LAID, LaidStrategy
from shoal.lightning.laying import Laid
from shoal.lightning.loaders import CutLoader, CutPack, Taken, cut_loader
from shoal.lightning.names import (
    Precision,
    Trainer,
    leave_samplers,
    script_launcher,
    set_rank,
)
from shoal.lightning.planned import check_micro_batch, check_module, planned_for, read_plan, say_left_out
from shoal.lightning.precision import PlanPrecision, planned_precision
from shoal.spec.plan import Plan
from shoal.sync.allreduce import PendingTotal

_GROUP = ExitStack()
"""The group of all workers, which stays to the end of the process, as with Lightning's own strategies."""
_LAYINGS = itertools.count()


def leave() -> None:
    """Leave the group of all workers. Done at the end of the process; before that, by one that is to join another."""
    for laid in LAID:
        laid.close()
    LAID.clear()
    _GROUP.close()


atexit.register(leave)


class ShoalStrategy(LaidStrategy):
    """Trains an ordinary LightningModule under a shoal plan: `Trainer(strategy=ShoalStrategy("plan.toml"), devices=2)`.

    `plan`: a Plan, the path of a plan.toml, or "auto": a copy of the module on each device. `weight(batch)` is what the
    loss is a mean over, such as tokens; without it, samples. `seed` is that of the order of samples and of dropout;
    without it, what `seed_everything` was given. `tensor_plan` says how layers are divided, as in a Job.
    """

    strategy_name = "shoal"
    is_distributed = True

    def __init__(
        self,
        plan: Plan | str | Path = "auto",
        *,
        weight: Callable[[Any], float] | None = None,
        seed: int | None = None,
        tensor_plan: Mapping[str, str] | None = None,
    ) -> None:
        self._asked = read_plan(plan)
        super().__init__()
        self.num_nodes = 1
        self._weight, self._seed, self._tensor_plan = weight, seed, dict(tensor_plan) if tensor_plan else None
        self._taken: Taken | None = None
        self._is_accumulating = False

    @property
    def root_device(self) -> torch.device:
        """Where this worker computes."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """How many workers this node has."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def precision_plugin(self) -> Precision:
        """What steps run in: the plan's precision."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is not None and not isinstance(plugin, PlanPrecision):
            plugin = PlanPrecision(planned_precision(str(plugin.precision), self._asked))
        self._precision_plugin = plugin

    # Starting, and ending.

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = script_launcher(self.cluster_environment, workers=self.num_processes, nodes=self.num_nodes)

    def set_world_ranks(self) -> None:
        """Tell everybody which worker this is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        set_rank(self.global_rank)

    def setup_environment(self) -> None:
        """Join the group of all workers."""
        super().setup_environment()
        self.set_world_ranks()
        assert isinstance(self.precision_plugin, PlanPrecision)
        plan = planned_for(self._asked, workers=self.world_size, precision=self.precision_plugin.planned)
        self._plan, self._worker = plan, self._rank()
        if self._worker.workers > 1 and not is_joined():
            store = connect(self._worker, timeout_s=plan.timeout_s)
            _GROUP.enter_context(joined(self._worker, store, device=self.root_device, timeout_s=plan.timeout_s))

    def _rank(self) -> Rank:
        rank, environment = read_rank(), self.cluster_environment
        if rank is not None and rank.workers == self.world_size:
            return rank
        assert environment is not None
        return Rank(
            index=self.global_rank,
            workers=self.world_size,
            local_index=self.local_rank,
            local_workers=self.num_processes,
            store_host=environment.main_address,
            store_port=environment.main_port,
            store_is_hosted=False,
        )

    def setup(self, trainer: Trainer) -> None:
        """Lay the plan over the module, and build the optimizer on what this worker holds of it."""
        assert self.accelerator is not None
        assert self.lightning_module is not None
        leave_samplers(trainer)
        self.accelerator.setup(trainer)
        is_fit = trainer.state.fn == "fit"
        if is_fit:
            check_module(self.lightning_module, workers=self._worker.workers)
        self._laid = self._find_laid() or self._lay()
        assert isinstance(self.precision_plugin, PlanPrecision)
        self.precision_plugin.laid = self._laid
        if is_fit:
            self.setup_optimizers(trainer)
            for optimizer in self.optimizers:
                self._laid.own(optimizer)
        self.setup_precision_plugin()

    def _find_laid(self) -> Laid | None:
        found = [laid for laid in LAID if laid.module is self.lightning_module and laid.plan == self._plan]
        for laid in found:
            laid.bring()
        return found[0] if found else None

    def _lay(self) -> Laid:
        assert self.lightning_module is not None
        while LAID:
            LAID.pop().close()
        many = self._worker.workers > 1
        laid = Laid(
            self.lightning_module,
            self._plan,
            rank=self._worker,
            store=PrefixStore(f"lightning {next(_LAYINGS)}", world_store()) if many else None,
            device=self.root_device,
            seed=self._order_seed,
            tensor_plan=self._tensor_plan,
        )
        LAID.append(laid)
        if self.is_global_zero:
            say_left_out(self._plan)
        return laid

    @property
    def _order_seed(self) -> int:
        return self._seed if self._seed is not None else int(os.environ.get("PL_GLOBAL_SEED", "0"))

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Be entered around `configure_model`: what is going to be cut is built on the processor, not on a GPU."""
        if self._plan.mesh.keeps_whole:
            with super().tensor_init_context(empty_init):
                yield
        else:
            with self.precision_plugin.tensor_init_context():
                yield

    def model_to_device(self) -> None:
        """Leave the module where the plan has it."""

    def teardown(self) -> None:
        """Let go of what a run had; a module that is cut stays so."""
        if self._plan.mesh.keeps_whole:
            super().teardown()
            return
        for part in (self.cluster_environment, self.precision_plugin, self.accelerator, self.checkpoint_io):
            assert part is not None
            part.teardown()

    # Steps.

    def process_dataloader(self, dataloader: object) -> object:
        """Return the loader of this worker's part of each batch."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        return cut_loader(
            dataloader,
            shares=self._plan.shares,
            index=self.laid.position.data,
            seed=self._order_seed,
            epoch=trainer.current_epoch,
            trains=lambda made: trainer.train_dataloader is made,
        )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """Note which part of the global batch is at hand."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        taken: Taken = self._loader_of(trainer).taken
        check_micro_batch(self._plan, taken, accumulated=trainer.accumulate_grad_batches)
        self._taken, self._share = taken, lambda: taken.share
        if self._weight is not None:
            self._share = self._weighed(float(self._weight(batch)) if taken.part_samples else 0.0)

    def _loader_of(self, trainer: Trainer) -> Any:
        loader = trainer.train_dataloader
        if not isinstance(loader, (CutLoader, CutPack)):
            raise ConfigError(
                "training_step is given batches of several loaders, and nobody can say what a part of them counts. "
                "Give trainer.fit one loader to train on."
            )
        return loader

    def _weighed(self, weight: float) -> Callable[[], float]:
        if self._worker.workers == 1:
            return lambda: 1.0
        pending = PendingTotal(weight if self.laid.position.is_first_of_data else 0.0)
        shares: list[float] = []

        def share() -> float:
            if not shares:
                shares.append(weight / pending.wait())
            return shares[0]

        return share

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training_step on this worker's part."""
        assert self.lightning_module is not None
        assert self._taken is not None
        self._is_training = True
        try:
            with self.precision_plugin.train_step_context():
                return self.laid.train(
                    args,
                    kwargs,
                    step=self.lightning_module.trainer.global_step + 1,
                    samples=self._taken.samples,
                    counts=bool(self._taken.part_samples),
                    last=not self._is_accumulating,
                )
        finally:
            self._is_training = False

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run backward from the loss, scaled to what the part is of the global batch, and bring gradients together."""
        assert self.lightning_module is not None
        assert self._taken is not None
        self.pre_backward(closure_loss)
        loss = self.precision_plugin.pre_backward(closure_loss * self._share(), self.lightning_module)
        with self.laid.backward(counts=bool(self._taken.part_samples)):
            self.precision_plugin.backward(loss, self.lightning_module, optimizer, *args, **kwargs)
        if not self._is_accumulating:
            self.laid.finish()
        loss = self.precision_plugin.post_backward(loss, self.lightning_module)
        self.post_backward(loss)
        return loss

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Leave gradients here: of all batches but the last of an optimizer step."""
        self._is_accumulating = True
        try:
            with self.laid.accumulating():
                yield
        finally:
            self._is_accumulating = False
