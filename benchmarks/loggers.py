"""What a process that follows a run for a logger takes of a processor: wandb offline, MLflow with a server here.

    python benchmarks/loggers.py

Nothing of it is in a worker. A synthetic run writes 50 steps a second; counted is the processor time of the process and
of what its library has started: that of the first 15 s, which is mostly imports, and the share of a core after that.
Minutes of a busy machine do not change it. 2 minutes.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.mlflow_server import mlflow_server
from tests.support.runs import make_run, step_fields

START_S, END_S, STEP_S = 15.0, 45.0, 0.02


def session_cpu_s(session: int) -> float:
    """Return the processor time of all processes of a session."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[3]) == session:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def measure(name: str, where: Path) -> tuple[float, float]:
    """Return the processor seconds of the start, and the share of a core after it."""
    run = make_run(where, name=name, steps=1, workers=1, status=None)
    command = [sys.executable, "-W", "ignore", "-m", "shoal", "log", str(run.path), "--to", name, "--follow"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    began, step, at_start = time.monotonic(), 1, None
    with run.events_of(0).open("a") as events:
        while (now_s := time.monotonic() - began) < END_S:
            step += 1
            event = {"kind": "step", "time": time.time(), **step_fields(step, 0), "batch_weight": 40}
            events.write(json.dumps(event) + "\n")
            events.flush()
            if at_start is None and now_s > START_S:
                at_start = session_cpu_s(process.pid)
            time.sleep(STEP_S)
    assert at_start is not None
    share = (session_cpu_s(process.pid) - at_start) / (END_S - START_S)
    assert process.stdin is not None
    process.stdin.close()
    process.wait(timeout=60)
    return at_start, share


def main() -> None:
    """Print both."""
    with tempfile.TemporaryDirectory() as folder, mlflow_server(Path(folder)) as address:
        os.environ |= {"MLFLOW_TRACKING_URI": address, "WANDB_MODE": "offline"}
        for name in ("wandb", "mlflow"):
            start_s, share = measure(name, Path(folder) / "runs")
            print(f"{name:8} {start_s:.2f} s to start, then {share:.2%} of a core")


if __name__ == "__main__":
    main()
