"""ZeRO by torch's engine (FSDP2, as shoal runs it) beside ZeRO by DeepSpeed: the time of a step, and memory.

1. Time: both live in the same worker processes and take turns, the one that begins changing every round. The ratio is
   taken within each round, where the machine was in the same mood for both; printed is its median, with an interval
   that holds the true median 95 times in 100.
2. Memory: each alone, in processes of its own, which have loaded the same libraries. Counted is the most that a worker
   held during steps, beside what it held before it built the model.
"""

import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shoal.bench.step import median_bounds
from shoal.core.errors import WorkerFailed
from shoal.launch.local import Watch, launch_local
from shoal.launch.starting import Spawning

SIDES = ("torch", "deepspeed")
_MEMORY_STEPS = 3


def bench_engines(
    file: Path, *, workers: int, zero: int, rounds: int, steps: int, say: Callable[[str], object]
) -> dict[str, Any]:
    """Return the figures of one stage of ZeRO: the job in `file`, `rounds` times `steps` steps a side."""
    say(f"ZeRO-{zero}, {workers} workers: steps of both, in turns")
    times = _run(file, SIDES, workers=workers, zero=zero, rounds=rounds, steps=steps)[0]["times"]
    peaks = {}
    for side in SIDES:
        say(f"ZeRO-{zero}, {workers} workers: memory of {side} alone")
        alone = _run(file, [side], workers=workers, zero=zero, rounds=1, steps=_MEMORY_STEPS)
        peaks[side] = [worker["peak_bytes"] for worker in alone]
    return {"job": file.name, "workers": workers, "zero": zero} | compare(times, peaks)


def compare(times: dict[str, list[float]], peaks: dict[str, list[int]]) -> dict[str, Any]:
    """Return the figures of both sides and shoal's over DeepSpeed's, from the seconds of each round and each peak."""
    ratios = [ours / theirs for ours, theirs in zip(times["torch"], times["deepspeed"], strict=True)]
    low, high = median_bounds(ratios)
    return {
        **{f"{side}_step_s": statistics.median(times[side]) for side in SIDES},
        "step_ratio": statistics.median(ratios),
        "step_ratio_low": low,
        "step_ratio_high": high,
        "rounds": len(ratios),
        **{f"{side}_peak_bytes": peaks[side] for side in SIDES},
        "peak_ratio": max(peaks["torch"]) / max(1, *peaks["deepspeed"]),
    }


def _run(file: Path, sides: Sequence[str], *, workers: int, zero: int, rounds: int, steps: int) -> list[dict[str, Any]]:
    """Run the workers, and return what each of them has written."""
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        asked: dict[str, Any] = {"file": str(file.resolve()), "folder": folder, "sides": list(sides)}
        asked |= {"zero": zero, "rounds": rounds, "steps": steps}
        command = [sys.executable, "-m", "shoal.bench.engines_worker", json.dumps(asked)]
        lines: list[str] = []
        watch = Watch(on_line=lambda rank, line: lines.append(f"[worker {rank}] {line}"))
        ended = launch_local(Spawning(command), workers=workers, timeout_s=600, watch=watch)
        if any(worker.exit_code != 0 for worker in ended):
            raise WorkerFailed("the benchmark's workers failed.", details="\n".join(lines))
        return [json.loads((Path(folder) / f"worker-{number}.json").read_text()) for number in range(workers)]
