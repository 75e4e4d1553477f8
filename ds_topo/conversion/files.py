"""DeepSpeed's files of the wanted layout: names, containers and values, with regions for what parameters fill."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from ds_topo.conversion.content import FileContent, Piece, Region
from ds_topo.conversion.experts import Place, head_of
from ds_topo.conversion.model import Parameter
from ds_topo.conversion.optimizer_files import OptimizerWriter
from ds_topo.conversion.partitions import PartitionedGroup
from ds_topo.conversion.reading import WEIGHT, Source, name_of_expert, name_of_optimizer, name_of_partition
from ds_topo.conversion.stages import prefix_of_layer
from ds_topo.conversion.target import Target
from ds_topo.engine.checkpoints.saved_types import DEEPSPEED_VERSION
from ds_topo.topology.process_topology import ProcessTopology


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
                    yield FileContent(name, partial(self._optimizer.partition, model_rank, replica))
            if layout.experts:
                yield from self._experts(model_rank)
        if self._same_places():
            for name in self.source.files.matching("random_states_*.pt"):
                yield FileContent(name, partial(self.source.files.content, name))

    def bytes(self) -> int:
        """What they take, about: without paddings, and what is not tensors."""
        layout, slices = self.target.layout, self.target.slices
        stages = Counter(name for names in self.target.names for name in names)
        of_states = self._optimizer.bytes_of_element()
        optimizers = 1  # in which a parameter is
        if layout.experts and not layout.zero_stage:
            optimizers += max(self.target.experts) // slices
        total = 0
        for name, one in self.source.model.parameters.items():
            copies = stages[name] * (1 if one.experts and one.split is None else slices)
            weight = 0 if layout.zero_stage == 3 and one.is_trained else getattr(torch, one.dtype).itemsize
            states = of_states * (1 if one.experts else optimizers) if one.is_trained else 0
            total += copies * one.numel_of_slice(slices) * (weight + states)
        return total

    def _same_places(self) -> bool:
        saved, wanted = self.source.layout, self.target.layout
        places = [(one.model_ranks, one.replicas) for one in (saved, wanted)]
        return places[0] == places[1] and self.source.model.slices == self.target.slices

    @cached_property
    def _optimizer(self) -> OptimizerWriter:
        return OptimizerWriter(self.source, self.target)

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

    def _experts(self, model_rank: int) -> Iterator[FileContent]:
        """Those that ranks of a model rank have, and without ZeRO the optimizers of these ranks."""
        structure, model = self.target.structure, self.source.model
        for head, layer in self.source.layers_of_experts.items():
            count, size = model.experts[head], structure.experts[head]
            places = self.target.experts[size]
            for number in range(count):
                if places.own_holder(model_rank, number // (count // size)) is not None:
                    name = name_of_expert(layer, number, model_rank)
                    yield FileContent(name, partial(self._expert, model_rank, head, number))
        if self.target.layout.zero_stage:
            return
        greatest = max(self.target.experts)
        for part in range(greatest):
            if (place := self.target.experts[greatest].own_holder(model_rank, part)) is not None:
                yield FileContent(name_of_optimizer(part, model_rank), partial(self._optimizer_of_experts, place))

    def _expert(self, model_rank: int, head: str, number: int) -> Any:
        stage, part = divmod(model_rank, self.target.slices)
        saved = self.source.expert_file(stage * self.source.model.slices, head, number)
        return self._state_dict(saved, "", part)

    def _optimizer_of_experts(self, place: Place) -> Any:
        return {"optimizer": self._optimizer.whole(place)}

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
        frozen = self._frozen(Place(model_rank, replica)) if layout.zero_stage > 1 else (None, None)
        aliases = source.model.structure.aliases
        names = set(self.target.names[stage])
        return {
            **saved,
            "module": module,
            "buffer_names": self._buffers(stage),
            "optimizer": None if has_partitions else self._optimizer.whole(Place(model_rank, 0)),
            "param_shapes": self._optimizer.shapes(Place(model_rank, 0)) if has_partitions else None,
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

    def _frozen(self, of: Place) -> tuple[Any, Any]:
        stage, place = divmod(of.model_rank, self.target.slices)
        model, structure = self.source.model, self.target.structure
        shapes: OrderedDict[str, Any] = OrderedDict()
        fragments: OrderedDict[str, Any] = OrderedDict()
        for name in self.target.names[stage]:
            parameter = self.source.model.parameters[name]
            if parameter.is_trained or not self._has(of, parameter):
                continue
            name = model.local_name(parameter.name, structure)
            shape, dtype = parameter.shape_of_slice(self.target.slices), getattr(torch, parameter.dtype)
            shapes[name] = torch.Size(shape)
            if self.target.layout.zero_stage < 3:
                fragments[name] = Region.of_slice(parameter.name, WEIGHT, place, shape, dtype)
                continue
            group = PartitionedGroup({name: shapes[name].numel()}, self.target.layout.replicas)
            pieces = [
                Piece(name, WEIGHT, place, span.offset, span.start, span.stop) for span in group.spans(of.replica)
            ]
            fragments[name] = Region((group.partition_numel,), dtype, tuple(pieces))
        return shapes, fragments

    def _has(self, place: Place, parameter: Parameter) -> bool:
        if not parameter.experts:
            return True
        structure = self.target.structure
        places = self.target.experts[structure.experts[head_of(parameter.name)]]
        return places.part_of[place] == self.source.model.part_of(parameter.name, structure)
