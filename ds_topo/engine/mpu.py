"""What DeepSpeed asks of the object passed as ``deepspeed.initialize(mpu=...)``: as a type, and a grid's answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ds_topo.process_groups.creation import ProcessGroup

SEQUENCE_QUERIES = tuple(
    f"get_{kind}_parallel_{what}"
    for kind in ("sequence", "sequence_data")
    for what in ("group", "world_size", "rank", "src_rank")
)
"""Methods whose mere presence changes DeepSpeed's path: an mpu offers them only where there is a ``seq`` axis."""


@runtime_checkable
class ModelParallelUnit(Protocol):
    """The queries that DeepSpeed makes on some path: engines, ZeRO, checkpoints, activation checkpointing.

    *Model parallel* means pipe x model (DeepSpeed's and Megatron's meaning), *slice* and *tensor model* parallel mean
    the ``model`` axis alone.
    """

    def get_data_parallel_group(self) -> ProcessGroup: ...
    def get_data_parallel_group_ranks(self) -> list[int]: ...
    def get_data_parallel_rank(self) -> int: ...
    def get_data_parallel_world_size(self) -> int: ...
    def get_model_parallel_group(self) -> ProcessGroup: ...
    def get_model_parallel_rank(self) -> int: ...
    def get_model_parallel_world_size(self) -> int: ...
    def get_slice_parallel_group(self) -> ProcessGroup: ...
    def get_slice_parallel_rank(self) -> int: ...
    def get_slice_parallel_world_size(self) -> int: ...
    def get_tensor_model_parallel_group(self) -> ProcessGroup: ...
    def get_tensor_model_parallel_rank(self) -> int: ...
    def get_tensor_model_parallel_world_size(self) -> int: ...
    def get_tensor_model_parallel_src_rank(self) -> int: ...
    def get_pipe_parallel_group(self) -> ProcessGroup: ...
    def get_pipe_parallel_rank(self) -> int: ...
    def get_pipe_parallel_world_size(self) -> int: ...
    def get_pipeline_model_parallel_group(self) -> ProcessGroup: ...
    def get_pipeline_model_parallel_rank(self) -> int: ...
    def get_pipeline_model_parallel_world_size(self) -> int: ...


class MpuQueries:
    """Mixin of ``PipelineParallelGrid``: DeepSpeed's questions, answered from what the grid knows."""

    if TYPE_CHECKING:
        global_rank: int
        stage_id: int
        pipe_parallel_size: int
        slice_parallel_size: int
        data_parallel_size: int
        data_parallel_id: int
        ds_model_rank: int
        ds_model_world_size: int
        dp_group: list[int]
        slice_group: list[int]

        @property
        def dp_proc_group(self) -> ProcessGroup: ...
        @property
        def pp_proc_group(self) -> ProcessGroup: ...
        @property
        def slice_proc_group(self) -> ProcessGroup: ...
        @property
        def ds_model_proc_group(self) -> ProcessGroup: ...

    def get_global_rank(self) -> int:
        """This rank in the whole job."""
        return self.global_rank

    def get_pipe_parallel_rank(self) -> int:
        """This rank's pipeline stage."""
        return self.stage_id

    def get_pipe_parallel_world_size(self) -> int:
        """The number of stages."""
        return self.pipe_parallel_size

    def get_pipe_parallel_group(self) -> ProcessGroup:
        """The stages of this rank's pipeline."""
        return self.pp_proc_group

    def get_data_parallel_rank(self) -> int:
        """Which of the distinct samples of a step this rank works on."""
        return self.data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        """The number of distinct samples that are worked on at a time."""
        return self.data_parallel_size

    def get_data_parallel_group(self) -> ProcessGroup:
        """The replicas of this rank's parameters: all ranks that share stage and slice."""
        return self.dp_proc_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Global ranks, ascending, of the data parallel group."""
        return list(self.dp_group)

    def get_model_parallel_rank(self) -> int:
        """``stage * slices + slice``, for every order of the axes."""
        return self.ds_model_rank

    def get_model_parallel_world_size(self) -> int:
        """Stages x slices."""
        return self.ds_model_world_size

    def get_model_parallel_group(self) -> ProcessGroup:
        """All ranks of this rank's replica of the model (pipe x model)."""
        return self.ds_model_proc_group

    def get_slice_parallel_rank(self) -> int:
        """This rank's index along ``model``."""
        return self.slice_group.index(self.global_rank)

    def get_slice_parallel_world_size(self) -> int:
        """The degree of ``model``."""
        return self.slice_parallel_size

    def get_slice_parallel_group(self) -> ProcessGroup:
        """This rank's group along ``model``."""
        return self.slice_proc_group
