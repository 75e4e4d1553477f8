"""Ask whether a silent rank is alive. Its witness, a small process beside it, answers for it.

A rank that holds the interpreter for a minute, in a long C call or a debugger, cannot report that it is alive, but must
not be taken for dead. Its witness needs neither the rank's interpreter nor the store.

The witness runs this file with a bare interpreter, ``python -I -S witness.py PID``. It writes its port and answers
every connection with the process state in ``/proc/PID/stat``: ``R`` running, ``S`` waiting, ``T`` stopped by a signal,
``t`` stopped by a debugger. It ends when the rank does.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum

_AT_A_TIME = 32


class State(Enum):
    """The state of a rank's process."""

    ALIVE = "is alive"
    STOPPED = "has been stopped by a signal"
    GONE = "is gone: its process was killed, or crashed"
    UNREACHABLE = "does not answer, and neither does its host"


class Witness:
    """The witness of this process. It ends with this process, or by :meth:`end`.

    Raises:
        LaunchError: the witness did not start.
    """

    def __init__(self) -> None:
        import subprocess

        from ds_topo.errors import LaunchError

        command = [sys.executable, "-I", "-S", __file__, str(os.getpid())]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True, text=True
        )
        assert self._process.stdout is not None
        with self._process.stdout as out:
            line = out.readline()
        if not line:
            raise LaunchError(f"the witness of this rank did not start: {' '.join(command)}")
        self.port = int(line)

    def end(self) -> None:
        """End the witness. Idempotent."""
        self._process.kill()
        self._process.wait()


def address_towards(host: str, port: int) -> str:
    """Return this host's address as another host sees it."""
    with suppress(OSError):
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing
            return str(probe.getsockname()[0])
    return socket.gethostname()


def ask(address: tuple[str, int], seconds: float) -> State:
    """Ask the witness at an address for the state of its rank.

    >>> witness = Witness()
    >>> ask(("127.0.0.1", witness.port), 5), witness.end(), ask(("127.0.0.1", witness.port), 5)
    (<State.ALIVE: 'is alive'>, None, <State.GONE: 'is gone: its process was killed, or crashed'>)
    """
    try:
        with socket.create_connection(address, seconds) as connection:
            letter = connection.recv(1)
    except ConnectionError:
        return State.GONE
    except OSError:  # no answer in time, or no route
        return State.UNREACHABLE
    if letter == b"T":
        return State.STOPPED
    return State.GONE if letter in (b"Z", b"X", b"") else State.ALIVE


def ask_all(addresses: Mapping[int, tuple[str, int]], seconds: float) -> dict[int, State]:
    """Ask the witnesses of several ranks at once."""
    from concurrent.futures import ThreadPoolExecutor

    if not addresses:
        return {}
    with ThreadPoolExecutor(min(_AT_A_TIME, len(addresses))) as pool:
        return dict(zip(addresses, pool.map(lambda address: ask(address, seconds), addresses.values()), strict=True))


def _answer_for(pid: int) -> None:
    """Be the witness of a process until it ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.create_server(("", 0), family=family, dualstack_ipv6=family == socket.AF_INET6, backlog=64) as server:
        poll, ended = select.poll(), -1
        poll.register(server, select.POLLIN)
        with suppress(AttributeError, OSError):  # not Linux, or an old kernel
            ended = os.pidfd_open(pid)
            poll.register(ended, select.POLLIN)
        print(server.getsockname()[1], flush=True)
        sys.stdout.close()
        while os.getppid() == pid:
            for descriptor, _ in poll.poll(None if ended >= 0 else 500):
                if descriptor == ended:
                    return
                connection, _ = server.accept()
                with connection:
                    connection.sendall(_state_of(pid).encode())


def _state_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "?"


if __name__ == "__main__":
    _answer_for(int(sys.argv[1]))
