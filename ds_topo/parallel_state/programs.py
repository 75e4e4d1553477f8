"""Answer the parallel states of GPT-NeoX, Megatron-DeepSpeed and Megatron-LM, each with its own meanings.

``ParallelState`` has the answers that all programs share. Most names ask one of a few questions about the group along
some axes; :func:`_about` returns such a method. The other names are written out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar

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
_EXPERTS, _EXPERT_SLICES = "experts of this rank", "slices of this rank's experts"
_SAMPLES, _REPLICAS = "ranks with other samples", "replicas of this rank's parameters"
"""Names that may stand among axes: for the ranks that share this rank's experts, and for axes that a grid decides."""
_P = ParamSpec("_P")
_T = TypeVar("_T")
_State = TypeVar("_State", bound="ParallelState")


def _setters(*kinds: str) -> dict[str, str]:
    """Return the functions that set the world size and the rank of some kinds of groups, with the reason to refuse."""
    return {f"set_{kind}_{what}": why for kind in kinds for what, why in _FIXED.items()}


def _about(
    question: Callable[Concatenate[_State, Iterable[str], _P], _T], *axes: str
) -> Callable[Concatenate[_State, _P], _T]:
    """Return the method that asks a question about the group along some axes."""

    def answer(self: _State, /, *args: _P.args, **options: _P.kwargs) -> _T:
        return question(self, axes, *args, **options)

    return answer


def _about_data(question: Callable[[_State, Iterable[str]], _T]) -> Callable[..., _T]:
    """Return the method that asks a question about Megatron's data parallelism."""

    def answer(
        self: _State,
        /,
        with_context_parallel: bool = False,
        with_gtp_remat: bool = True,
        partial_data_parallel: bool = False,
    ) -> _T:  # the other options change nothing: there is one distributed optimizer, over all replicas
        return question(self, (_REPLICAS if with_context_parallel else _SAMPLES,))

    return answer


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
    """The functions that all programs' parallel states share, as methods of the same names and arguments."""

    refused: ClassVar[dict[str, str]] = {}
    """The names that the program's module has and that a grid cannot answer, each with the reason."""

    def __init__(self, grid: PipelineParallelGrid) -> None:
        self.grid = grid
        self.is_awaited = False
        """True if a program has still to call ``initialize_model_parallel``, and the state answers that it has not."""
        self._virtual_rank: int | None = None
        self._virtual_world_size: int | None = None
        self._split_rank: int | None = None
        self._memory_buffer = GlobalMemoryBuffer()

    # -- questions about the group along some axes -----------------------------------------------------------------

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

    def _set_world_size(self, axes: Iterable[str], world_size: int | None) -> None:
        self._refuse_other("world size", axes, world_size, self._world_size(axes))

    def _set_rank(self, axes: Iterable[str], rank: int | None) -> None:
        self._refuse_other("rank", axes, rank, self._rank(axes))

    @staticmethod
    def _refuse_other(what: str, axes: Iterable[str], value: int | None, here: int) -> None:
        if value is not None and value != here:
            along = ",".join(axes)
            raise TopologyError(f"the {what} along {along} is the grid's, {here}, not {value}: create another grid")

    def _present(self, axes: Iterable[str]) -> tuple[str, ...]:
        topology, spanned = self.grid.topology(), set(axes)
        if _SAMPLES in spanned:
            spanned.update(sample_axes(topology))
        if _REPLICAS in spanned:
            spanned.update(gradient_axes(topology))
        if _EXPERT_SLICES in spanned and ((known := self._experts()) is None or known.plan.expert_tensor_parallel):
            spanned.add(MODEL)
        return tuple(axis for axis in topology.axes if axis in spanned)

    def _experts_among(self, axes: Iterable[str]) -> ExpertGroups | None:
        return self._experts() if _EXPERTS in axes else None

    def _experts(self) -> ExpertGroups | None:
        known = registry.of(self.grid)
        if len(known) > 1:
            names = [entry.plan.name for entry in known]
            raise RuntimeError(
                f"the grid has expert groups of several sizes, {names}, but Megatron-LM knows one: destroy() the others"
            )
        return known[0] if known else None

    def _check_degrees(self, **wanted: int | None) -> None:
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
        if group is not None and "cpu" not in devices_of(group):
            raise RuntimeError(
                f"{name}: the groups of this job have no gloo backend, which tensors on the CPU need. "
                'Join with init_distributed(backend="cpu:gloo,cuda:nccl")'
            )
        return group

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

    # -- tensor parallelism --------------------------------------------------------------------------------------

    get_tensor_model_parallel_group = _about(_group, MODEL)
    get_tensor_model_parallel_world_size = _about(_world_size, MODEL)
    get_tensor_model_parallel_rank = _about(_rank, MODEL)
    get_tensor_model_parallel_src_rank = _about(_src_rank, MODEL)

    set_tensor_model_parallel_world_size = _about(_set_world_size, MODEL)
    set_tensor_model_parallel_rank = _about(_set_rank, MODEL)

    # -- pipeline parallelism ------------------------------------------------------------------------------------

    get_pipeline_model_parallel_group = _about(_group, PIPE)
    get_pipeline_model_parallel_world_size = _about(_world_size, PIPE)
    get_pipeline_model_parallel_rank = _about(_rank, PIPE)
    get_pipeline_model_parallel_first_rank = _about(_src_rank, PIPE)

    set_pipeline_model_parallel_world_size = _about(_set_world_size, PIPE)
    set_pipeline_model_parallel_rank = _about(_set_rank, PIPE)

    def get_virtual_pipeline_model_parallel_rank(self) -> int | None:
        """Return the virtual stage that the program has set last."""
        return self._virtual_rank

    def set_virtual_pipeline_model_parallel_rank(self, rank: int | None) -> None:
        self._virtual_rank = rank

    def get_virtual_pipeline_model_parallel_world_size(self) -> int | None:
        """Return the number of virtual stages per rank, as the program has set it; None without virtual stages."""
        return self._virtual_world_size

    def set_virtual_pipeline_model_parallel_world_size(self, world_size: int | None) -> None:
        self._virtual_world_size = world_size

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
        return self.is_pipeline_stage_before_split() and self.is_pipeline_stage_after_split(self._rank((PIPE,)) + 1)

    def _has_no_split(self) -> bool:
        return self._split_rank is None or self._world_size((PIPE,)) == 1

    # -- memory --------------------------------------------------------------------------------------------------

    def get_global_memory_buffer(self) -> GlobalMemoryBuffer:
        """Return the memory for gathered activations."""
        return self._memory_buffer

    def destroy_global_memory_buffer(self) -> None:
        """Release the memory for gathered activations."""
        self._memory_buffer = GlobalMemoryBuffer()


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

    get_model_parallel_group = _about(ParallelState._group, PIPE, MODEL)
    get_model_parallel_src_rank = _about(ParallelState._src_rank, PIPE, MODEL)
    get_data_parallel_group = _about_data(ParallelState._group)
    get_data_parallel_group_gloo = _about_data(_group_gloo)
    get_data_parallel_world_size = _about_data(ParallelState._world_size)
    get_data_parallel_rank = _about_data(ParallelState._rank)
    get_data_parallel_src_rank = _about_data(ParallelState._src_rank)

    def get_amax_reduction_group(
        self, with_context_parallel: bool = False, tp_only_amax_red: bool = False
    ) -> ProcessGroup | None:
        """Return the group of the ranks that share the scales of FP8."""
        seq = (SEQ,) if with_context_parallel else ()
        samples = () if tp_only_amax_red else (_SAMPLES,)
        return self._group((MODEL, *seq, *samples))


class MegatronDeepSpeedState(_Megatron):
    """``megatron.core.parallel_state`` of Megatron-DeepSpeed."""

    _ignores_virtual_stages = False
    refused: ClassVar[dict[str, str]] = _setters("sequence_parallel", "sequence_data_parallel")

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
        """Check that the program asks for the grid's layout; create no groups."""
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

    get_sequence_parallel_group = _about(ParallelState._group, SEQ)
    get_sequence_parallel_world_size = _about(ParallelState._world_size, SEQ)
    get_sequence_parallel_rank = _about(ParallelState._rank, SEQ)
    get_sequence_parallel_src_rank = _about(ParallelState._src_rank, SEQ)
    get_sequence_data_parallel_group = _about(ParallelState._group, _REPLICAS)
    get_sequence_data_parallel_world_size = _about(ParallelState._world_size, _REPLICAS)
    get_sequence_data_parallel_rank = _about(ParallelState._rank, _REPLICAS)


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
        slices = self._world_size((_EXPERT_SLICES,))
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
        for axes in ((_SAMPLES,), (MODEL, SEQ), (MODEL, _SAMPLES), (MODEL, _REPLICAS), self.grid.topology().axes):
            self._group(axes)
        self.get_embedding_group(check_initialized=False)
        self._group((_EXPERTS, _EXPERT_SLICES))
        self._group((PIPE, _EXPERTS, _EXPERT_SLICES))
        self.is_awaited = False

    is_initialized = ParallelState.model_parallel_is_initialized

    # -- data and context ----------------------------------------------------------------------------------------
    # Groups over several axes are created when their ranks ask for them the first time, so all of them must ask.

    get_context_parallel_group = _about(ParallelState._group, SEQ)
    get_context_parallel_global_ranks = _about(ParallelState._global_ranks, SEQ)
    get_context_parallel_world_size = _about(ParallelState._world_size, SEQ)
    get_context_parallel_rank = _about(ParallelState._rank, SEQ)
    get_tensor_and_context_parallel_group = _about(ParallelState._group, MODEL, SEQ)
    get_tensor_and_context_parallel_world_size = _about(ParallelState._world_size, MODEL, SEQ)
    get_tensor_and_context_parallel_rank = _about(ParallelState._rank, MODEL, SEQ)

    def get_tensor_and_data_parallel_group(
        self, check_initialized: bool = True, with_context_parallel: bool = False
    ) -> ProcessGroup | None:
        """Return the group over tensor and data parallelism."""
        return self._group((MODEL, _REPLICAS if with_context_parallel else _SAMPLES), check_initialized)

    def get_intra_distributed_optimizer_instance_group(self, check_initialized: bool = True) -> ProcessGroup | None:
        """Return the group of all ranks: there is one distributed optimizer."""
        return self._group(self.grid.topology().axes, check_initialized)

    def get_hierarchical_context_parallel_groups(self, check_initialized: bool = True) -> None:
        """Return None: there are no such groups. Raise ``RuntimeError`` if ``check_initialized``."""
        if check_initialized:
            raise RuntimeError(f"get_hierarchical_context_parallel_groups(): {_NO_PARTS}")

    def get_inter_distributed_optimizer_instance_group(self, check_initialized: bool = True) -> None:
        """Return None: there is one distributed optimizer. Raise ``RuntimeError`` if ``check_initialized``."""
        if check_initialized:
            raise RuntimeError("get_inter_distributed_optimizer_instance_group(): a grid has one distributed optimizer")

    # A grid has no axis for rematerialised weights: each of these groups is this rank alone.
    get_gtp_weight_remat_group = _about(ParallelState._group)
    get_gtp_weight_remat_global_ranks = _about(ParallelState._global_ranks)
    get_gtp_weight_remat_world_size = _about(ParallelState._world_size)
    get_gtp_weight_remat_rank = _about(ParallelState._rank)
    get_expert_gtp_weight_remat_group = _about(ParallelState._group)
    get_expert_gtp_weight_remat_global_ranks = _about(ParallelState._global_ranks)
    get_expert_gtp_weight_remat_world_size = _about(ParallelState._world_size)
    get_expert_gtp_weight_remat_rank = _about(ParallelState._rank)

    # -- experts -------------------------------------------------------------------------------------------------

    get_expert_model_parallel_group = _about(ParallelState._group, _EXPERTS)
    get_expert_model_parallel_world_size = _about(ParallelState._world_size, _EXPERTS)
    get_expert_model_parallel_rank = _about(ParallelState._rank, _EXPERTS)
    get_expert_model_parallel_src_rank = _about(ParallelState._src_rank, _EXPERTS)
    get_expert_tensor_parallel_group = _about(ParallelState._group, _EXPERT_SLICES)
    get_expert_tensor_parallel_world_size = _about(ParallelState._world_size, _EXPERT_SLICES)
    get_expert_tensor_parallel_rank = _about(ParallelState._rank, _EXPERT_SLICES)
    get_expert_tensor_and_model_parallel_group = _about(ParallelState._group, _EXPERTS, _EXPERT_SLICES)
    get_expert_tensor_and_model_parallel_world_size = _about(ParallelState._world_size, _EXPERTS, _EXPERT_SLICES)
    get_expert_tensor_and_model_parallel_rank = _about(ParallelState._rank, _EXPERTS, _EXPERT_SLICES)

    def get_expert_tensor_model_pipeline_parallel_group(
        self, check_initialized: bool = True, with_egtp_remat: bool = False
    ) -> ProcessGroup | None:
        """Return the group of all slices of all experts, over all stages."""
        return self._group((_EXPERTS, PIPE, _EXPERT_SLICES), check_initialized)

    def get_expert_data_parallel_group(
        self, check_initialized: bool = True, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
    ) -> ProcessGroup | None:
        """Return the group of the replicas of this rank's experts; of its parameters without expert groups."""
        known = self._experts()
        return self._group((_REPLICAS,), check_initialized) if known is None else known.expert_data_group

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

    def _expert_replicas(self) -> list[int]:
        known = self._experts()
        return self._global_ranks((_REPLICAS,)) if known is None else known.expert_data_ranks


class GPTNeoXState(ParallelState):
    """``megatron.mpu`` of GPT-NeoX, where *model* parallel means tensor parallel."""

    def __init__(self, grid: PipelineParallelGrid) -> None:
        super().__init__(grid)
        self._fp32_allreduce = False

    def initialize_model_parallel(
        self, model_parallel_size: int, topology: Any = None, fp32_allreduce: bool = False
    ) -> None:
        """Check that the program asks for the grid's layout; create no groups."""
        self._check_degrees(model=model_parallel_size)
        if topology is not None:
            require_same_places(as_topology(topology, self.grid.world_size), self.grid)
        self._fp32_allreduce = fp32_allreduce
        self.is_awaited = False

    get_model_parallel_group = _about(ParallelState._group, MODEL)
    get_model_parallel_world_size = _about(ParallelState._world_size, MODEL)
    get_model_parallel_rank = _about(ParallelState._rank, MODEL)
    get_model_parallel_src_rank = _about(ParallelState._src_rank, MODEL)
    set_model_parallel_world_size = _about(ParallelState._set_world_size, MODEL)
    set_model_parallel_rank = _about(ParallelState._set_rank, MODEL)
    get_pipe_parallel_group = _about(ParallelState._group, PIPE)
    get_pipe_parallel_world_size = _about(ParallelState._world_size, PIPE)
    get_pipe_parallel_rank = _about(ParallelState._rank, PIPE)
    get_data_parallel_group = _about(ParallelState._group, _REPLICAS)
    get_data_parallel_world_size = _about(ParallelState._world_size, _SAMPLES)
    get_data_parallel_rank = _about(ParallelState._rank, _SAMPLES)
    get_data_parallel_src_rank = _about(ParallelState._src_rank, _REPLICAS)

    def get_topology(self) -> ProcessTopology:
        return self.grid.topology()

    def get_io_parallel_group(self) -> ProcessGroup | None:
        """Return the group of the first slices of all first and last stages.

        Without a pipeline, it is the group of the replicas of this rank's parameters. The group is created when its
        ranks ask for it the first time, so all of them must ask.
        """
        stages = self._world_size((PIPE,))
        if stages == 1:
            return self._group((_REPLICAS,))
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
