"""All-reduces over slow links, measured beside what the planner predicts from the measured link, and Gloo's own.

    python benchmarks/slow_links.py [--workers 4] [--rates 1gbit 100mbit] [--json FILE]

Hosts are network namespaces of this machine with shaped links (tests/support/hosts.py), so it needs root, and Linux. It
takes about 7 minutes. For each size: the seconds of every algorithm (the slowest worker's; the median of rounds in
which they take turns), its prediction, whether the planner's choice is the fastest measured or within 5% of it, and how
far ring and halving-doubling are from 2 (p-1)/p n / bandwidth.

The bars: ring and halving-doubling within 15% of that from 1 MB on, and the choice the fastest at all sizes but one. It
ends with 1 where one was missed.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script: tests/ is beside benchmarks/

SIZES = (4 << 10, 32 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
NOISE = 0.05
"""Two algorithms that differ by less are equally fast here: the same one differs by as much from run to run."""
OF_BOUND, BOUND_FROM = 1.15, 1 << 20
NOT_FASTEST = 1
"""At how many sizes the choice may not be the fastest."""
JAMS, JAM_BYTES = ("naive", "tree"), 128 << 10
"""Where several workers send that much to one, the queue of its link overflows, and the connections are slower for many
calls after: these are measured last."""
SLOW_BYTES = 16 << 20
"""There these take three times as long as others, minutes in all, and cannot be the fastest: they are left out."""
BITS_PER_S = {"1gbit": 1e9, "100mbit": 1e8}
TIMEOUT_S = 300.0
NAMES = ("naive", "tree", "ring", "halving-doubling", "recursive-doubling")


def main() -> int:
    """Measure, and print the tables; return 1 if a bar was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rates", nargs="+", default=["1gbit", "100mbit"], choices=BITS_PER_S)
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="bytes of the largest message")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(**json.loads(options.worker))
        return 0
    found = [measure(rate, options.workers, options.largest) for rate in options.rates]
    missed = [each for figures in found for each in show(figures)]
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    for each in missed:
        print(f"missed: {each}")
    return 1 if missed else 0


def measure(rate: str, workers: int, largest: int) -> dict[str, Any]:
    """Return what worker 0 of `workers` hosts says, joined by links of `rate`."""
    from shoal.comm.store import host_store
    from tests.support.hosts import hosts

    with hosts(count=workers, rate=rate) as cluster:
        store, port = host_store(host=cluster.machine, timeout_s=TIMEOUT_S)
        told = {"host": cluster.machine, "port": port, "workers": workers}
        sizes = [size for size in SIZES if size <= largest]
        processes = [
            cluster.start(
                index,
                [sys.executable, __file__, "--worker", json.dumps({**told, "index": index, "sizes": sizes})],
                stdout=subprocess.PIPE if index == 0 else subprocess.DEVNULL,
                text=True,
            )
            for index in range(workers)
        ]
        said = processes[0].communicate(timeout=2 * TIMEOUT_S)[0]
        del store
    return {"rate": rate, "workers": workers, **json.loads(said)}


def work(host: str, port: int, workers: int, index: int, sizes: list[int]) -> None:
    """Be a worker; worker 0 prints the figures."""
    import torch
    import torch.distributed as dist

    from shoal.comm.algorithms import ALL_REDUCE, Wire
    from shoal.comm.group import joined
    from shoal.comm.pairs import gather_hosts, measure_links
    from shoal.comm.rank import Rank
    from shoal.comm.store import connect

    torch.set_num_threads(1)
    rank = Rank(index, workers, 0, 1, host, port, store_is_hosted=True)
    with joined(rank, connect(rank, timeout_s=TIMEOUT_S), device=torch.device("cpu"), timeout_s=TIMEOUT_S):
        assert dist.group.WORLD is not None
        wire = Wire(dist.group.WORLD)
        functions = {name: (lambda tensor, f=ALL_REDUCE[name]: f(tensor, wire)) for name in NAMES}
        functions["gloo"] = dist.all_reduce
        links = [measure_links(wire, gather_hosts(wire, timeout_s=60)).between for _ in range(3)]
        seconds = {
            size: turns({name: call for name, call in functions.items() if size < JAM_BYTES or name not in JAMS}, size)
            for size in sizes
        }
        for size in sizes:  # the others are done: nothing comes after the jam
            if JAM_BYTES <= size < SLOW_BYTES:
                seconds[size] |= turns({name: functions[name] for name in JAMS}, size)
    if index == 0:
        names = ("latency_s", "bytes_per_s", "crowd_s")
        link = {name: statistics.median(getattr(link, name) for link in links if link) for name in names}
        print(json.dumps({"link": link, "seconds": seconds}))


def turns(functions: dict[str, Any], size: int) -> dict[str, float]:
    """Return the seconds of each function on a tensor of `size` bytes; all take turns."""
    import torch

    tensor = torch.zeros(size // 4)
    rough = {name: timed(function, tensor, calls=2) for name, function in functions.items()}
    rounds = 25 if size <= 1 << 20 else 9 if size <= 4 << 20 else 3
    calls = {name: max(1, min(30, round(0.1 / seconds))) for name, seconds in rough.items()}
    times = [
        {name: timed(function, tensor, calls[name]) for name, function in functions.items()} for _ in range(rounds)
    ]
    return {name: statistics.median(turn[name] for turn in times) for name in functions}


def timed(function: Any, tensor: Any, calls: int) -> float:
    """Return the seconds of one of `calls` calls, until the last worker has done them; the same on all workers."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    begin_s = time.perf_counter()
    for _ in range(calls):
        function(tensor)
    took = torch.tensor([(time.perf_counter() - begin_s) / calls], dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took.item())


def show(figures: dict[str, Any]) -> list[str]:
    """Print the table of one rate; return a sentence for each bar that was missed."""
    from shoal.planner.collectives.choice import choose_way
    from shoal.planner.collectives.crowd import crowded
    from shoal.spec.device import Link

    workers = figures["workers"]
    link = Link(source="measured", **figures["link"])
    print(
        f"\n{figures['rate']}, {workers} hosts: {link.bytes_per_s / 1e6:.1f} MB/s and {link.latency_s * 1e6:.0f} us "
        f"between two, {link.crowd_s * 1e6:.0f} us for each further message at the same time"
    )
    print(
        f"{'':>8}"
        + "".join(f"{name:>20}" for name in (*NAMES, "gloo"))
        + f"{'ring/bound':>12}{'h-d/bound':>11}  choice"
    )
    good, missed = 0, list[str]()
    for size, seconds in ((int(size), seconds) for size, seconds in figures["seconds"].items()):
        costs = {name: crowded(name, size, workers, link) for name in NAMES}
        choice = choose_way(workers=workers, per_host=1, inside=None, between=link, bucket=size).name
        best = min((name for name in NAMES if name in seconds), key=lambda name: seconds[name])
        is_good = seconds[choice] <= seconds[best] * (1 + NOISE)
        good += is_good
        bound_s = 2 * (workers - 1) / workers * size * 8 / BITS_PER_S[figures["rate"]]
        cells = [
            (f"{seconds[name] * 1e3:9.2f}" if name in seconds else " " * 9) + f" ({costs[name].seconds * 1e3:8.2f})"
            for name in NAMES
        ]
        for name in ("ring", "halving-doubling"):
            if size >= BOUND_FROM and seconds[name] > OF_BOUND * bound_s:
                missed.append(
                    f"{figures['rate']}, {size >> 10} KB: {name} takes {seconds[name] / bound_s:.2f} of the bound, not "
                    f"{OF_BOUND} or less"
                )
        verdict = "" if is_good else f", but {best} is the fastest by {seconds[choice] / seconds[best] - 1:.0%}"
        print(
            f"{size >> 10:>6}KB " + " ".join(cells) + f"{seconds['gloo'] * 1e3:20.2f}"
            f"{seconds['ring'] / bound_s:12.2f}{seconds['halving-doubling'] / bound_s:11.2f}  {choice}{verdict}"
        )
    sizes = len(figures["seconds"])
    print(
        f"ms measured (predicted). Bars: {OF_BOUND} of the bound from {BOUND_FROM >> 20} MB on; the planner's choice "
        f"the fastest, or within {NOISE:.0%} of it, at {sizes - NOT_FASTEST} of {sizes} sizes. It is so at {good}."
    )
    if good < sizes - NOT_FASTEST:
        missed.append(f"{figures['rate']}: the choice is the fastest at {good} of {sizes} sizes")
    return missed


if __name__ == "__main__":
    sys.exit(main())
