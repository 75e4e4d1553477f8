"""Find a port for a job whose ranks are started by hand."""

from __future__ import annotations

import random
import socket

_PORTS = range(10_000, 32_000)
"""Ports below those that Linux gives to connections, one of which could otherwise take the port in the meantime."""


def free_port() -> int:
    """Return a port of this machine that nothing listens at."""
    generator = random.SystemRandom()  # tests set the seed of the other one
    while True:
        port = generator.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
