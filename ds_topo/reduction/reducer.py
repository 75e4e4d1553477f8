"""Reduce gradients: hooks on parameters fill buckets, and full buckets are reduced while backward goes on.

The states of a reducer, with the call or event on each arrow::

                     no_sync()
            IDLE <--------------> ACCUMULATING     gradients stay on this rank, in their buckets
             ^ |
             | | a gradient of the last backward
             | v
             | REDUCING     parameter: its last gradient arrives; it is copied, scaled, into its bucket
             |    |         bucket: full when no member is pending; full buckets are launched in order
             |    | finish(), or reset() to give up the step
             |    v
            FINISHING     launch the remaining buckets, with zeros for unused parameters; sum the ranks' notes on used
                          parameters and failures; wait; set gradients or raise errors; reset

    detach() in any state leads to DETACHED, which is final.

The user's training loop makes these calls, or an engine through its :class:`~ds_topo.reduction.reducer.StepDriver`.
"""

from __future__ import annotations

import enum
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle
from typing_extensions import Unpack

from ds_topo.base.marks import owners
from ds_topo.errors import abridged, listed, warn
from ds_topo.process_groups.creation import ProcessGroup, require_initialized
from ds_topo.reduction import MANAGED, REPORT
from ds_topo.reduction.buckets import (
    BucketLayout,
    BucketTiming,
    StepTiming,
    hand_out,
    is_copied_at_once,
)
from ds_topo.reduction.options import ReductionArguments
from ds_topo.reduction.parameters import (
    COPIED,
    KEPT,
    REBUILD,
    SUMMED,
    Changes,
    HasDataParallelGroup,
    ParameterState,
    ReducerReference,
    Route,
    agreed_inputs,
    data_parallel_group,
    make_equal,
    watch,
)
from ds_topo.reduction.reductions import Reduction, StepNotes, assign_routes, different_steps

if TYPE_CHECKING:
    from ds_topo.reduction.managed import ReplicaSums
    from ds_topo.reduction.report import GradientReport


class ReducerState(enum.Enum):
    """The state of a reducer; the diagram in the docstring of this module says what happens in each."""

    IDLE = enum.auto()
    ACCUMULATING = enum.auto()
    REDUCING = enum.auto()
    FINISHING = enum.auto()
    DETACHED = enum.auto()


IDLE, ACCUMULATING, REDUCING = ReducerState.IDLE, ReducerState.ACCUMULATING, ReducerState.REDUCING
REPORTED_STEPS = 16
_REMEDIES = {
    ReducerState.IDLE: "no gradient arrived since the last finish(), or since the reducer was built; build it before "
    "the forward pass, and call finish() once per step, after a backward outside no_sync()",
    ReducerState.ACCUMULATING: "leave no_sync() first; the last micro-batch's backward belongs outside",
    ReducerState.REDUCING: "call finish() after the last backward of a step",
    ReducerState.FINISHING: "finish() is running; wait until it returns",
    ReducerState.DETACHED: "it was detached; build a new GradientReducer",
}


def _wrong_moment(call: str, state: ReducerState) -> RuntimeError:
    return RuntimeError(f"{call} while {state.name}: {_REMEDIES[state]}")


def _listed(states: Iterable[ParameterState]) -> str:
    return listed([state.name for state in states])


def _missing_gradients(states: Iterable[ParameterState], whose: str) -> RuntimeError:
    return RuntimeError(
        f"parameters {_listed(states)} got no gradient on {whose} in this step: use them, freeze them before "
        "construction, or pass find_unused_parameters=True"
    )


def wider_sums(manager: object) -> ReplicaSums | None:
    """Return what continues sums over the replicas of a ``Manager``; None without one."""
    return None if manager is None else cast("ReplicaSums", MANAGED.load().ReplicaSums(manager))


@dataclass(eq=False)
class ReductionStep:
    """The state of one step, from its last backward to the end of ``finish()``."""

    timing: StepTiming
    defers: bool = False
    """True while full buckets wait for the end of backward."""
    in_flight: list[Reduction] = field(default_factory=list)
    """The launched buckets, in their order."""
    absent: list[ParameterState] = field(default_factory=list)
    """Parameters without a gradient in the last micro-batch."""
    late: dict[int, ParameterState] = field(default_factory=dict)
    """Parameters that got a gradient after they were copied in, by index."""
    discarded: set[int] = field(default_factory=set)
    """Indices of parameters whose gradients ``zero_grad()`` discarded before ``finish()``."""


class StepDriver:
    """Step control of a reducer. This base class serves a user's training loop; drivers of engines override it."""

    wider: ReplicaSums | None = None
    """What continues the sums, if the engine's optimizer uses it, too."""

    def options(self) -> ReductionArguments:
        """Return the driver's settings of the reduction; the user's take precedence."""
        return {}

    def is_last_backward(self) -> bool:
        """Return True if the current gradients belong to the step's last micro-batch."""
        return True

    def prefers_to_defer(self, timings: Iterable[StepTiming]) -> bool:
        """Return True if the next step's reductions should be launched after its backward.

        It happens only if all ranks of the group prefer it: their backward may have collectives of the same group.
        ``timings`` are those of the last steps, and of the one that ends now, whose ``ended_ns`` is 0.
        """
        return False

    def owns_hook(self, hook: Callable[..., object]) -> bool:
        """Return True if a hook on the gradient of a parameter is the engine's, and leaves the gradient as it is."""
        return False

    def remedy_for_unfrozen(self) -> str:
        """Return what to do about parameters that were unfrozen after construction."""
        return REBUILD

    def steps_taken(self) -> int:
        """Return the number of optimizer steps; equal on all ranks, unless one has skipped a step."""
        return 0

    def wait_for_parameters(self) -> None:
        """Wait for all parameters that other ranks have updated."""

    def gathers(self) -> list[BucketTiming]:
        """Return the timings of the parameters that this step's forward pass has received."""
        return []

    def on_detach(self) -> None:
        """Undo the driver's changes for this reducer, which is being detached."""


class StandaloneReducer:
    """Average a module's gradients over a data-parallel group while backward is still running.

    Gradients are views of contiguous buckets. Accumulated gradients are added in place; a first one (after
    ``zero_grad(set_to_none=True)``) is scaled straight into its bucket and freed. A bucket is reduced once per step, in
    an order that is the same on all ranks. After the first step the buckets are laid out anew, in the order in which
    the first rank's gradients became ready. Peak memory is the size of the gradients and at most one bucket.

    Construction is collective over the group: the ranks compare parameters and options, then receive the first rank's
    values.

    Args:
        module: its trainable parameters are served once each, tied or not. Its forward is called as usual.
        grid: the grid whose data-parallel group (all replicas of a parameter) to reduce over;
        process_group: or the group itself. The default is the whole world.
        driver: the control of steps; the default is the user's training loop.
        options: see :class:`~ds_topo.reduction.options.ReductionOptions`.

    Raises:
        TypeError, ValueError: invalid values.
        DisagreementError: parameters or options differ between ranks; names them, on every rank.
        RuntimeError: ``torch.distributed`` is not initialised, or a parameter has a reducer already.

    Sources: Li et al., PyTorch Distributed (VLDB 2020), for buckets and overlap; TorchDistPackage's NaiveDDP for
    reducing at the last micro-batch only; DeepSpeed's ``average_expert_grads`` for the divisor of experts.
    """

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
        if not isinstance(module, nn.Module):
            raise TypeError(f"module={abridged(module)} is not a module: give a torch.nn.Module")
        if isinstance(module, DistributedDataParallel):
            raise ValueError(
                "module is wrapped by torch's DistributedDataParallel, which reduces its gradients already: use one of "
                "them"
            )
        self.module = module
        self.group = data_parallel_group(grid, process_group)
        self.driver = driver or StepDriver()
        self.options, self._states = agreed_inputs(
            module, {**self.driver.options(), **options}, self.group, may_be_empty=driver is not None
        )
        self._by_parameter: dict[torch.Tensor, ParameterState] = {state.parameter: state for state in self._states}
        self._device = self._states[0].parameter.device if self._states else torch.device("cpu")
        self._wider = self.driver.wider or wider_sums(self.options.manager)
        """What continues the sums beyond the group; None if they end there."""
        self._dense = assign_routes(self._states, self.options, self.group, self._device, self._wider)
        self._members: dict[Route, list[ParameterState]] = {}
        for state in self._states:
            self._members.setdefault(state.route, []).append(state)
        if self.options.overlap_parameters and not self.options.partitions:
            raise ValueError(
                "overlap_parameters=True: parameters arrive from other ranks only at ZeRO stages 1 and 2, with an "
                "optimizer that updates each element by itself, such as AdamW; leave it out, or use one of these"
            )
        if self.options.broadcast_at_start:
            make_equal(module, self.options, self.group)
        self._layout = BucketLayout(self._states, self.options.bucket_sizes(self._dense.bucket_bytes))

        # -- the step
        self._state = IDLE
        self._step = ReductionStep(StepTiming(0, 0))
        """Valid from REDUCING to the end of FINISHING; empty otherwise."""
        self.is_unreduced = False
        """True if gradients of earlier micro-batches wait for the last one."""
        self._all_prefer_to_defer = False
        """The preference that the ranks agreed on in the last step."""
        self._unread: list[StepNotes] = []
        """The notes of the last step, if they are read in the next one, so that nothing waits for the device."""

        # -- the record
        self._timings: deque[StepTiming] = deque(maxlen=REPORTED_STEPS)
        self.step_count = 0
        """The number of steps that were finished or given up."""
        self.reduction_count = 0
        """The number of reductions of buckets that were launched."""

        # -- hooks on the autograd nodes that accumulate gradients; they run after all hooks on the parameters
        self._nodes: dict[int, Node] = {}
        """The nodes by the index of the parameter; without this reference the hooks would be gone."""
        self._handles: list[RemovableHandle] = []
        own: weakref.ref[object] = weakref.ref(self)
        for state in self._states:
            owners[state.parameter] = own
            node = self._nodes[state.index] = get_gradient_edge(state.parameter).node
            self._handles.append(node.register_hook(self._hook(state)))
        remedy = self.driver.remedy_for_unfrozen()
        self._changes = Changes(module, self._states, self._nodes, self.options, remedy)
        self._stop_watching = watch(self)
        vars(module)[KEPT] = ReducerReference(self)

    # -- calls of the training loop, or of an engine -------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients of all but the last micro-batch on this rank; no communication happens inside.

        Raises:
            RuntimeError: the last step is not finished.
        """
        if self._state not in (IDLE, ACCUMULATING):
            raise _wrong_moment("no_sync()", self._state)
        previous, self._state = self._state, ACCUMULATING
        try:
            yield
        finally:
            self._state = previous

    def finish(self) -> None:
        """Wait until every gradient is reduced. Call it once per step, after the last backward, before the optimizer.

        Raises:
            DisagreementError: a rank has skipped a step of its engine; names it.
            RuntimeError: no gradient arrived since the last call; or, on every rank of the group: a parameter without a
                gradient, one added, frozen or unfrozen since construction, or a gradient that was replaced. On a GPU,
                ranks that did not cause the error raise it at the next step.
        """
        if self._state is not REDUCING:
            if self._state is IDLE and (problem := self._changes.problem(self._states)) is not None:
                raise RuntimeError(problem)
            raise _wrong_moment("finish()", self._state)
        with self._finishing():
            try:
                self._step.absent = self._layout.absent()
                problem = self._changes.problem(self._step.absent) or self._overwritten()
                without, notes = self._launch_the_rest(failed=problem is not None)
                self._wait(notes)
                if problem is not None:
                    raise RuntimeError(problem)
                unused, late = self._read(notes)
                if late and self._wider is not None:
                    raise self._wider.refuse_late(_listed(late))
                for state in sorted(late, key=attrgetter("index")):  # the same order on all ranks
                    state.bucket.add_late(state, *self.options.scales(self._dense.size))
                for state in self._step.late.values():
                    state.expected = max(state.expected or 1, state.arrived)
                hand_out(self._states, self.options, without, unused)
                self._layout.learn(self.group, keeps_order=self._wider is not None)
            except BaseException:
                for partition in self.options.partitions:
                    partition.discard()
                raise

    def reset(self) -> None:
        """Give up the step: discard its gradients, those of earlier micro-batches too, and continue with the next one.

        Use it after an exception has ended a step. Ranks that are in ``finish()`` of the same step raise there. Every
        rank that does not reach ``finish()`` must therefore call ``reset()``, before it continues.

        Raises:
            RuntimeError: inside ``finish()``, or after ``detach()``.
        """
        if self._state in (ReducerState.FINISHING, ReducerState.DETACHED):
            raise _wrong_moment("reset()", self._state)
        if self._state is REDUCING:
            self._end_step(failed=True)
        for state in self._states:
            state.parameter.grad = None
            state.discard_sum()
        for partition in self.options.partitions:
            partition.discard()
        self.is_unreduced = False

    def complete(self) -> None:
        """Call ``finish()``, even if no gradient arrived in the last micro-batch; for engines."""
        if self._state is IDLE:
            self._begin_step()
        self.finish()

    def give_up_unfinished(self) -> None:
        """Call ``reset()`` if an exception has ended the last step before ``finish()``; for engines."""
        if self.is_in_step:
            self.reset()

    def forget_unreduced(self) -> None:
        """Discard gradients of earlier micro-batches, because an engine has cleared them."""
        if self.is_unreduced and self._state is IDLE:
            for state in self._states:
                state.discard_sum()
            self.is_unreduced = False

    @property
    def is_in_step(self) -> bool:
        """True if gradients of a step have arrived and ``finish()`` was not called yet."""
        return self._state is REDUCING

    def launch_deferred(self) -> None:
        """Launch the full buckets that waited for the end of backward, if any did."""
        if self._step.defers and self._state is REDUCING:
            self._step.defers = False
            self._launch_full_buckets()

    def wait(self) -> None:
        """Wait for all parameters that other ranks have updated; for programs that keep references to parameters."""
        self.driver.wait_for_parameters()

    def report(self) -> GradientReport:
        """Return bytes and times of the last steps on this rank."""
        steps = tuple(timing for timing in self._timings if timing.ended_ns)
        report: GradientReport = REPORT.load().GradientReport(dist.get_rank(), steps)
        return report

    def detach(self) -> None:
        """Remove the hooks; the module may get another reducer. Gradients stay as they are. Idempotent."""
        if self._state is ReducerState.DETACHED:
            return
        partitions = self.options.partitions
        if partitions and (self.is_unreduced or any(partition.holds_sums for partition in partitions)):
            warn("detach() between the micro-batches of a step: the gradients of its earlier micro-batches are lost")
        self._state = ReducerState.DETACHED
        for handle in self._handles:
            handle.remove()
        self._nodes.clear()
        self._stop_watching()
        vars(self.module).pop(KEPT, None)
        for state in self._states:
            owners.pop(state.parameter, None)
            state.discard_sum()
        for bucket in self._layout.buckets:
            bucket.release()
        self.driver.on_detach()
        if self._dense.exchange is not None:
            self._dense.exchange.rest()
        if self._wider is not None:
            self._wider.rest()

    @property
    def state(self) -> ReducerState:
        """The present state."""
        return self._state

    @property
    def buckets(self) -> list[list[str]]:
        """Names of the parameters in each bucket, in the order of reduction."""
        return [[member.name for member in bucket.members] for bucket in self._layout.buckets]

    @property
    def uses_two_levels(self) -> bool:
        """True if dense gradients are reduced inside hosts first, then across hosts."""
        return self._dense.exchange is not None and self._dense.exchange.slices > 1

    # -- gradients arrive ----------------------------------------------------------------------------------------------

    def _hook(self, state: ParameterState) -> Callable[[object, object], None]:
        """Return the hook that autograd calls for each accumulated gradient; its common path is short.

        Note [Lifetime]. The garbage collector does not see what a node's hook refers to, so that must not lead to the
        reducer or its module: this function holds the reducer weakly. The module holds the reducer (:data:`KEPT`) in a
        way that the collector sees, so both are freed together.
        """
        at_once, layout, reference = is_copied_at_once(state), self._layout, weakref.ref(self)
        parameter = state.parameter
        of_engine = sum(map(self.driver.owns_hook, (parameter._post_accumulate_grad_hooks or {}).values()))

        def on_gradient(_: object, __: object) -> None:
            reducer = reference()
            assert reducer is not None
            hooks = parameter._post_accumulate_grad_hooks
            stays = hooks and len(hooks) > of_engine and state.stays_in_grad
            if reducer._state is not REDUCING and not reducer._start():
                if not stays or state.waits_for_bucket:
                    state.bucket.accumulate(state)
                reducer.is_unreduced = True
                return
            state.arrived += 1
            if layout.arrivals is not None:
                layout.arrivals.append(state.index)
            if stays:
                return  # finish() copies it in
            if state.arrived != state.expected:
                reducer._take_further(state)
                return
            bucket = state.bucket
            if at_once:
                bucket.copy_in((state,), in_one_pass=True)
            pending = bucket.pending
            pending.discard(state)
            if not pending:
                bucket.complete()
                if bucket.index == len(reducer._step.in_flight) and not reducer._step.defers:
                    reducer._launch_full_buckets()

        return on_gradient

    def _take_further(self, state: ParameterState) -> None:
        """Handle a gradient that is not the last one: more are expected, or may follow, or it is one too many."""
        if state.expected is None or state.arrived < state.expected:
            state.bucket.accumulate(state)
        elif not state.repeats:
            if state.expected > 1:
                raise RuntimeError(
                    f"parameter {state.name!r} got more than the {state.expected} gradients of the first step: build "
                    "the reducer with static_graph=False, and let every micro-batch reach a parameter once"
                )
            raise RuntimeError(
                f"parameter {state.name!r} got a second gradient before finish(): call finish() after the last "
                "backward of a step. Run the backward of earlier micro-batches inside no_sync(), and also that of a "
                "loss which only passes through this module. Call reset() to give up a step that an exception ended. "
                "If reentrant checkpointing or several backward calls reach the parameter more often in every step, "
                "pass static_graph=True"
            )
        elif state.contribution is COPIED:
            self._step.late[state.index] = state

    def _start(self) -> bool:
        """Handle a gradient outside REDUCING. Begin a step and return True if this is the step's last backward."""
        self._layout.renew()
        if self._state is IDLE and self.driver.is_last_backward():
            self._begin_step()
        return self._state is REDUCING

    def _begin_step(self) -> None:
        overlap = self.options.overlap
        defers = self._all_prefer_to_defer if overlap is None else not overlap
        self._step = ReductionStep(StepTiming(self.step_count, time.perf_counter_ns()), defers)
        self._timings.append(self._step.timing)
        self._state = REDUCING

    def _launch_full_buckets(self) -> None:
        """Launch full buckets in the layout's order, the same on all ranks, whichever became full first."""
        in_flight = self._step.in_flight
        for bucket in self._layout.buckets[len(in_flight) :]:
            if bucket.pending:
                return
            in_flight.append(Reduction(bucket))
            self.reduction_count += 1

    # -- optimizers and zero_grad() ------------------------------------------------------------------------------------

    def before_zero_grad(self, parameters: Iterable[torch.Tensor]) -> None:
        """Discard gradients beside ``parameter.grad``; give up a step whose gradients are all cleared.

        A loss that only passes through this module (a generator's, through the discriminator) starts a step here. Its
        gradients are then cleared, on all ranks alike.
        """
        options = self.options
        leaves_sums = options.accumulation_dtype is not None or options.partitions
        if self._state is not REDUCING and not self.is_unreduced and not leaves_sums:
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
            self.is_unreduced = False

    def before_optimizer_step(self, parameters: Iterable[torch.Tensor]) -> None:
        """Refuse an optimizer step on gradients that are not reduced, except inside ``no_sync()``."""
        if self._state is not ACCUMULATING:
            self.require_reduced(parameters, "optimizer.step()")

    def require_reduced(self, parameters: Iterable[torch.Tensor], call: str) -> None:
        """Raise ``RuntimeError`` for a call that would use gradients which are not reduced."""
        if self._state is REDUCING or (self.is_unreduced and self._state in (IDLE, ACCUMULATING)):
            for parameter in parameters:
                if parameter in self._by_parameter:
                    raise RuntimeError(
                        f"{call} on parameter {self._by_parameter[parameter].name!r} and others, whose gradients are "
                        "not reduced: it would use this rank's own gradients before finish(); call finish() first, "
                        "reset() to give the step up, or step inside no_sync() if local steps are intended"
                    )

    # -- the end of a step ---------------------------------------------------------------------------------------------

    @contextmanager
    def _finishing(self) -> Iterator[None]:
        """Enter FINISHING; at the end, record the time and return to IDLE."""
        self._state = ReducerState.FINISHING
        timing = self._step.timing
        timing.finish_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            timing.ended_ns = time.perf_counter_ns()
            self.step_count += 1
            for bucket in self._layout.buckets:
                bucket.reset()
            self._step = ReductionStep(timing)
            self.is_unreduced = False
            self._state = IDLE

    def _overwritten(self) -> str | None:
        """Return a description of gradients that the program has changed while they were being reduced, if any."""
        if type(self.driver) is not StepDriver or self._step.discarded:
            return None
        buckets = [reduction.bucket for reduction in self._step.in_flight if reduction.was_overwritten]
        if not buckets:
            return None
        changed = _listed(state for bucket in buckets for state in bucket.members)
        return (
            f"gradients such as {changed} were changed between backward and finish(), while they were being reduced: "
            "call clip_grad_norm_(), GradScaler.unscale_() and the like after finish()"
        )

    def _end_step(self, failed: bool) -> None:
        """Take part in the collectives that other ranks wait for, and discard the step."""
        with self._finishing():
            _, notes = self._launch_the_rest(failed)
            self._wait(notes)
            for partition in self.options.partitions:
                if not partition.reduces_always:  # it also has the sums of earlier micro-batches
                    partition.discard()

    def _launch_the_rest(self, failed: bool) -> tuple[list[ParameterState], list[StepNotes]]:
        """Launch the remaining buckets, with zeros for unused parameters, so that no rank waits forever.

        Return the parameters without a gradient, and the notes for the other ranks, in flight.
        """
        step, options = self._step, self.options
        unused = [] if options.zero_unused_parameters else step.absent
        if options.find_unused_parameters:  # parameters of earlier micro-batches are used, too
            unused = [each for each in unused if each.parameter.grad is None and each.contribution is not SUMMED]
        without: list[ParameterState] = []
        for bucket in self._layout.buckets:
            if bucket.pending:
                without += bucket.complete()
                bucket.pending.clear()
        self._launch_full_buckets()
        late, defers, steps = set(step.late), self.driver.prefers_to_defer(self._timings), self.driver.steps_taken()
        indices = {state.index for state in unused}
        notes = [
            StepNotes(members, route, indices, late, failed=failed, prefers_to_defer=defers, step=steps)
            for route, members in self._members.items()
        ]
        return without, notes

    def _wait(self, notes: list[StepNotes]) -> None:
        for reduction in self._step.in_flight:
            reduction.wait()
        for note in notes:
            note.settle()
        self._step.timing.buckets = [reduction.timing for reduction in self._step.in_flight]
        self._step.timing.gathers = self.driver.gathers()

    def _read(self, notes: list[StepNotes]) -> tuple[list[ParameterState], list[ParameterState]]:
        """Read the notes of all ranks; raise if they are an error.

        On a GPU, read those of the step before, so that nothing waits for the device. Exceptions are the first step,
        the search for unused parameters, and unusual notes of this rank.

        Return the parameters that no rank used, if those are searched for, and those that got late gradients.
        """
        is_first_step, reads_later = self._layout.arrivals is not None, self._dense.traits.ordered_by_stream
        all_read = not reads_later or self.options.find_unused_parameters or is_first_step
        due, self._unread = self._unread, notes
        if all_read or any(note.are_unusual for note in notes):
            due, self._unread = due + notes, []
        # All notes are read before any is refused: reading unusual ones is collective.
        for note in due:
            note.read(all_read=all_read and note in notes)
        if self._step.absent and not self.options.may_miss:
            raise _missing_gradients(self._step.absent, "this rank")
        unused: list[ParameterState] = []
        late: list[ParameterState] = []
        for note in due:
            self._raise_for(note)
            unused += note.unused_everywhere if self.options.find_unused_parameters else []
            late += note.late
        return unused, late

    def _raise_for(self, note: StepNotes) -> None:
        size = note.route.size
        if note.route is self._dense:
            self._all_prefer_to_defer = note.prefer_to_defer == size
        if note.failed:
            raise RuntimeError(f"{note.failed} of {size} ranks failed in finish(); their own errors say why")
        if not note.are_named:
            late = self._step.late.values()
            which = f"such as {_listed(late)} on this rank" if late else "which the errors of those ranks name"
            raise RuntimeError(
                f"on {note.unusual} of {size} ranks parameters, {which}, got no gradient, or more gradients than in "
                "the first step: let every rank reach the same parameters equally often in a step"
            )
        if note.unused_anywhere and not self.options.may_miss:
            raise _missing_gradients(note.unused_anywhere, "some other ranks")
        if note.steps_differ:  # this comes last, because the error needs a collective that all ranks reach
            raise different_steps(self.driver.steps_taken(), note.route.group)
