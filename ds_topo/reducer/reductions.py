"""How one bucket is reduced: flat, in two levels, sparse, or by a communication hook of torch's DDP."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from ds_topo.partition.exchange import Pending
from ds_topo.partition.gradients import RegionOfGradients
from ds_topo.reducer.buckets import CommHookBucket, GradientBucket
from ds_topo.reducer.report import BucketTiming
from ds_topo.reducer.routes import CommHook, Route
from ds_topo.reducer.two_level import TwoLevelReduction


class Reduction:
    """One bucket in flight. ``wait()`` returns when its gradients are final."""

    def __init__(self, bucket: GradientBucket, route: Route) -> None:
        self.bucket, self.route = bucket, route
        self.timing = BucketTiming(
            bucket.index, bucket.nbytes, len(bucket.members), route.label, time.perf_counter_ns()
        )

    def wait(self) -> None:
        """Wait for the sum, then write it to the bucket."""
        timing = self.timing
        timing.wait_started_ns = time.perf_counter_ns()
        self._wait()
        timing.wait_ended_ns = time.perf_counter_ns()
        timing.done_ns = timing.done_ns or timing.wait_ended_ns

    def _wait(self) -> None:
        self._complete()
        if self.route.after != 1.0 and not self.bucket.is_sparse:
            self.bucket.flat.mul_(self.route.after)
        self._collect()

    def _collect(self) -> None:
        """Take out of a region what this rank needs of it."""
        if self.bucket.region is not None:
            self.bucket.region.gradients.collect(self.bucket.region.region, self.bucket.flat)
            self.bucket.give_back()

    def _complete(self) -> None:
        """Nothing to wait for in a group of one."""

    def _note_done(self, _: object) -> None:
        self.timing.done_ns = time.perf_counter_ns()


class _AllReduce(Reduction):
    """An all_reduce over the whole group, in the communication data type."""

    def __init__(self, bucket: GradientBucket, route: Route) -> None:
        super().__init__(bucket, route)
        flat, dtype = bucket.flat, route.communication_dtype
        keeps_type = dtype is None or not flat.is_floating_point()  # a complex number in a real type would lose half
        self._payload = flat if keeps_type else flat.to(dtype)
        self._start()

    def _start(self) -> None:
        self._work = dist.all_reduce(self._payload, self.route.op, group=self.route.group, async_op=True)
        if not self._payload.is_cuda:
            self._work.get_future().add_done_callback(self._note_done)

    def _complete(self) -> None:
        self._work.wait()
        self._copy_out()

    def _copy_out(self) -> None:
        if self._payload is not self.bucket.flat:
            self.bucket.flat.copy_(self._payload[: len(self.bucket.flat)])


class _ReduceScatter(Reduction):
    """Sums to the ranks that own them, in the communication data type."""

    def __init__(self, bucket: GradientBucket, route: Route, region: RegionOfGradients) -> None:
        super().__init__(bucket, route)
        self._region = region
        flat, dtype = bucket.flat, route.communication_dtype
        keeps_type = dtype is None or not flat.is_floating_point()
        self._payload = flat if keeps_type else flat.to(dtype)
        self._pending: Pending | None = region.gradients.exchange.reduce_scatter(self._payload)
        region.gradients.note(self)

    def is_done(self) -> bool:
        """Whether its sum is there."""
        return self._pending is None or self._pending.is_done()

    def _wait(self) -> None:
        if self._pending is None:
            return
        self.timing.done_ns = self._pending.wait()
        self._pending = None
        own = self._own_slice(self.bucket.flat)
        if self._payload is not self.bucket.flat:
            own.copy_(self._own_slice(self._payload))
        if self.route.after != 1.0:
            own.mul_(self.route.after)
        self._payload = self._payload.new_empty(0)
        self._collect()

    def _own_slice(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.view(self._region.region.size, -1)[self._region.gradients.rank]


class _TwoLevelAllReduce(_AllReduce):
    """The same inside hosts and across hosts."""

    def __init__(self, bucket: GradientBucket, route: Route, two_level: TwoLevelReduction) -> None:
        self._two_level = two_level
        super().__init__(bucket, route)

    def _start(self) -> None:
        self._payload = self._two_level.padded(self._payload)
        self._done = self._two_level.submit(self._payload)

    def _complete(self) -> None:
        self.timing.done_ns = self._done.result()
        self._copy_out()


class _SparseReduction(Reduction):
    """An all_reduce of one sparse gradient, which becomes the sum of all ranks' rows."""

    def __init__(self, bucket: GradientBucket, route: Route) -> None:
        super().__init__(bucket, route)
        self._gradient = bucket.members[0].view.coalesce()
        self._work = dist.all_reduce(self._gradient, group=route.group, async_op=True)

    def _complete(self) -> None:
        self._work.wait()
        self.bucket.members[0].view = (self._gradient * self.route.after).coalesce()


class _HookReduction(Reduction):
    """Whatever a communication hook of torch's DDP does; the averaging is its own business."""

    def __init__(self, bucket: GradientBucket, route: Route, hook: CommHook, is_last: bool) -> None:
        super().__init__(bucket, route)
        route.wait_for_hook()
        self._future = hook(route.hook_state, CommHookBucket(bucket, is_last))
        if not bucket.flat.is_cuda:
            route.last_hook = self._future
            self._future.add_done_callback(self._note_done)

    def _complete(self) -> None:
        result = self._future.wait()
        result = result[0] if isinstance(result, (list, tuple)) else result
        flat = self.bucket.flat[: self.bucket.numel]
        if result.data_ptr() != flat.data_ptr():
            flat.copy_(result.view(-1))


def launch(bucket: GradientBucket, route: Route, is_last: bool) -> Reduction:
    """Start the reduction of a bucket; all ranks of the route launch the same buckets in the same order."""
    bucket.fill()
    if bucket.is_sparse:
        return _SparseReduction(bucket, route)
    if route.hook is not None:
        return _HookReduction(bucket, route, route.hook, is_last)
    if bucket.region is not None and not bucket.region.is_whole:
        return _ReduceScatter(bucket, route, bucket.region)
    if route.size == 1:
        return Reduction(bucket, route)
    return _AllReduce(bucket, route) if route.two_level is None else _TwoLevelAllReduce(bucket, route, route.two_level)
