"""``megatron.core.parallel_state`` of Megatron-DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from ds_topo.parallel_state.megatron_core import MegatronCoreState
from ds_topo.parallel_state.questions import means
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.topology.axes import MODEL, PIPE, SEQ


class MegatronDeepSpeedState(MegatronCoreState):
    """``megatron.core.parallel_state`` of Megatron-DeepSpeed."""

    refused: ClassVar[dict[str, str]] = {
        "set_sequence_parallel_world_size": "a grid's degrees do not change",
        "set_sequence_parallel_rank": "a rank's place in its grid does not change",
        "set_sequence_data_parallel_world_size": "a grid's degrees do not change",
        "set_sequence_data_parallel_rank": "a rank's place in its grid does not change",
    }

    def initialize_model_parallel(
        self,
        tensor_model_parallel_size: int = 1,
        pipeline_model_parallel_size: int = 1,
        sequence_parallel_size: int = 1,
        virtual_pipeline_model_parallel_size: int | None = None,
        pipeline_model_parallel_split_rank: int | None = None,
        use_fp8: bool = False,
        use_distributed_optimizer: bool = False,
    ) -> None:
        """Create nothing; check that the program wants the grid's layout.

        Raises:
            TopologyError: another degree.
        """
        self._check_degrees(
            model=tensor_model_parallel_size, pipe=pipeline_model_parallel_size, seq=sequence_parallel_size
        )
        self._virtual_world_size = virtual_pipeline_model_parallel_size
        self._virtual_rank = None if virtual_pipeline_model_parallel_size is None else 0
        self._split_rank = pipeline_model_parallel_split_rank

    def get_model_parallel_group(self) -> ProcessGroup | None:
        """This replica of the model."""
        return self._group((PIPE, MODEL))

    @means("tensor parallel, without a pipeline only; the grid's is pipe x model")
    def get_model_parallel_world_size(self) -> int:
        """Slices of every layer, in programs without a pipeline."""
        return self._legacy("get_model_parallel_world_size", self.get_tensor_model_parallel_world_size)

    @means("tensor parallel, without a pipeline only; the grid's is pipe x model")
    def get_model_parallel_rank(self) -> int:
        """Which slice this rank holds, in programs without a pipeline."""
        return self._legacy("get_model_parallel_rank", self.get_tensor_model_parallel_rank)

    def _legacy(self, name: str, ask: Callable[[], int]) -> int:
        if self.get_pipeline_model_parallel_world_size() > 1:
            raise RuntimeError(f"{name}() is about programs without a pipeline: ask its tensor or pipeline counterpart")
        return ask()

    def is_pipeline_first_stage(self, ignore_virtual: bool = False) -> bool:
        """Whether this rank is at the first (virtual) stage."""
        return self._is_first_stage(ignore_virtual)

    def is_pipeline_last_stage(self, ignore_virtual: bool = False) -> bool:
        """Whether this rank is at the last (virtual) stage."""
        return self._is_last_stage(ignore_virtual)

    def is_rank_in_embedding_group(self, ignore_virtual: bool = False) -> bool:
        """Whether this rank holds the input or the output embedding."""
        return self._is_in_embedding_group(ignore_virtual)

    def get_data_parallel_group(self) -> ProcessGroup | None:
        """Replicas with samples of their own, which hold the same part of every sequence."""
        return self._group(self._sample_axes())

    def get_data_parallel_group_gloo(self) -> ProcessGroup | None:
        """The same for tensors on the CPU."""
        return self._of_cpu(self.get_data_parallel_group(), "get_data_parallel_group_gloo")

    def get_data_parallel_world_size(self) -> int:
        """Replicas with samples of their own."""
        return len(self._ranks(self._sample_axes()))

    def get_data_parallel_rank(self) -> int:
        """Which of them this rank is in."""
        return self._place(self._sample_axes())

    def sequence_parallel_is_initialized(self) -> bool:
        """Whether the groups exist; of this rank alone without an axis ``seq``."""
        return self._grid.is_alive

    def sequence_data_parallel_is_initialized(self) -> bool:
        """Whether the groups exist."""
        return self._grid.is_alive

    @means("1 rank without an axis seq, where the grid does not have the name: DeepSpeed takes another path then")
    def get_sequence_parallel_group(self) -> ProcessGroup | None:
        """The ranks that share this rank's sequences."""
        return self._group((SEQ,))

    @means("1 without an axis seq, where the grid does not have the name: DeepSpeed takes another path then")
    def get_sequence_parallel_world_size(self) -> int:
        """Parts of every sequence."""
        return self._seq_size()

    @means("0 without an axis seq, where the grid does not have the name: DeepSpeed takes another path then")
    def get_sequence_parallel_rank(self) -> int:
        """Which part this rank has."""
        return self._seq_rank()

    def get_sequence_parallel_src_rank(self) -> int:
        """The global rank of the first part."""
        return self._ranks((SEQ,))[0]

    def get_sequence_data_parallel_group(self) -> ProcessGroup | None:
        """All replicas of this rank's parameters."""
        return self._group(self._replica_axes())

    def get_sequence_data_parallel_world_size(self) -> int:
        """Replicas."""
        return len(self._ranks(self._replica_axes()))

    def get_sequence_data_parallel_rank(self) -> int:
        """Which replica this rank holds."""
        return self._place(self._replica_axes())

    def get_amax_reduction_group(self) -> ProcessGroup | None:
        """Ranks that share FP8's scales: tensor and data parallel."""
        return self._group((MODEL, *self._sample_axes()))
