"""What each program's names mean where programs differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from ds_topo.engine.expert_registry import ExpertGroups, registry
from ds_topo.engine.grid import PipelineParallelGrid
from ds_topo.engine.inputs import require_grid
from ds_topo.errors import TopologyError, abridged
from ds_topo.parallel_state.questions import ParallelState, means
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.topology import ProcessTopology
from ds_topo.topology.axes import MODEL, PIPE, SEQ
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

    def get_io_parallel_group(self) -> ProcessGroup:
        """The first slices of all first and last stages. Created when they first ask, so all of them must.

        Raises:
            RuntimeError: this rank is none of them.
        """
        topology = self._grid.topology()
        first = {axis: 0 for axis in (PIPE, MODEL) if axis in topology.axes}
        ends = [first, first | {PIPE: topology.get_dim(PIPE) - 1}] if PIPE in first else [first]
        ranks = sorted({rank for end in ends for rank in self._grid.to_global(topology.filter_match(**end))})
        if self._grid.global_rank not in ranks:
            raise RuntimeError(
                f"get_io_parallel_group(): rank {self._grid.global_rank} is no first slice of a first or last stage"
            )
        return self._grid.create_group(RankGroup(("first slices of first and last stages",), tuple(ranks)))

    def get_fp32_allreduce(self) -> bool:
        """What the program has said at its start."""
        return self._fp32_allreduce


class _MegatronCore(ParallelState):
    """What Megatron-DeepSpeed and Megatron-LM share: *model* parallel is pipe x tensor."""

    def get_data_parallel_src_rank(self, with_context_parallel: bool = False) -> int:
        """The global rank of the first replica."""
        return self._ranks(self._replica_axes() if with_context_parallel else self._sample_axes())[0]

    def get_model_parallel_src_rank(self) -> int:
        """The global rank of the first rank of this replica of the model."""
        return self._grid.get_ranks((PIPE, MODEL))[0]


class MegatronDeepSpeedState(_MegatronCore):
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


_PARTIAL = "a grid has no distributed optimizer instances of part of the replicas"
_REMAT = "a grid has no axis for rematerialised weights"
_NESTED = "a grid has no such parts of its groups"


class MegatronState(_MegatronCore):
    """``megatron.core.parallel_state`` of Megatron-LM."""

    refused: ClassVar[dict[str, str]] = {
        "get_gtp_weight_remat_group": _REMAT,
        "get_gtp_weight_remat_global_ranks": _REMAT,
        "get_expert_gtp_weight_remat_group": _REMAT,
        "get_expert_gtp_weight_remat_global_ranks": _REMAT,
        "get_hierarchical_context_parallel_groups": _NESTED,
        "get_hybrid_data_context_parallel_groups": _NESTED,
        "get_intra_distributed_optimizer_instance_group": _PARTIAL,
        "get_inter_distributed_optimizer_instance_group": _PARTIAL,
        "set_expert_model_parallel_world_size": "a grid's degrees do not change",
        "set_expert_model_parallel_rank": "a rank's place in its grid does not change",
        "set_expert_tensor_parallel_world_size": "a grid's degrees do not change",
        "set_expert_tensor_parallel_rank": "a rank's place in its grid does not change",
        "set_data_parallel_rank": "a rank's place in its grid does not change",
    }

    def initialize_model_parallel(
        self,
        tensor_model_parallel_size: int = 1,
        pipeline_model_parallel_size: int = 1,
        virtual_pipeline_model_parallel_size: int | None = None,
        *args: Any,
        context_parallel_size: int = 1,
        expert_model_parallel_size: int = 1,
        **options: Any,
    ) -> None:
        """Create nothing; check that the program wants the grid's layout.

        Raises:
            TopologyError: another degree.
        """
        self._check_degrees(
            model=tensor_model_parallel_size, pipe=pipeline_model_parallel_size, seq=context_parallel_size
        )
        if expert_model_parallel_size > 1 and self.get_expert_model_parallel_world_size() != expert_model_parallel_size:
            raise TopologyError(
                f"initialize_model_parallel wants experts over {expert_model_parallel_size} ranks: call "
                f"ds_topo.create_expert_groups(grid, {expert_model_parallel_size}) before"
            )
        self._virtual_world_size = virtual_pipeline_model_parallel_size
        self._virtual_rank = None if virtual_pipeline_model_parallel_size is None else 0

    def is_initialized(self) -> bool:
        """Whether the groups exist."""
        return self._grid.is_alive

    def get_model_parallel_group(self, check_initialized: bool = True) -> ProcessGroup | None:
        """This replica of the model."""
        return self._group((PIPE, MODEL), check_initialized)

    def is_pipeline_first_stage(self, ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
        """Whether this rank is at the first (virtual) stage."""
        return self._is_first_stage(ignore_virtual, vp_stage)

    def is_pipeline_last_stage(self, ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
        """Whether this rank is at the last (virtual) stage."""
        return self._is_last_stage(ignore_virtual, vp_stage)

    def is_rank_in_embedding_group(self, ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
        """Whether this rank holds the input or the output embedding."""
        return self._is_in_embedding_group(ignore_virtual, vp_stage)

    # -- data and context ----------------------------------------------------------------------------------------

    def get_data_parallel_group(
        self, with_context_parallel: bool = False, with_gtp_remat: bool = True, partial_data_parallel: bool = False
    ) -> ProcessGroup | None:
        """Replicas with samples of their own, or all replicas of this rank's parameters."""
        self._check_partial(partial_data_parallel)
        return self._group(self._data_axes(with_context_parallel))

    def get_data_parallel_group_gloo(
        self, with_context_parallel: bool = False, partial_data_parallel: bool = False
    ) -> ProcessGroup | None:
        """The same for tensors on the CPU."""
        group = self.get_data_parallel_group(with_context_parallel, partial_data_parallel=partial_data_parallel)
        return self._of_cpu(group, "get_data_parallel_group_gloo")

    def get_data_parallel_world_size(
        self, with_context_parallel: bool = False, with_gtp_remat: bool = True, partial_data_parallel: bool = False
    ) -> int:
        """Their number."""
        self._check_partial(partial_data_parallel)
        return len(self._ranks(self._data_axes(with_context_parallel)))

    def get_data_parallel_rank(
        self, with_context_parallel: bool = False, with_gtp_remat: bool = True, partial_data_parallel: bool = False
    ) -> int:
        """Which of them this rank is in."""
        self._check_partial(partial_data_parallel)
        return self._place(self._data_axes(with_context_parallel))

    def get_context_parallel_group(self, check_initialized: bool = True) -> ProcessGroup | None:
        """The ranks that share this rank's sequences: axis ``seq``."""
        return self._group((SEQ,), check_initialized)

    def get_context_parallel_global_ranks(self, check_initialized: bool = True) -> list[int]:
        """Their global ranks."""
        return self._ranks((SEQ,))

    def get_context_parallel_world_size(self) -> int:
        """Parts of every sequence."""
        return self._seq_size()

    def get_context_parallel_rank(self) -> int:
        """Which part this rank has."""
        return self._seq_rank()

    def get_tensor_and_data_parallel_group(
        self, check_initialized: bool = True, with_context_parallel: bool = False
    ) -> ProcessGroup | None:
        """Tensor and data parallel together. Created when its ranks first ask, so all of them must."""
        return self._group((MODEL, *self._data_axes(with_context_parallel)), check_initialized)

    def get_tensor_and_context_parallel_group(self, check_initialized: bool = True) -> ProcessGroup | None:
        """Tensor and context parallel together. Created when its ranks first ask, so all of them must."""
        return self._group((MODEL, SEQ), check_initialized)

    def get_tensor_and_context_parallel_world_size(self) -> int:
        """Their number."""
        return len(self._ranks((MODEL, SEQ)))

    def get_tensor_and_context_parallel_rank(self) -> int:
        """This rank's place among them."""
        return self._place((MODEL, SEQ))

    def get_amax_reduction_group(
        self, with_context_parallel: bool = False, tp_only_amax_red: bool = False
    ) -> ProcessGroup | None:
        """Ranks that share FP8's scales."""
        seq = (SEQ,) if with_context_parallel else ()
        return self._group((MODEL, *seq) if tp_only_amax_red else (MODEL, *seq, *self._sample_axes()))

    # -- experts -------------------------------------------------------------------------------------------------

    def get_expert_model_parallel_group(self, check_initialized: bool = True) -> ProcessGroup | None:
        """The ranks that share the experts of a layer."""
        known = self._experts()
        return self._alone() if known is None else known.expert_group

    def get_expert_model_parallel_world_size(self) -> int:
        """Their number; 1 without expert groups."""
        known = self._experts()
        return 1 if known is None else len(known.expert_ranks)

    def get_expert_model_parallel_rank(self) -> int:
        """This rank's place among them."""
        known = self._experts()
        ranks = [self._grid.global_rank] if known is None else known.expert_ranks
        return ranks.index(self._grid.global_rank)

    def get_expert_data_parallel_group(
        self, check_initialized: bool = True, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
    ) -> ProcessGroup | None:
        """Replicas of this rank's experts; of its parameters without expert groups."""
        self._check_partial(partial_expert_data_parallel)
        known = self._experts()
        return self._group(self._replica_axes(), check_initialized) if known is None else known.expert_data_group

    def get_expert_data_parallel_world_size(
        self, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
    ) -> int:
        """Their number."""
        self._check_partial(partial_expert_data_parallel)
        return len(self._expert_replicas())

    def get_expert_data_parallel_rank(
        self, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
    ) -> int:
        """This rank's place among them."""
        self._check_partial(partial_expert_data_parallel)
        return self._expert_replicas().index(self._grid.global_rank)

    def get_all_ranks(self) -> str:
        """This rank's places along tensor, data, context, pipeline and expert parallelism."""
        places = (
            self.get_tensor_model_parallel_rank(),
            0,  # of rematerialised weights
            self.get_data_parallel_rank(),
            self.get_context_parallel_rank(),
            self.get_pipeline_model_parallel_rank(),
            self.get_expert_model_parallel_rank(),
        )
        return "_".join(map(str, places))

    def get_gtp_weight_remat_world_size(self) -> int:
        """1: a grid has no such axis."""
        return 1

    def get_gtp_weight_remat_rank(self) -> int:
        """0: a grid has no such axis."""
        return 0

    def _experts(self) -> ExpertGroups | None:
        """The one table of expert groups of this grid, if there is one.

        Raises:
            RuntimeError: there are several.
        """
        known = registry.of(self._grid)
        if len(known) > 1:
            names = [entry.plan.name for entry in known]
            raise RuntimeError(f"the grid has expert groups of several sizes, {names}: Megatron-LM knows one")
        return known[0] if known else None

    def _expert_replicas(self) -> list[int]:
        known = self._experts()
        return self._ranks(self._replica_axes()) if known is None else known.expert_data_ranks

    def _data_axes(self, with_context_parallel: bool) -> tuple[str, ...]:
        return self._replica_axes() if with_context_parallel else self._sample_axes()

    @staticmethod
    def _check_partial(partial: bool) -> None:
        if partial:
            raise RuntimeError(f"partial data parallel groups: {_PARTIAL}")


PROGRAMS: dict[str, type[ParallelState]] = {
    "gpt-neox": GPTNeoXState,
    "megatron-deepspeed": MegatronDeepSpeedState,
    "megatron-lm": MegatronState,
}
"""The programs whose parallel state a grid can answer."""


def of(grid: PipelineParallelGrid, program: str = "megatron-lm") -> ParallelState:
    """An object with the functions of a program's parallel state, with that program's meanings.

    Args:
        grid: whose layout it is.
        program: ``"gpt-neox"``, ``"megatron-deepspeed"`` or ``"megatron-lm"``.

    Raises:
        ValueError: another program.
        TypeError: no grid.

    >>> import torch.distributed as dist
    >>> from torch.testing._internal.distributed.fake_pg import FakeStore
    >>> dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    >>> with PipelineParallelGrid("model=2,pipe=2,data=2") as grid:
    ...     neox, megatron = of(grid, "gpt-neox"), of(grid)
    ...     neox.get_model_parallel_world_size(), dist.get_process_group_ranks(megatron.get_model_parallel_group())
    ...     neox.get_model_parallel_src_rank(), megatron.get_context_parallel_world_size()
    (2, [1, 3, 5, 7])
    (1, 1)
    >>> dist.destroy_process_group()
    """
    require_grid("grid", grid)
    if program not in PROGRAMS:
        raise ValueError(f"program={abridged(program)}: choose one of {list(PROGRAMS)}")
    return PROGRAMS[program](grid)
