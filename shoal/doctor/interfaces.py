"""The network interfaces of this host, and how Gloo and NCCL name them."""

import contextlib
import fcntl
import socket
import struct
import sys
from collections.abc import Sequence

_GET_ADDRESS = 0x8915  # SIOCGIFADDR, Linux
_MACHINE_INSIDE = ("docker", "br-", "veth", "virbr", "cni", "podman", "lo")
"""How the names of interfaces begin that join this machine with itself."""


def interface_names() -> list[str]:
    """Return the names of all interfaces."""
    return [name for _, name in socket.if_nameindex()]


def address_of(name: str) -> str:
    """Return an interface's IPv4 address, or ""."""
    if sys.platform != "linux":
        return ""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        found = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(found[20:24])
    return ""


def other_machines() -> dict[str, str]:
    """Return the interfaces that may lead to other machines, with their addresses."""
    names = [name for name in interface_names() if not name.startswith(_MACHINE_INSIDE)]
    return {name: address for name in names if (address := address_of(name))}


def why_not_gloo(value: str, names: Sequence[str]) -> str:
    """Return what is wrong with Gloo's list of interfaces, or nothing: all of them must exist."""
    missing = [each for each in value.split(",") if each not in names]
    return f"there is no interface {' nor '.join(missing)}" if missing else ""


def why_not_nccl(value: str, names: Sequence[str]) -> str:
    """Return what is wrong with NCCL's, or nothing: beginnings of names, "=" before whole ones, "^" before unwanted."""
    if value.startswith("^"):
        unwanted = value.lstrip("^=").split(",")
        left = [name for name in names if name != "lo" and not name.startswith(tuple(unwanted))]
        return "" if left else "it leaves no interface"
    wanted = value.lstrip("=").split(",")
    is_whole = value.startswith("=")
    hits = [name for name in names if (name in wanted if is_whole else name.startswith(tuple(wanted)))]
    return "" if hits else "no interface is called, or begins, like that"
