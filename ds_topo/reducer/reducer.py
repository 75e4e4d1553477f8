"""The reducer: hooks on parameters fill buckets, full buckets are reduced while backward goes on."""

from __future__ import annotations

import importlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_topo.process_groups.creation import ProcessGroup, require_initialized
from ds_topo.reducer.buckets import GradientBucket, GradientSlot
from ds_topo.reducer.copy_in import fill, fill_at_once, fills_at_once, keep
from ds_topo.reducer.misuse import Changes, ReducerState, missing_gradients, surplus_gradient, wrong_moment
from ds_topo.reducer.options import ReductionOptions
from ds_topo.reducer.parameters import (
    agree_on_slots,
    broadcast,
    expert_group_name,
    find_slots,
    ignored_identities,
    owners,
)
from ds_topo.reducer.planning import plan_slots
from ds_topo.reducer.probes import suitable_bucket_bytes
from ds_topo.reducer.reductions import Census, CommHook, Reduction, launch
from ds_topo.reducer.report import GradientReport, StepTiming
from ds_topo.reducer.routes import assign_lanes


class GradientReducer:
    """Average a module's gradients over a data-parallel group while backward is still running.

    ::

        reducer = GradientReducer(module, grid=grid)
        for batches in loader:                      # micro-batches of one step
            with reducer.no_sync():
                for batch in batches[:-1]:
                    module(batch).sum().backward()
            module(batches[-1]).sum().backward()    # full buckets leave during this backward
            reducer.finish()                        # now every gradient is the average over the group
            optimizer.step()
            optimizer.zero_grad()

    Gradients are views of contiguous buckets: those that accumulate are added in place, a first one (after
    ``zero_grad(set_to_none=True)``) is scaled straight into its bucket and freed. A bucket is reduced once per step, in
    an order that is the same on all ranks. After the first step the buckets are laid out anew in the order in which the
    first rank's gradients became ready. Peak memory is the gradients' size and at most one bucket.

    Creating it is collective over the group: the ranks compare parameters and options, then take over the first rank's
    values.

    Args:
        module: trainable parameters are served once each, tied or not. Its forward is called as usual.
        grid: whose data-parallel group (all replicas of a parameter) to reduce over;
        process_group: or that group itself. The whole world by default.
        options: see :class:`ReductionOptions`.

    Raises:
        ValueError: values that cannot be.
        DisagreementError: parameters or options differ between ranks; names them, on every rank.
        RuntimeError: ``torch.distributed`` is not initialised, or a parameter has a reducer already.

    Sources: Li et al., PyTorch Distributed (VLDB 2020), for buckets and overlap; TorchDistPackage's NaiveDDP for
    reducing at the last micro-batch only; DeepSpeed's ``average_expert_grads`` for the divisor of experts.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> module = nn.Linear(2, 1)
    >>> reducer = GradientReducer(module)
    >>> module(torch.ones(3, 2)).sum().backward()
    >>> reducer.finish()
    >>> module.weight.grad
    tensor([[3., 3.]])
    >>> dist.destroy_process_group()
    """

    def __init__(
        self, module: nn.Module, *, grid: Any = None, process_group: ProcessGroup | None = None, **options: Any
    ) -> None:
        require_initialized("GradientReducer")
        self.module = module
        self.group = _data_parallel_group(grid, process_group)
        failure: Exception | None = None
        self._slots: list[GradientSlot] = []
        try:
            self.options = ReductionOptions(**options)
            self._slots = find_slots(module, self.options)
        except (TypeError, ValueError, RuntimeError) as error:
            failure, self.options = error, ReductionOptions()
        agree_on_slots(self._slots, self.options, self.group, failure)
        self._changes = Changes(module, self._slots)
        self._state = ReducerState.IDLE
        device = self._slots[0].parameter.device
        self._sizes = self.options.bucket_sizes(self.options.bucket_bytes or suitable_bucket_bytes(self.group, device))
        self._dense, self._lane_of = assign_lanes(self._slots, self.options, self.group, self._sizes.bucket_bytes)
        if self.options.broadcast_at_start:
            self._broadcast()
        self._buckets: list[GradientBucket] = []
        self._plan: list[tuple[int, ...]] = []
        self._next = 0
        self._under_way: list[Reduction] = []
        self._order: list[int] | None = []
        """Indices of slots as their gradients became ready in the first step; None once the order is known."""
        self._next_plan: list[tuple[int, ...]] | None = None
        self._holds_back = self._all_want_to_hold_back = False
        """Whether full buckets wait for the end of backward, in this step; and by what the last one knew."""
        self._deferred: list[tuple[list[GradientSlot], Census]] = []
        self._steps: deque[StepTiming] = deque(maxlen=self.options.keep_steps)
        self.step_count = 0
        """How many times ``finish()`` was reached."""
        self.reduction_count = 0
        """How many reductions of buckets were started."""
        self._lay_out(self._planned(range(len(self._slots) - 1, -1, -1)))
        for slot in self._slots:
            owners[slot.parameter] = self
        self._handles = [slot.parameter.register_post_accumulate_grad_hook(self._hook(slot)) for slot in self._slots]

    # -- the verbs ---------------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients of all but the last micro-batch on this rank; no communication happens inside.

        Raises:
            RuntimeError: the last step is not finished.
        """
        if self._state not in (ReducerState.IDLE, ReducerState.ACCUMULATING):
            raise wrong_moment("no_sync()", self._state)
        previous, self._state = self._state, ReducerState.ACCUMULATING
        try:
            yield
        finally:
            self._state = previous

    def finish(self) -> None:
        """Wait until every gradient is reduced. Call it once per step, after the last backward, before the optimizer.

        Raises:
            RuntimeError: no gradient arrived since the last time (``finish()`` twice); on every rank of the group: a
                parameter without a gradient, one added, frozen or unfrozen since construction, a gradient that was
                replaced. On a GPU, ranks that are not to blame learn of it at the next step.
        """
        if self._state is not ReducerState.REDUCING:
            raise wrong_moment("finish()", self._state)
        self._state = ReducerState.FINISHING
        timing = self._steps[-1]
        timing.finish_ns = time.perf_counter_ns()
        try:
            problem = self._changes.problem()
            censuses = self._reduce_the_rest(problem is not None)
            for reduction in self._under_way:
                reduction.wait()
            for _, census in censuses:
                census.settle()
            timing.buckets = [reduction.timing for reduction in self._under_way]
            if problem is not None:
                raise RuntimeError(problem)
            self._conclude(censuses)
            self._learn_order()
        finally:
            timing.ended_ns = time.perf_counter_ns()
            self.step_count += 1
            self._under_way = []
            self._next, self._holds_back = 0, False
            for bucket in self._buckets:
                bucket.reset()
            self._state = ReducerState.IDLE

    def release(self) -> None:
        """Launch the full buckets that were held back during backward, if any were."""
        if self._holds_back and self._state is ReducerState.REDUCING:
            self._holds_back = False
            self._launch_full_buckets()

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Reduce dense gradients by a communication hook of torch's DDP, such as ``bf16_compress_hook``.

        The hook averages by itself, as it does under DDP. Experts and sparse gradients are reduced without it.

        Raises:
            ValueError: options that a hook would ignore.
            RuntimeError: in the middle of a step.
        """
        if self._state is not ReducerState.IDLE:
            raise wrong_moment("register_comm_hook()", self._state)
        options = self.options
        if options.op == "sum" or options.divisor or options.predivide_factor or options.communication_dtype:
            raise ValueError(
                "op, divisor, predivide_factor and communication_dtype are a communication hook's own business: "
                "leave them out of this GradientReducer"
            )
        self._dense.hook, self._dense.hook_state, self._dense.after = hook, state, 1.0
        for slot in self._slots:
            if self._lane_of[slot.index] is self._dense and not slot.is_sparse:
                slot.scale = 1.0

    def report(self) -> GradientReport:
        """Bytes and times of the last steps on this rank."""
        return GradientReport(dist.get_rank(), tuple(step for step in self._steps if step.ended_ns))

    def detach(self) -> None:
        """Remove the hooks; the module may get another reducer. Gradients stay as they are. Twice is once."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._state is not ReducerState.DETACHED:
            self._state = ReducerState.DETACHED
            for slot in self._slots:
                owners.pop(slot.parameter, None)
            if self._dense.two_level is not None:
                self._dense.two_level.destroy()

    @classmethod
    def attach(cls, engine: Any, **options: Any) -> Any:
        """Let a DeepSpeed engine reduce its gradients this way; see ``ds_topo.engine.reducer_drivers.attach``."""
        return importlib.import_module("ds_topo.engine.reducer_drivers").attach(engine, **options)

    @property
    def state(self) -> ReducerState:
        """What it is doing."""
        return self._state

    @property
    def buckets(self) -> list[list[str]]:
        """Names of the parameters in each bucket, in the order of reduction."""
        return [[slot.name for slot in bucket.slots] for bucket in self._buckets]

    @property
    def uses_two_levels(self) -> bool:
        """Whether dense gradients are reduced inside hosts and across hosts apart."""
        return self._dense.two_level is not None

    # -- gradients arrive --------------------------------------------------------------------------------------------

    def _hook(self, slot: GradientSlot) -> Callable[[torch.Tensor], None]:
        """What autograd calls when a parameter's gradient is complete; the common path is kept short."""
        reducing = ReducerState.REDUCING
        at_once = fills_at_once(slot)

        def on_gradient(_: torch.Tensor) -> None:
            if self._state is not reducing and not self._start():
                keep(slot)
                return
            slot.arrived += 1
            if self._order is not None:
                self._order.append(slot.index)
            if slot.arrived != slot.expected:
                self._keep_for_later(slot)
                return
            slot.is_ready = True
            if at_once:
                fill_at_once(slot)
            bucket = slot.bucket
            bucket.pending -= 1
            if not bucket.pending:
                fill(bucket.slots)
                if bucket.index == self._next and not self._holds_back:
                    self._launch_full_buckets()

        return on_gradient

    def _keep_for_later(self, slot: GradientSlot) -> None:
        """A gradient after which another one will arrive, or may (in the first step of a static graph)."""
        if slot.expected and slot.arrived > slot.expected:
            raise surplus_gradient(slot)
        keep(slot)

    def _start(self) -> bool:
        """A gradient while none is being reduced; whether this backward is the step's last one."""
        if self._next_plan is not None:
            self._lay_out(self._next_plan)
            self._next_plan = None
        if self._state is ReducerState.IDLE and self._is_last_backward():
            self._begin_step()
        return self._state is ReducerState.REDUCING

    def _begin_step(self) -> None:
        self._state = ReducerState.REDUCING
        overlap = self.options.overlap
        self._holds_back = self._all_want_to_hold_back if overlap is None else not overlap
        self._steps.append(StepTiming(self.step_count, time.perf_counter_ns()))

    def _wants_to_hold_back(self) -> bool:
        """Whether the next step's reductions had better not disturb its backward; done if all ranks agree.

        Ranks of a group must not differ in this: their backward may have collectives of the same group.
        """
        return False

    def _is_last_backward(self) -> bool:
        """Whether gradients that arrive now are of the step's last micro-batch; engines know better."""
        return True

    def _launch_full_buckets(self) -> None:
        """In the buckets' order, the same on all ranks, whatever the order in which they became full."""
        last = len(self._buckets) - 1
        while self._next <= last and not self._buckets[self._next].pending:
            bucket = self._buckets[self._next]
            self._under_way.append(launch(bucket, self._lane_of[bucket.slots[0].index], self._next == last))
            self.reduction_count += 1
            self._next += 1

    # -- the end of a step -------------------------------------------------------------------------------------------

    def _reduce_the_rest(self, failed: bool) -> list[tuple[list[GradientSlot], Census]]:
        """Reduce what is not yet under way, with zeros for parameters that took no part, so that no rank waits."""
        present = [slot.arrived > 0 for slot in self._slots]
        if self.options.find_unused_parameters:  # those of earlier micro-batches too
            present = [
                found or slot.parameter.grad is not None or slot.holds_gradient
                for found, slot in zip(present, self._slots, strict=True)
            ]
        for bucket in self._buckets:
            if bucket.pending:
                fill(bucket.slots)
                bucket.pending = 0
        self._launch_full_buckets()
        if self._dense.two_level is not None:
            self._dense.two_level.flush()
        censuses = []
        for lane in dict.fromkeys(self._lane_of):
            members = [slot for slot in self._slots if self._lane_of[slot.index] is lane]
            device = members[0].parameter.device
            notes = [*(present[slot.index] for slot in members), failed, self._wants_to_hold_back()]
            censuses.append((members, Census(notes, lane, device)))
        return censuses

    def _conclude(self, censuses: list[tuple[list[GradientSlot], Census]]) -> None:
        """Hand out gradients and errors by what the ranks have told each other."""
        may_miss = self.options.find_unused_parameters or self.options.zero_unused_parameters
        missing = [slot.name for slot in self._slots if not slot.arrived]
        if missing and not may_miss:
            raise missing_gradients(missing, "this rank")
        is_deferred = self._slots[0].parameter.is_cuda and not self.options.find_unused_parameters
        self._deferred, censuses = (censuses, self._deferred) if is_deferred else ([], censuses)
        unused: set[int] = set()
        for members, census in censuses:
            counts, failures, holding = census.result()
            if self._lane_of[members[0].index] is self._dense:
                self._all_want_to_hold_back = holding == census.size
            absent = [slot for slot, count in zip(members, counts, strict=True) if count < census.size]
            if failures:
                raise RuntimeError(f"{failures} of {census.size} ranks failed in finish(); their own errors say why")
            if absent and not may_miss:
                raise missing_gradients([slot.name for slot in absent], "some other ranks")
            if self.options.find_unused_parameters:
                unused.update(slot.index for slot, count in zip(members, counts, strict=True) if not count)
        for slot in self._slots:
            if slot.home is not None:
                slot.parameter.grad = None
            elif slot.is_apart and slot.index not in unused:
                setattr(slot.parameter, "main_grad", slot.view)  # noqa: B010
                slot.parameter.grad = slot.view.to(slot.parameter.dtype)
            elif (not slot.is_ready or slot.is_sparse) and slot.index not in unused:
                slot.parameter.grad = slot.view

    def _learn_order(self) -> None:
        """After the first step: plan buckets in the order in which the first rank's gradients became ready."""
        if self._order is None:
            return
        last_arrivals = list(dict.fromkeys(reversed(self._order)))[::-1]
        arrived = set(last_arrivals)
        order = last_arrivals + [slot.index for slot in reversed(self._slots) if slot.index not in arrived]
        for slot in self._slots:
            slot.expected = slot.expected or max(1, slot.arrived)
        agreed = torch.tensor(order, device=self._slots[0].parameter.device)
        broadcast([agreed], self.group)
        plan = self._planned(agreed.tolist())
        self._next_plan = plan if plan != self._plan else None
        self._order = None

    # -- construction ------------------------------------------------------------------------------------------------

    def _planned(self, order: Sequence[int]) -> list[tuple[int, ...]]:
        lanes = [id(lane) for lane in self._lane_of]
        return plan_slots(self._slots, lanes, order, self._sizes)

    def _lay_out(self, plan: list[tuple[int, ...]]) -> None:
        """Build the buckets of a plan; gradients that are still needed move along."""
        for bucket in self._buckets:
            bucket.release()
        self._plan, self._buckets = plan, []
        for index, members in enumerate(plan):
            slots = [self._slots[member] for member in members]
            two_level = self._lane_of[members[0]].two_level
            bucket = GradientBucket(index, slots, two_level.inner_size if two_level is not None else 1)
            bucket.install()
            self._buckets.append(bucket)

    def _broadcast(self) -> None:
        """Frozen parameters and buffers too, but for those to ignore."""
        ignored = ignored_identities(self.module, self.options)
        tensors = [tensor for tensor in self.module.parameters() if id(tensor) not in ignored]
        by_name: dict[str | None, list[torch.Tensor]] = {None: list(self.module.buffers())}
        for tensor in tensors:
            by_name.setdefault(expert_group_name(tensor), []).append(tensor)
        for name, members in by_name.items():
            group = self.group if name is None else self.options.expert_groups.get(name)
            if group is not None:
                broadcast(members, group)


def _data_parallel_group(grid: Any, process_group: ProcessGroup | None) -> ProcessGroup:
    if grid is not None and process_group is not None:
        raise ValueError("grid and process_group: give one of them")
    group: ProcessGroup = grid.get_data_parallel_group() if grid is not None else process_group or _world()
    if dist.get_rank() not in dist.get_process_group_ranks(group):
        raise ValueError(f"process_group: rank {dist.get_rank()} is not one of its ranks")
    return group


def _world() -> ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world
