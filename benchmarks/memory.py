"""Predicted peaks, traced now on this machine, beside those measured on a GPU: `python benchmarks/memory.py`.

The measurements are in benchmarks/gpu/memory_h200.json, as benchmarks/gpu/memory.py wrote them.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "gpu"))

from memory_cases import CASES, predict  # noqa: E402  the folder above is only now on the path


def compare(measured: dict[str, Any]) -> list[tuple[str, int, int, float, bool]]:
    """Return case, predicted and measured bytes, error, and whether it trained within what was promised."""
    rows = {row["case"]: row for row in measured["rows"]}
    found = []
    for case in CASES:
        if case.name in rows:
            row = rows[case.name]
            predicted_bytes = predict(case)[0].peak_bytes
            error = predicted_bytes / row["peak_bytes"] - 1
            found.append((case.name, predicted_bytes, row["peak_bytes"], error, row["trains_within_needed"]))
            print(
                f"{case.name:52} {predicted_bytes / 1e9:8.2f} {row['peak_bytes'] / 1e9:8.2f} {error:+8.1%}", flush=True
            )
    return found


def main() -> None:
    """Print the table, the mean and the worst error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", type=Path, default=HERE / "gpu" / "memory_h200.json")
    measured = json.loads(parser.parse_args().measured.read_text())
    print(f"Peak memory: traced here, measured on {measured['device']}, torch {measured['torch']}, {measured['date']}.")
    print(f"{'case':52} {'GB said':>8} {'measured':>8} {'error':>8}")
    rows = compare(measured)
    errors = [abs(row[3]) for row in rows]
    wrong = [row[0] for row in rows if not row[4]]
    print(f"{len(rows)} cases: mean error {sum(errors) / len(errors):.1%}, worst {max(errors):.1%}.")
    print(
        f"Trained within what `shoal fit` says is needed: {len(rows) - len(wrong)} of {len(rows)}. {'; '.join(wrong)}"
    )


if __name__ == "__main__":
    main()
