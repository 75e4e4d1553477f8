"""Keys that this rank wrote to the job's store, deleted when nobody can need them any more.

The server of the store lives as long as the job, and torch deletes nothing from it. A rank that is done with a key of
its own leaves it here, with the ranks that may still read it. Each of them is past all that it did before it comes to
an agreement: when all of them have come to a later one, the key goes. So ``destroy()`` waits for nobody and asks the
store nothing, a rank deletes only what it wrote itself, in a request per key, and what stays in the end is what was
left since the last agreement, however many there were.

NCCL's ids of communicators stay: it writes them at the first use, under names of its own, a few for each group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary

from ds_topo.process_groups.torch_names import Store

_left: WeakKeyDictionary[Store, dict[int, list[tuple[Sequence[int], str]]]] = WeakKeyDictionary()
"""Of each job's store and rank in it: who may read it, and the key."""


def leave(store: Store, rank: int, readers: Sequence[int], keys: Iterable[str]) -> None:
    """Let these keys be deleted once all ``readers`` have come to an agreement that starts after now."""
    _left.setdefault(store, {}).setdefault(rank, []).extend((readers, key) for key in keys)


def take_due(store: Store, rank: int, came: Sequence[int]) -> list[str]:
    """What this rank has left that nobody needs any more, since these ranks have come; the caller deletes it."""
    left = _left.get(store, {}).get(rank)
    if not left:
        return []
    here = set(came)
    due = [key for readers, key in left if here.issuperset(readers)]
    left[:] = [(readers, key) for readers, key in left if not here.issuperset(readers)]
    return due
