"""Which errors are the echo of another worker's end, and which are the job's own, whatever their words."""

import socket
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from shoal.comm.failure import is_peer_failure

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"


def caught(raises: Callable[[], object]) -> BaseException:
    with pytest.raises(Exception) as raised:  # of whichever class
        raises()
    return raised.value


def by_the_job() -> None:
    """Raise as the client of a database does that a dataset reads from."""
    raise RuntimeError("the server of samples: Connection refused")


def from_a_socket() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    try:
        socket.create_connection(address)
    except OSError as error:
        raise RuntimeError(f"no sample: {error}") from error


class Broken(torch.autograd.Function):
    """Raises in backward, which C++ runs."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        """Return `x`."""
        return x.clone()

    @staticmethod
    def backward(ctx: object, *_: torch.Tensor) -> torch.Tensor:
        """Raise."""
        raise RuntimeError("Broken pipe to the service of rewards")


def in_backward() -> None:
    Broken.apply(torch.ones(2, requires_grad=True)).sum().backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("raises", [by_the_job, from_a_socket, in_backward])
def test_an_error_of_the_jobs_own_is_no_lost_worker_whatever_its_words(raises: Callable[[], object]) -> None:
    assert not is_peer_failure(caught(raises))


def test_an_error_of_the_store_is_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    error = caught(lambda: dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=0.5)))
    assert is_peer_failure(error)


def test_what_the_job_raises_from_the_engines_error_is_one() -> None:
    def wraps() -> None:
        try:
            raise engine
        except RuntimeError as error:
            raise RuntimeError(f"in step 3: {error}") from error

    engine = dist.DistBackendError(GLOO)
    assert is_peer_failure(caught(wraps))


def test_words_that_c_has_raised_are_one() -> None:
    assert is_peer_failure(RuntimeError(GLOO)), "none of Python's lines has raised it"
    assert not is_peer_failure(RuntimeError("the shapes (2,) and (3,) do not match"))
