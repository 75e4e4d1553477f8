"""Weights and optimizer states of a checkpoint, by parameter, from DeepSpeed's files of any layout.

Files are mapped into memory: what is not asked for is not read.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.serialization import safe_globals

from ds_topo.checkpoint_files.manifest import SavedLayout
from ds_topo.conversion.model import Parameter, SavedModel
from ds_topo.conversion.partitions import PartitionedGroup
from ds_topo.conversion.slices import cut, joined
from ds_topo.conversion.target import prefix_of_layer
from ds_topo.engine.safe_reading import ALLOWED
from ds_topo.errors import CheckpointLayoutError, DamagedCheckpointError, abridged

WEIGHT = "weight"
"""The key of a parameter as the module has it; others are ``fp32`` and the optimizer's own."""
MASTER = "fp32"
"""The key of what the optimizer steps."""


class Files:
    """The files of one checkpoint, each mapped into memory once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, Any] = {}
        self._lock = threading.Lock()

    def content(self, name: str) -> Any:
        """What is in a file, with tensors that are read when they are used.

        Raises:
            DamagedCheckpointError: it cannot be read.
        """
        with self._lock:
            if name not in self._open:
                try:
                    with safe_globals(list(ALLOWED)):
                        self._open[name] = torch.load(
                            self.folder / name, map_location="cpu", mmap=True, weights_only=True
                        )
                except (OSError, RuntimeError) as error:
                    raise DamagedCheckpointError(f"{self.folder / name}: {str(error).partition(chr(10))[0]}") from None
            return self._open[name]

    def matching(self, pattern: str) -> list[str]:
        """Names that match, ascending."""
        return sorted(path.name for path in self.folder.glob(pattern))


class States(Protocol):
    """What the optimizer of a model rank has saved."""

    def hyperparameters(self) -> list[dict[str, Any]]:
        """Of every group, without its parameters."""

    def of_group(self, group: int) -> dict[str, Any]:
        """The states of a group: None for those that each element has, else the value."""

    def of(self, name: str, key: str) -> torch.Tensor:
        """A state that each element has, or the master weight: this slice of a parameter."""


@dataclass
class Source:
    """A checkpoint that is read."""

    model: SavedModel
    files: Files
    _states: dict[int, States] = field(default_factory=dict)

    @property
    def layout(self) -> SavedLayout:
        """That it was saved in."""
        return self.model.layout

    def local(self, name: str, key: str, slices: int) -> list[torch.Tensor]:
        """A parameter's weight or state, as each of so many slices holds it, or that all of them hold."""
        parameter = self.model.parameters[name]
        first = self.model.stage_of[name] * self.model.slices
        if slices == self.model.slices:
            return [self._part(first + place, parameter, key) for place in range(slices)]
        if parameter.split is None:
            return [self._part(first, parameter, key)] * slices
        full = self.full(name, key)
        return [cut(full, parameter.split, place, slices) for place in range(slices)]

    def full(self, name: str, key: str) -> torch.Tensor:
        """All slices of it, put together."""
        parameter = self.model.parameters[name]
        first = self.model.stage_of[name] * self.model.slices
        count = self.model.slices if parameter.split is not None else 1
        return joined([self._part(first + place, parameter, key) for place in range(count)], parameter.split)

    def states(self, model_rank: int) -> States:
        """Of the optimizer of a model rank."""
        if model_rank not in self._states:
            kinds: dict[int, Callable[[Source, int], States]] = {0: _Whole, 1: _Flat, 2: _Flat, 3: _Partitioned}
            self._states[model_rank] = kinds[self.layout.zero_stage](self, model_rank)
        return self._states[model_rank]

    def _part(self, model_rank: int, parameter: Parameter, key: str) -> torch.Tensor:
        if key == WEIGHT:
            return self._weight(model_rank, parameter)
        return self.states(model_rank).of(parameter.name, key).view(parameter.shape)

    def _weight(self, model_rank: int, parameter: Parameter) -> torch.Tensor:
        name = parameter.name
        if self.layout.is_pipeline:
            file, key = self._in_layers[name]
            place = model_rank % self.model.slices
            found: torch.Tensor = self.files.content(self.layer_files(file)[place])[key]
            return found
        if self.layout.zero_stage == 3:
            if not parameter.is_trained:
                return self._frozen(model_rank, parameter)
            return self._part(model_rank, parameter, MASTER).to(getattr(torch, parameter.dtype))
        weight: torch.Tensor = self.model_states(model_rank)["module"][name]
        return weight

    def _frozen(self, model_rank: int, parameter: Parameter) -> torch.Tensor:
        parts = [
            self.model_states(model_rank, replica)["frozen_param_fragments"][parameter.name].flatten()
            for replica in range(self.layout.replicas)
        ]
        return torch.cat(parts)[: math.prod(parameter.shape)].view(parameter.shape)

    def model_states(self, model_rank: int, replica: int = 0) -> dict[str, Any]:
        """Of the module and the engine, without ``layer_*`` files."""
        prefix = f"zero_pp_rank_{replica}_" if self.layout.zero_stage == 3 else ""
        content: dict[str, Any] = self.files.content(f"{prefix}mp_rank_{model_rank:02d}_model_states.pt")
        return content

    def optimizer_file(self, model_rank: int, replica: int) -> dict[str, Any]:
        """Of a partition of ZeRO."""
        content: dict[str, Any] = self.files.content(name_of_partition(self.layout, model_rank, replica))
        return content

    # -- layers of a pipeline ------------------------------------------------------------------------------------------

    def layer_files(self, number: int) -> list[str]:
        """The files of a layer, by slice; none where it is a function, or a second use of what is tied."""
        found = self.files.matching(f"layer_{number:02d}-*model_states.pt")
        if found and len(found) != self.model.slices:
            raise DamagedCheckpointError(
                f"{self.files.folder}: layer {number} has {len(found)} files, and there are {self.model.slices} slices"
            )
        return found

    def buffers_of_layers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What layers have saved beside parameters, of the first slice."""
        for name, (number, key) in self._in_layers.items():
            if name not in self.model.parameters:
                yield name, self.files.content(self.layer_files(number)[0])[key]

    @cached_property
    def _in_layers(self) -> dict[str, tuple[int, str]]:
        """Of every parameter, a layer whose file has it, and its key there."""
        found: dict[str, tuple[int, str]] = {}
        for number in range(len(self.model.structure.layers)):
            files = self.layer_files(number)
            prefix = prefix_of_layer(self.model.structure, number)
            for key in self.files.content(files[0]) if files else ():
                found.setdefault(f"{prefix}{key}", (number, key))
        return found


def name_of_partition(layout: SavedLayout, model_rank: int, replica: int) -> str:
    """The file of the optimizer's partition."""
    prefix = "bf16_" if layout.precision == "bf16" else ""
    return f"{prefix}zero_pp_rank_{replica}_mp_rank_{model_rank:02d}_optim_states.pt"


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


class _Whole:
    """Without ZeRO: torch's own optimizer, with states as its parameters are shaped."""

    def __init__(self, source: Source, model_rank: int) -> None:
        self._source, self._rank = source, model_rank
        self._saved: dict[str, Any] = source.model_states(model_rank)["optimizer"]
        groups = source.model.structure.groups[model_rank // source.model.slices]
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
                    f"{first!r} and {name!r} have different values of {_differing(one, found)} in the optimizer, and "
                    "ZeRO keeps one for all parameters of a group"
                )
            found, first = found or one, first or name
        return found

    def of(self, name: str, key: str) -> torch.Tensor:
        parameter = self._source.model.parameters[name]
        if key == MASTER:
            return self._source._weight(self._rank, parameter)
        state = self._saved["state"].get(self._numbers[name])
        if not state:  # never had a gradient
            return torch.zeros(parameter.shape)
        found: torch.Tensor = state[key]
        return found


def _alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and not _differing(one, other)


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    keys = [key for key in {**one, **other} if key not in one or key not in other or not _equal(one[key], other[key])]
    return abridged(keys[0]) if keys else ""


def _equal(one: Any, other: Any) -> bool:
    if torch.is_tensor(one) and torch.is_tensor(other):
        return bool(torch.equal(one, other))
    return bool(one == other)


class _Flat:
    """ZeRO 1 and 2: each group as one vector, a partition of it in every file, and where a parameter's parts are."""

    def __init__(self, source: Source, model_rank: int) -> None:
        self._replicas = [
            source.optimizer_file(model_rank, replica)["optimizer_state_dict"]
            for replica in range(source.layout.replicas)
        ]
        base = self._replicas[0]["base_optimizer_state"]
        if not isinstance(base, dict):
            raise CheckpointLayoutError(
                "zero_optimization.elastic_checkpoint was on when the checkpoint was saved: without it, which is the "
                "default, it can be converted"
            )
        self._groups = base["param_groups"]
        mappings = (replica["param_slice_mappings"] for replica in self._replicas)
        self._group_of = {
            name: number for mapping in mappings for number, names in enumerate(mapping) for name in names
        }

    def hyperparameters(self) -> list[dict[str, Any]]:
        return _without_parameters(self._groups)

    def of_group(self, group: int) -> dict[str, Any]:
        first = self._replicas[0]
        numel = first["single_partition_of_fp32_groups"][group].numel() + first["group_paddings"][group]
        return _of_group(self._state(first, group), numel, group)

    def _state(self, replica: Mapping[str, Any], group: int) -> dict[str, Any]:
        number = self._groups[group]["params"][0]
        state: dict[str, Any] = replica["base_optimizer_state"]["state"].get(number, {})
        return state

    def of(self, name: str, key: str) -> torch.Tensor:
        group = self._group_of[name]
        parts = []
        for replica in self._replicas:
            address = replica["param_slice_mappings"][group].get(name)
            if address is None:
                continue
            flat = (
                replica["single_partition_of_fp32_groups"][group] if key == MASTER else self._state(replica, group)[key]
            )
            parts.append(flat[address.start : address.start + address.numel])
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class _Partitioned:
    """ZeRO 3: each parameter in as many parts as there are replicas."""

    def __init__(self, source: Source, model_rank: int) -> None:
        layout = source.layout
        self._replicas = [
            source.optimizer_file(model_rank, replica)["optimizer_state_dict"] for replica in range(layout.replicas)
        ]
        self._groups = self._replicas[0]["optimizer_state_dict"]["param_groups"]
        shapes = source.model_states(model_rank)["param_shapes"]
        self._places: dict[str, tuple[int, int, int, int]] = {}
        self._numels: list[int] = []
        for number, group in enumerate(shapes):
            numels = {name: math.prod(shape) for name, shape in group.items()}
            self._numels.append(PartitionedGroup(numels, layout.replicas).partition_numel)
            offset = 0
            for name, numel in numels.items():
                part = -(-numel // layout.replicas)
                self._places[name] = (number, offset, part, numel)
                offset += part

    def hyperparameters(self) -> list[dict[str, Any]]:
        return _without_parameters(self._groups)

    def of_group(self, group: int) -> dict[str, Any]:
        number = self._groups[group]["params"][0]
        state = self._replicas[0]["optimizer_state_dict"]["state"].get(number, {})
        return _of_group(state, self._numels[number], group)

    def of(self, name: str, key: str) -> torch.Tensor:
        number, offset, part, numel = self._places[name]
        flats = [
            replica["fp32_flat_groups"][number]
            if key == MASTER
            else replica["optimizer_state_dict"]["state"][number][key]
            for replica in self._replicas
        ]
        return torch.cat([flat[offset : offset + part] for flat in flats])[:numel]
