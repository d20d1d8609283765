"""A node on a host of its own: stages together with the others, and says when it has what.

    python -m tests.data.stage.hosts_node '{"pack": URL, "home": DIR, "host": STORE, "port": PORT, "index": I}'

Prints "joined", then a line for each part, then its report; ends with its input.
"""

import json
import sys
import threading
from pathlib import Path

from shoal.comm.rank import Rank
from shoal.comm.store import connect
from shoal.data.stage.agent import Staging
from shoal.data.stage.staging import stage

TIMEOUT_S = 120.0


def main(pack: str, home: str, host: str, port: int, index: int) -> None:
    """Stage, and say so."""
    store = connect(Rank(index, 99, 0, 1, host, port, store_is_hosted=True), timeout_s=TIMEOUT_S)
    with stage(pack, to=home, desk=Path(home, "desk"), store=store) as staged:
        assert isinstance(staged, Staging)
        while staged._peers is None or staged._peers.number < 0:
            threading.Event().wait(0.01)
        print("joined", flush=True)
        for part in range(len(staged.manifest.parts)):
            staged.path_of(part)
            print(json.dumps({"part": part}), flush=True)
        found = {**staged.report(), "listens": staged._server.address if staged._server else None}
        print(json.dumps(found), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
