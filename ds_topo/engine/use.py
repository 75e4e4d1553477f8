"""One grid for programs that call DeepSpeed themselves: frameworks, and code that imports DeepSpeed's classes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, wraps
from types import TracebackType
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from typing_extensions import Self

from ds_topo.engine import changes, zero_init
from ds_topo.engine.frameworks import deal_samples
from ds_topo.engine.grid import PipelineEngineGrid, PipelineParallelGrid
from ds_topo.engine.initialize import initialize
from ds_topo.engine.inputs import require_grid
from ds_topo.engine.one_layout import grid_in_use, in_use, require_topology_in_use
from ds_topo.engine.pipeline import PipelineModule, building_on, check_built_on, index_tied_modules, with_plain_bounds
from ds_topo.errors import TopologyError
from ds_topo.ledger import Change, Make, always, ledger
from ds_topo.topology.axes import DATA, MODEL, PIPE, SEQ
from ds_topo.topology.process_topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology
from ds_topo.topology.rank_tables import fold_extra_axes


class use:  # noqa: N801 (a verb, and a context manager)
    """Let the rest of the program work on a grid: until ``with`` ends, ``release()``, or ``grid.destroy()``.

    - ``deepspeed.initialize`` is :func:`ds_topo.initialize`: its engines get the grid as their mpu, and the section
      ``"gradient_reducer"`` of the config is served. An mpu of the program's own is replaced by the grid if it joins
      the same ranks, and refused if not.
    - DeepSpeed's ``PipelineModule``, and whatever derives from it, is built on the grid; a topology that places ranks
      otherwise is refused. The names in ``deepspeed.runtime.pipe.topology`` are ours, and topologies that are asked for
      by degrees alone (``PipeModelDataParallelTopology(num_pp, num_mp, num_dp)``) are in the grid's order.
    - ``deepspeed.zero.Init`` without a group partitions over the replicas of a parameter, not over all ranks;
      ``GatheredParameters(modifier_rank=0)`` sends what the grid's first rank has written to all slices, but for
      parameters that are marked as a slice.
    - accelerate, and so Trainer, deals samples over the ranks that work on different ones
      (:meth:`~ds_topo.ProcessGrid.get_sample_rank`).
    - With a ``seq`` axis, DeepSpeed's long sequence training (``UlyssesSPAttentionHF``) uses its groups, in any order.

    Entering and leaving bind and restore names (``python -m ds_topo.engine`` lists them); no rank communicates.

    Args:
        grid: of the whole job.

    Raises:
        TypeError: no grid.
        RuntimeError: another grid is in use, or this one was destroyed.
        TopologyError: sequence parallel groups of DeepSpeed exist already, and join other ranks.

    >>> import deepspeed, torch.distributed as dist
    >>> from torch.testing._internal.distributed.fake_pg import FakeStore
    >>> dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    >>> grid = PipelineParallelGrid("data=2,model=2")
    >>> with use(grid):
    ...     deepspeed.initialize.__module__
    'ds_topo.engine.initialize'
    >>> deepspeed.initialize.__module__
    'deepspeed'
    >>> grid.destroy(), dist.destroy_process_group()
    (None, None)
    """

    def __init__(self, grid: PipelineParallelGrid) -> None:
        require_grid("grid", grid)
        if not grid.is_alive:
            raise RuntimeError(f"use({grid.topology().spec!r}): the grid was destroyed")
        before = grid_in_use()
        if before is not None and not before.shares_groups_with(grid):
            raise RuntimeError(
                f"use({grid.topology().spec!r}): {before.topology().spec!r} is in use: release() or destroy() it first"
            )
        if before is None:
            _bind(grid)
        in_use.append(grid)
        self.grid = grid
        self._is_over = False
        grid.on_destroy(self.release)

    def release(self) -> None:
        """End it, once; what is bound is put back when no other call holds the grid."""
        if self._is_over:
            return
        self._is_over = True
        in_use.remove(self.grid)
        if not in_use:
            _put_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


_releases: list[Callable[[], None]] = []
"""Of what is bound for the grid in use."""


def _bind(grid: PipelineParallelGrid) -> None:
    try:
        for change, make in WHILE_A_GRID_IS_IN_USE:
            _releases.append(ledger.bind(change, make))
        _releases.extend(deal_samples(grid))
        if SEQ in grid.topology().axes:
            _require_no_other_groups_of_seq(grid)
            for change, value in zip(
                changes.LONG_SEQUENCES,
                (grid.get_group(SEQ), grid.get_data_parallel_group(), partial(_require_degree_of_seq, grid)),
                strict=True,
            ):
                _releases.append(ledger.bind(change, always(value)))
    except BaseException:
        _put_back()
        raise


def _put_back() -> None:
    with ExitStack() as releases:  # all of them, even where one raises
        for release in _releases:
            releases.callback(release)
        _releases.clear()


def _require_no_other_groups_of_seq(grid: PipelineParallelGrid) -> None:
    """Attention that is registered already keeps the groups that it has found.

    Raises:
        TopologyError: they are not the grid's.
    """
    group = parallel_state_sp._SEQUENCE_PARALLEL_GROUP
    found = grid.get_ranks(SEQ) if group is None else sorted(dist.get_process_group_ranks(group))
    if found != grid.get_ranks(SEQ):
        raise TopologyError(
            f"use({grid.topology().spec!r}): initialize_sequence_parallel() or register_with_transformers() has joined "
            f"ranks {found} before, and the grid joins {grid.get_ranks(SEQ)} along {SEQ!r}: call it after use()"
        )


def _require_degree_of_seq(grid: PipelineParallelGrid, sequence_parallel_size: int) -> None:
    """``initialize_sequence_parallel`` of DeepSpeed, whose groups are there already.

    Raises:
        TopologyError: they have another size.
    """
    if sequence_parallel_size != grid.get_axis_size(SEQ):
        raise TopologyError(
            f"sequence_parallel_size {sequence_parallel_size}, but the grid in use is {grid.topology().spec!r}: give "
            "both one degree"
        )


def _constructed_on_grid(construct: Any) -> Any:
    @wraps(construct)
    def on_grid(
        module: Any, layers: Any, num_stages: int | None = None, topology: Any = None, *args: Any, **options: Any
    ) -> None:
        grid = grid_in_use()
        if isinstance(module, PipelineModule) or grid is None:  # ours does so by itself
            construct(module, layers, num_stages, topology, *args, **options)
            return
        require_topology_in_use(topology, num_stages, grid)
        engine_grid = PipelineEngineGrid.over(grid)
        with building_on(engine_grid):
            construct(module, layers, None, engine_grid._topo, *args, **options)
        check_built_on(module, engine_grid)

    return on_grid


def _in_the_order_in_use(degrees: dict[str, int], otherwise: ProcessTopology) -> ProcessTopology:
    """The layout of the grid in use for a program that asks for degrees alone, if it has them."""
    grid = grid_in_use()
    layout = fold_extra_axes(grid.topology()) if grid is not None else otherwise
    return layout if all(max(1, layout.get_dim(axis)) == degree for axis, degree in degrees.items()) else otherwise


class _PipeDataInUse(PipeDataParallelTopology):
    def __new__(cls, num_pp: int, num_dp: int) -> ProcessTopology:  # type: ignore[misc]
        otherwise = PipeDataParallelTopology(num_pp, num_dp)
        return _in_the_order_in_use({PIPE: num_pp, DATA: num_dp, MODEL: 1}, otherwise)


class _PipeModelDataInUse(PipeModelDataParallelTopology):
    def __new__(cls, num_pp: int, num_mp: int, num_dp: int) -> ProcessTopology:  # type: ignore[misc]
        otherwise = PipeModelDataParallelTopology(num_pp, num_mp, num_dp)
        return _in_the_order_in_use({PIPE: num_pp, DATA: num_dp, MODEL: num_mp}, otherwise)


_OURS = {
    "ProcessTopology": always(ProcessTopology),
    "PipeDataParallelTopology": always(_PipeDataInUse),
    "PipeModelDataParallelTopology": always(_PipeModelDataInUse),
    "PipelineParallelGrid": always(PipelineParallelGrid),
}
WHILE_A_GRID_IS_IN_USE: tuple[tuple[Change, Make], ...] = (
    (changes.INITIALIZE, always(initialize)),
    (changes.NAME_OF_PIPELINES, always(PipelineModule)),
    (changes.CONSTRUCT_PIPELINE, _constructed_on_grid),
    (changes.TIED_MODULES, always(index_tied_modules)),
    (changes.SET_BOUNDS, with_plain_bounds),
    *zero_init.WHILE_A_GRID_IS_IN_USE,
    *((change, _OURS[change.name]) for change in changes.NAMES_OF_TOPOLOGIES),
)
