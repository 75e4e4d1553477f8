"""Define ``PipelineParallelGrid``, the complete ``mpu`` for DeepSpeed's engines.

While a grid exists, hooks on the constructors of ``DeepSpeedEngine`` and ``DeepSpeedConfig`` are in force. An engine
whose mpu is a grid gets a class of ours (:mod:`ds_topo.engine.on_grid`) until the grid is destroyed. Every other engine
runs DeepSpeed's own code; the hooks only refuse an mpu or a model that was meant for a grid. Once a process has built
an engine without a grid, no grid is the current mpu outside of the methods of its engines
(:mod:`ds_topo.engine.current_mpu`).
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from deepspeed.moe.layer import MoE
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import groups as deepspeed_groups
from typing_extensions import Never

from ds_topo.base import patches, torch_names
from ds_topo.base.classes import adopt
from ds_topo.base.ledger import Row, always, around, ledger
from ds_topo.base.patches import DualPipeVEngine
from ds_topo.base.supported import check_release, warn_of_newer_releases
from ds_topo.engine import checks
from ds_topo.engine.config import Case, check_sections_and_sizes
from ds_topo.engine.current_mpu import current, get_tensor_model_parallel_src_rank
from ds_topo.engine.parts import load_all, parts_of
from ds_topo.errors import ExpertGroupError, warn
from ds_topo.health import guard
from ds_topo.launch.launchers import REFERENCE
from ds_topo.mpu import MpuGrid, registry
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.process_groups.process_grid import AnyTopology
from ds_topo.topology.axes import MODEL, PIPE, SEQ
from ds_topo.topology.rank_tables import gradient_axes

_CONSTRUCTION = "the construction of a grid"
_FIRST_OF_SLICES = always(get_tensor_model_parallel_src_rank)
"""One object for all grids, which share the replacement."""


def _with_seq_axis(method: Callable[[Any], Any]) -> property:
    """Make a method exist only on grids with sequence queries, because DeepSpeed tests for its presence."""

    def bound(grid: PipelineParallelGrid) -> Callable[[], Any]:
        if not grid.offers_sequence_queries:
            raise AttributeError  # __getattr__ says why
        return partial(method, grid)

    return property(bound, doc=method.__doc__)


class PipelineParallelGrid(MpuGrid):
    """The process groups of one job's topology, as this rank sees them; a complete ``mpu`` for DeepSpeed.

    Drop-in for ``deepspeed.runtime.pipe.topology.PipelineParallelGrid``, for any axes in any order. Creation is
    collective: all ranks compare their plans first, and raise together if the plans differ. A rank joins only the
    groups that it belongs to, and each distinct set of ranks is created once. Until ``destroy()``, an engine of the
    grid has a class of ours (:mod:`ds_topo.engine.on_grid`), and refuses options that assume another order of ranks.

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

    @guard.over(_CONSTRUCTION)
    def __init__(
        self,
        topology: AnyTopology | None = None,
        process_group: ProcessGroup | None = None,
        *,
        timeout: float | timedelta | None = None,
        extra_axes: Iterable[str] = (),
        **others: Never,
    ) -> None:
        if isinstance(process_group, ProcessGroup):
            guard.narrow(_CONSTRUCTION, torch.distributed.get_process_group_ranks(process_group))
        super().__init__(topology, process_group, timeout=timeout, extra_axes=extra_axes, **others)
        if torch.distributed.get_rank(process_group) == 0:
            warn_of_newer_releases(rows)
        try:
            self.on_destroy(ledger.bind(patches.CONSTRUCT_ENGINE, building_engines))
            if REFERENCE not in os.environ:  # ds-topo verify changes the config of a reference
                self.on_destroy(ledger.bind(patches.READ_CONFIG, reading_configs))
            if self.get_axis_size(MODEL) > 1:
                self.on_destroy(ledger.bind(patches.SOURCE_OF_SLICES, _FIRST_OF_SLICES))
            self.on_destroy(partial(current.forget, self))
            self.on_destroy(guard.hold())
            checks.grids.add(self)
            if topology is None and self.get_axis_size(PIPE) > 1 and self.grid_rank == 0:
                warn(
                    f"PipelineParallelGrid() without a topology is {self.topology().spec!r}, as in DeepSpeed: name the "
                    "axes, such as PipelineParallelGrid('data=-1'), or give this spec if it is intended"
                )
        except BaseException:
            self.destroy()
            raise

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

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            if name in SEQUENCE_QUERIES:  # DeepSpeed asks often whether they exist
                where = "in a pipeline" if SEQ in self.topology().axes else f"without an axis {SEQ!r}"
                raise AttributeError(f"{self.topology().spec!r}: a grid {where} has no {name}()")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


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


# -- engines of a grid ------------------------------------------------------------------------------------------------


when_built: list[Callable[[DeepSpeedEngine], object]] = []
"""What is called with each engine that was built."""


@around
def reading_configs(construct: Any, config: DeepSpeedConfig, *args: Any, **options: Any) -> None:
    """Replace ``DeepSpeedConfig.__init__``: check what DeepSpeed refuses itself, but without naming axes or values."""
    given = inspect.signature(construct).bind(config, *args, **options).arguments
    content, mpu = given["config"], given.get("mpu")
    if isinstance(mpu, MpuGrid) and isinstance(content, Mapping):
        check_sections_and_sizes(content, mpu)
    construct(config, *args, **options)


@around
def building_engines(construct: Any, engine: DeepSpeedEngine, *args: Any, **options: Any) -> None:
    """Replace ``DeepSpeedEngine.__init__``: an engine whose mpu is a grid gets the class of engines on a grid."""
    call = inspect.signature(construct).bind(engine, *args, **options)
    model, mpu = call.arguments["model"], call.arguments.get("mpu")
    with guard.over("initialize", mpu.members) if isinstance(mpu, MpuGrid) else nullcontext():
        checks.check_is_module(model)
        _check_names_of_experts(model, mpu)
        before = current.set(mpu)
        try:
            if isinstance(mpu, MpuGrid):
                _build_on_grid(construct, engine, call)
            else:
                checks.check_engine_without_grid(model, mpu, call.arguments.get("config_class"))
                construct(engine, *args, **options)
        except BaseException:
            current.restore(before)
            raise
        if isinstance(mpu, MpuGrid) and current.is_needed_by_others(before):
            current.restore(before)
        for tell in when_built:
            tell(engine)


def _build_on_grid(construct: Any, engine: DeepSpeedEngine, call: inspect.BoundArguments) -> None:
    """Call the constructor of an engine with the class that is made of its parts."""
    given = call.arguments
    mpu: MpuGrid = given["mpu"]
    config: Any = given.get("config_class")
    check_release(config)
    if given.get("mesh_device"):  # as the constructor does first
        deepspeed_groups.mesh_device = given["mesh_device"]
    given["model_parameters"] = checks.as_lists(given.get("model_parameters"), config)
    has_experts = bool(registry.of(mpu)) or config.expert_parallel_config.enabled
    case = Case(
        config,
        mpu,
        is_pipeline=isinstance(engine, PipelineEngine),
        is_dualpipe=isinstance(engine, DualPipeVEngine),
        optimizer=given.get("optimizer") or config.optimizer_name,
        has_experts=has_experts or any(isinstance(module, MoE) for module in given["model"].modules()),
    )
    mixins = {part.mixin: part.load() for part in parts_of(case)}
    checks.check_with_all_ranks(engine, case, mixins, given)
    release = adopt(engine, *reversed(mixins.values()))  # the outermost first
    try:
        vars(engine)[checks.CLIENT_PARAMETERS] = given["model_parameters"]
        with ExitStack() as contexts:
            engine.built_inside(contexts, case)
            construct(*call.args, **call.kwargs)
        engine.complete()
    except BaseException:
        release()
        raise
    mpu.on_destroy(release)


def rows() -> tuple[Row, ...]:
    """Return all patches, overrides and names that ds_topo relies on, of all parts."""
    from ds_topo.base.overrides import overrides

    load_all()  # their classes override names, too
    return (*patches.ROWS, *torch_names.ROWS, *overrides())


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
