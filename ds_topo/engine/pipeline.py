"""DeepSpeed's pipeline on our grid."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from numbers import Integral
from pathlib import Path
from typing import Any, cast

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.pipe import PipelineModule as DeepSpeedPipelineModule
from torch import nn

from ds_topo.engine import changes
from ds_topo.engine.grid import PipelineEngineGrid, PipelineParallelGrid
from ds_topo.engine.inputs import require_grid
from ds_topo.engine.norms import count_each_parameter_once
from ds_topo.engine.one_layout import grid_in_use, require_topology_in_use
from ds_topo.errors import MissingTopologyError, TopologyError, abridged
from ds_topo.launch.extension_locks import remove_abandoned_locks
from ds_topo.ledger import ledger
from ds_topo.process_groups.creation import require_initialized
from ds_topo.process_groups.grid import ProcessGrid, as_topology
from ds_topo.topology import ProcessTopology
from ds_topo.topology.axes import DATA, PIPE
from ds_topo.topology.rank_tables import RankGroup
from ds_topo.topology.spec import Spec, read_config

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]


_building: list[PipelineEngineGrid] = []


def _grid_of_construction(_: Any) -> Any:
    def build(topology: Any = None, process_group: Any = None) -> PipelineEngineGrid:
        return _building[-1]

    return build


def _world_of_construction(create: Any) -> Any:
    is_first = True

    @wraps(create)
    def world_or_new_group(ranks: Any = None, *arguments: Any, **named: Any) -> Any:
        nonlocal is_first
        is_of_world = is_first and ranks is not None and list(ranks) == list(range(dist.get_world_size()))
        is_first = False
        return dist.group.WORLD if is_of_world else create(ranks, *arguments, **named)

    return world_or_new_group


@contextmanager
def building_on(grid: PipelineEngineGrid) -> Iterator[None]:
    """DeepSpeed's ``PipelineModule`` makes no grid inside, but takes this one."""
    _building.append(grid)
    try:
        with (
            ledger.bound(changes.PIPELINE_GRID, _grid_of_construction),
            ledger.bound(changes.PIPELINE_WORLD, _world_of_construction),
        ):
            yield
    finally:
        _building.pop()


def check_built_on(module: DeepSpeedPipelineModule, grid: PipelineEngineGrid) -> None:
    """Refuse a release that builds pipelines in another way, and let every parameter count once in norms.

    Raises:
        RuntimeError: the module has another grid.
    """
    if module._grid is not grid:
        raise RuntimeError(f"{changes.PIPELINE_GRID} is not what this release of DeepSpeed builds pipelines on")
    count_each_parameter_once(module, grid)


class PipelineModule(DeepSpeedPipelineModule):  # type: ignore[misc]
    """DeepSpeed's ``PipelineModule`` on a ``PipelineParallelGrid`` of any topology, extra axes included.

    Used as DeepSpeed's own: ``deepspeed.initialize(model=PipelineModule(layers, topology=...), ...)`` then
    ``engine.train_batch()``. Groups for tied layers are created by the stages that share them, not by every rank.

    Args:
        layers: modules, ``LayerSpec``, ``TiedLayerSpec`` or functions, in order.
        num_stages: the degree of ``pipe``; the rest of the world is ``data``. Instead of ``topology``. (Or a spec.)
        topology: a topology, or a spec such as ``"data=-1,pipe=2"``.
        config: a DeepSpeed config (path or mapping) whose ``"topology"`` section is used. Instead of ``topology``.
        grid: a grid that exists already, for layers that need one of its groups. Instead of ``topology``.
        timeout: seconds, or a ``timedelta``: of agreement and process groups; the job's by default.
        **options: DeepSpeed's, unchanged: ``loss_fn``, ``partition_method``, ``activation_checkpoint_interval``, ...

    Raises:
        RuntimeError: ``torch.distributed`` is not initialised, or ``LOCAL_RANK`` is not set.
        TopologyError: no topology or more than one, not one for this number of ranks, or fewer layers than stages.
        TypeError, ValueError: layers that cannot be.
        DisagreementError: ranks came with different topologies, or did not come.
    """

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | str | None = None,
        topology: ProcessTopology | Spec | None = None,
        *args: Any,
        config: str | Path | Mapping[str, object] | None = None,
        grid: PipelineParallelGrid | None = None,
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
        layers = _checked_layers(layers)
        if isinstance(num_stages, str):  # a spec in the place of the number
            topology, num_stages = topology or num_stages, None
        layout = _one_layout(num_stages, topology, config, grid)
        if (used := grid_in_use()) is not None and grid is None:
            is_given = topology is not None or config is not None
            require_topology_in_use(cast(Any, layout) if is_given else None, num_stages, used)
            layout = grid = used
        _check_stages(num_stages, layout, len(layers))
        if isinstance(layout, PipelineParallelGrid):
            engine_grid = PipelineEngineGrid.over(layout)
        else:
            engine_grid = PipelineEngineGrid(layout, timeout=timeout)
        try:
            with building_on(engine_grid):
                super().__init__(layers, None, engine_grid._topo, *args, **options)
            check_built_on(self, engine_grid)
        except BaseException:
            if layout is not grid:
                engine_grid.destroy()
            raise

    def topology(self) -> ProcessTopology:
        """The topology as it was given, extra axes included."""
        return self.mpu().topology()

    def mpu(self) -> PipelineEngineGrid:
        """The grid."""
        grid: PipelineEngineGrid = self._grid
        return grid

    def _set_bounds(self, start: int | None = None, stop: int | None = None) -> None:
        with_plain_bounds(super()._set_bounds)(start, stop)

    def _partition_layers(self, method: str = "uniform") -> None:
        self.partition_method = method
        super()._partition_layers(method)

    def _synchronize_tied_weights(self) -> None:
        with torch.no_grad():  # without it torch warns that the broadcast of a parameter is not differentiable
            super()._synchronize_tied_weights()

    def _index_tied_modules(self) -> dict[str, dict[str, Any]]:
        return index_tied_modules(self)


def with_plain_bounds(set_bounds: Any) -> Any:
    """Balanced partitions come as NumPy integers, which Python's ``random.seed`` refuses under ``seed_layers=True``."""

    @wraps(set_bounds)
    def set_plain_bounds(*arguments: Any, **named: Any) -> None:
        def plain(value: Any) -> Any:
            return int(value) if isinstance(value, Integral) else value

        set_bounds(*map(plain, arguments), **{name: plain(value) for name, value in named.items()})

    return set_plain_bounds


def index_tied_modules(module: DeepSpeedPipelineModule) -> dict[str, dict[str, Any]]:
    """Groups of the stages that share a tied module, by its key (DeepSpeed creates those of all ranks)."""
    grid: PipelineEngineGrid = module.mpu()
    tied_comms: dict[str, dict[str, Any]] = {}
    if grid.pipe_parallel_size == 1:
        return tied_comms
    for key, stages in sorted(_stages_of_tied_modules(module).items()):
        if grid.stage_id not in stages:
            continue
        ranks = [grid.stage_to_global(stage) for stage in stages]
        tied_comms[key] = {
            "ranks": ranks,
            "group": grid.create_group(RankGroup(("tied layers", key), tuple(ranks))),
            "weight_attr": module.tied_weight_attrs[key],
            "module": module.tied_modules[key],
        }
        if grid.global_rank != ranks[0]:  # the first stage's copy alone counts in the gradient norm
            for parameter in module.tied_modules[key].parameters():
                parameter.ds_pipe_replicated = True
    return tied_comms


def _stages_of_tied_modules(module: DeepSpeedPipelineModule) -> dict[str, list[int]]:
    stages: dict[str, set[int]] = {}
    for index, layer in enumerate(module._layer_specs):
        if isinstance(layer, TiedLayerSpec):
            stages.setdefault(layer.key, set()).add(module.stage_owner(index))
    return {key: sorted(owners) for key, owners in stages.items()}


def _checked_layers(layers: Iterable[Any]) -> list[Any]:
    """Layers that a stage can build or call.

    Raises:
        ValueError: none.
        TypeError: something else, such as a class without its arguments.
    """
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
        if not isinstance(layer, (nn.Module, LayerSpec)) and not callable(layer):
            raise TypeError(
                f"layer {index} is {abridged(layer)}: give a module, LayerSpec, TiedLayerSpec or a function"
            )
    return checked


def _check_stages(num_stages: object, layout: PipelineParallelGrid | ProcessTopology | Spec, layers: int) -> None:
    """Refuse a number of stages that is not the topology's, or above that of layers; other mistakes are the grid's.

    Raises:
        TopologyError: the message has both numbers.
    """
    try:
        topology = layout.topology() if isinstance(layout, ProcessGrid) else as_topology(layout, dist.get_world_size())
    except (TopologyError, TypeError):
        return  # the grid says so on all ranks
    stages = max(1, topology.get_dim(PIPE))
    if num_stages is not None and num_stages != stages:
        raise TopologyError(f"num_stages={abridged(num_stages)}, but {topology.spec!r} has {stages}: give one of them")
    if layers < stages:
        raise TopologyError(
            f"{layers} layers for the {stages} stages of {topology.spec!r}: give every stage at least one"
        )


def _one_layout(
    num_stages: int | None,
    topology: ProcessTopology | Spec | None,
    config: str | Path | Mapping[str, object] | None,
    grid: PipelineParallelGrid | None,
) -> PipelineParallelGrid | ProcessTopology | Spec:
    """The one layout that was given, in whichever way."""
    ways = {"topology": topology, "config": config, "grid": grid}
    given = [name for name, value in ways.items() if value is not None]
    if len(given) > 1:
        raise TopologyError(f"{' and '.join(given)} are given: pass one of them")
    if config is not None:
        spec: Spec = read_config(config)
        return spec
    if grid is not None:
        require_grid("grid", grid)
    layout = topology if grid is None else grid
    if layout is not None:
        return layout
    if num_stages is None and (used := grid_in_use()) is not None:
        return used
    if num_stages is None:
        raise MissingTopologyError('PipelineModule needs a topology, such as topology="pipe=2,data=-1", or num_stages')
    return {PIPE: num_stages, DATA: -1}
