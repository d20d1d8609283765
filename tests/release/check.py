"""The check before a release, `make release-check`: in a clean environment, with the light dependencies alone.

1. The sdist is built, and the wheel from it, into dist/; what they hold is looked at.
2. A new environment gets torch, the wheel, and what pip installs for it: no extra.
3. Every verb says its help; shoal doctor finds no problem; the demo job trains with two workers and is reported on; a
   folder of .npy files is packed, checked and loaded; verbs that need an extra say which.

Needs what pip needs to install packages, and 1 to 3 minutes: 74 s on 2 cores, 2026-11-17.
"""

import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import numpy as np

from shoal.cli.main import VERBS
from tests.support.wheel import (
    LIGHT,
    ROOT,
    build,
    call,
    refuse_without_extras,
    sdist_faults,
    try_out,
    wheel_faults,
)

_INSTALL_S = 1200.0


def main() -> int:
    """Do it all, and say each step; an AssertionError says what is wrong."""
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    sdist, wheel = build(dist)
    faults = [f"{sdist.name}: {fault}" for fault in sdist_faults(sdist)]
    faults += [f"{wheel.name}: {fault}" for fault in wheel_faults(wheel)]
    assert not faults, "\n".join(faults)
    _say(f"{sdist.name} ({_kB(sdist)}), {wheel.name} ({_kB(wheel)}): all that belongs in, and nothing else")
    with tempfile.TemporaryDirectory(prefix="shoal-release-") as made:
        shoal = _installed(Path(made, "environment"), wheel)
        folder = Path(made, "elsewhere")
        folder.mkdir()
        for verb in VERBS:
            call(shoal, folder, verb, "--help")
        _say(f"{len(VERBS)} verbs say their help")
        _say(f"{try_out(shoal, folder).strip()}: checks itself, reads its catalog, trains, reports")
        shutil.copy(ROOT / "examples/gpt.py", folder)
        trained = call(shoal, folder, "train", "gpt.py", "--workers", "2", "--steps", "20")
        _say(trained.partition("\n")[0].strip())
        _pack(shoal, folder)
        _say(f"{', '.join(refuse_without_extras(shoal, folder))}: what needs an extra says which")
    _say("ready to be released")
    return 0


def _installed(environment: Path, wheel: Path) -> Path:
    """Return the command `shoal` of a new environment with the light dependencies alone."""
    venv.create(environment, with_pip=True)
    pip = [str(environment / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    torch = next(line for line in pins if line.startswith("torch=="))
    for asked in ([torch], ["--constraint", str(ROOT / "constraints.txt"), str(wheel)]):
        subprocess.run([*pip, *asked], timeout=_INSTALL_S, check=True)
    _say(f"installed with {len(LIGHT)} light dependencies: {', '.join(sorted(LIGHT))}")
    return environment / "bin/shoal"


def _pack(shoal: Path, folder: Path) -> None:
    for number in range(3):
        (folder / "arrays").mkdir(exist_ok=True)
        np.save(folder / f"arrays/{number}.npy", np.random.default_rng(number).random((8, 3)))
    call(shoal, folder, "pack", "arrays", "arrays.pack")
    call(shoal, folder, "pack", "--check", "arrays.pack")
    _say("a folder of .npy files is packed, and the pack is whole")


def _kB(file: Path) -> str:  # noqa: N802  # the unit
    return f"{file.stat().st_size / 1e3:,.0f} kB"


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
