"""Where a worker is, by the stacks of its threads."""

import faulthandler
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from shoal.fault.watch_stack import Frame, place_in, place_now, place_of, state_of

TORCH = Path(torch.__file__).parent
SHOAL = Path(sys.modules["shoal"].__file__ or "").parent
USER = Frame("/home/me/dataset.py", 88, "__getitem__")
LOOP = Frame("/home/me/train.py", 12, "main")
PYTHON = Frame(threading.__file__, 300, "wait")


def test_the_innermost_line_of_the_user_is_the_place() -> None:
    place = place_of([USER, Frame(str(SHOAL / "data" / "steps.py"), 3), LOOP])
    assert (place.text, place.is_busy) == ("dataset.py:88", True)


def test_pythons_own_functions_are_where_their_caller_is() -> None:
    place = place_of([PYTHON, USER, LOOP])
    assert (place.text, place.is_busy) == ("dataset.py:88", True)


def test_a_thread_in_torchs_layers_computes_and_its_user_is_named() -> None:
    place = place_of([Frame(str(TORCH / "nn" / "functional.py"), 9), Frame("/home/me/model.py", 5), LOOP])
    assert (place.text, place.is_busy, place.waits_in) == ("model.py:5", False, "")


def test_a_thread_in_torchs_distributed_room_waits() -> None:
    place = place_of([Frame(str(TORCH / "distributed" / "distributed_c10d.py"), 9, "recv"), LOOP])
    assert (place.is_busy, place.waits_in) == (False, "recv")


def test_who_waits_for_data_is_where_the_loading_thread_is() -> None:
    feed, loading = Frame(str(SHOAL / "data" / "loading" / "feed.py"), 9), Frame(str(SHOAL / "data" / "chunk.py"), 4)
    place = place_of([PYTHON, feed, LOOP], [[PYTHON, Frame("/x.py", 1)], [USER, loading]])
    assert (place.text, place.is_busy) == ("dataset.py:88", True)


def test_shoals_own_line_is_named_where_there_is_no_user() -> None:
    assert place_of([Frame(str(SHOAL / "training" / "loop.py"), 14)]).text == "shoal/training/loop.py:14"


def test_the_main_thread_is_found_from_another_one() -> None:
    found: list[Any] = []
    looking = threading.Thread(target=lambda: found.append(place_now()))
    looking.start()
    looking.join(60)  # in this line, or the one before, this thread is meanwhile
    assert found[0].text.startswith("test_watch_stack.py:")
    assert found[0].is_busy


@contextmanager
def another_thread() -> Iterator[None]:
    """Have a thread that is somewhere else."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait, args=(60,))
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join(60)


def test_what_c_code_writes_down_tells_the_main_threads_line(tmp_path: Path) -> None:
    with another_thread(), (tmp_path / "stacks").open("w+") as file:
        line = sys._getframe().f_lineno + 1
        faulthandler.dump_traceback(file, all_threads=True)
        place = place_in((tmp_path / "stacks").read_text().replace("Current thread", "Thread"))
    assert place.text == f"test_watch_stack.py:{line}"


def test_a_process_that_is_not_there_has_ended() -> None:
    assert state_of(2**30) == "has ended"


def test_a_process_that_is_aborted_says_in_which_line_it_was() -> None:
    code = "from shoal.fault.watch_stack import Dump\nimport os\ndump = Dump()\nos.abort()\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGABRT
    assert 'File "<string>", line 4' in done.stderr
