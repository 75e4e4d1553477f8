"""Check inputs and models at the start of every engine that is built while a grid exists.

The checks refuse combinations that would train a wrong model, hang, or fail later without naming the cause. All ranks
of an engine compare their settings and models; if one rank fails, all raise. Options of the config are checked by
:mod:`ds_topo.engine.config_options`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import cache
from itertools import groupby
from typing import Any
from weakref import WeakSet

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS, DeepSpeedConfig
from deepspeed.runtime.domino import async_linear as domino
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.module import PipelineModule as DeepSpeedPipelineModule
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.sequence.layer import DistributedAttention
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ds_topo.base.classes import stock_class
from ds_topo.base.ledger import always
from ds_topo.base.marks import PLACEHOLDERS
from ds_topo.base.torch_names import DESCRIPTION, describe
from ds_topo.engine.config import (
    REDUCER_SECTION,
    REPLICAS_SECTION,
    TOPOLOGY_SECTION,
    Case,
    check_config,
    splits_models,
    wants_reducer,
)
from ds_topo.engine.current_mpu import agreement, axes_of_engine, in_use
from ds_topo.engine.on_grid import EngineOnGrid
from ds_topo.errors import EngineOptionError, TopologyError, abridged, listed, warn
from ds_topo.mpu import MpuGrid
from ds_topo.process_groups.process_grid import ProcessGrid, as_topology
from ds_topo.topology.axes import MODEL, PIPE
from ds_topo.topology.process_topology import ProcessTopology
from ds_topo.topology.rank_tables import gradient_axes, partition_axes, sample_axes


class CheckedModel(EngineOnGrid):
    """An engine whose model and optimizer its ranks compare."""

    def _configure_distributed_model(self, model: Any) -> None:
        """Compare the models of replicas first.

        DeepSpeed broadcasts parameters here, which hides replicas that were built differently.
        """
        agree_on_model(self, model, self.mpu)
        super()._configure_distributed_model(model)
        if self.mpu.get_axis_size(MODEL) > 1:
            from ds_topo.engine.replica_comparison import compare_slices  # which others do not need

            compare_slices(self, model)

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:
        """Compare an optimizer that a function builds."""
        if client_optimizer is not None and not hasattr(client_optimizer, "param_groups"):
            with agreement(self.mpu.dp_group, _IN_ONE_ORDER) as lines:
                built = client_optimizer(model_parameters)
                lines += _lines_of_groups(self.module, built.param_groups, getattr(built, "defaults", ()))
            if isinstance(built, torch.optim.Optimizer):
                built.param_groups[:] = in_one_order(built.param_groups)
            client_optimizer = always(built)
        super()._configure_optimizer(client_optimizer, model_parameters)


def check_with_all_ranks(
    engine: DeepSpeedEngine, case: Case, mixins: Mapping[str, type[EngineOnGrid]], given: Mapping[str, Any]
) -> None:
    """Check options before an engine is built, and compare the results of all ranks."""
    optimizer, config, grid = given.get("optimizer"), case.config, case.grid
    everyone = grid.get_ranks(axes_of_engine(grid, case.is_pipeline))
    with agreement(everyone, "the settings of the engine") as lines:
        check_config(case)
        for mixin in mixins.values():
            mixin.complete_config(case)
        check_arguments(given, config)
        check_sections(config, grid)
        lines += (f"{name}={getattr(config, name)}" for name in _COMPARED_SETTINGS if hasattr(config, name))
        lines += [
            f"optimizer={type(optimizer).__name__ if optimizer else config.optimizer_name}",
            f"zero stage={config.zero_config.stage}",
            f"autotp_size={config.tensor_parallel_config.autotp_size}",
            f"autoep_size={config.expert_parallel_config.autoep_size}",
            f"correct norms={grid.correct_norms}",
            f"check weights={grid.check_weights}",
            f"check samples={grid.check_samples}",
            f"torch {torch.__version__}",
            f"deepspeed {deepspeed.__version__}",
            f"ds_topo {sys.modules['ds_topo'].__version__}",
        ]
        lines += [f"engine={stock_class(engine).__name__}", f"parts={', '.join(mixins)}"]


def check_arguments(given: Mapping[str, Any], config: DeepSpeedConfig) -> None:
    """Refuse an optimizer, a scheduler or parameters that an engine cannot use."""
    optimizer, scheduler, parameters = (given.get(name) for name in ("optimizer", "lr_scheduler", "model_parameters"))
    if not (optimizer is None or callable(optimizer) or hasattr(optimizer, "param_groups")):
        raise TypeError(
            f"optimizer={abridged(optimizer)}: give one such as torch.optim.AdamW(model.parameters()), or name "
            'one in the config: "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}'
        )
    if isinstance(scheduler, type):
        raise TypeError(
            f"lr_scheduler is the class {scheduler.__name__}: give an instance, or a function of the optimizer that "
            "returns one"
        )
    scheduled, chosen = getattr(scheduler, "optimizer", None), optimizer or config.optimizer_name
    groups = getattr(scheduled, "param_groups", None)  # also those of a wrapper around the engine's optimizer
    is_other = groups is not None and {*map(id, getattr(optimizer, "param_groups", ()))}.isdisjoint(map(id, groups))
    if chosen and not callable(scheduler) and is_other:
        kind = type(scheduler).__name__
        name = chosen if isinstance(chosen, str) else type(chosen).__name__
        raise EngineOptionError(
            f"lr_scheduler={kind} was built for another optimizer ({type(scheduled).__name__}) than the engine's "
            f"({name}), so it would not change the engine's learning rate. Pass its optimizer as optimizer= (and leave "
            "it out of the config), or a function that builds the scheduler: "
            f"lr_scheduler=lambda optimizer: {kind}(optimizer, ...)"
        )
    if isinstance(parameters, nn.Module):
        raise TypeError(f"model_parameters={type(parameters).__name__}(...): give model.parameters(), or omit it")
    named = config.optimizer_name if optimizer is None else None
    trained = next((name for name, each in given["model"].named_parameters() if each.requires_grad), None)
    if named is not None and isinstance(parameters, list) and not parameters and trained is not None:
        raise EngineOptionError(
            f"model_parameters is empty, but the model has parameters to train, such as {trained!r}. A generator such "
            "as model.parameters() can be read only once: omit model_parameters, call model.parameters() anew, or "
            "freeze the parameters by requires_grad_(False)"
        )
    if named is not None and named.lower() not in DEEPSPEED_OPTIMIZERS and not hasattr(torch.optim, named):
        choices = ["AdamW", *DEEPSPEED_OPTIMIZERS]
        raise EngineOptionError(
            f'config: "optimizer" has the type {named!r}: choose a class of torch.optim, or {choices}'
        )
    named = config.scheduler_name if scheduler is None else None
    if named is not None and not any(hasattr(module, named) for module in (lr_schedules, torch.optim.lr_scheduler)):
        raise EngineOptionError(
            f'config: "scheduler" has the type {named!r}: choose a class of torch.optim.lr_scheduler, or one of '
            f"{lr_schedules.VALID_LR_SCHEDULES}"
        )


CLIENT_PARAMETERS = "client_parameters"
"""The attribute of an engine with the ``model_parameters`` that it got, until the ranks have compared them."""


def as_lists(parameters: Any, config: DeepSpeedConfig) -> Any:
    """Return ``model_parameters`` with lists in place of generators, so that they can be compared and used.

    AutoTP and AutoEP replace parameters of the model before DeepSpeed reads generators.
    """
    is_lazy = config.tensor_parallel_config.autotp_size > 1 or config.expert_parallel_config.enabled
    if parameters is None or isinstance(parameters, (list, nn.Module)) or is_lazy:
        return parameters
    return list(parameters)


_reads_sections: ContextVar[bool] = ContextVar("reads_sections", default=False)
"""True during ``ds_topo.initialize``, which reads the sections of the config that are not DeepSpeed's."""

grids: WeakSet[MpuGrid] = WeakSet()
"""The grids that exist; an engine without an mpu may lack one of them."""


def check_mpu(mpu: Any) -> None:
    """Refuse a value that cannot be an mpu, such as a topology, a spec, a mesh or a grid for torch alone.

    DeepSpeed would count one rank, because it takes the missing method for a job that is not distributed.
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
    """Refuse a model of another kind."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={abridged(model)}: give a torch.nn.Module, or a PipelineModule")


def check_engine_without_grid(model: nn.Module, mpu: Any, config: DeepSpeedConfig) -> None:
    """Refuse an engine without mpu, or warn about it, while a grid exists whose ranks hold different parameters.

    Most likely its mpu was forgotten.
    """
    check_mpu(mpu)
    if mpu is not None:
        return
    if in_use:
        raise EngineOptionError(
            f"an engine without mpu while {in_use[-1].topology().spec!r} is in use: deepspeed.initialize was imported "
            "by name before ds_topo.use(grid); call it as deepspeed.initialize, or call use() before that import"
        )
    if unread := _unread_sections(config):
        raise EngineOptionError(
            f'config section "{unread[0]}" is ignored by deepspeed.initialize, which got no mpu: pass mpu=grid; '
            "ds_topo.initialize reads the section"
        )
    splitting = [grid for grid in grids if grid.is_alive and splits_models(grid)]
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
    token = _reads_sections.set(True)
    try:
        yield
    finally:
        _reads_sections.reset(token)


def _unread_sections(config: DeepSpeedConfig) -> list[str]:
    """Return the sections of a config that only ``ds_topo.initialize`` reads; none while that builds an engine."""
    if _reads_sections.get():
        return []
    found = [name for name in (TOPOLOGY_SECTION, REPLICAS_SECTION) if name in config._param_dict]
    return [*found, REDUCER_SECTION] if wants_reducer(config) else found


def check_sections(config: DeepSpeedConfig, grid: MpuGrid) -> None:
    """Raise for sections of the config that the engine would ignore."""
    unread = [name for name in _unread_sections(config) if name != TOPOLOGY_SECTION]  # the grid has one
    if unread:
        raise EngineOptionError(
            f'config section "{unread[0]}" is not read by deepspeed.initialize itself: call '
            "ds_topo.initialize, or call ds_topo.use(grid) first"
        )
    section = config._param_dict.get(TOPOLOGY_SECTION)
    if section is not None:
        wanted = as_topology(section, grid.world_size)  # or what verify has set
        if wanted != grid.topology():
            raise TopologyError(
                f'config section "{TOPOLOGY_SECTION}" is {wanted.spec!r}, but the mpu is {grid.topology().spec!r}: '
                "give only one of them, or make them equal"
            )


def check_model(engine: DeepSpeedEngine, model: nn.Module, grid: MpuGrid) -> None:
    """Raise for a model that does not fit the topology."""
    stages = grid.get_axis_size(PIPE)
    if stages > 1 and not engine.is_pipeline and not getattr(model, "is_pipeline_stage", False):
        raise EngineOptionError(
            f"a plain engine on {grid.topology().spec!r}: its {stages} stages would train {stages} separate models. "
            "Build a PipelineModule(layers, grid=grid), remove the axis 'pipe', or set "
            "model.is_pipeline_stage = True if your own program passes activations between stages"
        )
    optimizer = engine.client_optimizer
    if isinstance(optimizer, torch.optim.Optimizer):
        own = {id(parameter) for parameter in model.parameters()}
        is_empty = all(name.startswith(PLACEHOLDERS) for name, _ in model.named_parameters())
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if held and not is_empty and not any(id(parameter) in own for parameter in held):
            raise EngineOptionError(
                f"optimizer={type(optimizer).__name__} has no parameter of the model, which would not be trained: "
                "create it from model.parameters() of this model"
            )
        _compare_with_optimizer(engine, model, grid, held)
    check_not_wrapped(model, grid)
    group = domino.TP_group  # the first model's, for the rest of the process
    if group in (None, grid.get_tensor_model_parallel_group()):
        return
    if any(isinstance(layer, domino.DominoAsyncColumnParallelLinear) for layer in model.modules()):
        raise EngineOptionError(
            f"DominoTransformer would sum over the group of the first model, not that of {grid.topology().spec!r}: "
            "set deepspeed.runtime.domino.async_linear.TP_group = None before the model is built"
        )


def _compare_with_optimizer(engine: DeepSpeedEngine, model: nn.Module, grid: MpuGrid, held: list[torch.Tensor]) -> None:
    """Refuse an optimizer that holds others in place of parameters of the model; warn if it only leaves some out.

    A stage of a pipeline has some of the layers for which an optimizer may have been built. AutoTP and AutoEP replace
    layers themselves, and DeepSpeed corrects the optimizer. Parameters of a loss function are beside the model.
    """
    config = engine._config
    if engine.is_pipeline or config.expert_parallel_config.enabled:
        return
    if config.tensor_parallel_config.autotp_size > 1:
        return
    own, known = {id(each) for each in model.parameters()}, {id(each) for each in held}
    lacking = [name for name, each in model.named_parameters() if each.requires_grad and id(each) not in known]
    others = [list(each.shape) for each in held if id(each) not in own]
    if not lacking:
        return
    kind = type(engine.client_optimizer).__name__
    if others:
        raise EngineOptionError(
            f"optimizer={kind} has {len(others)} parameters that are not in the model, such as one of shape "
            f"{others[0]}, and it lacks {listed(lacking)}, which would not be trained: layers were replaced after it "
            "was created, such as by ParallelLinear.from_linear. Create the optimizer afterwards, from "
            "model.parameters()"
        )
    if grid.grid_rank == 0 and grid.check_weights:
        warn(
            f"optimizer={kind} lacks the parameters {listed(lacking)} of the model, which would not be trained: "
            "create it from model.parameters(), or freeze them by requires_grad_(False) before "
            "initialize(), or set grid.check_weights = False if it is intended"
        )


def check_sparse_layers(engine: DeepSpeedEngine, model: nn.Module) -> None:
    """Refuse layers with sparse gradients where DeepSpeed cannot reduce or clip them."""
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


def check_groups_of_layers(model: nn.Module, grid: MpuGrid) -> None:
    """Refuse layers that keep groups of another layout."""
    for name, layer in model.named_modules():
        _require_own_groups(name, layer, grid)


def _require_own_groups(name: str, layer: nn.Module, grid: MpuGrid) -> None:
    """Refuse a layer that keeps another grid of the same ranks, or a group that joins other ranks or replicas.

    Any group that a layer of ours divides its work over must stay within the ranks that read one sample, the whole
    world's, too. What other layers use their groups for is unknown.
    """
    is_ours = any(kind.__module__ == _OUR_LAYERS for kind in type(layer).__mro__)
    for attribute, value in vars(layer).items():
        what = f"{attribute} of {type(layer).__name__} {name!r}"
        if isinstance(value, ProcessGrid) and value.is_alive and value.topology() != grid.topology():
            raise TopologyError(
                f"two layouts in one job: {what} is the grid {value.topology().spec!r}, but the engine's is "
                f"{grid.topology().spec!r}: give the layer and the engine the same grid"
            )
        group = getattr(value, "__dict__", {}).get("group", value)  # ds_topo.layers.Parallel has one
        if not isinstance(group, dist.ProcessGroup):
            continue
        ranks = dist.get_process_group_ranks(group)
        divides = is_ours or isinstance(layer, DistributedAttention) or type(value).__module__ == _OUR_LAYERS
        if divides and (replicas := _axes_of_other_samples(ranks, grid)):
            raise TopologyError(
                f"{what} divides the work of one replica over ranks {listed(ranks)}, which read different "
                f"samples along {' x '.join(replicas)}: give it the group of {grid.topology().spec!r} along 'model', "
                "or 'seq' for attention"
            )
        if not str(group.group_desc).startswith(DESCRIPTION):
            continue
        axes = describe(group)[0].split("+")
        if set(axes) <= set(grid.topology().axes) and ranks != grid.get_ranks(axes):
            raise TopologyError(
                f"two layouts in one job: {what} joins ranks {listed(ranks)} along {' x '.join(axes)}, but "
                f"{grid.topology().spec!r} joins {listed(grid.get_ranks(axes))}: take the group from the engine's grid"
            )


def _axes_of_other_samples(ranks: list[int], grid: MpuGrid) -> list[str]:
    """Return the axes along which some of these ranks read other samples than this rank."""
    varied = sample_axes(grid.topology())
    if set(ranks) <= set(grid.get_ranks(axis for axis in grid.topology().axes if axis not in varied)):
        return []
    found = [axis for axis in varied if len({*ranks} & {*grid.get_ranks(axis)}) > 1]
    return found or [axis for axis in varied if grid.get_axis_size(axis) > 1]


def make_contiguous(model: nn.Module) -> None:
    """Give strided parameters contiguous memory, which DeepSpeed's broadcast needs; refuse views of other ones."""
    named = [
        (name, each)
        for name, each in model.named_parameters()
        if not (hasattr(each, "__tensor_flatten__") or hasattr(each, "ds_id") or each.layout is not torch.strided)
    ]  # plain memory, neither a wrapper such as a DTensor, nor partitioned by ZeRO 3, nor sparse
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


def check_not_wrapped(model: nn.Module, grid: MpuGrid) -> None:
    """Refuse FSDP, DTensors, and ``DistributedDataParallel`` over ranks that hold other parameters."""
    for name, module in model.named_modules():
        if any(base.__module__.startswith("torch.distributed.fsdp") for base in type(module).__mro__):
            raise EngineOptionError(
                f"module {name!r} is sharded by FSDP (fully_shard), and a DeepSpeed engine cannot shard it again: pass "
                'the model without it, and set "zero_optimization": {"stage": 3}, which shards like FSDP'
            )
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
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "placements"):
            raise EngineOptionError(
                f"parameter {name!r} is a DTensor, as parallelize_module and distribute_tensor make them, which a "
                f"DeepSpeed engine cannot train: split the model by ds_topo.layers or AutoTP "
                '("tensor_parallel" in the config), or train without an engine: fully_shard(model, mesh=grid["data"])'
            )


def check_partitions(model: nn.Module, grid: MpuGrid, engine: DeepSpeedEngine) -> None:
    """Refuse parameters that ``deepspeed.zero.Init`` has partitioned over other ranks than ZeRO 3 does.

    ``zero.Init`` gives all of these ranks the values of the first one, which other slices or stages may not have.
    ZeRO 3 itself needs parameters of one data type.
    """
    if engine.zero_optimization_stage() == 3 and not (engine.bfloat16_enabled() or engine.fp16_enabled()):
        kinds = {each.dtype: name for name, each in model.named_parameters() if each.requires_grad}
        if len(kinds) > 1:
            raise EngineOptionError(
                f"parameters of several data types ({listed([f'{name}: {kind}' for kind, name in kinds.items()])}) at "
                "ZeRO stage 3, which keeps its parts of all parameters in one vector: convert the model to one of them "
                '(model.float()), set "bf16": {"enabled": true}, which converts it, or use stage 0, 1 or 2'
            )
    expected = grid.get_ranks(partition_axes(grid.topology()))
    right = [expected]
    if engine._config.tensor_parallel_config.autotp_size > 1:  # AutoTP splits what was whole on all ranks
        right.append(grid.get_ranks(axes_of_engine(grid, False)))
    ranks_of = cache(lambda group: sorted(dist.get_process_group_ranks(group)))
    for name, parameter in model.named_parameters():
        group = getattr(parameter, "ds_process_group", None)
        if group is None or not getattr(parameter, "allreduce", True):  # experts have groups of their own
            continue
        ranks = ranks_of(group)
        if engine.zero_optimization_stage() < 3:
            raise EngineOptionError(
                f"zero.Init partitioned parameter {name!r} over ranks {listed(ranks)}, but the engine is at "
                f"ZeRO stage {engine.zero_optimization_stage()}, which needs whole parameters: use stage 3, or build "
                "the model without zero.Init"
            )
        if ranks not in right:
            raise EngineOptionError(
                f"zero.Init partitioned parameter {name!r} over ranks {listed(ranks)}, all of which now have "
                f"the values of the first one, but ZeRO 3 partitions over {listed(expected)} with "
                f"{grid.topology().spec!r}: pass data_parallel_group=grid.get_partition_group() to zero.Init, or call "
                "ds_topo.use(grid) before it"
            )


def agree_on_model(engine: DeepSpeedEngine, model: nn.Module, grid: MpuGrid) -> None:
    """Check the model, and compare the parameters of replicas and the parallel state of layers.

    Collective over the engine's ranks.
    """
    is_pipeline = isinstance(model, DeepSpeedPipelineModule)
    everyone = grid.get_ranks(axes_of_engine(grid, is_pipeline))
    with ExitStack() as agreements:
        if everyone != grid.dp_group:
            agreements.enter_context(agreement(everyone, "stages and slices"))
        subject = f"the parameters of replicas along {gradient_axes(grid.topology())}, and {_IN_ONE_ORDER}"
        lines = agreements.enter_context(agreement(grid.dp_group, subject))
        check_model(engine, model, grid)
        check_sparse_layers(engine, model)
        check_groups_of_layers(model, grid)
        check_partitions(model, grid, engine)
        make_contiguous(model)
        for name, parameter in model.named_parameters():
            shape = list(getattr(parameter, "ds_shape", parameter.shape))
            frozen = "" if parameter.requires_grad else " frozen"
            lines.append(f"{name} {shape} {parameter.dtype}{frozen}")
        parameters = vars(engine).pop(CLIENT_PARAMETERS, None)
        if isinstance(engine.client_optimizer, torch.optim.Optimizer):
            lines += _lines_of_groups(model, engine.client_optimizer.param_groups, engine.client_optimizer.defaults)
        elif isinstance(parameters, list):
            has_groups = parameters and isinstance(parameters[0], Mapping)
            lines += _lines_of_groups(model, parameters if has_groups else [{"params": parameters}])
        if is_pipeline:
            lines.append(f"loss function={'none' if model.loss_fn is None else 'given'}")


def in_one_order(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort neighboring groups of experts by name, if their options are equal; others keep their places.

    >>> experts = {"moe": True, "lr": 0.1}
    >>> groups = [{"name": "dense"}, {"name": "ep_size_2", **experts}, {"name": "ep_size_1", **experts}]
    >>> [group["name"] for group in in_one_order([*groups, {"name": "ep_size_1", "moe": True, "lr": 0.2}])]
    ['dense', 'ep_size_1', 'ep_size_2', 'ep_size_1']
    """
    ordered: list[dict[str, Any]] = []
    for options, alike in groupby(groups, _options_of_experts):
        ordered += sorted(alike, key=lambda group: "" if options is None else str(group.get("name")))
    return ordered


def _options_of_experts(group: dict[str, Any]) -> dict[str, Any] | None:
    is_of_experts = group.get("moe")
    return {key: group[key] for key in group if key not in ("name", "params")} if is_of_experts else None


_OUR_LAYERS = "ds_topo.layers"
_IN_ONE_ORDER = "their order in the optimizer (a set has another one in each process: sort what comes from it)"


def _lines_of_groups(model: nn.Module, groups: Any, settings: Iterable[str] = ()) -> Iterator[str]:
    """Describe the groups of an optimizer: their settings, and the names of their parameters in order."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for number, group in enumerate(in_one_order(groups)):
        of_group = {key: group[key] for key in settings if key in group}
        yield f"optimizer group {number}: {of_group}"
        given = group["params"]
        if not isinstance(given, (list, tuple)):
            given = group["params"] = [given] if torch.is_tensor(given) else list(given)
        for position, each in enumerate(given):
            parameter = each[1] if isinstance(each, tuple) else each  # torch takes named parameters, too
            name = names.get(id(parameter), f"not in the model, {list(parameter.shape)}")
            yield f"optimizer group {number}[{position}]: {name}"


_COMPARED_SETTINGS = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("gradient_predivide_factor", "prescale_gradients", "communication_data_type", "optimizer_params"),
    "scheduler_name",
)
"""Attributes of ``DeepSpeedConfig`` that must be equal on all ranks."""
