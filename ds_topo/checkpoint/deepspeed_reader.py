"""Read weights and optimizer states of single parameters from DeepSpeed's checkpoint files, whatever their layout.

:class:`Source` reads parameters of the whole model: it finds the files, maps them into memory and cuts slices to the
wanted degree. Only the requested elements are read. :class:`OptimizerStates` reads the files of optimizers, without and
with ZeRO.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from ds_topo.checkpoint.manifest import Place, SavedLayout, SavedOptions
from ds_topo.checkpoint.safe_reading import allowed_types, damaged, how_to_verify
from ds_topo.checkpoint.saved_model import (
    Parameter,
    WholeModel,
    expert_of,
    layer_of_experts,
    prefix_of_layer,
)
from ds_topo.checkpoint.shards import FlatGroup, PartitionedGroup, Slice, Span, elements_of_slice, resliced
from ds_topo.errors import CheckpointLayoutError, DamagedCheckpointError, abridged

FLAT_MASTERS, COPIED_MASTERS = "fp32_groups_flat", "fp32_groups"
"""Keys of the master weights of half precision without ZeRO: of ``FP16_Optimizer`` and ``FP16_UnfusedOptimizer``."""
WEIGHT = "weight"
"""Key of a parameter's value in the module."""
MASTER = "fp32"
"""Key of the master weight, on which the optimizer steps. All other keys are those of the optimizer's states."""


def entry_of(content: Any, file: Path, *keys: Any) -> Any:
    """Return an entry of a file, by its keys from the outside to the inside.

    Raises:
        DamagedCheckpointError: there is none.
    """
    for key in keys:
        if not isinstance(content, Mapping) or key not in content:
            raise DamagedCheckpointError(
                f"{file} has no entry {abridged(list(keys))}, so it does not fit its manifest. Find changed files by "
                f"{how_to_verify(file.parent)}"
            )
        content = content[key]
    return content


def name_of_model_states(layout: SavedLayout, model_rank: int, replica: int = 0) -> str:
    """Return the file of the module and the engine."""
    prefix = f"zero_pp_rank_{replica}_" if layout.zero_stage == 3 else ""
    return f"{prefix}mp_rank_{model_rank:02d}_model_states.pt"


def name_of_partition(layout: SavedLayout, place: Place) -> str:
    """Return the file of a rank's optimizer partition."""
    prefix = "bf16_" if layout.precision == "bf16" else ""
    return f"{prefix}zero_pp_rank_{place.replica}_mp_rank_{place.model_rank:02d}_optim_states.pt"


def name_of_expert(layer: int, number: int, model_rank: int) -> str:
    """Return the file of an expert's weights."""
    return f"layer_{layer}_expert_{number}_mp_rank_{model_rank:02d}_model_states.pt"


def name_of_optimizer(part: int, model_rank: int) -> str:
    """Return the file of an optimizer without ZeRO, for models with experts."""
    return f"expp_rank_{part}_mp_rank_{model_rank:02d}_optim_states.pt"


def options_of_files(states: Mapping[str, Any]) -> SavedOptions:
    """Return the options of ZeRO that a checkpoint was saved with, from the config in its file of weights."""
    section = (states.get("ds_config") or {}).get("zero_optimization") or {}
    return SavedOptions(**{key: section[key] for key in asdict(SavedOptions()) if key in section})


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return the first key whose values differ, abridged for a message; an empty string if none does."""
    for key in {**one, **other}:
        value, there = one.get(key), other.get(key)
        alike = torch.equal(value, there) if torch.is_tensor(value) and torch.is_tensor(there) else value == there
        if not alike or (key in one) != (key in other):
            return abridged(key)
    return ""


class OptimizerStates:
    """Optimizer states and master weights of ranks that hold the same parameters.

    They are stored in *vectors*, see :meth:`WholeModel.vectors`. Without ZeRO a vector is in one file. With ZeRO each
    rank's file has a partition of it.
    """

    def __init__(self, source: Source, holders: tuple[Place, ...]) -> None:
        layout, rows, self._folder = source.layout, source.model.parameters, source.folder
        vectors: Sequence[FlatGroup | PartitionedGroup]
        if layout.zero_stage == 3:
            shapes = source.entry(name_of_model_states(layout, holders[0].model_rank), "param_shapes")
            numels = [{name: math.prod(shape) for name, shape in of_vector.items()} for of_vector in shapes]
            vectors = [PartitionedGroup(of_vector, len(holders)) for of_vector in numels]
        else:
            vectors = [one for _, one in source.model.vectors(holders[0], lambda name: math.prod(rows[name].shape))]
        self.masters: list[list[torch.Tensor]] = []
        """Partitions of the master weights, by replica and vector."""
        if not layout.has_partitions:
            saved = source.optimizer_of(holders)
            inner = [saved.get("optimizer_state_dict", saved)]
            if FLAT_MASTERS in saved:
                self.masters = [list(saved[FLAT_MASTERS])]
            elif COPIED_MASTERS in saved:
                self.masters = [[master for group in saved[COPIED_MASTERS] for master in group]]
        else:
            is_stage_3 = layout.zero_stage == 3
            names = [name_of_partition(layout, place) for place in holders]
            key = "optimizer_state_dict" if is_stage_3 else "base_optimizer_state"
            inner = [source.entry(name, "optimizer_state_dict", key) for name in names]
            if not isinstance(inner[0], dict):
                raise CheckpointLayoutError(
                    "the checkpoint was saved with zero_optimization.elastic_checkpoint, which cannot be converted. "
                    "Load it in the layout that saved it, and save it without this option, which is the default"
                )
            key = "fp32_flat_groups" if is_stage_3 else "single_partition_of_fp32_groups"
            self.masters = [list(source.entry(name, "optimizer_state_dict", key)) for name in names]
        self._states: list[dict[int, dict[str, Any]]] = [one["state"] for one in inner]
        saved_groups, left_out = inner[0]["param_groups"], ("params", "param_names")
        self.groups = [{key: one[key] for key in one if key not in left_out} for one in saved_groups]
        """The hyperparameters of each group of the optimizer."""
        self._group_of = {number: group for group, one in enumerate(saved_groups) for number in one["params"]}
        source.require([*self._group_of] == [*range(len(vectors))], "groups of the optimizer")
        self._numels = [vector.partition_numel for vector in vectors]
        for masters in self.masters:
            fit = [one.numel() <= numel for one, numel in zip(masters, self._numels, strict=False)]
            source.require(len(masters) == len(vectors) and all(fit), "sizes of vectors of the optimizer")
        self._spans: dict[str, list[tuple[int, int, Span]]] = defaultdict(list)
        """The replica, the number of the vector and the span of each part of a parameter, in the order of elements."""
        for number, vector in enumerate(vectors):
            first = next(iter(vector.numels), "")
            is_here = not layout.has_partitions or source.model.sharers(first, holders[0]) == holders
            for replica in range(vector.replicas if is_here else 0):  # other ranks hold the other vectors
                for span in vector.spans(replica):
                    self._spans[span.name].append((replica, number, span))

    def of_parameter(self, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the hyperparameters of a parameter's group, and its states; see :meth:`Source.of_parameter`."""
        _, number, _ = self._spans[name][0]
        found: dict[str, Any] = {}
        for key, value in self._states[0].get(number, {}).items():
            is_elementwise = torch.is_tensor(value) and value.dim() > 0 and value.numel() == self._numels[number]
            if torch.is_tensor(value) and value.numel() > 1 and not is_elementwise:
                raise CheckpointLayoutError(
                    f"the optimizer's state {key!r} of {name!r} has the shape {list(value.shape)} for "
                    f"{self._numels[number]} elements. Only states of every element, and single values, can be "
                    "converted. Load the checkpoint in the layout that saved it"
                )
            found[key] = value.dtype if is_elementwise else value
        return self.groups[self._group_of[number]], found

    def of(self, name: str, key: str, start: int, stop: int) -> torch.Tensor | None:
        """Return elements of a state or master weight, flat; None if the parameter never had a gradient."""
        spans, parts = self._spans[name], []
        first = bisect_right(spans, start, key=lambda one: one[2].start) - 1
        for replica, number, span in spans[first : bisect_left(spans, stop, key=lambda one: one[2].start)]:
            if key == MASTER:
                vector = self.masters[replica][number]
            elif state := self._states[replica].get(number):
                vector = entry_of(state, self._folder / f"the optimizer's states of {name!r}", key)
            else:
                return None
            shift = span.offset - span.start
            parts.append(vector.detach().reshape(-1)[max(start, span.start) + shift : min(stop, span.stop) + shift])
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def opened(path: Path) -> dict[str, Any]:
    """Return the content of a file; its tensors are read when they are used.

    Raises:
        DamagedCheckpointError: the file cannot be read.
    """
    try:
        with allowed_types():
            content: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # of any class: torch raises whatever a changed byte leads to
        raise damaged(path, error, path.parent) from error
    return content


class Source:
    """An open checkpoint, whose files are mapped into memory, each once."""

    def __init__(self, model: WholeModel, folder: Path) -> None:
        self.model, self.layout, self.folder = model, model.layout, folder
        self._open: dict[str, dict[str, Any]] = {}
        self._states: dict[tuple[Place, ...], OptimizerStates] = {}
        self._modules: dict[int, Mapping[str, Any]] = {}
        self._lock = threading.RLock()

    def content(self, name: str) -> dict[str, Any]:
        """Return the content of a file, which is opened once.

        Raises:
            DamagedCheckpointError: the file cannot be read.
        """
        with self._lock:
            if name not in self._open:
                self._open[name] = opened(self.folder / name)
            return self._open[name]

    def entry(self, name: str, *keys: Any) -> Any:
        """Return an entry of a file; see :func:`entry_of`."""
        return entry_of(self.content(name), self.folder / name, *keys)

    def require(self, is_right: bool, what: str) -> None:
        """Raise DamagedCheckpointError unless the files hold what the manifest says."""
        if not is_right:
            raise DamagedCheckpointError(
                f"{self.folder}: {what} do not fit the manifest. Find changed files by {how_to_verify(self.folder)}"
            )

    def elements(self, name: str, key: str, place: int, slices: int, start: int, stop: int) -> torch.Tensor:
        """Return elements of a slice of a parameter's weight or state, flat. Nothing else is read.

        Args:
            name: name of the parameter in the whole model.
            key: :data:`WEIGHT`, :data:`MASTER` or the key of a state.
            place: number of the slice; of the part of the experts, if AutoEP stacks them.
            slices: number of slices, or parts, which may differ from the saved one.
            start: first element.
            stop: end of the elements, exclusive.
        """
        parameter = self.model.parameters[name]
        split, saved, read = parameter.split, parameter.slices, partial(self._elements, parameter, key)
        if split is None or (slices == saved and parameter.padded is None):
            return read(place if slices == saved else 0, start, stop)
        if parameter.padded is None:
            wanted = Slice(parameter.shape_of_slice(slices), split.dim, slices, place, split.stride)
            return elements_of_slice(read, wanted, saved, start, stop)
        rows, base = parameter.shape[1:], parameter.numel_of_slice(slices) * place
        end = (split.real or 0) * math.prod(rows)  # of what is no padding, which is zero
        low, high = min(base + start, end), min(base + stop, end)
        held = elements_of_slice(read, Slice((parameter.size, *rows), 0), saved, low, high)
        return torch.cat([held, held.new_zeros(stop - start - len(held))])

    def of_parameter(self, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the hyperparameters of a parameter's group, and its states, from the rank that holds its beginning.

        A state of every element is given by its data type. The states of a parameter without gradients are empty.
        """
        holders = self.model.holders(self.model.parameters[name].stage * self.model.slices, name)
        return self._states_of(holders).of_parameter(name)

    def states_of(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the states that parameters have in common, of which one tensor of the optimizer will hold all.

        A state of every element is given by its data type. Parameters without states count as any others.

        Raises:
            CheckpointLayoutError: they differ.
        """
        found: dict[str, Any] = {}
        first = ""
        for name in names:
            _, states = self.of_parameter(name)
            if found and states and (key := differing(found, states)):
                raise CheckpointLayoutError(
                    f"{self.folder}: {first!r} and {name!r} have different values or types of {key} in the optimizer, "
                    "which has one for both in this layout. Put the two into different groups of the optimizer, or "
                    "load the checkpoint in the layout that saved it"
                )
            if states and not found:
                found, first = states, name
        return found

    def _states_of(self, holders: tuple[Place, ...]) -> OptimizerStates:
        with self._lock:
            if holders not in self._states:
                self._states[holders] = OptimizerStates(self, holders)
            return self._states[holders]

    def _elements(self, parameter: Parameter, key: str, piece: int, start: int, stop: int) -> torch.Tensor:
        """Return elements of a slice, or of a part of the experts, that was saved."""
        name, first = parameter.name, parameter.stage * self.model.slices
        model_rank, part = (first, piece) if parameter.is_stacked else (first + piece, 0)
        has_masters = self.layout.has_partitions or self.layout.precision != "fp32"
        is_weight = key == WEIGHT or (key == MASTER and not (has_masters and parameter.is_trained))
        if is_weight and parameter.is_stacked:
            return self._stacked_weight(model_rank, parameter, part, start, stop)
        if is_weight and (self.layout.zero_stage < 3 or not parameter.is_trained):
            return self._weight(model_rank, parameter).detach().reshape(-1)[start:stop]
        states = self._states_of(self.model.holders(model_rank, name, part))
        elements = states.of(name, MASTER if is_weight else key, start, stop)
        if elements is None:
            return torch.zeros(stop - start)
        return elements.to(parameter.dtype) if is_weight else elements

    def _stacked_weight(self, model_rank: int, parameter: Parameter, part: int, start: int, stop: int) -> torch.Tensor:
        """Return elements of the stacked weights of the experts of a part, which have a file each."""
        name, held, numel = parameter.name, parameter.shape[0], math.prod(parameter.shape[1:])
        first, end = start // numel, -(-stop // numel)
        files = [self.expert_file(model_rank, name, part * held + number) for number in range(first, end)]
        weights = [self.content(file)[f"{name}.{part * held + first + at}"] for at, file in enumerate(files)]
        return torch.cat([one.detach().reshape(-1) for one in weights])[start - first * numel : stop - first * numel]

    def _weight(self, model_rank: int, parameter: Parameter) -> torch.Tensor:
        weight: torch.Tensor
        name = parameter.name
        if parameter.experts and (expert := expert_of(name)) is not None:
            weight = self.entry(self.expert_file(model_rank, expert.head, expert.number), name)
        elif self.layout.zero_stage == 3:  # frozen
            files = [name_of_model_states(self.layout, model_rank, place) for place in range(self.layout.partitions)]
            weight = torch.cat([self.entry(file, "frozen_param_fragments", name).flatten() for file in files])
            weight = weight[: math.prod(parameter.shape)]
        else:
            module = self.module(model_rank % self.model.slices)
            file = "layer_*" if self.layout.is_pipeline else name_of_model_states(self.layout, model_rank)
            weight = entry_of(module, self.folder / file, name)
        self.require(torch.is_tensor(weight) and weight.numel() == math.prod(parameter.shape), f"the size of {name!r}")
        return weight

    def model_states(self, model_rank: int) -> dict[str, Any]:
        """Return the file of the module and the engine."""
        return self.content(name_of_model_states(self.layout, model_rank))

    def first_partition(self) -> dict[str, Any]:
        """Return what the first file with a partition of ZeRO has."""
        return dict(self.entry(name_of_partition(self.layout, Place(0, 0)), "optimizer_state_dict"))

    def optimizer_of(self, holders: tuple[Place, ...]) -> dict[str, Any]:
        """Return the state that an optimizer without ZeRO saved on one of these ranks."""
        if holders[0].model_rank // self.model.slices not in self.model.experts_of_stages:
            content = self.model_states(holders[0].model_rank)
        else:
            parts = self.model.parts[max(self.model.parts)]
            content = self.content(self._first(name_of_optimizer(parts[one], one.model_rank) for one in holders))
        return dict(entry_of(content, self.folder / "the optimizer's file", "optimizer"))

    def expert_file(self, model_rank: int, head: str, number: int) -> str:
        """Return the name of the file with the weights of an expert, or of a slice of it.

        The head is the prefix of its name, or the name of the parameter in which AutoEP stacks it.
        """
        layer = self.model.experts_of_stages[model_rank // self.model.slices].index(layer_of_experts(head))
        holders = self.model.expert_holders(model_rank, head, number)
        return self._first(name_of_expert(layer, number, place.model_rank) for place in holders)

    def _first(self, names: Iterable[str]) -> str:
        """Return the first file that exists: only one of the ranks that hold the same content writes it."""
        candidates = list(dict.fromkeys(names))
        return next((name for name in candidates if (self.folder / name).exists()), candidates[0])

    def module(self, place: int) -> Mapping[str, Any]:
        """Return the module's state dict on a slice, without experts, under the names of the whole model."""
        if place not in self._modules:
            if self.layout.is_pipeline:
                found: dict[str, Any] = {}
                for number in range(len(self.model.structure.layers)):
                    prefix = prefix_of_layer(self.model.structure, number)
                    for key, value in (self.layer(number, place) or {}).items():
                        found.setdefault(f"{prefix}{key}", value)
                self._modules[place] = found
            else:
                self._modules[place] = self.entry(name_of_model_states(self.layout, place), "module")
        return self._modules[place]

    def layer(self, number: int, place: int) -> Mapping[str, Any] | None:
        """Return the state dict of a layer of a pipeline on a slice, without experts.

        It is in a file of its own, or in that of a stage with experts. A layer that is a function, or another use of a
        tied layer, has none.
        """
        if files := self.layer_files[number]:
            return self.content(files[place])
        model, prefix = self.model, prefix_of_layer(self.model.structure, number)
        for stage in model.experts_of_stages:
            if number in model.structure.layers_of(stage, len(model.structure.groups)):
                module = self.model_states(stage * model.slices + place)["module"]
                own = {key.removeprefix(prefix): one for key, one in module.items() if key.startswith(prefix)}
                return own or None
        return None

    @cached_property
    def layer_files(self) -> list[list[str]]:
        """The files of each layer of a pipeline, by slice.

        A layer that is a function, or another use of a tied layer, has none.
        """
        layers = range(len(self.model.structure.layers))
        found = [sorted(path.name for path in self.folder.glob(f"layer_{one:02d}-*model_states.pt")) for one in layers]
        for number, names in enumerate(found):
            if names and len(names) != self.model.slices:
                raise DamagedCheckpointError(
                    f"{self.folder}: layer {number} has {len(names)} files, but there are {self.model.slices} slices"
                )
        return found

    def require_equal_copies(self, slices: int, *, has_states: bool) -> None:
        """Check that slices hold equal copies of whatever does not declare how they split it, bit by bit.

        Args:
            slices: the new number of slices.
            has_states: compare optimizer states, too.

        Raises:
            CheckpointLayoutError: a parameter or buffer differs, or cannot be cut into so many slices.
        """
        saved = self.model.slices
        if slices == saved:
            return
        in_optimizer = {name for stage in self.model.structure.groups for names in stage for name in names}
        for name, one in self.model.parameters.items():
            if one.split is not None:
                continue
            keys = [WEIGHT]
            if has_states and self.model.local_name(name) in in_optimizer:
                _, states = self.of_parameter(name)
                keys += [MASTER, *(key for key, value in states.items() if isinstance(value, torch.dtype))]
            for key in keys:
                copies = (self._elements(one, key, place, 0, math.prod(one.shape)) for place in range(saved))
                self._require_equal(f"parameter {name!r}" if key == WEIGHT else f"{key} of {name!r}", copies)
        for rows in zip(*map(self.buffers_of, range(saved)), strict=True):
            name, values = rows[0][0], [value for _, value in rows]
            if (split := self.model.structure.splits.get(name)) is None:
                self._require_equal(f"buffer {name!r}", values)
            elif split.dim >= values[0].dim() or values[0].shape[split.dim] * saved % (split.stride * slices):
                raise CheckpointLayoutError(
                    f"the buffer {name!r} {list(values[0].shape)} of {saved} slices cannot become {slices} slices "
                    f"along dimension {split.dim} (stride {split.stride}). Choose another degree of model"
                )

    def _require_equal(self, what: str, copies: Iterable[torch.Tensor]) -> None:
        first, *others = (one.detach().contiguous().view(-1).view(torch.uint8) for one in copies)
        for place, other in enumerate(others, 1):
            if not torch.equal(first, other):
                raise CheckpointLayoutError(
                    f"slices 0 and {place} of model={self.model.slices} hold different values of {what}, which does "
                    "not declare how slices split it: another degree of model would keep slice 0's alone. If slices "
                    "split it, set tensor_model_parallel and partition_dim on it, as Megatron's layers do, and save "
                    "once more. partition_dim of a buffer must be set after deepspeed.initialize, which may replace "
                    "it. Register a buffer that follows from the slice itself with persistent=False"
                )

    def state_dict_of(self, place: int) -> dict[str, torch.Tensor]:
        """Return the state dict of a plain engine's module, of one of the saved slices."""
        slices, found = self.model.slices, {}
        for name, one in self.model.parameters.items():
            elements = self.elements(name, WEIGHT, place, slices, 0, one.numel_of_slice(slices))
            found[name] = elements.view(one.shape_of_slice(slices))
        found.update({alias: found[name] for alias, name in self.model.structure.aliases.items()})
        return {**found, **dict(self.buffers_of(place))}

    def buffers(self, slices: int = 1, place: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the entries beside parameters under the module's names, of one of ``slices`` slices."""
        for rows in zip(*map(self.buffers_of, range(self.model.slices)), strict=True):
            values = [value for _, value in rows]
            is_same, split = slices == self.model.slices, self.model.structure.splits.get(rows[0][0])
            if is_same or split is None:
                yield rows[0][0], values[place if is_same else 0]
            else:
                yield rows[0][0], resliced(values, split.dim, split.stride, slices, place)

    def is_like(self, layout: SavedLayout) -> bool:
        """Return True if a layout has the same numbers of stages, slices and replicas."""
        counts = [(one.model_ranks, one.degrees().get("model", 1), one.replicas) for one in (self.layout, layout)]
        return counts[0] == counts[1]

    def loss_scale(self) -> dict[str, Any]:
        """Return the state of the loss scale; empty if none was saved."""
        if not self.layout.has_partitions:
            return dict(self.model_states(0).get("optimizer") or {})
        scaler = self.first_partition().get("loss_scaler")
        return vars(scaler) if scaler is not None else {}

    def buffers_of(self, place: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the entries beside parameters that a slice saved, under the module's names."""
        parameters = self.model.parameters
        if self.layout.is_pipeline:
            others = {*parameters, *self.model.structure.aliases}
            yield from ((name, value) for name, value in self.module(place).items() if name not in others)
        else:
            names, module = self.model_states(place).get("buffer_names") or (), self.module(place)
            yield from ((name, module[name]) for name in names if name in module)
        for stage, heads in self.model.experts_of_stages.items():  # AutoEP's files have nothing else
            for head, number in ((one, number) for one in heads for number in range(self.model.experts.get(one, 0))):
                file = self.content(self.expert_file(stage * self.model.slices + place, head, number))
                yield from ((name, value) for name, value in file.items() if name not in parameters)
