"""How wide the jobs of a map are, by what a stand-in for sinfo says about the nodes."""

import os
from pathlib import Path

import pytest

from shoal.launch.slurm.site import Site
from shoal.tasks.bunch import Room
from shoal.tasks.call import refer
from shoal.tasks.folder import TaskFolder
from shoal.tasks.queued import JobWatch, smallest_node
from shoal.tasks.submitting import SlurmOptions, Submitter
from tests.tasks import work

SINFO = """\
case "$*" in
  *--partition=big*) echo 'b1|64|512000|(null)|big';;
  *--partition=none*) exit 1;;
  *) echo 'n1|16|64000|(null)|normal*'; echo 'n2|8+|128000|(null)|normal*'; echo 'b1|64|512000|(null)|big'
     echo 'd1|2|4000|(null)|debug';;
esac
"""


@pytest.fixture(autouse=True)
def _sinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sinfo").write_text(f"#!/bin/bash\n{SINFO}")
    (tmp_path / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def test_the_smallest_node_that_a_job_may_get_has_the_fewest_cores_and_the_least_memory_of_all() -> None:
    assert smallest_node("big", Room()) == Room(64, 512000 * 2**20)
    assert smallest_node(None, Room(gpus=2)) == Room(8, 64000 * 2**20, gpus=2), "of the default partition"
    assert smallest_node("none", Room(3)) == Room(3), "nothing is known"


@pytest.mark.parametrize(
    ("asked", "site", "width"), [(None, None, 8), ("big", None, 64), (None, "big", 64), ("big", "none", 64)]
)
def test_jobs_are_as_wide_as_the_nodes_of_their_partition_be_it_asked_for_or_the_sites(
    tmp_path: Path, asked: str | None, site: str | None, width: int
) -> None:
    folder = TaskFolder.begin(tmp_path / "kept", refer(work.double), [1])
    options = SlurmOptions(partition=asked)
    submitter = Submitter(folder, options, Site(partition=site), [], watch=JobWatch(folder), say=print)
    assert submitter.width() == width
