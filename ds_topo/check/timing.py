"""How fast groups and links are: seconds of a small message, bytes per second of large ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ds_topo.process_groups.creation import ProcessGroup

SMALL_TIMES, REPEATS = 10, 3
FIRST_BYTES, GROWTH = 2**16, 4
ENOUGH_SECONDS, TOO_MANY_SECONDS = 0.15, 2.0
"""A transfer is long enough when it takes as long on the fastest link, or so long on the slowest."""


@dataclass
class Device:
    """Where tensors are, and the one buffer that all tests send from and the one that they receive into.

    Args:
        device: of torch.
        most_bytes: the largest transfer.
    """

    device: torch.device
    most_bytes: int

    def __post_init__(self) -> None:
        self.outgoing = torch.ones(self.most_bytes // 4, device=self.device)
        self.incoming = torch.zeros(self.most_bytes // 4, device=self.device)

    def now(self) -> float:
        """Seconds, when everything that was asked of the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def number(self, value: float) -> Tensor:
        """A tensor of one number."""
        return torch.tensor([value], dtype=torch.float32, device=self.device)


@dataclass(frozen=True)
class Speed:
    """Of one link or group, as one rank saw it.

    Args:
        latency: seconds of a message of a few bytes, one way.
        bandwidth: bytes per second that came in; for collectives of the ring's busiest link (``busbw`` of nccl-tests).
        sent: bytes per second that went out, where they are told apart.
    """

    latency: float
    bandwidth: float
    sent: float = 0.0


def largest(value: float, group: ProcessGroup | None, device: Device) -> float:
    """The maximum over a group; the value itself without one."""
    if group is None:
        return value
    tensor = device.number(value)
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    return float(tensor.item())


def median(values: list[float]) -> float:
    """The middle one; the upper of two."""
    return sorted(values)[len(values) // 2]


def time_all_reduce(group: ProcessGroup, world: ProcessGroup, device: Device) -> Speed:
    """Latency and bandwidth of an all_reduce that all groups of an axis run at the same time.

    Collective over ``world``, so that all groups start together and take the same sizes.
    """
    ranks = group.size()
    small = device.number(0.0)

    def reduce_small() -> None:
        dist.all_reduce(small, group=group)

    def reduce_large(size: int) -> Callable[[], None]:
        return lambda: dist.all_reduce(device.outgoing[: size // 4], dist.ReduceOp.MAX, group=group)

    largest(0.0, world, device)
    latencies = [_timed(reduce_small, device) for _ in range(SMALL_TIMES)]
    size = FIRST_BYTES
    while size < device.most_bytes:
        largest(0.0, world, device)
        took = _timed(reduce_large(size), device)
        if _is_long_enough(-largest(-took, world, device), largest(took, world, device)):
            break
        size = min(size * GROWTH, device.most_bytes)
    times = []
    for _ in range(REPEATS):
        largest(0.0, world, device)
        times.append(largest(_timed(reduce_large(size), device), group, device))
    return Speed(median(latencies), 2 * (ranks - 1) / ranks * size / min(times))


def _is_long_enough(fastest: float, slowest: float) -> bool:
    """A short transfer says little: shapers and switches let a burst through at once."""
    return fastest >= ENOUGH_SECONDS or slowest >= TOO_MANY_SECONDS


def _timed(work: Callable[[], None], device: Device) -> float:
    start = device.now()
    work()
    return device.now() - start


# -- pairs of ranks ----------------------------------------------------------------------------------------------------


def exchange(peer: int, outgoing: Tensor, incoming: Tensor, device: Device) -> float:
    """Send to a peer and receive from it at the same time; return the seconds until everything had come."""
    start = device.now()
    operations = [dist.P2POp(dist.isend, outgoing, peer), dist.P2POp(dist.irecv, incoming, peer)]
    [*sending, receiving] = dist.batch_isend_irecv(operations)  # NCCL: one for both
    receiving.wait()
    came = device.now() - start
    for work in sending:
        work.wait()
    return came


def time_messages(peer: int, device: Device) -> float:
    """Seconds that a few bytes take to a peer, one way; the median of a few exchanges."""
    mine, theirs = device.number(1.0), device.number(0.0)
    exchange(peer, mine, theirs, device)  # the first makes the connection
    return median([exchange(peer, mine, theirs, device) for _ in range(SMALL_TIMES)])


def time_pair(peer: int | None, device: Device, team: ProcessGroup | None = None) -> Speed | None:
    """Latency and bandwidth between this rank and a peer, one way after the other.

    Sizes grow until a transfer takes long enough, so that a slow link costs no more time than a fast one. With a
    ``team``, the ranks of this rank's host, all of them start each transfer together and take the slowest one's time:
    every rank then gets its part of what the hosts carry together.

    Args:
        peer: its global rank, or None to take part in the team's steps alone.
        device: buffers.
        team: the ranks of this host; the peer's team must have as many that have a peer.

    Returns:
        What came in and what went out, or None without a peer.
    """
    latency = 0.0 if peer is None else time_messages(peer, device)
    size, times = FIRST_BYTES, [_time_step(peer, FIRST_BYTES, device, team)]
    while size < device.most_bytes and not _is_long_enough(min(times[0]), max(times[0])):
        size = min(size * GROWTH, device.most_bytes)
        times = [_time_step(peer, size, device, team)]
    times += [_time_step(peer, size, device, team) for _ in range(REPEATS - 1)]
    if peer is None:
        return None
    return Speed(latency, size / min(came for came, _ in times), size / min(went for _, went in times))


def _one_way_each(peer: int, outgoing: Tensor, incoming: Tensor, device: Device) -> float:
    """Send to a peer, then receive from it, or first receive; return the seconds that the receiving took.

    Not at the same time: gloo's one connection of a pair then sometimes carries one way after the other.
    """
    took = 0.0
    for sends in (dist.get_rank() < peer, dist.get_rank() > peer):
        exchange(peer, device.number(1.0), device.number(0.0), device)  # start together
        if sends:
            dist.send(outgoing[: len(outgoing) // 8], peer)
            dist.send(outgoing, peer)
        else:
            dist.recv(incoming[: len(incoming) // 8], peer)  # whatever lets a burst through at once has nothing left
            start = device.now()
            dist.recv(incoming, peer)
            took = device.now() - start
    return took


def _time_step(peer: int | None, size: int, device: Device, team: ProcessGroup | None) -> tuple[float, float]:
    """Seconds until all of this side's data had come, and all of the other side's."""
    largest(0.0, team, device)
    theirs, took = device.number(0.0), 0.0
    if peer is not None:
        took = _one_way_each(peer, device.outgoing[: size // 4], device.incoming[: size // 4], device)
    took = largest(took, team, device)
    if peer is not None:
        exchange(peer, device.number(took), theirs, device)
    return took, largest(float(theirs.item()), team, device)
