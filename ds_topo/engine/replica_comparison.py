"""Compare, bit by bit, the tensors that must be equal on ranks of an engine (``check_replicas``).

Every rank computes two 64-bit sums of each tensor's bits, on the tensor's device. The ranks then agree through the
store that all of them compare after the same step, so that a comparison cannot pair up with another collective. One
all-reduce per group detects whether any of its tensors differs. Only in that case the ranks exchange their names and
values, for the first tensor that differs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups as deepspeed_groups
from torch import nn

from ds_topo.base.backends import device_in_use
from ds_topo.base.marks import expert_group_name, inner_optimizer
from ds_topo.base.torch_names import devices_of
from ds_topo.engine.current_mpu import agreement, axes_of_engine
from ds_topo.errors import ReplicaError, warn
from ds_topo.mpu import MpuGrid
from ds_topo.process_groups.creation import ProcessGroup, extremes, gathered_by_value, number_of
from ds_topo.process_groups.process_grid import ProcessGrid
from ds_topo.topology.axes import MODEL, PIPE


def check_replicas(engine: DeepSpeedEngine, *, slices: bool = False) -> None:
    """Compare the replicas of an engine's parameters and optimizer states bit by bit; collective over its ranks.

    It compares

    - parameters, over the ranks that average gradients; experts over the replicas of each;
    - without ZeRO, which partitions them, optimizer states and master weights, over the same ranks;
    - tied weights, over the stages of a pipeline;
    - with ``slices``, over the ranks of the ``model`` axis, parameters that are not marked as a slice
      (``tensor_model_parallel``), and the random states, which must be equal for replicated dropout.

    It does not compare buffers. A comparison takes one pass over the tensors and an all-reduce of 48 bytes for each.
    Every rank of the engine raises, whichever replicas differ. To find the step after which they differ, call it every
    few steps::

        if engine.global_steps % 100 == 0:
            check_replicas(engine)

    Args:
        engine: the result of ``deepspeed.initialize``.
        slices: compare also the slices of a ``model`` axis.

    Raises:
        TypeError: ``engine`` is not an engine.
        ValueError: ``slices`` is set without a grid, or ZeRO stage 3 keeps no replicas.
        DisagreementError: ranks compare after different steps or with different arguments, do not compare, or cannot
            compute a digest; the message names them.
        ReplicaError: replicas differ; the message names the first tensor that differs, the ranks and their hosts.
    """
    if not isinstance(engine, DeepSpeedEngine):
        raise TypeError(
            f"check_replicas: {type(engine).__name__} is not an engine: pass what deepspeed.initialize returns"
        )
    if int(engine.zero_optimization_stage()) == 3:
        raise ValueError(
            "check_replicas: ZeRO stage 3 partitions parameters and keeps no replicas to compare: use stage 0, 1 or 2"
        )
    if slices and not isinstance(engine.mpu, MpuGrid):
        raise ValueError("slices=True needs an engine whose mpu is a grid: pass it a grid, or leave slices=False")
    everyone = dist.group.WORLD
    if isinstance(engine.mpu, MpuGrid):
        everyone = engine.mpu.get_group(axes_of_engine(engine.mpu, isinstance(engine, PipelineEngine)))
    assert everyone is not None
    by_group: dict[ProcessGroup, list[Replicated]] = defaultdict(list)
    sums: dict[int, torch.Tensor] = {}
    members, when = dist.get_process_group_ranks(everyone), f"after step {engine.global_steps}"
    with agreement(members, "a comparison of replicas", f"{when}, slices={slices}"):
        for each in replicated(engine, slices):
            by_group[each.group].append(each)
        unique = {id(each.tensor): each.tensor for group in by_group.values() for each in group}
        sums = {identity: digest(tensor) for identity, tensor in unique.items()}
    found = [_difference(brought, group, sums) for group, brought in by_group.items()]
    text = next((difference for difference in found if difference), "")
    first = torch.tensor([dist.get_rank(everyone) if text else _NOBODY], device=_device_of(everyone))
    dist.all_reduce(first, dist.ReduceOp.MIN, group=everyone)
    if int(first) == _NOBODY:
        return
    counted = torch.tensor([int(bool(text))], device=_device_of(everyone))
    dist.all_reduce(counted, group=everyone)
    said = [text]
    dist.broadcast_object_list(said, src=dist.get_global_rank(everyone, int(first)), group=everyone)
    raise ReplicaError(
        f"replicas differ {when}, on {int(counted)} of {len(members)} ranks; {said[0]}\n"
        "A rank has skipped or repeated a step, changed values outside of a step, or computed other results."
    )


def compare_slices(engine: DeepSpeedEngine, model: nn.Module) -> None:
    """Warn if the ranks along ``model`` start with wrong parameters; collective over the engine's ranks.

    Parameters without the mark of a slice must be equal on all slices. If they differ, a program has built them from
    different seeds, or has not marked slices. If nothing is marked and all parameters are equal, each slice may train
    the whole model. If all slices are equal, something has overwritten them. Only the first values of each parameter
    are compared, so that large models start without delay.
    """
    grid = engine.mpu
    if grid.get_axis_size(MODEL) == 1:
        return
    group = grid.get_group(MODEL)
    samples = [
        replace(each, tensor=each.tensor.detach().reshape(-1)[:_SAMPLED], whole=each.tensor)
        for each in _along_model(model.named_parameters(), group)
        if not (each.tensor.is_meta or hasattr(each.tensor, "__tensor_flatten__"))  # such as a DTensor
    ]
    sums = {id(each.tensor): digest(each.tensor) for each in samples}
    text = _difference(samples, group, sums)
    are_equal = _slices_are_equal(samples, group, sums)
    may_be_split = _may_be_split(engine, model)
    stages = grid.get_model_parallel_group()
    if isinstance(engine, PipelineEngine) and dist.get_world_size(stages) > 1:
        flag = torch.tensor(int(may_be_split), device=_device_of(stages))
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=stages)
        may_be_split = bool(flag)
    if grid.get_axis_rank(MODEL) or grid.get_sample_rank():
        return
    if text:
        warn(
            f"ranks along 'model' start with different parameters; {text}\nGive all of them the same seed before they "
            "create the model (torch.manual_seed(0)), or mark slices by parameter.tensor_model_parallel = True: "
            "gradient norms count a parameter without the mark on one rank only"
        )
    elif are_equal and grid.check_weights:
        warn(
            "all ranks along 'model' start with the same slices: DistributedDataParallel or a broadcast over all ranks "
            "has overwritten them, or they were created from one seed. Give each slice its own part of the whole "
            "weight, or set grid.check_weights = False if equal slices are intended"
        )
    elif samples and not may_be_split and grid.check_weights and grid.get_axis_rank(PIPE) == 0:
        warn(
            f"{grid.get_axis_size(MODEL)} ranks along 'model' train copies of the whole model, because nothing is "
            "split: no parameter is marked as a slice, and no layer has a process group. Use AutoTP "
            '("tensor_parallel", whose patterns must match names of layers), or layers of ds_topo.layers or your own '
            "that mark their slices (parameter.tensor_model_parallel = True), or leave the axis 'model' out; set "
            "grid.check_weights = False if copies are intended"
        )


def _slices_are_equal(samples: Sequence[Replicated], group: ProcessGroup, sums: dict[int, torch.Tensor]) -> bool:
    """Tell whether all ranks of a group have the same slices; collective over it. Constant slices say nothing."""
    telling = [each for each in samples if each.is_slice and bool((each.tensor != each.tensor[:1]).any())]
    device = _device_of(group)
    content = torch.zeros(2, dtype=torch.int64, device=device)
    for each in telling:
        content += sums[id(each.tensor)].to(device)
    highest, lowest = extremes(torch.cat([content, torch.tensor([len(telling)], device=device)]), group)
    return bool(telling) and bool((highest == lowest).all())


def _may_be_split(engine: DeepSpeedEngine, model: nn.Module) -> bool:
    """Tell whether something in a model may divide its work along ``model``."""
    if engine.has_moe_layers or engine._config.hybrid_engine.enabled:
        return True
    if not isinstance(engine, PipelineEngine) and engine.mpu.get_axis_size(PIPE) > 1:
        return True  # other stages have engines of their own
    if any(hasattr(each, "__tensor_flatten__") or is_model_parallel_parameter(each) for each in model.parameters()):
        return True
    owners = (dist.ProcessGroup, ProcessGrid)
    return any(isinstance(value, owners) for layer in model.modules() for value in vars(layer).values())


# -- tensors that must be alike ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Replicated:
    """A tensor that must be equal on all ranks of a group."""

    name: str
    tensor: torch.Tensor
    group: ProcessGroup
    axes: str
    """The axes of the group, for messages."""
    is_slice: bool = False
    """True if this rank holds its own slice. A tensor is not compared if it is a slice on all ranks."""
    whole: torch.Tensor | None = None
    """The tensor of which only ``tensor``, its first values, are compared; None if they are all values."""


def _kind_of(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def replicated(engine: DeepSpeedEngine, slices: bool) -> Iterator[Replicated]:
    """Yield what must be equal on several ranks; with ``slices`` also along ``model``. Compared here and by verify."""
    is_pipeline = isinstance(engine, PipelineEngine)
    dense = engine.seq_data_parallel_group
    named = list(engine.module.named_parameters())
    for name, parameter in named:
        yield Replicated(name, parameter, *_group_of(parameter, dense))
    averages = engine.pipeline_enable_backward_allreduce if is_pipeline else engine.enable_backward_allreduce
    if averages and not isinstance(engine.optimizer, (BF16_Optimizer, DeepSpeedZeroOptimizer)):
        yield from _states(inner_optimizer(engine), {id(parameter): name for name, parameter in named}, dense)
    if is_pipeline:
        numbers: Counter[ProcessGroup] = Counter()  # per group: stages have other tied layers, too
        for weight, group in engine.module.get_tied_weights_and_groups():
            yield Replicated(f"tied weight {numbers[group]}", weight, group, "pipe")
            numbers[group] += 1
    if slices and engine.mpu.get_axis_size(MODEL) > 1:
        group = engine.mpu.get_group(MODEL)
        yield from _along_model(named, group)
        yield Replicated("random state of the CPU", torch.get_rng_state(), group, "model")
        if device_in_use() is not None:
            yield Replicated("random state of the GPU", get_accelerator().get_rng_state(), group, "model")


def _along_model(named: Iterable[tuple[str, nn.Parameter]], group: ProcessGroup) -> Iterator[Replicated]:
    for name, parameter in named:
        # Copies of tied weights have no reliable marks, and experts differ between slices unless marked. A program may
        # mark a replicated parameter as a slice on one rank, so that it counts once in norms.
        if not getattr(parameter, "ds_pipe_replicated", False) and expert_group_name(parameter) is None:
            yield Replicated(name, parameter, group, "model", is_slice=bool(is_model_parallel_parameter(parameter)))


def _states(optimizer: Any, names: dict[int, str], dense: ProcessGroup) -> Iterator[Replicated]:
    """Yield the states of an optimizer, and master weights that are not the module's parameters."""
    for number, group in enumerate(getattr(optimizer, "param_groups", [])):
        for index, parameter in enumerate(group["params"]):
            known = names.get(id(parameter))
            label = known or f"master weight {index} of parameter group {number}"
            place = _group_of(parameter, dense)
            if known is None:
                place = _expert_group(group["name"]) if group.get("moe") else place
                yield Replicated(label, parameter, *place)
            for key, value in sorted(optimizer.state.get(parameter, {}).items(), key=str):
                if torch.is_tensor(value):
                    yield Replicated(f"{key} of {label}", value, *place)


def _group_of(parameter: torch.Tensor, dense: ProcessGroup) -> tuple[ProcessGroup, str]:
    name = expert_group_name(parameter)
    return (dense, "data") if name is None else _expert_group(name)


def _expert_group(name: str) -> tuple[ProcessGroup, str]:
    return deepspeed_groups._EXPERT_DATA_PARALLEL_GROUP[name], f"expert data of {name}"


# -- comparing --------------------------------------------------------------------------------------------------------

_NOBODY = 1 << 31
"""The value of a rank that has found no difference; other ranks send their group rank."""
_SAMPLED = 64
"""The number of values of each parameter that are compared when an engine starts."""


def _difference(tensors: Sequence[Replicated], group: ProcessGroup, sums: dict[int, torch.Tensor]) -> str:
    """Describe the difference in a group, with the same text on all its ranks, or return ""; collective over it."""
    if dist.get_world_size(group) == 1:
        return ""
    device = _device_of(group)
    kinds = "\n".join(f"{each.name} {_kind_of(each.tensor)}" for each in tensors)
    number = number_of(kinds)
    highest, lowest = extremes(torch.tensor([number], device=device), group)
    if bool(highest != lowest):
        own = f"{len(tensors)} tensors, from {tensors[0].name!r} on; names, types and shapes {number:014x}"
        said = gathered_by_value(own, group)
        return f"ranks along {tensors[0].axes} do not have the same tensors:{said}"
    words = torch.stack([sums[id(each.tensor)].to(device) for each in tensors])
    slices = torch.tensor([[int(each.is_slice)] for each in tensors], device=device)
    highest, lowest = extremes(torch.cat([words, slices], 1), group)
    differs = (highest != lowest)[:, :2].any(1) & (lowest[:, 2] == 0)
    if not differs.any():
        return ""
    first = tensors[int(differs.nonzero()[0])]
    own = " ".join(f"{word & 0xFFFFFFFFFFFFFFFF:016x}" for word in sums[id(first.tensor)].tolist())
    compared = len(tensors) - int(lowest[:, 2].sum())
    kind = _kind_of(first.tensor if first.whole is None else first.whole)
    what = f"{int(differs.sum())} of {compared} tensors along {first.axes}, first {first.name!r} ({kind})"
    return f"{what}:{gathered_by_value(own, group)}"


def _device_of(group: ProcessGroup) -> torch.device:
    """Return the device on which a group's tensors must be."""
    devices = devices_of(group)
    return torch.device("cpu" if "cpu" in devices else devices[0])


# -- digests ----------------------------------------------------------------------------------------------------------

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""The integers as which elements are read, by their size; an element of eight bytes becomes two."""
_AT_A_TIME = 1 << 20
"""The number of elements that are processed at once, which limits the memory of a digest."""
_MIXERS = (-0x61C8864680B583EB, -0x4B47D0C5A1A6B4D9)
"""Odd multipliers that turn places into pseudorandom weights."""


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return two 64-bit sums, ``[2]``, of a tensor's bits: plain, and weighted by the places of its elements.

    >>> (digest(torch.tensor([1, 2, 3])) == digest(torch.tensor([1, 3, 2]))).tolist()
    [True, False]
    """
    if tensor.is_meta:
        raise ValueError("a tensor on the meta device has no values to compare: load or initialise its values first")
    tensor = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    dense = (tensor if tensor.layout == torch.strided else tensor.to_dense()).contiguous()
    flat = dense.as_strided((dense.numel(),), (1,))  # a single element may have any stride
    bits = flat.to(torch.int8) if flat.dtype == torch.bool else flat.view(_INTEGERS[flat.itemsize])
    sums = torch.zeros(2, dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), _AT_A_TIME):
        values = bits[start : start + _AT_A_TIME].to(torch.int64)
        mixed = torch.arange(start + 1, start + 1 + len(values), device=bits.device).mul_(_MIXERS[0])
        weights = mixed.bitwise_xor_(mixed >> 29).mul_(_MIXERS[1])
        sums += torch.stack([values.sum(), weights.mul_(values).sum()])
    return sums
