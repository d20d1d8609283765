"""What shoal's own metadata says it needs, and what of that is installed here."""

import re
from dataclasses import dataclass
from functools import cache
from importlib import metadata

# As hatchling writes them: `h5py>=3.11; extra == 'hdf5'`.
_LINE = re.compile(r"(?P<name>[\w.-]+)[^;]*?(>=(?P<least>[\d.]+))?\s*(;.*extra == ['\"](?P<extra>[\w-]+)['\"].*)?")


@dataclass(frozen=True)
class Requirement:
    """A package that shoal, or one of its extras, needs."""

    package: str
    least: str
    """The lowest version; empty: any."""
    extra: str
    """Empty: needed by shoal itself."""

    def lacks(self) -> str:
        """Return what is wrong with what is installed, as "h5py 3.9 (3.11 or newer)"; empty where all is well."""
        found = installed(self.package)
        if found is None:
            return self.package
        if numbers(found) < numbers(self.least):
            return f"{self.package} {found} ({self.least} or newer is needed)"
        return ""


@cache
def requirements() -> list[Requirement]:
    """Return what shoal's metadata asks for; empty where shoal runs from a folder without having been installed."""
    try:
        lines = metadata.requires("shoal") or []
    except metadata.PackageNotFoundError:
        return []
    found = [parse(line) for line in lines]
    return [each for each in found if each.package != "shoal"]  # an extra that names others of its own


def parse(line: str) -> Requirement:
    """Return what one line of the metadata asks for."""
    match = _LINE.fullmatch(line.strip())
    assert match is not None, f"a requirement that is written otherwise: {line}"
    return Requirement(match["name"], match["least"] or "", match["extra"] or "")


def installed(package: str) -> str | None:
    """Return the version of a package; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with: those of 2.13.0+cpu are 2, 13 and 0."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()
