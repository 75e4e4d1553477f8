"""Find the parameters that a reducer serves, define their routes, and notice what the program does to them.

A route is the group and method by which gradients are reduced. A reducer learns by patches that an optimizer is about
to step and that gradients are discarded. It also compares the module with its state at construction, and refuses
changes that it cannot reduce.
"""

from __future__ import annotations

import enum
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.optim.optimizer import register_optimizer_step_pre_hook
from typing_extensions import Self

from ds_topo.base.backends import BackendTraits
from ds_topo.base.ledger import Make, Patch, around, ledger
from ds_topo.base.marks import expert_group_name, owners
from ds_topo.base.torch_names import (
    ZERO_GRAD_OF_MODULES,
    ZERO_GRAD_OF_OPTIMIZERS,
    ReduceOp,
    job_timeout,
)
from ds_topo.errors import abridged, listed
from ds_topo.launch.council import agree
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.reduction.options import ReductionArguments, ReductionOptions, unknown_option

if TYPE_CHECKING:
    from ds_topo.reduction.exchange import Exchange

# -- routes ------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Route:
    """The process group that reduces some parameters, and the scaling around the sum over it."""

    label: str
    group: ProcessGroup
    traits: BackendTraits
    """The traits of the group's backend for gradients."""
    before: float
    """The factor for gradients before the sum, on their way into the bucket."""
    after: float
    """The factor after the sum."""
    op: ReduceOp
    """The operation of the sum; NCCL's may divide by itself."""
    communication_dtype: torch.dtype | None
    bucket_bytes: int
    """The capacity of its buckets; equal on all ranks of the group."""
    exchange: Exchange | None = None
    """The exchange that sums inside hosts first, then across hosts, or also beyond the group."""

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return dist.get_world_size(self.group)


# -- parameters --------------------------------------------------------------------------------------------------------


class GradientHome(enum.Enum):
    """Name the place where a parameter's gradient accumulates, and where its sum is left."""

    GRAD = enum.auto()
    """In ``parameter.grad``, which is a view of the bucket."""
    WIDER = enum.auto()
    """In the bucket, in another data type; ``main_grad`` is the view of it, and ``parameter.grad`` gets a copy."""
    PARTITION = enum.auto()
    """In partitioned gradients alone."""


GRAD, WIDER, PARTITION = GradientHome


class Contribution(enum.Enum):
    """Tell what a bucket has of this rank's contribution to the gradient of one parameter, in a step.

    ::

                  accumulate_gradient()            copy_in()             GradientBucket.reset()
        NOT_YET ------------------------> SUMMED ------------> COPIED -------------------------> NOT_YET
           |  ^      (apart from grad)      |                    ^
           |  +------- discard_sum() -------+                    |
           +------------------- copy_in() -----------------------+
    """

    NOT_YET = enum.auto()
    """The bucket has none of it, or ``parameter.grad`` is the view that has the sum of earlier gradients."""
    SUMMED = enum.auto()
    """The view, apart from ``parameter.grad``, has the sum of earlier gradients, not scaled yet."""
    COPIED = enum.auto()
    """It is in the bucket, scaled. Further gradients are late, and must not be added to it."""


NOT_YET, SUMMED, COPIED = Contribution


@dataclass(eq=False, slots=True)
class ParameterState:
    """The state of one parameter (compare FSDP2's ``FSDPParam``)."""

    # -- fixed at construction
    index: int
    """Its position in the module's list of parameters."""
    name: str
    parameter: nn.Parameter
    dtype: torch.dtype
    """The type in which its gradient accumulates."""
    repeats: bool = False
    """True if it may get further gradients after it is copied in (``allow_late_gradients``)."""
    partition: Any = None
    """The :class:`~ds_topo.reduction.partitions.PartitionedGradients` that have its gradient, or None."""
    home: GradientHome = field(init=False)
    """Where its gradient accumulates; only a cast of the parameter changes it, from GRAD to WIDER or back."""

    # -- set when routes are assigned, and by the first step
    route: Route = field(init=False)
    expected: int | None = 1
    """The number of gradients that it gets in the last micro-batch; None while that is unknown."""

    # -- set by each layout of buckets
    view: torch.Tensor = field(init=False)
    """Its part of the bucket, in the parameter's shape and strides."""
    bucket: Any = field(init=False)
    """Its :class:`~ds_topo.reduction.buckets.GradientBucket`."""

    # -- the step: reset by the bucket at the end
    arrived: int = 0
    """The number of gradients that arrived in the last micro-batch; counted by the hook."""
    contribution: Contribution = NOT_YET
    """What the bucket has of its gradient; written by the copies, and by :meth:`discard_sum`."""

    def __post_init__(self) -> None:
        self.home = GRAD if self.partition is None else PARTITION
        self.note_type()

    def note_type(self) -> None:
        """Update ``home`` after a cast of the parameter."""
        if self.home in (GRAD, WIDER):
            self.home = GRAD if self.dtype == self.parameter.dtype else WIDER

    @property
    def stays_in_grad(self) -> bool:
        """True if a hook of the program must find the sum of all gradients in ``parameter.grad``.

        The gradient then stays there until ``finish()``. If it were moved to the partition earlier, changes by the hook
        would be lost. Where gradients have lasting memory, as in ``BF16_Optimizer``, the gradient of every micro-batch
        leaves ``parameter.grad``, with or without a reducer.
        """
        is_lent = self.partition is not None and self.partition.is_lent
        return is_lent and self.repeats and self.dtype == self.parameter.dtype

    @property
    def waits_for_bucket(self) -> bool:
        """True if its gradient stays in ``parameter.grad`` until its bucket is full."""
        return self.partition is not None and self.partition.reduces_always

    @property
    def holds_live_view(self) -> bool:
        """True if the view holds gradients that are still needed."""
        gradient = self.parameter.grad
        return self.contribution is SUMMED or (gradient is not None and gradient is getattr(self, "view", None))

    @property
    def nbytes(self) -> int:
        """The size of the gradient as it accumulates."""
        return self.parameter.numel() * self.dtype.itemsize

    @property
    def is_replaced(self) -> bool:
        """True if the user has replaced or removed the gradient since it was copied in."""
        gradient = self.parameter.grad
        if self.repeats:
            return gradient is not None and self.expected is not None and self.arrived <= self.expected
        if gradient is self.view:
            return False
        return gradient is not None or self.home is GRAD

    def discard_sum(self) -> None:
        """Discard gradients that are not in ``parameter.grad``."""
        self.contribution = NOT_YET
        if self.home is not GRAD and hasattr(self.parameter, "main_grad"):
            del self.parameter.main_grad


def find_parameters(
    module: nn.Module,
    options: ReductionOptions,
    may_be_empty: bool = False,
) -> list[ParameterState]:
    """Return the state of each trainable parameter of a module, once each, without the ignored ones.

    Raise ``ValueError`` for parameters that no reducer can serve, and ``RuntimeError`` for those that have one already.
    """
    ignored = ignored_identities(module, options)
    embeddings = (part for part in module.modules() if isinstance(part, (nn.Embedding, nn.EmbeddingBag)))
    sparse = {part.weight for part in embeddings if part.sparse}
    states: list[ParameterState] = []
    for name, parameter in module.named_parameters():
        if id(parameter) in ignored:
            continue
        if hasattr(parameter, "placements") and (parameter.requires_grad or options.broadcast_at_start):
            raise ValueError(
                f"module: parameter {name!r} is a DTensor, as parallelize_module, distribute_tensor and fully_shard "
                'make them, which a GradientReducer cannot sum: call fully_shard(model, mesh=grid["data"]) instead, '
                "which reduces gradients itself, or split the model by ds_topo.layers"
            )
        if not parameter.requires_grad:
            continue
        if parameter in sparse:
            raise sparse_gradient(name)
        state = ParameterState(
            index=len(states),
            name=name,
            parameter=parameter,
            dtype=options.accumulation_dtype_of(parameter),
            repeats=options.allow_late_gradients,
            partition=options.partition_of(parameter),
        )
        # Counting the gradients of others first would need memory for all of them.
        if options.static_graph and not state.waits_for_bucket:
            state.expected = None
        group = expert_group_name(parameter)
        if group is not None and group not in options.expert_groups:
            raise ValueError(
                f"expert_groups: parameter {name!r} is an expert of group {group!r}, which is not among "
                f"{sorted(options.expert_groups)}; pass its expert-data group, expert_groups={{{group!r}: group}}"
            )
        states.append(state)
    if not states and not may_be_empty:
        raise ValueError(
            "module: no parameter requires a gradient, so there is nothing to reduce: unfreeze one, or build no reducer"
        )
    without_values = [state.name for state in states if state.parameter.is_meta]
    if without_values:
        raise ValueError(
            f"module: parameters {listed(without_values)} are on the meta device, without values: give them memory "
            "and values first, such as by module.to_empty(device=...) and load_state_dict()"
        )
    taken = [state.name for state in states if state.parameter in owners and owners[state.parameter]() is not None]
    if taken:
        raise RuntimeError(
            f"parameters {listed(taken)} already have a GradientReducer: detach() that one first, or use it for both"
        )
    return states


def sparse_gradient(name: str) -> ValueError:
    """Return the error for a parameter whose gradient is sparse."""
    return ValueError(
        f"parameter {name!r} has a sparse gradient, which buckets cannot hold: give its nn.Embedding or "
        "nn.EmbeddingBag sparse=False, or return a dense gradient"
    )


def ignored_identities(module: nn.Module, options: ReductionOptions) -> set[int]:
    """Return the identities of the ignored parameters; raise ``ValueError`` for a name that none has."""
    if not options.ignored_parameters:
        return set()
    named = dict(module.named_parameters(remove_duplicate=False))
    ignored = set()
    for entry in options.ignored_parameters:
        if isinstance(entry, str) and entry not in named:
            raise ValueError(
                f"ignored_parameters: no parameter is named {entry!r}; names look like {next(iter(named), '')!r}"
            )
        ignored.add(id(named[entry] if isinstance(entry, str) else entry))
    return ignored


class HasDataParallelGroup(Protocol):
    """A grid, or any mpu."""

    def get_data_parallel_group(self) -> ProcessGroup:
        """Return the group of all replicas of a parameter."""
        ...


def data_parallel_group(grid: HasDataParallelGroup | None, process_group: ProcessGroup | None) -> ProcessGroup:
    """Return a grid's data-parallel group, the given group, or by default the group of all ranks."""
    if grid is not None and process_group is not None:
        raise ValueError("grid and process_group are both given, and each names a group: give one of them")
    if grid is not None and not hasattr(grid, "get_data_parallel_group"):
        raise TypeError(
            f"grid={abridged(grid)}: give a grid or another mpu, which has get_data_parallel_group(), such as "
            "PipelineParallelGrid('data=2,model=2')"
        )
    if process_group is not None and not isinstance(process_group, ProcessGroup):
        raise TypeError(f"process_group={abridged(process_group)}: give a torch.distributed process group, or a grid")
    group = grid.get_data_parallel_group() if grid is not None else process_group or dist.group.WORLD
    assert group is not None
    return group


def agreed_inputs(
    module: nn.Module,
    arguments: ReductionArguments,
    group: ProcessGroup,
    may_be_empty: bool,
) -> tuple[ReductionOptions, list[ParameterState]]:
    """Return options and parameters, after all ranks have compared them; collective over the group.

    A rank on which this fails tells the others, so that no rank waits. Errors are those of the options and of
    :func:`find_parameters`, and ``DisagreementError`` on every rank if ranks differ or another one has failed.
    """
    failure: Exception | None = None
    options, states = ReductionOptions(), []
    try:
        problems = [unknown_option(name, ("grid", "process_group")) for name in arguments]
        if any(problems):
            raise TypeError("".join(problems))
        options = ReductionOptions(**arguments)
        states = find_parameters(module, options, may_be_empty)
    except (TypeError, ValueError, RuntimeError) as error:
        failure = error
    lines = options.summary() + [_description(state) for state in states]
    members = sorted(dist.get_process_group_ranks(group))
    parameters = f"{len(states)} parameters, with options "
    agree(parameters, members, job_timeout(), failure=failure, subject="what to reduce", lines=lines)
    return options, states


def _description(state: ParameterState) -> str:
    text = f"{state.name} {list(state.parameter.shape)} {state.parameter.dtype}"
    expert = expert_group_name(state.parameter)
    return text + (f" expert of {expert}" if expert is not None else "")


def make_equal(module: nn.Module, options: ReductionOptions, group: ProcessGroup) -> None:
    """Give every rank the parameters and buffers of the group's first rank, frozen ones too; collective.

    Ignored parameters stay as they are. Experts get the values of the first rank of their own group.
    """
    ignored = ignored_identities(module, options)
    by_name: dict[str | None, list[torch.Tensor]] = {None: [buffer.detach() for buffer in module.buffers()]}
    for parameter in module.parameters():
        if id(parameter) not in ignored:
            by_name.setdefault(expert_group_name(parameter), []).append(parameter.detach())
    for name, tensors in by_name.items():
        replicas = group if name is None else options.expert_groups.get(name)
        if replicas is not None:
            _broadcast(tensors, replicas)


def _broadcast(tensors: Iterable[torch.Tensor], group: ProcessGroup) -> None:
    """Broadcast the values of the group's first rank, in place; collective."""
    targets = [torch.view_as_real(each) if each.is_complex() else each for each in tensors]  # gloo's types
    values = [each.contiguous() for each in targets]
    works = [dist.broadcast(each, group_src=0, group=group, async_op=True) for each in values]
    for target, value, work in zip(targets, values, works, strict=True):
        work.wait()
        if value is not target:
            target.copy_(value)


# -- the reducers of parameters ----------------------------------------------------------------------------------------


KEPT = "_ds_topo_reducer"
"""The attribute of a module that keeps its reducer alive; see Note [Lifetime] in ``reducer.py``."""


class ReducerReference:
    """A module's reference to its reducer, which is neither copied nor pickled."""

    def __init__(self, reducer: object = None) -> None:
        self.reducer = reducer

    def __deepcopy__(self, memo: object) -> Self:
        return type(self)()

    def __reduce__(self) -> tuple[type[ReducerReference], tuple[()]]:
        return type(self), ()


_watched: list[weakref.ref[Any]] = []
"""The reducers to call before optimizer steps and ``zero_grad()``."""
_step_hook = ExitStack()
"""The one hook of all reducers. torch iterates over its hooks in a step, in which reducers may be freed."""


def watch(reducer: Any) -> Callable[[], None]:
    """Call a reducer before optimizer steps and ``zero_grad()``, until the returned function is called or it is freed.

    Reducers define ``before_optimizer_step(parameters)`` and ``before_zero_grad(parameters)``.
    """
    own = weakref.ref(reducer)
    with ExitStack() as bound:  # restores the names if an error occurs
        for change, make in _CHANGES:
            bound.callback(ledger.bind(change, make))
        undo = bound.pop_all()
    if not _watched:
        _step_hook.callback(register_optimizer_step_pre_hook(_before_step).remove)
    _watched.append(own)
    undo.callback(_forget, own)
    leave = weakref.finalize(reducer, undo.close)
    leave.atexit = False
    return leave


def _forget(own: weakref.ref[Any]) -> None:
    _watched.remove(own)
    if not _watched:
        _step_hook.close()


def _reducers() -> list[Any]:
    return [reducer for own in tuple(_watched) if (reducer := own()) is not None]


def _before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for reducer in _reducers():
        reducer.before_optimizer_step(_parameters_of(optimizer))


def _telling_reducers(parameters_of: Callable[[Any], Iterable[torch.Tensor]]) -> Make:
    @around
    def zero(zero_grad: Any, owner: Any, *args: Any, **options: Any) -> None:
        for reducer in _reducers():
            reducer.before_zero_grad(parameters_of(owner))
        zero_grad(owner, *args, **options)

    return zero


def _parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


_CHANGES: tuple[tuple[Patch, Make], ...] = (
    (ZERO_GRAD_OF_MODULES, _telling_reducers(nn.Module.parameters)),
    (ZERO_GRAD_OF_OPTIMIZERS, _telling_reducers(_parameters_of)),
)


# -- changes of a module -----------------------------------------------------------------------------------------------


_GRADIENT, _VIEW = operator.attrgetter("grad"), operator.attrgetter("view")


class Changes:
    """Detects changes of a module since construction that cannot be reduced.

    ``nodes`` are the autograd nodes that have the hooks of ``states``, by index. ``remedy`` says what to do about
    parameters that were unfrozen.
    """

    def __init__(
        self,
        module: nn.Module,
        states: Sequence[ParameterState],
        nodes: Mapping[int, Node],
        options: ReductionOptions,
        remedy: str,
    ) -> None:
        self._module, self._states, self._nodes, self._remedy = module, states, nodes, remedy
        self._may_be_frozen = options.may_miss
        self._ignored = ignored_identities(module, options)
        self._parameters = [state.parameter for state in states]
        self._are_plain = all(state.home is GRAD for state in states)
        named = list(self._named())
        self._known = {name: id(parameter) for name, parameter in named}
        self._frozen = [(name, parameter) for name, parameter in named if not parameter.requires_grad]
        self._note_parts()

    def _note_parts(self) -> None:
        """Record the parameters and submodules of every part of the module."""
        self._holders: list[dict[str, Any]] = []
        for part in self._module.modules():
            self._holders += part._parameters, part._modules
        self._held = [dict(holder) for holder in self._holders]
        self._single = [
            (holder, name, held)
            for holder in self._holders
            for name, held in holder.items()
            if isinstance(held, torch.Tensor) and held.numel() == 1
        ]
        """Parameters of one element, which ``==`` compares by value."""

    def _holds_the_same(self) -> bool:
        """Return True if every part holds the objects that were recorded.

        The first comparison is one call in C, and compares equal objects by identity alone. Torch raises if it
        compares two tensors of several elements.
        """
        try:
            same = self._holders == self._held
        except RuntimeError:
            return False
        return same and all(holder[name] is held for holder, name, held in self._single)

    def problem(self, absent: Sequence[ParameterState]) -> str | None:
        """Return a description of changed parameters, or of replaced gradients; None if there are none.

        ``absent`` are the parameters without a gradient in the last micro-batch.
        """
        if (changed := self._changed_parameters(absent)) is not None:
            return changed
        gradients, views = map(_GRADIENT, self._parameters), map(_VIEW, self._states)
        if self._are_plain and all(map(operator.is_, gradients, views)):  # one pass in C, for the usual case
            return None
        replaced = [state.name for state in self._states if state.contribution is COPIED and state.is_replaced]
        if not replaced:
            return None
        return (
            f"gradients of {listed(replaced)} were replaced between backward and finish(): change them in place, or "
            "after finish()"
        )

    def _changed_parameters(self, absent: Sequence[ParameterState]) -> str | None:
        if not self._holds_the_same():
            # Listing parameters by name takes longer than this comparison.
            named = dict(self._named())
            new = [name for name, parameter in named.items() if self._known.get(name) != id(parameter)]
            new = [name for name in new if id(named[name]) not in self._known.values()]
            for names, how in (
                ([name for name in new if name in self._known], "replaced"),
                (new, "added"),
                ([name for name in self._known if name not in named], "removed"),
            ):
                if names:
                    return _changed(names, how)
            self._note_parts()
        lost = [
            state
            for state in absent
            if state.parameter.requires_grad and get_gradient_edge(state.parameter).node is not self._nodes[state.index]
        ]
        if lost:
            for state in lost:
                state.note_type()  # so that the step can still be ended
            return _changed([state.name for state in lost], "moved or cast")
        frozen = [state.name for state in absent if not state.parameter.requires_grad]
        if frozen and not self._may_be_frozen:
            return _changed(frozen, "frozen")
        unfrozen = [name for name, parameter in self._frozen if parameter.requires_grad]
        return _changed(unfrozen, "unfrozen", self._remedy) if unfrozen else None

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        return (
            (name, parameter)
            for name, parameter in self._module.named_parameters()
            if id(parameter) not in self._ignored
        )


REBUILD = "detach() and build a new GradientReducer"


def _changed(names: Sequence[str], how: str, remedy: str = REBUILD) -> str:
    return f"parameters {listed(names)} were {how} after construction: {remedy}"
