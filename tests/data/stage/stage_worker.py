"""A worker of its own process, for tests of what a killed one leaves: stages as told, and says what it sees.

    python -m tests.data.stage.stage_worker PACK FOLDER DESK

Prints a line with its copy and the process that sweeps it, and one with whether it leads when asked by a line on its
input; ends with the input.
"""

import json
import sys
from pathlib import Path

from shoal.data.stage.agent import Staging
from shoal.data.stage.staging import stage


def main(pack: str, folder: str, desk: str) -> None:
    """Stage, and answer."""
    with stage(pack, to=folder, desk=Path(desk)) as staged:
        assert isinstance(staged, Staging)
        sweeper = staged._sweeper.pid if staged._sweeper is not None else None
        print(json.dumps({"path": str(staged.path), "sweeper": sweeper}), flush=True)
        for line in sys.stdin:
            if line.startswith("wait"):
                staged.wait(timeout_s=60)
            print(json.dumps(staged.report() | {"have": staged.have()}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
