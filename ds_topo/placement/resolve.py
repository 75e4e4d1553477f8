"""Whether hosts can be found by their names."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from ds_topo.errors import HostError

_AT_A_TIME = 64


def address_of(name: str) -> str:
    """The first address of a host.

    Raises:
        HostError: the name has none.
    """
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        raise HostError(
            f"host {name!r} cannot be resolved to an address: {error}; check its spelling, /etc/hosts and DNS"
        ) from None


def is_loopback(address: str) -> bool:
    """Whether an address is reached from its own host alone.

    >>> is_loopback("127.0.1.1"), is_loopback("10.0.0.1")
    (True, False)
    """
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def resolve_all(names: Sequence[str]) -> dict[str, str]:
    """Name -> address of every host, asked for at the same time.

    Raises:
        HostError: names without an address; the message has each.
    """

    def try_address(name: str) -> str | HostError:
        try:
            return address_of(name)
        except HostError as error:
            return error

    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        found = dict(zip(names, pool.map(try_address, names), strict=True))
    failed = [error for error in found.values() if isinstance(error, HostError)]
    if failed:
        more = f" (and {len(failed) - 8} more)" if len(failed) > 8 else ""
        raise HostError("; ".join(map(str, failed[:8])) + more)
    return {name: address for name, address in found.items() if isinstance(address, str)}
