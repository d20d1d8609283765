"""A step of parameter servers over slow links, measured beside what its cost is said to be: 2 max(n/b, p n / (k b)).

    python benchmarks/sync/server_cost.py [--servers 1 2 4] [--workers 4] [--rate 100mbit] [--megabytes 8] [--json FILE]

Hosts are network namespaces of this machine with shaped links (tests/support/hosts.py), so it needs root, and Linux.
Each worker and each server has a host of its own. A step here is all that `Servers.meet` does, without any forward and
backward: each of p workers sends n bytes of gradients to k servers, which sum and apply them, and fetches n bytes of
parameters. Either way, a worker's link carries n bytes and a server's p n / k, so the busier of the two sets the time.
b is what the link is set to; of that, TCP over Ethernet carries 95.6% as payload. Replicas are left out (they add n / k
to what a server sends). With the figures: the ratio of measured to predicted, which is to be within 20% of 1.

All hosts share this machine's cores. Where links are so fast that these are the limit, it is they that are measured: on
2 cores, 4 servers at 200mbit took 1.30 times what is predicted (2026-11).
"""

import argparse
import json
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script: tests/ is beside benchmarks/

BAR = 0.20
TIMEOUT_S = 240.0
BITS_PER_S = {"gbit": 1e9, "mbit": 1e6}


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--megabytes", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(**json.loads(options.worker))
        return
    found = [measure(servers, options) for servers in options.servers]
    for figures in found:
        verdict = "within" if abs(figures["ratio"] - 1) <= BAR else "NOT within"
        print(
            f"{figures['servers']} servers, {options.workers} workers, {options.megabytes} MB at {options.rate}: "
            f"{figures['measured_s']:.3f} s measured, {figures['predicted_s']:.3f} s predicted, "
            f"ratio {figures['ratio']:.3f}, {verdict} {BAR:.0%}"
        )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


def predicted_s(num_bytes: int, *, workers: int, servers: int, rate: str) -> float:
    """Return what a step costs: there and back, the busier of a worker's and a server's link."""
    from shoal.planner.collectives.allreduce import parameter_server

    bytes_per_s = float(rate[:-4]) * BITS_PER_S[rate[-4:]] / 8
    seconds = 2 * max(num_bytes / bytes_per_s, workers * num_bytes / (servers * bytes_per_s))
    assert abs(parameter_server(num_bytes, workers, bytes_per_s, 0.0, servers=servers).seconds - seconds) < 1e-9
    return seconds


def measure(servers: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return what worker 0 says of steps with so many servers."""
    from shoal.comm.store import host_store
    from tests.support.hosts import hosts

    workers, num_bytes = options.workers, options.megabytes * 1_000_000
    with hosts(count=workers + servers, rate="none") as cluster:
        store, port = host_store(host=cluster.machine, timeout_s=TIMEOUT_S)
        token = secrets.token_hex(16)
        store.set("servers", token)
        told = {"store_host": cluster.machine, "store_port": port, "workers": workers, "timeout_s": TIMEOUT_S}
        for host in range(servers):
            where = {"host": host, "hosts": servers, "token": token, "address": cluster.address(workers + host)}
            command = [sys.executable, "-m", "shoal.sync.server.process", json.dumps({**told, **where})]
            cluster.start(workers + host, command, stdin=subprocess.PIPE, cwd=Path(__file__).parents[2])
        processes = [
            cluster.start(
                index,
                [
                    sys.executable,
                    __file__,
                    "--worker",
                    json.dumps(
                        {**told, "index": index, "servers": servers, "bytes": num_bytes, "steps": options.steps}
                    ),
                ],
                stdout=subprocess.PIPE if index == 0 else subprocess.DEVNULL,
                text=True,
            )
            for index in range(workers)
        ]
        store.wait([f"ready {index}" for index in range(workers)])
        cluster.shape(options.rate)
        store.set("go", "1")
        said = processes[0].communicate(timeout=TIMEOUT_S)[0]
        for process in processes[1:]:
            process.wait(TIMEOUT_S)
        del store
    measured_s = statistics.median(json.loads(said))
    cost_s = predicted_s(num_bytes, workers=workers, servers=servers, rate=options.rate)
    return {"servers": servers, "measured_s": measured_s, "predicted_s": cost_s, "ratio": measured_s / cost_s}


def work(*, store_host: str, store_port: int, workers: int, timeout_s: float, index: int, **sizes: int) -> None:
    """Be a worker; worker 0 prints the seconds of each step."""
    import torch

    from shoal.comm.rank import Rank
    from shoal.comm.store import connect
    from shoal.core.events import EventLog
    from shoal.spec.sync import Sync
    from shoal.sync.mode import Mine, Place, Trained
    from shoal.sync.server.mode import Servers

    torch.set_num_threads(1)
    rank = Rank(index, workers, 0, 1, store_host, store_port, store_is_hosted=True)
    store = connect(rank, timeout_s=timeout_s)
    weight = torch.nn.Parameter(torch.zeros(sizes["bytes"] // 4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with tempfile.TemporaryDirectory() as folder:
        log = EventLog(Path(folder) / "events.jsonl")
        place = Place(
            sync=Sync(mode="server", servers=sizes["servers"], place="processes"),
            rank=rank,
            store=store,
            device=torch.device("cpu"),
            log=log,
            is_boundary=lambda _: False,
            timeout_s=timeout_s,
        )
        trained = Trained({"weight": weight}, {}, optimizer, None)
        servers = Servers(trained, place, has_replica=False, starts_hosts=False)
        seconds = []
        try:
            for step in range(1, sizes["steps"] + 3):
                if step == 2:  # the first is done at full speed: links, and torch's own first calls
                    store.set(f"ready {index}", "1")
                    store.wait(["go"])
                weight.grad = torch.ones_like(weight)
                begin_s = time.perf_counter()
                servers.meet(Mine(step, 1.0, 0.0, 1))
                seconds.append(time.perf_counter() - begin_s)
            assert torch.allclose(weight, torch.tensor(-0.1 * step))
        finally:
            servers.close()
            log.close()
    if index == 0:
        print(json.dumps(seconds[2:]))


if __name__ == "__main__":
    main()
