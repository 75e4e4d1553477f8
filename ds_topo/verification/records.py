"""Read recorded runs, and assemble whole tensors from the parts of their ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ds_topo.topology.axes import MODEL, SEQ
from ds_topo.verification.recorder import Part, box_of, whole_tensors


class Run:
    """A recorded run of all ranks; a reference has started with the weights of the ``wanted`` run."""

    def __init__(self, folder: Path, wanted: Run | None = None) -> None:
        self._wanted = wanted
        count = len(list(folder.glob("rank_*/start.pt")))
        self.folders = [folder / f"rank_{rank}" for rank in range(count)]
        starts = [torch.load(one / "start.pt", mmap=True) for one in self.folders]
        self.about: list[Mapping[str, Any]] = [one["about"] for one in starts]
        self.starts = [one.get("weights", {}) for one in starts]
        self.digests = {name: digest for one in starts for name, digest in one.get("digests", {}).items()}
        """Of the weights that a reference would have started with."""
        self.replicas = [one["replicas"] for one in starts]
        self.shares = int(self.about[0]["shares"])
        self.steps = min(len(list(one.glob("step_*.pt"))) for one in self.folders)

    @cached_property
    def start(self) -> dict[str, torch.Tensor]:
        """The whole first weights."""
        return whole_tensors(self.starts) if self._wanted is None else self._wanted.start

    def step(self, number: int) -> Step:
        """Return the records of one step."""
        return Step(self, number, [torch.load(one / f"step_{number}.pt", mmap=True) for one in self.folders])

    def coordinate(self, rank: int) -> Mapping[str, int]:
        """Return the coordinate of a rank."""
        found: Mapping[str, int] = self.about[rank]["coordinate"]
        return found


class Step:
    """The records of all ranks in one step."""

    def __init__(self, run: Run, number: int, ranks: list[dict[str, Any]]) -> None:
        self.run, self.number, self.ranks = run, number, ranks

    def holders(self, kind: str, name: str) -> list[int]:
        """Return the ranks that have recorded a tensor."""
        return [rank for rank, record in enumerate(self.ranks) if name in record[kind]]

    @cached_property
    def sums(self) -> dict[str, torch.Tensor]:
        """The mean, over the shares of the samples, of whole gradients before reduction."""
        found: dict[str, torch.Tensor] = {}
        for record in self.ranks:
            for name, (shape, boxes) in record["before"].items():
                total = found.setdefault(name, torch.zeros(shape))
                for offsets, values in boxes:
                    box_of(total, offsets, values).add_(values, alpha=1 / record["scale"] / self.run.shares)
        return found

    @cached_property
    def whole_weights(self) -> dict[str, torch.Tensor]:
        """The whole weights after the step."""
        return whole_tensors(record["weights"] for record in self.ranks)

    @cached_property
    def previous(self) -> dict[str, torch.Tensor]:
        """The whole weights before the step."""
        return self.run.start if self.number == 0 else self.run.step(self.number - 1).whole_weights

    def coordinates_differ(self, rank: int, other: int) -> set[str]:
        """Return the axes along which two ranks have different coordinates."""
        here, there = self.run.coordinate(rank), self.run.coordinate(other)
        return {axis for axis in here if here[axis] != there[axis]}

    def degree(self, axis: str) -> int:
        """Return the degree of an axis."""
        return 1 + max(self.run.coordinate(rank).get(axis, 0) for rank in range(len(self.ranks)))

    def before(self, rank: int, name: str) -> torch.Tensor:
        """Return a rank's gradient before reduction at its place in the whole, zeros elsewhere."""
        record = self.ranks[rank]
        whole = whole_tensors([{name: record["before"][name]}])[name].float()
        return whole / float(record["scale"])

    def clipping(self, rank: int, expected: Mapping[str, torch.Tensor]) -> tuple[float, float | None]:
        """Return the factor by which a rank's gradients were clipped, and the norm that it reports or clips by.

        DeepSpeed clips by the norm of scaled or of unscaled gradients, and does not report every norm. The factor is
        the median over all parameters, so that one wrong gradient does not change it.
        """
        record = self.ranks[rank]
        factors = []
        for name, part in record["after"].items():
            own, there = _square(part), _square(masked(part, expected[name])) if name in expected else 0.0
            if own > 0 and there > 0 and math.isfinite(own):
                factors.append(math.sqrt(own / there))
        found = median(factors) if factors else 1.0
        clip, scale, norm = record["clip"], record["scale"], record["norm"]
        right = math.sqrt(sum(float(one.double().square().sum()) for one in expected.values()))
        if not norm and 0 < clip < right and factors:
            return found, clip / found
        reasons = [
            1.0,
            *(clip / (each + 1e-6) for each in {norm or right, (norm or right) / scale} if 0 < clip < each < math.inf),
        ]
        return min(reasons, key=lambda reason: abs(math.log(found / reason))), norm

    def after(self, rank: int, name: str, factor: float) -> Part:
        """Return a rank's part of a gradient after reduction, before clipping by ``factor``."""
        shape, boxes = self.ranks[rank]["after"][name]
        return shape, [(offsets, values.float() / factor) for offsets, values in boxes]


def _square(part: Part) -> float:
    return sum(float(values.double().square().sum()) for _, values in part[1])


def peers(found: Step, name: str) -> list[list[int]]:
    """Return the ranks whose gradients before reduction are parts of one: stages that share it, and the axis seq."""
    groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for rank in found.holders("before", name):
        about = found.run.about[rank]
        groups[about["share"], about["coordinate"].get(MODEL, 0)].append(rank)
    return list(groups.values())


def sum_of(found: Step, ranks: Iterable[int], name: str) -> torch.Tensor:
    """Return the gradient of peers at its place in the whole: the sum over stages, and the mean over ``seq``."""
    total, seq = torch.empty(0), set()
    for number, rank in enumerate(ranks):
        own = found.before(rank, name)
        total = own if number == 0 else total + own
        seq.add(found.run.coordinate(rank).get(SEQ, 0))
    return total / max(1, len(seq))


def masked(part: Part, whole: torch.Tensor) -> Part:
    """Return the values of a whole tensor at the places of a part."""
    return part[0], [(offsets, box_of(whole, offsets, values)) for offsets, values in part[1]]


# -- errors ------------------------------------------------------------------------------------------------------------


def error_of(part: Part, whole: torch.Tensor, least: float = 0.0) -> float:
    """Return the relative error of a rank's part of a tensor; ``least`` is the smallest norm of an element."""
    own = reference = 0.0
    numel = 0
    for offsets, values in part[1]:
        there = box_of(whole, offsets, values).double()
        own += float((values.double() - there).square().sum())
        reference += float(there.square().sum())
        numel += values.numel()
    typical = float(whole.double().square().mean()) if whole.numel() else 0.0
    return ratio(own, max(reference, numel * typical, numel * least**2))


def ratio(own: float, reference: float) -> float:
    if math.isnan(own) or math.isinf(own):
        return math.inf
    return math.sqrt(own / reference) if reference > 0 else math.inf if own > 0 else 0.0


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    found, expected = found.double(), expected.double()
    return ratio(float((found - expected).square().sum()), float(expected.square().sum()))
