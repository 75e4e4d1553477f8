"""Real collectives with results that are known: whoever gives or gets something else is suspected."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ds_topo.check.faults import Anomaly
from ds_topo.collectives.functional import all_gather, all_to_all, reduce_scatter
from ds_topo.process_groups.creation import ProcessGroup

CHUNK = 64
"""Numbers that each rank contributes for each other."""
_PRIME = 251
ARITHMETIC_SIZE, ARITHMETIC_TIMES = 192, 8


def pattern(sender: int, receiver: int, device: torch.device) -> Tensor:
    """Whole numbers below 251, ``[CHUNK]``, that no other pair of ranks has in this order; exact in every sum here."""
    positions = torch.arange(CHUNK, device=device)
    return ((positions * 7 + sender * 31 + receiver * 17 + 5) % _PRIME).float()


def check_arithmetic(device: torch.device, rank: int) -> list[Anomaly]:
    """Multiply matrices of small whole numbers, whose product every format of at least 10 bits gives exactly."""
    n = ARITHMETIC_SIZE
    rows, columns = torch.arange(n).unsqueeze(1), torch.arange(n).unsqueeze(0)
    left, right = (rows * 7 + columns * 3) % 5 - 2, (rows * 5 + columns * 11) % 7 - 3
    exact = left @ right
    product = [left.float().to(device) @ right.float().to(device) for _ in range(ARITHMETIC_TIMES)]
    wrong = any(not torch.equal(result.cpu().long(), exact) for result in product)
    return [Anomaly(rank, "matrix product", (rank,))] if wrong else []


def check_group(name: str, ranks: Sequence[int], group: ProcessGroup, rank: int, device: torch.device) -> list[Anomaly]:
    """Every collective that training uses, over one group; collective over it.

    Args:
        name: of the axis or axes, for the report.
        ranks: of the group, global, ascending.
        group: itself.
        rank: this one, global.
        device: where tensors are.
    """
    if len(ranks) == 1:
        return []
    anomalies: list[Anomaly] = []
    for operation, check in _CHECKS:
        for sender in check(ranks, group, rank, device):
            suspects = tuple(ranks) if sender is None else tuple(sorted({sender, rank}))
            anomalies.append(Anomaly(rank, f"{operation} over {name}", suspects))
    return anomalies


def pairs_of(suspects: Sequence[int], rank: int) -> list[tuple[int, int]]:
    """The groups of two in which a rank is tested again, where a group's wrong sum may be due to any member.

    Each suspect with its neighbors in a ring: whoever is wrong is in both of the groups that are.

    >>> pairs_of((0, 2, 4, 6), 2), pairs_of((0, 2, 4, 6), 0), pairs_of((0, 2, 4, 6), 1)
    ([(0, 2), (2, 4)], [(0, 2), (0, 6)], [])
    """
    if rank not in suspects:
        return []
    position = suspects.index(rank)
    neighbors = (suspects[position - 1], suspects[(position + 1) % len(suspects)])
    return sorted((min(rank, other), max(rank, other)) for other in neighbors)


Senders = list["int | None"]
"""Whose parts were wrong; None where nobody's part can be told."""


def _broadcast(ranks: Sequence[int], group: ProcessGroup, rank: int, device: torch.device) -> Senders:
    wrong: Senders = []
    for source in (ranks[0], ranks[-1]):
        tensor = pattern(source, source, device) if rank == source else torch.zeros(CHUNK, device=device)
        dist.broadcast(tensor, source, group=group)
        if not torch.equal(tensor, pattern(source, source, device)):
            wrong.append(source)
    return wrong


def _all_reduce(ranks: Sequence[int], group: ProcessGroup, rank: int, device: torch.device) -> Senders:
    tensor = pattern(rank, 0, device)
    dist.all_reduce(tensor, group=group)
    return [] if torch.equal(tensor, _total(ranks, 0, device)) else [None]


def _reduce_scatter(ranks: Sequence[int], group: ProcessGroup, rank: int, device: torch.device) -> Senders:
    parts = torch.cat([pattern(rank, receiver, device) for receiver in ranks])
    return [] if torch.equal(reduce_scatter(parts, 0, group), _total(ranks, rank, device)) else [None]


def _all_gather(ranks: Sequence[int], group: ProcessGroup, rank: int, device: torch.device) -> Senders:
    parts = all_gather(pattern(rank, 0, device), 0, group).split(CHUNK)
    return [
        sender for sender, part in zip(ranks, parts, strict=True) if not torch.equal(part, pattern(sender, 0, device))
    ]


def _all_to_all(ranks: Sequence[int], group: ProcessGroup, rank: int, device: torch.device) -> Senders:
    parts = torch.cat([pattern(rank, receiver, device) for receiver in ranks])
    received = all_to_all(parts, 0, 0, group).split(CHUNK)
    return [
        sender
        for sender, part in zip(ranks, received, strict=True)
        if not torch.equal(part, pattern(sender, rank, device))
    ]


def _ring(ranks: Sequence[int], group: ProcessGroup, rank: int, device: torch.device) -> Senders:
    """To the next rank, from the previous one, as stages of a pipeline do."""
    position = ranks.index(rank)
    after, before = ranks[(position + 1) % len(ranks)], ranks[position - 1]
    received = torch.zeros(CHUNK, device=device)
    send = dist.P2POp(dist.isend, pattern(rank, after, device), after, group)
    receive = dist.P2POp(dist.irecv, received, before, group)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    return [] if torch.equal(received, pattern(before, rank, device)) else [before]


def _total(ranks: Sequence[int], receiver: int, device: torch.device) -> Tensor:
    total = torch.zeros(CHUNK, device=device)
    for sender in ranks:
        total += pattern(sender, receiver, device)
    return total


_CHECKS: tuple[tuple[str, Callable[[Sequence[int], ProcessGroup, int, torch.device], Senders]], ...] = (
    ("broadcast", _broadcast),
    ("all_reduce", _all_reduce),
    ("reduce_scatter", _reduce_scatter),
    ("all_gather", _all_gather),
    ("all_to_all", _all_to_all),
    ("send and receive", _ring),
)
