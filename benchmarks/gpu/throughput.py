"""Tokens a second of GPT-2 124M, bf16 autocast with torch.compile: `shoal` beside a loop written by hand.

    python benchmarks/gpu/throughput.py [--rounds 8 --steps 20]

Both train in this process on the same GPU, taking turns; each line is a round, the last the median ratio.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from shoal.comm.rank import ALONE
from shoal.core.events import EventLog
from shoal.core.run_folder import RunFolder
from shoal.core.toml import write_toml
from shoal.spec.job import Job
from shoal.spec.plan import Plan
from shoal.training.jobfile import load_job
from shoal.training.opening import open_run

_WARM_UP_STEPS = 8


def by_hand(job: Job, device: torch.device, *, compiles: bool) -> Iterator[None]:
    """Train as people do without any framework; yield after each step."""
    torch.manual_seed(job.seed)
    model = job.model().to(device)
    optimizer = job.optimizer(list(model.parameters()))

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return job.loss(model(x), {"y": y})

    step_loss = torch.compile(loss_of) if compiles else loss_of
    loader = torch.utils.data.DataLoader(
        job.data, batch_size=job.batch_size, shuffle=True, drop_last=True,
        num_workers=2, persistent_workers=True, pin_memory=device.type == "cuda",
    )  # fmt: skip
    for batch in itertools.chain.from_iterable(itertools.repeat(loader)):
        x, y = (batch[name].to(device, non_blocking=True) for name in ("x", "y"))
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = step_loss(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield


def by_shoal(job: Job, folder: Path, *, compiles: bool) -> Iterator[None]:
    """Train through shoal; yield after each step."""
    run_folder = RunFolder.create(folder, None, stem="run")
    write_toml(run_folder.plan_toml, Plan(precision="bf16", compile=compiles))
    log = EventLog(run_folder.events_of(0))
    with open_run(job, run_folder, rank=ALONE, store=None, log=log) as run:
        for batch in run.batches():
            run.advance(batch)
            yield


def compare(job: Job, *, rounds: int, steps: int, compiles: bool, device: torch.device) -> dict[str, list[float]]:
    """Return the tokens a second of each side in each round."""
    tokens = job.batch_size * job.data[0]["x"].numel()
    job = job.with_steps(10**6)
    with tempfile.TemporaryDirectory() as folder:
        sides: dict[str, Any] = {
            "hand": by_hand(job, device, compiles=compiles),
            "shoal": by_shoal(job, Path(folder), compiles=compiles),
        }
        for side in sides.values():
            _advance(side, _WARM_UP_STEPS, device)
        rates: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(rounds):
            for name in list(sides) if number % 2 == 0 else reversed(list(sides)):
                rates[name].append(tokens * steps / _advance(sides[name], steps, device))
        for side in sides.values():
            side.close()
    return rates


def _advance(side: Iterator[None], steps: int, device: torch.device) -> float:
    _wait(device)
    begin_s = time.perf_counter()
    for _ in range(steps):
        next(side)
    _wait(device)
    return time.perf_counter() - begin_s


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    job = load_job(Path(__file__).parent / "gpt2.py")
    rates = compare(job, rounds=arguments.rounds, steps=arguments.steps, compiles=not arguments.eager, device=device)
    for hand, shoal in zip(rates["hand"], rates["shoal"], strict=True):
        print(f"by hand {hand:12,.0f} tokens/s    shoal {shoal:12,.0f} tokens/s    ratio {shoal / hand:.4f}")
    ratios = [shoal / hand for hand, shoal in zip(rates["hand"], rates["shoal"], strict=True)]
    print(json.dumps({"median_ratio": statistics.median(ratios), "rates": rates}))


if __name__ == "__main__":
    main()
