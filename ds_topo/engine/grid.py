"""Define ``PipelineParallelGrid``, the complete ``mpu`` for DeepSpeed's engines, and its variant for pipelines."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, Generic, TypeVar

import deepspeed
import torch

from ds_topo.engine import checks
from ds_topo.engine.autotp import get_tensor_model_parallel_src_rank
from ds_topo.engine.engine_patches import forget, patching_engines
from ds_topo.ledger import always, ledger
from ds_topo.mpu import patches
from ds_topo.mpu.mpu import MpuGrid
from ds_topo.mpu.releases import warn_of_releases
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.process_groups.process_grid import AnyTopology
from ds_topo.topology.axes import MODEL, SEQ
from ds_topo.topology.rank_tables import gradient_axes

Answer = TypeVar("Answer")
_FIRST_OF_SLICES = always(get_tensor_model_parallel_src_rank)
"""One object for all grids, which share the replacement."""


class _WithSeqAxis(Generic[Answer]):
    """A method that exists only on grids with sequence queries, because DeepSpeed tests for its presence."""

    def __init__(self, method: Callable[[Any], Answer]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, grid: PipelineParallelGrid | None, kind: type) -> Callable[[], Answer]:
        if grid is None:
            return self  # type: ignore[return-value]
        if not grid.offers_sequence_queries:
            raise AttributeError(
                f"{kind.__name__} of {grid.topology().spec!r} has no {self._name}: it needs an axis {SEQ!r}"
            )
        return partial(self._method, grid)


class PipelineParallelGrid(MpuGrid):
    """The process groups of one job's topology, as this rank sees them; a complete ``mpu`` for DeepSpeed.

    Drop-in for ``deepspeed.runtime.pipe.topology.PipelineParallelGrid``, for any axes in any order. Creation is
    collective: all ranks compare their plans first, and raise together if the plans differ. A rank joins only the
    groups that it belongs to, and each distinct set of ranks is created once. Until ``destroy()``, an engine of the
    grid has patched methods, and refuses options that assume another order of ranks (:mod:`ds_topo.mpu.patches`).

    - ``data parallel`` groups join the replicas of a parameter: all ranks that share stage and slice. An axis that
      DeepSpeed does not know (``seq``, ``expert``, any other) therefore counts as data, for gradients.
    - ``model parallel`` is pipe x model. Its rank is ``stage * slices + slice`` for any order of the axes, because the
      universal checkpoint format relies on that.
    - ``slice`` and ``tensor model`` parallel are the ``model`` axis, ``pipe`` and ``pipeline model`` the ``pipe`` axis.
    - With a ``seq`` axis, sequence queries exist, and ``get_data_parallel_rank`` and ``_world_size`` count distinct
      samples while ``get_data_parallel_group`` still joins all replicas.

    Arguments and errors are those of :class:`~ds_topo.process_groups.process_grid.ProcessGrid`.

    >>> import torch.distributed as dist
    >>> from torch.testing._internal.distributed.fake_pg import FakeStore
    >>> dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    >>> with PipelineParallelGrid("pipe=2,data=2,model=2") as grid:
    ...     print(grid)
    ...     grid.get_ranks("data"), grid.get_ranks(("pipe", "model")), grid.get_model_parallel_rank()
    PipelineParallelGrid('pipe=2,data=2,model=2', rank 5: pipe=1, data=0, model=1)
    ([5, 7], [0, 1, 4, 5], 3)
    >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        topology: AnyTopology | None = None,
        process_group: ProcessGroup | None = None,
        *,
        timeout: float | timedelta | None = None,
        extra_axes: Iterable[str] = (),
    ) -> None:
        warn_of_releases(deepspeed.__version__, torch.__version__)
        super().__init__(topology, process_group, timeout=timeout, extra_axes=extra_axes)
        with ExitStack() as undo:
            undo.callback(self.destroy)
            self.on_destroy(ledger.bind(patches.CONSTRUCT_ENGINE, patching_engines))
            if self.get_axis_size(MODEL) > 1:
                self.on_destroy(ledger.bind(patches.SOURCE_OF_SLICES, _FIRST_OF_SLICES))
            self.on_destroy(partial(forget, self))
            checks.grids.add(self)
            undo.pop_all()

    @cached_property
    def offers_sequence_queries(self) -> bool:
        """True if the ``get_sequence_*`` methods exist."""
        return SEQ in self.topology().axes

    @_WithSeqAxis
    def get_sequence_parallel_group(self) -> ProcessGroup:
        """Return this rank's group along ``seq``: the ranks that share its samples."""
        return self.get_group(SEQ)

    @_WithSeqAxis
    def get_sequence_parallel_world_size(self) -> int:
        """Return the degree of ``seq``."""
        return self.get_axis_size(SEQ)

    @_WithSeqAxis
    def get_sequence_parallel_rank(self) -> int:
        """Return this rank's index along ``seq``."""
        return self.get_axis_rank(SEQ)

    @_WithSeqAxis
    def get_sequence_parallel_src_rank(self) -> int:
        """Return the global rank of the first member of the sequence parallel group."""
        return self.get_ranks(SEQ)[0]

    @_WithSeqAxis
    def get_sequence_data_parallel_group(self) -> ProcessGroup:
        """Return the group of all replicas of this rank's parameters, over data and seq."""
        return self.get_data_parallel_group()

    @_WithSeqAxis
    def get_sequence_data_parallel_world_size(self) -> int:
        """Return the number of replicas."""
        return len(self.dp_group)

    @_WithSeqAxis
    def get_sequence_data_parallel_rank(self) -> int:
        """Return the index of the replica that this rank holds."""
        return self.topology().get_axis_index(gradient_axes(self.topology()), self.grid_rank)

    @_WithSeqAxis
    def get_sequence_data_parallel_src_rank(self) -> int:
        """Return the global rank of the first replica."""
        return self.dp_group[0]

    def __dir__(self) -> list[str]:
        hidden = () if self.offers_sequence_queries else SEQUENCE_QUERIES
        return [name for name in super().__dir__() if name not in hidden]


SEQUENCE_QUERIES = tuple(name for name, value in vars(PipelineParallelGrid).items() if isinstance(value, _WithSeqAxis))
"""The names of the methods that only grids with sequence queries have."""


class PipelineEngineGrid(PipelineParallelGrid):
    """The grid of a pipeline engine: every extra axis, ``seq`` included, is data parallel.

    The engine sums losses over the data parallel group and divides by its size, so sizes count all replicas here. The
    grid has no sequence queries: with them, ZeRO-1 would sum gradients over ``seq`` where stage 0 averages them.
    """

    @cached_property
    def offers_sequence_queries(self) -> bool:
        """Always false."""
        return False

    @cached_property
    def data_parallel_size(self) -> int:
        """The number of replicas."""
        return len(self.dp_group)

    @cached_property
    def data_parallel_id(self) -> int:
        """The index of the replica that this rank holds."""
        return self.topology().get_axis_index(gradient_axes(self.topology()), self.grid_rank)
