"""5,000 tasks of 20 ms on a Slurm of 4 nodes on this machine: `python benchmarks/tasks/bunching.py` (1 minute, root).

1. A real Slurm is started (tests/support/slurm.py): 4 nodes of 2 CPUs. A task sleeps: nodes share the machine's cores.
2. `shoal map` with 4 tasks at once: measuring, planning, queueing and collecting are all in the time.
3. Beside it, an array of 50 jobs with one task each, 4 at a time, by Slurm alone: its time is taken 100-fold.

The bars: at most 20 jobs, and at most 1.3 times the sum of the work over 4.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from shoal.core.units import format_seconds  # noqa: E402
from tests.support.slurm import slurm_cluster, why_not  # noqa: E402

TASK_S = 0.02
AT_ONCE = 4
MOST_JOBS = 20
MOST_TIMES = 1.3
TIMEOUT_S = 600
FUNCTION = f"import time\n\n\ndef nap(item):\n    time.sleep({TASK_S})\n    return item\n"


def main() -> int:
    """Measure, print, and return 1 where a bar was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=5000)
    parser.add_argument("--single", type=int, default=50, help="jobs of one task that are measured")
    arguments = parser.parse_args()
    if (why := why_not()) is not None:
        print(f"Not measured: {why}.")
        return 1
    with slurm_cluster(nodes=4, cpus=2) as cluster, tempfile.TemporaryDirectory() as folder:
        os.environ.update(cluster.env)
        single_s = one_job_per_task(Path(folder), arguments.single) / arguments.single
        seconds, jobs = bunched(Path(folder), arguments.tasks)
    ideal_s = arguments.tasks * TASK_S / AT_ONCE
    print(
        f"{arguments.tasks:,} tasks of {TASK_S * 1e3:g} ms, {AT_ONCE} at once: {format_seconds(ideal_s)} of work each."
    )
    print(f"{'':24}{'jobs':>8}{'time':>16}{'times the work':>18}")
    print(f"{'shoal map':24}{jobs:>8,}{format_seconds(seconds):>16}{seconds / ideal_s:>18.2f}")
    all_s = single_s * arguments.tasks
    print(f"{'one job per task':24}{arguments.tasks:>8,}{format_seconds(all_s):>16}{all_s / ideal_s:>18.2f}", end="")
    print(f"   (from {arguments.single})")
    is_good = jobs <= MOST_JOBS and seconds <= MOST_TIMES * ideal_s
    print(f"The bars, {MOST_JOBS} jobs and {MOST_TIMES} times the work, are {'met' if is_good else 'MISSED'}.")
    return 0 if is_good else 1


def one_job_per_task(folder: Path, count: int) -> float:
    """Return the seconds that an array of so many jobs of one task takes."""
    begun_s = time.monotonic()
    work = f"{sys.executable} -c 'import time; time.sleep({TASK_S})'"
    array = f"--array=0-{count - 1}%{AT_ONCE}"
    command = ["sbatch", "--parsable", array, "--output=/dev/null", f"--wrap={work}"]
    job = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stdout.strip()
    while subprocess.run(["squeue", "-h", "-j", job], capture_output=True, text=True, check=True).stdout:
        time.sleep(0.1)
        if time.monotonic() - begun_s > TIMEOUT_S:
            raise TimeoutError(f"{count} jobs took more than {TIMEOUT_S} s")
    return time.monotonic() - begun_s


def bunched(folder: Path, count: int) -> tuple[float, int]:
    """Return the seconds that `shoal map` takes, and the number of jobs."""
    (folder / "work.py").write_text(FUNCTION)
    items = ["work.py:nap", f"range:0:{count}", "--slurm", "--workers", str(AT_ONCE), "--out", "out"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    begun_s = time.monotonic()
    subprocess.run([sys.executable, "-m", "shoal", "map", *items], cwd=folder, env=env, check=True, timeout=TIMEOUT_S)
    seconds = time.monotonic() - begun_s
    assert len((folder / "out" / "results.jsonl").read_text().splitlines()) == count
    return seconds, sum(1 for _ in (folder / "out" / "jobs").glob("submission-*/output-*"))


if __name__ == "__main__":
    sys.exit(main())
