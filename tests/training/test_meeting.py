"""How gradients meet: workers of several pretended hosts train the model that one process trains."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.comm.rank import Rank
from shoal.compress.codecs import CODECS
from shoal.core.run_folder import RunFolder
from shoal.core.toml import read_toml
from shoal.spec.communication import Communication
from shoal.spec.job import Job
from shoal.spec.plan import Mesh, Plan
from shoal.spec.sync import Sync
from tests.support import jobs
from tests.support.ranks import RankPool
from tests.support.training import Trace, bare_folder, build, largest_difference, reference, train_part

STEPS = 6
# Float32 sums in another order differ by about 1e-7 of their size; a few optimizer steps let that grow little.
TOLERANCE = 1e-5


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
    return train_part(there, **arguments)


def trained(
    ranks: RankPool, folder: Path, builder: str, way: str, per_host: list[int], codec: str = "none"
) -> tuple[Trace, Communication]:
    """Return what worker 0 saw, the same as all others, and how they met."""
    workers = sum(per_host)
    plan = Plan(mesh=Mesh(replicate=workers), sync=Sync(way=way, codec=codec, bucket_bytes=4096))
    path = bare_folder(folder, plan)
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
    trace, communication = trained(ranks, tmp_path, "tests.support.jobs:padded", "auto", [2, 1])
    expected = reference(build("tests.support.jobs:padded", steps=STEPS), STEPS)
    assert largest_difference(trace.losses, expected.losses) <= TOLERANCE
    assert communication.way != "two-level"
    assert communication.copied is None
    assert communication.between is not None


def test_workers_of_one_host_take_no_codec_and_say_why(ranks: RankPool, tmp_path: Path) -> None:
    trace, communication = trained(ranks, tmp_path, "tests.support.jobs:padded", "auto", [2], codec="auto")
    expected = reference(build("tests.support.jobs:padded", steps=STEPS), STEPS)
    assert largest_difference(trace.losses, expected.losses) <= TOLERANCE
    assert (communication.way, communication.codec) == ("shared-memory", "none")
    assert communication.codec_why.startswith("no codec pays here")


def test_between_hosts_the_measured_link_decides_on_a_codec(ranks: RankPool, tmp_path: Path) -> None:
    trace, communication = trained(ranks, tmp_path, "tests.support.jobs:padded", "auto", [1, 1], codec="auto")
    assert len(trace.losses) == STEPS
    assert communication.between is not None
    assert "with 16 bits" in communication.codec_why
    assert communication.codec in CODECS or communication.codec == "none"


@pytest.mark.parametrize("codec", ["int8", "powersgd"])
def test_a_codec_that_the_plan_names_is_used(ranks: RankPool, tmp_path: Path, codec: str) -> None:
    trace, communication = trained(ranks, tmp_path, "tests.support.jobs:padded", "auto", [2], codec=codec)
    expected = reference(build("tests.support.jobs:padded", steps=STEPS), STEPS)
    # int8 rounds by up to 1/254 of a block's largest; matrices as small as these go whole through PowerSGD.
    assert largest_difference(trace.losses, expected.losses) <= 1e-2
    assert (communication.codec, communication.codec_why) == (codec, "the plan says so")
