"""Hostfiles of the ``deepspeed`` launcher, ``NAME slots=N`` on each line (``launcher.runner.fetch_hostfile``)."""

from __future__ import annotations

import re
from pathlib import Path

from ds_topo.errors import HostError
from ds_topo.placement.hosts import MAX_SLOTS, Host, Hosts

_ENTRY = re.compile(r"(?P<name>[^\s=#]+)(?:\s+slots=(?P<slots>\S*))?(?P<rest>(?:\s+\S+)*)")
_IGNORED = re.compile(r"(?:max[_-]slots=\d+)")


def read_hostfile(path: str | Path) -> Hosts:
    """The hosts of a file.

    Raises:
        HostError: it cannot be read, or a line of it is wrong; the message says which.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise HostError(f"hostfile {str(path)!r} cannot be read: {error}") from error
    return parse_hostfile(text, str(path))


def parse_hostfile(text: str, source: str = "hostfile") -> Hosts:
    """The hosts of a hostfile's text, in order.

    ``#`` begins a comment; empty lines and Open MPI's ``max_slots=N`` mean nothing.

    >>> parse_hostfile("# two hosts\\nworker-0 slots=2\\n\\nworker-1 slots=1  # the small one\\n").counts
    (2, 1)

    Raises:
        HostError: a line that is no entry, a host twice, zero or missing slots, or no host at all.
    """
    hosts: dict[str, Host] = {}
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        where = f"{source}, line {number}, {entry!r}"
        host = _parse_entry(entry, where)
        if host.name in hosts:
            raise HostError(
                f"{where}: host {host.name!r} stands on line {lines[host.name]} already; give a host one line with all "
                "its slots"
            )
        hosts[host.name], lines[host.name] = host, number
    if not hosts:
        raise HostError(f'{source} names no host: expected lines such as "worker-0 slots=4"')
    return Hosts(tuple(hosts.values()))


def _parse_entry(entry: str, where: str) -> Host:
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise HostError(f'{where}: expected "NAME slots=N", such as "worker-0 slots=4"')
    name, slots = match["name"], match["slots"]
    if slots is None:
        raise HostError(f'{where}: the number of slots is missing; expected "{name} slots=N"')
    unknown = [word for word in match["rest"].split() if not _IGNORED.fullmatch(word)]
    if unknown:
        raise HostError(f'{where}: {unknown[0]!r} is not understood; expected "{name} slots=N"')
    if not re.fullmatch(r"[0-9]{1,9}", slots):
        raise HostError(f"{where}: slots={slots!r} is not a whole number")
    if not 1 <= int(slots) <= MAX_SLOTS:
        raise HostError(
            f"{where}: slots={int(slots)} must be 1 to {MAX_SLOTS}; leave out a host that is not to be used"
        )
    try:
        return Host.of(name, int(slots))
    except HostError as error:
        raise HostError(f"{where}: {error}") from None
