"""Whether ranks of different hosts can meet: the master's address, and the interface that gloo binds to."""

from __future__ import annotations

import os
import socket
import struct
import sys
from contextlib import suppress

from ds_topo.errors import HostError, LaunchError
from ds_topo.launch.launchers import Launch
from ds_topo.placement.resolve import address_of, is_loopback

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def check_master(launch: Launch) -> str:
    """The address of the master.

    Raises:
        LaunchError: its name cannot be resolved on this host, or means this host itself while rank 0 is on another.
    """
    try:
        address = address_of(launch.master_addr)
    except HostError as error:
        raise LaunchError(
            f"MASTER_ADDR={launch.master_addr!r} (rank {launch.rank} on {socket.gethostname()}, started by "
            f"{launch.launcher}): {error}"
        ) from error
    if is_loopback(address) and launch.node is not None and launch.node[0] > 0:
        raise LaunchError(
            f"MASTER_ADDR={launch.master_addr!r} is {address} on {socket.gethostname()}, which means this host itself, "
            "but rank 0 is on another: give an address that all hosts reach"
        )
    return address


def choose_interface(launch: Launch, master: str) -> str | None:
    """The interface that gloo must be told to use on this host, or None where it finds one itself.

    gloo binds to the address of the host's own name. Where that is a loopback address (Debian's ``127.0.1.1``) or
    unknown, ranks of different hosts cannot connect. The interface towards the master is taken then; on the master's
    own host that of the default route, or the only one that there is.

    Raises:
        LaunchError: there is none that can be found out; the message says what to set.
    """
    if GLOO_INTERFACE in os.environ or launch.is_on_one_host or (launch.node is None and is_loopback(master)):
        return None
    name, own = socket.gethostname(), "unknown"
    try:
        own = address_of(name)
        if not is_loopback(own):
            return None
    except HostError:
        pass
    interface = interface_towards(master) or interface_towards(_ANYWHERE) or _only_interface()
    if interface is None:
        raise LaunchError(
            f"gloo would bind to the address of this host's own name, {name}, which is {own}: other hosts cannot reach "
            f"it. Set {GLOO_INTERFACE} to the interface towards them (`ip -brief address` lists all), or mend the name"
        )
    return interface


def interface_towards(address: str) -> str | None:
    """The name of the interface through which this host reaches ``address``; None if unknown, or loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing
        except OSError:
            return None
        own = probe.getsockname()[0]
    return next((name for name, address in _interfaces() if address == own and not is_loopback(own)), None)


def _only_interface() -> str | None:
    """The one interface with an address that is not loopback, if there is one alone."""
    names = [name for name, address in _interfaces() if not is_loopback(address)]
    return names[0] if len(names) == 1 else None


def _interfaces() -> list[tuple[str, str]]:
    """Names and IPv4 addresses of this host's interfaces; none where the system does not tell."""
    if sys.platform != "linux":
        return []
    import fcntl

    found: list[tuple[str, str]] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append((name, socket.inet_ntoa(answer[20:24])))
    return found


_ANYWHERE = "192.0.2.1"
"""An address that nobody has (RFC 5737): the way there is the default route."""
_SIOCGIFADDR = 0x8915
"""Linux: the address of an interface."""
