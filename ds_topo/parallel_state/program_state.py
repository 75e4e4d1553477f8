"""Define the base of the programs' parallel states: tensor and pipeline parallelism, virtual and split stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ClassVar

import torch

from ds_topo.backends import current_device
from ds_topo.engine.grid import PipelineParallelGrid
from ds_topo.errors import TopologyError
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.topology.axes import MODEL, PIPE
from ds_topo.topology.rank_tables import RankGroup, gradient_axes, sample_axes
from ds_topo.torch_names import devices_of


class GlobalMemoryBuffer:
    """Memory that is reused for all tensors of one name and data type (Megatron's class of this name)."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def get_tensor(self, tensor_shape: Iterable[int], dtype: torch.dtype, name: str) -> torch.Tensor:
        """Return an uninitialised tensor on the current device. It overlaps the previous one of the same name."""
        shape = torch.Size(tensor_shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < shape.numel():
            buffer = torch.empty(shape.numel(), dtype=dtype, device=current_device())
            self._buffers[name, dtype] = buffer
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
        self.is_awaited = False
        """Whether a program has still to call ``initialize_model_parallel``, and the state answers that it has not."""
        self._virtual_rank: int | None = None
        self._virtual_world_size: int | None = None
        self._split_rank: int | None = None
        self._memory_buffer = GlobalMemoryBuffer()

    # -- life cycle ----------------------------------------------------------------------------------------------

    def model_parallel_is_initialized(self) -> bool:
        """Return whether the groups exist and, in an installed module, the program has asked for them.

        Programs ask this before they call ``initialize_model_parallel``, which checks their degrees.
        """
        return self.grid.is_alive and not self.is_awaited

    def is_unitialized(self) -> bool:
        """Return the opposite of :meth:`model_parallel_is_initialized`. (The spelling is the programs'.)"""
        return not self.model_parallel_is_initialized()

    def destroy_model_parallel(self) -> None:
        """Destroy the grid."""
        self.grid.destroy()

    destroy_tensor_model_parallel = destroy_model_parallel

    # -- tensor parallelism --------------------------------------------------------------------------------------

    def get_tensor_model_parallel_group(self, check_initialized: bool = True) -> ProcessGroup | None:
        """Return the group of the slices of this rank's layers."""
        return self._group((MODEL,), check_initialized)

    def get_tensor_model_parallel_world_size(self) -> int:
        """Return the number of slices of each layer."""
        return self.grid.get_axis_size(MODEL)

    def get_tensor_model_parallel_rank(self) -> int:
        """Return the index of this rank's slice."""
        return self.grid.get_axis_rank(MODEL)

    def get_tensor_model_parallel_src_rank(self) -> int:
        """Return the global rank of the first slice."""
        return self.grid.get_ranks(MODEL)[0]

    def set_tensor_model_parallel_world_size(self, world_size: int | None) -> None:
        """Refuse any value but the grid's."""
        self._check_set("tensor parallel world size", world_size, self.get_tensor_model_parallel_world_size())

    def set_tensor_model_parallel_rank(self, rank: int | None) -> None:
        """Refuse any value but the grid's."""
        self._check_set("tensor parallel rank", rank, self.get_tensor_model_parallel_rank())

    # -- pipeline parallelism ------------------------------------------------------------------------------------

    def get_pipeline_model_parallel_group(self, check_initialized: bool = True) -> ProcessGroup | None:
        """Return the group of the stages of this rank's pipeline."""
        return self._group((PIPE,), check_initialized)

    def get_pipeline_model_parallel_world_size(self) -> int:
        """Return the number of stages."""
        return self.grid.get_axis_size(PIPE)

    def get_pipeline_model_parallel_rank(self) -> int:
        """Return this rank's stage."""
        return self.grid.get_axis_rank(PIPE)

    def set_pipeline_model_parallel_world_size(self, world_size: int | None) -> None:
        """Refuse any value but the grid's."""
        self._check_set("pipeline parallel world size", world_size, self.get_pipeline_model_parallel_world_size())

    def set_pipeline_model_parallel_rank(self, rank: int | None) -> None:
        """Refuse any value but the grid's."""
        self._check_set("pipeline parallel rank", rank, self.get_pipeline_model_parallel_rank())

    def get_pipeline_model_parallel_first_rank(self) -> int:
        """Return the global rank of the first stage."""
        return self.grid.get_ranks(PIPE)[0]

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
        return self._has_no_split() or stage < (self._split_rank or 0)

    def is_pipeline_stage_after_split(self, rank: int | None = None) -> bool:
        """Return whether a stage, by default this rank's, belongs to the decoder."""
        stage = self.get_pipeline_model_parallel_rank() if rank is None else rank
        return self._has_no_split() or stage >= (self._split_rank or 0)

    def is_pipeline_stage_at_split(self) -> bool:
        """Return whether this rank's stage is the last one of the encoder."""
        stage = self.get_pipeline_model_parallel_rank()
        return self.is_pipeline_stage_before_split(stage) and self.is_pipeline_stage_after_split(stage + 1)

    def _has_no_split(self) -> bool:
        return self._split_rank is None or self.get_pipeline_model_parallel_world_size() == 1

    # -- memory --------------------------------------------------------------------------------------------------

    def get_global_memory_buffer(self) -> GlobalMemoryBuffer:
        """Return the memory for gathered activations."""
        return self._memory_buffer

    def destroy_global_memory_buffer(self) -> None:
        """Release the memory for gathered activations."""
        self._memory_buffer = GlobalMemoryBuffer()

    # -- for the programs' own questions -------------------------------------------------------------------------

    def _group(self, axes: Iterable[str], check_initialized: bool = True) -> ProcessGroup | None:
        """Return the group along some axes: this rank alone if the topology has none of them."""
        if not check_initialized and not self.grid.is_alive:
            return None
        present = [axis for axis in axes if axis in self.grid.topology().axes]
        return self.grid.get_group(present) if present else self._alone()

    def _alone(self) -> ProcessGroup:
        return self.grid.create_group(RankGroup(("this rank",), (self.grid.global_rank,)))

    def _ranks(self, axes: Iterable[str]) -> list[int]:
        """Return the global ranks of the group along some axes."""
        return self.grid.get_ranks([axis for axis in axes if axis in self.grid.topology().axes])

    def _rank_in(self, ranks: Iterable[int]) -> int:
        """Return the index of this rank among global ranks."""
        return list(ranks).index(self.grid.global_rank)

    def _sample_axes(self) -> tuple[str, ...]:
        return sample_axes(self.grid.topology())

    def _replica_axes(self) -> tuple[str, ...]:
        return gradient_axes(self.grid.topology())

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
