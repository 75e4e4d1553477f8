"""A rank's partition in another layout."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from ds_topo.partition.layout import Fragment, PartitionLayout
from ds_topo.process_groups.creation import ProcessGroup


def moved(
    partition: torch.Tensor, source: PartitionLayout, target: PartitionLayout, group: ProcessGroup
) -> torch.Tensor:
    """This rank's partition in ``target``, where it has ``partition`` in ``source``; collective over ``group``.

    Ranks send each other what the other ones own from now on. Padding is zero.

    Args:
        partition: ``[source.partition_numel]``.
        source: the layout that it has.
        target: the layout to have, of the same parameters.
        group: of the ranks that share the flat tensor.

    Returns:
        ``[target.partition_numel]``, new memory.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    leaving = sorted(_pairs(source, target, rank), key=_by_peer)
    arriving = sorted(_pairs(target, source, rank), key=_by_peer)
    parts = [partition[here.address : here.address + here.numel] for here, _ in leaving]
    outgoing = torch.cat(parts) if parts else partition.new_empty(0)
    incoming = partition.new_empty(sum(here.numel for here, _ in arriving))
    dist.all_to_all_single(incoming, outgoing, _counts(arriving, size), _counts(leaving, size), group=group)
    result = partition.new_zeros(target.partition_numel)
    position = 0
    for here, _ in arriving:
        result[here.address : here.address + here.numel] = incoming[position : position + here.numel]
        position += here.numel
    return result


def _pairs(source: PartitionLayout, target: PartitionLayout, rank: int) -> Iterator[tuple[Fragment, Fragment]]:
    """Parts of what ``rank`` owns in ``source``, each with who owns it in ``target``."""
    for own in source.fragments(rank):
        for owner in target.owners(own.parameter, own.start, own.numel):
            here = Fragment(own.parameter, owner.start, rank, own.address + owner.start - own.start, owner.numel)
            yield here, owner


def _by_peer(pair: tuple[Fragment, Fragment]) -> tuple[int, int, int]:
    """Sender and receiver sort what they exchange alike."""
    here, there = pair
    return there.rank, here.parameter, here.start


def _counts(pairs: list[tuple[Fragment, Fragment]], size: int) -> list[int]:
    """Elements by peer."""
    counts = [0] * size
    for here, there in pairs:
        counts[there.rank] += here.numel
    return counts
