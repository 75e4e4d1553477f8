"""Our expert groups inside DeepSpeed: where its MoE layers find them, and what its engine gets wrong about them.

Registration binds names of ``deepspeed.utils.groups`` and methods of DeepSpeed's engine and ZeRO optimizer for as long
as expert groups exist; the last ``destroy()`` puts back what was there.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import wraps
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.moe import mappings
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups as deepspeed_groups

from ds_topo.engine.expert_norm import clip_gradients, zero_gradient_norm
from ds_topo.engine.grid import PipelineParallelGrid
from ds_topo.errors import ExpertGroupError
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.topology.expert_tables import ExpertPlan
from ds_topo.topology.rank_tables import MODEL, PIPE


@dataclass(frozen=True, eq=False)
class ExpertGroups:
    """The expert groups of one size as one rank sees them, registered with DeepSpeed until ``destroy()``."""

    grid: PipelineParallelGrid
    plan: ExpertPlan
    expert_group: ProcessGroup
    expert_data_group: ProcessGroup

    @property
    def expert_ranks(self) -> list[int]:
        """Global ranks, ascending, that hold every expert once."""
        return list(self.grid.to_global(self.plan.expert_ranks(self.grid.grid_rank)))

    @property
    def expert_data_ranks(self) -> list[int]:
        """Global ranks, ascending, that hold the same experts as this one."""
        return list(self.grid.to_global(self.plan.expert_data_ranks(self.grid.grid_rank)))

    @property
    def writes_checkpoint(self) -> bool:
        """Whether this rank writes the files of its experts that its slice reads."""
        return self.plan.writes_checkpoint(self.grid.grid_rank)

    def destroy(self) -> None:
        """Take the registration back; the process groups themselves live as long as the grid. Twice is once."""
        registry.remove(self)


class ExpertRegistry:
    """The one owner of what DeepSpeed is told about expert groups."""

    def __init__(self) -> None:
        self._by_name: dict[str, ExpertGroups] = {}
        self._bindings = ExitStack()

    def find(self, name: str) -> ExpertGroups | None:
        """The groups registered under a name."""
        return self._by_name.get(name)

    def names(self) -> list[str]:
        """Names in use, in order of registration."""
        return list(self._by_name)

    def sizes(self) -> set[int]:
        """Expert parallel sizes in use."""
        return {groups.plan.expert_parallel_size for groups in self._by_name.values()}

    def serves(self, mpu: Any) -> bool:
        """Whether there are expert groups of this mpu's grid."""
        return isinstance(mpu, PipelineParallelGrid) and any(
            groups.grid.shares_groups_with(mpu) for groups in self._by_name.values()
        )

    def check(self, grid: PipelineParallelGrid, plan: ExpertPlan) -> None:
        """Raise ``ExpertGroupError`` if this plan cannot be registered beside what is."""
        known = self.find(plan.name)
        if known is not None and (known.plan != plan or not known.grid.shares_groups_with(grid)):
            raise ExpertGroupError(
                f"expert groups {plan.name!r} are already registered, for {known.grid} with {known.plan}: DeepSpeed "
                "keeps one table per name; call destroy() on those groups, or on their grid, first"
            )
        if known is None and plan.name in deepspeed_groups._EXPERT_PARALLEL_GROUP:
            raise ExpertGroupError(
                f"DeepSpeed already created groups {plan.name!r} of its own, from rank arithmetic: call "
                "create_expert_groups() before deepspeed.initialize()"
            )
        for other in self._by_name.values():
            if other.plan.expert_tensor_parallel != plan.expert_tensor_parallel:
                raise ExpertGroupError(
                    f"expert_tensor_parallel={plan.expert_tensor_parallel} for {plan.name!r}, but "
                    f"{other.plan.expert_tensor_parallel} for {other.plan.name!r}: DeepSpeed keeps one setting for all "
                    "MoE layers of a process; choose one"
                )

    def add(self, groups: ExpertGroups) -> None:
        """Show DeepSpeed these groups."""
        if not self._by_name:
            self._bind(groups)
        name = groups.plan.name
        self._by_name[name] = groups
        deepspeed_groups._EXPERT_PARALLEL_GROUP[name] = groups.expert_group
        deepspeed_groups._EXPERT_PARALLEL_GROUP_RANKS[name] = groups.expert_ranks
        deepspeed_groups._EXPERT_DATA_PARALLEL_GROUP[name] = groups.expert_data_group
        deepspeed_groups._EXPERT_DATA_PARALLEL_GROUP_RANKS[name] = groups.expert_data_ranks
        groups.grid.on_destroy(groups.destroy)

    def remove(self, groups: ExpertGroups) -> None:
        """Hide them again."""
        name = groups.plan.name
        if self.find(name) is not groups:
            return
        del self._by_name[name]
        for table in (
            deepspeed_groups._EXPERT_PARALLEL_GROUP,
            deepspeed_groups._EXPERT_PARALLEL_GROUP_RANKS,
            deepspeed_groups._EXPERT_DATA_PARALLEL_GROUP,
            deepspeed_groups._EXPERT_DATA_PARALLEL_GROUP_RANKS,
        ):
            table.pop(name, None)  # DeepSpeed empties its tables itself when the world is destroyed
        if not self._by_name:
            self._bindings.close()

    def _bind(self, groups: ExpertGroups) -> None:
        slices = groups.grid.get_slice_parallel_world_size() if groups.plan.expert_tensor_parallel else 1
        for owner, name, value in (
            (deepspeed_groups, "expert_tensor_parallel_world_size", slices),
            (deepspeed_groups, "_create_expert_and_data_parallel", _refuse_to_create),
            (deepspeed_groups, "_create_expert_data_and_model_parallel", _refuse_to_create),
            (mappings, "_gather_tokens", _gather_tokens),
            (DeepSpeedEngine, "_configure_checkpointing", _checked(DeepSpeedEngine._configure_checkpointing)),
            (DeepSpeedEngine, "_save_moe_checkpoint", _saved_by_slice(DeepSpeedEngine._save_moe_checkpoint)),
            (DeepSpeedEngine, "clip_fp32_gradients", _clipped(DeepSpeedEngine.clip_fp32_gradients)),
            (DeepSpeedZeroOptimizer, "scaled_global_norm", _normed(DeepSpeedZeroOptimizer.scaled_global_norm)),
        ):
            self._bindings.enter_context(mock.patch.object(owner, name, value))


registry = ExpertRegistry()


def _refuse_to_create(expert_parallel_size_: int, *_: Any, **__: Any) -> NoReturn:
    """In place of DeepSpeed's creation, which would hang the stages that have no such layer."""
    raise ExpertGroupError(
        f"a MoE layer asks for ep_size={expert_parallel_size_}, but create_expert_groups() was called for "
        f"{registry.names()} only: call it with expert_parallel_size={expert_parallel_size_} too, on every rank, "
        "before deepspeed.initialize(), or give the layer one of those sizes"
    )


def _gather_tokens(tokens: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Tokens of all slices, one after another along ``dim``; DeepSpeed's flat buffer is refused by gloo."""
    group = deepspeed_groups.mpu.get_slice_parallel_group()
    parts = [torch.empty_like(tokens, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tokens.contiguous(), group=group)
    return torch.cat(parts, dim=dim)


def _checked(configure_checkpointing: Any) -> Any:
    """At the end of an engine's construction, before its first step."""

    @wraps(configure_checkpointing)
    def configure(engine: Any) -> None:
        configure_checkpointing(engine)
        if isinstance(engine.mpu, PipelineParallelGrid):
            _check_tensor_parallelism(engine)
            _check_sequence_scale(engine)
            _check_norm(engine)
            _pad_capacities(engine)

    return configure


def _check_tensor_parallelism(engine: Any) -> None:
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


def _check_sequence_scale(engine: Any) -> None:
    """DeepSpeed sums dense gradients over ``seq`` but averages those of experts, without ZeRO."""
    if engine.sequence_parallel_size > 1 and engine.has_moe_layers and not engine.zero_optimization():
        raise ExpertGroupError(
            "experts with sequence parallelism and ZeRO stage 0: DeepSpeed would scale the gradients of experts by "
            f"1/{engine.sequence_parallel_size} of all others; use ZeRO stage 1 or 2"
        )


def _check_norm(engine: Any) -> None:
    """Optimizers of fp16 and bf16 whose own norm is wrong, or hangs, and has no seam."""
    grid: PipelineParallelGrid = engine.mpu
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer) or not (engine.fp16_enabled() or engine.bfloat16_enabled()):
        return
    optimizer = type(engine.optimizer).__name__
    if engine.has_moe_layers and engine.gradient_clipping() > 0 and isinstance(engine.optimizer, FP16_UnfusedOptimizer):
        raise ExpertGroupError(
            f"gradient_clipping={engine.gradient_clipping()} in fp16 or bf16 without ZeRO: DeepSpeed's {optimizer} "
            "leaves experts out of the norm that it clips by; use ZeRO stage 1 or 2, or gradient_clipping 0"
        )
    names = {module.expert_group_name for module in engine.module.modules() if isinstance(module, MoE)}
    gathered: list[Any] = [None] * grid.get_model_parallel_world_size()
    own = (grid.get_stage_id(), sorted(names), _has_dense_share(engine))
    dist.all_gather_object(gathered, own, group=grid.get_model_parallel_group())
    remedy = "use fp32, or ZeRO stage 1 without fp32 accumulation of gradients"
    sizes: dict[int, list[str]] = {stage: names for stage, names, _ in sorted(gathered)}
    if any(others != sizes[0] for others in sizes.values()):
        raise ExpertGroupError(
            f"pipeline stages have experts of different sizes, {sizes} (stage: sizes): DeepSpeed's {optimizer} would "
            f"hang in the first step; {remedy}, or give every stage MoE layers of the same sizes"
        )
    if any(sizes.values()) and not all(has_share for _, _, has_share in gathered):
        raise ExpertGroupError(
            f"some slices hold no tensor-parallel parameters beside experts: DeepSpeed's {optimizer} would fail in the "
            f"first step, on those ranks alone; {remedy}"
        )


def _has_dense_share(engine: Any) -> bool:
    """Whether anything but experts on this rank counts in the norm of DeepSpeed's BF16_Optimizer."""
    return engine.mpu.get_slice_parallel_rank() == 0 or any(
        is_model_parallel_parameter(parameter) and not is_moe_param(parameter)
        for parameter in engine.module.parameters()
    )


def _pad_capacities(engine: Any) -> None:
    """Let ``model`` peers split the slots of an expert evenly: DeepSpeed asserts that they can."""
    slices = engine.mpu.get_slice_parallel_world_size()
    if slices > 1:
        for gate in engine.gate_modules:
            gate.register_forward_hook(lambda _gate, _inputs, routes: _pad_capacity(routes, slices))


def _pad_capacity(routes: tuple[Any, ...], slices: int) -> tuple[Any, ...]:
    """``(auxiliary loss, capacity, experts, ...)`` with the capacity rounded up to a multiple of ``slices``."""
    loss, capacity, *rest = routes
    return (loss, torch.as_tensor(-(-int(capacity) // slices) * slices), *rest)


def _clipped(clip: Any) -> Any:
    @wraps(clip)
    def clip_fp32_gradients(engine: Any) -> None:
        if registry.serves(engine.mpu):
            limit = engine.gradient_clipping()
            engine._global_grad_norm = clip_gradients(engine.module.parameters(), limit, engine.mpu)
        else:
            clip(engine)

    return clip_fp32_gradients


def _normed(norm: Any) -> Any:
    @wraps(norm)
    def scaled_global_norm(optimizer: Any, norm_type: int = 2) -> Any:
        if registry.serves(optimizer.mpu):
            return zero_gradient_norm(optimizer, optimizer.mpu)
        return norm(optimizer, norm_type)

    return scaled_global_norm


def _saved_by_slice(save: Any) -> Any:
    """Let each slice write the files that it reads.

    DeepSpeed puts the writer's model parallel rank into the names and lets expert data parallel rank 0 write. Where
    replicas of an expert sit on several slices, the others' files would be missing.
    """

    @wraps(save)
    def save_moe_checkpoint(engine: Any, *args: Any, **options: Any) -> Any:
        if not registry.serves(engine.mpu):
            return save(engine, *args, **options)
        _check_optimizer_files(engine)
        place = deepspeed_groups._get_expert_data_parallel_rank
        with mock.patch.object(
            deepspeed_groups,
            "_get_expert_data_parallel_rank",
            lambda name: place(name) if (known := registry.find(name)) is None else int(not known.writes_checkpoint),
        ):
            return save(engine, *args, **options)

    return save_moe_checkpoint


def _check_optimizer_files(engine: Any) -> None:
    """Without ZeRO, DeepSpeed writes one optimizer file for each expert parallel rank of the greatest size."""
    sizes = registry.sizes()
    others = sorted(size for size in sizes if max(sizes) % size)
    if others and not engine.zero_optimization():
        raise ExpertGroupError(
            f"expert parallel sizes {others} do not divide the greatest, {max(sizes)}: without ZeRO, DeepSpeed writes "
            "one optimizer state for each place in the greatest group, so that some experts' would be lost. Use ZeRO "
            "stage 1 or 2, or sizes that divide each other"
        )


def uses_data_axis_alone(grid: PipelineParallelGrid) -> bool:
    """Whether every rank of the job is a replica: no pipe and no model axis."""
    return all(grid.get_axis_size(axis) == 1 for axis in (PIPE, MODEL))
