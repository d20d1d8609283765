"""Whether workers find each other: loopback, this host's name, and the network interfaces that variables name."""

import errno
import os
import socket
from collections.abc import Mapping

from shoal.doctor.finding import Finding, ok, problem, warning
from shoal.doctor.interfaces import address_of, interface_names, other_machines, why_not_gloo, why_not_nccl

_CONNECT_S = 5.0
_VARIABLES = {"GLOO_SOCKET_IFNAME": why_not_gloo, "NCCL_SOCKET_IFNAME": why_not_nccl}


def check_ports(host: str = "127.0.0.1") -> list[Finding]:
    """Listen on a free port of loopback, and connect to it."""
    try:
        with socket.create_server((host, 0)) as server:
            server.settimeout(_CONNECT_S)
            port = server.getsockname()[1]
            with socket.create_connection((host, port), timeout=_CONNECT_S) as client, server.accept()[0] as accepted:
                accepted.settimeout(_CONNECT_S)
                client.sendall(b"shoal")
                said = accepted.recv(5)
    except OSError as error:
        fact = f"no connection from this host to itself over {host}: {error}"
        return [problem("ports", fact, "bring loopback up (ip link set lo up), and let the firewall pass it")]
    assert said == b"shoal", said
    return [ok("ports", f"a free port of {host} can be listened on and connected to")]


def check_host_name(name: str | None = None, env: Mapping[str, str] = os.environ) -> list[Finding]:
    """Look whether this host's name means an address that other machines can reach.

    Gloo and the rendezvous store listen there when a run has several machines; on one machine it does not matter.
    """
    name = socket.gethostname() if name is None else name
    chosen = [variable for variable in _VARIABLES if env.get(variable)]
    says = problem if _has_several_nodes(env) and not chosen else warning
    remedy = _remedy(name)
    try:
        found = sorted({str(row[4][0]) for row in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    except OSError as error:
        return [says("host name", f"{name} has no address ({error}): runs of several machines fail", remedy)]
    if chosen:
        return [ok("host name", f"{name} is {', '.join(found)}; {', '.join(chosen)} decides")]
    if all(address.startswith("127.") or address == "::1" for address in found):
        fact = f"{name} is {', '.join(found)}, which other machines cannot reach: runs of several machines fail"
        return [says("host name", fact, remedy) if other_machines() or says is problem else _alone(name, found)]
    foreign = [address for address in found if not _is_ours(address)]
    if foreign:
        fact = f"{name} is {', '.join(foreign)}, which is no address of this host"
        return [says("host name", fact, f"mend its entry in /etc/hosts or the name server; until then: {remedy}")]
    return [ok("host name", f"{name} is {', '.join(found)}")]


def check_interfaces(env: Mapping[str, str] = os.environ) -> list[Finding]:
    """Look whether the network interfaces exist that variables of Gloo and NCCL name."""
    found = []
    for variable, why_not in _VARIABLES.items():
        if env.get(variable) and (said := why_not(env[variable], interface_names())):
            remedy = f"unset {variable}, or name one of: {', '.join(interface_names())}"
            found.append(problem("interfaces", f"{variable}={env[variable]}: {said}", remedy))
    return found or [ok("interfaces", ", ".join(_described()))]


def _described() -> list[str]:
    return [f"{name} {address}" for name in interface_names() if (address := address_of(name))] or ["none"]


def _alone(name: str, found: list[str]) -> Finding:
    return ok("host name", f"{name} is {', '.join(found)}; this machine has no network beside loopback")


def _remedy(name: str) -> str:
    others = other_machines()
    if not others:
        return f"for runs of several machines: give this one a network, and the name {name} an address there"
    interface, address = next(iter(others.items()))
    return (
        f"export GLOO_SOCKET_IFNAME={interface} NCCL_SOCKET_IFNAME={interface}, or write {address} {name} to /etc/hosts"
    )


def _has_several_nodes(env: Mapping[str, str]) -> bool:
    return env.get("SLURM_JOB_NUM_NODES", "1") not in ("", "0", "1")


def _is_ours(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            return error.errno != errno.EADDRNOTAVAIL
    return True
