"""What the ``megatron.core.parallel_state`` of Megatron-DeepSpeed and of Megatron-LM have in common."""

from __future__ import annotations

from ds_topo.parallel_state.questions import ParallelState
from ds_topo.topology.axes import MODEL, PIPE


class MegatronCoreState(ParallelState):
    """What Megatron-DeepSpeed and Megatron-LM share: *model* parallel is pipe x tensor."""

    def get_data_parallel_src_rank(self, with_context_parallel: bool = False) -> int:
        """The global rank of the first replica."""
        return self._ranks(self._replica_axes() if with_context_parallel else self._sample_axes())[0]

    def get_model_parallel_src_rank(self) -> int:
        """The global rank of the first rank of this replica of the model."""
        return self._grid.get_ranks((PIPE, MODEL))[0]
