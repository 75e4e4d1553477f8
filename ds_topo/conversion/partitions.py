"""Which elements of which parameter lie where in the partitions of ZeRO: arithmetic, as DeepSpeed does it."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

_BYTES_OF_ALIGNED = 16
"""At which addresses ``zero_optimization.parameter_alignment`` lets parameters begin."""
_START_ALIGNMENT = 2
"""Elements, of each partition: DeepSpeed's ``nccl_start_alignment_factor``."""


class Span(NamedTuple):
    """Elements ``start:stop`` of a parameter, at ``offset`` of a partition."""

    name: str
    offset: int
    start: int
    stop: int


@dataclass(frozen=True)
class FlatGroup:
    """A group of parameters as one vector in equal partitions: ZeRO 1 and 2.

    >>> group = FlatGroup.of({"weight": 6, "bias": 3}, replicas=2)
    >>> group.partition_numel, group.spans(1), group.padding(1)
    (6, [Span(name='bias', offset=0, start=0, stop=3)], 3)

    Source: the constructor of ``DeepSpeedZeroOptimizer``.
    """

    numels: Mapping[str, int]
    """In the order of the vector."""
    paddings: tuple[int, ...]
    """After each of them."""
    replicas: int

    @classmethod
    def of(
        cls,
        numels: Mapping[str, int],
        replicas: int,
        *,
        round_robin: bool = False,
        aligned_element_bytes: int = 0,
    ) -> FlatGroup:
        """Of parameters in the optimizer's order.

        Args:
            numels: elements of each.
            replicas: that share the vector.
            round_robin: ``zero_optimization.round_robin_gradients``.
            aligned_element_bytes: of an element where ``zero_optimization.parameter_alignment`` is set; else 0.
        """
        names = list(numels)
        if round_robin:
            names = [name for first in range(min(replicas, len(names))) for name in names[first::replicas]]
        unit = _BYTES_OF_ALIGNED // math.gcd(_BYTES_OF_ALIGNED, aligned_element_bytes) if aligned_element_bytes else 1
        paddings, end = [], 0
        for name in names:
            end += numels[name]
            paddings.append(0 if name == names[-1] else -end % unit)
            end += paddings[-1]
        return cls({name: numels[name] for name in names}, tuple(paddings), replicas)

    @cached_property
    def numel(self) -> int:
        """With the paddings between parameters."""
        return sum(self.numels.values()) + sum(self.paddings)

    @property
    def partition_numel(self) -> int:
        """Of every partition."""
        unit = _START_ALIGNMENT * self.replicas
        return -(-self.numel // unit) * unit // self.replicas

    def padding(self, replica: int) -> int:
        """Elements at the end of a partition that belong to no parameter."""
        size = self.partition_numel
        return min(size, max(0, (replica + 1) * size - self.numel))

    def spans(self, replica: int) -> list[Span]:
        """What lies in a partition."""
        first, last = replica * self.partition_numel, (replica + 1) * self.partition_numel
        names, begins = self._begins
        found = []
        for number in range(max(0, bisect_right(begins, first) - 1), bisect_left(begins, last)):
            name, begin = names[number], begins[number]
            start, stop = max(begin, first), min(begin + self.numels[name], last)
            if start < stop:
                found.append(Span(name, start - first, start - begin, stop - begin))
        return found

    @cached_property
    def _begins(self) -> tuple[list[str], list[int]]:
        """Every parameter, and where it begins."""
        sizes = [numel + padding for numel, padding in zip(self.numels.values(), self.paddings, strict=True)]
        return list(self.numels), [0, *accumulate(sizes)][:-1]


@dataclass(frozen=True)
class PartitionedGroup:
    """Parameters that are each in as many parts as there are replicas: a sub-group of ZeRO 3.

    >>> group = PartitionedGroup({"weight": 5, "bias": 2}, replicas=2)
    >>> group.partition_numel, group.spans(1)
    (4, [Span(name='weight', offset=0, start=3, stop=5), Span(name='bias', offset=3, start=1, stop=2)])

    Source: ``DeepSpeedZeroOptimizer_Stage3`` and ``zero.Init``.
    """

    numels: Mapping[str, int]
    replicas: int

    @property
    def partition_numel(self) -> int:
        """Of every partition."""
        return sum(-(-numel // self.replicas) for numel in self.numels.values())

    def spans(self, replica: int) -> list[Span]:
        """What lies in a partition."""
        found, offset = [], 0
        for name, numel in self.numels.items():
            part = -(-numel // self.replicas)
            start, stop = min(numel, replica * part), min(numel, (replica + 1) * part)
            if start < stop:
                found.append(Span(name, offset, start, stop))
            offset += part
        return found


def in_sub_groups(names: Sequence[str], numels: Mapping[str, int], replicas: int, limit: int) -> list[list[str]]:
    """A group of ZeRO 3 in parts of about ``limit`` elements of a partition.

    >>> in_sub_groups(["a", "b", "c"], {"a": 4, "b": 4, "c": 4}, 2, 3)
    [['a', 'b'], ['c']]

    Source: ``DeepSpeedZeroOptimizer_Stage3._create_fp16_sub_groups``.
    """
    parts = {name: -(-numels[name] // replicas) for name in names}
    if limit >= sum(parts.values()):
        return [list(names)]
    groups: list[list[str]] = [[]]
    held = 0
    for name in names:
        if held >= limit:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += parts[name]
    return groups
