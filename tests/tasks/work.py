"""Functions that the tests of this room run in workers."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from tests.support.waiting import wait_until


def double(item: Any) -> Any:
    return item * 2


def fail_at_three(item: int) -> int:
    if item == 3:
        raise ValueError("three")
    return item


def exit_at_three(item: int) -> int:
    if item == 3:
        raise SystemExit(5)
    return item


def die_at_three(item: int) -> int:
    if item == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def process(_: Any) -> int:
    time.sleep(0.01)
    return os.getpid()


def gpus_and_process(seconds: float) -> tuple[str | None, int]:
    time.sleep(seconds)
    return os.environ.get("CUDA_VISIBLE_DEVICES"), os.getpid()


def die_once(item: tuple[str, int]) -> int:
    """Kill the worker the first time that task 3 runs; `item` is a folder and a number."""
    folder, number = item
    with (Path(folder) / str(number)).open("a") as file:
        file.write("ran\n")
    if number == 3 and (Path(folder) / "3").read_text().count("ran") == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def fail_once(item: tuple[str, int]) -> int:
    folder, number = item
    mark = Path(folder) / f"failed-{number}"
    if number % 2 and not mark.exists():
        mark.touch()
        raise OSError("not yet")
    return number


def note(item: tuple[str, int]) -> int:
    """Append a line to the task's own file, so that a test can count how often each ran."""
    folder, number = item
    with (Path(folder) / str(number)).open("a") as file:
        file.write("ran\n")
    time.sleep(0.01)
    return number * 10


def cannot_be_pickled(item: int) -> Any:
    return (lambda: item) if item == 2 else item


class Picky(Exception):
    """An exception that cannot be built from its message alone, as many cannot."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def raise_picky(item: int) -> None:
    raise Picky(item, item)


def most_at_once(folder: str) -> int:
    """Return how many tasks were in `reading` while this one was."""
    from shoal.tasks.reads import reading

    with reading():
        mark = Path(folder) / str(os.getpid())
        mark.touch()
        time.sleep(0.02)
        count = len(list(Path(folder).iterdir()))
        mark.unlink()
    return count


def read_from(item: tuple[str, bool | None]) -> int:
    """Read from a stand-in for shared storage, beside a folder of marks, and return how many did at once.

    It serves each reader at the same rate, or, if it is saturated by one, all together at the rate of one. With None,
    nothing is read: wait for 4 workers to be up.
    """
    from shoal.tasks.reads import reading

    folder, is_saturated = Path(item[0]), item[1]
    if is_saturated is None:
        (folder.parent / f"up-{os.getpid()}").touch()
        wait_until(lambda: len(list(folder.parent.glob("up-*"))) == 4)
        return 0
    most = 1
    with reading():
        mark = folder / str(os.getpid())
        mark.touch()
        for _ in range(10):
            readers = len(list(folder.iterdir()))
            most = max(most, readers)
            (folder.parent / "source").read_bytes()
            time.sleep(0.02 * (readers if is_saturated else 1))
        mark.unlink()
    return most


def say(item: int) -> None:
    print("task", item)


def kill_job(item: int) -> int:
    """Kill the process that runs the whole job, at task 3."""
    if item == 3:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    return item


def rest_a_moment(item: int) -> int:
    time.sleep(0.001)
    return item


def wait_for(path: str, timeout_s: float) -> float:
    """Return `timeout_s` as soon as there is something at `path`."""
    end_s = time.monotonic() + timeout_s
    while not Path(path).exists() and time.monotonic() < end_s:
        time.sleep(0.02)
    return timeout_s


def wait_at(path: str) -> None:
    """Return as soon as there is something at `path`."""
    wait_for(path, timeout_s=60)
