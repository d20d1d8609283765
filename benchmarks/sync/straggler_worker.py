"""What straggler.py trains: the job that `shoal train` is given, and the same as a plain DDP script.

A sample costs computing; where that is simulated, it costs waiting: SAMPLE_S of sleep, four times that on the slow
worker. The samples, their order and the model are the same for all, so undisturbed losses are, too.

    python -m benchmarks.sync.straggler_worker      is one worker of DDP (RANK, WORLD_SIZE, SHOAL_BENCH_MEET)
"""

import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate

import shoal
from shoal.data.order import order
from shoal.data.partition import global_batch

VARIABLE = "SHOAL_BENCH_STRAGGLER"
WORKERS, SLOW, TIMES = 4, 3, 4
FEATURES, CLASSES = 64, 10
NUM_SAMPLES, NUM_HELD_OUT = 16384, 2048


@dataclass(frozen=True)
class Setting:
    """What one training is like."""

    steps: int
    batch_size: int
    width: int
    sample_s: float = 0.0
    """How long a sample is slept for; 0: it is computed."""
    slow: int = -1
    """Which worker is slow, where that is simulated; -1: none."""
    groups: tuple[str, ...] = ()
    """The control group of each worker, which says how much of a core it has (quota.py); empty: none."""
    cores: tuple[int, ...] = ()
    """The core of each worker, where there are enough of them."""

    def environment(self) -> dict[str, str]:
        """Return the variables that tell a worker."""
        return {VARIABLE: json.dumps(asdict(self))}


def told() -> Setting:
    """Return what this process was told."""
    said = json.loads(os.environ.get(VARIABLE, '{"steps": 10, "batch_size": 32, "width": 64}'))
    return Setting(**{**said, **{name: tuple(said.get(name, ())) for name in ("groups", "cores")}})


def settle_down(setting: Setting) -> None:
    """Take no more than this worker's core, or its part of one, if it has one."""
    index = int(os.environ.get("RANK", "-1"))
    if index < 0 or not (setting.groups or setting.cores):
        return
    torch.set_num_threads(1)
    if setting.cores:
        os.sched_setaffinity(0, {setting.cores[index]})
    else:
        Path(setting.groups[index]).write_text(str(os.getpid()))


def samples(count: int, seed: int) -> TensorDataset:
    """Return noise, of which the class is a function, now and then a wrong one: the best loss is not 0."""
    chance = torch.Generator().manual_seed(seed)
    x = torch.randn(count, FEATURES, generator=chance)
    teacher = torch.Generator().manual_seed(99)
    hidden = torch.tanh(x @ torch.randn(FEATURES, 32, generator=teacher) / 8)
    y = (hidden @ torch.randn(32, CLASSES, generator=teacher)).argmax(1)
    wrong = torch.rand(count, generator=chance) < 0.2
    return TensorDataset(x, torch.where(wrong, torch.randint(CLASSES, (count,), generator=chance), y))


SETTING = told()
DATA, HELD_OUT = samples(NUM_SAMPLES, 1), samples(NUM_HELD_OUT, 2)


def build() -> nn.Module:
    """Return the model."""
    width = SETTING.width
    return nn.Sequential(
        nn.Linear(FEATURES, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, CLASSES)
    )


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW; its eps is far above the rounding of a sum, so that all ways to sum train alike."""
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4)


def loss(output: Tensor, batch: Any) -> Tensor:
    """Return the mean of the cross-entropy."""
    return F.cross_entropy(output, batch[1])


def inputs(batch: Any) -> Tensor:
    """Return what the model is called with; where computing is simulated, after a while."""
    x: Tensor = batch[0]
    if SETTING.sample_s and torch.is_grad_enabled() and type(x) is Tensor and "RANK" in os.environ:
        times = TIMES if int(os.environ["RANK"]) == SETTING.slow else 1
        time.sleep(SETTING.sample_s * len(x) * times)
    return x


settle_down(SETTING)
job = shoal.Job(
    model=build,
    inputs=inputs,
    loss=loss,
    optimizer=optimizer,
    data=DATA,
    eval_data=HELD_OUT,
    batch_size=SETTING.batch_size,
    steps=SETTING.steps,
)


def train_ddp() -> None:
    """Be one worker of DDP; worker 0 prints when each step was done, and the loss over what was held out."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    index, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    meet = f"file://{os.environ['SHOAL_BENCH_MEET']}"
    dist.init_process_group("gloo", init_method=meet, rank=index, world_size=workers)
    torch.manual_seed(job.seed)
    model = DistributedDataParallel(build())
    update = optimizer(model.parameters())
    share, moments = SETTING.batch_size // workers, []
    for step in range(SETTING.steps):
        where = global_batch(step, num_samples=NUM_SAMPLES, batch_size=SETTING.batch_size)
        positions = np.arange(where.first + index * share, where.first + (index + 1) * share)
        numbers = order(NUM_SAMPLES, positions, seed=job.seed, epoch=where.epoch)
        batch = default_collate([DATA[int(number)] for number in numbers])
        loss(model(inputs(batch)), batch).backward()
        update.step()
        update.zero_grad(set_to_none=True)
        moments.append(time.time())
    if index == 0:
        with torch.no_grad():
            found = float(F.cross_entropy(model.module(HELD_OUT.tensors[0]), HELD_OUT.tensors[1]))
        print(json.dumps({"moments": moments, "loss": found}))
    dist.destroy_process_group()


if __name__ == "__main__":
    train_ddp()
