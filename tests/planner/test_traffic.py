"""Who talks to whom, held against the closed forms of `collectives` and against counting workers one by one."""

import dataclasses

import pytest

from shoal.planner.catalog import read_link
from shoal.planner.collectives.allreduce import ring, two_level
from shoal.planner.machine import Machine, machine_of
from shoal.planner.time.traffic import Group, exchange_overlaps, groups_of
from shoal.spec.cluster import Cluster, Node
from shoal.spec.device import Device, Link
from shoal.spec.plan import Mesh
from shoal.spec.sync import Sync

DEVICE = Device(source="round", matmul_flops_per_s=1, bf16_matmul_flops_per_s=1, memory_bytes_per_s=1, operation_s=0)
NVLINK = Link(source="round", bytes_per_s=300e9, latency_s=5e-6)
NETWORK = Link(source="round", bytes_per_s=25e9, latency_s=10e-6)
NODES = Machine(device=DEVICE, nodes=64, per_node=8, inside=NVLINK, between=NETWORK, adapters=4)


def members(mesh: Mesh, axis: str) -> list[int]:
    """Return the workers of that group along `axis` which worker 0 is in, numbered as the mesh lays them out."""
    stride = 1
    for name in ("tensor", "shard", "replicate", "pipeline"):
        if name == axis:
            return [stride * number for number in range(getattr(mesh, name))]
        stride *= getattr(mesh, name)
    raise AssertionError(axis)


@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(tensor=8, replicate=32, pipeline=2),
        Mesh(tensor=2, replicate=32, pipeline=8),
        Mesh(tensor=16, replicate=4, pipeline=8),
        Mesh(tensor=1, shard=8, replicate=64),
        Mesh(tensor=2, shard=4, replicate=16, pipeline=4),
        Mesh(tensor=4, shard=32, pipeline=4),
    ],
)
@pytest.mark.parametrize("axis", ["tensor", "shard", "replicate"])
def test_a_group_lies_on_the_nodes_of_its_workers(mesh: Mesh, axis: str) -> None:
    workers = members(mesh, axis)
    nodes = {worker // NODES.per_node for worker in workers}
    group = getattr(groups_of(NODES, mesh), axis)
    assert (group.nodes, group.local) == (len(nodes), len(workers) // len(nodes))


def test_stages_lie_next_to_each_other_where_a_node_holds_several() -> None:
    one_node = Machine(device=DEVICE, per_node=8, inside=NVLINK, between=NETWORK)
    assert groups_of(one_node, Mesh(tensor=2, pipeline=4)).next_stage.nodes == 1
    assert groups_of(NODES, Mesh(tensor=2, replicate=8, pipeline=4)).next_stage.nodes == 2


@pytest.mark.parametrize(("local", "nodes"), [(8, 1), (1, 16), (4, 8), (8, 2)])
def test_an_all_reduce_takes_what_the_closed_form_says(local: int, nodes: int) -> None:
    group = Group(local, nodes, 300e9, 5e-6, 12.5e9, 10e-6)
    reference = two_level(
        1e9, local * nodes, 12.5e9, 10e-6, per_node=local, inside_bytes_per_s=300e9, inside_latency_s=5e-6
    )
    assert group.all_reduce_s(1e9) == pytest.approx(reference.seconds)
    inside, between = group.gather_bytes(2e9)
    assert inside == pytest.approx(reference.inside_bytes)
    assert inside + between == pytest.approx(reference.bytes_per_worker)


def test_groups_that_meet_on_a_node_share_its_adapters() -> None:
    # Each of 8 groups has one worker on a node with 4 adapters of 25 GB/s.
    data = groups_of(NODES, Mesh(tensor=8, replicate=32)).data
    assert data.all_reduce_s(9.8e9) == pytest.approx(2 * 31 / 32 * 9.8e9 / 12.5e9 + 2 * 31 * 10e-6)
    # Of 2 groups each has four: together they send a quarter each, at the same rate.
    data = groups_of(NODES, Mesh(tensor=2, replicate=32)).data
    between_s = 2 * 7 / 8 * 9.8e9 / 4 / 12.5e9 + 2 * 7 * 10e-6
    assert data.all_reduce_s(9.8e9) == pytest.approx(2 * 3 / 4 * 9.8e9 / 300e9 + 2 * 3 * 5e-6 + between_s)


def test_a_worker_that_sends_alone_has_one_adapter() -> None:
    few = Machine(device=DEVICE, nodes=4, per_node=2, inside=NVLINK, between=NETWORK, adapters=4)
    assert groups_of(few, Mesh(replicate=8)).data.between_bytes_per_s == 25e9


@pytest.mark.parametrize(
    ("workers", "num_bytes", "measured_s"), [(2, 4096, 560e-6), (2, 43.1e6, 0.054), (4, 43.1e6, 0.145)]
)
def test_an_all_reduce_on_the_loopback_takes_what_gloo_took(workers: int, num_bytes: float, measured_s: float) -> None:
    # 2 cores of a 2.8 GHz Xeon, torch 2.13, 2026-11. The rate is that between two workers alone; n have 2/n of it each.
    loopback = Link(source="measured", bytes_per_s=0.94e9, latency_s=280e-6, overlaps=False)
    host = Machine(device=DEVICE, per_node=4, shared=True, inside=loopback, between=loopback)
    group = groups_of(host, Mesh(replicate=workers)).data
    assert group.all_reduce_s(num_bytes) == pytest.approx(measured_s, rel=0.2)
    assert group.all_reduce_s(num_bytes) == ring(num_bytes, workers, 0.94e9 * 2 / workers, 280e-6).seconds


IN_PLACE = Link(source="measured", bytes_per_s=6.5e9, latency_s=40e-6, overlaps=False)
COPIED = Link(source="measured", bytes_per_s=1.5e9, latency_s=60e-6, overlaps=False)
LOOPBACK = Link(source="measured", bytes_per_s=1e9, latency_s=280e-6)
HOST = Machine(
    device=DEVICE, per_node=4, shared=True, inside=LOOPBACK, between=NETWORK, in_place=IN_PLACE, copied=COPIED
)


@pytest.mark.parametrize(("workers", "measured_s"), [(2, 64e6 / 6.52e9), (4, 64e6 / 2.10e9)])
def test_a_sum_in_shared_memory_takes_what_it_took(workers: int, measured_s: float) -> None:
    # benchmarks/shared_memory.py, 2 cores of a 2.8 GHz Xeon, 2026-11 (docs/communication.md).
    group = groups_of(HOST, Mesh(replicate=workers)).data
    assert group.all_reduce_s(64e6) == pytest.approx(measured_s, rel=0.1)


def test_replicas_and_shards_of_one_processor_meet_in_its_memory_and_all_others_over_the_link() -> None:
    whole = groups_of(HOST, Mesh(replicate=2))
    assert (whole.data.in_memory, whole.data.inside_bytes_per_s) == (True, 6.5e9)
    both = groups_of(HOST, Mesh(replicate=2, shard=2))
    assert (both.shard.in_memory, both.shard.inside_bytes_per_s) == (True, 1.5e9 * 2 / 4)
    divided = groups_of(HOST, Mesh(replicate=2, tensor=2))
    pipelines = groups_of(HOST, Mesh(replicate=2, pipeline=2))
    for group in (both.replicate, divided.data, divided.tensor, pipelines.data, pipelines.next_stage, whole.tensor):
        assert (group.in_memory, group.inside_latency_s) == (False, 280e-6)
    assert not exchange_overlaps(HOST, whole)
    assert not exchange_overlaps(HOST, both)
    assert exchange_overlaps(HOST, divided)


@pytest.mark.parametrize(
    "sync", [Sync(way="engine"), Sync(way="ring"), Sync(codec="int8"), Sync(mode="server")], ids=str
)
def test_replicas_meet_over_the_link_where_the_plan_says_so(sync: Sync) -> None:
    assert not groups_of(HOST, Mesh(replicate=2), sync).data.in_memory
    assert groups_of(HOST, Mesh(shard=2), sync).shard.in_memory is (sync.way != "engine" and sync.codec == "none")


def test_workers_of_several_hosts_and_on_gpus_share_no_memory() -> None:
    hosts = dataclasses.replace(HOST, nodes=2, per_node=2)
    gpus = dataclasses.replace(HOST, shared=False)
    for machine in (hosts, gpus):
        assert not groups_of(machine, Mesh(replicate=4)).data.in_memory
        assert not groups_of(machine, Mesh(shard=4)).shard.in_memory


def test_where_nobody_measured_it_shared_memory_is_as_fast_as_the_memory_of_the_device() -> None:
    node = Node(host="h", cores=2, memory_bytes=1 << 34, device="cpu-host")
    machine = machine_of(Cluster(nodes=(node,), inside=read_link("loopback")), per_node=2)
    assert machine.in_place is not None
    assert machine.copied is not None
    assert machine.inside.bytes_per_s < machine.in_place.bytes_per_s < 20e9  # what its memory reads and writes
    assert 0 < machine.copied.bytes_per_s < machine.in_place.bytes_per_s
    measured = machine_of(Cluster(nodes=(node,), in_place=IN_PLACE, copied=COPIED), per_node=2)
    assert (measured.in_place, measured.copied) == (IN_PLACE, COPIED)
    on_gpus = machine_of(Cluster(nodes=(Node(host="h", cores=2, memory_bytes=1, device="h100", devices=8),)))
    assert on_gpus.in_place is on_gpus.copied is None


def test_one_worker_sends_nothing() -> None:
    group = groups_of(NODES, Mesh()).data
    assert group.size == 1
    assert group.all_reduce_s(1e9) == 0
