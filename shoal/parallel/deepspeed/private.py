"""What is used of DeepSpeed that it does not document (0.19). A test fails if one of them goes.

1. Its accelerator for processors without what it compiles at first use: a minute, for a collective that inference uses.
2. Its backend for collectives, so that they are counted, and waiting for them is known.
3. Its groups and its backend are globals, and outlive the group of all workers: they are taken back with it.
4. Its numbers for modules and parameters, which count on from run to run in one process.
5. Where the numbers of a parameter lie in the rows that it gives to optimizers.
"""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from shoal.comm.collectives import ReduceOp, Waiting, all_gather_into, reduce_scatter_into
from shoal.comm.torch_private import set_timeout
from shoal.comm.traffic import TRAFFIC

_NAMES = {
    "all_reduce": "all-reduce",
    "all_reduce_coalesced": "all-reduce",
    "reduce": "reduce",
    "reduce_scatter": "reduce-scatter",
    "broadcast": "broadcast",
    "all_gather": "all-gather",
    "all_gather_coalesced": "all-gather",
    "all_to_all_single": "all-to-all",
}
"""Its collectives, and what we call them. Gathering and scattering of one tensor are ours (comm/collectives.py)."""


def set_up(device: torch.device, *, waiting: Waiting, timeout_s: float) -> None:
    """Make DeepSpeed use the group of all workers that there is, and compile nothing. Called by every worker."""
    if device.type == "cpu":
        _set_processor()
    _count_anew()
    comm: Any = importlib.import_module("deepspeed.comm.comm")
    comm.cdb = _backend_class()(waiting, timeout_s)


def tear_down() -> None:
    """Take back what `set_up` and DeepSpeed have made of the group."""
    comm: Any = importlib.import_module("deepspeed.comm.comm")
    groups: Any = importlib.import_module("deepspeed.utils.groups")
    comm.cdb = None
    groups._release_process_group_references()


def _count_anew() -> None:
    """Number modules and parameters from 0 again: ZeRO-3 compares the numbers between workers, which may have had
    different runs before."""
    offload: Any = importlib.import_module("deepspeed.runtime.zero.parameter_offload").DeepSpeedZeRoOffload
    offload._register_deepspeed_module.__defaults__[0][0] = 0
    importlib.import_module("deepspeed.runtime.zero.partition_parameters").Init.param_id = 0


def _set_processor() -> None:
    accelerator: Any = importlib.import_module("deepspeed.accelerator")
    kind: Any = importlib.import_module("deepspeed.accelerator.cpu_accelerator").CPU_Accelerator

    class Processor(kind):  # type: ignore[misc]
        def create_op_builder(self, op_name: str) -> Any:
            return None if op_name == "ShareMemCommBuilder" else super().create_op_builder(op_name)

    if type(accelerator.get_accelerator()).__name__ != Processor.__name__:
        accelerator.set_accelerator(Processor())


def _backend_class() -> Any:
    kind: Any = importlib.import_module("deepspeed.comm.torch").TorchBackend

    class Backend(kind):  # type: ignore[misc]
        """DeepSpeed's own, whose collectives are timed."""

        def __init__(self, waiting: Waiting, timeout_s: float) -> None:
            self._waiting, self._longest = waiting, timedelta(seconds=timeout_s)
            super().__init__("", self._longest, None)

        def new_group(self, ranks: Any) -> Any:
            group = super().new_group(ranks)
            set_timeout(group, self._longest)  # else its own half an hour
            return group

        def all_gather_into_tensor(
            self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None, async_op: bool = False
        ) -> Any:
            work = self._timed(all_gather_into, output_tensor, input_tensor, group, async_op=async_op)
            return _Timed(work, self._waiting) if async_op else work

        def reduce_scatter_tensor(
            self,
            output_tensor: torch.Tensor,
            input_tensor: torch.Tensor,
            op: Any = ReduceOp.SUM,
            group: Any = None,
            async_op: bool = False,
        ) -> Any:
            op = self._reduce_op(op)
            work = self._timed(reduce_scatter_into, output_tensor, input_tensor, group, op=op, async_op=async_op)
            return _Timed(work, self._waiting) if async_op else work

        def _timed(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with self._waiting():
                return function(*args, **kwargs)

    for name, ours in _NAMES.items():
        setattr(Backend, name, _counted(getattr(kind, name), ours))
    return Backend


def _counted(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a collective of the backend's, timed and counted."""

    def collective(self: Any, *args: Any, **kwargs: Any) -> Any:
        tensor = _first_tensor([*args, *kwargs.values()])
        begin = TRAFFIC.begin(tensor)
        with self._waiting():
            work = function(self, *args, **kwargs)
        is_pending = hasattr(work, "wait")
        TRAFFIC.end(None if is_pending else begin, name, "engine", tensor)
        return _Timed(work, self._waiting) if is_pending else work

    return collective


def _first_tensor(values: list[Any]) -> torch.Tensor:
    tensors = (each for value in values for each in (value if isinstance(value, (list, tuple)) else [value]))
    return next((tensor for tensor in tensors if isinstance(tensor, torch.Tensor)), torch.empty(0))


class _Timed:
    """A collective under way; waiting for it counts as such."""

    def __init__(self, work: Any, waiting: Waiting) -> None:
        self._work, self._waiting = work, waiting

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        with self._waiting():
            return self._work.wait(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


@dataclass(frozen=True)
class Held:
    """What a worker holds of a flattened parameter: `count` numbers, from `first` on."""

    first: int
    count: int
    row: nn.Parameter | None
    """The row they lie in, which the optimizer is given; None: the parameter is not trained."""
    begin: int
    """Where in that row."""
    computed: torch.Tensor | None
    """The same numbers as the model computes with them, where it holds no more than these (ZeRO-3)."""

    def of(self, row: torch.Tensor) -> torch.Tensor:
        """Return these numbers of something that lies as the row does: itself, or a state of the optimizer."""
        return row.detach().narrow(0, self.begin, self.count)


def held_of(parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> Held | None:
    """Return what this worker holds of a parameter, of which `optimizer` trains rows; None: nothing, or all of it."""
    own: Any = parameter
    if hasattr(own, "ds_id"):
        return _held_sharded(own)
    mapping = getattr(own, "_hp_mapping", None)
    if mapping is None:
        return None
    here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
    row = optimizer.param_groups[mapping.param_group_index]["params"][0]
    return Held(here.start, here.numel, row, there.start, None)


def _held_sharded(parameter: Any) -> Held | None:
    """Return the same of ZeRO-3, which cuts each parameter by itself, into equal parts."""
    part = parameter.ds_tensor.numel()
    first = parameter.ds_process_group.rank() * part
    count = max(0, min(part, parameter.ds_numel - first))
    if not count:
        return None
    computed = parameter.ds_tensor.detach().narrow(0, 0, count)
    if not parameter.requires_grad:
        return Held(first, count, None, 0, computed)
    zero = parameter._z3_optimizer
    number, begin, _ = zero.grad_position[zero.get_param_id(parameter)]
    return Held(first, count, zero.fp32_partitioned_groups_flat[number], begin, computed)


def rows_of(engine: Any) -> Iterator[torch.Tensor]:
    """Yield the rows of `engine` that its optimizer trains: this worker's part of all parameters, in float32."""
    zero = engine.optimizer
    yield from getattr(zero, "fp32_partitioned_groups_flat", None) or zero.single_partition_of_fp32_groups
