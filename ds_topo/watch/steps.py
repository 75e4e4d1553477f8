"""Whether ranks that should take the same steps do: whoever leaves one out has called more collectives by its next one.

Nothing waits for it: what a rank has done goes to the store at some later beat, where the first of a group to come is
what the others compare themselves with.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ds_topo.process_groups.torch_names import Store, calls_of, describe
from ds_topo.watch.findings import Who

_KEPT = 64
"""So many comparisons stay in the store: ranks come to them at different beats."""


@dataclass(frozen=True)
class Steps:
    """What a rank has done when it has taken some number of steps."""

    which: str
    """The process group, what takes the steps, and how often it was compared: the same on all members."""
    over: str
    """What that group is over, for people."""
    taken: int
    calls: int
    """So many collectives of the group."""


class StepCounts:
    """Of everything in this process that takes steps, such as engines, during one watch."""

    def __init__(self) -> None:
        self._numbers: defaultdict[str, Iterator[int]] = defaultdict(count)
        self._places: WeakKeyDictionary[object, tuple[int, int]] = WeakKeyDictionary()
        """The number of each owner among those of its group, and how often it was compared."""

    def next(self, owner: object, group: dist.ProcessGroup, taken: int) -> Steps:
        """What this rank has done; an owner's first one is compared with other ranks' first ones, and so on."""
        over, name = describe(group)
        number, times = self._places.get(owner) or (next(self._numbers[name]), 0)
        self._places[owner] = number, times + 1
        over = "all ranks" if group == dist.group.WORLD else over or "their group"
        return Steps(f"{name}/{number}/{times}", over, taken, calls_of(group))


class StepComparison:
    """With other ranks, through the store.

    Args:
        rank: this one.
        key_of: where in the store something is, by its name.
    """

    def __init__(self, rank: int, key_of: Callable[[str], str]) -> None:
        self._rank, self._key_of = rank, key_of
        self._first: deque[str] = deque()
        """Keys that this rank was the first to come to."""
        self._told: set[str] = set()

    def difference(self, store: Store, own: Steps, who: Callable[[int], Who]) -> str:
        """What is to be said, once for each group; empty if there is nothing."""
        key = self._key_of(own.which)
        said = store.compare_set(key, "", f"{self._rank} {own.taken} {own.calls}")
        rank, taken, calls = map(int, said.split())
        if rank == self._rank:
            self._first.append(key)
            if len(self._first) > _KEPT:
                store.delete_key(self._first.popleft())
        elif (taken, calls) != (own.taken, own.calls) and own.over not in self._told:
            self._told.add(own.over)
            return different(who(self._rank), who(rank), own, taken, calls)
        return ""


def different(here: Who, other: Who, own: Steps, taken: int, calls: int) -> str:
    """What is said of ranks that have called other numbers of collectives by the same step; it ends no job.

    >>> print(different(Who(1, "a"), Who(0, "a"), Steps("g/0/1", "data", 100, 203), 100, 201))
    ds_topo watch: ranks are at different steps:
      rank 1 on a has called 203 collectives of data by its step 100,
      rank 0 on a has called 201 by its step 100.
    Whoever has called more has left out engine.step(), or its program calls others besides.
    Replicas may differ: ds_topo.check_replicas(engine) compares them.
    """
    lines = [
        "ds_topo watch: ranks are at different steps:",
        f"  {here} has called {own.calls} collectives of {own.over} by its step {own.taken},",
        f"  {other} has called {calls} by its step {taken}.",
        "Whoever has called more has left out engine.step(), or its program calls others besides.",
        "Replicas may differ: ds_topo.check_replicas(engine) compares them.",
    ]
    return "\n".join(lines)
