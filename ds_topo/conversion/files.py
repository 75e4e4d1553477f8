"""DeepSpeed's files of the wanted layout: names, containers and values, with regions for what parameters fill."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ds_topo.conversion.content import FileContent, Piece, Region
from ds_topo.conversion.model import Parameter
from ds_topo.conversion.partitions import FlatGroup, PartitionedGroup, Span, in_sub_groups
from ds_topo.conversion.reading import MASTER, WEIGHT, Source, name_of_partition
from ds_topo.conversion.target import Target, prefix_of_layer
from ds_topo.engine.saved_types import DEEPSPEED_VERSION, fragment, no_loss_scale, zero_stage
from ds_topo.topology.process_topology import ProcessTopology

_SUB_GROUP_SIZE = 1_000_000_000
"""DeepSpeed's default of ``zero_optimization.sub_group_size``."""
_ELEMENTWISE = torch.float32
"""Of master weights and states."""


@dataclass(frozen=True)
class Writer:
    """The files of a target, from those of a source."""

    source: Source
    target: Target

    def files(self) -> Iterator[FileContent]:
        """All of them, in an order that does not change."""
        layout = self.target.layout
        if layout.is_pipeline:
            yield from self._layers()
        for model_rank in range(layout.model_ranks):
            replicas = range(layout.replicas)
            if layout.zero_stage == 3:
                for replica in replicas:
                    name = f"zero_pp_rank_{replica}_mp_rank_{model_rank:02d}_model_states.pt"
                    yield FileContent(name, partial(self._model_states, model_rank, replica))
            else:
                name = f"mp_rank_{model_rank:02d}_model_states.pt"
                yield FileContent(name, partial(self._model_states, model_rank, 0))
            if layout.zero_stage:
                for replica in replicas:
                    name = name_of_partition(layout, model_rank, replica)
                    yield FileContent(name, partial(self._partition, model_rank, replica))
        if self._same_places():
            for name in self.source.files.matching("random_states_*.pt"):
                yield FileContent(name, partial(self.source.files.content, name))

    def _same_places(self) -> bool:
        saved, wanted = self.source.layout, self.target.layout
        places = [(one.model_ranks, one.replicas) for one in (saved, wanted)]
        return places[0] == places[1] and self.source.model.slices == self.target.slices

    # -- the module ----------------------------------------------------------------------------------------------------

    def _layers(self) -> Iterator[FileContent]:
        topology = ProcessTopology.from_spec(self.target.layout.topology or "data=1")
        has_slices = "model" in topology.axes
        for number in range(len(self.source.model.structure.layers)):
            if not self.source.layer_files(number):
                continue
            for place in range(self.target.slices):
                mark = f"-model_{place:02d}" if has_slices else ""
                yield FileContent(f"layer_{number:02d}{mark}-model_states.pt", partial(self._layer, number, place))

    def _layer(self, number: int, place: int) -> Any:
        files = self.source.layer_files(number)
        saved = self.source.files.content(files[place if len(files) == self.target.slices else 0])
        return self._state_dict(saved, prefix_of_layer(self.source.model.structure, number), place)

    def _state_dict(self, saved: Mapping[str, Any], prefix: str, place: int) -> OrderedDict[str, Any]:
        """Of a module: parameters of this slice; buffers as they were saved."""
        parameters, aliases = self.source.model.parameters, self.source.model.structure.aliases
        found: OrderedDict[str, Any] = OrderedDict()
        for key, value in saved.items():
            name = aliases.get(f"{prefix}{key}", f"{prefix}{key}")
            parameter = parameters.get(name)
            found[key] = value if parameter is None else self._weight(parameter, place)
        return found

    def _weight(self, parameter: Parameter, place: int) -> Any:
        dtype = getattr(torch, parameter.dtype)
        if self.target.layout.zero_stage == 3:
            return torch.empty(0, dtype=dtype)
        shape = parameter.shape_of_slice(self.target.slices)
        return Region.of_slice(parameter.name, WEIGHT, place, shape, dtype)

    def _model_states(self, model_rank: int, replica: int) -> dict[str, Any]:
        layout, source = self.target.layout, self.source
        stage, place = divmod(model_rank, self.target.slices)
        same = (source.layout.model_ranks, source.model.slices) == (layout.model_ranks, self.target.slices)
        saved = source.model_states(model_rank if same else 0)
        has_partitions = layout.zero_stage > 0
        module = None
        if not layout.is_pipeline:
            kept = place if source.model.slices == self.target.slices else 0
            module = self._state_dict(source.model_states(kept)["module"], "", place)
        frozen = self._frozen(stage, place, replica) if layout.zero_stage > 1 else (None, None)
        aliases = source.model.structure.aliases
        names = set(self.target.names[stage])
        return {
            **saved,
            "module": module,
            "buffer_names": self._buffers(stage),
            "optimizer": None if has_partitions else self._optimizer(stage, place),
            "param_shapes": self._shapes(stage) if has_partitions else None,
            "frozen_param_shapes": frozen[0],
            "shared_params": {alias: name for alias, name in aliases.items() if name in names}
            if has_partitions
            else None,
            "frozen_param_fragments": frozen[1],
            "dp_world_size": layout.replicas,
            "mp_world_size": layout.model_ranks,
            "checkpoint_parallel_dimensions": {"pp_degree": self.target.stages, "tp_degree": self.target.slices},
            "ds_version": DEEPSPEED_VERSION,
        }

    def _buffers(self, stage: int) -> list[str]:
        source = self.source
        found = dict.fromkeys(
            name
            for first in range(0, source.layout.model_ranks, source.model.slices)
            for name in source.model_states(first).get("buffer_names") or ()
        )
        structure = self.target.structure
        if not structure.layers:
            return list(found)
        own = range(structure.bounds[stage], structure.bounds[stage + 1])
        prefixes = tuple(prefix_of_layer(structure, number) for number in own)
        return [name for name in found if name.startswith(prefixes)]

    def _frozen(self, stage: int, place: int, replica: int) -> tuple[Any, Any]:
        shapes: OrderedDict[str, Any] = OrderedDict()
        fragments: OrderedDict[str, Any] = OrderedDict()
        for name in self.target.names[stage]:
            parameter = self.source.model.parameters[name]
            if parameter.is_trained:
                continue
            shape, dtype = parameter.shape_of_slice(self.target.slices), getattr(torch, parameter.dtype)
            shapes[name] = torch.Size(shape)
            if self.target.layout.zero_stage < 3:
                fragments[name] = Region.of_slice(name, WEIGHT, place, shape, dtype)
                continue
            group = PartitionedGroup({name: shapes[name].numel()}, self.target.layout.replicas)
            fragments[name] = self._region(group.partition_numel, group.spans(replica), WEIGHT, place, dtype)
        return shapes, fragments

    # -- the optimizer -------------------------------------------------------------------------------------------------

    def _optimizer(self, stage: int, place: int) -> dict[str, Any]:
        """Without ZeRO: states as parameters are shaped."""
        parameters, slices = self.source.model.parameters, self.target.slices
        hyperparameters = self._hyperparameters()
        states: dict[int, dict[str, Any]] = {}
        groups: list[dict[str, Any]] = []
        number = 0
        for group, names in enumerate(self.target.structure.groups[stage]):
            kept, first = self._states_of(group), number
            for name in names:
                if kept and parameters[name].is_trained:
                    shape = parameters[name].shape_of_slice(slices)
                    states[number] = {
                        key: Region.of_slice(name, key, place, shape, _ELEMENTWISE) if value is None else _copy(value)
                        for key, value in kept.items()
                    }
                number += 1
            groups.append({**hyperparameters[group], "params": list(range(first, number))})
        return {"state": states, "param_groups": groups}

    def _hyperparameters(self) -> list[dict[str, Any]]:
        return self.source.states(0).hyperparameters()

    def _states_of(self, group: int) -> dict[str, Any]:
        return self.source.states(0).of_group(group)

    def _flat_groups(self, stage: int) -> list[FlatGroup]:
        """ZeRO 1 and 2."""
        options = self._zero_options()
        aligned = bool(options.get("parameter_alignment", False))
        found = []
        for names in self.target.structure.groups[stage]:
            trained = self._trained(names)
            size = getattr(torch, self.source.model.parameters[trained[0]].dtype).itemsize
            found.append(
                FlatGroup.of(
                    self._numels(trained),
                    self.target.layout.replicas,
                    round_robin=bool(options.get("round_robin_gradients", False)),
                    aligned_element_bytes=size if aligned else 0,
                )
            )
        return found

    def _sub_groups(self, stage: int) -> tuple[list[PartitionedGroup], list[list[int]]]:
        """ZeRO 3: all sub-groups, and which of them are of which group."""
        limit = int(self._zero_options().get("sub_group_size", _SUB_GROUP_SIZE))
        replicas = self.target.layout.replicas
        found: list[PartitionedGroup] = []
        numbers: list[list[int]] = []
        for names in self.target.structure.groups[stage]:
            trained = self._trained(names)
            parts = in_sub_groups(trained, self._numels(trained), replicas, limit)
            numbers.append(list(range(len(found), len(found) + len(parts))))
            found += [PartitionedGroup(self._numels(part), replicas) for part in parts]
        return found, numbers

    def _trained(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if self.source.model.parameters[name].is_trained]

    def _numels(self, names: Sequence[str]) -> dict[str, int]:
        return {name: self.source.model.parameters[name].numel_of_slice(self.target.slices) for name in names}

    def _zero_options(self) -> Mapping[str, Any]:
        config = self.source.model_states(0).get("ds_config")
        options = config.get("zero_optimization", {}) if isinstance(config, dict) else {}
        return options if isinstance(options, dict) else {}

    def _shapes(self, stage: int) -> list[OrderedDict[str, Any]]:
        groups: Sequence[FlatGroup | PartitionedGroup]
        groups = self._sub_groups(stage)[0] if self.target.layout.zero_stage == 3 else self._flat_groups(stage)
        parameters, slices = self.source.model.parameters, self.target.slices
        return [
            OrderedDict((name, torch.Size(parameters[name].shape_of_slice(slices))) for name in group.numels)
            for group in groups
        ]

    def _partition(self, model_rank: int, replica: int) -> dict[str, Any]:
        stage, place = divmod(model_rank, self.target.slices)
        make = self._of_parameters if self.target.layout.zero_stage == 3 else self._of_vectors
        return {
            "optimizer_state_dict": {**self._scaling(), **make(stage, place, replica)},
            "ds_config": self.source.model_states(0).get("ds_config"),
            "ds_version": DEEPSPEED_VERSION,
        }

    def _scaling(self) -> dict[str, Any]:
        """How losses are scaled, and gradients clipped, where it was saved."""
        kept = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
        if not self.source.layout.zero_stage:
            return {"loss_scaler": no_loss_scale(), "dynamic_loss_scale": False, "overflow": False}
        saved = self.source.optimizer_file(0, 0)["optimizer_state_dict"]
        return {key: saved[key] for key in kept if key in saved}

    def _of_vectors(self, stage: int, place: int, replica: int) -> dict[str, Any]:
        groups, hyperparameters = self._flat_groups(stage), self._hyperparameters()
        spans = [group.spans(replica) for group in groups]
        sizes = [group.partition_numel for group in groups]
        paddings = [group.padding(replica) for group in groups]
        return {
            "base_optimizer_state": {
                "state": self._states(range(len(groups)), sizes, spans, place),
                "param_groups": [{**one, "params": [number]} for number, one in enumerate(hyperparameters)],
            },
            "single_partition_of_fp32_groups": [
                self._region(size - padding, own, MASTER, place)
                for size, padding, own in zip(sizes, paddings, spans, strict=True)
            ],
            "zero_stage": zero_stage(self.target.layout.zero_stage),
            "group_paddings": paddings,
            "param_alignment_paddings": [list(group.paddings) for group in groups],
            "partition_count": [self.target.layout.replicas] * len(groups),
            "ds_version": DEEPSPEED_VERSION,
            "param_slice_mappings": [
                OrderedDict((span.name, fragment(span.stop - span.start, span.offset)) for span in own) for own in spans
            ],
        }

    def _of_parameters(self, stage: int, place: int, replica: int) -> dict[str, Any]:
        groups, numbers = self._sub_groups(stage)
        spans = [group.spans(replica) for group in groups]
        sizes = [group.partition_numel for group in groups]
        group_of = [group for group, own in enumerate(numbers) for _ in own]
        hyperparameters = self._hyperparameters()
        return {
            "zero_stage": zero_stage(3),
            "partition_count": self.target.layout.replicas,
            "optimizer_state_dict": {
                "state": self._states(group_of, sizes, spans, place),
                "param_groups": [{**one, "params": own} for one, own in zip(hyperparameters, numbers, strict=True)],
            },
            "fp32_flat_groups": [
                self._region(size, own, MASTER, place) for size, own in zip(sizes, spans, strict=True)
            ],
        }

    def _states(
        self, group_of: Sequence[int], sizes: Sequence[int], spans: Sequence[Sequence[Span]], place: int
    ) -> dict[int, dict[str, Any]]:
        found = {}
        for number, group in enumerate(group_of):
            if kept := self._states_of(group):
                found[number] = {
                    key: self._region(sizes[number], spans[number], key, place) if value is None else _copy(value)
                    for key, value in kept.items()
                }
        return found

    def _region(
        self, numel: int, spans: Sequence[Span], key: str, place: int, dtype: torch.dtype = _ELEMENTWISE
    ) -> Region:
        pieces = (Piece(span.name, key, place, span.offset, span.start, span.stop) for span in spans)
        return Region((numel,), dtype, tuple(pieces))


def _copy(value: Any) -> Any:
    """Of its own, so that no two tensors of a file share memory."""
    return value.clone() if torch.is_tensor(value) else value
