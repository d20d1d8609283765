"""Packs that are not what they say: a part is missing, or the manifest lies; for bad_input.py."""

import contextlib
import io
import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bad_input_asked import Row, asked, must
from shoal.cli.main import main as shoal_command
from shoal.core.errors import ShoalError
from shoal.data.loader import Loader
from shoal.data.pack.progress import Quiet
from shoal.data.pack.reader import Pack
from shoal.data.pack.writer import pack
from shoal.data.stage.staging import stage


def broken_packs(folder: Path) -> list[Row]:
    """Packs of which a part is missing, or whose manifest is not true."""
    good = folder / "good.pack"
    samples = ({"x": np.full(64, row, np.float32), "text": f"sample {row}"} for row in range(1000))
    pack(samples, good, part_bytes=100e3, compression={"x": "none", "text": "zstd"}, report=Quiet())
    return [*missing_parts(folder, good), *lies(folder, good)]


def missing_parts(folder: Path, good: Path) -> list[Row]:
    """A pack without a file, seen by all who read packs."""
    rows = []
    for name in ("parts/00001.arrow", "parts/00001.zstd.arrow"):
        path = folder / "bad.pack"
        shutil.copytree(good, path)
        (path / name).unlink()
        bad, named = f"a pack without {name}", re.escape(name)
        rows += [
            asked(bad, "Pack('bad.pack')[500]", named, partial(read_row, path), folder),
            asked(bad, "shoal.Loader('bad.pack', ...)", named, partial(load_all, path), folder),
            asked(bad, "stage('bad.pack')", named, partial(stage_all, folder, path), folder),
            checked(bad, folder, named),
            mended(folder, good),
        ]
    return rows


def read_row(path: Path) -> None:
    """Read one sample of the second part."""
    Pack(path)[500]


def load_all(path: Path) -> int:
    """Return how many samples a loader gives."""
    return sum(len(batch["text"]) for batch in Loader(path, batch_size=100, shuffle=False))


def stage_all(folder: Path, path: Path) -> None:
    """Stage a pack to another folder, and wait for all of it."""
    (folder / "node").mkdir(exist_ok=True)
    with stage(path, to=folder / "node", desk=folder / "desk", timeout_s=60) as staged:
        staged.wait(timeout_s=60)


def checked(bad: str, folder: Path, named: str) -> Row:
    """Return what `shoal pack --check` says of bad.pack."""
    code, said = shoal_check(folder)
    return Row(
        bad,
        "shoal pack --check bad.pack",
        said,
        "nothing",
        must(code == 2 and re.search(named, said), f"not named, exit code {code}"),
    )


def shoal_check(folder: Path) -> tuple[int, str]:
    """Return the exit code and the first problem."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        code = shoal_command(["pack", "--check", str(folder / "bad.pack")])
    return code, out.getvalue().replace(f"{folder}/", "").splitlines()[0]


def mended(folder: Path, good: Path) -> Row:
    """Bring the pack back, and read it in every way."""
    path = folder / "bad.pack"
    shutil.rmtree(path)
    shutil.copytree(good, path)
    code, said = shoal_check(folder)
    try:
        stage_all(folder, path)
        wrong = must(code == 0 and load_all(path) == 1000, "not read")
    except ShoalError as error:
        wrong = f"NO: {error}"
    leftovers = [str(each) for each in (folder / "node").rglob("*.arrow")]
    shutil.rmtree(path)
    return Row("the same, mended", "all four", said, "nothing", wrong or must(not leftovers, f"left: {leftovers}"))


def _change(*keys: Any, by: Any) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        at: Any = manifest
        for key in keys[:-1]:
            at = at[key]
        at[keys[-1]] = by

    return change


def _rows_of_two_parts(manifest: dict[str, Any]) -> None:
    manifest["parts"][1]["num_rows"] += 1
    manifest["parts"][2]["num_rows"] -= 1


LIES: dict[str, tuple[Callable[[dict[str, Any]], None], str, str]] = {
    "rows": (_change("num_rows", by=1001), "open", "num_rows is 1,001, but its parts have 1,000"),
    "rows of two parts": (_rows_of_two_parts, "read", "00001.*rows, but the manifest says|block"),
    "the size of a part": (
        _change("parts", 1, "files", 0, "num_bytes", by=64),
        "read",
        "00001.arrow has",
    ),
    "a checksum": (
        _change("parts", 1, "files", 0, "checksum", by="00000000"),
        "check",
        "00001.arrow is damaged: its checksum",
    ),
    "the number of values": (_change("parts", 1, "num_values", "text", by=7), "check", "00001.*'text' has .* says 7"),
    "a dtype": (_change("columns", 0, "dtype", by="float64"), "read", "but the manifest says x .*double"),
    "a shape": (_change("columns", 0, "shape", by=[32]), "read", "00000.arrow has .* but the manifest says"),
    "a column's name": (_change("columns", 0, "name", by="y"), "read", "but the manifest says y"),
    "a file's name": (_change("parts", 0, "files", 0, "name", by="../../passwd"), "open", "lies outside the pack"),
    "rows of a block": (_change("block_rows", "zstd", by=7), "read", "00000.zstd.arrow.*block 0 has"),
    "its version": (_change("version", by=9), "open", "version 9; this shoal reads version 1"),
}


def lies(folder: Path, good: Path) -> list[Row]:
    """Manifests that are not true: noticed when the pack is opened, when its rows are read, or by --check alone."""
    rows = []
    for what, (change, when, named) in LIES.items():
        path = folder / "bad.pack"
        shutil.copytree(good, path)
        manifest = json.loads((path / "manifest.json").read_text())
        change(manifest)
        (path / "manifest.json").write_text(json.dumps(manifest))
        bad = f"a manifest that lies about {what}"
        if when != "check":
            call = "shoal.Loader('bad.pack', ...)"
            rows.append(asked(bad, call, named, partial(load_all, path), folder))
        rows.append(checked(bad, folder, named))
        shutil.rmtree(path)
    return rows
