"""One candidate: which degrees, in which order, and how a rank works through its samples."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ds_topo.planner.cluster import Cluster
from ds_topo.planner.model import Model
from ds_topo.planner.precision import Precision
from ds_topo.planner.software import Recompute, Software
from ds_topo.planner.work import Share
from ds_topo.topology.axes import DATA, MODEL, PIPE, SEQ
from ds_topo.topology.expert_tables import divisors
from ds_topo.topology.process_topology import ProcessTopology

AXES = (PIPE, DATA, SEQ, MODEL)
"""Axes that a plan can have, in the order that is tried first: ``model`` peers are neighbors."""


@dataclass(frozen=True)
class Job:
    """What is to be trained on what.

    Args:
        model: its layers.
        cluster: where.
        batch: sequences per step, over all ranks.
        sequence: positions of a sequence.
        precision: of the training.
        software: what the program can do.
        expert_load: rows that every expert has room for over the mean (DeepSpeed without dropping: of the fullest).
    """

    model: Model
    cluster: Cluster
    batch: int
    sequence: int
    precision: Precision
    software: Software
    expert_load: float = 1.0


@dataclass(frozen=True)
class Layout:
    """A layout of a job.

    Args:
        topology: axes among ``pipe``, ``data``, ``seq``, ``model``, outermost first.
        micro_batch: sequences of one replica that are worked on at a time.
        zero: stage of sharded states (Rajbhandari et al., arXiv:1910.02054).
        recompute: what backward computes again.
        virtual_stages: stages per rank (Narayanan et al., section 2.2).
        sequence_parallel: activations between tensor-parallel layers are split along the sequence.
        expert_parallel: ranks that share out the experts of a layer, neighbors among the replicas.
    """

    topology: ProcessTopology
    micro_batch: int
    zero: int = 0
    recompute: Recompute = Recompute.NONE
    virtual_stages: int = 1
    sequence_parallel: bool = False
    expert_parallel: int = 1

    def degree(self, axis: str) -> int:
        """The degree of an axis, 1 if it is not there."""
        return max(1, self.topology.get_dim(axis))

    @cached_property
    def pipe(self) -> int:
        """Stages of the pipeline."""
        return self.degree(PIPE)

    @cached_property
    def data(self) -> int:
        """Replicas with samples of their own."""
        return self.degree(DATA)

    @cached_property
    def model(self) -> int:
        """Ranks that share a layer's weights (tensor parallel)."""
        return self.degree(MODEL)

    @cached_property
    def seq(self) -> int:
        """Ranks that share a sequence."""
        return self.degree(SEQ)

    @property
    def replicas(self) -> int:
        """Ranks with the same parameters: over ``data`` and ``seq``; gradients are summed over them."""
        return self.data * self.seq

    def micro_batches(self, batch: int) -> int:
        """Micro-batches of a replica in one step."""
        return batch // (self.data * self.micro_batch)

    def share(self, job: Job) -> Share:
        """A rank's part of a micro-batch."""
        return Share(
            self.micro_batch,
            job.sequence,
            self.model,
            self.seq,
            self.sequence_parallel,
            self.expert_parallel,
            job.expert_load,
        )

    def __str__(self) -> str:
        parts = [self.topology.spec, f"micro-batch {self.micro_batch}", f"ZeRO {self.zero}"]
        if self.recompute is not Recompute.NONE:
            parts.append(f"recompute {self.recompute.value}")
        if self.virtual_stages > 1:
            parts.append(f"{self.virtual_stages} virtual stages")
        if self.sequence_parallel:
            parts.append("sequence parallel")
        if self.expert_parallel > 1:
            parts.append(f"experts over {self.expert_parallel}")
        return ", ".join(parts)


def layout_problem(job: Job, layout: Layout) -> str | None:
    """The rule that a layout breaks, None if it breaks none."""
    model, software = job.model, job.software
    unknown = [axis for axis in layout.topology.axes if axis not in AXES]
    if unknown:
        return f"axes {unknown} cannot be planned; choose among {list(AXES)}"
    if layout.topology.world_size() != job.cluster.ranks:
        return f"its degrees make {layout.topology.world_size()} ranks, the cluster has {job.cluster.ranks}"
    degrees = heads_problem(model, layout.model, layout.seq, software)
    if degrees:
        return degrees
    if layout.pipe * layout.virtual_stages > model.layers + 2:
        return f"{layout.pipe} x {layout.virtual_stages} stages for {model.layers} layers"
    if job.batch % (layout.data * layout.micro_batch):
        return (
            f"the batch of {job.batch} sequences is not a multiple of data={layout.data} x micro-batch "
            f"{layout.micro_batch}{_divisors_of_batch(job, layout.data)}"
        )
    if job.sequence % (layout.seq * (layout.model if layout.sequence_parallel else 1)):
        return f"{job.sequence} positions cannot be split over seq={layout.seq} x model={layout.model}"
    if model.positions and job.sequence > model.positions:
        return f"the model has {model.positions} positions, fewer than the sequence's {job.sequence}"
    return _experts_problem(model, layout) or _software_problem(job, layout)


def batch_problem(batch: int, data: int) -> str | None:
    """Why a batch cannot be dealt to so many replicas, None if it can."""
    if batch % data == 0:
        return None
    less = batch // data * data
    near = f"{less} or {less + data}" if less else f"{data}"
    return f"data={data} does not divide the batch of {batch} sequences (a batch of {near} would do)"


def _divisors_of_batch(job: Job, data: int) -> str:
    """The micro-batches that go with a number of replicas."""
    return f"; choose a micro-batch among {divisors(job.batch // data)}" if job.batch % data == 0 else ""


def heads_problem(model: Model, tensor: int, seq: int, software: Software) -> str | None:
    """Why heads, widths or the vocabulary cannot be split so, None if they can."""
    if model.heads % tensor:
        return (
            f"model={tensor} does not divide the {model.heads} attention heads; choose one of {divisors(model.heads)}"
        )
    if seq > 1 and software.seq_exchange == "all_to_all" and (model.heads // tensor) % seq:
        return f"seq={seq} does not divide the {model.heads // tensor} attention heads of a model rank"
    odd = [width for width in model.split_widths if width % tensor]
    if odd:
        return f"model={tensor} does not divide the width {min(odd)} of a feed-forward layer"
    return None


def _experts_problem(model: Model, layout: Layout) -> str | None:
    size = layout.expert_parallel
    if size == 1:
        return None
    if not model.expert_count:
        return f"experts over {size} ranks, but the model has none"
    if model.expert_count % size:
        return f"{model.expert_count} experts cannot be dealt to {size} ranks"
    if layout.replicas % size:
        return f"experts over {size} ranks: not a divisor of the {layout.replicas} replicas"
    return None


def _software_problem(job: Job, layout: Layout) -> str | None:
    software, name = job.software, job.software.name
    stages = software.zero_stages(layout.pipe, mixed=bool(job.precision.master_bytes))
    if layout.zero not in stages:
        with_pipe = "with" if layout.pipe > 1 else "without"
        return f"{name} has no ZeRO {layout.zero} {with_pipe} a pipeline, only {list(stages)}"
    if layout.recompute not in software.recompute:
        return f"{name} cannot recompute {layout.recompute.value!r}"
    if layout.virtual_stages > (software.virtual_stages if layout.pipe > 1 else 1):
        return f"{name} has no {layout.virtual_stages} virtual stages with pipe={layout.pipe}"
    if layout.virtual_stages > 1 and layout.micro_batches(job.batch) % layout.pipe:
        return (
            f"virtual stages need a multiple of pipe={layout.pipe} micro-batches, not {layout.micro_batches(job.batch)}"
        )
    if layout.sequence_parallel and not (software.sequence_parallel and layout.model > 1):
        return f"{name} has no sequence parallelism with model={layout.model}"
    if layout.seq > 1 and not software.splits_sequences(layout.pipe):
        return f"{name} cannot split sequences" + (" in a pipeline" if layout.pipe > 1 else "")
    if software.eager and layout.zero == 3 and layout.expert_parallel > 1:
        return f"{name} has no ZeRO 3 where ranks share out experts, only {[stage for stage in stages if stage < 3]}"
    return None
