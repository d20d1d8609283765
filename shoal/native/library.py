"""The shared library, compiled when shoal was installed (build_native.py)."""

import ctypes
from functools import cache
from pathlib import Path

LIBRARY = Path(__file__).with_name("shoal_native.so")


@cache
def library() -> ctypes.CDLL | None:
    """Return the library, whose functions run without Python's lock; None where shoal was installed without it."""
    try:
        return ctypes.CDLL(str(LIBRARY))
    except OSError:
        return None
