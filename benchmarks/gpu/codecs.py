"""Every codec with gradients on a GPU: nothing is lost, training goes as on the processor, and how fast they encode.

    python benchmarks/gpu/codecs.py [--steps 20 --mb 256 --json FILE]

Two workers share the one GPU, over Gloo by way of the processor's memory (comm/staged.py: NCCL refuses that). Without a
GPU all is done on the processor, with tensors staged all the same. For each codec:

1. nothing lost: under DDP, what has arrived in some steps and what is pending on both workers, against the gradients of
   one process without an engine: the largest difference, relative to the largest gradient. Both have the same bits.
2. training: examples/gpt.py's model, small, by `open_run` with [sync] codec, with replicas and with ZeRO-3: the largest
   relative difference of a loss to that of the same plan on the processor. Where rounding is by chance (int8, int4)
   the device draws other numbers; elsewhere a float that differs in its last digit may choose another element.
   Without a GPU: the difference to one process without a codec.
3. GB of float32 gradient that one worker encodes and decodes in a second, on the device, without the wire.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.parallel_cases import gpt
from shoal.comm.device import pick_device
from shoal.comm.group import new_group
from shoal.comm.rank import Rank
from shoal.comm.staged import staged_backend
from shoal.comm.store import connect
from shoal.compress.bucket import Bucket, padded
from shoal.compress.codec import Coded, Turn
from shoal.compress.codecs import CODECS, codec_named
from shoal.compress.collectives import GroupCollectives
from shoal.compress.feedback import ErrorFeedback
from shoal.core.events import EventLog
from shoal.core.run_folder import RunFolder
from shoal.spec.plan import Mesh, Plan
from shoal.spec.sync import Sync
from shoal.sync.compressed import CompressedAllReduce
from shoal.training.opening import open_run
from tests.support.ranks import RankPool
from tests.support.training import bare_folder, largest_difference, reference

WORKERS = 2
EXACT = 1e-5
"""Of step 1: some 20 additions in float32."""
CLOSE = {"bf16": 0.005, "int8": 0.005, "int4": 0.01, "sign": 0.03, "powersgd": 0.03, "topk": 0.03, "threshold": 0.03}
"""Of step 2, after 20 steps. What a codec leaves pending, which grows with its error, is what may differ."""
SIDE = 512
ROUNDS = 8


def model(device: torch.device) -> nn.Sequential:
    """Return a model with matrices, vectors and odd sizes, always the same."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 50), nn.Tanh(), nn.Linear(50, 61), nn.Tanh(), nn.Linear(61, 3)).to(device)


def loss(module: nn.Module, worker: int, step: int, device: torch.device) -> Tensor:
    """Return the loss of a worker's part of a step's batch."""
    x = torch.randn(4 + worker, 7, generator=torch.Generator().manual_seed(10 * step + worker))
    return module(x.to(device)).square().sum() / 10  # type: ignore[no-any-return]


def nothing_lost(rank: Rank, *, names: Sequence[str], steps: int) -> dict[str, dict[str, Any]]:
    """Return for each codec what arrived and what is pending here, by parameter. Runs in the pool."""
    device = pick_device(rank)
    store, limit = connect(rank, timeout_s=60), timedelta(seconds=60)
    backend = staged_backend(stages_cpu=device.type == "cpu")
    dist.init_process_group(backend, store=store, rank=rank.index, world_size=rank.workers, timeout=limit)
    try:
        return {name: _accounts(name, rank.index, steps, device) for name in names}
    finally:
        dist.destroy_process_group()


def _accounts(name: str, worker: int, steps: int, device: torch.device) -> dict[str, Any]:
    module, feedback = model(device), ErrorFeedback(codec_named(name))
    replica = DistributedDataParallel(module, bucket_cap_mb=0.01, gradient_as_bucket_view=True)
    parameters = dict(module.named_parameters())
    hook = CompressedAllReduce(feedback, parameters, GroupCollectives(new_group()))
    replica.register_comm_hook(None, hook.hook)
    arrived = {key: torch.zeros_like(parameter) for key, parameter in parameters.items()}
    for step in range(steps):
        replica.zero_grad()
        loss(replica, worker, step, device).backward()  # type: ignore[no-untyped-call]
        for key, parameter in parameters.items():
            assert parameter.grad is not None
            arrived[key] += parameter.grad
        if step == steps // 2:  # as after a resume
            feedback.load_state_dict(feedback.state_dict())
    pending = feedback.state_dict()["pending"]
    return {key: (arrived[key].cpu().numpy(), pending[key].cpu().numpy()) for key in parameters}


def true_gradients(steps: int, device: torch.device) -> dict[str, Any]:
    """Return the gradients of all workers and steps, summed by one process."""
    module = model(device)
    for step in range(steps):
        for worker in range(WORKERS):
            loss(module, worker, step, device).backward()  # type: ignore[no-untyped-call]
    return {key: p.grad.cpu().numpy() for key, p in module.named_parameters() if p.grad is not None}


def lost_of(answers: list[dict[str, Any]], true: dict[str, Any]) -> float:
    """Return the largest difference that arrived and pending have to `true`, relative to the largest gradient.

    Infinite where the workers got different bits.
    """
    worst = 0.0
    for key, gradient in true.items():
        arrived = [answer[key][0] for answer in answers]
        if any(each.tobytes() != arrived[0].tobytes() for each in arrived):
            return float("inf")
        total = arrived[0] + sum(answer[key][1] for answer in answers)
        worst = max(worst, float(abs(total - gradient).max() / abs(gradient).max()))
    return worst


def train(rank: Rank, *, folders: dict[str, str], steps: int, device: str) -> dict[str, list[float]]:
    """Return the losses of the training in each folder, all by this worker on a `device`. Runs in the pool."""
    losses: dict[str, list[float]] = {}
    for name, folder in folders.items():
        log = EventLog(RunFolder(Path(folder)).events_of(rank.index))
        store = dist.PrefixStore(name, connect(rank, timeout_s=60))
        with open_run(gpt(steps=steps, layers=2), RunFolder(Path(folder)), rank=rank, store=store, log=log) as run:
            assert run.device.type == device
            losses[name] = [run.step(batch) for batch in run.batches()]
        log.close()
    return losses


def plans(names: Sequence[str]) -> dict[str, Plan]:
    """Return the plans of the trainings: each codec with replicas, and with shards where it serves them."""
    made = {name: Plan(mesh=Mesh(replicate=WORKERS), sync=Sync(codec=name)) for name in names}
    sharded = [name for name in names if CODECS[name].serves_shards]
    return made | {f"{name}, zero 3": Plan(zero=3, mesh=Mesh(shard=WORKERS), sync=Sync(codec=name)) for name in sharded}


def trained(pool: RankPool, names: Sequence[str], steps: int, device: torch.device) -> dict[str, list[float]]:
    """Return the losses of every plan, in the processes of `pool`, which must use such a device."""
    with tempfile.TemporaryDirectory() as folder:
        folders = {
            name: str(bare_folder(Path(folder) / str(number), plan))
            for number, (name, plan) in enumerate(plans(names).items())
        }
        first, _ = pool.run(train, workers=WORKERS, folders=folders, steps=steps, device=device.type)
    return first  # type: ignore[no-any-return]


def rates(name: str, num_bytes: int, device: torch.device) -> tuple[float, float] | None:
    """Return the bytes of gradient encoded and decoded in a second; None for a codec that is summed while encoded."""
    codec = codec_named(name)
    if not isinstance(codec, Coded):
        return None
    count = max(1, num_bytes // (4 * SIDE * SIDE))
    bucket = Bucket(tuple(f"w{index}" for index in range(count)), ((SIDE, SIDE),) * count)
    values = torch.randn(padded(bucket.width, 1), generator=torch.Generator().manual_seed(0)).to(device)
    turn, into, times = Turn(bucket, 0, 0, 0, {}), torch.zeros_like(values), []
    codec.observe(values, turn)
    for _ in range(ROUNDS):
        pending = values.clone()
        begin_s = _now_s(device)
        message = codec.encode(pending, turn)
        middle_s = _now_s(device)
        codec.add(message, into)
        times.append((middle_s - begin_s, _now_s(device) - middle_s))
    encode_s, decode_s = (statistics.median(each) for each in zip(*times[1:], strict=True))
    return values.nbytes / encode_s, values.nbytes / decode_s


def _now_s(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def compare(names: Sequence[str], *, steps: int, num_bytes: int) -> list[dict[str, Any]]:
    """Return what was found of each codec."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pool = RankPool()
    try:
        accounts = pool.run(nothing_lost, workers=WORKERS, names=list(names), steps=5)
        losses = trained(pool, names, steps, device)
    finally:
        pool.close()
    if device.type == "cuda":
        expected = on_processor(names, steps)
    else:
        expected = dict.fromkeys(losses, reference(gpt(steps=steps, layers=2), steps).losses)
    true = true_gradients(5, device)
    found = []
    for name in names:
        rate = rates(name, num_bytes, device)
        line: dict[str, Any] = {"codec": name, "device": device.type}
        line["lost"] = lost_of([answer[name] for answer in accounts], true)
        line |= {
            plan: largest_difference(losses[key], expected[key])
            for plan, key in (("replicas", name), ("zero 3", f"{name}, zero 3"))
            if key in losses
        }
        line |= {"encode_GBps": rate[0] / 1e9, "decode_GBps": rate[1] / 1e9} if rate else {}
        differs = max(line["replicas"], line.get("zero 3", 0.0))
        line["ok"] = line["lost"] <= EXACT and differs <= CLOSE[name]
        found.append(line)
    return found


def on_processor(names: Sequence[str], steps: int) -> dict[str, list[float]]:
    """Return the losses of every plan without the GPU."""
    pool = RankPool()
    try:
        pool.run(hide_gpu, workers=WORKERS)
        return trained(pool, names, steps, torch.device("cpu"))
    finally:
        pool.close()


def hide_gpu(_: Rank) -> None:
    """Let this process see no GPU: it has not asked for one yet. Runs in the pool, which has the environment it had."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def main() -> int:
    """Measure, print, and return the exit code: 1 if a codec is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--mb", type=int, default=256, help="of gradient, for the rates")
    parser.add_argument("--codecs", nargs="+", default=list(CODECS), choices=CODECS)
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args()
    found = compare(flags.codecs, steps=flags.steps, num_bytes=flags.mb * 10**6)
    what = torch.cuda.get_device_name() if torch.cuda.is_available() else "the processor"
    print(f"{WORKERS} workers on {what}, torch {torch.__version__}")
    print(f"{'codec':<10} {'lost':>9} {'replicas':>9} {'zero 3':>9} {'encode':>8} {'decode':>8}")
    for line in found:
        cells = [f"{line[key]:>9.1e}" if key in line else f"{'':>9}" for key in ("lost", "replicas", "zero 3")]
        cells += [f"{line[key]:>8.1f}" if key in line else f"{'':>8}" for key in ("encode_GBps", "decode_GBps")]
        print(f"{line['codec']:<10} {' '.join(cells)}  {'ok' if line['ok'] else 'NOT OK'}")
    if flags.json:
        flags.json.write_text(json.dumps(found, indent=1))
    return 0 if all(line["ok"] for line in found) else 1


if __name__ == "__main__":
    sys.exit(main())
