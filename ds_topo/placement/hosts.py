"""Hosts and their slots, and which rank runs where."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from ds_topo.errors import HostError

MAX_SLOTS = 4096
"""Of one host; more than any host has, and few enough to list."""

_SLOT_LIST = re.compile(r"[0-9]{1,9}(,[0-9]{1,9})*")


@dataclass(frozen=True)
class Host:
    """A host by name, and the numbers of its slots (devices) in use, ascending.

    Raises:
        HostError: a name with spaces, ``:`` or ``,``, no slot, or slots that do not ascend from 0 or above.

    >>> Host.of("worker-0", 2)
    Host(name='worker-0', slots=(0, 1))
    """

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
        """A host whose first ``slots`` slots are in use."""
        if slots > MAX_SLOTS:
            raise HostError(f"host {name!r}: slots={slots} is more than {MAX_SLOTS}")
        return cls(name, tuple(range(slots)))


@dataclass(frozen=True)
class Hosts:
    """Hosts in the order in which a launcher numbers their ranks, each name once.

    Raises:
        HostError: no host, or one that is named twice.

    >>> hosts = Hosts.uniform(2, slots=4)
    >>> hosts.names, hosts.slots
    (('host0', 'host1'), 8)
    >>> [host.slots for host in hosts.including("host1:0,2@host0")]
    [(0, 1, 2, 3), (0, 2)]
    """

    hosts: tuple[Host, ...]

    def __post_init__(self) -> None:
        if not self.hosts:
            raise HostError("there are no hosts: name at least one")
        twice = [name for name, count in Counter(self.names).items() if count > 1]
        if twice:
            raise HostError(f"host {twice[0]!r} is named twice: name every host once, with all its slots")

    @classmethod
    def uniform(cls, count: int, slots: int) -> Hosts:
        """``host0``, ``host1``, ... with the same number of slots."""
        if count < 1 or slots < 1:
            raise HostError(f"{count} hosts with {slots} slots: both must be >= 1")
        digits = len(str(count - 1))
        return cls(tuple(Host.of(f"host{index:0{digits}d}", slots) for index in range(count)))

    @classmethod
    def named(cls, names: Iterable[str], slots: int) -> Hosts:
        """Hosts by name, with the same number of slots."""
        if slots < 1:
            raise HostError(f"slots={slots}: every host needs at least one")
        return cls(tuple(Host.of(name, slots) for name in names))

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)

    def __len__(self) -> int:
        return len(self.hosts)

    @property
    def names(self) -> tuple[str, ...]:
        """Names, in order."""
        return tuple(host.name for host in self.hosts)

    @property
    def slots(self) -> int:
        """The number of slots of all hosts together."""
        return sum(len(host.slots) for host in self.hosts)

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of slots of each host."""
        return tuple(len(host.slots) for host in self.hosts)

    # -- parts, by the options of the deepspeed launcher ---------------------------------------------------------------

    def including(self, text: str) -> Hosts:
        """These hosts and slots alone, in their own order: ``NAME[:SLOT,SLOT]@NAME...`` as ``deepspeed --include``.

        Raises:
            HostError: a malformed filter, a host or slot that is not there.
        """
        chosen = self._parse_filter("include", text)
        return Hosts(
            tuple(replace(host, slots=chosen[host.name] or host.slots) for host in self.hosts if host.name in chosen)
        )

    def excluding(self, text: str) -> Hosts:
        """All but these hosts and slots: ``NAME[:SLOT,SLOT]@NAME...`` as ``deepspeed --exclude``.

        >>> Hosts.uniform(2, slots=2).excluding("host0:1@host1").hosts
        (Host(name='host0', slots=(0,)),)

        Raises:
            HostError: a malformed filter, a host or slot that is not there, or nothing left.
        """
        removed = self._parse_filter("exclude", text)
        kept: list[Host] = []
        for host in self.hosts:
            gone = host.slots if host.name in removed and not removed[host.name] else removed.get(host.name, ())
            slots = tuple(slot for slot in host.slots if slot not in gone)
            if slots:
                kept.append(replace(host, slots=slots))
        if not kept:
            raise HostError(f"exclude {text!r} leaves no slot of {_few(self.names)}")
        return Hosts(tuple(kept))

    def first(self, hosts: int | None = None, slots: int | None = None) -> Hosts:
        """The first ``hosts`` hosts with slots 0 to ``slots`` - 1 each, as ``deepspeed --num_nodes --num_gpus``.

        Raises:
            HostError: more than there are.
        """
        if hosts is not None and not 1 <= hosts <= len(self):
            raise HostError(f"{hosts} hosts asked for, but there are {len(self)}")
        kept = self.hosts[:hosts]
        if slots is None:
            return Hosts(kept)
        short = [host for host in kept if not 1 <= slots <= len(host.slots)]
        if short:
            raise HostError(f"{slots} slots asked for, but host {short[0].name!r} has {len(short[0].slots)}")
        return Hosts(tuple(Host.of(host.name, slots) for host in kept))

    def _parse_filter(self, what: str, text: str) -> dict[str, tuple[int, ...]]:
        """Host name -> slots, ``()`` for all of them."""
        by_name = {host.name: host for host in self.hosts}
        chosen: dict[str, set[int]] = {}
        for part in text.split("@"):
            name, colon, numbers = part.strip().partition(":")
            if name not in by_name:
                raise HostError(f"{what} {text!r}: host {name!r} is not among {_few(self.names)}")
            if colon and not _SLOT_LIST.fullmatch(numbers):
                raise HostError(
                    f'{what} {text!r} at {part!r}: expected "NAME[:SLOT,SLOT]@NAME...", such as "worker-0@worker-1:0,2"'
                )
            slots = {int(number) for number in numbers.split(",")} if colon else set()
            unknown = slots.difference(by_name[name].slots)
            if unknown:
                raise HostError(
                    f"{what} {text!r}: host {name!r} has no slot {min(unknown)}, its slots are "
                    f"{list(by_name[name].slots)}"
                )
            chosen.setdefault(name, set()).update(slots)
        return {name: tuple(sorted(slots)) for name, slots in chosen.items()}


@dataclass(frozen=True)
class HostMap:
    """Which host and which of its slots every rank has, in closed form.

    Args:
        hosts: in order.
        runs: ``(first rank, index of the host, index into its slots)`` of consecutive ranks on consecutive slots of a
            host, ascending.
        size: the number of ranks.

    >>> host_map = HostMap.block(Hosts((Host.of("a", 1), Host.of("b", 3))))
    >>> [host_map.host_of(rank).name for rank in range(4)], host_map.slot_of(3)
    (['a', 'b', 'b', 'b'], 2)
    """

    hosts: Hosts
    runs: tuple[tuple[int, int, int], ...]
    size: int

    @classmethod
    def block(cls, hosts: Hosts) -> HostMap:
        """Ranks numbered host by host, one in each slot: what every launcher does unless told otherwise."""
        firsts = accumulate(hosts.counts, initial=0)
        runs = tuple((first, index, 0) for index, first in zip(range(len(hosts)), firsts, strict=False))
        return cls(hosts, runs, hosts.slots)

    @classmethod
    def in_order(cls, hosts: Hosts, order: Sequence[int]) -> HostMap:
        """Rank ``r`` takes the next free slot of host number ``order[r]``.

        Raises:
            HostError: more ranks on a host than it has slots.

        >>> cyclic = HostMap.in_order(Hosts.uniform(2, slots=2), [0, 1, 0, 1])
        >>> [cyclic.host_index(rank) for rank in range(4)], cyclic.slot_of(2)
        ([0, 1, 0, 1], 1)
        """
        used: Counter[int] = Counter()
        runs: list[tuple[int, int, int]] = []
        for rank, index in enumerate(order):
            if used[index] == len(hosts.hosts[index].slots):
                raise HostError(f"host {hosts.hosts[index].name!r} has {used[index]} slots, but gets more ranks")
            if rank == 0 or order[rank - 1] != index:
                runs.append((rank, index, used[index]))
            used[index] += 1
        return cls(hosts, tuple(runs), len(order))

    @cached_property
    def _firsts(self) -> list[int]:
        return [first for first, _, _ in self.runs]

    def _run_of(self, rank: int) -> tuple[int, int, int]:
        if not 0 <= rank < self.size:
            raise HostError(f"rank {rank} is out of range: the hosts have ranks 0 to {self.size - 1}")
        return self.runs[bisect_right(self._firsts, rank) - 1]

    def host_index(self, rank: int) -> int:
        """The number of the host of ``rank``, in the order of the hosts."""
        return self._run_of(rank)[1]

    def host_of(self, rank: int) -> Host:
        """The host of ``rank``."""
        return self.hosts.hosts[self.host_index(rank)]

    def slot_of(self, rank: int) -> int:
        """The number of the slot of ``rank`` on its host."""
        first, index, slot = self._run_of(rank)
        return self.hosts.hosts[index].slots[slot + rank - first]

    @cached_property
    def host_indices(self) -> tuple[int, ...]:
        """The number of the host of every rank; O(ranks), built once."""
        ends = [*self._firsts[1:], self.size]
        return tuple(index for (first, index, _), end in zip(self.runs, ends, strict=True) for _ in range(end - first))

    @cached_property
    def ranks_on_hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks on every host, ascending; O(ranks), built once."""
        ranks: list[list[int]] = [[] for _ in self.hosts]
        for rank, index in enumerate(self.host_indices):
            ranks[index].append(rank)
        return tuple(tuple(on_host) for on_host in ranks)


def _few(names: Sequence[str], most: int = 8) -> str:
    """The names, or the first of many."""
    return f"{list(names[:most])}" if len(names) <= most else f"{list(names[:most])} and {len(names) - most} more"
