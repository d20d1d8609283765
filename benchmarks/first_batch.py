"""How long the first batch of a pack takes, whatever its size, and what that reads and holds.

    python benchmarks/first_batch.py [--rounds 3] [--json FILE]

Packs of 10^6 to 10^9 rows of 64 bytes, and one of 10^9 windows of 1,025 tokens (2 TB), also as whole documents in rows
of as many, in parts of 256 MB: valid packs, whose parts are sparse files (tests/data/huge.py). In a process of its own,
after the imports: the seconds from the call of shoal.Loader to the first batch, shuffled over the whole pack, when none
of its rows is in memory, and once more when these are; the memory of its own that the process has taken since (without
what it maps of the files); and what it read beside the maps, which is the manifest. A disk has no part in it: what a
sparse file lacks, the kernel makes up.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script: tests/ is beside benchmarks/

ROW_BYTES, PART_BYTES, WINDOW = 64, 256_000_000, 1025
BATCH = 256
PART_ROWS = PART_BYTES // ROW_BYTES
CASES = {
    **{"10^6 rows": 10**6, "10^7 rows": 10**7, "10^8 rows": 10**8, "10^9 rows": 10**9},
    **{"10^9 windows": 10**9, "10^9 packed": 10**9},
}
TIMEOUT_S = 120.0

MEASURED = """
import json, sys, time
from pathlib import Path
import torch
import shoal
from shoal.data.loader import Loader

def figure(file, name):
    return next(int(line.split()[1]) for line in open(file) if line.startswith(name + ":"))

def held():
    return figure("/proc/self/status", "RssAnon") * 1024

path, options = sys.argv[1], json.loads(sys.argv[2])
torch.ones(1).sum()
held_before, read_before, begin_s = held(), figure("/proc/self/io", "rchar"), time.perf_counter()
loader = Loader(path, seed=1, **options)
batches = iter(loader)
first = next(batches)
seconds = time.perf_counter() - begin_s
found = {"seconds": seconds, "held_bytes": held() - held_before}
found["read_bytes"] = figure("/proc/self/io", "rchar") - read_before
found["num_samples"] = len(loader) * options["batch_size"]
print(json.dumps(found), flush=True)
batches.close()
"""


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES, metavar="CASE")
    options = parser.parse_args()
    found = {name: measure(name, options.rounds) for name in options.cases}
    print(f"{'':14}{'parts':>8}{'first batch':>14}{'again':>10}{'memory taken':>15}{'read':>10}")
    for name, case in found.items():
        taken, read = f"{case['held_bytes'] / 1e6:.1f} MB", f"{case['read_bytes'] / 1e6:.2f} MB"
        seconds = f"{case['seconds'] * 1e3:11.0f} ms{case['again_s'] * 1e3:7.0f} ms"
        print(f"{name:14}{case['parts']:8,}{seconds}{taken:>15}{read:>10}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Return the medians of a case."""
    answers = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "huge.pack")
            options = make(name, path)
            parts = len(list((path / "parts").iterdir()))
            answers.append({**_once(path, options), "again_s": _once(path, options)["seconds"]})
    medians = {key: statistics.median(answer[key] for answer in answers) for key in answers[0]}
    print(f"{name}: {[round(answer['seconds'], 3) for answer in answers]} s", file=sys.stderr)
    return {"parts": parts, **medians}


def make(name: str, path: Path) -> dict[str, int]:
    """Write the pack of a case; return how it is loaded."""
    from tests.data.huge import huge_rows, huge_tokens

    if name.endswith(("windows", "packed")):
        part_tokens = PART_BYTES // 2
        huge_tokens(path, num_parts=-(-CASES[name] * (WINDOW - 1) // part_tokens), part_tokens=part_tokens)
        return {"batch_size": BATCH, "window": WINDOW, "pack_documents": name.endswith("packed")}
    huge_rows(path, num_rows=CASES[name], part_rows=min(CASES[name], PART_ROWS), width=ROW_BYTES)
    return {"batch_size": BATCH}


def _once(path: Path, options: dict[str, int]) -> dict[str, float]:
    command = [sys.executable, "-c", MEASURED, str(path), json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    main()
