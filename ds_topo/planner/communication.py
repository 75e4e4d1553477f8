"""Find the hosts that groups of ranks span in a layout, and predict the seconds and bytes of their collectives.

A ring moves ``(n - 1) / n`` of a tensor over each of its edges in an all_gather or a reduce_scatter, twice that in an
all_reduce (Thakur et al., 2005; Narayanan et al., section 3.3). Its edges inside a host have a link each; those that
leave a host share that host's adapters. In an all_to_all every rank sends ``1 / n`` of its tensor to each peer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from math import ceil, gcd, log2, prod

from ds_topo.planner.hardware import Cluster
from ds_topo.planner.job import Layout
from ds_topo.planner.stages import Costs
from ds_topo.topology.axes import DATA, MODEL, PIPE, SEQ, SHARD, Factors
from ds_topo.topology.process_topology import ProcessTopology, offsets_of

EXPERT, EXPERT_DATA, GRADIENTS, ENDS, COPIES = "expert", "expert data", "gradients", "ends", "copies"
"""Groups that are no axis: the ranks over which a layer's experts are distributed, the replicas of an expert, the
replicas of a parameter, the first and last stage, and the ranks that hold one partition of ZeRO."""
PASS_AXES = (MODEL, SEQ, EXPERT)
"""Axes whose messages a stage waits for within a pass."""
TO_OWNERS, FROM_OWNERS = "sum_to_owners", "gather_from_owners"
"""The operations of ``ds_topo.zero`` at ZeRO 1 and 2: a reduce_scatter and an all_gather, on gloo point to point."""
SAMPLED_HOSTS = 4
"""Irregular groups are counted on at most so many hosts; the others look like them."""


@dataclass(frozen=True)
class Span:
    """The groups of one axis (or of several together) as the busiest host sees them.

    Args:
        size: ranks of a group.
        hosts: hosts on which a group has ranks.
        groups: groups that have ranks on one host.
        ring_edges: neighbors in those groups' rings of which the first is on the host and the second is not.
        remote_pairs: ordered pairs of group members of which the first is on the host and the second is not.
        forward_edges: ranks on the host whose next rank along the axis (without wrap-around) is elsewhere.
    """

    size: int
    hosts: int
    groups: int
    ring_edges: float
    remote_pairs: float
    forward_edges: float

    @property
    def crosses(self) -> bool:
        """True if its messages leave hosts."""
        return self.hosts > 1


def layout_spans(costs: Costs, layout: Layout) -> dict[str, Span]:
    """Return the span of every group of the layout, by axis or group."""
    topology, slots, world = layout.topology, costs.job.cluster.slots, costs.job.cluster.ranks
    factors = {axis: factors_of(topology, [axis]) for axis in (PIPE, SEQ, MODEL)}
    factors[DATA] = factors_of(topology, [DATA, SHARD])
    spans = {axis: span_of(factors[axis], world, slots) for axis in factors}
    replicas = factors_of(topology, [DATA, SHARD, SEQ])
    spans[GRADIENTS] = span_of(replicas, world, slots)
    if SHARD in topology.axes:
        spans[SHARD] = span_of(factors_of(topology, [SHARD]), world, slots)
        spans[COPIES] = span_of(factors_of(topology, [DATA, SEQ]), world, slots)
    if costs.job.model.tied:
        spans[ENDS] = ends_span(factors[PIPE], world, slots)
    if costs.job.model.expert_count:
        near, far = split_factors(replicas, layout.expert_parallel)
        spans[EXPERT] = span_of(near, world, slots)
        spans[EXPERT_DATA] = span_of(far, world, slots)
    return spans


def factors_of(topology: ProcessTopology, axes: Collection[str]) -> Factors:
    """Return ``(size, stride)`` of every axis of more than one rank, outermost first.

    >>> factors_of(ProcessTopology.from_spec("pipe=2,data=4,model=1"), ["data", "model"])
    ((4, 1),)
    """
    present = [position for position, axis in enumerate(topology.axes) if axis in axes]
    return tuple(factor for position in present for factor in topology.layout.axes[position] if factor[0] > 1)


def split_factors(factors: Factors, inner: int) -> tuple[Factors, Factors]:
    """Return the factors of groups of ``inner`` neighbors, and of the groups of their counterparts.

    >>> split_factors(((2, 8), (4, 1)), inner=2)
    (((2, 1),), ((2, 8), (2, 2)))
    """
    near: list[tuple[int, int]] = []
    far: list[tuple[int, int]] = []
    for size, stride in reversed(factors):
        taken = gcd(inner, size)
        inner //= taken
        near += [(taken, stride)] if taken > 1 else []
        far += [(size // taken, stride * taken)] if size > taken else []
    return tuple(reversed(near)), tuple(reversed(far))


@lru_cache(maxsize=4096)
def ends_span(factors: Factors, world: int, slots: int) -> Span:
    """Return the span of the pairs of a first and a last stage, which share a tied embedding, from ``pipe``'s factors.

    >>> ends_span(((4, 2),), world=8, slots=4).ring_edges
    2
    """
    if not factors:
        return Span(1, 1, slots, 0, 0, 0)
    [(size, stride)] = factors
    reach = (size - 1) * stride
    leaving = [0]
    for host in range(min(SAMPLED_HOSTS, -(-world // slots))):
        firsts = [rank for rank in range(host * slots, (host + 1) * slots) if rank // stride % size == 0]
        leaving.append(sum((rank + reach) // slots != host for rank in firsts))
    edges = max(leaving)
    return Span(2, 2 if edges else 1, slots, edges, edges, edges)


@lru_cache(maxsize=65536)
def span_of(factors: Factors, world: int, slots: int) -> Span:
    """Return the span of the groups ``{base + sum of digit x stride}`` if every host has ``slots`` consecutive ranks.

    >>> span_of(((2, 1),), world=8, slots=4).hosts, span_of(((2, 4),), world=8, slots=4)
    (1, Span(size=2, hosts=2, groups=4, ring_edges=4, remote_pairs=4, forward_edges=4))
    """
    if not factors:
        return Span(1, 1, slots, 0, 0, 0)
    ends = [end for size, stride in factors for end in (stride, stride * size)]
    if world % slots == 0 and all(slots % end == 0 or end % slots == 0 for end in ends):
        return _regular_span(factors, slots)
    offsets = sorted(offsets_of(factors))
    hosts = -(-world // slots)
    sampled = {0, min(1, hosts - 1), hosts // 2, hosts - 1} if hosts > SAMPLED_HOSTS else set(range(hosts))
    spans = [_span_at(host, offsets, factors, world, slots) for host in sampled]
    by_field = zip(*map(astuple, spans), strict=True)
    return Span(*(max(values) for values in by_field))


def _regular_span(factors: Factors, slots: int) -> Span:
    """Compute in closed form the span of groups that have equally many ranks on each of their hosts."""
    size = prod(size for size, _ in factors)
    local = prod(min(size, max(1, slots // stride)) for size, stride in factors)
    groups, hosts = slots // local, size // local
    if hosts == 1:
        return Span(size, 1, groups, 0, 0, 0)
    return Span(size, hosts, groups, groups, slots * (size - local), groups)


def _span_at(host: int, offsets: list[int], factors: Factors, world: int, slots: int) -> Span:
    most_hosts = ring_edges = remote_pairs = forward_edges = 0
    bases: set[int] = set()
    for rank in range(host * slots, min((host + 1) * slots, world)):
        base = rank - sum(rank // stride % size * stride for size, stride in factors)
        members = [base + offset for offset in offsets]
        place = members.index(rank)
        remote_pairs += sum(1 for member in members if member // slots != host)
        leaves = members[(place + 1) % len(members)] // slots != host
        ring_edges += leaves
        forward_edges += leaves and place + 1 < len(members)
        bases.add(base)
        most_hosts = max(most_hosts, len({member // slots for member in members}))
    return Span(len(offsets), most_hosts, len(bases), ring_edges, remote_pairs, forward_edges)


def senders_on_one_link(spans: Mapping[str, Span]) -> tuple[int, int]:
    """Return how many stages send their collectives over one host's link, and how many independent replicas of each.

    Both are 1 if no collective of a pass leaves a host. Replicas that exchange tokens with experts count as one.
    """
    crossing = [axis for axis in PASS_AXES if axis in spans and spans[axis].crosses]
    if not crossing:
        return 1, 1
    replicas = 1 if EXPERT in crossing else spans[DATA].size // spans[DATA].hosts
    return spans[PIPE].size // spans[PIPE].hosts, replicas


def with_sends_shared(spans: Mapping[str, Span], share: float) -> dict[str, Span]:
    """Return the spans with a share of the pipeline's sends to other hosts."""
    return {**spans, PIPE: replace(spans[PIPE], forward_edges=spans[PIPE].forward_edges * share)}


def with_link_shared(spans: Mapping[str, Span], share: float) -> dict[str, Span]:
    """Return the spans with a share of the edges between hosts: those that are busy at the same time."""
    shared = dict(spans)
    for axis, span in spans.items():
        if axis in PASS_AXES and span.crosses:
            shared[axis] = replace(span, ring_edges=span.ring_edges * share, remote_pairs=span.remote_pairs * share)
    return shared


def response_of(senders: int, computing: float, sending: float) -> float:
    """Return how much longer a message takes if several senders alternate on a link than if one has it alone.

    Each sender computes for ``computing`` seconds, then sends for ``sending`` seconds if it has the link alone. This is
    a closed queueing network (exact mean value analysis: Reiser and Lavenberg, 1980).

    >>> response_of(3, computing=0.0, sending=1.0), response_of(1, 1.0, 1.0), response_of(2, 1.0, 1.0)
    (3.0, 1.0, 1.5)
    """
    response = waiting = 0.0
    for number in range(1, senders + 1):
        response = 1 + waiting
        waiting = number * response * sending / (computing + response * sending) if sending else 0.0
    return response


def shares_of_turns(stages: int, replicas: int, computing: float, sending: float, passes: int) -> tuple[float, float]:
    """Return the shares of all senders' edges on a link that are busy while one sends.

    The first share is for a stage's own passes, the second for passes of other stages that it waits for at the
    beginning and at the end of a step.

    While a stage works on m passes, one that comes d later works on m - d of them; on average over k stages d is
    (k + 1) / 3. A link that is always busy carries k m passes in all; so k - 1 passes of waiting take (k + 1) / 3 times
    as long as alone.

    >>> shares_of_turns(2, 1, computing=0.0, sending=1.0, passes=4), shares_of_turns(2, 1, 1.0, 0.0, 8)
    ((0.875, 0.5), (0.5, 0.5))
    """
    senders = stages * replicas
    response = response_of(senders, computing, sending)
    of_stages = max(0.0, 1 - (stages + 1) / 3 / passes), (stages - 2) / 3 / max(1, stages - 1)
    others = ((replicas - 1 + (stages - 1) * replicas * overlap) / (senders - 1) for overlap in of_stages)
    own, waited_for = ((1 + (response - 1) * share) / senders for share in others)
    return own, waited_for


def ring_passes(operation: str, cluster: Cluster) -> int:
    """Return how often a collective sends a tensor around the ring.

    torch's gloo implements a reduce_scatter as an all_reduce whose result it then takes a part of (counted at an
    interface: as many bytes).
    """
    return 2 if operation == "all_reduce" or (operation == "reduce_scatter" and cluster.is_cpu) else 1


def collective_seconds(operation: str, size: float, span: Span, cluster: Cluster, calls: int = 1) -> float:
    """Return the seconds of a collective that all groups of an axis run at the same time.

    Args:
        operation: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``TO_OWNERS`` or ``FROM_OWNERS``.
        size: bytes of the whole tensor; for an all_to_all, what one rank sends, its own part included.
        span: the span of the axis.
        cluster: the cluster whose links carry it.
        calls: the number of pieces of equal size.
    """
    ranks = span.size
    if ranks == 1 or not size:
        return 0.0
    leaving = bytes_leaving(operation, size, span, cluster)
    if operation == "all_to_all":
        local = size * (ranks - 1) / ranks - leaving / cluster.slots
    else:
        local = ring_passes(operation, cluster) * size * (ranks - 1) / ranks
    # if no two ranks of a group are on one host, nothing travels inside
    inside = local / cluster.inside.bandwidth if span.size > span.hosts else 0.0
    moving = max(inside, leaving / cluster.across.bandwidth)
    return moving + calls * latency_seconds(operation, span, cluster)


def latency_seconds(operation: str, span: Span, cluster: Cluster) -> float:
    """Return the seconds of an empty collective: its start, and its hops one after the other.

    A ring passes every rank once per pass. NCCL takes a tree over hosts for an all_reduce, whose depth is the logarithm
    of their number (NCCL 2.4's double binary trees).
    """
    across = span.hosts if span.crosses else 0
    inside = max(0, span.size - max(1, span.hosts))
    if operation == "all_to_all":
        hops = (min(inside, span.size // span.hosts - 1), min(across, 1) * ceil(log2(span.size)))
    elif operation == "all_reduce" and not cluster.is_cpu:
        hops = (2 * min(inside, span.size // span.hosts - 1), 2 * ceil(log2(max(1, across))) if across else 0)
    else:
        passes = ring_passes(operation, cluster)
        hops = (passes * inside, passes * across)
    return cluster.start_seconds + hops[0] * cluster.inside.latency + hops[1] * cluster.across.latency


def bytes_leaving(operation: str, size: float, span: Span, cluster: Cluster) -> float:
    """Return the bytes that the busiest host sends to others in one such collective of all groups."""
    if operation == "all_to_all":
        return size / span.size * span.remote_pairs
    if operation in (TO_OWNERS, FROM_OWNERS) and cluster.is_cpu:
        # every slice is sent to each other host once, whatever the number of ranks there
        return size * (span.hosts - 1) / max(1, span.hosts) * span.ring_edges
    return ring_passes(operation, cluster) * size * (span.size - 1) / span.size * span.ring_edges


def send_seconds(size: float, span: Span, cluster: Cluster) -> float:
    """Return the seconds for every rank to send ``size`` bytes to the next along an axis."""
    if span.size == 1 or not size:
        return 0.0
    if not span.crosses:
        return size / cluster.inside.bandwidth + cluster.inside.latency + cluster.start_seconds
    # ranks with adapters of their own cannot use those of others
    edges = span.forward_edges if cluster.is_cpu else max(span.forward_edges, cluster.slots)
    return size * edges / cluster.across.bandwidth + cluster.across.latency + cluster.start_seconds
