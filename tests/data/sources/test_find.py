"""Which source is opened for what; and what is said when that cannot be told."""

from pathlib import Path

import numpy as np
import pytest

from shoal.core.errors import ConfigError
from shoal.data.sources.find import EXTENSIONS, open_source
from shoal.data.sources.places import expand_braces, find_files
from tests.data.sources.made import ROWS
from tests.data.sources.made_files import webdataset
from tests.data.sources.made_text import Rows


def test_braces_stand_for_numbers_and_words() -> None:
    assert list(expand_braces("s-{08..10}.tar")) == ["s-08.tar", "s-09.tar", "s-10.tar"]
    assert list(expand_braces("{a,b}/{0..1}")) == ["a/0", "a/1", "b/0", "b/1"]
    assert list(expand_braces("plain")) == ["plain"]


def test_files_are_named_below_the_folder_they_share_in_the_order_given(tmp_path: Path) -> None:
    for name in ("a/2.npy", "b/1.npy"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(b"")
    place = find_files([tmp_path / "b" / "1.npy", tmp_path / "a" / "2.npy"])
    assert place.names == ["b/1.npy", "a/2.npy"]
    assert place.tree.name == tmp_path.name
    assert find_files(f"file://{tmp_path}/a/2.npy").names == ["2.npy"]
    assert find_files(f"file://{tmp_path}").names == ["a/2.npy", "b/1.npy"]
    assert find_files(f"file://{tmp_path}/*/*.npy").names == ["a/2.npy", "b/1.npy"]


@pytest.mark.parametrize("src", ["nothing/here", "nothing-*.tar", "memory://nothing/here"])
def test_what_is_not_there_is_said(src: str) -> None:
    with pytest.raises(ConfigError, match="There is nothing at"):
        open_source(src)


def test_a_url_that_holds_a_secret_is_not_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        open_source("memory://user:secret@nothing/here?key=secret")
    assert "secret" not in str(caught.value)


def test_a_protocol_that_nobody_knows_is_named() -> None:
    with pytest.raises(ConfigError, match="Protocol not known: nosuch"):
        open_source("nosuch://bucket/x")


def test_a_folder_of_several_kinds_asks_which_one_is_meant(tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text("y\n1\n")
    (tmp_path / "1.jpg").write_bytes(b"\xff\xd8\xff")
    (tmp_path / "README.md").write_text("no data")
    with pytest.raises(ConfigError, match=r"several kinds: folder \(1.jpg\), csv \(labels.csv\).*kind='folder'"):
        open_source(tmp_path)
    assert open_source(tmp_path, kind="csv").describe()["num_files"] == 1
    assert open_source(tmp_path, kind="folder").describe()["ignored_files"] == 2


def test_a_file_that_says_nothing_asks_for_its_kind(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(bytes(8))
    with pytest.raises(ConfigError, match=r"What train.bin is cannot be told from its name. Say kind="):
        open_source(tmp_path / "train.bin")
    assert open_source(tmp_path / "train.bin", kind="tokens").describe()["kind"] == "tokens"


def test_unknown_kinds_and_options_are_named_with_the_nearest(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(3))
    with pytest.raises(ConfigError, match="kind='numpy' is not known"):
        open_source(tmp_path / "x.npy", kind="numpy")
    with pytest.raises(ConfigError, match=r"no option 'colums'. Did you mean 'columns'"):
        open_source(tmp_path / "x.npy", colums=["x"])
    with pytest.raises(ConfigError, match=r"no option 'key'. Did you mean 'keys'"):
        open_source(webdataset(tmp_path).src, key=True)
    with pytest.raises(ConfigError, match=r"x.npy has no column 'y'. It has: x"):
        open_source(tmp_path / "x.npy", columns=["y"])


def test_python_objects_become_sources_and_sources_stay_what_they_are() -> None:
    source = open_source(Rows())
    assert open_source(source) is source
    assert source.describe() == {"kind": "dataset", "name": "Rows", "num_rows": len(ROWS)}
    assert open_source(ROWS).describe()["kind"] == "dataset"
    assert open_source(iter(ROWS)).describe() == {"kind": "iterable", "name": "list_iterator"}
    with pytest.raises(ConfigError, match="A int has no samples"):
        open_source(3)


def test_the_extensions_of_kinds_do_not_overlap() -> None:
    every = [end for ends in EXTENSIONS.values() for end in ends]
    assert len(every) == len(set(every))
