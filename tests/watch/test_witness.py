"""A witness answers for a process that cannot."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ds_topo.watch import witness
from ds_topo.watch.witness import State, ask

_RANK = """
import ctypes, sys, time
from ds_topo.watch.witness import Witness
print(Witness().port, flush=True)
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
    address = ("127.0.0.1", int(rank.stdout.readline()))
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
        "import os, time; from ds_topo.watch.witness import Witness\n"
        "print(Witness().port, flush=True)\n"
        "if not os.fork(): os.close(1); time.sleep(20); os._exit(0)\n"
        "os._exit(0)"
    )
    out = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=20).stdout
    _until(lambda: ask(("127.0.0.1", int(out)), 5) is State.GONE)


def test_a_silent_address_is_unreachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert ask(server.getsockname(), 0.3) is State.UNREACHABLE


def test_a_witness_runs_in_a_bare_interpreter() -> None:
    source = Path(witness.__file__).read_text()
    imported = {line.split()[1] for line in source.splitlines() if line.startswith(("import ", "from "))}
    light = {"__future__", "collections.abc", "contextlib", "enum"}
    assert imported == {"os", "select", "signal", "socket", "sys"} | light


def _until(holds: object) -> None:
    until = time.monotonic() + 10
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < until
        time.sleep(0.02)
