"""How long the verbs take that must be instant: whole processes, timed from outside."""

import statistics
import subprocess
import sys
import time
from pathlib import Path


def bench_start(run_folder: Path, *, repeats: int = 7) -> dict[str, float]:
    """Return the median seconds of `shoal --help`, of `shoal report` on a run, and of a wrong config's answer."""
    wrong = run_folder / "wrong-plan.toml"
    wrong.write_text("[batch]\nmicro_bach = 4\n")
    commands = {
        "shoal --help": ["--help"],
        "shoal report RUN": ["report", str(run_folder)],
        "shoal train with a wrong plan.toml": ["train", "job.py", "--plan", str(wrong)],
    }
    return {name: _median_s(arguments, repeats) for name, arguments in commands.items()}


def _median_s(arguments: list[str], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "shoal", *arguments], capture_output=True, timeout=60, check=False)
        times.append(time.perf_counter() - started)
    return statistics.median(times)
