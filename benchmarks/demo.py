"""The demo's step time and memory, predicted after `shoal probe`, beside what it measures: `python benchmarks/demo.py`.

Probes this machine into a cluster.toml of its own, trains examples/gpt.py with two workers, and compares.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

GPT = Path(__file__).parents[1] / "examples" / "gpt.py"


def main() -> None:
    """Probe, train, and print predicted beside measured."""
    with tempfile.TemporaryDirectory() as folder:
        shoal = [sys.executable, "-m", "shoal"]
        subprocess.run([*shoal, "probe", "--json"], cwd=folder, check=True, timeout=300, stdout=subprocess.DEVNULL)
        command = [*shoal, "train", str(GPT), "--workers", "2", "--json"]
        done = subprocess.run(command, cwd=folder, check=True, timeout=900, stdout=subprocess.PIPE, text=True)
    result = json.loads(done.stdout)
    predicted = result["predicted"]
    for name, said, seen in (
        ("step", predicted["step_s"] * 1e3, result["step_s"] * 1e3),
        ("peak memory", max(predicted["peak_bytes"]) / 1e6, max(result["peak_bytes"]) / 1e6),
    ):
        unit = "ms" if name == "step" else "MB"
        error = f"{said / seen - 1:+.1%}"
        print(f"examples/gpt.py, 2 workers, {name}: {said:.0f} {unit} predicted, {seen:.0f} measured, {error}")


if __name__ == "__main__":
    main()
