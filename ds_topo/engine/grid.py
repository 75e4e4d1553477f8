"""``PipelineParallelGrid``: the complete ``mpu`` for DeepSpeed's engines, and the face of it that pipelines see."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, Generic, TypeVar

import deepspeed
import torch

from ds_topo.engine import current_mpu, inputs, norms, options, parameter_gathers
from ds_topo.engine.megatron import MegatronGrid
from ds_topo.engine.releases import is_due, warn_of_releases
from ds_topo.ledger import ledger
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.process_groups.grid import AnyTopology
from ds_topo.topology.axes import SEQ
from ds_topo.topology.rank_tables import gradient_axes

Answer = TypeVar("Answer")

_WHILE_A_GRID_EXISTS = (
    *options.WHILE_A_GRID_EXISTS,
    *norms.WHILE_A_GRID_EXISTS,
    *current_mpu.WHILE_A_GRID_EXISTS,
    *parameter_gathers.WHILE_A_GRID_EXISTS,
)


class _WithSeqAxis(Generic[Answer]):
    """A method that is there only where sequence queries are: its mere presence changes DeepSpeed's path."""

    def __init__(self, method: Callable[[Any], Answer]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, grid: PipelineParallelGrid | None, kind: type) -> Callable[[], Answer]:
        if grid is None:
            return self  # type: ignore[return-value]
        if not grid.offers_sequence_queries:
            raise AttributeError(f"{kind.__name__} of {grid.topology().spec!r} has no {self._name}: no axis {SEQ!r}")
        return partial(self._method, grid)


class PipelineParallelGrid(MegatronGrid):
    """The process groups of one job's topology, as this rank sees them; a complete ``mpu`` for DeepSpeed.

    Drop-in for ``deepspeed.runtime.pipe.topology.PipelineParallelGrid``, for any axes in any order. Creation is
    collective: all ranks compare what they are about to create and raise together if they differ. A rank joins only the
    groups that it belongs to, each distinct set of ranks once. While a grid exists, DeepSpeed's engines refuse options
    that assume another order of ranks (:mod:`ds_topo.engine.changes` lists what is changed, until ``destroy()``).

    - ``data parallel`` groups join the replicas of a parameter: all ranks that share stage and slice. An axis that
      DeepSpeed does not know (``seq``, ``expert``, any other) therefore counts as data, for gradients.
    - ``model parallel`` is pipe x model; its rank is ``stage * slices + slice`` whatever the order of the axes, which
      the universal checkpoint format relies on.
    - ``slice`` and ``tensor model`` parallel are the ``model`` axis, ``pipe`` and ``pipeline model`` the ``pipe`` axis.
    - With a ``seq`` axis, sequence queries exist, and ``get_data_parallel_rank`` and ``_world_size`` count distinct
      samples while ``get_data_parallel_group`` still joins all replicas.

    Arguments and errors are those of :class:`~ds_topo.process_groups.grid.ProcessGrid`.

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
            for change, make in _WHILE_A_GRID_EXISTS:
                if is_due(change):
                    self.on_destroy(ledger.bind(change, make))
            self.on_destroy(partial(current_mpu.forget, self))
            inputs.grids.add(self)
            undo.pop_all()

    @cached_property
    def offers_sequence_queries(self) -> bool:
        """Whether the ``get_sequence_*`` methods exist."""
        return SEQ in self.topology().axes

    @_WithSeqAxis
    def get_sequence_parallel_group(self) -> ProcessGroup:
        """This rank's group along ``seq``: the ranks that share its samples."""
        return self.get_group(SEQ)

    @_WithSeqAxis
    def get_sequence_parallel_world_size(self) -> int:
        """The degree of ``seq``."""
        return self.get_axis_size(SEQ)

    @_WithSeqAxis
    def get_sequence_parallel_rank(self) -> int:
        """This rank's index along ``seq``."""
        return self.get_axis_rank(SEQ)

    @_WithSeqAxis
    def get_sequence_parallel_src_rank(self) -> int:
        """The global rank of the first member of the sequence parallel group."""
        return self.get_ranks(SEQ)[0]

    @_WithSeqAxis
    def get_sequence_data_parallel_group(self) -> ProcessGroup:
        """All replicas of this rank's parameters, over data and seq."""
        return self.get_data_parallel_group()

    @_WithSeqAxis
    def get_sequence_data_parallel_world_size(self) -> int:
        """The number of replicas."""
        return len(self.dp_group)

    @_WithSeqAxis
    def get_sequence_data_parallel_rank(self) -> int:
        """Which of the replicas this rank holds."""
        return self.topology().get_axis_index(gradient_axes(self.topology()), self.grid_rank)

    @_WithSeqAxis
    def get_sequence_data_parallel_src_rank(self) -> int:
        """The global rank of the first replica."""
        return self.dp_group[0]

    def __dir__(self) -> list[str]:
        hidden = () if self.offers_sequence_queries else SEQUENCE_QUERIES
        return [name for name in super().__dir__() if name not in hidden]


SEQUENCE_QUERIES = tuple(name for name, value in vars(PipelineParallelGrid).items() if isinstance(value, _WithSeqAxis))
"""Methods whose mere presence changes DeepSpeed's path: a grid offers them only where there is a ``seq`` axis."""


class PipelineEngineGrid(PipelineParallelGrid):
    """The grid of a pipeline engine: every extra axis, ``seq`` included, is data parallel.

    The engine averages losses over the data parallel group and divides by its size, and its ZeRO-1 sums over ``seq``
    where stage 0 averages as soon as an mpu has sequence queries; so here sizes count all replicas, and there are none.
    """

    @cached_property
    def offers_sequence_queries(self) -> bool:
        """Never."""
        return False

    @cached_property
    def data_parallel_size(self) -> int:
        """The number of replicas."""
        return len(self.dp_group)

    @cached_property
    def data_parallel_id(self) -> int:
        """Which of the replicas this rank holds."""
        return self.topology().get_axis_index(gradient_axes(self.topology()), self.grid_rank)
