"""Experts: their names, which ranks of a layout hold which of them, and the optimizer's groups that have them.

In names of a whole model an expert has its number among all of its layer's; in files of optimizers and in groups of a
structure it is *local*: counted among those of one rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from ds_topo.checkpoint_files.manifest import SavedExperts, SavedLayout
from ds_topo.errors import CheckpointLayoutError, listed
from ds_topo.topology.expert_tables import ExpertPlan
from ds_topo.topology.process_topology import ProcessTopology
from ds_topo.topology.rank_tables import gradient_axes

_NAME = re.compile(r"(?P<head>(?:.*\.)?deepspeed_experts)\.(?P<number>\d+|\*)\.(?P<tail>.+)")
_GREATEST_GROUP = 178_956_971
"""Elements of experts in a group: DeepSpeed's ``split_params_into_different_moe_groups_for_optimizer``."""


class ExpertName(NamedTuple):
    """The name of a parameter of an expert.

    >>> expert_of("1.moe.deepspeed_moe.experts.deepspeed_experts.3.weight").numbered(7)
    '1.moe.deepspeed_moe.experts.deepspeed_experts.7.weight'
    """

    head: str
    """Which all experts of a layer share."""
    number: int
    tail: str

    def numbered(self, number: int | str) -> str:
        """The same parameter of another expert of the layer."""
        return f"{self.head}.{number}.{self.tail}"


def expert_of(name: str) -> ExpertName | None:
    """What a name says of an expert; None of every other parameter."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    number = found["number"]
    return ExpertName(found["head"], 0 if number == "*" else int(number), found["tail"])


def head_of(name: str) -> str:
    """Which layer's expert a parameter is of; empty of every other one."""
    expert = expert_of(name)
    return expert.head if expert is not None else ""


class Place(NamedTuple):
    """What names of files have of a rank."""

    model_rank: int
    replica: int


@dataclass(frozen=True)
class ExpertPlaces:
    """Which ranks of a layout hold which experts, where each layer deals them to so many ranks."""

    part_of: Mapping[Place, int]
    """Which part of the experts a rank has."""
    copy_of: Mapping[Place, int]
    """Which of the ranks that have the same part it is."""
    holders: Mapping[tuple[int, int], tuple[Place, ...]]
    """By model rank and part: the ranks that have it, in the order of their group. A model rank that has no rank with
    the part is there by those of its stage's other slices, unless slices split experts."""
    copies: int
    """How many ranks have the same part."""

    def own_holder(self, model_rank: int, part: int) -> Place | None:
        """The first rank of a model rank that has a part; None if it has none."""
        return next((place for place in self.holders[model_rank, part] if place.model_rank == model_rank), None)


def places_in(layout: SavedLayout, experts: SavedExperts) -> ExpertPlaces:
    """Where a layout has experts of one size.

    Raises:
        ExpertSizeError: the size does not divide the ranks that can share experts.
    """
    topology = ProcessTopology.from_spec(layout.topology or f"data={layout.world_size}")
    plan = ExpertPlan(topology, experts.size, experts.tensor_parallel, experts.data_first)
    slices = max(1, topology.get_dim("model"))
    parts = {rank: part for ranks in plan.expert_tables() for part, rank in enumerate(ranks)}
    part_of: dict[Place, int] = {}
    copy_of: dict[Place, int] = {}
    holders: dict[tuple[int, int], tuple[Place, ...]] = {}
    for ranks in plan.expert_data_tables():
        places = tuple(_place(topology, rank, slices) for rank in ranks)
        part = parts[ranks[0]]
        part_of.update(dict.fromkeys(places, part))
        copy_of.update((place, copy) for copy, place in enumerate(places))
        first = places[0].model_rank // slices * slices
        own = [places[0].model_rank] if experts.tensor_parallel else range(first, first + slices)
        holders.update({(model_rank, part): places for model_rank in own})
    return ExpertPlaces(part_of, copy_of, holders, len(plan.expert_data_tables()[0]))


def _place(topology: ProcessTopology, rank: int, slices: int) -> Place:
    place = topology.get_coord(rank)._asdict()
    model_rank = place.get("pipe", 0) * slices + place.get("model", 0)
    return Place(model_rank, topology.get_axis_index(gradient_axes(topology), rank))


# -- groups of an optimizer --------------------------------------------------------------------------------------------

Groups = tuple[tuple[str, ...], ...]
Numel = Callable[[str], int]


def origins_of(groups: Groups, saved: Groups) -> list[tuple[int, ...]]:
    """Of each group of a rank, the groups that its parameters were saved in: several where experts of other sizes are
    one group now, or where DeepSpeed has split what is too large.

    >>> experts = [f"deepspeed_experts.{number}.weight" for number in range(3)]
    >>> origins_of((("bias",), tuple(experts)), (("bias",), tuple(experts[:2]), tuple(experts[2:])))
    [(0,), (1, 2)]
    """
    holding: dict[str, set[int]] = {}
    for number, names in enumerate(saved):
        for name in names:
            holding.setdefault(_of_any(name), set()).add(number)
    return [tuple(sorted({one for name in names for one in holding.get(_of_any(name), ())})) for names in groups]


def _of_any(name: str) -> str:
    """The same for every expert of a layer."""
    expert = expert_of(name)
    return name if expert is None else expert.numbered("*")


def are_experts(names: Sequence[str]) -> bool:
    """Whether a group has no other parameters."""
    return bool(names) and all(map(head_of, names))


def _of_one_group(groups: Groups, numel: Numel) -> list[list[int]]:
    """Which groups were one before DeepSpeed split experts into groups that are not too large."""
    found: list[list[int]] = []
    for number, group in enumerate(groups):
        before = groups[number - 1] if number else ()
        are_two_parts = are_experts(before) and are_experts(group)
        if are_two_parts and sum(map(numel, before)) + numel(group[0]) > _GREATEST_GROUP:
            found[-1].append(number)
        else:
            found.append([number])
    return found


def dealt_anew(groups: Groups, was: Mapping[str, int], now: Mapping[str, int], numels: tuple[Numel, Numel]) -> Groups:
    """The groups of a rank that has another number of experts.

    Args:
        groups: of a rank, with local names.
        was: how many experts of each layer it had.
        now: how many it has.
        numels: elements of its parameters, as they were and as they are.

    Raises:
        CheckpointLayoutError: in which order experts are is not clear.
    """
    found: list[tuple[str, ...]] = []
    for numbers in _of_one_group(groups, numels[0]):
        names = [name for number in numbers for name in groups[number]]
        anew = tuple(_dealt(names, was, now))
        found += _in_parts(anew, numels[1]) if are_experts(anew) else [anew]
    return tuple(found)


def _dealt(names: Sequence[str], was: Mapping[str, int], now: Mapping[str, int]) -> Iterator[str]:
    for head, run in groupby(names, key=head_of):
        own = list(run)
        if not head or was[head] == now[head]:
            yield from own
            continue
        experts = [expert for name in own if (expert := expert_of(name)) is not None]
        first = [expert for expert in experts if expert.number == 0]
        if own != [one.numbered(number) for number in range(was[head]) for one in first]:
            raise CheckpointLayoutError(
                f"a group of the optimizer has {listed(own, 3)} in another order than the module's, one expert after "
                "the other: how another number of experts would be ordered is not known"
            )
        for number in range(now[head]):
            yield from (one.numbered(number) for one in first)


def _in_parts(names: Sequence[str], numel: Numel) -> Iterator[tuple[str, ...]]:
    """As DeepSpeed splits a group of experts."""
    part: list[str] = []
    held = 0
    for name in names:
        size = numel(name)
        if part and held + size > _GREATEST_GROUP:
            yield tuple(part)
            part, held = [], 0
        part.append(name)
        held += size
    yield tuple(part)
