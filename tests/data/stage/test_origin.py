"""Packs behind addresses: moved, with a query, and what is said where there is none."""

from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.core.errors import ConfigError, DataError
from shoal.data.stage.origin import open_origin
from shoal.data.stage.staging import stage
from tests.data.stage.file_server import serving
from tests.data.stage.packs import differing, make_pack


def test_files_that_have_moved_are_followed_and_a_query_goes_with_each(tmp_path: Path) -> None:
    make_pack(tmp_path / "source" / "a.pack")
    with serving(tmp_path / "source") as server:
        server.moved["old.pack/manifest.json"] = f"{server.url}/a.pack/manifest.json?key=1"
        for number in range(4):
            server.moved[f"old.pack/parts/{number:05d}.arrow"] = f"/a.pack/parts/{number:05d}.arrow?key=1"
        url = f"{server.url}/old.pack/?key=1"
        with stage(url, to=tmp_path / "fast", desk=tmp_path / "desk") as staged:
            staged.wait(timeout_s=60)
            assert differing(staged.path, tmp_path / "source" / "a.pack") == []
        assert server.queries == {"key=1"}


@pytest.mark.parametrize(
    ("to", "words"),
    [
        ("/a.pack/manifest.json", "the server has led elsewhere 5 times"),
        ("file:///etc/passwd", "the server leads from http to file"),
    ],
)
def test_a_server_is_not_followed_in_circles_nor_out_of_the_web(tmp_path: Path, to: str, words: str) -> None:
    with serving(tmp_path) as server:
        server.moved["a.pack/manifest.json"] = to
        with pytest.raises(DataError, match=words):
            stage(f"{server.url}/a.pack", to=tmp_path / "fast", desk=tmp_path / "desk")


def test_what_cannot_be_reached_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(tmp_path) as server:
        url = server.url
        assert main(["stage", f"{url}/nowhere", "--to", str(tmp_path / "fast")]) != 0
        assert "nowhere cannot be read as a pack: " in (said := capsys.readouterr().err)
        assert "404 Not Found" in said
        assert "Traceback" not in said
    with pytest.raises(DataError, match=r"cannot be read as a pack: .*refused"):
        stage(f"{url}/a.pack", to=tmp_path / "fast", desk=tmp_path / "desk")
    with pytest.raises(ConfigError, match="names and passwords in an address are not supported") as found:
        open_origin("https://me:secret@example.org/a.pack")
    assert "secret" not in str(found.value)
