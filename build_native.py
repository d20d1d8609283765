"""Compiles shoal/native/*.c when shoal is installed: one shared library, and one more where libjpeg's headers are.

Without a compiler shoal does without both.

python build_native.py        compile it in place, after a change of a .c file
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand
    BuildHookInterface = object

FOLDER = Path(__file__).parent / "shoal" / "native"
LIBRARY, JPEG_LIBRARY = FOLDER / "shoal_native.so", FOLDER / "shoal_jpeg.so"
NEEDS_LIBJPEG = FOLDER / "jpeg_libjpeg.c"
FLAGS = ["-O3", "-std=c11", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra", "-ffp-contract=off"]


def compile_native(library: Path = LIBRARY, *, flags: Sequence[str] = ()) -> str | None:
    """Compile the library that needs nothing; return why not, if that fails."""
    return _compile([path for path in FOLDER.glob("*.c") if path != NEEDS_LIBJPEG], library, ["-lm"], flags)


def compile_jpeg(library: Path = JPEG_LIBRARY, *, flags: Sequence[str] = ()) -> str | None:
    """Compile the library that needs libjpeg-turbo; return why not, if that fails."""
    return _compile([NEEDS_LIBJPEG, FOLDER / "jpeg_header.c"], library, ["-ljpeg"], flags)


def _compile(sources: list[Path], library: Path, libraries: list[str], flags: Sequence[str]) -> str | None:
    unfinished, compiler = library.with_suffix(f".{os.getpid()}"), os.environ.get("CC", "cc")
    command = [compiler, *FLAGS, *flags, *sorted(map(str, sources)), "-o", str(unfinished), *libraries]
    try:
        done = subprocess.run(command, check=False, timeout=300, stderr=subprocess.PIPE, text=True)
        if done.returncode == 0:
            sys.stderr.write(done.stderr)  # warnings
            unfinished.replace(library)
            return None
        return done.stderr
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    finally:
        unfinished.unlink(missing_ok=True)


class CustomBuildHook(BuildHookInterface):
    """What hatchling calls before it makes a wheel or an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Compile, and put the library into the wheel, which is then one for this kind of machine."""
        if (problem := compile_native()) is not None:
            self.app.display_warning(f"shoal is installed without its C part, and loads data slower: {problem}")
            return
        build_data["artifacts"].append("/shoal/native/shoal_native.so")
        if (problem := compile_jpeg()) is None:
            build_data["artifacts"].append("/shoal/native/shoal_jpeg.so")
        else:
            self.app.display_warning(
                "shoal is installed without libjpeg-turbo (its header jpeglib.h is not here: libjpeg62-turbo-dev or "
                "libjpeg-turbo-devel): progressive and other unusual JPEGs are packed as they are, and Pillow decodes "
                f"them. {problem}"
            )
        build_data["pure_python"], build_data["tag"] = False, f"py3-none-{_platform()}"


def _platform() -> str:
    import sysconfig

    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


if __name__ == "__main__":
    if (said := compile_native()) is not None:
        sys.exit(said)
    if (said := compile_jpeg()) is not None:
        sys.stderr.write(f"Without libjpeg-turbo: {said}")
