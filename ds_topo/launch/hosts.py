"""Read the hosts of a job and their slots from hostfiles, lists of names and Slurm; give every rank its host.

Whatever cannot be used raises :class:`~ds_topo.errors.HostError`, whose message names the value, the line or the
variable. Compact lists of nodes, ``n[01-03,7],gpu-a``, are parsed as ``scontrol show hostnames`` does, since Slurm's
programs are missing on laptops and in containers. The package ``python-hostlist`` does the same under the GPL, which
this package's Apache licence cannot include.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod
from pathlib import Path

from ds_topo.errors import HostError, listed

MAX_SLOTS = 4096
"""The most slots of one host: more than any host has, and few enough to list."""
MAX_RANKS = 2**20
"""The most slots of all hosts together: more than any job has, and few enough to list in seconds."""

_SLOT_LIST = re.compile(r"[0-9]{1,9}(,[0-9]{1,9})*")


def check_size(ranks: int) -> None:
    """Refuse more ranks than can be listed."""
    if ranks > MAX_RANKS:
        raise HostError(f"{ranks:,} ranks are more than the {MAX_RANKS:,} that can be listed")


@dataclass(frozen=True)
class Host:
    """A host by name, and the numbers of its slots (devices) in use, ascending from 0 on."""

    name: str
    slots: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.name or not self.name.isprintable() or set(self.name) & set(" :,#=[]"):
            raise HostError(f"host {self.name!r}: a name has no spaces, colons, commas, brackets, '#' or '='")
        if not self.slots:
            raise HostError(f"host {self.name!r} has no slots: give it at least one, or leave it out")
        if list(self.slots) != sorted(set(self.slots)) or self.slots[0] < 0 or self.slots[-1] >= MAX_SLOTS:
            raise HostError(f"host {self.name!r}: slots {self.slots} must ascend, from 0 to {MAX_SLOTS - 1} at most")

    @classmethod
    def of(cls, name: str, slots: int) -> Host:
        """Return a host whose first ``slots`` slots are in use."""
        if slots > MAX_SLOTS:
            raise HostError(f"host {name!r}: slots={slots} is more than {MAX_SLOTS}")
        return cls(name, tuple(range(slots)))


@dataclass(frozen=True)
class Hosts:
    """Hosts with different names, in the order in which a launcher numbers their ranks.

    >>> hosts = Hosts.uniform(2, slots=4)
    >>> hosts.names, hosts.counts
    (('host0', 'host1'), (4, 4))
    >>> [host.slots for host in hosts.including("host1:0,2@host0")]
    [(0, 1, 2, 3), (0, 2)]
    """

    hosts: tuple[Host, ...]

    def __post_init__(self) -> None:
        if not self.hosts:
            raise HostError("there are no hosts: name at least one")
        twice = next((name for name, count in Counter(map(str.lower, self.names)).items() if count > 1), None)
        if twice is not None:
            first, second, *_ = [name for name in self.names if name.lower() == twice]
            again = "" if first == second else f", as {second!r} too (capitals do not matter)"
            raise HostError(f"host {first!r} is named twice{again}: name every host once, with all its slots")

    @classmethod
    def uniform(cls, count: int, slots: int) -> Hosts:
        """Return ``host0``, ``host1``, ... with the same number of slots."""
        if count < 1 or slots < 1:
            raise HostError(f"{count} hosts with {slots} slots: both must be >= 1")
        check_size(count * slots)
        digits = len(str(count - 1))
        return cls.named((f"host{index:0{digits}d}" for index in range(count)), slots)

    @classmethod
    def named(cls, names: Iterable[str], slots: int) -> Hosts:
        """Return hosts by name, with the same number of slots."""
        names = list(names)
        check_size(len(names) * slots)
        return cls(tuple(Host.of(name, slots) for name in names))

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)

    def __len__(self) -> int:
        return len(self.hosts)

    @property
    def names(self) -> tuple[str, ...]:
        """The names, in order."""
        return tuple(host.name for host in self.hosts)

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of slots of each host."""
        return tuple(len(host.slots) for host in self.hosts)

    # -- filters of the deepspeed launcher -----------------------------------------------------------------------------

    def including(self, text: str) -> Hosts:
        """Return only these hosts and slots, ``NAME[:SLOT,SLOT]@NAME...``, as ``deepspeed --include`` does."""
        chosen = self._parse_filter("include", text)
        return Hosts(tuple(replace(host, slots=chosen[host.name]) for host in self if host.name in chosen))

    def excluding(self, text: str) -> Hosts:
        """Return all but these hosts and slots, ``NAME[:SLOT,SLOT]@NAME...``, as ``deepspeed --exclude`` does."""
        removed = self._parse_filter("exclude", text)
        left = {host: tuple(slot for slot in host.slots if slot not in removed.get(host.name, ())) for host in self}
        kept = tuple(replace(host, slots=slots) for host, slots in left.items() if slots)
        if not kept:
            raise HostError(f"exclude {text!r} leaves no slot of {listed(self.names)}")
        return Hosts(kept)

    def first(self, hosts: int | None = None, slots: int | None = None) -> Hosts:
        """Return the first hosts with their first slots, as ``deepspeed --num_nodes --num_gpus`` does."""
        if hosts is not None and not 1 <= hosts <= len(self):
            raise HostError(f"{hosts} hosts requested, but there are {len(self)}: give 1 to {len(self)}")
        kept = self.hosts[:hosts]
        if slots is None:
            return Hosts(kept)
        for host in kept:
            if not 1 <= slots <= len(host.slots):
                raise HostError(f"{slots} slots requested, but host {host.name!r} has {len(host.slots)}")
        return Hosts(tuple(Host.of(host.name, slots) for host in kept))

    def _parse_filter(self, what: str, text: str) -> dict[str, tuple[int, ...]]:
        """Return the slots of each host that a filter names."""
        by_name = {host.name: host for host in self.hosts}
        chosen: dict[str, set[int]] = {}
        for part in text.split("@"):
            name, colon, numbers = part.strip().partition(":")
            if name not in by_name:
                raise HostError(f"{what} {text!r}: host {name!r} is not among {listed(self.names)}")
            if colon and not _SLOT_LIST.fullmatch(numbers):
                raise HostError(
                    f'{what} {text!r} at {part!r}: expected "NAME[:SLOT,SLOT]@NAME...", such as "worker-0@worker-1:0,2"'
                )
            slots = {int(number) for number in numbers.split(",")} if colon else set()
            unknown = slots.difference(by_name[name].slots)
            if unknown:
                there = list(by_name[name].slots)
                raise HostError(f"{what} {text!r}: host {name!r} has no slot {min(unknown)}, its slots are {there}")
            chosen.setdefault(name, set()).update(slots)
        return {name: tuple(sorted(slots)) or by_name[name].slots for name, slots in chosen.items()}


@dataclass(frozen=True)
class HostMap:
    """The host and the slot of every rank.

    ``host_indices`` has the number of the host of every rank. A rank takes the next free slot of its host.

    >>> host_map = HostMap.block(Hosts((Host.of("a", 1), Host.of("b", 3))))
    >>> [host_map.host_of(rank).name for rank in range(4)], host_map.slot_of(3)
    (['a', 'b', 'b', 'b'], 2)
    """

    hosts: Hosts
    host_indices: tuple[int, ...]

    def __post_init__(self) -> None:
        for host, ranks in zip(self.hosts, self.ranks_on_hosts, strict=True):
            if len(ranks) > len(host.slots):
                raise HostError(f"host {host.name!r} has {len(host.slots)} slots, but gets {len(ranks)} ranks")

    @classmethod
    def block(cls, hosts: Hosts) -> HostMap:
        """Number ranks host by host, one in each slot, as every launcher does by default."""
        return cls(hosts, tuple(index for index, count in enumerate(hosts.counts) for _ in range(count)))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.host_indices)

    def host_index(self, rank: int) -> int:
        """Return the number of the host of ``rank``."""
        if not 0 <= rank < self.size:
            raise HostError(f"rank {rank} is out of range: the hosts have ranks 0 to {self.size - 1}")
        return self.host_indices[rank]

    def host_of(self, rank: int) -> Host:
        """Return the host of ``rank``."""
        return self.hosts.hosts[self.host_index(rank)]

    def slot_of(self, rank: int) -> int:
        """Return the number of the slot of ``rank`` on its host."""
        return self.host_of(rank).slots[self.ranks_on_hosts[self.host_index(rank)].index(rank)]

    @cached_property
    def ranks_on_hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks on every host, ascending."""
        ranks: list[list[int]] = [[] for _ in self.hosts]
        for rank, index in enumerate(self.host_indices):
            ranks[index].append(rank)
        return tuple(map(tuple, ranks))


# -- hostfiles ---------------------------------------------------------------------------------------------------------


def read_hostfile(path: str | Path) -> Hosts:
    """Read a hostfile of the ``deepspeed`` launcher, with ``NAME slots=N`` on each line."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise HostError(f"hostfile {str(path)!r} cannot be read: {error}") from error
    return parse_hostfile(text, str(path))


def parse_hostfile(text: str, source: str = "hostfile") -> Hosts:
    """Parse the text of a hostfile. ``#`` starts a comment; empty lines and Open MPI's ``max_slots=N`` are ignored.

    >>> parse_hostfile("# two hosts\\nworker-0 slots=2\\n\\nworker-1 slots=1  # the small one\\n").counts
    (2, 1)
    """
    hosts: dict[str, tuple[int, Host]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        where = f"{source}, line {number}, {entry!r}"
        host = _parse_entry(entry, where)
        key = host.name.lower()  # names of hosts do not distinguish capitals
        if key in hosts:
            first, same = hosts[key]
            raise HostError(
                f"{where}: host {same.name!r} is on line {first} already; give a host one line with all its slots"
            )
        hosts[key] = number, host
    if not hosts:
        raise HostError(f'{source} names no host: expected lines such as "worker-0 slots=4"')
    return Hosts(tuple(host for _, host in hosts.values()))


def _parse_entry(entry: str, where: str) -> Host:
    name, *words = entry.split()
    slots = [word for word in words if word.startswith("slots=")]
    counts = [word.removeprefix("slots=") for word in slots]
    others = [word for word in words if word not in slots and not re.fullmatch(r"max[_-]slots=\d+", word)] + slots[1:]
    if "=" in name:
        raise HostError(f'{where}: expected "NAME slots=N", such as "worker-0 slots=4"')
    alone, _, count = name.partition(":")
    if not words and re.fullmatch(r"[0-9]{1,9}", count):
        raise HostError(f'{where}: {name!r} is in the form of other launchers; expected "{alone} slots={count}"')
    if others:
        raise HostError(f'{where}: {others[0]!r} is unknown; expected "{name} slots=N"')
    if not counts:
        raise HostError(f'{where}: the number of slots is missing; expected "{name} slots=N"')
    if not re.fullmatch(r"[0-9]{1,9}", counts[0]):
        raise HostError(f"{where}: slots={counts[0]!r} is not a whole number")
    try:
        return Host.of(name, int(counts[0]))
    except HostError as error:
        raise HostError(f"{where}: {error}") from None


# -- Slurm -------------------------------------------------------------------------------------------------------------


MAX_NAMES = 1_000_000
"""The most names or counts that a list may expand to."""
_ADVICE = "give the number of tasks in the request, such as `salloc -N 2 --ntasks-per-node 4`"

_ENTRY_OF_LIST = re.compile(r"((?:\[[^\[\]]*\]|[^,])*),")  # a comma in brackets does not end an item
_ITEM = re.compile(r"([^\[\]\s]|\[[^\[\]]*\])+")
_PIECE = re.compile(r"\[([^\[\]]*)\]|[^\[]+")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def expand_node_list(text: str) -> list[str]:
    """Return the names of a compact list, in order; numbers keep the zeros of the list.

    >>> expand_node_list("n[01-03,7],gpu-a")
    ['n01', 'n02', 'n03', 'n7', 'gpu-a']
    >>> expand_node_list("rack[0-1]-n[8-9]")
    ['rack0-n8', 'rack0-n9', 'rack1-n8', 'rack1-n9']
    """
    names: list[str] = []
    for item in map(str.strip, _ENTRY_OF_LIST.findall(f"{text},")):
        if not _ITEM.fullmatch(item):
            raise HostError(
                f'node list {text[:80]!r} at {item[:40]!r}: expected names and bracketed ranges, "n[01-03,7],gpu-a"'
            )
        pieces = [[part[0]] if part[1] is None else _numbers(part[1], text) for part in _PIECE.finditer(item)]
        if len(names) + prod(map(len, pieces)) > MAX_NAMES:
            raise HostError(f"node list {text[:80]!r} has more than {MAX_NAMES} names")
        names += map("".join, product(*pieces))
    return names


def expand_counts(text: str) -> list[int]:
    """Expand Slurm's compact list of counts, one per node.

    >>> expand_counts("2(x3),1")
    [2, 2, 2, 1]
    """
    counts: list[int] = []
    for item in text.split(","):
        match = _COUNT.fullmatch(item.strip())
        if match is None:
            raise HostError(f'counts {text[:80]!r} at {item!r}: expected "N" or "N(xTIMES)", such as "2(x3),1"')
        times = int(match[2] or 1)
        if len(counts) + times > MAX_NAMES:
            raise HostError(f"counts {text[:80]!r} are for more than {MAX_NAMES} nodes")
        counts += [int(match[1])] * times
    return counts


def _numbers(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or last < first:
            raise HostError(
                f'node list {text[:80]!r} at [{ranges[:40]}]: expected numbers and rising ranges, "01-03,7"'
            )
        if len(numbers) + last - first >= MAX_NAMES:
            raise HostError(f"node list {text[:80]!r} has more than {MAX_NAMES} names")
        numbers += [f"{number:0{len(match[1])}d}" for number in range(first, last + 1)]
    return numbers


def slurm_map(environ: Mapping[str, str], *, of_step: bool) -> HostMap:
    """Return the node of every task of the step, or outside a step, of the step that plain ``srun`` would start.

    >>> slurm_map({"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2,1"}, of_step=False).host_indices
    (0, 0, 1)
    """
    names = ["SLURM_STEP_NODELIST"] if of_step else []
    found = next((name for name in (*names, "SLURM_JOB_NODELIST", "SLURM_NODELIST") if environ.get(name)), None)
    if found is None:
        raise HostError(
            "not inside a Slurm job (SLURM_JOB_NODELIST is not set): run this inside `salloc`, `sbatch` or `srun`, or "
            "name the nodes instead"
        )
    nodes = expand_node_list(environ[found])
    name = "SLURM_STEP_TASKS_PER_NODE" if of_step else "SLURM_TASKS_PER_NODE"
    if not environ.get(name):
        raise HostError(f"the Slurm job has no tasks ({name} is not set): {_ADVICE}")
    counts = expand_counts(environ[name])
    if len(counts) != len(nodes):
        raise HostError(
            f"{name}={environ[name]!r} is for {len(counts)} nodes, but the job has {len(nodes)}: {nodes[:8]}"
        )
    if not all(counts):
        raise HostError(f"{name}={environ[name]!r}: node {nodes[counts.index(0)]!r} has no task; {_ADVICE}")
    hosts = Hosts(tuple(Host.of(node, count) for node, count in zip(nodes, counts, strict=True)))
    distribution = environ.get("SLURM_DISTRIBUTION", "block").split(",")[0].split(":")[0]
    slots = [(slot, index) for index, host in enumerate(hosts) for slot in host.slots]
    if distribution == "cyclic":
        slots.sort()
    elif distribution not in ("block", "*", ""):
        raise HostError(
            f"SLURM_DISTRIBUTION={distribution!r} is not one of block and cyclic: pass one of them to srun "
            "--distribution, and choose the places of ranks by the order of axes"
        )
    return HostMap(hosts, tuple(index for _, index in slots))
