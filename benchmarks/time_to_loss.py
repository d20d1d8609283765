"""Time to the same loss over slow links: codecs beside uncompressed DDP and torch's own PowerSGD hook, in one run.

    python benchmarks/time_to_loss.py [--rate 100mbit --hosts 4 --steps 40]      (root, for the links)
    python benchmarks/time_to_loss.py --rate none --most 160 --codecs bf16 int8 int4 sign topk threshold powersgd

Hosts are network namespaces of this machine whose links are shaped. All train examples/gpt.py on the same samples, one
after the other. The target is 1.01 times the loss of uncompressed DDP after `--steps` steps (the mean of the last 5, as
for all); what is printed for each is the time and the steps until it was reached.

The bars, at 100 Mb/s: the best codec is 4 times as fast as uncompressed DDP, and no slower than torch's hook. It ends
with 1 where one was missed.
"""

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel

from shoal.comm.group import all_reduce_sum, joined
from shoal.comm.rank import Rank, read_rank
from shoal.comm.store import connect, host_store
from shoal.core.events import EventLog
from shoal.core.run_folder import RunFolder
from shoal.core.toml import write_toml
from shoal.data.steps import StepLoader
from shoal.spec.job import Job
from shoal.spec.plan import Mesh, Plan
from shoal.spec.sync import Sync
from shoal.training.host import measured_host
from shoal.training.jobfile import load_job
from shoal.training.opening import open_run
from shoal.training.predict import predict_plan
from shoal.training.resolve import resolve_plan
from tests.support.hosts import Hosts, hosts, why_not

JOB = Path(__file__).parents[1] / "examples" / "gpt.py"
CPU = torch.device("cpu")
TIMEOUT_S = 900.0
SMOOTHED = 5
BARRED_RATE, TIMES_DDP = "100mbit", 4.0
BARE = ("ddp", "torch-powersgd")
"""What runs without shoal."""
CODECS = ("powersgd", "int4", "sign", "topk", "threshold", "auto")
"""Those that are measured if nothing else is asked for: bf16 and int8 need no more steps, and send more."""


def bare_losses(job: Job, rank: Rank, hook: str) -> Iterator[float]:
    """Yield the loss of each step of bare DDP over Gloo, uncompressed or through torch's PowerSGD."""
    torch.manual_seed(job.seed)
    # All in one bucket for the hook: it starts collectives in callbacks, whose order over Gloo differs between workers.
    size = {"bucket_cap_mb": 1 << 10} if hook == "torch-powersgd" else {}
    model = DistributedDataParallel(job.model(), gradient_as_bucket_view=True, **size)
    if hook == "torch-powersgd":
        state = powersgd.PowerSGDState(process_group=None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        model.register_comm_hook(state, powersgd.powerSGD_hook)
    optimizer = job.optimizer(list(model.parameters()))
    schedule = job.schedule(optimizer) if job.schedule else None
    for part in _parts(job, rank):
        batch = part.batch
        loss = job.loss(model(job.inputs(batch)), batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm or float("inf"))
        optimizer.step()
        if schedule is not None:
            schedule.step()
        mean = loss.detach().clone() / rank.workers
        all_reduce_sum(mean).wait()
        yield float(mean)


def _parts(job: Job, rank: Rank) -> StepLoader:
    return StepLoader(
        job.data,
        batch_size=job.batch_size,
        shares=(1 / rank.workers,) * rank.workers,
        index=rank.index,
        first_step=1,
        last_step=job.total_steps,
        seed=job.seed,
        shuffle=job.shuffle,
        collate=job.collate,
        timeout_s=TIMEOUT_S,
        is_ahead=False,
    )


def worker(kind: str, steps: int, folder: Path) -> None:
    """Be one worker: train, and write (seconds since the first step, loss) of each step."""
    torch.set_num_threads(1)
    rank = read_rank()
    assert rank is not None
    job = load_job(JOB).with_steps(steps)
    store = connect(rank, timeout_s=TIMEOUT_S)
    seen: list[tuple[float, float]] = []
    if kind in BARE:
        with joined(rank, store, device=CPU, timeout_s=TIMEOUT_S):
            _note(bare_losses(job, rank, kind), seen)
    else:
        run_folder = RunFolder(folder)
        log = EventLog(run_folder.events_of(rank.index))
        with open_run(job, run_folder, rank=rank, store=store, log=log) as run:
            _note((run.step(batch) for batch in run.batches()), seen)
    if rank.index == 0:
        (folder / "seen.json").write_text(json.dumps(seen))


def _note(losses: Iterator[float], seen: list[tuple[float, float]]) -> None:
    begin_s = time.perf_counter()
    for loss in losses:
        seen.append((time.perf_counter() - begin_s, loss))


def measure(cluster: Hosts, kind: str, *, steps: int, folder: Path) -> list[tuple[float, float]]:
    """Train on all hosts and return what worker 0 has seen."""
    run_folder = RunFolder.create(folder, None, stem=kind)
    plan = Plan(mesh=Mesh(replicate=cluster.count), sync=Sync(codec="none" if kind in BARE else kind), timeout_s=300)
    write_toml(run_folder.plan_toml, _predicted(plan) if kind == "auto" else plan)
    store, port = host_store(host=cluster.machine, timeout_s=TIMEOUT_S)
    common = {"WORLD_SIZE": cluster.count, "LOCAL_WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_PORT": port}
    processes = []
    for index in range(cluster.count):
        own = {"RANK": index, "MASTER_ADDR": cluster.machine, "TORCHELASTIC_USE_AGENT_STORE": "True", **common}
        command = [sys.executable, "-W", "ignore", __file__, "--worker", kind, str(steps), str(run_folder.path)]
        env = os.environ | {name: str(value) for name, value in own.items()} | {"OMP_NUM_THREADS": "1"}
        processes.append(cluster.start(index, command, env=env))
    for process in processes:
        if process.wait(TIMEOUT_S):
            raise SystemExit(f"{kind}: a worker failed")
    del store
    seen: list[tuple[float, float]] = json.loads((run_folder.path / "seen.json").read_text())
    return seen


def _predicted(plan: Plan) -> Plan:
    """Return `plan` with what it is predicted to compute on this machine, on which all the hosts are: `auto` asks."""
    job = load_job(JOB)
    resolved, profile = resolve_plan(job, plan)
    predicted = predict_plan(job, resolved, profile, cluster=measured_host(), say=print)
    return dataclasses.replace(resolved, predicted=predicted)


def smoothed(seen: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the mean loss of the last steps, with the time, from the first step on that has so many."""
    return [
        (seen[end - 1][0], statistics.fmean(loss for _, loss in seen[end - SMOOTHED : end]))
        for end in range(SMOOTHED, len(seen) + 1)
    ]


def reached(seen: list[tuple[float, float]], target: float) -> tuple[float, int] | None:
    """Return the seconds and steps until the smoothed loss was `target` or less."""
    found = ((at_s, step) for step, (at_s, loss) in enumerate(smoothed(seen), start=SMOOTHED) if loss <= target)
    return next(found, None)


def main() -> int:
    """Measure, and print a table; return 1 if a bar was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--most", type=int, help="steps that each may take (default: twice --steps)")
    parser.add_argument("--codecs", nargs="*", default=list(CODECS))
    arguments = parser.parse_args()
    if reason := why_not():
        raise SystemExit(f"This needs shaped links: {reason}.")
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, hosts(count=arguments.hosts, rate=arguments.rate) as cluster:
        plain = measure(cluster, "ddp", steps=arguments.steps, folder=Path(folder))
        target = 1.01 * smoothed(plain)[-1][1]
        print(f"{arguments.hosts} hosts, {arguments.rate}; target loss {target:.4f}", flush=True)
        print(f"{'':16} {'s/step':>7} {'steps':>6} {'seconds':>8} {'faster':>7}  last loss", flush=True)
        for kind in (*BARE, *arguments.codecs):
            steps = arguments.most or 2 * arguments.steps
            seen = plain if kind == "ddp" else measure(cluster, kind, steps=steps, folder=Path(folder))
            figures[kind] = _row(kind, seen, target, plain)
    print(json.dumps(figures))
    missed = missed_bars(figures) if arguments.rate == BARRED_RATE else []
    if arguments.rate == BARRED_RATE:
        print(f"Bars: the best codec {TIMES_DDP:g} times as fast as ddp, and no slower than torch-powersgd.")
    for each in missed:
        print(f"missed: {each}")
    return 1 if missed else 0


def missed_bars(figures: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each bar that the best codec misses; `figures` are those of each row, by its name."""
    ours = {name: row["faster"] for name, row in figures.items() if name not in BARE and row["faster"] is not None}
    if not ours:
        return ["no codec has reached the loss"]
    best = max(ours, key=lambda name: ours[name])
    bars = {"ddp": TIMES_DDP, "torch-powersgd": figures["torch-powersgd"]["faster"] or 0.0}
    return [
        f"{best} is {ours[best]:.2f} times as fast as ddp, and the bar by {name} is {bar:.2f}"
        for name, bar in bars.items()
        if ours[best] < bar
    ]


def _row(kind: str, seen: list[tuple[float, float]], target: float, plain: list[tuple[float, float]]) -> dict[str, Any]:
    found, base = reached(seen, target), reached(plain, target)
    assert base is not None
    seconds, steps = found or (float("inf"), 0)
    step_s = statistics.median(b[0] - a[0] for a, b in itertools.pairwise(seen))
    last = smoothed(seen)[-1][1]
    print(f"{kind:16} {step_s:7.2f} {steps:6} {seconds:8.1f} {base[0] / seconds:7.2f}  {last:.4f}", flush=True)
    took = {"seconds": seconds, "faster": base[0] / seconds} if found else {"seconds": None, "faster": None}
    return {"step_s": step_s, "steps": steps, **took, "last_loss": last}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
    else:
        sys.exit(main())
