"""The live topology of one rank: its process groups, its neighbors, and the answers that DeepSpeed wants of an mpu."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ds_topo.engine.megatron import MegatronQueries
from ds_topo.engine.mpu import SEQUENCE_QUERIES, MpuQueries
from ds_topo.errors import TopologyError
from ds_topo.process_groups.agreement import agree
from ds_topo.process_groups.creation import ProcessGroup, ProcessGroups, job_timeout, require_initialized
from ds_topo.process_groups.device_mesh import mesh_over
from ds_topo.topology.process_topology import ProcessTopology
from ds_topo.topology.rank_tables import (
    DATA,
    MODEL,
    PIPE,
    SEQ,
    RankGroup,
    axes_of,
    degree,
    factorized_topology,
    fold_extra_axes,
    gradient_axes,
    grid_groups,
    model_parallel_axes,
    neighbor,
    p2p_pairs,
    sample_axes,
)
from ds_topo.topology.spec import Spec


class PipelineParallelGrid(MpuQueries, MegatronQueries):
    """The process groups of one job's topology, as this rank sees them; a complete ``mpu`` for DeepSpeed.

    Drop-in for ``deepspeed.runtime.pipe.topology.PipelineParallelGrid``, for any axes in any order. Creation is
    collective: all ranks compare what they are about to create and raise together if they differ. A rank joins only the
    groups that it belongs to, each distinct set of ranks once.

    - ``data parallel`` groups join the replicas of a parameter: all ranks that share stage and slice. An axis that
      DeepSpeed does not know (``seq``, ``expert``, any other) therefore counts as data, for gradients.
    - ``model parallel`` is pipe x model; its rank is ``stage * slices + slice`` whatever the order of the axes, which
      the universal checkpoint format relies on.
    - ``slice`` and ``tensor model`` parallel are the ``model`` axis, ``pipe`` and ``pipeline model`` the ``pipe`` axis.
    - With a ``seq`` axis, sequence queries exist, and ``get_data_parallel_rank`` and ``_world_size`` count distinct
      samples while ``get_data_parallel_group`` still joins all replicas.

    Args:
        topology: a topology (DeepSpeed's own too) or a spec such as ``"pipe=2,data=-1"``. Without one the world size is
            factorised as DeepSpeed does.
        process_group: the ranks of the job to lay out, all by default.
        timeout: of agreement and of every group; the job's own (``init_process_group(timeout=)``) by default. A group
            of all ranks is the world's own group and keeps the job's.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialised.
        TopologyError: the topology is malformed or not for this number of ranks.
        DisagreementError: ranks came with different topologies, or did not come.

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

    _data_queries_count_samples = True
    """Whether data-parallel rank and size leave ``seq`` out; a pipeline engine averages its loss over all replicas."""

    _told_when_created: ClassVar[list[Callable[[PipelineParallelGrid], None]]] = []

    def __init__(
        self,
        topology: ProcessTopology | Spec | None = None,
        process_group: ProcessGroup | None = None,
        *,
        timeout: timedelta | None = None,
    ) -> None:
        require_initialized("PipelineParallelGrid")
        self.global_rank = dist.get_rank()
        self._members = _members_of(process_group)
        self._callbacks: list[Callable[[], None]] = []
        self.world_size = len(self._members)
        self._topology = _agreed_topology(topology, self._members, timeout or job_timeout())
        self._rank = self._members.index(self.global_rank)
        self._topo = fold_extra_axes(self._topology)
        self._set_coordinates()
        self._groups = ProcessGroups(
            f"grid {self._topology.spec}, timeout {timeout or job_timeout()}",
            [RankGroup(group.axes, self.to_global(group.ranks)) for group in grid_groups(self._topology, self._rank)],
            self._members,
            timeout,
        )
        if self._data_queries_count_samples and SEQ in self._topology.axes:
            self._offer_sequence_queries()
        for tell in self._told_when_created:
            tell(self)

    @classmethod
    def when_created(cls, tell: Callable[[PipelineParallelGrid], None]) -> None:
        """Call this with every grid from now on, once it is complete."""
        cls._told_when_created.append(tell)

    def _set_coordinates(self) -> None:
        """Everything that DeepSpeed reads as an attribute; all of it follows from topology and rank."""
        folded = self._topo.get_coord(self._rank)
        self.data_parallel_id: int
        self.pipe_parallel_size = self._topo.get_dim(PIPE)
        self.model_parallel_size = self.slice_parallel_size = max(1, self._topo.get_dim(MODEL))
        self.stage_id: int = folded.pipe
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1
        self.data_parallel_size, self.data_parallel_id = self._topo.get_dim(DATA), int(folded.data)
        if self._data_queries_count_samples:
            self.data_parallel_size, self.data_parallel_id = self.get_sample_world_size(), self.get_sample_rank()
        self.dp_group = self.get_ranks(gradient_axes(self._topology))
        self.pp_group = self.get_ranks(PIPE)
        self.slice_group = self.mp_group = self.get_ranks(MODEL)
        self.ds_model_world_size = degree(self._topology, model_parallel_axes(self._topology))
        self.ds_model_rank: int = self.stage_id * self.slice_parallel_size + self.slice_group.index(self.global_rank)

    # -- any axis, any set of axes -------------------------------------------------------------------------------

    def topology(self) -> ProcessTopology:
        """The topology as it was given. (``_topo`` is its pipe/data/model form, with extra axes folded into data.)"""
        return self._topology

    @property
    def grid_rank(self) -> int:
        """This rank's number within the topology; the global rank unless the grid lays out a part of the job."""
        return self._rank

    def to_global(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Global ranks of ranks of the topology."""
        return tuple(self._members[rank] for rank in ranks)

    def get_ranks(self, axes: str | Iterable[str]) -> list[int]:
        """Global ranks, ascending, of this rank's group over one axis or several.

        Raises:
            UnknownAxisError: an axis that is not in the topology (``pipe``, ``data``, ``model`` have degree 1 then).
        """
        return list(self.to_global(self._topology.get_axis_ranks(axes_of(self._topology, axes), self._rank)))

    def get_group(self, axes: str | Iterable[str]) -> ProcessGroup:
        """This rank's process group over one axis or several.

        Every single axis, model parallel (pipe x model) and data parallel groups exist from the start, and answering
        never communicates. Any other set of axes is created when its ranks first ask; all of them must.

        Raises:
            UnknownAxisError: an axis that is not in the topology.
            DisagreementError: a new set of axes, and some of its ranks did not ask within the timeout.
            RuntimeError: the grid was destroyed.
        """
        span = axes_of(self._topology, axes)
        group = self._groups.get(span)
        return self._groups.extend(RankGroup(span, tuple(self.get_ranks(span)))) if group is None else group

    def create_group(self, group: RankGroup) -> ProcessGroup:
        """A group of this grid's ranks beyond its axes; collective over ``group.ranks`` (global, ascending).

        Equal rank sets share one process group; it lives as long as the grid.

        Raises:
            DisagreementError: ranks of the group did not ask within the timeout.
        """
        return self._groups.extend(group)

    def create_groups(
        self, description: str, groups: Sequence[RankGroup], failure: Exception | None = None
    ) -> list[ProcessGroup]:
        """Groups beyond the axes that all ranks of the grid create together; collective over the grid.

        Args:
            description: what is created, the same text on every rank.
            groups: this rank's own, global ranks ascending, in the one order that all ranks follow.
            failure: why this rank cannot take part; raised here, and told to the others.

        Raises:
            DisagreementError: ranks came with different descriptions, failed, or did not come.
        """
        return self._groups.extend_all(description, groups, self._members, failure)

    def on_destroy(self, callback: Callable[[], None]) -> None:
        """Call this, last one first, before the groups are destroyed."""
        self._callbacks.append(callback)

    def shares_groups_with(self, other: PipelineParallelGrid) -> bool:
        """Whether both are faces of one grid, as a module's ``mpu()`` is of the ``grid`` that it was built on."""
        return self._groups is other._groups

    def get_axis_rank(self, axis: str) -> int:
        """This rank's index along one axis; equal to its rank in ``get_group(axis)``."""
        return self.get_ranks(axis).index(self.global_rank)

    def get_axis_size(self, axis: str) -> int:
        """The degree of one axis."""
        return degree(self._topology, axes_of(self._topology, axis))

    def get_sample_rank(self) -> int:
        """Which of the step's distinct samples this rank works on; its pipe, model and seq peers share them."""
        samples = sample_axes(self._topology)
        return self._topology.get_axis_ranks(samples, self._rank).index(self._rank)

    def get_sample_world_size(self) -> int:
        """The number of distinct samples that the grid works on at a time."""
        return degree(self._topology, sample_axes(self._topology))

    def get_next_rank(self, axis: str) -> int:
        """The global rank of the next peer along ``axis``; the last one's is the first."""
        return self._neighbor(axis, +1)

    def get_prev_rank(self, axis: str) -> int:
        """The global rank of the previous peer along ``axis``; the first one's is the last."""
        return self._neighbor(axis, -1)

    def device_mesh(self, device_type: str | None = None) -> DeviceMesh:
        """The same layout as a torch ``DeviceMesh``: one dimension per axis, over this grid's own process groups.

        For ``parallelize_module``, ``DTensor``, ``fully_shard`` and ``torch.distributed.checkpoint``; slice it by axis,
        ``grid.device_mesh()["data"]``. It lives as long as the grid.

        Args:
            device_type: ``"cpu"``, ``"cuda"``, ...; by default the accelerator that the groups serve, else the CPU.
        """
        groups = [self.get_group(axis) for axis in self._topology.axes]
        return mesh_over(self._topology, self._members, groups, device_type)

    def destroy(self) -> None:
        """Destroy the groups of this grid; every rank should call it. Later queries for groups raise RuntimeError."""
        while self._callbacks:
            self._callbacks.pop()()
        self._groups.destroy()

    def __enter__(self) -> PipelineParallelGrid:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.destroy()

    def __repr__(self) -> str:
        coordinate = self._topology.get_coord(self._rank)._asdict()
        where = ", ".join(f"{axis}={index}" for axis, index in coordinate.items())
        return f"PipelineParallelGrid({self._topology.spec!r}, rank {self.global_rank}: {where})"

    # -- DeepSpeed's grid ----------------------------------------------------------------------------------------

    @property
    def dp_proc_group(self) -> ProcessGroup:
        """The data parallel group."""
        return self.get_group(gradient_axes(self._topology))

    @property
    def pp_proc_group(self) -> ProcessGroup:
        """The pipe parallel group."""
        return self.get_group(PIPE)

    @property
    def slice_proc_group(self) -> ProcessGroup:
        """The slice parallel group."""
        return self.get_group(MODEL)

    @property
    def ds_model_proc_group(self) -> ProcessGroup:
        """The model parallel group, pipe x model."""
        return self.get_group(model_parallel_axes(self._topology))

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
        """``[rank, rank of its next stage]`` for every rank of the job; the last stage's next is the first."""
        return self._all_to_global(p2p_pairs(self._topo))

    def get_stage_id(self) -> int:
        """This rank's pipeline stage."""
        return self.stage_id

    def get_data_parallel_id(self) -> int:
        """This rank's place among the pipelines; the same as ``get_data_parallel_rank()``."""
        return self.data_parallel_id

    def stage_to_global(self, stage_id: int, **axes: int) -> int:
        """The global rank at a stage, elsewhere at this rank's own coordinate unless ``axes`` say otherwise.

        ``data`` counts all replicas (0 to the size of the data parallel group - 1) unless an extra axis is named too.

        Raises:
            CoordinateError: a stage or index out of range; stages do not wrap around.
            UnknownAxisError: an axis that is not in the topology.
        """
        by_folded_axes = set(axes) <= {*self._topo.axes, "tensor"}
        topology = self._topo if by_folded_axes else self._topology
        own: dict[str, int] = topology.get_coord(self._rank)._asdict()
        if MODEL in own and "tensor" in axes:
            axes[MODEL] = axes.pop("tensor")
        if PIPE in own or stage_id != 0:
            axes[PIPE] = stage_id
        return self._members[topology.get_rank(**own | axes)]

    def _is_grid_valid(self) -> bool:
        return self._topology.world_size() == self.world_size

    # -- sequence parallelism: only where there is a ``seq`` axis ----------------------------------------------------

    if TYPE_CHECKING:
        get_sequence_parallel_group: Any
        get_sequence_parallel_world_size: Any
        get_sequence_parallel_rank: Any
        get_sequence_parallel_src_rank: Any
        get_sequence_data_parallel_group: Any
        get_sequence_data_parallel_world_size: Any
        get_sequence_data_parallel_rank: Any
        get_sequence_data_parallel_src_rank: Any

    def _offer_sequence_queries(self) -> None:
        spans = {"sequence": (SEQ,), "sequence_data": gradient_axes(self._topology)}
        for name in SEQUENCE_QUERIES:
            kind, _, what = name.removeprefix("get_").partition("_parallel_")
            setattr(self, name, _SequenceQuery(self, spans[kind], what))

    # -- rank numbers --------------------------------------------------------------------------------------------

    def _neighbor(self, axis: str, step: int) -> int:
        axes_of(self._topology, axis)
        return self._members[neighbor(self._topology, axis, self._rank, step)]

    def _all_to_global(self, table: list[list[int]]) -> list[list[int]]:
        return [list(self.to_global(ranks)) for ranks in table]


class _SequenceQuery:
    """One ``get_sequence_*`` method of a grid, bound to the axes that it speaks of."""

    def __init__(self, grid: PipelineParallelGrid, axes: tuple[str, ...], what: str) -> None:
        self._grid, self._axes, self._what = grid, axes, what

    def __call__(self) -> ProcessGroup | int:
        ranks = self._grid.get_ranks(self._axes)
        if self._what == "group":
            return self._grid.get_group(self._axes)
        return {"world_size": len(ranks), "rank": ranks.index(self._grid.global_rank), "src_rank": ranks[0]}[self._what]


def _members_of(process_group: ProcessGroup | None) -> Sequence[int]:
    """Global ranks of a group; the whole world by default."""
    if process_group is None:
        return range(dist.get_world_size())
    members = dist.get_process_group_ranks(process_group)
    if dist.get_rank() not in members:
        raise ValueError(f"process_group: rank {dist.get_rank()} is not one of its ranks {members}")
    return members


def _agreed_topology(
    topology: ProcessTopology | Spec | None, members: Sequence[int], timeout: timedelta
) -> ProcessTopology:
    """The topology for these members; a rank whose own is unusable tells the others before it raises."""
    try:
        return _checked_topology(topology, len(members))
    except TopologyError as error:
        agree("", members, timeout, failure=error)
        raise


def _checked_topology(topology: Any, world_size: int) -> ProcessTopology:
    if topology is None:
        return factorized_topology(world_size)
    if not isinstance(topology, ProcessTopology):
        if hasattr(topology, "axes") and hasattr(topology, "dims"):
            topology = ProcessTopology(topology.axes, topology.dims)
        else:
            topology = ProcessTopology.from_spec(topology, world_size)
    checked: ProcessTopology = topology
    checked.check_world_size(world_size)
    return checked
