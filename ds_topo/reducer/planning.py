"""Which parameters share a bucket, and in which order the buckets leave: pure, from sizes and an order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ds_topo.reducer.parameter_state import ParameterState

MIB = 1 << 20


@dataclass(frozen=True)
class BucketSizes:
    """Capacities in bytes; a bucket is closed by the parameter that reaches its capacity.

    The first bucket is small so that communication starts early, the last one because nothing is left that
    could hide it.

    Raises:
        ValueError: a capacity below 1.
    """

    bucket_bytes: int
    first_bytes: int
    last_bytes: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name}={value}: a capacity in bytes, at least 1; leave it out for the default")


class ParameterPlan:
    """Distributes parameters over buckets by data type, device, route and the user's buffers, for any order.

    A region makes one bucket. Buckets over a user's buffers follow memory, downwards. Those of experts do not follow
    the order either: replicas of an expert may be on ranks of several data-parallel groups, each of which learns an
    order of its own. None of these has small buckets.
    """

    def __init__(self, states: Sequence[ParameterState], routes: Sequence[Route], sizes: BucketSizes) -> None:
        self._sizes = sizes
        self._nbytes = [state.nbytes for state in states]
        runs = _runs_of_buffers(states)
        numbers: dict[Hashable, int] = {}
        self._kinds: list[int] = []
        members: dict[int, list[int]] = defaultdict(list)
        self._capacities: dict[Hashable, int] = {}
        for state in states:
            apart = state.index if state.is_sparse else state.region or runs.get(state.index)
            kind = numbers.setdefault(
                (state.dtype, state.parameter.device, id(routes[state.index]), apart), len(numbers)
            )
            self._kinds.append(kind)
            if state.region is not None:
                self._capacities[kind] = self._capacities.get(kind, 0) + state.nbytes
            elif state.grad_buffer is not None or state.is_expert:
                members[kind].append(state.index)
                self._capacities[kind] = routes[state.index].bucket_bytes
        self._sequences = {kind: _downwards(states, indices) for kind, indices in members.items()}

    def buckets(self, order: Sequence[int]) -> list[tuple[int, ...]]:
        """Indices by bucket, where gradients are expected in this order."""
        if not self._nbytes:
            return []
        if self._sequences:
            kinds, rest = self._kinds, {kind: iter(indices) for kind, indices in self._sequences.items()}
            order = [next(rest[kinds[index]]) if kinds[index] in rest else index for index in order]
        return plan_buckets(self._nbytes, self._kinds, order, self._sizes, self._capacities)


class Route(Protocol):
    """What the plan must know of a parameter's route."""

    bucket_bytes: int


def plan_buckets(
    nbytes: Sequence[int],
    kinds: Sequence[Hashable],
    order: Sequence[int],
    sizes: BucketSizes,
    capacities: Mapping[Hashable, int] | None = None,
) -> list[tuple[int, ...]]:
    """Distribute parameters over buckets; imitates torch's ``compute_bucket_assignment_by_size``.

    Args:
        nbytes: of every parameter's gradient.
        kinds: only parameters of the same kind share a bucket.
        order: indices in the order in which gradients are expected to be ready.
        sizes: the capacities.
        capacities: kinds whose buckets have this capacity in bytes, the first and the last of them too.

    Returns:
        Indices by bucket; buckets in the order in which they are expected to be full.

    >>> sizes = BucketSizes(bucket_bytes=100, first_bytes=10, last_bytes=30)
    >>> plan_buckets([20, 60, 60, 60, 20, 10], ["float32"] * 6, range(6), sizes)
    [(0,), (1, 2), (3,), (4, 5)]
    >>> plan_buckets([20, 60, 60, 60, 20, 10], ["float32", "bfloat16"] * 3, range(6), sizes)
    [(0,), (1, 3), (2, 4), (5,)]
    """
    capacities = capacities or {}
    last = () if kinds[order[-1]] in capacities else _last_bucket(nbytes, kinds, order, sizes.last_bytes)
    in_last = set(last)
    buckets: list[tuple[int, ...]] = []
    open_members: dict[Hashable, list[int]] = defaultdict(list)
    open_bytes: dict[Hashable, int] = defaultdict(int)
    for index in order:
        kind = kinds[index]
        if index in in_last:
            continue
        open_members[kind].append(index)
        open_bytes[kind] += nbytes[index]
        if open_bytes[kind] >= capacities.get(kind, sizes.bucket_bytes if buckets else sizes.first_bytes):
            buckets.append(tuple(open_members.pop(kind)))
            del open_bytes[kind]
    buckets += [tuple(members) for members in open_members.values()]
    buckets += [last] if last else []
    position = {index: place for place, index in enumerate(order)}
    return sorted(buckets, key=lambda members: max(position[index] for index in members))


def _last_bucket(
    nbytes: Sequence[int], kinds: Sequence[Hashable], order: Sequence[int], capacity: int
) -> tuple[int, ...]:
    """The last parameter and those of its kind before it, as far as they fit."""
    members: list[int] = []
    total = 0
    for index in reversed(order):
        if kinds[index] == kinds[order[-1]]:
            total += nbytes[index]
            if members and total > capacity:
                break
            members.append(index)
    return tuple(reversed(members))


def _runs_of_buffers(states: Sequence[ParameterState]) -> Mapping[int, tuple[str, int]]:
    """For every parameter with a user's buffer, the run of adjacent buffers, without gaps, that it is part of."""
    numbers: dict[int, tuple[str, int]] = {}
    end, number = None, 0
    buffers = [(state.grad_buffer, state.index) for state in states if state.grad_buffer is not None]
    for buffer, index in sorted(buffers, key=lambda entry: entry[0].data_ptr()):
        start = (buffer.untyped_storage().data_ptr(), buffer.dtype, buffer.data_ptr())
        number += start != end
        numbers[index] = ("run of buffers", number)
        end = (*start[:2], buffer.data_ptr() + buffer.nbytes)
    return numbers


def _downwards(states: Sequence[ParameterState], indices: Sequence[int]) -> list[int]:
    """By falling address, or falling index."""

    def key(index: int) -> int:
        buffer = states[index].grad_buffer
        return index if buffer is None else buffer.data_ptr()

    return sorted(indices, key=key, reverse=True)
