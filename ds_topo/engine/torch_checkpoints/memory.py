"""Where an engine has the master weights and optimizer states of each parameter, on this rank.

Every one of DeepSpeed's optimizers keeps them in tensors that its inner optimizer steps on: the parameters themselves,
copies of them, or flat vectors of many parameters, of which ZeRO gives each rank a partition. A state has the layout of
the tensor that it belongs to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from ds_topo.errors import CheckpointError


@dataclass(frozen=True, eq=False)
class Trained:
    """A parameter that the optimizer has, and where; all numbers are elements."""

    parameter: nn.Parameter
    group: int
    """Of the optimizer's groups."""
    master: torch.Tensor
    """What the inner optimizer steps on."""
    start: int
    """Where this rank's part of the parameter begins."""
    numel: int
    """Of this rank's part."""
    address: int
    """Where it begins in ``master``."""

    @property
    def is_whole(self) -> bool:
        """Whether ``master`` is this parameter, or a copy of it, and nothing else."""
        return self.master.shape == self.parameter.shape and self.numel == self.parameter.numel()

    def part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of the parameter in a tensor of the layout of ``master``: a view."""
        held = tensor.detach()
        return held if self.is_whole else held.view(-1)[self.address : self.address + self.numel]


def shape_of(parameter: nn.Parameter) -> tuple[int, ...]:
    """Of a parameter of this rank's slice, partitioned or not."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def inner_optimizer(engine: DeepSpeedEngine) -> torch.optim.Optimizer | None:
    """What steps, whatever DeepSpeed has wrapped around it."""
    optimizer: Any = engine.optimizer
    while getattr(optimizer, "optimizer", optimizer) is not optimizer:
        optimizer = optimizer.optimizer
    return optimizer if hasattr(optimizer, "param_groups") else None


def trained(engine: DeepSpeedEngine) -> list[Trained]:
    """Every parameter that the optimizer of this rank has, also those of which other ranks have all.

    Raises:
        CheckpointError: the optimizer keeps its states elsewhere.
    """
    optimizer: Any = engine.optimizer
    inner = inner_optimizer(engine)
    if inner is None:
        return []
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return list(_of_zero_3(optimizer))
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        return list(_of_partitions(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups))
    if isinstance(optimizer, BF16_Optimizer):
        return list(_of_partitions(optimizer.bf16_groups, optimizer.fp32_groups_flat_partition))
    if isinstance(optimizer, FP16_Optimizer):
        return list(_of_flat_groups(optimizer.fp16_groups, optimizer.fp32_groups_flat))
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        return list(_of_copies(optimizer.fp16_groups, optimizer.fp32_groups))
    if optimizer is inner:
        groups = [list(group["params"]) for group in inner.param_groups]
        return list(_of_copies(groups, groups))
    raise CheckpointError(
        f"{type(optimizer).__name__}: where it has master weights and optimizer states is not known. Save for torch "
        "from ZeRO 0 to 3, BF16_Optimizer or FP16_Optimizer, or with checkpoint.save()"
    )


def _of_copies(groups: Any, masters: Any) -> Iterator[Trained]:
    """Each parameter has a tensor of its own."""
    for number, (parameters, copies) in enumerate(zip(groups, masters, strict=True)):
        for parameter, master in zip(parameters, copies, strict=True):
            yield Trained(parameter, number, master, 0, parameter.numel(), 0)


def _of_flat_groups(groups: Any, masters: Any) -> Iterator[Trained]:
    """Every rank has the whole vector of a group."""
    for number, (parameters, master) in enumerate(zip(groups, masters, strict=True)):
        ends = accumulate(parameter.numel() for parameter in parameters)
        for parameter, end in zip(parameters, ends, strict=True):
            numel = parameter.numel()
            yield Trained(parameter, number, master, 0, numel, end - numel)


def _of_partitions(groups: Any, masters: Any) -> Iterator[Trained]:
    """Each rank has a partition of a group's vector: DeepSpeed notes on parameters where, and so does our layout."""
    for number, (parameters, master) in enumerate(zip(groups, masters, strict=True)):
        for parameter in parameters:
            found = parameter._hp_mapping
            if found is None:
                yield Trained(parameter, number, master, 0, 0, 0)
            else:
                there, here = found.lp_fragment_address, found.hp_fragment_address
                yield Trained(parameter, number, master, there.start, there.numel, here.start)


def _of_zero_3(optimizer: DeepSpeedZeroOptimizer_Stage3) -> Iterator[Trained]:
    """Each rank has a part of every parameter; those of a sub-group lie one after the other."""
    if optimizer.swap_optimizer or optimizer.params_in_nvme_and_cpu:
        raise CheckpointError(
            "offload to NVMe: optimizer states are in files of this host. Save with checkpoint.save()"
        )
    rows = zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True)
    for number, (parameters, master) in enumerate(rows):
        address = 0
        for parameter in parameters:
            start, numel = span_of_zero_3(parameter)
            yield Trained(parameter, optimizer.sub_group_to_group_id[number], master, start, numel, address)
            address += int(parameter.partition_numel())


def span_of_zero_3(parameter: Any) -> tuple[int, int]:
    """First element and number of elements of this rank's part of a partitioned parameter, without padding."""
    numel = int(parameter.partition_numel())
    start = min(int(parameter.ds_numel), dist.get_rank(parameter.ds_process_group) * numel)
    return start, min(numel, int(parameter.ds_numel) - start)


# -- after masters were loaded -----------------------------------------------------------------------------------------


def update_weights(engine: DeepSpeedEngine, found: list[Trained]) -> None:
    """Give the module what master weights hold now; collective under ZeRO."""
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
