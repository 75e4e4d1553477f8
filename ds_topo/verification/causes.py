"""Explain a difference: which combination of the tensors that were recorded gives the wrong value.

A wrong gradient is often a simple combination of right ones: its own without the others' (not reduced), their sum
without the divisor, the mean of a wrong group. So the wrong tensor is fitted by least squares, and the weights tell.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import combinations
from typing import NamedTuple, TypeVar

import torch

from ds_topo.topology.axes import DATA, MODEL, PIPE, SEQ
from ds_topo.verification.recorder import (
    MASTER,
    WEIGHT,
    RecordedStep,
    at,
    distance,
    flat,
    places,
    ratio,
    square,
    whole_tensors,
)

_Key = TypeVar("_Key")
_CLOSE = 0.02
"""The greatest relative error of an explanation."""


class Cause(NamedTuple):
    """A likely cause."""

    text: str
    axis: str | None = None


def explain(
    kind: str, name: str, rank: int, found: RecordedStep, reference: RecordedStep, wrong: Collection[str]
) -> list[Cause]:
    """Return likely causes of a difference on a rank, the likeliest first; ``wrong`` has all names of its kind."""
    finders: dict[str, Callable[..., Iterator[Cause]]] = {
        "output": _of_output,
        "loss": _of_loss,
        "norm": _of_norm,
        "skipped step": _of_skipped,
        "gradient": partial(_of_gradient, wrong),
        "reduced gradient": partial(_of_reduced, wrong),
    }
    return list(finders.get(kind, partial(_of_update, kind))(name, rank, found, reference))


def _of_output(name: str, rank: int, found: RecordedStep, reference: RecordedStep) -> Iterator[Cause]:
    run, share = found.run, found.run.share_of[rank]
    own, whole = found.ranks[rank]["outputs"][name].double(), reference.ranks[share]["outputs"][name].double()
    if own.shape == whole.shape:
        together = [
            found.ranks[other]["outputs"][name].double()
            for other in found.holders("outputs", name)
            if run.share_of[other] == share and run.axes_between(rank, other) <= {MODEL}
        ]
        if len(together) > 1 and _is_sum(torch.stack(together).sum(0), whole):
            yield Cause("not reduced: the values of the ranks along 'model' add up to the right one", MODEL)
        yield from _factor(own, whole, found, "reduced twice, or a sum that should be a mean, or the reverse")
        for other in range(reference.run.shares):
            there = reference.ranks[other]["outputs"].get(name)
            if other != share and there is not None and there.shape == own.shape and distance(own, there) < _CLOSE:
                yield Cause(f"these ranks worked on the samples of share {other} instead of {share}", DATA)
    else:
        yield Cause("no arrangement of slices gives the reference's values: a slice at a wrong place, or wrong inputs")
    if run.about[rank]["zero"] == 3:
        yield Cause("the weights that ZeRO 3 has gathered for it: the groups over which it partitions")
    order = [other for other in reference.ranks[share]["outputs"] if other in found.ranks[rank]["outputs"]]
    before = f", or the code since `{order[order.index(name) - 1]}`" if order.index(name) else ""
    changed = ", or its weights, if they were changed or loaded after the last step" if found.number else ""
    times = _in_words(own, whole, found) if own.shape == whole.shape else ""
    yield Cause(f"the module itself{before}{changed}: everything that was recorded before it is right{times}")


def _is_sum(total: torch.Tensor, whole: torch.Tensor) -> bool:
    """Tell whether a sum is the whole, or has counted a bias several times."""
    extra = total - whole
    if whole.dim() > 1 and whole[..., 0].numel() > 1:
        extra = extra - extra.flatten(0, -2).mean(0)
    return distance(whole + extra, whole) < _CLOSE


def _of_loss(_: str, rank: int, found: RecordedStep, reference: RecordedStep) -> Iterator[Cause]:
    own, expected = found.ranks[rank]["losses"], reference.ranks[found.run.share_of[rank]]["losses"]
    if len(own) != len(expected):
        what = "lost micro-batch" if len(own) < len(expected) else "more micro-batches"
        yield Cause(
            f"{what}: {len(own)} losses in this step instead of {len(expected)}; DeepSpeed computes their number from "
            "train_batch_size and the number of replicas"
        )
        return
    right = torch.tensor(expected)
    alternatives = [torch.tensor(own)]
    if (total := losses_over_seq(rank, found)) is not None:  # each rank may have its part of a sum or of a mean
        alternatives = [torch.tensor(total), torch.tensor(total) / found.run.degree(SEQ)]
    nearest = min(alternatives, key=lambda losses: abs(math.log(max(_times(losses, right) or math.inf, 1e-9))))
    yield from _factor(nearest, right, found, "averaged over the wrong number of ranks")
    errors = [abs(mine - theirs) for mine, theirs in zip(own, expected, strict=True)]
    wrong = [number for number, error in enumerate(errors) if error > _CLOSE * max(errors)]
    for number in wrong:
        for other, loss in enumerate(expected):
            if abs(own[number] - loss) < _CLOSE * errors[number]:
                yield Cause(f"other samples: micro-batch {number + 1} has the loss of micro-batch {other + 1}")
                break
    if 0 not in wrong:
        numbers = ", ".join(str(number + 1) for number in wrong)
        yield Cause(f"other samples in micro-batch {numbers}: the first one, in which outputs are recorded, is right")
    else:
        yield Cause("the loss function, or other labels: all recorded outputs are right")


def losses_over_seq(rank: int, found: RecordedStep) -> list[float] | None:
    """Return the sums of the losses of ranks that differ only in ``seq``; None without that axis."""
    peers = [other for other in range(len(found.ranks)) if found.run.axes_between(rank, other) <= {SEQ}]
    each = [found.ranks[other]["losses"] for other in peers]
    return [math.fsum(losses) for losses in zip(*each, strict=False)] if len(peers) > 1 else None


def _of_gradient(
    wrong: Collection[str], name: str, rank: int, found: RecordedStep, reference: RecordedStep
) -> Iterator[Cause]:
    share, part = found.run.share_of[rank], found.ranks[rank]["before"][name]
    groups = [group for group in found.peers(name) if found.run.share_of[group[0]] == share]
    ranks = next(group for group in groups if rank in group)
    own, whole = at(part, found.before(ranks, name)), at(part, reference.before([share], name))
    if not own.any():
        yield Cause("no gradient: the backward pass does not reach this parameter")
    same_place = [group for group in groups if _places(found, group[0], name) == places(part)]
    if len(same_place) > 1:
        total = torch.stack([at(part, found.before(group, name)) for group in same_place]).sum(0)
        if distance(total, whole) < _CLOSE:
            yield Cause("not reduced: each rank along 'model' has its own part of this gradient; sum them", MODEL)
    yield from _factor(own, whole, found, "counted more than once, or divided twice, in the backward pass")
    held = found.ranks[rank]["before"].keys()
    if len(held & set(wrong)) > 0.9 * len(held):  # gradients without a meaning, such as those of key biases, are right
        yield Cause(
            "nearly all gradients of these ranks are wrong, and the losses are right: a micro-batch is lost or counts "
            "twice, or a factor is between the loss and its gradient"
        )
    yield Cause(f"the backward pass of the module that owns it, or of one after it{_in_words(own, whole, found)}")


def _of_reduced(
    wrong: Collection[str], name: str, rank: int, found: RecordedStep, reference: RecordedStep
) -> Iterator[Cause]:
    run, part = found.run, found.ranks[rank]["after"][name]
    own = flat(part) / found.clipping(rank, reference)[0]
    if not own.any():
        yield Cause("no gradient reached the optimizer")
    owners = [
        other
        for other in found.holders("before", name)
        if MODEL not in run.axes_between(rank, other) or _places(found, other, name) == _places(found, rank, name)
    ]
    expected = at(part, reference.sums[name])
    if (cause := _of_losses_over_seq(rank, _times(own, expected), found, reference)) is not None:
        yield cause
    weights = _weights(own, [at(part, found.before([other], name)) for other in owners])
    if weights is not None:
        causes = list(_of_weights(weights, owners, rank, found))
        others = [other for other in reference.sums if other not in wrong and other in found.ranks[rank]["after"]]
        if any(_is_split(found, other) for other in others):  # so the reduction over the replicas works
            causes.sort(key=lambda cause: cause.axis != MODEL)
        yield from causes
    unused = {MODEL} if _is_split(found, name) else set()
    if len({run.coordinates[owner].get(PIPE, 0) for owner in owners}) < 2:
        unused.add(PIPE)
    yield from _factor(own, expected, found, "reduced twice, or a sum that should be a mean, or the reverse", unused)
    if owners and weights is None and own.any():
        yield Cause(
            "no combination of the ranks' gradients gives it: a micro-batch was not accumulated on a rank, or a "
            "gradient changed after it was accumulated"
        )
    clip, wholes = found.ranks[rank]["clip"], whole_tensors(record["after"] for record in found.ranks)
    norm = math.sqrt(sum(square(wholes[other]) for other in reference.sums if other in wholes))
    if 0 < clip < norm / (1 + _CLOSE) and found.ranks[rank]["clipped"] is not None:
        yield Cause(f"clipping: the optimizer gets {norm / clip:.3g} times the norm that gradient_clipping allows")
    yield Cause(f"the reduction: all gradients before it are right{_in_words(own, expected, found)}")


def _of_losses_over_seq(rank: int, factor: float | None, found: RecordedStep, reference: RecordedStep) -> Cause | None:
    """Explain gradients that are too large or too small by a factor that the losses along ``seq`` have, too."""
    total, right = losses_over_seq(rank, found), reference.ranks[found.run.share_of[rank]]["losses"]
    if factor is None or not total or len(total) != len(right):
        return None
    of_losses, size = math.fsum(total) / math.fsum(right) if math.fsum(right) else 0.0, found.run.degree(SEQ)
    times = next((each for each in (size, 1 / size) if math.isclose(factor, each, rel_tol=_CLOSE)), None)
    if times is None or not math.isclose(times, of_losses, rel_tol=_CLOSE):
        return None
    return Cause(
        f"the losses along 'seq' add up to {times:.3g} times the right one ({size} is the degree of 'seq'), and so do "
        "the gradients: each rank must return its part of the loss, or the gradients must be averaged and not summed",
        SEQ,
    )


def _is_split(found: RecordedStep, name: str) -> bool:
    """Tell whether slices of a parameter are at different places."""
    return len({_places(found, rank, name) for rank in found.holders("before", name)}) > 1


def _weights(own: torch.Tensor, basis: Sequence[torch.Tensor]) -> list[float] | None:
    """Return the combination of ``basis`` that is ``own``; None if there is none."""
    if not basis:
        return None
    matrix = torch.stack(list(basis), 1)
    solution = torch.linalg.lstsq(matrix, own.unsqueeze(1), driver="gelsd", rcond=1e-5).solution
    if distance((matrix @ solution).squeeze(1), own) > _CLOSE:
        return None
    return [float(one) for one in solution.squeeze(1)]


def _of_weights(weights: Sequence[float], owners: Sequence[int], rank: int, found: RecordedStep) -> Iterator[Cause]:
    run = found.run
    shares, coordinate = run.shares, run.coordinates[rank]

    def along(axis: str) -> dict[int, float]:
        return _summed(weights, [run.coordinates[owner].get(axis, 0) for owner in owners])

    for axis in sorted(coordinate, key=lambda axis: axis != PIPE):
        index, by_index = coordinate[axis], along(axis)
        others = [abs(one) for other, one in by_index.items() if other != index]
        if others and max(others) < 0.05 * min(1.0, abs(by_index[index])):
            alone = f"not reduced along {axis!r}: only the gradients of ranks with {axis}={index} count"
            tied = "not reduced: a tied weight without the gradients of its other stages"
            yield Cause(tied if axis == PIPE else alone, axis)
            return
    by_share = _summed(weights, [run.share_of[owner] for owner in owners])
    total = sum(by_share.values()) / len(along(PIPE))
    listed = ", ".join(f"share {share}: {weight:.3g}" for share, weight in sorted(by_share.items()))
    text = f"({listed}; each share counts {1 / shares:.3g} if averaged)"
    is_uneven = len({round(weight, 2) for weight in by_share.values()}) > 1
    if shares > 1 and is_uneven:
        known = all(abs(weight) < _CLOSE or _is_of_degrees(weight * shares, found) for weight in by_share.values())
        what = ": averaged over the wrong group" if known else ", as if one had scaled its gradients"
        yield Cause(f"replicas count unequally{what} {text}", DATA)
    elif shares > 1 and abs(total - 1 / shares) < 0.05 / shares and len(by_share) == shares:
        yield Cause(f"divided by the number of replicas twice {text}", DATA)
    elif shares > 1 and abs(total - shares) < 0.05 * shares:
        yield Cause(f"summed over the replicas without a division {text}", DATA)
    if len(along(MODEL)) > 1 and abs(total - 1) > 0.05 and not is_uneven and _is_of_degrees(total, found):
        yield Cause("replicated along 'model': its gradient was reduced there too often, or not at all", MODEL)


def _summed(values: Iterable[float], keys: Iterable[_Key]) -> dict[_Key, float]:
    found: defaultdict[_Key, float] = defaultdict(float)
    for value, key in zip(values, keys, strict=True):
        found[key] += value
    return found


def _of_norm(_: str, rank: int, found: RecordedStep, reference: RecordedStep) -> Iterator[Cause]:
    """Find which tensors a norm leaves out, or counts several times: of all explanations the closest ones."""
    own = (found.clipping(rank, reference)[1] or 0.0) ** 2
    total = reference.norm**2
    noise = total * (1e-6 if found.run.about[rank]["dtype"] in ("float32", "float64") else 5e-3)
    close = [
        (max(noise, abs(own - wrong)), number, cause)
        for number, (wrong, cause) in enumerate(_norms(found, reference, total))
        if wrong > 0 and abs(own - wrong) < _CLOSE * abs(wrong - total)
    ]
    yield from (cause for _, _, cause in sorted(close, key=lambda one: one[:2])[:2])
    if not close and found.ranks[rank]["norm"] is None and own > 0:  # it was derived from clipped gradients
        yield Cause(
            f"clipping: the optimizer gets {math.sqrt(total / own):.3g} times the norm that gradient_clipping allows"
        )
    yield Cause("the norm: all gradients are right")


def _norms(found: RecordedStep, reference: RecordedStep, total: float) -> Iterator[tuple[float, Cause]]:
    """Yield the squares of wrong norms and their causes, the simplest first. ``total`` is the square of the right one.

    Where there are no slices or tied weights, causes that need them give the right norm, and so explain nothing.
    """
    coordinates = found.run.coordinates
    squares = {name: square(value) for name, value in reference.sums.items()}
    by_stage, by_slice = defaultdict[int, float](float), defaultdict[int, float](float)
    replicated = tied = 0.0
    for name, value in reference.sums.items():
        holders = found.holders("before", name)
        stages = {coordinates[rank].get(PIPE, 0) for rank in holders}
        for stage in stages:
            by_stage[stage] += squares[name] / len(stages)
        tied += squares[name] * (len(stages) - 1)
        if not _is_split(found, name):
            replicated += squares[name]
            continue
        for place, rank in {coordinates[rank].get(MODEL, 0): rank for rank in holders}.items():
            by_slice[place] += square(at(found.ranks[rank]["before"][name], value))
    repeated = replicated * (found.run.degree(MODEL) - 1)
    for left in _one_or_all_but_one(by_slice):
        rest, what = total - sum(by_slice[place] for place in left), f"the norm leaves out the slices {left}"
        yield rest, Cause(f"{what} of parameters that are split", MODEL)
        yield rest + repeated, Cause(f"{what}, and counts replicated parameters on each", MODEL)
    for left in _one_or_all_but_one(by_stage):
        yield total - sum(by_stage[stage] for stage in left), Cause(f"the norm leaves out the stages {left}", PIPE)
    yield total + repeated, Cause("counted twice in the norm: parameters that are replicated along 'model'", MODEL)
    yield sum(by_slice.values()), Cause("the norm leaves out all parameters that are replicated along 'model'", MODEL)
    yield total + tied, Cause("counted twice in the norm: a tied weight, on each of its stages", PIPE)
    degrees = {axis: found.run.degree(axis) for axis in coordinates[0]}
    for size in sorted(set(degrees.values()) - {1}):
        axes = [axis for axis, degree in degrees.items() if degree == size]
        names = " or ".join(map(repr, axes))
        for power in (1.0, 0.5, -1.0, -0.5):
            how = "times" if power > 0 else "divided by"
            root = "the root of " if abs(power) == 0.5 else ""
            text = f"the norm is the right one {how} {root}the degree of {names}, {size}"
            yield total * size ** (2 * power), Cause(text, axes[0] if len(axes) == 1 else None)
    scale = float(found.ranks[0]["scale"])
    yield total * scale**2, Cause("the norm is that of scaled gradients: it was not divided by the loss scale")
    families = _summed(squares.values(), (re.sub(r"\d+", "*", name) for name in squares))
    for name, own in {**squares, **families}.items():
        yield total - own, Cause(f"the norm leaves out {name!r}")
        yield total + own, Cause(f"counted twice in the norm: {name!r}")


def _one_or_all_but_one(parts: Iterable[int]) -> list[list[int]]:
    """Return the sets of parts that a faulty norm may leave out: a single one, or all but one.

    >>> _one_or_all_but_one([0, 1]), _one_or_all_but_one([0, 1, 2])
    ([[0], [1]], [[0], [1], [2], [1, 2], [0, 2], [0, 1]])
    """
    everything = list(parts)
    singles = [[one] for one in everything] if len(everything) > 1 else []
    return singles + [[other for other in everything if other != one] for one in everything if len(everything) > 2]


def _of_skipped(_: str, rank: int, found: RecordedStep, reference: RecordedStep) -> Iterator[Cause]:
    skipped = [other for other, record in enumerate(found.ranks) if record["is_skipped"]]
    if 0 < len(skipped) < len(found.ranks):
        yield Cause(f"ranks {skipped} alone skipped the step: their overflow was not reported to the others")
    elif skipped:
        yield Cause("the layout skipped a step after an overflow, and the reference did not")
    else:
        yield Cause("the layout took a step that overflows")


def _of_update(kind: str, name: str, rank: int, found: RecordedStep, reference: RecordedStep) -> Iterator[Cause]:
    rates = [found.ranks[rank]["rates"], reference.ranks[0]["rates"]]
    if rates[0] and rates[1] and not math.isclose(rates[0][0], rates[1][0], rel_tol=1e-9):
        yield Cause(f"the learning rate is {rates[0][0]:g} instead of {rates[1][0]:g}")
    states = found.ranks[rank]["states"]
    began_at_zero = kind in (WEIGHT, MASTER) and not found.run.start[name].any()
    if name in states.get(kind, {}) and not flat(states[kind][name]).any() and not began_at_zero:
        yield Cause(f"lost: {kind} is zero on these ranks")
    if (part := states.get(WEIGHT, {}).get(name)) is not None:
        before, after, expected = at(part, found.previous[name]), flat(part), at(part, reference.whole_weights[name])
        if torch.equal(after, before) and not torch.equal(expected, before):
            yield Cause("stale: these ranks did not get the updated weight")
        else:
            yield from _factor(after - before, expected - before, found, "another learning rate or divisor")
    yield Cause("the optimizer's step, or the exchange of weights after it: all gradients are right")


def _factor(
    own: torch.Tensor, expected: torch.Tensor, found: RecordedStep, what: str, unused: Collection[str] = ()
) -> Iterator[Cause]:
    """Explain a tensor that is the right one times a product of degrees, of axes that are not unused."""
    factor = _times(own, expected)
    if factor is None:
        return
    degrees = {axis: found.run.degree(axis) for axis in found.run.coordinates[0] if axis not in unused}
    wide = [axis for axis, size in degrees.items() if size > 1]
    powers = ((1, ""), (-1, "1/ "), (2, "the square of "), (-2, "1/ the square of "))
    for count in range(1, len(wide) + 1):
        sizes = {axes: math.prod(degrees[axis] for axis in axes) for axes in combinations(wide, count)}
        for power, text in powers if count == 1 else powers[:2]:
            near = [axes for axes, size in sizes.items() if math.isclose(factor, size**power, rel_tol=_CLOSE)]
            if near:
                of = "the degree of" if count == 1 else "the product of the degrees of"
                names = " or ".join(" and ".join(map(repr, axes)) for axes in near)
                axis = near[0][0] if near == [near[0][:1]] else None
                yield Cause(f"it is the right value times {factor:.3g}, {text}{of} {names}: {what}", axis)
                return


def _is_of_degrees(factor: float, found: RecordedStep) -> bool:
    """Tell whether a number is a product of degrees of the layout, or its reciprocal."""
    degrees = [found.run.degree(axis) for axis in found.run.coordinates[0]]
    products = {math.prod(some) for count in range(len(degrees) + 1) for some in combinations(degrees, count)}
    return any(math.isclose(factor, size**power, rel_tol=0.05) for size in products for power in (1, -1))


def _times(own: torch.Tensor, expected: torch.Tensor) -> float | None:
    """Return the number by which the right tensor was multiplied; None if it was not, or by 1."""
    own, expected = own.double().reshape(-1), expected.double().reshape(-1)
    size = square(expected)
    if not size:
        return None
    factor = float(own @ expected) / size
    if abs(factor - 1) < _CLOSE or ratio(square(own - factor * expected), factor**2 * size) > _CLOSE:
        return None
    return factor


def _in_words(own: torch.Tensor, expected: torch.Tensor, found: RecordedStep) -> str:
    """Return what a cause adds if a tensor is the right one times a number that is no product of degrees."""
    factor = _times(own, expected) if expected.numel() > 1 else None
    is_named = any(_factor(own, expected, found, ""))
    return "" if factor is None or is_named else f"; it is the right value times {factor:.3g}"


def _places(found: RecordedStep, rank: int, name: str) -> tuple[tuple[int, ...], ...]:
    return places(found.ranks[rank]["before"].get(name, ((), [])))
