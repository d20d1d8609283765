"""What each worker really holds under a plan, beside what the planner says: `python benchmarks/zero.py`.

Real worker processes on this machine train a GPT of 25M parameters with AdamW, 3 steps under each plan.
1. Model state by kind, counted from the tensors, at four moments of a step: between two blocks of a forward, when the
   last micro-batch begins (gradients of those before are there), when the optimizer steps, and at rest.
2. Peak memory: predicted as `shoal train` does it, beside the growth of the process.
3. How far the process grew while the model was built: no worker ever holds the whole of it, unless the plan says so.

`--only WORD` takes the plans with that word in their title.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from parallel_cases import title_of

from shoal.comm.rank import ALONE, read_rank
from shoal.comm.store import connect
from shoal.core.events import EventLog, EventReader
from shoal.core.run_folder import RunFolder
from shoal.core.toml import write_toml
from shoal.launch.local import Watch, launch_local
from shoal.launch.starting import Spawning
from shoal.planner.engine import scatters_each
from shoal.planner.memory.peak import peaks_of_stages
from shoal.planner.search.shares import cut_batch
from shoal.profile.layers import find_layers
from shoal.spec.job import Job
from shoal.spec.plan import Batch, Mesh, Plan
from shoal.spec.profile import Profile
from shoal.training.host import measured_host
from shoal.training.jobfile import load_job
from shoal.training.memory import state_bytes
from shoal.training.opening import open_run
from shoal.training.predict import predict_plan
from shoal.training.resolve import resolve_plan
from shoal.training.run import Run

BATCH, STEPS = 8, 3
KINDS = ("parameters", "gathered", "gradients", "optimizer")
MOMENTS = ("between blocks", "accumulating", "optimizer", "rest")
_TIMEOUT_S = 300.0


def gpt() -> Job:
    """The GPT of examples/gpt.py, wider: every matrix divides by 4."""
    source: Any = load_job(Path(__file__).parents[1] / "examples" / "gpt.py")
    return Job(
        model=lambda: source.model(layers=8, width=512, heads=8),
        inputs=source.inputs,
        loss=source.loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4),
        data=source.data,
        batch_size=BATCH,
        steps=STEPS,
    )


def plans() -> Iterator[Plan]:
    """Yield one worker, and every way to spread over 4."""
    single = Batch(micro_batch=1)
    yield Plan()
    yield Plan(mesh=Mesh(replicate=4))
    for zero in (1, 2, 3):
        yield Plan(mesh=Mesh(shard=4), zero=zero)
        yield Plan(mesh=Mesh(shard=4), zero=zero, batch=single)
    yield Plan(mesh=Mesh(shard=2, tensor=2), zero=3)
    yield Plan(mesh=Mesh(pipeline=2, shard=2), zero=3, batch=single)
    yield Plan(mesh=Mesh(pipeline=4), batch=single)
    yield Plan(mesh=Mesh(tensor=4))
    yield Plan(mesh=Mesh(replicate=2, shard=2), zero=3)


def title(plan: Plan) -> str:
    """Return a plan in a few words, with its micro-batches."""
    return title_of(plan) + (f", micro-batch {plan.batch.micro_batch}" if plan.batch.micro_batch else "")


@dataclass
class Held:
    """What one worker held, and what the planner says of it."""

    worker: int
    moments: dict[str, dict[str, int]]
    planned: dict[str, dict[str, int]]
    build_bytes: int
    peak_bytes: int
    predicted_bytes: int

    def ratio(self, moment: str, kind: str) -> float:
        """Return measured over planned."""
        return self.moments[moment][kind] / self.planned[moment][kind]


class Observer:
    """Counts a worker's model state at the moments of its last step."""

    def __init__(self, run: Run) -> None:
        self._run, self._optimizer = run, run._state.optimizer
        self.moments: dict[str, dict[str, int]] = {}
        self._optimizer.register_step_pre_hook(lambda *_: self.note("optimizer"))
        root = run.layout.roots[0]
        # Before the engine's own hooks, which gather. Called once a micro-batch: the last call stays.
        root.register_forward_pre_hook(lambda *_: self.note("accumulating"), prepend=True)
        inside = {id(module) for module in root.modules()}
        blocks = [b for found in find_layers(run.model)[1] for b in found.members() if id(b) in inside]
        blocks[-1].register_forward_pre_hook(lambda *_: self.note("between blocks"), prepend=True)

    def note(self, moment: str) -> None:
        """Count now."""
        self.moments[moment] = state_bytes(self._run.layout, self._optimizer)


def work(path: Path) -> None:
    """Be one worker of the run at `path`."""
    folder, rank = RunFolder(path), read_rank() or ALONE
    log = EventLog(folder.events_of(rank.index))
    store = connect(rank, timeout_s=_TIMEOUT_S) if rank.workers > 1 else None
    with open_run(gpt(), folder, rank=rank, store=store, log=log) as run:
        build_bytes = run.memory.read()
        observer = Observer(run)
        for batch in run.batches():
            run.advance(batch)
            observer.note("rest")
        found = {"moments": observer.moments, "build_bytes": build_bytes}
        (path / f"held-{rank.index}.json").write_text(json.dumps(found))
    log.close()


def measure(job: Job, plan: Plan, host: Any) -> list[Held]:
    """Train `job` under `plan` in processes of their own, and return what each worker held."""
    plan, profile = resolve_plan(job, plan)
    predicted = predict_plan(job, plan, profile, cluster=host, say=print)
    assert profile is not None
    assert predicted is not None
    with tempfile.TemporaryDirectory() as runs:
        folder = RunFolder.create(Path(runs), None, stem="run")
        write_toml(folder.plan_toml, plan)
        command = [sys.executable, __file__, "--worker", str(folder.path)]
        workers = launch_local(Spawning(command), workers=plan.workers, timeout_s=_TIMEOUT_S, watch=Watch())
        assert all(worker.exit_code == 0 for worker in workers), "a worker failed; its last words are above"
        found = [json.loads((folder.path / f"held-{index}.json").read_text()) for index in range(plan.workers)]
        ends = [EventReader(folder.events_of(index)).poll()[-1] for index in range(plan.workers)]
    planned = _planned(plan, profile)
    per_stage = plan.workers // plan.mesh.pipeline
    return [
        Held(
            worker=index,
            moments=held["moments"],
            planned=planned[index // per_stage],
            build_bytes=held["build_bytes"],
            peak_bytes=ends[index]["peak_bytes"],
            predicted_bytes=predicted.peak_bytes[index],
        )
        for index, held in enumerate(found)
    ]


def _planned(plan: Plan, profile: Profile) -> list[dict[str, dict[str, int]]]:
    """Return for each stage what the plan says of every moment; of gradients only where there are any."""
    found = []
    for stage in peaks_of_stages(profile, plan, samples=cut_batch(plan, BATCH)[0]):
        lasting = {kind: stage.parts[kind] for kind in ("parameters", "optimizer")}
        slices = lasting["parameters"]  # all is float32, and trained: gradients are as large
        whole = slices * (1 if scatters_each(plan) else plan.mesh.shard)
        by_moment = {moment: dict(lasting) for moment in MOMENTS}
        by_moment["accumulating"]["gradients"], by_moment["optimizer"]["gradients"] = whole, slices
        found.append(by_moment)
    return found


def _print_states(name: str, plan: Plan, held: list[Held]) -> float:
    """Print the worker that is furthest from the plan at each moment; return by how much the furthest of all is."""
    furthest = 0.0
    for moment in MOMENTS:
        if moment == "accumulating" and not plan.batch.micro_batch:
            continue
        kinds = list(held[0].planned[moment])
        off = lambda each: max(abs(each.ratio(moment, kind) - 1) for kind in kinds)  # noqa: B023, E731
        worst = max(held, key=off)
        furthest = max(furthest, off(worst))
        cells = []
        for kind in KINDS:
            now_bytes = worst.moments[moment][kind]
            said = f"{worst.ratio(moment, kind):5.2f}" if kind in kinds else "     "
            cells.append(f"{now_bytes / 1e6:8.1f} {said}")
        print(f"{name if moment == MOMENTS[0] else '':44} {moment:15}{' '.join(cells)}", flush=True)
    return furthest


def _print_peaks(rows: list[tuple[str, list[Held]]], whole_bytes: int) -> None:
    print(f"\n{'peak, MB':44} {'worker':>6} {'said':>8} {'measured':>8} {'error':>7} {'built':>7}")
    errors = []
    for name, held in rows:
        for each in held:
            error = each.predicted_bytes / each.peak_bytes - 1
            errors.append(abs(error))
            print(
                f"{name if each.worker == 0 else '':44} {each.worker:6} {each.predicted_bytes / 1e6:8.1f} "
                f"{each.peak_bytes / 1e6:8.1f} {error:+7.1%} {each.build_bytes / 1e6:7.1f}"
            )
    print(f"{len(errors)} workers: mean error {sum(errors) / len(errors):.1%}, worst {max(errors):.1%}.")
    print(f'"built": what the process had grown by when its model was there; the whole has {whole_bytes / 1e6:.1f} MB.')


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="plans with this word in their title")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        work(asked.worker)
        return
    job, host = gpt(), measured_host()
    print(f"{'model state, MB and ratio to the plan':44} {'moment':15}{' '.join(f'{kind:>14}' for kind in KINDS)}")
    rows, furthest = [], 0.0
    for plan in plans():
        if asked.only in title(plan):
            held = measure(job, plan, host)
            furthest = max(furthest, _print_states(title(plan), plan, held))
            rows.append((title(plan), held))
    print(f"Furthest from the plan: {furthest:.1%}.")
    _print_peaks(rows, sum(p.nbytes for p in job.model().parameters()))


if __name__ == "__main__":
    main()
