"""What a training step costs through shoal, beside the same model in a bare PyTorch loop or bare DDP.

Both sides live in the same worker processes and take turns: some steps of one, some of the other, the one that begins
changing every round. The ratio is taken within each round, where the machine was in the same mood for both; what is
printed is the median of these ratios, with an interval that holds the true median 95 times in 100 (bootstrap).
"""

import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from shoal.core.errors import WorkerFailed
from shoal.launch.local import Watch, launch_local
from shoal.launch.starting import Spawning


def bench_step(file: Path, *, workers: int, rounds: int, steps: int) -> dict[str, Any]:
    """Return the figures of one comparison: the job in `file`, `rounds` times `steps` steps a side."""
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        options = [str(file.resolve()), folder, str(rounds), str(steps)]
        command = [sys.executable, "-m", "shoal.bench.step_worker", *options]
        lines: list[str] = []
        watch = Watch(on_line=lambda rank, line: lines.append(f"[worker {rank}] {line}"))
        ended = launch_local(Spawning(command), workers=workers, timeout_s=600, watch=watch)
        if any(worker.exit_code != 0 for worker in ended):
            raise WorkerFailed("the benchmark's workers failed.", details="\n".join(lines))
        times = json.loads((Path(folder) / "times.json").read_text())
    return {"job": file.name, "workers": workers, "peer": "bare DDP" if workers > 1 else "bare loop"} | compare(times)


def compare(times: dict[str, list[float]]) -> dict[str, Any]:
    """Return the step times of both sides and their ratio, from the seconds of each round."""
    ratios = [ours / bare for ours, bare in zip(times["shoal"], times["bare"], strict=True)]
    low, high = median_bounds(ratios)
    return {
        "bare_step_s": statistics.median(times["bare"]),
        "shoal_step_s": statistics.median(times["shoal"]),
        "ratio": statistics.median(ratios),
        "ratio_low": low,
        "ratio_high": high,
        "rounds": len(ratios),
    }


def median_bounds(values: list[float]) -> tuple[float, float]:
    """Return bounds that hold the true median of `values` 95 times in 100, by resampling them."""
    chance = random.Random(0)  # noqa: S311  not for secrets; seeded, so that a figure can be computed again
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(1000))
    return medians[25], medians[974]
