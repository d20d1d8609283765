"""How gradients meet: workers of several pretended hosts train the model that one process trains."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.comm.rank import Rank
from shoal.core.run_folder import RunFolder
from shoal.core.toml import read_toml, write_toml
from shoal.planner.collectives.codecs import CODECS
from shoal.spec.cluster import Cluster, Node
from shoal.spec.communication import Communication
from shoal.spec.device import Link
from shoal.spec.job import Job
from shoal.spec.plan import Mesh, Plan, Predicted
from shoal.spec.sync import Sync
from tests.support import jobs
from tests.support.ranks import RankPool
from tests.support.training import Trace, bare_folder, build, largest_difference, reference, train_part

STEPS = 6
SLOW = Link(source="made up", bytes_per_s=100.0, latency_s=0.0)
FAST = Link(source="made up", bytes_per_s=1e15, latency_s=0.0)
LATE = Link(source="made up", bytes_per_s=125e6, latency_s=1e-3)
COMPUTES = Predicted(step_s=1e-3, comm_s=0.0, samples_per_s=1.0, peak_bytes=(1,))
# Float32 sums in another order differ by about 1e-7 of their size; a few optimizer steps let that grow little.
TOLERANCE = 1e-5
JOB = "tests.support.jobs:padded"


class Mixed(nn.Module):
    """A model of parameters in float64 and bfloat16, of sizes that no number of workers divides."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(5, 7, dtype=torch.float64)
        self.narrow = nn.Linear(7, 3, dtype=torch.bfloat16)
        self.out = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.narrow(self.wide(x.double()).tanh().bfloat16()).float())  # type: ignore[no-any-return]


def mixed(*, steps: int) -> Job:
    return jobs.linear(steps=steps, model=Mixed)


def train_on_hosts(rank: Rank, *, per_host: list[int], **arguments: Any) -> Trace:
    """Train as if the first per_host[0] workers were on one host, the next on another. Runs in the pool."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # which one is chosen for several hosts is no matter here
    first = 0
    while rank.index >= first + per_host[0]:
        first += per_host[0]
        per_host = per_host[1:]
    there = dataclasses.replace(rank, local_index=rank.index - first, local_workers=per_host[0])
    trace = train_part(there, **arguments)
    whole = [parameter for parameter in trace.parameters if not isinstance(parameter, DTensor)]
    return dataclasses.replace(trace, parameters=whole)  # slices are nothing outside their groups


def trained(
    ranks: RankPool,
    folder: Path,
    builder: str,
    way: str,
    per_host: list[int],
    codec: str = "none",
    between: Link | None = None,
    **fields: Any,
) -> tuple[Trace, Communication]:
    """Return what worker 0 saw, the same as all others, and how they met; `between` is what cluster.toml says."""
    workers = sum(per_host)
    sync = fields.pop("sync", None) or Sync(way=way, codec=codec, bucket_bytes=4096)
    plan = Plan(**{"mesh": Mesh(replicate=workers), "predicted": COMPUTES, **fields}, sync=sync)
    path = bare_folder(folder, plan)
    if between is not None:
        node = Node(host="h1", device="cpu", cores=2, memory_bytes=1 << 30, count=len(per_host))
        write_toml(RunFolder(path).cluster_toml, Cluster(nodes=(node,), between=between))
    traces = ranks.run(
        train_on_hosts,
        workers=workers,
        per_host=per_host,
        builder=builder,
        arguments={"steps": STEPS},
        plan=plan,
        folder=path,
    )
    for trace in traces:
        assert trace.losses == traces[0].losses
        assert all(map(torch.equal, trace.parameters, traces[0].parameters)), "the same bits on every worker"
    return traces[0], read_toml(Communication, RunFolder(path).communication_toml)


@pytest.mark.parametrize(("name", "tolerance"), [("padded", TOLERANCE), ("mixed", 0.02)])
def test_two_hosts_of_two_meet_in_shared_memory_inside_and_train_what_one_process_does(
    ranks: RankPool, tmp_path: Path, name: str, tolerance: float
) -> None:
    # bfloat16 has 8 bits: each worker's part of a gradient is rounded to 0.4%, which a few steps add up.
    module = "tests.training.test_meeting" if name == "mixed" else "tests.support.jobs"
    builder = f"{module}:{name}"
    trace, communication = trained(ranks, tmp_path, builder, "two-level", [2, 2])
    assert largest_difference(trace.losses, reference(build(builder, steps=STEPS), STEPS).losses) <= tolerance
    assert communication.way == "two-level"
    assert communication.copied is not None
    assert communication.copied.bytes_per_s > 0


def test_hosts_of_different_numbers_of_workers_meet_over_wires_alone(ranks: RankPool, tmp_path: Path) -> None:
    trace, communication = trained(ranks, tmp_path, JOB, "auto", [2, 1])
    expected = reference(build(JOB, steps=STEPS), STEPS)
    assert largest_difference(trace.losses, expected.losses) <= TOLERANCE
    assert communication.way != "two-level"
    assert communication.copied is None
    assert communication.between is not None


def test_workers_of_one_host_take_no_codec_and_say_why(ranks: RankPool, tmp_path: Path) -> None:
    trace, communication = trained(ranks, tmp_path, JOB, "auto", [2], codec="auto")
    expected = reference(build(JOB, steps=STEPS), STEPS)
    assert largest_difference(trace.losses, expected.losses) <= TOLERANCE
    assert (communication.way, communication.codec) == ("shared-memory", "none")
    assert communication.codec_why.startswith("no codec pays here")
    assert communication.inside is not None, "what joins workers is in the folder, whatever is chosen"


@pytest.mark.parametrize("link", [SLOW, FAST])
def test_between_hosts_the_link_decides_on_a_codec(ranks: RankPool, tmp_path: Path, link: Link) -> None:
    # 137 numbers that no codec makes much smaller but sign: 5 s over the slow link, and a millisecond to compute.
    trace, communication = trained(ranks, tmp_path, JOB, "auto", [1, 1], codec="auto", between=link)
    assert communication.between == link
    expected = reference(build(JOB, steps=STEPS), STEPS)
    if link is SLOW:
        assert communication.codec == "sign"
        assert communication.codec_why.startswith("sign pays")
        assert largest_difference(trace.losses, expected.losses) > TOLERANCE, "gradients have gone through it"
    else:
        assert communication.codec == "none"
        assert communication.codec_why.startswith("no codec pays here")
        assert largest_difference(trace.losses, expected.losses) <= TOLERANCE


def test_a_link_that_nobody_has_named_is_measured_and_decides(ranks: RankPool, tmp_path: Path) -> None:
    _, communication = trained(ranks, tmp_path, JOB, "auto", [1, 1], codec="auto")
    assert communication.between is not None
    assert communication.between.source.startswith("measured between")
    assert "ms uncompressed" in communication.codec_why


def test_beside_a_link_that_the_file_names_what_it_leaves_out_is_measured(ranks: RankPool, tmp_path: Path) -> None:
    _, communication = trained(ranks, tmp_path, JOB, "auto", [2, 1], between=LATE)
    assert communication.between == LATE
    assert communication.inside is not None
    assert communication.inside.source.startswith("measured inside")


@pytest.mark.parametrize(("per_host", "codec"), [([2], "none"), ([1, 1], "int4")])
def test_shards_take_a_codec_that_serves_them_between_hosts_and_none_on_one(
    ranks: RankPool, tmp_path: Path, per_host: list[int], codec: str
) -> None:
    # Parameters are gathered whole, whatever gradients go through: 1.6 times as many steps do not pay, as with sign.
    fields = {"mesh": Mesh(shard=2), "zero": 2}
    trace, communication = trained(ranks, tmp_path, JOB, "auto", per_host, codec="auto", between=SLOW, **fields)
    expected = reference(build(JOB, steps=STEPS), STEPS)
    assert (largest_difference(trace.losses, expected.losses) <= TOLERANCE) == (codec == "none")
    assert communication.codec == codec
    assert ("meet in the memory of one host" in communication.codec_why) == (codec == "none")


@pytest.mark.parametrize("mesh", [Mesh(shard=2, replicate=2), Mesh(replicate=2, tensor=2)])
def test_auto_is_none_where_no_codec_goes_with_the_mesh_and_links_are_kept(
    ranks: RankPool, tmp_path: Path, mesh: Mesh
) -> None:
    job = "benchmarks.parallel_cases:gpt"
    _, communication = trained(
        ranks, tmp_path, job, "auto", [2, 2], codec="auto", mesh=mesh, zero=2 if mesh.shard > 1 else 0
    )
    assert communication.codec == "none"
    assert communication.codec_why.startswith("no codec goes with this plan")
    assert communication.between is not None
    assert communication.inside is not None


def test_without_a_prediction_auto_takes_no_codec_however_slow_the_link(ranks: RankPool, tmp_path: Path) -> None:
    _, communication = trained(ranks, tmp_path, JOB, "auto", [1, 1], codec="auto", between=SLOW, predicted=None)
    assert communication.codec == "none"
    assert "without a prediction" in communication.codec_why


@pytest.mark.parametrize(
    ("sync", "size"),
    [
        (Sync(way="ring"), 19 * LATE.latency_s * LATE.bytes_per_s * 2),
        (Sync(way="engine"), 19 * LATE.latency_s * LATE.bytes_per_s * 2),
        (Sync(codec="int8"), 19 * LATE.latency_s * LATE.bytes_per_s * 2 / CODECS["int8"].ratio),
        (Sync(codec="int8", bucket_bytes=1 << 20), 1 << 20),
    ],
    ids=["algorithm", "engine", "codec", "the plan"],
)
def test_a_bucket_is_as_large_as_the_link_asks_for_whatever_carries_it(
    ranks: RankPool, tmp_path: Path, sync: Sync, size: float
) -> None:
    _, communication = trained(ranks, tmp_path, JOB, "auto", [1, 1], between=LATE, sync=sync)
    assert communication.bucket_bytes == pytest.approx(size, rel=1e-6)


@pytest.mark.parametrize("codec", ["int8", "powersgd"])
def test_a_codec_that_the_plan_names_is_used(ranks: RankPool, tmp_path: Path, codec: str) -> None:
    trace, communication = trained(ranks, tmp_path, JOB, "auto", [2], codec=codec)
    expected = reference(build(JOB, steps=STEPS), STEPS)
    # int8 rounds by up to 1/254 of a block's largest; matrices as small as these go whole through PowerSGD.
    assert largest_difference(trace.losses, expected.losses) <= 1e-2
    assert (communication.codec, communication.codec_why) == (codec, "the plan says so")
