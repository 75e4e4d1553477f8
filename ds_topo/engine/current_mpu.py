"""Which mpu DeepSpeed's functions ask: that of the engine at work.

DeepSpeed keeps one mpu for all engines of a process, the last one's (``deepspeed.utils.groups.mpu``), and none of an
engine without. While grids exist, whatever an engine does starts with its own.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from deepspeed.moe.layer import MoE
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import groups as deepspeed_groups

from ds_topo.engine import changes
from ds_topo.engine.checkpoints.routes import loaded_whole, saved_as_a_whole
from ds_topo.engine.expert_registry import registry
from ds_topo.engine.inputs import (
    agree_on_model,
    check_model,
    check_model_without_mpu,
    create_missing_expert_groups,
)
from ds_topo.engine.micro_batches import with_enough_micro_batches
from ds_topo.engine.mpu import MpuGrid
from ds_topo.engine.samples import remember_samples, with_same_batches, with_same_samples
from ds_topo.errors import ExpertGroupError
from ds_topo.ledger import Change, Make
from ds_topo.watch import compare_steps


def forget(grid: MpuGrid) -> None:
    """Let no later engine without an mpu find this grid."""
    if isinstance(deepspeed_groups.mpu, MpuGrid) and grid.shares_groups_with(deepspeed_groups.mpu):
        deepspeed_groups.mpu = None


def _with_own_mpu(method: Any) -> Any:
    @wraps(method)
    def with_own_mpu(engine: DeepSpeedEngine, *args: Any, **options: Any) -> Any:
        if deepspeed_groups.mpu is not engine.mpu:
            deepspeed_groups.mpu = engine.mpu
        return method(engine, *args, **options)

    return with_own_mpu


STEPS_BETWEEN = 100
"""Comparisons of what ranks have done, while there is a watch."""


def _comparing_steps(method: Any) -> Any:
    @wraps(method)
    def compare_steps_sometimes(engine: DeepSpeedEngine, *args: Any, **options: Any) -> Any:
        before = engine.global_steps
        result = method(engine, *args, **options)
        taken = engine.global_steps
        compares_itself = getattr(engine, "gradient_reducer", None) is not None
        if taken != before and not taken % STEPS_BETWEEN and isinstance(engine.mpu, MpuGrid) and not compares_itself:
            compare_steps(engine, engine.mpu.get_data_parallel_group(), taken)
        return result

    return compare_steps_sometimes


def _forward_with_own_mpu(method: Any) -> Any:
    return _with_own_mpu(with_same_samples(method))


def _save_with_own_mpu(method: Any) -> Any:
    return _with_own_mpu(saved_as_a_whole(method))


def _load_with_own_mpu(method: Any) -> Any:
    return _with_own_mpu(loaded_whole(method))


def _steps_with_own_mpu(method: Any) -> Any:
    start_together = with_enough_micro_batches(method)
    return _with_own_mpu(with_same_batches(start_together) if method.__name__ == "train_batch" else start_together)


def _configured_with_own_mpu(configure: Any) -> Any:
    @wraps(configure)
    def configure_distributed_model(engine: DeepSpeedEngine, model: Any) -> None:
        deepspeed_groups.mpu = engine.mpu
        _check_names_of_experts(engine, model)
        if isinstance(engine.mpu, MpuGrid):
            check_model(engine, model, engine.mpu)
            agree_on_model(model, engine.mpu)
            create_missing_expert_groups(engine, model, engine.mpu)
        elif engine.mpu is None:
            check_model_without_mpu(model)
        before, registry.serves_current_engine = registry.serves_current_engine, isinstance(engine.mpu, MpuGrid)
        try:
            configure(engine, model)
        finally:
            registry.serves_current_engine = before

    return configure_distributed_model


def _check_names_of_experts(engine: DeepSpeedEngine, model: Any) -> None:
    """Refuse MoE layers whose groups, by their name, would be those of a grid that is not the engine's."""
    own = registry.of(engine.mpu)
    for module in model.modules():
        known = registry.find(module.expert_group_name) if isinstance(module, MoE) else None
        if known is not None and known not in own:
            raise ExpertGroupError(
                f"a MoE layer of an engine without that grid asks for {known.plan.name!r}, the groups of {known.grid}: "
                "DeepSpeed keeps one table per name; pass mpu=grid, destroy() those groups first, or choose another "
                "ep_size"
            )


_OF_ENTRIES = {
    "forward": _forward_with_own_mpu,
    "step": lambda method: _with_own_mpu(_comparing_steps(method)),
}
WHILE_A_GRID_EXISTS: tuple[tuple[Change, Make], ...] = (
    (changes.CONFIGURE_MODEL, _configured_with_own_mpu),
    *((change, _OF_ENTRIES.get(change.name, _with_own_mpu)) for change in changes.ENTRIES_OF_ENGINES),
    (changes.SAVE_CHECKPOINT, _save_with_own_mpu),
    (changes.LOAD_CHECKPOINT, _load_with_own_mpu),
    (changes.NEXT_BATCH, remember_samples),
    *((change, _steps_with_own_mpu) for change in changes.STEPS_OF_PIPELINES),
)
