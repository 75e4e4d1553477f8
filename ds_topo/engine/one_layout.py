"""One job has one layout: what else in the program says which ranks belong together must say the same.

Programs bring a topology or an mpu of their own, and their layers ask a parallel state of their own. Where it joins
other ranks than the grid, collectives meet the wrong peers and hang, or train something else.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from deepspeed.pipe import PipelineModule as DeepSpeedPipelineModule
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from torch import nn

from ds_topo.engine.mpu import MpuGrid
from ds_topo.errors import TopologyError, abridged, listed
from ds_topo.process_groups.agreement import agree
from ds_topo.process_groups.grid import AnyTopology, as_topology
from ds_topo.process_groups.torch_names import job_timeout
from ds_topo.topology import ProcessTopology
from ds_topo.topology.axes import DATA, MODEL, PIPE, SEQ
from ds_topo.topology.rank_tables import fold_extra_axes, gradient_axes, sample_axes

if TYPE_CHECKING:
    from ds_topo.engine.grid import PipelineParallelGrid

in_use: list[PipelineParallelGrid] = []
"""The grid of :func:`ds_topo.use`, once for every call that has not ended."""

_TENSOR, _PIPELINE, _BOTH = (MODEL,), (PIPE,), (PIPE, MODEL)
_QUESTIONS: dict[str, tuple[tuple[str, ...], ...]] = {
    "get_tensor_model_parallel_group": (_TENSOR,),
    "get_slice_parallel_group": (_TENSOR,),
    "get_model_parallel_group": (_BOTH, _TENSOR),
    "get_pipeline_model_parallel_group": (_PIPELINE,),
    "get_pipe_parallel_group": (_PIPELINE,),
    "get_sequence_parallel_group": ((SEQ,),),
    "get_context_parallel_group": ((SEQ,),),
}
"""What mpus are asked, with the axes that the answer may span: programs differ in what they call model parallel."""
_TENSOR_IS_MODEL_PARALLEL = "get_io_parallel_group"
"""A function that GPT-NeoX's parallel state has alone; there, model parallel is tensor parallel."""
_DATA = "get_data_parallel_group"
_LIBRARIES = ("deepspeed", "ds_topo", "torch")


def grid_in_use() -> PipelineParallelGrid | None:
    """The grid of :func:`ds_topo.use`."""
    return in_use[-1] if in_use else None


# -- topologies -------------------------------------------------------------------------------------------------------


def require_topology_in_use(given: AnyTopology | None, num_stages: int | None, grid: PipelineParallelGrid) -> None:
    """Refuse a pipeline of another layout than the grid in use; collective over the grid.

    Raises:
        TopologyError: the message names ranks whose places differ.
        DisagreementError: another rank's is.
    """
    failure: Exception | None = None
    try:
        if given is not None:
            _require_same_places(as_topology(given, grid.world_size), grid)
        elif num_stages is not None and num_stages != grid.pipe_parallel_size:
            raise TopologyError(
                f"num_stages={abridged(num_stages)}, but the grid in use, {grid.topology().spec!r}, has "
                f"{grid.pipe_parallel_size}: leave it out, or use a grid of that many"
            )
    except (TopologyError, TypeError) as error:
        failure = error
    _agree(grid, grid.topology().axes, "the topology of the pipeline", failure)


def _require_same_places(given: ProcessTopology, grid: PipelineParallelGrid) -> None:
    wanted = fold_extra_axes(grid.topology())
    if given in (grid.topology(), wanted):
        return
    found = fold_extra_axes(given) if given.world_size() == wanted.world_size() else given
    axes = (PIPE, DATA, MODEL)

    def place(topology: ProcessTopology, rank: int) -> tuple[int, ...]:
        here = topology.get_coord(rank)._asdict()
        return tuple(here.get(axis, 0) for axis in axes)

    both = range(min(given.world_size(), wanted.world_size()))
    differ = [rank for rank in both if place(found, rank) != place(wanted, rank)]
    if differ or given.world_size() != wanted.world_size():
        raise TopologyError(
            f"the topology {given.spec!r} is not the layout of the grid in use, {grid.topology().spec!r}: they place "
            f"ranks {listed(differ)} differently; pass grid.topology(), or use a grid of the program's order"
        )


# -- mpus -------------------------------------------------------------------------------------------------------------


def mpu_in_use(mpu: Any, model: Any, grid: PipelineParallelGrid) -> Any:
    """The mpu of an engine while a grid is in use: that grid; collective over it (but for pipe).

    Raises:
        TopologyError: ``mpu``, or the pipeline's own, joins other ranks; the message names them.
        DisagreementError: another rank's does.
    """
    is_pipeline = isinstance(model, DeepSpeedPipelineModule)
    own: Any = model.mpu() if isinstance(model, DeepSpeedPipelineModule) else mpu
    failure: Exception | None = None
    try:
        if isinstance(own, MpuGrid):
            if own.topology() != grid.topology() or own.to_global([0]) != grid.to_global([0]):
                _require_same_places(own.topology(), grid)
        elif own is not None and own is not parallel_state_sp:  # DeepSpeed's, whose groups are the grid's meanwhile
            require_same_groups(own, type(own).__name__ if not isinstance(own, ModuleType) else own.__name__, grid)
    except Exception as error:  # whatever it is: the others hear of it
        failure = error
    axes = [axis for axis in grid.topology().axes if axis != PIPE or is_pipeline]
    _agree(grid, axes, "the mpu of the engine", failure)
    if is_pipeline or isinstance(mpu, MpuGrid):
        return mpu
    return grid


def require_same_groups(mpu: Any, name: str, grid: MpuGrid) -> None:
    """Refuse an mpu, or a program's module of parallel state, whose groups are not the grid's.

    Raises:
        TopologyError: the message names the question and both sets of ranks.
    """
    for question, spans in _questions_to(mpu, grid):
        found = _ranks_of(mpu, question)
        expected = [_ranks_along(grid, span) for span in spans]
        if found is not None and found not in expected:
            remedy = f"let it answer from the grid, ds_topo.parallel_state.install(grid, {name})"
            if not isinstance(mpu, ModuleType):
                remedy = "pass mpu=grid"
            raise TopologyError(
                f"two layouts in one job: {question}() of {name} joins ranks {listed(found)} on rank "
                f"{grid.global_rank}, where {grid.topology().spec!r} joins {listed(expected[0])} along "
                f"{' x '.join(spans[0])}: {remedy}, or create the grid in the program's own order"
            )


def check_programs(model: nn.Module, grid: MpuGrid) -> None:
    """Compare the parallel states that a model's layers can ask, such as ``megatron.mpu``, with the grid.

    They are found in the packages that the layers come from, and among the names in the layers' own files.

    Raises:
        TopologyError: one of them joins other ranks, or the grid answers in its place with DeepSpeed's meanings.
    """
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
    of_neox = {name.split(".")[0] for name, module in modules.items() if _TENSOR_IS_MODEL_PARALLEL in vars(module)}
    for name, module in modules.items():
        package = name.split(".")[0]
        if package not in packages and id(module) not in states and name not in origins:
            continue
        if _DATA in vars(module) and not _QUESTIONS.keys().isdisjoint(vars(module)):
            require_same_groups(module, name, grid)
        if package in of_neox and grid.pipe_parallel_size > 1 and grid.slice_parallel_size > 1:
            _refuse_grid_as_neox_state(module, name, grid)


def _refuse_grid_as_neox_state(module: ModuleType, name: str, grid: MpuGrid) -> None:
    """The grid means pipe x model where GPT-NeoX's layers mean tensor parallel.

    Raises:
        TopologyError: it stands in a module of theirs.
    """
    for attribute, value in list(vars(module).items()):
        if isinstance(value, MpuGrid) or (
            isinstance(getattr(value, "__self__", None), MpuGrid) and attribute.startswith("get_model_parallel")
        ):
            raise TopologyError(
                f"{name}.{attribute} is the grid's, whose model parallel group is pipe x model "
                f"({grid.get_model_parallel_world_size()} ranks), but GPT-NeoX means tensor parallel "
                f"({grid.slice_parallel_size}): its layers would wait for other stages. Leave its module as it was, "
                "and call ds_topo.parallel_state.install(grid, megatron.mpu)"
            )


def _questions_to(mpu: Any, grid: MpuGrid) -> Iterator[tuple[str, tuple[tuple[str, ...], ...]]]:
    for question, spans in _QUESTIONS.items():
        if question == "get_model_parallel_group" and hasattr(mpu, _TENSOR_IS_MODEL_PARALLEL):
            spans = (_TENSOR,)
        yield question, spans
    yield _DATA, (sample_axes(grid.topology()), gradient_axes(grid.topology()))


def _ranks_of(mpu: Any, question: str) -> list[int] | None:
    """Who is in the group that an mpu answers; None where it does not, or a grid does in its place."""
    ask = getattr(mpu, question, None)
    answers_from = type(getattr(ask, "__self__", None)).__module__
    if not callable(ask) or answers_from.split(".")[0] == "ds_topo":  # asking a grid may create a group
        return None
    try:
        return sorted(dist.get_process_group_ranks(ask()))
    except Exception:  # not initialised, wants arguments, is no group: whatever a program's function may raise
        return None


def _ranks_along(grid: MpuGrid, axes: tuple[str, ...]) -> list[int]:
    present = [axis for axis in axes if axis in grid.topology().axes]
    return grid.get_ranks(present) if present else [grid.global_rank]


def _agree(grid: MpuGrid, axes: list[str], subject: str, failure: Exception | None) -> None:
    agree("", grid.get_ranks(axes), job_timeout(), failure=failure, subject=subject)
