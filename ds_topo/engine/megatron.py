"""Questions that Megatron-style model code asks of its parallel state, answered from a grid's topology.

Source: names and meanings of ``megatron/core/parallel_state.py``; ranks come from the actual groups, never from
``rank // size * size``, so they hold for any order of the axes.
"""

from __future__ import annotations

from ds_topo.engine.mpu import MpuGrid
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.topology.axes import MODEL, PIPE, SEQ
from ds_topo.topology.rank_tables import RankGroup


class MegatronGrid(MpuGrid):
    """A grid that also answers tensor, pipeline and embedding queries by Megatron's names."""

    # -- tensor parallelism: the ``model`` axis ------------------------------------------------------------------

    def get_tensor_model_parallel_rank(self) -> int:
        """This rank's index along ``model``."""
        return self.get_axis_rank(MODEL)

    def get_tensor_model_parallel_world_size(self) -> int:
        """The degree of ``model``."""
        return self.slice_parallel_size

    def get_tensor_model_parallel_group(self) -> ProcessGroup:
        """This rank's group along ``model``."""
        return self.get_group(MODEL)

    def get_tensor_model_parallel_src_rank(self) -> int:
        """The global rank of the first member of the tensor parallel group."""
        return self.slice_group[0]

    # -- context parallelism: the ``seq`` axis, this rank alone without one ---------------------------------------

    def get_context_parallel_group(self) -> ProcessGroup:
        """The ranks that share this one's samples and hold other parts of the sequences."""
        if SEQ in self.topology().axes:
            return self.get_group(SEQ)
        return self.create_group(RankGroup(("this rank",), (self.global_rank,)))

    def get_context_parallel_global_ranks(self) -> list[int]:
        """Their global ranks, ascending."""
        return self.get_ranks(SEQ) if SEQ in self.topology().axes else [self.global_rank]

    def get_context_parallel_world_size(self) -> int:
        """Their number."""
        return len(self.get_context_parallel_global_ranks())

    def get_context_parallel_rank(self) -> int:
        """Which part of the sequences this rank holds."""
        return self.get_context_parallel_global_ranks().index(self.global_rank)

    # -- pipeline parallelism: the ``pipe`` axis -----------------------------------------------------------------

    def get_pipeline_model_parallel_rank(self) -> int:
        """This rank's pipeline stage."""
        return self.stage_id

    def get_pipeline_model_parallel_world_size(self) -> int:
        """The number of stages."""
        return self.pipe_parallel_size

    def get_pipeline_model_parallel_group(self) -> ProcessGroup:
        """The stages of this rank's pipeline."""
        return self.get_group(PIPE)

    def get_pipeline_model_parallel_first_rank(self) -> int:
        """The global rank of this pipeline's first stage."""
        return self.pp_group[0]

    def get_pipeline_model_parallel_last_rank(self) -> int:
        """The global rank of this pipeline's last stage."""
        return self.pp_group[-1]

    def get_pipeline_model_parallel_next_rank(self) -> int:
        """The global rank of the next stage; the last stage's is the first."""
        return self.get_next_rank(PIPE)

    def get_pipeline_model_parallel_prev_rank(self) -> int:
        """The global rank of the previous stage; the first stage's is the last."""
        return self.get_prev_rank(PIPE)

    def is_pipeline_first_stage(self, ignore_virtual: bool = True) -> bool:
        """Whether this rank holds the first stage (stages are never virtual here)."""
        return self.is_first_stage

    def is_pipeline_last_stage(self, ignore_virtual: bool = True) -> bool:
        """Whether this rank holds the last stage (stages are never virtual here)."""
        return self.is_last_stage

    # -- data parallelism ----------------------------------------------------------------------------------------

    def get_data_parallel_src_rank(self) -> int:
        """The global rank of the first member of the data parallel group."""
        return self.dp_group[0]

    # -- tied embeddings: first and last stage -------------------------------------------------------------------

    def is_rank_in_embedding_group(self) -> bool:
        """Whether this rank holds the input or the output embedding."""
        return self.is_first_stage or self.is_last_stage

    def get_embedding_group(self) -> ProcessGroup:
        """The first and last stage of this pipeline, which share tied embeddings.

        Created when both first ask, unless the pipeline has only these two.

        Raises:
            RuntimeError: this rank is on a middle stage.
        """
        if not self.is_rank_in_embedding_group():
            raise RuntimeError(
                f"rank {self.global_rank} is on stage {self.stage_id}: the embedding group joins stage 0 and stage "
                f"{self.pipe_parallel_size - 1}; ask is_rank_in_embedding_group() first"
            )
        ranks = tuple(dict.fromkeys((self.pp_group[0], self.pp_group[-1])))
        return self.create_group(RankGroup(("embedding",), ranks))

    def is_rank_in_position_embedding_group(self) -> bool:
        """Whether this rank holds the position embedding: the first stage does."""
        return self.is_first_stage

    def get_position_embedding_group(self) -> ProcessGroup:
        """The holder of the position embedding, the first stage alone.

        Raises:
            RuntimeError: this rank is on another stage.
        """
        if not self.is_first_stage:
            raise RuntimeError(
                f"rank {self.global_rank} is on stage {self.stage_id}: stage 0 holds the position embedding"
            )
        return self.create_group(RankGroup(("position embedding",), (self.global_rank,)))

    # -- life cycle ----------------------------------------------------------------------------------------------

    def model_parallel_is_initialized(self) -> bool:
        """Whether the groups exist."""
        return self.is_alive

    def destroy_model_parallel(self) -> None:
        """The same as ``destroy()``."""
        self.destroy()
