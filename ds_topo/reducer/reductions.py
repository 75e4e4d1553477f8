"""How one bucket is reduced: flat, in two levels, sparse, or by a communication hook of torch's DDP."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.reducer.buckets import CommHookBucket, GradientBucket
from ds_topo.reducer.report import BucketTiming
from ds_topo.reducer.two_level import TwoLevelReduction

CommHook: TypeAlias = Callable[[Any, Any], "torch.futures.Future[Any]"]


@dataclass(eq=False)
class Lane:
    """A process group and how gradients are scaled around the sum over it."""

    label: str
    group: ProcessGroup
    before: float
    """What gradients are multiplied by before the sum (by the gradient slots)."""
    after: float
    """What they are multiplied by after it."""
    op: Any
    """A ``ReduceOp``; NCCL's may divide by itself."""
    communication_dtype: torch.dtype | None
    two_level: TwoLevelReduction | None = None
    hook: CommHook | None = None
    hook_state: Any = None
    last_hook: torch.futures.Future[Any] | None = None
    """On a CPU, what the previous bucket's hook returned."""

    def wait_for_hook(self) -> None:
        """On a CPU a hook's callbacks may start collectives, which must not mix with others of this group."""
        if self.last_hook is not None:
            self.last_hook.wait()
            self.last_hook = None

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return dist.get_world_size(self.group)


class Reduction:
    """One bucket under way. ``wait()`` returns when its gradients are final."""

    def __init__(self, bucket: GradientBucket, lane: Lane) -> None:
        self.bucket, self.lane = bucket, lane
        self.timing = BucketTiming(bucket.index, bucket.nbytes, len(bucket.slots), lane.label, time.perf_counter_ns())

    def wait(self) -> None:
        """Wait for the sum, then write it to the bucket."""
        timing = self.timing
        timing.wait_started_ns = time.perf_counter_ns()
        self._complete()
        timing.wait_ended_ns = time.perf_counter_ns()
        timing.done_ns = timing.done_ns or timing.wait_ended_ns
        if self.lane.after != 1.0 and not self.bucket.is_sparse:
            self.bucket.flat.mul_(self.lane.after)

    def _complete(self) -> None:
        """Nothing to wait for in a group of one."""

    def _note_done(self, _: Any) -> None:
        self.timing.done_ns = time.perf_counter_ns()


class _FlatReduction(Reduction):
    """An all_reduce over the whole group, or two levels of it."""

    def __init__(self, bucket: GradientBucket, lane: Lane) -> None:
        super().__init__(bucket, lane)
        flat, dtype = bucket.flat, lane.communication_dtype
        self._payload = flat if dtype is None or dtype == flat.dtype else flat.to(dtype)
        if lane.two_level is not None:
            self._payload = lane.two_level.padded(self._payload)
            self._wait = lane.two_level.submit(self._payload).result
            return
        work = dist.all_reduce(self._payload, lane.op, group=lane.group, async_op=True)
        self._wait = work.wait
        if not flat.is_cuda:
            work.get_future().add_done_callback(self._note_done)

    def _complete(self) -> None:
        ended = self._wait()
        if self.lane.two_level is not None:
            self.timing.done_ns = ended
        if self._payload is not self.bucket.flat:
            self.bucket.flat.copy_(self._payload[: len(self.bucket.flat)])


class _SparseReduction(Reduction):
    """An all_reduce of one sparse gradient, which becomes the sum of all ranks' rows."""

    def __init__(self, bucket: GradientBucket, lane: Lane) -> None:
        super().__init__(bucket, lane)
        self._gradient = bucket.slots[0].view.coalesce()
        self._work = dist.all_reduce(self._gradient, group=lane.group, async_op=True)

    def _complete(self) -> None:
        self._work.wait()
        self.bucket.slots[0].view = (self._gradient * self.lane.after).coalesce()


class _HookReduction(Reduction):
    """Whatever a communication hook of torch's DDP does; the averaging is its own business."""

    def __init__(self, bucket: GradientBucket, lane: Lane, hook: CommHook, is_last: bool) -> None:
        super().__init__(bucket, lane)
        lane.wait_for_hook()
        self._future = hook(lane.hook_state, CommHookBucket(bucket, is_last))
        if not bucket.flat.is_cuda:
            lane.last_hook = self._future
            self._future.add_done_callback(self._note_done)

    def _complete(self) -> None:
        result = self._future.wait()
        result = result[0] if isinstance(result, (list, tuple)) else result
        flat = self.bucket.flat[: self.bucket.numel]
        if result.data_ptr() != flat.data_ptr():
            flat.copy_(result.view(-1))


def launch(bucket: GradientBucket, lane: Lane, is_last: bool) -> Reduction:
    """Start the reduction of a bucket; all ranks of the lane launch the same buckets in the same order."""
    if bucket.is_sparse:
        return _SparseReduction(bucket, lane)
    if lane.hook is not None:
        return _HookReduction(bucket, lane, lane.hook, is_last)
    return Reduction(bucket, lane) if lane.size == 1 else _FlatReduction(bucket, lane)


class Census:
    """How many ranks of a lane have a gradient for each parameter, failed, and wish to hold back the next step."""

    def __init__(self, notes: list[bool], lane: Lane, device: torch.device) -> None:
        lane.wait_for_hook()
        self._counts = torch.tensor(notes, dtype=torch.int32, device=device)
        self._work = dist.all_reduce(self._counts, group=lane.group, async_op=True)
        self._event: torch.cuda.Event | None = None
        self.size = lane.size

    def settle(self) -> None:
        """Let the sum arrive; on a GPU without waiting for it."""
        self._work.wait()
        if self._counts.is_cuda:
            self._counts = self._counts.to("cpu", non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def result(self) -> tuple[list[int], int, int]:
        """Ranks with a gradient, by parameter; ranks that failed; ranks that wish to hold back."""
        if self._event is not None:
            self._event.synchronize()
        *present, failed, holding = self._counts.tolist()
        return present, failed, holding
