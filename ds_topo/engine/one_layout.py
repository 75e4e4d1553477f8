"""Check that everything in a program that groups ranks agrees with the grid: one job has one layout.

A program may have its own topology or mpu, and its layers may use their own parallel state. If one of these groups
ranks in another way than the grid, collectives hang or mix up gradients. The checks raise on all ranks together.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import torch.distributed as dist
from deepspeed.pipe import PipelineModule as DeepSpeedPipelineModule
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.sequence.layer import DistributedAttention
from torch import nn

from ds_topo.base.torch_names import DESCRIPTION, describe, job_timeout
from ds_topo.errors import TopologyError, abridged, listed
from ds_topo.launch.agreement import agree
from ds_topo.launch.launchers import TOPOLOGY_OVERRIDE
from ds_topo.mpu import MpuGrid
from ds_topo.process_groups.process_grid import AnyTopology, ProcessGrid, as_topology
from ds_topo.topology import ProcessTopology
from ds_topo.topology.axes import DATA, MODEL, PIPE, SEQ
from ds_topo.topology.rank_tables import fold_extra_axes, gradient_axes, sample_axes

in_use: list[MpuGrid] = []
"""The grid of :func:`ds_topo.use`, once for every call that has not ended."""

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
_DATA_QUESTION = "get_data_parallel_group"
_ONLY_IN_NEOX = "get_io_parallel_group"
"""A function that only the parallel state of GPT-NeoX has, where model parallel means tensor parallel."""
_LIBRARIES = ("deepspeed", "ds_topo", "torch")
_OUR_LAYERS = "ds_topo.layers"


def grid_in_use() -> MpuGrid | None:
    """Return the grid of :func:`ds_topo.use`, or None."""
    return in_use[-1] if in_use else None


def axes_of_engine(grid: MpuGrid, is_pipeline: bool) -> list[str]:
    """Return the axes of an engine's ranks: without a pipeline engine, each stage of a program has an engine."""
    return [axis for axis in grid.topology().axes if axis != PIPE or is_pipeline]


@contextmanager
def agreement(members: Sequence[int], subject: str, description: str = "") -> Iterator[list[str]]:
    """Compare a description, or else the lines that a block adds, between ranks, or raise its error on all of them.

    Raises:
        DisagreementError: they differ, or the block of another rank has raised an error; the message names ranks.
    """
    lines: list[str] = []
    failure: Exception | None = None
    try:
        yield lines
    except Exception as error:  # of any kind, because the other ranks must raise, too
        failure = error
    agree(description, members, job_timeout(), failure=failure, subject=subject, lines=None if description else lines)


def require_topology_in_use(given: AnyTopology | None, num_stages: int | None, grid: MpuGrid) -> None:
    """Refuse a pipeline whose layout differs from the grid in use; collective over the grid.

    ``ds-topo verify`` replaces the layout of a program, so nothing is refused in its runs.

    Raises:
        TopologyError: the layout differs; the message names ranks that are placed differently.
        DisagreementError: the layout of another rank differs.
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
    """Return the mpu for an engine while a grid is in use; collective over the ranks of the engine.

    Raises:
        TopologyError: ``mpu``, or the pipeline's own, joins other ranks than the grid; the message names them.
        DisagreementError: another rank raised that error.
    """
    is_pipeline = isinstance(model, DeepSpeedPipelineModule)
    own: Any = model.mpu() if isinstance(model, DeepSpeedPipelineModule) else mpu
    with agreement(grid.get_ranks(axes_of_engine(grid, is_pipeline)), "the mpu of the engine"):
        if isinstance(own, MpuGrid):
            require_same_places(own.topology(), grid)
        elif own is not None and own is not parallel_state_sp:  # this module answers with the grid's groups
            require_same_groups(own, own.__name__ if isinstance(own, ModuleType) else type(own).__name__, grid)
    return mpu if is_pipeline or isinstance(mpu, MpuGrid) else grid


def require_same_places(given: ProcessTopology, grid: MpuGrid) -> None:
    """Refuse a topology that places ranks differently than a grid does; axes of degree 1 do not matter.

    Raises:
        TopologyError: the message names the ranks.
    """
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
    """Refuse an mpu, or a program's module of parallel state, whose groups are not the grid's.

    Raises:
        TopologyError: a group differs; the message names the method and both sets of ranks.
    """
    spans_of = {**_QUESTIONS, _DATA_QUESTION: (sample_axes(grid.topology()), gradient_axes(grid.topology()))}
    if hasattr(mpu, _ONLY_IN_NEOX):
        spans_of["get_model_parallel_group"] = ((MODEL,),)
    axes = grid.topology().axes
    for question, spans in spans_of.items():
        found = _ranks_of(mpu, question)
        expected = [grid.get_ranks(axis for axis in span if axis in axes) for span in spans]
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


def check_programs(model: nn.Module, grid: MpuGrid) -> None:
    """Compare the parallel states that a model's layers may use, such as ``megatron.mpu``, with the grid.

    The function searches the packages that define the layers, and the names in the layers' own files: layers call the
    functions of a parallel state by the names of its module, and no attribute of theirs refers to it.

    Raises:
        TopologyError: a parallel state joins other ranks, or GPT-NeoX uses a grid with DeepSpeed's meaning of model
            parallel.
    """
    for name, layer in model.named_modules():
        _require_own_groups(name, layer, grid)
    layers = [*model.modules(), *getattr(model, "forward_funcs", ())]
    files = {getattr(layer, "__module__", "") for layer in (*layers, *map(type, layers))} - {""}
    files = {file for file in files if file.split(".")[0] not in _LIBRARIES and file in sys.modules}
    packages = {file.split(".")[0] for file in files}
    named = [value for file in files for value in vars(sys.modules[file]).values()]
    states = {id(value) for value in named if isinstance(value, ModuleType)}
    origins = {getattr(value, "__module__", None) for value in named if isinstance(value, FunctionType)}
    modules = {
        name: module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and name.split(".")[0] not in _LIBRARIES
    }
    of_neox = {name.split(".")[0] for name, module in modules.items() if _ONLY_IN_NEOX in vars(module)}
    for name, module in modules.items():
        package = name.split(".")[0]
        if package not in packages and id(module) not in states and name not in origins:
            continue
        if _DATA_QUESTION in vars(module) and not _QUESTIONS.keys().isdisjoint(vars(module)):
            require_same_groups(module, name, grid)
        if package in of_neox and grid.pipe_parallel_size > 1:
            _refuse_grid_as_neox_state(module, name, grid)


def _require_own_groups(name: str, layer: nn.Module, grid: MpuGrid) -> None:
    """Refuse a layer that keeps another grid of the same ranks, or a group that joins other ranks or replicas.

    Any group that a layer of ours divides its work over must stay within the ranks that read one sample, the whole
    world's, too. What other layers use their groups for is unknown.
    """
    is_ours = any(kind.__module__ == _OUR_LAYERS for kind in type(layer).__mro__)
    for attribute, value in vars(layer).items():
        what = f"{attribute} of {type(layer).__name__} {name!r}"
        if isinstance(value, ProcessGrid) and value.is_alive and value.topology() != grid.topology():
            raise TopologyError(
                f"two layouts in one job: {what} is the grid {value.topology().spec!r}, but the engine's is "
                f"{grid.topology().spec!r}: give the layer and the engine the same grid"
            )
        group = getattr(value, "__dict__", {}).get("group", value)  # ds_topo.layers.Parallel has one
        if not isinstance(group, dist.ProcessGroup):
            continue
        ranks = dist.get_process_group_ranks(group)
        divides = is_ours or isinstance(layer, DistributedAttention) or type(value).__module__ == _OUR_LAYERS
        if divides and (replicas := _axes_of_other_samples(ranks, grid)):
            raise TopologyError(
                f"{what} divides the work of one replica over ranks {listed(ranks)}, which read different "
                f"samples along {' x '.join(replicas)}: give it the group of {grid.topology().spec!r} along 'model', "
                "or 'seq' for attention"
            )
        if not str(group.group_desc).startswith(DESCRIPTION):
            continue
        axes = describe(group)[0].split("+")
        if set(axes) <= set(grid.topology().axes) and ranks != grid.get_ranks(axes):
            raise TopologyError(
                f"two layouts in one job: {what} joins ranks {listed(ranks)} along {' x '.join(axes)}, but "
                f"{grid.topology().spec!r} joins {listed(grid.get_ranks(axes))}: take the group from the engine's grid"
            )


def _axes_of_other_samples(ranks: list[int], grid: MpuGrid) -> list[str]:
    """Return the axes along which some of these ranks read other samples than this rank."""
    varied = sample_axes(grid.topology())
    if set(ranks) <= set(grid.get_ranks(axis for axis in grid.topology().axes if axis not in varied)):
        return []
    found = [axis for axis in varied if len({*ranks} & {*grid.get_ranks(axis)}) > 1]
    return found or [axis for axis in varied if grid.get_axis_size(axis) > 1]


def _refuse_grid_as_neox_state(module: ModuleType, name: str, grid: MpuGrid) -> None:
    """Refuse a grid or its methods in a module of GPT-NeoX, where the model parallel group has another meaning."""
    for attribute, value in list(vars(module).items()):
        is_method = isinstance(getattr(value, "__self__", None), MpuGrid)
        if isinstance(value, MpuGrid) or (is_method and attribute.startswith("get_model_parallel")):
            raise TopologyError(
                f"{name}.{attribute} belongs to the grid, whose model parallel group is pipe x model "
                f"({grid.get_model_parallel_world_size()} ranks), but GPT-NeoX means tensor parallel "
                f"({grid.slice_parallel_size}): call ds_topo.parallel_state.install(grid, megatron.mpu) instead"
            )
