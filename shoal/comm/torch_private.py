"""The private parts of torch that comm/ stands on. When they move, tests/comm/test_torch_private.py says which."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, _collective_utils, _redistribute


def timeout_of(group: Any) -> timedelta:
    """Return how long an operation of `group` waits."""
    limit: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return limit


def set_timeout(group: Any, limit: timedelta) -> None:
    """Make the operations of `group` wait `limit` at most: those of DeviceMesh wait half an hour by themselves."""
    dist.distributed_c10d._set_pg_timeout(limit, group)


def forget_meshes() -> None:
    """Make DTensor forget what it has worked out so far.

    It keeps that by the shape of the mesh, groups included: in a process that leaves its groups and forms them anew, it
    would go on with the old ones ("Could not resolve the process group registered under the name ..."), and keep their
    threads alive, which wake 100 times a second.
    """
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache.cache_clear()
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear is not None:  # since torch 2.10
        clear()
    for function in (_redistribute._gen_transform_infos, _collective_utils.MeshTopoInfo.build_from_mesh):
        getattr(function, "cache_clear", lambda: None)()
    getattr(_redistribute, "clear_redistribute_planner_cache", lambda: None)()  # not in torch 2.11
