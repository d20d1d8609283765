"""Verbs that keep what is done: Ctrl-C and SIGTERM end them in order, and with a sentence."""

import contextlib
import signal
from collections.abc import Iterator

from shoal.core.errors import Stopped


class _Terminated(BaseException):
    """SIGTERM; no Exception, so that nobody on the way takes it for a failure."""


@contextlib.contextmanager
def stopped_in_order(said: str) -> Iterator[None]:
    """Leave the block by Stopped, which says `said`, on Ctrl-C and on SIGTERM: what its end has to do is done then."""
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    except KeyboardInterrupt:
        raise Stopped(f"Ctrl-C: {said}", exit_code=130) from None
    except _Terminated:
        raise Stopped(f"SIGTERM: {said}") from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(*_: object) -> None:
    raise _Terminated
