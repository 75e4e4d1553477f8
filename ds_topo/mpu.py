"""Define the queries that DeepSpeed and Megatron make on an ``mpu``, as methods of a grid.

*Data parallel* groups join the replicas of a parameter: all ranks that share stage and slice. An axis that DeepSpeed
does not know (``seq``, ``expert``, ``shard``, any other) therefore counts as data, for gradients. *Model parallel* is
pipe x model, *slice* the ``model`` axis alone. ZeRO *partitions* over ``shard``, or over all of data without that axis.

DeepSpeed's MoE layers do not ask an ``mpu`` for expert groups but look them up in tables of ``deepspeed.utils.groups``.
``registry`` is the owner of these tables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeGuard, TypeVar

from deepspeed.utils import groups as deepspeed_groups

from ds_topo.base.supported import refuse_older_releases
from ds_topo.errors import ExpertGroupError, abridged, require_switches
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.process_groups.process_grid import ProcessGrid, TrainingProgress
from ds_topo.topology import ProcessTopology, rank_tables
from ds_topo.topology.axes import DATA, MODEL, PIPE, SEQ, SHARD
from ds_topo.topology.rank_tables import ExpertPlan, RankGroup

refuse_older_releases()

_T = TypeVar("_T")


def _along(axis: str, question: Callable[[ProcessGrid, str], _T]) -> Callable[[ProcessGrid], _T]:
    """Return the method that asks one of a grid's questions about an axis."""

    def answer(self: ProcessGrid) -> _T:
        return question(self, axis)

    answer.__doc__ = f"Return ``{question.__name__}({axis!r})``."
    return answer


class MpuGrid(ProcessGrid):
    """A grid with the attributes and queries of DeepSpeed's own grid, and with Megatron's names for them.

    Sources: ``deepspeed.runtime.pipe.topology.PipelineParallelGrid``, whose values it has for every order of pipe, data
    and model, and ``megatron/core/parallel_state.py``. One value differs: the model-parallel rank is
    ``stage * slices + slice`` for every order, because the universal checkpoint format relies on it. Ranks come from
    the actual groups, never from ``rank // size * size``, so they hold for any order of the axes.
    """

    @cached_property
    def _topo(self) -> ProcessTopology:
        """The topology of pipe, data and model that DeepSpeed knows; extra axes are folded into data."""
        return rank_tables.fold_extra_axes(self.topology())

    @property
    def correct_norms(self) -> bool:
        """True if engines clip by the norm that counts every parameter once. That is the default.

        False leaves DeepSpeed's own norms and loss scales as they are, so that losses can be compared with those of an
        earlier job bit by bit. Set it on all ranks before an engine is built.
        """
        return self._core.correct_norms

    @correct_norms.setter
    def correct_norms(self, value: bool) -> None:
        require_switches(correct_norms=value)
        if self._core.has_engines:
            raise RuntimeError(
                f"correct_norms={value} would not change the engines that this grid has already: set it right after "
                "the grid is created"
            )
        self._core.correct_norms = value

    def settle_norms(self) -> bool:
        """Return ``correct_norms``, which can no longer change."""
        self._core.has_engines = True
        return self._core.correct_norms

    @property
    def progress(self) -> TrainingProgress:
        """Return what samplers know about the engines."""
        return self._core.progress

    # -- attributes of DeepSpeed's grid -------------------------------------------------------------------------------

    data_parallel_size = cached_property(ProcessGrid.get_sample_world_size)
    data_parallel_id = cached_property(ProcessGrid.get_sample_rank)

    pp_group = cached_property(_along(PIPE, ProcessGrid.get_ranks))
    slice_group = cached_property(_along(MODEL, ProcessGrid.get_ranks))

    @cached_property
    def dp_groups(self) -> list[list[int]]:
        """The ranks of every data parallel group of the job."""
        return self._all_to_global(self._topo.get_axis_comm_lists(DATA))

    @cached_property
    def pipe_groups(self) -> list[list[int]]:
        """The ranks of every pipeline of the job."""
        return self._all_to_global(self._topo.get_axis_comm_lists(PIPE))

    @cached_property
    def model_groups(self) -> list[list[int]]:
        """The ranks of every slice parallel group of the job; ``[]`` without a ``model`` axis."""
        return self._all_to_global(self._topo.get_axis_comm_lists(MODEL))

    @cached_property
    def p2p_groups(self) -> list[list[int]]:
        """The pairs ``[rank, rank of its next stage]`` of the job; the first stage follows the last."""
        ranks = range(self._topo.world_size())
        return self._all_to_global([[rank, rank_tables.neighbor(self._topo, PIPE, rank, step=1)] for rank in ranks])

    # -- queries ---------------------------------------------------------------------------------------------------

    def get_global_rank(self) -> int:
        """Return this rank in the whole job."""
        return self.global_rank

    get_stage_id = _along(PIPE, ProcessGrid.get_axis_rank)
    get_pipe_parallel_world_size = _along(PIPE, ProcessGrid.get_axis_size)
    get_pipe_parallel_group = _along(PIPE, ProcessGrid.get_group)
    get_slice_parallel_rank = _along(MODEL, ProcessGrid.get_axis_rank)
    get_slice_parallel_world_size = _along(MODEL, ProcessGrid.get_axis_size)
    get_slice_parallel_group = _along(MODEL, ProcessGrid.get_group)

    def get_data_parallel_rank(self) -> int:
        """Return the index of this rank among those that work on distinct samples."""
        return self.data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        """Return the number of ranks that work on distinct samples."""
        return self.data_parallel_size

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Return the global ranks of the data parallel group, ascending."""
        return self.get_ranks(rank_tables.gradient_axes(self.topology()))

    def get_partition_group(self) -> ProcessGroup:
        """Return the group over which ZeRO partitions: ``shard``, or the data parallel group without that axis."""
        return self.get_group(rank_tables.partition_axes(self.topology()))

    def get_copy_group(self) -> ProcessGroup:
        """Return the group of the ranks that hold this rank's partition, which is this rank alone without ``shard``."""
        return self.get_group(rank_tables.copy_axes(self.topology()))

    def get_copy_rank(self) -> int:
        """Return the index of this rank among those that hold copies of its partition."""
        return self.topology().get_axis_index(rank_tables.copy_axes(self.topology()), self.grid_rank)

    def get_model_parallel_rank(self) -> int:
        """Return the rank ``stage * slices + slice``, for every order of the axes."""
        return self.stage_id * self.slice_parallel_size + self.get_axis_rank(MODEL)

    def get_model_parallel_world_size(self) -> int:
        """Return the number of stages times the number of slices."""
        return rank_tables.degree(self.topology(), rank_tables.model_parallel_axes(self.topology()))

    def get_model_parallel_group(self) -> ProcessGroup:
        """Return the group of all ranks of this rank's replica of the model (pipe x model)."""
        return self.get_group(rank_tables.model_parallel_axes(self.topology()))

    stage_id = cached_property(get_stage_id)
    pipe_parallel_size = cached_property(get_pipe_parallel_world_size)
    slice_parallel_size = cached_property(get_slice_parallel_world_size)
    ds_model_rank = cached_property(get_model_parallel_rank)
    ds_model_world_size = cached_property(get_model_parallel_world_size)
    dp_group = cached_property(get_data_parallel_group_ranks)
    get_pipe_parallel_rank = get_stage_id
    get_data_parallel_id = get_data_parallel_rank
    dp_proc_group = property(ProcessGrid.get_data_parallel_group)
    pp_proc_group = property(get_pipe_parallel_group)
    slice_proc_group = property(get_slice_parallel_group)
    ds_model_proc_group = property(get_model_parallel_group)
    mp_group = property(lambda self: self.slice_group)
    model_parallel_size = property(get_slice_parallel_world_size)

    def stage_to_global(self, stage_id: int, **axes: int) -> int:
        """Return the global rank at a stage. Other coordinates are this rank's own, or given by ``axes``.

        ``data`` counts all replicas (0 to the size of the data parallel group - 1) unless an extra axis is named too.

        Raises:
            CoordinateError: a stage or index is out of range; stages do not wrap around.
            UnknownAxisError: an axis is not in the topology.
        """
        by_folded_axes = set(axes) <= {*self._topo.axes, "tensor"}
        topology = self._topo if by_folded_axes else self.topology()
        own: dict[str, int] = topology.get_coord(self.grid_rank)._asdict()
        if MODEL in own and "tensor" in axes:
            axes[MODEL] = axes.pop("tensor")
        if PIPE in own or stage_id != 0:
            axes[PIPE] = stage_id
        (rank,) = self.to_global([topology.get_rank(**own | axes)])
        return rank

    def _is_grid_valid(self) -> bool:
        return self.topology().world_size() == self.world_size

    def _all_to_global(self, table: list[list[int]]) -> list[list[int]]:
        return [list(self.to_global(ranks)) for ranks in table]

    # -- Megatron's names: tensor and pipeline parallelism -----------------------------------------------------------

    get_tensor_model_parallel_rank = get_slice_parallel_rank
    get_tensor_model_parallel_world_size = get_slice_parallel_world_size
    get_tensor_model_parallel_group = get_slice_parallel_group
    get_pipeline_model_parallel_rank = get_pipe_parallel_rank
    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size
    get_pipeline_model_parallel_group = get_pipe_parallel_group

    def get_tensor_model_parallel_src_rank(self) -> int:
        """Return the global rank of the first member of the tensor parallel group."""
        return self.slice_group[0]

    # -- Megatron's names: context parallelism is the ``seq`` axis, or this rank alone without one --------------------

    def get_context_parallel_group(self) -> ProcessGroup:
        """Return the group of ranks that hold the parts of the same sequences."""
        if SEQ in self.topology().axes:
            return self.get_group(SEQ)
        return self.create_group(RankGroup(("this rank",), (self.global_rank,)))

    def get_context_parallel_global_ranks(self) -> list[int]:
        """Return the global ranks of the context parallel group, ascending."""
        return self.get_ranks(SEQ) if SEQ in self.topology().axes else [self.global_rank]

    def get_context_parallel_world_size(self) -> int:
        """Return the size of the context parallel group."""
        return self.get_axis_size(SEQ) if SEQ in self.topology().axes else 1

    def get_context_parallel_rank(self) -> int:
        """Return the index of the part of the sequences that this rank holds."""
        return self.get_axis_rank(SEQ) if SEQ in self.topology().axes else 0

    # -- Megatron's names: neighbors in the pipeline -----------------------------------------------------------------

    get_pipeline_model_parallel_next_rank = _along(PIPE, ProcessGrid.get_next_rank)
    get_pipeline_model_parallel_prev_rank = _along(PIPE, ProcessGrid.get_prev_rank)

    def get_pipeline_model_parallel_first_rank(self) -> int:
        """Return the global rank of this pipeline's first stage."""
        return self.pp_group[0]

    def get_pipeline_model_parallel_last_rank(self) -> int:
        """Return the global rank of this pipeline's last stage."""
        return self.pp_group[-1]

    def is_pipeline_first_stage(self, ignore_virtual: bool = True) -> bool:
        """Tell whether this rank holds the first stage; stages are never virtual here."""
        return self.stage_id == 0

    def is_pipeline_last_stage(self, ignore_virtual: bool = True) -> bool:
        """Tell whether this rank holds the last stage; stages are never virtual here."""
        return self.stage_id == self.pipe_parallel_size - 1

    is_first_stage = cached_property(is_pipeline_first_stage)
    is_last_stage = cached_property(is_pipeline_last_stage)

    def get_data_parallel_src_rank(self) -> int:
        """Return the global rank of the first member of the data parallel group."""
        return self.dp_group[0]

    # -- Megatron's names: tied embeddings on the first and last stage -----------------------------------------------

    def is_rank_in_embedding_group(self) -> bool:
        """Tell whether this rank holds the input or the output embedding."""
        return self.is_first_stage or self.is_last_stage

    def get_embedding_group(self) -> ProcessGroup:
        """Return the group of the first and last stage of this pipeline, which share tied embeddings.

        The first call creates it, collectively on both stages, unless the pipeline has only these two.

        Raises:
            RuntimeError: this rank is on a middle stage.
        """
        if not self.is_rank_in_embedding_group():
            raise RuntimeError(
                f"rank {self.global_rank} is on stage {self.stage_id}: the embedding group joins stage 0 and stage "
                f"{self.pipe_parallel_size - 1}; check is_rank_in_embedding_group() first"
            )
        ranks = tuple(dict.fromkeys((self.pp_group[0], self.pp_group[-1])))
        return self.create_group(RankGroup(("embedding",), ranks))

    def is_rank_in_position_embedding_group(self) -> bool:
        """Tell whether this rank holds the position embedding, as the first stage does."""
        return self.is_first_stage

    def get_position_embedding_group(self) -> ProcessGroup:
        """Return the group of the first stage alone, which holds the position embedding.

        Raises:
            RuntimeError: this rank is on another stage.
        """
        if not self.is_first_stage:
            raise RuntimeError(
                f"rank {self.global_rank} is on stage {self.stage_id}, but stage 0 holds the position embedding: check "
                "is_rank_in_position_embedding_group() first"
            )
        return self.create_group(RankGroup(("position embedding",), (self.global_rank,)))

    # -- life cycle ----------------------------------------------------------------------------------------------

    def __dir__(self) -> list[str]:
        """Leave out the names of DeepSpeed and Megatron: the classes of grids define them after ``ProcessGrid``."""
        return [name for name in super().__dir__() if name in _OWN or hasattr(ProcessGrid, name) or name[0] == "_"]

    def model_parallel_is_initialized(self) -> bool:
        """Tell whether the groups exist."""
        return self.is_alive

    destroy_model_parallel = ProcessGrid.destroy


_OWN = frozenset({"correct_norms", "get_copy_group", "get_copy_rank", "get_partition_group"})
"""The names of grids that are neither those of ``ProcessGrid`` nor of another library."""


def has_shard(grid: object) -> TypeGuard[MpuGrid]:
    """Tell whether a grid partitions over the axis ``shard``."""
    return isinstance(grid, MpuGrid) and SHARD in grid.topology().axes


def require_grid(value: Any) -> None:
    """Refuse a layout, or a pipeline that has a grid, in place of a grid, and a grid that was destroyed."""
    if isinstance(value, MpuGrid):
        if not value.is_alive:
            raise RuntimeError(f"grid={value.topology().spec!r}: the grid was destroyed; create another one")
        return
    if isinstance(getattr(value, "mpu", None), MpuGrid) or callable(getattr(value, "mpu", None)):
        raise TypeError(f"grid: a {type(value).__name__} is not a grid: pass its grid, module.mpu()")
    raise TypeError(f"grid={abridged(value)}: pass a live grid, such as PipelineParallelGrid('pipe=2,data=2')")


# -- expert groups, in the tables of DeepSpeed's MoE layers ------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ExpertGroups:
    """The expert groups of one size as one rank sees them, registered with DeepSpeed until ``destroy()``."""

    grid: MpuGrid
    plan: ExpertPlan
    expert_group: ProcessGroup
    expert_data_group: ProcessGroup

    @property
    def expert_ranks(self) -> list[int]:
        """The global ranks, ascending, that together hold every expert once."""
        return list(self.grid.to_global(self.plan.expert_ranks(self.grid.grid_rank)))

    @property
    def expert_data_ranks(self) -> list[int]:
        """The global ranks, ascending, that hold the same experts as this rank."""
        return list(self.grid.to_global(self.plan.expert_data_ranks(self.grid.grid_rank)))

    @property
    def writes_checkpoint(self) -> bool:
        """True if this rank writes the files of its experts for its slice."""
        return self.plan.writes_checkpoint(self.grid.grid_rank)

    def destroy(self) -> None:
        """Remove the registration; the process groups themselves live as long as the grid. Idempotent."""
        registry.remove(self)


class ExpertRegistry:
    """The one owner of DeepSpeed's tables of expert groups."""

    def __init__(self) -> None:
        self._by_name: dict[str, tuple[ExpertGroups, Callable[[], None]]] = {}
        self.has_groups = False

    def find(self, name: str) -> ExpertGroups | None:
        """Return the groups registered under a name, if any."""
        return self._by_name[name][0] if name in self._by_name else None

    def forget_former_worlds(self) -> None:
        """Drop the entries of grids whose process groups torch has destroyed together with the world."""
        for groups, _ in list(self._by_name.values()):
            if not groups.grid.has_its_world:
                groups.grid.destroy()

    def sizes(self) -> set[int]:
        """Return the expert parallel sizes in use."""
        return {groups.plan.expert_parallel_size for groups, _ in self._by_name.values()}

    def of(self, mpu: object) -> list[ExpertGroups]:
        """Return the expert groups of a grid; an empty list for an mpu that is not a grid."""
        if not self._by_name or not isinstance(mpu, MpuGrid):
            return []
        return [groups for groups, _ in self._by_name.values() if groups.grid.shares_groups_with(mpu)]

    def check(self, grid: MpuGrid, plan: ExpertPlan) -> None:
        """Raise ``ExpertGroupError`` if this plan conflicts with a registered one."""
        known = self.find(plan.name)
        if known is not None and (known.plan != plan or not known.grid.shares_groups_with(grid)):
            raise ExpertGroupError(
                f"expert groups {plan.name!r} are already registered, for {known.grid} with {known.plan}: DeepSpeed "
                "keeps one table per name; call destroy() on those groups, or on their grid, first"
            )
        if known is None and plan.name in deepspeed_groups._EXPERT_PARALLEL_GROUP:
            raise ExpertGroupError(
                f"DeepSpeed has already created its own groups {plan.name!r}, of neighboring ranks: call "
                "create_expert_groups() before deepspeed.initialize()"
            )
        for other, _ in self._by_name.values():
            if other.plan.expert_tensor_parallel != plan.expert_tensor_parallel:
                raise ExpertGroupError(
                    f"expert_tensor_parallel={plan.expert_tensor_parallel} for {plan.name!r}, but "
                    f"{other.plan.expert_tensor_parallel} for {other.plan.name!r}: DeepSpeed keeps one; choose one"
                )

    def add(self, groups: ExpertGroups, on_remove: Callable[[], None]) -> None:
        """Add groups to DeepSpeed's tables."""
        name = groups.plan.name
        self._by_name[name] = (groups, on_remove)
        self.has_groups = True
        deepspeed_groups._EXPERT_PARALLEL_GROUP[name] = groups.expert_group
        deepspeed_groups._EXPERT_PARALLEL_GROUP_RANKS[name] = groups.expert_ranks
        deepspeed_groups._EXPERT_DATA_PARALLEL_GROUP[name] = groups.expert_data_group
        deepspeed_groups._EXPERT_DATA_PARALLEL_GROUP_RANKS[name] = groups.expert_data_ranks
        groups.grid.on_destroy(groups.destroy)

    def remove(self, groups: ExpertGroups) -> None:
        """Remove groups from DeepSpeed's tables. Idempotent."""
        name = groups.plan.name
        if self.find(name) is not groups:
            return
        _, on_remove = self._by_name.pop(name)
        self.has_groups = bool(self._by_name)
        for table in (
            deepspeed_groups._EXPERT_PARALLEL_GROUP,
            deepspeed_groups._EXPERT_PARALLEL_GROUP_RANKS,
            deepspeed_groups._EXPERT_DATA_PARALLEL_GROUP,
            deepspeed_groups._EXPERT_DATA_PARALLEL_GROUP_RANKS,
        ):
            table.pop(name, None)  # DeepSpeed empties its tables itself when the world is destroyed
        on_remove()


registry = ExpertRegistry()
