"""What a worker knows of the others, and what they write into the store: the small change of `alive`."""

import os
import zlib
from dataclasses import dataclass
from pathlib import Path

from shoal.core.host import host_id

WATCHED = 16
"""How many workers each one looks after: so many must die at once for one to go unnoticed until the next is named."""
LEFT = "left"
"""The beat of a worker that has left in order."""


@dataclass
class Other:
    """What is known of another worker."""

    host: str = ""
    address: str = ""
    process: int = 0
    """Its number, and where such numbers are of one kind: those of a container are others than its host's, and those of
    two hosts that have one name are, too."""
    processes: int = 0
    beat: str = ""
    silent_s: float = 0.0

    def look(self, beat: str, gap_s: float) -> None:
        """Take note of its beat, `gap_s` after the last time."""
        self.silent_s = 0.0 if beat == LEFT or beat != self.beat else self.silent_s + gap_s
        self.beat = beat


def process_of_this() -> dict[str, int]:
    """Return what `Other` wants to know of this process."""
    try:
        processes = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:  # not Linux: nobody can look
        processes = 0
    # Outside of containers the kernel gives these the same sign on every host.
    return {"process": os.getpid(), "processes": processes and zlib.crc32(host_id().encode()) << 64 | processes}


def is_gone(other: Other, host: str) -> bool:
    """Return whether the process of a worker of this `host` has ended, as far as that can be seen from here."""
    own = process_of_this()["processes"]
    if other.host != host or not own or other.processes != own:
        return False
    try:
        return Path(f"/proc/{other.process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True
    except OSError:
        return False


def after(index: int, count: int) -> list[int]:
    """Return the workers that worker `index` of `count` looks after."""
    return [(index + ahead) % count for ahead in range(1, min(WATCHED + 1, count))]


def silence(names: list[str], seconds: float) -> str:
    """Return the sentence that says who has been silent."""
    return f"{' and '.join(names)} {'has' if len(names) == 1 else 'have'} been silent for {seconds:.1f} s."


def beat_of(worker: int) -> str:
    """Return the key of a worker's beat."""
    return f"beat {worker}"


def who_is(worker: int) -> str:
    """Return the key of what a worker says of itself."""
    return f"who {worker}"


def them(names: list[str]) -> str:
    """Return the pronoun."""
    return "it" if len(names) == 1 else "them"


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says; torch's have many."""
    return next(iter(str(error).splitlines()), type(error).__name__)
