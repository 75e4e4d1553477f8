"""Lay out DeepSpeed's files of a new layout: names, containers and values, with regions for the parameters.

:meth:`Writer.files` lists the files. Their content is taken from the files of the source, except for values that depend
on the layout. A region records which elements of which parameter belong to it, and
:mod:`~ds_topo.checkpoint.file_filling` fills it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from deepspeed import __version__ as DEEPSPEED_VERSION
from deepspeed.checkpoint.constants import UNIVERSAL_CHECKPOINT_INFO
from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from ds_topo.checkpoint.deepspeed_reader import (
    COPIED_MASTERS,
    FLAT_MASTERS,
    MASTER,
    Source,
    differing,
    name_of_expert,
    name_of_model_states,
    name_of_optimizer,
    name_of_partition,
)
from ds_topo.checkpoint.file_filling import NewFile, Region
from ds_topo.checkpoint.manifest import BF16_OPTIMIZER, Place
from ds_topo.checkpoint.saved_model import Vectors, WholeModel, head_of, layer_of_experts, prefix_of_layer
from ds_topo.checkpoint.shards import FLAT_OPTIMIZER, FlatGroup, PartitionedGroup
from ds_topo.checkpoint.target import NAME_BESIDE_EXPERTS
from ds_topo.errors import CheckpointLayoutError
from ds_topo.ledger import is_absent
from ds_topo.mpu.differences import HAS_PARAMETER_ALIGNMENT, map_of_placement, placement_of_experts
from ds_topo.topology.process_topology import ProcessTopology
from ds_topo.topology.rank_tables import name_of_size

_LOSS_SCALE = {"cur_scale": 1.0, "cur_iter": 0, "last_overflow_iter": -1, "scale_factor": 2.0, "scale_window": 1000}
"""The state of a loss scale, with the values of one that does not change."""
_WITH_EXPERTS = ("num_experts", "ds_autoep_layers")
"""Entries beside the progress of a stage of a pipeline that only a stage with experts has."""
_PLACEMENT_OF_EXPERTS = {"expert_placement", "affine_maps"}
"""Entries of a layer of AutoEP that DeepSpeed writes from 0.19.8 on."""


@dataclass(frozen=True, eq=False)
class Writer:
    """The files of a target, made from those of a source."""

    source: Source
    target: WholeModel
    _known_optimizers: dict[Any, tuple[Vectors, list[dict[str, Any]], list[dict[str, Any]]]] = field(
        default_factory=dict
    )
    _known_buffers: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)

    @cached_property
    def _partitions_of_files(self) -> Sequence[int]:
        return self.target.layout.partitions_of_files

    def files(self) -> Iterator[NewFile]:
        """Yield all files, always in the same order. Each call makes their contents anew, to hold one at a time."""
        layout = self.target.layout
        if layout.is_pipeline:
            yield from self._layer_files()
        for model_rank in range(layout.model_ranks):
            for replica in range(layout.partitions if layout.zero_stage == 3 else 1):
                name = name_of_model_states(layout, model_rank, replica)
                yield name, self._model_states(Place(model_rank, replica))
            for replica in range(layout.files_of_partitions if layout.zero_stage else 0):
                place = Place(model_rank, replica)
                yield name_of_partition(layout, place), self._partition(place)
            if layout.experts:
                yield from self._expert_files(model_rank)
        if self.source.is_like(layout):
            for path in sorted(self.source.folder.glob("random_states_*.pt")):
                yield path.name, self.source.content(path.name)

    def _layer_files(self) -> Iterator[NewFile]:
        """Yield the files of a pipeline's layers; a stage with experts has none, and keeps its layers together."""
        slices, names, structure = self.target.slices, self.target.names, self.target.structure
        has_slices = "model" in ProcessTopology.from_spec(self.target.layout.topology or "data=1").axes
        stages = [stage for stage in range(len(names)) if stage not in self.target.experts_of_stages]
        for number in sorted({number for stage in stages for number in structure.layers_of(stage, len(names))}):
            for place in range(slices if self.source.layer(number, 0) is not None else 0):
                name = f"layer_{number:02d}{f'-model_{place:02d}' if has_slices else ''}-model_states.pt"
                saved = self.source.layer(number, self._saved_slice(place)) or {}
                yield name, self._state_dict(saved, prefix_of_layer(structure, number), place)

    def _module(self, stage: int, place: int) -> OrderedDict[str, Any] | None:
        """Return the state dict that a stage keeps beside its progress; None if its layers have files of their own."""
        whole = self.source.module(self._saved_slice(place))
        if not self.target.layout.is_pipeline:
            return self._state_dict(whole, "", place)
        if stage not in self.target.experts_of_stages:
            return None
        prefixes = self.target.prefixes(stage)
        own = {name: one for prefix in prefixes for name, one in whole.items() if name.startswith(prefix)}
        return self._state_dict(own, "", place)

    def _expert_files(self, model_rank: int) -> Iterator[NewFile]:
        """Yield the experts of a model rank and, without ZeRO, the optimizers of its ranks."""
        target, model, (stage, part) = self.target, self.source.model, divmod(model_rank, self.target.slices)
        firsts = {head: saved * model.slices for saved, heads in model.experts_of_stages.items() for head in heads}
        for layer, head in enumerate(self.target.experts_of_stages.get(stage, ())):
            stacked = [name for name in self._stacked if layer_of_experts(name) == head]
            key = stacked[0] if stacked else head
            for number in range(model.experts[key]):
                if all(place.model_rank != model_rank for place in target.expert_holders(model_rank, key, number)):
                    continue
                name = name_of_expert(layer, number, model_rank)
                if stacked:
                    yield name, self._of_stacks(stacked, number)
                else:
                    saved = self.source.expert_file(firsts[head] + self._saved_slice(part), head, number)
                    yield name, self._state_dict(self.source.content(saved), "", part)
        if not self.target.layout.zero_stage and stage in self.target.experts_of_stages:
            parts = target.parts[max(target.parts)]
            own = {part: place for place, part in reversed(parts.items()) if place.model_rank == model_rank}
            for number, place in sorted(own.items()):  # the first rank that holds each part
                yield name_of_optimizer(number, model_rank), {"optimizer": self._whole_optimizer(place)}

    @cached_property
    def _stacked(self) -> list[str]:
        return [name for name, one in self.source.model.parameters.items() if one.is_stacked]

    def _of_stacks(self, names: Sequence[str], number: int) -> dict[str, Any]:
        """Return the file of one of the experts that AutoEP stacks."""
        found = {}
        for name in names:
            one = self.source.model.parameters[name]
            whole = Region.of_weight(one, number, one.experts)
            found[f"{name}.{number}"] = replace(whole, shape=whole.shape[1:])
        return found

    def _layers_of_auto_ep(self, saved: Sequence[Mapping[str, Any]], of: Place) -> list[dict[str, Any]]:
        """Return DeepSpeed's description of the layers of AutoEP on the rank that writes it."""
        target, found = self.target, []
        for row in saved:
            names = [name for name in self._stacked if layer_of_experts(name) == row["expert_key_prefix"]]
            size, part, count = target.pieces(names[0]), target.piece(names[0], of), int(row["num_experts"])
            holders = target.sharers(names[0], of)
            new = {
                "num_local_experts": count // size,
                "ep_size": size,
                "ep_group_name": name_of_size(size),
                "ep_rank": part,
                "expert_data_parallel_rank": holders.index(of),
                "expert_data_parallel_world_size": len(holders),
                "global_expert_start": part * (count // size),
                "global_expert_end": (part + 1) * (count // size),
            }
            kept = {key: value for key, value in row.items() if key not in _PLACEMENT_OF_EXPERTS}
            found.append({**kept, **new, **self._placement_of_experts(row, names, size)})
        return found

    def _placement_of_experts(self, row: Mapping[str, Any], names: Sequence[str], size: int) -> dict[str, Any]:
        """Return the entries of a layer of AutoEP about the ranks that hold its experts.

        They are empty if the saved layer has none, or the installed DeepSpeed does not read them.
        """
        if not row.keys() >= _PLACEMENT_OF_EXPERTS or is_absent(placement_of_experts):
            return {}
        count = int(row["num_experts"])
        placement = placement_of_experts(count, count // size, size)
        shapes = {name: (count, *self.source.model.parameters[name].shape[1:]) for name in names}
        maps = {name: map_of_placement(placement, shape).to_dict() for name, shape in shapes.items()}
        return {"expert_placement": placement, "affine_maps": {**row["affine_maps"], "params": maps}}

    def _saved_slice(self, place: int) -> int:
        """Return the saved slice whose state dicts those of a new slice are like."""
        return place if self.target.slices == self.source.model.slices else 0

    def _state_dict(self, saved: Mapping[str, Any], prefix: str, place: int) -> OrderedDict[str, Any]:
        """Return the state dict of a module on a slice, like a saved one: parameters and buffers."""
        parameters, aliases = self.source.model.parameters, self.source.model.structure.aliases
        if place not in self._known_buffers:
            self._known_buffers[place] = dict(self.source.buffers(self.target.slices, place))
        found: OrderedDict[str, Any] = OrderedDict()
        for key, value in saved.items():
            name = f"{prefix}{key}"
            if (one := parameters.get(aliases.get(name, name))) is None:
                found[key] = self._known_buffers[place].get(name, value)
            elif self.target.layout.zero_stage == 3:
                found[key] = torch.empty(0, dtype=one.dtype)
            else:
                found[key] = Region.of_weight(one, place, self.target.slices)
        return found

    def _model_states(self, of: Place) -> dict[str, Any]:
        layout, source, slices = self.target.layout, self.source, self.target.slices
        stage, place = divmod(of.model_rank, slices)
        are_alike = (source.layout.model_ranks, source.model.slices) == (layout.model_ranks, slices)
        has_partitions = layout.zero_stage > 0
        has_frozen = any(not one.is_trained for one in source.model.parameters.values())
        frozen = self._frozen(of) if layout.zero_stage > 1 and has_frozen else (None, None)  # None: they are excluded
        first = Place(of.model_rank, 0)
        shared = {
            alias: name for alias, name in source.model.structure.aliases.items() if name in self.target.names[stage]
        }
        with_experts: dict[str, Any] = {}
        if layout.is_pipeline and (heads := self.target.experts_of_stages.get(stage)):
            with_experts = {"num_experts": [source.model.experts[head] for head in heads], "ds_autoep_layers": None}
        saved = source.model_states(of.model_rank if are_alike else 0)
        if self._stacked and saved.get("ds_autoep_layers"):
            layers = self._layers_of_auto_ep(saved["ds_autoep_layers"], of)
            with_experts = {"ds_autoep_layers": layers}
            if isinstance(info := saved.get(UNIVERSAL_CHECKPOINT_INFO), Mapping) and "ds_autoep_layers" in info:
                with_experts[UNIVERSAL_CHECKPOINT_INFO] = {**info, "ds_autoep_layers": layers}
        return {
            **{key: value for key, value in saved.items() if not layout.is_pipeline or key not in _WITH_EXPERTS},
            **with_experts,
            "module": self._module(stage, place),
            "buffer_names": self._buffer_names(stage),
            "optimizer": None if has_partitions else self._whole_optimizer(first),
            "param_shapes": self._shapes(first) if has_partitions else None,
            "frozen_param_shapes": frozen[0],
            "shared_params": shared if has_partitions else None,
            "frozen_param_fragments": frozen[1],
            "dp_world_size": layout.replicas,
            "mp_world_size": layout.model_ranks,
            "checkpoint_parallel_dimensions": {"pp_degree": layout.model_ranks // slices, "tp_degree": slices},
            "ds_version": DEEPSPEED_VERSION,
        }

    def _buffer_names(self, stage: int) -> list[str]:
        source = self.source
        found = dict.fromkeys(
            name
            for first in range(0, source.layout.model_ranks, source.model.slices)
            for name in source.model_states(first).get("buffer_names") or ()
        )
        if not self.target.structure.layers:
            return list(found)
        return [name for name in found if name.startswith(self.target.prefixes(stage))]

    def _frozen(self, of: Place) -> tuple[OrderedDict[str, Any], OrderedDict[str, Any]]:
        """Return the shapes of parameters that are not trained, and a rank's parts of them."""
        stage = of.model_rank // self.target.slices
        layout, target = self.target.layout, self.target
        shapes: OrderedDict[str, Any] = OrderedDict()
        fragments: OrderedDict[str, Any] = OrderedDict()
        for whole_name in self.target.names[stage]:
            one = self.source.model.parameters[whole_name]
            if one.is_trained or of not in target.sharers(whole_name, of):
                continue
            name = target.local_name(whole_name)
            weight = Region.of_weight(one, target.piece(whole_name, of), target.pieces(whole_name))
            shapes[name] = torch.Size(weight.shape)
            if layout.zero_stage == 3:
                group = PartitionedGroup({whole_name: shapes[name].numel()}, layout.partitions)
                weight = replace(weight, shape=(group.partition_numel,), spans=group.spans(of.replica))
            fragments[name] = weight
        return shapes, fragments

    def _shapes(self, place: Place) -> list[OrderedDict[str, Any]]:
        """Return the shapes of the parameters in each vector of the optimizer."""
        local_name = self.target.local_name
        return [
            OrderedDict((local_name(name), torch.Size(self.target.shape(name))) for name in group.numels)
            for _, group in self._optimizer(place)[0]
        ]

    def _whole_optimizer(self, place: Place) -> dict[str, Any]:
        """Return the optimizer's state dict without ZeRO: states in the shape of the parameters."""
        (vectors, known, param_groups), states = self._optimizer(place), dict[int, Any]()
        masters: list[list[Region]] = [[] for _ in param_groups]
        is_flat = self.target.layout.optimizer == FLAT_OPTIMIZER
        for number, (group, vector) in enumerate(vectors):
            one = self.source.model.parameters[next(iter(vector.numels))]
            master = self._master(place, vector, 0)
            master = master if is_flat else replace(master, shape=self.target.shape(one.name))
            if one.is_trained and known[number]:
                states[number] = _filled(known[number], master)
            masters[group].append(master)
        inner = {"state": states, "param_groups": param_groups}
        if self.target.layout.precision == "fp32":
            return inner
        scale = self.source.loss_scale()
        settings = {
            "dynamic_loss_scale": bool(scale.get("dynamic_loss_scale", scale.get("dynamic"))),
            **{key: scale.get(key, value) for key, value in _LOSS_SCALE.items()},
            "clip_grad": self._config().get("gradient_clipping", GRADIENT_CLIPPING_DEFAULT),
        }
        key, found = (FLAT_MASTERS, [one[0] for one in masters]) if is_flat else (COPIED_MASTERS, masters)
        return {**settings, "optimizer_state_dict": inner, key: found}

    def _partition(self, place: Place) -> dict[str, Any]:
        """Return the file of a rank's partition of the optimizer, with ZeRO."""
        layout, target = self.target.layout, self.target
        vectors, known, param_groups = self._optimizer(place)
        states: dict[int, dict[str, Any]] = {}
        masters, paddings, mappings = [], [], []
        for number, (_, vector) in enumerate(vectors):
            holders = target.sharers(next(iter(vector.numels)), place)
            is_saved_here = place in holders  # otherwise another replica saves this partition
            replica = holders.index(place) if is_saved_here else self._partitions_of_files[place.replica]
            master, numel = self._master(place, vector, replica), vector.partition_numel
            if is_saved_here and known[number]:
                states[number] = _filled(known[number], master)
            if isinstance(vector, FlatGroup):
                if layout.optimizer != BF16_OPTIMIZER:
                    paddings.append(vector.padding(replica))
                    numel -= paddings[-1]
                else:  # it saves the padding, and notes all of it on the last rank
                    is_last = replica == vector.replicas - 1
                    paddings.append(numel * vector.replicas - vector.numel if is_last else 0)
                addresses = (
                    (target.local_name(one.name), fragment_address(numel=one.stop - one.start, start=one.offset))
                    for one in master.spans
                )
                mappings.append(OrderedDict(addresses))
            master = replace(master, dtype=self.source.type_of_masters, shape=(numel if is_saved_here else 0,))
            masters.append(master if is_saved_here else replace(master, spans=[]))
        inner = {"state": states, "param_groups": param_groups}
        if layout.zero_stage == 3:
            content = {
                "zero_stage": ZeroStageEnum(3),
                "partition_count": layout.partitions,
                "optimizer_state_dict": inner,
                "fp32_flat_groups": masters,
            }
        else:
            content = {
                "base_optimizer_state": inner,
                "single_partition_of_fp32_groups": masters,
                "zero_stage": ZeroStageEnum(layout.zero_stage),
                "group_paddings": paddings,
                "partition_count": [vector.replicas for _, vector in vectors],
                "ds_version": DEEPSPEED_VERSION,
                "param_slice_mappings": mappings,
            }
            if HAS_PARAMETER_ALIGNMENT:
                flat = [vector for _, vector in vectors if isinstance(vector, FlatGroup)]
                content["param_alignment_paddings"] = [vector.paddings for vector in flat]
        return {
            "optimizer_state_dict": {**self._loss_scaling(), **content},
            "ds_config": self._config(),
            "ds_version": DEEPSPEED_VERSION,
        }

    def _optimizer(self, place: Place) -> tuple[Vectors, list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the vectors of a rank's optimizer, the states of each, and its groups.

        All ranks with the same parameters have them in common.
        """
        target, stage = self.target, place.model_rank // self.target.slices
        key = stage, *(parts[place] for parts in target.parts.values())
        if key not in self._known_optimizers:
            vectors = self.target.vectors(place, self.target.numel)
            states = [self.source.states_of(vector.numels) for _, vector in vectors]
            self._known_optimizers[key] = vectors, states, self._param_groups(stage, vectors)
        return self._known_optimizers[key]

    def _master(self, place: Place, vector: FlatGroup | PartitionedGroup, replica: int) -> Region:
        """Return a partition of the master weights of a vector."""
        target, name = self.target, next(iter(vector.numels))
        numel, spans = vector.partition_numel, vector.spans(replica)
        return Region((numel,), torch.float32, MASTER, target.piece(name, place), spans, target.pieces(name))

    def _param_groups(self, stage: int, vectors: Vectors) -> list[dict[str, Any]]:
        """Return hyperparameters and vectors of every group of a stage, with the names that DeepSpeed gives them."""
        found = []
        for group, local in enumerate(self.target.structure.groups[stage]):
            own = [number for number, (of, _) in enumerate(vectors) if of == group]
            saved = [self.source.of_parameter(name)[0] for number in own for name in vectors[number][1].numels]
            options = dict(_common(saved))
            if options.get("moe"):
                head = head_of(local[0]) or local[0]  # AutoEP stacks experts
                options["name"] = name_of_size(self.target.structure.experts[head])
            elif self.target.layout.is_pipeline and stage in self.target.experts_of_stages:
                options = {"name": NAME_BESIDE_EXPERTS, **options}
            elif self.target.layout.is_pipeline and options.get("name") == NAME_BESIDE_EXPERTS:
                del options["name"]
            found.append({**options, "params": own})
        return found

    def _config(self) -> dict[str, Any]:
        return self.source.model_states(0).get("ds_config") or {}

    def _loss_scaling(self) -> dict[str, Any]:
        """Return the settings of loss scaling and gradient clipping that were saved."""
        saved: dict[str, Any] = {"loss_scaler": LossScaler(scale=1.0), "dynamic_loss_scale": False, "overflow": False}
        if self.source.layout.has_partitions:
            file = self.source.first_partition()
            saved.update((key, file[key]) for key in (*saved, "clip_grad") if key in file)
        elif self.target.layout.precision == "fp16":
            scale, config = self.source.loss_scale(), self._config().get("fp16", {})
            saved["dynamic_loss_scale"] = bool(scale.get("dynamic_loss_scale"))
            saved["loss_scaler"] = LossScaler(scale=scale.get("cur_scale", 1.0))
            if saved["dynamic_loss_scale"]:
                saved["loss_scaler"] = DynamicLossScaler(
                    scale["cur_scale"],
                    scale["scale_window"],
                    config.get("min_loss_scale", 1),
                    config.get("hysteresis", 2),
                    config.get("consecutive_hysteresis", False),
                )
                for key in _LOSS_SCALE:
                    setattr(saved["loss_scaler"], key, scale[key])
        return saved


def _filled(states: Mapping[str, Any], master: Region) -> dict[str, Any]:
    """Return the states of a tensor of the optimizer: regions, and values of their own, which share no memory."""
    found: dict[str, Any] = {}
    for key, value in states.items():
        if isinstance(value, torch.dtype):
            found[key] = replace(master, dtype=value, key=key)
        else:
            found[key] = value.clone() if torch.is_tensor(value) else value
    return found


def _common(groups: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the saved group of parameters that become one group; their groups may have different names.

    Raises:
        CheckpointLayoutError: other hyperparameters differ.
    """
    first, *others = {id(group): group for group in groups}.values()
    for other in others:
        if key := differing({**other, "name": None}, {**first, "name": None}):
            raise CheckpointLayoutError(
                f"groups of parameters that would become one differ in {key} in the optimizer, which has one value for "
                "all of them in this layout. Choose an expert parallel size or stages that keep the groups apart"
            )
    return first
