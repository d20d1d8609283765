"""This host as a cluster: what it has, and which cluster.toml is about it."""

import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import torch

from shoal.core.errors import ConfigError
from shoal.core.host import memory_bytes, processor_name, usable_cores
from shoal.core.toml import read_toml
from shoal.planner.catalog import read_device, read_link
from shoal.profile.host import measure_host
from shoal.spec.cluster import Cluster, Node
from shoal.spec.device import Device

Say: TypeAlias = Callable[[str], object]
"""Tells the user one line."""

CLUSTER_TOML = Path("cluster.toml")
"""What `shoal probe` writes, and where training looks for it: in the working directory."""


def this_host() -> Cluster:
    """Return the cluster that consists of this host alone, with nothing measured."""
    gpus = torch.cuda.device_count()
    device = torch.cuda.get_device_name(0) if gpus else processor_name()
    node = Node(host=platform.node(), cores=usable_cores(), memory_bytes=memory_bytes(), device=device, devices=gpus)
    return Cluster(nodes=(node,))


def probed_host(path: Path | None, *, say: Say) -> Cluster | None:
    """Return this host as `shoal probe` measured it, from `path` or else from cluster.toml, if that is here.

    A cluster.toml about another host is left aside, which `say` is told; a `path` about another host is an error.
    """
    if path is None and not CLUSTER_TOML.is_file():
        return None
    file = path or CLUSTER_TOML
    cluster = read_toml(Cluster, file)
    difference = _difference(cluster)
    if difference is None:
        return cluster
    if path is not None:
        raise ConfigError(f"--cluster {path} {difference}. Measure this host: shoal probe --out {path}")
    say(f"{file} {difference}: left aside. To measure this host: shoal probe")
    return None


def _difference(cluster: Cluster) -> str | None:
    """Return in what `cluster` is another than this host, or None."""
    here = this_host().nodes[0]
    there = cluster.nodes[0]
    if len(cluster.nodes) > 1 or there.count > 1:
        return "describes several hosts, and this run is on one"
    if there.host != here.host:
        return f"describes the host {there.host!r}, and this is {here.host!r}"
    for name in ("device", "devices", "cores"):
        was, is_now = getattr(there, name), getattr(here, name)
        if was != is_now:
            return f"says {name} = {was!r}, and this host has {is_now!r}"
    return None


def measured_host() -> Cluster:
    """Return this host, measured in a fraction of a second where its workers run on the processor.

    That is with all cores in one process, and with the catalog's figures for the link: `shoal probe` does better. GPUs
    are looked up in the catalog.
    """
    host = this_host()
    if host.nodes[0].devices:
        return host
    device = completed(measure_host(), entry="cpu-host")
    inside = replace(read_link("loopback"), guessed=True)
    return replace(host, devices={host.nodes[0].device: device}, inside=inside)


def completed(device: Device, *, entry: str) -> Device:
    """Return the measured `device` with what nobody measures as in the catalog: its usual link, the heap's habits."""
    try:
        known = read_device(entry)
    except ConfigError:
        return device
    return replace(
        device,
        link=known.link,
        library_bytes=known.library_bytes,
        heap_fraction=known.heap_fraction,
        memory_error=known.memory_error,
    )
