"""The reducer: hooks on parameters fill buckets, full buckets are reduced while backward goes on.

A step, with the verb or event on each arrow::

                     no_sync()
            IDLE <--------------> ACCUMULATING     gradients stay on this rank, in their buckets
             ^ |
             | | a gradient of the last backward
             | v
             | REDUCING     parameter: PENDING -> READY (its last gradient) -> COPIED_IN (scaled, in its bucket)
             |    |         bucket: full when nothing is pending; full buckets go in flight, in order
             |    | finish(), or reset() to give the step up
             |    v
            FINISHING     the rest goes in flight, with zeros for unused parameters; the ranks tell each other which
                          parameters they used, and who failed; wait; hand out gradients or errors; reset

    detach() in any state leads to DETACHED, for good.

Whoever calls the verbs is the :class:`~ds_topo.reducer.driver.StepDriver`: the user's loop, or an engine.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import Unpack

from ds_topo.partition.gradients import PartitionedGradients
from ds_topo.process_groups.creation import ProcessGroup, require_initialized
from ds_topo.reducer.copy_in import accumulate, copy_in, copy_in_at_once, is_copied_at_once
from ds_topo.reducer.driver import StepDriver, TrainingLoop
from ds_topo.reducer.hooks import GradientHooks, OnGradient, keep_alive, let_go, without_collections
from ds_topo.reducer.inputs import HasDataParallelGroup, agreed_inputs, data_parallel_group
from ds_topo.reducer.layout import BucketLayout
from ds_topo.reducer.misuse import (
    Changes,
    check_module,
    missing_gradients,
    other_steps,
    unequal_repetition,
    unexpected_gradient,
    unreduced_gradients,
    wrong_moment,
)
from ds_topo.reducer.optimizers import watch
from ds_topo.reducer.options import ReductionArguments
from ds_topo.reducer.parameter_state import COPIED_IN, READY, ParameterState
from ds_topo.reducer.parameters import ignored_identities, make_equal, owners
from ds_topo.reducer.reductions import launch
from ds_topo.reducer.report import GradientReport, StepTiming
from ds_topo.reducer.results import add_late_gradients, hand_out
from ds_topo.reducer.routes import CommHook, assign_routes
from ds_topo.reducer.step import ReducerState, Step
from ds_topo.reducer.used_parameters import Counts, UsedParameters

IDLE, ACCUMULATING, REDUCING = ReducerState.IDLE, ReducerState.ACCUMULATING, ReducerState.REDUCING


class BucketReducer:
    """Average a module's gradients over a data-parallel group while backward is still running.

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
        driver: who decides about steps; the user's training loop by default.
        options: see :class:`~ds_topo.reducer.options.ReductionOptions`.

    Raises:
        ValueError: values that cannot be.
        DisagreementError: parameters or options differ between ranks; names them, on every rank.
        RuntimeError: ``torch.distributed`` is not initialised, or a parameter has a reducer already.

    Sources: Li et al., PyTorch Distributed (VLDB 2020), for buckets and overlap; TorchDistPackage's NaiveDDP for
    reducing at the last micro-batch only; DeepSpeed's ``average_expert_grads`` for the divisor of experts.
    """

    @without_collections
    def __init__(
        self,
        module: nn.Module,
        *,
        grid: HasDataParallelGroup | None = None,
        process_group: ProcessGroup | None = None,
        driver: StepDriver | None = None,
        **options: Unpack[ReductionArguments],
    ) -> None:
        require_initialized("GradientReducer")
        check_module(module)
        self.module = module
        self.group = data_parallel_group(grid, process_group)
        self.driver: StepDriver = driver or TrainingLoop()
        self._given = frozenset(options)
        """Names of the options that are the user's, not the driver's."""
        self.options, self._states = agreed_inputs(
            module, {**self.driver.options(), **options}, self.group, may_be_empty=driver is not None
        )
        self._by_parameter: dict[torch.Tensor, ParameterState] = {state.parameter: state for state in self._states}
        self._device = self._states[0].parameter.device if self._states else torch.device("cpu")
        self._dense, self._routes = assign_routes(self._states, self.options, self.group, self._device)
        if self.options.overlap_parameters and not self.options.partitions:
            raise ValueError(
                "overlap_parameters=True: parameters arrive from other ranks at ZeRO stages 1 and 2 alone; leave it out"
            )
        if self.options.broadcast_at_start:
            make_equal(module, self.options, self.group)
        self._layout = BucketLayout(self._states, self._routes, self.options.bucket_sizes(self._dense.bucket_bytes))

        # -- the step
        self._state = IDLE
        self._step = Step(StepTiming(0, 0))
        self._is_unreduced = False
        """Whether gradients of earlier micro-batches wait for the last one."""
        self._all_prefer_to_defer = False
        """What the ranks told each other in the last step."""
        self._unread: list[UsedParameters] = []
        """On a GPU, what they told each other in the last step is read in the next one."""

        # -- the record
        self._timings: deque[StepTiming] = deque(maxlen=self.options.keep_steps)
        self.step_count = 0
        """How many times ``finish()`` was reached."""
        self.reduction_count = 0
        """How many reductions of buckets were started."""

        self._hooks = GradientHooks()
        own: weakref.ref[object] = weakref.ref(self)
        for state in self._states:
            owners[state.parameter] = own
        self._hooks.add([state.parameter for state in self._states], [self._hook(state) for state in self._states])
        ignored = ignored_identities(module, self.options)
        self._changes = Changes(module, self._states, self._hooks, ignored, self._may_miss)
        self._stop_watching = watch.enter(self)
        keep_alive(module, self)

    # -- the verbs ---------------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients of all but the last micro-batch on this rank; no communication happens inside.

        Raises:
            RuntimeError: the last step is not finished.
        """
        if self._state not in (IDLE, ACCUMULATING):
            raise wrong_moment("no_sync()", self._state)
        previous, self._state = self._state, ACCUMULATING
        try:
            yield
        finally:
            self._state = previous

    def finish(self) -> None:
        """Wait until every gradient is reduced. Call it once per step, after the last backward, before the optimizer.

        Raises:
            DisagreementError: a rank has left out a step of its engine; names it.
            RuntimeError: no gradient arrived since the last time (``finish()`` twice); on every rank of the group: a
                parameter without a gradient, one added, frozen or unfrozen since construction, a gradient that was
                replaced. On a GPU, ranks that are not to blame learn of it at the next step.
        """
        if self._state is not REDUCING:
            raise wrong_moment("finish()", self._state)
        self._state = ReducerState.FINISHING
        timing = self._step.timing
        timing.finish_ns = time.perf_counter_ns()
        try:
            problem = self._changes.problem()
            without, told = self._launch_the_rest(failed=problem is not None)
            self._wait(told)
            if problem is not None:
                raise RuntimeError(problem)
            unused, late = self._read(told)
            self._reduce_late(late)
            hand_out(self._states, self.options, without, unused)
            self._layout.learn(self.group)
        except BaseException:
            self._discard_collected(self.options.partitions)
            raise
        finally:
            timing.ended_ns = time.perf_counter_ns()
            self._reset()

    def reset(self) -> None:
        """Give up the step: discard its gradients, of earlier micro-batches too, and go on with the next one.

        For a step that an exception ended. Ranks that are in ``finish()`` of the same step raise there; so call it on
        every rank that does not get that far, as soon as it goes on.

        Raises:
            RuntimeError: inside ``finish()``, or after ``detach()``.
        """
        if self._state in (ReducerState.FINISHING, ReducerState.DETACHED):
            raise wrong_moment("reset()", self._state)
        if self._state is REDUCING:
            self._end_step(failed=True)
        for state in self._states:
            state.parameter.grad = None
            state.discard_sum()
            if state.grad_buffer is not None:
                state.grad_buffer.zero_()
        self._discard_collected(self.options.partitions)
        self._is_unreduced = False

    def complete(self) -> None:
        """``finish()``, also of a step in which no gradient arrived in the last micro-batch; for engines."""
        if self._state is IDLE:
            self._begin_step()
        self.finish()

    def give_up_unfinished(self) -> None:
        """``reset()`` if an exception has ended the last step before ``finish()``; for engines."""
        if self.is_in_step:
            self.reset()

    def forget_unreduced(self) -> None:
        """Gradients of earlier micro-batches are thrown away by an engine."""
        if self._is_unreduced and self._state is IDLE:
            for state in self._states:
                state.discard_sum()
            self._is_unreduced = False

    @property
    def is_in_step(self) -> bool:
        """Whether gradients of a step have arrived, and ``finish()`` is still to come."""
        return self._state is REDUCING

    def launch_deferred(self) -> None:
        """Launch the full buckets that waited for the end of backward, if any did."""
        if self._step.defers and self._state is REDUCING:
            self._step.defers = False
            self._launch_full_buckets()

    def release(self) -> None:
        """The former name of ``launch_deferred()``."""
        warnings.warn("release() is now launch_deferred()", DeprecationWarning, stacklevel=2)
        self.launch_deferred()

    def wait(self) -> None:
        """Until all parameters that other ranks have updated are there; for programs that keep references to them."""
        self.driver.wait_for_parameters()

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        """Reduce dense gradients by a communication hook of torch's DDP, such as ``bf16_compress_hook``.

        The hook averages by itself, as it does under DDP. Experts and sparse gradients are reduced without it.

        Raises:
            ValueError: options that a hook would ignore.
            RuntimeError: in the middle of a step.
        """
        if self._state is not IDLE:
            raise wrong_moment("register_comm_hook()", self._state)
        options = self.options
        type_is_given = options.communication_dtype is not None and "communication_dtype" in self._given
        if options.op == "sum" or options.divisor or options.predivide_factor or type_is_given:
            raise ValueError(
                "op, divisor, predivide_factor and communication_dtype are a communication hook's own business: "
                "leave them out of this GradientReducer"
            )
        if any(not partition.keeps for partition in options.partitions):
            raise ValueError(
                "register_comm_hook() at ZeRO stage 2: a communication hook works on whole gradients, of which ranks "
                "keep their partition alone; use stage 0 or 1"
            )
        self._dense.hook, self._dense.hook_state, self._dense.after = hook, state, 1.0
        for parameter in self._states:
            if self._routes[parameter.index] is self._dense and not parameter.is_sparse:
                parameter.scale = 1.0

    def report(self) -> GradientReport:
        """Bytes and times of the last steps on this rank."""
        return GradientReport(dist.get_rank(), tuple(timing for timing in self._timings if timing.ended_ns))

    def detach(self) -> None:
        """Remove the hooks; the module may get another reducer. Gradients stay as they are. Idempotent."""
        if self._state is ReducerState.DETACHED:
            return
        partitions = self.options.partitions
        if partitions and (self._is_unreduced or any(partition.holds_sums for partition in partitions)):
            warnings.warn(
                "detach() between the micro-batches of a step: the gradients of those that are over are lost",
                RuntimeWarning,
                stacklevel=2,
            )
        self._state = ReducerState.DETACHED
        self._hooks.remove()
        self._stop_watching()
        let_go(self.module)
        for state in self._states:
            owners.pop(state.parameter, None)
            state.discard_sum()
        for bucket in self._layout.buckets:
            bucket.release()
        self.driver.on_detach()
        if self._dense.two_level is not None:
            self._dense.two_level.destroy()

    @property
    def state(self) -> ReducerState:
        """What it is doing."""
        return self._state

    @property
    def buckets(self) -> list[list[str]]:
        """Names of the parameters in each bucket, in the order of reduction."""
        return [[member.name for member in bucket.members] for bucket in self._layout.buckets]

    @property
    def uses_two_levels(self) -> bool:
        """Whether dense gradients are reduced inside hosts and across hosts apart."""
        return self._dense.two_level is not None

    # -- gradients arrive --------------------------------------------------------------------------------------------

    def _hook(self, state: ParameterState) -> OnGradient:
        """What autograd calls when a gradient is accumulated; the common path is kept short.

        It must not keep this reducer alive: see Note [Lifetime] in ``hooks.py``.
        """
        at_once, layout, reference = is_copied_at_once(state), self._layout, weakref.ref(self)

        def on_gradient(_: object, __: object) -> None:
            reducer = reference()
            assert reducer is not None
            if reducer._state is not REDUCING and not reducer._start():
                accumulate(state)
                reducer._is_unreduced = True
                return
            state.arrived += 1
            if layout.arrivals is not None:
                layout.arrivals.append(state.index)
            if state.arrived != state.expected:
                reducer._take_further(state)
                return
            state.contribution = READY
            if at_once:
                copy_in_at_once(state)
            bucket = state.bucket
            bucket.pending -= 1
            if not bucket.pending:
                if bucket.accumulates:
                    copy_in(bucket.members)
                if bucket.index == reducer._step.next_bucket and not reducer._step.defers:
                    reducer._launch_full_buckets()

        return on_gradient

    def _take_further(self, state: ParameterState) -> None:
        """A gradient after which another one will arrive, or may (in the first step of a static graph), or one more."""
        if not state.expected or state.arrived < state.expected:
            accumulate(state)
        elif not state.repeats:
            raise unexpected_gradient(state)
        elif state.contribution is COPIED_IN:
            self._step.late[state.index] = state

    def _start(self) -> bool:
        """A gradient while none is being reduced; whether this backward is the step's last one."""
        self._layout.renew()
        if self._state is IDLE and self.driver.is_last_backward():
            self._begin_step()
        return self._state is REDUCING

    def _begin_step(self) -> None:
        overlap = self.options.overlap
        defers = self._all_prefer_to_defer if overlap is None else not overlap
        self._step = Step(StepTiming(self.step_count, time.perf_counter_ns()), defers)
        self._timings.append(self._step.timing)
        self._state = REDUCING

    def _launch_full_buckets(self) -> None:
        """In the buckets' order, the same on all ranks, whatever the order in which they became full."""
        step, buckets = self._step, self._layout.buckets
        last = len(buckets) - 1
        while step.next_bucket <= last and not buckets[step.next_bucket].pending:
            bucket = buckets[step.next_bucket]
            route = self._routes[bucket.members[0].index]
            step.in_flight.append(launch(bucket, route, is_last=step.next_bucket == last))
            self.reduction_count += 1
            step.next_bucket += 1

    # -- what others do to gradients -----------------------------------------------------------------------------------

    def before_zero_grad(self, parameters: Iterable[torch.Tensor]) -> None:
        """Let go of what these gradients are, beside ``parameter.grad``; give up a step that is thrown away whole.

        A loss that only runs through this module (a generator's, through the discriminator) starts a step here, whose
        gradients are then thrown away, on all ranks alike.
        """
        if self._state is not REDUCING and not self._is_unreduced and not self._leaves_sums:
            return
        zeroed = [self._by_parameter[parameter] for parameter in parameters if parameter in self._by_parameter]
        if self._state is REDUCING:
            self._step.discarded.update(state.index for state in zeroed)
            if len(self._step.discarded) < len(self._states):
                return
            self._end_step(failed=False)
        for state in zeroed:
            state.discard_sum()
        if len(zeroed) == len(self._states):
            self._is_unreduced = False

    def before_optimizer_step(self, parameters: Iterable[torch.Tensor]) -> None:
        """Refuse a step on gradients that are this rank's alone."""
        if self._state is REDUCING or (self._is_unreduced and self._state is IDLE):
            for parameter in parameters:
                if parameter in self._by_parameter:
                    raise unreduced_gradients(self._by_parameter[parameter].name)

    @property
    def _leaves_sums(self) -> bool:
        """Whether gradients are left in ``main_grad``, or accumulate apart from ``parameter.grad``."""
        options = self.options
        return options.accumulation_dtype is not None or bool(options.grad_buffers or options.partitions)

    @property
    def _may_miss(self) -> bool:
        """Whether parameters may be without a gradient."""
        return self.options.find_unused_parameters or self.options.zero_unused_parameters

    # -- the end of a step -------------------------------------------------------------------------------------------

    def _end_step(self, failed: bool) -> None:
        """Take part in what the other ranks wait for, and forget the step."""
        self._state = ReducerState.FINISHING
        timing = self._step.timing
        timing.finish_ns = time.perf_counter_ns()
        try:
            _, told = self._launch_the_rest(failed)
            self._wait(told)
            self._discard_collected([partition for partition in self.options.partitions if partition.keeps])
        finally:
            timing.ended_ns = time.perf_counter_ns()
            self._reset()

    @staticmethod
    def _discard_collected(partitions: Iterable[PartitionedGradients]) -> None:
        """Forget the sums of a step that is given up, which the next step's would be added to.

        Partitions that do not keep whole gradients hold earlier micro-batches, too.
        """
        for partition in partitions:
            partition.discard()

    def _launch_the_rest(self, failed: bool) -> tuple[list[ParameterState], list[UsedParameters]]:
        """Launch what is not yet in flight, with zeros for parameters that took no part, so that no rank waits.

        Returns:
            The parameters without a gradient, and what is being told to the other ranks.
        """
        used = [state.arrived > 0 for state in self._states]
        if self.options.find_unused_parameters:  # those of earlier micro-batches too
            used = [
                found or state.parameter.grad is not None or state.holds_sum
                for found, state in zip(used, self._states, strict=True)
            ]
        without: list[ParameterState] = []
        for bucket in self._layout.buckets:
            if bucket.pending:
                without += copy_in(bucket.members) if bucket.accumulates else ()
                bucket.pending = 0
        self._launch_full_buckets()
        if self._dense.two_level is not None:
            self._dense.two_level.flush()
        prefers_to_defer = self.driver.prefers_to_defer(
            [timing.communication_ns for timing in self._timings if timing.ended_ns]
        )
        told = []
        for route in dict.fromkeys(self._routes):
            members = [state for state in self._states if self._routes[state.index] is route]
            mine = [used[state.index] for state in members]
            late = self._step.late.keys()
            told.append(
                UsedParameters(
                    members,
                    mine,
                    late,
                    route,
                    failed=failed,
                    prefers_to_defer=prefers_to_defer,
                    step=self.driver.steps_taken(),
                )
            )
        return without, told

    def _wait(self, told: list[UsedParameters]) -> None:
        for reduction in self._step.in_flight:
            reduction.wait()
        for notes in told:
            notes.settle()
        self._step.timing.buckets = [reduction.timing for reduction in self._step.in_flight]
        self._step.timing.gathers = self.driver.gathers()

    def _read(self, told: list[UsedParameters]) -> tuple[list[ParameterState], list[ParameterState]]:
        """What the ranks have told each other; raise where that is an error.

        On a GPU it is what they told in the step before, so that nothing waits for the device; but at once in the first
        step, where unused parameters are to be found, and where this rank got late gradients.

        Returns:
            The parameters that no rank used, if those are to be found, and those that got late gradients.
        """
        missing = [state.name for state in self._states if not state.arrived]
        if missing and not self._may_miss:
            raise missing_gradients(missing, "this rank")
        is_first = self._layout.arrivals is not None
        at_once = self.options.find_unused_parameters or is_first or bool(self._step.late)
        if self._device.type == "cuda" and not at_once:
            told, self._unread = self._unread, told
        unused: list[ParameterState] = []
        late: list[ParameterState] = []
        for counts in (notes.counts() for notes in told):
            self._raise_for(counts)
            unused += counts.unused_everywhere if self.options.find_unused_parameters else []
            late += counts.late_anywhere
        return unused, late

    def _raise_for(self, counts: Counts) -> None:
        size = counts.route.size
        if counts.route is self._dense:
            self._all_prefer_to_defer = counts.prefer_to_defer == size
        if counts.failed:
            raise RuntimeError(f"{counts.failed} of {size} ranks failed in finish(); their own errors say why")
        if counts.unused_anywhere and not self._may_miss:
            raise missing_gradients([state.name for state in counts.unused_anywhere], "some other ranks")
        if self._device.type == "cuda" and len(counts.late_anywhere) > len(counts.late_everywhere):
            raise unequal_repetition([state.name for state in counts.late_anywhere])
        if counts.steps_differ:  # the last: it is told by a collective, to which all ranks have come here
            raise other_steps(self.driver.steps_taken(), counts.route.group)

    def _reduce_late(self, late: list[ParameterState]) -> None:
        groups = [self._routes[state.index].group for state in late]
        add_late_gradients(late, groups, self.options.scales(self._dense.size))
        for state in self._step.late.values():
            state.expected = max(state.expected, state.arrived)

    def _reset(self) -> None:
        self.step_count += 1
        for bucket in self._layout.buckets:
            bucket.reset()
        self._step = Step(self._step.timing)
        self._is_unreduced = False
        self._state = IDLE
