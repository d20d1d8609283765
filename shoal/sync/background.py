"""Exchanges on a thread of their own, one after the other, while the caller computes."""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

_Work = tuple[Callable[[], torch.Tensor], "torch.futures.Future[torch.Tensor]"]


class Background:
    """Does what it is given in the order in which it is given; all workers give the same, in the same order."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self.error: Exception | None = None
        """What went wrong first; all that was given later has failed with it."""
        self._thread = threading.Thread(target=self._run, name="shoal exchange", daemon=True)
        self._thread.start()

    def start(self, work: Callable[[], torch.Tensor]) -> "torch.futures.Future[torch.Tensor]":
        """Return the future of what `work` returns."""
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self._queue.put((work, future))
        return future.then(_value)  # which turns an exception into an error that DDP, being C++, understands

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Raise what really went wrong, in place of what an engine makes of a future that has failed."""
        try:
            yield
        except RuntimeError:
            if self.error is not None:
                raise self.error from None
            raise

    def close(self) -> None:
        """End the thread, after what it is doing; what it waits for has a timeout."""
        self._queue.put(None)
        self._thread.join(self._timeout_s)

    def _run(self) -> None:
        while (given := self._queue.get()) is not None:
            work, future = given
            try:
                if self.error is not None:
                    raise self.error
                future.set_result(work())
            except Exception as error:
                self.error = self.error or error
                future.set_exception(error)  # type: ignore[arg-type]  # torch says T, and takes exceptions
            del given, work, future  # or the last bucket would stay alive while the thread sleeps


def hook_of(background: Background, exchange: Callable[[torch.Tensor], None], on_bucket: Callable[[], None]) -> Any:
    """Return a communication hook of DDP that sums each bucket by `exchange`, in place, in the background."""

    def hook(_state: None, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        on_bucket()
        buffer = bucket.buffer()

        def work() -> torch.Tensor:
            exchange(buffer)
            return buffer

        return background.start(work)

    return hook


def _value(future: "torch.futures.Future[torch.Tensor]") -> torch.Tensor:
    return future.value()
