"""`shoal probe`: measure this machine by worker processes that load it as training does, and return it as a Cluster."""

import datetime
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shoal.comm.link import link_from
from shoal.core.errors import ConfigError, WorkerFailed
from shoal.core.events import EventReader
from shoal.core.run_folder import RunFolder
from shoal.data.storage import measure_storage, usual_folders
from shoal.launch.cause import find_cause
from shoal.launch.local import Watch, launch_local
from shoal.launch.starting import Spawning
from shoal.profile.host import device_from, product_points
from shoal.spec.cluster import Cluster, Storage
from shoal.spec.device import Device, Link
from shoal.training.host import Say, completed, this_host
from shoal.training.probe_worker import TIMEOUT_S

_STORAGE_SHARE = 0.2
"""How much of the time the storage gets."""
_PATIENCE = 10.0
"""How many times the time they were given the workers may take before they count as stuck."""

Events = dict[str, dict[str, Any]]
"""The last event of each kind that a worker wrote."""


@dataclass(frozen=True, kw_only=True)
class Probed:
    """What a probe found: the cluster, and the measurements by size that its rates were fitted to."""

    cluster: Cluster
    products: dict[str, list[tuple[float, float]]]
    """By precision: (operations of one product, operations per second that the whole device reached with such)."""
    messages: list[tuple[int, float]]
    """(bytes, seconds of an all-reduce of so many); empty for one worker."""
    sums: list[tuple[int, float]]
    """The same in shared memory, in place; empty where workers share none."""
    copies: list[tuple[int, float]]
    """The same for what is scattered and gathered through shared memory."""


def probe(
    *, workers: int | None = None, seconds: float = 4.0, storage: Sequence[Path] = (), say: Say = lambda _: None
) -> Probed:
    """Measure this machine with `workers` processes at once, in about `seconds` beyond their start.

    By default there is a worker for each GPU; without GPUs there are two. Where `storage` names no folders, the usual
    ones are read: the current folder, memory, temporary files. `say` is told what is measured now.
    """
    gpus = torch.cuda.device_count()
    workers = (gpus or 2) if workers is None else workers
    _check(workers, seconds, gpus)
    say("reading from storage")
    tiers = _measure_storage(storage, seconds=_STORAGE_SHARE * seconds)
    say("starting workers")
    logs = _run_workers(workers, seconds=(1 - _STORAGE_SHARE) * seconds, say=say)
    return _probed(logs, tiers, shared=gpus == 0)


def probe_command(folder: Path, *, seconds: float) -> list[str]:
    """Return the command of a probe's worker, to be started by this process."""
    options = ["--worker", str(folder), "--seconds", str(seconds), "--parent", str(os.getpid())]
    return [sys.executable, "-m", "shoal", "probe", *options]


def _check(workers: int, seconds: float, gpus: int) -> None:
    if workers < 1:
        raise ConfigError(f"--workers {workers}: measure with at least 1 worker.")
    if gpus and workers > gpus:
        raise ConfigError(f"--workers {workers}: this machine has {gpus} GPU{'s' * (gpus > 1)}. Use at most {gpus}.")
    if not 0 < seconds < math.inf:
        raise ConfigError(f"--seconds {seconds:g}: measure for more than 0 seconds.")


def _measure_storage(folders: Sequence[Path], *, seconds: float) -> tuple[Storage, ...]:
    chosen = list(folders) or usual_folders()
    return tuple(measure_storage(folder, seconds=seconds / len(chosen)) for folder in chosen)


def _run_workers(workers: int, *, seconds: float, say: Say) -> list[Events]:
    """Run the probe's workers to their end and return what each has measured."""
    with tempfile.TemporaryDirectory(prefix="shoal-probe-") as path:
        folder = RunFolder(Path(path))
        folder.events.mkdir()
        lines: list[str] = []
        watch = Watch(
            on_line=lambda rank, line: lines.append(f"[worker {rank}] {line}"),
            on_tick=_ticker(folder, say, deadline_s=time.monotonic() + TIMEOUT_S + _PATIENCE * seconds),
        )
        command = probe_command(folder.path, seconds=seconds)
        cause = find_cause(folder, launch_local(Spawning(command), workers=workers, timeout_s=TIMEOUT_S, watch=watch))
        if cause is not None:
            details = getattr(cause, "details", "") or "\n".join(lines)
            raise WorkerFailed(f"the probe failed: {cause}", details=details)
        return [{event["kind"]: event for event in EventReader(folder.events_of(i)).poll()} for i in range(workers)]


def _ticker(folder: RunFolder, say: Say, *, deadline_s: float) -> Callable[[], None]:
    reader = EventReader(folder.events_of(0))

    def tick() -> None:
        for event in reader.poll():
            if event["kind"] == "progress":
                say(event["what"])
        if time.monotonic() > deadline_s:
            raise WorkerFailed("the probe's workers do not come to an end. Is the machine busy with something else?")

    return tick


def _probed(logs: list[Events], tiers: tuple[Storage, ...], *, shared: bool) -> Probed:
    tables = [log["measured"]["seconds"] for log in logs]
    workers = len(logs)
    how = f"measured by {workers} workers at once" if workers > 1 else "measured by 1 worker"
    source = f"{how}, torch {torch.__version__}, {datetime.datetime.now().astimezone().date()}"
    device = _device(logs, shared=shared, source=source)
    messages = _times(logs, "link", "times")
    sums, copies = _times(logs, "memory", "in_place"), _times(logs, "memory", "copied")

    def link(times: list[tuple[int, float]]) -> Link | None:
        return link_from(times, workers=workers, shared=shared, source=source) if times else None

    host, inside = this_host(), link(messages)
    # Where workers share no memory, they meet over the link in its place.
    in_place, copied = (link(sums) or inside, link(copies) or inside) if shared else (None, None)
    cluster = replace(
        host,
        devices={host.nodes[0].device: device},
        inside=inside,
        in_place=in_place,
        copied=copied,
        storage=tiers,
    )
    together = workers if shared else 1
    mean = {name: sum(table[name] for table in tables) / workers for name in tables[0]}
    products = {
        precision: [(flops, together * flops / seconds) for flops, seconds in product_points(mean, precision)]
        for precision in ("fp32", "bf16")
    }
    return Probed(cluster=cluster, products=products, messages=messages, sums=sums, copies=copies)


def _times(logs: list[Events], kind: str, name: str) -> list[tuple[int, float]]:
    """Return (bytes, seconds) as worker 0 measured them; none where it did not."""
    return [(int(size), float(seconds)) for size, seconds in logs[0].get(kind, {}).get(name, [])]


def _device(logs: list[Events], *, shared: bool, source: str) -> Device:
    facts = logs[0]["measured"]
    device = device_from(
        [log["measured"]["seconds"] for log in logs],
        shared=shared,
        source=source,
        title=facts["title"],
        memory_bytes=facts["memory_bytes"],
        reserved_bytes=facts["reserved_bytes"],
    )
    return completed(device, entry="cpu-host" if shared else device.title)
