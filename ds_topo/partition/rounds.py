"""Who sends which slices to whom: directly, or first inside hosts and then across them. Pure.

A reduce-scatter goes through the rounds in their order, a gather through the same rounds backwards with sending and
receiving exchanged. With ``n`` ranks on each of ``h`` hosts and ``B`` bytes, a direct exchange sends
``B n (h - 1) / h`` over each host's link, one in two rounds ``B (h - 1) / h``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_topo.topology.rank_tables import has_two_levels, two_level_ranks


@dataclass(frozen=True)
class Peer:
    """What this rank exchanges with one other rank of the group in one round."""

    rank: int
    """Its rank in the group."""
    theirs: tuple[int, ...]
    """Slices that it answers for after this round: a reduce-scatter sends them to it."""
    mine: tuple[int, ...]
    """Slices that this rank answers for: a reduce-scatter receives them from it."""


def rounds_of(rank: int, hosts: Sequence[str]) -> list[list[Peer]]:
    """The rounds of a reduce-scatter, for a rank of a group.

    Args:
        rank: in the group.
        hosts: of every rank of the group. Two rounds, if there are several hosts with equally many ranks, several each.

    >>> rounds_of(0, ["a", "a"])
    [[Peer(rank=1, theirs=(1,), mine=(0,))]]
    >>> for peers in rounds_of(0, ["a", "a", "b", "b"]):
    ...     print(peers)
    [Peer(rank=1, theirs=(1, 3), mine=(0, 2))]
    [Peer(rank=2, theirs=(2,), mine=(0,))]
    """
    ranks = range(len(hosts))
    if not has_two_levels(dict(enumerate(hosts))):
        return [[Peer(other, (other,), (rank,)) for other in _from_next(ranks, rank)]]
    of_rank = dict(enumerate(hosts))
    local, counterparts = two_level_ranks(ranks, of_rank, rank)
    inside = [
        Peer(other, tuple(two_level_ranks(ranks, of_rank, other)[1]), tuple(counterparts))
        for other in _from_next(local, rank)
    ]
    across = [Peer(other, (other,), (rank,)) for other in _from_next(counterparts, rank)]
    return [inside, across]


def _from_next(ranks: Sequence[int], rank: int) -> list[int]:
    """The others, from the next one on, so that not all ranks begin with the same one."""
    place = list(ranks).index(rank)
    return [*ranks[place + 1 :], *ranks[:place]]
