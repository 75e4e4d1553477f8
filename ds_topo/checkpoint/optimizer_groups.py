"""Plan the groups of the optimizer on the stages of another layout.

DeepSpeed's files have optimizer states by position, so the groups of each stage must be known exactly. DeepSpeed leaves
out the groups of which a stage has no parameter, and splits off the experts of each expert parallel size behind the
other groups. So stages may differ in their groups. What they have in common is found by the hyperparameters: groups of
several stages with the same ones are one *kind*.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from ds_topo.checkpoint.deepspeed_reader import differing
from ds_topo.checkpoint.manifest import SavedStructure
from ds_topo.checkpoint.saved_model import SavedModel, expert_of, head_of, names_of_stage
from ds_topo.errors import CheckpointLayoutError, listed

_LARGEST_EXPERT_GROUP = 178_956_971
"""Elements of a group of experts: DeepSpeed's ``split_params_into_different_moe_groups_for_optimizer``."""
NAME_BESIDE_EXPERTS = "dense-params"
"""The name of a group of an engine with experts to which the program gives none. Source: ``_configure_optimizer``."""
_REMEDY = "convert while loading (convert=True), where the job says it"

Groups = tuple[tuple[str, ...], ...]
"""Names of the parameters in each group of the optimizer, on one stage."""
Hyperparameters = Callable[[int], Sequence[Mapping[str, Any]]]
"""Returns the hyperparameters of each group of a stage that was saved."""


class Origin(NamedTuple):
    """A group of the optimizer that was saved."""

    stage: int
    group: int


class _Group(NamedTuple):
    """A group of a stage: DeepSpeed's parts of one that was too large are one again."""

    names: tuple[str, ...]
    origins: tuple[Origin, ...]
    is_of_experts: bool


def planned_groups(
    model: SavedModel,
    structure: SavedStructure,
    slices: int,
    stages: Sequence[Sequence[str]],
    hyperparameters: Hyperparameters | None,
    *,
    are_all_trained: bool,
) -> tuple[tuple[Groups, ...], tuple[tuple[tuple[Origin, ...], ...], ...]]:
    """Return the groups of every stage, with local names, and the saved groups that each of them comes from.

    Args:
        model: the model.
        structure: its structure in the new layout, except the groups.
        slices: the degree of ``model`` in the new layout.
        stages: the names of each stage's parameters in the new layout.
        hyperparameters: those of the saved groups; None if they cannot be read.
        are_all_trained: leave out the parameters that are not trained, as ZeRO does.

    Raises:
        CheckpointLayoutError: the groups are not clear.
    """
    saved, rows = model.structure, model.parameters
    stacked = frozenset(name for name, one in rows.items() if one.is_stacked)
    was, now = (
        {head: count // one.experts[head] for head, count in model.experts.items()} for one in (saved, structure)
    )
    old, new = (
        {name: one.numel_of_slice(one_structure.experts[name] if one.is_stacked else of) for name, one in rows.items()}
        for one_structure, of in ((saved, model.slices), (structure, slices))
    )
    before = [_joined(stage, groups, old, stacked) for stage, groups in enumerate(saved.groups)]
    kinds = _kinds(before, hyperparameters)
    origins: dict[int, list[Origin]] = {}
    kind_of: dict[str, int] = {}
    for own, groups in zip(kinds, before, strict=True):
        for kind, group in zip(own, groups, strict=True):
            origins.setdefault(kind, []).extend(group.origins)
            kind_of.update((_starred(name), kind) for name in group.names)
    is_same = len(stages) == len(saved.groups) and structure.bounds == saved.bounds
    if not is_same:
        _require_order_of_module(model, before)
    found: list[tuple[Groups, tuple[tuple[Origin, ...], ...]]] = []
    for stage, names in enumerate(stages):
        if is_same:
            rows_of_stage = zip(kinds[stage], before[stage], strict=True)
            own_groups = {kind: tuple(_with_experts(group.names, was, now)) for kind, group in rows_of_stage}
        else:
            local = [name for name in names if _number(name) < now.get(head_of(name), 1)]
            present = {kind_of[_starred(name)] for name in local if _starred(name) in kind_of}
            own_groups = {
                kind: tuple(name for name in local if kind_of.get(_starred(name)) == kind)
                for kind in _in_order(present, kinds, before)
            }
        parts: list[tuple[tuple[str, ...], tuple[Origin, ...]]] = []
        for kind, members in own_groups.items():
            trained = tuple(name for name in members if model.parameters[name].is_trained or not are_all_trained)
            if not trained:
                raise CheckpointLayoutError(
                    f"a group of the optimizer would have frozen parameters alone on stage {stage} of {len(stages)}, "
                    "which ZeRO does not support. Use fewer stages, or other bounds of the stages"
                )
            parts += [(part, tuple(origins[kind])) for part in _split(trained, new, stacked)]
        if not parts:
            raise CheckpointLayoutError(
                f"stage {stage} of {len(stages)} would have no trained parameter, which DeepSpeed does not support. "
                "Use fewer stages, or other bounds of the stages"
            )
        found.append((tuple(group for group, _ in parts), tuple(origin for _, origin in parts)))
    return tuple(groups for groups, _ in found), tuple(of_stage for _, of_stage in found)


# -- kinds -------------------------------------------------------------------------------------------------------------


def _kinds(stages: Sequence[Sequence[_Group]], hyperparameters: Hyperparameters | None) -> list[list[int]]:
    """Return the kind of each group of each stage.

    Raises:
        CheckpointLayoutError: a stage has several groups of equal hyperparameters, and another one has fewer.
    """
    shapes = {tuple(group.is_of_experts for group in groups) for groups in stages}
    if len(stages) == 1 or (hyperparameters is None and len(shapes) == 1):
        return [[*range(len(groups))] for groups in stages]
    if hyperparameters is None:
        raise CheckpointLayoutError(
            f"stages have {[*map(len, stages)]} groups of the optimizer: it is unknown which of them belong together. "
            f"Give the optimizer as many groups on every stage, or {_REMEDY}"
        )
    known: list[Mapping[str, Any]] = []
    found: list[list[int]] = []
    for stage, groups in enumerate(stages):
        saved = hyperparameters(stage)
        found.append([])
        for group in groups:
            own = _distinguishing(saved[group.origins[0].group])
            alike = [kind for kind, one in enumerate(known) if not differing(one, own)]
            free = next((kind for kind in alike if kind not in found[-1]), len(known))
            known += [own] if free == len(known) else []
            found[-1].append(free)
        counts = [sum(not differing(known[kind], known[other]) for other in found[-1]) for kind in found[-1]]
        for earlier, of_stage in enumerate(found[:-1]):
            for kind, count in zip(found[-1], counts, strict=True):
                there = sum(not differing(known[kind], known[other]) for other in of_stage)
                if there not in (0, count):
                    raise CheckpointLayoutError(
                        f"stages {earlier} and {stage} have {there} and {count} groups of the optimizer with the same "
                        "hyperparameters, so that it is unknown which of them belong together. Give each group of the "
                        f"optimizer a name of its own ('name'), or {_REMEDY}"
                    )
    return found


def _distinguishing(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters that distinguish groups: DeepSpeed names dense ones beside experts only."""
    return {key: value for key, value in group.items() if (key, value) != ("name", NAME_BESIDE_EXPERTS)}


def _in_order(present: set[int], kinds: Sequence[Sequence[int]], stages: Sequence[Sequence[_Group]]) -> list[int]:
    """Return the order of the groups of a stage, as on the stages that were saved.

    Raises:
        CheckpointLayoutError: no stage had two of them, or two stages had them in different orders.
    """
    before = {pair for own in kinds for at, one in enumerate(own) for pair in ((one, other) for other in own[at + 1 :])}
    experts = {
        kind
        for own, groups in zip(kinds, stages, strict=True)
        for kind, group in zip(own, groups, strict=True)
        if group.is_of_experts
    }
    before |= {(one, other) for one in present - experts for other in present & experts}
    first = sorted(present, key=lambda kind: sum((other, kind) in before for other in present))
    for one, other in pairwise(first):
        if (one, other) not in before or (other, one) in before:
            raise CheckpointLayoutError(
                "a stage would have groups of the optimizer that no stage of the checkpoint has in this order, so that "
                f"it is unknown which of them comes first. Keep the stages as they are, or {_REMEDY}"
            )
    return first


def _require_order_of_module(model: SavedModel, stages: Sequence[Sequence[_Group]]) -> None:
    """Check that groups have the module's order, in which the groups of other stages will have it, too.

    Raises:
        CheckpointLayoutError: the message names two parameters.
    """
    for stage, groups in enumerate(stages):
        names = names_of_stage(model.structure, list(model.parameters), stage, len(stages))
        order = {name: place for place, name in enumerate(names)}
        for number, group in enumerate(groups):
            for one, other in pairwise(group.names):
                if order[one] > order[other]:
                    raise CheckpointLayoutError(
                        f"group {number} of the optimizer has {one!r} before {other!r}, which is not the module's "
                        "order: it is unknown how other stages would order it. Give the optimizer its parameters in "
                        f"the module's order, or {_REMEDY}"
                    )


# -- experts -----------------------------------------------------------------------------------------------------------


def _joined(stage: int, groups: Groups, numels: Mapping[str, int], stacked: Container[str] = ()) -> list[_Group]:
    """Join the groups of experts that DeepSpeed has split because they are too large."""
    found: list[_Group] = []
    for number, names in enumerate(groups):
        before = groups[number - 1] if number else ()
        origin, is_of_experts = Origin(stage, number), _are_experts(names, stacked)
        are_parts = is_of_experts and _are_experts(before, stacked)
        if are_parts and sum(numels[name] for name in before) + numels[names[0]] > _LARGEST_EXPERT_GROUP:
            found[-1] = _Group(found[-1].names + names, (*found[-1].origins, origin), True)
        else:
            found.append(_Group(names, (origin,), is_of_experts))
    return found


def _split(
    names: tuple[str, ...], numels: Mapping[str, int], stacked: Container[str] = ()
) -> Iterator[tuple[str, ...]]:
    """Split a group of experts that is too large as DeepSpeed does."""
    start, held = 0, 0
    for place, name in enumerate(names if _are_experts(names, stacked) else ()):
        if place > start and held + numels[name] > _LARGEST_EXPERT_GROUP:
            yield names[start:place]
            start, held = place, 0
        held += numels[name]
    yield names[start:]


def dealt_anew(
    groups: Groups, was: Mapping[str, int], now: Mapping[str, int], old: Mapping[str, int], new: Mapping[str, int]
) -> Groups:
    """Return the optimizer's groups of a rank that gets another number of experts.

    Args:
        groups: groups of a rank, with local names.
        was: number of experts of each layer that a rank had.
        now: number of experts that it gets.
        old: number of elements of each parameter before.
        new: number of elements of each parameter after.

    Raises:
        CheckpointLayoutError: the order of the experts is not clear.
    """
    return tuple(
        part for group in _joined(0, groups, old) for part in _split(tuple(_with_experts(group.names, was, now)), new)
    )


def _with_experts(names: Sequence[str], was: Mapping[str, int], now: Mapping[str, int]) -> Iterator[str]:
    """Yield the names of a group with another number of experts in each layer."""
    for head, run in groupby(names, key=head_of):
        own = list(run)
        if not head or was[head] == now[head]:
            yield from own
            continue
        first = [expert for name in own if (expert := expert_of(name)) is not None and expert.number == 0]
        if own != [one.numbered(number) for number in range(was[head]) for one in first]:
            raise CheckpointLayoutError(
                f"a group of the optimizer has {listed(own, 3)} in another order than the module's, one expert after "
                "the other: it is unknown how another number of experts would be ordered. Give the optimizer its "
                f"parameters in the module's order, or {_REMEDY}"
            )
        yield from (one.numbered(number) for number in range(now[head]) for one in first)


def _starred(name: str) -> str:
    """Return a name that all experts of a layer have in common."""
    expert = expert_of(name)
    return name if expert is None else expert.numbered("*")


def _number(name: str) -> int:
    expert = expert_of(name)
    return 0 if expert is None else expert.number


def _are_experts(names: Sequence[str], stacked: Container[str]) -> bool:
    return bool(names) and all(head_of(name) or name in stacked for name in names)
