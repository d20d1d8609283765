"""The table of docs/models.md: families of models as they come, traced, planned, trained under three plans, verified.

    python benchmarks/families.py [--only NAME ...] [--steps 4] [--json]

Each cell compares a training with that of one process: "=" and the largest relative difference of any loss, gradient
norm or final parameter; or why the model cannot be divided so. Exit code 1 if anything is different, or if what is
refused is not what `Family.refused` says. About ten minutes on 2 cores. Families of timm are left out where it is not
installed (pip install 'shoal[timm]').
"""

import argparse
import dataclasses
import json
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.families_cases import FAMILIES, job
from benchmarks.families_timm import timm_folder
from benchmarks.parallel_cases import title_of
from shoal.core.errors import ShoalError
from shoal.core.run_folder import RunFolder
from shoal.core.units import format_bytes
from shoal.spec.cluster import Cluster, Node
from shoal.spec.plan import Batch, Mesh, Plan
from shoal.spec.record import Recorded
from shoal.training.planning import plan_job
from shoal.training.verify import compare_runs
from tests.support.parallel import record
from tests.support.ranks import RankPool, WorkerError

PLANS: dict[str, Plan] = {
    "ZeRO-3 over 2": Plan(mesh=Mesh(shard=2), zero=3),
    "tensor=2": Plan(mesh=Mesh(tensor=2)),
    "pipeline=2": Plan(mesh=Mesh(pipeline=2), batch=Batch(micro_batch=2)),
}
_CASE = "benchmarks.families_cases:job"
_DEVICE = "H100"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One family under one plan."""

    outcome: str
    """equal, different, refused (in a sentence, before any process starts), or failed."""
    is_expected: bool
    """Whether it is equal, or refused for the reason that the family names."""
    difference: float | None = None
    """The largest relative difference from one process."""
    reason: str = ""

    def __str__(self) -> str:
        if self.difference is None:
            return self.outcome if self.is_expected else self.outcome.upper()
        return f"{'=' if self.outcome == 'equal' else 'DIFFERENT'} {self.difference:.0e}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One family."""

    name: str
    kind: str
    model: str
    parameters: int
    peak_bytes: int | None
    """Predicted for a worker of the best plan."""
    best: str
    """The best plan for a node of eight GPUs, in words; or why there is none."""
    cells: dict[str, Cell]


class Table:
    """Plans, trains and compares, by a pool of processes that stay."""

    def __init__(self, pool: RankPool, folder: Path, steps: int) -> None:
        self._pool, self._folder, self._steps = pool, folder, steps

    def row(self, name: str, plans: Sequence[str]) -> Row:
        """Return what comes of the family `name` under `plans`."""
        family = FAMILIES[name]
        peak_bytes, best = _planned(name)
        one = self._run(name, Plan())
        return Row(
            name=name,
            kind=family.kind,
            model=family.model,
            parameters=sum(parameter.numel() for parameter in family.build().parameters()),
            peak_bytes=peak_bytes,
            best=best,
            cells={title: self.cell(name, PLANS[title], one) for title in plans},
        )

    def cell(self, name: str, plan: Plan, one: RunFolder) -> Cell:
        """Return what comes of the family `name` under `plan`, beside the run of one process."""
        refusal = next((words for axis, words in FAMILIES[name].refused.items() if getattr(plan.mesh, axis) > 1), "")
        try:
            other = self._run(name, plan)
            verdict = compare_runs(one, other)
            if not verdict.equal:
                verdict = compare_runs(one, other, nudged=self._run(name, Plan(), "nudged"))
        except ShoalError as error:
            is_expected = bool(refusal) and refusal in str(error)
            return Cell(outcome="refused", is_expected=is_expected, reason=str(error))
        except (WorkerError, TimeoutError) as error:
            return Cell(outcome="failed", is_expected=False, reason=str(error).strip().splitlines()[-1])
        largest = max(verdict.loss, verdict.gradient_norm, verdict.parameter)
        if verdict.equal:
            reason = f"it is listed as refused ({refusal}), and was not" if refusal else ""
            return Cell(outcome="equal", is_expected=not refusal, difference=largest, reason=reason)
        return Cell(outcome="different", is_expected=False, difference=largest, reason=str(verdict.first))

    def _run(self, name: str, plan: Plan, recorded: Recorded = "plain") -> RunFolder:
        settings: Any = {"name": name, "steps": self._steps}
        return record(self._pool, _CASE, plan, folder=self._folder, recorded=recorded, **settings)


def _planned(name: str) -> tuple[int | None, str]:
    """Return the peak and the words of the best plan of a family for eight GPUs, or why there is none."""
    node = Node(host="node", cores=1, memory_bytes=0, device=_DEVICE, devices=8)
    try:
        best = plan_job(job(name), Cluster(nodes=(node,))).plans[0]
    except ShoalError as error:
        return None, str(error)
    return int(best.peak.peak_bytes), title_of(best.plan)


def rows(names: Sequence[str], pool: RankPool, *, steps: int, plans: Sequence[str] = tuple(PLANS)) -> Iterator[Row]:
    """Yield the rows of the families `names`, each as soon as it is there."""
    with tempfile.TemporaryDirectory() as folder:
        table = Table(pool, Path(folder), steps)
        for name in names:
            yield table.row(name, plans)


def _line(row: Row) -> str:
    peak = "-" if row.peak_bytes is None else format_bytes(row.peak_bytes)
    best = row.best if row.peak_bytes is not None else "not traced"
    cells = " | ".join(str(cell) for cell in row.cells.values())
    return f"| {row.name} | {row.kind} | {row.parameters:,} | {peak} | {best} | {cells} |"


def _reasons(row: Row) -> Iterator[str]:
    if row.peak_bytes is None:
        yield f"{row.name}: {row.best}"
    yield from (f"{row.name}, {title}: {cell.reason}" for title, cell in row.cells.items() if cell.reason)


def _names(only: Sequence[str] | None) -> list[str]:
    unknown = [name for name in only or () if name not in FAMILIES]
    if unknown:
        raise SystemExit(f"no family {unknown[0]!r}. There are: {', '.join(FAMILIES)}.")
    folder = timm_folder()
    of_timm = [name for name in only or FAMILIES if FAMILIES[name].model.startswith("timm/")]
    if folder is not None and of_timm:  # else not: whoever is started from now on looks there, too
        sys.path.append(str(folder))
    missing = [] if folder is not None else of_timm
    if missing:
        print(f"Without timm there is no {', '.join(missing)}: pip install 'shoal[timm]'.", file=sys.stderr)
    return [name for name in only or FAMILIES if name not in missing]


def main(words: Sequence[str] | None = None, *, pool: RankPool) -> int:
    """Print the table, in Markdown, or as JSON; return 1 if anything is not as it is to be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"of {', '.join(FAMILIES)}")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", action="store_true", help="one object on stdout, and nothing else")
    arguments = parser.parse_args(words)
    warnings.simplefilter("ignore")  # what the libraries have to say about small configs
    names = _names(arguments.only)
    if not arguments.json:
        print(f"| family | kind | parameters | peak | best on 8 {_DEVICE} | {' | '.join(PLANS)} |")
        print(f"|---|---|---|---|---|{'---|' * len(PLANS)}")
    found = []
    for row in rows(names, pool, steps=arguments.steps):
        found.append(row)
        if not arguments.json:
            print(_line(row), flush=True)
            for reason in _reasons(row):
                print(reason, file=sys.stderr)
    if arguments.json:
        print(json.dumps({"steps": arguments.steps, "families": [dataclasses.asdict(row) for row in found]}))
    return 0 if all(cell.is_expected for row in found for cell in row.cells.values()) else 1


if __name__ == "__main__":
    workers = RankPool()
    try:
        sys.exit(main(pool=workers))
    finally:
        workers.close()
