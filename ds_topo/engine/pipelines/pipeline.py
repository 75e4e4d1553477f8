"""Build ``PipelineModule``, DeepSpeed's pipeline on a grid of any topology."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial, wraps
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec as DeepSpeedLayerSpec
from deepspeed.pipe import PipelineModule as DeepSpeedPipelineModule
from deepspeed.pipe import TiedLayerSpec as DeepSpeedTiedLayerSpec
from deepspeed.runtime.activation_checkpointing.checkpointing import non_reentrant_checkpoint
from deepspeed.runtime.utils import set_random_seed
from torch import nn

from ds_topo.base import patches
from ds_topo.base.ledger import always, ledger
from ds_topo.base.patches import StockDualPipeVModule
from ds_topo.base.supported import CHECKPOINTS_ON_CPU, DUALPIPEV, require
from ds_topo.checkpoint.engine_facts import saved_layer
from ds_topo.engine.current_mpu import agreement, grid_in_use
from ds_topo.engine.grid import PipelineEngineGrid
from ds_topo.engine.one_layout import require_topology_in_use
from ds_topo.engine.pipelines.idle_stages import add_placeholders
from ds_topo.errors import MissingTopologyError, TopologyError, abridged, listed, warn
from ds_topo.health import guard
from ds_topo.launch.build_locks import remove_abandoned_locks
from ds_topo.launch.launchers import TOPOLOGY_OVERRIDE
from ds_topo.mpu import MpuGrid, require_grid
from ds_topo.process_groups.creation import require_initialized
from ds_topo.process_groups.process_grid import ProcessGrid, as_topology
from ds_topo.topology import ProcessTopology
from ds_topo.topology.axes import DATA, PIPE, Spec, read_config
from ds_topo.topology.rank_tables import RankGroup

__all__ = ["DualPipeVModule", "LayerSpec", "PipelineModule", "TiedLayerSpec"]
CONSTRUCTION = "PipelineModule"
"""The name of a pipeline's construction in errors of other ranks."""


class LayerSpec(DeepSpeedLayerSpec):  # type: ignore[misc]
    """A layer that its stage builds, of a class and arguments; DeepSpeed's, with an error that names the mistake."""

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not isinstance(typename, type):
            raise TypeError(
                f"LayerSpec({abridged(typename)}): give a class and its arguments, such as LayerSpec(nn.Linear, 8, 8); "
                "a module that exists needs no LayerSpec"
            )
        super().__init__(typename, *module_args, **module_kwargs)


class TiedLayerSpec(DeepSpeedTiedLayerSpec, LayerSpec):  # type: ignore[misc]
    """A layer whose weight has copies on several stages; DeepSpeed's, with the errors of ``LayerSpec``."""


def _groups_of_construction(grid: PipelineEngineGrid, create: Any) -> Any:
    """Return the function that creates groups while a module is built on a grid.

    DeepSpeed clones the world's group first. At the end it creates the groups of stages that share a tied layer, for
    all replicas on every rank; here, their members alone create them.
    """
    lines = map(grid.to_global, grid.topology().get_axis_comm_lists(PIPE))
    line_of = {rank: number for number, line in enumerate(lines) for rank in line}
    is_first = True

    @wraps(create)
    def world_or_own_group(ranks: Any = None, *arguments: Any, **named: Any) -> Any:
        nonlocal is_first
        is_of_world = is_first and ranks is not None and list(ranks) == list(range(dist.get_world_size()))
        is_first = False
        if is_of_world:
            return dist.group.WORLD
        of_lines = {line_of.get(rank) for rank in ranks or ()}
        if arguments or named or len(of_lines) != 1 or None in of_lines:
            return create(ranks, *arguments, **named)
        is_member = grid.global_rank in ranks
        return grid.create_group(RankGroup(("tied layers",), tuple(ranks))) if is_member else None

    return world_or_own_group


def construct_on(
    grid: PipelineEngineGrid,
    module: DeepSpeedPipelineModule,
    construct: Callable[..., None],
    layers: list[Any],
    *arguments: Any,
    **options: Any,
) -> None:
    """Call DeepSpeed's constructor of a module, without ``num_stages`` and ``topology``, so that it takes this grid."""
    with agreement(grid.members, "the layers of the pipeline, one list on every rank") as lines:
        for number, layer in enumerate(map(saved_layer, layers)):
            lines.append(f"layer {number}: {layer.kind}" + f" tied by {layer.tied!r}" * bool(layer.tied))
    given = inspect.signature(construct).bind(layers, None, grid._topo, *arguments, **options)
    given.apply_defaults()
    if given.arguments["seed_layers"]:  # the bounds of stages are NumPy's integers, which random.seed() refuses
        seed = given.arguments["seed_fn"] or set_random_seed
        given.arguments["seed_fn"] = wraps(seed)(lambda number: seed(int(number)))
    own_grid = always(lambda topology=None, process_group=None: grid)
    own_groups = partial(_groups_of_construction, grid)
    vars(module)["_synchronize_tied_weights"] = partial(_synchronize_tied_weights, module)
    with ledger.bound(patches.PIPELINE_GRID, own_grid), ledger.bound(patches.PIPELINE_GROUPS, own_groups):
        construct(*given.args, **given.kwargs)
    del vars(module)["_synchronize_tied_weights"]
    module.partition_method = given.arguments["partition_method"]
    if module.mpu() is not grid:
        raise RuntimeError(
            f"this release of DeepSpeed does not build pipelines on {patches.PIPELINE_GRID}, which ds_topo replaces: "
            "use a release that README.md names"
        )
    _checkpoint_all_segments(module)
    _refuse_weights_of_several_stages(module, layers)
    if grid.pipe_parallel_size > 1 and not any(each.requires_grad for each in module.parameters()):
        add_placeholders(module, 1)  # for an optimizer of the program, which torch refuses without parameters


def _synchronize_tied_weights(module: DeepSpeedPipelineModule) -> None:
    """Compare tied weights between the stages that share them, then broadcast them, which ends processes otherwise."""
    for key, shared in module.tied_comms.items():
        with agreement(
            shared["ranks"], f"the weights of the layers tied by {key!r}, whose arguments must be equal"
        ) as lines:
            for name in shared["weight_attr"]:
                weight = attrgetter(name)(shared["module"])
                lines.append(f"{name}: {str(weight.dtype).removeprefix('torch.')} {list(weight.shape)}")
    with torch.no_grad():  # otherwise torch warns that the broadcast of a parameter is not differentiable
        type(module)._synchronize_tied_weights(module)


def _refuse_weights_of_several_stages(module: DeepSpeedPipelineModule, layers: Sequence[Any]) -> None:
    """Refuse layers of several stages that share a trainable parameter: each stage would train a copy of it."""
    known: dict[nn.Parameter, tuple[int, str]] = {}
    for number, layer in enumerate(layers):
        for name, parameter in layer.named_parameters() if isinstance(layer, nn.Module) else ():
            other, of_other = known.setdefault(parameter, (number, name))
            if other == number or not parameter.requires_grad:
                continue
            here, there = module.stage_owner(number), module.stage_owner(other)
            if here != there:
                raise ValueError(
                    f"{name!r} of layer {number} is {of_other!r} of layer {other}, but they are on stages {here} and "
                    f"{there}, each of which would train a copy: give both layers as TiedLayerSpec(key, ...) with one "
                    "key, or keep them on one stage (partition_method)"
                )


class PipelineModule(DeepSpeedPipelineModule):  # type: ignore[misc]
    """DeepSpeed's ``PipelineModule`` on a ``PipelineParallelGrid`` of any topology, extra axes included.

    Use it as DeepSpeed's own: ``deepspeed.initialize(model=PipelineModule(layers, topology=...), ...)``, then
    ``engine.train_batch()``. Groups for tied layers are created only by the stages that share them.

    Args:
        layers: modules, ``LayerSpec``, ``TiedLayerSpec`` or functions, in order.
        num_stages: instead of ``topology``, the degree of ``pipe``; other ranks are ``data``. Or a spec, or a grid.
        topology: a topology, or a spec such as ``"data=-1,pipe=2"``.
        config: instead of ``topology``, a DeepSpeed config (path or mapping) that has a section ``"topology"``.
        grid: instead of ``topology``, an existing grid, for layers that need one of its groups.
        timeout: seconds or a ``timedelta``, for agreement and process groups; the job's by default.
        **options: options of DeepSpeed's class, such as ``loss_fn`` and ``activation_checkpoint_interval``.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialised, or ``LOCAL_RANK`` is not set.
        TopologyError: no topology or more than one is given, it does not fit the job, or a stage would have no layer.
        TypeError, ValueError: the layers are invalid.
        DisagreementError: ranks pass different topologies or layers, or some rank does not build the pipeline.
    """

    parts_of_a_rank = 1
    """The number of parts of the model that each rank of the pipeline holds."""

    @guard.over(CONSTRUCTION)
    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | str | MpuGrid | None = None,
        topology: ProcessTopology | Spec | None = None,
        *args: Any,
        config: str | Path | Mapping[str, object] | None = None,
        grid: MpuGrid | None = None,
        timeout: float | timedelta | None = None,
        **options: Any,
    ) -> None:
        require_initialized("PipelineModule")
        if not deepspeed.comm.is_initialized():
            remove_abandoned_locks()
            deepspeed.init_distributed(dist_init_required=False)
        if "LOCAL_RANK" not in os.environ:
            raise RuntimeError(
                "PipelineModule needs the environment variable LOCAL_RANK: start the job with deepspeed or torchrun"
            )
        layers = checked_layers(layers, args[0] if args else options.get("loss_fn"))
        grid = options.pop("mpu", None) if grid is None else grid
        if isinstance(num_stages, MpuGrid):
            grid, num_stages = grid or num_stages, None
        if isinstance(num_stages, str):  # a spec instead of a number
            topology, num_stages = topology or num_stages, None
        layout = _layout_of(num_stages, topology, config, grid)
        if (used := grid_in_use()) is not None and grid is None:
            is_given = topology is not None or config is not None
            require_topology_in_use(cast(Any, layout) if is_given else None, num_stages, used)
            layout = grid = used
        check_stages(num_stages, layout, len(layers), self.parts_of_a_rank)
        if isinstance(layout, MpuGrid):
            engine_grid = PipelineEngineGrid.over(layout)
        else:
            engine_grid = PipelineEngineGrid(layout, timeout=timeout)
        guard.narrow(CONSTRUCTION, engine_grid.members)
        try:
            construct_on(engine_grid, self, super().__init__, layers, *args, **options)
        except BaseException:
            if layout is not grid:
                engine_grid.destroy()
            raise

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights of this stage; say how it names them if the state dict has others.

        Raises:
            RuntimeError: weights are missing, or not of this stage, with ``strict``.
        """
        own = list(self.state_dict())
        others = [name for name in state_dict if name not in {*own}]
        text = (
            f"{listed(others, 3)} are not weights of this stage, which has {listed(own, 3)}: a name begins with the "
            "number of the layer in the pipeline. Rename them, and load with strict=False, by which each stage takes "
            "its own; or load weights of the whole model into the engine by ds_topo.checkpoint.load(engine, folder, "
            "rename=...)"
        )
        if strict and others:
            raise RuntimeError(f"load_state_dict of a pipeline: {text}")
        if own and others and len(others) == len(state_dict):
            warn(f"load_state_dict(strict=False) of a pipeline changes nothing: {text}")
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def topology(self) -> ProcessTopology:
        """Return the topology as it was given, extra axes included."""
        return self.mpu().topology()

    def mpu(self) -> PipelineEngineGrid:
        """Return the grid."""
        grid: PipelineEngineGrid = super().mpu()
        return grid


class DualPipeVModule(PipelineModule, StockDualPipeVModule):  # type: ignore[misc]
    """DeepSpeed's ``DualPipeVModule`` on a grid of any topology: a pipeline with the DualPipeV schedule of DeepSeek-V3.

    Rank ``r`` of ``n`` along ``pipe`` holds parts ``r`` and ``2n - 1 - r`` of the model. Micro-batches pass through the
    first parts towards the last rank, and back to rank 0, which also computes the loss. A step needs at least ``2n``
    micro-batches. Arguments and errors are those of :class:`PipelineModule`. It needs DeepSpeed 0.19.8.
    """

    parts_of_a_rank = 2
    phase_bounds: list[tuple[int, int]]

    def __init__(self, *args: Any, **options: Any) -> None:
        require(DUALPIPEV)
        if options.get("dynamic_shape"):
            raise ValueError(
                "dynamic_shape=True with DualPipeV, whose stages exchange the shapes of activations once: pad samples "
                "to one length, or use PipelineModule"
            )
        super().__init__(*args, **options)
        self.phase_bounds = [(int(start), int(stop)) for start, stop in self.phase_bounds]  # NumPy's in DeepSpeed


def _checkpoint_all_segments(module: DeepSpeedPipelineModule) -> None:
    """Let the activation checkpointing of a module work for token ids, and with ``torch_autocast``.

    DeepSpeed's default function is reentrant: it detaches a segment whose inputs need no gradient from autograd, so an
    embedding would get no gradient, and the backward pass of the first stage fails. It also computes a segment again
    without autocast, with other data types.
    """
    if module.activation_checkpoint_func is deepspeed.checkpointing.checkpoint:
        if module.activation_checkpoint_interval > 0 and get_accelerator().device_name() == "cpu":
            require(CHECKPOINTS_ON_CPU)
        module.activation_checkpoint_func = _checkpointed


def _checkpointed(function: Any, *inputs: Any) -> Any:
    device = get_accelerator().device_name()
    if torch.is_autocast_enabled(device):
        function = torch.autocast(device, torch.get_autocast_dtype(device))(function)
    if any(torch.is_tensor(each) and each.requires_grad for each in inputs) or not torch.is_grad_enabled():
        return deepspeed.checkpointing.checkpoint(function, *inputs)
    return non_reentrant_checkpoint(function, *inputs)


def checked_layers(layers: Iterable[Any], loss: object) -> list[Any]:
    """Return the layers as a list; refuse those that a stage could not build or call, and such a loss function."""
    if isinstance(layers, (str, type)) or not isinstance(layers, Iterable):
        raise TypeError(f"layers={abridged(layers)}: give a list of modules, LayerSpec, TiedLayerSpec or functions")
    checked = list(layers)
    if not checked:
        raise ValueError("layers is empty: a pipeline needs at least one layer per stage")
    for index, layer in enumerate(checked):
        if isinstance(layer, type):
            raise TypeError(
                f"layer {index} is the class {layer.__name__}: give LayerSpec({layer.__name__}, ...) or a module"
            )
        if not isinstance(layer, (nn.Module, DeepSpeedLayerSpec)) and not callable(layer):
            raise TypeError(
                f"layer {index} is {abridged(layer)}: give a module, LayerSpec, TiedLayerSpec or a function"
            )
    if isinstance(loss, type) and issubclass(loss, nn.Module):
        raise TypeError(f"loss_fn is the class {loss.__name__}: give an instance, {loss.__name__}()")
    if loss is not None and not callable(loss):
        raise TypeError(f"loss_fn={abridged(loss)}: give a function of (outputs, labels), such as nn.MSELoss()")
    return checked


def _layout_of(
    num_stages: int | None,
    topology: ProcessTopology | Spec | None,
    config: str | Path | Mapping[str, object] | None,
    grid: MpuGrid | None,
) -> MpuGrid | ProcessTopology | Spec:
    """Return the only layout that was given."""
    ways = {"topology": topology, "config": config, "grid": grid}
    given = [name for name, value in ways.items() if value is not None]
    if len(given) > 1:
        raise TopologyError(f"{' and '.join(given)} are given: pass one of them")
    if config is not None:
        spec: Spec = read_config(config)
        return spec
    if grid is not None:
        require_grid(grid)
        return grid
    if topology is not None:
        return topology
    if num_stages is not None:
        return {PIPE: num_stages, DATA: -1}
    if (used := grid_in_use()) is None:
        raise MissingTopologyError('PipelineModule needs a topology, such as topology="pipe=2,data=-1", or num_stages')
    return used


def check_stages(num_stages: object, layout: MpuGrid | ProcessTopology | Spec, layers: int, parts: int) -> None:
    """Refuse a ``num_stages`` that differs from the topology's, and fewer layers than parts on all stages."""
    try:
        topology = layout.topology() if isinstance(layout, ProcessGrid) else as_topology(layout, dist.get_world_size())
    except (TopologyError, TypeError):
        return  # the grid raises this on all ranks
    stages = max(1, topology.get_dim(PIPE))
    if num_stages is not None and num_stages != stages and TOPOLOGY_OVERRIDE not in os.environ:
        raise TopologyError(f"num_stages={abridged(num_stages)}, but {topology.spec!r} has {stages}: give only one")
    if layers < stages * parts:
        raise TopologyError(
            f"{layers} layers for the {stages} stages of {topology.spec!r}: give every stage at least "
            + ("one" if parts == 1 else f"{parts} (DualPipeV)")
        )
