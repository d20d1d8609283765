"""Staging a pack on several hosts with slow links: everyone reads the source, or one reads and each passes it on.

    python benchmarks/staging.py [--nodes 4] [--rate 1gbit] [--size 400MB] [--json FILE] [--svg FILE]

Hosts are network namespaces of this machine with shaped links (tests/support/hosts.py), so it needs root, and Linux.
One more host has the pack behind a link of the same rate, and counts what is read from it. It takes about a minute.
Each case: the seconds until each node has all parts, checksummed; their ratio to size over rate; how often the source
was read. In one case a node is killed in the middle, in one it is cut off, in one the source sends a wrong byte.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script: tests/ is beside benchmarks/

BYTES_PER_S = {"1gbit": 125e6, "100mbit": 12.5e6, "5gbit": 625e6}
NUM_PARTS = 8
TIMEOUT_S = 300.0
CASES = {
    "everyone reads": {"together": False},
    "chain": {"together": True},
    "tree, fan-out 2": {"together": True, "fan_out": 2},
    "chain, node 1 killed": {"together": True, "lose": "kill"},
    "chain, node 1 cut off": {"together": True, "lose": "cut"},
    "chain, wrong byte": {"together": True, "wrong": True},
}


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rate", default="1gbit", choices=BYTES_PER_S)
    parser.add_argument("--size", default="400MB")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES, metavar="CASE")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--svg", type=Path, help="draw the first two cases there")
    parser.add_argument("--node", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.node:
        be_node(**json.loads(options.node))
        return
    from shoal.core.units import parse_bytes

    found = measure(options.nodes, options.rate, int(parse_bytes(options.size)), options.cases)
    show(found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.svg:
        options.svg.write_text(draw(found))


def measure(nodes: int, rate: str, size: int, cases: list[str]) -> dict[str, Any]:
    """Return the figures of each case."""
    from tests.data.stage.packs import make_pack
    from tests.support.hosts import hosts

    fast = Path("/dev/shm") if shutil.disk_usage("/dev/shm").free > 2 * nodes * size else None  # noqa: S108
    with tempfile.TemporaryDirectory() as root, tempfile.TemporaryDirectory(dir=fast) as copies:
        manifest = make_pack(Path(root, "a.pack"), num_parts=NUM_PARTS, part_bytes=size // NUM_PARTS)
        ideal_s = manifest.num_bytes / BYTES_PER_S[rate]
        found = {"nodes": nodes, "rate": rate, "bytes": manifest.num_bytes, "ideal_s": ideal_s, "cases": {}}
        for name in cases:
            with hosts(count=nodes + 1, rate=rate) as cluster:
                case = one_case(cluster, nodes, Path(root), Path(copies, name.replace(" ", "-")), **CASES[name])
            case["ratio"] = max(case["seconds"].values()) / ideal_s
            case["source_reads"] = case.pop("read_bytes") / manifest.num_bytes
            found["cases"][name] = case
            print(f"{name}: {case}", file=sys.stderr)
    return found


def one_case(
    cluster: Any,
    nodes: int,
    root: Path,
    copies: Path,
    *,
    together: bool,
    fan_out: int = 1,
    lose: str = "",
    wrong: bool = False,
) -> dict[str, Any]:
    """Return the seconds of each node, and the bytes read from the source."""
    from shoal.comm.store import host_store

    command = [sys.executable, "-m", "tests.data.stage.file_server", str(root), cluster.address(nodes)]
    if wrong:
        command += ["--wrong", "a.pack/parts/00003.arrow"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = cluster.start(nodes, command, cwd=Path(__file__).parents[1], **pipes)
    url = server.stdout.readline().strip()
    store, port = host_store(host=cluster.machine, timeout_s=TIMEOUT_S)
    told = {"pack": f"{url}/a.pack", "host": cluster.machine, "port": port, "together": together, "fan_out": fan_out}
    processes = [
        cluster.start(
            index,
            [sys.executable, __file__, "--node", json.dumps({**told, "index": index, "home": f"{copies}-{index}"})],
            **pipes,
        )
        for index in range(nodes)
    ]
    for process in processes:
        process.stdout.readline()
    store.set("begin", repr(time.monotonic()))
    lost = lose_one(cluster, processes, store, lose) if lose else None
    said = {i: json.loads(p.stdout.readline()) for i, p in enumerate(processes) if i != lost}
    for index, process in enumerate(processes):
        if index != lost:
            process.communicate("", timeout=TIMEOUT_S)
    read = json.loads(server.communicate("", timeout=TIMEOUT_S)[0])
    for folder in copies.parent.iterdir():
        shutil.rmtree(folder, ignore_errors=True)
    parts = sum(count for name, count in read.items() if "/parts/" in name)
    refetched = {index: node["refetched"] for index, node in said.items()}
    return {"seconds": {i: node["seconds"] for i, node in said.items()}, "read_bytes": parts, "refetched": refetched}


def lose_one(cluster: Any, processes: list[Any], store: Any, how: str) -> int:
    """Lose node 1 when it has half of the parts; return its number."""
    store.get("node 1 has half")
    if how == "cut":
        cluster.cut(1)
    else:
        os.killpg(processes[1].pid, signal.SIGKILL)
    return 1


def be_node(*, pack: str, host: str, port: int, together: bool, fan_out: int, index: int, home: str) -> None:
    """Be a node: join in the order of the numbers, stage, and print how long it took."""
    from shoal.comm.rank import Rank
    from shoal.comm.store import connect
    from shoal.data.stage.staging import stage

    store = connect(Rank(index, 99, 0, 1, host, port, store_is_hosted=True), timeout_s=TIMEOUT_S)
    print("ready", flush=True)
    begin_s = float(store.get("begin"))
    if together and index > 0:
        store.get(f"joined {index - 1}")
    options: dict[str, Any] = {"store": store, "fan_out": fan_out} if together else {}
    with stage(pack, to=home, desk=Path(home, "desk"), **options) as staged:
        while together and not (staged._peers is not None and staged._peers.number >= 0):  # type: ignore[attr-defined]
            time.sleep(0.001)
        store.set(f"joined {index}", "yes")
        for part in range(NUM_PARTS):
            staged.path_of(part)
            if part == NUM_PARTS // 2 - 1:
                store.set(f"node {index} has half", "yes")
        seconds = time.monotonic() - begin_s
        print(json.dumps({"seconds": seconds, "refetched": staged.report()["refetched"]}), flush=True)
        sys.stdin.read()  # stay for the nodes after this one


def show(found: dict[str, Any]) -> None:
    """Print the table."""
    print(
        f"{found['bytes'] / 1e6:.0f} MB to {found['nodes']} hosts with links of {found['rate']}: size over rate is ",
        end="",
    )
    print(f"{found['ideal_s']:.2f} s")
    print(f"{'':24}{'all have it after':>20}{'of size/rate':>14}{'source read':>13}")
    for name, case in found["cases"].items():
        seconds = f"{max(case['seconds'].values()):.2f} s"
        print(f"{name:24}{seconds:>20}{case['ratio']:>13.2f}x{case['source_reads']:>12.2f}x")


def draw(found: dict[str, Any]) -> str:
    """Return a picture of the first two cases: a bar for each node."""
    cases = list(found["cases"].items())[:2]
    longest_s = max(second for _, case in cases for second in case["seconds"].values())
    left, width, step = 150, 420, 22
    lines, y = [], 48
    for (name, case), colour in zip(cases, ("#c2703d", "#2f7f86"), strict=True):
        for index, seconds in sorted(case["seconds"].items()):
            long = width * seconds / longest_s
            label = (
                f'<text x="{left - 8}" y="{y + 12}" text-anchor="end">{name if index == 0 else ""} node {index}</text>'
            )
            bar = f'<rect x="{left}" y="{y}" width="{long:.1f}" height="16" rx="2" fill="{colour}"/>'
            lines.append(f'{label}{bar}<text x="{left + long + 6:.1f}" y="{y + 12}">{seconds:.1f} s</text>')
            y += step
        y += 12
    at = left + width * found["ideal_s"] / longest_s
    size = f"{found['bytes'] / 1e6:.0f} MB"
    title = f"{size} to {found['nodes']} hosts, links of {found['rate']}: seconds until all is there"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 {y + 24}" font-family="sans-serif" font-size="12">'
    )
    ideal = f'<line x1="{at:.1f}" x2="{at:.1f}" y1="40" y2="{y}" stroke="#555" stroke-dasharray="4 3"/>'
    ideal += (
        f'<text x="{at:.1f}" y="{y + 14}" text-anchor="middle" fill="#555">size / rate {found["ideal_s"]:.1f} s</text>'
    )
    back = f'<rect width="640" height="{y + 24}" fill="white"/><text x="12" y="22" font-size="14">{title}</text>'
    return "\n".join([head, back, *lines, ideal, "</svg>", ""])


if __name__ == "__main__":
    main()
