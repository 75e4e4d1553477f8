"""``megatron.core.parallel_state`` of Megatron-LM."""

from __future__ import annotations

from typing import Any, ClassVar

from ds_topo.engine.expert_registry import ExpertGroups, registry
from ds_topo.errors import TopologyError
from ds_topo.parallel_state.megatron_core import MegatronCoreState
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.topology.axes import MODEL, PIPE, SEQ
from ds_topo.topology.rank_tables import RankGroup, axes_of

_NESTED = "a grid has no such parts of its groups"
_LACKING = {
    "gtp_remat_size": "axis for rematerialised weights",
    "expert_gtp_remat_size": "axis for rematerialised weights",
    "num_distributed_optimizer_instances": "distributed optimizers of part of the replicas",
    "hierarchical_context_parallel_sizes": "parts of its groups over context",
    "hybrid_context_parallel": "parts of its groups over context",
}
"""Arguments of ``initialize_model_parallel`` that want what a grid does not have, unless 1, false or none."""


class MegatronState(MegatronCoreState):
    """``megatron.core.parallel_state`` of Megatron-LM."""

    refused: ClassVar[dict[str, str]] = {
        "get_hybrid_data_context_parallel_groups": _NESTED,
        "create_all_gather_groups": "a grid has one group of any ranks; these would be laid out in Megatron-LM's order",
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
        expert_tensor_parallel_size: int | None = None,
        **options: Any,
    ) -> None:
        """Check that the program wants the grid's layout; create the groups over several axes.

        Collective over the grid. Later the ranks ask for these groups in an order of each one's own
        (``ProcessGroupCollection.use_mpu_process_groups`` walks through a set), in which they could not create them.

        Raises:
            TopologyError: another degree, or what a grid does not have.
        """
        self._check_degrees(
            model=tensor_model_parallel_size, pipe=pipeline_model_parallel_size, seq=context_parallel_size
        )
        if expert_model_parallel_size > 1 and self.get_expert_model_parallel_world_size() != expert_model_parallel_size:
            raise TopologyError(
                f"initialize_model_parallel wants experts over {expert_model_parallel_size} ranks: call "
                f"ds_topo.create_expert_groups(grid, {expert_model_parallel_size}) before"
            )
        if expert_tensor_parallel_size not in (None, self.get_expert_tensor_parallel_world_size()):
            raise TopologyError(
                f"initialize_model_parallel wants experts in {expert_tensor_parallel_size} slices, but they are in "
                f"{self.get_expert_tensor_parallel_world_size()}: create_expert_groups(expert_tensor_parallel=) says"
            )
        for name, lacking in _LACKING.items():
            if options.get(name) not in (None, False, 1):
                raise TopologyError(f"initialize_model_parallel got {name}={options[name]}: a grid has no {lacking}")
        self._virtual_world_size = virtual_pipeline_model_parallel_size
        self._virtual_rank = None if virtual_pipeline_model_parallel_size is None else 0
        self._create_groups()

    def _create_groups(self) -> None:
        """Ask for all that is created when it is first asked for, in one order."""
        for axes in (self._sample_axes(), (MODEL, SEQ)):
            self._group(axes)
        for with_context_parallel in (False, True):
            self.get_tensor_and_data_parallel_group(with_context_parallel=with_context_parallel)
        self.get_intra_distributed_optimizer_instance_group()
        self.get_embedding_group(check_initialized=False)
        self.get_expert_tensor_and_model_parallel_group()
        self.get_expert_tensor_model_pipeline_parallel_group()

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
        """Replicas with samples of their own, or all replicas of this rank's parameters.

        Those of a part, ``partial_data_parallel``, are all of them: there is one distributed optimizer.
        """
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
        return len(self._ranks(self._data_axes(with_context_parallel)))

    def get_data_parallel_rank(
        self, with_context_parallel: bool = False, with_gtp_remat: bool = True, partial_data_parallel: bool = False
    ) -> int:
        """Which of them this rank is in."""
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

    def get_hierarchical_context_parallel_groups(self, check_initialized: bool = True) -> None:
        """None: there are none.

        Raises:
            RuntimeError: there have to be, ``check_initialized``.
        """
        self._check_needless("get_hierarchical_context_parallel_groups", _NESTED, check_initialized)

    def get_intra_distributed_optimizer_instance_group(self, check_initialized: bool = True) -> ProcessGroup | None:
        """The ranks of the one distributed optimizer: all of the grid."""
        return self._group(tuple(self._grid.topology().axes), check_initialized)

    def get_inter_distributed_optimizer_instance_group(self, check_initialized: bool = True) -> None:
        """None: there is one distributed optimizer.

        Raises:
            RuntimeError: there have to be several, ``check_initialized``.
        """
        self._check_needless(
            "get_inter_distributed_optimizer_instance_group", "a grid has one distributed optimizer", check_initialized
        )

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

    def get_expert_model_parallel_src_rank(self) -> int:
        """The global rank of the first of them."""
        return self._with_experts(())[0]

    def get_expert_tensor_parallel_group(self, check_initialized: bool = True) -> ProcessGroup | None:
        """The slices of this rank's experts; this rank alone if experts are whole, and layers' slices without any."""
        return self._group(self._expert_tensor_axes(), check_initialized)

    def get_expert_tensor_parallel_world_size(self) -> int:
        """Slices of every expert."""
        return len(self._ranks(self._expert_tensor_axes()))

    def get_expert_tensor_parallel_rank(self) -> int:
        """Which slice of its experts this rank holds."""
        return self._place(self._expert_tensor_axes())

    def get_expert_tensor_and_model_parallel_group(self, check_initialized: bool = True) -> ProcessGroup | None:
        """All slices of all experts of a layer. Created when its ranks first ask, so all of them must."""
        return self._group_with_experts(self._expert_tensor_axes(), check_initialized)

    def get_expert_tensor_and_model_parallel_world_size(self) -> int:
        """Their number."""
        return len(self._with_experts(self._expert_tensor_axes()))

    def get_expert_tensor_and_model_parallel_rank(self) -> int:
        """This rank's place among them."""
        return self._with_experts(self._expert_tensor_axes()).index(self._grid.global_rank)

    def get_expert_tensor_model_pipeline_parallel_group(
        self, check_initialized: bool = True, with_egtp_remat: bool = False
    ) -> ProcessGroup | None:
        """The same of all stages. Created when its ranks first ask, so all of them must."""
        return self._group_with_experts((PIPE, *self._expert_tensor_axes()), check_initialized)

    def get_expert_data_parallel_group(
        self, check_initialized: bool = True, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
    ) -> ProcessGroup | None:
        """Replicas of this rank's experts; of its parameters without expert groups."""
        known = self._experts()
        return self._group(self._replica_axes(), check_initialized) if known is None else known.expert_data_group

    def get_expert_data_parallel_group_gloo(self, partial_expert_data_parallel: bool = False) -> ProcessGroup | None:
        """The same for tensors on the CPU."""
        return self._of_cpu(self.get_expert_data_parallel_group(), "get_expert_data_parallel_group_gloo")

    def get_expert_data_parallel_world_size(
        self, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
    ) -> int:
        """Their number."""
        return len(self._expert_replicas())

    def get_expert_data_parallel_rank(
        self, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
    ) -> int:
        """This rank's place among them."""
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

    # -- rematerialised weights: a grid has no axis for them -----------------------------------------------------

    def get_gtp_weight_remat_group(self, check_initialized: bool = True) -> ProcessGroup | None:
        """This rank alone."""
        return self._group((), check_initialized)

    def get_gtp_weight_remat_global_ranks(self, check_initialized: bool = True) -> list[int]:
        """This rank alone."""
        return self._ranks(())

    def get_gtp_weight_remat_world_size(self) -> int:
        """1."""
        return 1

    def get_gtp_weight_remat_rank(self) -> int:
        """0."""
        return 0

    def get_expert_gtp_weight_remat_group(self, check_initialized: bool = True) -> ProcessGroup | None:
        """This rank alone."""
        return self._group((), check_initialized)

    def get_expert_gtp_weight_remat_global_ranks(self, check_initialized: bool = True) -> list[int]:
        """This rank alone."""
        return self._ranks(())

    def get_expert_gtp_weight_remat_world_size(self) -> int:
        """1."""
        return 1

    def get_expert_gtp_weight_remat_rank(self) -> int:
        """0."""
        return 0

    # -- parts ---------------------------------------------------------------------------------------------------

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

    def _expert_tensor_axes(self) -> tuple[str, ...]:
        known = self._experts()
        return (MODEL,) if known is None or known.plan.expert_tensor_parallel else ()

    def _with_experts(self, axes: tuple[str, ...]) -> list[int]:
        """The ranks along some axes from every rank that shares this one's experts."""
        known, topology = self._experts(), self._grid.topology()
        own = [self._grid.grid_rank] if known is None else known.plan.expert_ranks(self._grid.grid_rank)
        span = axes_of(topology, axes)
        return sorted(self._grid.to_global({peer for rank in own for peer in topology.get_axis_ranks(span, rank)}))

    def _group_with_experts(self, axes: tuple[str, ...], check_initialized: bool) -> ProcessGroup | None:
        if not check_initialized and not self._grid.is_alive:
            return None
        known = self._experts()
        name = "no experts" if known is None else f"experts {known.plan.name}"
        return self._grid.create_group(RankGroup((name, *axes), tuple(self._with_experts(axes))))

    def _data_axes(self, with_context_parallel: bool) -> tuple[str, ...]:
        return self._replica_axes() if with_context_parallel else self._sample_axes()

    @staticmethod
    def _check_needless(name: str, reason: str, is_needed: bool) -> None:
        if is_needed:
            raise RuntimeError(f"{name}(): {reason}")
