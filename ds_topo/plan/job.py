"""Describe a training job (model, cluster, batch, number formats, program) and a layout of it.

A layout says which degrees each axis has, in which order the axes are placed on ranks, and how a rank works through its
samples. ``layout_problem`` holds the rules that a layout must keep.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from ds_topo.plan.hardware import Cluster
from ds_topo.plan.model import Model
from ds_topo.topology.axes import DATA, MODEL, PIPE, SEQ, SHARD, divisors
from ds_topo.topology.process_topology import ProcessTopology

AXES = (PIPE, DATA, SHARD, SEQ, MODEL)
"""The axes that a plan can have, in the order that is tried first: ``model`` peers are neighbors."""

ADAM_MOMENTS_BYTES = 8
"""Adam keeps two fp32 moments per parameter (Kingma and Ba, arXiv:1412.6980)."""


@dataclass(frozen=True)
class Precision:
    """The number formats of a training run, as in mixed precision (Micikevicius et al., arXiv:1710.03740).

    Args:
        products: the format in which linear layers multiply.
        attention: the format in which attention and the output layer multiply.
        activation_bytes: bytes of a value between layers, and of a weight.
        input_bytes: bytes of a linear layer's input as it is kept for backward.
        master_bytes: bytes of the optimizer's own copy of a parameter; 0 where the weights themselves are fp32.
    """

    name: str
    products: str
    attention: str
    activation_bytes: int
    input_bytes: int
    master_bytes: int

    @property
    def is_mixed(self) -> bool:
        """True if the optimizer keeps an fp32 copy of the weights."""
        return self.master_bytes > 0


FP32 = Precision("fp32", "fp32", "fp32", 4, 4, 0)
BF16 = Precision("bf16", "bf16", "bf16", 2, 2, 4)
FP16 = Precision("fp16", "fp16", "fp16", 2, 2, 4)
FP8 = Precision("fp8", "fp8", "bf16", 2, 1, 4)
PRECISIONS = {precision.name: precision for precision in (FP32, BF16, FP16, FP8)}


class Recompute(Enum):
    """The activations that backward computes again instead of keeping them."""

    NONE = "none"
    SELECTIVE = "selective"
    """Attention's core if its scores are kept (Korthikanti et al.); otherwise the outputs of norms and activations."""
    FULL = "full"
    """Every block, from its input (Chen et al., arXiv:1604.06174)."""


@dataclass(frozen=True)
class Software:
    """The abilities of a training program. The same layout takes a different time under a different program.

    Args:
        flash_attention: scores never reach memory (Dao et al., arXiv:2205.14135).
        recompute: the kinds of recomputation that it offers.
        sequence_parallel: activations between tensor-parallel layers can be split along the sequence (Korthikanti et
            al.).
        virtual_stages: the most stages per rank (Narayanan et al., section 2.2).
        zero: ZeRO stages that it offers without a pipeline, in an fp32 pipeline, and in a mixed-precision pipeline.
        seq: attention can work on a split sequence, without and with a pipeline.
        seq_exchange: how attention works on a split sequence: ``ring`` sends keys and values around (Liu et al.,
            arXiv:2310.01889), ``all_to_all`` exchanges positions for heads (Jacobs et al., arXiv:2309.14509).
        accumulation_bytes: bytes of an accumulated gradient in mixed precision.
        reduction_bytes: bytes of a gradient in a message in mixed precision.
        sends_to_owners: ZeRO stages whose gradients are sent to the owners of their slices, and whose parameters come
            from them, as this package's reducer does.
        two_level: an all_reduce may be split into one inside hosts and one across hosts.
        shards: ZeRO can partition over an axis ``shard``, with copies of each partition on other ranks.
        eager: it reads a DeepSpeed config and has the buffers of DeepSpeed's engines: an fp32 copy of what ZeRO
            updates, outputs of micro-batches in flight, fp32 gradients for the update, and a number of parameters that
            stay gathered.
        overlaps_gradients: gradients are reduced during backward.
        overlaps_update: updated parameters are gathered during the next forward.
        overlaps_pipe: activations are sent while the next micro-batch is computed (with virtual stages).
        overlaps_model: messages of sequence parallelism alternate with pieces of matrix products.
        overlaps_model_backward: in backward these messages run beside the products for the weights' gradients.
        regathers: inputs that were split along the sequence are kept split, and gathered again for backward.
        agreements: small collectives per step, about losses, norms and overflows.
        balances_parameters: stages get layers by their parameters (DeepSpeed's default), not by their number.
        mirrors: each stage holds two parts of the model, a part and its mirror (DeepSeek-V3's DualPipeV).
    """

    name: str
    flash_attention: bool = True
    recompute: tuple[Recompute, ...] = (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)
    sequence_parallel: bool = True
    virtual_stages: int = 1000
    zero: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] = ((0, 1, 2, 3), (0, 1), (0, 1))
    seq: tuple[bool, bool] = (True, True)
    seq_exchange: str = "ring"
    accumulation_bytes: int = 4
    reduction_bytes: int = 4
    sends_to_owners: tuple[int, ...] = ()
    two_level: bool = False
    shards: bool = False
    eager: bool = False
    overlaps_gradients: bool = True
    overlaps_update: bool = True
    overlaps_pipe: bool = True
    overlaps_model: bool = False
    overlaps_model_backward: bool = True
    regathers: bool = True
    agreements: int = 3
    balances_parameters: bool = False
    mirrors: bool = False

    def zero_stages(self, pipe: int, precision: Precision) -> tuple[int, ...]:
        """Return the ZeRO stages that it offers for a pipeline of this degree."""
        return self.zero[(2 if precision.is_mixed else 1) if pipe > 1 else 0]

    def accumulated_bytes(self, precision: Precision) -> int:
        """Return the bytes of an accumulated gradient."""
        return self.accumulation_bytes if precision.is_mixed else precision.activation_bytes

    def reduced_bytes(self, precision: Precision) -> int:
        """Return the bytes of a gradient in a message."""
        return self.reduction_bytes if precision.is_mixed else precision.activation_bytes


DEEPSPEED = Software(
    "deepspeed",
    recompute=(Recompute.NONE, Recompute.FULL),
    virtual_stages=1,
    zero=((0, 1, 2, 3), (0, 1), (1,)),
    seq=(True, False),
    seq_exchange="all_to_all",
    accumulation_bytes=2,
    reduction_bytes=2,
    sends_to_owners=(1, 2),
    two_level=True,
    shards=True,
    eager=True,
    overlaps_update=False,
    overlaps_pipe=False,
    overlaps_model_backward=False,
    regathers=False,
    agreements=5,
    balances_parameters=True,
)
"""DeepSpeed's engines with this package's reducer. Its bf16 pipelines also shard the optimizer at stage 0. Stage 1 does
the same, and is used instead."""

DEEPSPEED_PIPELINE = replace(DEEPSPEED, name="deepspeed-pipeline", zero=((0, 1), (0, 1), (1,)), seq=(False, False))
"""A program whose model is a ``PipelineModule`` in every topology, as in the examples."""

DUALPIPEV = replace(DEEPSPEED_PIPELINE, name="deepspeed-dualpipev", mirrors=True)
"""A program as ``DEEPSPEED_PIPELINE``, with a ``DualPipeVModule``."""

MEGATRON = Software(
    "megatron", zero=((0, 1, 3), (0, 1), (0, 1)), accumulation_bytes=2, reduction_bytes=2, overlaps_model=True
)
"""Megatron-LM since 2023: flash attention, distributed optimizer, overlap, context parallelism, FSDP."""

MEGATRON_2022 = Software(
    "megatron-2022",
    flash_attention=False,
    virtual_stages=3,
    seq=(False, False),
    zero=((0,), (0,), (0,)),
    reduction_bytes=2,
    overlaps_gradients=False,
    overlaps_pipe=False,
)
"""Megatron-LM of Korthikanti et al.: sequence parallelism and selective recomputation, attention with scores; the
paper's runs have up to 3 virtual stages."""

MEGATRON_2021 = replace(
    MEGATRON_2022,
    name="megatron-2021",
    recompute=(Recompute.NONE, Recompute.FULL),
    sequence_parallel=False,
    overlaps_model_backward=False,
)
"""Megatron-LM of Narayanan et al.; their runs, too, have up to 3 virtual stages (scripts of table 1)."""

SOFTWARE = {
    software.name: software
    for software in (DEEPSPEED, DEEPSPEED_PIPELINE, DUALPIPEV, MEGATRON, MEGATRON_2022, MEGATRON_2021)
}


@dataclass(frozen=True)
class Job:
    """A model to train, the cluster to train it on, and what is fixed about each step.

    Args:
        batch: sequences per step, over all ranks.
        sequence: positions of a sequence.
        expert_load: rows that every expert has room for, over the mean (in DeepSpeed without dropping: rows of the
            fullest expert, over the mean).
    """

    model: Model
    cluster: Cluster
    batch: int
    sequence: int
    precision: Precision
    software: Software
    expert_load: float = 1.0

    @property
    def tokens(self) -> int:
        """The tokens of a step."""
        return self.batch * self.sequence

    def mfu(self, seconds: float) -> float:
        """Return the model FLOPs utilization of a step: FLOPs of the model, none done twice, over those of the peak."""
        peak = self.cluster.ranks * self.cluster.accelerator.peak(self.precision.products)
        return self.tokens * self.model.flops_per_token(self.sequence) / seconds / peak


@dataclass(frozen=True)
class JobLayout:
    """A layout of a job.

    Args:
        topology: the axes among ``pipe``, ``data``, ``shard``, ``seq``, ``model``, outermost first.
        micro_batch: sequences of one replica that are computed at a time.
        zero: the stage of sharded states (Rajbhandari et al., arXiv:1910.02054).
        virtual_stages: stages per rank (Narayanan et al., section 2.2).
        expert_parallel: ranks over which the experts of a layer are distributed; neighbors among the replicas.
    """

    topology: ProcessTopology
    micro_batch: int
    zero: int = 0
    recompute: Recompute = Recompute.NONE
    virtual_stages: int = 1
    sequence_parallel: bool = False
    expert_parallel: int = 1

    @cached_property
    def pipe(self) -> int:
        """The stages of the pipeline."""
        return max(1, self.topology.get_dim(PIPE))

    @cached_property
    def data(self) -> int:
        """The replicas with samples of their own, along ``data`` and ``shard``."""
        return max(1, self.topology.get_dim(DATA)) * max(1, self.topology.get_dim(SHARD))

    @cached_property
    def model(self) -> int:
        """The ranks that share a layer's weights (tensor parallelism)."""
        return max(1, self.topology.get_dim(MODEL))

    @cached_property
    def seq(self) -> int:
        """The ranks that share a sequence."""
        return max(1, self.topology.get_dim(SEQ))

    @property
    def replicas(self) -> int:
        """The ranks with the same parameters, along ``data``, ``shard`` and ``seq``. Gradients are summed over them."""
        return self.data * self.seq

    @property
    def partitions(self) -> int:
        """The ranks over which ZeRO partitions: those along ``shard``, or all replicas without that axis."""
        return self.topology.get_dim(SHARD) if SHARD in self.topology.axes else self.replicas

    @property
    def spread(self) -> int:
        """The ranks that share the activations between tensor-parallel layers (``r`` in formulas)."""
        return self.model if self.sequence_parallel else 1

    def micro_batches(self, batch: int) -> int:
        """Return the number of micro-batches of a replica in one step."""
        return batch // (self.data * self.micro_batch)

    def tokens(self, job: Job) -> float:
        """Return the tokens of a micro-batch for which a rank computes (its part of) attention and other layers."""
        return self.micro_batch * job.sequence / self.seq

    def activation_bytes(self, job: Job) -> float:
        """Return the bytes of a micro-batch's activations between layers, over all ranks of ``model``."""
        return self.tokens(job) * job.model.hidden * job.precision.activation_bytes

    def logits(self, job: Job) -> float:
        """Return the logits of a micro-batch on one rank; the ranks of ``model`` split the vocabulary."""
        return self.tokens(job) * (job.model.vocabulary / self.model)

    def details(self) -> list[str]:
        """Return the settings beside topology, micro-batch and ZeRO stage that are not the default, in words."""
        details = {
            f"recompute {self.recompute.value}": self.recompute is not Recompute.NONE,
            f"{self.virtual_stages} virtual stages": self.virtual_stages > 1,
            "sequence parallel": self.sequence_parallel,
            f"experts over {self.expert_parallel}": self.expert_parallel > 1,
        }
        return [text for text, is_set in details.items() if is_set]

    def __str__(self) -> str:
        return ", ".join([self.topology.spec, f"micro-batch {self.micro_batch}", f"ZeRO {self.zero}", *self.details()])


def layout_problem(job: Job, layout: JobLayout) -> str | None:
    """Return the first rule that a layout breaks, or None."""
    return next(_layout_problems(job, layout), None)


def degree_problems(job: Job, pipe: int, data: int, seq: int, tensor: int) -> Iterator[str]:
    """Yield why these degrees do not divide heads, widths, layers, batch or positions."""
    model, software, batch, heads = job.model, job.software, job.batch, job.model.heads
    if heads % tensor:
        yield f"model={tensor} does not divide the {heads} attention heads; choose one of {divisors(heads)}"
    if seq > 1 and software.seq_exchange == "all_to_all" and (heads // tensor) % seq:
        yield f"seq={seq} does not divide the {heads // tensor} attention heads of a model rank"
    odd = [width for width in model.split_widths if width % tensor]
    if odd:
        yield f"model={tensor} does not divide the width {min(odd)} of a feed-forward layer"
    if pipe > model.layers:
        yield f"pipe={pipe} is more than the {model.layers} layers"
    if batch % data:
        less = batch // data * data
        near = f"{less} or {less + data}" if less else f"{data}"
        yield f"data={data} does not divide the batch of {batch} sequences (a batch of {near} would do)"
    if job.sequence % seq:
        yield f"seq={seq} does not divide the {job.sequence} positions of a sequence"
    if seq > 1 and not software.seq[pipe > 1]:
        yield f"{software.name} cannot split sequences{' in a pipeline' if pipe > 1 else ''}"


def _layout_problems(job: Job, layout: JobLayout) -> Iterator[str]:
    """Yield the rules that a layout breaks. Those that follow a broken rule may not apply."""
    model, software, batch, data = job.model, job.software, job.batch, layout.data
    unknown = [axis for axis in layout.topology.axes if axis not in AXES]
    if unknown:
        yield f"axes {unknown} cannot be planned; choose among {list(AXES)}"
    if layout.topology.world_size() != job.cluster.ranks:
        yield f"its degrees make {layout.topology.world_size()} ranks, the cluster has {job.cluster.ranks}"
    yield from degree_problems(job, layout.pipe, data, layout.seq, layout.model)
    stages, virtual = software.zero_stages(layout.pipe, job.precision), layout.virtual_stages
    if layout.zero not in stages:
        pipeline = "with a pipeline" if layout.pipe > 1 else "without a pipeline"
        yield f"{software.name} has no ZeRO {layout.zero} {pipeline}, only {list(stages)}"
    if layout.recompute not in software.recompute:
        yield f"{software.name} cannot recompute {layout.recompute.value!r}"
    if virtual > software.virtual_stages:
        yield f"{software.name} has no {virtual} virtual stages, at most {software.virtual_stages}"
    if layout.sequence_parallel and not software.sequence_parallel:
        yield f"{software.name} has no sequence parallelism"
    if SHARD in layout.topology.axes and not software.shards:
        yield f"{software.name} has no axis 'shard'"
    if virtual > 1 and layout.pipe == 1:
        yield f"{virtual} virtual stages need a pipeline, pipe=2 or more"
    if layout.sequence_parallel and layout.model == 1:
        yield "sequence parallelism needs a model axis, model=2 or more"
    if software.eager and layout.zero == 3 and layout.expert_parallel > 1:
        others = [stage for stage in stages if stage < 3]
        yield f"{software.name} has no ZeRO 3 where experts are distributed over ranks, only {others}"
    if layout.pipe * virtual > model.layers + 2:
        yield f"pipe={layout.pipe} x {virtual} virtual stages are too many for {model.layers} layers"
    if batch % (data * layout.micro_batch):
        yield (
            f"the batch of {batch} sequences is not a multiple of data={data} x micro-batch {layout.micro_batch}; "
            f"choose a micro-batch among {divisors(batch // data)}"
        )
    if job.sequence % (layout.seq * (layout.model if layout.sequence_parallel else 1)):
        yield f"{job.sequence} positions cannot be split over seq={layout.seq} x model={layout.model}"
    if model.positions and job.sequence > model.positions:
        yield f"the model has {model.positions} positions, fewer than the sequence's {job.sequence}"
    parts, count = 2 * layout.pipe, layout.micro_batches(batch)
    if virtual > 1 and count % layout.pipe:
        yield f"virtual stages need a multiple of pipe={layout.pipe} micro-batches, not {count}"
    if software.mirrors and layout.pipe > 1 and parts > min(count, model.layers + 2):
        yield f"DualPipeV on pipe={layout.pipe} needs {parts} micro-batches and layers, not {count} and {model.layers}"
    size, experts = layout.expert_parallel, model.expert_count
    if size > 1 and not experts:
        yield f"experts over {size} ranks, but the model has none"
    if experts % size:
        yield f"{experts} experts cannot be distributed over {size} ranks"
    if layout.replicas % size:
        yield f"experts over {size} ranks: not a divisor of the {layout.replicas} replicas"
