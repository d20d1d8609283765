"""The other side of hundred.py: torchrun restarts all workers, and they go on from the last checkpoint."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np

from benchmarks.faults import hundred_model

PEER_WORKERS = (2, 3, 4, 6)
_SCRIPT = Path(__file__).with_name("hundred_torchrun.py")
_APART = 60


def restarts(count: int, *, folder: Path) -> list[float]:
    """Return the seconds of each recovery from about `count` kills."""
    each = -(-count // len(PEER_WORKERS))
    return [s for workers in PEER_WORKERS for s in killed(workers, each, folder=folder / str(workers))]


def killed(workers: int, kills: int, *, folder: Path) -> list[float]:
    """Run the script, kill one of its workers some times, and return what each of its recoveries took."""
    folder.mkdir(parents=True)
    samples = [hundred_model.sample(number) for number in range(hundred_model.NUM_SAMPLES)]
    arrays = {name: np.stack([sample[name] for sample in samples]) for name in ("x", "y")}
    np.savez(folder / "samples.npz", **arrays)
    draw = random.Random(workers)  # noqa: S311 - a schedule, no secret
    schedule = [[_APART * (n + 1) + draw.randrange(20), draw.randrange(workers)] for n in range(kills)]
    # What makes it quick and sure: without the variable, half of the restarts failed ("Connection refused").
    env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={workers}"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--monitor-interval=0.1"]
    command += ["--rdzv-conf=last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"]
    command += ["--max-restarts=1000", str(_SCRIPT), str(folder), str(_APART * (kills + 2)), json.dumps(schedule)]
    done = subprocess.run(command, check=False, env=env, capture_output=True, text=True, timeout=300)
    assert not done.returncode, done.stderr[-3000:]
    lines = [json.loads(line) for line in (folder / "done.jsonl").read_text().splitlines()]
    found = []
    for path in folder.glob("killed-*"):
        note = json.loads(path.read_text())
        again = min(line["time"] for line in lines if line["time"] > note["time"] and line["step"] >= note["step"])
        found.append(again - note["time"])
    return found
