"""Describe where this rank keeps weights and optimizer states, in elements of the parameters of the whole model.

:func:`named_parameters` is the one table of a live engine: each parameter with its names, the slice of it that this
rank has, and the place of this rank's part in the memory of the optimizer or the module. Copies by name, torch's
checkpoints and recordings read it. The last section restores what is no tensor of the model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups as deepspeed_groups
from torch import nn

from ds_topo.base.classes import stock_class
from ds_topo.base.marks import inner_optimizer, offsets_in_flat_groups
from ds_topo.checkpoint import engine_facts as facts
from ds_topo.checkpoint.manifest import SavedSplit
from ds_topo.checkpoint.table import FileRecorder, Order, Piece, Slice, boxes_in, head_of, number_of, numbered
from ds_topo.errors import CheckpointError, CheckpointLayoutError, abridged, listed
from ds_topo.mpu import MpuGrid

if TYPE_CHECKING:  # with DTensor and SymPy behind them, they take a third of the start of the commands
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

_OF_THE_PROGRAM = {"params", "param_names", "name", "moe", "foreach", "fused", "capturable", "differentiable"}
"""Entries of an optimizer's group that belong to the program and are not restored: names and implementation flags."""
COUNTS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
OF_LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
SCHEDULER = "lr_scheduler"

# -- memory ------------------------------------------------------------------------------------------------------------
# Each of DeepSpeed's optimizers keeps master weights in the tensors that its inner optimizer steps on: the parameters
# themselves, copies of them, or flat vectors of many parameters, of which ZeRO gives each rank a partition. An
# optimizer state has the layout of the tensor that it belongs to.


class Held(NamedTuple):
    """A parameter, and the place of this rank's part of it in memory, in elements."""

    parameter: nn.Parameter
    master: torch.Tensor
    """The tensor with its values: that which the inner optimizer steps on, or else the module's own."""
    start: int
    """The first element of the parameter that this rank has."""
    numel: int
    """The number of its elements that this rank has."""
    address: int = 0
    """The position of the first one in ``master``."""
    group: int | None = None
    """The number of its group in the optimizer; None if the optimizer does not have it."""

    @property
    def is_whole(self) -> bool:
        """True if ``master`` is this parameter, or a copy of it, and nothing else."""
        return self.master.shape == self.parameter.shape and self.numel == self.parameter.numel()

    def part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of this rank's part of the parameter in a tensor with the layout of ``master``."""
        held = tensor.detach()
        return held if self.is_whole else held.view(-1)[self.address : self.address + self.numel]


def held_by_module(parameter: Any) -> Held:
    """Return the place of the weights that forward passes use."""
    if not hasattr(parameter, "ds_tensor"):
        return Held(parameter, parameter, 0, parameter.numel())
    return Held(parameter, parameter.ds_tensor, *_span_of_zero_3(parameter))


class JoinedParameters(NamedTuple):
    """The parameters in one of the tensors that an inner optimizer steps on, in the layout of DeepSpeed's files."""

    parameters: Sequence[nn.Parameter]
    begins: Sequence[int]
    """Where each of them begins in the vector of all partitions; at ZeRO 3, in a partition."""
    process_group: Any = None
    """The ranks over which the vector is partitioned; None if this rank has all of it."""


def _joined_parameters(optimizer: Any, inner: Any) -> Iterator[JoinedParameters]:
    """Yield the parameters of each tensor that the inner optimizer steps on, in its order."""
    if inner is None:
        return
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        for parameters in optimizer.fp16_groups:
            group = parameters[0].ds_process_group if parameters else None
            yield JoinedParameters(parameters, _adjacent(int(one.partition_numel()) for one in parameters), group)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        vectors = zip(optimizer.round_robin_bit16_groups, offsets_in_flat_groups(optimizer), strict=True)
        for (parameters, begins), group in zip(vectors, optimizer.real_dp_process_group, strict=True):
            yield JoinedParameters(parameters, begins, group)
    elif isinstance(optimizer, BF16_Optimizer):
        for parameters, group in zip(optimizer.bf16_groups, optimizer.real_dp_process_group, strict=True):
            yield JoinedParameters(parameters, _adjacent(one.numel() for one in parameters), group)
    elif isinstance(optimizer, FP16_Optimizer):
        for parameters in optimizer.fp16_groups:
            yield JoinedParameters(parameters, _adjacent(one.numel() for one in parameters))
    elif optimizer is inner or isinstance(optimizer, FP16_UnfusedOptimizer):
        own_groups = [group["params"] for group in inner.param_groups]
        for parameter in chain.from_iterable(own_groups if optimizer is inner else optimizer.fp16_groups):
            yield JoinedParameters([parameter], [0])
    else:
        raise CheckpointError(
            f"{stock_class(optimizer).__name__}: it is unknown where this optimizer keeps master weights and states, "
            "so torch cannot save them. Use ZeRO 0 to 3, BF16_Optimizer or FP16_Optimizer, or save by checkpoint.save()"
        )


def _adjacent(sizes: Iterable[int]) -> list[int]:
    """Return where values of these sizes begin if one follows the other."""
    return list(accumulate(sizes, initial=0))[:-1]


def _held_by_optimizer(engine: DeepSpeedEngine) -> Iterator[Held]:
    """Yield every parameter of this rank's optimizer, also those that other ranks hold completely."""
    optimizer, inner = engine.optimizer, inner_optimizer(engine)
    if inner is None:
        return
    masters = [(one, number) for number, group in enumerate(inner.param_groups) for one in group["params"]]
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        if optimizer.swap_optimizer or optimizer.params_in_nvme_and_cpu:
            raise CheckpointError(
                "offload to NVMe keeps optimizer states in files of each host, which torch cannot save: save with "
                "checkpoint.save()"
            )
        masters = [
            (one, optimizer.sub_group_to_group_id[number])
            for number, one in enumerate(optimizer.fp32_partitioned_groups_flat)
        ]
    for joined, (master, number) in zip(_joined_parameters(optimizer, inner), masters, strict=True):
        for parameter, begin in zip(joined.parameters, joined.begins, strict=True):
            yield Held(parameter, master, *_own_part(optimizer, joined, parameter, begin, number), number)


def _own_part(
    optimizer: Any, joined: JoinedParameters, parameter: Any, begin: int, number: int
) -> tuple[int, int, int]:
    """Return the first element of this rank's part of a parameter, their number, and their position in the tensor."""
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return *_span_of_zero_3(parameter), begin
    if joined.process_group is None:
        return 0, parameter.numel(), begin
    if getattr(optimizer, "round_robin_gradients", False):  # the parameters store the addresses without it
        size = int(optimizer.partition_size[number])
        first = size * dist.get_rank(joined.process_group)
        start, end = max(begin, first), min(begin + parameter.numel(), first + size)
        return (start - begin, end - start, start - first) if start < end else (0, 0, 0)
    if (found := parameter._hp_mapping) is None:
        return 0, 0, 0
    there, here = found.lp_fragment_address, found.hp_fragment_address
    return there.start, there.numel, here.start


def _span_of_zero_3(parameter: Any) -> tuple[int, int]:
    """Return the first element and the number of elements of this rank's part of a parameter, without padding."""
    numel = int(parameter.partition_numel())
    start = min(int(parameter.ds_numel), dist.get_rank(parameter.ds_process_group) * numel)
    return start, min(numel, int(parameter.ds_numel) - start)


def begin_states(inner: torch.optim.Optimizer, found: Iterable[Held]) -> None:
    """Create the initial states of every tensor that the optimizer steps on, where it has none yet.

    torch does that by a step without gradients at a learning rate of zero. Such a step counts, and turns a weight of
    -0.0 into 0.0. Here another optimizer of the same class takes it, with a parameter of one element. If none can be
    created from the groups alone, CheckpointError is raised.
    """
    for one in {id(one.master): one for one in found if one.parameter.requires_grad}.values():
        if one.group is None or inner.state.get(one.master):
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
        for key, value in twin.param_groups[0].items():
            if torch.is_tensor(value) or isinstance(value, (int, float)):  # such as a count of steps
                inner.param_groups[one.group].setdefault(key, _like(value, one.master))


def _like(value: Any, master: torch.Tensor) -> Any:
    """Extend a state of one element to all elements, and set numbers such as the step to zero."""
    if torch.is_tensor(value) and value.shape == (1,):
        return torch.full_like(master, float(value), dtype=value.dtype, requires_grad=False)
    return torch.zeros_like(value) if torch.is_tensor(value) else type(value)()


def update_weights(engine: DeepSpeedEngine, parameters: Iterable[Named]) -> None:
    """Copy the master weights into the module after they were loaded; collective under ZeRO."""
    optimizer: Any = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        optimizer.checkpoint_event_prologue()
        flats = zip(optimizer.fp16_partitioned_groups_flat, optimizer.fp32_partitioned_groups_flat, strict=True)
        for weights, masters in flats:
            weights.data.copy_(masters.data)
        optimizer.checkpoint_event_epilogue()
    elif isinstance(optimizer, (DeepSpeedZeroOptimizer, BF16_Optimizer)):
        optimizer.update_lp_params()
    else:
        for held in (one.held for one in parameters):
            if held.master is not held.parameter:
                held.parameter.data.copy_(held.part_of(held.master).view(held.parameter.shape))


# -- parts of tensors for torch ----------------------------------------------------------------------------------------

_ATEN = torch.ops.aten


class PartOfTensor(torch.Tensor):
    """The boxes of a tensor that this process holds, with the shape of the whole tensor.

    ``torch.distributed.checkpoint`` writes and reads it like a ``DTensor``, through three methods that it looks for on
    tensors. Nothing is gathered or copied, and a reader gets only the boxes that it needs.

    Args:
        shape: shape of the whole tensor.
        boxes: memory of each box, by its offsets in the whole tensor. They are views, read and written in place.
        like: a tensor with the data type and the device of all boxes.
        is_written: whether this process saves the boxes. If not, another process that holds them does.

    >>> memory = torch.arange(5.0)
    >>> part = part_of(memory, Slice((3, 4)), 2, 7)
    >>> part.shape, part.boxes
    (torch.Size([3, 4]), {(0, 2): tensor([[0., 1.]]), (1, 0): tensor([[2., 3., 4.]])})

    Source: torch, ``distributed/_checkpointable.py`` (the methods) and ``distributed/tensor/_shards_wrapper.py``
    (a tensor in several boxes).
    """

    boxes: dict[tuple[int, ...], torch.Tensor]
    is_written: bool

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        boxes: Mapping[tuple[int, ...], torch.Tensor],
        like: torch.Tensor,
        is_written: bool = True,
    ) -> PartOfTensor:
        self: PartOfTensor = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=like.dtype, device=like.device
        )
        self.boxes, self.is_written = dict(boxes), is_written
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PartOfTensor({list(self.shape)}, {len(self.boxes)} boxes here)"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return PartOfTensor, (tuple(self.shape), self.boxes, torch.empty(0, dtype=self.dtype), self.is_written)

    # The methods that torch.distributed.checkpoint calls.

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        if not self.is_written:
            return []
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties.create_from_tensor(memory), size=self.shape
                ),
            )
            for chunk, memory in zip(self.__create_chunk_list__(), self.boxes.values(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(offsets), memory.shape) for offsets, memory in self.boxes.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self.boxes[tuple(index.offset)]

    # Torch's stagers copy the boxes to host memory by these operations while training continues.

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = [*args, *(kwargs or {}).values()]
        given += chain.from_iterable(value for value in given if isinstance(value, (list, tuple)))
        part = next(value for value in given if isinstance(value, PartOfTensor))
        device = (kwargs or {}).get("device") or part.device
        if function is _ATEN.new_empty.default:  # the stager copies the attribute boxes itself
            return cls(part.shape, {}, torch.empty(0, dtype=part.dtype, device=device), part.is_written)
        if function in (_ATEN.zeros_like.default, _ATEN.empty_like.default):
            return part._each(lambda memory: torch.empty_like(memory, device=device))
        if function in (_ATEN.detach.default, _ATEN.clone.default):
            return part._each(function)
        if function is _ATEN.copy_.default:
            target, source = args[:2]  # of the same boxes; or into a plain tensor of a single number
            into = target.boxes if isinstance(target, PartOfTensor) else {(0,) * target.dim(): target}
            assert into.keys() == source.boxes.keys()
            for offsets, memory in source.boxes.items():
                into[offsets].copy_(memory)
            return target
        raise RuntimeError(  # Python's operators would replace a TypeError by one that says nothing
            f"{function}: {part!r} does not support this operation. It holds boxes of a tensor and can be saved and "
            "loaded by torch.distributed.checkpoint only. Compute with the engine's own tensors instead"
        )

    def _each(self, function: Callable[[torch.Tensor], torch.Tensor]) -> PartOfTensor:
        boxes = {offsets: function(memory) for offsets, memory in self.boxes.items()}
        like = next(iter(boxes.values()), torch.empty(0, dtype=self.dtype, device=self.device))
        return PartOfTensor(self.shape, boxes, like, self.is_written)


def part_of(memory: torch.Tensor, of: Slice, start: int, stop: int, is_written: bool = True) -> PartOfTensor:
    """Present the elements ``start:stop`` of a slice as a part of the whole tensor.

    ``memory`` has these elements, or the whole slice, in its shape. This process saves them if ``is_written``.
    """
    return PartOfTensor(of.whole_shape, boxes_in(memory, of, start, stop), memory, is_written)


# -- names -------------------------------------------------------------------------------------------------------------
# Experts are numbered over all ranks of their layer. A parameter that several places of the model share has all of
# their names, and the first one for its optimizer states, as in torch's ``get_state_dict``.

Rename: TypeAlias = "Callable[[str], str | tuple[str, ...]] | Mapping[str, str | tuple[str, ...]] | None"
"""A function or mapping from the names of the engine's module to another program's; a mapping may omit equal names.

A parameter that several places of the other program share gets all of its names.
"""


class Named(NamedTuple):
    """A parameter of this rank, with its names in the whole model."""

    parameter: nn.Parameter
    local: str
    """The first name in the engine's module."""
    names: tuple[str, ...]
    """The names of all places that share it."""
    everywhere: tuple[str, ...]
    """The first name. For an expert, those of the experts with its local number on all ranks of the layer."""
    slice: Slice
    split: SavedSplit | None
    """The split that the module declares, also in a job of one slice."""
    experts: int
    """The number of experts in the layer; 0 if it does not belong to an expert."""
    is_first: bool
    """True if this rank writes it, among the stages and slices that have the same values."""
    held: Held
    """The place of its values: of the master weight, if the optimizer has one."""

    @property
    def is_expert(self) -> bool:
        """True if it belongs to an expert."""
        return self.experts > 0

    def part_of(self, tensor: torch.Tensor, held: Held) -> PartOfTensor:
        """Present this rank's part of the parameter in a tensor with the layout of ``held.master``."""
        return part_of(held.part_of(tensor), self.slice, held.start, held.start + held.numel, self.is_first)


def named_parameters(engine: DeepSpeedEngine, rename: Rename = None) -> list[Named]:
    """Return all parameters of this rank, in the module's order.

    If it is unknown how slices form the whole, or where the optimizer keeps its states, CheckpointError is raised; and
    ValueError if two parameters get the same name.
    """
    if not isinstance(engine.mpu, MpuGrid) and int(engine.mp_world_size) > 1:
        raise CheckpointLayoutError(
            f"the engine's mpu is not a ds_topo grid and has {engine.mp_world_size} model ranks, so it is unknown "
            "which are stages and which are slices: pass a grid as mpu"
        )
    _, place, slices = facts.stage_and_slice(engine)
    experts, new_names = facts.experts_of(engine.module), renaming(rename)
    splits, undeclared, _ = facts.splits_of(engine, experts)
    if undeclared and slices > 1:
        raise CheckpointLayoutError(
            f"{listed(undeclared, 3)} are marked as slices (tensor_model_parallel), but do not declare along "
            "which dimension: set partition_dim on these parameters where they are created, as Megatron's layers do"
        )
    held = {id(one.parameter): one for one in _held_by_optimizer(engine)}
    shared: dict[int, tuple[nn.Parameter, list[str]]] = {}
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        shared.setdefault(id(parameter), (parameter, []))[1].append(name)
    result: list[Named] = []
    owners: dict[str, int] = {}
    for key, (parameter, old_names) in shared.items():
        local, first_names = old_names[0], old_names[:1]
        layer = experts.get(local)
        own = _slice(local, facts.shape_of(parameter), splits.get(local), slices, place)
        if layer is not None and not head_of(local):  # AutoEP's parts are slices of all experts
            own = Slice(own.shape, 0, int(layer.ep_size), int(layer.ep_rank))
        elif layer is not None:
            first_names = [_numbered(local, layer, rank) for rank in range(int(layer.ep_size))]
            old_names = [_numbered(name, layer) for name in old_names]
        names = tuple(dict.fromkeys(new for name in old_names for new in new_names(name)))
        everywhere = tuple(new_names(name)[0] for name in first_names)
        for name in names:
            if owners.setdefault(name, key) != key:
                raise ValueError(f"rename gives two parameters the same name, {name!r}: give each its own")
        experts_of_layer = int(layer.num_experts) if layer is not None else 0
        is_replicated = getattr(parameter, "ds_pipe_replicated", False)
        is_first = not is_replicated and (layer is not None or own.dim is not None or place == 0)
        memory, split = held.get(key) or held_by_module(parameter), splits.get(local)
        result.append(Named(parameter, local, names, everywhere, own, split, experts_of_layer, is_first, memory))
    are_split = any(getattr(layer, "enable_expert_tensor_parallelism", False) for layer in experts.values())
    if slices > 1 and are_split and not any(one.is_expert and one.slice.dim is not None for one in result):
        raise CheckpointLayoutError(
            "experts are split over slices (enable_expert_tensor_parallelism), but none of their parameters declares "
            "along which dimension: set partition_dim on them where they are created, as Megatron's layers do"
        )
    return result


def _slice(name: str, shape: tuple[int, ...], split: SavedSplit | None, slices: int, place: int) -> Slice:
    if split is not None and slices > 1 and (split.dim >= len(shape) or shape[split.dim] % split.stride):
        raise CheckpointLayoutError(
            f"{name!r} {list(shape)} declares partition_dim={split.dim}, partition_stride={split.stride}: there must "
            "be such a dimension, and its size must be a multiple of the stride"
        )
    return Slice.of(shape, split, place, slices)


def renaming(rename: Rename) -> Callable[[str], tuple[str, ...]]:
    """Return a function from a name of the engine's module to the names in the other program.

    It raises ValueError if ``rename`` gives something else than names.
    """
    if rename is None:
        return lambda name: (name,)

    def new_names(name: str) -> tuple[str, ...]:
        new = rename(name) if callable(rename) else rename.get(name, name)
        names = new if isinstance(new, tuple) else (new,)
        if not names or not all(isinstance(one, str) and one for one in names):
            raise ValueError(f"rename gives {abridged(new)} for {name!r}: give a name, or a tuple of names")
        return names

    return new_names


class NamedBuffer(NamedTuple):
    """A buffer of this rank that checkpoints hold."""

    tensor: torch.Tensor
    slice: Slice
    is_expert: bool


def named_buffers(engine: DeepSpeedEngine, rename: Rename = None) -> dict[str, NamedBuffer]:
    """Return this rank's buffers that checkpoints hold, by their names in the whole model or in another program."""
    experts, new_names = facts.experts_of(engine.module), renaming(rename)
    _, place, slices = facts.stage_and_slice(engine)
    found: dict[str, NamedBuffer] = {}
    for name, buffer in facts.saved_buffers(engine.module, of_experts=True).items():
        is_expert = name in experts and head_of(name) != ""
        whole = _numbered(name, experts[name]) if is_expert else name
        own = _slice(name, tuple(buffer.shape), facts.split_of(buffer), slices, place)
        found[new_names(whole)[0]] = NamedBuffer(buffer, own, is_expert)
    return found


def _numbered(name: str, layer: Any, rank: int | None = None) -> str:
    """Replace an expert's number on a rank, by default this one, by its number in the whole layer."""
    if rank is None:
        rank = dist.get_rank(deepspeed_groups._EXPERT_PARALLEL_GROUP[layer.expert_group_name])
    return numbered(name, rank * int(layer.num_local_experts) + number_of(name))


# -- files -------------------------------------------------------------------------------------------------------------


def recorder_of(engine: DeepSpeedEngine) -> FileRecorder:
    """Return a description of the files that this rank is going to save, to which each file is added.

    Files are in DeepSpeed's layout, also if our reducer keeps partitions in another one. Errors are those of
    :func:`named_parameters`.
    """
    named = named_parameters(engine)
    pieces = {one.local: Piece(one.names[0], one.slice) for one in named}
    numbers = {id(one.parameter): number for number, one in enumerate(named)}
    buffers = named_buffers(engine)
    pieces |= {name: Piece(name, one.slice) for name, one in buffers.items()}
    stacked = [one.local for one in named if one.is_expert and not head_of(one.local)]
    orders = []
    for parameters, begins, group in _joined_parameters(engine.optimizer, inner_optimizer(engine)):
        rows = zip(parameters, begins, strict=True)
        known = [(numbers[id(one)], begin) for one, begin in rows if id(one) in numbers]
        orders.append(Order(known, *_place_in(group)))
    of_zero_3: list[Any] = [one.ds_process_group for one in engine.module.parameters() if hasattr(one, "ds_tensor")]
    partition = _place_in(of_zero_3[0] if of_zero_3 else None)
    rank = int(engine.checkpoint_mp_rank)
    layers = [layer.prefix(number) for number, layer in enumerate(facts.layers_of(engine.module))]
    return FileRecorder(rank, pieces, orders, buffers, stacked=stacked, layers=layers, partition=partition)


def _place_in(group: Any) -> tuple[int, int]:
    """Return the number of this rank's partition in a process group, and the number of all."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


# -- progress ----------------------------------------------------------------------------------------------------------


def restore_hyperparameters(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Restore the entries of a group, in place, except those of ``_OF_THE_PROGRAM``.

    Entries that the group does not have are those that an optimizer adds while it steps, such as a count of steps.

    >>> group = {"lr": torch.tensor(0.5), "eps": 0.5}
    >>> restore_hyperparameters(group, {"lr": 0.25, "eps": torch.tensor(0.25), "step": 3, "fused": True})
    >>> group
    {'lr': tensor(0.2500), 'eps': 0.25, 'step': 3}
    """
    for key, value in saved.items():
        if key in _OF_THE_PROGRAM:
            continue
        own = group.get(key)
        if torch.is_tensor(own) and own.shape == torch.as_tensor(value).shape:
            own.copy_(torch.as_tensor(value))
        elif torch.is_tensor(value):
            group[key] = value.item() if isinstance(own, (int, float)) else value.clone()
        else:
            group[key] = copy.deepcopy(value)


@contextmanager
def with_same_groups(inner: torch.optim.Optimizer | None) -> Iterator[None]:
    """Keep the groups of an optimizer, and their list, while it loads: a schedule may hold them.

    ``load_state_dict()`` of torch puts new ones in their place.
    """
    kept = inner.param_groups if inner is not None else []
    yield
    if inner is not None and inner.param_groups is not kept:
        for group, loaded in zip(kept, inner.param_groups, strict=True):
            group.clear()
            group.update(loaded)
        inner.param_groups = kept


def progress_of(engine: DeepSpeedEngine) -> dict[str, Any]:
    """Return steps, loss scale and learning-rate scheduler, for :func:`restore_progress`."""
    found: dict[str, Any] = {name: int(getattr(engine, name)) for name in COUNTS}
    scaler = loss_scaler_of(engine)
    found.update((name, getattr(scaler, name)) for name in OF_LOSS_SCALE if hasattr(scaler, name))
    if hasattr(engine.lr_scheduler, "state_dict"):
        found[SCHEDULER] = engine.lr_scheduler.state_dict()
    return found


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
