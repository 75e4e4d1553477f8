"""Define ``PipelineParallelGrid``, the complete ``mpu`` for DeepSpeed's engines, which patches each of its engines.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod

import torch
from deepspeed.moe.layer import MoE
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import groups as deepspeed_groups

from ds_topo import torch_names
from ds_topo.checkpoint.loading import loaded_whole
from ds_topo.checkpoint.saving import saved_as_a_whole
from ds_topo.engine import (
    accumulation,
    activations,
    autoparallel,
    backward_passes,
    batches,
    checks,
    experts,
    hybrid_sharding,
    norms,
    parameter_gathers,
    reduction_order,
    shares,
    unused_parameters,
    written_weights,
)
from ds_topo.engine.accumulation import with_own_number
from ds_topo.engine.autocast_scaling import share_scale
from ds_topo.engine.batches import with_enough_micro_batches
from ds_topo.engine.idle_stages import with_placeholders
from ds_topo.engine.replicas import compare_slices
from ds_topo.errors import ExpertGroupError, warn
from ds_topo.ledger import Make, Patch, always, around, ledger
from ds_topo.mpu import patches
from ds_topo.mpu.differences import DualPipeVEngine, check_release
from ds_topo.mpu.mpu import MpuGrid, registry
from ds_topo.mpu.releases import bind_methods, warn_of_newer_releases
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.process_groups.process_grid import AnyTopology
from ds_topo.topology.axes import MODEL, PIPE, SEQ
from ds_topo.topology.rank_tables import gradient_axes
from ds_topo.watch import guard, job_watch

STEPS_BETWEEN = 100
"""The number of steps between two comparisons of the ranks' progress, while a watch is on."""
_RELEASES = "ds_topo_patches"
"""The attribute with the releases of a patched object. The object owns them, so that no patch keeps it alive."""
_before_backward: WeakKeyDictionary[DeepSpeedEngine, dict[str, Any]] = WeakKeyDictionary()
"""The engines in a backward pass, oldest first, and for all of them what was current before the first one began."""
_CURRENT = (
    "mpu",
    "expert_tensor_parallel_world_size",
    "_TENSOR_MODEL_PARALLEL_GROUP",
    "_MODEL_PARALLEL_GROUP",
    "_DATA_PARALLEL_GROUP",
)
"""The names of ``deepspeed.utils.groups`` that belong to one mpu."""

_FIRST_OF_SLICES = always(autoparallel.get_tensor_model_parallel_src_rank)
"""One object for all grids, which share the replacement."""


def _with_seq_axis(method: Callable[[Any], Any]) -> property:
    """Make a method exist only on grids with sequence queries, because DeepSpeed tests for its presence."""

    def bound(grid: PipelineParallelGrid) -> Callable[[], Any]:
        if not grid.offers_sequence_queries:
            raise AttributeError(f"{grid.topology().spec!r} has no axis {SEQ!r}, which get_sequence_* methods need")
        return partial(method, grid)

    return property(bound, doc=method.__doc__)


class PipelineParallelGrid(MpuGrid):
    """The process groups of one job's topology, as this rank sees them; a complete ``mpu`` for DeepSpeed.

    Drop-in for ``deepspeed.runtime.pipe.topology.PipelineParallelGrid``, for any axes in any order. Creation is
    collective: all ranks compare their plans first, and raise together if the plans differ. A rank joins only the
    groups that it belongs to, and each distinct set of ranks is created once. Until ``destroy()``, an engine of the
    grid has patched methods, and refuses options that assume another order of ranks (:mod:`ds_topo.mpu.patches`).

    - ``data parallel`` groups join the replicas of a parameter: all ranks that share stage and slice. An axis that
      DeepSpeed does not know (``seq``, ``expert``, any other) therefore counts as data, for gradients.
    - ``model parallel`` is pipe x model. Its rank is ``stage * slices + slice`` for any order of the axes, because the
      universal checkpoint format relies on that.
    - ``slice`` and ``tensor model`` parallel are the ``model`` axis, ``pipe`` and ``pipeline model`` the ``pipe`` axis.
    - With a ``seq`` axis, sequence queries exist, and ``get_data_parallel_rank`` and ``_world_size`` count distinct
      samples while ``get_data_parallel_group`` still joins all replicas.

    Arguments and errors are those of :class:`~ds_topo.process_groups.process_grid.ProcessGrid`.

    >>> import torch.distributed as dist
    >>> from torch.testing._internal.distributed.fake_pg import FakeStore
    >>> dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    >>> with PipelineParallelGrid("pipe=2,data=2,model=2") as grid:
    ...     print(grid)
    ...     grid.get_ranks("data"), grid.get_ranks(("pipe", "model")), grid.get_model_parallel_rank()
    PipelineParallelGrid('pipe=2,data=2,model=2', rank 5: pipe=1, data=0, model=1)
    ([5, 7], [0, 1, 4, 5], 3)
    >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        topology: AnyTopology | None = None,
        process_group: ProcessGroup | None = None,
        *,
        timeout: float | timedelta | None = None,
        extra_axes: Iterable[str] = (),
    ) -> None:
        super().__init__(topology, process_group, timeout=timeout, extra_axes=extra_axes)
        if torch.distributed.get_rank(process_group) == 0:
            warn_of_newer_releases((*patches.ROWS, *torch_names.ROWS))
        with ExitStack() as undo:
            undo.callback(self.destroy)
            self.on_destroy(ledger.bind(patches.CONSTRUCT_ENGINE, _patching_engines))
            if self.get_axis_size(MODEL) > 1:
                self.on_destroy(ledger.bind(patches.SOURCE_OF_SLICES, _FIRST_OF_SLICES))
            self.on_destroy(partial(_forget, self))
            self.on_destroy(guard.hold())
            checks.grids.add(self)
            if topology is None and self.get_axis_size(PIPE) > 1 and self.grid_rank == 0:
                warn(
                    f"PipelineParallelGrid() without a topology is {self.topology().spec!r}, as in DeepSpeed: name the "
                    "axes, such as PipelineParallelGrid('data=-1'), or give this spec if it is intended"
                )
            undo.pop_all()

    @cached_property
    def offers_sequence_queries(self) -> bool:
        """True if the ``get_sequence_*`` methods exist."""
        return SEQ in self.topology().axes

    def _replicas(self) -> int:
        """Return the number of replicas."""
        return len(self.dp_group)

    def _replica_rank(self) -> int:
        """Return the index of the replica that this rank holds."""
        return self.topology().get_axis_index(gradient_axes(self.topology()), self.grid_rank)

    def _first_of_sequence(self) -> int:
        """Return the global rank of the first member of the sequence parallel group."""
        return self.get_ranks(SEQ)[0]

    get_sequence_parallel_group = _with_seq_axis(MpuGrid.get_context_parallel_group)
    get_sequence_parallel_world_size = _with_seq_axis(MpuGrid.get_context_parallel_world_size)
    get_sequence_parallel_rank = _with_seq_axis(MpuGrid.get_context_parallel_rank)
    get_sequence_parallel_src_rank = _with_seq_axis(_first_of_sequence)
    get_sequence_data_parallel_group = _with_seq_axis(MpuGrid.get_data_parallel_group)
    get_sequence_data_parallel_world_size = _with_seq_axis(_replicas)
    get_sequence_data_parallel_rank = _with_seq_axis(_replica_rank)
    get_sequence_data_parallel_src_rank = _with_seq_axis(MpuGrid.get_data_parallel_src_rank)

    def __dir__(self) -> list[str]:
        hidden = () if self.offers_sequence_queries else SEQUENCE_QUERIES
        return [name for name in super().__dir__() if name not in hidden]


SEQUENCE_QUERIES = tuple(name for name in vars(PipelineParallelGrid) if name.startswith("get_sequence_"))
"""The names of the methods that only grids with sequence queries have."""


class PipelineEngineGrid(PipelineParallelGrid):
    """The grid of a pipeline engine: every extra axis, ``seq`` included, is data parallel.

    The engine sums losses over the data parallel group and divides by its size, so sizes count all replicas here. The
    grid has no sequence queries: with them, ZeRO-1 would sum gradients over ``seq`` where stage 0 averages them.
    """

    @cached_property
    def offers_sequence_queries(self) -> bool:
        """Always false."""
        return False

    data_parallel_size = cached_property(PipelineParallelGrid._replicas)
    data_parallel_id = cached_property(PipelineParallelGrid._replica_rank)


# -- patches of an engine ---------------------------------------------------------------------------------------------


@around
def _patching_engines(construct: Any, engine: DeepSpeedEngine, *args: Any, **options: Any) -> None:
    given = inspect.signature(construct).bind(engine, *args, **options).arguments
    model, mpu = given["model"], given.get("mpu")
    guarded = guard.over("initialize", mpu.members) if isinstance(mpu, MpuGrid) else nullcontext()
    with guarded, ExitStack() as undo:
        checks.check_is_module(model)
        _check_names_of_experts(model, mpu)
        before = _set_current(mpu)
        undo.callback(_make_current, before)
        if isinstance(mpu, MpuGrid):
            check_release(given.get("config_class"))
            with bind_methods(_OF_CONSTRUCTION, engine), autoparallel.tables_of_grid(given.get("config_class"), mpu):
                construct(engine, *args, **options)
            _patch_engine(engine)
        else:
            checks.check_engine_without_grid(model, mpu, given.get("config_class"))
            construct(engine, *args, **options)
        if not isinstance(mpu, MpuGrid) or not _has_engine_without_grid(before["mpu"]):
            undo.pop_all()


def _patch_engine(engine: DeepSpeedEngine) -> None:
    is_pipeline, has_experts = isinstance(engine, PipelineEngine), bool(registry.of(engine.mpu))
    shares.deal_dynamic_batches(engine)
    rows = [*_OF_ALL_ENGINES, *(() if is_pipeline else _OF_PLAIN_ENGINES)]
    rows += hybrid_sharding.rows_of_engines(engine)
    rows += reduction_order.rows_of_reductions(engine)
    rows += written_weights.rows_of_weights(engine)
    rows += batches.rows_of_first_samples(engine)
    rows.append((patches.MODEL_STEP, around(checks.DirectSteps(engine).take_step)))
    hybrid_sharding.save_each_partition_once(engine)
    if has_experts:
        experts.check_engine_with_experts(engine)
        rows.append((patches.SAVE_EXPERTS, experts.saved_by_slice))
    elif is_pipeline:
        rows += norms.of_unequal_stages(engine)
    if is_pipeline:
        _time_backward_once(engine)
    share_scale(engine)
    if autoparallel.uses_autosp(engine._config):
        autoparallel.average_over_seq(engine)
    if engine.mpu.settle_norms():
        rows += norms.corrections(engine, has_experts)
    rows += accumulation.rows_of_engines(engine)
    rows += [] if is_pipeline else backward_passes.rows_of_engines(engine)
    rows += unused_parameters.rows_of_engines(engine)  # around the others, which read gradients
    rows += _AROUND_PIPELINES if is_pipeline else _AROUND_PLAIN_ENGINES
    for target in (engine, engine.optimizer):
        if any(isinstance(target, row.owner) for row, _ in rows if isinstance(row.owner, type)):
            _patch(target, rows, engine.mpu)


def _time_backward_once(engine: PipelineEngine) -> None:
    """Leave the timers of the backward pass to the pipeline on all stages but the last, whose engine has the loss.

    The pipeline starts and stops them there itself, and DeepSpeed's hooks on outputs would start them a second time.
    """
    if not engine.is_last_stage() and not isinstance(engine, DualPipeVEngine):
        engine.engine_timers.backward_timers.clear()
        engine.engine_timers.backward_inner_timers.clear()


def _patch(target: Any, rows: Sequence[tuple[Patch, Make]], grid: MpuGrid) -> None:
    """Patch the methods of one object until the grid is destroyed."""
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
                "pass mpu=grid, destroy() those groups first, or choose another ep_size"
            )


# -- the current mpu of the process -----------------------------------------------------------------------------------


def _set_current(mpu: Any) -> dict[str, Any]:
    """Set the mpu that DeepSpeed's functions query, and what goes with it; return the former values."""
    before = {name: getattr(deepspeed_groups, name) for name in _CURRENT}
    values = {"mpu": mpu}
    if isinstance(mpu, MpuGrid) or isinstance(before["mpu"], MpuGrid):
        slices = data = None  # AutoTP creates groups of its own, unless it finds some
        if isinstance(mpu, MpuGrid) and mpu.get_axis_size(MODEL) > 1:
            slices, data = mpu.get_tensor_model_parallel_group(), mpu.get_data_parallel_group()
        values = dict(zip(_CURRENT, (mpu, experts.slices_of_experts(mpu), slices, slices, data), strict=True))
    _make_current(values)
    return before


def _make_current(values: dict[str, Any]) -> None:
    vars(deepspeed_groups).update(values)


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
        _make_current(interrupted)
    _before_backward.clear()
    before = _set_current(mpu)
    try:
        yield
    finally:
        _before_backward.clear()
        _make_current(before)


def _forget(grid: MpuGrid) -> None:
    """Reset the current mpu if it is this grid, so that no later engine without an mpu finds it."""
    if isinstance(deepspeed_groups.mpu, MpuGrid) and grid.shares_groups_with(deepspeed_groups.mpu):
        _set_current(None)


def _with_own_mpu(row: Patch, make: Make = lambda method: method) -> tuple[Patch, Make]:
    """Return a row whose method is called with the engine's own mpu, and all ranks know if one of them alone raises."""

    @around
    def called(method: Any, engine: DeepSpeedEngine, *args: Any, **options: Any) -> Any:
        with guard.over(row.name, engine.mpu.members, engine.global_steps), _current(engine.mpu):
            return method(engine, *args, **options)

    return row, lambda method: called(make(method))


@around
def _with_own_mpu_from_here(begin_backward: Any, engine: DeepSpeedEngine) -> None:
    """Set the mpu in ``_backward_prologue``, because a program may call ``loss.backward()`` itself."""
    before = _set_current(engine.mpu)
    _before_backward.setdefault(engine, next(iter(_before_backward.values()), before))
    try:
        begin_backward(engine)
    except BaseException:
        _leave_backward(engine)
        raise


@around
def _with_own_mpu_until_here(end_backward: Any, engine: DeepSpeedEngine) -> None:
    _set_current(engine.mpu)
    try:
        end_backward(engine)
    finally:
        _leave_backward(engine)


def _leave_backward(engine: DeepSpeedEngine) -> None:
    """Set the mpu of another engine of the same backward pass, or after the last one what was current before."""
    before = _before_backward.pop(engine, None)
    others = [*_before_backward]
    if others:
        _set_current(others[-1].mpu)
    elif before is not None:
        _make_current(before)


# -- methods of engines -----------------------------------------------------------------------------------------------


@around
def _comparing_steps(step: Any, engine: DeepSpeedEngine, *args: Any, **options: Any) -> Any:
    before = engine.global_steps
    result = step(engine, *args, **options)
    taken = engine.global_steps
    has_reducer = getattr(engine, "gradient_reducer", None) is not None  # which compares steps itself
    if taken != before and not taken % STEPS_BETWEEN and not has_reducer:
        job_watch.compare_steps(engine.mpu.get_data_parallel_group(), taken)
    return result


@around
def _configured(configure: Any, engine: DeepSpeedEngine, model: Any) -> None:
    checks.agree_on_model(engine, model, engine.mpu)
    checks.create_missing_expert_groups(engine, model, engine.mpu)
    _set_current(engine.mpu)  # again, because experts may have got groups since
    configure(engine, model)
    compare_slices(engine, model)


_OF_CONSTRUCTION: tuple[tuple[Patch, Make], ...] = (
    (patches.SANITY_CHECK, checks.with_checks),
    (patches.EXPERT_PARALLEL, autoparallel.over_groups_of_grid),
    (patches.TENSOR_PARALLEL_STATES, autoparallel.keeping_grid),
    (patches.CONFIGURE_MODEL, _configured),
    (patches.LOADER_OF_SHARES, shares.loader_of_shares),
    (patches.CONFIGURE_OPTIMIZER, with_placeholders),
    *hybrid_sharding.OF_CONSTRUCTION,
)
_OF_PLAIN_ENGINES: tuple[tuple[Patch, Make], ...] = (
    (patches.BACKWARD_PROLOGUE, _with_own_mpu_from_here),
    (patches.BACKWARD_EPILOGUE, _with_own_mpu_until_here),
    (patches.AUTOSP_BACKEND, autoparallel.with_groups_of_grid),
    (patches.STEP_ON_GRID, _comparing_steps),
)
_AROUND_PLAIN_ENGINES = tuple(
    map(_with_own_mpu, (patches.FORWARD_ON_GRID, patches.BACKWARD_ON_GRID, patches.STEP_ON_GRID))
)
_AROUND_PIPELINES = tuple(map(_with_own_mpu, (patches.TRAIN_BATCH_ON_GRID, patches.EVAL_BATCH_ON_GRID)))
"""They are bound last: an error of any other replacement reaches all ranks, too."""
_OF_ALL_ENGINES: tuple[tuple[Patch, Make], ...] = (
    _with_own_mpu(patches.SAVE_CHECKPOINT, saved_as_a_whole),
    _with_own_mpu(patches.LOAD_CHECKPOINT, loaded_whole),
    (patches.SAVE_16_BIT, autoparallel.saving_whole_weights),
    (patches.LOADER_OF_SHARES, shares.loader_of_shares),
    (patches.OWN_SAMPLES, shares.iterating_over_share),
    (patches.TRAIN_BATCH_ON_GRID, lambda train: with_own_number(with_enough_micro_batches(train))),
    (patches.EVAL_BATCH_ON_GRID, with_enough_micro_batches),
    (patches.CHECKED_SENDS, activations.with_checked_sends),
    (patches.BUFFERS_BY_TYPE, activations.allocated_by_type),
    (patches.AVERAGE_AND_SCATTER, checks.with_sum_over_seq),
    *parameter_gathers.OF_OPTIMIZERS,
)
