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


def connections(besides: Collection[int]) -> Iterator[socket.socket]:
    """Established TCP connections of this process, but for those with one of these ports at either end.

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
                ports = {each.getsockname()[1], each.getpeername()[1]}
                if min(ports) >= _WELL_KNOWN and not ports & set(besides):
                    yield each


def bytes_moved(besides: Collection[int]) -> int | None:
    """So many have come and gone over all connections; None where the system does not tell, or there are none."""
    total, found = 0, False
    for each in connections(besides):
        with suppress(OSError, struct.error):
            info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            total += sum(struct.unpack_from("=QQ", info, _BYTES_ACKED_AND_RECEIVED))
            found = True
    return total if found else None


def shut_down(besides: Collection[int]) -> int:
    """End them: whoever waits in one raises; how many there were."""
    count = 0
    for each in connections(besides):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
            count += 1
    return count
