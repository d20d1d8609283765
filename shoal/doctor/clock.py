"""The clocks: this host's own, and that of the storage which other hosts see."""

import datetime
import tempfile
import time
from pathlib import Path

from shoal.core.units import format_seconds
from shoal.doctor.finding import Finding, ok, problem, warning

_RELEASE_S = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC).timestamp()
"""Before this there was no shoal."""
_MOST_SKEW_S = 2.0
"""File systems round times to whole seconds at worst."""
_SYNC = "have the clocks set by the network: chronyc tracking, or timedatectl set-ntp true"


def check_clock(now_s: float | None = None) -> list[Finding]:
    """Look whether the time of day can be right, and whether the clock that measures goes on."""
    now_s = time.time() if now_s is None else now_s
    first_s = time.monotonic()
    time.sleep(0.01)
    if time.monotonic() <= first_s:
        fact = "the monotonic clock stands still: no time can be measured"
        return [problem("clock", fact, "update the kernel, or the virtual machine's clock source")]
    if now_s < _RELEASE_S:
        fact = f"it is {_date(now_s)} here: names, certificates and Slurm's credentials go by that"
        return [problem("clock", fact, _SYNC)]
    return [ok("clock", f"{_date(now_s)} UTC")]


def check_storage_clock(runs: Path, offset_s: float | None = None) -> list[Finding]:
    """Compare the time that storage gives a file with this host's; `offset_s` is by how much it is ahead."""
    folder = next(path for path in (runs.resolve(), *runs.resolve().parents) if path.is_dir())
    if offset_s is None:
        try:
            offset_s = measured_offset(folder)
        except OSError:
            return []  # that no file can be written is said elsewhere
    if abs(offset_s) > _MOST_SKEW_S:
        which = "ahead of" if offset_s > 0 else "behind"
        fact = (
            f"files in {folder} are {format_seconds(abs(offset_s))} {which} this host's clock: events of several hosts"
        )
        return [warning("storage's clock", f"{fact} do not line up", f"on this host and on the file server, {_SYNC}")]
    return [ok("storage's clock", f"files in {folder} have this host's time")]


def measured_offset(folder: Path) -> float:
    """Return by how many seconds the time of a file just written is ahead of this host's."""
    before_s = time.time()
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".shoal-doctor-") as file:
        file.write(b"shoal")
        file.flush()
        written_s = Path(file.name).stat().st_mtime
    after_s = time.time()
    return written_s - min(max(written_s, before_s), after_s)


def _date(now_s: float) -> str:
    return datetime.datetime.fromtimestamp(now_s, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
