"""Finds the address at which the other machines of a rendezvous can reach this machine.

scripts/train_torchrun.sh runs this file as a program, before anything else is imported:

    python -P scripts/network.py HOST:PORT

It prints an address, the name of its network interface, and "host" if this machine is HOST and has to tell
torchrun so, with "-" for anything that is not known.
"""

import fcntl
import ipaddress
import socket
import struct
import sys
from pathlib import Path

# An address reserved for documentation. Connecting a datagram socket to it sends nothing.
_OUTSIDE = "192.0.2.1"
_SIOCGIFADDR = 0x8915


def reach(endpoint: str) -> tuple[str | None, str | None, bool]:
    """Returns this machine's address on the route to ``endpoint``, its interface, and whether it is the host.

    torchrun passes the name of the first machine to the workers of the others, and gloo listens at the
    address of the machine's own name. On many systems that is a loopback address, unreachable from others.

    Args:
        endpoint: a name or address, with or without ":PORT"; an IPv6 address in brackets.

    Returns:
        None for what is not known, for example if the name does not resolve (yet). The last value is true
        only if torchrun, which compares ``endpoint`` with the machine's name, might not detect it.
    """
    name, port = _split(endpoint)
    try:
        target = socket.getaddrinfo(name, port, type=socket.SOCK_DGRAM)[0][4][0]
    except OSError:
        return None, None, False
    address = _source(target)
    if address is None:
        return None, None, False
    host = address == target
    if _is_loopback(target):
        # torchrun recognises these. A name that resolves to them here resolves differently on other machines.
        host = False
        if not _is_literal(name) and name != "localhost":
            address = _source(_OUTSIDE) or address
    return address, _interface(address), host and not _answers(target, port)


def _split(endpoint: str) -> tuple[str, int]:
    name, colon, port = endpoint.rpartition(":")
    if not colon or "]" in port:
        name, port = endpoint, ""
    return name.strip("[]"), int(port) if port.isdecimal() else 29400


def _source(target: str) -> str | None:
    """Returns the address from which this machine would send to ``target``; None if there is no route."""
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
        except OSError:
            return None
        return probe.getsockname()[0]


def _is_literal(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _answers(address: str, port: int) -> bool:
    """Returns whether another agent on this machine already hosts the rendezvous."""
    try:
        socket.create_connection((address, port), timeout=1).close()
    except OSError:
        return False
    return True


def _interface(address: str) -> str | None:
    """Returns the name of the interface that has the address."""
    if ":" in address:
        wanted = ipaddress.ip_address(address.partition("%")[0]).exploded.replace(":", "")
        table = Path("/proc/net/if_inet6")
        rows = (line.split() for line in table.read_text().splitlines()) if table.exists() else ()
        return next((row[-1] for row in rows if row[0] == wanted), None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    return None


if __name__ == "__main__":
    address, interface, host = reach(sys.argv[1])
    print(address or "-", interface or "-", "host" if host else "-")
