"""The options of a DeepSpeed config that assume ranks, in one table: :data:`OPTIONS`.

Several options join neighboring ranks of the world and ignore the mpu, reduce gradients by themselves, or need ranks
that a topology may not have. Each is a row, which says what uses it, along which axes, what it conflicts with and what
to do instead, and which field of a checkpoint's manifest records it. To add one, add a row, and each of its messages to
the cases of ``tests/engine/test_options.py``, which also compares them with ``examples/guides/combinations.md``.

The end of the file checks the keys and the batch sizes of a config.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from types import NoneType
from typing import Any

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.data_pipeline import constants as samplers
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.utils import groups as deepspeed_groups

from ds_topo.base.differences import validate_autoep_config
from ds_topo.base.supported import SEQUENCES_ON_CPU, SLICES_WITH_EXPERTS, require
from ds_topo.errors import EngineOptionError, abridged, listed, warn
from ds_topo.mpu import MpuGrid, has_shard
from ds_topo.topology.axes import DATA, EXPERT, MODEL, PIPE, SEQ, SHARD, whole_number
from ds_topo.topology.rank_tables import gradient_axes, zero_partition_ranks

SAVED_OPTIONS = ("round_robin_gradients", "parameter_alignment", "sub_group_size")
"""The options of ``zero_optimization`` that a manifest has: the fields of ``checkpoint.manifest.SavedOptions``."""


@dataclass(frozen=True)
class ConfigOnGrid:
    """The config of an engine, and the grid that the engine is for."""

    config: DeepSpeedConfig
    grid: MpuGrid
    is_pipeline: bool = False
    is_dualpipe: bool = False

    @property
    def spec(self) -> str:
        """The spec of the grid."""
        return self.grid.topology().spec

    @property
    def stage(self) -> int:
        """The stage of ZeRO."""
        return int(self.config.zero_config.stage)

    @property
    def slices(self) -> int:
        """The number of slices that AutoTP makes; 1 without it."""
        return max(1, int(self.config.tensor_parallel_config.autotp_size))  # 0 switches it off, too

    def degree(self, axis: str) -> int:
        """Return the degree of an axis, 1 if the grid does not have it."""
        return max(1, self.grid.topology().get_dim(axis))


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
    check: Callable[[ConfigOnGrid], Iterator[str]] | None = None
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


def splits_models(grid: MpuGrid) -> bool:
    """Tell whether ranks of a grid hold different parts of a model."""
    return any(grid.get_axis_size(axis) > 1 for axis in (PIPE, MODEL))


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


def _zero(case: ConfigOnGrid) -> Iterator[str]:
    # ZeRO 2 saves memory by reducing gradients in every micro-batch. A pipeline sums those of all micro-batches first,
    # so they are whole on every rank until the last backward. After it only the partition stays, at stage 1, too.
    if case.is_pipeline and case.stage > 1:
        yield (
            f"ZeRO stage {case.stage} in a pipeline: gradients are summed over its micro-batches before they are "
            "reduced, so every rank holds all of them until then, and stage 2 would hold as much as stage 1; use stage "
            "1"
        )


def _second_partition(case: ConfigOnGrid) -> Iterator[str]:
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


def _quantized_gradients(case: ConfigOnGrid) -> Iterator[str]:
    yield from different_parameters("zero_quantized_gradients", case.grid)


def _zenflow(case: ConfigOnGrid) -> Iterator[str]:
    if case.stage < 3:  # it broadcasts by numbers in the group
        yield from different_parameters("zero_optimization.zenflow at stage 1 or 2", case.grid)


def _elastic(case: ConfigOnGrid) -> Iterator[str]:
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


def _curriculum(case: ConfigOnGrid) -> Iterator[str]:
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


def _dynamic_batches(case: ConfigOnGrid) -> Iterator[str]:
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


def _autotp(case: ConfigOnGrid) -> Iterator[str]:
    yield from other_slices("tensor_parallel.autotp_size", case.slices, case.grid)


def passes_of(config: DeepSpeedConfig) -> set[str]:
    """Return the compiler passes that a config names."""
    return set(getattr(config.compile_config, "passes", None) or ())


def _pass_of_autotp(case: ConfigOnGrid) -> Iterator[str]:
    if others := sorted({"autosp", "z1", "z3"} & passes_of(case.config)):  # DeepSpeed refuses it only in compile()
        yield (
            f"compile.passes 'autotp' with {others}: DeepSpeed refuses this in DeepSpeedEngine.compile; "
            "leave one out. AutoTP works without its pass, too"
        )


def _autoep(case: ConfigOnGrid) -> Iterator[str]:
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


def _autosp(case: ConfigOnGrid) -> Iterator[str]:
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


def _mesh(case: ConfigOnGrid) -> Iterator[str]:
    name = "mesh_param or sequence_parallel_size with data_parallel_size"
    size, found = deepspeed_groups.mesh_device.size(1), case.grid.get_context_parallel_global_ranks()
    if found != _neighbors(size):
        yield (
            f"{name} {size} joins {size} neighboring ranks of the job, but along {SEQ!r} the topology {case.spec!r} "
            f"joins ranks {found}: name {SEQ}={size} as the last axis, or switch it off"
        )
    yield from different_parameters(name, case.grid)


def _long_sequence_training(case: ConfigOnGrid) -> Iterator[str]:
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


def _hybrid_engine(case: ConfigOnGrid) -> Iterator[str]:
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


def _micro_batches(case: ConfigOnGrid) -> Iterator[str]:
    needed, given = 2 * case.degree(PIPE), case.config.gradient_accumulation_steps
    if case.is_dualpipe and given < needed:
        yield (
            f"gradient_accumulation_steps {given} with DualPipeV on {case.spec!r}: its schedule needs at least 2 "
            f"micro-batches for each stage; set gradient_accumulation_steps to {needed} or more, or use PipelineModule"
        )


def _parts_of_activations(config: DeepSpeedConfig) -> list[str]:
    return [name for name in ("pipe_partitioned", "grad_partitioned") if config.pipeline[name]]


def _partitioned_pipeline(case: ConfigOnGrid) -> Iterator[str]:
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
        _quantized_gradients,
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
        _autotp,
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


def refusals(case: ConfigOnGrid) -> Iterator[str]:
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


def mechanisms_on(case: ConfigOnGrid) -> dict[str, str]:
    """Return the part of DeepSpeed that uses each axis of a degree above 1, if the config names one."""
    on = [option for option in OPTIONS if option.axes and option.is_on(case.config)]
    used = {axis: [option.mechanism for option in on if axis in option.axes] for axis in case.grid.topology().axes}
    return {axis: " and ".join(names) for axis, names in used.items() if names and case.degree(axis) > 1}


def check_config(case: ConfigOnGrid) -> None:
    """Refuse a config that an engine of a grid could not follow.

    Raises:
        EngineOptionError: the message names the option, what DeepSpeed would do, what to do instead, and what uses each
            axis.
    """
    unknown = check_top_level(case.config._param_dict)
    _refuse_unfilled(case.config._param_dict)
    refuse_elasticity(case.config._param_dict)
    if unknown and dist.get_rank() == 0:
        warn(f"config keys {listed(unknown)} have no effect: neither DeepSpeed nor ds_topo reads them")
    for message in refusals(case):
        uses = [f"{axis}={case.degree(axis)}: {names}" for axis, names in mechanisms_on(case).items()]
        raise EngineOptionError(f"{message} ({', '.join(uses)})" if uses else message)


# -- keys and sizes ---------------------------------------------------------------------------------------------------


TOPOLOGY_SECTION = "topology"
REDUCER_SECTION = "gradient_reducer"
REPLICAS_SECTION = "replicas"
_KEYS = frozenset(
    f"""
    {TOPOLOGY_SECTION} {REDUCER_SECTION} {REPLICAS_SECTION}
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation
    optimizer scheduler gradient_clipping prescale_gradients gradient_predivide_factor gradient_allreduce_op
    communication_data_type seq_parallel_communication_data_type sparse_gradients disable_allgather
    fp16 bf16 bfloat16 torch_autocast amp data_types zero_optimization zero_allow_untested_optimizer
    zero_force_ds_cpu_optimizer activation_checkpointing pipeline hybrid_engine use_data_before_expert_parallelism
    tensor_parallel expert_parallel sequence_parallel_size data_parallel_size inference
    compile compression_training weight_quantization quantize_training progressive_layer_drop eigenvalue
    sparse_attention data_efficiency curriculum_learning checkpoint datastates_ckpt nebula aio elasticity autotuning
    vocabulary_size
    comms_logger tensorboard wandb csv_monitor comet flops_profiler timers model_info allgather_size
    steps_per_print wall_clock_breakdown memory_breakdown dump_state disable_python_gc dataloader_drop_last log_level
    """.split()
)
"""The top-level keys of a config that DeepSpeed and ds_topo read."""


def wants_reducer(config: DeepSpeedConfig) -> bool:
    """Tell whether a config has a section that switches the reducer on."""
    section = config._param_dict.get(REDUCER_SECTION, False)
    return bool(section.get("enabled", True) if isinstance(section, Mapping) else section)


def check_top_level(config: Mapping[str, Any]) -> list[str]:
    """Check the keys and counts at the top level of a config; return the keys that nothing reads.

    Raises:
        EngineOptionError: a key is nearly one that is read, and DeepSpeed would ignore it in silence; a section has a
            misspelt switch; a key is in a section where nothing reads it; or a number of samples or micro-batches is
            not whole.
    """
    unknown = [str(name) for name in config if name not in _KEYS]
    for name in unknown:
        text = name.lower()
        near = difflib.get_close_matches(text, (REDUCER_SECTION, TOPOLOGY_SECTION, REPLICAS_SECTION), cutoff=0.77)
        near = near or difflib.get_close_matches(text, _KEYS, cutoff=0.86)
        if near:
            raise EngineOptionError(
                f"config section {abridged(name)}: did you mean {near[0]!r}? DeepSpeed ignores keys that it does not "
                "know, so rename or remove it"
            )
    for name in _SIZES:
        count = config.get(name, 1)
        if isinstance(count, bool) or (isinstance(count, float) and not count.is_integer()):
            raise EngineOptionError(f"config: {name} is {count}: give a whole number of samples or steps, at least 1")
    for name, section in config.items():
        if name not in _SECTIONS_WITHOUT_SWITCH:
            _check_switches(name, section)
    pipeline = config.get("pipeline")
    if isinstance(pipeline, Mapping) and TOPOLOGY_SECTION in pipeline:
        raise EngineOptionError(
            f'config section "pipeline" contains "{TOPOLOGY_SECTION}", where nothing reads it: move it to the top level'
        )
    if isinstance(pipeline, Mapping) and "schedule" in pipeline:
        raise EngineOptionError(
            f'config section "pipeline": "schedule" {abridged(pipeline["schedule"])} has no effect, because the class '
            "of the module has the schedule, and divides the layers before a config is read: build DualPipeVModule for "
            "DualPipeV, or PipelineModule for 1F1B, and remove the key"
        )
    return unknown


_SECTIONS_WITHOUT_SWITCH = ("optimizer", "scheduler", TOPOLOGY_SECTION, REDUCER_SECTION, REPLICAS_SECTION)
_SWITCH = "enabled"


def _check_switches(path: str, section: object) -> None:
    """Refuse ``"enable": true`` and the like: older sections of DeepSpeed ignore it, and stay off."""
    for name, value in section.items() if isinstance(section, Mapping) else ():
        if name != _SWITCH and difflib.get_close_matches(str(name).lower(), [_SWITCH], cutoff=0.85):
            raise EngineOptionError(f'config section "{path}": {abridged(name)} switches nothing on: write "{_SWITCH}"')
        _check_switches(f"{path}.{name}", value)


def _refuse_unfilled(config: Mapping[str, Any]) -> None:
    """Refuse ``"auto"`` and other text where DeepSpeed computes with numbers.

    Raises:
        EngineOptionError: the message names the key.
    """
    clipping = config.get("gradient_clipping", 0)
    unfilled = {} if isinstance(clipping, (int, float)) else {"gradient_clipping": clipping}
    for section in ("optimizer", "scheduler"):
        parameters = (config.get(section) or {}).get("params") or {}
        unfilled |= {f"{section}.params.{name}": value for name, value in parameters.items() if value == "auto"}
    for name, value in unfilled.items():
        raise EngineOptionError(f"config: {name} is {abridged(value)}: give a number{_AUTO * (value == 'auto')}")


def refuse_elasticity(config: Mapping[str, Any]) -> None:
    """Refuse DeepSpeed's section for elastic jobs on a grid, and say what serves them.

    DeepSpeed up to 0.19.7 chooses the samples of a step by it. Version 0.2 of the section divides the number of
    replicas, which an mpu gives, by the number of slices once more. DeepSpeed 0.19.8 has removed it.

    Raises:
        EngineOptionError: the section is switched on.
    """
    section = config.get("elasticity")
    if isinstance(section, Mapping) and section.get("enabled"):
        raise EngineOptionError(
            'config section "elasticity" on a grid: DeepSpeed 0.19.8 has removed it, and earlier releases do not count '
            "the replicas of a topology. Remove it, and give train_batch_size and train_micro_batch_size_per_gpu "
            "without gradient_accumulation_steps, which then follows from the replicas; config |= "
            "grid.batch_sizes(samples, most) also makes micro-batches smaller where that is needed"
        )


_SECTIONS = {
    "optimizer": '{"type": "AdamW", "params": {"lr": 0.001}}',
    "scheduler": '{"type": "WarmupLR", "params": {}}',
    "zero_optimization": '{"stage": 1}',
    **dict.fromkeys(("bf16", "bfloat16", "fp16"), '{"enabled": true}'),
}
"""Sections of a config that are often given as a single value, with an example of each."""
_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_AUTO = '; Trainer and accelerate replace "auto" themselves, deepspeed.initialize does not'


def check_sections_and_sizes(config: Mapping[str, Any], grid: MpuGrid) -> None:
    """Refuse sections and batch sizes on which DeepSpeed's constructor of a config fails.

    Raises:
        EngineOptionError: a section is no mapping; ZeRO has no such stage; two precisions are on; or batch sizes are
            missing, are no numbers, or contradict each other or the number of replicas with samples of their own. The
            message says which axes count.
    """
    refuse_elasticity(config)
    for name, example in _SECTIONS.items():
        section = config.get(name)
        is_switch = name == "zero_optimization" and isinstance(section, bool)
        if not (is_switch or isinstance(section, (Mapping, NoneType))):
            raise EngineOptionError(
                f'config section "{name}" is {abridged(section)}: give a mapping, such as {example}'
            )
    zero = config.get("zero_optimization")
    if isinstance(zero, Mapping) and str(zero.get("stage", 0)) not in ("0", "1", "2", "3", "auto"):
        raise EngineOptionError(
            f'config section "zero_optimization": "stage" is {abridged(zero["stage"])}: ZeRO has the stages 0, 1, 2, 3'
        )
    precisions = [name for name in ("fp16", "bf16", "bfloat16") if (config.get(name) or {}).get("enabled") is True]
    if "fp16" in precisions and len(precisions) > 1:
        raise EngineOptionError(f"config sections {precisions} are both enabled: choose one of them")
    for name in _SIZES:
        value = config.get(name)
        if value is not None and (whole_number(value) or 0) < 1:
            raise EngineOptionError(
                f"config: {name} is {abridged(value)}: give a whole number of samples or steps, at least 1"
                f"{_AUTO * (value == 'auto')}"
            )
    if config.get(_SIZES[0]) is None and config.get(_SIZES[1]) is None:
        raise EngineOptionError(
            'config: neither "train_batch_size" (the samples of a step, over all replicas) nor '
            '"train_micro_batch_size_per_gpu" (those of a rank in a forward pass) is given: give one of them'
        )
    _check_batch_sizes(grid, *(None if config.get(name) is None else whole_number(config[name]) for name in _SIZES))


def _check_batch_sizes(grid: MpuGrid, batch: int | None, micro: int | None, steps: int | None) -> None:
    if batch is None:
        return  # it follows from the others
    replicas = grid.get_data_parallel_world_size()
    parts = (micro or 1) * (steps or 1) * replicas
    if batch % parts == 0 if None in (micro, steps) else batch == parts:
        return
    sizes = zip(_SIZES[1:], (micro, steps), strict=True)
    factors = " x ".join(f"{size} ({name})" for name, size in sizes if size is not None)
    counted = [
        axis for axis in gradient_axes(grid.topology()) if axis != SEQ or replicas > grid.get_sample_world_size()
    ]
    spec, axes = grid.topology().spec, [f"{axis}={grid.get_axis_size(axis)}" for axis in counted]
    valid = f"{parts}, or omit it" if None not in (micro, steps) else f"a multiple of {parts}"
    raise EngineOptionError(
        f"train_batch_size {batch} is not {'a multiple of ' if None in (micro, steps) else ''}{factors}"
        f"{' x ' if factors else ''}{replicas} (replicas with samples of their own). In {spec!r} they are along "
        f"{listed(axes) if axes else 'no axis'}; ranks along other axes read the same samples. Set train_batch_size to "
        f"{valid}"
    )
