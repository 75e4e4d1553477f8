"""Define the base of the programs' parallel states: tensor and pipeline parallelism, virtual and split stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeAlias

import torch

from ds_topo.engine.grid import PipelineParallelGrid
from ds_topo.errors import TopologyError
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.topology import ProcessTopology
from ds_topo.topology.axes import MODEL, PIPE
from ds_topo.topology.rank_tables import RankGroup
from ds_topo.torch_names import devices_of

Axes: TypeAlias = "Iterable[str] | Callable[[ProcessTopology], tuple[str, ...]]"
"""Names of axes, of which a topology may lack some, or a function that selects axes of the topology."""
Ranks: TypeAlias = "Callable[[Any], list[int]]"
"""A function of a parallel state that returns the global ranks of one of its groups, ascending."""


def over(axes: Axes) -> Ranks:
    """Return the function that returns the ranks of a group over some axes."""
    return lambda state: state._ranks(axes)


def group_over(*axes: str) -> Callable[[Any, bool], ProcessGroup | None]:
    """Return a method ``get_..._group`` that returns the group over some axes."""

    def get_group(self, check_initialized: bool = True) -> ProcessGroup | None:  # type: ignore[no-untyped-def]
        return self._group(axes, check_initialized)  # type: ignore[no-any-return]

    return get_group


def size_of(ranks: Ranks) -> Callable[[Any], int]:
    """Return a method ``get_..._world_size`` that returns the number of these ranks."""
    return lambda self: len(ranks(self))


def index_in(ranks: Ranks) -> Callable[[Any], int]:
    """Return a method ``get_..._rank`` that returns the index of this rank among these ranks."""
    return lambda self: ranks(self).index(self.grid.global_rank)


def first_of(ranks: Ranks) -> Callable[[Any], int]:
    """Return a method ``get_..._src_rank`` that returns the first of these ranks."""
    return lambda self: ranks(self)[0]


class GlobalMemoryBuffer:
    """Memory that is reused for all tensors of one name and data type (Megatron's class of this name)."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def get_tensor(self, tensor_shape: Iterable[int], dtype: torch.dtype, name: str) -> torch.Tensor:
        """Return an uninitialised tensor on the current device. It overlaps the previous one of the same name."""
        shape = torch.Size(tensor_shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < shape.numel():
            device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
            buffer = self._buffers[name, dtype] = torch.empty(shape.numel(), dtype=dtype, device=device)
        return buffer[: shape.numel()].view(shape)


class ParallelState:
    """The functions that all programs' parallel states share, as methods of the same names and arguments.

    Args:
        grid: the grid whose groups and coordinates are the answers.
    """

    refused: ClassVar[dict[str, str]] = {}
    """The names that the program's module has and that a grid cannot answer, each with the reason."""
    translated: ClassVar[dict[str, str]] = {}
    """The names that mean something else to the grid, each with the program's meaning."""

    def __init__(self, grid: PipelineParallelGrid) -> None:
        self.grid = grid
        self._virtual_rank: int | None = None
        self._virtual_world_size: int | None = None
        self._split_rank: int | None = None
        self._memory_buffer = GlobalMemoryBuffer()

    # -- life cycle ----------------------------------------------------------------------------------------------

    def model_parallel_is_initialized(self) -> bool:
        """Return whether the groups exist."""
        return self.grid.is_alive

    def is_unitialized(self) -> bool:
        """Return whether the groups do not exist. (The spelling is the programs'.)"""
        return not self.grid.is_alive

    def destroy_model_parallel(self) -> None:
        """Destroy the grid."""
        self.grid.destroy()

    # -- tensor parallelism --------------------------------------------------------------------------------------

    get_tensor_model_parallel_group = group_over(MODEL)
    get_tensor_model_parallel_world_size = size_of(over([MODEL]))
    get_tensor_model_parallel_rank = index_in(over([MODEL]))
    get_tensor_model_parallel_src_rank = first_of(over([MODEL]))

    def set_tensor_model_parallel_world_size(self, world_size: int | None) -> None:
        """Refuse any value but the grid's."""
        self._check_set("tensor parallel world size", world_size, self.get_tensor_model_parallel_world_size())

    def set_tensor_model_parallel_rank(self, rank: int | None) -> None:
        """Refuse any value but the grid's."""
        self._check_set("tensor parallel rank", rank, self.get_tensor_model_parallel_rank())

    # -- pipeline parallelism ------------------------------------------------------------------------------------

    get_pipeline_model_parallel_group = group_over(PIPE)
    get_pipeline_model_parallel_world_size = size_of(over([PIPE]))
    get_pipeline_model_parallel_rank = index_in(over([PIPE]))
    get_pipeline_model_parallel_first_rank = first_of(over([PIPE]))

    def set_pipeline_model_parallel_world_size(self, world_size: int | None) -> None:
        """Refuse any value but the grid's."""
        self._check_set("pipeline parallel world size", world_size, self.get_pipeline_model_parallel_world_size())

    def set_pipeline_model_parallel_rank(self, rank: int | None) -> None:
        """Refuse any value but the grid's."""
        self._check_set("pipeline parallel rank", rank, self.get_pipeline_model_parallel_rank())

    def get_pipeline_model_parallel_last_rank(self) -> int:
        """Return the global rank of the last stage."""
        return self.grid.get_ranks(PIPE)[-1]

    def get_pipeline_model_parallel_next_rank(self) -> int:
        """Return the global rank of the next stage; the first stage follows the last one."""
        return self.grid.get_next_rank(PIPE)

    def get_pipeline_model_parallel_prev_rank(self) -> int:
        """Return the global rank of the previous stage; the last stage precedes the first one."""
        return self.grid.get_prev_rank(PIPE)

    def get_virtual_pipeline_model_parallel_rank(self) -> int | None:
        """Return the virtual stage that the program has set last."""
        return self._virtual_rank

    def set_virtual_pipeline_model_parallel_rank(self, rank: int | None) -> None:
        """Set the current virtual stage."""
        self._virtual_rank = rank

    def get_virtual_pipeline_model_parallel_world_size(self) -> int | None:
        """Return the number of virtual stages per rank, as the program has set it; None without virtual stages."""
        return self._virtual_world_size

    def set_virtual_pipeline_model_parallel_world_size(self, world_size: int | None) -> None:
        """Set the number of virtual stages per rank."""
        self._virtual_world_size = world_size

    def is_rank_in_position_embedding_group(self) -> bool:
        """Return whether this rank holds the position embedding."""
        return self.grid.is_rank_in_position_embedding_group()

    def get_embedding_group(self, check_initialized: bool = True) -> ProcessGroup | None:
        """Return the group of the first and the last stage. It is created when both ask for it the first time."""
        return self._unless_absent(self.grid.get_embedding_group, check_initialized)

    def get_position_embedding_group(self, check_initialized: bool = True) -> ProcessGroup | None:
        """Return the group of the first stage."""
        return self._unless_absent(self.grid.get_position_embedding_group, check_initialized)

    # -- encoder and decoder -------------------------------------------------------------------------------------

    def get_pipeline_model_parallel_split_rank(self) -> int | None:
        """Return the first stage of the decoder, as the program has set it."""
        return self._split_rank

    def set_pipeline_model_parallel_split_rank(self, rank: int | None) -> None:
        """Set the first stage of the decoder."""
        self._split_rank = rank

    def is_pipeline_stage_before_split(self, rank: int | None = None) -> bool:
        """Return whether a stage, by default this rank's, belongs to the encoder."""
        stage = self.get_pipeline_model_parallel_rank() if rank is None else rank
        return stage < self._split_or(stage + 1)

    def is_pipeline_stage_after_split(self, rank: int | None = None) -> bool:
        """Return whether a stage, by default this rank's, belongs to the decoder."""
        stage = self.get_pipeline_model_parallel_rank() if rank is None else rank
        return stage >= self._split_or(stage)

    def is_pipeline_stage_at_split(self) -> bool:
        """Return whether this rank's stage is the last one of the encoder."""
        stage = self.get_pipeline_model_parallel_rank()
        return self.is_pipeline_stage_before_split(stage) and self.is_pipeline_stage_after_split(stage + 1)

    def _split_or(self, default: int) -> int:
        """Return the first stage of the decoder; ``default`` if there is no such split."""
        if self._split_rank is None or self.get_pipeline_model_parallel_world_size() == 1:
            return default
        return self._split_rank

    # -- memory --------------------------------------------------------------------------------------------------

    def get_global_memory_buffer(self) -> GlobalMemoryBuffer:
        """Return the memory for gathered activations."""
        return self._memory_buffer

    def destroy_global_memory_buffer(self) -> None:
        """Release the memory for gathered activations."""
        self._memory_buffer = GlobalMemoryBuffer()

    # -- for the programs' own questions -------------------------------------------------------------------------

    def _group(self, axes: Axes, check_initialized: bool = True) -> ProcessGroup | None:
        """Return the group along some axes: this rank alone if the topology has none of them."""
        if not check_initialized and not self.grid.is_alive:
            return None
        present = self._present(axes)
        return self.grid.get_group(present) if present else self._alone()

    def _alone(self) -> ProcessGroup:
        return self.grid.create_group(RankGroup(("this rank",), (self.grid.global_rank,)))

    def _ranks(self, axes: Axes) -> list[int]:
        """Return the global ranks of the group along some axes."""
        return self.grid.get_ranks(self._present(axes))

    def _present(self, axes: Axes) -> tuple[str, ...]:
        """Return those of the axes that the topology has."""
        topology = self.grid.topology()
        return axes(topology) if callable(axes) else tuple(axis for axis in axes if axis in topology.axes)

    def _check_degrees(self, **wanted: int | None) -> None:
        """Compare the degrees that a program asks for with the grid's.

        Raises:
            TopologyError: a degree differs.
        """
        for axis, degree in wanted.items():
            here = max(1, self.grid.topology().get_dim(axis))
            if degree is not None and degree != here:
                raise TopologyError(
                    f"initialize_model_parallel wants {degree} ranks along {axis!r}, but the grid is "
                    f"{self.grid.topology().spec!r}: one job has one layout. Configure the program with the grid's "
                    "degrees, or create the grid with the program's"
                )

    @staticmethod
    def _check_cpu(group: ProcessGroup | None, name: str) -> ProcessGroup | None:
        """Return the group if it serves tensors on the CPU; raise otherwise."""
        if group is not None and "cpu" not in devices_of(group):
            raise RuntimeError(
                f"{name}: the groups of this job have no gloo backend, which tensors on the CPU need. "
                'Join with init_distributed(backend="cpu:gloo,cuda:nccl")'
            )
        return group

    @staticmethod
    def _unless_absent(ask: Callable[[], ProcessGroup], check_initialized: bool) -> ProcessGroup | None:
        try:
            return ask()
        except RuntimeError:
            if check_initialized:
                raise
            return None

    @staticmethod
    def _check_set(what: str, value: int | None, here: int) -> None:
        if value is not None and value != here:
            raise TopologyError(
                f"the {what} is the grid's, {here}, and cannot be set to {value}: create the grid with another topology"
            )
