"""What it costs to wake another worker of a host: semaphores in shared memory beside sockets.

python benchmarks/waking.py
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.shared_memory import alternate, in_new_workers


def waking_worker(rank: Any, *, rounds: int) -> dict[str, float]:
    """Return the seconds of telling each other "here" by semaphores, spinning or not, and by a socket."""
    from shoal.comm.shm.group import join
    from shoal.comm.store import connect

    with join(connect(rank, timeout_s=60), index=rank.index, count=2, timeout_s=60) as group:
        bells, (link,) = group._turns._slots.ready, group._meeting._links.values()
        link.settimeout(60)

        def sleeping() -> None:
            spin_s, bells._spin_s = bells._spin_s, 0.0
            group.barrier()
            bells._spin_s = spin_s

        def by_socket() -> None:
            link.send(b"x")
            link.recv(1)

        sides = {"semaphore, spinning shortly": group.barrier, "semaphore, sleeping": sleeping, "socket": by_socket}
        return alternate(sides, rounds=rounds, calls=200, wait=group.barrier)


def main() -> None:
    """Print the microseconds of a barrier of two by each way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21, metavar="N", help="of which the median counts (default: 21)")
    for name, seconds in in_new_workers(waking_worker, rounds=parser.parse_args().rounds)[0].items():
        print(f"{name}: {seconds * 1e6:.1f} us")


if __name__ == "__main__":
    main()
