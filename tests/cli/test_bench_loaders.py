"""`shoal bench loaders`: every loader that is installed gives what was asked; figures, table, and what it refuses."""

import contextlib
import dataclasses
import importlib
import io
import json
import mmap
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from rich.console import Console

from shoal.bench.loaders.export import export_sample, task_of
from shoal.bench.loaders.figures import LIMIT, Figures, Loaded
from shoal.bench.loaders.measure import PEERS, bench_loaders
from shoal.bench.loaders.memory import memory_of
from shoal.bench.loaders.peers import crop, worker
from shoal.bench.loaders.peers.sample import Sample
from shoal.bench.loaders.peers.task import Task
from shoal.bench.loaders.side import Side, ask
from shoal.cli.loaders_table import draw_loaders
from shoal.cli.main import main
from shoal.core.errors import WorkerFailed
from shoal.data.pack.progress import Quiet
from shoal.data.pack.reader import open_pack
from shoal.data.pack.writer import pack
from shoal.native import jpeg
from tests.data.packs import images_pack, tokens_pack

WINDOW = 17
PYTHON = Path(sys.executable)


def rows() -> NDArray[np.float32]:
    return np.arange(3 * 4 * 100, dtype=np.float32).reshape(100, 3, 4)


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small pack of each kind."""
    folder = tmp_path_factory.mktemp("packs")
    found = {kind: folder / f"{kind}.pack" for kind in ("images", "tokens", "rows")}
    images_pack(found["images"], 24)
    documents = ({"ids": np.arange(500 * n, 500 * n + 500, dtype=np.uint16)} for n in range(4))
    pack(documents, found["tokens"], columns={"ids": "tokens"}, compression="none", report=Quiet(), part_bytes=2000)
    values = ({"x": row, "y": number} for number, row in enumerate(rows()))
    pack(values, found["rows"], compression="none", report=Quiet(), part_bytes=2000)
    return found


def asked(path: Path, **options: Any) -> Task:
    wanted = {"column": None, "batch_size": 8, "threads": 2, "window": WINDOW, "size": 16, **options}
    return task_of(open_pack(path), **wanted)


def exported(path: Path, task: Task, folder: Path, *, most_bytes: int = 10**9) -> Sample:
    folder.mkdir()
    export_sample(open_pack(path), task, folder, most_bytes=most_bytes)
    return Sample(folder, kind=task.kind, window=task.window)


def test_the_columns_decide_over_the_kind(packs: dict[str, Path]) -> None:
    for kind, path in packs.items():
        assert asked(path).kind == kind
    assert asked(packs["rows"]).column == "x"
    assert asked(packs["rows"], column="y").column == "y"
    assert asked(packs["images"], batch_size=None).batch_size == 64
    assert asked(packs["rows"], batch_size=None).batch_size == 1024


def test_rows_and_tokens_are_exported_as_they_are(packs: dict[str, Path], tmp_path: Path) -> None:
    sample = exported(packs["rows"], asked(packs["rows"]), tmp_path / "rows")
    assert np.array_equal(sample.values, rows())
    part = exported(packs["rows"], asked(packs["rows"]), tmp_path / "part", most_bytes=48 * 30)
    assert np.array_equal(part.values, rows()[:30])
    tokens = exported(packs["tokens"], asked(packs["tokens"]), tmp_path / "tokens")
    assert np.array_equal(tokens.values, np.arange(2000, dtype=np.uint16))
    assert len(tokens) == 1999 // 16
    assert np.array_equal(tokens[3], np.arange(48, 48 + WINDOW))
    few = exported(packs["tokens"], asked(packs["tokens"]), tmp_path / "few", most_bytes=1201)
    assert np.array_equal(few.values, np.arange(600, dtype=np.uint16))


@pytest.mark.skipif(not jpeg.available(), reason="shoal was installed without its C part")
def test_images_are_exported_without_restart_markers_and_with_the_same_pixels(
    packs: dict[str, Path], tmp_path: Path
) -> None:
    stored = open_pack(packs["images"])
    sample = exported(packs["images"], asked(packs["images"]), tmp_path / "images")
    assert len(sample) == len(stored) == 24
    assert any(b"\xff\xd0" in stored[number]["image"] for number in range(24))
    for number in range(24):
        assert b"\xff\xd0" not in sample[number]
        assert np.array_equal(jpeg.decode(sample[number]), jpeg.decode(stored[number]["image"]))


@pytest.mark.filterwarnings("ignore")  # other libraries' own
@pytest.mark.parametrize("kind", ["images", "tokens", "rows"])
@pytest.mark.parametrize("name", PEERS)
def test_every_loader_that_is_installed_gives_what_was_asked_for(
    name: str, kind: str, packs: dict[str, Path], tmp_path: Path
) -> None:
    peer = importlib.import_module(f"shoal.bench.loaders.peers.{PEERS[name]}")
    if kind not in peer.KINDS:
        return
    if missing := worker.look(peer).get("missing"):
        pytest.skip(f"{missing} is not installed")
    task = asked(packs[kind])
    sample, folder = exported(packs[kind], task, tmp_path / "sample"), tmp_path / name
    folder.mkdir()
    assert 0.9 * len(sample) <= peer.write(sample, folder, task) <= len(sample)  # LitData's windows do not overlap
    batches = iter(peer.open_batches(folder, task, sample)())
    for _ in range(2):
        batch = next(batches)
        assert task.wrong(batch) == ""
        if kind == "tokens":
            found = np.asarray(batch)
            assert np.array_equal(found, found[:, :1] + np.arange(WINDOW))
        if kind == "rows":
            found = np.asarray(batch)
            assert np.array_equal(found, rows()[(found[:, 0, 0] / 12).astype(int)])
    assert isinstance(peer.how(task), str)


@pytest.mark.parametrize("is_averaged", [False, True])
def test_crops_of_python_loaders_are_the_filter_that_is_named(is_averaged: bool) -> None:
    task = Task(kind="images", batch_size=1, threads=1, size=8, antialias=is_averaged)
    stripes = np.zeros((64, 64, 3), np.uint8)
    stripes[:, ::2] = 200
    found = crop.resize(stripes, task)
    assert found.shape == (8, 8, 3)
    assert task.filter in crop.how(task)
    flat = crop.resize(np.full((40, 50, 3), 7, np.uint8), task)
    assert np.all(flat == 7)
    assert abs(float(found.mean()) - 100) < (3 if is_averaged else 101)


def test_a_batch_that_is_not_what_was_asked_for_is_named() -> None:
    task = Task(kind="tokens", batch_size=4, threads=1, window=9)
    assert task.wrong(np.zeros((4, 9), np.int64)) == ""
    assert task.wrong(np.zeros((4, 9), np.uint16)) == "it gave a batch of uint16[4, 9]"
    assert "[3, 9]" in task.wrong(np.zeros((3, 9), np.int64))


def test_a_library_that_is_missing_is_named() -> None:
    assert worker.look(SimpleNamespace(MODULES=("json", "no_such_library"))) == {"missing": "no_such_library"}
    assert worker.look(SimpleNamespace(MODULES=("nowhere.at_all",))) == {"missing": "nowhere.at_all"}
    assert worker.look(SimpleNamespace(MODULES=("json",), PACKAGE="no-such-package")) == {"version": ""}


def test_what_a_loader_said_last_is_the_reason_that_it_is_left_out(tmp_path: Path, packs: dict[str, Path]) -> None:
    task = asked(packs["rows"])
    exported(packs["rows"], task, tmp_path / "sample")
    with pytest.raises(WorkerFailed, match=r"data\.pack"):
        Side(PYTHON, "shoal_loader", task, tmp_path / "sample", tmp_path)
    with pytest.raises(WorkerFailed, match="no_python"):
        ask(tmp_path / "no_python", "look", "shoal_loader")


def test_memory_counts_this_process() -> None:
    before = memory_of(os.getpid())
    with mmap.mmap(-1, 30_000_000) as held:  # new to the process, whatever it has freed before
        held.write(b"x" * len(held))
        assert memory_of(os.getpid()) > before + 20_000_000


def test_the_verb_measures_and_leaves_nothing_behind(packs: dict[str, Path], tmp_path: Path) -> None:
    options = ["--peers", "shoal,torch-batched", "--seconds", "0.2", "--rounds", "2", "--batch-size", "8"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert (
            main(["bench", "loaders", "--data", str(packs["rows"]), "--folder", str(tmp_path), *options, "--json"]) == 0
        )
    (figures,) = json.loads(printed.getvalue())
    assert [row["name"] for row in figures["loaders"]] == ["shoal", "torch DataLoader, batched index"]
    for row in figures["loaders"]:
        assert row["slowest"] <= row["samples_per_s"] <= row["fastest"]
        assert row["num_samples"] == figures["num_samples"] == 100
        assert (row["disk_bytes"] > 0) == (row["name"] == "shoal")
    assert figures["loaders"][0]["shoal_is_times_as_fast"] == 1.0
    assert figures["left_out"] == []
    assert list(tmp_path.iterdir()) == []


def test_who_fails_is_left_out_and_the_others_are_measured(packs: dict[str, Path], tmp_path: Path) -> None:
    false = tmp_path / "python"
    false.write_text("#!/bin/sh\necho 'this is no Python' >&2\nexit 3\n")
    false.chmod(0o755)
    (figures,) = bench_loaders(
        open_pack(packs["rows"]),
        [asked(packs["rows"])],
        seconds=0.1,
        rounds=1,
        peers=["torch-batched", "lmdb"],
        pythons={"lmdb": false},
    )
    assert [loaded.name for loaded in figures.loaded] == ["torch DataLoader, batched index"]
    assert figures.left_out == ["LMDB is left out: this is no Python"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--python", "ffcv"], "--python ffcv=/"),
        (["--python", "ffcv=/no/such/python"], "there is no /no/such/python"),
        (["--peers", "fcv"], "Did you mean 'ffcv'?"),
        (["--filters", "sharp"], "bilinear"),
        (["--batch-size", "0"], "--batch-size"),
        (["--column", "z"], "no column 'z'"),
        (["--folder", "/no/such/folder"], "no such folder"),
    ],
)
def test_what_it_cannot_do_it_says(
    options: list[str], said: str, packs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "loaders", "--data", str(packs["rows"]), *options]) == 2
    assert said in capsys.readouterr().err


def test_the_table_says_how_many_times_as_fast_shoal_is() -> None:
    task = Task(kind="images", batch_size=64, threads=2, column="image", antialias=True)
    ours = Loaded(
        name="shoal",
        version="1",
        workers=None,
        how="2 threads",
        samples_per_s=6000.0,
        slowest=5000.0,
        fastest=7000.0,
        first_batch_s=0.02,
        memory_bytes=10**8,
        num_samples=4000,
        write_s=4.0,
        disk_bytes=10**8,
    )
    peer = dataclasses.replace(
        ours, name="Peer", version="2.1", workers=2, samples_per_s=2000.0, num_samples=1000, write_s=0.0, disk_bytes=0
    )
    limit = dataclasses.replace(ours, name=LIMIT, samples_per_s=9000.0)
    figures = Figures(
        task=task,
        num_samples=4000,
        sample_bytes=180_000_000,
        rounds=5,
        turn_s=1.0,
        loaded=[ours, peer, limit],
        left_out=["X is left out: it is not there."],
    )
    console = Console(width=200, file=io.StringIO())
    console.print(draw_loaders(figures))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "random-resized crops to 224x224, antialiased; batches of 64 from 4,000 samples" in text
    assert "3.00x" in text
    assert "Peer 2.1, 2 workers" in text
    assert "the first 1,000 samples" in text
    assert "shoal is 3.00 times as fast as the fastest of the others, Peer 2.1, 2 workers." in text
    assert "X is left out: it is not there." in text
    assert figures.best_peer() is peer


def test_a_pack_without_one_whole_window_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = tokens_pack(tmp_path / "short.pack", 1)
    asked = ["bench", "loaders", "--data", str(short), "--peers", "shoal", "--window", "100000", "--seconds", "0.1"]
    assert main(asked) == 2
    assert "has no sample of tokens. Use more data, or a shorter --window." in capsys.readouterr().err
