"""What a process and its children hold of the machine's memory."""

import re
from pathlib import Path

_LINE = re.compile(rb"^Pss_(Anon|Shmem):\s+(\d+) kB", re.MULTILINE)


def memory_of(root: int) -> int:
    """Return the bytes of memory that a process and all below it hold; 0 where the kernel does not tell.

    Pages that several share are counted once. Pages of files are not counted: the kernel takes them back when it needs
    them, whoever mapped or read them.
    """
    return sum(_own_bytes(process) for process in _tree(root))


def _own_bytes(process: int) -> int:
    try:
        text = Path(f"/proc/{process}/smaps_rollup").read_bytes()
    except OSError:  # it has ended meanwhile, or this is not Linux
        return 0
    return sum(1024 * int(number) for _, number in _LINE.findall(text))


def _tree(root: int) -> list[int]:
    found, at = [root], 0
    while at < len(found):
        for path in Path(f"/proc/{found[at]}/task").glob("*/children"):
            try:
                found += [int(child) for child in path.read_text().split()]
            except OSError:
                continue
        at += 1
    return found
