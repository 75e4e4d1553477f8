"""Known accelerators: peaks from data sheets, and how much of a peak real kernels reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ds_topo.errors import TopologyError

GIGA, TERA = 1e9, 1e12


@dataclass(frozen=True)
class Efficiency:
    """How much of an accelerator's peaks kernels reach; few numbers, each with one meaning.

    Args:
        products: of the peak FLOP/s, by format, of matrix products so large that only the chip's clock and its
            schedulers limit them.
        processors: multiprocessors; a product is dealt to them in tiles of 128 x 256 results. 0: no such loss.
        product_depth: terms of an inner product that a tile's start and end cost.
        attention_forward: of the bf16 peak, of flash attention over long sequences with heads of 128 features.
        attention_backward: the same in backward.
        attention_length: positions at which flash attention reaches half of that.
        attention_width: features of a head at which it does; 0: as the square root says where there are processors.
        memory: of the memory's bandwidth, of kernels that read and write long vectors.
        kernel_seconds: from the end of a kernel to the start of the next.
        update_bytes: memory traffic of Adam's update per parameter; None for that of a fused one.
        links: of the links' bandwidth, of collectives over long messages (inside a host, across hosts).
    """

    products: Mapping[str, float]
    processors: int
    product_depth: int = 64
    attention_forward: float = 0.60
    attention_backward: float = 0.48
    attention_length: float = 256
    attention_width: float = 0
    memory: float = 0.80
    kernel_seconds: float = 2e-6
    update_bytes: float | None = None
    links: tuple[float, float] = (0.78, 0.85)


@dataclass(frozen=True)
class Accelerator:
    """One device.

    Args:
        name: as in data sheets.
        peak_flops: dense FLOP/s by format (``fp32``: what torch uses by default).
        memory_bytes: what the driver shows.
        memory_bandwidth: bytes per second.
        link_inside: bytes per second and direction to peers in its host (or NVLink domain).
        link_across: bytes per second and direction of its network adapter.
        slots: devices per host as they are usually built.
        efficiency: see there.
        transport: ``nccl`` (collectives use every link at once) or ``gloo`` (one ring over a shared interface).
    """

    name: str
    peak_flops: Mapping[str, float]
    memory_bytes: float
    memory_bandwidth: float
    link_inside: float
    link_across: float
    efficiency: Efficiency
    slots: int = 8
    transport: str = "nccl"
    latency_inside: float = 1.5e-6
    latency_across: float = 5e-6
    aliases: tuple[str, ...] = field(default=())

    def peak(self, precision: str) -> float:
        """FLOP/s of a format.

        Raises:
            TopologyError: a format that it does not have.
        """
        if precision not in self.peak_flops:
            name = self.name if self.name.startswith("accelerator") else f"accelerator {self.name}"
            raise TopologyError(f"{name} has no {precision}: choose one of {list(self.peak_flops)}")
        return self.peak_flops[precision]


AMPERE = Efficiency({"fp32": 0.75, "bf16": 0.785, "fp16": 0.785}, processors=108)
HOPPER = Efficiency({"fp32": 0.70, "bf16": 0.54, "fp16": 0.54, "fp8": 0.60}, processors=132)
BLACKWELL = Efficiency({"fp32": 0.70, "bf16": 0.60, "fp16": 0.60, "fp8": 0.555}, processors=148)
BLACKWELL_ULTRA = Efficiency({"fp32": 0.70, "bf16": 0.65, "fp16": 0.65, "fp8": 0.62}, processors=148)
"""The same peaks as Blackwell at a sixth more power, and so a higher clock under load."""
VOLTA = Efficiency({"fp32": 0.80, "fp16": 0.75}, processors=80)
CDNA = Efficiency({"fp32": 0.60, "bf16": 0.55, "fp16": 0.55, "fp8": 0.50}, processors=304)


def _nvidia(
    name: str,
    efficiency: Efficiency,
    half: float,
    memory: float,
    bandwidth: float,
    links: tuple[float, float],
    *,
    fp8: float = 0.0,
    fp32: float = 19.5,
    slots: int = 8,
    bf16: bool = True,
    aliases: tuple[str, ...] = (),
) -> Accelerator:
    """TFLOP/s, GB and GB/s as data sheets give them."""
    peaks = {"fp32": fp32 * TERA, "fp16": half * TERA}
    if bf16:
        peaks["bf16"] = half * TERA
    if fp8:
        peaks["fp8"] = fp8 * TERA
    inside, across = links
    return Accelerator(
        name,
        peaks,
        memory * GIGA,
        bandwidth * GIGA,
        inside * GIGA,
        across * GIGA,
        efficiency,
        slots,
        aliases=aliases,
    )


_TABLE = (
    _nvidia("V100-16GB", VOLTA, 125, 16.9, 900, (150, 12.5), fp32=15.7, bf16=False),
    _nvidia("V100-32GB", VOLTA, 125, 34.1, 900, (150, 12.5), fp32=15.7, bf16=False, aliases=("V100",)),
    _nvidia("A100-40GB", AMPERE, 312, 42.4, 1555, (300, 25)),
    _nvidia("A100-80GB", AMPERE, 312, 85.0, 2039, (300, 25), aliases=("A100",)),
    _nvidia("A800-80GB", AMPERE, 312, 85.0, 2039, (200, 25), aliases=("A800",)),
    _nvidia("H100-80GB", HOPPER, 989.4, 85.0, 3352, (450, 50), fp8=1978.9, fp32=67, aliases=("H100",)),
    _nvidia("H800-80GB", HOPPER, 989.4, 85.0, 3352, (200, 50), fp8=1978.9, fp32=67, aliases=("H800",)),
    _nvidia("H200-141GB", HOPPER, 989.4, 150.0, 4800, (450, 50), fp8=1978.9, fp32=67, aliases=("H200",)),
    _nvidia("B200", BLACKWELL, 2250, 191.0, 7700, (900, 50), fp8=4500, fp32=75, aliases=("B200-180GB", "B200-192GB")),
    _nvidia("GB200", BLACKWELL, 2500, 197.0, 8000, (900, 50), fp8=5000, fp32=80, slots=72),
    _nvidia("B300", BLACKWELL_ULTRA, 2250, 288.0, 7700, (900, 100), fp8=4500, fp32=75),
    _nvidia("GB300", BLACKWELL_ULTRA, 2500, 296.0, 8000, (900, 100), fp8=5000, fp32=80, slots=72),
    Accelerator(
        "MI300X",
        {"fp32": 163.4e12, "bf16": 1307.4e12, "fp16": 1307.4e12, "fp8": 2614.9e12},
        206e9,
        5300e9,
        448e9,
        50e9,
        CDNA,
    ),
)

ACCELERATORS = {accelerator.name: accelerator for accelerator in _TABLE}


def accelerator_of(name: str) -> Accelerator:
    """The accelerator of this name, in any spelling.

    >>> accelerator_of("a100").name, accelerator_of("h100 80gb").name
    ('A100-80GB', 'H100-80GB')

    Raises:
        TopologyError: one that the table does not have.
    """
    wanted = _key(name)
    for accelerator in ACCELERATORS.values():
        if wanted in {_key(accelerator.name), *map(_key, accelerator.aliases)}:
            return accelerator
    raise TopologyError(
        f"accelerator {name!r} is not in the table: choose one of {list(ACCELERATORS)}, or give its numbers with "
        "--peak-tflops --memory-gb --memory-gbps --link-inside-gbps --link-across-gbps"
    )


def _key(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
