"""Every algorithm of comm/algorithms with tensors of a GPU, exact and how fast: `python benchmarks/gpu/algorithms.py`.

Workers share the one GPU, over Gloo by way of the processor's pinned memory (`Wire.carried`: NCCL refuses two workers
on one GPU, and is what sums between several). Without a GPU the processor's tensors are copied down and up as well.
For 2, 3 and 4 workers:

1. Every all-reduce, reduce-scatter, all-gather and broadcast, of several sizes and dtypes, against the plain sum.
   Numbers are small and whole, so every order of adding gives the same: they are compared exactly.
2. Each tensor is filled behind work that keeps the GPU busy: whoever copied it without waiting for that would send
   what was there before.
3. The rate of each at --mb: bytes of the tensor a second, the median of some calls, copies down and up included.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from shoal.comm.algorithms import ALL_GATHER, ALL_REDUCE, BROADCAST, REDUCE_SCATTER, Wire, broadcast, reduce
from shoal.comm.algorithms.steps import part
from shoal.comm.device import pick_device
from shoal.comm.group import joined
from shoal.comm.rank import Rank
from shoal.comm.store import connect
from tests.support.ranks import RankPool

WORKERS = (2, 3, 4)
SIZES = (0, 1, 1000, 300_001)
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)
ROUNDS = 7
Call = Callable[[Tensor, Wire], object]


def calls(source: int) -> dict[str, Call]:
    """Return every algorithm by name; broadcasts come from worker `source`."""
    kinds = {"all-reduce": ALL_REDUCE, "reduce-scatter": REDUCE_SCATTER, "all-gather": ALL_GATHER}
    found: dict[str, Call] = {f"{kind} {name}": call for kind, names in kinds.items() for name, call in names.items()}
    found["reduce tree"] = partial(reduce, to=source)
    return found | {f"broadcast {name}": partial(broadcast, source=source, algorithm=name) for name in BROADCAST}


def made(index: int, numel: int) -> Tensor:
    """Return what worker `index` has. The sum of 4 of them is below 256, up to which bfloat16 counts exactly."""
    return ((torch.arange(numel) * 7 + index * 5) % 31).to(torch.float64)


def given(name: str, wire: Wire, numel: int) -> Tensor:
    """Return what this worker has before the call."""
    if not name.startswith("all-gather"):
        return made(wire.index, numel)
    mine = slice(*part(numel, wire.index, wire.count))
    tensor = torch.zeros(numel, dtype=torch.float64)
    tensor[mine] = made(wire.index, numel)[mine]
    return tensor


def wanted(name: str, wire: Wire, numel: int, *, source: int) -> tuple[Tensor, slice]:
    """Return what is to be there after it, and which part of that counts."""
    everything, mine = slice(0, numel), slice(*part(numel, wire.index, wire.count))
    if name.startswith("broadcast"):
        return made(source, numel), everything
    if name.startswith("all-gather"):
        pieces = [made(index, numel)[slice(*part(numel, index, wire.count))] for index in range(wire.count)]
        return torch.cat(pieces), everything
    total = sum((made(index, numel) for index in range(wire.count)), torch.zeros(numel, dtype=torch.float64))
    if name.startswith("reduce tree"):
        return total, everything if wire.index == source else slice(0, 0)
    return total, mine if name.startswith("reduce-scatter") else everything


def late(value: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return `value` on the device, where it arrives only when the work that was queued before it is done."""
    tensor = torch.full(value.shape, -1, dtype=dtype, device=device)
    if device.type == "cuda":
        busy = torch.ones(2048, 2048, device=device)
        for _ in range(20):
            busy = busy @ busy
    tensor.copy_(value)
    return tensor


def wrong_of(wire: Wire, device: torch.device) -> list[str]:
    """Return what is wrong with any of them; nothing, it is hoped."""
    source, wrong = wire.count - 1, []
    for name, call in calls(source).items():
        for numel in SIZES:
            for dtype in DTYPES:
                tensor = late(given(name, wire, numel), dtype, device)
                call(tensor, wire)
                want, counts = wanted(name, wire, numel, source=source)
                if tensor.device != device or not torch.equal(tensor.cpu()[counts], want.to(dtype)[counts]):
                    wrong.append(f"{name} of {numel} {dtype}")
    return wrong


def rates_of(wire: Wire, device: torch.device, num_bytes: int) -> dict[str, float]:
    """Return the bytes a second of each."""
    tensor, found = torch.ones(num_bytes // 4, device=device), {}
    for name, call in calls(0).items():
        times = []
        for _ in range(ROUNDS):
            tensor.fill_(1.0)
            _settle(device)
            began_s = time.perf_counter()
            call(tensor, wire)
            _settle(device)
            times.append(time.perf_counter() - began_s)
        found[name] = num_bytes / statistics.median(times[1:])
    return found


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()


def exercise(rank: Rank, *, num_bytes: int) -> tuple[str, list[str], dict[str, float]]:
    """Return the device, what is wrong, and the rates. Runs in the pool."""
    device = pick_device(rank)
    with joined(rank, connect(rank, timeout_s=60), device=torch.device("cpu"), timeout_s=60):
        assert dist.group.WORLD is not None
        wire = Wire(dist.group.WORLD, stages_cpu=device.type == "cpu")
        return device.type, wrong_of(wire, device), rates_of(wire, device, num_bytes) if num_bytes else {}


def measured(pool: RankPool, num_bytes: int) -> Iterator[tuple[int, list[str], dict[str, float]]]:
    """Yield how many workers there were, what was wrong on any, and the rates of the slowest."""
    for workers in WORKERS:
        answers: list[Any] = pool.run(exercise, workers=workers, num_bytes=num_bytes)
        wrong = sorted({text for _, texts, _ in answers for text in texts})
        yield workers, wrong, {name: min(rates[name] for *_, rates in answers) for name in answers[0][2]}


def main() -> int:
    """Print the table; return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=16, help="of the tensor whose rate is measured")
    asked = parser.parse_args()
    pool = RankPool()
    try:
        found = list(measured(pool, int(asked.mb * 1e6)))
    finally:
        pool.close()
    what = torch.cuda.get_device_name() if torch.cuda.is_available() else "the processor, copied as a GPU's"
    print(f"tensors of {what}, torch {torch.__version__}; GB/s at {asked.mb:g} MB")
    print(f"{'':32}" + "".join(f"{workers:>4} workers" for workers, *_ in found))
    for name in calls(0):
        print(f"{name:32}" + "".join(f"{rates[name] / 1e9:12.2f}" for *_, rates in found))
    for workers, wrong, _ in found:
        checks = len(calls(0)) * len(SIZES) * len(DTYPES)
        print(f"{workers} workers: {checks - len(wrong)} of {checks} exact" + "".join(f"\n  {text}" for text in wrong))
    return 1 if any(wrong for _, wrong, _ in found) else 0


if __name__ == "__main__":
    sys.exit(main())
