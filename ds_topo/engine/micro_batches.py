"""Whether every stage that reads samples has as many micro-batches as a step takes, agreed before the step starts.

Only the first and the last stage of a pipeline read samples. Where an iterator ends within a step, DeepSpeed raises
``StopIteration`` on the ranks that found it, and all others wait for activations that never come.
"""

from __future__ import annotations

import inspect
import operator
from collections import deque
from collections.abc import Iterator
from functools import wraps
from itertools import cycle, islice, repeat
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.dataloader import RepeatingLoader
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ds_topo.engine.mpu import MpuGrid
from ds_topo.errors import EndOfSamplesError, abridged

_ENDLESS = 2**31
_MOST_STEPS = 64
"""Without asking: a program may go on with another iterator."""
_NO_ITERATOR, _FAILED = -1, -2
_steps_promised: WeakKeyDictionary[PipelineEngine, int] = WeakKeyDictionary()
"""Training steps for which the iterators of all ranks last; nobody asks again before."""


class ReadAhead(Iterator[Any]):
    """An iterator of which some elements can be read before they are asked for."""

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        self._ahead: deque[Any] = deque()

    def __next__(self) -> Any:
        return self._ahead.popleft() if self._ahead else next(self._source)

    def fill(self, count: int) -> int:
        """Read until ``count`` elements are there, or all; return how many are."""
        self._ahead.extend(islice(self._source, max(0, count - len(self._ahead))))
        return len(self._ahead)


def remaining(iterator: Iterator[Any]) -> int | None:
    """Elements that an iterator has left, where that can be known without reading them.

    >>> remaining(iter([1, 2])), remaining(repeat(0)) > 10**6, remaining(number for number in (1, 2))
    (2, True, None)
    """
    if isinstance(iterator, (RepeatingLoader, cycle)):
        return _ENDLESS
    if isinstance(iterator, _BaseDataLoaderIter) and hasattr(iterator._dataset, "__len__"):
        return len(iterator) - int(iterator._num_yielded)
    if isinstance(iterator, repeat):
        return operator.length_hint(iterator, _ENDLESS)
    if type(iterator).__module__ == "builtins":  # others' hints may be estimates
        hint = operator.length_hint(iterator, -1)
        return hint if hint >= 0 else None
    return None


def with_enough_micro_batches(method: Any) -> Any:
    """``train_batch`` or ``eval_batch`` of a pipeline engine that starts on all ranks or on none."""
    signature = inspect.signature(method)
    training = method.__name__ == "train_batch"

    @wraps(method)
    def start_together(engine: PipelineEngine, *args: Any, **options: Any) -> Any:
        given = signature.bind(engine, *args, **options)
        wanted = given.arguments.get("num_micro_batches") or engine.micro_batches
        iterator = given.arguments.get("data_iter")
        if isinstance(engine.grid, MpuGrid) and engine.grid.world_size > 1:
            if training and _steps_promised.get(engine, 0) > 0:
                _steps_promised[engine] -= 1
            else:
                iterator = _require(engine, iterator, wanted, training)
                if iterator is not None:
                    given.arguments["data_iter"] = iterator
        return method(*given.args, **given.kwargs)

    return start_together


def _require(engine: PipelineEngine, given: Iterator[Any] | None, wanted: int, training: bool) -> Iterator[Any] | None:
    """Agree that all have what a step takes; return the iterator in place of the one given.

    Raises:
        EndOfSamplesError: on every rank; the message names the one that has fewest.
        Exception: this rank's, of reading samples.
    """
    left, failure = _ENDLESS, None
    iterator = engine.data_iterator if given is None and training else given
    reads = engine.is_first_stage() or engine.is_last_stage()
    if reads and iterator is None:
        left = _NO_ITERATOR if engine.batch_fn is None else _ENDLESS  # batch_fn may have samples from elsewhere
    elif reads and iterator is not None:
        try:
            iterator, left = _read_ahead(iterator, wanted)
        except Exception as error:
            left, failure = _FAILED, error
        if given is None:
            engine.data_iterator = iterator
    fewest, rank = _fewest(left, engine.grid)
    if failure is not None:
        raise failure
    if fewest < wanted:
        raise EndOfSamplesError(_message(engine.grid, rank, fewest, wanted))
    if training:
        _steps_promised[engine] = min(fewest // wanted, _MOST_STEPS) - 1
    return None if given is None else iterator


def _read_ahead(iterator: Iterator[Any], wanted: int) -> tuple[Iterator[Any], int]:
    """An iterator of the same elements, and how many it has left, or whether there are as many as wanted.

    Raises:
        TypeError: it is no iterator.
    """
    if not hasattr(iterator, "__next__"):
        raise TypeError(f"data_iter={abridged(iterator)} is no iterator: pass iter(...) of it, made before the loop")
    known = remaining(iterator)
    if known is not None:
        return iterator, known
    ahead = iterator if isinstance(iterator, ReadAhead) else ReadAhead(iterator)
    return ahead, ahead.fill(wanted)


def _fewest(left: int, grid: MpuGrid) -> tuple[int, int]:
    """The smallest number of all ranks, and the first rank of the grid that has it."""
    device = get_accelerator().current_device_name()
    first = torch.tensor((min(left, _ENDLESS) - _FAILED) * grid.world_size + grid.grid_rank, device=device)
    dist.all_reduce(first, dist.ReduceOp.MIN, group=grid.get_group(grid.topology().axes))
    number, rank = divmod(int(first), grid.world_size)
    return number + _FAILED, rank


def _message(grid: MpuGrid, rank: int, number: int, wanted: int) -> str:
    found = {
        _FAILED: "failed to read samples",
        _NO_ITERATOR: "has no data iterator",
    }.get(number, f"has {number} of the {wanted} micro-batches that this step takes")
    where = ", ".join(f"{axis}={index}" for axis, index in grid.topology().get_coord(rank)._asdict().items())
    [rank] = grid.to_global([rank])
    return (
        f"rank {rank} ({where}) {found}, so no rank starts it: every rank of the first and of the last stage needs an "
        "iterator that lasts; deepspeed.utils.RepeatingLoader starts anew where one ends"
    )
