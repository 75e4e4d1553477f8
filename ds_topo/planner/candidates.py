"""What a plan can be: degrees, schedules, ZeRO stages and orders, each as far as the user has not decided it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations, product
from math import gcd
from typing import TypeAlias

from ds_topo.planner.layout import AXES, Job, Layout, batch_problem, heads_problem
from ds_topo.planner.software import Recompute
from ds_topo.topology.axes import DATA, MODEL, PIPE, SEQ
from ds_topo.topology.expert_tables import divisors
from ds_topo.topology.process_topology import ProcessTopology

Degrees: TypeAlias = tuple[int, int, int, int]
"""Of pipe, data, seq, model."""

LARGEST_MICRO_BATCH = 64
"""Micro-batches of more sequences than this are not tried."""


@dataclass(frozen=True)
class Wanted:
    """What the user has decided already; None leaves it to the search.

    Args:
        topology: degrees and their order.
        degrees: degrees of some axes, in any order.
        recompute: the kinds to choose from; all that the software offers if empty.
    """

    topology: ProcessTopology | None = None
    degrees: tuple[tuple[str, int], ...] = ()
    micro_batch: int | None = None
    zero: int | None = None
    recompute: tuple[Recompute, ...] = ()
    virtual_stages: int | None = None
    sequence_parallel: bool | None = None
    expert_parallel: int | None = None

    def degree(self, axis: str) -> int | None:
        """The degree that an axis must have."""
        if self.topology is not None:
            return max(1, self.topology.get_dim(axis))
        return dict(self.degrees).get(axis)

    def decisions(self) -> list[str]:
        """What is decided, in words.

        >>> Wanted(degrees=(("model", 2),), zero=2, recompute=(Recompute.FULL,), sequence_parallel=False).decisions()
        ['model=2', 'ZeRO 2', 'recompute full', 'no sequence parallelism']
        """
        split = {None: None, True: "sequence parallel", False: "no sequence parallelism"}[self.sequence_parallel]
        said = [
            None if self.topology is None else self.topology.spec,
            *(f"{axis}={degree}" for axis, degree in self.degrees),
            None if self.micro_batch is None else f"micro-batch {self.micro_batch}",
            None if self.zero is None else f"ZeRO {self.zero}",
            f"recompute {' or '.join(kind.value for kind in self.recompute)}" if self.recompute else None,
            None if self.virtual_stages is None else f"{self.virtual_stages} virtual stages",
            split,
            None if self.expert_parallel is None else f"experts over {self.expert_parallel}",
        ]
        return [text for text in said if text]


def possible_degrees(job: Job, wanted: Wanted, problems: Counter[str]) -> Iterator[Degrees]:
    """Degrees whose product is the number of ranks and that divide heads, layers, positions and batch."""
    ranks = job.cluster.ranks
    choices = {axis: [wanted.degree(axis)] if wanted.degree(axis) else divisors(ranks) for axis in (PIPE, SEQ, MODEL)}
    for pipe, seq, tensor in product(choices[PIPE], choices[SEQ], choices[MODEL]):
        assert pipe is not None
        assert seq is not None
        assert tensor is not None
        if ranks % (pipe * seq * tensor):
            continue
        data = ranks // (pipe * seq * tensor)
        if wanted.degree(DATA) not in (None, data):
            continue
        problem = _degrees_problem(job, pipe, data, seq, tensor)
        if problem:
            problems[problem] += 1
        else:
            yield pipe, data, seq, tensor


def _degrees_problem(job: Job, pipe: int, data: int, seq: int, tensor: int) -> str | None:
    problem = heads_problem(job.model, tensor, seq, job.software)
    if problem:
        return problem
    if pipe > max(job.model.layers, 1):
        return f"pipe={pipe} is more than the {job.model.layers} layers"
    problem = batch_problem(job.batch, data)
    if problem:
        return problem
    if job.sequence % seq:
        return f"seq={seq} does not divide the {job.sequence} positions of a sequence"
    if seq > 1 and not job.software.splits_sequences(pipe):
        return f"{job.software.name} cannot split sequences" + (" in a pipeline" if pipe > 1 else "")
    return None


def first_order(degrees: Degrees) -> ProcessTopology:
    """The axes of more than one rank in the order that is tried first; ``data`` is always there."""
    named = [(axis, degree) for axis, degree in zip(AXES, degrees, strict=True) if degree > 1 or axis == DATA]
    return ProcessTopology([axis for axis, _ in named], [degree for _, degree in named])


def orders(topology: ProcessTopology) -> Iterator[ProcessTopology]:
    degrees = dict(zip(topology.axes, topology.dims, strict=True))
    moving = [axis for axis in topology.axes if degrees[axis] > 1]
    fixed = [axis for axis in topology.axes if degrees[axis] == 1]
    for order in permutations(moving):
        yield ProcessTopology([*fixed, *order], [degrees[axis] for axis in (*fixed, *order)])


def zero_stages(job: Job, layout: Layout) -> list[int]:
    """The stages to choose from; one is enough where there is nothing to shard."""
    stages = list(job.software.zero_stages(layout.pipe, mixed=bool(job.precision.master_bytes)))
    return stages if layout.replicas > 1 else stages[:1]


def schedules(job: Job, degrees: Degrees, wanted: Wanted) -> Iterator[Layout]:
    """Micro-batches, virtual stages, recomputation, sequence parallelism and sharers of experts."""
    pipe, data, seq, tensor = degrees
    topology = wanted.topology if wanted.topology is not None else first_order(degrees)
    software, model = job.software, job.model
    virtuals = [wanted.virtual_stages] if wanted.virtual_stages else [1]
    if not wanted.virtual_stages and software.virtual_stages > 1 and pipe > 1:
        virtuals = [stages for stages in _virtual_stages(model.layers, pipe) if stages <= software.virtual_stages]
    recompute = wanted.recompute or software.recompute
    split = [False]
    if software.sequence_parallel and tensor > 1 and job.sequence % (seq * tensor) == 0:
        split = [True] if software.regathers else [False, True]
    if wanted.sequence_parallel is not None:
        split = [wanted.sequence_parallel]
    experts = [wanted.expert_parallel] if wanted.expert_parallel else [1]
    if not wanted.expert_parallel and model.expert_count:
        experts = divisors(gcd(model.expert_count, data * seq))
    stages = software.zero_stages(pipe, mixed=bool(job.precision.master_bytes))
    zero = stages[0] if wanted.zero is None else wanted.zero  # all of them are tried later
    for micro_batch in micro_batches(job, data, wanted):
        for virtual, kind, spread, sharers in product(virtuals, recompute, split, experts):
            yield Layout(topology, micro_batch, zero, kind, virtual, spread, sharers)


def micro_batches(job: Job, data: int, wanted: Wanted) -> list[int]:
    if wanted.micro_batch:
        return [wanted.micro_batch]
    return [size for size in divisors(job.batch // data) if size <= LARGEST_MICRO_BATCH]


def _virtual_stages(layers: int, pipe: int) -> list[int]:
    """Numbers of virtual stages that make chunks of different lengths, the fewest of each.

    >>> _virtual_stages(layers=12, pipe=2)
    [1, 2, 3, 6]
    """
    by_length = {-(-layers // (pipe * virtual)): virtual for virtual in range(-(-layers // pipe), 0, -1)}
    return sorted(by_length.values())
