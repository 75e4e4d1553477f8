"""Describe the machine that a job runs on: accelerators, links and hosts, from data sheets or from measurements.

``ds-topo check --json`` writes a file with measured links; ``ds-topo plan --calibrate`` writes one with measured
speeds, and the links of ``--machine`` if it has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from ds_topo.checkpoint.manifest import built_from
from ds_topo.errors import TopologyError
from ds_topo.topology.axes import read_json

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
ZeroOrMore = Annotated[float, Field(ge=0, allow_inf_nan=False)]
GIGA, TERA = 1e9, 1e12
CONTEXT_BYTES = 3e9
"""Device memory that no tensor can use: driver context, libraries' workspaces, communicators."""
USABLE_SHARE = 0.96
"""The share of the rest that tensors can use: torch's allocator rounds blocks up and leaves gaps."""
KERNEL_SECONDS = 2e-6
"""From the end of a kernel to the start of the next."""
START_SECONDS = 10e-6
"""From the call of a collective to its first message."""
UNKNOWN_LINKS = 25 * GIGA, 12.5 * GIGA
"""The links of an accelerator that is not in the table, inside a host (PCIe 4.0) and across hosts (100 Gbit/s)."""


@dataclass(frozen=True)
class Link:
    """A link's bandwidth in bytes per second and direction, and the seconds of one hop of an empty message."""

    bandwidth: Positive
    latency: ZeroOrMore


@dataclass(frozen=True)
class Efficiency:
    """The share of an accelerator's peaks that kernels reach.

    Args:
        products: share of the peak FLOP/s, by format, for matrix products so large that only the chip's clock and its
            schedulers limit them.
        processors: multiprocessors. A product is split over them in tiles of 128 x 256 results. 0: no such loss.
        product_depth: terms of an inner product that a tile's start and end cost.
        attention_forward: share of the bf16 peak for flash attention over long sequences with heads of 128 features.
        attention_backward: the same in backward.
        attention_length: positions at which flash attention reaches half of that share.
        memory: share of the memory's bandwidth for kernels that read and write long vectors.
        launch_seconds: processor time to launch a kernel, which bounds models of small kernels. 0: no such bound.
        update_bytes: memory traffic of Adam's update per parameter; None for that of a fused one.
        links: share of the links' bandwidth for collectives over long messages (inside a host, across hosts).
    """

    products: Mapping[str, float]
    processors: int
    product_depth: int = 64
    attention_forward: float = 0.60
    attention_backward: float = 0.48
    attention_length: float = 256
    memory: float = 0.80
    launch_seconds: float = 0.0
    update_bytes: float | None = None
    links: tuple[float, float] = (0.78, 0.85)


@dataclass(frozen=True)
class Accelerator:
    """A device, as its data sheet or a measurement describes it.

    Args:
        peak_flops: dense FLOP/s by format (``fp32``: what torch uses by default).
        memory_bytes: memory as the driver shows it.
        link_inside: bytes per second and direction to peers in its host (or NVLink domain).
        link_across: bytes per second and direction of its network adapter.
        slots: devices per host in common systems.
    """

    name: str
    peak_flops: Mapping[str, float]
    memory_bytes: float
    memory_bandwidth: float
    link_inside: float
    link_across: float
    efficiency: Efficiency
    slots: int = 8
    aliases: tuple[str, ...] = ()

    def peak(self, precision: str) -> float:
        """Return the FLOP/s of a format; raise if the accelerator does not have it."""
        if precision not in self.peak_flops:
            name = self.name if self.name.startswith("accelerator") else f"accelerator {self.name}"
            raise TopologyError(f"{name} has no {precision}: choose one of {list(self.peak_flops)}")
        return self.peak_flops[precision]


AMPERE = Efficiency({"fp32": 0.75, "bf16": 0.785, "fp16": 0.785}, processors=108)
HOPPER = Efficiency({"fp32": 0.70, "bf16": 0.54, "fp16": 0.54, "fp8": 0.60}, processors=132)
BLACKWELL = Efficiency({"fp32": 0.70, "bf16": 0.60, "fp16": 0.60, "fp8": 0.555}, processors=148)
BLACKWELL_ULTRA = Efficiency({"fp32": 0.70, "bf16": 0.65, "fp16": 0.65, "fp8": 0.62}, processors=148)
"""Blackwell's peaks at a sixth more power, and therefore a higher clock under load."""
VOLTA = Efficiency({"fp32": 0.80, "fp16": 0.75}, processors=80)
CDNA = Efficiency({"fp32": 0.60, "bf16": 0.55, "fp16": 0.55, "fp8": 0.50}, processors=304)


def _accelerator(
    name: str,
    efficiency: Efficiency,
    tflops: tuple[float, ...],
    memory: float,
    bandwidth: float,
    links: tuple[float, float],
    slots: int = 8,
    aliases: tuple[str, ...] = (),
) -> Accelerator:
    """Return an accelerator from the TFLOP/s (in fp32, half precision, fp8), GB and GB/s of its data sheet."""
    fp32, half, fp8 = (*tflops, 0.0)[:3]
    by_format = {"fp32": fp32, "fp16": half, "bf16": half, "fp8": fp8}
    peaks = {one: by_format[one] * TERA for one in efficiency.products}
    inside, across = (link * GIGA for link in links)
    return Accelerator(name, peaks, memory * GIGA, bandwidth * GIGA, inside, across, efficiency, slots, aliases=aliases)


_TABLE = (
    _accelerator("V100-16GB", VOLTA, (15.7, 125), 16.9, 900, (150, 12.5)),
    _accelerator("V100-32GB", VOLTA, (15.7, 125), 34.1, 900, (150, 12.5), aliases=("V100",)),
    _accelerator("A100-40GB", AMPERE, (19.5, 312), 42.4, 1555, (300, 25)),
    _accelerator("A100-80GB", AMPERE, (19.5, 312), 85.0, 2039, (300, 25), aliases=("A100",)),
    _accelerator("A800-80GB", AMPERE, (19.5, 312), 85.0, 2039, (200, 25), aliases=("A800",)),
    _accelerator("H100-80GB", HOPPER, (67, 989.4, 1978.9), 85.0, 3352, (450, 50), aliases=("H100",)),
    _accelerator("H800-80GB", HOPPER, (67, 989.4, 1978.9), 85.0, 3352, (200, 50), aliases=("H800",)),
    _accelerator("H200-141GB", HOPPER, (67, 989.4, 1978.9), 150.0, 4800, (450, 50), aliases=("H200",)),
    _accelerator("B200", BLACKWELL, (75, 2250, 4500), 191.0, 7700, (900, 50), aliases=("B200-180GB", "B200-192GB")),
    _accelerator("GB200", BLACKWELL, (80, 2500, 5000), 197.0, 8000, (900, 50), slots=72),
    _accelerator("B300", BLACKWELL_ULTRA, (75, 2250, 4500), 288.0, 7700, (900, 100)),
    _accelerator("GB300", BLACKWELL_ULTRA, (80, 2500, 5000), 296.0, 8000, (900, 100), slots=72),
    _accelerator("MI300X", CDNA, (163.4, 1307.4, 2614.9), 206.0, 5300, (448, 50)),
)
ACCELERATORS = {accelerator.name: accelerator for accelerator in _TABLE}


def accelerator_of(name: str) -> Accelerator:
    """Return the accelerator of this name, in any spelling.

    >>> accelerator_of("a100").name, accelerator_of("h100 80gb").name
    ('A100-80GB', 'H100-80GB')
    """
    for accelerator in ACCELERATORS.values():
        if _letters(name) in map(_letters, (accelerator.name, *accelerator.aliases)):
            return accelerator
    raise TopologyError(
        f"accelerator {name!r} is not in the table: choose one of {list(ACCELERATORS)}, or give its numbers with "
        "--peak-tflops --memory-gb --memory-gbps --link-inside-gbps --link-across-gbps"
    )


def _letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


@dataclass(frozen=True)
class Cluster:
    """``hosts`` equal hosts of ``slots`` accelerators; rank r is on host r // slots.

    Args:
        inside: the link from one rank to a peer on its host.
        across: the link from one host to the others, shared by its ranks.
        memory_limit: bytes that tensors of one rank may take.
    """

    accelerator: Accelerator
    hosts: int
    slots: int
    inside: Link
    across: Link
    memory_limit: float

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.hosts * self.slots


def cluster_of(accelerator: Accelerator, hosts: int, slots: int | None = None) -> Cluster:
    """Return a cluster of known accelerators.

    >>> cluster_of(accelerator_of("A100"), hosts=4).ranks
    32
    """
    slots = accelerator.slots if slots is None else slots
    if hosts < 1 or slots < 1:
        raise TopologyError(f"hosts={hosts}, slots={slots}: a cluster has at least one host with one slot")
    shares = accelerator.efficiency.links
    return Cluster(
        accelerator,
        hosts,
        slots,
        inside=Link(accelerator.link_inside * shares[0], latency=1.5e-6),
        across=Link(accelerator.link_across * slots * shares[1], latency=5e-6),
        memory_limit=usable_bytes(accelerator.memory_bytes),
    )


def usable_bytes(memory_bytes: float) -> float:
    """Return the part of a device's memory that tensors can use."""
    return USABLE_SHARE * (memory_bytes - CONTEXT_BYTES)


@dataclass(frozen=True)
class Speeds:
    """The measured speeds of one GPU.

    Args:
        product_flops: FLOP/s of the largest matrix products, by format.
        depth: terms of an inner product at which a product reaches half of that.
        attention_flops: FLOP/s of attention's core, forward and backward (half of a causal mask counted).
        memory_bandwidth: bytes per second of kernels that read and write long vectors.
        launch_seconds: processor time to launch a kernel, with torch's work around it.
        update_bytes: memory traffic of Adam's update per parameter, at that bandwidth.
        block_share: the share of the speeds above, which are those of single kernels, that a block of layers reaches.
    """

    name: str
    product_flops: Annotated[Mapping[str, Positive], Field(min_length=1)]
    depth: Annotated[int, Field(ge=0)]
    attention_flops: tuple[Positive, Positive]
    memory_bandwidth: Positive
    launch_seconds: ZeroOrMore
    update_bytes: ZeroOrMore
    memory_bytes: Positive
    block_share: Positive = 1.0

    def accelerator(self) -> Accelerator:
        """Return the accelerator whose peaks are the measured speeds."""
        products, share = dict(self.product_flops), self.block_share
        fastest = max(products.values())
        efficiency = Efficiency(
            dict.fromkeys(products, share),
            processors=0,
            product_depth=self.depth,
            attention_forward=share * self.attention_flops[0] / fastest,
            attention_backward=share * self.attention_flops[1] / fastest,
            attention_length=0.0,
            memory=share,
            launch_seconds=self.launch_seconds,
            update_bytes=self.update_bytes * share,
            links=(1.0, 1.0),
        )
        memory = self.memory_bytes, self.memory_bandwidth
        return Accelerator(self.name, products, *memory, *UNKNOWN_LINKS, efficiency, slots=1)


@dataclass(frozen=True)
class HostRanks:
    """The ranks of a host, or their number."""

    ranks: int | list[int]


@dataclass(frozen=True)
class Machine:
    """The content of a machine file: the measured links and speeds of a cluster; None for what was not measured."""

    hosts: Annotated[list[HostRanks], Field(min_length=1)]
    speeds: Speeds | None = None
    inside: Link | None = None
    across: Link | None = None

    @property
    def slots(self) -> int:
        """The number of ranks of a host."""
        ranks = self.hosts[0].ranks
        return ranks if isinstance(ranks, int) else len(ranks)


def read_machine(path: str | Path) -> Machine:
    """Return the machine that a file of ``plan --calibrate`` or of ``check --json`` describes."""
    content = read_json(path, "machine file")
    try:
        machine: Machine = built_from(Machine, content)
        if not (machine.speeds or machine.inside or machine.across):
            raise ValueError("it has no links and no speeds: measure them with more than one rank")
    except ValueError as error:
        raise TopologyError(
            f"machine file {str(path)!r} cannot be used: {error}; give a file that ds-topo plan --calibrate FILE or "
            "ds-topo check SPEC --json FILE has written"
        ) from error
    return machine
