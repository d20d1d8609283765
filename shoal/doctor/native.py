"""The parts of shoal in C, which are compiled when it is installed."""

import ctypes
import os
from pathlib import Path

import shoal.native
from shoal.doctor.finding import Finding, ok, warning

# Not asked of the modules that load them: these need NumPy, which may be what is missing.
_OWN, _JPEG = (Path(shoal.native.__file__).with_name(name) for name in ("shoal_native.so", "shoal_jpeg.so"))

_WITHOUT = {
    "C library": "data loads slower, gradients are added up slower, and JPEGs are decoded by Pillow",
    "JPEG library": "progressive, CMYK and other unusual JPEGs are decoded by Pillow, slower",
}
_REMEDY = {
    "C library": "install a C compiler (Debian: gcc libc6-dev), then shoal once more: pip install --force-reinstall",
    "JPEG library": "install libjpeg-turbo's headers (Debian: libjpeg62-turbo-dev; Red Hat: libjpeg-turbo-devel), then "
    "shoal once more: pip install --force-reinstall",
}


def check_native(own: Path = _OWN, jpeg: Path = _JPEG) -> list[Finding]:
    """Look whether the libraries are there and can be loaded."""
    return [_check("C library", own), _check("JPEG library", jpeg)]


def _check(subject: str, file: Path) -> Finding:
    if not file.exists():
        return warning(subject, f"shoal was installed without {file.name}: {_WITHOUT[subject]}", _REMEDY[subject])
    try:
        ctypes.CDLL(os.fspath(file))
    except OSError as error:
        return warning(subject, f"{file.name} cannot be loaded ({error}): {_WITHOUT[subject]}", _REMEDY[subject])
    return ok(subject, f"{file.name} is compiled and loads")
