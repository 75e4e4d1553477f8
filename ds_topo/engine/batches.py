"""Deal samples to an engine's ranks, and check them: all stages have enough micro-batches, and peers read the same.

*Shares.* Samples are divided into shares, one for all ranks that must read the same ones. ``training_data=`` and
``engine.deepspeed_io()`` build DeepSpeed's own loaders. In a pipeline they would give peers along ``seq`` different
samples. Its sampler for data efficiency (curriculum learning) divides batches by the size of the data parallel group,
which counts peers along ``seq``, and sends them from rank 0 to that group, which slices do not share.

*Micro-batches.* Only the first and the last stage of a pipeline read samples. If an iterator ends within a step,
DeepSpeed raises ``StopIteration`` on the ranks that found it, and all others wait for activations that never come. So
before each step the ranks agree that all of them have enough micro-batches. A count holds for one step, because a
program may pass another iterator next time.

*Samples.* The stages and slices of one replica read samples separately. If samples are divided over all ranks of the
job, as ``DistributedSampler`` does by default, the slices train on different samples and no error occurs. So the ranks
compare the first samples of an engine. Replicas that read the same samples, as with a plain ``DataLoader``, train as
one, without an error; engines warn about them, and about batches of another size than the config's, in the first step.
So does a program that makes a new iterator for each step of a pipeline, and thereby reads the first samples alone.
"""

from __future__ import annotations

import hashlib
import inspect
import operator
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import cycle, islice, repeat
from math import nan
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.data_pipeline.data_sampling.data_sampler import DeepSpeedDataSampler
from deepspeed.runtime.dataloader import RepeatingLoader
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch.utils.data import DistributedSampler

from ds_topo.base.classes import Mixin, adopt
from ds_topo.base.differences import DualPipeVEngine
from ds_topo.engine.activation_shapes import Shapes, buffers_for, have_changed, shapes_of
from ds_topo.engine.autoparallel import uses_autosp
from ds_topo.engine.config_options import has_dynamic_batches
from ds_topo.engine.one_layout import axes_of_engine
from ds_topo.errors import DisagreementError, EndOfSamplesError, abridged, listed, warn
from ds_topo.mpu import MpuGrid
from ds_topo.process_groups.creation import ProcessGroup, gathered
from ds_topo.process_groups.process_grid import Epochs, FollowedSampler
from ds_topo.topology.axes import MODEL, PIPE, SEQ
from ds_topo.topology.rank_tables import RankGroup, sample_axes

# -- shares -----------------------------------------------------------------------------------------------------------


class SamplerOfShares(Mixin, DeepSpeedDataSampler):  # type: ignore[misc]
    """DeepSpeed's sampler for data efficiency, whose group joins all ranks that read, in every share."""

    def get_start_end_idx(self, batch_len: int | None = None) -> tuple[int, int]:
        """Return where this rank's share of a global micro-batch starts and ends: several ranks read one sample."""
        whole = self.micro_batch_times_data_parallel_size
        share = (batch_len or whole) / (whole // self.micro_batch_size)
        return round(self.data_parallel_rank * share), round((self.data_parallel_rank + 1) * share)


def complete_loader(engine: DeepSpeedEngine, loader: Any) -> None:
    """Let the sampler for data efficiency of a loader send samples to all ranks that read them, if it has one.

    Warn of a loader without a batch, and of a shuffled sampler whose epoch is always the same.
    """
    sampler = loader.data_sampler
    if not len(loader):
        engine.mpu.warn_of_no_batch(loader.dataset, f"a batch of {loader.batch_size} on each rank that reads others")
    if type(sampler) is DistributedSampler:
        sampler.__class__ = FollowedSampler  # the program may have given it, and kept it to call set_epoch
        loader.data_sampler.epochs = Epochs(engine.mpu.progress)
    if type(sampler) is DeepSpeedDataSampler and reads_samples(engine):
        adopt(sampler, SamplerOfShares)
        sampler.data_parallel_group = _group_of_readers(engine, engine.mpu)


@contextmanager
def counting_shares(engine: DeepSpeedEngine) -> Iterator[None]:
    """Let the mpu and the attributes of an engine count shares of samples; those of pipelines count replicas."""
    grid, replicas = engine.mpu, engine.dp_world_size
    engine.mpu, engine.dp_world_size = MpuGrid.over(grid), grid.get_sample_world_size()
    try:
        yield
    finally:
        engine.mpu, engine.dp_world_size = grid, replicas


def reads_samples(engine: DeepSpeedEngine) -> bool:
    """Tell whether this rank reads samples: in a pipeline the first and the last stage do, of DualPipeV the first."""
    return not isinstance(engine, PipelineEngine) or engine.mpu.get_axis_rank(PIPE) in _reading_stages(engine)


def _reading_stages(engine: PipelineEngine) -> set[int]:
    return {0} if isinstance(engine, DualPipeVEngine) else {0, engine.mpu.get_axis_size(PIPE) - 1}


def _group_of_readers(engine: DeepSpeedEngine, grid: MpuGrid) -> ProcessGroup:
    """Return the group of all ranks that read samples; collective over them at the first call."""
    if not isinstance(engine, PipelineEngine):
        return grid.get_group(axes_of_engine(grid, False))
    stages = _reading_stages(engine)
    if len(stages) == grid.get_axis_size(PIPE):
        return grid.get_group(grid.topology().axes)
    ranks = [rank for rank in range(grid.world_size) if grid.topology().get_axis_index(PIPE, rank) in stages]
    return grid.create_group(RankGroup(("stages that read samples",), tuple(sorted(grid.to_global(ranks)))))


def deal_dynamic_batches(engine: DeepSpeedEngine) -> None:
    """Let ``engine.data_parallel_group`` join one rank of each share if DeepSpeed deals batches of variable size.

    ``get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed`` deals them by this group. It is used for
    nothing else, except by DeepCompile, which ``OPTIONS`` refuses then.
    """
    if has_dynamic_batches(engine._config):
        engine.data_parallel_group = engine.mpu.get_group(sample_axes(engine.mpu.topology()))


# -- enough micro-batches ---------------------------------------------------------------------------------------------


def _described(grid: MpuGrid, grid_rank: int) -> str:
    where = ", ".join(f"{axis}={index}" for axis, index in grid.topology().get_coord(grid_rank)._asdict().items())
    return f"rank {grid.to_global([grid_rank])[0]} ({where})"


_ENDLESS = 2**31
_NO_ITERATOR, _FAILED = -1, -2


_checked: WeakSet[PipelineEngine] = WeakSet()
"""The engines whose first batch has been checked."""


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

        Raises:
            ValueError: the source has written into the tensors of an earlier element.
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
    """Call ``train_batch`` or ``eval_batch`` of a pipeline engine on all ranks or on none.

    Args:
        method: DeepSpeed's method, bound to the engine.
        engine: the engine.
        args: arguments of the method.
        options: more of them.
    """
    given, call = inspect.signature(method).bind(*args, **options), method.__name__
    wanted, starts = given.arguments.get("num_micro_batches") or engine.micro_batches, engine.on_grid.starts
    iterator = given.arguments.get("data_iter")
    if engine.grid.world_size == 1:
        if call == "train_batch":
            given.arguments["data_iter"] = starts.look(engine, iterator, wanted)
        result = method(*given.args, **given.kwargs)
        starts.end(engine)
        return result
    if iterator is not None:
        given.arguments["data_iter"], shapes = _require(engine, call, iterator, wanted)
    elif call == "train_batch":
        _, shapes = _require(engine, call, engine.data_iterator, wanted, is_own=True)
    else:
        _, shapes = _require(engine, call, None, wanted)
    with buffers_for(engine, call, wanted, *shapes):
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

    Raises:
        EndOfSamplesError: a rank has too few; raised on every rank; the message names the rank with the fewest.
        DisagreementError: slices have samples of different shapes, or some ranks train while others evaluate; raised on
            every rank.
        Exception: this rank failed to read samples.
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
                iterator = engine.on_grid.starts.look(engine, iterator, wanted)
            iterator, left = _read_ahead(iterator, wanted)
            if engine not in _checked and left and engine.batch_fn is None:
                iterator = iterator if isinstance(iterator, ReadAhead) else ReadAhead(iterator)
                _check_batch(iterator.first(), engine.is_first_stage())
                _checked.add(engine)
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
    flags = have_changed(engine, shapes), uneven, call == "train_batch", call != "train_batch"
    fewest, rank, (changed, uneven, trains, evaluates) = _fewest(left, engine.grid, *flags)
    if trains and evaluates:
        raise DisagreementError(
            f"{_described(engine.grid, engine.grid.grid_rank)} has called {call}(), but other ranks of the pipeline "
            f"{'eval' if call == 'train_batch' else 'train'}_batch(): call both on every rank, in one order"
        )
    if failure is not None:
        raise failure
    if fewest < wanted:
        reasons = {_FAILED: "failed to read samples", _NO_ITERATOR: "has no data iterator"}
        reason = reasons.get(fewest, f"has {fewest} of the {wanted} micro-batches that this step takes")
        raise EndOfSamplesError(
            f"{_described(engine.grid, rank)} {reason}, so no rank starts it: every rank of the first and of the last "
            "stage needs an iterator with enough micro-batches; deepspeed.utils.RepeatingLoader restarts one that ends"
        )
    if changed and engine.grid.get_axis_size(MODEL) > 1:
        read = [zlib.crc32(repr(shapes).encode())]
        _require_equal(read, engine.grid, (MODEL,), engine.grid.topology().axes, "batches of different shapes")
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
    """Return an iterator of the same elements, and how many it has left, or ``wanted`` if it has at least as many.

    Raises:
        TypeError: the argument is not an iterator.
    """
    if not hasattr(iterator, "__next__"):
        raise TypeError(f"data_iter={abridged(iterator)} is not an iterator: pass iter(...) of it, not the samples")
    known = remaining(iterator)
    if known is not None:
        return iterator, known
    ahead = iterator if isinstance(iterator, ReadAhead) else ReadAhead(iterator)
    return ahead, ahead.fill(wanted)


def _check_batch(batch: Any, is_first_stage: bool) -> None:
    """Refuse a batch of which DeepSpeed would take wrong parts as inputs and labels, or fail on some stages only.

    Raises:
        TypeError: the message says what the batch must be.
    """
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

    Only the first rank looks at them, until an iterator is passed again or begins with another batch.
    """

    def __init__(self) -> None:
        self._first: int | None = None
        """The digest of the batch with which the last iterators have begun."""
        self._number = 0
        """The number of these iterators; 0 if the last one was passed again."""
        self._read: list[int] = []
        """The digests of a step of the last of them, of which the next batch is looked at."""

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


# -- the same samples -------------------------------------------------------------------------------------------------

_COMPARED = 2
"""The number of micro-batches of a plain engine, or steps of a pipeline, that are compared."""
_TELLING = 8
"""The number of elements from which on equal tensors are no coincidence."""
_UNLIKE = 1e-3
"""The relative difference from which on losses are not those of the same operations."""
_ZERO = 1e-6
"""The difference of losses that may be rounding near zero."""


def _require_equal(
    read: list[int], grid: MpuGrid, peers: tuple[str, ...], others: Sequence[str], what: str = "different samples"
) -> None:
    """Raise on all ranks along ``others`` if some ``peers`` have read different samples; 0 means that nothing was read.

    Raises:
        DisagreementError: samples differ; the message names a rank and the axes.
    """
    group = grid.get_group([axis for axis in peers if axis in grid.topology().axes])
    by_batch = zip(*gathered(read, group), strict=True)
    differ = any(len({*digests} - {0}) > 1 for digests in by_batch)
    device = get_accelerator().current_device_name()
    flag = torch.tensor(grid.world_size - grid.grid_rank if differ else 0, device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=grid.get_group(others))
    if not int(flag):
        return
    names = " and ".join(repr(axis) for axis in peers if grid.get_axis_size(axis) > 1)
    raise DisagreementError(
        f"{_described(grid, grid.world_size - int(flag))} and its peers along {names} read {what}, but all "
        f"ranks of one replica of {grid.topology().spec!r} must train on the same ones. Use grid.sampler(dataset) or "
        "grid.data_loader(dataset), or divide samples into grid.get_sample_world_size() shares; if the difference is "
        "intended, set grid.check_samples = False"
    )


class FirstSamples:
    """The samples that an engine reads first: its peers must read the same ones, and its replicas should not.

    Args:
        grid: the engine's grid, whose ``check_samples`` switches errors and warnings off.
        micro_batch: the number of samples of a batch, by the config.
    """

    def __init__(self, grid: MpuGrid, micro_batch: int) -> None:
        self._grid, self._micro_batch = grid, micro_batch
        self.left = _COMPARED
        """The number of micro-batches of a plain engine, or steps of a pipeline, that peers have yet to compare."""
        self._in_step: list[tuple[int, int]] | None = None
        """The digests of inputs and labels that this rank has read, in a step that peers compare."""
        self._digests: list[tuple[int, ...]] = []
        """The digests of what was read before the first step. That of a batch of one value, such as ones, is empty."""
        self._loss: torch.Tensor | None = None
        """The loss of the first micro-batch of a plain engine."""
        self.are_compared = False
        """True from the first step on, before which replicas are compared."""

    def look_at_inputs(self, inputs: Any) -> None:
        """Compare the inputs of a forward pass of a plain engine between slices, in the first micro-batches."""
        grid = self._grid
        if not self._is_due():
            return
        read = (digest(inputs, zeros_count=True),)
        # Later stages of a program's own pipeline get parts of activations.
        if grid.get_axis_size(MODEL) > 1 and grid.get_axis_rank(PIPE) == 0:
            _require_equal([*read], grid, (MODEL,), (MODEL,))  # other replicas may run more or fewer micro-batches
        self._note(inputs, read)

    def look_at_batch(self, engine: PipelineEngine, batch: Any) -> None:
        """Take digests of a micro-batch that a pipeline engine has read, in the first steps."""
        is_noted = engine.training and self._grid.check_samples and len(self._digests) < _COMPARED
        if self._in_step is not None or (is_noted and not self.are_compared):
            inputs, labels = batch if isinstance(batch, (tuple, list)) and len(batch) == 2 else (batch, None)
            read = digest(inputs), digest(labels)
            if self._in_step is not None:
                self._in_step.append(read)
            if is_noted:
                self._note(batch, read)

    def note_loss(self, loss: torch.Tensor, **_: object) -> None:
        """Keep the first loss of a plain engine for :meth:`compare_losses`."""
        if self._loss is None:
            self._loss = loss.detach()

    @contextmanager
    def compared(self, engine: PipelineEngine) -> Iterator[None]:
        """Compare what stages and slices have read in a step of a pipeline, in the first steps."""
        grid = engine.grid
        if not self._is_due() or grid.get_model_parallel_world_size() == 1:
            yield
            return
        read: list[tuple[int, int]] = []
        self._in_step = read
        try:
            yield
        finally:
            self._in_step = None
        if not (engine.is_first_stage() or engine.is_last_stage()):
            read = []
        read = (read + [(0, 0)] * engine.micro_batches)[: engine.micro_batches]
        inputs, labels = ([pair[index] for pair in read] for index in (0, 1))
        everyone = grid.topology().axes
        # Stages are compared by labels: the last stage does not use inputs, and the first may change them at random.
        _require_equal(labels, grid, (PIPE, MODEL), everyone)
        if grid.get_axis_size(MODEL) > 1:
            _require_equal(inputs, grid, (MODEL,), everyone)

    def _is_due(self) -> bool:
        if not self.left or not self._grid.check_samples:
            return False
        self.left -= 1
        return True

    def _note(self, samples: Any, read: tuple[int, ...]) -> None:
        """Keep the digests of a batch for :meth:`compare`."""
        if self.are_compared:
            return
        tensors = list(_tensors(samples))
        if not self._digests and self._grid.grid_rank == 0:
            self._warn_of_size(tensors)
        is_telling = any(
            tensor.numel() >= _TELLING and bool((tensor != tensor.reshape(-1)[0]).any()) for tensor in tensors
        )
        self._digests.append(read if is_telling else ())

    def _warn_of_size(self, tensors: Sequence[torch.Tensor]) -> None:
        shapes = [list(tensor.shape) for tensor in tensors if tensor.dim()]
        if shapes and not any(self._micro_batch in shape[:2] for shape in shapes):
            warn(
                f"a batch with tensors of shape {listed(shapes, 3)}, but train_micro_batch_size_per_gpu is "
                f"{self._micro_batch}: DeepSpeed counts that many samples for each batch, in train_batch_size and in "
                "its logs. Give both the same size, or set grid.check_samples = False if it is intended"
            )

    def compare(self) -> None:
        """Warn if all replicas have read the same samples before the first step; collective over them."""
        self.are_compared = True
        grid = self._grid
        axes = [axis for axis in sample_axes(grid.topology()) if grid.get_axis_size(axis) > 1]
        if not grid.check_samples or not axes:
            return
        if grid.get_sample_world_size() == dist.get_world_size(grid.get_data_parallel_group()):
            group = grid.get_data_parallel_group()
        elif len(axes) == 1:
            group = grid.get_group(axes)
        else:
            return  # there is no such group yet
        is_known = bool(self._digests) and all(self._digests)
        number = abs(hash(tuple(self._digests))) if is_known else -grid.grid_rank  # unlike those of all others
        device = get_accelerator().current_device_name()
        extremes = torch.tensor([number, ~number], device=device)
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
        highest, lowest = extremes.tolist()
        if highest == ~lowest and grid.grid_rank == 0:
            warn(
                f"all {grid.get_sample_world_size()} replicas of {grid.topology().spec!r} have read the same samples "
                "before the first step, so they compute the same gradients. Use grid.sampler(dataset) or "
                "grid.data_loader(dataset), or give each grid.get_sample_rank() other samples; if they are meant to be "
                "equal, set grid.check_samples = False"
            )

    def compare_losses(self, engine: DeepSpeedEngine) -> None:
        """Warn if slices compute different losses, or ranks along ``seq`` the same one of the same samples.

        It is collective over both, before the first step of a plain engine.
        """
        grid = self._grid
        if not grid.check_samples:
            return
        loss, limit = (nan, 0.0) if self._loss is None else (float(self._loss), torch.finfo(self._loss.dtype).eps)
        inputs = self._digests[0] if self._digests else ()
        slices, sequence = (
            gathered((loss, inputs), grid.get_group(axis)) if grid.topology().get_dim(axis) > 1 else [(loss, inputs)]
            for axis in (MODEL, SEQ)
        )
        if grid.grid_rank:
            return
        losses, spec = [each for each, _ in slices], grid.topology().spec
        # The same operations on the same samples; but kernels of accelerators may add in another order.
        if max(losses) - min(losses) > max(_UNLIKE, 4 * limit) * max(map(abs, losses)) + _ZERO:
            warn(
                f"the slices of one replica of {spec!r} compute different losses of the same samples, "
                f"{listed([float(f'{each:.6g}') for each in losses])}, but each must compute that of the whole model. "
                "If the last layer is split by columns, use ds_topo.layers.parallel_cross_entropy, or "
                "ds_topo.collectives.gather(outputs, group) before the loss; dropout of what is not split needs one "
                "seed for all slices. Set grid.check_samples = False if it is intended"
            )
        if inputs and len(sequence) > 1 and len({*sequence}) == 1 and not uses_autosp(engine._config):
            warn(
                f"the {len(sequence)} ranks along 'seq' of {spec!r} have read the same inputs and computed the same "
                "loss, as if each had the whole sequence; but gradients are summed along 'seq', where each rank has a "
                "part. Give each rank a part of every sequence, by grid.get_axis_rank('seq'); set "
                "grid.check_samples = False if the model divides sequences itself"
            )


def digest(samples: Any, zeros_count: bool = False) -> int:
    """Return a positive digest of all tensors in samples, or 0 if there is none.

    Without ``zeros_count`` it is also 0 if all tensors are zeros, which pipeline stages get if they do not use samples.
    """
    hashed = hashlib.blake2b()
    found = False
    for tensor in _tensors(samples):
        found = found or zeros_count or bool(tensor.detach().any())
        content = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        hashed.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
        hashed.update(content.reshape(-1).view(torch.uint8).numpy().tobytes())
    return int.from_bytes(hashed.digest(), "big") if found else 0


def types_of(samples: Any) -> set[torch.dtype]:
    """Return the floating-point types of all tensors in samples."""
    return {tensor.dtype for tensor in _tensors(samples) if tensor.is_floating_point()}


def _tensors(samples: Any) -> Iterator[torch.Tensor]:
    if isinstance(samples, torch.Tensor):
        is_wrapper = samples.is_nested or hasattr(samples, "__tensor_flatten__")  # such as a DTensor
        if samples.layout is torch.strided and not samples.is_meta and not is_wrapper:
            yield samples
    elif isinstance(samples, (Mapping, tuple, list)):
        for value in samples.values() if isinstance(samples, Mapping) else samples:
            yield from _tensors(value)
