"""Answer the parallel states of GPT-NeoX, Megatron-DeepSpeed and Megatron-LM, each with its own meanings.

``ParallelState`` has the answers that all programs share. Most names ask the same few questions about some kind of
group: :func:`_define` adds them to the classes, at the end of this file. The other names are methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from ds_topo.base.backends import current_device
from ds_topo.base.torch_names import devices_of
from ds_topo.engine.grid import PipelineParallelGrid
from ds_topo.engine.one_layout import require_same_places
from ds_topo.errors import TopologyError
from ds_topo.mpu import ExpertGroups, registry
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.process_groups.process_grid import as_topology
from ds_topo.topology import ProcessTopology
from ds_topo.topology.axes import MODEL, PIPE, SEQ
from ds_topo.topology.rank_tables import RankGroup, degree, gradient_axes, sample_axes

_FIXED = {"world_size": "a grid's degrees do not change", "rank": "a rank's place in its grid does not change"}
_NO_PARTS = "a grid has no such parts of its groups"
_EXPERTS = "experts of this rank"
"""Stands among axes for the ranks that share this rank's experts."""


def _setters(*kinds: str) -> dict[str, str]:
    """Return the functions that set the world size and the rank of some kinds of groups, with the reason to refuse."""
    return {f"set_{kind}_{what}": why for kind in kinds for what, why in _FIXED.items()}


def _samples(state: ParallelState) -> tuple[str, ...]:
    return sample_axes(state.grid.topology())


def _replicas(state: ParallelState) -> tuple[str, ...]:
    return gradient_axes(state.grid.topology())


def _data(
    state: ParallelState,
    with_context_parallel: bool = False,
    with_gtp_remat: bool = True,
    partial_data_parallel: bool = False,
) -> tuple[str, ...]:
    """Return the axes of Megatron's data parallelism.

    The other options change nothing: there is one distributed optimizer, over all replicas.
    """
    return _replicas(state) if with_context_parallel else _samples(state)


class GlobalMemoryBuffer:
    """Memory that is reused for all tensors of one name and data type (Megatron's class of this name)."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def get_tensor(self, tensor_shape: Iterable[int], dtype: torch.dtype, name: str) -> Tensor:
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
        """True if a program has still to call ``initialize_model_parallel``, and the state answers that it has not."""
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

    # -- pipeline parallelism ------------------------------------------------------------------------------------

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

    def get_pipeline_model_parallel_first_rank(self) -> int:
        """Return the global rank of the first stage."""
        return self.grid.get_pipeline_model_parallel_first_rank()

    def get_pipeline_model_parallel_last_rank(self) -> int:
        """Return the global rank of the last stage."""
        return self.grid.get_pipeline_model_parallel_last_rank()

    def get_pipeline_model_parallel_next_rank(self) -> int:
        """Return the global rank of the next stage; the first stage follows the last one."""
        return self.grid.get_next_rank(PIPE)

    def get_pipeline_model_parallel_prev_rank(self) -> int:
        """Return the global rank of the previous stage; the last stage precedes the first one."""
        return self.grid.get_prev_rank(PIPE)

    def is_rank_in_position_embedding_group(self) -> bool:
        """Return whether this rank holds the position embedding."""
        return self.grid.is_rank_in_position_embedding_group()

    def get_embedding_group(self, check_initialized: bool = True) -> ProcessGroup | None:
        """Return the group of the first and the last stage. It is created when both ask for it the first time."""
        exists = self.grid.is_alive and self.grid.is_rank_in_embedding_group()
        return self.grid.get_embedding_group() if exists or check_initialized else None

    def get_position_embedding_group(self, check_initialized: bool = True) -> ProcessGroup | None:
        """Return the group of the first stage."""
        exists = self.grid.is_alive and self.grid.is_rank_in_position_embedding_group()
        return self.grid.get_position_embedding_group() if exists or check_initialized else None

    # -- encoder and decoder -------------------------------------------------------------------------------------

    def get_pipeline_model_parallel_split_rank(self) -> int | None:
        """Return the first stage of the decoder, as the program has set it."""
        return self._split_rank

    def set_pipeline_model_parallel_split_rank(self, rank: int | None) -> None:
        """Set the first stage of the decoder."""
        self._split_rank = rank

    def is_pipeline_stage_before_split(self, rank: int | None = None) -> bool:
        """Return whether a stage, by default this rank's, belongs to the encoder."""
        stage = self._rank((PIPE,)) if rank is None else rank
        return self._has_no_split() or stage < (self._split_rank or 0)

    def is_pipeline_stage_after_split(self, rank: int | None = None) -> bool:
        """Return whether a stage, by default this rank's, belongs to the decoder."""
        stage = self._rank((PIPE,)) if rank is None else rank
        return self._has_no_split() or stage >= (self._split_rank or 0)

    def is_pipeline_stage_at_split(self) -> bool:
        """Return whether this rank's stage is the last one of the encoder."""
        stage = self._rank((PIPE,))
        return self.is_pipeline_stage_before_split(stage) and self.is_pipeline_stage_after_split(stage + 1)

    def _has_no_split(self) -> bool:
        return self._split_rank is None or self._world_size((PIPE,)) == 1

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
        present, experts = self._present(axes), self._experts_among(axes)
        if present and experts is None:
            return self.grid.get_group(present)
        if experts is not None and not present:
            return experts.expert_group
        names = ("this rank",) if experts is None else (*present, "experts", str(experts.plan))
        return self.grid.create_group(RankGroup(names, tuple(self._global_ranks(axes))))

    def _global_ranks(self, axes: Iterable[str], check_initialized: bool = True) -> list[int]:
        """Return the global ranks, ascending, of the group along some axes."""
        topology, present, experts = self.grid.topology(), self._present(axes), self._experts_among(axes)
        if experts is None:
            return self.grid.get_ranks(present)
        own = experts.plan.expert_ranks(self.grid.grid_rank)
        return sorted(self.grid.to_global({peer for rank in own for peer in topology.get_axis_ranks(present, rank)}))

    def _world_size(self, axes: Iterable[str]) -> int:
        if self._experts_among(axes) is None:  # layers ask in every pass: in closed form, for any number of ranks
            return degree(self.grid.topology(), self._present(axes))
        return len(self._global_ranks(axes))

    def _rank(self, axes: Iterable[str]) -> int:
        if self._experts_among(axes) is None:
            return self.grid.topology().get_axis_index(self._present(axes), self.grid.grid_rank)
        return self._global_ranks(axes).index(self.grid.global_rank)

    def _src_rank(self, axes: Iterable[str]) -> int:
        return self._global_ranks(axes)[0]

    def _present(self, axes: Iterable[str]) -> tuple[str, ...]:
        return tuple(axis for axis in self.grid.topology().axes if axis in axes)

    def _experts_among(self, axes: Iterable[str]) -> ExpertGroups | None:
        return self._experts() if _EXPERTS in axes else None

    def _experts(self) -> ExpertGroups | None:
        """Return the expert groups of this grid, or None.

        Raises:
            RuntimeError: the grid has expert groups of several sizes.
        """
        known = registry.of(self.grid)
        if len(known) > 1:
            names = [entry.plan.name for entry in known]
            raise RuntimeError(
                f"the grid has expert groups of several sizes, {names}, but Megatron-LM knows one: destroy() the others"
            )
        return known[0] if known else None

    def _check_degrees(self, **wanted: int | None) -> None:
        """Compare the degrees that a program asks for with the grid's.

        Raises:
            TopologyError: a degree differs.
        """
        for axis, size in wanted.items():
            here = degree(self.grid.topology(), [axis])
            if size is not None and size != here:
                raise TopologyError(
                    f"initialize_model_parallel wants {size} ranks along {axis!r}, but the grid is "
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


class _Megatron(ParallelState):
    """The functions that Megatron-DeepSpeed and Megatron-LM share. *Model* parallel means pipe x tensor."""

    _ignores_virtual_stages: ClassVar[bool]
    """The default of ``ignore_virtual``."""

    def _set_virtual_stages(self, count: int | None) -> None:
        self._virtual_world_size = count
        self._virtual_rank = None if count is None else 0

    def is_pipeline_first_stage(self, ignore_virtual: bool | None = None, vp_stage: int | None = None) -> bool:
        """Return whether this rank is at the first (virtual) stage."""
        return self._is_at_virtual_stage(0, ignore_virtual, vp_stage) and self._rank((PIPE,)) == 0

    def is_pipeline_last_stage(self, ignore_virtual: bool | None = None, vp_stage: int | None = None) -> bool:
        """Return whether this rank is at the last (virtual) stage."""
        is_last = self._rank((PIPE,)) == self._world_size((PIPE,)) - 1
        return self._is_at_virtual_stage(-1, ignore_virtual, vp_stage) and is_last

    def is_rank_in_embedding_group(self, ignore_virtual: bool | None = None, vp_stage: int | None = None) -> bool:
        """Return whether this rank holds the input or the output embedding."""
        if self._ignores_virtual_stages if ignore_virtual is None else ignore_virtual:
            return self.grid.is_rank_in_embedding_group()
        return self.is_pipeline_first_stage(False, vp_stage) or self.is_pipeline_last_stage(False, vp_stage)

    def _is_at_virtual_stage(self, wanted: int, ignore_virtual: bool | None, vp_stage: int | None) -> bool:
        ignored = self._ignores_virtual_stages if ignore_virtual is None else ignore_virtual
        if ignored or self._virtual_world_size is None:
            return True
        return (self._virtual_rank if vp_stage is None else vp_stage) == wanted % self._virtual_world_size

    def _group_gloo(self, axes: Iterable[str]) -> ProcessGroup | None:
        """Return the group along some axes, for tensors on the CPU."""
        return self._check_cpu(self._group(axes), "get_data_parallel_group_gloo")

    def get_amax_reduction_group(
        self, with_context_parallel: bool = False, tp_only_amax_red: bool = False
    ) -> ProcessGroup | None:
        """Return the group of the ranks that share the scales of FP8."""
        seq = (SEQ,) if with_context_parallel else ()
        samples = () if tp_only_amax_red else _samples(self)
        return self._group((MODEL, *seq, *samples))


class MegatronDeepSpeedState(_Megatron):
    """``megatron.core.parallel_state`` of Megatron-DeepSpeed."""

    _ignores_virtual_stages = False
    refused: ClassVar[dict[str, str]] = _setters("sequence_parallel", "sequence_data_parallel")
    translated: ClassVar[dict[str, str]] = {
        **dict.fromkeys(
            ("get_model_parallel_world_size", "get_model_parallel_rank"),
            "tensor parallel, without a pipeline only; the grid's is pipe x model",
        ),
        **{
            f"get_sequence_parallel_{name}": f"{answer} without an axis seq, where the grid does not have the name: "
            "DeepSpeed takes another path then"
            for name, answer in (("group", "1 rank"), ("world_size", "1"), ("rank", "0"))
        },
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
        """Check that the program asks for the grid's layout; create no groups.

        Raises:
            TopologyError: a degree differs.
        """
        self._check_degrees(
            model=tensor_model_parallel_size, pipe=pipeline_model_parallel_size, seq=sequence_parallel_size
        )
        self._set_virtual_stages(virtual_pipeline_model_parallel_size)
        self._split_rank = pipeline_model_parallel_split_rank
        self.is_awaited = False

    def get_model_parallel_world_size(self) -> int:
        """Return the number of slices of each layer, in programs without a pipeline."""
        self._refuse_pipelines("get_model_parallel_world_size")
        return self._world_size((MODEL,))

    def get_model_parallel_rank(self) -> int:
        """Return the index of this rank's slice, in programs without a pipeline."""
        self._refuse_pipelines("get_model_parallel_rank")
        return self._rank((MODEL,))

    def _refuse_pipelines(self, name: str) -> None:
        if self._world_size((PIPE,)) > 1:
            tensor, pipeline = (name.replace("_model_", f"_{kind}_model_") for kind in ("tensor", "pipeline"))
            raise RuntimeError(
                f"{name}() has an answer only without a pipeline, but {self.grid.topology().spec!r} has one: "
                f"call {tensor}() or {pipeline}()"
            )

    def sequence_parallel_is_initialized(self) -> bool:
        """Return whether the groups exist. Without an axis ``seq``, each of them is one rank."""
        return self.grid.is_alive

    sequence_data_parallel_is_initialized = sequence_parallel_is_initialized


class MegatronState(_Megatron):
    """``megatron.core.parallel_state`` of Megatron-LM."""

    _ignores_virtual_stages = True
    refused: ClassVar[dict[str, str]] = {
        "get_hybrid_data_context_parallel_groups": _NO_PARTS,
        "create_all_gather_groups": "a grid has one group of any ranks; these would be laid out in Megatron-LM's order",
        **_setters("expert_model_parallel", "expert_tensor_parallel"),
        "set_data_parallel_rank": _FIXED["rank"],
    }
    _lacking: ClassVar[dict[str, str]] = {
        "gtp_remat_size": "axis for rematerialised weights",
        "expert_gtp_remat_size": "axis for rematerialised weights",
        "num_distributed_optimizer_instances": "distributed optimizers of part of the replicas",
        "hierarchical_context_parallel_sizes": "parts of its groups over context",
        "hybrid_context_parallel": "parts of its groups over context",
    }
    """Arguments of ``initialize_model_parallel`` that ask for what a grid lacks, unless they are 1, False or None."""

    def initialize_model_parallel(
        self,
        tensor_model_parallel_size: int = 1,
        pipeline_model_parallel_size: int = 1,
        virtual_pipeline_model_parallel_size: int | None = None,
        *args: Any,
        context_parallel_size: int = 1,
        expert_model_parallel_size: int = 1,
        expert_tensor_parallel_size: int | None = None,
        **options: Any,
    ) -> None:
        """Check that the program asks for the grid's layout; create the groups over several axes.

        Collective over the grid. The groups are created here, in one order: later the ranks ask for them in different
        orders (``ProcessGroupCollection.use_mpu_process_groups`` iterates over a set).

        Raises:
            TopologyError: a degree differs, or the program asks for something that a grid lacks.
        """
        self._check_degrees(
            model=tensor_model_parallel_size, pipe=pipeline_model_parallel_size, seq=context_parallel_size
        )
        if expert_model_parallel_size > 1 and self._world_size((_EXPERTS,)) != expert_model_parallel_size:
            raise TopologyError(
                f"initialize_model_parallel wants experts over {expert_model_parallel_size} ranks, but the grid has "
                f"them over {self._world_size((_EXPERTS,))}: call "
                f"ds_topo.groups.create_expert_groups(grid, {expert_model_parallel_size}) before"
            )
        slices = self._world_size(self._expert_tensor_axes())
        if expert_tensor_parallel_size not in (None, slices):
            raise TopologyError(
                f"initialize_model_parallel wants experts in {expert_tensor_parallel_size} slices, but they are in "
                f"{slices}: pass expert_tensor_parallel= to create_expert_groups()"
            )
        for name, lacking in self._lacking.items():
            if options.get(name) not in (None, False, 1):
                raise TopologyError(
                    f"initialize_model_parallel got {name}={options[name]}: a grid has no {lacking}; leave it out"
                )
        self._set_virtual_stages(virtual_pipeline_model_parallel_size)
        samples, replicas, slices_of_experts = _samples(self), _replicas(self), _expert_slices(self)
        for axes in (samples, (MODEL, SEQ), (MODEL, *samples), (MODEL, *replicas), self.grid.topology().axes):
            self._group(axes)
        self.get_embedding_group(check_initialized=False)
        for axes in (slices_of_experts, (PIPE, *slices_of_experts)):
            self._group(axes)
        self.is_awaited = False

    is_initialized = ParallelState.model_parallel_is_initialized

    # -- data and context ----------------------------------------------------------------------------------------
    # Groups over several axes are created when their ranks ask for them the first time, so all of them must ask.

    def get_tensor_and_data_parallel_group(
        self, check_initialized: bool = True, with_context_parallel: bool = False
    ) -> ProcessGroup | None:
        """Return the group over tensor and data parallelism."""
        return self._group((MODEL, *_data(self, with_context_parallel)), check_initialized)

    def get_hierarchical_context_parallel_groups(self, check_initialized: bool = True) -> None:
        """Return None: there are no such groups. Raise ``RuntimeError`` if ``check_initialized``."""
        if check_initialized:
            raise RuntimeError(f"get_hierarchical_context_parallel_groups(): {_NO_PARTS}")

    def get_inter_distributed_optimizer_instance_group(self, check_initialized: bool = True) -> None:
        """Return None: there is one distributed optimizer. Raise ``RuntimeError`` if ``check_initialized``."""
        if check_initialized:
            raise RuntimeError("get_inter_distributed_optimizer_instance_group(): a grid has one distributed optimizer")

    # -- experts -------------------------------------------------------------------------------------------------

    def get_expert_tensor_model_pipeline_parallel_group(
        self, check_initialized: bool = True, with_egtp_remat: bool = False
    ) -> ProcessGroup | None:
        """Return the group of all slices of all experts, over all stages."""
        return self._group((_EXPERTS, PIPE, *self._expert_tensor_axes()), check_initialized)

    def get_expert_data_parallel_group(
        self, check_initialized: bool = True, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
    ) -> ProcessGroup | None:
        """Return the group of the replicas of this rank's experts; of its parameters without expert groups."""
        known = self._experts()
        return self._group(_replicas(self), check_initialized) if known is None else known.expert_data_group

    def get_expert_data_parallel_group_gloo(self, partial_expert_data_parallel: bool = False) -> ProcessGroup | None:
        """Return the group of the replicas of this rank's experts, for tensors on the CPU."""
        return self._check_cpu(self.get_expert_data_parallel_group(), "get_expert_data_parallel_group_gloo")

    def get_expert_data_parallel_world_size(
        self, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
    ) -> int:
        """Return the number of replicas of this rank's experts."""
        return len(self._expert_replicas())

    def get_expert_data_parallel_rank(
        self, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
    ) -> int:
        """Return this rank's index among the replicas of its experts."""
        return self._expert_replicas().index(self.grid.global_rank)

    def get_all_ranks(self) -> str:
        """Return this rank's indices along tensor, rematerialisation, data, context, pipeline and expert parallelism.

        They are joined by ``_``.
        """
        kinds: tuple[tuple[str, ...], ...] = ((MODEL,), (), _samples(self), (SEQ,), (PIPE,), (_EXPERTS,))
        return "_".join(str(self._rank(axes)) for axes in kinds)

    # -- expert groups of the grid -------------------------------------------------------------------------------

    def _expert_replicas(self) -> list[int]:
        known = self._experts()
        return self._global_ranks(_replicas(self)) if known is None else known.expert_data_ranks

    def _expert_tensor_axes(self) -> tuple[str, ...]:
        known = self._experts()
        return (MODEL,) if known is None or known.plan.expert_tensor_parallel else ()


class GPTNeoXState(ParallelState):
    """``megatron.mpu`` of GPT-NeoX, where *model* parallel means tensor parallel."""

    translated: ClassVar[dict[str, str]] = {
        f"get_model_parallel_{question}": "tensor parallel; the grid's is pipe x model"
        for question in ("group", "world_size", "rank", "src_rank")
    }

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
        stages = self._world_size((PIPE,))
        if stages == 1:
            return self._group(_replicas(self))
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
        slice_index = self._rank((MODEL,)) if rank is None else rank
        return tokens_per_expert.chunk(self._world_size((MODEL,)))[slice_index]

    def get_expert_tokens_for_rank(
        self, routed_tokens: Tensor, tokens_per_expert: Tensor, rank: int | None = None
    ) -> Tensor:
        """Return the tokens of the experts of a slice, by default this rank's: ``[tokens, ...] -> [its tokens, ...]``.

        The tokens are in the order of the experts.
        """
        slice_index = self._rank((MODEL,)) if rank is None else rank
        counts = [int(part.sum()) for part in tokens_per_expert.chunk(self._world_size((MODEL,)))]
        tokens: tuple[Tensor, ...] = routed_tokens.split(counts)
        return tokens[slice_index]

    def get_fp32_allreduce(self) -> bool:
        """Return the ``fp32_allreduce`` that the program gave to ``initialize_model_parallel``."""
        return self._fp32_allreduce


# -- the names that ask a few questions about a kind of group ----------------------------------------------------------


def _define(
    state: type[ParallelState],
    kind: str,
    questions: str,
    axes: Callable[..., Iterable[str]],
    *,
    has_options: bool = False,
    is_set: bool = False,
) -> None:
    """Give a class the functions ``get_<kind>_<question>`` of one kind of group.

    Args:
        state: the class.
        kind: the name of the kind.
        questions: the questions, separated by spaces: ``_<question>`` is the method that answers one for any axes.
        axes: returns the axes of the group, for a state.
        has_options: True if ``axes`` also needs the arguments of the program's call.
        is_set: True for functions ``set_<kind>_world_size`` and ``_rank``, too, which refuse all values but the grid's.
    """
    for question in questions.split():
        _add(state, f"get_{kind}_{question}", _answer(f"_{question}", axes, has_options))
    for question in _FIXED if is_set else ():
        what = f"{kind.replace('_model_', '_')}_{question}".replace("_", " ")
        _add(state, f"set_{kind}_{question}", _check(f"_{question}", axes, what))


def _add(state: type[ParallelState], name: str, function: Any) -> None:
    function.__name__ = name
    setattr(state, name, function)


def _answer(question: str, axes: Callable[..., Iterable[str]], has_options: bool) -> Callable[..., Any]:
    def answer(state: ParallelState, *args: Any, **options: Any) -> Any:
        """Answer one question about one kind of group."""
        ask = getattr(state, question)
        return ask(axes(state, *args, **options)) if has_options else ask(axes(state), *args, **options)

    return answer


def _check(question: str, axes: Callable[..., Iterable[str]], what: str) -> Callable[..., None]:
    def check(state: ParallelState, *values: int | None, **named: int | None) -> None:
        """Refuse any value but the grid's."""
        (value,) = (*values, *named.values())
        here = getattr(state, question)(axes(state))
        if value is not None and value != here:
            raise TopologyError(
                f"the {what} is the grid's, {here}, and cannot be set to {value}: create the grid with another topology"
            )

    return check


def _expert_slices(state: MegatronState) -> tuple[str, ...]:
    return (_EXPERTS, *state._expert_tensor_axes())


_define(ParallelState, "tensor_model_parallel", "group world_size rank src_rank", lambda _: (MODEL,), is_set=True)
_define(ParallelState, "pipeline_model_parallel", "group world_size rank", lambda _: (PIPE,), is_set=True)

_define(GPTNeoXState, "model_parallel", "group world_size rank src_rank", lambda _: (MODEL,), is_set=True)
_define(GPTNeoXState, "pipe_parallel", "group world_size rank", lambda _: (PIPE,))
_define(GPTNeoXState, "data_parallel", "group", _replicas)

_define(_Megatron, "model_parallel", "group src_rank", lambda _: (PIPE, MODEL))
_define(_Megatron, "data_parallel", "group group_gloo world_size rank src_rank", _data, has_options=True)

_define(MegatronDeepSpeedState, "sequence_parallel", "group world_size rank src_rank", lambda _: (SEQ,))
_define(MegatronDeepSpeedState, "sequence_data_parallel", "group world_size rank", _replicas)

_define(MegatronState, "context_parallel", "group global_ranks world_size rank", lambda _: (SEQ,))
_define(MegatronState, "tensor_and_context_parallel", "group world_size rank", lambda _: (MODEL, SEQ))
_define(MegatronState, "intra_distributed_optimizer_instance", "group", lambda state: state.grid.topology().axes)
_define(MegatronState, "expert_model_parallel", "group world_size rank src_rank", lambda _: (_EXPERTS,))
_define(MegatronState, "expert_tensor_parallel", "group world_size rank", MegatronState._expert_tensor_axes)
_define(MegatronState, "expert_tensor_and_model_parallel", "group world_size rank", _expert_slices)
for _kind in ("gtp_weight_remat", "expert_gtp_weight_remat"):  # a grid has no axis for them: this rank alone
    _define(MegatronState, _kind, "group global_ranks world_size rank", lambda _: ())
