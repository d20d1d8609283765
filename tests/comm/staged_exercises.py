"""What is asked of a group that stages its tensors: every operation, and the engines that are built on them.

Each exercise is run by every worker of a group and returns tensors, on the device that it is given.
"""

import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from shoal.sync.allreduce import AllReduce

functional: Any = functional_collectives  # largely untyped
Result = Any  # tensors, in lists, tuples and dicts


def numbers(device: torch.device, *shape: int, seed: int = 0) -> Tensor:
    """Return numbers that differ between workers."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    return torch.randn(*shape, generator=generator).to(device)


def empty(device: torch.device, *shape: int) -> Tensor:
    return torch.full(shape, -7.0, device=device)


def reductions(device: torch.device) -> Result:
    results = {}
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        dist.all_reduce(tensor := numbers(device, 5, 3), op=op)
        results[str(op)] = tensor
    for dtype in (torch.float64, torch.bfloat16, torch.int64):
        dist.all_reduce(typed := (10 * numbers(device, 7)).to(dtype))
        results[str(dtype)] = typed
    dist.reduce(reduced := numbers(device, 5), dst=1)
    coalesced = functional.all_reduce_coalesced([numbers(device, 3), numbers(device, 2, 2)], "sum", dist.group.WORLD)
    return results, reduced if dist.get_rank() == 1 else None, [functional.wait_tensor(t) for t in coalesced]


def one_to_all_and_back(device: torch.device) -> Result:
    size, rank = dist.get_world_size(), dist.get_rank()
    dist.broadcast(sent := numbers(device, 4, 2), src=1)
    rows = [numbers(device, 3, seed=i) for i in range(size)]
    dist.scatter(row := empty(device, 3), rows if rank == 1 else None, src=1)
    gathered = [empty(device, 3) for _ in range(size)] if rank == 0 else None
    dist.gather(numbers(device, 3), gathered, dst=0)
    objects = [{"rank": rank}, "text"] if rank == 0 else [None, None]
    dist.broadcast_object_list(objects, src=0)
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, {"rank": rank})
    assert objects == [{"rank": 0}, "text"]
    assert everyone == [{"rank": i} for i in range(size)]
    return sent, row, gathered


def gathers(device: torch.device) -> Result:
    size = dist.get_world_size()
    parts = [empty(device, 2, 3) for _ in range(size)]
    dist.all_gather(parts, numbers(device, 2, 3))
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(
        whole := empty(device, 2 * size, 3), numbers(device, 2, 3)
    )
    one = functional.all_gather_tensor(numbers(device, 2, 3), 1, dist.group.WORLD)
    many = functional.all_gather_into_tensor_coalesced([numbers(device, 2), numbers(device, 1, 3)], dist.group.WORLD)
    return parts, whole, functional.wait_tensor(one), [functional.wait_tensor(t) for t in many]


def reduce_scatters(device: torch.device) -> Result:
    size = dist.get_world_size()
    dist.reduce_scatter(part := empty(device, 3), [numbers(device, 3, seed=i) for i in range(size)])
    getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(
        shard := empty(device, 2, 3), numbers(device, 2 * size, 3)
    )
    one = functional.reduce_scatter_tensor(numbers(device, 3, 2 * size), "sum", 1, dist.group.WORLD)
    many = functional.reduce_scatter_tensor_coalesced(
        [numbers(device, size), numbers(device, size, 2)], "sum", [0, 0], dist.group.WORLD
    )
    return part, shard, functional.wait_tensor(one), [functional.wait_tensor(t) for t in many]


def all_to_alls(device: torch.device) -> Result:
    size, rank = dist.get_world_size(), dist.get_rank()
    dist.all_to_all_single(even := empty(device, 2 * size), numbers(device, 2 * size))
    gives, takes = [rank + to for to in range(size)], [source + rank for source in range(size)]
    dist.all_to_all_single(uneven := empty(device, sum(takes)), numbers(device, sum(gives)), takes, gives)
    lists = [empty(device, 2) for _ in range(size)]
    if torch.__version__ >= "2.12":  # Gloo has it from there on
        dist.all_to_all(lists, list(numbers(device, size, 2)))
    one = functional.all_to_all_single(numbers(device, sum(gives)), takes, gives, dist.group.WORLD)
    # What DTensor does on a mesh of GPUs to go from one sharded dim to another.
    group = dist.group.WORLD
    assert group is not None
    swapped = torch.ops._dtensor.shard_dim_alltoall(numbers(device, 2, 3 * size), 0, 1, group.group_name)
    return even, uneven, lists, functional.wait_tensor(one), swapped


def messages(device: torch.device) -> Result:
    size, rank = dist.get_world_size(), dist.get_rank()
    after, before = (rank + 1) % size, (rank - 1) % size
    arrived = [empty(device, 40_000), empty(device, 3, 2)]
    ring = [
        dist.P2POp(dist.isend, numbers(device, 40_000), after),
        dist.P2POp(dist.irecv, arrived[0], before),
        dist.P2POp(dist.isend, numbers(device, 3, 2), before),
        dist.P2POp(dist.irecv, arrived[1], after),
    ]
    for work in dist.batch_isend_irecv(ring):
        assert work.wait()
    if rank == 0:
        dist.send(numbers(device, 5), dst=1, tag=3)
        dist.send_object_list(["shape", (2, 3)], dst=1, device=device)
        return arrived
    if rank == 1:
        source = dist.recv(single := empty(device, 5), tag=3)  # from anybody
        assert source == 0
        objects: list[Any] = [None, None]
        dist.recv_object_list(objects, src=0, device=device)
        assert objects == ["shape", (2, 3)]
        return arrived, single
    return arrived


def started_and_awaited(device: torch.device) -> Result:
    works = [dist.all_reduce(numbers(device, 4, seed=i), async_op=True) for i in range(3)]
    values = [work.get_future().then(lambda future: future.value()[0] * 2).wait() for work in works]
    for work in works:
        assert work.wait()
        assert work.is_completed()
    dist.barrier()
    return values


def subgroups(device: torch.device) -> Result:
    size, rank = dist.get_world_size(), dist.get_rank()
    pair = dist.new_group([0, 1], timeout=timedelta(seconds=60))
    if rank < 2:
        dist.all_reduce(ours := numbers(device, 3), group=pair)
        dist.barrier(group=pair)
        assert pair._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=60)
    flat = init_device_mesh(device.type, (1, size), mesh_dim_names=("a", "b"))
    dist.all_reduce(along := numbers(device, 3), group=flat["b"].get_group())
    dist.all_reduce(alone := numbers(device, 3), group=flat["a"].get_group())
    return ours if rank < 2 else None, along, alone


def redistributions(device: torch.device) -> Result:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    torch.manual_seed(1)
    whole = torch.randn(5, 7).to(device)  # divides neither by 2 nor by 3
    starts = [distribute_tensor(whole, mesh, [place]) for place in (Replicate(), Shard(0), Shard(1))]
    starts.append(DTensor.from_local(numbers(device, 5, 7), mesh, [Partial()]))
    results = []
    for start, there in itertools.product(starts, (Replicate(), Shard(0), Shard(1))):
        moved = start.redistribute(mesh, [there])
        results += [moved.to_local(), moved.full_tensor()]
    return results


def net(device: torch.device) -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 7), nn.GELU(), nn.Linear(7, 5)).to(device)


def trained(model: nn.Module, device: torch.device) -> Result:
    """Return the losses of three steps, and the whole parameters after them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(model(numbers(device, 4, 6, seed=step)), numbers(device, 4, 5, seed=9))
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.detach())
    return losses, [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]


def plain_ddp(device: torch.device) -> Result:
    return trained(DistributedDataParallel(net(device)), device)


def hooked_ddp(device: torch.device) -> Result:
    replica = DistributedDataParallel(net(device), gradient_as_bucket_view=True, bucket_cap_mb=0.0001)
    replica.register_comm_hook(None, AllReduce(lambda: None).hook)
    return trained(replica, device)


def sharded(device: torch.device) -> Result:
    model = net(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for part in (model[2], model):
        module = fully_shard(part, mesh=mesh)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return trained(model, device)


def tensor_parallel(device: torch.device) -> Result:
    model = net(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    torch.manual_seed(3)
    batch, target = torch.randn(4, 6).to(device), torch.randn(4, 5).to(device)
    torch.autograd.backward(F.mse_loss(model(batch), target))
    return [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]


def pipelined(device: torch.device) -> Result:
    size, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(4)
    stages = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()).to(device) for _ in range(size)]
    batch, target = torch.randn(12, 6).to(device), torch.randn(12, 6).to(device)
    schedule = Schedule1F1B(PipelineStage(stages[rank], rank, size, device), 4, loss_fn=F.mse_loss)
    losses: list[Tensor] = []
    for _ in range(2):
        schedule.step(*([batch] if rank == 0 else []), target=target if rank == size - 1 else None, losses=losses)
    return [p.grad for p in stages[rank].parameters()], losses


COLLECTIVES = (reductions, one_to_all_and_back, gathers, reduce_scatters, all_to_alls, messages, started_and_awaited)
ENGINES = (subgroups, redistributions, plain_ddp, hooked_ddp, sharded, tensor_parallel, pipelined)
EXERCISES: dict[str, Callable[[torch.device], Result]] = {made.__name__: made for made in (*COLLECTIVES, *ENGINES)}


def as_lists(result: Result) -> Any:
    if isinstance(result, Tensor):
        return result.detach().double().tolist()
    if isinstance(result, dict):
        return {key: as_lists(value) for key, value in result.items()}
    return result if result is None else [as_lists(part) for part in result]
