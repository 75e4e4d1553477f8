"""Whether a silent rank is alive: its witness, a process beside it, is asked.

A rank that holds the interpreter for a minute (a long C call, a debugger) cannot say that it is alive, and must not be
taken for dead. Its witness can: it needs no interpreter of the rank's, and no store.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from enum import Enum
from pathlib import Path

from ds_topo.errors import LaunchError

_AT_A_TIME = 32


class State(Enum):
    """Of a rank's process."""

    ALIVE = "is alive"
    STOPPED = "has been stopped by a signal"
    GONE = "is gone: its process was killed, or crashed"
    UNREACHABLE = "does not answer, and neither does its host"


class Witness:
    """The one of this process; it ends with it, or by :meth:`end`."""

    def __init__(self) -> None:
        command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("witness_process.py")), str(os.getpid())]
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
        """End it. Idempotent."""
        self._process.kill()
        self._process.wait()


def address_towards(host: str, port: int) -> str:
    """This host's address, as another one sees it."""
    with suppress(OSError):
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing
            return str(probe.getsockname()[0])
    return socket.gethostname()


def ask(address: tuple[str, int], seconds: float) -> State:
    """What the witness at an address says.

    >>> witness = Witness()
    >>> ask(("127.0.0.1", witness.port), 5), witness.end(), ask(("127.0.0.1", witness.port), 5)
    (<State.ALIVE: 'is alive'>, None, <State.GONE: 'is gone: its process was killed, or crashed'>)
    """
    try:
        with socket.create_connection(address, seconds) as connection:
            letter = connection.recv(1)
    except ConnectionError:
        return State.GONE
    except OSError:  # no answer in time, no route
        return State.UNREACHABLE
    if letter == b"T":
        return State.STOPPED
    return State.GONE if letter in (b"Z", b"X", b"") else State.ALIVE


def ask_all(addresses: Mapping[int, tuple[str, int]], seconds: float) -> dict[int, State]:
    """The same of several ranks at once."""
    if not addresses:
        return {}
    with ThreadPoolExecutor(min(_AT_A_TIME, len(addresses))) as pool:
        return dict(zip(addresses, pool.map(lambda address: ask(address, seconds), addresses.values()), strict=True))
