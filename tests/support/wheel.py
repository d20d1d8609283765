"""Building shoal as it is released, looking into what was built, and trying it out where it was installed."""

import email
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from pathlib import Path

from packaging.requirements import Requirement

import shoal

ROOT = Path(__file__).parents[2]
LIGHT = {"fsspec", "numpy", "plotly", "pyarrow", "rich", "scipy", "tensorboardx", "tomli-w", "torch"}
"""What an installation without extras needs: docs/dependencies.md has the reason of each."""
_BUILD_S, _TRY_S = 300.0, 300.0
_LIBRARIES = {"shoal/native/shoal_native.so", "shoal/native/shoal_jpeg.so"}
_JOB = """
import shoal, torch
from torch import nn

x = torch.randn(40, 5, generator=torch.Generator().manual_seed(7))
job = shoal.Job(
    model=lambda: nn.Linear(5, 1),
    loss=lambda output, batch: ((output[:, 0] - batch[1]) ** 2).mean(),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    data=torch.utils.data.TensorDataset(x, x.sum(1)),
    batch_size=8,
    steps=6,
)
"""


def build(folder: Path) -> tuple[Path, Path]:
    """Return the sdist of this checkout and the wheel built from that sdist, both in `folder`; no network is used."""
    _run([sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(folder)], ROOT, _BUILD_S)
    (sdist,) = folder.glob("shoal-*.tar.gz")
    offline = ["--no-build-isolation", "--no-deps", "--no-index", "--disable-pip-version-check"]
    _run([sys.executable, "-m", "pip", "wheel", *offline, "--wheel-dir", str(folder), str(sdist)], folder, _BUILD_S)
    (wheel,) = folder.glob("shoal-*.whl")
    return sdist, wheel


def sdist_faults(sdist: Path) -> list[str]:
    """Return what is wrong with what the sdist holds: it needs all that a wheel is built from, and nothing compiled."""
    with tarfile.open(sdist) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    wanted = {"pyproject.toml", "build_native.py", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt"}
    wanted |= {str(path.relative_to(ROOT)) for path in _sources("shoal") | _sources("catalog")}
    faults = [f"it lacks {name}" for name in sorted(wanted - names)]
    return faults + [f"it has {name}" for name in sorted(names) if name.endswith((".so", ".pyc", ".whl"))]


def wheel_faults(wheel: Path) -> list[str]:
    """Return what is wrong with what the wheel holds: the package without its C sources, the catalog, the libraries."""
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
    compiled = {".c", ".h"}
    wanted = {str(path.relative_to(ROOT)) for path in _sources("shoal") if path.suffix not in compiled}
    wanted |= {f"shoal/{path.relative_to(ROOT)}" for path in _sources("catalog")} | {"shoal/native/shoal_native.so"}
    faults = [f"it lacks {name}" for name in sorted(wanted - names)]
    return faults + [f"it has {name}" for name in sorted(names - wanted - _LIBRARIES)] + _metadata_faults(wheel)


def metadata(wheel: Path) -> Message:
    """Return the wheel's metadata."""
    with zipfile.ZipFile(wheel) as file:
        (name,) = [name for name in file.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(file.read(name))


def _metadata_faults(wheel: Path) -> list[str]:
    said = metadata(wheel)
    needed = {_name(line) for line in said.get_all("Requires-Dist", []) if "extra ==" not in line}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    truths = {
        f"version {said['Version']}": said["Version"] == shoal.__version__,
        f"needs {sorted(needed ^ LIGHT)}, or does not": needed == LIGHT,
        f"Python {said['Requires-Python']}": said["Requires-Python"] == ">=3.11",
        "other extras": set(said.get_all("Provides-Extra", [])) == set(project["optional-dependencies"]),
        "no readme": "The number of workers changes how fast you train" in str(said.get_payload()),
        f"for any machine: {wheel.name}": "-none-any" not in wheel.name,
    }
    return [fault for fault, is_true in truths.items() if not is_true]


def try_out(command: Path, folder: Path) -> str:
    """Use an installed `shoal` from `folder`, as people would, and return what `--version` said."""
    (folder / "job.py").write_text(_JOB)
    version = call(command, folder, "--version")
    found = json.loads(call(command, folder, "doctor", "--json"))
    levels = {each["subject"]: each["level"] for each in found["findings"]}
    where = _run([str(command.with_name("python")), "-c", "import shoal; print(shoal.__file__)"], folder, _TRY_S)
    assert Path(where.strip()).is_relative_to(command.parents[1]), "the checkout's was used"
    assert levels["torch"] == levels["process group"] == levels["C library"] == levels["packages"] == "ok", found
    cost = ("cost", "allreduce", "--bytes", "1GB", "--workers", "8", "--link", "ib-ndr")
    assert "ring" in call(command, folder, *cost), "the catalog"
    trained = json.loads(call(command, folder, "train", "job.py", "--workers", "2", "--name", "two", "--json"))
    assert trained["steps"] == 6, trained
    assert "Trained 6 steps on 2 workers" in call(command, folder, "report", "runs/two")
    assert (folder / "runs/two/report.html").stat().st_size > 1_000_000, "with its own copy of plotly"
    return version


def refuse_without_extras(command: Path, folder: Path) -> list[str]:
    """See that what needs an extra which is not there says which; return these extras."""
    (folder / "data.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    (folder / "tune.py").write_text("def objective(trial):\n    return trial.suggest_float('x', 0, 1)\n")
    asked = {
        "hdf5": ("pack", "data.h5", "data.pack"),
        "hf": ("fit", "config.json"),
        "sweep": ("sweep", "tune.py", "--trials", "2"),
    }
    for extra, arguments in asked.items():
        assert f"pip install 'shoal[{extra}]'" in call(command, folder, *arguments, code=2)
    return list(asked)


def link_light(folder: Path) -> None:
    """Put the light dependencies, and theirs, into `folder`, as links to where they are installed: nothing else."""
    named, found = set(LIGHT), set[str]()
    while named:
        name = named.pop()
        found.add(name)
        needed = map(Requirement, importlib.metadata.requires(name) or [])
        names = {each.name.lower() for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})}
        named |= names - found
    for name in found:
        package = importlib.metadata.distribution(name)
        for part in {file.parts[0] for file in package.files or []} - {"..", "__pycache__"}:
            (folder / part).symlink_to(Path(str(package.locate_file(part))))


def call(command: Path, folder: Path, *arguments: str, code: int = 0) -> str:
    """Return what `shoal ARGUMENTS` prints, without this checkout on Python's path."""
    return _run([str(command), *arguments], folder, _TRY_S, code=code)


def _run(command: list[str], folder: Path, timeout_s: float, *, code: int = 0) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"COLUMNS": "200"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == code, f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout + (done.stderr if code else "")


def _sources(folder: str) -> set[Path]:
    """Return the files of a folder that are no results."""
    results = {".so", ".pyc"}
    return {path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix not in results}


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower()
