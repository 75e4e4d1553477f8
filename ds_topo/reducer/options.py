"""How gradients are reduced: a frozen value, validated once."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

import torch
from torch import nn

from ds_topo.errors import abridged
from ds_topo.partition.gradients import PartitionedGradients, RegionOfGradients
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.reducer.planning import MIB, BucketSizes


class ReductionArguments(TypedDict, total=False):
    """:class:`ReductionOptions` as keyword arguments, for type checkers and editors."""

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
    grad_buffers: Mapping[nn.Parameter, torch.Tensor]
    partitions: Sequence[PartitionedGradients]
    expert_groups: Mapping[str, ProcessGroup]
    ignored_parameters: Collection[str | nn.Parameter]
    broadcast_at_start: bool
    two_level: bool | None
    overlap_parameters: bool
    keep_steps: int


_SWITCHES = (
    "find_unused_parameters",
    "zero_unused_parameters",
    "static_graph",
    "allow_late_gradients",
    "broadcast_at_start",
    "overlap_parameters",
)
_OPTIONAL_SWITCHES = ("overlap", "two_level")
_WHOLE_NUMBERS = ("first_bucket_bytes", "last_bucket_bytes", "keep_steps")
_DTYPES = {
    **dict.fromkeys(("fp32", "float32", "torch.float32"), torch.float32),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), torch.bfloat16),
    **dict.fromkeys(("fp16", "float16", "torch.float16"), torch.float16),
    **dict.fromkeys(("fp64", "float64", "torch.float64"), torch.float64),
}
_NOT_IN_JSON = ("grad_buffers", "partitions", "expert_groups")


def arguments_from_config(section: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments as JSON writes them, data types by name; checked as if they had been given directly.

    >>> arguments_from_config({"bucket_bytes": 1000, "communication_dtype": "bf16"})
    {'bucket_bytes': 1000, 'communication_dtype': torch.bfloat16}
    >>> arguments_from_config({"bucket_byte": 1000})
    Traceback (most recent call last):
    ValueError: 'bucket_byte' is no option: did you mean 'bucket_bytes'? Options are bucket_bytes, ...

    Raises:
        ValueError, TypeError: an option that there is not, or a value that cannot be.
    """
    names = [name for name in ReductionArguments.__annotations__ if name not in _NOT_IN_JSON]
    arguments = dict(section)
    for name, value in section.items():
        if name not in names:
            near = difflib.get_close_matches(str(name), names, n=1)
            question = f": did you mean {near[0]!r}?" if near else "."
            raise ValueError(f"{abridged(name)} is no option{question} Options are {', '.join(names)}")
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
        bucket_bytes: capacity of a bucket. By default 4 MiB on a link that measures slow at the start, where an early
            start of communication counts most, and 25 MiB, as DDP, on any other. (Sums over more than two ranks depend
            on the layout of buckets in the last bit: give it, where restarts must be bit-equal.)
        first_bucket_bytes, last_bucket_bytes: capacities of the first bucket, and of the last, which nothing hides.
        op: ``"average"`` divides the sum by ``divisor``, ``"sum"`` does not.
        divisor: of the average, experts included; the size of the data-parallel group by default.
        predivide_factor: divide by so much before the sum and by the rest of the divisor after it (DeepSpeed's
            ``gradient_predivide_factor``), for gradients of narrow types on many ranks. Everything before by default.
        communication_dtype: reduce in this type; the type in which gradients are accumulated by default.
        accumulation_dtype: accumulate and reduce gradients of narrower floating-point types in this one. They are left
            in ``parameter.main_grad``, and rounded once to the parameter's type in ``parameter.grad``.
        find_unused_parameters: let parameters take no part in a step; ``finish()`` must then come before any other
            collective of the group. One that takes part on some ranks only gets
            the same gradient on all; one that takes part on none keeps its ``grad`` as it is. Without it, finish()
            raises on every rank and names them.
        zero_unused_parameters: let parameters take no part in a step, and give them zeros, as DeepSpeed does. Costs no
            synchronization of a GPU, which ``find_unused_parameters`` does.
        overlap: launch full buckets during backward; by default but where an engine knows that nothing is gained.
        static_graph: every step reaches the same parameters equally often, as DDP's option of this name. Lets a
            parameter get several gradients in one micro-batch (reentrant checkpointing, several backward calls); they
            are counted in the first step, which is reduced without overlap.
        allow_late_gradients: let later steps of a static graph reach a parameter more often than the first one did.
            What comes after its bucket has left is reduced in ``finish()``; gradients become views of their buckets
            there.
        grad_buffers: where gradients accumulate instead of in buckets of the reducer's own, for some parameters:
            contiguous ``[numel]`` tensors of any floating-point type. Neighbors in memory share a bucket. The sum is
            left there; ``parameter.grad`` is None after ``finish()``. (Formerly ``storage``.)
        partitions: gradients of which every rank needs its own partition alone: their sums go there, in half the time
            of a sum for all. ``parameter.grad`` is None after ``finish()``.
        expert_groups: the expert-data group of every ``group_name`` of parameters with ``allreduce = False``,
            DeepSpeed's marks of experts.
        ignored_parameters: names or parameters that are left alone.
        broadcast_at_start: give every rank the parameters and buffers of the group's first rank.
        two_level: reduce inside hosts and across hosts apart. By default where the group spans hosts with equally many
            ranks, several each, and where that measures faster than a flat reduction at the start. (What goes to its
            owners, at ZeRO stages 1 and 2, always travels so there on gloo: it is never more.)
        overlap_parameters: at ZeRO stages 1 and 2, let parameters arrive during the next forward pass, in which each
            module waits for its own. Whoever reads a parameter through its module waits, too; a program that keeps
            parameters itself calls ``wait()`` before it reads them.
        keep_steps: how many steps the report remembers.

    Raises:
        ValueError: a value that cannot be; the message names it, the rule and the choices.
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
    grad_buffers: Mapping[nn.Parameter, torch.Tensor] = field(default_factory=dict)
    partitions: Sequence[PartitionedGradients] = ()
    expert_groups: Mapping[str, ProcessGroup] = field(default_factory=dict)
    ignored_parameters: Collection[str | nn.Parameter] = ()
    broadcast_at_start: bool = True
    two_level: bool | None = None
    overlap_parameters: bool = False
    keep_steps: int = 16

    def __post_init__(self) -> None:
        self._check_types()
        if self.op not in ("average", "sum"):
            raise ValueError(f"op={self.op!r}: choose 'average' or 'sum'")
        for name in ("divisor", "predivide_factor"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value}: must be positive; leave it out for the data-parallel group's size")
        if self.op == "sum" and self.divisor is not None:
            raise ValueError(f"divisor={self.divisor} with op='sum': a sum is not divided; use op='average'")
        for name in ("communication_dtype", "accumulation_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(
                    f"{name}={dtype}: choose a floating-point type such as torch.float32 or torch.bfloat16"
                )
        if self.find_unused_parameters and self.zero_unused_parameters:
            raise ValueError("find_unused_parameters and zero_unused_parameters: choose one of them")
        if self.allow_late_gradients and not self.static_graph:
            raise ValueError(
                "allow_late_gradients=True: only gradients of a static graph are counted; set static_graph"
            )
        if self.keep_steps < 1:
            raise ValueError(f"keep_steps={self.keep_steps}: the report remembers at least 1 step")
        for parameter, buffer in self.grad_buffers.items():
            if buffer.numel() != parameter.numel() or not buffer.is_contiguous() or buffer.device != parameter.device:
                raise ValueError(
                    f"grad_buffers: a tensor {list(buffer.shape)} on {buffer.device} for a parameter "
                    f"{list(parameter.shape)} on {parameter.device}; it must be contiguous and of as many elements on "
                    "the same device"
                )
        self.bucket_sizes(MIB)

    def _check_types(self) -> None:
        """Python takes ``"false"`` for true, and 1.5 bytes for a number."""
        for names, kinds, choices in (
            (_SWITCHES, (bool,), "True or False"),
            (_OPTIONAL_SWITCHES, (bool, type(None)), "True, False or None"),
            (_WHOLE_NUMBERS, (int,), "a whole number"),
            (("bucket_bytes",), (int, type(None)), "a whole number of bytes, or None"),
            (("divisor", "predivide_factor"), (int, float, type(None)), "a number, or None"),
            (("grad_buffers", "expert_groups"), (Mapping,), "a mapping"),
        ):
            for name in names:
                value = getattr(self, name)
                if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                    raise TypeError(f"{name}={abridged(value)}: give {choices}")
        if isinstance(self.ignored_parameters, (str, nn.Parameter)):
            raise TypeError(
                f"ignored_parameters={abridged(self.ignored_parameters)}: give a collection of names or parameters"
            )

    def bucket_sizes(self, suitable_bytes: int) -> BucketSizes:
        """The capacities of the buckets, with that of a bucket where none was given."""
        bucket_bytes = suitable_bytes if self.bucket_bytes is None else self.bucket_bytes
        return BucketSizes(bucket_bytes, self.first_bucket_bytes, self.last_bucket_bytes)

    def accumulation_dtype_of(self, parameter: nn.Parameter) -> torch.dtype:
        """What gradients of this parameter are accumulated in."""
        if parameter in self.grad_buffers:
            return self.grad_buffers[parameter].dtype
        region = self.region_of(parameter)
        if region is not None:
            return region.gradients.dtype
        dtype = parameter.dtype
        wide = self.accumulation_dtype
        return wide if wide and dtype.is_floating_point and wide.itemsize > dtype.itemsize else dtype

    def region_of(self, parameter: nn.Parameter) -> RegionOfGradients | None:
        """The region of a partitioned gradient."""
        regions = (partition.regions for partition in self.partitions if parameter in partition.regions)
        return next(regions, {}).get(parameter)

    def scales(self, data_parallel_size: int) -> tuple[float, float]:
        """What gradients are multiplied by before and after the sum.

        >>> ReductionOptions().scales(4), ReductionOptions(predivide_factor=2.0).scales(8)
        ((0.25, 1.0), (0.5, 0.25))
        """
        total = 1.0 if self.op == "sum" else 1.0 / (self.divisor or data_parallel_size)
        before = total if self.predivide_factor is None else 1.0 / self.predivide_factor
        return before, total / before

    def summary(self) -> list[str]:
        """What must be equal on all ranks."""
        skipped = {"expert_groups", "ignored_parameters", "keep_steps", "grad_buffers", "partitions"}
        return [f"{name}={value}" for name, value in vars(self).items() if name not in skipped]
