"""Compiles shoal/native/*.c into one shared library, when shoal is installed; without a compiler shoal does without.

python build_native.py        compile it in place, after a change of a .c file
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand
    BuildHookInterface = object

FOLDER = Path(__file__).parent / "shoal" / "native"
LIBRARY = FOLDER / "shoal_native.so"
FLAGS = ["-O3", "-std=c11", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra", "-ffp-contract=off"]


def compile_native() -> str | None:
    """Compile the library; return why not, if that fails."""
    sources = sorted(map(str, FOLDER.glob("*.c")))
    unfinished = LIBRARY.with_suffix(f".{os.getpid()}")
    command = [os.environ.get("CC", "cc"), *FLAGS, *sources, "-o", str(unfinished)]
    try:
        subprocess.run(command, check=True, timeout=300)
        unfinished.replace(LIBRARY)
    except (OSError, subprocess.SubprocessError) as error:
        unfinished.unlink(missing_ok=True)
        return str(error)
    return None


class CustomBuildHook(BuildHookInterface):
    """What hatchling calls before it makes a wheel or an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Compile, and put the library into the wheel, which is then one for this kind of machine."""
        if (problem := compile_native()) is not None:
            self.app.display_warning(f"shoal is installed without its C part, and loads data slower: {problem}")
            return
        build_data["artifacts"].append("/shoal/native/shoal_native.so")
        build_data["pure_python"], build_data["tag"] = False, f"py3-none-{_platform()}"


def _platform() -> str:
    import sysconfig

    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


if __name__ == "__main__":
    if (said := compile_native()) is not None:
        sys.exit(said)
