"""What was measured on a machine, as a file: of ``ds-topo plan --calibrate``, or links alone of ``ds-topo check``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from ds_topo.errors import TopologyError
from ds_topo.planner.accelerators import Accelerator, Efficiency
from ds_topo.planner.cluster import Cluster, Link


@dataclass(frozen=True)
class Speeds:
    """What one device does, with every rank at work.

    Args:
        name: of the device.
        transport: ``nccl`` or ``gloo``.
        product_flops: FLOP/s of matrix products, by format: of the largest, and the smallest share of it that the
            depth of small ones leaves (see ``depth``).
        depth: terms of an inner product at which a product reaches half of that.
        attention_flops: FLOP/s of attention's core, forward and backward (a causal mask's half counted).
        attention_half: positions, and features of a head, at which it reaches half of that.
        memory_bandwidth: bytes per second of kernels that read and write long vectors.
        kernel_seconds: of a kernel over next to nothing, with what torch does around it.
        update_bytes: memory traffic of Adam's update per parameter, at that bandwidth.
        memory_bytes: of the device.
        processors: how many ranks work at full speed at the same time.
        block_share: what a block of layers reaches of the speeds above, which are those of single kernels.
    """

    name: str
    transport: str
    product_flops: Mapping[str, float]
    depth: int
    attention_flops: tuple[float, float]
    memory_bandwidth: float
    kernel_seconds: float
    update_bytes: float
    memory_bytes: float
    processors: float
    attention_half: tuple[float, float] = (0.0, 0.0)
    block_share: float = 1.0

    def accelerator(self) -> Accelerator:
        """As the planner's table has them: what was measured is the peak."""
        products, share = dict(self.product_flops), self.block_share
        fastest = max(products.values())
        efficiency = Efficiency(
            dict.fromkeys(products, share),
            processors=0,
            product_depth=self.depth,
            attention_forward=share * self.attention_flops[0] / fastest,
            attention_backward=share * self.attention_flops[1] / fastest,
            attention_length=self.attention_half[0],
            attention_width=self.attention_half[1],
            memory=share,
            kernel_seconds=self.kernel_seconds,
            update_bytes=self.update_bytes * share,
            links=(1.0, 1.0),
        )
        return Accelerator(
            self.name,
            products,
            self.memory_bytes,
            self.memory_bandwidth,
            link_inside=self.memory_bandwidth / 2,
            link_across=self.memory_bandwidth / 2,
            efficiency=efficiency,
            slots=1,
            transport=self.transport,
        )


@dataclass(frozen=True)
class Machine:
    """What is known of a cluster from measurements; None where nothing was measured.

    Args:
        hosts: their number.
        slots: ranks on each.
        speeds: of a device.
        inside: from a rank to a peer on its host.
        across: from a host to another, all of their ranks together.
        start_seconds: of an empty collective.
    """

    hosts: int
    slots: int
    speeds: Speeds | None = None
    inside: Link | None = None
    across: Link | None = None
    start_seconds: float | None = None

    def applied_to(self, cluster: Cluster) -> Cluster:
        """The cluster with what was measured in place of what a table says."""
        accelerator = self.speeds.accelerator() if self.speeds else cluster.accelerator
        processors = float(cluster.ranks)
        if self.speeds and self.speeds.processors < self.hosts * self.slots:
            processors = self.speeds.processors * cluster.ranks / (self.hosts * self.slots)
        return replace(
            cluster,
            accelerator=accelerator,
            inside=self.inside or cluster.inside,
            across=self.across or cluster.across,
            processors=processors,
            memory_limit=self.speeds.memory_bytes if self.speeds else cluster.memory_limit,
            start_seconds=cluster.start_seconds if self.start_seconds is None else self.start_seconds,
        )

    def as_json(self) -> dict[str, Any]:
        """For a file."""
        content: dict[str, Any] = {"hosts": [{"ranks": self.slots}] * self.hosts}
        for name, link in (("inside", self.inside), ("across", self.across)):
            content[name] = None if link is None else {"bandwidth": link.bandwidth, "latency": link.latency}
        content["start_seconds"] = self.start_seconds
        content["speeds"] = None if self.speeds is None else dict(vars(self.speeds))
        return content


def read_machine(path: str | Path) -> Machine:
    """What a file of ``plan --calibrate`` or of ``check --json`` says.

    Raises:
        TopologyError: no such file, no JSON, or none of these.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise TopologyError(f"machine file {str(path)!r} cannot be read: {error}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise TopologyError(f"machine file {str(path)!r} is not JSON: {error}") from error
    try:
        return machine_from_json(content)
    except TopologyError as error:
        raise TopologyError(f"machine file {str(path)!r}: {error}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TopologyError(
            f"machine file {str(path)!r} is neither of `ds-topo plan --calibrate` nor of `ds-topo check --json`: "
            f"{error!r}"
        ) from error


def machine_from_json(content: Mapping[str, Any]) -> Machine:
    """The inverse of ``Machine.as_json``; also reads the summary of ``check``.

    >>> machine_from_json({"hosts": [{"ranks": [0, 1]}], "inside": {"bandwidth": 1e9, "latency": 1e-4}}).slots
    2

    Raises:
        TopologyError: a measurement that cannot be one.
        KeyError, TypeError, ValueError: something else than such a file.
    """
    hosts = content["hosts"]
    if not hosts:
        raise ValueError("no hosts")
    ranks = hosts[0]["ranks"]
    links: dict[str, Link | None] = {}
    for name in ("inside", "across"):
        link = content.get(name)
        links[name] = _link(name, link) if link else None
    speeds = content.get("speeds")
    if speeds:
        forward, backward = speeds["attention_flops"]
        length, width = speeds.get("attention_half", (0.0, 0.0))
        pairs = {"attention_flops": (float(forward), float(backward)), "attention_half": (float(length), float(width))}
        speeds = Speeds(**{**speeds, **pairs})
        _check_speeds(speeds)
    elif links["inside"] is None and links["across"] is None:
        raise ValueError("no links and no speeds")
    start = content.get("start_seconds")
    if start is not None:
        _check_positive("start_seconds", start, or_zero=True)
    return Machine(
        len(hosts),
        ranks if isinstance(ranks, int) else len(ranks),
        speeds or None,
        links["inside"],
        links["across"],
        start,
    )


def _link(name: str, content: Mapping[str, Any]) -> Link:
    bandwidth, latency = float(content["bandwidth"]), float(content["latency"])
    _check_positive(f"bandwidth of {name!r}", bandwidth)
    _check_positive(f"latency of {name!r}", latency, or_zero=True)
    return Link(bandwidth, latency)


def _check_speeds(speeds: Speeds) -> None:
    forward, backward = speeds.attention_flops
    rates = {
        **{f"product_flops of {name}": flops for name, flops in speeds.product_flops.items()},
        "product_flops": max(speeds.product_flops.values(), default=0.0),
        "attention_flops": min(forward, backward),
        **{name: getattr(speeds, name) for name in ("memory_bandwidth", "memory_bytes", "processors", "block_share")},
    }
    for name, value in rates.items():
        _check_positive(name, value)
    for name in ("depth", "kernel_seconds", "update_bytes"):
        _check_positive(name, getattr(speeds, name), or_zero=True)


def _check_positive(name: str, value: float, *, or_zero: bool = False) -> None:
    if not (0 < value < inf or (or_zero and value == 0)):
        raise TopologyError(f"{name} is {value!r}; it must be {'zero or ' if or_zero else ''}a positive number")
