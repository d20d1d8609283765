"""Weights & Biases in the mode that its own variables and settings files say."""

from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.core.run_folder import RunFolder
from shoal.training.loggers.logger import Kept
from tests.support.curves import about
from tests.support.runs import make_run
from tests.support.wandb_file import read_offline

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("fresh_wandb")]


@pytest.fixture(autouse=True)
def _without_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is said of Weights & Biases, and no account: whoever tries to reach the server says so."""
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "settings"))


def delivered(folder: RunFolder, capfd: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """Bring the run to Weights & Biases, as a process that begins and ends with it, and return what was said."""
    import wandb

    assert main(["log", str(folder.path), "--to", "wandb"]) == 0
    wandb.teardown()
    said = capfd.readouterr()
    return said.out, said.err


def assert_kept_offline(folder: RunFolder, *, steps: int) -> None:
    ids, values, _, _ = read_offline(folder.path)
    assert ids == {Kept.read(folder, "wandb").id}
    assert [(step, found["loss"]) for step, found in sorted(values.items())] == about(
        (step, 4 / step) for step in range(1, steps + 1)
    )


@pytest.mark.parametrize("mode", ["offline", "dryrun"])
def test_a_run_is_kept_offline_where_a_variable_says_so(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", mode)
    folder = make_run(tmp_path, steps=3)
    assert delivered(folder, capfd) == (f"wandb has gpt-1 up to step 3: {folder.path / 'wandb'}\n", "")
    assert_kept_offline(folder, steps=3)


def test_a_run_is_kept_offline_where_a_settings_file_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "settings").mkdir()
    (tmp_path / "settings/settings").write_text("[default]\nmode = offline\n")
    folder = make_run(tmp_path, steps=3)
    assert delivered(folder, capfd) == (f"wandb has gpt-1 up to step 3: {folder.path / 'wandb'}\n", "")
    assert_kept_offline(folder, steps=3)


def test_a_run_goes_nowhere_while_it_is_disabled_and_all_of_it_where_it_no_longer_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    folder = make_run(tmp_path, steps=3)
    assert delivered(folder, capfd) == ("wandb is switched off, and was sent nothing.\n", "")
    assert not (folder.path / "wandb").exists()
    monkeypatch.setenv("WANDB_MODE", "offline")
    delivered(folder, capfd)
    assert_kept_offline(folder, steps=3)


def test_what_should_be_online_and_cannot_is_said_and_kept_offline(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path, steps=3)
    _, said = delivered(folder, capfd)
    assert "The run is kept offline. Later: wandb sync" in said
    assert_kept_offline(folder, steps=3)


def test_wandb_still_says_that_it_sends_the_starts_of_a_run_in_their_order() -> None:
    """There is no server here to send them to: docs/loggers.md repeats what its help says."""
    from wandb.cli.cli import sync

    said = " ".join(str(getattr(option, "help", "")) for option in sync.params)
    assert "files that are part of the same run, the files are synced sequentially in order of start time" in " ".join(
        said.split()
    )
