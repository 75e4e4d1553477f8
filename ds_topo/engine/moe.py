"""Mixtures of experts inside DeepSpeed's engines: what they get wrong about experts on a grid, and what is done."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import groups as deepspeed_groups

from ds_topo.engine import changes
from ds_topo.engine.expert_registry import registry
from ds_topo.engine.mpu import MpuGrid
from ds_topo.engine.norms import check_norm
from ds_topo.errors import ExpertGroupError
from ds_topo.ledger import Change, Make, ledger

# -- groups and tokens ------------------------------------------------------------------------------------------------


def _refused_on_a_grid(create: Any) -> Any:
    """In place of DeepSpeed's creation, which would hang the stages that have no such layer."""

    @wraps(create)
    def create_or_refuse(expert_parallel_size_: int, *args: Any, **options: Any) -> None:
        if not registry.serves_current_engine:
            create(expert_parallel_size_, *args, **options)
            return
        raise ExpertGroupError(
            f"a MoE layer asks for ep_size={expert_parallel_size_}, but create_expert_groups() was called for "
            f"{registry.names()} only: call it with expert_parallel_size={expert_parallel_size_} too, on every rank, "
            "before deepspeed.initialize(), or give the layer one of those sizes"
        )

    return create_or_refuse


def _slices_of_current_grid(slices: Any) -> Any:
    @wraps(slices)
    def slices_of_experts() -> int:
        groups = registry.of(deepspeed_groups.mpu)
        if not groups:
            return int(slices())
        sliced = any(known.plan.expert_tensor_parallel for known in groups)
        return groups[0].grid.get_slice_parallel_world_size() if sliced else 1

    return slices_of_experts


def _gathered_into_a_list(gather: Any) -> Any:
    @wraps(gather)
    def gather_tokens(tokens: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Tokens of all slices, one after another along ``dim``."""
        if not isinstance(deepspeed_groups.mpu, MpuGrid):
            others: torch.Tensor = gather(tokens, dim)
            return others
        group = deepspeed_groups.mpu.get_slice_parallel_group()
        like = torch.contiguous_format
        parts = [torch.empty_like(tokens, memory_format=like) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, tokens.contiguous(), group=group)
        return torch.cat(parts, dim=dim)

    return gather_tokens


# -- an engine with experts -------------------------------------------------------------------------------------------


def _checked(configure_checkpointing: Any) -> Any:
    """At the end of an engine's construction, before its first step."""

    @wraps(configure_checkpointing)
    def configure(engine: DeepSpeedEngine) -> None:
        configure_checkpointing(engine)
        if isinstance(engine.mpu, MpuGrid):
            _check_tensor_parallelism(engine)
            _check_sequence_scale(engine)
            check_norm(engine)
            _pad_capacities(engine)

    return configure


def _check_tensor_parallelism(engine: DeepSpeedEngine) -> None:
    for name, module in engine.module.named_modules():
        groups = registry.find(module.expert_group_name) if isinstance(module, MoE) else None
        if groups is None or engine.mpu.get_slice_parallel_world_size() == 1:
            continue
        if module.enable_expert_tensor_parallelism != groups.plan.expert_tensor_parallel:
            raise ExpertGroupError(
                f"MoE layer {name!r} has enable_expert_tensor_parallelism={module.enable_expert_tensor_parallelism}, "
                f"but its groups were created with expert_tensor_parallel={groups.plan.expert_tensor_parallel}: "
                "give both the same value"
            )


def _check_sequence_scale(engine: DeepSpeedEngine) -> None:
    """DeepSpeed sums dense gradients over ``seq`` but averages those of experts, without ZeRO."""
    if engine.sequence_parallel_size > 1 and engine.has_moe_layers and not engine.zero_optimization():
        raise ExpertGroupError(
            "experts with sequence parallelism and ZeRO stage 0: DeepSpeed would scale the gradients of experts by "
            f"1/{engine.sequence_parallel_size} of all others; use ZeRO stage 1 or 2"
        )


def _pad_capacities(engine: DeepSpeedEngine) -> None:
    """Let ``model`` peers split the slots of an expert evenly: DeepSpeed asserts that they can."""
    slices = engine.mpu.get_slice_parallel_world_size()
    if slices > 1:
        for gate in engine.gate_modules:
            hook = gate.register_forward_hook(lambda _gate, _inputs, routes: _pad_capacity(routes, slices))
            engine.mpu.on_destroy(hook.remove)


def _pad_capacity(routes: tuple[Any, ...], slices: int) -> tuple[Any, ...]:
    """``(auxiliary loss, capacity, experts, ...)`` with the capacity rounded up to a multiple of ``slices``."""
    loss, capacity, *rest = routes
    return (loss, torch.as_tensor(-(-int(capacity) // slices) * slices), *rest)


# -- checkpoints ------------------------------------------------------------------------------------------------------


def _saved_by_slice(save: Any) -> Any:
    """Let each slice write the files that it reads.

    DeepSpeed puts the writer's model parallel rank into the names and lets expert data parallel rank 0 write. Where
    replicas of an expert sit on several slices, the others' files would be missing.
    """

    @wraps(save)
    def save_moe_checkpoint(engine: DeepSpeedEngine, *args: Any, **options: Any) -> Any:
        if not registry.of(engine.mpu):
            return save(engine, *args, **options)
        _check_optimizer_files(engine)
        with ledger.bound(changes.WRITER_OF_EXPERTS, _first_writes):
            return save(engine, *args, **options)

    return save_moe_checkpoint


def _first_writes(place: Any) -> Any:
    def writer_first(name: str) -> int:
        known = registry.find(name)
        return int(place(name)) if known is None else int(not known.writes_checkpoint)

    return writer_first


def _check_optimizer_files(engine: DeepSpeedEngine) -> None:
    """Without ZeRO, DeepSpeed writes one optimizer file for each expert parallel rank of the greatest size."""
    sizes = registry.sizes()
    others = sorted(size for size in sizes if max(sizes) % size)
    if others and not engine.zero_optimization():
        raise ExpertGroupError(
            f"expert parallel sizes {others} do not divide the greatest, {max(sizes)}: without ZeRO, DeepSpeed writes "
            "one optimizer state for each place in the greatest group, so that some experts' would be lost. Use ZeRO "
            "stage 1 or 2, or sizes that divide each other"
        )


WHILE_EXPERTS_EXIST: tuple[tuple[Change, Make], ...] = (
    (changes.CREATE_EXPERT_GROUPS, _refused_on_a_grid),
    (changes.CREATE_TENSOR_PARALLEL_EXPERT_GROUPS, _refused_on_a_grid),
    (changes.EXPERT_SLICES, _slices_of_current_grid),
    (changes.GATHER_TOKENS, _gathered_into_a_list),
    (changes.CONFIGURE_CHECKPOINTING, _checked),
    (changes.SAVE_EXPERTS, _saved_by_slice),
)
