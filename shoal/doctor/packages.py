"""Python, the packages that shoal needs, and those that its extras bring."""

import os
import platform
import sys

from shoal.doctor.finding import Finding, ok, problem, warning
from shoal.doctor.requirements import Requirement, installed, requirements

_OLDEST_PYTHON = (3, 11)

PURPOSES = {
    "accelerate": "examples/accelerate_*.py: Accelerate beside shoal",
    "dali": "feeding a DALI pipeline from a pack",
    "deepspeed": 'engine = "deepspeed" in a plan',
    "examples": "examples/digits.py",
    "hdf5": "packing HDF5 files",
    "hf": "shoal fit and plan of Hugging Face configs; packing Hugging Face datasets",
    "images": "decoding PNG and other images that are not JPEGs",
    "lightning": "shoal.lightning: a LightningModule under a shoal plan",
    "lmdb": "packing LMDB databases",
    "mlflow": "--log mlflow",
    "squashfs": "packing squashfs images",
    "sweep": "shoal sweep",
    "text": "packing text with a tokenizers file",
    "timm": "examples with timm's models",
    "wandb": "--log wandb",
    "zarr": "packing Zarr stores",
}
"""What each extra is for; docs/install.md has the same with their sizes."""
_OURS = ("dev", "docs")
"""Extras for work on shoal itself."""


def check_python(version: tuple[int, ...] = sys.version_info[:3]) -> list[Finding]:
    """Look at Python's version."""
    said = ".".join(map(str, version))
    if version < _OLDEST_PYTHON:
        oldest = ".".join(map(str, _OLDEST_PYTHON))
        remedy = f"make an environment with a newer one: python{oldest} -m venv .venv"
        return [problem("Python", f"{said} is older than {oldest}", remedy)]
    return [ok("Python", f"{said}, {platform.system()} {os.uname().release}, {sys.prefix}")]


def check_packages(needed: list[Requirement] | None = None) -> list[Finding]:
    """Look whether the packages that shoal needs are there."""
    ours = [each for each in (requirements() if needed is None else needed) if not each.extra]
    if not ours:
        fact = "shoal runs from a folder and is not installed here, so that its packages cannot be checked"
        return [warning("packages", fact, "pip install . in its folder")]
    missing = [lack for each in ours if (lack := each.lacks())]
    if missing:
        fact = f"{', '.join(missing)}: missing, or too old"
        names = " ".join(f"'{each.package}>={each.least}'" for each in ours if each.lacks())
        return [problem("packages", fact, f"pip install {names}")]
    versions = [f"{each.package} {installed(each.package)}" for each in ours if each.package != "torch"]
    return [ok("packages", ", ".join(versions))]


def check_extras(needed: list[Requirement] | None = None) -> list[Finding]:
    """Look which extras are there, and which are there by half or too old."""
    lacking: dict[str, list[str]] = {}
    present: dict[str, int] = {}
    for each in requirements() if needed is None else needed:
        if each.extra and each.extra not in _OURS:
            lack = each.lacks()
            lacking.setdefault(each.extra, []).extend([lack] if lack else [])
            present[each.extra] = present.get(each.extra, 0) + (installed(each.package) is not None)
    there = sorted(extra for extra, lacks in lacking.items() if not lacks)
    fact = f"{len(there)} of {len(lacking)} are installed: {', '.join(there) or 'none'}"
    absent = [f"for {PURPOSES.get(extra, extra)}: {_pip(extra)}" for extra in sorted(lacking) if extra not in there]
    found = [ok("extras", fact, *absent)]
    for extra in sorted(extra for extra, lacks in lacking.items() if lacks and present[extra]):
        said = f"{extra} is there by half: it lacks {', '.join(lacking[extra])}"
        found.append(warning("extras", said, f"{_pip(extra)} (it is for {PURPOSES.get(extra, extra)})"))
    return found


def _pip(extra: str) -> str:
    return f"pip install 'shoal[{extra}]'"
