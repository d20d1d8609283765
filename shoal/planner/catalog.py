"""The catalog: devices and links with their rates, each from a file that names its source."""

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import shoal
from shoal.core.errors import ConfigError, did_you_mean
from shoal.core.toml import read_toml

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Device:
    """What computes."""

    source: str
    """Where the numbers come from."""
    matmul_flops_per_s: float
    bf16_matmul_flops_per_s: float
    memory_bytes_per_s: float
    """Bytes read plus bytes written by operations on whole tensors."""
    operation_s: float
    """What starting an operation costs, however small it is."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """What carries the gradients between two workers."""

    source: str
    """Where the numbers come from."""
    bytes_per_s: float
    latency_s: float
    overlaps: bool
    """Whether it works beside the device's computing; not where the same cores do both."""


def read_device(name: str) -> Device:
    """Return the device `name` of the catalog."""
    return _read(Device, "devices", name)


def read_link(name: str) -> Link:
    """Return the link `name` of the catalog."""
    return _read(Link, "links", name)


def _read(cls: type[T], kind: str, name: str) -> T:
    folder = catalog_folder() / kind
    known = [path.stem for path in folder.glob("*.toml")]
    if name not in known:
        raise ConfigError(f"the catalog has no {name!r} in {kind}.{did_you_mean(name, known)}")
    return read_toml(cls, folder / f"{name}.toml")


def catalog_folder() -> Path:
    """Return where the catalog lies: inside an installed package, beside the package in a checkout."""
    package = Path(next(iter(shoal.__path__)))
    inside = package / "catalog"
    return inside if inside.is_dir() else package.parent / "catalog"
