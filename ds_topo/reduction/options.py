"""Define the options of a reducer: a frozen value, validated once."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypedDict, cast

import torch
from torch import nn

from ds_topo.errors import abridged
from ds_topo.process_groups.creation import ProcessGroup

MIB = 1 << 20


@dataclass(frozen=True)
class BucketSizes:
    """The capacities of buckets in bytes; a bucket is closed by the parameter that reaches its capacity.

    The first bucket is small so that communication starts early; the last one because nothing remains to hide it.

    Raises:
        ValueError: a capacity is below 1.
    """

    bucket_bytes: int
    first_bytes: int
    last_bytes: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name}={value}: a capacity is in bytes and at least 1; leave it out for the default")


class ReductionArguments(TypedDict, total=False):
    """The fields of :class:`ReductionOptions` as keyword arguments, for type checkers and editors."""

    bucket_bytes: int | None
    first_bucket_bytes: int
    last_bucket_bytes: int
    op: Literal["average", "sum"]
    divisor: float | None
    predivide_factor: float | None
    communication_dtype: torch.dtype | None
    accumulation_dtype: torch.dtype | None
    find_unused_parameters: bool
    zero_unused_parameters: bool
    overlap: bool | None
    static_graph: bool
    allow_late_gradients: bool
    partitions: Sequence[Any]
    expert_groups: Mapping[str, ProcessGroup]
    ignored_parameters: Collection[str | nn.Parameter]
    broadcast_at_start: bool
    two_level: bool | None
    overlap_parameters: bool
    manager: Any


_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "bool": ((bool,), "True or False"),
    "bool | None": ((bool, type(None)), "True, False or None"),
    "int": ((int,), "a whole number of bytes"),
    "int | None": ((int, type(None)), "a whole number of bytes, or None"),
    "float | None": ((int, float, type(None)), "a number, or None"),
    "Mapping": ((Mapping,), "a mapping"),
}
"""Accepted types and their description, by the annotation of an option, without type arguments."""
_DTYPES = {
    name: getattr(torch, dtype)
    for short, dtype in (("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16"), ("fp64", "float64"))
    for name in (short, dtype, f"torch.{dtype}")
}
_NOT_IN_JSON = ("partitions", "expert_groups", "manager")


def unknown_option(name: object, besides: Sequence[str] = (), without: Sequence[str] = ()) -> str:
    """Return a message about a name that is no option of a reducer; "" if it is one."""
    names = [one for one in ReductionArguments.__annotations__ if one not in without]
    if name in names:
        return ""
    near = difflib.get_close_matches(str(name), [*names, *besides], n=1)
    question = f": did you mean {near[0]!r}?" if near else "."
    return f"{abridged(name)} is not an option{question} Options are {', '.join(names)}"


def arguments_from_config(section: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a config section to keyword arguments, with data types by name, and validate them.

    >>> arguments_from_config({"bucket_bytes": 1000, "communication_dtype": "bf16"})
    {'bucket_bytes': 1000, 'communication_dtype': torch.bfloat16}
    >>> arguments_from_config({"bucket_byte": 1000})
    Traceback (most recent call last):
    ValueError: 'bucket_byte' is not an option: did you mean 'bucket_bytes'? Options are bucket_bytes, ...

    Raises:
        ValueError, TypeError: an option does not exist, or a value is invalid.
    """
    arguments = dict(section)
    for name, value in section.items():
        if problem := unknown_option(name, ("enabled",), _NOT_IN_JSON):
            raise ValueError(problem)
        if name.endswith("_dtype") and value is not None:
            if not isinstance(value, str) or value not in _DTYPES:
                raise ValueError(f"{name}={abridged(value)}: choose one of {', '.join(_DTYPES)}")
            arguments[name] = _DTYPES[value]
    ReductionOptions(**arguments)
    return arguments


@dataclass(frozen=True)
class ReductionOptions:
    """The keyword arguments of a ``GradientReducer``, all optional.

    Attributes:
        bucket_bytes: capacity of a bucket. The default is 4 MiB on a link that measures slow at the start, where
            communication must start early, and 25 MiB (as DDP) on any other. Sums over more than two ranks depend on
            the layout of buckets in the last bit: set it if restarts must be bit-equal.
        first_bucket_bytes, last_bucket_bytes: capacities of the first bucket, and of the last, which nothing hides.
        op: ``"average"`` divides the sum by ``divisor``; ``"sum"`` does not divide.
        divisor: divisor of the average, experts included; the default is the size of the data-parallel group.
        predivide_factor: divide by this factor before the sum and by the rest of the divisor after it (DeepSpeed's
            ``gradient_predivide_factor``), for gradients of narrow types on many ranks. By default the whole division
            comes before the sum.
        communication_dtype: reduce in this type; the default is the type in which gradients accumulate.
        accumulation_dtype: accumulate and reduce gradients of narrower floating-point types in this type. They are left
            in ``parameter.main_grad``, and rounded once to the parameter's type in ``parameter.grad``.
        find_unused_parameters: let parameters be unused in a step; ``finish()`` must then come before any other
            collective of the group. A parameter used on some ranks only gets the same gradient on all ranks; one that
            no rank used keeps its ``grad``. Without this option, ``finish()`` raises on every rank and names them.
        zero_unused_parameters: let parameters be unused in a step and give them zeros, as DeepSpeed does. Unlike
            ``find_unused_parameters``, it needs no synchronization of a GPU.
        overlap: launch full buckets during backward. This is the default, unless an engine knows that it gains nothing.
        static_graph: promise that every step reaches the same parameters equally often, as DDP's option of this name.
            A parameter may then get several gradients in one micro-batch (reentrant checkpointing, several backward
            calls). They are counted in the first step, which is reduced without overlap.
        allow_late_gradients: let later steps of a static graph reach a parameter more often than the first one did.
            Gradients that arrive after their bucket was launched are reduced in ``finish()``. Gradients become views
            of their buckets only there.
        partitions: gradients of which every rank needs only its own partition, as
            :class:`~ds_topo.reduction.partitions.PartitionedGradients`. They are reduced to it, in half the time of a
            sum for all ranks. ``parameter.grad`` is None after ``finish()``.
        expert_groups: the expert-data group of every ``group_name`` of parameters with ``allreduce = False``,
            DeepSpeed's marks of experts.
        ignored_parameters: names or parameters to leave alone.
        broadcast_at_start: give every rank the parameters and buffers of the group's first rank.
        two_level: reduce inside hosts first, then across hosts. By default this is used if the group spans hosts with
            equally many ranks, several each, and it measures faster than a flat reduction at the start. (At ZeRO stages
            1 and 2 on gloo, gradients always travel this way to their owners; it is never slower there.)
        overlap_parameters: at ZeRO stages 1 and 2, receive updated parameters while the program goes on. Whatever reads
            a parameter waits for it. Where that is impossible (scripted or compiled modules, tensors that share the
            memory of parameters), they arrive within the optimizer's step, with a warning.
        manager: the ``torchft.Manager`` of this rank. Every bucket is then also averaged over the replicas that it
            manages, each of which is a job of its own. A bucket has 25 MiB by default, and buckets keep the order of
            the parameters, because replicas must not differ in them.

    Raises:
        TypeError, ValueError: a value is invalid; the message names it, the rule and the choices.
    """

    bucket_bytes: int | None = None
    first_bucket_bytes: int = MIB
    last_bucket_bytes: int = MIB
    op: Literal["average", "sum"] = "average"
    divisor: float | None = None
    predivide_factor: float | None = None
    communication_dtype: torch.dtype | None = None
    accumulation_dtype: torch.dtype | None = None
    find_unused_parameters: bool = False
    zero_unused_parameters: bool = False
    overlap: bool | None = None
    static_graph: bool = False
    allow_late_gradients: bool = False
    partitions: Sequence[Any] = ()
    expert_groups: Mapping[str, ProcessGroup] = field(default_factory=dict)
    ignored_parameters: Collection[str | nn.Parameter] = ()
    broadcast_at_start: bool = True
    two_level: bool | None = None
    overlap_parameters: bool = False
    manager: Any = None

    def __post_init__(self) -> None:
        for option in fields(self):  # such as the string "false", which Python takes for true
            kinds, choices = _KINDS.get(str(option.type).partition("[")[0], ((object, bool), ""))
            value = getattr(self, option.name)
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                raise TypeError(f"{option.name}={abridged(value)}: give {choices}")
        if isinstance(self.ignored_parameters, (str, nn.Parameter)):
            raise TypeError(
                f"ignored_parameters={abridged(self.ignored_parameters)}: give a collection of names or parameters"
            )
        if self.op not in ("average", "sum"):
            raise ValueError(f"op={self.op!r} is not a reduction: choose 'average' or 'sum'")
        for name in ("divisor", "predivide_factor"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value}: must be positive; leave it out for the default")
        if self.op == "sum" and self.divisor is not None:
            raise ValueError(f"divisor={self.divisor} with op='sum': a sum is not divided; use op='average'")
        for name in ("communication_dtype", "accumulation_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(
                    f"{name}={dtype} is not a floating-point type: choose a floating-point type such as torch.float32 "
                    "or torch.bfloat16"
                )
        if self.find_unused_parameters and self.zero_unused_parameters:
            raise ValueError(
                "find_unused_parameters=True and zero_unused_parameters=True treat unused parameters differently: "
                "choose one of them"
            )
        if self.manager is not None and self.find_unused_parameters:
            raise ValueError(
                "find_unused_parameters=True with a manager: replicas would not agree which parameters are unused; use "
                "zero_unused_parameters=True"
            )
        if self.allow_late_gradients and not self.static_graph:
            raise ValueError(
                "allow_late_gradients=True without static_graph: only gradients of a static graph are counted; set "
                "static_graph=True"
            )
        self.bucket_sizes(MIB)  # validates the capacities

    def bucket_sizes(self, suitable_bytes: int) -> BucketSizes:
        """Return the capacities of the buckets; ``suitable_bytes`` is the default of ``bucket_bytes``."""
        bucket_bytes = suitable_bytes if self.bucket_bytes is None else self.bucket_bytes
        return BucketSizes(bucket_bytes, self.first_bucket_bytes, self.last_bucket_bytes)

    @property
    def may_miss(self) -> bool:
        """True if parameters may have no gradient."""
        return self.find_unused_parameters or self.zero_unused_parameters

    def accumulation_dtype_of(self, parameter: nn.Parameter) -> torch.dtype:
        """Return the type in which gradients of this parameter accumulate.

        >>> narrow = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
        >>> ReductionOptions(accumulation_dtype=torch.float32).accumulation_dtype_of(narrow)
        torch.float32
        >>> ReductionOptions(accumulation_dtype=torch.float16).accumulation_dtype_of(narrow)
        torch.bfloat16
        """
        partition, dtype = self.partition_of(parameter), parameter.dtype
        if partition is not None:
            return cast("torch.dtype", partition.dtype)
        wide = self.accumulation_dtype
        return wide if wide and wide.itemsize > dtype.itemsize else dtype

    def partition_of(self, parameter: nn.Parameter) -> Any:
        """Return the partition that has the gradient of a parameter, or None."""
        return next((partition for partition in self.partitions if parameter in partition.regions), None)

    def scales(self, data_parallel_size: int) -> tuple[float, float]:
        """Return the factors that gradients are multiplied by before and after the sum.

        >>> ReductionOptions().scales(4), ReductionOptions(predivide_factor=2.0).scales(8)
        ((0.25, 1.0), (0.5, 0.25))
        """
        total = 1.0 if self.op == "sum" else 1.0 / (self.divisor or data_parallel_size)
        before = total if self.predivide_factor is None else 1.0 / self.predivide_factor
        return before, total / before

    def summary(self) -> list[str]:
        """Return the options that must be equal on all ranks, as text."""
        skipped = {"expert_groups", "ignored_parameters", "partitions", "manager"}
        return [f"{name}={value}" for name, value in vars(self).items() if name not in skipped]
