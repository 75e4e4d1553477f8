"""Find the connections over which process groups communicate, end them, and tell errors of a lost one.

``abort()`` and ``shutdown()`` of a gloo group do not end a blocked collective. The end of its connections does so at
once. A connection is gloo's if one of gloo's own threads waits for it: ``/proc`` lists what a thread's ``epoll`` waits
for. This covers every group, whoever created it, and connections that gloo opens later. All others are left alone:
those of a logger, of an upload, or of NCCL. torch 2.8 does not name gloo's threads, so none is gloo's there.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import struct
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from ds_topo.base.torch_names import gloo_threads

_OF_TRANSPORT = re.compile(
    r"gloo|NCCL|[Cc]onnection (closed|reset|refused|was)|no connection|Failed to recv|Timed out|wait timeout|"
    r"Broken pipe|[Ss]ocket|TCPStore|their own errors say why|did not answer within|was lost"
)
_BYTES_ACKED_AND_RECEIVED = 120
"""Their offset in Linux's ``struct tcp_info``."""
_WELL_KNOWN = 1024
"""Ports below belong to services, not to ranks."""
_INODE = re.compile(r"^tfd:.* ino:([0-9a-f]+)", re.MULTILINE)
"""A file that an ``epoll`` waits for, in ``/proc/self/fdinfo``."""


def _connections() -> Iterator[tuple[socket.socket, int, int]]:
    """Yield the established TCP connections of this process, with the ports of this end and of the other end.

    Each is a duplicate, which is closed when the next one is requested.
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
    """Return this process's own ports of connections to a port."""
    return {own for _, own, other in _connections() if other == port}


def bytes_moved(besides: Collection[int]) -> int | None:
    """Return the bytes sent and received on connections without one of these ports; None where this is unknown."""
    counts = []
    for each, *ports in _connections():
        if not set(ports) & set(besides):
            with suppress(OSError, struct.error):
                info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                counts.append(sum(struct.unpack_from("=QQ", info, _BYTES_ACKED_AND_RECEIVED)))
    return sum(counts) if counts else None


def shut_down(store_port: int, spared: Collection[int]) -> None:
    """End gloo's connections and those to the job's store, except from the ports ``spared``; calls in them raise.

    A thread of gloo's that is not waiting at this moment is left out, so call this until nothing waits any more.
    """
    of_gloo = _inodes_of_gloo()
    for each, own, other in _connections():
        if own not in spared and (other == store_port or os.fstat(each.fileno()).st_ino in of_gloo):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def _inodes_of_gloo() -> set[int]:
    """Return the inodes of the sockets and other files that gloo's threads wait for."""
    found: set[int] = set()
    for thread in gloo_threads():
        with suppress(OSError, ValueError):  # the thread has ended, or runs
            call = Path(f"/proc/self/task/{thread}/syscall").read_text()
            _, descriptor, *_ = call.split()  # the number of epoll_wait, and its arguments
            waits_for = Path(f"/proc/self/fdinfo/{int(descriptor, 16)}").read_text()
            found |= {int(inode, 16) for inode in _INODE.findall(waits_for)}
    return found


def chain_of(error: BaseException | None) -> list[BaseException]:
    """Return an exception and its causes."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain


def is_of_transport(error: BaseException) -> bool:
    """Return whether an exception, or a cause of it, says only that another rank could not be reached.

    torch raises a ``RuntimeError``. An ``OSError`` is the program's own, as of a server that has its samples.
    """
    return any(isinstance(each, RuntimeError) and _OF_TRANSPORT.search(str(each)) for each in chain_of(error))
