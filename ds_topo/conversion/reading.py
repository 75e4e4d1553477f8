"""Weights and optimizer states of a checkpoint, by parameter, from DeepSpeed's files of any layout.

Files are mapped into memory: what is not asked for is not read.
"""

from __future__ import annotations

import fnmatch
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.serialization import safe_globals

from ds_topo.checkpoint_files.manifest import SavedLayout
from ds_topo.conversion.experts import ExpertPlaces, Place, expert_of, head_of, places_in
from ds_topo.conversion.model import Parameter, SavedModel
from ds_topo.conversion.slices import elements_of_slice
from ds_topo.conversion.stages import prefix_of_layer
from ds_topo.conversion.states import MASTER, Flat, Partitioned, States, Whole
from ds_topo.engine.checkpoints.safe_reading import ALLOWED
from ds_topo.errors import DamagedCheckpointError

WEIGHT = "weight"
"""The key of a parameter as the module has it; others are ``fp32`` and the optimizer's own."""


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
        return fnmatch.filter(self._names, pattern)

    @cached_property
    def _names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


@dataclass(frozen=True, eq=False)
class Source:
    """A checkpoint that is read."""

    model: SavedModel
    files: Files
    _known_states: dict[tuple[Place, ...], States] = field(default_factory=dict)
    _lock: Any = field(default_factory=threading.Lock)

    @property
    def layout(self) -> SavedLayout:
        """That it was saved in."""
        return self.model.layout

    def elements(self, name: str, key: str, place: int, slices: int, start: int, stop: int) -> torch.Tensor:
        """Elements ``start:stop`` of a slice of a parameter's weight or state, flat; what they need is read.

        Args:
            name: of the parameter.
            key: of its weight or state.
            place: of the slice.
            slices: among how many.
            start: the first one.
            stop: after the last one.
        """
        parameter = self.model.parameters[name]
        first, split = self.model.stage_of[name] * self.model.slices, parameter.split
        if slices == self.model.slices or split is None:
            own = first + (place if slices == self.model.slices else 0)
            return self._elements(own, parameter, key, start, stop)

        def read(part: int, low: int, high: int) -> torch.Tensor:
            return self._elements(first + part, parameter, key, low, high)

        return elements_of_slice(read, parameter.shape, split, self.model.slices, place, slices, start, stop)

    def full(self, name: str, key: str) -> torch.Tensor:
        """All of it."""
        shape = self.model.parameters[name].shape_of_slice(1)
        return self.elements(name, key, 0, 1, 0, math.prod(shape)).view(shape)

    @cached_property
    def hyperparameters(self) -> list[dict[str, Any]]:
        """Of every group of the optimizer, without its parameters."""
        return self.states_of_first().hyperparameters()

    @cached_property
    def states_of_groups(self) -> list[dict[str, Any]]:
        """Of every group of the optimizer: None for states that each element has, else the value."""
        return [self.states_of_first().of_group(group) for group in range(len(self.hyperparameters))]

    def states_of_first(self) -> States:
        """Of the optimizer of the first model rank, for what is the same on all of them."""
        return self._states(self._replicas_of(0))

    def _states(self, holders: tuple[Place, ...]) -> States:
        with self._lock:
            if holders not in self._known_states:
                kinds: dict[int, Callable[[Source, tuple[Place, ...]], States]]
                kinds = {0: Flat if self.layout.has_partitions else Whole, 1: Flat, 2: Flat, 3: Partitioned}
                self._known_states[holders] = kinds[self.layout.zero_stage](self, holders)
            return self._known_states[holders]

    @cached_property
    def experts(self) -> dict[int, ExpertPlaces]:
        """Where experts are, by the size of their groups."""
        return {experts.size: places_in(self.layout, experts) for experts in self.layout.experts}

    def _replicas_of(self, model_rank: int) -> tuple[Place, ...]:
        return tuple(Place(model_rank, replica) for replica in range(self.layout.replicas))

    def _holders(self, model_rank: int, parameter: Parameter) -> tuple[Place, ...]:
        """The ranks that share out the states of a parameter's slice."""
        if not parameter.experts:
            return self._replicas_of(model_rank)
        places = self.experts[self.model.structure.experts[head_of(parameter.name)]]
        return places.holders[model_rank, self.model.part_of(parameter.name, self.model.structure)]

    def _elements(self, model_rank: int, parameter: Parameter, key: str, start: int, stop: int) -> torch.Tensor:
        """Of a slice that there is."""
        is_weight = key == WEIGHT or (key == MASTER and not self.layout.has_partitions)
        if is_weight and (self.layout.zero_stage < 3 or not parameter.is_trained):
            return self._weight(model_rank, parameter).detach().reshape(-1)[start:stop]
        own = self.model.local_name(parameter.name, self.model.structure)
        states = self._states(self._holders(model_rank, parameter))
        found = states.of(own, MASTER if is_weight else key, start, stop)
        if found is None:
            return torch.zeros(stop - start)
        return found.to(getattr(torch, parameter.dtype)) if is_weight else found

    def _weight(self, model_rank: int, parameter: Parameter) -> torch.Tensor:
        name = parameter.name
        if (expert := expert_of(name)) is not None and parameter.experts:
            own: torch.Tensor = self.expert_file(model_rank, expert.head, expert.number)[name]
            return own
        if self.layout.is_pipeline:
            file, key = self._in_layers[name]
            place = model_rank % self.model.slices
            found: torch.Tensor = self.files.content(self.layer_files(file)[place])[key]
            return found
        if self.layout.zero_stage == 3:
            return self._frozen(model_rank, parameter)
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

    def optimizer_file(self, place: Place) -> dict[str, Any]:
        """Of a partition of ZeRO."""
        content: dict[str, Any] = self.files.content(name_of_partition(self.layout, *place))
        return content

    # -- experts -------------------------------------------------------------------------------------------------------

    @cached_property
    def layers_of_experts(self) -> dict[str, int]:
        """The number by which files call a layer, by how the names of its experts begin."""
        return {head: number for number, head in enumerate(self.model.experts)}

    def expert_file(self, model_rank: int, head: str, number: int) -> dict[str, Any]:
        """Weights of an expert, or of a slice of it."""
        size = self.model.structure.experts[head]
        holders = self.experts[size].holders[model_rank, number // (self.model.experts[head] // size)]
        layer = self.layers_of_experts[head]
        return self._first(name_of_expert(layer, number, place.model_rank) for place in holders)

    def buffers_of_experts(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What experts have saved beside parameters, of the first slice."""
        for head, count in self.model.experts.items():
            for number in range(count):
                file = self.expert_file(0, head, number)
                yield from ((name, value) for name, value in file.items() if name not in self.model.parameters)

    def optimizer_of(self, holders: tuple[Place, ...]) -> dict[str, Any]:
        """Without ZeRO: what torch's optimizer has saved on one of these ranks."""
        if not self.experts:
            content: dict[str, Any] = self.model_states(holders[0].model_rank)["optimizer"]
            return content
        places = self.experts[max(self.experts)]
        names = (name_of_optimizer(places.part_of[place], place.model_rank) for place in holders)
        found: dict[str, Any] = self._first(names)["optimizer"]
        return found

    def _first(self, names: Iterable[str]) -> dict[str, Any]:
        """The first file that there is: of ranks that have the same, one writes."""
        candidates = list(dict.fromkeys(names))
        there = next((name for name in candidates if (self.files.folder / name).exists()), candidates[0])
        content: dict[str, Any] = self.files.content(there)
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


def name_of_expert(layer: int, number: int, model_rank: int) -> str:
    """The file of an expert's weights."""
    return f"layer_{layer}_expert_{number}_mp_rank_{model_rank:02d}_model_states.pt"


def name_of_optimizer(part: int, model_rank: int) -> str:
    """The file of an optimizer without ZeRO where there are experts."""
    return f"expp_rank_{part}_mp_rank_{model_rank:02d}_optim_states.pt"


def name_of_partition(layout: SavedLayout, model_rank: int, replica: int) -> str:
    """The file of the optimizer's partition."""
    prefix = "bf16_" if layout.precision == "bf16" else ""
    return f"{prefix}zero_pp_rank_{replica}_mp_rank_{model_rank:02d}_optim_states.pt"
