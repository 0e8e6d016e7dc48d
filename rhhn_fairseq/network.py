"""Under which address a machine can be reached by those that it meets at a given place.

scripts/train_torchrun.sh runs this file as a program, before anything else is imported:

    python -P rhhn_fairseq/network.py HOST:PORT

It prints an address, the name of its network interface, and "host" if this machine is HOST and has to say so
to torchrun, with "-" for what is not known.
"""

import fcntl
import ipaddress
import socket
import struct
import sys
from pathlib import Path

# An address for documentation. A datagram's socket that is connected to it sends nothing.
_OUTSIDE = "192.0.2.1"
_SIOCGIFADDR = 0x8915


def reach(endpoint: str) -> tuple[str | None, str | None, bool]:
    """This machine's address on the way to ``endpoint``, its interface, and whether the machine is the host.

    torchrun hands the name of the first machine to the workers of the others, and gloo listens where the
    machine's own name leads. On many systems that is a loopback address, which no other machine can reach.

    Args:
        endpoint: a name or address, with ":PORT" or without; an IPv6 address in brackets.

    Returns:
        None for what is not known, such as where the name does not resolve (yet). The last is true only if
        torchrun, which compares ``endpoint`` with the machine's name, might not see it by itself.
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
        # torchrun knows these by itself. A name that leads there on this machine leads elsewhere on others.
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
    """The address from which this machine would send to ``target``; None if it knows no way there."""
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
    """Whether another agent on this machine hosts the meeting already."""
    try:
        socket.create_connection((address, port), timeout=1).close()
    except OSError:
        return False
    return True


def _interface(address: str) -> str | None:
    """The name of the interface that has the address."""
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
