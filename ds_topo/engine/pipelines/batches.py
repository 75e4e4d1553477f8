"""Start a step of a pipeline on all ranks or on none: each that reads samples has enough micro-batches.

Only the first and the last stage of a pipeline read samples. If an iterator ends within a step, DeepSpeed raises
``StopIteration`` on the ranks that found it, and all others wait for activations that never come. So before each step
the ranks agree that all of them have enough micro-batches. A count holds for one step, because a program may pass
another iterator next time. A program that makes a new iterator for each step, and thereby reads the first samples
alone, is warned.
"""

from __future__ import annotations

import inspect
import operator
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import cycle, islice, repeat
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.dataloader import RepeatingLoader
from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_topo.engine.pipelines.activation_shapes import Shapes, buffers_for, shapes_of
from ds_topo.engine.samples import described, digest, require_equal
from ds_topo.errors import DisagreementError, EndOfSamplesError, abridged, listed, warn
from ds_topo.mpu import MpuGrid
from ds_topo.topology.axes import MODEL

_ENDLESS = 2**31
_NO_ITERATOR, _FAILED = -1, -2


class ReadAhead(Iterator[Any]):
    """An iterator whose next elements can be read in advance."""

    def __init__(self, source: Iterator[Any]) -> None:
        self.source = source
        self.ahead: deque[Any] = deque()
        """Elements that were read already."""
        self._versions: list[int] = []
        """The versions of the tensors in the last of them when it was read."""

    def __next__(self) -> Any:
        return self.ahead.popleft() if self.ahead else next(self.source)

    def first(self) -> Any:
        """Return the next element, which stays the next one; None at the end."""
        return self.ahead[0] if self.fill(1) else None

    def fill(self, count: int) -> int:
        """Read ahead ``count`` elements, or all that are left; return the number of elements read ahead.

        Refuse a source that has written into the tensors of an earlier element.
        """
        for element in islice(self.source, max(0, count - len(self.ahead))):
            if self.ahead and _versions_in(self.ahead[-1]) != self._versions:
                raise ValueError(
                    "the data iterator writes each micro-batch into the tensors of the one before, but those of a step "
                    "are read before it starts: yield new tensors, such as tensor.clone()"
                )
            self.ahead.append(element)
            self._versions = _versions_in(element)
        return len(self.ahead)


def _versions_in(element: Any) -> list[int]:
    """Return how often each tensor in an element of nested tuples and lists was written."""
    if isinstance(element, (tuple, list)):
        return [version for part in element for version in _versions_in(part)]
    return [element._version] if isinstance(element, torch.Tensor) and not element.is_inference() else []


def remaining(iterator: Iterator[Any]) -> int | None:
    """Return the number of elements that an iterator has left; None if that is unknown without reading them.

    >>> remaining(iter([1, 2])), remaining(repeat(0)) > 10**6, remaining(number for number in (1, 2))
    (2, True, None)
    """
    if isinstance(iterator, ReadAhead):
        left = remaining(iterator.source)
        return None if left is None else left + len(iterator.ahead)
    if isinstance(iterator, (RepeatingLoader, cycle)):
        return _ENDLESS
    if isinstance(iterator, repeat):
        return operator.length_hint(iterator, _ENDLESS)
    if type(iterator).__module__ == "builtins":  # the hints of other iterators may be estimates
        hint = operator.length_hint(iterator, -1)
        return hint if hint >= 0 else None
    return None


def run_with_enough(method: Any, engine: PipelineEngine, *args: Any, **options: Any) -> Any:
    """Call ``train_batch`` or ``eval_batch`` of a pipeline engine on all ranks or on none."""
    given, call = inspect.signature(method).bind(*args, **options), method.__name__
    wanted, starts = given.arguments.get("num_micro_batches") or engine.micro_batches, engine.starts
    iterator = given.arguments.get("data_iter")
    context: AbstractContextManager[None] = nullcontext()
    if engine.grid.world_size > 1:
        is_own = iterator is None and call == "train_batch"
        found, shapes = _require(engine, call, engine.data_iterator if is_own else iterator, wanted, is_own)
        if iterator is not None:
            given.arguments["data_iter"] = found
        context = buffers_for(engine, call, wanted, *shapes)
    elif call == "train_batch":
        given.arguments["data_iter"] = starts.look(engine, iterator, wanted)
    with context:
        result = method(*given.args, **given.kwargs)
    starts.end(engine)
    return result


def _require(
    engine: PipelineEngine, call: str, iterator: Iterator[Any] | None, wanted: int, is_own: bool = False
) -> tuple[Iterator[Any] | None, tuple[list[Shapes], bool, bool]]:
    """Agree that all ranks have enough samples for a step, and whether these have other shapes than the last ones.

    Returns:
        The iterator to use instead of the given one; the shapes of this rank's micro-batches where they matter, whether
        those of some rank have changed since the last step, and whether they change within this one.
    """
    left, failure = _ENDLESS, None
    shapes: list[Shapes] = []
    if not (engine.is_first_stage() or engine.is_last_stage()):
        pass  # other stages read no samples
    elif iterator is None:
        left = _NO_ITERATOR if engine.batch_fn is None else _ENDLESS  # batch_fn may produce samples itself
    else:
        try:
            if call == "train_batch" and not is_own:
                iterator = engine.starts.look(engine, iterator, wanted)
            iterator, left = _read_ahead(iterator, wanted)
            if not engine.starts.is_checked and left and engine.batch_fn is None:
                iterator = iterator if isinstance(iterator, ReadAhead) else ReadAhead(iterator)
                _check_batch(iterator.first(), engine.is_first_stage())
                engine.starts.is_checked = True
            if left >= wanted and _are_shapes_read(engine):
                iterator = iterator if isinstance(iterator, ReadAhead) else ReadAhead(iterator)
                iterator.fill(wanted)
                part = 0 if engine.is_first_stage() else 1
                shapes = [shapes_of(batch[part]) for batch in islice(iterator.ahead, wanted)]
        except Exception as error:
            left, failure = _FAILED, error
        if is_own:
            engine.data_iterator = iterator
    uneven = len({*shapes}) > 1 and engine.is_first_stage()
    flags = engine.starts.shapes != shapes[:1], uneven, call == "train_batch", call != "train_batch"
    fewest, rank, (changed, uneven, trains, evaluates) = _fewest(left, engine.grid, *flags)
    if trains and evaluates:
        raise DisagreementError(
            f"{described(engine.grid, engine.grid.grid_rank)} has called {call}(), but other ranks of the pipeline "
            f"{'eval' if call == 'train_batch' else 'train'}_batch(): call both on every rank, in one order"
        )
    if failure is not None:
        raise failure
    if fewest < wanted:
        reasons = {_FAILED: "failed to read samples", _NO_ITERATOR: "has no data iterator"}
        reason = reasons.get(fewest, f"has {fewest} of the {wanted} micro-batches that this step takes")
        raise EndOfSamplesError(
            f"{described(engine.grid, rank)} {reason}, so no rank starts it: every rank of the first and of the last "
            "stage needs an iterator with enough micro-batches; deepspeed.utils.RepeatingLoader restarts one that ends"
        )
    if changed and engine.grid.get_axis_size(MODEL) > 1:
        read = [zlib.crc32(repr(shapes).encode())]
        require_equal(read, engine.grid, (MODEL,), engine.grid.topology().axes, "batches of different shapes")
    return iterator, (shapes, changed, uneven)


def _are_shapes_read(engine: PipelineEngine) -> bool:
    """Tell whether this rank reads all micro-batches of a step before it, for their shapes.

    The first stage reads them for the buffers of activations, and the last one to compare the labels of slices. A
    sampler for data efficiency communicates, so both read at the same time.
    """
    grid = engine.grid
    is_reader = engine.is_first_stage() or grid.get_axis_size(MODEL) > 1 or engine.curriculum_learning_enabled()
    return bool(engine.num_stages > 1 and engine.batch_fn is None and grid.check_samples and is_reader)


def _read_ahead(iterator: Iterator[Any], wanted: int) -> tuple[Iterator[Any], int]:
    """Return an iterator of the same elements, and how many it has left, or ``wanted`` if it has at least as many."""
    if not hasattr(iterator, "__next__"):
        raise TypeError(f"data_iter={abridged(iterator)} is not an iterator: pass iter(...) of it, not the samples")
    known = remaining(iterator)
    if known is not None:
        return iterator, known
    ahead = iterator if isinstance(iterator, ReadAhead) else ReadAhead(iterator)
    return ahead, ahead.fill(wanted)


def _check_batch(batch: Any, is_first_stage: bool) -> None:
    """Refuse a batch of which DeepSpeed would take wrong parts as inputs and labels, or fail on some stages only."""
    if isinstance(batch, (torch.Tensor, Mapping, str)) or not hasattr(batch, "__getitem__"):
        problem = f"is a {type(batch).__name__}"
    elif isinstance(batch, (tuple, list)) and len(batch) < 2:
        problem = f"has {len(batch)} elements"
    else:
        inputs = batch[0] if isinstance(batch[0], (tuple, list)) else [batch[0]]
        others = sorted({type(each).__name__ for each in inputs if not isinstance(each, torch.Tensor)})
        if not others or not is_first_stage:  # only the first stage uses inputs
            if isinstance(batch, (tuple, list)) and len(batch) > 2:
                warn(
                    f"a batch of this pipeline has {len(batch)} elements, but DeepSpeed uses the first two alone, as "
                    "inputs and labels: put further ones into a tuple of inputs or of labels"
                )
            return
        problem = f"has inputs of type {listed(others)}"
    raise TypeError(
        f"a batch of this pipeline {problem}: it must be (inputs, labels), where inputs is a tensor or a tuple of "
        "tensors; engine.set_batch_fn(function) converts batches"
    )


_STARTS = 3
"""The number of iterators in a row whose equal beginnings are no coincidence."""


class Starts:
    """Notice iterators of which a program makes one for each step of a pipeline, and which all begin with one batch.

    Only the first rank looks at them, until an iterator is passed again or begins with another batch. This is also the
    place for what the engine's steps have read, run and sent.
    """

    def __init__(self) -> None:
        self._first: int | None = None
        """The digest of the batch with which the last iterators have begun."""
        self._number = 0
        """The number of these iterators; 0 if the last one was passed again."""
        self._read: list[int] = []
        """The digests of a step of the last of them, of which the next batch is looked at."""
        self.instructions: dict[type, Any] | None = None
        """The instructions of the engine's schedule, with checks; None until the first step."""
        self.is_checked = False
        """True once the engine's first batch has been checked."""
        self.last_call = ""
        """The method that the engine ran last."""
        self.shapes: list[Shapes] | None = None
        """The shapes of one micro-batch in it on this rank; None if they differed."""
        self.announced: dict[int, Shapes] = {}
        """The shapes of activations that the next stage expects, by phase (which only DualPipeV has)."""

    def look(self, engine: PipelineEngine, iterator: Any, wanted: int) -> Any:
        """Return the iterator to use for a step of ``wanted`` micro-batches in place of the one that was passed."""
        former, grid = engine.data_iterator, engine.grid
        if not hasattr(iterator, "__next__"):
            return iterator
        if iterator is former or (isinstance(former, ReadAhead) and former.source is iterator):
            self._number = min(self._number, 0)
            return former
        if self._number < 0 or grid.grid_rank or not grid.check_samples or engine.curriculum_learning_enabled():
            return iterator
        ahead = iterator if isinstance(iterator, ReadAhead) else ReadAhead(iterator)
        first = digest(ahead.first(), zeros_count=True)
        is_other = self._number > 0 and first != self._first
        self._first, self._number = first, self._number + 1
        if is_other or self._number == _STARTS:
            self._number = -1  # it is not looked at any more
            if not is_other:
                ahead.fill(wanted)
                self._read = [digest(each, zeros_count=True) for each in ahead.ahead]
        return ahead

    def end(self, engine: PipelineEngine) -> None:
        """Warn if the last of the iterators has a batch that no step reads."""
        read, self._read = self._read, []
        if not read:
            return
        following = None
        with suppress(Exception):  # of a batch that the program does not ask for
            following = engine.data_iterator.first()
        if following is not None and digest(following, zeros_count=True) not in read:
            warn(
                f"train_batch() has got a new iterator in each of {_STARTS} steps, and all have begun with the same "
                "batch, so further batches are never trained on. Make one iterator before the loop and pass it to "
                "every step: batches = deepspeed.utils.RepeatingLoader(loader), then engine.train_batch(batches); "
                "set grid.check_samples = False if it is intended"
            )


def _fewest(left: int, grid: MpuGrid, *flags: bool) -> tuple[int, int, list[bool]]:
    """Return the smallest ``left`` of all ranks, the first rank that has it, and which flags are true on some rank.

    It is collective over the grid.
    """
    device = get_accelerator().current_device_name()
    first = (min(left, _ENDLESS) - _FAILED) * grid.world_size + grid.grid_rank
    smallest = torch.tensor([first, *(0 if flag else 1 for flag in flags)], device=device)
    dist.all_reduce(smallest, dist.ReduceOp.MIN, group=grid.get_group(grid.topology().axes))
    first, *unset = smallest.tolist()
    number, rank = divmod(first, grid.world_size)
    return number + _FAILED, rank, [not flag for flag in unset]
