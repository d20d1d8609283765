"""Sources that are bad: each is made in a folder, packed, mended and packed again; for bad_input.py."""

import io
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bad_input_asked import PLAIN, Case, Row, asked, half_written, left, must, said_by, shoal, whole
from shoal.data.pack.progress import Quiet
from shoal.data.pack.writer import pack
from shoal.data.sources.find import open_source
from tests.data.pack.sources import jpeg
from tests.data.sources.beton_file import write_beton

TIMEOUT_S = 120


def images(folder: Path) -> list[Row]:
    """A cut JPEG, alone in a folder and in a tar, and three kinds of files that are no images."""
    photos = [jpeg(seed=number) for number in range(100)]
    rows: list[Row] = []
    for where in ("photos", "web.tar"):
        for number, (bad, content, named) in enumerate(
            [
                ("a truncated JPEG", photos[77][:-200], "77.*the JPEG is truncated"),
                ("a JPEG without its middle", photos[77][:1000] + photos[77][-20:], "77.*(damaged|cut short)"),
                ("an empty image", b"", "77.*is empty"),
                ("a web page called .jpg", b"<html>not found</html>", "77.*no image"),
            ]
        ):
            at = folder / f"{where}-{number}"
            at.mkdir()
            save_images(at / where, [*photos[:77], content, *photos[78:]])
            mend = partial(save_images, at / where, photos)
            rows += Case(at, f"{bad} in {'a folder' if where == 'photos' else 'a tar'}", where, named, mend, 1).rows()
    return rows


def save_images(path: Path, photos: list[bytes]) -> None:
    """Write images as a folder, or as a tar with labels."""
    if path.suffix == ".tar":
        members = [(f"{n:04d}.{end}", data) for n, x in enumerate(photos) for end, data in (("cls", b"1"), ("jpg", x))]
        save_tar(path, members)
        return
    path.mkdir(exist_ok=True)
    for number, photo in enumerate(photos):
        (path / f"{number:04d}.jpg").write_bytes(photo)


def save_tar(path: Path, members: list[tuple[str, bytes]], links: dict[str, str] | None = None) -> None:
    """Write a tar; `links` are members that point elsewhere."""
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            if links and name in links:
                member.type, member.linkname, member.size = tarfile.SYMTYPE, links[name], 0
            tar.addfile(member, io.BytesIO(data))


def hostile_tars(folder: Path) -> list[Row]:
    """Tars with members that would be written outside, were they unpacked."""
    rows: list[Row] = []
    names = [f"{number:04d}.txt" for number in range(80)]
    for number, name in enumerate(["../0077.txt", "a/../../0077.txt", "/etc/0077.txt", "0077.txt"]):
        at = folder / str(number)
        at.mkdir()
        links = {name: "/etc/passwd"} if name == "0077.txt" else None
        bad = f"a tar with a link to {links[name]}" if links else f"a tar with the name {name}"
        save_tar(at / "web.tar", [(each, b"some text") for each in [*names[:77], name, *names[78:]]], links)
        mend = partial(save_tar, at / "web.tar", [(each, b"some text") for each in names])
        named = f"{re.escape(repr(name))}.*(points outside|is a link)"
        rows += Case(at, bad, "web.tar", named, mend, 1).rows()
    return rows


def wrong_shape(folder: Path) -> list[Row]:
    """Row 9,999 of 12,000 has another length than it should."""
    import pyarrow as pa
    import pyarrow.parquet

    def save(lengths: list[int]) -> None:
        columns = {"x": [[1.5] * length for length in lengths], "label": list(range(len(lengths)))}
        pyarrow.parquet.write_table(pa.table(columns), folder / "table.parquet")

    save([8 - (row == 9999) for row in range(12000)])
    flags = ("--option", 'shapes={"x": [8]}')
    rows = [
        *Case(
            folder, "a wrong shape in row 9,999", "table.parquet", r"row 9999\b.*x", lambda: save([8] * 12000), 1, flags
        ).rows()
    ]
    samples = [{"x": np.zeros((3, 32 - (row == 9999)), np.float32)} for row in range(12000)]
    named = r"row 9999: column 'x' has shape \(3, 31\)"
    ask = partial(pack, samples, folder / "out.pack", report=Quiet())
    row = asked("a wrong shape in row 9,999", "shoal.pack(samples, 'out.pack')", named, ask, folder)
    row.wrong = row.wrong or half_written(folder)
    return [*rows, row]


def no_text(folder: Path) -> list[Row]:
    """What a line of JSON, a Python str and a field of FFCV's can hold, and no text can."""
    rows: list[Row] = []
    lines = [f'{{"text": "line {number}"}}' for number in range(80)]
    for number, (bad, line, named) in enumerate(
        [
            ("half of a pair of UTF-16 in JSON", '{"text": "a \\ud800"}', r"character \\ud800, which no text has"),
            ("JSON that is nested too deeply", "[" * 100_000, "is no JSON object with 'text'"),
            ("a line that is no JSON", '{"text": ', "is no JSON object with 'text'"),
        ]
    ):
        at = folder / str(number)
        at.mkdir()
        (at / "lines.jsonl").write_text("\n".join([*lines[:77], line, *lines[78:]]))
        mend = partial((at / "lines.jsonl").write_text, "\n".join(lines))
        rows += Case(at, bad, "lines.jsonl", rf"lines.jsonl: byte \d+.*{named}", mend, 1).rows()
    write_beton(folder / "a.beton", [{"note": {"n": number}} for number in range(80)])
    whole_file = (folder / "a.beton").read_bytes()
    (folder / "a.beton").write_bytes(whole_file.replace(b'"n": 77', b'"\xff": 77'))
    mend = partial((folder / "a.beton").write_bytes, whole_file)
    rows += Case(folder, "text of a .beton that is not UTF-8", "a.beton", "77: 'note' is not UTF-8", mend, 1).rows()
    samples = [{"text": "a" if row != 77 else "\ud800"} for row in range(80)]
    named = r"row 77: column 'text': character 0 is \\ud800, which no text has"
    ask = partial(pack, samples, folder / "out.pack", report=Quiet())
    row = asked("half of a pair of UTF-16 in a str", "shoal.pack(samples, 'out.pack')", named, ask, folder)
    row.wrong = row.wrong or half_written(folder)
    return [*rows, row]


def full_disk(folder: Path) -> list[Row]:
    """A disk with room for some of the parts; then with room for all."""
    np.save(folder / "rows.npy", np.random.default_rng(0).standard_normal((20_000, 64)).astype(np.float32))
    disk = folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(disk)]
    is_mounted = (
        os.geteuid() == 0 and subprocess.run(mount, timeout=30, check=False, capture_output=True).returncode == 0
    )
    bad = "a full disk (tmpfs of 3 MB)" if is_mounted else "a full disk (files of at most 0.5 MB)"
    limit = "" if is_mounted else "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000));"
    try:
        said = full_disk_said(folder, limit)
        row = Row(bad, "shoal pack rows.npy disk/out.pack", said, left(disk))
        row.wrong = must(re.search(r"is full|may be as large", said), "not named") or half_written(disk)
        if is_mounted:
            subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], timeout=30, check=True)
        again = Row("the same, with room", row.asked, full_disk_said(folder, ""), "out.pack, whole")
        again.wrong = must("Packed 20,000 rows" in again.said, "not packed") or whole(disk)
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", str(disk)], timeout=30, check=True)
    return [row, again]


def full_disk_said(folder: Path, limit: str) -> str:
    """Return what `shoal pack` says in a process of its own, which may have a limit."""
    code = f"import sys; {limit} from shoal.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = ["pack", "rows.npy", "disk/out.pack", "--part-size", "1MB", "--compression", "none"]
    done = subprocess.run([sys.executable, "-c", code, *command], cwd=folder, timeout=TIMEOUT_S, check=False,
                          capture_output=True, text=True)  # fmt: skip
    return said_by(done.stderr + done.stdout, folder)


def changing(folder: Path) -> list[Row]:
    """A source that is written to while it is read."""
    rows: list[Row] = []
    for what, name in (("a folder", "photos"), ("a tar", "web.tar"), ("a .npy file", "rows.npy")):
        at = folder / name.replace(".", "-")
        at.mkdir()
        if name.endswith(".npy"):
            np.save(at / name, np.zeros((5000, 16), np.float32))
        else:
            save_images(at / name, [jpeg(seed=number) for number in range(20)])
        written = at / name / "0003.jpg" if name == "photos" else at / name
        source = Changing(open_source(at / name), written)
        call = f"shoal.pack({name!r}, 'out.pack')"
        named = rf"changed while it was read \(({written.name}|{name})"
        ask = partial(pack, source, at / "out.pack", storage_bytes_per_s=1e9, report=Quiet())
        row = asked(f"{what} that changes while it is read", call, named, ask, at)
        row.wrong = row.wrong or half_written(at)
        code, said = shoal(at, "pack", name, "out.pack", *PLAIN)
        again = Row("the same, left alone", call, said, "out.pack, whole", must(code == 0, "not packed") or whole(at))
        rows += [row, again]
    return rows


class Changing:
    """A source, of which `file` is written again when the fifth sample, or the first batch, has been read."""

    def __init__(self, source: Any, file: Path) -> None:
        self._source, self._file = source, file
        self.columns = source.columns
        self.describe, self.slices, self.fingerprint = source.describe, source.slices, source.fingerprint

    def read(self, part: Any) -> Iterator[Any]:
        """Yield the samples."""
        for number, sample in enumerate(self._source.read(part)):
            if number == 5:
                self._touch()
            yield sample

    def _touch(self) -> None:
        found = self._file.stat()
        os.utime(self._file, ns=(found.st_atime_ns, found.st_mtime_ns + 1_000_000))
