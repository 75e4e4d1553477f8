"""Ask whether a silent rank is alive. Its witness, a small process beside it, answers for it.

A rank that holds the interpreter for a minute, in a long C call or a debugger, cannot report that it is alive, but must
not be taken for dead. Its witness needs neither the rank's interpreter nor the store.

The witness runs this file with a bare interpreter, ``python -I -S witness.py PID HOST``, and listens at the one address
that other ranks use. Who asks sends the witness's secret, which the job's store holds; the answer is a second secret
and the process state in ``/proc/PID/stat``: ``R`` running, ``S`` waiting, ``T`` stopped by a signal, ``t`` stopped by a
debugger. Strangers get no answer and cannot end it. It ends when the rank does.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from typing import Any, NamedTuple

_AT_A_TIME = 32
_SECRET_BYTES = 16
_OPEN = 64
"""The number of connections that a witness keeps open; it closes the oldest of more."""
_PATIENCE = 5.0
"""The time in seconds that a connection has for its question."""


class State(Enum):
    """The state of a rank's process."""

    ALIVE = "is alive"
    STOPPED = "has been stopped by a signal"
    GONE = "is gone: its process was killed, or crashed"
    UNREACHABLE = "does not answer, and neither does its host"


class Address(NamedTuple):
    """The place of a witness, and what to send it and to expect from it, in hexadecimal digits."""

    host: str
    port: int
    question: str
    answer: str


class Witness:
    """The witness of this process, at its host's address as others see it. It ends with the process, or by ``end``."""

    def __init__(self, host: str) -> None:
        import secrets
        import subprocess

        from ds_topo.errors import LaunchError

        question, answer = secrets.token_hex(_SECRET_BYTES), secrets.token_hex(_SECRET_BYTES)
        command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), host]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, text=True
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._process.stdout as out:
            with suppress(BrokenPipeError), self._process.stdin as secret:  # not an argument, which all users can see
                secret.write(f"{question} {answer}\n")
            line = out.readline()
        if not line:
            raise LaunchError(f"the witness of this rank did not start: {' '.join(command)}")
        self.address = Address(host, int(line), question, answer)

    @property
    def has_ended(self) -> bool:
        """True if the witness was killed."""
        return self._process.poll() is not None

    def end(self) -> None:
        """End the witness. Idempotent."""
        self._process.kill()
        self._process.wait()


def ask(address: Address, seconds: float) -> State:
    """Ask the witness at an address for the state of its rank."""
    answer = b""
    try:
        with socket.create_connection(address[:2], seconds) as connection:
            connection.sendall(bytes.fromhex(address.question))
            while len(answer) <= _SECRET_BYTES and (part := connection.recv(_SECRET_BYTES + 1)):
                answer += part
    except ConnectionRefusedError:
        return State.GONE
    except OSError:  # no answer in time, no route, or a connection that was reset
        return State.UNREACHABLE
    known, letter = answer[:_SECRET_BYTES], answer[_SECRET_BYTES:]
    if known != bytes.fromhex(address.answer):  # another program has its port
        return State.GONE if known else State.UNREACHABLE
    if letter == b"T":
        return State.STOPPED
    return State.GONE if letter in (b"Z", b"X", b"") else State.ALIVE


def ask_all(addresses: Mapping[int, Address], seconds: float) -> dict[int, State]:
    """Ask the witnesses of several ranks at once."""
    from concurrent.futures import ThreadPoolExecutor

    if not addresses:
        return {}
    with ThreadPoolExecutor(min(_AT_A_TIME, len(addresses))) as pool:
        return dict(zip(addresses, pool.map(lambda address: ask(address, seconds), addresses.values()), strict=True))


def _answer_for(pid: int, host: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    question, answer = map(bytes.fromhex, sys.stdin.readline().split())
    with _server_at(host) as server:
        ended: list[int] = []
        with suppress(AttributeError, OSError):  # not Linux, or an old kernel
            ended = [os.pidfd_open(pid)]
        server.setblocking(False)
        print(server.getsockname()[1], flush=True)
        sys.stdout.close()
        asking: dict[socket.socket, tuple[float, bytearray]] = {}
        """Open connections, oldest first: the time of acceptance, and what has arrived."""
        while os.getppid() == pid:
            watched: list[Any] = [server, *ended, *asking]
            ready, _, _ = select.select(watched, [], [], None if ended and not asking else 0.5)
            for each in ready:
                if each in ended:
                    return
                received = b""
                with suppress(OSError):  # the connection was reset
                    if each is server:
                        connection, _ = server.accept()
                        connection.setblocking(False)
                        asking[connection] = time.monotonic(), bytearray()
                        continue
                    received = each.recv(len(question) + 1)
                    asking[each][1].extend(received)
                    if asking[each][1] == question:
                        each.sendall(answer + _state_of(pid).encode())
                if each in asking and (not received or len(asking[each][1]) >= len(question)):
                    del asking[each]
                    each.close()
            late, surplus = time.monotonic() - _PATIENCE, len(asking) - _OPEN
            for place, (connection, (since, _)) in enumerate(list(asking.items())):
                if since < late or place < surplus:
                    del asking[connection]
                    connection.close()


def _server_at(host: str) -> socket.socket:
    """Listen at a host's address, or at all of them if that is impossible."""
    with suppress(OSError):
        family, _, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        return socket.create_server(place[:2], family=family, backlog=1024)
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    return socket.create_server(("", 0), family=family, dualstack_ipv6=family == socket.AF_INET6, backlog=1024)


def _state_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "?"


if __name__ == "__main__":
    _answer_for(int(sys.argv[1]), sys.argv[2])
