"""WebDataset tar files: hostile names, links, damage, and what their extensions mean."""

import io
import pickle
import tarfile
from pathlib import Path

import pytest

from shoal.core.errors import DataError
from shoal.data.pack.progress import Quiet
from shoal.data.pack.writer import pack
from shoal.data.sources.find import open_source
from shoal.data.sources.source import Sample, Source
from tests.data.sources.made import JPEGS


def everything(source: Source) -> list[Sample]:
    return [sample for part in source.slices(1 << 40) for sample in source.read(part)]


def tar_of(path: Path, *members: tuple[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


@pytest.mark.parametrize("name", ["../evil.jpg", "a/../../evil.jpg", "/etc/evil.jpg"])
def test_a_tar_with_names_that_point_outside_is_refused_by_name(name: str, tmp_path: Path) -> None:
    path = tar_of(tmp_path / "bad.tar", ("0.jpg", JPEGS[0]), (name, JPEGS[1]), ("2.jpg", JPEGS[2]))
    for about_bytes in (1, 1 << 40):
        source = open_source(path)
        found = [sample for part in source.slices(about_bytes) for sample in source.read(part)]
        assert [values for _, values in found[::2]] == [{"image": JPEGS[0]}, {"image": JPEGS[2]}]
        assert str(found[1][1]).endswith(f"its name {name!r} points outside of the tar. Such members are not read.")
        assert str(found[1][1]).startswith(f"bad.tar: {name.removesuffix('.jpg')}: ")


def test_a_pack_of_a_tar_leaves_out_and_counts_what_points_outside(tmp_path: Path) -> None:
    names = [*(f"{row}.txt" for row in range(70)), "../70.txt", "/71.txt", "72.txt"]
    path = tar_of(tmp_path / "bad.tar", *((name, b"text") for name in names))
    with pytest.raises(DataError, match=r"^bad.tar: ../70: its name '../70.txt' points outside of the tar"):
        pack(path, tmp_path / "a.pack", compression="none", report=Quiet())
    assert list(tmp_path.iterdir()) == [path]
    manifest = pack(path, tmp_path / "a.pack", compression="none", on_error="skip", report=Quiet())
    assert (manifest.num_rows, manifest.skipped) == (71, 2)
    assert ["'../70.txt'" in manifest.made["skipped"][0], "'/71.txt'" in manifest.made["skipped"][1]] == [True, True]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.GNUTYPE_SPARSE])
def test_links_devices_and_sparse_files_in_a_tar_are_refused(kind: bytes, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "bad.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        for row in range(3):
            member = tarfile.TarInfo(f"{row}.txt")
            if row == 1:
                member.type, member.linkname = kind, "/etc/passwd"
            else:
                member.size = 4
            tar.addfile(member, io.BytesIO(b"text"))
    found = everything(open_source(tmp_path / "bad.tar"))
    assert [found[0], found[2]] == [("bad.tar: 0", {"txt": "text"}), ("bad.tar: 2", {"txt": "text"})]
    assert str(found[1][1]) == "bad.tar: 1: '1.txt' is a link, a device or sparse. Only plain files are read."


def test_two_members_of_one_name_are_an_error_of_their_sample(tmp_path: Path) -> None:
    members = [("0.txt", b"a"), ("1.txt", b"b"), ("1.txt", b"c"), ("2.txt", b"d")]
    found = everything(open_source(tar_of(tmp_path / "bad.tar", *members)))
    assert [label for label, values in found if isinstance(values, DataError)] == ["bad.tar: 1"]
    assert "two members that end in .txt" in str(found[1][1])


def test_a_tar_without_its_end_mark_or_with_a_spoiled_header_is_named(tmp_path: Path) -> None:
    path = tar_of(tmp_path / "cut.tar", *((f"{row}.jpg", data) for row, data in enumerate(JPEGS)))
    written = path.read_bytes()
    path.write_bytes(written[: 1024 * 4])  # four members whole, and nothing after
    with pytest.raises(DataError, match=r"cut.tar has no end mark after its last member"):
        everything(open_source(path))
    path.write_bytes(written[:2048] + b"spoiled" + written[2055:])
    with pytest.raises(DataError, match=r"cut.tar is broken at byte 2048"):
        everything(open_source(path))


def test_members_of_a_tar_are_what_their_extensions_say_and_pickles_stay_closed(tmp_path: Path) -> None:
    evil = pickle.dumps({"never": "opened"})
    path = tar_of(
        tmp_path / "a.tar", ("k.left.png", b"png"), ("k.json", b'{"a": 1}'), ("k.pyd", evil), ("k.cls", b"oops")
    )
    assert str(everything(open_source(path))[0][1]).startswith("a.tar: k: .cls is not what its name says")
    path = tar_of(tmp_path / "a.tar", ("d/k.left.png", b"png"), ("d/k.json", b'{"a": 1}'), ("d/k.pyd", evil))
    [(label, values)] = everything(open_source(path, keys=True))
    assert label == "a.tar: d/k"
    assert values == {"left": b"png", "json": '{"a": 1}', "pyd": evil, "key": "d/k"}
