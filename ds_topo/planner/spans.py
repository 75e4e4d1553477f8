"""Which hosts the groups of an axis span: what the order of axes decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod

from ds_topo.topology.layout import Factors
from ds_topo.topology.process_topology import ProcessTopology

SAMPLED_HOSTS = 4


@dataclass(frozen=True)
class Span:
    """The groups of one axis (or of several together) as the busiest host sees them.

    Args:
        size: ranks of a group.
        hosts: hosts that a group touches.
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
        """Whether its messages leave hosts."""
        return self.hosts > 1


def span_of(topology: ProcessTopology, axes: Sequence[str], slots: int) -> Span:
    """The span of the groups along ``axes`` when every host has ``slots`` consecutive ranks.

    >>> topology = ProcessTopology.from_spec("pipe=2,data=2,model=2")
    >>> span_of(topology, ["model"], slots=4).hosts, span_of(topology, ["pipe"], slots=4)
    (1, Span(size=2, hosts=2, groups=4, ring_edges=4, remote_pairs=4, forward_edges=4))
    """
    return span_of_factors(factors_of(topology, axes), topology.world_size(), slots)


def factors_of(topology: ProcessTopology, axes: Sequence[str]) -> Factors:
    """``(size, stride)`` of every axis of more than one rank, outermost first.

    >>> factors_of(ProcessTopology.from_spec("pipe=2,data=4,model=1"), ["data", "model"])
    ((4, 1),)
    """
    present = [position for position, axis in enumerate(topology.axes) if axis in axes]
    return tuple(factor for position in present for factor in topology.layout.axes[position] if factor[0] > 1)


def split_factors(factors: Factors, inner: int) -> tuple[Factors, Factors]:
    """Factors of groups of ``inner`` neighbors, and of the groups of their counterparts.

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
    """The pairs of a first and a last stage, which share a tied embedding, given the factors of ``pipe``.

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
def span_of_factors(factors: Factors, world: int, slots: int) -> Span:
    """Of groups ``{base + sum of digit x stride}``; hosts beyond the first few look like them."""
    if not factors:
        return Span(1, 1, slots, 0, 0, 0)
    if world % slots == 0 and all(_fits(slots, stride) and _fits(slots, stride * size) for size, stride in factors):
        return _regular_span(factors, slots)
    offsets = [0]
    for size, stride in factors:
        offsets = [base + step for base in offsets for step in range(0, size * stride, stride)]
    offsets.sort()
    hosts = -(-world // slots)
    sampled = {0, min(1, hosts - 1), hosts // 2, hosts - 1} if hosts > SAMPLED_HOSTS else set(range(hosts))
    spans = [_span_at(host, offsets, factors, world, slots) for host in sampled]
    return Span(
        len(offsets),
        max(span.hosts for span in spans),
        max(span.groups for span in spans),
        max(span.ring_edges for span in spans),
        max(span.remote_pairs for span in spans),
        max(span.forward_edges for span in spans),
    )


def _fits(slots: int, stride: int) -> bool:
    """Whether hosts end where runs of ``stride`` ranks do."""
    return slots % stride == 0 or stride % slots == 0


def _regular_span(factors: Factors, slots: int) -> Span:
    """In closed form, where every group has equally many ranks on each host that it touches."""
    size = prod(size for size, _ in factors)
    local = prod(min(size, max(1, slots // stride)) for size, stride in factors)
    groups, hosts = slots // local, size // local
    if hosts == 1:
        return Span(size, 1, groups, 0, 0, 0)
    return Span(size, hosts, groups, groups, slots * (size - local), groups)


def _span_at(host: int, offsets: list[int], factors: Factors, world: int, slots: int) -> Span:
    touched = ring_edges = remote_pairs = forward_edges = 0
    bases: set[int] = set()
    ranks = range(host * slots, min((host + 1) * slots, world))
    for rank in ranks:
        base = rank - sum(rank // stride % size * stride for size, stride in factors)
        members = [base + offset for offset in offsets]
        place = members.index(rank)
        here = sum(1 for member in members if member // slots == host)
        remote_pairs += len(members) - here
        following = members[(place + 1) % len(members)]
        leaves = following // slots != host
        ring_edges += leaves
        forward_edges += leaves and place + 1 < len(members)
        if base not in bases:
            bases.add(base)
            touched = max(touched, len({member // slots for member in members}))
    return Span(len(offsets), touched, len(bases), ring_edges, remote_pairs, forward_edges)
