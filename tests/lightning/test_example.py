"""examples/lightning_digits.py, started as people start it."""

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning_digits.py"


def test_the_script_starts_its_second_worker_itself_and_learns(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(EXAMPLE), "--workers", "2", "--zero", "3", "--epochs", "2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"2 workers: loss ([\d.]+), accuracy ([\d.]+)", done.stdout)
    assert found is not None, done.stdout
    assert float(found[2]) > 0.85
