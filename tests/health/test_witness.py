"""A witness answers for a process that cannot."""

from __future__ import annotations

import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from ds_topo.health import witness
from ds_topo.health.witness import Address, State, Witness, ask

_RANK = """
import ctypes, sys, time
from ds_topo.health.witness import Witness
witness = Witness("127.0.0.1")
print(*witness.address, flush=True)
sys.stdin.readline()
ctypes.PyDLL(None).sleep(30)  # with the interpreter held
"""


@pytest.fixture
def rank() -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", _RANK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


def test_a_witness_reports_alive_stopped_and_gone(rank: subprocess.Popen[str]) -> None:
    assert rank.stdout is not None
    assert rank.stdin is not None
    address = _address(rank.stdout.readline())
    assert ask(address, 5) is State.ALIVE
    rank.stdin.write("hold\n")
    rank.stdin.flush()
    time.sleep(0.2)
    assert ask(address, 5) is State.ALIVE, "while it holds the interpreter"
    rank.send_signal(signal.SIGSTOP)
    _until(lambda: ask(address, 5) is State.STOPPED)
    rank.send_signal(signal.SIGCONT)
    _until(lambda: ask(address, 5) is State.ALIVE)
    rank.kill()
    rank.wait()
    _until(lambda: ask(address, 5) is State.GONE)


def test_a_child_that_outlives_the_rank_does_not_keep_the_witness() -> None:
    code = (
        "import os, time; from ds_topo.health.witness import Witness\n"
        "witness = Witness('127.0.0.1')\n"
        "print(*witness.address, flush=True)\n"
        "if not os.fork(): os.close(1); time.sleep(20); os._exit(0)\n"
        "os._exit(0)"
    )
    out = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=20).stdout
    _until(lambda: ask(_address(out), 5) is State.GONE)


def _address(line: str) -> Address:
    host, port, question, answer = line.split()
    return Address(host, int(port), question, answer)


# -- strangers ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def own() -> Iterator[Witness]:
    """A witness of this process."""
    witness = Witness("127.0.0.1")
    yield witness
    witness.end()


def _connected(address: Address) -> socket.socket:
    return socket.create_connection(address[:2], 5)


def test_strangers_get_no_answer(own: Witness) -> None:
    for question in (b"GET / HTTP/1.1\r\n\r\n", bytes(16), bytes.fromhex(own.address.answer)):
        with _connected(own.address) as connection, suppress(ConnectionResetError):
            connection.sendall(question)
            assert connection.recv(100) == b""
    assert ask(own.address._replace(question="00" * 16), 5) is State.UNREACHABLE
    assert ask(own.address, 5) is State.ALIVE


def test_scans_and_resets_do_not_end_a_witness(own: Witness) -> None:
    for _ in range(200):
        connection = _connected(own.address)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset when it is closed
        connection.close()
    for part in (b"", b"\0", bytes(1000)):
        with _connected(own.address) as connection:
            connection.sendall(part)
    assert ask(own.address, 5) is State.ALIVE
    assert not own.has_ended


def test_a_thousand_silent_connections_delay_no_answer(own: Witness) -> None:
    with ExitStack() as stack:
        for _ in range(900):  # below the usual limit of open files
            stack.enter_context(_connected(own.address))
        started = time.monotonic()
        assert ask(own.address, 5) is State.ALIVE
        assert time.monotonic() - started < 4


def test_a_question_in_parts_is_answered(own: Witness) -> None:
    with _connected(own.address) as connection:
        for byte in bytes.fromhex(own.address.question):
            connection.sendall(bytes([byte]))
            time.sleep(0.01)
        assert connection.recv(100)[:16] == bytes.fromhex(own.address.answer)


def test_a_witness_listens_at_one_address_alone(own: Witness) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", own.address.port), 5)


def _greet(server: socket.socket) -> None:
    with server.accept()[0] as connection:
        connection.sendall(b"SSH-2.0-OpenSSH_9.2 and more")


def test_another_program_at_the_port_of_a_witness_is_not_believed(own: Witness) -> None:
    own.end()
    with socket.create_server(("127.0.0.1", own.address.port)) as server:
        threading.Thread(target=_greet, args=(server,), daemon=True).start()
        assert ask(own.address, 5) in (State.GONE, State.UNREACHABLE)


def test_the_secrets_are_not_visible_to_other_users(own: Witness) -> None:
    arguments = Path(f"/proc/{own._process.pid}/cmdline").read_text()
    assert own.address.question not in arguments
    assert own.address.answer not in arguments


def test_a_silent_address_is_unreachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert ask(Address(*server.getsockname(), "00", "11"), 0.3) is State.UNREACHABLE


def test_a_witness_runs_in_a_bare_interpreter() -> None:
    source = Path(witness.__file__).read_text()
    imported = {line.split()[1] for line in source.splitlines() if line.startswith(("import ", "from "))}
    light = {"__future__", "collections.abc", "contextlib", "enum", "time", "typing"}
    assert imported == {"os", "select", "signal", "socket", "sys"} | light


def _until(holds: object) -> None:
    until = time.monotonic() + 10
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < until
        time.sleep(0.02)
