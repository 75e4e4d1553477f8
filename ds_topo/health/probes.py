"""Probe a running cluster: collectives with known results, and the speed of groups and of all links.

Links are measured in rounds in which every rank of a host, or every host, has a partner, until all pairs have met.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median_high
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ds_topo.base.backends import synchronize
from ds_topo.collectives import functional_all_gather, functional_all_to_all, functional_reduce_scatter
from ds_topo.health.faults import Anomaly
from ds_topo.process_groups.creation import ProcessGroup

# -- right results -----------------------------------------------------------------------------------------------------

CHUNK = 64
"""The number of values that each rank contributes for each other rank."""
_PRIME = 251
_MATRIX, _PRODUCTS = 192, 8


def pattern(sender: int, receiver: int, device: torch.device) -> Tensor:
    """Return ``[CHUNK]`` whole numbers below 251, different for each pair of ranks, whose sums here are exact."""
    positions = torch.arange(CHUNK, device=device)
    return ((positions * 7 + sender * 31 + receiver * 17 + 5) % _PRIME).float()


def check_arithmetic(device: torch.device, rank: int) -> list[Anomaly]:
    """Multiply matrices of small whole numbers, whose product is exact in every format of at least 10 bits."""
    rows, columns = torch.arange(_MATRIX).unsqueeze(1), torch.arange(_MATRIX).unsqueeze(0)
    left, right = (rows * 7 + columns * 3) % 5 - 2, (rows * 5 + columns * 11) % 7 - 3
    products = [left.float().to(device) @ right.float().to(device) for _ in range(_PRODUCTS)]
    wrong = any(not torch.equal(product.cpu().long(), left @ right) for product in products)
    return [Anomaly(rank, "matrix product", (rank,))] if wrong else []


def check_group(
    name: str, ranks: Sequence[int], group: ProcessGroup, rank: int, device: torch.device
) -> Iterator[Anomaly]:
    """Run every collective of training over a group, and yield wrong results; any member may cause a wrong sum."""

    def wrong(operation: str, culprits: Sequence[int]) -> Anomaly:
        return Anomaly(rank, f"{operation} over {name}", tuple(sorted({*culprits, rank})))

    def sent(sender: int, receiver: int) -> Tensor:
        return pattern(sender, receiver, device)

    def total(receiver: int) -> Tensor:
        return torch.stack([sent(sender, receiver) for sender in ranks]).sum(0)

    for source in (ranks[0], ranks[-1]):
        tensor = sent(source, source) if rank == source else torch.zeros(CHUNK, device=device)
        dist.broadcast(tensor, source, group=group)
        if not torch.equal(tensor, sent(source, source)):
            yield wrong("broadcast", [source])
    tensor = sent(rank, 0)
    dist.all_reduce(tensor, group=group)
    if not torch.equal(tensor, total(0)):
        yield wrong("all_reduce", ranks)
    for_each = torch.cat([sent(rank, receiver) for receiver in ranks])
    if not torch.equal(functional_reduce_scatter(for_each, 0, group), total(rank)):
        yield wrong("reduce_scatter", ranks)
    gathered = functional_all_gather(sent(rank, 0), 0, group)
    exchanged = functional_all_to_all(for_each, 0, 0, group)
    for operation, parts, receiver in (("all_gather", gathered, 0), ("all_to_all", exchanged, rank)):
        for sender, part in zip(ranks, parts.split(CHUNK), strict=True):
            if not torch.equal(part, sent(sender, receiver)):
                yield wrong(operation, [sender])
    # to the next rank and from the previous one, as the stages of a pipeline do
    position = ranks.index(rank)
    after, before = ranks[(position + 1) % len(ranks)], ranks[position - 1]
    received = torch.zeros(CHUNK, device=device)
    send = dist.P2POp(dist.isend, sent(rank, after), after, group)
    receive = dist.P2POp(dist.irecv, received, before, group)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    if not torch.equal(received, sent(before, rank)):
        yield wrong("send and receive", [before])


def pairs_of(suspects: Sequence[int], rank: int) -> list[tuple[int, int]]:
    """Return the pairs in which a rank is tested again: each suspect of a wrong sum and its neighbors in a ring.

    >>> pairs_of((0, 2, 4, 6), 2), pairs_of((0, 2, 4, 6), 0), pairs_of((0, 2, 4, 6), 1)
    ([(0, 2), (2, 4)], [(0, 2), (0, 6)], [])
    """
    if rank not in suspects:
        return []
    position = suspects.index(rank)
    neighbors = (suspects[position - 1], suspects[(position + 1) % len(suspects)])
    return sorted((min(rank, other), max(rank, other)) for other in neighbors)


# -- speed of one group or pair ----------------------------------------------------------------------------------------

SMALL_TIMES, REPEATS = 10, 3
FIRST_BYTES, GROWTH = 2**16, 4
ENOUGH_SECONDS, TOO_MANY_SECONDS = 0.15, 2.0
"""Transfers grow until one takes ``ENOUGH_SECONDS`` on the fastest link, or ``TOO_MANY_SECONDS`` on the slowest:
traffic shapers and switches pass a short burst at full speed."""
Times = TypeVar("Times", bound=tuple[float, ...])


@dataclass
class Device:
    """The device of the tensors, with one buffer that all probes send from and one that they receive into."""

    device: torch.device
    most_bytes: int

    def __post_init__(self) -> None:
        self.outgoing = torch.ones(self.most_bytes // 4, device=self.device)
        self.incoming = torch.zeros(self.most_bytes // 4, device=self.device)

    def now(self) -> float:
        """Wait until the device is idle; return the time in seconds."""
        synchronize(self.device)
        return time.perf_counter()

    def number(self, value: float) -> Tensor:
        """Return a tensor of one number."""
        return torch.tensor([value], dtype=torch.float32, device=self.device)


class PairTime(NamedTuple):
    """The speed of one link, as one of its ends measured it."""

    peer: int
    """The rank, or the host, at the other end."""
    latency: float
    """Seconds of a message of a few bytes, one way."""
    came: float
    """Bytes per second received."""
    went: float
    """Bytes per second sent."""


def largest(value: float, group: ProcessGroup | None, device: Device) -> float:
    """Return the maximum over a group; the value itself without a group."""
    if group is None:
        return value
    tensor = device.number(value)
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    return float(tensor.item())


def time_all_reduce(group: ProcessGroup, world: ProcessGroup, device: Device) -> tuple[float, float, int]:
    """Measure an all_reduce of all groups of an axis; collective over ``world``, so that they start together.

    Return the seconds of one number, the seconds of ``size`` bytes, and ``size``.
    """
    small = device.number(0.0)

    def seconds_of(tensor: Tensor, op: dist.ReduceOp.RedOpType) -> float:
        start = device.now()
        dist.all_reduce(tensor, op, group=group)
        return device.now() - start

    def seconds_of_bytes(size: int) -> tuple[float, float, float]:
        largest(0.0, world, device)  # start together
        took = seconds_of(device.outgoing[: size // 4], dist.ReduceOp.MAX)
        return -largest(-took, world, device), largest(took, world, device), largest(took, group, device)

    largest(0.0, world, device)
    latencies = [seconds_of(small, dist.ReduceOp.SUM) for _ in range(SMALL_TIMES)]
    size, times = _repeated(seconds_of_bytes, device)
    return median_high(latencies), min(of_group for _, _, of_group in times), size


def time_pair(peer: int | None, device: Device, team: ProcessGroup | None = None) -> PairTime | None:
    """Measure latency and bandwidth between this rank and a peer, one direction after the other.

    With a ``team``, all ranks of this host start each transfer together and take the slowest rank's time. Every rank
    then gets its share of what the two hosts carry together. Without a peer it takes part in the team's steps alone.
    """
    latency = 0.0
    if peer is not None:
        mine, theirs = device.number(1.0), device.number(0.0)
        _exchange(peer, mine, theirs, device)  # the first exchange opens the connection
        latency = median_high([_exchange(peer, mine, theirs, device) for _ in range(SMALL_TIMES)])
    size, times = _repeated(lambda size: _time_step(peer, size, device, team), device)
    if peer is None:
        return None
    return PairTime(peer, latency, size / min(came for came, _ in times), size / min(went for _, went in times))


def _repeated(step: Callable[[int], Times], device: Device) -> tuple[int, list[Times]]:
    """Repeat a transfer of so many bytes that it takes long enough, which are fewer on a slow link.

    ``step`` returns seconds on several ranks, with the shortest and the longest of all. These decide, so they are equal
    on all ranks. Return the bytes, and the seconds of each repetition.
    """
    size, first = FIRST_BYTES, step(FIRST_BYTES)
    while size < device.most_bytes and min(first) < ENOUGH_SECONDS and max(first) < TOO_MANY_SECONDS:
        size = min(size * GROWTH, device.most_bytes)
        first = step(size)
    return size, [first, *(step(size) for _ in range(REPEATS - 1))]


def _exchange(peer: int, outgoing: Tensor, incoming: Tensor, device: Device) -> float:
    """Send to a peer and receive from it at the same time; return the seconds until everything was received."""
    start = device.now()
    operations = [dist.P2POp(dist.isend, outgoing, peer), dist.P2POp(dist.irecv, incoming, peer)]
    [*sending, receiving] = dist.batch_isend_irecv(operations)  # NCCL returns one work for both
    receiving.wait()
    took = device.now() - start
    for work in sending:
        work.wait()
    return took


def _time_step(peer: int | None, size: int, device: Device, team: ProcessGroup | None) -> tuple[float, float]:
    """Return the seconds until this side had received all its data, and until the other side had."""
    largest(0.0, team, device)
    theirs, took = device.number(0.0), 0.0
    if peer is not None:
        outgoing, incoming = device.outgoing[: size // 4], device.incoming[: size // 4]
        # one direction after the other: gloo's one connection of a pair sometimes serialises them
        for sends in (dist.get_rank() < peer, dist.get_rank() > peer):
            _exchange(peer, device.number(1.0), device.number(0.0), device)  # start together
            if sends:
                dist.send(outgoing[: len(outgoing) // 8], peer)
                dist.send(outgoing, peer)
            else:
                dist.recv(incoming[: len(incoming) // 8], peer)  # uses up what a shaper passes at full speed
                start = device.now()
                dist.recv(incoming, peer)
                took = device.now() - start
    took = largest(took, team, device)
    if peer is not None:
        _exchange(peer, device.number(took), theirs, device)
    return took, largest(float(theirs.item()), team, device)


# -- all pairs, in rounds ----------------------------------------------------------------------------------------------


def opponents(player: int, players: int) -> list[int | None]:
    """Return a player's opponent in each round, until all pairs have met once; None in a round off of an odd number.

    This is the circle method: the last player stays, and all others move on by one place per round. Every round is a
    matching, so 2,048 hosts need 2,047 rounds instead of 2,096,128 tests one after the other. The rounds are in a
    random order, equal for every player, so that the first ones are a fair sample.

    >>> sorted(opponents(0, 4)), opponents(1, 2)
    ([1, 2, 3], [0])
    """
    last = players + players % 2 - 1
    found: list[int | None] = []
    for number in random.Random(players).sample(range(last), last):
        if player == last:
            other = number * (last + 1) // 2 % last  # the player that would meet itself: 2 * other = number modulo last
        else:
            other = (number - player) % last
            other = last if other == player else other
        found.append(None if other >= players else other)
    return found


def ranks_in_blocks(each: int, hosts: int) -> list[list[int]]:
    """Return the ranks of hosts with ``each`` ranks, numbered host by host.

    >>> ranks_in_blocks(2, 2)
    [[0, 1], [2, 3]]
    """
    return [list(range(first, first + each)) for first in range(0, each * hosts, each)]
