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
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ds_topo.checkpoint.manifest import Place, SavedLayout, SavedOptions
from ds_topo.checkpoint.safe_reading import allowed_types, damaged, how_to_verify
from ds_topo.checkpoint.saved_model import (
    Parameter,
    RankTable,
    SavedModel,
    expert_of,
    layer_of_experts,
    prefix_of_layer,
)
from ds_topo.checkpoint.shards import FlatGroup, PartitionedGroup, Slice, Span, elements_of_slice, resliced, vectors_of
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
        is_there = key in content if isinstance(content, Mapping) else isinstance(content, (list, tuple))
        if not is_there or (not isinstance(content, Mapping) and not 0 <= key < len(content)):
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


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return the first key whose values differ, abridged for a message; an empty string if none does."""
    for key in {**one, **other}:
        value, there = one.get(key), other.get(key)
        alike = torch.equal(value, there) if torch.is_tensor(value) and torch.is_tensor(there) else value == there
        if not alike or (key in one) != (key in other):
            return abridged(key)
    return ""


class OptimizerStates:
    """Optimizer states and master weights of ranks that hold the same parameters, by local names.

    They are stored in *vectors*. Without ZeRO each parameter has its own vector. With ZeRO several parameters share
    one, and every replica has a partition of it. Stages 1 and 2 have one vector for each group, and their files record
    the offsets of parameters. Stage 3 has one vector for each sub-group.
    """

    def __init__(self, source: Source, holders: tuple[Place, ...]) -> None:
        model, layout, self._folder = source.model, source.layout, source.folder
        self._spans: dict[str, list[tuple[int, int, Span]]] = defaultdict(list)
        """The replica, the number of the vector and the span of each part of a parameter, in the order of elements."""
        self._numels: dict[int, int] = {}
        """Number of elements in a partition of each vector."""
        self._masters: list[dict[int, torch.Tensor]] = []
        """Partitions of the master weights, by replica and vector."""
        if not layout.has_partitions:
            saved = source.optimizer_of(holders)
            inner = [saved.get("optimizer_state_dict", saved)]
            groups = model.structure.groups[holders[0].model_rank // model.slices]
            numels = {name: source.numel_of(name, holders[0]) for group in groups for name in group}
            numbers = [number for group in inner[0]["param_groups"] for number in group["params"]]
            source.require(len(numbers) == len(groups if FLAT_MASTERS in saved else numels), "groups of the optimizer")
            if FLAT_MASTERS in saved:  # half precision with one vector for each group
                self._masters = [dict(zip(numbers, saved[FLAT_MASTERS], strict=True))]
                vectors = [FlatGroup({name: numels[name] for name in group}, 1) for group in groups]
            else:
                copies = [master for group in saved.get(COPIED_MASTERS, ()) for master in group]
                self._masters = [dict(zip(numbers, copies, strict=True))] if copies else []
                vectors = [FlatGroup({name: numel}, 1) for name, numel in numels.items()]
            for number, vector in zip(numbers, vectors, strict=True):
                self._numels[number] = vector.numel
                for span in vector.spans(0):
                    self._spans[span.name].append((0, number, span))
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
            self._masters = [dict(enumerate(source.entry(name, "optimizer_state_dict", key))) for name in names]
            if is_stage_3:
                shapes = source.entry(name_of_model_states(layout, holders[0].model_rank), "param_shapes")
                self._locate_in_sub_groups(shapes, len(holders))
            else:
                groups = model.structure.groups[holders[0].model_rank // model.slices]
                self._locate_in_groups(source, holders, groups)
        self.param_groups: list[dict[str, Any]] = inner[0]["param_groups"]
        self._states: list[dict[int, dict[str, Any]]] = [one["state"] for one in inner]
        self._group_of = {number: group for group, one in enumerate(self.param_groups) for number in one["params"]}
        unknown = sorted(self._numels.keys() - self._group_of.keys())
        source.require(not unknown, f"vectors {unknown} of the optimizer")
        for one in self._masters:
            sizes = {number: vector.numel() for number, vector in one.items()}
            short = [number for number, numel in self._numels.items() if sizes.get(number, -1) > numel]
            source.require(not short, f"sizes of vectors {short} of the optimizer")

    def _locate_in_groups(self, source: Source, holders: Sequence[Place], groups: Sequence[Sequence[str]]) -> None:
        """Compute the spans: the files have ``param_slice_mappings``, which ignore ``round_robin_gradients``."""
        for number, names in enumerate(groups):
            members = [source.model.parameters[source.ranks.whole_name(name, holders[0])] for name in names]
            numels = {name: math.prod(one.shape) for name, one in zip(names, members, strict=True)}
            itemsize = members[0].dtype.itemsize if members else 1
            own = source.ranks.sharers(members[0].name, holders[0]) if members else holders
            for group in vectors_of(numels, source.layout, source.options, len(own), itemsize):
                self._numels[number] = group.partition_numel
                for replica in range(len(own) if own == holders else 0):  # other ranks hold the other groups
                    for span in group.spans(replica):
                        self._spans[span.name].append((replica, number, span))

    def _locate_in_sub_groups(self, shapes: Sequence[Mapping[str, Sequence[int]]], replicas: int) -> None:
        for number, of_group in enumerate(shapes):
            group = PartitionedGroup({name: math.prod(shape) for name, shape in of_group.items()}, replicas)
            self._numels[number] = group.partition_numel
            for replica in range(replicas):
                for span in group.spans(replica):
                    self._spans[span.name].append((replica, number, span))

    def of_group(self, group: int) -> dict[str, Any]:
        """Return the states of a group: the data type of a state of every element, otherwise the value."""
        found: dict[str, Any] = {}
        first = 0
        for number in self.param_groups[group]["params"]:
            one = self._of_vector(number, group)
            if found and one and (key := differing(one, found)):
                names = {parts[0][1]: name for name, parts in self._spans.items()}
                raise CheckpointLayoutError(
                    f"{names[first]!r} and {names[number]!r} have different values or types of {key} in the optimizer, "
                    "and ZeRO keeps one for all parameters of a group. Put the two into different groups, or load the "
                    "checkpoint in the layout that saved it"
                )
            if one and not found:
                found, first = one, number
        return found

    def _of_vector(self, number: int, group: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in self._states[0].get(number, {}).items():
            is_elementwise = torch.is_tensor(value) and value.dim() > 0 and value.numel() == self._numels[number]
            if torch.is_tensor(value) and value.numel() > 1 and not is_elementwise:
                raise CheckpointLayoutError(
                    f"the optimizer's state {key!r} of group {group} has the shape {list(value.shape)} for "
                    f"{self._numels[number]} elements. Only states of every element, and single values, can be "
                    "converted. Load the checkpoint in the layout that saved it"
                )
            found[key] = value.dtype if is_elementwise else value
        return found

    def of_parameter(self, name: str) -> tuple[int, dict[str, Any]]:
        """Return the group of a parameter and its states: the data type of a state of every element, or the value."""
        _, number, _ = self._spans[name][0]
        return self._group_of[number], self._of_vector(number, self._group_of[number])

    @property
    def type_of_masters(self) -> torch.dtype:
        """The data type of master weights."""
        return next(iter(self._masters[0].values())).dtype

    def of(self, name: str, key: str, start: int, stop: int) -> torch.Tensor | None:
        """Return elements of a state or master weight, flat; None if the parameter never had a gradient."""
        spans, parts = self._spans[name], []
        first = bisect_right(spans, start, key=lambda one: one[2].start) - 1
        for replica, number, span in spans[first : bisect_left(spans, stop, key=lambda one: one[2].start)]:
            if key == MASTER:
                vector = self._masters[replica][number]
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

    def __init__(self, model: SavedModel, folder: Path) -> None:
        self.model, self.layout, self.folder = model, model.layout, folder
        self.ranks = RankTable(model, model.layout, model.structure)
        self._open: dict[str, dict[str, Any]] = {}
        self._states: dict[tuple[Place, ...], OptimizerStates] = {}
        self._of_groups: dict[tuple[int, int], dict[str, Any]] = {}
        self._lock = threading.RLock()

    @cached_property
    def options(self) -> SavedOptions:
        """The options of ZeRO with which the files were written."""
        if self.model.structure.options is not None:
            return self.model.structure.options
        config = self.model_states(0).get("ds_config")  # an earlier release did not record them in the manifest
        given = config.get("zero_optimization") if isinstance(config, dict) else None
        known = given if isinstance(given, dict) else {}
        return SavedOptions(**{key: known[key] for key in asdict(SavedOptions()) if key in known})

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
        parameter, saved = self.model.parameters[name], self.model.slices
        first, split = self.model.stage_of[name] * saved, parameter.split
        if parameter.is_stacked:
            return self._of_stacked(first, parameter, key, place, slices, start, stop)
        if parameter.padded is not None:
            return self._padded(parameter, key, parameter.numel_of_slice(slices) * place, start, stop)
        if slices == saved or split is None:
            return self._elements(first + (place if slices == saved else 0), parameter, key, start, stop)

        def read(number: int, low: int, high: int) -> torch.Tensor:
            return self._elements(first + number, parameter, key, low, high)

        wanted = Slice(parameter.shape_of_slice(slices), split.dim, slices, place, split.stride)
        return elements_of_slice(read, wanted, saved, start, stop)

    def _of_stacked(
        self, model_rank: int, parameter: Parameter, key: str, place: int, parts: int, start: int, stop: int
    ) -> torch.Tensor:
        """Return elements of a part of the experts that AutoEP stacks."""

        def read(part: int, low: int, high: int) -> torch.Tensor:
            return self._elements(model_rank, parameter, key, low, high, part)

        wanted = Slice(parameter.shape_of_slice(parts), 0, parts, place)
        return elements_of_slice(read, wanted, parameter.slices, start, stop)

    def _padded(self, parameter: Parameter, key: str, base: int, start: int, stop: int) -> torch.Tensor:
        """Return elements from ``base`` on of a parameter with another padding, which is zero."""
        assert parameter.split is not None
        first, numel = self.model.stage_of[parameter.name] * self.model.slices, math.prod(parameter.shape)
        low, end = base + start, min(base + stop, (parameter.split.real or 0) * math.prod(parameter.shape[1:]))
        parts = [self._elements(first, parameter, key, 0, 1)[:0]]  # of the right type
        while low < end:
            number, offset = divmod(low, numel)
            until = min(end, (number + 1) * numel)
            parts.append(self._elements(first + number, parameter, key, offset, offset + until - low))
            low = until
        return torch.cat([*parts, parts[0].new_zeros(stop - start - sum(map(len, parts)))])

    def numel_of(self, local: str, place: Place) -> int:
        """Return the number of elements of a rank's parameter, by its local name."""
        return math.prod(self.model.parameters[self.ranks.whole_name(local, place)].shape)

    def of_parameter(self, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the hyperparameters of a parameter's group, and its states, from the rank that holds its beginning.

        A state of every element is given by its data type. The states of a parameter without gradients are empty.
        """
        model_rank = self.model.stage_of[name] * self.model.slices
        states = self._states_of(self.ranks.holders(model_rank, name))
        group, found = states.of_parameter(self.ranks.local_name(name))
        return states.param_groups[group], found

    def hyperparameters(self, stage: int) -> list[dict[str, Any]]:
        """Return the hyperparameters of every group of the optimizer of a stage."""
        names = ("params", "param_names")
        groups = self._of_stage(stage).param_groups
        return [{key: value for key, value in group.items() if key not in names} for group in groups]

    def states_of_group(self, stage: int, group: int) -> dict[str, Any]:
        """Return the states of a group of a stage: the type of a state of every element, otherwise the value."""
        if (stage, group) not in self._of_groups:
            self._of_groups[stage, group] = self._of_stage(stage).of_group(group)
        return self._of_groups[stage, group]

    def _of_stage(self, stage: int) -> OptimizerStates:
        return self._states_of(self.ranks.holders(stage * self.model.slices, ""))

    @cached_property
    def type_of_masters(self) -> torch.dtype:
        """The data type of master weights."""
        if not self.layout.has_partitions and self.layout.precision == "fp32":
            return torch.float32
        return self._of_stage(0).type_of_masters

    def _states_of(self, holders: tuple[Place, ...]) -> OptimizerStates:
        with self._lock:
            if holders not in self._states:
                self._states[holders] = OptimizerStates(self, holders)
            return self._states[holders]

    def _elements(
        self, model_rank: int, parameter: Parameter, key: str, start: int, stop: int, part: int = 0
    ) -> torch.Tensor:
        """Return elements of a slice, or of a part of the experts, that was saved."""
        has_masters = self.layout.has_partitions or self.layout.precision != "fp32"
        is_weight = key == WEIGHT or (key == MASTER and not (has_masters and parameter.is_trained))
        if is_weight and parameter.is_stacked:
            return self._stacked_weight(model_rank, parameter, part, start, stop)
        if is_weight and (self.layout.zero_stage < 3 or not parameter.is_trained):
            return self._weight(model_rank, parameter).detach().reshape(-1)[start:stop]
        states = self._states_of(self.ranks.holders(model_rank, parameter.name, part))
        elements = states.of(self.ranks.local_name(parameter.name), MASTER if is_weight else key, start, stop)
        if elements is None:
            return torch.zeros(stop - start)
        return elements.to(parameter.dtype) if is_weight else elements

    def _stacked_weight(self, model_rank: int, parameter: Parameter, part: int, start: int, stop: int) -> torch.Tensor:
        """Return elements of the stacked weights of the experts of a part, which have a file each."""
        name, held = parameter.name, parameter.shape[0]
        numel, layers = math.prod(parameter.shape[1:]), self.model.experts_of_stages[model_rank // self.model.slices]
        layer, holders = layers.index(layer_of_experts(name)), self.ranks.holders(model_rank, name, part)
        first, weights = start // numel, []
        for number in range(part * held + first, part * held + -(-stop // numel)):
            file = self._first(name_of_expert(layer, number, place.model_rank) for place in holders)
            weights.append(self.content(file)[f"{name}.{number}"].detach().reshape(-1))
        return torch.cat(weights)[start - first * numel : stop - first * numel]

    def _weight(self, model_rank: int, parameter: Parameter) -> torch.Tensor:
        weight: torch.Tensor
        name = parameter.name
        if (expert := expert_of(name)) is not None and parameter.experts:
            weight = self.entry(self.expert_file(model_rank, expert.head, expert.number), name)
        elif self.has_layer_files(model_rank):
            number, key = entry_of(self._in_layers, self.folder / "layer_*", name)
            weight = self.entry(self.layer_files[number][model_rank % self.model.slices], key)
        elif self.layout.zero_stage == 3:  # frozen
            files = [name_of_model_states(self.layout, model_rank, place) for place in range(self.layout.partitions)]
            weight = torch.cat([self.entry(file, "frozen_param_fragments", name).flatten() for file in files])
            weight = weight[: math.prod(parameter.shape)]
        else:
            weight = self.entry(name_of_model_states(self.layout, model_rank), "module", name)
        self.require(torch.is_tensor(weight) and weight.numel() == math.prod(parameter.shape), f"the size of {name!r}")
        return weight

    def model_states(self, model_rank: int, replica: int = 0) -> dict[str, Any]:
        """Return the file of the module and the engine."""
        return self.content(name_of_model_states(self.layout, model_rank, replica))

    def optimizer_file(self, place: Place) -> dict[str, Any]:
        """Return the file of a partition of ZeRO."""
        return self.content(name_of_partition(self.layout, place))

    def optimizer_of(self, holders: tuple[Place, ...]) -> dict[str, Any]:
        """Return the state that an optimizer without ZeRO saved on one of these ranks."""
        if holders[0].model_rank // self.model.slices not in self.model.experts_of_stages:
            content = self.model_states(holders[0].model_rank)
        else:
            parts = self.ranks.parts[max(self.ranks.parts)]
            content = self.content(self._first(name_of_optimizer(parts[one], one.model_rank) for one in holders))
        return dict(entry_of(content, self.folder / "the optimizer's file", "optimizer"))

    def expert_file(self, model_rank: int, head: str, number: int) -> str:
        """Return the name of the file with the weights of an expert, or of a slice of it."""
        layer = self.model.experts_of_stages[model_rank // self.model.slices].index(head)
        holders = self.ranks.expert_holders(model_rank, head, number)
        return self._first(name_of_expert(layer, number, place.model_rank) for place in holders)

    def _first(self, names: Iterable[str]) -> str:
        """Return the first file that exists: only one of the ranks that hold the same content writes it."""
        candidates = list(dict.fromkeys(names))
        return next((name for name in candidates if (self.folder / name).exists()), candidates[0])

    def has_layer_files(self, model_rank: int) -> bool:
        """Return True if a pipeline's stage saved a file for each layer, which it does not with experts."""
        return self.layout.is_pipeline and model_rank // self.model.slices not in self.model.experts_of_stages

    def layer(self, number: int) -> list[Mapping[str, Any]]:
        """Return the state dict of a layer of a pipeline on each slice, without experts.

        It is in files of its own, or in those of a stage with experts. A layer that is a function, or another use of a
        tied layer, has none.
        """
        if files := self.layer_files[number]:
            return [self.content(file) for file in files]
        structure, slices, prefix = (
            self.model.structure,
            self.model.slices,
            prefix_of_layer(self.model.structure, number),
        )
        for stage in self.model.experts_of_stages:
            if number in structure.layers_of(stage, len(structure.groups)):
                modules = [self.model_states(stage * slices + place)["module"] for place in range(slices)]
                entries = [{key: one for key, one in module.items() if key.startswith(prefix)} for module in modules]
                return [{key.removeprefix(prefix): one for key, one in own.items()} for own in entries if own]
        return []

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

    @cached_property
    def _in_layers(self) -> dict[str, tuple[int, str]]:
        """The layer whose file holds each entry of a pipeline's state dict, and its key there."""
        found: dict[str, tuple[int, str]] = {}
        for number, files in enumerate(self.layer_files):
            for key in self.content(files[0]) if files else ():
                found.setdefault(f"{prefix_of_layer(self.model.structure, number)}{key}", (number, key))
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
            if has_states and self.ranks.local_name(name) in in_optimizer:
                _, states = self.of_parameter(name)
                keys += [MASTER, *(key for key, value in states.items() if isinstance(value, torch.dtype))]
            first = self.model.stage_of[name] * saved
            for key in keys:
                copies = (self._elements(first + place, one, key, 0, math.prod(one.shape)) for place in range(saved))
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
        scaler = self.optimizer_file(Place(0, 0))["optimizer_state_dict"].get("loss_scaler")
        return vars(scaler) if scaler is not None else {}

    def buffers_of(self, place: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the entries beside parameters that a slice saved, under the module's names."""
        parameters = self.model.parameters
        for name, (number, key) in self._in_layers.items() if self.layout.is_pipeline else ():
            if name not in parameters:
                yield name, self.content(self.layer_files[number][place])[key]
        for first in range(0, self.layout.model_ranks, self.model.slices):
            if self.has_layer_files(first):
                continue
            states = self.model_states(first + place)
            names = states.get("buffer_names") or ()
            yield from ((name, states["module"][name]) for name in names if name in states["module"])
        for stage, heads in self.model.experts_of_stages.items():  # AutoEP's files have nothing else
            for head, number in ((one, number) for one in heads for number in range(self.model.experts.get(one, 0))):
                file = self.content(self.expert_file(stage * self.model.slices + place, head, number))
                yield from ((name, value) for name, value in file.items() if name not in parameters)
