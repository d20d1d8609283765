"""Which cluster.toml training goes by."""

from dataclasses import replace
from pathlib import Path

import pytest

from shoal.core.errors import ConfigError
from shoal.core.toml import read_toml, write_toml
from shoal.planner.catalog import read_device, read_link
from shoal.profile.host import measure_host
from shoal.spec.cluster import Cluster
from shoal.spec.plan import Plan
from shoal.training.host import completed, measured_host, probed_host, this_host
from shoal.training.prepare import Asked, prepare_run
from tests.support.jobs import linear


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fail(line: str) -> None:
    raise AssertionError(line)


def test_without_a_file_nothing_is_known() -> None:
    assert probed_host(None, say=fail) is None


def test_a_file_about_this_host_is_taken_from_the_working_directory_or_from_where_it_is_said(elsewhere: Path) -> None:
    measured = measured_host()
    write_toml(elsewhere / "cluster.toml", measured)
    assert probed_host(None, say=fail) == measured
    write_toml(elsewhere / "other.toml", measured)
    assert probed_host(elsewhere / "other.toml", say=fail) == measured
    assert read_toml(Cluster, elsewhere / "other.toml") == measured


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"host": "node-7"}, "describes the host 'node-7', and this is"),
        ({"device": "NVIDIA H200"}, "says device = 'NVIDIA H200', and this host has"),
        ({"cores": 4096}, "says cores = 4096, and this host has"),
        ({"count": 2}, "describes several hosts, and this run is on one"),
    ],
)
def test_a_file_about_another_host_is_left_aside_aloud_and_refused_where_it_was_asked_for(
    changes: dict[str, object], words: str, elsewhere: Path
) -> None:
    cluster = this_host()
    node = replace(cluster.nodes[0], **changes)  # type: ignore[arg-type]
    write_toml(elsewhere / "cluster.toml", replace(cluster, nodes=(node,)))
    said: list[str] = []
    assert probed_host(None, say=said.append) is None
    assert words in said[0]
    assert "left aside" in said[0]
    with pytest.raises(ConfigError, match="shoal probe --out") as error:
        probed_host(elsewhere / "cluster.toml", say=fail)
    assert words in str(error.value)


def test_a_file_that_was_asked_for_and_is_not_there_is_named(elsewhere: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no file .*none\.toml"):
        probed_host(elsewhere / "none.toml", say=fail)


def test_a_run_is_predicted_by_the_rates_of_the_file_and_keeps_them(elsewhere: Path) -> None:
    def step_s(name: str, flops_per_s: float) -> float:
        node = this_host().nodes[0]
        device = replace(read_device("cpu-host"), matmul_flops_per_s=flops_per_s)
        cluster = replace(this_host(), devices={node.device: device}, inside=read_link("loopback"))
        write_toml(elsewhere / name, cluster)
        asked = Asked(file=None, runs=elsewhere, cluster=elsewhere / name)
        folder = prepare_run(linear(), Plan(), asked, say=fail)
        assert read_toml(Cluster, folder.cluster_toml) == cluster
        predicted = read_toml(Plan, folder.plan_toml).predicted
        assert predicted is not None
        return predicted.step_s

    assert step_s("slow.toml", 1e3) > 10 * step_s("fast.toml", 1e12)


def test_this_host_measured_in_a_moment_has_rates_and_the_usual_link() -> None:
    cluster = measured_host()
    assert cluster.devices[cluster.nodes[0].device].matmul_flops_per_s > 0
    assert cluster.inside is not None


def test_what_nobody_measures_comes_from_the_catalog_where_that_knows_the_device() -> None:
    measured = measure_host(seconds=0.01)
    known = read_device("h200")
    device = completed(measured, entry="NVIDIA H200")
    assert (device.link, device.memory_error) == (known.link, known.memory_error)
    assert (device.library_bytes, device.heap_fraction) == (known.library_bytes, known.heap_fraction)
    assert device.matmul_flops_per_s == measured.matmul_flops_per_s
    assert completed(measured, entry="NVIDIA H300") == measured
