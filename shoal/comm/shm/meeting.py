"""How workers of one host find each other: a local socket without a file, its name told through the store.

1. Worker 0 listens on a socket in Linux's abstract namespace (no file, gone with its process, only this host) and puts
   its name and a secret into the store.
2. The others connect and send the secret and their number. Both sides ask the kernel who the other is: another user is
   turned away.
3. When all are there, worker 0 sends each the descriptors of the control memory and of a pidfd for every worker.
4. The connections stay, for the descriptors of buffers that are made later.
"""

import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from shoal.comm.calls import CALLS
from shoal.comm.told import not_told
from shoal.core.errors import PeerLost, PlanError

_MOST_MESSAGE_BYTES = 4096
_GREETING_S = 5.0  # a stranger that connects and says nothing holds up the others no longer than that

_SLICE_S = 0.05


class Meeting:
    """One worker's connections: worker 0 to all others, the others to worker 0."""

    def __init__(self, links: dict[int, socket.socket], timeout_s: float) -> None:
        self._links, self._timeout_s = links, timeout_s

    @property
    def others(self) -> list[int]:
        """Who is at the other end: everybody else for worker 0, worker 0 for everybody else."""
        return list(self._links)

    def send(self, other: int, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send a message, and descriptors that the receiver gets copies of. OSError if `other` is gone."""
        self._links[other].settimeout(self._timeout_s)
        socket.send_fds(self._links[other], [json.dumps(message).encode()], descriptors)

    def receive(self, other: int, most_descriptors: int, *, timeout_s: float) -> tuple[dict[str, Any], list[int]]:
        """Return the next message of `other` with its descriptors. OSError if it is gone; TimeoutError if silent."""
        return _receive(self._links[other], most_descriptors, timeout_s)

    def close(self) -> None:
        """Close the connections."""
        for link in self._links.values():
            link.close()
        self._links = {}


def gather(
    store: dist.Store, *, count: int, numbers: Sequence[int], timeout_s: float, join_number: int
) -> tuple[Meeting, list[int]]:
    """Return worker 0's connections to all others, and the pidfds of all workers in their order. Called by worker 0.

    Raises PeerLost naming who has not come within `timeout_s`.
    """
    links: dict[int, socket.socket] = {}
    pidfds = {0: os.pidfd_open(os.getpid())}
    name, secret = f"shoal-{secrets.token_hex(16)}", secrets.token_hex(16)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind("\0" + name)
            listener.listen(count)
            store.set(f"meeting {join_number}", json.dumps([name, secret]))
            _accept(listener, secret, links, pidfds, count=count, deadline_s=time.monotonic() + timeout_s)
        missing = [numbers[other] for other in range(count) if other not in pidfds]
        if missing:
            raise PeerLost(f"worker {missing[0]} has not joined the shared memory of this host within {timeout_s:g} s.")
    except BaseException as error:
        for link in links.values():
            _tell(link, {"refused": str(error)})
            link.close()
        for pidfd in pidfds.values():
            os.close(pidfd)
        raise
    return Meeting(dict(sorted(links.items())), timeout_s), [pidfds[other] for other in range(count)]


def reach(
    store: dist.Store, *, index: int, count: int, numbers: Sequence[int], timeout_s: float, join_number: int
) -> tuple[Meeting, list[int]]:
    """Return the connection to worker 0, and the descriptors of the control memory and of all pidfds.

    Called by every worker but worker 0. Raises PeerLost when worker 0 is not there, or says who else is not.
    """
    key = f"meeting {join_number}"
    if not_told(store, [key], timeout_s=timeout_s):
        raise PeerLost(f"worker {numbers[0]} has not joined the shared memory of this host within {timeout_s:g} s.")
    name, secret = json.loads(store.get(key))
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        link.settimeout(timeout_s)
        link.connect("\0" + name)
        if _who(link)[1] != os.geteuid():
            raise PlanError(f"worker {numbers[0]} belongs to another user: shared memory is not shared with it.")
        link.send(json.dumps({"secret": secret, "index": index}).encode())
        # Worker 0 waits timeout_s for the others, and then says who was missing: a moment longer than that.
        message, descriptors = _answer(link, count + 1, timeout_s + _GREETING_S)
        if "refused" in message:
            raise PeerLost(message["refused"])
    except OSError as error:
        link.close()
        raise PeerLost(f"worker {numbers[0]} is gone, or is not on the host of worker {numbers[index]}.") from error
    except BaseException:
        link.close()
        raise
    return Meeting({0: link}, timeout_s), descriptors


def _accept(
    listener: socket.socket,
    secret: str,
    links: dict[int, socket.socket],
    pidfds: dict[int, int],
    *,
    count: int,
    deadline_s: float,
) -> None:
    """Fill in `links` and `pidfds` until all have come or the time is up; strangers are turned away."""
    while len(pidfds) < count and (left_s := deadline_s - time.monotonic()) > 0:
        listener.settimeout(min(left_s, _SLICE_S))
        try:
            link, _ = listener.accept()
        except TimeoutError:
            CALLS.check()  # known from elsewhere: not all of them will come
            continue
        pid, user = _who(link)
        try:
            greeting, _ = _receive(link, 0, min(left_s, _GREETING_S))
            is_ours = user == os.geteuid() and secrets.compare_digest(str(greeting.get("secret")), secret)
            if is_ours:
                pidfds[greeting["index"]] = os.pidfd_open(pid)
        except (OSError, ValueError):
            is_ours = False
        if is_ours:
            links[greeting["index"]] = link
        else:
            link.close()


def _answer(link: socket.socket, most_descriptors: int, timeout_s: float) -> tuple[dict[str, Any], list[int]]:
    """Return the next message with its descriptors; PeerLost if it is known from elsewhere that none will come."""
    end_s = time.monotonic() + timeout_s
    while True:
        try:
            return _receive(link, most_descriptors, _SLICE_S)
        except TimeoutError:
            CALLS.check()
            if time.monotonic() > end_s:
                raise


def _receive(link: socket.socket, most_descriptors: int, timeout_s: float) -> tuple[dict[str, Any], list[int]]:
    link.settimeout(timeout_s)
    data, descriptors, _, _ = socket.recv_fds(link, _MOST_MESSAGE_BYTES, most_descriptors, socket.MSG_CMSG_CLOEXEC)
    if not data:
        raise ConnectionResetError("the other side has closed the connection")
    message: dict[str, Any] = json.loads(data)
    return message, list(descriptors)


def _tell(link: socket.socket, message: dict[str, Any]) -> None:
    """Send a last word; whoever is gone does not get it."""
    try:
        link.settimeout(0)
        link.send(json.dumps(message).encode())
    except OSError:
        return


def _who(link: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end, as the kernel knows them."""
    pid, user, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid, user
