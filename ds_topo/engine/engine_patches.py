"""Patch each engine of a grid separately.

While a grid exists, one hook on ``DeepSpeedEngine.__init__`` is in force. An engine whose mpu is a grid gets its
patches on itself and on its optimizer, until the grid is destroyed. Every other engine runs DeepSpeed's own code; the
hook only refuses an mpu or a model that was meant for a grid.

DeepSpeed keeps one mpu for all engines of a process, in ``deepspeed.utils.groups.mpu``, and its functions query it.
It is the mpu of the engine that was built last. The patched methods of an engine set it to the engine's own grid and
restore it when they return, so that engines of several grids work side by side, and so do engines without one. Once a
process has built an engine without a grid, no grid is current outside of these methods.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakMethod

from deepspeed.moe.layer import MoE
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import groups as deepspeed_groups

from ds_topo.checkpoint.loading import loaded_whole
from ds_topo.checkpoint.saving import saved_as_a_whole
from ds_topo.engine import autoep, autosp, autotp, checks, experts, hybrid_sharding, norms, parameter_gathers
from ds_topo.engine.batches import remember_samples, with_enough_micro_batches, with_same_batches, with_same_samples
from ds_topo.engine.replicas import warn_of_unequal_slices
from ds_topo.errors import ExpertGroupError
from ds_topo.ledger import Make, Patch
from ds_topo.mpu import patches
from ds_topo.mpu.mpu import MpuGrid, registry
from ds_topo.mpu.releases import bind_methods
from ds_topo.watch import job_watch

STEPS_BETWEEN = 100
"""The number of steps between two comparisons of the ranks' progress, while a watch is on."""
_RELEASES = "ds_topo_patches"
"""The attribute with the releases of a patched object. The object owns them, so that no patch keeps it alive."""
_before_backward: WeakKeyDictionary[DeepSpeedEngine, _Current] = WeakKeyDictionary()
"""The engines in a backward pass, oldest first, and for all of them what was current before the first one began."""


def patching_engines(construct: Any) -> Any:
    """Build the replacement of ``DeepSpeedEngine.__init__``."""
    signature = inspect.signature(construct)

    @wraps(construct)
    def construct_and_patch(engine: DeepSpeedEngine, *args: Any, **options: Any) -> None:
        given = signature.bind(engine, *args, **options).arguments
        model, mpu = given["model"], given.get("mpu")
        checks.check_is_module(model)
        _check_names_of_experts(model, mpu)
        before = _set_current(mpu)
        with ExitStack() as undo:
            undo.callback(_restore_current, before)
            if isinstance(mpu, MpuGrid):
                with bind_methods(_OF_CONSTRUCTION, engine), autoep.tables_of_grid(given.get("config_class"), mpu):
                    construct(engine, *args, **options)
            else:
                checks.check_engine_without_grid(model, mpu, given.get("config_class"))
                construct(engine, *args, **options)
            if not isinstance(engine.mpu, MpuGrid):
                undo.pop_all()
                return
            is_pipeline = isinstance(engine, PipelineEngine)
            rows = [*_OF_ALL_ENGINES, *(() if is_pipeline else _OF_PLAIN_ENGINES)]
            rows += hybrid_sharding.rows_of_engines(engine.mpu)
            hybrid_sharding.save_each_partition_once(engine)
            corrects = engine.mpu.settle_norms()
            if is_pipeline and corrects:
                norms.log_clipping(engine)
            elif autosp.uses_autosp(engine._config):
                autosp.average_over_seq(engine)
            if registry.of(mpu):
                experts.check_engine_with_experts(engine)
                rows += _WITH_EXPERTS + (norms.WITH_EXPERTS if corrects else ())
            elif is_pipeline:
                rows += norms.of_unequal_stages(engine) + (norms.OF_PIPELINES if corrects else ())
            if corrects:
                rows += norms.OF_OPTIMIZERS
                norms.scale_losses(engine)
            for target in (engine, engine.optimizer):
                _patch(target, rows, engine.mpu)
            undo.pop_all()
        if _has_engine_without_grid(before[0]):
            _restore_current(before)

    return construct_and_patch


def _patch(target: Any, rows: Sequence[tuple[Patch, Make]], grid: MpuGrid) -> None:
    """Patch the methods of one object until the grid is destroyed."""
    if not any(isinstance(target, row.owner) for row, _ in rows if isinstance(row.owner, type)):
        return  # such as an optimizer of torch
    releases = bind_methods(rows, target)
    releases.callback(vars(target).pop, _RELEASES, None)
    setattr(target, _RELEASES, releases)
    close = WeakMethod(releases.close)

    def close_if_alive() -> None:
        method = close()
        if method is not None:
            method()

    grid.on_destroy(close_if_alive)


def _check_names_of_experts(model: Any, mpu: Any) -> None:
    """Refuse MoE layers that would find the expert groups of another grid under their name."""
    own = registry.of(mpu)
    for module in model.modules():
        known = registry.find(module.expert_group_name) if isinstance(module, MoE) else None
        if known is not None and known not in own:
            raise ExpertGroupError(
                f"a MoE layer of an engine without that grid uses {known.plan.name!r}, the groups of {known.grid}: "
                "DeepSpeed keeps one table per name; pass mpu=grid, destroy() those groups first, or choose another "
                "ep_size"
            )


# -- the current mpu of the process -----------------------------------------------------------------------------------


class _Current(NamedTuple):
    """The values that DeepSpeed's functions look up in their modules, for one mpu."""

    mpu: Any
    slices_of_experts: int
    tensor_parallel: autotp.TensorParallelGroups


def _set_current(mpu: Any) -> _Current:
    """Set the mpu that DeepSpeed's functions query, and what goes with it; return the former values."""
    before = _Current(
        deepspeed_groups.mpu,
        deepspeed_groups.expert_tensor_parallel_world_size,
        autotp.TensorParallelGroups.in_force(),
    )
    if isinstance(mpu, MpuGrid) or isinstance(before.mpu, MpuGrid):
        _restore_current(_Current(mpu, experts.slices_of_experts(mpu), autotp.TensorParallelGroups.of(mpu)))
    else:
        deepspeed_groups.mpu = mpu
    return before


def _restore_current(before: _Current) -> None:
    deepspeed_groups.mpu, deepspeed_groups.expert_tensor_parallel_world_size, tensor_parallel = before
    tensor_parallel.put_in_force()


def _has_engine_without_grid(current: Any) -> bool:
    """Tell whether there may be an engine whose methods, DeepSpeed's own, would find a grid that stays current.

    Garbage collection must not decide this, because ranks collect at different times: an engine without an mpu counts
    from its construction, which clones the world's group, until the end of the world.
    """
    has_other_mpu = current is not None and not isinstance(current, MpuGrid)
    return has_other_mpu or deepspeed_groups._WORLD_GROUP is not None


@contextmanager
def _current(mpu: MpuGrid) -> Iterator[None]:
    for interrupted in _before_backward.values():  # by an exception
        _restore_current(interrupted)
    _before_backward.clear()
    before = _set_current(mpu)
    try:
        yield
    finally:
        _before_backward.clear()
        _restore_current(before)


def forget(grid: MpuGrid) -> None:
    """Reset the current mpu if it is this grid, so that no later engine without an mpu finds it."""
    if isinstance(deepspeed_groups.mpu, MpuGrid) and grid.shares_groups_with(deepspeed_groups.mpu):
        _set_current(None)


def _with_own_mpu(method: Any) -> Any:
    @wraps(method)
    def with_own_mpu(engine: DeepSpeedEngine, *args: Any, **options: Any) -> Any:
        with _current(engine.mpu):
            return method(engine, *args, **options)

    return with_own_mpu


def _with_own_mpu_from_here(begin_backward: Any) -> Any:
    """Wrap ``_backward_prologue`` to set the mpu, because a program may call ``loss.backward()`` itself."""

    @wraps(begin_backward)
    def backward_prologue(engine: DeepSpeedEngine) -> None:
        before = _set_current(engine.mpu)
        _before_backward.setdefault(engine, next(iter(_before_backward.values()), before))
        try:
            begin_backward(engine)
        except BaseException:
            _leave_backward(engine)
            raise

    return backward_prologue


def _with_own_mpu_until_here(end_backward: Any) -> Any:
    @wraps(end_backward)
    def backward_epilogue(engine: DeepSpeedEngine) -> None:
        _set_current(engine.mpu)
        try:
            end_backward(engine)
        finally:
            _leave_backward(engine)

    return backward_epilogue


def _leave_backward(engine: DeepSpeedEngine) -> None:
    """Set the mpu of another engine of the same backward pass, or after the last one what was current before."""
    before = _before_backward.pop(engine, None)
    others = [*_before_backward]
    if others:
        _set_current(others[-1].mpu)
    elif before is not None:
        _restore_current(before)


# -- methods of engines -----------------------------------------------------------------------------------------------


def _comparing_steps(step: Any) -> Any:
    @wraps(step)
    def compare_steps_sometimes(engine: DeepSpeedEngine, *args: Any, **options: Any) -> Any:
        before = engine.global_steps
        result = step(engine, *args, **options)
        taken = engine.global_steps
        has_reducer = getattr(engine, "gradient_reducer", None) is not None  # which compares steps itself
        if taken != before and not taken % STEPS_BETWEEN and not has_reducer:
            job_watch.compare_steps(engine, engine.mpu.get_data_parallel_group(), taken)
        return result

    return compare_steps_sometimes


def _configured(configure: Any) -> Any:
    @wraps(configure)
    def configure_distributed_model(engine: DeepSpeedEngine, model: Any) -> None:
        checks.check_model(engine, model, engine.mpu)
        checks.agree_on_model(model, engine.mpu)
        checks.create_missing_expert_groups(engine, model, engine.mpu)
        _set_current(engine.mpu)  # again, because experts may have got groups since
        configure(engine, model)
        warn_of_unequal_slices(model, engine.mpu)

    return configure_distributed_model


_OF_CONSTRUCTION: tuple[tuple[Patch, Make], ...] = (
    (patches.SANITY_CHECK, checks.with_checks),
    (patches.EXPERT_PARALLEL, autoep.over_groups_of_grid),
    (patches.TENSOR_PARALLEL_STATES, autotp.keeping_grid),
    (patches.CONFIGURE_MODEL, _configured),
    *hybrid_sharding.OF_CONSTRUCTION,
)
_OF_PLAIN_ENGINES: tuple[tuple[Patch, Make], ...] = (
    (patches.FORWARD_ON_GRID, lambda forward: _with_own_mpu(with_same_samples(forward))),
    (patches.BACKWARD_ON_GRID, _with_own_mpu),
    (patches.BACKWARD_PROLOGUE, _with_own_mpu_from_here),
    (patches.BACKWARD_EPILOGUE, _with_own_mpu_until_here),
    (patches.AUTOSP_BACKEND, autosp.with_groups_of_grid),
    (patches.STEP_ON_GRID, lambda step: _with_own_mpu(_comparing_steps(step))),
)
_OF_ALL_ENGINES: tuple[tuple[Patch, Make], ...] = (
    (patches.SAVE_CHECKPOINT, lambda save: _with_own_mpu(saved_as_a_whole(save))),
    (patches.LOAD_CHECKPOINT, lambda load: _with_own_mpu(loaded_whole(load))),
    (patches.SAVE_16_BIT, autotp.saving_whole_weights),
    (patches.NEXT_BATCH, remember_samples),
    (patches.TRAIN_BATCH_ON_GRID, lambda train: _with_own_mpu(with_same_batches(with_enough_micro_batches(train)))),
    (patches.EVAL_BATCH_ON_GRID, lambda evaluate: _with_own_mpu(with_enough_micro_batches(evaluate))),
    (patches.AVERAGE_AND_SCATTER, checks.with_sum_over_seq),
    *parameter_gathers.OF_OPTIMIZERS,
)
_WITH_EXPERTS: tuple[tuple[Patch, Make], ...] = ((patches.SAVE_EXPERTS, experts.saved_by_slice),)
