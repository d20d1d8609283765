"""The signals that ask a launcher to stop, noted instead of died of."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from shoal.core.errors import Stopped
from shoal.core.notice import SAME_S, SIGNALS

if TYPE_CHECKING:
    from shoal.launch.local import Worker


class Requests:
    """The signals that this process got while workers run."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.ends_at_once = False
        self._first_s = 0.0
        self._is_passed_on = False

    def note(self, number: int) -> None:
        """Take note of a signal; the first asks to stop in order, a second one, and Ctrl-C, to end at once."""
        self._first_s = self._first_s or time.monotonic()
        self.numbers.append(number)
        self.ends_at_once |= number == signal.SIGINT or time.monotonic() - self._first_s > SAME_S

    def pass_on(self, workers: list["Worker"]) -> bool:
        """Pass the first on to the workers, once; return whether somebody has asked to stop.

        Not to what they have started: a worker that loads data must not lose its helpers before it has stopped.
        """
        if self.numbers and not self._is_passed_on and not self.ends_at_once:
            self._is_passed_on = True
            for worker in workers:
                if worker.process.poll() is None:
                    worker.process.send_signal(self.numbers[0])
        return bool(self.numbers)


@contextlib.contextmanager
def stop_requests() -> Iterator[Requests]:
    """Collect the signals that ask to stop, for the length of a `with` block, instead of dying of them."""
    requests = Requests()
    previous = {}
    with contextlib.suppress(ValueError):  # not the main thread: signals go to whoever handles them there
        for number in (signal.SIGINT, *SIGNALS):
            previous[number] = signal.signal(number, _noting(requests, signal.getsignal(number)))
    try:
        yield requests
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _noting(requests: Requests, earlier: Any) -> Callable[[int, FrameType | None], None]:
    """Return a handler that takes note of a signal, and calls the one that was there before."""

    def handler(number: int, frame: FrameType | None) -> None:
        requests.note(number)
        if callable(earlier) and earlier is not signal.default_int_handler:  # which raises in the middle of anything
            earlier(number, frame)

    return handler


def stopped(number: int) -> Stopped:
    """Return the error of a run that was ended by the signal of that `number`."""
    if number == signal.SIGINT:
        return Stopped("stopped by Ctrl-C; all workers have ended.", exit_code=128 + signal.SIGINT)
    return Stopped(f"stopped by {signal.Signals(number).name}; all workers have ended.")
