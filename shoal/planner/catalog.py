"""The catalog: devices and links with their rates, each from a file that names its source.

A name is found however people and drivers write it. "h200", "H200" and "NVIDIA H200" are one device, "NVLink4" and
"nvlink-4" one link: case and hyphens do not count, nor do makers' names. A part of a name is enough where it tells one
entry from all others ("4090"); where it does not ("A100"), the error names those it could be. A word that no entry has
("A100 PCIe", "RTX 4090 Laptop") is another product, and is not guessed.
"""

import re
from functools import cache
from pathlib import Path
from typing import TypeVar

import shoal
from shoal.core.errors import ConfigError, did_you_mean
from shoal.core.toml import read_toml
from shoal.spec.device import Device, Link

T = TypeVar("T")

_FILLERS = {"nvidia", "amd", "tesla", "geforce", "gpu", "sxm", "sxm2", "sxm4", "sxm5"}
"""Words that tell no two entries apart: makers, and the board that all entries with several boards are about."""
_SYNONYMS = {"infiniband": "ib", "eth": "ethernet", "gige": "ethernet"}


def read_device(name: str) -> Device:
    """Return the device `name` of the catalog."""
    return _read(Device, "devices", name)


def read_link(name: str) -> Link:
    """Return the link `name` of the catalog."""
    return _read(Link, "links", name)


def device_names() -> list[str]:
    """Return the names of all devices of the catalog."""
    return _names("devices")


def link_names() -> list[str]:
    """Return the names of all links of the catalog."""
    return _names("links")


def catalog_folder() -> Path:
    """Return where the catalog lies: inside an installed package, beside the package in a checkout."""
    package = Path(next(iter(shoal.__path__)))
    inside = package / "catalog"
    return inside if inside.is_dir() else package.parent / "catalog"


def _read(cls: type[T], kind: str, name: str) -> T:
    entry = _find(kind, name)
    return read_toml(cls, catalog_folder() / kind / f"{entry}.toml")


def _find(kind: str, name: str) -> str:
    """Return the name of the file that `name` means."""
    names, words = _names(kind), _words(name)
    exact = [entry for entry in names if "".join(words) == "".join(_words(entry))]
    fitting = exact or [entry for entry in names if words and set(words) <= _all_words(kind, entry)]
    if len(fitting) > 1:
        choice = f"{', '.join(map(repr, fitting[:-1]))} or {fitting[-1]!r}"
        raise ConfigError(f"{name!r} is several of the catalog's {kind}. Write {choice}.")
    if not fitting:
        raise ConfigError(f"the catalog has no {name!r} in {kind}.{did_you_mean('-'.join(words), names)}")
    return fitting[0]


def _names(kind: str) -> list[str]:
    return sorted(path.stem for path in (catalog_folder() / kind).glob("*.toml"))


@cache
def _all_words(kind: str, entry: str) -> set[str]:
    """Return the words of the file's name and, of a device, those of its title."""
    title = read_toml(Device, catalog_folder() / kind / f"{entry}.toml").title if kind == "devices" else ""
    return {*_words(entry), *_words(title)}


def _words(name: str) -> list[str]:
    """Return what tells one entry from another: "NVIDIA A100-SXM4-80GB" -> ["a100", "80"]."""
    words = [_SYNONYMS.get(word, word) for word in re.findall(r"[a-z0-9]+", name.lower())]
    words = [re.sub(r"(?<=\d)gb$", "", word) for word in words]
    return [word for word in words if word not in _FILLERS] or words
