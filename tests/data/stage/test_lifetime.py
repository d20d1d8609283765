"""How long storage keeps what is written, and results that leave what is erased before the job ends."""

import json
import os
import shutil
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.core.errors import CheckpointError, ConfigError
from shoal.data.stage.lifetime import JOB, KEPT, NODE, WEEKS, copied_out, known_places, lifetime_of, measured_places


@pytest.fixture
def site(tmp_path: Path) -> dict[str, str]:
    """The variables of a job at a site that has everything."""
    env = {"SLURM_JOB_ID": "4711"}
    folders = {
        "SLURM_TMPDIR": "local/4711",
        "TMPDIR": "tmp",
        "SCRATCH": "scratch",
        "PROJECT": "project",
        "HOME": "home",
    }
    for name, folder in folders.items():
        (tmp_path / folder).mkdir(parents=True)
        env[name] = str(tmp_path / folder)
    return env


def test_the_folders_of_a_site_are_known_with_their_lifetimes(tmp_path: Path, site: dict[str, str]) -> None:
    expected = {"local/4711": JOB, "tmp": NODE, "scratch": WEEKS, "project": KEPT, "home": KEPT}
    known = known_places(site)
    assert {
        str(path.relative_to(tmp_path)): known[path][1] for path in known if path.is_relative_to(tmp_path)
    } == expected
    assert lifetime_of(tmp_path / "local/4711/runs/not/there yet", site) == JOB
    assert lifetime_of(tmp_path / "scratch/me", site) == WEEKS
    assert lifetime_of(Path("/"), site) == KEPT


def test_a_folder_of_temporary_files_is_erased_with_the_job_if_it_has_the_jobs_number(tmp_path: Path) -> None:
    folder = tmp_path / "slurm.4711"
    folder.mkdir()
    assert lifetime_of(folder, {"TMPDIR": str(folder), "SLURM_JOB_ID": "4711"}) == JOB
    assert lifetime_of(folder, {"TMPDIR": str(folder), "SLURM_JOB_ID": "471"}) == NODE
    assert lifetime_of(folder, {"TMPDIR": str(folder)}) == NODE


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="this machine has no /dev/shm")
def test_memory_is_the_jobs_inside_a_job_and_the_nodes_outside() -> None:
    assert lifetime_of(Path("/dev/shm/x"), {"SLURM_JOB_ID": "1"}) == JOB
    assert lifetime_of(Path("/dev/shm/x"), {}) == NODE


def test_variables_that_name_no_folder_are_left_out(tmp_path: Path) -> None:
    known = known_places({"SLURM_TMPDIR": str(tmp_path / "gone"), "SCRATCH": "", "HOME": os.devnull})
    assert not {"$SLURM_TMPDIR", "$SCRATCH", "$HOME"} & {name for name, _ in known.values()}


def test_every_place_is_measured_fastest_first(site: dict[str, str]) -> None:
    places = measured_places(seconds=0.01, env=site)
    assert {"$SLURM_TMPDIR", "$SCRATCH", "$PROJECT", "$HOME"} <= {place.name for place in places}
    rates = [place.read_bytes_per_s or 0.0 for place in places]
    assert rates == sorted(rates, reverse=True)
    assert min(rates) > 0
    assert all(0 <= place.room_bytes <= place.size_bytes for place in places)


def test_the_tiers_of_this_node_are_shown(
    site: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in site.items():
        monkeypatch.setenv(name, value)
    assert main(["stage", "--tiers", "--json"]) == 0
    tiers = {tier["name"]: tier["lifetime"] for tier in json.loads(capsys.readouterr().out)["tiers"]}
    assert (tiers["$SLURM_TMPDIR"], tiers["$SCRATCH"], tiers["$HOME"]) == (JOB, WEEKS, KEPT)
    assert main(["stage", "--tiers"]) == 0
    assert "erased with the job" in capsys.readouterr().out


def fill(folder: Path) -> None:
    (folder / "events").mkdir(parents=True)
    (folder / "events" / "rank-0.jsonl").write_text("{}\n")


@pytest.mark.parametrize("error", [None, ValueError("no"), KeyboardInterrupt(), SystemExit(75)])
def test_results_leave_storage_that_is_erased_also_after_an_error(
    tmp_path: Path, site: dict[str, str], error: BaseException | None
) -> None:
    folder, said = Path(site["SLURM_TMPDIR"]) / "runs" / "it's 1", list[str]()
    caught: BaseException | None = None
    try:
        with copied_out(folder, to=tmp_path / "home" / "runs", say=said.append, env=site) as kept:
            fill(folder)
            if error is not None:
                raise error
    except BaseException as raised:
        caught = raised
    assert caught is error
    assert kept == tmp_path / "home" / "runs" / "it's 1"
    assert (kept / "events" / "rank-0.jsonl").read_text() == "{}\n"
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]
    assert said == [
        f"{folder} is erased with the job. At the end it is copied to {kept}.",
        f"{folder} was copied to {kept}.",
    ]


def test_a_folder_that_was_never_made_is_not_copied(tmp_path: Path, site: dict[str, str]) -> None:
    folder = Path(site["SLURM_TMPDIR"]) / "run"
    with copied_out(folder, to=tmp_path / "home", say=lambda _: None, env=site) as kept:
        pass
    assert not kept.exists()


def test_results_in_storage_that_is_kept_stay_where_they_are(tmp_path: Path, site: dict[str, str]) -> None:
    for name in ("SCRATCH", "PROJECT", "HOME", "TMPDIR"):
        folder = Path(site[name]) / "run"
        with copied_out(folder, say=pytest.fail, env=site) as kept:
            assert kept == folder


def test_a_name_that_is_taken_is_numbered_and_the_kept_folder_is_found(
    tmp_path: Path, site: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(site["SLURM_TMPDIR"]) / "run"
    fill(folder)
    monkeypatch.chdir(site["SLURM_TMPDIR"])
    for expected in ("run", "run-2", "run-3"):
        with copied_out(folder, say=lambda _: None, env=site) as kept:
            assert kept == tmp_path / "home" / "runs" / expected
    with copied_out(folder, say=lambda _: None, env=site | {"SLURM_SUBMIT_DIR": site["PROJECT"]}) as kept:
        assert kept == tmp_path / "project" / "runs" / "run"
    with (
        pytest.raises(ConfigError, match="is erased with the job, too"),
        copied_out(folder, to=folder.parent, say=pytest.fail, env=site),
    ):
        pass


def test_a_copy_that_fails_is_named_and_leaves_nothing_half(
    tmp_path: Path, site: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, said, to = Path(site["SLURM_TMPDIR"]) / "run", list[str](), tmp_path / "home" / "runs"
    fill(folder)

    def full(source: Path, target: Path, **_: object) -> None:
        target.mkdir()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copytree", full)
    refused = pytest.raises(CheckpointError, match=r"could not be copied to .*No space left")
    with refused, copied_out(folder, to=to, say=said.append, env=site):
        pass
    assert list(to.iterdir()) == []
    with pytest.raises(ValueError, match="first"), copied_out(folder, to=to, say=said.append, env=site):
        raise ValueError("first")
    assert "could not be copied" in said[-1]
