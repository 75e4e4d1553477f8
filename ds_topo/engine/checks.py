"""Check options, inputs and models at the start of every engine that is built while a grid exists.

The checks refuse combinations that would train a wrong model, hang, or fail later without naming the cause. All ranks
of an engine compare their settings and models; if one rank fails, all raise. Several options of DeepSpeed's config
group neighboring ranks of the world and ignore the mpu. They are refused for a topology with another order of ranks.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import NoneType
from typing import Any
from weakref import WeakSet

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.runtime.config import DeepSpeedConfig, HybridEngineConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule as DeepSpeedPipelineModule
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.utils import groups as deepspeed_groups
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ds_topo.checkpoint.engine_facts import inner_optimizer
from ds_topo.classes import stock_class
from ds_topo.engine import autoparallel
from ds_topo.engine.experts import create_expert_groups
from ds_topo.engine.hybrid_sharding import check_sharding
from ds_topo.engine.one_layout import agreement, axes_of_engine, check_programs, in_use
from ds_topo.engine.shares import check_sampling
from ds_topo.errors import EngineOptionError, TopologyError, abridged, listed, warn
from ds_topo.mpu.differences import DualPipeVEngine, DualPipeVModule
from ds_topo.mpu.mpu import MpuGrid, registry
from ds_topo.process_groups.creation import ProcessGroup, gathered
from ds_topo.process_groups.process_grid import ProcessGrid, as_topology
from ds_topo.topology.axes import MODEL, PIPE, SEQ, mechanisms_of
from ds_topo.topology.process_topology import ProcessTopology
from ds_topo.topology.rank_tables import gradient_axes, partition_axes, zero_partition_ranks


def check_with_all_ranks(engine: DeepSpeedEngine, do_sanity_check: Callable[[], None]) -> None:
    """Check options and inputs before ``DeepSpeedEngine._do_sanity_check``, and compare the results of all ranks."""
    config, grid = engine._config, engine.mpu
    everyone = grid.get_ranks(axes_of_engine(grid, isinstance(engine, PipelineEngine)))
    with agreement(everyone, "the settings of the engine") as lines:
        try:
            autoparallel.complete_sizes(config, grid)
            check_engine(config, grid, isinstance(engine, PipelineEngine))
            check_engine_inputs(engine, grid)
            if isinstance(engine, DualPipeVEngine):
                check_dualpipe(engine, grid)
            do_sanity_check()
        except EngineOptionError as error:
            raise _with_mechanisms(error, config, grid) from None
        lines += _settings(engine)


def _with_mechanisms(error: EngineOptionError, config: DeepSpeedConfig, grid: MpuGrid) -> EngineOptionError:
    """Add to a message what uses each axis."""
    degrees = dict(zip(grid.topology().axes, grid.topology().dims, strict=True))
    uses = [f"{axis}={degrees[axis]}: {use}" for axis, use in mechanisms_of(config._param_dict, degrees).items()]
    return EngineOptionError(f"{error} ({', '.join(uses)})") if uses else error


def check_engine(config: DeepSpeedConfig, grid: MpuGrid, is_pipeline: bool = False) -> None:
    """Raise if an option of a ``DeepSpeedConfig`` would use other groups than the grid's.

    Raises:
        EngineOptionError: the message names the option, what DeepSpeed would do, and what to do instead.
    """
    unknown = check_top_level(config._param_dict)
    if unknown and dist.get_rank() == 0:
        warn(f"config keys {listed(unknown)} have no effect: neither DeepSpeed nor ds_topo reads them")
    check_sharding(config, grid)
    check_sampling(config, grid, is_pipeline)
    if config.zero_config.zero_quantized_gradients:
        check_exchange_between_all_ranks("zero_quantized_gradients", grid)
    if config.zero_config.zenflow is not None and config.zero_config.stage < 3:  # it broadcasts by numbers in the group
        check_exchange_between_all_ranks("zero_optimization.zenflow at stage 1 or 2", grid)
    if config.zero_config.zero_hpz_partition_size > 1:
        _check_second_partition(config.zero_config.zero_hpz_partition_size, grid)
    autoparallel.check(config, grid, is_pipeline)
    _check_device_mesh(grid)
    _check_long_sequence_training(grid, config)
    _check_hybrid_engine(config.hybrid_engine, grid)
    if config.hybrid_engine.enabled and config.tensor_parallel_config.autotp_size > 1:
        raise EngineOptionError(
            "hybrid_engine with tensor_parallel (AutoTP): both would slice the same layers. Leave tensor_parallel out, "
            "and give the hybrid engine a model of your own slices, with inference_tp_size the degree of 'model'"
        )
    # ZeRO 2 saves memory by reducing gradients in every micro-batch. A pipeline sums those of all micro-batches first,
    # so they are whole on every rank until the last backward. After it only the partition stays, at stage 1, too.
    stage = int(config.zero_config.stage)
    if is_pipeline and stage > 1:
        raise EngineOptionError(
            f"ZeRO stage {stage} in a pipeline: gradients are summed over its micro-batches before they are reduced, "
            "so every rank holds all of them until then, and stage 2 would hold as much as stage 1; use stage 1"
        )


def check_batch_sizes(config: Mapping[str, Any], grid: MpuGrid) -> None:
    """Refuse sizes of batches that contradict each other, or the number of replicas with samples of their own.

    Raises:
        EngineOptionError: the message says which axes count.
    """
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    batch, micro, steps = (config.get(name) for name in names)
    elastic = config.get("elasticity")
    is_elastic = isinstance(elastic, Mapping) and elastic.get("enabled")
    if (
        not isinstance(batch, int)
        or is_elastic
        or not all(isinstance(size, (int, NoneType)) for size in (micro, steps))
    ):
        return  # one of them follows from the others, or DeepSpeed names the value
    replicas = grid.get_data_parallel_world_size()
    parts = (micro or 1) * (steps or 1) * replicas
    if parts <= 0 or (batch % parts == 0 if None in (micro, steps) else batch == parts):
        return
    sizes = zip(names[1:], (micro, steps), strict=True)
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


TOPOLOGY_SECTION = "topology"
REDUCER_SECTION = "gradient_reducer"
_KEYS = frozenset(
    f"""
    {TOPOLOGY_SECTION} {REDUCER_SECTION}
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
        near = difflib.get_close_matches(text, (REDUCER_SECTION, TOPOLOGY_SECTION), n=1, cutoff=0.77)
        near = near or difflib.get_close_matches(text, _KEYS, n=1, cutoff=0.86)
        if near:
            raise EngineOptionError(
                f"config section {abridged(name)}: did you mean {near[0]!r}? DeepSpeed ignores keys that it does not "
                "know, so rename or remove it"
            )
    for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
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


_SECTIONS_WITHOUT_SWITCH = ("optimizer", "scheduler", TOPOLOGY_SECTION, REDUCER_SECTION)
_SWITCH = "enabled"


def _check_switches(path: str, section: object) -> None:
    """Refuse ``"enable": true`` and the like: older sections of DeepSpeed ignore it, and stay off."""
    for name, value in section.items() if isinstance(section, Mapping) else ():
        if name != _SWITCH and difflib.get_close_matches(str(name).lower(), [_SWITCH], n=1, cutoff=0.85):
            raise EngineOptionError(f'config section "{path}": {abridged(name)} switches nothing on: write "{_SWITCH}"')
        _check_switches(f"{path}.{name}", value)


def check_exchange_between_all_ranks(option: str, grid: MpuGrid) -> None:
    """Raise unless all ranks of the job hold the same parameters, between which ``option`` exchanges.

    Raises:
        EngineOptionError: the grid has ``pipe`` or ``model``, or is not the whole job.
    """
    if _splits_models(grid) or grid.world_size != dist.get_world_size():
        raise EngineOptionError(
            f"{option} exchanges between all ranks of the job, but ranks of {grid.topology().spec!r} hold different "
            "parameters: switch it off, or use data parallelism alone"
        )


def _splits_models(grid: MpuGrid) -> bool:
    return any(grid.get_axis_size(axis) > 1 for axis in (PIPE, MODEL))


def _check_second_partition(size: int, grid: MpuGrid) -> None:
    size = min(size, len(grid.dp_group))  # as DeepSpeed does
    wanted = list(grid.to_global(zero_partition_ranks(grid.topology(), size, grid.grid_rank)))
    group = deepspeed_groups._get_zero_param_intra_parallel_group()
    first = dist.get_rank() // size * size
    found = list(range(first, first + size)) if group is None else dist.get_process_group_ranks(group)
    if found != wanted:
        raise EngineOptionError(
            f"zero_hpz_partition_size {size}: ranks {found} would share a second partition, but in "
            f"{grid.topology().spec!r} they hold different parameters, or another size was asked for before: call "
            f"groups.create_zero_partition_groups(grid, {size}) before deepspeed.zero.Init and deepspeed.initialize"
        )


def _check_device_mesh(grid: MpuGrid) -> None:
    """Refuse a mesh of DeepSpeed, which joins neighboring ranks of the job, unless the grid joins the same ones."""
    mesh, option = deepspeed_groups.mesh_device, "mesh_param or sequence_parallel_size with data_parallel_size"
    if mesh is None:
        return
    size, found = mesh.size(1), grid.get_context_parallel_global_ranks()
    first = dist.get_rank() // size * size
    if found != list(range(first, first + size)):
        raise EngineOptionError(
            f"{option} {size} joins {size} neighboring ranks of the job, but along {SEQ!r} the topology "
            f"{grid.topology().spec!r} joins ranks {found}: name {SEQ}={size} as the last axis, or switch it off"
        )
    check_exchange_between_all_ranks(option, grid)


def _check_long_sequence_training(grid: MpuGrid, config: DeepSpeedConfig) -> None:
    """Refuse sequence groups of ``UlyssesSPAttentionHF.register_with_transformers`` that differ from the grid's.

    Its attention cannot be split by AutoTP, either.
    """
    state = sys.modules.get("deepspeed.runtime.sequence_parallel.parallel_state_sp")
    group = state._SEQUENCE_PARALLEL_GROUP if state is not None else None
    if group is None:
        return
    if config.tensor_parallel_config.autotp_size > 1:
        raise EngineOptionError(
            "UlyssesSPAttentionHF (ALST) with tensor_parallel (AutoTP): it needs all heads of the model on each rank "
            "(check 'query input tensor does not match the required shape' of UlyssesSPAttentionHF.forward), which "
            "AutoTP divides; use DistributedAttention in the model instead, or leave tensor_parallel out"
        )
    found = sorted(dist.get_process_group_ranks(group))
    expected = grid.get_context_parallel_global_ranks()
    if found != expected:
        raise EngineOptionError(
            f"sequence_parallel_size of UlyssesSPAttentionHF (ALST) joins ranks {found}, but along {SEQ!r} the "
            f"topology {grid.topology().spec!r} joins ranks {expected}: call ds_topo.use(grid) before "
            f"register_with_transformers(), name seq={len(found)} as the last axis, or do not register it"
        )


def _check_hybrid_engine(options: HybridEngineConfig, grid: MpuGrid) -> None:
    """Refuse a hybrid engine whose ``inference_tp_size`` is not the size of pipe x model, over which it slices."""
    size, slices = options.inference_tp_size, grid.get_model_parallel_world_size()
    if options.enabled and size > 1 and (size != slices or grid.pipe_parallel_size > 1):
        raise EngineOptionError(
            f"hybrid_engine.inference_tp_size {size} with {grid.topology().spec!r}: DeepSpeed would slice for {size} "
            f"ranks over a group of {slices}: give the topology a model axis of {size} and no pipe axis, or set "
            "inference_tp_size to 1"
        )


_readers: list[str] = []
"""One entry for each running call of ``ds_topo.initialize``, which reads both sections."""

grids: WeakSet[MpuGrid] = WeakSet()
"""The grids that exist; an engine without an mpu may lack one of them."""


def check_mpu(mpu: Any) -> None:
    """Refuse a value that cannot be an mpu, such as a topology, a spec, a mesh or a grid for torch alone.

    DeepSpeed would count one rank, because it takes the missing method for a job that is not distributed.

    Raises:
        TypeError: it has none of the methods that DeepSpeed calls first.
    """
    is_grid = isinstance(mpu, MpuGrid)
    is_layout = isinstance(mpu, (ProcessTopology, ProcessGrid, type)) or isinstance(getattr(mpu, "mpu", None), MpuGrid)
    questions = ("get_data_parallel_group", "get_data_parallel_world_size", "get_sequence_parallel_world_size")
    answers = any(callable(getattr(mpu, question, None)) for question in questions)
    if mpu is not None and not is_grid and (is_layout or not answers):
        raise TypeError(
            f"mpu={abridged(mpu)}: DeepSpeed needs a live grid, such as PipelineParallelGrid('data=2,model=2')"
        )


def check_is_module(model: Any) -> None:
    """Refuse a model of another kind.

    Raises:
        TypeError: not a ``torch.nn.Module``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={abridged(model)}: give a torch.nn.Module, or a PipelineModule")


def check_engine_without_grid(model: nn.Module, mpu: Any, config: DeepSpeedConfig) -> None:
    """Refuse an engine without mpu, or warn about it, while a grid exists whose ranks hold different parameters.

    Most likely its mpu was forgotten.

    Raises:
        TypeError: the mpu cannot be one.
        EngineOptionError: the config has a section of ds_topo, or the model has tensor-parallel parameters.
    """
    check_mpu(mpu)
    if mpu is not None:
        return
    if in_use:
        raise EngineOptionError(
            f"an engine without mpu while {in_use[-1].topology().spec!r} is in use: deepspeed.initialize was imported "
            "by name before ds_topo.use(grid); call it as deepspeed.initialize, or call use() before that import"
        )
    section = TOPOLOGY_SECTION if TOPOLOGY_SECTION in config._param_dict else REDUCER_SECTION
    if not _readers and (section == TOPOLOGY_SECTION or _wants_reducer(config)):
        raise EngineOptionError(
            f'config section "{section}" is ignored by deepspeed.initialize, which got no mpu: pass mpu=grid; '
            "ds_topo.initialize reads the section"
        )
    splitting = [grid for grid in grids if grid.is_alive and _splits_models(grid)]
    for grid in splitting:
        warn(
            f"deepspeed.initialize without mpu= while {grid.topology().spec!r} exists broadcasts the parameters of "
            f"the first rank to all ranks: pass mpu=grid ({grid.topology().spec!r}), or "
            "mpu=PipelineParallelGrid('data=-1') for a model that all ranks replicate"
        )
    for name, parameter in model.named_parameters() if splitting else ():
        if is_model_parallel_parameter(parameter):
            raise EngineOptionError(
                f"parameter {name!r} is a slice (tensor_model_parallel), but deepspeed.initialize got no mpu= and "
                "would broadcast the first rank's slice to all ranks: pass mpu=grid"
            )


@contextmanager
def reading_sections() -> Iterator[None]:
    """Allow the sections of the config while ``ds_topo.initialize`` reads them."""
    _readers.append(REDUCER_SECTION)
    try:
        yield
    finally:
        _readers.pop()


def check_engine_inputs(engine: DeepSpeedEngine, grid: MpuGrid) -> None:
    """Raise for sections of the config that the engine would ignore.

    Raises:
        TopologyError: the topology of the config differs from the grid's.
        EngineOptionError: ``deepspeed.initialize`` itself does not read the reducer's section.
    """
    if _wants_reducer(engine._config) and not _readers:
        raise EngineOptionError(
            f'config section "{REDUCER_SECTION}" is not read by deepspeed.initialize itself: call '
            "ds_topo.initialize, or call ds_topo.use(grid) first"
        )
    if _wants_reducer(engine._config):
        autoparallel.check_reducer(engine._config)
    section = engine._config._param_dict.get(TOPOLOGY_SECTION)
    if section is not None:
        wanted = as_topology(section, grid.world_size)  # or what verify has set
        if wanted != grid.topology():
            raise TopologyError(
                f'config section "{TOPOLOGY_SECTION}" is {wanted.spec!r}, but the mpu is {grid.topology().spec!r}: '
                "give only one of them, or make them equal"
            )


def _wants_reducer(config: DeepSpeedConfig) -> bool:
    section = config._param_dict.get(REDUCER_SECTION, False)
    return bool(section.get("enabled", True) if isinstance(section, Mapping) else section)


def check_dualpipe(engine: DeepSpeedEngine, grid: MpuGrid) -> None:
    """Refuse options that the DualPipeV schedule does not support, before anything is built.

    Raises:
        EngineOptionError: the message names the option and what to do.
    """
    needed, given = 2 * grid.get_axis_size(PIPE), engine._config.gradient_accumulation_steps
    if given < needed:
        raise EngineOptionError(
            f"gradient_accumulation_steps {given} with DualPipeV on {grid.topology().spec!r}: its schedule needs at "
            f"least 2 micro-batches for each stage; set gradient_accumulation_steps to {needed} or more, or use "
            "PipelineModule"
        )
    options = [name for name in ("pipe_partitioned", "grad_partitioned") if engine._config.pipeline[name]]
    if options and grid.get_axis_size(MODEL) > 1:
        raise EngineOptionError(
            f'config section "pipeline": {listed(options)} (true by default) with DualPipeV on '
            f"{grid.topology().spec!r}: slices would send parts of activations, which its schedule does not support; "
            'set "pipe_partitioned" and "grad_partitioned" to false'
        )


def check_model(engine: DeepSpeedEngine, model: nn.Module, grid: MpuGrid) -> None:
    """Raise for a model that does not fit the topology.

    Raises:
        EngineOptionError: a plain module would be on all stages of a pipeline, the optimizer has no parameter of it,
            gradients would be sparse with ZeRO, or Domino uses another grid's group.
    """
    stages = grid.get_axis_size(PIPE)
    if stages > 1 and not isinstance(engine, PipelineEngine) and not getattr(model, "is_pipeline_stage", False):
        raise EngineOptionError(
            f"a plain engine on {grid.topology().spec!r}: its {stages} stages would train {stages} separate models. "
            "Build a PipelineModule(layers, grid=grid), remove the axis 'pipe', or set "
            "model.is_pipeline_stage = True if your own program passes activations between stages"
        )
    optimizer = engine.client_optimizer
    if isinstance(optimizer, torch.optim.Optimizer):
        own = {id(parameter) for parameter in model.parameters()}
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if own and held and not any(id(parameter) in own for parameter in held):
            raise EngineOptionError(
                f"optimizer={type(optimizer).__name__} has no parameter of the model, which would not be trained: "
                "create it from model.parameters() of this model"
            )
    check_not_wrapped(model, grid)
    domino: Any = sys.modules.get("deepspeed.runtime.domino.async_linear")
    group = domino.TP_group if domino is not None else None  # the first model's, for the rest of the process
    if group in (None, grid.get_tensor_model_parallel_group()):
        return
    if any(isinstance(layer, domino.DominoAsyncColumnParallelLinear) for layer in model.modules()):
        raise EngineOptionError(
            f"DominoTransformer would sum over the group of the first model, not that of {grid.topology().spec!r}: "
            "set deepspeed.runtime.domino.async_linear.TP_group = None before the model is built"
        )


def check_sparse_layers(engine: DeepSpeedEngine, model: nn.Module) -> None:
    """Refuse layers with sparse gradients where DeepSpeed cannot reduce or clip them.

    Raises:
        EngineOptionError: the message names the layers and the options.
    """
    sparse = [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse and layer.weight.requires_grad
    ]
    needs_dense = {
        f"ZeRO stage {engine.zero_optimization_stage()}": engine.zero_optimization(),
        "bf16": engine.bfloat16_enabled(),
        "fp16": engine.fp16_enabled(),
        f"gradient_clipping {engine.gradient_clipping()}": engine.gradient_clipping() > 0,
    }
    if sparse and any(needs_dense.values()):
        raise EngineOptionError(
            f"{' and '.join(name for name, is_on in needs_dense.items() if is_on)} with layers {listed(sparse)}, whose "
            "gradients are sparse (sparse=True), which DeepSpeed can neither copy into flat buffers nor clip; build "
            "the layers with sparse=False, or use fp32, ZeRO stage 0 and gradient_clipping 0"
        )


def make_contiguous(model: nn.Module) -> None:
    """Give strided parameters contiguous memory, which DeepSpeed's broadcast needs; values stay.

    Raises:
        EngineOptionError: a strided parameter is a view of another one, from which it would be separated.
    """
    named = [(name, each) for name, each in model.named_parameters() if not _is_stored_otherwise(each)]
    strided = [(name, each) for name, each in named if not each.is_contiguous()]
    if not strided:
        return
    memory: dict[int, list[str]] = {}
    for name, parameter in named:
        memory.setdefault(parameter.untyped_storage().data_ptr(), []).append(name)
    for name, parameter in strided:
        others = [other for other in memory[parameter.untyped_storage().data_ptr()] if other != name]
        if others and not parameter.is_meta:
            raise EngineOptionError(
                f"parameter {name!r} is a strided view ({list(parameter.shape)}, strides {list(parameter.stride())}) "
                f"of the memory of {listed(others)}: DeepSpeed needs contiguous parameters, and a copy would train "
                "apart from the others. Use one parameter, and transpose it in forward()"
            )
        parameter.data = parameter.data.contiguous()


def _is_stored_otherwise(parameter: nn.Parameter) -> bool:
    """Tell whether a parameter is not plain memory: partitioned by ZeRO 3, sparse, or a wrapper such as a DTensor."""
    is_wrapper = hasattr(parameter, "__tensor_flatten__")
    return is_wrapper or hasattr(parameter, "ds_id") or parameter.layout is not torch.strided


def check_not_wrapped(model: nn.Module, grid: MpuGrid) -> None:
    """Refuse ``DistributedDataParallel`` over ranks that hold other parameters.

    Raises:
        EngineOptionError: its constructor has overwritten them, and it would average their gradients; names the ranks.
    """
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            joined = dist.get_process_group_ranks(module.process_group)
            others = sorted(set(joined) - set(grid.dp_group))
            if others:
                raise EngineOptionError(
                    f"DistributedDataParallel {name or 'around the model'} has given ranks {listed(sorted(joined))} "
                    f"the parameters of the first one, but in {grid.topology().spec!r} ranks {listed(others)} hold "
                    f"other ones than rank {grid.global_rank}: build the model anew and pass it without the wrapper, "
                    "because the engine averages gradients itself"
                )


_HOOK = "_ds_topo_direct_steps"
"""The attribute of an optimizer with the hook of its last engine."""


class DirectSteps:
    """Notice steps of an engine's optimizer that the program takes itself, without ``engine.step()``.

    Args:
        engine: an engine of a grid, whose ``check_weights`` switches the warning off.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._grid = engine.mpu
        self._is_of_engine = self._has_warned = False
        optimizer = inner_optimizer(engine)
        if isinstance(optimizer, torch.optim.Optimizer):
            hook = optimizer.register_step_pre_hook(self._before_step)
            former = vars(optimizer).get(_HOOK)
            if former is not None:  # of an engine that had this optimizer before
                former.remove()
            setattr(optimizer, _HOOK, hook)
            self._grid.on_destroy(hook.remove)

    @contextmanager
    def of_engine(self) -> Iterator[None]:
        """Take steps of the optimizer for the engine's inside the context."""
        self._is_of_engine = True
        try:
            yield
        finally:
            self._is_of_engine = False

    def _before_step(self, *_: object) -> None:
        if self._is_of_engine or self._has_warned or not self._grid.check_weights:
            return
        self._has_warned = True
        warn(
            "optimizer.step() was called without engine.step(): the engine counts no micro-batch, so with gradient "
            "accumulation it never reduces gradients, and its schedule and counters stay behind. Call engine.step() "
            "after every engine.backward(loss), and no step of the optimizer; set grid.check_weights = False if it is "
            "intended"
        )


def create_missing_expert_groups(engine: DeepSpeedEngine, model: nn.Module, grid: MpuGrid) -> None:
    """Create the expert groups that a model needs and its user has not created.

    All stages of a pipeline create them together. DeepSpeed creates them in the MoE layers, which hangs if a stage has
    no such layer.
    """
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    sizes = {(layer.ep_size, layer.enable_expert_tensor_parallelism) for layer in layers}
    if isinstance(engine, PipelineEngine) and grid.pipe_parallel_size > 1:
        sizes = set().union(*gathered(sizes, grid.get_pipe_parallel_group()))
    for size, sliced in sorted(sizes):
        known = registry.find(f"ep_size_{size}")
        if known is None or (isinstance(engine, PipelineEngine) and not known.grid.shares_groups_with(grid)):
            create_expert_groups(grid, size, sliced, engine._config.use_data_before_expert_parallel_)


def check_partitions(model: nn.Module, grid: MpuGrid, engine: DeepSpeedEngine) -> None:
    """Refuse parameters that ``deepspeed.zero.Init`` has partitioned over other ranks than ZeRO 3 does.

    It gives all of these ranks the values of the first one, which other slices or stages may not have.

    Raises:
        EngineOptionError: the message names a parameter, and both sets of ranks.
    """
    expected = grid.get_ranks(partition_axes(grid.topology()))
    right = [expected]
    if engine._config.tensor_parallel_config.autotp_size > 1:  # AutoTP splits what was whole on all ranks
        right.append(grid.get_ranks(axes_of_engine(grid, False)))
    known: dict[ProcessGroup, list[int]] = {}
    for name, parameter in model.named_parameters():
        group = getattr(parameter, "ds_process_group", None)
        if group is None or not getattr(parameter, "allreduce", True):  # experts have groups of their own
            continue
        if group not in known:
            known[group] = sorted(dist.get_process_group_ranks(group))
        if engine.zero_optimization_stage() < 3:
            raise EngineOptionError(
                f"zero.Init partitioned parameter {name!r} over ranks {listed(known[group])}, but the engine is at "
                f"ZeRO stage {engine.zero_optimization_stage()}, which needs whole parameters: use stage 3, or build "
                "the model without zero.Init"
            )
        if known[group] not in right:
            raise EngineOptionError(
                f"zero.Init partitioned parameter {name!r} over ranks {listed(known[group])}, all of which now have "
                f"the values of the first one, but ZeRO 3 partitions over {listed(expected)} with "
                f"{grid.topology().spec!r}: pass data_parallel_group=grid.get_partition_group() to zero.Init, or call "
                "ds_topo.use(grid) before it"
            )


def agree_on_model(engine: DeepSpeedEngine, model: nn.Module, grid: MpuGrid) -> None:
    """Check the model, and compare the parameters of replicas and the parallel state of layers.

    Collective over the engine's ranks.

    Raises:
        EngineOptionError: the model does not fit the topology.
        DisagreementError: replicas differ; the message names parameters, ranks and hosts. Or another rank failed.
        TopologyError: layers use a parallel state with another layout.
    """
    is_pipeline = isinstance(model, DeepSpeedPipelineModule)
    loss_stage = 0 if isinstance(model, DualPipeVModule) else grid.pipe_parallel_size - 1
    everyone = grid.get_ranks(axes_of_engine(grid, is_pipeline))
    with ExitStack() as agreements:
        if everyone != grid.dp_group:
            agreements.enter_context(agreement(everyone, "stages and slices"))
        subject = f"the parameters of replicas along {gradient_axes(grid.topology())}"
        lines = agreements.enter_context(agreement(grid.dp_group, subject))
        check_model(engine, model, grid)
        check_sparse_layers(engine, model)
        check_programs(model, grid)
        check_partitions(model, grid, engine)
        make_contiguous(model)
        for name, parameter in model.named_parameters():
            shape = list(getattr(parameter, "ds_shape", parameter.shape))
            frozen = "" if parameter.requires_grad else " frozen"
            lines.append(f"{name} {shape} {parameter.dtype}{frozen}")
        if is_pipeline and grid.stage_id == loss_stage:
            lines.append(f"loss function={'none' if model.loss_fn is None else 'given'}")


def _settings(engine: DeepSpeedEngine) -> list[str]:
    config = engine._config
    optimizer = type(engine.client_optimizer).__name__ if engine.client_optimizer else config.optimizer_name
    module = engine.module if hasattr(engine, "module") else None
    return [
        *(f"{name}={getattr(config, name)}" for name in _COMPARED_SETTINGS if hasattr(config, name)),
        f"optimizer={optimizer}",
        f"zero stage={config.zero_config.stage}",
        f"autotp_size={config.tensor_parallel_config.autotp_size}",
        f"autoep_size={config.expert_parallel_config.autoep_size}",
        f"engine={stock_class(engine).__name__}",
        f"correct norms={engine.mpu.correct_norms}",
        f"micro batches of={getattr(module, 'micro_batches', None)}",
        f"torch {torch.__version__}",
        f"deepspeed {deepspeed.__version__}",
        f"ds_topo {sys.modules['ds_topo'].__version__}",
    ]


_COMPARED_SETTINGS = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("gradient_predivide_factor", "prescale_gradients", "communication_data_type", "optimizer_params"),
    "scheduler_name",
)
"""Attributes of ``DeepSpeedConfig`` that must be equal on all ranks."""
