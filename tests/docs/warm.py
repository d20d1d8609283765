"""Processes that run blocks and commands, in a folder: forked from one that has imported torch and shoal.

Importing them takes 4 s of a core, and a page has ten commands. The workers of `shoal train` are forked by a nursery,
a process that has imported everything: here it is a fork, too, made before anything was computed.
"""

import contextlib
import io
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

ENV = {"COLUMNS": "96", "BROWSER": "true", "TERM": "dumb", "NO_COLOR": "1"}
ENV |= {"WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": "sqlite:///mlflow.db"}  # loggers, without a server
_SPARES = 2
"""How many launchers a command has: `shoal verify` has two, one after the other."""


def context() -> Any:
    """Return what makes processes that have everything imported."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["shoal.training.worker", "shoal.cli.main", "tests.docs.preloaded"])
    return found


class Playing:
    """A command that runs: its process, and the file that it prints to."""

    def __init__(self, words: tuple[str, ...], folder: Path, output: Path, env: dict[str, str] | None = None) -> None:
        self.output = output
        arguments = (list(words), str(folder), str(output), env or {})
        self._process = context().Process(target=_be_command, args=arguments, daemon=False)
        self._process.start()

    def wait(self, timeout_s: float) -> int:
        """Return its exit code; after `timeout_s`, end it and raise TimeoutError."""
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            self.kill()
            raise TimeoutError(f"it has not ended within {timeout_s:g} s; it has printed:\n{self.text()}")
        return int(self._process.exitcode)

    def interrupt(self) -> None:
        """Do what Ctrl-C does."""
        os.kill(self._process.pid, signal.SIGINT)

    def kill(self) -> None:
        """End it at once; what it has started dies with it."""
        self._process.kill()
        self._process.join(10)

    def is_running(self) -> bool:
        """Return whether it has not ended."""
        return bool(self._process.is_alive())

    def text(self) -> str:
        """Return what it has printed until now."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""


class Interpreter:
    """The Python of a page: blocks are run one after another, and share their variables."""

    def __init__(self, folder: Path) -> None:
        self._pipe, theirs = context().Pipe()
        self._process = context().Process(target=_be_interpreter, args=(theirs, str(folder)), daemon=False)
        self._process.start()
        theirs.close()

    def run(self, code: str, name: str, *, module: str = "__main__", timeout_s: float = 120.0) -> tuple[str, str]:
        """Run `code`, and return what it printed and its traceback, which is empty if all went well."""
        self._pipe.send((code, name, module))
        if not self._pipe.poll(timeout_s):
            raise TimeoutError(f"{name} has not ended within {timeout_s:g} s")
        answer: tuple[str, str] = self._pipe.recv()
        return answer

    def close(self) -> None:
        """End it."""
        self._pipe.close()
        self._process.join(5)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join(10)


def _be_command(words: list[str], folder: str, output: str, env: dict[str, str]) -> None:
    os.setsid()
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(folder)
    os.environ.update(ENV, **env)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if words[:2] in (["shoal", "train"], ["shoal", "verify"]):
        _lend_nurseries()
    _leave(lambda: PROGRAMS[words[0]](words))


def _leave(main: Callable[[], int]) -> None:
    """End this process as `sys.exit(main())` would, less what multiprocessing does at the end."""
    import atexit

    try:
        code = main()
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    atexit._run_exitfuncs()
    os._exit(code)


def _shoal(words: list[str]) -> int:
    from shoal.cli.main import main

    sys.argv = ["shoal", *words[1:]]
    return main(words[1:])


def _python(words: list[str]) -> int:
    sys.argv = words[1:]
    sys.path.insert(0, str(Path.cwd()))
    runpy.run_path(words[1], run_name="__main__")
    return 0


def _torchrun(words: list[str]) -> int:
    from torch.distributed.run import main

    os.environ["OMP_NUM_THREADS"] = "1"
    main(words[1:])
    return 0


PROGRAMS: dict[str, Callable[[list[str]], int]] = {"shoal": _shoal, "python": _python, "torchrun": _torchrun}


def _be_interpreter(pipe: Any, folder: str) -> None:
    os.chdir(folder)
    os.environ.update(ENV)
    sys.path.insert(0, folder)
    import torch

    torch.set_num_threads(1)
    variables: dict[str, Any] = {}
    with contextlib.suppress(EOFError):
        while True:
            code, name, variables["__name__"] = pipe.recv()
            printed, failed = io.StringIO(), ""
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                try:
                    exec(compile(code, name, "exec"), variables)
                except BaseException:
                    failed = traceback.format_exc()
            pipe.send((printed.getvalue(), failed))


class _Spare:
    """A fork of this process that waits until it is asked to be a nursery: what `subprocess.Popen` gives."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            self._ours.close()
            _leave(lambda: _be_nursery(theirs))
        theirs.close()
        self.returncode: int | None = None

    def begin(self, control: int, output: int, env: dict[str, str]) -> None:
        socket.send_fds(self._ours, [json.dumps(env).encode()], [control, output])

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout_s: float) -> int:
        end_s = time.monotonic() + timeout_s
        while self.poll() is None:
            if time.monotonic() > end_s:
                raise subprocess.TimeoutExpired("nursery", timeout_s)
            time.sleep(5e-3)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def _be_nursery(asked: socket.socket) -> int:
    from shoal.cli.nursery import run

    launcher = os.getppid()
    data, descriptors, _, _ = socket.recv_fds(asked, 1 << 18, 2)
    if not data:
        return 0
    os.environ.clear()
    os.environ.update(json.loads(data))
    control, output = descriptors
    os.dup2(output, 1)
    os.dup2(output, 2)
    return run(Namespace(control=control, parent=launcher))


def _lend_nurseries() -> None:
    """Let launchers of this process have a nursery that is there already, instead of starting one."""
    from shoal.launch import nursery

    spares = [_Spare() for _ in range(_SPARES)]

    def start(command: list[str], *, stdout: Any, env: dict[str, str], **options: Any) -> Any:
        if not spares:
            return subprocess.Popen(command, stdout=stdout, env=env, **options)
        spare = spares.pop()
        spare.begin(int(command[command.index("--control") + 1]), stdout.fileno(), env)
        return spare

    lent = {name: getattr(subprocess, name) for name in ("DEVNULL", "STDOUT", "PIPE", "TimeoutExpired")}
    vars(nursery)["subprocess"] = Namespace(Popen=start, **lent)
