"""Loading processes and the signals by which a run is asked to stop: they are for the one who loads."""

import os
import signal
import subprocess
import sys
from multiprocessing import active_children

import pytest

from shoal.data.loader import Loader


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT])
def test_a_loading_process_goes_on_until_it_is_told_to_end(number: signal.Signals) -> None:
    before = set(active_children())
    batches = iter(Loader(list(range(64)), batch_size=1, shuffle=False, workers=1))
    found = [int(next(batches))]
    (process,) = set(active_children()) - before
    assert process.pid is not None
    os.kill(process.pid, number)
    found += [int(batch) for batch in batches]
    assert found == list(range(64))
    assert not process.is_alive()


def test_a_script_that_leaves_in_the_middle_of_an_epoch_does_not_wait_for_them() -> None:
    code = (
        "from shoal.data.loader import Loader\n"
        "batches = iter(Loader(list(range(10**6)), batch_size=1, workers=2))\n"
        "next(batches)\n"
        "import builtins; builtins.kept = batches\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
