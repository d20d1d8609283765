"""In the first step of a process, each collective is compared with what the other workers call, before it is made.

Gloo aborts the process of one worker, not always the wrong one's, where sizes differ ("preamble.length <= op.nbytes").

1. A worker that comes to its n-th collective of a group appends what it is to a word in the store, and reads the word.
2. If somebody before it has written another collective, type or shape, it raises that, and never enters.
3. Nobody waits for anybody here: of two that differ, the later one sees it.

Example: worker 1 appends "all-reduce of float32 (4,)" where worker 0 has written "all-reduce of float32 (3,)".

Two messages to the store for each collective, in one step. Those in which workers give different sizes by right (all
to all, gathered by one) and messages between two are left alone.
"""

import json
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.comm.torch_private import store_of
from shoal.core.errors import JobError

LATE_S = 0.5

# What torch calls them (2.11 to 2.13), and what we do.
_NAMES = {
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "allgather_": "all-gather",
    "_allgather_base_": "all-gather",
    "all_gather_single_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_": "reduce-scatter",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_single_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "barrier": "barrier",
}


def comparing_calls(engine: str) -> AbstractContextManager[object]:
    """Return what to be in for the collectives of a step to be compared; nothing where there is no group of Gloo's.

    Of several runs in one group (`shoal bench engines`), each has another `engine`.
    """
    if not dist.is_initialized() or dist.group.WORLD is None or dist.get_backend() != "gloo":
        return nullcontext()  # NCCL waits instead, and `fault.watch` says in what
    return _Comparing(dist.PrefixStore(f"first calls of {engine}", store_of(dist.group.WORLD)), dist.get_rank())


class _Comparing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every collective of this thread."""

    supports_higher_order_operators = True

    def __init__(self, store: Any, worker: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._store, self._worker = store, worker
        self._counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "namespace", "") in ("c10d", "_c10d_functional"):
            name = _NAMES.get(func.overloadpacket.__name__)
            group = _group_of([*args, *kwargs.values()])
            if name is not None and group:
                self._compare(group, _described(name, args))
        return func(*args, **kwargs)

    def _compare(self, group: str, call: str) -> None:
        """Raise JobError, which names all, if a worker that came here before calls something else."""
        self._counts[group] += 1
        number = self._counts[group]
        key = f"{group} {number}"
        self._store.append(key, json.dumps([self._worker, call]) + "\n")
        if len(self._said(key)) > 1:
            time.sleep(LATE_S)  # those who come a little later tell who is the odd one out
            said = ", ".join(f"{_names(workers)} {theirs}" for theirs, workers in self._said(key).items())
            raise JobError(
                f"the workers call different collectives as #{number} of their first step: {said}. All must call the "
                "same, with the same shapes."
            )

    def _said(self, key: str) -> dict[str, list[int]]:
        """Return what has been called so far, and by whom."""
        found: dict[str, list[int]] = {}
        for line in self._store.get(key).decode().splitlines():
            worker, call = json.loads(line)
            found.setdefault(call, []).append(worker)
        return found


def _names(workers: list[int]) -> str:
    if len(workers) == 1:
        return f"worker {workers[0]} calls"
    *others, last = sorted(workers)
    return f"workers {', '.join(map(str, others))} and {last} call"


def _described(name: str, args: Sequence[Any]) -> str:
    """Return a collective with the type and shape of the first tensor that it is given."""
    tensor = next(_tensors(args), None)
    if tensor is None:
        return name
    return f"{name} of {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _tensors(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


def _group_of(args: Sequence[Any]) -> str:
    """Return the name of the group that a collective is called on, or "" if that cannot be told."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            try:
                return str(dist.ProcessGroup.unbox(arg).group_name)
            except RuntimeError:  # that was the kind of the sum
                continue
    names = [arg for arg in args if isinstance(arg, str)]
    return names[-1] if names else ""
