"""What bash, zsh and fish complete, asked of the real shells."""

import json
import os
import pty
import signal
import subprocess
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path

from tests.support.waiting import wait_until

_TIMEOUT_S = 30.0
_END = "====="
_BASH = """\
source ./script
for line in "${@}"; do
    eval "COMP_WORDS=($line)"
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    _shoal
    for word in "${COMPREPLY[@]}"; do printf '%s\\n' "$word"; done
    echo =====
done
"""
_ZSHRC = """\
autoload -U compinit && compinit -D -u
source ./script
record() { print -r -- "$BUFFER" >> completed }
zle -N record
bindkey '^T' record
setopt no_beep
zle-line-init() { print ready > started }
zle -N zle-line-init
"""


def bash_offers(folder: Path, *lines: str) -> list[list[str]]:
    """Return what bash offers for the last word of each line, by `script` in the folder; '' is a word just begun."""
    return _parts(_output(["bash", "--norc", "-c", _BASH, "bash", *lines], folder))


def fish_offers(folder: Path, *lines: str) -> list[list[str]]:
    """Return what fish offers for the end of each line."""
    asked = "; ".join(f"complete -C {json.dumps(line)}; echo {_END}" for line in lines)
    parts = _parts(_output(["fish", "--no-config", "-c", f"source script; {asked}"], folder))
    return [[row.partition("\t")[0] for row in part] for part in parts]


def zsh_completes(folder: Path, *lines: str) -> list[str]:
    """Return what zsh makes of each line when the tabulator is pressed at its end.

    Only one thing may follow each; of several, zsh waits for a choice.
    """
    (folder / ".zshrc").write_text(_ZSHRC)
    outer, inner = pty.openpty()
    env = {**os.environ, "ZDOTDIR": str(folder), "TERM": "xterm", "HOME": str(folder)}
    shell = subprocess.Popen(
        ["zsh", "-d", "-i"], cwd=folder, env=env, stdin=inner, stdout=inner, stderr=inner, start_new_session=True
    )
    os.close(inner)
    threading.Thread(target=_drain, args=(outer,), daemon=True).start()
    completed = folder / "completed"
    try:
        wait_until((folder / "started").exists, seconds=_TIMEOUT_S)
        for number, line in enumerate(lines, start=1):
            os.write(outer, f"{line}\t\x14\x15".encode())  # tabulator, record, clear the line
            wait_until(partial(_has_lines, completed, number), seconds=_TIMEOUT_S)
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.wait(_TIMEOUT_S)
        os.close(outer)
    return completed.read_text().splitlines()


def _parts(said: str) -> list[list[str]]:
    return [part.splitlines() for part in said.split(f"{_END}\n")[:-1]]


def _has_lines(file: Path, count: int) -> bool:
    return file.exists() and file.read_text().count("\n") >= count


def _drain(descriptor: int) -> None:
    with suppress(OSError):
        while os.read(descriptor, 4096):
            pass


def _output(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout
