"""Check that a program's own topology or mpu agrees with the grid that is in use: one job has one layout.

If one of them groups ranks in another way than the grid, collectives hang or mix up gradients. The checks raise on all
ranks together.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

import torch.distributed as dist
from deepspeed.pipe import PipelineModule as DeepSpeedPipelineModule
from deepspeed.runtime.sequence_parallel import parallel_state_sp

from ds_topo.engine.current_mpu import agreement, axes_of_engine
from ds_topo.errors import TopologyError, abridged, listed
from ds_topo.launch.launchers import TOPOLOGY_OVERRIDE
from ds_topo.mpu import MpuGrid
from ds_topo.process_groups.process_grid import AnyTopology, as_topology
from ds_topo.topology import ProcessTopology
from ds_topo.topology.axes import DATA, MODEL, PIPE, SEQ
from ds_topo.topology.rank_tables import fold_extra_axes, gradient_axes, sample_axes

_QUESTIONS: dict[str, tuple[tuple[str, ...], ...]] = {
    "get_tensor_model_parallel_group": ((MODEL,),),
    "get_slice_parallel_group": ((MODEL,),),
    "get_model_parallel_group": ((PIPE, MODEL), (MODEL,)),
    "get_pipeline_model_parallel_group": ((PIPE,),),
    "get_pipe_parallel_group": ((PIPE,),),
    "get_sequence_parallel_group": ((SEQ,),),
    "get_context_parallel_group": ((SEQ,),),
}
"""The methods of mpus, each with the axes that its answer may span: the meaning of model parallel differs."""
_ONLY_IN_NEOX = "get_io_parallel_group"
"""A function that only the parallel state of GPT-NeoX has, where model parallel means tensor parallel."""


def require_topology_in_use(given: AnyTopology | None, num_stages: int | None, grid: MpuGrid) -> None:
    """Refuse a pipeline whose layout differs from the grid in use; collective over the grid.

    ``ds-topo verify`` replaces the layout of a program, so nothing is refused in its runs.
    """
    if TOPOLOGY_OVERRIDE in os.environ:
        return
    with agreement(grid.get_ranks(grid.topology().axes), "the topology of the pipeline"):
        if given is not None:
            require_same_places(as_topology(given, grid.world_size), grid)
        elif num_stages is not None and num_stages != grid.pipe_parallel_size:
            raise TopologyError(
                f"num_stages={abridged(num_stages)}, but the grid in use, {grid.topology().spec!r}, has "
                f"{grid.pipe_parallel_size}: omit num_stages, or use a grid with that many stages"
            )


def mpu_in_use(mpu: Any, model: Any, grid: MpuGrid) -> Any:
    """Return the mpu for an engine while a grid is in use; refuse one that joins other ranks. Collective."""
    is_pipeline = isinstance(model, DeepSpeedPipelineModule)
    own: Any = model.mpu() if isinstance(model, DeepSpeedPipelineModule) else mpu
    with agreement(grid.get_ranks(axes_of_engine(grid, is_pipeline)), "the mpu of the engine"):
        if isinstance(own, MpuGrid):
            require_same_places(own.topology(), grid)
        elif own is not None and own is not parallel_state_sp:  # this module answers with the grid's groups
            require_same_groups(own, own.__name__ if isinstance(own, ModuleType) else type(own).__name__, grid)
    return mpu if is_pipeline or isinstance(mpu, MpuGrid) else grid


def require_same_places(given: ProcessTopology, grid: MpuGrid) -> None:
    """Refuse a topology that places ranks differently than a grid does; axes of degree 1 do not matter."""
    wanted = fold_extra_axes(grid.topology())
    if given in (grid.topology(), wanted):
        return
    found = fold_extra_axes(given) if given.world_size() == wanted.world_size() else given

    def place(topology: ProcessTopology, rank: int) -> tuple[int, ...]:
        here = topology.get_coord(rank)._asdict()
        return tuple(here.get(axis, 0) for axis in (PIPE, DATA, MODEL))

    both = range(min(given.world_size(), wanted.world_size()))
    differ = [rank for rank in both if place(found, rank) != place(wanted, rank)]
    if differ or given.world_size() != wanted.world_size():
        raise TopologyError(
            f"the topology {given.spec!r} is not the layout of the grid in use, {grid.topology().spec!r}: they place "
            f"ranks {listed(differ)} differently; pass grid.topology(), or create the grid in the program's order"
        )


def require_same_groups(mpu: Any, name: str, grid: MpuGrid) -> None:
    """Refuse an mpu, or a program's module of parallel state, whose groups are not the grid's."""
    topology = grid.topology()
    spans_of = {**_QUESTIONS, "get_data_parallel_group": (sample_axes(topology), gradient_axes(topology))}
    if hasattr(mpu, _ONLY_IN_NEOX):
        spans_of["get_model_parallel_group"] = ((MODEL,),)
    for question, spans in spans_of.items():
        found = _ranks_of(mpu, question)
        expected = [grid.get_ranks(axis for axis in span if axis in topology.axes) for span in spans]
        if found is not None and found not in expected:
            remedy = f"call ds_topo.parallel_state.install(grid, {name})"
            if not isinstance(mpu, ModuleType):
                remedy = "pass mpu=grid"
            raise TopologyError(
                f"two layouts in one job: {question}() of {name} joins ranks {listed(found)} on rank "
                f"{grid.global_rank}, where {grid.topology().spec!r} joins {listed(expected[0])} along "
                f"{' x '.join(spans[0])}: {remedy}, or create the grid in the program's own order"
            )


def _ranks_of(mpu: Any, question: str) -> list[int] | None:
    """Return the ranks of the group that a query returns; None if it returns no group, or if a grid answers it."""
    ask = getattr(mpu, question, None)
    answers_from = type(getattr(ask, "__self__", None)).__module__
    if not callable(ask) or answers_from.split(".")[0] == "ds_topo":  # asking a grid may create a group
        return None
    try:
        return sorted(dist.get_process_group_ranks(ask()))
    except Exception:  # a program's function may raise anything, such as when it is not initialised
        return None
