"""How the command ends its process."""

import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
from shoal.cli import main

class Ring:
    def __init__(self): self.itself = self
    def __del__(self, write=os.write): write(1, b"freed")

ring = Ring()
main.main = lambda: 3
main.command()
"""


@pytest.mark.parametrize(("verb", "said"), [("worker", "freed"), ("train", "")])
def test_only_what_a_workers_user_has_made_is_searched_for_rings_at_the_end(verb: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, verb], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, said, "")
