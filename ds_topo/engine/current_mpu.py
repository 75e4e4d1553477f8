"""Keep track of the one mpu that DeepSpeed's functions query, so that engines of several grids work side by side.

Also of the grid of :func:`ds_topo.use`, and of the ranks of an engine, which agree before they go on.

DeepSpeed keeps one mpu for all engines of a process, in ``deepspeed.utils.groups``: that of the engine that was built
last. The methods of an engine on a grid make its own mpu the current one, and restore the former one at their end. So
does a backward pass, from its start to its end, because a program may start it by ``loss.backward()``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, TypeAlias

import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import groups as deepspeed_groups

from ds_topo.base.torch_names import job_timeout
from ds_topo.launch.council import agree
from ds_topo.mpu import MpuGrid, registry
from ds_topo.topology.axes import PIPE

_NAMES = (
    "mpu",
    "expert_tensor_parallel_world_size",
    "_TENSOR_MODEL_PARALLEL_GROUP",
    "_MODEL_PARALLEL_GROUP",
    "_DATA_PARALLEL_GROUP",
)
"""The names of ``deepspeed.utils.groups`` that belong to one mpu."""
_values = attrgetter(*_NAMES)
_variables = vars(deepspeed_groups)

Values: TypeAlias = tuple[Any, ...]
"""Their values, of which the first one is the mpu."""


class CurrentMpu:
    """The current mpu of the process."""

    def __init__(self) -> None:
        self._in_backward: list[weakref.ref[DeepSpeedEngine]] = []
        """The engines whose backward pass is running; the last one began last."""
        self._before_backward: Values | None = None
        """What was current before the first of them began; None while there is none."""

    def set(self, mpu: Any, *, begins_call: bool = False) -> Values:
        """Make an mpu the current one; return what was current, for :meth:`restore`.

        A call of an engine ends interrupted backward passes first, and ends itself by :meth:`end_call`.
        """
        if begins_call and self._before_backward is not None:
            self.end_call(self._before_backward)
        before: Values = _values(deepspeed_groups)
        former = before[0]
        if isinstance(mpu, MpuGrid):
            known = registry.of(mpu) if registry.has_groups else []
            experts = mpu.slice_parallel_size if known and known[0].plan.expert_tensor_parallel else 1
            if mpu is former:  # in most calls; its experts may be new
                deepspeed_groups.expert_tensor_parallel_world_size = experts
                return before
            slices = data = None  # AutoTP creates groups of its own, unless it finds some
            if mpu.slice_parallel_size > 1:
                slices, data = mpu.get_tensor_model_parallel_group(), mpu.get_data_parallel_group()
            values: Values = mpu, experts, slices, slices, data
        elif isinstance(former, MpuGrid):
            values = mpu, 1, None, None, None
        else:
            values = mpu, *before[1:]
        _variables.update(zip(_NAMES, values, strict=True))
        return before

    def restore(self, values: Values) -> None:
        """Make current what :meth:`set` has returned."""
        _variables.update(zip(_NAMES, values, strict=True))

    def forget(self, grid: MpuGrid) -> None:
        """Reset the current mpu if it is this grid, so that no later engine without an mpu finds it."""
        if isinstance(deepspeed_groups.mpu, MpuGrid) and grid.shares_groups_with(deepspeed_groups.mpu):
            self.set(None)

    def end_call(self, before: Values) -> None:
        """Make current what :meth:`set` has returned, and end backward passes."""
        self._in_backward.clear()
        self._before_backward = None
        _variables.update(zip(_NAMES, before, strict=True))

    def begin_backward(self, engine: DeepSpeedEngine) -> None:
        """Make the mpu of an engine the current one until :meth:`end_backward`."""
        before = self.set(engine.mpu)
        if not self._in_backward:
            self._before_backward = before
        if (reference := weakref.ref(engine)) not in self._in_backward:
            self._in_backward.append(reference)

    def end_backward(self, engine: DeepSpeedEngine) -> None:
        """Make the mpu of another engine of the same backward pass the current one, or what was current before it."""
        if (reference := weakref.ref(engine)) in self._in_backward:
            self._in_backward.remove(reference)
        while self._in_backward and self._in_backward[-1]() is None:
            self._in_backward.pop()
        last = self._in_backward[-1]() if self._in_backward else None
        if last is not None:
            self.set(last.mpu)
        elif self._before_backward is not None:
            self.end_call(self._before_backward)

    def is_needed_by_others(self, before: Values) -> bool:
        """Tell whether there may be an engine without a grid, whose methods would find a grid that stays current.

        Garbage collection must not decide this, because ranks collect at different times: an engine without an mpu
        counts from its construction, which clones the world's group, until the end of the world.
        """
        former = before[0]
        has_other_mpu = former is not None and not isinstance(former, MpuGrid)
        return has_other_mpu or deepspeed_groups._WORLD_GROUP is not None


current = CurrentMpu()
"""The one of this process."""


in_use: list[MpuGrid] = []
"""The grid of :func:`ds_topo.use`, once for every call that has not ended."""


def grid_in_use() -> MpuGrid | None:
    """Return the grid of :func:`ds_topo.use`, or None."""
    return in_use[-1] if in_use else None


def axes_of_engine(grid: MpuGrid, is_pipeline: bool) -> list[str]:
    """Return the axes of an engine's ranks: without a pipeline engine, each stage of a program has an engine."""
    return [axis for axis in grid.topology().axes if axis != PIPE or is_pipeline]


@contextmanager
def agreement(members: Sequence[int], subject: str, description: str = "") -> Iterator[list[str]]:
    """Compare a description, or else the lines that a block adds, between ranks, or raise its error on all of them.

    Raises:
        DisagreementError: they differ, or the block of another rank has raised an error; the message names ranks.
    """
    lines: list[str] = []
    failure: Exception | None = None
    try:
        yield lines
    except Exception as error:  # of any kind, because the other ranks must raise, too
        failure = error
    agree(description, members, job_timeout(), failure=failure, subject=subject, lines=None if description else lines)


def get_tensor_model_parallel_src_rank() -> int:
    """Return the first global rank of the tensor model parallel group, the current mpu's or DeepSpeed's own."""
    if isinstance(deepspeed_groups.mpu, MpuGrid):
        return deepspeed_groups.mpu.get_tensor_model_parallel_src_rank()
    return min(dist.get_process_group_ranks(deepspeed_groups.get_tensor_model_parallel_group()))
