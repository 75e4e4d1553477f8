"""The TCP connections of this process to other ranks, as gloo makes them: whether bytes move, and how to end them.

Neither ``abort()`` nor ``shutdown()`` of a gloo group ends a collective that is blocked; the end of its connections
does, at once.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress

_BYTES_ACKED_AND_RECEIVED = 120
"""Where they are in Linux's ``struct tcp_info``."""
_WELL_KNOWN = 1024
"""Ports below belong to services, not to ranks."""


def connections() -> Iterator[tuple[socket.socket, int, int]]:
    """Established TCP connections of this process, with the ports of this end and of the other one.

    Each is a duplicate, open until the next one is asked for.
    """
    if sys.platform != "linux":
        return
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as each:
                if each.family not in (socket.AF_INET, socket.AF_INET6) or each.type != socket.SOCK_STREAM:
                    continue
                own, other = each.getsockname()[1], each.getpeername()[1]
                if min(own, other) >= _WELL_KNOWN:
                    yield each, own, other


def ports_towards(port: int) -> set[int]:
    """Of this process's ends of connections to a port."""
    return {own for _, own, other in connections() if other == port}


def bytes_moved(besides: Collection[int]) -> int | None:
    """So many have come and gone, but for connections with one of these ports; None where nothing is known."""
    total, found = 0, False
    for each, *ports in connections():
        if not set(ports) & set(besides):
            with suppress(OSError, struct.error):
                info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += sum(struct.unpack_from("=QQ", info, _BYTES_ACKED_AND_RECEIVED))
                found = True
    return total if found else None


def shut_down(spared: Collection[int]) -> None:
    """End them, but for those whose end here has one of these ports: whoever waits in one raises."""
    for each, own, _ in connections():
        if own not in spared:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
