"""Answer the parallel state of GPT-NeoX, ``megatron.mpu``."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from ds_topo.engine.grid import PipelineParallelGrid
from ds_topo.engine.one_layout import require_same_places
from ds_topo.parallel_state.program_state import ParallelState
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.process_groups.process_grid import as_topology
from ds_topo.topology import ProcessTopology
from ds_topo.topology.axes import MODEL, PIPE
from ds_topo.topology.rank_tables import RankGroup


class GPTNeoXState(ParallelState):
    """``megatron.mpu`` of GPT-NeoX, where *model* parallel means tensor parallel."""

    translated: ClassVar[dict[str, str]] = dict.fromkeys(
        (
            "get_model_parallel_group",
            "get_model_parallel_world_size",
            "get_model_parallel_rank",
            "get_model_parallel_src_rank",
        ),
        "tensor parallel; the grid's is pipe x model",
    )

    def __init__(self, grid: PipelineParallelGrid) -> None:
        super().__init__(grid)
        self._fp32_allreduce = False

    def initialize_model_parallel(
        self, model_parallel_size: int, topology: Any = None, fp32_allreduce: bool = False
    ) -> None:
        """Check that the program asks for the grid's layout; create no groups.

        Raises:
            TopologyError: the degree differs, or the topology places ranks differently.
        """
        self._check_degrees(model=model_parallel_size)
        if topology is not None:
            require_same_places(as_topology(topology, self.grid.world_size), self.grid)
        self._fp32_allreduce = fp32_allreduce
        self.is_awaited = False

    get_model_parallel_group = ParallelState.get_tensor_model_parallel_group
    get_model_parallel_world_size = ParallelState.get_tensor_model_parallel_world_size
    get_model_parallel_rank = ParallelState.get_tensor_model_parallel_rank
    get_model_parallel_src_rank = ParallelState.get_tensor_model_parallel_src_rank
    set_model_parallel_world_size = ParallelState.set_tensor_model_parallel_world_size
    set_model_parallel_rank = ParallelState.set_tensor_model_parallel_rank
    get_pipe_parallel_group = ParallelState.get_pipeline_model_parallel_group
    get_pipe_parallel_rank = ParallelState.get_pipeline_model_parallel_rank
    get_pipe_parallel_world_size = ParallelState.get_pipeline_model_parallel_world_size

    def get_data_parallel_group(self) -> ProcessGroup | None:
        """Return the group of the replicas of this rank's parameters."""
        return self._group(self._replica_axes())

    def get_data_parallel_world_size(self) -> int:
        """Return the number of replicas that train on different samples."""
        return self.grid.get_data_parallel_world_size()

    def get_data_parallel_rank(self) -> int:
        """Return the index of this rank's replica."""
        return self.grid.get_data_parallel_rank()

    def get_data_parallel_src_rank(self) -> int:
        """Return the global rank of the first replica."""
        return self.grid.get_data_parallel_src_rank()

    def get_topology(self) -> ProcessTopology:
        """Return the grid's topology."""
        return self.grid.topology()

    def get_io_parallel_group(self) -> ProcessGroup | None:
        """Return the group of the first slices of all first and last stages.

        Without a pipeline, it is the group of the replicas of this rank's parameters. The group is created when its
        ranks ask for it the first time, so all of them must ask.

        Raises:
            RuntimeError: this rank is not in that group.
        """
        stages = self.get_pipeline_model_parallel_world_size()
        if stages == 1:
            return self.get_data_parallel_group()
        topology = self.grid.topology()
        first = {MODEL: 0} if MODEL in topology.axes else {}
        ends = [topology.filter_match(**first, **{PIPE: stage}) for stage in (0, stages - 1)]
        ranks = sorted(rank for end in ends for rank in self.grid.to_global(end))
        if self.grid.global_rank not in ranks:
            raise RuntimeError(
                f"get_io_parallel_group(): rank {self.grid.global_rank} is no first slice of a first or last stage; "
                f"the group has ranks {ranks}"
            )
        return self.grid.create_group(RankGroup(("first slices of first and last stages",), tuple(ranks)))

    def get_expert_token_counts_for_rank(self, tokens_per_expert: Tensor, rank: int | None = None) -> Tensor:
        """Return the token counts of the experts of a slice, by default this rank's: ``[experts] -> [experts / n]``."""
        slice_index = self.get_tensor_model_parallel_rank() if rank is None else rank
        return tokens_per_expert.chunk(self.get_tensor_model_parallel_world_size())[slice_index]

    def get_expert_tokens_for_rank(
        self, routed_tokens: Tensor, tokens_per_expert: Tensor, rank: int | None = None
    ) -> Tensor:
        """Return the tokens of the experts of a slice, by default this rank's: ``[tokens, ...] -> [its tokens, ...]``.

        The tokens are in the order of the experts.
        """
        slice_index = self.get_tensor_model_parallel_rank() if rank is None else rank
        counts = [int(part.sum()) for part in tokens_per_expert.chunk(self.get_tensor_model_parallel_world_size())]
        tokens: tuple[Tensor, ...] = routed_tokens.split(counts)
        return tokens[slice_index]

    def get_fp32_allreduce(self) -> bool:
        """Return the ``fp32_allreduce`` that the program gave to ``initialize_model_parallel``."""
        return self._fp32_allreduce
