"""The copy of a job's code: what is in it, what is not, and that a process which uses it sees no later edit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.launch.slurm import code
from shoal.launch.slurm.code import code_path, copied_file, copy_code
from shoal.launch.slurm.code_files import SMALL_BYTES

ROOT = Path(__file__).parents[3]


def write(folder: Path, **files: str) -> None:
    """Write files; __ in a name stands for a slash, and all are Python unless they have a dot."""
    for name, text in files.items():
        path = folder / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A job in a folder of its own, with a module, a package and a namespace beside it, and much that is not code."""
    folder = tmp_path / "a job's é"
    write(folder, train="import json, numpy, helper\ndef late():\n    import nets.deep\n    import parts.one\n")
    write(folder, helper="from pathlib import Path\nwords = (Path(__file__).parent / 'words.txt').read_text()\n")
    write(folder, unused="", parts__one="", nets__deep="from . import other\n", nets__other="value = 1\n")
    (folder / "nets" / "__init__.py").write_text("import broken\n")
    (folder / "nets" / "layers.toml").write_text("width = 3\n")
    (folder / "broken.py").write_text("this is not Python\n")
    (folder / "words.txt").write_text("some words")
    (folder / "large.bin").write_bytes(b"x" * (SMALL_BYTES + 1))
    for skipped in ("runs/train-1", ".git", "corpus.pack", "nets/__pycache__"):
        (folder / skipped).mkdir(parents=True)
        (folder / skipped / "file.txt").write_text("")
    (folder / "env").mkdir()
    (folder / "env" / "pyvenv.cfg").write_text("")
    (folder / "photos").mkdir()
    return folder


def listed(target: Path) -> set[str]:
    """Return what is copied."""
    walked = [Path(folder, name) for folder, _, names in os.walk(target) for name in names]
    return {str(path.relative_to(target)) for path in walked if not path.is_symlink()} - {code.MANIFEST}


def test_what_the_file_imports_is_copied_and_data_is_linked(project: Path) -> None:
    target = project / "out" / "code"
    copied = copy_code(target, file=project / "train.py", path=[str(project)])
    assert listed(target) == {
        "train.py",
        "helper.py",
        "words.txt",
        "broken.py",
        "parts/one.py",
        "nets/__init__.py",
        "nets/deep.py",
        "nets/other.py",
        "nets/layers.toml",
    }
    links = {path.name: path.readlink() for path in target.iterdir() if path.is_symlink()}
    assert links == {"large.bin": project / "large.bin", "photos": project / "photos"}
    assert (copied.files, copied.left_out) == (9, ())
    assert code_path(target) == [str(target), str(project)]
    assert copied_file(target) == (str(project / "train.py"), target / "train.py")


def test_modules_of_other_folders_on_the_path_are_copied_and_installed_ones_are_not(tmp_path: Path) -> None:
    write(tmp_path / "job", train="import tools.text, pytest, queue, shoal, nowhere\n")
    write(tmp_path / "lib", tools__text="")
    copy_code(tmp_path / "c", file=tmp_path / "job" / "train.py", path=[str(tmp_path / "lib"), *sys.path])
    assert listed(tmp_path / "c") == {"train.py", "_1/tools/text.py"}
    paths = [str(tmp_path / "c"), str(tmp_path / "c" / "_1"), str(tmp_path / "job"), str(tmp_path / "lib")]
    assert code_path(tmp_path / "c") == paths


def test_a_copy_that_would_be_too_large_is_left_out_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "MOST_BYTES", 1000)
    write(tmp_path, train="import small, large\n", small="", large=f"text = '{'x' * 2000}'\n")
    copied = copy_code(tmp_path / "c", file=tmp_path / "train.py", path=[])
    assert listed(tmp_path / "c") == {"train.py", "small.py"}
    assert "Not copied: large, more than 2,000 files or 1 kB" in str(copied)


def test_of_many_small_files_those_that_are_not_copied_are_linked_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code, "MOST_FILES", 20)
    write(tmp_path / "job", train="")
    for number in range(24):
        (tmp_path / "job" / f"{number:02d}.txt").write_text(f"{number}")
    (tmp_path / "job" / "vocab.txt").write_text("words")
    os.mkfifo(tmp_path / "job" / "00-pipe")  # it cannot be copied, and keeps nobody else from it
    copied = copy_code(tmp_path / "c", file=tmp_path / "job" / "train.py", path=[])
    assert (tmp_path / "c" / "vocab.txt").read_text() == "words"
    assert {path.name for path in (tmp_path / "c").glob("*.txt")} == {
        path.name for path in (tmp_path / "job").glob("*.txt")
    }
    assert (tmp_path / "c" / "00-pipe").is_symlink()
    assert copied.files == 20
    assert f"Not copied: 6 of the files in {tmp_path / 'job'}, more than 20 files" in copied.note


def test_what_is_neither_copied_nor_linked_is_said_although_one_file_alone_was_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code, "MOST_FILES", 1)
    write(tmp_path / "job", train="")
    for number in range(10):
        (tmp_path / "job" / f"{number}.txt").write_text("")
    copied = copy_code(tmp_path / "c", file=tmp_path / "job" / "train.py", path=[])
    assert copied.files == 1
    assert f"Not copied: 2 of the files in {tmp_path / 'job'}, what else is in {tmp_path / 'job'}" in copied.note


def test_of_a_file_alone_nothing_is_said(tmp_path: Path) -> None:
    write(tmp_path / "job", train="")
    assert copy_code(tmp_path / "c", file=tmp_path / "job" / "train.py", path=[]).note == ""


def test_what_was_private_stays_private(tmp_path: Path) -> None:
    write(tmp_path, train="")
    (tmp_path / "token.txt").write_text("secret")
    (tmp_path / "token.txt").chmod(0o600)
    copy_code(tmp_path / "c", file=tmp_path / "train.py", path=[])
    assert (tmp_path / "c" / "token.txt").stat().st_mode & 0o777 == 0o600


def test_a_second_copy_takes_the_place_of_the_first(tmp_path: Path) -> None:
    write(tmp_path, train="import one\n", one="", two="")
    copy_code(tmp_path / "c", file=tmp_path / "train.py", path=[])
    write(tmp_path, train="import two\n")
    copy_code(tmp_path / "c", file=tmp_path / "train.py", path=[])
    assert listed(tmp_path / "c") == {"train.py", "two.py"}


@pytest.mark.parametrize("edit", ["changed", "removed"])
def test_a_process_with_the_copy_sees_no_later_edit_wherever_it_stands(project: Path, edit: str) -> None:
    target = project / "c"
    copy_code(target, file=project / "train.py", path=[str(project)])
    for path in [project / "helper.py", *(project / "nets").glob("*.py")]:
        path.write_text("raise RuntimeError('edited')\n") if edit == "changed" else path.unlink()
    write(target, broken="")
    ask = (
        "import sys; from pathlib import Path; from shoal.launch.slurm.code import use_code\n"
        "use_code(Path(sys.argv[1]))\n"
        "import json, helper, nets.deep, unused\n"
        "print(json.dumps([helper.words, nets.other.value, unused.__file__]))"
    )
    command = [sys.executable, "-c", ask, str(target)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["some words", 1, str(project / "unused.py")]
