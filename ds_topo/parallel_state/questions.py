"""Questions that all Megatron-like programs ask alike: tensor and pipeline parallelism, virtual and split stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NoReturn, TypeVar

import torch

from ds_topo.engine.grid import PipelineParallelGrid
from ds_topo.errors import TopologyError
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.process_groups.torch_names import devices_of
from ds_topo.topology.axes import MODEL, PIPE, SEQ
from ds_topo.topology.rank_tables import RankGroup, gradient_axes, sample_axes

Method = TypeVar("Method", bound=Callable[..., Any])


def means(text: str) -> Callable[[Method], Method]:
    """Mark a method whose name means something else to DeepSpeed's mpu, and so to the grid."""

    def mark(method: Method) -> Method:
        method.meaning = text  # type: ignore[attr-defined]
        return method

    return mark


class GlobalMemoryBuffer:
    """Memory that is used again for tensors of one name and type (Megatron's class of this name)."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def get_tensor(self, tensor_shape: Iterable[int], dtype: torch.dtype, name: str) -> torch.Tensor:
        """A tensor of this shape, uninitialised, on the current device; it overlaps the last one of its name."""
        shape = torch.Size(tensor_shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < shape.numel():
            device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
            buffer = self._buffers[name, dtype] = torch.empty(shape.numel(), dtype=dtype, device=device)
        return buffer[: shape.numel()].view(shape)


class ParallelState:
    """What every program's parallel state answers. Methods have the names and arguments of the programs' functions.

    Args:
        grid: whose groups and coordinates the answers are.
    """

    refused: ClassVar[dict[str, str]] = {}
    """Names that the program's module has and that a grid cannot answer, each with the reason."""

    def __init__(self, grid: PipelineParallelGrid) -> None:
        self._grid = grid
        self._virtual_rank: int | None = None
        self._virtual_world_size: int | None = None
        self._split_rank: int | None = None
        self._memory_buffer = GlobalMemoryBuffer()

    # -- life cycle ----------------------------------------------------------------------------------------------

    def model_parallel_is_initialized(self) -> bool:
        """Whether the groups exist."""
        return self._grid.is_alive

    def is_unitialized(self) -> bool:
        """Whether they do not (the programs' spelling)."""
        return not self._grid.is_alive

    def destroy_model_parallel(self) -> None:
        """Destroy the grid."""
        self._grid.destroy()

    def _check_degrees(self, **wanted: int | None) -> None:
        """Compare what a program would create with what is there.

        Raises:
            TopologyError: another degree.
        """
        for axis, degree in wanted.items():
            here = max(1, self._grid.topology().get_dim(axis))
            if degree is not None and degree != here:
                raise TopologyError(
                    f"initialize_model_parallel wants {degree} ranks along {axis!r}, but the grid is "
                    f"{self._grid.topology().spec!r}: one job has one layout, so configure the program with the grid's"
                )

    # -- tensor parallelism --------------------------------------------------------------------------------------

    def get_tensor_model_parallel_group(self, check_initialized: bool = True) -> ProcessGroup | None:
        """The slices of this rank's layers."""
        return self._group((MODEL,), check_initialized)

    def get_tensor_model_parallel_world_size(self) -> int:
        """Slices of every layer."""
        return self._grid.get_axis_size(MODEL)

    def get_tensor_model_parallel_rank(self) -> int:
        """Which slice this rank holds."""
        return self._grid.get_axis_rank(MODEL)

    def get_tensor_model_parallel_src_rank(self) -> int:
        """The global rank of the first slice."""
        return self._grid.get_ranks(MODEL)[0]

    def set_tensor_model_parallel_world_size(self, world_size: int | None) -> None:
        """Nothing, if it is the grid's."""
        self._check_set("tensor parallel world size", world_size, self.get_tensor_model_parallel_world_size())

    def set_tensor_model_parallel_rank(self, rank: int | None) -> None:
        """Nothing, if it is the grid's."""
        self._check_set("tensor parallel rank", rank, self.get_tensor_model_parallel_rank())

    # -- pipeline parallelism ------------------------------------------------------------------------------------

    def get_pipeline_model_parallel_group(self, check_initialized: bool = True) -> ProcessGroup | None:
        """The stages of this rank's pipeline."""
        return self._group((PIPE,), check_initialized)

    def get_pipeline_model_parallel_world_size(self) -> int:
        """Stages."""
        return self._grid.get_axis_size(PIPE)

    def get_pipeline_model_parallel_rank(self) -> int:
        """This rank's stage."""
        return self._grid.get_axis_rank(PIPE)

    def set_pipeline_model_parallel_world_size(self, world_size: int | None) -> None:
        """Nothing, if it is the grid's."""
        self._check_set("pipeline parallel world size", world_size, self.get_pipeline_model_parallel_world_size())

    def set_pipeline_model_parallel_rank(self, rank: int | None) -> None:
        """Nothing, if it is the grid's."""
        self._check_set("pipeline parallel rank", rank, self.get_pipeline_model_parallel_rank())

    def get_pipeline_model_parallel_first_rank(self) -> int:
        """The global rank of the first stage."""
        return self._grid.get_ranks(PIPE)[0]

    def get_pipeline_model_parallel_last_rank(self) -> int:
        """The global rank of the last stage."""
        return self._grid.get_ranks(PIPE)[-1]

    def get_pipeline_model_parallel_next_rank(self) -> int:
        """The global rank of the next stage; after the last comes the first."""
        return self._grid.get_next_rank(PIPE)

    def get_pipeline_model_parallel_prev_rank(self) -> int:
        """The global rank of the stage before; before the first comes the last."""
        return self._grid.get_prev_rank(PIPE)

    def get_virtual_pipeline_model_parallel_rank(self) -> int | None:
        """The virtual stage that the program is at, as it has said."""
        return self._virtual_rank

    def set_virtual_pipeline_model_parallel_rank(self, rank: int | None) -> None:
        """Note it."""
        self._virtual_rank = rank

    def get_virtual_pipeline_model_parallel_world_size(self) -> int | None:
        """Virtual stages of every rank, as the program has said; None without any."""
        return self._virtual_world_size

    def set_virtual_pipeline_model_parallel_world_size(self, world_size: int | None) -> None:
        """Note it."""
        self._virtual_world_size = world_size

    def _is_first_stage(self, ignore_virtual: bool, vp_stage: int | None = None) -> bool:
        at = self._virtual_rank if vp_stage is None else vp_stage
        if not ignore_virtual and self._virtual_world_size is not None and at != 0:
            return False
        return self.get_pipeline_model_parallel_rank() == 0

    def _is_last_stage(self, ignore_virtual: bool, vp_stage: int | None = None) -> bool:
        at = self._virtual_rank if vp_stage is None else vp_stage
        if not ignore_virtual and self._virtual_world_size is not None and at != self._virtual_world_size - 1:
            return False
        return self.get_pipeline_model_parallel_rank() == self.get_pipeline_model_parallel_world_size() - 1

    def _is_in_embedding_group(self, ignore_virtual: bool, vp_stage: int | None = None) -> bool:
        if ignore_virtual:
            return self._grid.is_rank_in_embedding_group()
        return self._is_first_stage(False, vp_stage) or self._is_last_stage(False, vp_stage)

    def is_rank_in_position_embedding_group(self) -> bool:
        """Whether this rank holds the position embedding."""
        return self._grid.is_rank_in_position_embedding_group()

    def get_embedding_group(self, check_initialized: bool = True) -> ProcessGroup | None:
        """First and last stage. Created when both first ask."""
        return self._unless_absent(self._grid.get_embedding_group, check_initialized)

    def get_position_embedding_group(self, check_initialized: bool = True) -> ProcessGroup | None:
        """The first stage."""
        return self._unless_absent(self._grid.get_position_embedding_group, check_initialized)

    # -- encoder and decoder -------------------------------------------------------------------------------------

    def get_pipeline_model_parallel_split_rank(self) -> int | None:
        """The decoder's first stage, as the program has said."""
        return self._split_rank

    def set_pipeline_model_parallel_split_rank(self, rank: int | None) -> None:
        """Note it."""
        self._split_rank = rank

    def is_pipeline_stage_before_split(self, rank: int | None = None) -> bool:
        """Whether a stage, this rank's unless given, is the encoder's."""
        stage = self.get_pipeline_model_parallel_rank() if rank is None else rank
        return (
            self._split_rank is None or self.get_pipeline_model_parallel_world_size() == 1 or stage < self._split_rank
        )

    def is_pipeline_stage_after_split(self, rank: int | None = None) -> bool:
        """Whether a stage, this rank's unless given, is the decoder's."""
        stage = self.get_pipeline_model_parallel_rank() if rank is None else rank
        return (
            self._split_rank is None or self.get_pipeline_model_parallel_world_size() == 1 or stage >= self._split_rank
        )

    def is_pipeline_stage_at_split(self) -> bool:
        """Whether this stage is the encoder's last."""
        stage = self.get_pipeline_model_parallel_rank()
        return self.is_pipeline_stage_before_split(stage) and self.is_pipeline_stage_after_split(stage + 1)

    # -- memory --------------------------------------------------------------------------------------------------

    def get_global_memory_buffer(self) -> GlobalMemoryBuffer:
        """Memory for gathered activations."""
        return self._memory_buffer

    def destroy_global_memory_buffer(self) -> None:
        """Let go of it."""
        self._memory_buffer = GlobalMemoryBuffer()

    # -- parts ---------------------------------------------------------------------------------------------------

    def _group(self, axes: tuple[str, ...], check_initialized: bool = True) -> ProcessGroup | None:
        """The group over some axes; of this rank alone where none of them is there."""
        if not check_initialized and not self._grid.is_alive:
            return None
        present = [axis for axis in axes if axis in self._grid.topology().axes]
        return self._grid.get_group(present) if present else self._alone()

    def _alone(self) -> ProcessGroup:
        """The group of this rank alone."""
        return self._grid.create_group(RankGroup(("this rank",), (self._grid.global_rank,)))

    def _ranks(self, axes: Iterable[str]) -> list[int]:
        present = [axis for axis in axes if axis in self._grid.topology().axes]
        return self._grid.get_ranks(present) if present else [self._grid.global_rank]

    def _place(self, axes: Iterable[str]) -> int:
        """This rank's among the ranks along some axes."""
        return self._ranks(axes).index(self._grid.global_rank)

    def _sample_axes(self) -> tuple[str, ...]:
        return sample_axes(self._grid.topology())

    def _replica_axes(self) -> tuple[str, ...]:
        return gradient_axes(self._grid.topology())

    def _seq_size(self) -> int:
        return max(1, self._grid.topology().get_dim(SEQ))

    def _seq_rank(self) -> int:
        return self._grid.get_axis_rank(SEQ) if SEQ in self._grid.topology().axes else 0

    def _of_cpu(self, group: ProcessGroup | None, name: str) -> ProcessGroup | None:
        """The group, if it serves tensors on the CPU.

        Raises:
            RuntimeError: it does not.
        """
        if group is not None and "cpu" not in devices_of(group):
            raise RuntimeError(
                f'{name}: the job\'s groups have no gloo: join with init_distributed(backend="cpu:gloo,cuda:nccl")'
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
            raise TopologyError(f"the {what} is the grid's, {here}: it cannot be set to {value}")


def is_of(state: ParallelState, grid: PipelineParallelGrid) -> bool:
    """Whether the answers are this grid's."""
    return state._grid.shares_groups_with(grid)


def refuse(name: str, reason: str) -> Callable[..., NoReturn]:
    """A function that says why a name is not answered."""

    def refused(*args: Any, **options: Any) -> NoReturn:
        raise RuntimeError(f"{name}(): {reason}")

    refused.__name__ = name
    return refused
