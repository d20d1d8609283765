"""`shoal stage`: bring a pack to the fastest storage of this node, say who has what, and give the space back."""

import argparse
import json
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

from shoal.cli import flags
from shoal.cli.tiers_table import show_tiers
from shoal.comm.rank import read_rank
from shoal.core.errors import ConfigError
from shoal.core.units import format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    from shoal.comm.rank import Rank
    from shoal.data.stage.agent import Staging

ABOUT = (
    "Copy a pack to the fastest storage of this node that has room; one copy, for all workers, as long as it is used."
)
EXAMPLE = """\
example:
  shoal stage corpus.pack                         to the fastest storage with room; it stays until this shell ends
  shoal stage corpus.pack --to /local/me          to a folder, or to one kind: memory, local, scratch, project
  srun --ntasks-per-node 1 shoal stage corpus.pack --foreground &     on all nodes: one reads, each passes it on
  shoal stage --status                            which packs are here, and which nodes have what
  shoal stage --release corpus.pack               give its space back now
  shoal stage --clean                             remove what processes that were killed have left
  shoal stage --tiers                             this node's storage: how fast, how large, how long it keeps

Workers of this node that stage the same pack find the copy, and share it.
"""


_MOST_PARTS = 10_000_000
_LINES = 10  # of progress, where it does not go to a terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("pack", nargs="?", metavar="PACK", help="the pack: a folder or a URL")
    parser.add_argument("--to", default="auto", metavar="WHERE", help="a folder, a kind of storage, or auto (default)")
    parser.add_argument("--parts", metavar="LIST", help="those that this node reads, in order, as in 0-9,12")
    parser.add_argument("--reserve", metavar="SIZE", help="room to leave free, such as 20GB")
    parser.add_argument("--fan-out", type=int, default=1, metavar="N", help="nodes that each one sends to (default: 1)")
    parser.add_argument("--timeout", type=float, default=3600.0, metavar="S", help="seconds without a byte, to give up")
    parser.add_argument("--until", type=int, metavar="PID", help="keep the copy until this process ends")
    parser.add_argument("--foreground", action="store_true", help="stay, and keep the copy until interrupted")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--status", action="store_true", help="show the copies on this node, and who has what")
    what.add_argument("--release", action="store_true", help="give the space of PACK back")
    what.add_argument("--clean", action="store_true", help="remove the copies that no process uses")
    what.add_argument("--tiers", action="store_true", help="show this node's storage: speed, room, how long it keeps")


def run(arguments: argparse.Namespace) -> int:
    """Stage, or show, or clean."""
    if arguments.status:
        return _status(arguments)
    if arguments.clean:
        return _clean(arguments)
    if arguments.tiers:
        return show_tiers(as_json=arguments.json)
    if arguments.pack is None:
        raise ConfigError("PACK is missing. Write it like: shoal stage corpus.pack")
    return _release(arguments) if arguments.release else _stage(arguments)


def _stage(arguments: argparse.Namespace) -> int:
    reserve = None if arguments.reserve is None else int(flags.read("--reserve", parse_bytes, arguments.reserve))
    parts = None if arguments.parts is None else flags.read("--parts", read_parts, arguments.parts)
    flags.whole("--fan-out", arguments.fan_out)
    timeout_s = flags.above_0("--timeout", arguments.timeout)
    from shoal.data.stage.agent import Staging
    from shoal.data.stage.staging import stage

    begin_s = time.monotonic()
    rank = read_rank()
    store = _store(rank, timeout_s)
    staged = stage(
        arguments.pack,
        to=arguments.to,
        parts=parts,
        store=store,
        fan_out=arguments.fan_out,
        reserve_bytes=reserve,
        timeout_s=timeout_s,
    )
    with staged:
        if not isinstance(staged, Staging):
            _say(arguments, staged.report(), f"{arguments.pack} is {staged.reason}")
            return 0
        if arguments.foreground:  # the signal that ends a job: give the space back first
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        _watch(staged, begin_s, quiet=arguments.json or (rank is not None and rank.index > 0))
        found = {**staged.report(), "seconds": round(time.monotonic() - begin_s, 3)}
        until = "this command ends" if arguments.foreground else _until(arguments)
        _say(arguments, found, f"{staged.source} is at {staged.path} until {until}.")
        _stay(staged, arguments, store, rank, timeout_s)
    return 0


def _store(rank: "Rank | None", timeout_s: float) -> Any:
    """Return the store by which the nodes of a launcher meet, or None on one node."""
    if rank is None or rank.workers <= rank.local_workers:
        return None
    from shoal.comm.store import connect

    return connect(rank, timeout_s=timeout_s)


def _watch(staged: Any, begin_s: float, *, quiet: bool) -> None:
    """Wait for the parts, and show how far they are."""
    from rich.console import Console

    wanted = [part for part in range(len(staged.manifest.parts)) if staged.is_coming(part)]
    console = Console(stderr=True, quiet=quiet)
    console.print(staged.reason, highlight=False, markup=False, soft_wrap=True)
    with console.status("staging") as status:
        for count, part in enumerate(wanted, start=1):
            staged.wait(part)
            passed = f"part {count} of {len(wanted)} after {format_seconds(time.monotonic() - begin_s)}"
            status.update(passed)
            if count == len(wanted) or (not console.is_terminal and count % -(-len(wanted) // _LINES) == 0):
                console.print(passed, highlight=False, markup=False)


def _stay(staged: "Staging", arguments: argparse.Namespace, store: Any, rank: "Rank | None", timeout_s: float) -> None:
    """Keep the copy as long as it was asked for."""
    if arguments.foreground:
        while True:
            time.sleep(3600)
    if store is not None and rank is not None:
        _farewell(store, rank.workers, timeout_s)
    from shoal.data.stage.keeper import start_keeper

    until_pid = os.getppid() if arguments.until is None else arguments.until
    path = staged.path
    start_keeper(staged.hand_over(linger_s=timeout_s), path, until_pid=until_pid)


def _farewell(store: Any, workers: int, timeout_s: float) -> None:
    """Return when all workers have what they want, so that those who pass it on stay until then."""
    end_s = time.monotonic() + min(timeout_s, 60.0)
    count = store.add("stage/left", 1)
    while count < workers and time.monotonic() < end_s:
        time.sleep(0.05)
        try:
            count = store.add("stage/left", 0)
        except RuntimeError:  # whoever hosts the store has left: all are done
            return


def _until(arguments: argparse.Namespace) -> str:
    pid = os.getppid() if arguments.until is None else arguments.until
    return f"process {pid} ends, or: shoal stage --release {arguments.pack}"


def _say(arguments: argparse.Namespace, found: dict[str, Any], sentence: str) -> None:
    """Say what was done, once for each node."""
    rank = read_rank()
    if rank is not None and rank.local_index > 0:
        return
    print(json.dumps(found) if arguments.json else sentence, flush=True)


def _status(arguments: argparse.Namespace) -> int:
    from shoal.data.stage.copies import Desk
    from shoal.data.stage.status import staged_here

    found = staged_here(Desk(), arguments.pack)
    if arguments.json:
        print(json.dumps({"copies": found}))
        return 0
    if not found:
        print("Nothing is staged on this node.")
    for copy in found:
        used = "used" if copy["is_used"] else "used by nobody: shoal stage --clean removes it"
        print(f"{copy['path']}\n  of {copy['source']}\n  {_progress(copy)}, {format_bytes(copy['bytes'])}; {used}")
        for why in copy["failed"].values():
            print(f"  {why}")
        for node in copy["nodes"]:
            print(f"  node {node['number']} ({node['host']}): {_progress(node)}")
    return 0


def _progress(about: dict[str, Any]) -> str:
    return f"{len(about['has'])} of {about['wants']} parts" + (f" ({_ranges(about['has'])})" if about["has"] else "")


def _clean(arguments: argparse.Namespace) -> int:
    from shoal.data.stage.copies import Desk
    from shoal.data.stage.tiers import places

    removed = Desk().clean(places())
    if arguments.json:
        print(json.dumps({"removed": [{"path": str(path), "bytes": size} for path, size in removed]}))
        return 0
    for path, size in removed:
        print(f"{path}: {format_bytes(size)} given back.")
    if not removed:
        print("There is nothing on this node that no process uses.")
    return 0


def _release(arguments: argparse.Namespace) -> int:
    from shoal.data.stage.copies import Desk
    from shoal.data.stage.status import release

    removed, used = release(Desk(), arguments.pack, timeout_s=5.0)
    if arguments.json:
        print(json.dumps({"removed": [str(path) for path in removed], "used": [str(path) for path in used]}))
        return 0
    for path in removed:
        print(f"{path}: given back.")
    for path in used:
        print(f"{path}: other processes still use it; it goes with the last of them.")
    if not removed and not used:
        print(f"{arguments.pack} is not staged on this node.")
    return 0


def read_parts(text: str) -> list[int]:
    """Return the numbers that a list such as "0-2,7" says."""
    found: list[int] = []
    for item in text.split(","):
        first, _, last = item.partition("-")
        if not first.strip().isdecimal() or not (last or first).strip().isdecimal():
            raise ConfigError(f"{text!r} is no list of parts. Write it like 0-9,12.")
        if int(last or first) >= _MOST_PARTS:
            raise ConfigError(f"{text!r}: no pack has {_MOST_PARTS:,} parts.")
        found += range(int(first), int(last or first) + 1)
    return found


def _ranges(parts: list[int]) -> str:
    """Return sorted numbers as "0-2,7"."""
    runs: list[list[int]] = []
    for part in parts:
        if runs and part == runs[-1][1] + 1:
            runs[-1][1] = part
        else:
            runs.append([part, part])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
