"""The machine that a job runs on: hosts, slots, accelerators and the links between them."""

from __future__ import annotations

from dataclasses import dataclass

from ds_topo.errors import TopologyError
from ds_topo.planner.accelerators import Accelerator

CONTEXT_BYTES = 3e9
"""Device memory that no tensor gets: driver context, libraries' workspaces, communicators."""
USABLE_SHARE = 0.96
"""Of the rest, what tensors can have at most: torch's allocator rounds blocks up and leaves gaps."""


@dataclass(frozen=True)
class Link:
    """A link's bandwidth in bytes per second and direction, and the seconds of one hop of an empty message."""

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Cluster:
    """``hosts`` equal hosts of ``slots`` accelerators; rank r is on host r // slots.

    Args:
        accelerator: of every slot.
        hosts: their number.
        slots: ranks on each.
        inside: from one rank to a peer on its host.
        across: from one host to the others, all its ranks together.
        processors: how many ranks can compute at full speed at the same time; below the number of ranks where they
            share processors (ranks on a CPU).
        memory_limit: bytes that tensors of one rank may take.
        start_seconds: from the call of a collective to its first message.
    """

    accelerator: Accelerator
    hosts: int
    slots: int
    inside: Link
    across: Link
    processors: float
    memory_limit: float
    start_seconds: float

    @property
    def ranks(self) -> int:
        """All slots."""
        return self.hosts * self.slots


def cluster_of(
    accelerator: Accelerator,
    hosts: int,
    slots: int | None = None,
    *,
    inside: Link | None = None,
    across: Link | None = None,
    processors: float | None = None,
    memory_limit: float | None = None,
    start_seconds: float = 10e-6,
) -> Cluster:
    """A cluster of known accelerators, with whatever is known better than the table.

    >>> from ds_topo.planner.accelerators import accelerator_of
    >>> cluster_of(accelerator_of("A100"), hosts=4).ranks
    32

    Raises:
        TopologyError: no hosts or slots.
    """
    slots = accelerator.slots if slots is None else slots
    if hosts < 1 or slots < 1:
        raise TopologyError(f"hosts={hosts}, slots={slots}: a cluster has at least one host with one slot")
    shares = accelerator.efficiency.links
    return Cluster(
        accelerator,
        hosts,
        slots,
        inside or Link(accelerator.link_inside * shares[0], accelerator.latency_inside),
        across or Link(accelerator.link_across * slots * shares[1], accelerator.latency_across),
        float(hosts * slots) if processors is None else processors,
        USABLE_SHARE * (accelerator.memory_bytes - CONTEXT_BYTES) if memory_limit is None else memory_limit,
        start_seconds,
    )


def cluster_of_ranks(accelerator: Accelerator, ranks: int) -> Cluster:
    """The smallest cluster with so many ranks: hosts as they are usually built, or with fewer slots in use on each.

    >>> from ds_topo.planner.accelerators import accelerator_of
    >>> cluster = cluster_of_ranks(accelerator_of("A100"), 280)
    >>> cluster.hosts, cluster.slots
    (35, 8)
    >>> cluster = cluster_of_ranks(accelerator_of("GB200"), 256)
    >>> cluster.hosts, cluster.slots
    (4, 64)
    """
    slots = next(slots for slots in range(min(ranks, accelerator.slots), 0, -1) if ranks % slots == 0)
    return cluster_of(accelerator, ranks // slots, slots)
