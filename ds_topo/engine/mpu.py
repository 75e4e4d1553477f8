"""What DeepSpeed asks of the object passed as ``deepspeed.initialize(mpu=...)``: as a type, and a grid's answers.

*Data parallel* groups join the replicas of a parameter: all ranks that share stage and slice. An axis that DeepSpeed
does not know (``seq``, ``expert``, any other) therefore counts as data, for gradients. *Model parallel* is pipe x
model, *slice* the ``model`` axis alone.
"""

from __future__ import annotations

from functools import cached_property
from typing import Protocol, runtime_checkable

from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.process_groups.grid import ProcessGrid
from ds_topo.topology import ProcessTopology
from ds_topo.topology.axes import DATA, MODEL, PIPE
from ds_topo.topology.rank_tables import degree, fold_extra_axes, gradient_axes, model_parallel_axes, p2p_pairs


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


class MpuGrid(ProcessGrid):
    """A grid that answers as DeepSpeed's own does: its attributes and its queries.

    Source: ``deepspeed.runtime.pipe.topology.PipelineParallelGrid``, whose values it has for every order of pipe, data
    and model, but for the model-parallel rank: that is ``stage * slices + slice`` whatever the order, which the
    universal checkpoint format relies on.
    """

    @cached_property
    def _topo(self) -> ProcessTopology:
        """The topology as DeepSpeed understands it: pipe, data and model, with extra axes folded into data."""
        return fold_extra_axes(self.topology())

    # -- attributes of DeepSpeed's grid -------------------------------------------------------------------------------

    @cached_property
    def stage_id(self) -> int:
        """This rank's pipeline stage."""
        return self.get_axis_rank(PIPE)

    @cached_property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the first stage."""
        return self.stage_id == 0

    @cached_property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the last stage."""
        return self.stage_id == self.pipe_parallel_size - 1

    @cached_property
    def pipe_parallel_size(self) -> int:
        """The number of stages."""
        return self.get_axis_size(PIPE)

    @cached_property
    def slice_parallel_size(self) -> int:
        """The degree of ``model``."""
        return self.get_axis_size(MODEL)

    @cached_property
    def model_parallel_size(self) -> int:
        """The same as ``slice_parallel_size``."""
        return self.slice_parallel_size

    @cached_property
    def data_parallel_size(self) -> int:
        """The number of distinct samples that are worked on at a time."""
        return self.get_sample_world_size()

    @cached_property
    def data_parallel_id(self) -> int:
        """Which of the distinct samples of a step this rank works on."""
        return self.get_sample_rank()

    @cached_property
    def ds_model_world_size(self) -> int:
        """Stages x slices."""
        return degree(self.topology(), model_parallel_axes(self.topology()))

    @cached_property
    def ds_model_rank(self) -> int:
        """``stage * slices + slice``, for every order of the axes."""
        return self.stage_id * self.slice_parallel_size + self.get_axis_rank(MODEL)

    @cached_property
    def dp_group(self) -> list[int]:
        """The ranks of the data parallel group."""
        return self.get_ranks(gradient_axes(self.topology()))

    @cached_property
    def pp_group(self) -> list[int]:
        """The ranks of this rank's pipeline."""
        return self.get_ranks(PIPE)

    @cached_property
    def slice_group(self) -> list[int]:
        """The ranks of the slice parallel group."""
        return self.get_ranks(MODEL)

    @cached_property
    def mp_group(self) -> list[int]:
        """The same as ``slice_group``."""
        return self.slice_group

    @property
    def dp_proc_group(self) -> ProcessGroup:
        """The data parallel group."""
        return self.get_data_parallel_group()

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
        return self.get_group(model_parallel_axes(self.topology()))

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

    # -- queries ---------------------------------------------------------------------------------------------------

    def get_global_rank(self) -> int:
        """This rank in the whole job."""
        return self.global_rank

    def get_stage_id(self) -> int:
        """This rank's pipeline stage."""
        return self.stage_id

    def get_pipe_parallel_rank(self) -> int:
        """This rank's pipeline stage."""
        return self.stage_id

    def get_pipe_parallel_world_size(self) -> int:
        """The number of stages."""
        return self.pipe_parallel_size

    def get_pipe_parallel_group(self) -> ProcessGroup:
        """The stages of this rank's pipeline."""
        return self.get_group(PIPE)

    def get_data_parallel_id(self) -> int:
        """The same as ``get_data_parallel_rank()``."""
        return self.data_parallel_id

    def get_data_parallel_rank(self) -> int:
        """Which of the distinct samples of a step this rank works on."""
        return self.data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        """The number of distinct samples that are worked on at a time."""
        return self.data_parallel_size

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
        return self.get_axis_rank(MODEL)

    def get_slice_parallel_world_size(self) -> int:
        """The degree of ``model``."""
        return self.slice_parallel_size

    def get_slice_parallel_group(self) -> ProcessGroup:
        """This rank's group along ``model``."""
        return self.get_group(MODEL)

    def stage_to_global(self, stage_id: int, **axes: int) -> int:
        """The global rank at a stage, elsewhere at this rank's own coordinate unless ``axes`` say otherwise.

        ``data`` counts all replicas (0 to the size of the data parallel group - 1) unless an extra axis is named too.

        Raises:
            CoordinateError: a stage or index out of range; stages do not wrap around.
            UnknownAxisError: an axis that is not in the topology.
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
