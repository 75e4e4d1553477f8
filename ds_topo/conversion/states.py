"""What optimizers have saved, by parameter: without ZeRO, at stages 1 and 2, and at stage 3."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ds_topo.checkpoint_files.manifest import BF16_OPTIMIZER
from ds_topo.conversion.experts import Place
from ds_topo.conversion.partitions import PartitionedGroup
from ds_topo.errors import CheckpointLayoutError, abridged

if TYPE_CHECKING:
    from ds_topo.conversion.reading import Source

MASTER = "fp32"
"""The key of what the optimizer steps."""


class States(Protocol):
    """What the optimizers of ranks that have the same parameters have saved; names are those of their own."""

    def hyperparameters(self) -> list[dict[str, Any]]:
        """Of every group, without its parameters."""

    def of_group(self, group: int) -> dict[str, Any]:
        """The states of a group: None for those that each element has, else the value."""

    def of(self, name: str, key: str, start: int, stop: int) -> torch.Tensor | None:
        """A state that each element has, or with ZeRO the master weight: these elements of a slice, flat; None if the
        parameter has none yet."""


def _of_group(state: Mapping[str, Any], numel: int, group: int) -> dict[str, Any]:
    """Which states each element has: None stands for those."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        if torch.is_tensor(value) and value.dim() > 0 and value.numel() == numel:
            found[key] = None
        elif torch.is_tensor(value) and value.numel() > 1:
            raise CheckpointLayoutError(
                f"the optimizer's state {key!r} of group {group} has the shape {list(value.shape)} for {numel} "
                "elements: only states of every element, and single values, can be converted"
            )
        else:
            found[key] = value
    return found


def _without_parameters(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key not in ("params", "param_names")} for group in groups]


class Whole:
    """Without ZeRO: torch's own optimizer, with states as its parameters are shaped."""

    def __init__(self, source: Source, holders: tuple[Place, ...]) -> None:
        self._source = source
        self._saved = source.optimizer_of(holders)
        groups = source.model.structure.groups[holders[0].model_rank // source.model.slices]
        numbers = [number for group in self._saved["param_groups"] for number in group["params"]]
        names = [name for group in groups for name in group]
        self._numbers = dict(zip(names, numbers, strict=True))
        self._groups = groups

    def hyperparameters(self) -> list[dict[str, Any]]:
        return _without_parameters(self._saved["param_groups"])

    def of_group(self, group: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        first = ""
        for name in self._groups[group]:
            state = self._saved["state"].get(self._numbers[name])
            if not state:
                continue
            one = _of_group(state, math.prod(self._source.model.parameters[name].shape), group)
            if found and not _alike(one, found):
                raise CheckpointLayoutError(
                    f"{first!r} and {name!r} have different values of {differing(one, found)} in the optimizer, and "
                    "ZeRO keeps one for all parameters of a group"
                )
            found, first = found or one, first or name
        return found

    def of(self, name: str, key: str, start: int, stop: int) -> torch.Tensor | None:
        state = self._saved["state"].get(self._numbers[name])
        return state[key].detach().reshape(-1)[start:stop] if state else None  # it may never have had a gradient


def _alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and not differing(one, other)


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The first entry in which two differ; empty if in none."""
    keys = [key for key in {**one, **other} if key not in one or key not in other or not _equal(one[key], other[key])]
    return abridged(keys[0]) if keys else ""


def _equal(one: Any, other: Any) -> bool:
    if torch.is_tensor(one) and torch.is_tensor(other):
        return bool(torch.equal(one, other))
    return bool(one == other)


class Flat:
    """ZeRO 1 and 2: each group as one vector, a partition of it in every file, and where a parameter's parts are."""

    def __init__(self, source: Source, holders: tuple[Place, ...]) -> None:
        self._replicas = [source.optimizer_file(place)["optimizer_state_dict"] for place in holders]
        self._are_padded = source.layout.optimizer == BF16_OPTIMIZER
        base = self._replicas[0]["base_optimizer_state"]
        if not isinstance(base, dict):
            raise CheckpointLayoutError(
                "zero_optimization.elastic_checkpoint was on when the checkpoint was saved: without it, which is the "
                "default, it can be converted"
            )
        self._groups = base["param_groups"]
        self._parts: dict[str, list[tuple[int, int, Any]]] = defaultdict(list)
        """Of each parameter, in its elements' order: replica, group, and where it is in the replica's partition."""
        for replica, content in enumerate(self._replicas):
            for group, addresses in enumerate(content["param_slice_mappings"]):
                for name, address in addresses.items():
                    self._parts[name].append((replica, group, address))

    def hyperparameters(self) -> list[dict[str, Any]]:
        return _without_parameters(self._groups)

    def of_group(self, group: int) -> dict[str, Any]:
        first = self._replicas[0]
        numel = first["single_partition_of_fp32_groups"][group].numel()
        if not self._are_padded:
            numel += first["group_paddings"][group]
        return _of_group(self._state(first, group), numel, group)

    def _state(self, replica: Mapping[str, Any], group: int) -> dict[str, Any]:
        number = self._groups[group]["params"][0]
        state: dict[str, Any] = replica["base_optimizer_state"]["state"].get(number, {})
        return state

    def of(self, name: str, key: str, start: int, stop: int) -> torch.Tensor:
        parts, begin = [], 0
        for number, group, address in self._parts[name]:
            low, high = max(start, begin) - begin, min(stop, begin + address.numel) - begin
            begin += address.numel
            if low < high:
                replica = self._replicas[number]
                masters = replica["single_partition_of_fp32_groups"]
                flat = masters[group] if key == MASTER else self._state(replica, group)[key]
                parts.append(flat.detach()[address.start + low : address.start + high])
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class Partitioned:
    """ZeRO 3: each parameter in as many parts as there are replicas."""

    def __init__(self, source: Source, holders: tuple[Place, ...]) -> None:
        layout = source.layout
        self._replicas = [source.optimizer_file(place)["optimizer_state_dict"] for place in holders]
        self._groups = self._replicas[0]["optimizer_state_dict"]["param_groups"]
        shapes = source.model_states(holders[0].model_rank)["param_shapes"]
        self._places: dict[str, tuple[int, int, int]] = {}
        self._numels: list[int] = []
        for number, group in enumerate(shapes):
            numels = {name: math.prod(shape) for name, shape in group.items()}
            self._numels.append(PartitionedGroup(numels, layout.replicas).partition_numel)
            offset = 0
            for name, numel in numels.items():
                part = -(-numel // layout.replicas)
                self._places[name] = (number, offset, part)
                offset += part

    def hyperparameters(self) -> list[dict[str, Any]]:
        return _without_parameters(self._groups)

    def of_group(self, group: int) -> dict[str, Any]:
        number = self._groups[group]["params"][0]
        state = self._replicas[0]["optimizer_state_dict"]["state"].get(number, {})
        return _of_group(state, self._numels[number], group)

    def of(self, name: str, key: str, start: int, stop: int) -> torch.Tensor:
        number, offset, part = self._places[name]
        parts = []
        for replica in range(start // part, -(-stop // part)):
            own = self._replicas[replica]
            flat = (
                own["fp32_flat_groups"][number] if key == MASTER else own["optimizer_state_dict"]["state"][number][key]
            )
            low, high = max(start - replica * part, 0), min(stop - replica * part, part)
            parts.append(flat.detach()[offset + low : offset + high])
        return parts[0] if len(parts) == 1 else torch.cat(parts)
