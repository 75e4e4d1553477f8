"""Explain a difference: which combination of the tensors that were recorded gives the wrong value.

A wrong gradient is often a simple combination of right ones: its own without the others' (not reduced), their sum
without the divisor, the mean of a wrong group. So the wrong tensor is fitted by least squares, and the weights tell.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from ds_topo.topology.axes import DATA, MODEL, PIPE
from ds_topo.verification.records import Step, distance, masked, peers, ratio, sum_of

_CLOSE = 0.02
"""The greatest relative error of an explanation."""


class Cause(NamedTuple):
    """A likely cause."""

    text: str
    axis: str | None = None


def explain(kind: str, name: str, bad: Sequence[int], found: Step, reference: Step) -> list[Cause]:
    """Return likely causes of a difference, the likeliest first."""
    finders = {
        "output": _of_output,
        "loss": _of_loss,
        "gradient": _of_gradient,
        "reduced gradient": _of_reduced,
        "norm": _of_norm,
        "skipped step": _of_skipped,
    }
    find = finders.get(kind, _of_update)
    return list(find(name, bad, found, reference))


def _of_output(name: str, bad: Sequence[int], found: Step, reference: Step) -> Iterator[Cause]:
    rank = bad[0]
    share = found.run.about[rank]["share"]
    own, whole = found.ranks[rank]["outputs"][name].double(), reference.ranks[share]["outputs"][name].double()
    peers_of_slice = [
        other
        for other in found.holders("outputs", name)
        if found.run.about[other]["share"] == share and found.coordinates_differ(rank, other) <= {MODEL}
    ]
    if own.shape == whole.shape:
        together = [found.ranks[other]["outputs"][name].double() for other in peers_of_slice]
        if len(together) > 1 and _is_sum(torch.stack(together).sum(0), whole):
            yield Cause("not reduced: the values of the ranks along 'model' add up to the right one", MODEL)
        yield from _factor(own, whole, found, "reduced twice, or a sum that should be a mean, or the reverse")
        for other in range(reference.run.shares):
            there = reference.ranks[other]["outputs"].get(name)
            if other != share and there is not None and there.shape == own.shape and distance(own, there) < _CLOSE:
                yield Cause(f"these ranks worked on the samples of share {other} instead of {share}", DATA)
        if found.ranks[rank]["is_random"]:
            yield Cause("different random state: the forward pass draws random numbers")
    else:
        yield Cause("no arrangement of slices gives the reference's values: a slice at a wrong place, or wrong inputs")
    yield Cause("the module itself: its inputs are right, since everything before it is")


def _is_sum(total: torch.Tensor, whole: torch.Tensor) -> bool:
    """Tell whether a sum is the whole, or has counted a bias several times."""
    extra = total - whole
    if whole.dim() > 1 and whole[..., 0].numel() > 1:
        extra = extra - extra.flatten(0, -2).mean(0)
    return distance(whole + extra, whole) < _CLOSE


def _of_loss(_: str, bad: Sequence[int], found: Step, reference: Step) -> Iterator[Cause]:
    rank = bad[0]
    own, expected = found.ranks[rank]["losses"], reference.ranks[found.run.about[rank]["share"]]["losses"]
    if len(own) != len(expected):
        yield Cause(f"lost micro-batch: {len(own)} losses in this step instead of {len(expected)}")
        return
    yield from _factor(torch.tensor(own), torch.tensor(expected), found, "averaged over the wrong number of ranks")
    yield Cause("the loss function: all recorded outputs are right")


def _of_gradient(name: str, bad: Sequence[int], found: Step, reference: Step) -> Iterator[Cause]:
    rank = bad[0]
    share = found.run.about[rank]["share"]
    ranks = next(group for group in peers(found, name) if rank in group)
    part = found.ranks[rank]["before"][name]
    own, whole = _flat(masked(part, sum_of(found, ranks, name))), _flat(masked(part, reference.before(share, name)))
    arrived = found.ranks[rank]["arrivals"].get(name, 0)
    usual = reference.ranks[share]["arrivals"].get(name, 0)
    if arrived < usual:
        yield Cause(f"lost micro-batch: gradients arrived {arrived} times in this step instead of {usual}")
    if not own.any():
        yield Cause("no gradient: the backward pass does not reach this parameter")
    same_place = [
        group
        for group in peers(found, name)
        if found.run.about[group[0]]["share"] == share and _places(found, group[0], name) == _places(found, rank, name)
    ]
    if len(same_place) > 1:
        total = sum((_flat(masked(part, sum_of(found, group, name))) for group in same_place), torch.zeros_like(own))
        if distance(total, whole) < _CLOSE:
            yield Cause("not reduced: each rank along 'model' has its own part of this gradient; sum them", MODEL)
    yield from _factor(own, whole, found, "counted more than once, or divided twice, in the backward pass")
    for other in range(reference.run.shares):
        if other != share and distance(own, _flat(masked(part, reference.before(other, name)))) < _CLOSE:
            yield Cause(f"these ranks worked on the samples of share {other} instead of {share}", DATA)
    yield Cause("the backward pass of the module that owns it, or of one after it")


def _of_reduced(name: str, bad: Sequence[int], found: Step, reference: Step) -> Iterator[Cause]:
    rank = bad[0]
    part = found.after(rank, name, found.clipping(rank, reference.sums)[0])
    own = _flat(part)
    basis, owners = [], []
    for other in found.holders("before", name):
        if not found.coordinates_differ(rank, other) & {MODEL} or _places(found, other, name) == _places(
            found, rank, name
        ):
            basis.append(_flat(masked(part, found.before(other, name))))
            owners.append(other)
    expected = _flat(masked(part, reference.sums[name]))
    if not own.any():
        yield Cause("no gradient reached the optimizer")
    if basis and (weights := _weights(own, basis)) is not None:
        yield from _of_weights(weights, owners, rank, found)
    yield from _factor(own, expected, found, "reduced twice, or a sum that should be a mean, or the reverse")
    yield Cause("the reduction: all gradients before it are right")


def _weights(own: torch.Tensor, basis: Sequence[torch.Tensor]) -> list[float] | None:
    """Return the combination of ``basis`` that is ``own``; None if there is none."""
    matrix = torch.stack(list(basis), 1)
    solution = torch.linalg.lstsq(matrix, own.unsqueeze(1), driver="gelsd", rcond=1e-5).solution
    if distance((matrix @ solution).squeeze(1), own) > _CLOSE:
        return None
    return [float(one) for one in solution.squeeze(1)]


def _of_weights(weights: Sequence[float], owners: Sequence[int], rank: int, found: Step) -> Iterator[Cause]:
    """Explain by how much the gradient of each rank counts."""
    shares, coordinate = found.run.shares, found.run.coordinate(rank)
    by_stage = _summed(weights, [found.run.coordinate(owner).get(PIPE, 0) for owner in owners])
    own_stage = coordinate.get(PIPE, 0)
    if len(by_stage) > 1 and all(abs(one) < 0.05 for stage, one in by_stage.items() if stage != own_stage):
        yield Cause("not reduced: a tied weight without the gradients of its other stages", PIPE)
    by_slice = _summed(weights, [found.run.coordinate(owner).get(MODEL, 0) for owner in owners])
    by_share = _summed(weights, [found.run.about[owner]["share"] for owner in owners])
    total = sum(by_share.values()) / max(1, len(by_stage))
    text = ", ".join(f"share {share}: {weight:.3g}" for share, weight in sorted(by_share.items()))
    right = f"each share counts {1 / shares:.3g} if averaged"
    missing = [share for share, weight in by_share.items() if abs(weight) < 0.05 / shares]
    own_share = found.run.about[rank]["share"]
    if shares > 1 and missing and len(missing) == shares - 1 and own_share not in missing:
        yield Cause(f"not reduced over the replicas ({text}; {right})", DATA)
    elif shares > 1 and missing:
        yield Cause(f"averaged over the wrong group ({text}; {right})", DATA)
    elif shares > 1 and abs(total - 1 / shares) < 0.05 / shares and len(by_share) == shares:
        yield Cause(f"divided by the number of replicas twice ({text}; {right})", DATA)
    elif shares > 1 and abs(total - shares) < 0.05 * shares:
        yield Cause(f"summed over the replicas without a division ({text}; {right})", DATA)
    elif shares > 1 and len({round(weight, 2) for weight in by_share.values()}) > 1:
        yield Cause(f"replicas count unequally: averaged over the wrong group ({text}; {right})", DATA)
    if len(by_slice) > 1 and abs(total - 1) > 0.05 and not missing:
        yield Cause("replicated along 'model': its gradient was reduced there too often, or not at all", MODEL)


def _summed(values: Iterable[float], keys: Iterable[int]) -> dict[int, float]:
    found: dict[int, float] = {}
    for value, key in zip(values, keys, strict=True):
        found[key] = found.get(key, 0.0) + value
    return found


def _of_norm(_: str, bad: Sequence[int], found: Step, reference: Step) -> Iterator[Cause]:
    """Find which tensors a norm leaves out, or counts several times."""
    own = (found.clipping(bad[0], reference.sums)[1] or 0.0) ** 2
    squares = {name: float(value.double().square().sum()) for name, value in reference.sums.items()}
    total = sum(squares.values())

    def is_close(square: float) -> bool:
        return square > 0 and abs(own - square) < _CLOSE * abs(square - total)

    by_stage: dict[int, float] = {}
    by_slice: dict[int, float] = {}
    replicated = tied = 0.0
    for name, value in reference.sums.items():
        holders = found.holders("before", name)
        stages = {found.run.coordinate(rank).get(PIPE, 0) for rank in holders}
        places = {_places(found, rank, name) for rank in holders}
        for stage in stages:
            by_stage[stage] = by_stage.get(stage, 0.0) + squares[name] / len(stages)
        tied += squares[name] * (len(stages) - 1)
        if len(places) == 1:
            replicated += squares[name]
        else:
            for rank in {found.run.coordinate(rank).get(MODEL, 0): rank for rank in holders}.values():
                part = masked(found.ranks[rank]["before"][name], value)
                place = found.run.coordinate(rank).get(MODEL, 0)
                by_slice[place] = by_slice.get(place, 0.0) + float(_flat(part).double().square().sum())
    slices, split = found.degree(MODEL), sum(by_slice.values())
    for left in _one_or_all_but_one(by_slice):
        without = sum(by_slice[place] for place in left)
        if is_close(total - without):
            yield Cause(f"the norm leaves out the slices {left} of parameters that are split", MODEL)
        if is_close(total - without + replicated * (slices - 1)):
            yield Cause(f"the norm leaves out the slices {left}, and counts replicated parameters on each", MODEL)
    for left in _one_or_all_but_one(by_stage):
        if is_close(total - sum(by_stage[stage] for stage in left)):
            yield Cause(f"the norm leaves out the stages {left}", PIPE)
    if slices > 1 and is_close(total + replicated * (slices - 1)):
        yield Cause("counted twice in the norm: parameters that are replicated along 'model'", MODEL)
    if slices > 1 and is_close(split):
        yield Cause("the norm leaves out all parameters that are replicated along 'model'", MODEL)
    if tied and is_close(total + tied):
        yield Cause("counted twice in the norm: a tied weight, on each of its stages", PIPE)
    for axis in (DATA, MODEL, PIPE):
        size = found.degree(axis)
        for power in (1.0, 0.5, -1.0, -0.5):
            if size > 1 and is_close(total * size ** (2 * power)):
                how = "times" if power > 0 else "divided by"
                root = "the root of " if abs(power) == 0.5 else ""
                yield Cause(f"the norm is the right one {how} {root}the degree of {axis!r}, {size}", axis)
    if abs(own - total * norm_scale(found) ** 2) < _CLOSE * total * norm_scale(found) ** 2 and norm_scale(found) != 1:
        yield Cause("the norm is that of scaled gradients: it was not divided by the loss scale")
    for name, square in squares.items():
        if is_close(total - square):
            yield Cause(f"the norm leaves out {name!r}")
        elif is_close(total + square):
            yield Cause(f"counted twice in the norm: {name!r}")
    yield Cause("the norm: all gradients are right")


def _one_or_all_but_one(parts: Iterable[int]) -> list[list[int]]:
    """Return the sets of parts that a faulty norm may leave out: a single one, or all but one.

    >>> _one_or_all_but_one([0, 1]), _one_or_all_but_one([0, 1, 2])
    ([[0], [1]], [[0], [1], [2], [1, 2], [0, 2], [0, 1]])
    """
    everything = list(parts)
    singles = [[one] for one in everything] if len(everything) > 1 else []
    return singles + [[other for other in everything if other != one] for one in everything if len(everything) > 2]


def norm_scale(found: Step) -> float:
    """Return the loss scale of a step."""
    return float(found.ranks[0]["scale"])


def _of_skipped(_: str, bad: Sequence[int], found: Step, reference: Step) -> Iterator[Cause]:
    skipped = [rank for rank, record in enumerate(found.ranks) if record["is_skipped"]]
    if 0 < len(skipped) < len(found.ranks):
        yield Cause(f"ranks {skipped} alone skipped the step: their overflow was not reported to the others")
    elif skipped:
        yield Cause("the layout skipped a step after an overflow, and the reference did not")
    else:
        yield Cause("the layout took a step that overflows")


def _of_update(name: str, bad: Sequence[int], found: Step, reference: Step) -> Iterator[Cause]:
    rank = bad[0]
    if name in found.ranks[rank]["weights"]:
        part = found.ranks[rank]["weights"][name]
        before = _flat(masked(part, found.previous[name]))
        after, start = _flat(part), before
        expected = _flat(masked(part, reference.whole_weights[name]))
        if torch.equal(after, before) and not torch.equal(expected, before):
            yield Cause("stale: these ranks did not get the updated weight")
        else:
            yield from _factor(after - start, expected - start, found, "another learning rate or divisor")
    rates = [found.ranks[rank]["rates"], reference.ranks[0]["rates"]]
    if rates[0] and rates[1] and not math.isclose(rates[0][0], rates[1][0], rel_tol=1e-9):
        yield Cause(f"the learning rate is {rates[0][0]:g} instead of {rates[1][0]:g}")
    yield Cause("the optimizer's step, or the exchange of weights after it: all gradients are right")


def _factor(own: torch.Tensor, expected: torch.Tensor, found: Step, what: str) -> Iterator[Cause]:
    """Explain a tensor that is the right one times a number."""
    own, expected = own.double().reshape(-1), expected.double().reshape(-1)
    square = float(expected.square().sum())
    if not square:
        return
    factor = float(own @ expected) / square
    if abs(factor - 1) < _CLOSE or ratio(float((own - factor * expected).square().sum()), factor**2 * square) > _CLOSE:
        return
    degrees = {axis: found.degree(axis) for axis in found.run.coordinate(0)}
    for power, text in ((1, ""), (-1, "1/"), (2, "the square of "), (-2, "1/ the square of ")):
        axes = [
            axis for axis, size in degrees.items() if size > 1 and math.isclose(factor, size**power, rel_tol=_CLOSE)
        ]
        if axes:
            names = " or ".join(map(repr, axes))
            axis = axes[0] if len(axes) == 1 else None
            yield Cause(f"it is the right value times {factor:.3g}, {text}the degree of {names}: {what}", axis)
            return
    yield Cause(f"it is the right value times {factor:.3g}: {what}")


def _flat(part: tuple[tuple[int, ...], list[tuple[tuple[int, ...], torch.Tensor]]]) -> torch.Tensor:
    return torch.cat([values.double().reshape(-1) for _, values in part[1]] or [torch.empty(0, dtype=torch.float64)])


def _places(found: Step, rank: int, name: str) -> tuple[tuple[int, ...], ...]:
    """Return where in the whole parameter a rank's slice is."""
    return tuple(offsets for offsets, _ in found.ranks[rank]["before"].get(name, ((), []))[1])
