"""Present this rank's weights and optimizer states as tensors of the whole model, for torch's checkpoints.

A tensor that a rank holds as a whole is a ``DTensor`` on the grid's mesh: replicated, or a shard along ``model`` if
slices split it. A part of a partition, and a slice in several pieces, is a ``PartOfTensor``. All of them are views of
the engine's own memory: saving copies and gathers nothing, and loading writes into that memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups as deepspeed_groups
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ds_topo.checkpoint import engine_facts as facts
from ds_topo.checkpoint.manifest import SavedSplit
from ds_topo.checkpoint.rank_zero import Meeting
from ds_topo.checkpoint.shards import Slice, part_of
from ds_topo.errors import CheckpointError, CheckpointLayoutError, abridged, listed
from ds_topo.mpu.mpu import MpuGrid
from ds_topo.topology.axes import MODEL, PIPE

PARAMS = "params"
"""The key of an optimizer group's parameters, in torch's state dicts."""
_OF_THE_PROGRAM = {"params", "param_names", "name", "moe", "foreach", "fused", "capturable", "differentiable"}
"""Entries of an optimizer's group that belong to the program and are not restored: names and implementation flags."""
COUNTS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
OF_LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
SCHEDULER = "lr_scheduler"

# -- memory ------------------------------------------------------------------------------------------------------------
# Each of DeepSpeed's optimizers keeps master weights in the tensors that its inner optimizer steps on: the parameters
# themselves, copies of them, or flat vectors of many parameters, of which ZeRO gives each rank a partition. An
# optimizer state has the layout of the tensor that it belongs to.


@dataclass(frozen=True, eq=False)
class Trained:
    """A trained parameter, and the place of this rank's part of it in the optimizer's memory, in elements."""

    parameter: nn.Parameter
    group: int
    """The number of its group in the optimizer."""
    master: torch.Tensor
    """The tensor that the inner optimizer steps on."""
    start: int
    """The first element of the parameter that this rank has."""
    numel: int
    """The number of its elements that this rank has."""
    address: int
    """The position of the first one in ``master``."""

    @property
    def is_whole(self) -> bool:
        """True if ``master`` is this parameter, or a copy of it, and nothing else."""
        return self.master.shape == self.parameter.shape and self.numel == self.parameter.numel()

    def part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of this rank's part of the parameter in a tensor with the layout of ``master``."""
        held = tensor.detach()
        return held if self.is_whole else held.view(-1)[self.address : self.address + self.numel]


def trained(engine: DeepSpeedEngine) -> Iterator[Trained]:
    """Yield every parameter of this rank's optimizer, also those that other ranks hold completely.

    Raises:
        CheckpointError: it is unknown where this kind of optimizer keeps its states.
    """
    optimizer, inner = engine.optimizer, facts.inner_optimizer(engine)
    if inner is None:
        return
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        yield from _of_zero_3(optimizer)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        if optimizer.round_robin_gradients and isinstance(optimizer.bit16_groups_flat, list):  # not our reducer's
            yield from _of_round_robin(optimizer)
        else:
            yield from _of_partitions(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups)
    elif isinstance(optimizer, BF16_Optimizer):
        yield from _of_partitions(optimizer.bf16_groups, optimizer.fp32_groups_flat_partition)
    elif isinstance(optimizer, FP16_Optimizer):
        for number, (group, master) in enumerate(zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True)):
            for parameter, end in zip(group, accumulate(one.numel() for one in group), strict=True):
                yield Trained(parameter, number, master, 0, parameter.numel(), end - parameter.numel())
    elif isinstance(optimizer, FP16_UnfusedOptimizer):
        yield from _of_copies(optimizer.fp16_groups, optimizer.fp32_groups)
    elif optimizer is inner:
        groups = [group["params"] for group in inner.param_groups]
        yield from _of_copies(groups, groups)
    else:
        raise CheckpointError(
            f"{type(optimizer).__name__}: it is unknown where this optimizer keeps master weights and states, so torch "
            "cannot save them. Use ZeRO 0 to 3, BF16_Optimizer or FP16_Optimizer, or save with checkpoint.save()"
        )


def _of_copies(groups: Any, masters: Any) -> Iterator[Trained]:
    """Yield the parameters of an optimizer with one master tensor for each."""
    for number, (parameters, copies) in enumerate(zip(groups, masters, strict=True)):
        for parameter, master in zip(parameters, copies, strict=True):
            yield Trained(parameter, number, master, 0, parameter.numel(), 0)


def _of_partitions(groups: Any, masters: Any) -> Iterator[Trained]:
    """Yield the parameters of partitioned vectors; in both layouts the parameters store their addresses."""
    for number, (parameters, master) in enumerate(zip(groups, masters, strict=True)):
        for parameter in parameters:
            found = parameter._hp_mapping
            if found is None:
                yield Trained(parameter, number, master, 0, 0, 0)
            else:
                there, here = found.lp_fragment_address, found.hp_fragment_address
                yield Trained(parameter, number, master, there.start, there.numel, here.start)


def _of_round_robin(optimizer: DeepSpeedZeroOptimizer) -> Iterator[Trained]:
    """Yield the parameters with ``round_robin_gradients``, where the addresses in parameters are those without it."""
    rows = zip(
        optimizer.round_robin_bit16_groups,
        optimizer.round_robin_bit16_offsets,
        optimizer.single_partition_of_fp32_groups,
        strict=True,
    )
    for number, (parameters, offsets, master) in enumerate(rows):
        size = int(optimizer.partition_size[number])
        first = size * dist.get_rank(optimizer.real_dp_process_group[number])
        for parameter, offset in zip(parameters, offsets, strict=True):
            start, end = max(offset, first), min(offset + parameter.numel(), first + size)
            numel = max(0, end - start)
            yield Trained(
                parameter, number, master, start - offset if numel else 0, numel, start - first if numel else 0
            )


def _of_zero_3(optimizer: DeepSpeedZeroOptimizer_Stage3) -> Iterator[Trained]:
    """Yield the parameters of ZeRO 3: each rank has a part of every one, and parts of a sub-group are adjacent."""
    if optimizer.swap_optimizer or optimizer.params_in_nvme_and_cpu:
        raise CheckpointError(
            "offload to NVMe keeps optimizer states in files of each host, which torch cannot save: save with "
            "checkpoint.save()"
        )
    rows = zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True)
    for number, (parameters, master) in enumerate(rows):
        address = 0
        for parameter in parameters:
            start, numel = span_of_zero_3(parameter)
            yield Trained(parameter, optimizer.sub_group_to_group_id[number], master, start, numel, address)
            address += int(parameter.partition_numel())


def span_of_zero_3(parameter: Any) -> tuple[int, int]:
    """Return the first element and the number of elements of this rank's part of a parameter, without padding."""
    numel = int(parameter.partition_numel())
    start = min(int(parameter.ds_numel), dist.get_rank(parameter.ds_process_group) * numel)
    return start, min(numel, int(parameter.ds_numel) - start)


def update_weights(engine: DeepSpeedEngine, found: Iterable[Trained]) -> None:
    """Copy the master weights into the module after they were loaded; collective under ZeRO."""
    optimizer: Any = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        optimizer.checkpoint_event_prologue()
        for number in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(number)
        optimizer.checkpoint_event_epilogue()
    elif isinstance(optimizer, (DeepSpeedZeroOptimizer, BF16_Optimizer)):
        optimizer.update_lp_params()
    else:
        for one in found:
            if one.master is not one.parameter:
                one.parameter.data.copy_(one.part_of(one.master).view(one.parameter.shape))


# -- progress ----------------------------------------------------------------------------------------------------------


def restore_hyperparameters(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Restore the entries of a group that it and the checkpoint have, except those of ``_OF_THE_PROGRAM``."""
    for key in group.keys() & saved.keys() - _OF_THE_PROGRAM:
        if torch.is_tensor(group[key]):
            group[key].fill_(float(saved[key]))
        else:
            group[key] = float(saved[key]) if torch.is_tensor(saved[key]) else saved[key]


def restore_progress(engine: DeepSpeedEngine, saved: Mapping[str, Any]) -> None:
    """Restore steps, loss scale and learning-rate scheduler, as far as they were saved and the engine has them."""
    for owner, names in ((engine, COUNTS), (loss_scaler_of(engine), OF_LOSS_SCALE)):
        for name in names:
            if name in saved and hasattr(owner, name):
                setattr(owner, name, saved[name])
    micro_batches = int(engine.gradient_accumulation_steps())
    if engine.micro_steps % micro_batches:  # the saving job had another number of micro-batches in a step
        engine.micro_steps = engine.global_steps * micro_batches
    if saved.get(SCHEDULER) is not None and hasattr(engine.lr_scheduler, "load_state_dict"):
        own = engine.lr_scheduler.state_dict()
        same = {  # lists have a value for each group of the optimizer, of which there may be another number
            key: own[key] if isinstance(value, list) and len(own.get(key, value)) != len(value) else value
            for key, value in saved[SCHEDULER].items()
        }
        engine.lr_scheduler.load_state_dict(same)
    if engine.random_ltd_enabled() and engine.random_ltd_scheduler is not None and saved.get("random_ltd"):
        engine.random_ltd_scheduler.load_state_dict(saved["random_ltd"])
    has_sampler = engine.training_dataloader is not None and engine.curriculum_learning_enabled()
    if has_sampler and saved.get("data_sampler"):
        engine.training_dataloader.data_sampler.load_state_dict(saved["data_sampler"])


def loss_scaler_of(engine: DeepSpeedEngine) -> Any:
    """Return the object that holds the engine's loss scale; None if it has none."""
    optimizer = engine.optimizer
    return getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)


# -- names -------------------------------------------------------------------------------------------------------------
# Experts are numbered over all ranks of their layer. A parameter that several places of the model share has all of
# their names, and the first one for its optimizer states, as in torch's ``get_state_dict``.

NewNames: TypeAlias = "str | tuple[str, ...]"
"""The other program's name for a parameter, or all of its names if several places share it."""
Rename: TypeAlias = "Callable[[str], NewNames] | Mapping[str, NewNames] | None"
"""A function or mapping from the names of the engine's module to another program's; a mapping may omit equal names."""


@dataclass(frozen=True, eq=False)
class Named:
    """A parameter of this rank, with its names in the whole model."""

    parameter: nn.Parameter
    local: str
    """The first name in the engine's module."""
    names: tuple[str, ...]
    """The names of all places that share it."""
    everywhere: tuple[str, ...]
    """The first name. For an expert, those of the experts with its local number on all ranks of the layer."""
    slice: Slice
    is_expert: bool
    is_first: bool
    """True if this rank writes it, among the stages and slices that have the same values."""


def named_parameters(engine: DeepSpeedEngine, rename: Rename = None) -> list[Named]:
    """Return all parameters of this rank, in the module's order.

    Raises:
        CheckpointLayoutError: it is unknown how slices form the whole.
        ValueError: two of them get the same name.
    """
    if not isinstance(engine.mpu, MpuGrid) and int(engine.mp_world_size) > 1:
        raise CheckpointLayoutError(
            f"the engine's mpu is not a ds_topo grid and has {engine.mp_world_size} model ranks, so it is unknown "
            "which are stages and which are slices: pass a grid as mpu"
        )
    _, place, slices = facts.stage_and_slice(engine)
    structure, layers, new_names = facts.structure_of(engine), facts.moe_layers(engine.module), renaming(rename)
    stacked = facts.stacked_experts(engine.module)
    if structure.undeclared and slices > 1:
        raise CheckpointLayoutError(
            f"{listed(structure.undeclared, 3)} are marked as slices (tensor_model_parallel), but do not declare along "
            "which dimension: set partition_dim on these parameters where they are created, as Megatron's layers do"
        )
    shared: dict[int, tuple[nn.Parameter, list[str]]] = {}
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        shared.setdefault(id(parameter), (parameter, []))[1].append(name)
    result: list[Named] = []
    owners: dict[str, int] = {}
    for key, (parameter, old_names) in shared.items():
        layer = facts.moe_layer_of(old_names[0], layers)
        own = _slice(old_names[0], facts.shape_of(parameter), structure.splits.get(old_names[0]), slices, place)
        if (automatic := stacked.get(old_names[0])) is not None:  # AutoEP's parts of the experts are slices of all
            own = Slice(own.shape, 0, int(automatic.ep_size), int(automatic.ep_rank))
        if layer is None:
            here, first_names = old_names, [old_names[0]]
        else:
            rank = dist.get_rank(deepspeed_groups._get_expert_parallel_group(layer.expert_group_name))
            here = [_numbered(name, layer, rank) for name in old_names]
            first_names = [_numbered(old_names[0], layer, rank) for rank in range(int(layer.ep_size))]
        names = tuple(dict.fromkeys(new for name in here for new in new_names(name)))
        for name in names:
            if owners.setdefault(name, key) != key:
                raise ValueError(f"rename gives two parameters the same name, {name!r}: give each its own")
        everywhere, is_expert = tuple(new_names(name)[0] for name in first_names), bool(layer or automatic)
        is_replicated = getattr(parameter, "ds_pipe_replicated", False)
        is_first = not is_replicated and (is_expert or own.dim is not None or place == 0)
        result.append(Named(parameter, old_names[0], names, everywhere, own, is_expert, is_first))
    are_split = any(layer.enable_expert_tensor_parallelism for layer in layers.values())
    if slices > 1 and are_split and not any(one.is_expert and one.slice.dim is not None for one in result):
        raise CheckpointLayoutError(
            "experts are split over slices (enable_expert_tensor_parallelism), but none of their parameters declares "
            "along which dimension: set partition_dim on them where they are created, as Megatron's layers do"
        )
    return result


def _slice(name: str, shape: tuple[int, ...], split: SavedSplit | None, slices: int, place: int) -> Slice:
    if split is None or slices == 1:
        return Slice(shape)
    if split.dim >= len(shape) or shape[split.dim] % split.stride:
        raise CheckpointLayoutError(
            f"{name!r} {list(shape)} declares partition_dim={split.dim}, partition_stride={split.stride}: there must "
            "be such a dimension, and its size must be a multiple of the stride"
        )
    return Slice(shape, split.dim, slices, place, split.stride)


def renaming(rename: Rename) -> Callable[[str], tuple[str, ...]]:
    """Return a function from a name of the engine's module to the names in the other program.

    Raises:
        ValueError: by the function, if ``rename`` gives something else than names.
    """

    def new_names(name: str) -> tuple[str, ...]:
        new = name if rename is None else rename(name) if callable(rename) else rename.get(name, name)
        names = new if isinstance(new, tuple) else (new,)
        if not names or not all(isinstance(one, str) and one for one in names):
            raise ValueError(f"rename gives {abridged(new)} for {name!r}: give a name, or a tuple of names")
        return names

    return new_names


def whole_name(local: str, layers: Mapping[str, MoE]) -> str:
    """Return the name in the whole model of a parameter or buffer of this rank."""
    if (layer := facts.moe_layer_of(local, layers)) is None:
        return local
    return _numbered(local, layer, dist.get_rank(deepspeed_groups._get_expert_parallel_group(layer.expert_group_name)))


def names_of_buffers(engine: DeepSpeedEngine, rename: Rename = None) -> dict[str, str]:
    """Return the name in the whole model, or in another program, of each of this rank's buffers."""
    layers, new_names = facts.moe_layers(engine.module), renaming(rename)
    return {local: new_names(whole_name(local, layers))[0] for local, _ in engine.module.named_buffers()}


def _numbered(name: str, layer: MoE, rank: int) -> str:
    """Replace an expert's number on a rank by its number in the whole layer."""
    first = rank * int(layer.num_local_experts)
    return facts.LOCAL_EXPERT.sub(lambda match: f"{match[1]}{first + int(match[2])}", name)


# -- optimizer states --------------------------------------------------------------------------------------------------


def begin_states(inner: torch.optim.Optimizer, found: Iterable[Trained]) -> None:
    """Create the initial states of every tensor that the optimizer steps on, where it has none yet.

    torch does that by a step without gradients at a learning rate of zero. Such a step counts, and turns a weight of
    -0.0 into 0.0. Here another optimizer of the same class takes it, with a parameter of one element.

    Raises:
        CheckpointError: an optimizer of its class cannot be created from its groups alone.
    """
    for one in {id(one.master): one for one in found if one.parameter.requires_grad}.values():
        if inner.state.get(one.master):
            continue
        element = nn.Parameter(torch.zeros(1, dtype=one.master.dtype, device=one.master.device))
        try:
            twin = type(inner)([{**inner.param_groups[one.group], "params": [element]}])  # type: ignore[call-arg]
            element.grad = torch.zeros_like(element)
            twin.step()
        except Exception as error:
            raise CheckpointError(
                f"{type(inner).__name__} has no states yet, and its initial states cannot be derived "
                f"({abridged(error)}): take a step before saving"
            ) from error
        states = twin.state[element].items()
        inner.state[one.master] = {key: _like(value, one.master) for key, value in states if value is not None}


def _like(value: Any, master: torch.Tensor) -> Any:
    """Extend a state of one element to all elements, and set numbers such as the step to zero."""
    if torch.is_tensor(value) and value.shape == (1,):
        return torch.full_like(master, float(value), dtype=value.dtype, requires_grad=False)
    return torch.zeros_like(value) if torch.is_tensor(value) else type(value)()


def _is_by_element(value: Any, master: torch.Tensor) -> bool:
    """Return True if a state has a value for each element, and False if it is one number, such as the step.

    Raises:
        CheckpointError: the state is neither.
    """
    if torch.is_tensor(value) and value.shape == master.shape and master.dim():
        return True
    if (torch.is_tensor(value) and value.numel() == 1) or isinstance(value, (int, float)):
        return False
    shape = f" {list(value.shape)}" if torch.is_tensor(value) else ""
    raise CheckpointError(
        f"an optimizer state is a {type(value).__name__}{shape}, neither a value for each element nor a number: it is "
        "unknown what another layout would hold. Save with checkpoint.save()"
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if torch.is_tensor(value):
        return bool(value.numel() == 1)
    return value is None or isinstance(value, (bool, int, float, str))


# -- all of it ---------------------------------------------------------------------------------------------------------


class EngineState:
    """The weights and optimizer states of an engine on this rank, under names that do not depend on its layout."""

    def __init__(self, engine: DeepSpeedEngine, rename: Rename, has_states: bool) -> None:
        self.has_states = has_states
        self.trained = list(trained(engine))
        self.weights: dict[str, torch.Tensor] = {}
        """Parameters and buffers."""
        self.aliases: dict[str, tuple[str, ...]] = {}
        """A map from each name of a parameter to all of its names."""
        self.states: dict[str, dict[str, torch.Tensor]] = {}
        """Optimizer states by parameter. Those that are one number are copies."""
        self.numbers: dict[tuple[str, str], torch.Tensor] = {}
        """The tensor that the optimizer steps on, for each state that is one number, by parameter and key."""
        self.groups: list[dict[str, Any]] = []
        """Hyperparameters, with the names of this stage's parameters."""
        self.names: list[str] = []
        """The names of all parameters and buffers of the stage; empty on all but one rank of each stage."""
        self._grid = engine.mpu if isinstance(engine.mpu, MpuGrid) else None
        is_first = facts.replica_of(engine) == 0 and facts.stage_and_slice(engine)[1] == 0
        inner = facts.inner_optimizer(engine) if has_states else None
        if inner is not None:
            begin_states(inner, self.trained)
        masters, names_in_groups = {id(one.parameter): one for one in self.trained}, defaultdict[int, list[str]](list)
        for one in named_parameters(engine, rename):
            master = masters.get(id(one.parameter))
            self.names += (*one.names, *one.everywhere) if is_first else ()
            for name in one.names:
                if (weight := self._weight(one, master)) is not None:
                    self.weights[name], self.aliases[name] = weight, one.names
            if master is not None and inner is not None:
                names_in_groups[master.group] += one.everywhere
                self._add_states(one, master, inner.state.get(master.master, {}))
        saved, new_names = engine.module.state_dict(keep_vars=True), renaming(rename)
        for name, value in engine.module.named_buffers():
            if name in saved:
                new = new_names(name)[0]
                self.weights[new] = part_of(value.detach(), Slice(tuple(value.shape)), 0, value.numel(), is_first)
                self.names += [new] if is_first else []
        for number, group in enumerate(inner.param_groups if inner is not None else ()):
            found = {key: group[key] for key in group if key not in (PARAMS, "param_names") and _is_plain(group[key])}
            if {"betas", "eps"} <= found.keys() and not type(inner).__module__.startswith("torch."):
                found = {**torch.optim.AdamW([torch.zeros(1)]).defaults, **found}  # FSDP2 programs ask for all of them
            self.groups.append({**found, PARAMS: names_in_groups[number]})

    def _add_states(self, one: Named, master: Trained, states: Mapping[str, Any]) -> None:
        name, own = one.names[0], {}
        for key, value in states.items():
            if value is None:
                continue
            if _is_by_element(value, master.master):
                if master.numel:
                    own[key] = self._of_master(one, master, value)
            else:
                number = value.detach().clone() if torch.is_tensor(value) else torch.tensor(float(value))
                own[key] = number.reshape(())
                self.numbers[name, key] = master.master
        if own:
            self.states[name] = own

    def _weight(self, one: Named, master: Trained | None) -> torch.Tensor | None:
        """Return a parameter's master weights or values; None if this rank has none of its elements."""
        if master is not None:
            return self._of_master(one, master, master.master) if master.numel else None
        held: Any = one.parameter
        if not hasattr(held, "ds_tensor"):
            return self._whole(held.detach(), one)
        start, numel = span_of_zero_3(held)
        memory = held.ds_tensor.detach().view(-1)[:numel]
        return part_of(memory, one.slice, start, start + numel, one.is_first) if numel else None

    def _of_master(self, one: Named, master: Trained, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a parameter, in a tensor with the layout of master weights."""
        memory = master.part_of(tensor)
        if master.is_whole:
            return self._whole(memory, one)
        return part_of(memory, one.slice, master.start, master.start + master.numel, one.is_first)

    def _whole(self, memory: torch.Tensor, one: Named) -> torch.Tensor:
        mesh = None if one.is_expert or one.slice.stride > 1 else self._mesh
        if mesh is not None and mesh.device_type == memory.device.type:
            from torch.distributed.tensor import DTensor, Replicate, Shard  # slow, and offline conversions need none

            split = Shard(one.slice.dim) if one.slice.dim is not None else Replicate()
            placements = [split if axis == MODEL else Replicate() for axis in mesh.mesh_dim_names or ()]
            return DTensor.from_local(memory, mesh, placements, run_check=False)
        return memory if one.slice.dim is None else part_of(memory, one.slice, 0, memory.numel(), one.is_first)

    @cached_property
    def _mesh(self) -> DeviceMesh | None:
        """The device mesh of this rank's stage; None without a grid, or if the stage is one rank."""
        if self._grid is None:
            return None
        mesh, all_axes = self._grid.device_mesh(), self._grid.topology().axes
        axes = tuple(axis for axis in all_axes if axis != PIPE)
        return mesh if len(axes) == len(all_axes) else mesh[axes] if axes else None


def state_of_engine(engine: DeepSpeedEngine, rename: Rename, plan: str, *, has_states: bool = True) -> EngineState:
    """Return an engine's state for torch's checkpoints. Collective: all ranks succeed, or all raise.

    Args:
        engine: the engine.
        rename: from its names to those of another program.
        plan: the purpose, the same on all ranks.
        has_states: include optimizer states, which are created if there are none yet.

    Raises:
        CheckpointError: a rank cannot describe its state; the same error on every rank.
        DisagreementError: ranks call different operations.
    """
    failure: Exception | None = None
    try:
        found = EngineState(engine, rename, has_states)
    except Exception as error:  # of any class: the other ranks must receive it
        failure = error
    meeting = Meeting.begin("the engine's state for torch.distributed.checkpoint", plan)
    meeting.all_or_none("described", failure)
    meeting.end()
    return found
