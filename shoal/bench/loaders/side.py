"""One loader in a process of its own, as whoever takes the turns sees it.

Between its turns a side is stopped (SIGSTOP), so that threads and worker processes that load ahead take no time from
the others. It is ended with all its children.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shoal.bench.loaders.memory import memory_of
from shoal.bench.loaders.peers.task import Task
from shoal.core.errors import WorkerFailed

_WORKER = Path(__file__).parent / "peers" / "worker.py"
_START_S = 300.0
"""FFCV compiles for up to 13 s before its first batch, on an idle machine."""
_LOOK_S = 120.0
_END_S = 5.0
_SAMPLE_S = 0.1
"""How often memory is looked at, in the first turn."""


class Side:
    """A loader that is open and stands still."""

    def __init__(self, python: Path, peer: str, task: Task, sample: Path, folder: Path) -> None:
        self._talk = _Process(
            [str(python), str(_WORKER), "read", peer, json.dumps(asdict(task)), str(sample), str(folder)]
        )
        try:
            opened = self._talk.answer(_START_S)
        except BaseException:
            self._talk.end()
            raise
        self.task = task
        self.first_batch_s: float = opened["first_batch_s"]
        self.how: str = opened["how"]
        self.memory_bytes = memory_of(self._talk.pid)
        self._talk.pause()

    def turn(self, *, warm_s: float, seconds: float, watch: bool = False) -> float:
        """Return samples a second over a turn; with `watch`, look at its memory meanwhile, which slows it."""
        self._talk.go_on(f"{warm_s} {seconds}")
        begin_s, most_s = time.monotonic(), 10 * (warm_s + seconds) + _START_S
        while True:
            try:
                answer = self._talk.answer(_SAMPLE_S if watch else most_s)
                break
            except TimeoutError:
                if time.monotonic() - begin_s > most_s:
                    raise WorkerFailed(f"a turn of {seconds:.1f} s has not ended in {most_s:.0f} s.") from None
                self.memory_bytes = max(self.memory_bytes, memory_of(self._talk.pid))
        self._talk.pause()
        return float(answer["samples"] / answer["seconds"])

    def end(self) -> None:
        """End it and all its children."""
        self._talk.end()


def ask(python: Path, what: str, *arguments: str, timeout_s: float = _LOOK_S) -> dict[str, Any]:
    """Return what a worker answers that does one thing: look, or write."""
    talk = _Process([str(python), str(_WORKER), what, *arguments])
    try:
        return talk.answer(timeout_s)
    except TimeoutError:
        raise WorkerFailed(f"it has not answered in {timeout_s:.0f} s.") from None
    finally:
        talk.end()


class _Process:
    """A worker and all its children, in a session of their own."""

    def __init__(self, command: Sequence[str]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed by end()
        environment = {**os.environ, "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
        environment.pop("PYTHONPATH", None)  # another Python has its own packages
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=environment,
                start_new_session=True,
                text=True,
            )
        except OSError as error:
            self._log.close()
            raise WorkerFailed(f"{command[0]} cannot be run: {error.strerror}.") from None
        self.pid = self._process.pid
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """Return its next answer. Raises TimeoutError, or WorkerFailed with what it said last."""
        try:
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError from None
        if not line:
            raise WorkerFailed(self._last_words())
        found: dict[str, Any] = json.loads(line)
        return found

    def pause(self) -> None:
        """Stop it and all its children."""
        os.killpg(self.pid, signal.SIGSTOP)

    def go_on(self, line: str) -> None:
        """Let it go on, with a line to do."""
        assert self._process.stdin is not None
        os.killpg(self.pid, signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):  # it has ended: the answer will say so
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()

    def end(self) -> None:
        """End it and all its children. Called again it does nothing."""
        if self._log.closed:
            return
        self._ask_to_end()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait(timeout=60)
        self._listener.join(timeout=60)
        for stream in (self._process.stdin, self._process.stdout, self._log):
            with contextlib.suppress(OSError):
                assert stream is not None
                stream.close()

    def _ask_to_end(self) -> None:
        """Let it give back what outlives a process, like shared memory."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGCONT)
        self._exit_code(within_s=_END_S)

    def _exit_code(self, *, within_s: float) -> int | None:
        """Return its exit code once it has ended. It is not reaped, so its number, and its group's, stay its own."""
        end_s = time.monotonic() + within_s
        while (ended := os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is None:
            if time.monotonic() > end_s:
                return None
            time.sleep(0.01)
        return ended.si_status

    def _last_words(self) -> str:
        code = self._exit_code(within_s=_END_S)
        self._log.seek(0)
        lines = [line for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip() if lines else f"it left with exit code {code}."


def this_python() -> Path:
    """Return the Python that runs this."""
    return Path(sys.executable)
