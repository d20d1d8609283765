"""What joins the workers of this run: read from the cluster's file where that says it, else measured for a second."""

import socket
from dataclasses import dataclass

import torch
from torch.distributed import PrefixStore, Store

from shoal.comm.algorithms import Wire
from shoal.comm.algorithms.wire import Guard
from shoal.comm.pairs import Links, measure_links
from shoal.comm.rank import Rank
from shoal.core.run_folder import RunFolder
from shoal.core.toml import read_toml
from shoal.spec.cluster import Cluster

_MEASURE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a worker stands: with whom it meets, and by what."""

    rank: Rank
    store: Store | None
    device: torch.device
    watch: Guard | None = None
    """Tells whoever waits for a worker that it is lost."""
    known: Links | None = None
    """Links that need not be measured."""


def hosts_of(rank: Rank, store: Store) -> list[str]:
    """Return the host of each worker; those that one launcher counts apart are told apart, whatever they are called."""
    own = PrefixStore("hosts", store)
    own.set(str(rank.index), f"{socket.gethostname()}/{rank.index - rank.local_index}")
    return [own.get(str(worker)).decode() for worker in range(rank.workers)]


def known_links(folder: RunFolder) -> Links | None:
    """Return the links that the cluster.toml of a run names; None where it has none between hosts."""
    if not folder.cluster_toml.exists():
        return None
    cluster = read_toml(Cluster, folder.cluster_toml)
    return Links(inside=cluster.inside, between=cluster.between) if cluster.between is not None else None


def links_of(wire: Wire, known: Links | None) -> Links:
    """Return the links of the workers of `wire`: `known`, or measured. Called by every worker."""
    hosts = list(wire.hosts)
    if known is not None and len(set(hosts)) > 1:
        return known
    return measure_links(wire, hosts, seconds=_MEASURE_S)
