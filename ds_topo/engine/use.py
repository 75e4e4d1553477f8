"""Run programs that call DeepSpeed themselves on a grid, by ``use(grid)``.

Such programs are frameworks (accelerate, Trainer) and code that imports DeepSpeed's classes. While a grid is in use,
the following names are patched: ``deepspeed.initialize``, pipelines and their topologies,
``deepspeed.zero.Init``, sequence parallel groups, and accelerate's data loaders.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.inference.config import DeepSpeedInferenceConfig
from deepspeed.inference.engine import InferenceEngine
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.utils import groups as deepspeed_groups
from torch.utils.data import DistributedSampler

from ds_topo.base import patches
from ds_topo.base.ledger import Make, Patch, always, around, find, ledger
from ds_topo.base.patches import StockDualPipeVModule
from ds_topo.engine.config_options import other_slices
from ds_topo.engine.current_mpu import grid_in_use, in_use
from ds_topo.engine.grid import PipelineEngineGrid, PipelineParallelGrid
from ds_topo.engine.one_layout import require_topology_in_use
from ds_topo.engine.pipelines.pipeline import CONSTRUCTION, PipelineModule, check_stages, checked_layers, construct_on
from ds_topo.engine.start import initialize, with_samples_of
from ds_topo.errors import EngineOptionError, TopologyError, warn
from ds_topo.health import guard
from ds_topo.mpu import MpuGrid, require_grid
from ds_topo.topology.axes import DATA, MODEL, PIPE, SEQ
from ds_topo.topology.process_topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology
from ds_topo.topology.rank_tables import fold_extra_axes, sample_axes


def use(grid: PipelineParallelGrid) -> GridInUse:
    """Run the rest of the program on a grid, until the end of ``with``, ``release()``, or ``grid.destroy()``.

    - ``deepspeed.initialize`` is :func:`ds_topo.initialize`: its engines get the grid as their mpu, and the config may
      have a section ``"gradient_reducer"``. If the program passes its own mpu, the grid replaces it; an mpu that joins
      other ranks is refused.
    - DeepSpeed's ``PipelineModule`` and its subclasses are built on the grid. A topology that places ranks differently
      is refused. The names in ``deepspeed.runtime.pipe.topology`` are those of ds_topo. A topology that is given by
      degrees only (``PipeModelDataParallelTopology(num_pp, num_mp, num_dp)``) has the grid's order.
    - ``deepspeed.zero.Init`` without a group partitions over the replicas of a parameter, not over all ranks.
      ``GatheredParameters(modifier_rank=0)`` broadcasts the values of the grid's first rank to all slices, except for
      parameters that are marked as a slice.
    - accelerate, and so Trainer, distributes samples over the ranks that work on different samples
      (:meth:`~ds_topo.ProcessGrid.get_sample_rank`), and counts these ranks in schedules and batch sizes.
      ``start.with_samples_of`` corrects a ``train_batch_size`` that it has computed already.
    - ``deepspeed.init_inference`` with ``tensor_parallel`` splits the model along the axis ``model``.
    - With a ``seq`` axis, DeepSpeed's long sequence training (``UlyssesSPAttentionHF``) uses the grid's groups.

    The function only patches names, and does not communicate. Calls for the same grid may be nested.

    Args:
        grid: a grid of the whole job.

    Returns:
        A context manager with a method ``release()``.

    Raises:
        TypeError: ``grid`` is not a grid.
        RuntimeError: another grid is in use, or this one was destroyed.
        TopologyError: DeepSpeed's sequence parallel groups exist already and join other ranks.

    >>> import deepspeed, torch.distributed as dist
    >>> from torch.testing._internal.distributed.fake_pg import FakeStore
    >>> dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    >>> grid = PipelineParallelGrid("data=2,model=2")
    >>> with use(grid):
    ...     deepspeed.initialize.__module__
    'ds_topo.engine.start'
    >>> deepspeed.initialize.__module__
    'deepspeed'
    >>> grid.destroy(), dist.destroy_process_group()
    (None, None)
    """
    require_grid(grid)
    before = grid_in_use()
    if before is None:
        if deepspeed_groups._WORLD_GROUP is not None and grid.get_model_parallel_world_size() > 1:
            warn(
                f"use({grid.topology().spec!r}) has no effect on an engine that DeepSpeed has built before without an "
                "mpu: it averages the gradients of all ranks; call use() before deepspeed.initialize"
            )
    elif not before.shares_groups_with(grid):
        raise RuntimeError(
            f"use({grid.topology().spec!r}): {before.topology().spec!r} is in use: release() or destroy() it first"
        )
    return GridInUse(grid)


class GridInUse(ExitStack):
    """One call of :func:`use`, which lasts until the end of ``with``, ``release()``, or ``grid.destroy()``."""

    def __init__(self, grid: PipelineParallelGrid) -> None:
        super().__init__()
        self.grid = grid
        in_use.append(grid)
        self.callback(in_use.remove, grid)
        grid.on_destroy(self.release)
        try:
            for patch, make in (*WHILE_A_GRID_IS_IN_USE, *_patches_of_accelerate(), *_patches_of_sequences(grid)):
                self.callback(ledger.bind(patch, make))
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """End the use of the grid. The last release restores the patched names. Idempotent."""
        self.close()


# -- pipelines --------------------------------------------------------------------------------------------------------


@around
def _constructed_on_grid(
    construct: Any,
    module: Any,
    layers: Any,
    num_stages: int | None = None,
    topology: Any = None,
    *args: Any,
    **options: Any,
) -> None:
    grid = grid_in_use()
    if isinstance(module, PipelineModule) or grid is None:  # our class uses the grid by itself
        construct(module, layers, num_stages, topology, *args, **options)
        return
    require_topology_in_use(topology, num_stages, grid)
    layers = checked_layers(layers, args[0] if args else options.get("loss_fn"))
    check_stages(num_stages, grid, len(layers), 2 if isinstance(module, StockDualPipeVModule) else 1)
    with guard.over(CONSTRUCTION, grid.members):
        construct_on(PipelineEngineGrid.over(grid), module, partial(construct, module), layers, *args, **options)


class _PipeDataInUse(PipeDataParallelTopology):
    def __new__(cls, num_pp: int, num_dp: int) -> ProcessTopology:  # type: ignore[misc]
        return _in_the_grids_order(PipeDataParallelTopology(num_pp, num_dp))


class _PipeModelDataInUse(PipeModelDataParallelTopology):
    def __new__(cls, num_pp: int, num_mp: int, num_dp: int) -> ProcessTopology:  # type: ignore[misc]
        return _in_the_grids_order(PipeModelDataParallelTopology(num_pp, num_mp, num_dp))


def _in_the_grids_order(asked: ProcessTopology) -> ProcessTopology:
    """Return the layout of the grid in use if it has the degrees that a program asks for."""
    grid = grid_in_use()
    layout = asked if grid is None else fold_extra_axes(grid.topology())
    same = all(max(1, layout.get_dim(axis)) == max(1, asked.get_dim(axis)) for axis in (PIPE, DATA, MODEL))
    return layout if same else asked


# -- ZeRO 3 -----------------------------------------------------------------------------------------------------------
# deepspeed.zero.Init and GatheredParameters treat all ranks as replicas of one model. So does from_pretrained(), which
# fills parameters on rank 0 only.


@around
def _partitioned_over_replicas(construct: Any, *args: Any, **options: Any) -> None:
    given = inspect.signature(construct).bind(*args, **options)
    arguments, grid = given.arguments, grid_in_use()
    has_group = arguments.get("data_parallel_group") or arguments.get("sequence_data_parallel_group")
    if grid is not None and not has_group:
        arguments["data_parallel_group"] = grid.get_partition_group()
        if arguments.get("mpu") is None:
            arguments["mpu"] = grid
        for name in {"config_dict_or_path", "config"} & arguments.keys():
            arguments[name] = with_samples_of(grid, arguments[name])
    construct(*given.args, **given.kwargs)


@around
def _modified_by_one(end: Any, context: Any, *exception: Any) -> Any:
    grid = grid_in_use()
    if context.enabled and grid is not None and context.src_rank is not None:
        rank = dist.get_group_rank(context.params[0].ds_process_group, context.src_rank)  # of what was given
        copies = grid.get_copy_group()
        if dist.get_world_size(copies) > 1:  # other copies of the partitions, which the modifier does not reach
            for parameter in context.params:
                if parameter.ds_process_group == grid.get_partition_group():
                    dist.broadcast(parameter.data.view(torch.uint8), dist.get_global_rank(copies, 0), group=copies)
        if grid.get_axis_size(MODEL) > 1:
            replicas = grid.get_partition_group()
            group = grid.get_group([axis for axis in grid.topology().axes if axis != PIPE])
            for parameter in context.params:
                if parameter.ds_process_group == replicas and not _may_differ_on_slices(parameter):
                    dist.broadcast(parameter.data.view(torch.uint8), dist.get_global_rank(group, rank), group=group)
    return end(context, *exception)


def _may_differ_on_slices(parameter: torch.Tensor) -> bool:
    """Tell whether other slices may hold other values, by the marks of Megatron and DeepSpeed."""
    if hasattr(parameter, "_z3_optimizer"):  # it belongs to an engine: programs gather it to save it, not to fill it
        return True
    return is_model_parallel_parameter(parameter) or not getattr(parameter, "allreduce", True)


# -- sequence parallelism ---------------------------------------------------------------------------------------------


def _patches_of_sequences(grid: PipelineParallelGrid) -> Iterable[tuple[Patch, Make]]:
    if SEQ not in grid.topology().axes:
        return ()
    group = parallel_state_sp._SEQUENCE_PARALLEL_GROUP
    found = grid.get_ranks(SEQ) if group is None else sorted(dist.get_process_group_ranks(group))
    if found != grid.get_ranks(SEQ):  # attention that is already registered keeps its groups
        raise TopologyError(
            f"use({grid.topology().spec!r}): initialize_sequence_parallel() or register_with_transformers() has "
            f"already joined ranks {found}, but the grid joins {grid.get_ranks(SEQ)} along {SEQ!r}: call it after use()"
        )
    return _OF_SEQUENCES


def _initialize_sequence_parallel(sequence_parallel_size: int) -> None:
    grid = in_use[-1]
    if sequence_parallel_size != grid.get_axis_size(SEQ):
        raise TopologyError(
            f"sequence_parallel_size {sequence_parallel_size}, but the grid in use is {grid.topology().spec!r}: "
            "give both the same degree"
        )


_OF_SEQUENCES: tuple[tuple[Patch, Make], ...] = (
    (patches.SEQUENCE_GROUP, lambda _: in_use[-1].get_group(SEQ)),
    (patches.SEQUENCE_DATA_GROUP, lambda _: in_use[-1].get_data_parallel_group()),
    (patches.INITIALIZE_SEQUENCES, always(_initialize_sequence_parallel)),
)


# -- inference ---------------------------------------------------------------------------------------------------------


@around
def _with_group_of_grid(create_group: Any, engine: InferenceEngine, config: DeepSpeedInferenceConfig) -> None:
    grid = grid_in_use()
    if grid is None:
        create_group(engine, config)
        return
    for problem in other_slices("tensor_parallel.tp_size", int(config.tensor_parallel.tp_size), grid):
        raise EngineOptionError(problem)
    if get_accelerator().device_name() == "cpu" and grid.get_axis_size(MODEL) < dist.get_world_size():
        raise EngineOptionError(
            f"init_inference with tensor_parallel.tp_size {grid.get_axis_size(MODEL)} on {dist.get_world_size()} "
            "ranks: on CPUs DeepSpeed's inference_all_reduce sums over all ranks of the job, whatever the group. "
            f"Use as many ranks as slices (model={grid.get_axis_size(MODEL)} alone), a GPU, or an engine of "
            "deepspeed.initialize in eval mode"
        )
    engine.mp_group = grid.get_tensor_model_parallel_group()


# -- accelerate, and Trainer, which uses it ---------------------------------------------------------------------------


def _while_in_use(replacement: Any) -> Make:
    """Return a make function whose result calls the original if a program has kept it until no grid is in use."""

    @around
    def replaced(original: Any, *args: Any, **options: Any) -> Any:
        return replacement(original, *args, **options) if in_use else original(*args, **options)

    return replaced


def _patches_of_accelerate() -> Iterable[tuple[Patch, Make]]:
    """Make accelerate count the ranks that work on different samples, wherever it means them by its processes.

    Nothing is patched unless the program has imported accelerate or transformers.
    """
    if not {"accelerate", "transformers"} & sys.modules.keys() or importlib.util.find_spec("accelerate") is None:
        return
    samples = Patch(
        find("accelerate.accelerator"),
        "prepare_data_loader",
        instead="The same function, for this rank's samples.",
        why="It distributes samples over all ranks, so model parallel peers would train on different samples.",
        during=patches.USE,
        process_wide="accelerate calls it by name, for every data loader and in every step of a scheduler.",
    )
    state = replace(
        samples,
        owner=find("accelerate.scheduler"),
        name="AcceleratorState",
        instead="A state whose num_processes is the number of ranks that work on different samples.",
        why="AcceleratedScheduler.step() steps the schedule that often in each training step.",
    )
    prepare = replace(
        samples,
        owner=find("accelerate.accelerator.Accelerator"),
        name="_prepare_deepspeed",
        instead="The same method, with the number of ranks that work on different samples.",
        why="It derives the length of a DummyScheduler and the batch size from the number of all ranks.",
        process_wide="An Accelerator may be created before or after use(grid).",
    )
    metrics = replace(
        prepare,
        name="gather_for_metrics",
        instead="The same method, which gathers from one rank for each share of the samples.",
        why="It would return samples once per slice, and cut an incomplete last batch off in the wrong place.",
    )
    yield from (
        (samples, _prepare_samples),
        (state, _STATE),
        (prepare, _counting_samples),
        (metrics, _gathering_shares),
    )


_STATE = always(lambda: SimpleNamespace(num_processes=_share_of_samples()[0]))


@_while_in_use
def _prepare_samples(prepare: Any, *args: Any, **options: Any) -> Any:
    grid = in_use[-1]
    given = inspect.signature(prepare).bind(*args, **options)
    if given.arguments.get("dispatch_batches"):
        raise ValueError(
            "dispatch_batches=True: rank 0 would read all samples and send them to all ranks, but only "
            f"{grid.get_sample_world_size()} of {grid.world_size} ranks work on different samples in "
            f"{grid.topology().spec!r}: omit the option"
        )
    count, index = _share_of_samples()
    loader: Any = given.arguments.get("dataloader")
    if _is_dealt(loader, grid):
        if loader.batch_sampler is not None:  # gather_for_metrics counts the samples of all shares
            loader.batch_sampler.num_processes = count
        count, index = 1, 0
    given.arguments |= {
        "num_processes": count,
        "process_index": index,
        "dispatch_batches": False,
        "torch_device_mesh": None,
    }
    return prepare(*given.args, **given.kwargs)


def _is_dealt(loader: Any, grid: MpuGrid) -> bool:
    """Tell whether a loader, such as that of ``grid.data_loader``, reads this rank's share of the samples already."""
    sampler, shares = getattr(loader, "sampler", None), grid.get_sample_world_size()
    if not isinstance(sampler, DistributedSampler) or shares == 1 or sampler.num_replicas != shares:
        return False
    if _ranks_per_sample(grid) > 1:
        raise ValueError(
            f"a loader whose {type(sampler).__name__} divides samples over {shares} shares, as grid.data_loader does: "
            "with sequence parallelism accelerate divides them over the ranks along 'seq', too. Give prepare() a "
            "torch DataLoader of all samples"
        )
    return True


@_while_in_use
def _counting_samples(prepare: Any, *args: Any, **options: Any) -> Any:
    count = Patch(
        find("accelerate.accelerator.Accelerator"),
        "num_processes",
        instead="The number of ranks that work on different samples.",
        why="The length of a schedule and the batch size count them.",
        during="one call of _prepare_deepspeed",
    )
    with ledger.bound(count, always(property(lambda _: _share_of_samples()[0]))):
        prepared = prepare(*args, **options)
    for engine in (each for each in prepared if isinstance(each, DeepSpeedEngine)):
        _warn_of_unsaved_slices(engine)
    return prepared


def _warn_of_unsaved_slices(engine: DeepSpeedEngine) -> None:
    """Warn on rank 0 that accelerate, and so Trainer, will not save the weights of a model that AutoTP splits.

    ``Accelerator.get_state_dict`` raises, and ``Trainer.save_model`` catches that and writes no weights.
    """
    slices = engine.autotp_size()
    if slices > 1 and not engine.zero_gather_16bit_weights_on_model_save() and in_use[-1].grid_rank == 0:
        warn(
            f"AutoTP splits this model over {slices} slices, and the config does not ask for whole weights: "
            "Trainer.save_model() will write no model.safetensors, and Accelerator.get_state_dict() will raise. Set "
            '"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": true}, at any stage, or save by '
            "engine.save_16bit_model(folder) on every rank"
        )


@_while_in_use
def _gathering_shares(gather_for_metrics: Any, *args: Any, **options: Any) -> Any:
    from accelerate.utils import recursively_apply

    of_tensors_row = Patch(
        find("accelerate.accelerator"),
        "gather",
        instead="What the first rank of each share has.",
        why="Ranks that work on the same samples have the same metrics.",
        during="one call of gather_for_metrics",
    )
    of_objects_row = replace(of_tensors_row, name="gather_object")
    grid, topology = in_use[-1], in_use[-1].topology()
    axes = [*sample_axes(topology), *([SEQ] if _ranks_per_sample(grid) > 1 else [])]
    firsts = topology.layout.offsets(map(topology.axes.index, axes))

    def keep(gathered: torch.Tensor) -> torch.Tensor:
        by_rank = gathered.chunk(grid.world_size)
        return torch.cat([by_rank[rank] for rank in firsts])

    @around
    def of_tensors(gather: Any, tensor: Any) -> Any:
        return recursively_apply(keep, gather(tensor))

    @around
    def of_objects(gather: Any, found: Any) -> Any:
        return gather(found if grid.grid_rank in firsts else [])

    with ledger.bound(of_tensors_row, of_tensors), ledger.bound(of_objects_row, of_objects):
        return gather_for_metrics(*args, **options)


def _share_of_samples() -> tuple[int, int]:
    """Return the number of shares that a data loader is divided into, and the index of this rank's share."""
    grid = in_use[-1]
    topology, size = grid.topology(), _ranks_per_sample(grid)
    share = topology.get_axis_index(sample_axes(topology), grid.grid_rank) * size
    share += topology.get_axis_index(SEQ, grid.grid_rank) if size > 1 else 0
    return grid.get_sample_world_size() * size, share


def _ranks_per_sample(grid: MpuGrid) -> int:
    """Return the number of ranks along ``seq`` that need samples of their own.

    Long sequence training shards each sample over these ranks, after each of them has read another one.
    """
    from accelerate.state import AcceleratorState

    parallelism = getattr(AcceleratorState(), "parallelism_config", None)
    is_sharded = getattr(parallelism, "sp_size", 1) > 1 and SEQ in grid.topology().axes
    return grid.get_axis_size(SEQ) if is_sharded else 1


WHILE_A_GRID_IS_IN_USE: tuple[tuple[Patch, Make], ...] = (
    (patches.INITIALIZE, always(initialize)),
    (patches.CONSTRUCT_PIPELINE, _constructed_on_grid),
    (patches.ZERO_INIT, _partitioned_over_replicas),
    (patches.INFERENCE_GROUP, _with_group_of_grid),
    (patches.MODIFIED_BY_ONE, _modified_by_one),
    (patches.PROCESS_TOPOLOGY, always(ProcessTopology)),
    (patches.PIPE_DATA_TOPOLOGY, always(_PipeDataInUse)),
    (patches.PIPE_MODEL_DATA_TOPOLOGY, always(_PipeModelDataInUse)),
    (patches.GRID, always(PipelineParallelGrid)),
)
