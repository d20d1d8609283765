"""`shoal completion`: a script that completes shoal's command line in a shell."""

import argparse
import json
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.cli.completion_words import Command

ABOUT = "Print a script that completes verbs, flags, files and run folders in bash, zsh or fish."
EXAMPLE = """\
example:
  source <(shoal completion bash)                                                for this shell; zsh likewise
  shoal completion bash > ~/.local/share/bash-completion/completions/shoal       for every new one
  shoal completion zsh > ~/.zfunc/_shoal              with fpath+=~/.zfunc in ~/.zshrc, before compinit
  shoal completion fish > ~/.config/fish/completions/shoal.fish

Print it anew after an update: the script is a list, so that completing starts no Python.
"""
SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help="bash, zsh or fish")


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    from shoal.cli.completion_words import read_command
    from shoal.cli.main import build_parser

    script = _writer(arguments.shell)(read_command(build_parser()))
    print(json.dumps({"shell": arguments.shell, "script": script}) if arguments.json else script.rstrip())
    return 0


def _writer(shell: str) -> "Callable[[Command], str]":
    from shoal.cli.completion_bash import bash_script
    from shoal.cli.completion_fish import fish_script
    from shoal.cli.completion_zsh import zsh_script

    return {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}[shell]
