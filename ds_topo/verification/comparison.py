"""Compare recorded runs in the order of computation, and explain the first difference.

A difference is a relative error: the norm of the difference over the norm of the reference's tensor, on each rank's
part of it. What rounding allows is measured for each tensor, as the error of a reference with artificial rounding
errors. Gradients after reduction are compared with the mean, over the samples' shares, of the reference's gradients
before reduction, and the reported norm with the norm of that mean, so that DeepSpeed's own averaging is checked, too.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from ds_topo.checkpoint.table import head_of
from ds_topo.topology.axes import MODEL, PIPE, SEQ
from ds_topo.verification.causes import explain, losses_over_seq
from ds_topo.verification.recorder import (
    MASTER,
    WEIGHT,
    Part,
    RecordedStep,
    Run,
    at,
    distance,
    error_of,
    flat,
    places,
    ratio,
    square,
)

OUTPUT, LOSS, GRADIENT, REDUCED = "output", "loss", "gradient", "reduced gradient"
NORM, SKIPPED = "norm", "skipped step"
START, REPLICAS, SAMPLES = "first weight", "replicas", "samples"
"""Kinds of values that are compared, besides weights and states; the last three are compared first."""
_TIMES_ROUNDING, _OF_UPDATES = 5.0, 20.0
"""The error that is allowed, as a multiple of the measured error of rounding; optimizers amplify it."""
_GROWTH = 2.0
"""The errors of rounding in steps that were not measured, as a multiple of those in the last measured one. A difference
in such a step is only a reason to measure it, too."""
_LEAST = {"float64": 1e-5, "float32": 1e-5, "bfloat16": 1.6e-2, "float16": 2e-3}
"""The error that is always allowed, by the data type of the weights: twice the precision of a half type."""
_USELESS = 0.5
"""A tensor is not compared if rounding allows this error."""
_SMALL = 1e-3
"""Gradients below this share of the mean square of all gradients count as noise."""
_STRIDES = (1, 2, 3, 4, 6, 8)
"""The numbers of pieces that a sliced output may have; query, key and value are three."""
EXACT = 1e-12
_CERTAIN = torch.zeros(1, dtype=torch.bool)


@dataclass(frozen=True)
class Error:
    """The errors of one tensor in a report."""

    step: int
    kind: str
    name: str
    errors: tuple[float, ...]
    """The error of each rank; NaN if it has no part of the tensor."""
    allowed: float


class ComparedTensor(NamedTuple):
    """One tensor that was compared, and the error on each rank that has a part of it."""

    kind: str
    name: str
    errors: dict[int, float]
    is_partial_sum: bool = False
    """True if the values on the ranks of the model axis add up to the reference's."""


@dataclass(frozen=True)
class Deviation:
    """A difference that rounding does not explain."""

    step: int
    kind: str
    name: str
    ranks: tuple[int, ...]
    where: str
    """A description of the ranks that differ, such as ``ranks with model=1``."""
    axis: str | None
    """The axis that the difference follows."""
    causes: tuple[str, ...] = ()
    error: float = math.inf
    allowed: float = 0.0

    def __str__(self) -> str:
        allows = f" (rounding allows {self.allowed:.0e})" if self.allowed > EXACT else ""
        what = f"`{self.name}` {self.kind}" if self.name else self.kind
        step = "start" if self.step < 0 else f"step {self.step + 1}"
        if self.kind == SAMPLES:
            return f"{what}, {step}, {self.where}"
        if math.isinf(self.error):
            return f"{what}, {step}, {self.where}: not finite, absent, or not zero where the reference is zero"
        return f"{what}, {step}, {self.where}: relative error {self.error:.2g}{allows}"


@dataclass(frozen=True)
class Report:
    """The result of a comparison."""

    topology: str
    reference: str
    steps: int
    ranks: int
    compared: int
    """The number of tensors that were compared."""
    findings: tuple[Deviation, ...]
    """All differences; the first one comes first in the order of computation."""
    notes: tuple[str, ...]
    undecided: tuple[str, ...]
    """Why equal results would prove nothing; empty if they do."""
    errors: tuple[Error, ...] = field(repr=False, default=())
    """The errors of all compared tensors, in the order of computation."""

    @property
    def status(self) -> int:
        """The exit status: 0 equal, 1 different, 2 undecided."""
        return 2 if self.undecided else 1 if self.findings else 0

    def as_json(self) -> dict[str, Any]:
        """Return everything as values of JSON, which has no infinite numbers: they are null."""
        content: dict[str, Any] = json.loads(json.dumps(asdict(self)), parse_constant=lambda _: None)
        return {"status": self.status, **content}


# -- errors ------------------------------------------------------------------------------------------------------------


def rows_of(found: RecordedStep, reference: RecordedStep) -> Iterator[ComparedTensor]:
    """Yield everything that both runs have computed in a step, in the order of the reference's computation."""
    for rows in (_outputs, _losses, _gradients, _updates):
        yield from rows(found, reference)


def _outputs(found: RecordedStep, reference: RecordedStep) -> Iterator[ComparedTensor]:
    for name in reference.ranks[0]["outputs"]:
        if head_of(f"{name}.weight"):
            continue
        holders, errors = found.holders("outputs", name), dict[int, float]()
        stages = {rank: found.run.coordinates[rank].get(PIPE, 0) for rank in holders}
        first = [rank for rank in holders if stages[rank] == min(stages.values())]  # the first call, if tied
        is_partial = True
        for share in range(reference.run.shares):
            whole = reference.ranks[share]["outputs"].get(name)
            ranks = [rank for rank in first if found.run.share_of[rank] == share]
            if whole is not None and ranks:
                outputs = {rank: found.ranks[rank]["outputs"][name] for rank in ranks}
                own, partial = output_errors(outputs, whole, found.run)
                errors.update(own)
                is_partial &= partial
        if holders:
            yield ComparedTensor(OUTPUT, name, errors, is_partial)


def output_errors(outputs: Mapping[int, torch.Tensor], whole: torch.Tensor, run: Run) -> tuple[dict[int, float], bool]:
    """Return the error of each rank's output, which is the whole or a slice, and whether they add up to the whole.

    There are no errors if the outputs have other shapes, such as those of a gate with another capacity of experts.
    """
    first = next(iter(outputs.values()))
    if any(value.shape != first.shape for value in outputs.values()):
        return {}, False
    if first.shape == whole.shape:
        errors = {rank: distance(value, whole) for rank, value in outputs.items()}
        is_partial = len(outputs) > 1 and distance(
            torch.stack([value.double() for value in outputs.values()]).sum(0), whole
        ) < min(errors.values())
        return errors, is_partial
    split = [dim for dim, (size, own) in enumerate(zip(whole.shape, first.shape, strict=False)) if size != own]
    if first.dim() != whole.dim() or len(split) != 1:
        return {}, False
    best: dict[int, float] = {}
    dim, size, own = split[0], whole.shape[split[0]], first.shape[split[0]]
    for axes in ((MODEL,), (SEQ,), (SEQ, MODEL), (MODEL, SEQ)):
        index, slices = dict.fromkeys(outputs, 0), math.prod(map(run.degree, axes))
        if own * slices != size:
            continue
        for axis in axes:
            index = {rank: each * run.degree(axis) + run.coordinates[rank].get(axis, 0) for rank, each in index.items()}
        for stride in (each for each in _STRIDES if own % each == 0):
            pieces = whole.unflatten(dim, (stride, slices, own // stride))
            errors = {
                rank: distance(value, pieces.select(dim + 1, index[rank]).flatten(dim, dim + 1))
                for rank, value in outputs.items()
            }
            if not best or max(errors.values()) < max(best.values()):
                best = errors
    return best, False


def _losses(found: RecordedStep, reference: RecordedStep) -> Iterator[ComparedTensor]:
    """Yield the losses. Along ``seq`` each rank has the whole loss, or its part of a sum or of a mean."""
    errors = {}
    pieces = found.run.degree(SEQ)
    for rank, record in enumerate(found.ranks):
        expected = reference.ranks[found.run.share_of[rank]]["losses"]
        if len(expected) != len(record["losses"]):
            errors[rank] = math.inf
        elif expected:
            sums = losses_over_seq(rank, found) or record["losses"]
            errors[rank] = min(
                max(ratio((own - there) ** 2, there**2) for own, there in zip(losses, expected, strict=False))
                for losses in (record["losses"], sums, [total / pieces for total in sums])
            )
    if errors and any(record["losses"] for record in found.ranks):
        yield ComparedTensor(LOSS, "", errors)


def _gradients(found: RecordedStep, reference: RecordedStep) -> Iterator[ComparedTensor]:
    """Yield gradients before reduction, after it, and their norm."""
    expected = reference.sums  # in the order in which they arrived
    numel = sum(one.numel() for one in expected.values())
    least = _SMALL * reference.norm / math.sqrt(max(1, numel))
    for name in expected:
        errors = {}
        shares = {found.run.share_of[rank] for rank in found.holders("before", name)}
        if len(shares) < found.run.shares or len(reference.holders("before", name)) < reference.run.shares:
            continue  # experts of a rank get the samples of several shares
        for ranks in found.peers(name):
            whole, own = reference.before([found.run.share_of[ranks[0]]], name), found.before(ranks, name)
            for rank in ranks:
                part = found.ranks[rank]["before"][name]
                errors[rank] = min(  # over an axis seq it is a mean or a sum, as the loss is
                    error_of(at(part, own * factor), part, whole, least) for factor in {1, found.run.degree(SEQ)}
                )
        if errors:
            yield ComparedTensor(GRADIENT, name, errors)
    if any(record["is_skipped"] for record in (*found.ranks, *reference.ranks)):
        differ = {
            rank: float(record["is_skipped"] != reference.ranks[0]["is_skipped"])
            for rank, record in enumerate(found.ranks)
        }
        yield ComparedTensor(SKIPPED, "", differ)
    clipped = [found.clipping(rank, reference) for rank in range(len(found.ranks))]
    for name in expected:
        errors = {}
        for rank in found.holders("after", name):
            part = found.ranks[rank]["after"][name]
            errors[rank] = error_of(flat(part) / clipped[rank][0], part, expected[name], least)
        if errors:
            yield ComparedTensor(REDUCED, name, errors)
    right = reference.ranks[0]["norm"] or reference.norm  # some optimizers report the norm of scaled gradients
    norms = {
        rank: ratio((norm - right) ** 2, right**2)
        for rank, (_, norm) in enumerate(clipped)
        if norm and not found.ranks[rank]["is_skipped"]
    }
    if norms and right:
        yield ComparedTensor(NORM, "", norms)


def _updates(found: RecordedStep, reference: RecordedStep) -> Iterator[ComparedTensor]:
    """Yield weights and states after the step. An error of a weight is relative to the change since the start."""
    start = reference.run.start
    for key in dict.fromkeys(key for record in reference.ranks for key in record["states"]):
        wholes = reference.whole_states(key)
        for name in (name for name in start if name in wholes):
            states = {rank: record["states"].get(key, {}) for rank, record in enumerate(found.ranks)}
            parts = {rank: own[name] for rank, own in states.items() if name in own}
            if parts and key in (WEIGHT, MASTER):
                unclear = reference.uncertain.get(name)
                yield ComparedTensor(key, name, change_errors(parts, wholes[name], start[name], unclear))
            elif parts:
                yield ComparedTensor(
                    key, name, {rank: error_of(flat(part), part, wholes[name]) for rank, part in parts.items()}
                )


def change_errors(
    parts: Mapping[int, Part], whole: torch.Tensor, start: torch.Tensor, uncertain: torch.Tensor | None = None
) -> dict[int, float]:
    """Return the error of each rank's change of a weight; one of the last bit of all elements is always allowed.

    Elements that are ``uncertain`` are left out.
    """
    change = whole.double() - start.double()
    if uncertain is not None:
        change[uncertain] = 0.0
    bit = torch.finfo(whole.dtype).eps / _LEAST[str(whole.dtype).removeprefix("torch.")]
    least = bit * float(start.double().square().mean().sqrt())
    errors = {}
    for rank, part in parts.items():
        own = flat(part) - at(part, start)
        if uncertain is not None:
            own[at(part, uncertain) > 0] = 0.0
        errors[rank] = error_of(own, part, change, least)
    return errors


def uncertain_updates(found: RecordedStep, reference: RecordedStep, allowed: Allowed) -> dict[str, torch.Tensor]:
    """Return where in each weight the sign of its gradient may be one of rounding.

    An optimizer that divides by the size of the gradient, such as Adam, changes such an element by a whole step in one
    direction or in the other. A gradient of exactly 0 in all runs is certain.
    """
    result = {}
    for name, right in reference.sums.items():
        limit = allowed(ComparedTensor(GRADIENT, name, {}))
        own, size = found.sums.get(name), right.abs()
        if own is None or own.shape != right.shape:
            continue
        is_small = size < limit * float(right.double().square().mean().sqrt())
        result[name] = (is_small | (limit >= _USELESS)) & ((right != 0) | (own != 0))
    return result


def equal_samples(found: RecordedStep) -> Iterator[Deviation]:
    """Yield the first shares of the samples that have read the same ones in all micro-batches of a step."""
    read: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for share in range(found.run.shares):
        holders = [rank for rank, own in enumerate(found.run.share_of) if own == share]
        reader = min(holders, key=lambda rank: (found.run.coordinates[rank].get(PIPE, 0), rank))
        if (samples := found.ranks[reader]["samples"]) and all(samples):
            read[tuple(samples)].append(share)
    shares = next((shares for shares in read.values() if len(shares) > 1), [])
    if not shares:
        return
    ranks = tuple(rank for rank, own in enumerate(found.run.share_of) if own in shares)
    first, second = (found.run.share_of.index(share) for share in shares[:2])
    axes = sorted(found.run.axes_between(first, second))
    where, axis = place_of(ranks, range(len(found.run.about)), found.run)
    same = f"{where}: the replicas train on the same ones"
    cause = (
        "a data loader without a sampler, which gives all replicas the same samples: use grid.data_loader(dataset), or "
        "DistributedSampler(dataset, grid.get_sample_world_size(), grid.get_sample_rank()); if the program means it, "
        "give --same-samples (verify: same_samples=True)"
    )
    yield Deviation(found.number, SAMPLES, "", ranks, same, axis or (axes[0] if len(axes) == 1 else None), (cause,))


# -- the comparison ----------------------------------------------------------------------------------------------------


def compare(wanted: Path, reference: Path, rounding: Path, same_samples: bool = False) -> Report:
    """Compare the recordings in three folders, step after step, up to the first one that differs.

    With ``same_samples`` replicas may train on the same samples.
    """
    found = Run(wanted)
    expected, noisy = Run(reference, found), Run(rounding, found)
    findings = list(_at_start(found))
    differs_at_start = bool(findings)
    errors, undecided, notes = list[Error](), list[str](), list[str]()
    unlike, useless = dict[str, None](), set[str]()
    if missing := sorted(found.start.keys() - expected.names):
        notes.append(f"{len(missing)} parameters are not in the reference, the first is {missing[0]!r}")
    if is_other_module := len(missing) == len(found.start):
        undecided.append(
            "the program trains another module in the reference, with other names, as one that builds a pipeline only "
            "if there are stages: let it build the same module in every layout"
        )
    for mine, theirs, allowed in () if is_other_module else _steps(found, expected, noisy):
        everything = list(rows_of(mine, theirs))
        limits = [(row, allowed(row)) for row in everything if row.errors]
        rows = [(row, limit) for row, limit in limits if not _is_noise(row, limit, theirs)]
        right = {row.name for row, limit in limits if row.kind == REDUCED and max(row.errors.values()) <= limit}
        new = [
            *(() if same_samples else equal_samples(mine)),
            *_deviations(rows, right, mine),
            *_unequal(found, [record["replicas"] for record in mine.ranks], mine.number),
        ]
        if new and not differs_at_start:
            new[0] = _explained(new, mine, theirs)
        findings += new
        for row, limit in rows:
            each = tuple(row.errors.get(rank, math.nan) for rank in range(len(mine.ranks)))
            errors.append(Error(mine.number, row.kind, row.name, each, limit))
        unlike |= dict.fromkeys(row.name for row in everything if not row.errors)
        useless |= {f"{row.kind} {row.name}".strip() for row, limit in limits if _is_noise(row, limit, theirs)}
        undecided += _undecided(mine, theirs, bool(findings))
        reported, norm = theirs.ranks[0]["norm"], theirs.norm
        if mine.number == 0 and reported and norm and abs(reported / norm - 1) > _LEAST["bfloat16"]:
            times = f"{reported / norm:.3g} times its norm of gradients"
            notes.append(f"the reference reports {times}; others are compared with that")
        if findings:
            break
    if unlike:
        first = next(iter(unlike))
        notes.append(f"{len(unlike)} outputs are not compared, because they have other shapes in the layout: {first!r}")
    if useless:
        notes.append(
            f"rounding alone changes {len(useless)} tensors by half of their value or more: {min(useless)!r}, ..."
        )
    return Report(
        topology=found.about[0]["spec"],
        reference=expected.about[0]["spec"],
        steps=found.steps,
        ranks=len(found.about),
        compared=len(errors),
        findings=tuple(findings),
        notes=tuple(notes),
        undecided=tuple(dict.fromkeys(undecided)),
        errors=tuple(errors),
    )


def _steps(found: Run, expected: Run, noisy: Run) -> Iterator[tuple[RecordedStep, RecordedStep, Allowed]]:
    """Yield each step of the layout and of the reference, and the errors that rounding allows in it."""
    uncertain: dict[str, torch.Tensor] = {}
    for number in range(min(found.steps, expected.steps)):
        mine, theirs = found.step(number), expected.step(number)
        if is_measured := number < noisy.steps:
            dtype, noise = found.about[0]["dtype"], noisy.step(number)
            allowed = Allowed(_gradients(noise, theirs), dtype)
        else:
            allowed.growth = _GROWTH
        # the change of a weight since the start stays uncertain
        for name, where in uncertain_updates(mine, theirs, allowed).items():
            uncertain[name] = uncertain[name] | where if name in uncertain else where
        theirs.uncertain = dict(uncertain)
        if is_measured:
            allowed = Allowed(rows_of(noise, theirs), dtype, error_of_norm(theirs.sums))
        yield mine, theirs, allowed


def _is_noise(row: ComparedTensor, limit: float, reference: RecordedStep) -> bool:
    """Return True if rounding alone may change a tensor too much to compare it."""
    is_weight = row.kind in (WEIGHT, MASTER)
    return limit >= _USELESS or (is_weight and bool(reference.uncertain.get(row.name, _CERTAIN).all()))


def _deviations(
    rows: Sequence[tuple[ComparedTensor, float]], right: Set[str], found: RecordedStep
) -> Iterator[Deviation]:
    """Yield the tensors whose error is larger than rounding allows, in the order of computation.

    A partial sum that is wrong is reported with the next wrong tensor, unless an output in between is right. Gradients
    before reduction are not reported if they are ``right`` after it: then they are completed in between.
    """
    partial_sums: list[Deviation] = []
    for row, limit in rows:
        bad = tuple(rank for rank, error in row.errors.items() if error > limit)
        if not bad and row.kind == OUTPUT:
            partial_sums.clear()
        if not bad or (row.kind == GRADIENT and row.name in right):
            continue
        where, axis = place_of(bad, row.errors, found.run)
        worst = max(row.errors.values())
        one = Deviation(found.number, row.kind, row.name, bad, where, axis, error=worst, allowed=limit)
        if row.is_partial_sum:
            partial_sums.append(one)
        else:
            yield from (*partial_sums, one)
            partial_sums.clear()


class Allowed:
    """The error that rounding allows for a tensor: a multiple of its measured error, or of the median of its kind."""

    def __init__(self, rows: Iterable[ComparedTensor], dtype: str, of_norm: float = 0.0) -> None:
        self.of_norm, self.growth = of_norm, 1.0
        self.least = _LEAST.get(dtype, max(_LEAST.values()))
        self.measured = {(row.kind, row.name): max(row.errors.values()) for row in rows if row.errors}
        kinds = defaultdict(list)
        for (kind, _), error in self.measured.items():
            kinds[kind].append(error)
        self.medians = {kind: median(found) for kind, found in kinds.items()}

    def __call__(self, row: ComparedTensor) -> float:
        if row.kind == SKIPPED:
            return EXACT
        kind = GRADIENT if row.kind == REDUCED else row.kind  # reductions of the reference prove nothing
        measured = max(self.measured.get((kind, row.name), 0.0), self.medians.get(kind, 0.0)) * self.growth
        is_update = kind not in (OUTPUT, LOSS, GRADIENT, NORM)
        of_norm = _TIMES_ROUNDING * self.of_norm if is_update or row.kind == NORM else 0.0
        return max(self.least, (_OF_UPDATES if is_update else _TIMES_ROUNDING) * measured, of_norm)


def error_of_norm(gradients: Mapping[str, torch.Tensor]) -> float:
    """Return the error of the norm of all gradients in one vector: on CPUs, torch adds millions of squares in fp32.

    Both runs clip by such a norm, over vectors of other sizes.
    """
    vector = torch.cat([torch.zeros(1), *(one.reshape(-1).float() for one in gradients.values())])
    exact = math.sqrt(sum(map(square, vector.split(1 << 20))))
    return abs(float(vector.norm()) / exact - 1) if 0 < exact < math.inf else 0.0


def place_of(bad: Iterable[int], holders: Iterable[int], run: Run) -> tuple[str, str | None]:
    """Describe ranks by their coordinates, and name the axis that they follow."""
    wrong, everyone = set(bad), set(holders)
    if wrong == everyone:
        return "all ranks" if len(everyone) == len(run.about) else f"all ranks that have it, {sorted(everyone)}", None
    for axis in run.coordinates[0]:
        values = {run.coordinates[rank][axis] for rank in wrong}
        if {rank for rank in everyone if run.coordinates[rank][axis] in values} == wrong:
            return f"ranks with {axis}={','.join(map(str, sorted(values)))}", axis
    return f"ranks {sorted(wrong)}", None


def _at_start(found: Run) -> Iterator[Deviation]:
    """Yield weights that no rank has, replicas that start differently, and slices that start with equal values."""
    held: dict[str, dict[tuple[Any, ...], int]] = defaultdict(dict)
    sizes = {}
    for weights in found.starts:
        for name, (shape, boxes) in weights.items():
            sizes[name] = math.prod(shape)
            held[name] |= {(offsets, tuple(values.shape)): values.numel() for offsets, values in boxes}
    for name, boxes_of in held.items():
        if sum(boxes_of.values()) < sizes[name]:
            share = sum(boxes_of.values()) / sizes[name]
            cause = "the ranks have the same slice or experts twice, and others not at all: a wrong group"
            holders = tuple(rank for rank, weights in enumerate(found.starts) if name in weights)
            where = f"all ranks together have {share:.3g} of it"
            yield Deviation(-1, START, name, holders, where, None, (cause,))
            return
    yield from _unequal(found, found.replicas, -1)
    by_place: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for rank, weights in enumerate(found.starts):
        place = {axis: index for axis, index in found.coordinates[rank].items() if axis != MODEL}
        for name in weights:
            by_place[name, tuple(place.items())].append(rank)
    for (name, _), ranks in by_place.items():
        parts = [found.starts[rank][name] for rank in ranks]
        values = [flat(part) for part in parts if part[1]]
        is_sliced = len(ranks) > 1 and len(set(map(places, parts))) == len(parts)
        if is_sliced and all(torch.equal(values[0], one) for one in values) and values[0].unique().numel() > 1:
            cause = "different random state: ranks along 'model' drew equal values for different slices"
            yield Deviation(-1, START, name, tuple(ranks), "all slices are equal", MODEL, (cause,))
            return


def _unequal(run: Run, replicas: list[Any], number: int) -> Iterator[Deviation]:
    """Yield the first tensor that must be equal on several ranks and is not."""
    values: dict[tuple[Any, ...], dict[int, tuple[Any, ...]]] = defaultdict(dict)
    for rank, rows in enumerate(replicas):
        for name, axes, ranks, is_slice, digest in rows:
            values[name, axes, tuple(ranks)][rank] = (is_slice, tuple(digest))
    for (name, axes, ranks), found in values.items():
        if all(is_slice for is_slice, _ in found.values()):
            continue
        digests = [digest for _, digest in found.values()]
        if len(set(digests)) > 1:
            usual = max(digests, key=digests.count)
            bad = tuple(rank for rank, (_, digest) in found.items() if digest != usual)
            parts = [run.starts[rank].get(name) for rank in found]
            if all(parts) and len(set(map(places, parts))) > 1:
                cause = "it is split, as its partition_dim says, but lacks the mark tensor_model_parallel = True"
            elif number < 0:
                cause = "different random state, as by other seeds, or a weight loaded or changed on some ranks only"
            else:
                cause = "a rank skipped or repeated a step, or changed or lost an update"
            yield Deviation(number, REPLICAS, name, bad, f"ranks {list(ranks)} along {axes} differ", axes, (cause,))
            return


def _undecided(mine: RecordedStep, theirs: RecordedStep, is_different: bool) -> Iterator[str]:
    if is_different and any(record["is_random"] for record in (*mine.ranks, *theirs.ranks)):
        yield "the model draws random numbers, such as dropout: give --no-dropout, or set it to 0"
    is_last = theirs.number == theirs.run.steps - 1
    if not is_different and is_last and all(record["is_skipped"] for record in theirs.ranks):
        yield "the last step was skipped because of an overflow: give a smaller initial loss scale, or more --steps"


def _explained(findings: Sequence[Deviation], mine: RecordedStep, theirs: RecordedStep) -> Deviation:
    first = findings[0]
    if first.causes:
        return first
    wrong = {one.name for one in findings if one.kind == first.kind}
    causes = explain(first.kind, first.name, first.ranks[0], mine, theirs, wrong)
    axis = first.axis or next((cause.axis for cause in causes if cause.axis), None)
    return replace(first, axis=axis, causes=tuple(cause.text for cause in causes))
