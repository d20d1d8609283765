"""Nodes on hosts of their own: one is cut off in the middle, without a word, and the others finish."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shoal.comm.store import host_store
from tests.data.stage.file_server import serving
from tests.data.stage.packs import differing, make_pack
from tests.support.hosts import hosts

TIMEOUT_S = 120.0


@pytest.mark.usefixtures("_needs_hosts")
def test_a_node_is_cut_off_in_the_middle_and_the_others_finish_from_one_reading(tmp_path: Path) -> None:
    make_pack(tmp_path / "source" / "a.pack", num_parts=3, part_bytes=4_000_000)
    with hosts(count=3, rate="1gbit") as cluster, serving(tmp_path / "source", cluster.machine) as server:
        gate = server.gates.setdefault("a.pack/parts/00001.arrow", threading.Event())
        store, port = host_store(host=cluster.machine, timeout_s=TIMEOUT_S)
        processes = []
        for index in range(3):
            told = {"pack": f"{server.url}/a.pack", "home": str(tmp_path / f"node{index}"), "index": index}
            told |= {"host": cluster.machine, "port": port}
            command = [sys.executable, "-m", "tests.data.stage.hosts_node", json.dumps(told)]
            processes.append(cluster.start(index, command, stdin=-1, stdout=-1, text=True))
            assert line(processes[-1]) == "joined\n"
        assert [line(process) for process in processes] == 3 * ['{"part": 0}\n']
        assert server.reached.wait(TIMEOUT_S)
        cluster.cut(1)
        gate.set()
        said = {index: [line(processes[index]) for _ in range(3)] for index in (0, 2)}
        reports = {index: json.loads(lines[-1]) for index, lines in said.items()}
        for index, report in reports.items():
            assert differing(Path(report["path"]), tmp_path / "source" / "a.pack") == []
            assert report["listens"][0] == cluster.address(index)
            processes[index].communicate("", timeout=TIMEOUT_S)
        assert (reports[0]["source_bytes"], reports[2]["source_bytes"]) == (
            sum(server.read_bytes.values()) - size(tmp_path),
            0,
        )
        assert reports[2]["refetched"] == 1
        del store


def line(process: "subprocess.Popen[str]") -> str:
    """Return the next line that `process` prints."""
    assert process.stdout is not None
    return process.stdout.readline()


def size(tmp_path: Path) -> int:
    """Return what the three nodes have read of the manifest."""
    return 3 * (tmp_path / "source" / "a.pack" / "manifest.json").stat().st_size
