"""What DeepSpeed's files have of the optimizer in the wanted layout, with regions for what parameters fill."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ds_topo.checkpoint_files.manifest import BF16_OPTIMIZER
from ds_topo.conversion.content import Piece, Region
from ds_topo.conversion.experts import Place, head_of
from ds_topo.conversion.partitions import FlatGroup, PartitionedGroup, Span, in_sub_groups
from ds_topo.conversion.reading import Source
from ds_topo.conversion.states import MASTER, differing
from ds_topo.conversion.target import Target
from ds_topo.engine.checkpoints.saved_types import DEEPSPEED_VERSION, fragment, no_loss_scale, zero_stage
from ds_topo.errors import CheckpointLayoutError
from ds_topo.topology.expert_tables import name_of_size

_SUB_GROUP_SIZE = 1_000_000_000
"""DeepSpeed's default of ``zero_optimization.sub_group_size``."""
_ELEMENTWISE = torch.float32
"""Of master weights and states."""


@dataclass(frozen=True)
class OptimizerWriter:
    """Optimizers of the ranks of a target, from those of a source."""

    source: Source
    target: Target
    _known_groups: dict[Any, list[FlatGroup]] = field(default_factory=dict)
    _known_sub_groups: dict[int, tuple[list[PartitionedGroup], list[list[int]]]] = field(default_factory=dict)

    def bytes_of_element(self) -> int:
        """Of the states and the master weight of an element that is trained: as in the first group."""
        states = [value for value in self.source.states_of_groups[0].values() if value is None]
        return _ELEMENTWISE.itemsize * (len(states) + self.target.layout.has_partitions)

    def whole(self, place: Place) -> dict[str, Any]:
        """Without ZeRO: states as parameters are shaped."""
        model, slices = self.source.model, self.target.slices
        stage, number_of_slice = divmod(place.model_rank, slices)
        states: dict[int, dict[str, Any]] = {}
        groups: list[dict[str, Any]] = []
        number = 0
        hyperparameters = self._hyperparameters()
        for group, local in enumerate(self.target.structure.groups[stage]):
            kept, first = self._states_of(group), number
            for name in self.target.whole_names(model, local, place):
                if kept and model.parameters[name].is_trained:
                    shape = model.parameters[name].shape_of_slice(slices)
                    states[number] = {
                        key: Region.of_slice(name, key, number_of_slice, shape, _ELEMENTWISE)
                        if value is None
                        else _copy(value)
                        for key, value in kept.items()
                    }
                number += 1
            groups.append({**hyperparameters[group], "params": list(range(first, number))})
        return {"state": states, "param_groups": groups}

    def partition(self, model_rank: int, replica: int) -> dict[str, Any]:
        """With ZeRO: the file of a rank."""
        make = self._of_parameters if self.target.layout.zero_stage == 3 else self._of_vectors
        return {
            "optimizer_state_dict": {**self._scaling(), **make(Place(model_rank, replica))},
            "ds_config": self.source.model_states(0).get("ds_config"),
            "ds_version": DEEPSPEED_VERSION,
        }

    def shapes(self, place: Place) -> list[OrderedDict[str, Any]]:
        """Of the parameters of every group of ZeRO's."""
        model, slices = self.source.model, self.target.slices
        groups: Sequence[Sequence[str]]
        if self.target.layout.zero_stage == 3:
            groups = [list(group.numels) for group in self._sub_groups(place.model_rank // slices)[0]]
        else:
            groups = [self._local(group.numels) for group in self._flat_groups(place)]
        return [
            OrderedDict((name, torch.Size(model.parameters[name].shape_of_slice(slices))) for name in names)
            for names in groups
        ]

    # -- groups --------------------------------------------------------------------------------------------------------

    def _hyperparameters(self) -> list[dict[str, Any]]:
        saved = self.source.hyperparameters
        return [
            {**_one_of([saved[number] for number in numbers]), **self._name_of_experts(group, saved[numbers[0]])}
            for group, numbers in enumerate(self.target.origins)
        ]

    def _name_of_experts(self, group: int, saved: Mapping[str, Any]) -> dict[str, Any]:
        if not saved.get("moe"):
            return {}
        return {"name": name_of_size(self.target.structure.experts[head_of(self.target.structure.groups[0][group][0])])}

    def _states_of(self, group: int) -> dict[str, Any]:
        return _one_of([self.source.states_of_groups[number] for number in self.target.origins[group]])

    def _flat_groups(self, place: Place) -> list[FlatGroup]:
        """ZeRO 1 and 2: alike for all ranks that have the same parameters."""
        parts = tuple(places.part_of[place] for places in self.target.experts.values())
        known = place.model_rank // self.target.slices, parts
        if known not in self._known_groups:
            self._known_groups[known] = self._laid_out(place)
        return self._known_groups[known]

    def _laid_out(self, place: Place) -> list[FlatGroup]:
        options = {} if self._is_bf16 else self._zero_options()
        aligned = bool(options.get("parameter_alignment", False))
        found = []
        for local in self.target.structure.groups[place.model_rank // self.target.slices]:
            names = self._trained(self.target.whole_names(self.source.model, local, place))
            size = getattr(torch, self.source.model.parameters[names[0]].dtype).itemsize
            head = head_of(names[0])
            found.append(
                FlatGroup.of(
                    self._numels(names),
                    self._places(head).copies if head else self.target.layout.replicas,
                    round_robin=bool(options.get("round_robin_gradients", False)),
                    aligned_element_bytes=size if aligned else 0,
                )
            )
        return found

    def _places(self, head: str) -> Any:
        return self.target.experts[self.target.structure.experts[head]]

    def _local(self, names: Mapping[str, int]) -> list[str]:
        return [self.source.model.local_name(name, self.target.structure) for name in names]

    def _sub_groups(self, stage: int) -> tuple[list[PartitionedGroup], list[list[int]]]:
        """ZeRO 3: all sub-groups, and which of them are of which group."""
        if stage not in self._known_sub_groups:
            self._known_sub_groups[stage] = self._divided(stage)
        return self._known_sub_groups[stage]

    def _divided(self, stage: int) -> tuple[list[PartitionedGroup], list[list[int]]]:
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

    # -- partitions ----------------------------------------------------------------------------------------------------

    def _scaling(self) -> dict[str, Any]:
        """How losses are scaled, and gradients clipped, where it was saved."""
        kept = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
        saved: dict[str, Any] = {}
        if self.source.layout.has_partitions:
            saved = self.source.optimizer_file(Place(0, 0))["optimizer_state_dict"]
        unscaled = {"loss_scaler": no_loss_scale(), "dynamic_loss_scale": False, "overflow": False}
        return {**unscaled, **{key: saved[key] for key in kept if key in saved}}

    def _of_vectors(self, place: Place) -> dict[str, Any]:
        groups, hyperparameters = self._flat_groups(place), self._hyperparameters()
        own = [self._number_of_partition(group, place) for group in groups]
        spans = [group.spans(number) for group, number in zip(groups, own, strict=True)]
        sizes = [group.partition_numel for group in groups]
        paddings, lengths = zip(*map(self._padding, groups, own), strict=True)
        part = place.model_rank % self.target.slices
        return {
            "base_optimizer_state": {
                "state": self._states(range(len(groups)), sizes, spans, part),
                "param_groups": [{**one, "params": [number]} for number, one in enumerate(hyperparameters)],
            },
            "single_partition_of_fp32_groups": [
                _region(length, held, MASTER, part) for length, held in zip(lengths, spans, strict=True)
            ],
            "zero_stage": zero_stage(self.target.layout.zero_stage),
            "group_paddings": list(paddings),
            "param_alignment_paddings": [list(group.paddings) for group in groups],
            "partition_count": [group.replicas for group in groups],
            "ds_version": DEEPSPEED_VERSION,
            "param_slice_mappings": [
                OrderedDict(
                    (self.source.model.local_name(span.name, self.target.structure), _fragment(span)) for span in held
                )
                for held in spans
            ],
        }

    def _padding(self, group: FlatGroup, number: int) -> tuple[int, int]:
        """What is told of a partition's padding, and how much of its master weights is saved."""
        if not self._is_bf16:
            return group.padding(number), group.partition_numel - group.padding(number)
        is_last = number == group.replicas - 1
        return group.partition_numel * group.replicas - group.numel if is_last else 0, group.partition_numel

    @property
    def _is_bf16(self) -> bool:
        return self.target.layout.optimizer == BF16_OPTIMIZER

    def _number_of_partition(self, group: FlatGroup, place: Place) -> int:
        head = head_of(next(iter(group.numels)))
        return int(self._places(head).copy_of[place]) if head else place.replica

    def _of_parameters(self, place: Place) -> dict[str, Any]:
        stage, part = divmod(place.model_rank, self.target.slices)
        groups, numbers = self._sub_groups(stage)
        spans = [group.spans(place.replica) for group in groups]
        sizes = [group.partition_numel for group in groups]
        group_of = [group for group, own in enumerate(numbers) for _ in own]
        hyperparameters = self._hyperparameters()
        return {
            "zero_stage": zero_stage(3),
            "partition_count": self.target.layout.replicas,
            "optimizer_state_dict": {
                "state": self._states(group_of, sizes, spans, part),
                "param_groups": [{**one, "params": own} for one, own in zip(hyperparameters, numbers, strict=True)],
            },
            "fp32_flat_groups": [_region(size, own, MASTER, part) for size, own in zip(sizes, spans, strict=True)],
        }

    def _states(
        self, group_of: Sequence[int], sizes: Sequence[int], spans: Sequence[Sequence[Span]], part: int
    ) -> dict[int, dict[str, Any]]:
        found = {}
        for number, group in enumerate(group_of):
            if kept := self._states_of(group):
                found[number] = {
                    key: _region(sizes[number], spans[number], key, part) if value is None else _copy(value)
                    for key, value in kept.items()
                }
        return found


def _region(numel: int, spans: Sequence[Span], key: str, part: int) -> Region:
    return Region(
        (numel,), _ELEMENTWISE, tuple(Piece(span.name, key, part, span.offset, span.start, span.stop) for span in spans)
    )


def _fragment(span: Span) -> Any:
    return fragment(span.stop - span.start, span.offset)


def _one_of(groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What several groups are alike in that are one now.

    Raises:
        CheckpointLayoutError: they differ.
    """
    first = groups[0]
    for other in groups[1:]:
        if key := differing({**other, "name": None}, {**first, "name": None}):
            raise CheckpointLayoutError(
                f"groups of experts that would be one differ in {key} in the optimizer, which in this layout has one "
                "value for all of them"
            )
    return first


def _copy(value: Any) -> Any:
    """Of its own, so that no two tensors of a file share memory."""
    return value.clone() if torch.is_tensor(value) else value
