"""What shoal says to bad input, one line a case, and whether that is as it must be.

    python benchmarks/bad_input.py [--json FILE]

Every case is made in a temporary folder: images and files that are cut off, a wrong shape, what is no text, a full
disk, parts that are missing, manifests that lie, tars with hostile names, sources that change while they are read. Each
must be named with its row or its part, leave nothing half-written, and be counted where `--on-error skip` asks for
that; and the same command must work when the input is mended. It ends with 1 if anything is not so. The full disk is a
small tmpfs for root, and a limit on the size of files for others. 15 s on 2 cores.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script: tests/ is beside benchmarks/

from benchmarks.bad_input_asked import Row
from benchmarks.bad_input_packs import broken_packs
from benchmarks.bad_input_sources import changing, full_disk, hostile_tars, images, no_text, wrong_shape

CASES = (images, hostile_tars, wrong_shape, no_text, full_disk, changing, broken_packs)


def main() -> int:
    """Run all cases, print the table, and return whether something is not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()
    rows: list[Row] = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            rows += case(Path(folder).resolve())
    print("| bad input | asked | shoal says | left behind | as it must be |\n|---|---|---|---|---|")
    for row in rows:
        cells = [row.bad, f"`{row.asked}`", row.said.replace("|", "\\|"), row.left, row.wrong or "yes"]
        print(f"| {' | '.join(cells)} |")
    wrong = sum(bool(row.wrong) for row in rows)
    print(f"\n{len(rows)} answers, {wrong} not as they must be.")
    if options.json:
        options.json.write_text(json.dumps([row.__dict__ for row in rows], indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
