"""What tests of staging and of loggers share."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.data.pack.progress import Quiet
from shoal.data.pack.reader import Pack
from shoal.data.pack.writer import pack
from tests.support.mlflow_server import mlflow_server
from tests.training.test_pack_job import NUM_ROWS, numbers


@pytest.fixture(scope="session")
def mlflow_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an MLflow server, the same for all tests."""
    pytest.importorskip("flask", reason="an MLflow server needs Flask (it is in the extra dev)")
    with mlflow_server(tmp_path_factory.mktemp("mlflow")) as address:
        yield address


@pytest.fixture
def fresh_wandb() -> Iterator[None]:
    """Weights & Biases as a new process has it: it reads its variables once, and a test sets others than the last."""
    import wandb

    wandb.teardown()
    yield
    wandb.teardown()


@pytest.fixture
def own_desk(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A desk for each test: it lies among temporary files, as do sockets, whose paths must be short."""
    monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("tmp")))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield
    tempfile.tempdir = None


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of some parts, for the job of test_pack_job.py."""
    path = tmp_path_factory.mktemp("packs") / "rows.pack"
    pack([numbers(row) for row in range(NUM_ROWS)], path, part_bytes=200, report=Quiet())
    assert len(Pack(path).manifest.parts) > 4
    return path
