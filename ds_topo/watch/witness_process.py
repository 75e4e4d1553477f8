"""The witness of a rank: a small process beside it that says what the rank's process is doing when it cannot itself.

It runs this file with a bare interpreter: ``python -I -S witness_process.py PID``. It writes its port, answers every
connection with a letter, as in ``/proc/PID/stat`` (``R`` running, ``S`` waiting, ``T`` stopped by a signal, ``t`` by a
debugger), and ends when the rank does.
"""

import os
import select
import signal
import socket
import sys


def main() -> None:
    """Answer until the process has ended."""
    pid = int(sys.argv[1])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.create_server(("", 0), family=family, dualstack_ipv6=family == socket.AF_INET6, backlog=64) as server:
        poll = select.poll()
        poll.register(server, select.POLLIN)
        ended = _descriptor_of(pid)
        if ended is not None:
            poll.register(ended, select.POLLIN)
        print(server.getsockname()[1], flush=True)
        sys.stdout.close()
        while os.getppid() == pid:
            for descriptor, _ in poll.poll(None if ended is not None else 500):
                if descriptor == ended:
                    return
                connection, _ = server.accept()
                with connection:
                    connection.sendall(_state_of(pid).encode())


def _descriptor_of(pid: int) -> "int | None":
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # not Linux, or an old kernel
        return None


def _state_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "?"


if __name__ == "__main__":
    main()
