"""Where a worker is in its code: the innermost line of the user's, and whether it is there by itself or waits.

1. Of each thread, the frames are read from another thread (`sys._current_frames`), innermost first.
2. The innermost frame that is not of Python's own library tells what the main thread does: torch's distributed room or
   shoal's comm: it waits for other workers. Anything else of torch or shoal: it computes. Neither: the user's code.
3. A main thread that waits for data has its user's code in a loading thread: that one is looked at instead.
4. A thread that holds Python's lock stops them all, also the one that would look. So before each beat, C code is asked
   to write all stacks down unless it is asked again within `DUMP_S` (`faulthandler`); it needs no lock. It writes to
   memory that other workers of the host can read through /proc.
"""

import contextlib
import faulthandler
import hashlib
import linecache
import os
import re
import sys
import sysconfig
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

import shoal

DUMP_S = 3.0
_STDERR = 2

_SHOAL = str(Path(shoal.__file__).parent) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_LIBRARY = tuple(sysconfig.get_paths()[name] + os.sep for name in ("purelib", "platlib"))
_PYTHON = (*(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib")), "<frozen")
_COMMUNICATES = (f"{_SHOAL}comm{os.sep}", f"{_TORCH}distributed{os.sep}")
_LOADS = f"{_SHOAL}data{os.sep}"
_EXCHANGES = f"{_SHOAL}sync{os.sep}background.py"


class Frame(NamedTuple):
    """One line of a stack."""

    file: str
    line: int
    function: str = ""


@dataclass(frozen=True)
class Place:
    """Where a worker is."""

    text: str = ""
    """The innermost line of the user's code, "dataset.py:88", or of shoal's where there is none of his."""
    path: str = ""
    """The same with its whole path."""
    is_busy: bool = False
    """Whether the user's code is what runs, or waits for something that is no worker."""
    waits_in: str = ""
    """The function in which it waits for other workers, as far as the stack tells."""
    stack: str = ""
    """All lines of the main thread, hashed: one that computes has others when looked at again."""


def place_now() -> Place:
    """Return where this process is. Called by another thread than the main one."""
    stacks = {number: _frames(frame) for number, frame in sys._current_frames().items()}
    main = stacks.pop(threading.main_thread().ident or 0, [])
    stacks.pop(threading.get_ident(), None)
    lines = hashlib.blake2b(repr([frame[:2] for frame in main]).encode(), digest_size=8).hexdigest()
    return replace(place_of(main, list(stacks.values())), stack=lines)


def place_of(main: list[Frame], others: list[list[Frame]] = []) -> Place:  # noqa: B006 (never changed)
    """Return where a process is whose main thread has these frames, innermost first, and other threads have those."""
    doing = _first_outside_python(main)
    if doing is not None and doing.file.startswith(_LOADS):
        loading = next(filter(_loads_for_user, others), None)
        main, doing = (main, doing) if loading is None else (loading, _first_outside_python(loading))
    exchanging = [stack for stack in others if any(frame.file.startswith(_EXCHANGES) for frame in stack)]
    waits_in = next(filter(None, map(_waits_in, [main, *exchanging])), "")
    shown = _shown(main)
    if shown is None:
        return Place(waits_in=waits_in)
    is_busy = _is_users(doing) and not _awaits_engine(main)
    return Place(f"{_short(shown.file)}:{shown.line}", f"{shown.file}:{shown.line}", is_busy, waits_in)


class Dump:
    """Memory into which C code writes this process's stacks when nobody has called `again` for `DUMP_S`."""

    def __init__(self) -> None:
        self.file = os.memfd_create("stacks") if hasattr(os, "memfd_create") else -1
        """Its descriptor, by which others of this host find it."""
        # Where the engine aborts the process (Gloo, where shapes differ), C code says in which lines its threads were.
        self._is_enabled = not faulthandler.is_enabled()
        if self._is_enabled:
            faulthandler.enable(file=_STDERR)
        self._lock = threading.Lock()  # or one thread would write to what has been closed by another, and opened anew

    def again(self) -> None:
        """Put off the writing."""
        with self._lock:
            if self.file >= 0:
                os.ftruncate(self.file, 0)
                os.lseek(self.file, 0, os.SEEK_SET)
                faulthandler.dump_traceback_later(DUMP_S, file=self.file)

    def close(self) -> None:
        """Write no more."""
        with self._lock:
            if self.file >= 0:
                faulthandler.cancel_dump_traceback_later()
                os.close(self.file)
                self.file = -1
        if self._is_enabled:
            faulthandler.disable()


def read_dump(process: int, file: int) -> Place:
    """Return where another process of this host was when C code wrote its stacks down; an empty place if it has not."""
    with contextlib.suppress(OSError):
        return place_in(Path(f"/proc/{process}/fd/{file}").read_text(errors="replace"))
    return Place()


def place_in(text: str) -> Place:
    """Return the place of the main thread in what `faulthandler` wrote: it lists that one last."""
    last = text.rpartition("Thread 0x")[2]
    found = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', last, re.MULTILINE)
    return place_of([Frame(file, int(line), function) for file, line, function in found])


def state_of(process: int) -> str:
    """Return what a process of this host that says nothing does, as "is stopped by a signal"."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "has ended"
    if state in "ZX":
        return "has ended"
    if state in "tT":
        return "is stopped by a signal (SIGSTOP, or a debugger)"
    return "waits for a disk" if state == "D" else "holds Python's lock"


def _frames(frame: object) -> list[Frame]:
    found = []
    while frame is not None:
        found.append(Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))  # type: ignore[attr-defined]
        frame = frame.f_back  # type: ignore[attr-defined]
    return found


def _first_outside_python(stack: list[Frame]) -> Frame | None:
    return next((frame for frame in stack if not _is_pythons(frame)), None)


def _is_pythons(frame: Frame) -> bool:
    return frame.file.startswith(_PYTHON) and not frame.file.startswith(_LIBRARY)


def _is_users(frame: Frame | None) -> bool:
    return frame is not None and not frame.file.startswith((_SHOAL, _TORCH))


def _loads_for_user(stack: list[Frame]) -> bool:
    """Return whether a thread of shoal's loader is in the user's code."""
    own = next((at for at, frame in enumerate(stack) if frame.file.startswith(_LOADS)), 0)
    return any(_is_users(frame) and not _is_pythons(frame) for frame in stack[:own])


def _awaits_engine(stack: list[Frame]) -> bool:
    """Return whether the innermost line may be `work.wait()`, which is C's: Python's own `wait` has frames inside."""
    return ".wait(" in linecache.getline(stack[0].file, stack[0].line)


def _waits_in(stack: list[Frame]) -> str:
    doing = _first_outside_python(stack)
    return doing.function if doing is not None and doing.file.startswith(_COMMUNICATES) else ""


def _shown(stack: list[Frame]) -> Frame | None:
    """Return the innermost frame of the user's own files, or else of what he has installed, or else of shoal."""
    outside = [frame for frame in stack if _is_users(frame) and not _is_pythons(frame)]
    own = [frame for frame in outside if not frame.file.startswith(_LIBRARY) and not _starts_workers(frame)]
    ours = [frame for frame in stack if frame.file.startswith(_SHOAL)]
    return next(iter([*own, *outside, *ours]), None)


def _starts_workers(frame: Frame) -> bool:
    return frame.file.startswith("<") or frame.file.endswith(f"{os.sep}bin{os.sep}shoal")


def _short(file: str) -> str:
    return f"shoal/{file.removeprefix(_SHOAL)}" if file.startswith(_SHOAL) else Path(file).name
