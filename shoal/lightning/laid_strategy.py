"""The parts of a strategy that need no order: evaluation, what workers tell each other, and checkpoints."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from shoal.comm.group import barrier, is_joined, reduce_over, tell_all
from shoal.lightning.laying import Laid
from shoal.lightning.loaders import CutLoader
from shoal.lightning.names import ParallelStrategy
from shoal.lightning.state import (
    bring_places_back,
    load_module_state,
    load_optimizer_state,
    module_state,
    optimizer_state,
    set_places_apart,
)
from shoal.spec.plan import Plan

LAID: list[Laid] = []
"""The module that was laid out last, if any: a later Trainer of this process finds it as it is."""


class LaidStrategy(ParallelStrategy):
    """A strategy for a module that is laid out over workers."""

    _plan = Plan()
    _laid: Laid | None = None
    _share: Callable[[], float] = staticmethod(lambda: 1.0)
    """What fraction of the global batch the part at hand is."""
    _is_training = False
    """Whether a training step runs."""

    @property
    def laid(self) -> Laid:
        """The module under the plan."""
        assert self._laid is not None, "before setup"
        return self._laid

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's validation_step on this worker's part."""
        with self.precision_plugin.val_step_context():
            return self.laid.run("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's test_step on this worker's part."""
        with self.precision_plugin.test_step_context():
            return self.laid.run("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's predict_step on this worker's part."""
        with self.precision_plugin.predict_step_context():
            return self.laid.run("predict_step", *args, **kwargs)

    # What workers tell each other.

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return `tensor` reduced over the workers; a mean in training_step is that over the global batch."""
        if not isinstance(tensor, torch.Tensor) or not is_joined():
            return tensor
        op = str(getattr(reduce_op, "name", reduce_op) or "mean").lower()
        if op not in ("mean", "avg"):
            return reduce_over(tensor, op, group)
        if self._is_training and group is None:
            return reduce_over(tensor * (self._share() / self._plan.mesh.tensor), "sum")
        return reduce_over(tensor.clone(), "sum", group) / self.world_size

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return what worker `src` has."""
        return tell_all(obj, source=src) if is_joined() else obj

    def barrier(self, name: str | None = None) -> None:  # noqa: ARG002
        """Wait until every worker is here."""
        if is_joined():
            barrier()

    # Checkpoints: always those of one process.

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write a checkpoint, on the first worker. Called by every worker."""
        assert self.lightning_module is not None
        if isinstance(self.lightning_module.trainer.train_dataloader, CutLoader):  # a shoal.Loader is one anywhere
            set_places_apart(checkpoint)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # other ones in Lightning 2.5 than in 2.6
        """Read a checkpoint."""
        checkpoint = super().load_checkpoint(*args, **kwargs)
        bring_places_back(checkpoint)
        return checkpoint

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the whole state of the module, on the first worker. Called by every worker."""
        if self._laid is not None and self._laid.is_cut:
            return module_state(self._laid, keeps=self.is_global_zero)
        return super().lightning_module_state_dict()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Give the module the weights of a checkpoint: its slices, where it is cut already."""
        laid = [laid for laid in LAID if laid.module is self.lightning_module and laid.is_cut]
        if laid:
            load_module_state(laid[0], checkpoint["state_dict"], strict=strict)
        else:
            super().load_model_state_dict(checkpoint, strict=strict)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the whole state of the optimizer, on the first worker. Called by every worker."""
        plain = getattr(optimizer, "optimizer", optimizer)
        if self.laid.is_cut:
            return optimizer_state(self.laid, plain, keeps=self.is_global_zero)
        return super().optimizer_state(plain)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Give the optimizer its slices of a checkpoint's state."""
        if not self.laid.is_cut:
            super().load_optimizer_state_dict(checkpoint)
            return
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            load_optimizer_state(self.laid, optimizer, state)
