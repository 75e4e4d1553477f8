"""Whether ranks that should work on the same samples do: the first ones of an engine are compared.

Stages and slices of one replica read samples by themselves. Dealt over all ranks of the job, as ``DistributedSampler``
does by default, each slice trains on other samples, and nothing fails.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_topo.engine.mpu import MpuGrid
from ds_topo.errors import DisagreementError
from ds_topo.topology.axes import MODEL, PIPE

_COMPARED = 2
"""Micro-batches of a plain engine, steps of a pipeline."""
_calls: WeakKeyDictionary[DeepSpeedEngine, int] = WeakKeyDictionary()
_read: WeakKeyDictionary[PipelineEngine, list[tuple[int, int]]] = WeakKeyDictionary()
"""Digests of inputs and labels that this rank has read in this step."""


def with_same_samples(forward: Any) -> Any:
    """``forward`` of a plain engine that compares the first arguments of slices before it starts."""

    @wraps(forward)
    def compare_first(engine: DeepSpeedEngine, *args: Any, **options: Any) -> Any:
        grid = engine.mpu
        reads = not isinstance(engine, PipelineEngine)  # which calls this with activations
        if reads and engine.training and _is_due(engine, grid) and _reads_samples(grid):
            slices = (MODEL,)  # alone: other replicas may look at more samples, or fewer
            _require_equal([digest((args, options), zeros_count=True)], grid, slices, slices)
        return forward(engine, *args, **options)

    return compare_first


def remember_samples(next_batch: Any) -> Any:
    """``_next_batch`` of a pipeline engine that takes a digest of the first ones."""

    @wraps(next_batch)
    def read(engine: PipelineEngine) -> Any:
        batch = next_batch(engine)
        if engine in _read:
            inputs, labels = batch if isinstance(batch, (tuple, list)) and len(batch) == 2 else (batch, None)
            _read[engine].append((digest(inputs), digest(labels)))
        return batch

    return read


def with_same_batches(train_batch: Any) -> Any:
    """``train_batch`` that compares, after the first steps, what first and last stages and their slices have read."""

    @wraps(train_batch)
    def compare_after(engine: PipelineEngine, *args: Any, **options: Any) -> Any:
        grid = engine.grid
        if not _is_due(engine, grid) or grid.get_model_parallel_world_size() == 1:
            return train_batch(engine, *args, **options)
        _read[engine] = []
        try:
            result = train_batch(engine, *args, **options)
            read = _read[engine]
        finally:
            del _read[engine]
        reads = engine.is_first_stage() or engine.is_last_stage()
        count = engine.micro_batches
        read = (read + [(0, 0)] * count)[:count] if reads else [(0, 0)] * count
        inputs, labels = ([pair[index] for pair in read] for index in (0, 1))
        everyone = grid.topology().axes
        # The last stage has no use for inputs, which the first may have changed at random; labels tell which they are.
        has_labels = _require_equal(labels, grid, (PIPE, MODEL), everyone)
        _require_equal(inputs, grid, (MODEL,) if has_labels else (PIPE, MODEL), everyone)
        return result

    return compare_after


def _reads_samples(grid: MpuGrid) -> bool:
    """Whether a plain engine has slices that are given samples; later stages are given parts of activations."""
    return grid.get_axis_size(MODEL) > 1 and grid.get_axis_rank(PIPE) == 0


def _is_due(engine: DeepSpeedEngine, grid: Any) -> bool:
    if not isinstance(grid, MpuGrid) or not grid.check_samples or _calls.get(engine, 0) == _COMPARED:
        return False
    _calls[engine] = _calls.get(engine, 0) + 1
    return True


def _require_equal(read: list[int], grid: MpuGrid, peers: tuple[str, ...], others: Sequence[str]) -> bool:
    """Raise on all ranks along ``others`` if some ``peers`` have read different samples; 0 stands for nothing read.

    Returns:
        Whether any of the peers has read something.

    Raises:
        DisagreementError: the message names ranks.
    """
    device = get_accelerator().current_device_name()
    own = torch.tensor(read, dtype=torch.int64, device=device)
    # The largest digest, and the smallest of those that are not 0, in one exchange.
    ends = torch.cat([own, torch.where(own == 0, torch.iinfo(torch.int64).min, -own)])
    group = grid.get_group([axis for axis in peers if axis in grid.topology().axes])
    dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
    largest, smallest = ends.chunk(2)
    differ = bool(((largest != -smallest) & (largest != 0)).any())
    flag = torch.tensor(grid.world_size - grid.grid_rank if differ else 0, device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=grid.get_group(others))
    if not int(flag):
        return bool((largest != 0).any())
    first = grid.world_size - int(flag)
    where = ", ".join(f"{axis}={index}" for axis, index in grid.topology().get_coord(first)._asdict().items())
    names = " and ".join(repr(axis) for axis in peers if grid.get_axis_size(axis) > 1)
    raise DisagreementError(
        f"rank {grid.to_global([first])[0]} ({where}) and its peers along {names} read different samples: one replica "
        f"of {grid.topology().spec!r} would train on several. Deal them with grid.sampler(dataset) or "
        "grid.data_loader(dataset), or over grid.get_sample_world_size() shares; where they are meant to differ, set "
        "grid.check_samples = False"
    )


def digest(samples: Any, zeros_count: bool = False) -> int:
    """Of all tensors, positive; 0 if there is none.

    Unless ``zeros_count``, 0 also where all are zeros, as stages of a pipeline get that have no use for samples.
    """
    hashed = hashlib.blake2b(digest_size=7)
    found = False
    for tensor in _tensors(samples):
        found = found or zeros_count or bool(tensor.detach().any())
        content = tensor.detach().to("cpu", copy=False).resolve_conj().contiguous()
        hashed.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
        hashed.update(content.reshape(-1).view(torch.uint8).numpy().tobytes())
    return int.from_bytes(hashed.digest(), "big") + 1 if found else 0


def _tensors(samples: Any) -> Iterator[torch.Tensor]:
    if isinstance(samples, torch.Tensor):
        is_wrapper = samples.is_nested or hasattr(samples, "__tensor_flatten__")  # such as a DTensor
        if samples.layout is torch.strided and not samples.is_meta and not is_wrapper:
            yield samples
    elif isinstance(samples, Mapping):
        for value in samples.values():
            yield from _tensors(value)
    elif isinstance(samples, (tuple, list)):
        for value in samples:
            yield from _tensors(value)
