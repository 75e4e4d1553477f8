"""The options of a DeepSpeed config that assume ranks, in one table: :data:`OPTIONS`.

Several options join neighboring ranks of the world and ignore the mpu, reduce gradients by themselves, or need ranks
that a topology may not have. Each is a row, which says what uses it, along which axes, what it conflicts with and what
to do instead, and which field of a checkpoint's manifest records it. To add one, add a row, and each of its messages to
the cases of ``tests/engine/test_options.py``, which also compares them with ``examples/guides/combinations.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.data_pipeline import constants as samplers
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.utils import groups as deepspeed_groups

from ds_topo.base.patches import validate_autoep_config
from ds_topo.base.supported import SEQUENCES_ON_CPU, SLICES_WITH_EXPERTS, require
from ds_topo.engine.config import REDUCER_SECTION, Case, passes_of, splits_models, wants_reducer
from ds_topo.engine.on_grid import EngineOnGrid
from ds_topo.errors import EngineOptionError, listed
from ds_topo.mpu import MpuGrid, has_shard
from ds_topo.topology.axes import DATA, EXPERT, MODEL, PIPE, SEQ, SHARD
from ds_topo.topology.rank_tables import zero_partition_ranks

SAVED_OPTIONS = ("round_robin_gradients", "parameter_alignment", "sub_group_size")
"""The options of ``zero_optimization`` that a manifest has: the fields of ``checkpoint.manifest.SavedOptions``."""


@dataclass(frozen=True)
class Option:
    """A row of the table."""

    key: str
    """The key in the config, with its value if that matters."""
    is_on: Callable[[DeepSpeedConfig], object]
    mechanism: str = ""
    """The name of what uses it, as in ``model=2: AutoTP``."""
    axes: tuple[str, ...] = ()
    """The axes that this mechanism uses."""
    check: Callable[[Case], Iterator[str]] | None = None
    """Yields a message for each combination that is refused: what was given, why it cannot work, and what to do."""
    ignores_shard: bool = False
    """True if it has groups or a reduction of its own, which ignore the axis ``shard``."""
    with_reducer: str = ""
    """Why a GradientReducer refuses it, and what to do; empty if it does not."""
    manifest_field: str = ""
    """The field of a checkpoint's manifest that has it, because the files depend on it; a test compares them."""

    @property
    def title(self) -> str:
        """The key and the mechanism."""
        return f"{self.key} ({self.mechanism})" if self.mechanism else self.key


# -- checks -----------------------------------------------------------------------------------------------------------


def _neighbors(size: int) -> list[int]:
    """Return the ranks that DeepSpeed joins with this one where it joins neighbors."""
    first = dist.get_rank() // size * size
    return list(range(first, first + size))


def different_parameters(name: str, grid: MpuGrid) -> Iterator[str]:
    """Refuse an option that exchanges between all ranks, unless they hold the same parameters."""
    if splits_models(grid) or grid.world_size != dist.get_world_size():
        yield (
            f"{name} exchanges between all ranks of the job, but ranks of {grid.topology().spec!r} hold different "
            "parameters: switch it off, or use data parallelism alone"
        )


def _zero_has(name: str, config: Any) -> bool:
    return bool(getattr(config.zero_config, name, False))


def _is_at_stage(stage: int, config: DeepSpeedConfig) -> bool:
    return int(config.zero_config.stage) == stage


def _zero(case: Case) -> Iterator[str]:
    # ZeRO 2 saves memory by reducing gradients in every micro-batch. A pipeline sums those of all micro-batches first,
    # so they are whole on every rank until the last backward. After it only the partition stays, at stage 1, too.
    if case.is_pipeline and case.stage > 1:
        yield (
            f"ZeRO stage {case.stage} in a pipeline: gradients are summed over its micro-batches before they are "
            "reduced, so every rank holds all of them until then, and stage 2 would hold as much as stage 1; use stage "
            "1"
        )


def _second_partition(case: Case) -> Iterator[str]:
    grid = case.grid
    size = min(case.config.zero_config.zero_hpz_partition_size, len(grid.dp_group))  # as DeepSpeed does
    wanted = list(grid.to_global(zero_partition_ranks(grid.topology(), size, grid.grid_rank)))
    group = deepspeed_groups._ZERO_PARAM_INTRA_PARALLEL_GROUP
    found = _neighbors(size) if group is None else dist.get_process_group_ranks(group)
    if found != wanted:
        yield (
            f"zero_hpz_partition_size {size}: ranks {found} would share a second partition, but in {case.spec!r} they "
            "hold different parameters, or another size was asked for before: call "
            f"groups.create_zero_partition_groups(grid, {size}) before deepspeed.zero.Init and deepspeed.initialize"
        )


def _zenflow(case: Case) -> Iterator[str]:
    if case.stage < 3:  # it broadcasts by numbers in the group
        yield from different_parameters("zero_optimization.zenflow at stage 1 or 2", case.grid)


def _elastic(case: Case) -> Iterator[str]:
    if case.stage in (1, 2):  # DeepSpeed itself refuses it at stage 3
        yield (
            f"zero_optimization.elastic_checkpoint at stage {case.stage}: DeepSpeed saves optimizer states in a form "
            "that it cannot load, at the same degrees either. Remove it: on a grid, checkpoints load at any degrees"
        )


def _offloads(config: DeepSpeedConfig) -> bool:
    options = config.zero_config.offload_optimizer
    return options is not None and str(getattr(options.device, "value", "")) != "none"


def _is_deepcompile(config: DeepSpeedConfig) -> bool:
    return bool(getattr(config.compile_config, "deepcompile", False))


_SAMPLING = 'config section "data_efficiency": "data_sampling" with'


def _curriculum(case: Case) -> Iterator[str]:
    is_without_first = not case.is_pipeline and case.degree(PIPE) > 1
    if is_without_first or case.grid.to_global([0]) != (0,):
        yield (
            f'{_SAMPLING} "curriculum_learning" on {case.spec!r}: rank 0 of the job chooses all samples, but some '
            "engines do not have this rank: use grid.data_loader(dataset), or a PipelineModule on all ranks"
        )


def has_dynamic_batches(config: DeepSpeedConfig) -> bool:
    """Tell whether DeepSpeed makes batches of variable size."""
    sampling = config.data_efficiency_config[samplers.DATA_SAMPLING]
    return bool(sampling[samplers.DYNAMIC_BATCHING][samplers.DYNAMIC_BATCHING_ENABLED])


def _has_curriculum(config: DeepSpeedConfig) -> bool:
    sampling = config.data_efficiency_config[samplers.DATA_SAMPLING]
    return bool(sampling[samplers.CURRICULUM_LEARNING][samplers.CURRICULUM_LEARNING_ENABLED])


def _dynamic_batches(case: Case) -> Iterator[str]:
    if case.degree(SEQ) > 1 and case.is_pipeline:
        yield (
            f'{_SAMPLING} "dynamic_batching" in a pipeline on {case.spec!r}: the batch size of a pipeline counts peers '
            f"along {SEQ!r}, so batches and learning rates would not fit each other: use another axis, or switch it off"
        )
    if case.degree(SEQ) > 1 and _is_deepcompile(case.config):
        yield (
            f'{_SAMPLING} "dynamic_batching" and compile.deepcompile on {case.spec!r}: both use the data parallel '
            f"group, but DeepCompile needs the ranks along {SEQ!r} in it, and dynamic batching needs a group without "
            "them: switch one of them off"
        )


def other_slices(name: str, size: int, grid: MpuGrid) -> Iterator[str]:
    """Refuse a number of slices that is not the degree of ``model``."""
    degree, spec = grid.get_axis_size(MODEL), grid.topology().spec
    if size != degree:
        here, remedy = "no axis 'model'", f"remove {name}"
        if degree > 1:
            here, remedy = f"model={degree}", f"set {name} to {degree}"
        yield (
            f"{name} {size} (AutoTP), but {spec!r} has {here}, along which AutoTP splits a model: {remedy}, or create "
            f"the grid with model={size}"
        )


def _pass_of_autotp(case: Case) -> Iterator[str]:
    if others := sorted({"autosp", "z1", "z3"} & passes_of(case.config)):  # DeepSpeed refuses it only in compile()
        yield (
            f"compile.passes 'autotp' with {others}: DeepSpeed refuses this in DeepSpeedEngine.compile; "
            "leave one out. AutoTP works without its pass, too"
        )


def _autoep(case: Case) -> Iterator[str]:
    config, zero, sequences = case.config, case.config.zero_config, case.degree(SEQ)
    start = f"expert_parallel (AutoEP) on {case.spec!r}:"
    if case.degree(PIPE) > 1:
        yield (
            f"{start} it finds MoE layers by their names in a model of Hugging Face, which a PipelineModule does not "
            "have. Use deepspeed.moe.layer.MoE in the layers, or a grid without 'pipe'"
        )
    if case.grid.world_size != dist.get_world_size():
        yield f"{start} it needs all ranks of the job: create the grid of all of them"
    if case.degree(MODEL) != case.slices:
        yield (
            f"{start} its layers can share an axis 'model' with AutoTP only, which DeepSpeed's "
            'bwc_tensor_model_parallel_world_size requires. Add a section "tensor_parallel": {} if AutoTP shall '
            "split the model, or use deepspeed.moe.layer.MoE in a model that is split already"
        )
    try:
        validate_autoep_config(
            config.expert_parallel_config,
            case.grid.world_size,
            1,
            case.slices,
            sequences,
            zero_stage=case.stage,
            deepcompile_enabled=_is_deepcompile(config),
            tp_preset_model=config.tensor_parallel_config.preset_model,
            use_data_before_expert_parallel=config.use_data_before_expert_parallel_,
            zero_offload_optimizer=zero.offload_optimizer is not None,
            zero_offload_param=zero.offload_param is not None,
        )
    except ValueError as error:
        yield f"{start} {error} (DeepSpeed raises this in validate_autoep_config)"
    of_zero_3 = {
        f"an axis 'seq' of {sequences}": sequences > 1,
        "zero_quantized_gradients": zero.zero_quantized_gradients,
        "zero_hpz_partition_size": zero.zero_hpz_partition_size > 1,
    }
    if case.stage == 3 and (given := [name for name, is_given in of_zero_3.items() if is_given]):
        yield (
            f"{start} ZeRO stage 3 with {given[0]}, which DeepSpeed refuses in _validate_zero3_moe_compatibility. Use "
            "stage 1 or 2"
        )
    if case.slices > 1:
        require(SLICES_WITH_EXPERTS)


def _autosp(case: Case) -> Iterator[str]:
    size = case.degree(SEQ)
    given = case.config._param_dict.get("sequence_parallel_size", size)
    if given != size:
        yield (
            f"sequence_parallel_size {given} (AutoSP), but {case.spec!r} has seq={size}: name seq={given} in the "
            "topology, or leave sequence_parallel_size out"
        )
    if case.is_pipeline:
        yield (
            "compile.passes 'autosp' (AutoSP) with a PipelineModule: DeepSpeed compiles the layers of a pipeline one "
            "by one and would not split sequences; use a model without a pipeline, or leave the pass out"
        )
    if case.slices > 1:
        yield (
            "compile.passes 'autosp' (AutoSP) with tensor_parallel (AutoTP): AutoSP compiles the model as one graph "
            "(fullgraph of get_autosp_backend), which the layers of AutoTP break, because they communicate; use "
            "DistributedAttention, which works with AutoTP, or slices of your own"
        )
    if size > 1 and case.stage > 1:
        yield (
            f"compile.passes 'autosp' (AutoSP) at ZeRO stage {case.stage}: DeepSpeed would compile without splitting "
            "sequences; use stage 0 or 1, or DistributedAttention or UlyssesSPAttentionHF, which work at every stage"
        )
    if get_accelerator().device_name() == "cpu":
        require(SEQUENCES_ON_CPU)


def _mesh(case: Case) -> Iterator[str]:
    name = "mesh_param or sequence_parallel_size with data_parallel_size"
    size, found = deepspeed_groups.mesh_device.size(1), case.grid.get_context_parallel_global_ranks()
    if found != _neighbors(size):
        yield (
            f"{name} {size} joins {size} neighboring ranks of the job, but along {SEQ!r} the topology {case.spec!r} "
            f"joins ranks {found}: name {SEQ}={size} as the last axis, or switch it off"
        )
    yield from different_parameters(name, case.grid)


def _long_sequence_training(case: Case) -> Iterator[str]:
    if case.slices > 1:
        yield (
            "UlyssesSPAttentionHF (ALST) with tensor_parallel (AutoTP), which splits the heads: its forward() needs "
            "all heads of the model on each rank ('query input tensor does not match the required shape'). Use "
            "DistributedAttention in the model instead, or leave tensor_parallel out"
        )
    found = sorted(dist.get_process_group_ranks(parallel_state_sp._SEQUENCE_PARALLEL_GROUP))
    expected = case.grid.get_context_parallel_global_ranks()
    if found != expected:
        yield (
            f"sequence_parallel_size of UlyssesSPAttentionHF (ALST) joins ranks {found}, but along {SEQ!r} the "
            f"topology {case.spec!r} joins ranks {expected}: call ds_topo.use(grid) before "
            f"register_with_transformers(), name seq={len(found)} as the last axis, or do not register it"
        )


def _hybrid_engine(case: Case) -> Iterator[str]:
    size, slices = case.config.hybrid_engine.inference_tp_size, case.grid.get_model_parallel_world_size()
    if size > 1 and (size != slices or case.degree(PIPE) > 1):
        yield (
            f"hybrid_engine.inference_tp_size {size} with {case.spec!r}: DeepSpeed would slice for {size} ranks over a "
            f"group of {slices}: give the topology a model axis of {size} and no pipe axis, or set inference_tp_size "
            "to 1"
        )
    if case.slices > 1:
        yield (
            "hybrid_engine with tensor_parallel (AutoTP): both would slice the same layers. Leave tensor_parallel out, "
            "and give the hybrid engine a model of your own slices, with inference_tp_size the degree of 'model'"
        )


def _micro_batches(case: Case) -> Iterator[str]:
    needed, given = 2 * case.degree(PIPE), case.config.gradient_accumulation_steps
    if case.is_dualpipe and given < needed:
        yield (
            f"gradient_accumulation_steps {given} with DualPipeV on {case.spec!r}: its schedule needs at least 2 "
            f"micro-batches for each stage; set gradient_accumulation_steps to {needed} or more, or use PipelineModule"
        )


def _parts_of_activations(config: DeepSpeedConfig) -> list[str]:
    return [name for name in ("pipe_partitioned", "grad_partitioned") if config.pipeline[name]]


def _partitioned_pipeline(case: Case) -> Iterator[str]:
    if case.is_dualpipe and case.degree(MODEL) > 1:
        yield (
            f'config section "pipeline": {listed(_parts_of_activations(case.config))} (true by default) with DualPipeV '
            f"on {case.spec!r}: slices would send parts of activations, which its schedule does not support; set "
            '"pipe_partitioned" and "grad_partitioned" to false'
        )


# -- the table --------------------------------------------------------------------------------------------------------


_STAGE_3 = (
    "ZeRO stage 3 partitions parameters, too, and reduces gradients as it gathers those: keep its own overlap "
    '("overlap_comm": true), or use stage 0, 1 or 2'
)
_OFFLOADED = "an offloaded optimizer (offload_optimizer, zenflow) moves gradients by itself: switch offload off"
OPTIONS: tuple[Option, ...] = (
    *(
        Option(
            f"zero_optimization.stage: {stage}",
            partial(_is_at_stage, stage),
            f"ZeRO {stage}",
            (SHARD,),
            _zero,
            with_reducer=_STAGE_3 if stage == 3 else "",
            manifest_field="layout.zero_stage",
        )
        for stage in (1, 2, 3)
    ),
    Option(
        "zero_optimization.zero_hpz_partition_size",
        lambda config: config.zero_config.zero_hpz_partition_size > 1,
        "hpZ",
        (DATA,),
        _second_partition,
        ignores_shard=True,
    ),
    Option(
        "zero_optimization.mics_shard_size",  # DeepSpeed 0.19.8 refuses it itself
        lambda config: getattr(config.zero_config, "mics_shard_size", -1) > 0,
        "MiCS",
        (DATA,),
        ignores_shard=True,
    ),
    Option(
        "zero_optimization.zero_quantized_gradients",
        lambda config: config.zero_config.zero_quantized_gradients,
        "qgZ",
        (DATA,),
        lambda case: different_parameters("zero_quantized_gradients", case.grid),
        ignores_shard=True,
    ),
    Option(
        "zero_optimization.zenflow",
        lambda config: config.zero_config.zenflow is not None,
        "ZenFlow",
        (DATA,),
        _zenflow,
        ignores_shard=True,
        with_reducer=_OFFLOADED,
    ),
    Option("zero_optimization.offload_optimizer", _offloads, with_reducer=_OFFLOADED),
    Option(
        "zero_optimization.offload_optimizer.super_offload",
        lambda config: _offloads(config) and getattr(config.zero_config.offload_optimizer, "super_offload", False),
        "SuperOffload",
        ignores_shard=True,
    ),
    Option("zero_optimization.elastic_checkpoint", attrgetter("zero_config.elastic_checkpoint"), check=_elastic),
    *(
        Option(f"zero_optimization.{name}", partial(_zero_has, name), manifest_field=f"structure.options.{name}")
        for name in SAVED_OPTIONS  # DeepSpeed 0.19.6 lacks parameter_alignment
    ),
    Option(
        "managed_gradient_accumulation: false",
        lambda config: not getattr(config, "managed_gradient_accumulation", True),
        ignores_shard=True,
        with_reducer="with managed_gradient_accumulation=false the last micro-batch is known only in step(), when "
        "backward is over: let DeepSpeed manage it",
    ),
    Option("data_efficiency.data_sampling.curriculum_learning", _has_curriculum, check=_curriculum),
    Option("data_efficiency.data_sampling.dynamic_batching", has_dynamic_batches, check=_dynamic_batches),
    Option(
        "tensor_parallel",
        lambda config: config.tensor_parallel_config.autotp_size > 1,
        "AutoTP",
        (MODEL,),
        lambda case: other_slices("tensor_parallel.autotp_size", case.slices, case.grid),
        manifest_field="structure.splits",
    ),
    Option("compile.passes: autotp", lambda config: "autotp" in passes_of(config), check=_pass_of_autotp),
    Option(
        "expert_parallel",
        lambda config: config.expert_parallel_config.enabled,
        "AutoEP",
        (EXPERT,),
        _autoep,
        ignores_shard=True,
        manifest_field="layout.experts",
    ),
    Option(
        "expert_parallel with tensor_parallel",
        lambda config: config.expert_parallel_config.enabled and config.tensor_parallel_config.autotp_size > 1,
        with_reducer="with AutoEP and AutoTP together, DeepSpeed corrects gradients of slices in its own reduction, "
        "which the reducer replaces: leave out the reducer, expert_parallel or tensor_parallel",
    ),
    Option("compile.passes: autosp", lambda config: "autosp" in passes_of(config), "AutoSP", (SEQ,), _autosp),
    Option("compile.deepcompile", _is_deepcompile, "DeepCompile", ignores_shard=True),
    Option(
        "sequence_parallel_size with data_parallel_size",
        lambda config: deepspeed_groups.mesh_device is not None,
        "a mesh of DeepSpeed",
        (SEQ,),
        _mesh,
    ),
    Option(
        "sequence_parallel_size of UlyssesSPAttentionHF",
        lambda config: parallel_state_sp._SEQUENCE_PARALLEL_GROUP is not None,
        "ALST",
        (SEQ,),
        _long_sequence_training,
    ),
    Option("hybrid_engine", lambda config: config.hybrid_engine.enabled, "hybrid engine", (MODEL,), _hybrid_engine),
    Option("gradient_accumulation_steps", lambda config: True, check=_micro_batches),
    Option("pipeline.pipe_partitioned", _parts_of_activations, check=_partitioned_pipeline),
)


# -- readers of the table ---------------------------------------------------------------------------------------------


def refusals(case: Case) -> Iterator[str]:
    """Yield a message for each combination that is refused."""
    on = [option for option in OPTIONS if option.is_on(case.config)]
    ignoring = [option.title for option in on if option.ignores_shard]
    if ignoring and has_shard(case.grid):
        yield (
            f"{listed(ignoring)} with {case.spec!r}: the option has groups or a reduction of its own, which ignore the "
            f"axis {SHARD!r}: switch it off, or name that axis {DATA!r}"
        )
    for option in on:
        if option.check is not None:
            yield from option.check(case)
    if wants_reducer(case.config) and (reason := refusal_of_reducer(case.config)):
        yield f'config section "{REDUCER_SECTION}": {reason}'


def refusal_of_reducer(config: DeepSpeedConfig) -> str | None:
    """Return the reason why no GradientReducer works with a config, and what to do; None if one can be attached."""
    return next((option.with_reducer for option in OPTIONS if option.with_reducer and option.is_on(config)), None)


def mechanisms_on(case: Case) -> dict[str, str]:
    """Return the part of DeepSpeed that uses each axis of a degree above 1, if the config names one."""
    on = [option for option in OPTIONS if option.axes and option.is_on(case.config)]
    used = {axis: [option.mechanism for option in on if axis in option.axes] for axis in case.grid.topology().axes}
    return {axis: " and ".join(names) for axis, names in used.items() if names and case.degree(axis) > 1}


class OptionsOfConfig(EngineOnGrid):
    """An engine whose config may have an option that assumes ranks."""

    @classmethod
    def complete_config(cls, case: Case) -> None:
        """Refuse an option that an engine of the grid could not follow."""
        super().complete_config(case)
        for message in refusals(case):
            uses = [f"{axis}={case.degree(axis)}: {names}" for axis, names in mechanisms_on(case).items()]
            raise EngineOptionError(f"{message} ({', '.join(uses)})" if uses else message)
