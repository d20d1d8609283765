"""What each exchange of gradients puts on the wire, beside the bytes that the planner says a worker sends.

    python benchmarks/wire_bytes.py [--workers 4] [--rate 1gbit]

Hosts are network namespaces of this machine with shaped links (tests/support/hosts.py), so it needs root, and Linux. It
takes 2 minutes, and exits with 1 where what a host has sent is further than 5% from what the planner says.

1. Each host exchanges gradients with the shapes of a block and the embeddings of examples/gpt.py, 8 MB, partly the same
   in every step. After 20 exchanges of a kind come 5 that are counted, between two barriers.
2. Bytes and packets that have left are those of the queue that shapes the link (`tc -s qdisc`). (The device's tx_bytes
   has the headers of up to 64 KB once: it counts before the kernel cuts them into packets.) What a barrier sends is
   taken off.
3. Of each packet 66 bytes are headers: Ethernet's 14, IP's 20, TCP's 32 with its timestamps. A packet that only
   acknowledges is nothing else. What TCP has sent again (RetransSegs, 1,448 bytes each) counts once.

The planner is told what it cannot know: the shapes of the gradients (powersgd), and which fraction of the elements
exceeded the threshold (threshold), worker by worker.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script: tests/ is beside benchmarks/

from shoal.comm.algorithms import ALL_REDUCE, Wire
from shoal.comm.group import joined
from shoal.comm.pairs import gather_hosts, measure_links
from shoal.comm.rank import Rank
from shoal.comm.store import connect, host_store
from shoal.compress.bucket import Bucket
from shoal.compress.codecs import CODECS, codec_named
from shoal.compress.collectives import GroupCollectives
from shoal.compress.feedback import ErrorFeedback
from shoal.compress.threshold import Threshold
from shoal.planner.collectives import codecs, compression
from shoal.planner.collectives.allreduce import ALLREDUCE
from tests.support.hosts import hosts

WIDTH = 384
SHAPES = (
    *((256, WIDTH), (128, WIDTH), (WIDTH,), (WIDTH,), (3 * WIDTH, WIDTH), (WIDTH, WIDTH)),
    *((WIDTH,), (WIDTH,), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (WIDTH,), (WIDTH,), (256, WIDTH)),
)
NUMEL = sum(math.prod(shape) for shape in SHAPES)
ALGORITHMS = ("ring", "halving-doubling")
EARLIER, COUNTED = 20, 5
HEADER_BYTES, SEGMENT_BYTES = 66, 1448
TOLERANCE = 0.05
TIMEOUT_S = 300.0
Figures = dict[str, float]


def main() -> int:
    """Measure, and print the table; return 1 if any exchange is not what the planner says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(**json.loads(options.worker))
        return 0
    print(f"{4 * NUMEL / 1e6:.2f} MB, {options.workers} hosts, {options.rate}: bytes a worker sends in an exchange")
    return show(**measure(options.rate, options.workers))


def measure(rate: str, workers: int) -> dict[str, Any]:
    """Return what worker 0 of `workers` hosts says, joined by links of `rate`."""
    with hosts(count=workers, rate=rate) as cluster:
        store, port = host_store(host=cluster.machine, timeout_s=TIMEOUT_S)
        told = {"host": cluster.machine, "port": port, "workers": workers}
        for index in range(workers):
            command = [sys.executable, __file__, "--worker", json.dumps({**told, "index": index})]
            cluster.start(index, command, stdout=subprocess.DEVNULL if index else subprocess.PIPE, text=True)
        found: dict[str, Any] = json.loads(cluster.processes[0].communicate(timeout=2 * TIMEOUT_S)[0])
        del store
    return found


def work(host: str, port: int, workers: int, index: int) -> None:
    """Be a worker; worker 0 prints the figures of all."""
    torch.set_num_threads(1)
    rank = Rank(index, workers, 0, 1, host, port, store_is_hosted=True)
    with joined(rank, connect(rank, timeout_s=TIMEOUT_S), device=torch.device("cpu"), timeout_s=TIMEOUT_S):
        assert dist.group.WORLD is not None
        wire = Wire(dist.group.WORLD)
        link = measure_links(wire, gather_hosts(wire, timeout_s=60)).between
        assert link is not None
        gradient_of = gradients(index)
        barrier = counted(lambda _: 0, gradient_of)
        exchanges = {name: counted(exchange_of(name, wire), gradient_of) for name in (*ALGORITHMS, *CODECS)}
    if index == 0:
        said = {"link_bytes_per_s": link.bytes_per_s, "latency_s": link.latency_s}
        print(json.dumps({"link": said, "barrier": barrier, "exchanges": exchanges}))


def gradients(worker: int) -> Callable[[int], Tensor]:
    """Return a function that makes the gradient of a step: of low rank, and noise, with rows that differ in size."""
    fixed = torch.Generator().manual_seed(worker)
    low, rows = [], []
    for shape in SHAPES:
        columns = math.prod(shape[1:])
        low.append(torch.randn(shape[0], 8, generator=fixed) @ torch.randn(8, columns, generator=fixed) / 8**0.5)
        rows.append(torch.randn(shape[0], 1, generator=fixed).exp().expand(shape[0], columns))
    same, scale = (torch.cat([part.flatten() for part in parts]) for parts in (low, rows))

    def gradient_of(step: int) -> Tensor:
        moving = torch.Generator().manual_seed(10_000 + 100 * step + worker)
        return (0.3 * same + torch.randn(NUMEL, generator=moving)).mul_(scale)

    return gradient_of


def exchange_of(name: str, wire: Wire) -> Callable[[Tensor], int]:
    """Return what sums a gradient by algorithm or codec `name`; it returns how many elements threshold found, or 0."""
    assert dist.group.WORLD is not None
    feedback = None if name in ALGORITHMS else ErrorFeedback(codec_named(name))
    workers, bucket = GroupCollectives(dist.group.WORLD), Bucket(tuple(map(str, range(len(SHAPES)))), SHAPES)

    def exchange(gradient: Tensor) -> int:
        if feedback is None:
            ALL_REDUCE[name](gradient, wire)
            return 0
        feedback.sum(bucket, gradient, workers)
        return feedback.codec.kept if isinstance(feedback.codec, Threshold) else 0

    return exchange


def counted(exchange: Callable[[Tensor], int], gradient_of: Callable[[int], Tensor]) -> list[Figures]:
    """Return what each worker has sent in all counted exchanges and a barrier. Called by every worker."""
    for step in range(EARLIER):
        exchange(gradient_of(step))
    dist.barrier()
    before = left()
    kept = sum(exchange(gradient_of(EARLIER + step)) for step in range(COUNTED))
    dist.barrier()
    sent = {name: count - before[name] for name, count in left().items()} | {"kept": kept}
    rows = [torch.zeros(len(sent), dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, torch.tensor(list(sent.values()), dtype=torch.float64))
    return [dict(zip(sent, row.tolist(), strict=True)) for row in rows]


def left() -> Figures:
    """Return what has left this host on eth0 so far, and how many TCP segments were sent again."""
    command = ["tc", "-s", "-j", "qdisc", "show", "dev", "eth0"]
    queue = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_S).stdout)[0]
    names, values = (line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if line[:4] == "Tcp:")
    return {**{name: queue[name] for name in ("bytes", "packets")}, "again": int(values[names.index("RetransSegs")])}


def content_bytes(sent: Figures) -> float:
    """Return what the packets carried, each byte once."""
    return sent["bytes"] - HEADER_BYTES * sent["packets"] - SEGMENT_BYTES * sent["again"]


def planned_bytes(name: str, density: float, workers: int, link: Any) -> float:
    """Return what the planner says that a worker sends in an exchange."""
    if name in ALGORITHMS:
        return ALLREDUCE[name](4 * NUMEL, workers, *link.values()).bytes_per_worker
    setting = compression.Setting(num_bytes=4 * NUMEL, workers=workers, compute_s=0.0, **link)
    told = {"powersgd": codecs.low_rank(SHAPES), "threshold": codecs.sparse(density)}
    return compression.exchange(told.get(name, codecs.CODECS[name]), setting).bytes_per_worker


def show(link: Figures, barrier: list[Figures], exchanges: dict[str, list[Figures]]) -> int:
    """Print the table, means over the hosts and the host that is furthest off; return 1 if that is too far."""
    print(f"{'':<17}{'planner':>12}{'wire':>12}{'ratio':>7}{'content':>12}{'ratio':>8}{'furthest host':>15}  within 5%")
    worst = 0.0
    for name, totals in exchanges.items():
        pairs = zip(totals, barrier, strict=True)
        once = [{key: (total[key] - alone[key]) / COUNTED for key in total} for total, alone in pairs]
        planned = [planned_bytes(name, sent["kept"] / NUMEL, len(once), link) for sent in once]
        ratios = [content_bytes(sent) / said for sent, said in zip(once, planned, strict=True)]
        furthest = max(ratios, key=lambda ratio: abs(ratio - 1))
        worst = max(worst, abs(furthest - 1))
        mean = {key: statistics.fmean(sent[key] for sent in once) for key in once[0]}
        said, content = statistics.fmean(planned), content_bytes(mean)
        print(
            f"{name:<17}{said:>12,.0f}{mean['bytes']:>12,.0f}{mean['bytes'] / said:>7.3f}{content:>12,.0f}"
            f"{content / said:>8.4f}{furthest:>15.4f}  {'yes' if abs(furthest - 1) <= TOLERANCE else 'NO'}"
            + (f"; {mean['kept'] / NUMEL:.2%} of the elements" if mean["kept"] else "")
        )
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
