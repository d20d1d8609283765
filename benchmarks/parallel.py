"""The table of docs/parallel.md: every model under every mesh, 20 steps, compared with one process.

    python benchmarks/parallel.py [MODEL ...] [--steps 20] [--workers 8]

Each figure is the largest relative difference of a loss from that of one process over all steps; "=" stands in front of
it where gradient norms and final parameters agree as well. Half an hour on 2 cores.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.parallel_cases import JOBS, layers_for, plans, runs_on
from shoal.core.errors import ShoalError
from shoal.core.run_folder import RunFolder
from shoal.spec.plan import Plan
from shoal.training.verify import compare_runs
from tests.support.parallel import record
from tests.support.ranks import RankPool, WorkerError


class Table:
    """Trains, compares, and keeps what one process has done."""

    def __init__(self, folder: Path, steps: int) -> None:
        self._pool, self._folder, self._steps = RankPool(), folder, steps
        self._ones: dict[tuple[str, int], RunFolder] = {}
        self.failed: list[str] = []

    def cell(self, model: str, title: str, plan: Plan) -> str:
        """Return how far `model` under `plan` is from one process."""
        if not runs_on(plan, model):
            return "-"
        try:
            layers = layers_for(plan)
            if (model, layers) not in self._ones:
                self._ones[model, layers] = self._run(model, Plan(), layers)
            verdict = compare_runs(self._ones[model, layers], self._run(model, plan, layers))
        except (ShoalError, WorkerError, TimeoutError) as error:
            self.failed.append(f"{model}, {title}: {str(error).strip().splitlines()[-1]}")
            return "failed"
        if not verdict.equal:
            self.failed.append(f"{model}, {title}: {verdict.first}")
        return f"{'=' if verdict.equal else 'DIFFERENT'} {verdict.loss:.0e}"

    def close(self) -> None:
        """End the workers."""
        self._pool.close()

    def _run(self, model: str, plan: Plan, layers: int) -> RunFolder:
        case = f"benchmarks.parallel_cases:{model}"
        return record(self._pool, case, plan, folder=self._folder, steps=self._steps, layers=layers)


def main() -> int:
    """Print the table, in Markdown; return 1 if anything is different."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(JOBS), metavar="MODEL")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--workers", type=int, default=8, help="meshes of at most so many workers")
    arguments = parser.parse_args()
    print(f"| workers | mesh | {' | '.join(arguments.models)} |")
    print(f"|---|---|{'---|' * len(arguments.models)}")
    with tempfile.TemporaryDirectory() as folder:
        table = Table(Path(folder), arguments.steps)
        try:
            for title, plan in plans():
                if plan.workers <= arguments.workers:
                    cells = [table.cell(model, title, plan) for model in arguments.models]
                    print(f"| {plan.workers} | {title} | {' | '.join(cells)} |", flush=True)
        finally:
            table.close()
    for line in table.failed:
        print(line, file=sys.stderr)
    return 1 if table.failed else 0


if __name__ == "__main__":
    sys.exit(main())
