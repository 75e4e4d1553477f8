"""Seconds and bytes of collectives over the links that a layout puts them on.

A ring moves ``(n - 1) / n`` of a tensor over each of its edges in an all_gather or a reduce_scatter, twice that in an
all_reduce (Thakur et al., 2005; Narayanan et al., section 3.3). Its edges inside a host have a link each, those that
leave a host share that host's adapters. In an all_to_all every rank sends ``1 / n`` of its tensor to each peer.
"""

from __future__ import annotations

from math import ceil, log2

from ds_topo.planner.cluster import Cluster
from ds_topo.planner.spans import Span

TO_OWNERS, FROM_OWNERS = "sum_to_owners", "gather_from_owners"
"""What ``ds_topo.partition`` does at ZeRO 1 and 2: a reduce_scatter and an all_gather, on gloo point to point."""
_PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, TO_OWNERS: 1, FROM_OWNERS: 1}


def ring_passes(operation: str, cluster: Cluster) -> int:
    """How often a collective sends a tensor around the ring. torch's gloo does a reduce_scatter as an all_reduce whose
    result it then takes a part of (counted at an interface: as many bytes)."""
    if operation == "reduce_scatter" and cluster.accelerator.transport == "gloo":
        return _PASSES["all_reduce"]
    return _PASSES[operation]


def collective_seconds(operation: str, size: float, span: Span, cluster: Cluster, calls: int = 1) -> float:
    """Seconds of a collective that all groups of an axis run at the same time.

    Args:
        operation: ``all_reduce``, ``all_gather``, ``reduce_scatter`` or ``all_to_all``.
        size: bytes of the whole tensor; for an all_to_all, what one rank sends, its own part included.
        span: of the axis.
        cluster: whose links carry it.
        calls: in how many pieces of equal size.
    """
    ranks = span.size
    if ranks == 1 or not size:
        return 0.0
    leaving = bytes_leaving(operation, size, span, cluster)
    if operation == "all_to_all":
        local = size * (ranks - 1) / ranks - leaving / cluster.slots
    else:
        local = ring_passes(operation, cluster) * size * (ranks - 1) / ranks
    # where no two ranks of a group are on one host, nothing travels inside
    inside = local / cluster.inside.bandwidth if span.size > span.hosts else 0.0
    moving = max(inside, leaving / cluster.across.bandwidth)
    return moving + calls * latency_seconds(operation, span, cluster)


def latency_seconds(operation: str, span: Span, cluster: Cluster) -> float:
    """Seconds of an empty collective: its start, and its hops one after the other.

    A ring passes every rank once per pass; NCCL takes a tree over hosts for an all_reduce, whose depth is the logarithm
    of their number (NCCL 2.4's double binary trees).
    """
    across = span.hosts if span.crosses else 0
    inside = max(0, span.size - max(1, span.hosts))
    if operation == "all_to_all":
        hops = (min(inside, span.size // span.hosts - 1), min(across, 1) * ceil(log2(span.size)))
    elif operation == "all_reduce" and cluster.accelerator.transport == "nccl":
        hops = (2 * min(inside, span.size // span.hosts - 1), 2 * ceil(log2(max(1, across))) if across else 0)
    else:
        passes = ring_passes(operation, cluster)
        hops = (passes * inside, passes * across)
    return cluster.start_seconds + hops[0] * cluster.inside.latency + hops[1] * cluster.across.latency


def bytes_leaving(operation: str, size: float, span: Span, cluster: Cluster) -> float:
    """Bytes that the busiest host sends to others in one such collective of all groups."""
    if operation == "all_to_all":
        return size / span.size * span.remote_pairs
    if operation in (TO_OWNERS, FROM_OWNERS) and cluster.accelerator.transport == "gloo":
        # every slice crosses to another host once, whatever the number of ranks there
        return size * (span.hosts - 1) / max(1, span.hosts) * span.ring_edges
    return ring_passes(operation, cluster) * size * (span.size - 1) / span.size * span.ring_edges


def send_seconds(size: float, span: Span, cluster: Cluster) -> float:
    """Seconds for every rank to send ``size`` bytes to the next along an axis."""
    if span.size == 1 or not size:
        return 0.0
    if not span.crosses:
        return size / cluster.inside.bandwidth + cluster.inside.latency + cluster.start_seconds
    shared = cluster.accelerator.transport == "gloo"
    # where every rank has an adapter of its own, a message has no more than that
    edges = span.forward_edges if shared else max(span.forward_edges, cluster.slots)
    return size * edges / cluster.across.bandwidth + cluster.across.latency + cluster.start_seconds
