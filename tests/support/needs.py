"""What tests need of a machine that not every machine has: programs, root, a browser.

A test that cannot run here is skipped with one sentence. Where everything must run, as in CI, it fails with it: the
variable SHOAL_TESTS_MUST_RUN says so. Debian's packages are installed where that can be done.
"""

import os
import shutil
import subprocess
from functools import cache
from typing import NoReturn

import pytest

MUST_RUN = "SHOAL_TESTS_MUST_RUN"
_TRIES = 3
_APT_S = 240.0
# A mirror that does not answer is given up soon, and tried again; another apt-get is waited for.
_PATIENCE = ("Acquire::http::Timeout=20", "Acquire::Retries=2", "DPkg::Lock::Timeout=120")


def need(reason: str | None) -> None:
    """Return where there is no `reason` why a test cannot run; else skip it, or fail it where all must run."""
    if reason is not None:
        _leave_out(reason)


def _leave_out(reason: str) -> NoReturn:
    if os.environ.get(MUST_RUN):
        pytest.fail(f"{reason}; {MUST_RUN} is set, so that this must run.", pytrace=False)
    pytest.skip(reason)


@cache
def why_no(programs: tuple[str, ...], packages: tuple[str, ...]) -> str | None:
    """Return why this machine cannot have `programs`, of these `packages`; None where it has, after this if need be."""
    missing = [program for program in programs if shutil.which(program) is None]
    if not missing:
        return None
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return f"there is no {' and no '.join(missing)} here, which only root can install, with apt-get"
    said = ""
    for _ in range(_TRIES):
        said = _apt("update") or _apt("install", "-y", "--no-install-recommends", *packages)
        if not said:
            return None
    return f"{' and '.join(packages)} could not be installed in {_TRIES} tries: {said}"


def _apt(*words: str) -> str:
    """Return what apt-get complained of; nothing where it has done it."""
    options = [word for option in _PATIENCE for word in ("-o", option)]
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            ["apt-get", "-qq", *options, *words], env=env, capture_output=True, text=True, timeout=_APT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{words[0]} took more than {_APT_S:g} s"
    return "" if done.returncode == 0 else done.stderr.strip()[-200:] or f"{words[0]} failed without a word"
