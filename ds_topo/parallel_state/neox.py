"""``megatron.mpu`` of GPT-NeoX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ds_topo.engine.grid import PipelineParallelGrid
from ds_topo.errors import TopologyError
from ds_topo.parallel_state.questions import ParallelState, means
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.topology import ProcessTopology
from ds_topo.topology.axes import MODEL, PIPE
from ds_topo.topology.rank_tables import RankGroup

_TENSOR = "tensor parallel; the grid's is pipe x model"


class GPTNeoXState(ParallelState):
    """``megatron.mpu`` of GPT-NeoX: *model* parallel is tensor parallel."""

    def __init__(self, grid: PipelineParallelGrid) -> None:
        super().__init__(grid)
        self._fp32_allreduce = False

    def initialize_model_parallel(
        self, model_parallel_size: int, topology: Any = None, fp32_allreduce: bool = False
    ) -> None:
        """Create nothing; check that the program wants the grid's layout.

        Raises:
            TopologyError: another degree, or a topology that places ranks otherwise.
        """
        self._check_degrees(model=model_parallel_size)
        own = self._grid.topology()
        if topology is not None:
            wanted = ProcessTopology(
                topology.get_axis_names(), [topology.get_dim(a) for a in topology.get_axis_names()]
            )
            if wanted != own:
                raise TopologyError(
                    f"initialize_model_parallel got the topology {wanted.spec!r}, but the grid is {own.spec!r}: one "
                    "job has one layout, so pass grid.topology()"
                )
        self._fp32_allreduce = fp32_allreduce

    @means(_TENSOR)
    def get_model_parallel_group(self) -> ProcessGroup | None:
        """The slices of this rank's layers."""
        return self._group((MODEL,))

    @means(_TENSOR)
    def get_model_parallel_world_size(self) -> int:
        """Slices of every layer."""
        return self.get_tensor_model_parallel_world_size()

    @means(_TENSOR)
    def get_model_parallel_rank(self) -> int:
        """Which slice this rank holds."""
        return self.get_tensor_model_parallel_rank()

    @means(_TENSOR)
    def get_model_parallel_src_rank(self) -> int:
        """The global rank of the first slice."""
        return self.get_tensor_model_parallel_src_rank()

    def set_model_parallel_world_size(self, world_size: int | None) -> None:
        """Nothing, if it is the grid's."""
        self.set_tensor_model_parallel_world_size(world_size)

    def set_model_parallel_rank(self, rank: int | None) -> None:
        """Nothing, if it is the grid's."""
        self.set_tensor_model_parallel_rank(rank)

    def get_data_parallel_group(self) -> ProcessGroup | None:
        """Replicas of this rank's parameters."""
        return self._group(self._replica_axes())

    def get_data_parallel_world_size(self) -> int:
        """Replicas with samples of their own."""
        return self._grid.get_data_parallel_world_size()

    def get_data_parallel_rank(self) -> int:
        """Which of them this rank is in."""
        return self._grid.get_data_parallel_rank()

    def get_data_parallel_src_rank(self) -> int:
        """The global rank of the first replica."""
        return self._grid.get_data_parallel_src_rank()

    def get_topology(self) -> ProcessTopology:
        """The grid's."""
        return self._grid.topology()

    def get_pipe_parallel_group(self) -> ProcessGroup | None:
        """The stages of this rank's pipeline."""
        return self._group((PIPE,))

    def get_pipe_parallel_rank(self) -> int:
        """This rank's stage."""
        return self.get_pipeline_model_parallel_rank()

    def get_pipe_parallel_world_size(self) -> int:
        """Stages."""
        return self.get_pipeline_model_parallel_world_size()

    def get_io_parallel_group(self) -> ProcessGroup | None:
        """The first slices of all first and last stages; without a pipeline the replicas of this rank's parameters.

        Created when its ranks first ask, so all of them must.

        Raises:
            RuntimeError: this rank is none of them.
        """
        stages = self.get_pipe_parallel_world_size()
        if stages == 1:
            return self.get_data_parallel_group()
        topology = self._grid.topology()
        first = {MODEL: 0} if MODEL in topology.axes else {}
        ends = [topology.filter_match(**first, pipe=stage) for stage in (0, stages - 1)]
        ranks = sorted(rank for end in ends for rank in self._grid.to_global(end))
        if self._grid.global_rank not in ranks:
            raise RuntimeError(
                f"get_io_parallel_group(): rank {self._grid.global_rank} is no first slice of a first or last stage"
            )
        return self._grid.create_group(RankGroup(("first slices of first and last stages",), tuple(ranks)))

    def get_expert_token_counts_for_rank(self, tokens_per_expert: Tensor, rank: int | None = None) -> Tensor:
        """``[experts] -> [experts / slices]``: of the experts that a slice holds, this rank's unless given."""
        return self._of_slice(tokens_per_expert.chunk(self.get_model_parallel_world_size()), rank)

    def get_expert_tokens_for_rank(
        self, routed_tokens: Tensor, tokens_per_expert: Tensor, rank: int | None = None
    ) -> Tensor:
        """``[tokens, ...] -> [its tokens, ...]``: of the experts that a slice holds, this rank's unless given.

        The tokens are in the order of the experts.
        """
        counts = [int(part.sum()) for part in tokens_per_expert.chunk(self.get_model_parallel_world_size())]
        return self._of_slice(routed_tokens.split(counts), rank)

    def _of_slice(self, parts: Sequence[Tensor], rank: int | None) -> Tensor:
        return parts[self.get_model_parallel_rank() if rank is None else rank]

    def get_fp32_allreduce(self) -> bool:
        """What the program has said at its start."""
        return self._fp32_allreduce
