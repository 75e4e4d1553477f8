"""Differences and their causes, in records without a run."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_topo.cli.shared import new_console
from ds_topo.cli.verify_command import draw_errors, print_report
from ds_topo.verification.__main__ import uses_ds_topo
from ds_topo.verification.comparison import (
    Allowed,
    ComparedTensor,
    Deviation,
    Error,
    Report,
    change_errors,
    compare,
    error_of_norm,
    output_errors,
)
from ds_topo.verification.recorder import Run, digest_of_samples, with_rounding_errors

COORDINATES = [{"data": data, "model": model} for data in range(2) for model in range(2)]
Records = list[dict[str, Any]]


def _wholes(share: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(share)
    split, whole = torch.randn(4, 3, generator=generator) + 1, torch.randn(5, generator=generator) + 1
    return {"whole": whole, "split": split}  # in the order of their gradients


def _part(name: str, whole: torch.Tensor, model: int | None) -> Any:
    if name == "split" and model is not None:
        return tuple(whole.shape), [((2 * model, 0), whole[2 * model : 2 * model + 2].clone())]
    return tuple(whole.shape), [((0,) * whole.dim(), whole.clone())]


def _records(coordinates: list[dict[str, int]]) -> Records:
    """The records of a right step of descent with rate 1, of two parameters, one of which slices split."""
    mean = {name: sum(_wholes(share)[name] for share in range(2)) / 2 for name in ("split", "whole")}
    norm = float(sum(one.square().sum() for one in mean.values())) ** 0.5
    start = {name: torch.ones_like(one) for name, one in mean.items()}
    found = []
    for rank, coordinate in enumerate(coordinates):
        own, model, share = _wholes(coordinate["data"]), coordinate.get("model"), coordinate["data"]
        about = {"coordinate": coordinate, "share": share, "shares": 2, "spec": "data=2,model=2", "rank": rank}
        weights = {name: _part(name, start[name] - mean[name], model) for name in mean}
        start_of = {name: _part(name, start[name], model) for name in mean}
        found.append(
            {
                "about": {**about, "dtype": "float32", "zero": 0},
                "start": start_of,
                "replicas": [],
                "outputs": {"layer": own["whole"].clone()},
                "losses": [1.0 + share, 2.0 + share],
                "before": {name: _part(name, one, model) for name, one in own.items()},
                "after": {name: _part(name, one, model) for name, one in mean.items()},
                "norm": norm,
                "clip": 0.0,
                "clipped": None,
                "samples": [],
                "scale": 1.0,
                "is_skipped": False,
                "is_random": False,
                "rates": [1.0],
                "states": {"weight": weights, "exp_avg": {name: _part(name, one, model) for name, one in mean.items()}},
            }
        )
    return found


def _write(records: Records, folder: Path) -> Path:
    for rank, record in enumerate(records):
        own = folder / f"rank_{rank}"
        own.mkdir(parents=True)
        start = {"about": record["about"], "states": {"weight": record["start"]}, "replicas": record["replicas"]}
        start["names"] = list(record["start"])
        torch.save(start, own / "start.pt")
        torch.save(record, own / "step_0.pt")
    return folder


def _compared(
    change: Callable[[Records], None], folder: Path, coordinates: list[dict[str, int]] = COORDINATES
) -> Report:
    wanted = _records(coordinates)
    change(wanted)
    reference = _records([{"data": share} for share in range(2)])
    noisy = copy.deepcopy(reference)
    for record in noisy:
        record["outputs"]["layer"] *= 1 + 1e-6
    folders = (_write(wanted, folder / "w"), _write(reference, folder / "r"), _write(noisy, folder / "n"))
    return compare(*folders)


EVERYONE = range(4)


def _on(ranks: Iterable[int], change: Callable[[dict[str, Any]], object]) -> Callable[[Records], None]:
    """Return a change of the records of some ranks."""

    def change_all(records: Records) -> None:
        for rank in ranks:
            change(records[rank])

    return change_all


def _scale(kind: str, name: str, factor: float, ranks: tuple[int, ...]) -> Callable[[Records], None]:
    def change(records: Records) -> None:
        for rank in ranks:
            value = records[rank][kind][name]
            if torch.is_tensor(value):
                value *= factor
            else:
                for _, values in value[1]:
                    values *= factor

    return change


def _half_of_a_slice(records: Records) -> None:
    for kind in ("before", "after"):
        _scale(kind, "split", 0.5, (1, 3))(records)


UNREDUCED = _on(EVERYONE, lambda one: one["after"].update(whole=copy.deepcopy(one["before"]["whole"])))
STALE = _on((2, 3), lambda one: one["states"]["weight"].update(whole=copy.deepcopy(one["start"]["whole"])))


def _norm_without_a_slice(records: Records) -> None:
    square = float(records[1]["after"]["split"][1][0][1].square().sum())
    for record in records:
        record["norm"] = (record["norm"] ** 2 - square) ** 0.5


def _lost_in_backward(records: Records) -> None:
    for record in records[2:]:
        for _, ((_, values),) in record["before"].values():
            values += torch.arange(values.numel()).view(values.shape) % 3
    for record in records:
        for name in ("split", "whole"):
            mean = (records[0]["before"][name][1][0][1] + records[2]["before"][name][1][0][1]) / 2
            if name == "whole":
                record["after"][name][1][0][1].copy_(mean)
    for model in range(2):
        mean = (records[model]["before"]["split"][1][0][1] + records[2 + model]["before"]["split"][1][0][1]) / 2
        for record in (records[model], records[2 + model]):
            record["after"]["split"][1][0][1].copy_(mean)


def _other_rate(records: Records) -> None:
    for record in (records[1], records[3]):
        record["rates"] = [2.0]
        for name, (_, ((_, values),)) in record["states"]["weight"].items():
            values -= record["start"][name][1][0][1] - values


def _missing_slice(records: Records) -> None:
    for record in records:
        record["start"]["split"] = records[0]["start"]["split"]


def _of_other_share(records: Records) -> None:
    for record in records[:2]:
        record["outputs"]["layer"] = records[2]["outputs"]["layer"].clone()


def _equal_slices(record: dict[str, Any]) -> None:
    record["start"]["split"][1][0][1].copy_(torch.arange(6.0).view(2, 3))


@pytest.mark.parametrize(
    ("change", "kind", "ranks", "axis", "cause"),
    [
        (_scale("outputs", "layer", 2.0, (1, 3)), "output", (1, 3), "model", "times 2, the degree of"),
        (_of_other_share, "output", (0, 1), "data", "samples of share 1 instead of 0"),
        (_on((3,), lambda one: one["losses"].clear()), "loss", (3,), None, "lost micro-batch"),
        (
            _on((3,), lambda one: one["losses"].extend((5.0, 6.0))),
            "loss",
            (3,),
            None,
            "more micro-batches: 4 losses in this step instead of 2",
        ),
        (
            _on(EVERYONE, lambda one: one.update(losses=one["losses"][:1] * 2)),
            "loss",
            (0, 1, 2, 3),
            None,
            "micro-batch 2 has the loss of micro-batch 1",
        ),
        (_lost_in_backward, "gradient", (2, 3), "data", "a micro-batch is lost or counts twice"),
        (_other_rate, "weight", (1, 3), "model", "the learning rate is 2 instead of 1"),
        (
            _on((2, 3), lambda one: one["states"]["exp_avg"]["whole"][1][0][1].zero_()),
            "exp_avg",
            (2, 3),
            "data",
            "exp_avg is zero",
        ),
        (_missing_slice, "first weight", (0, 1, 2, 3), None, "a wrong group"),
        (_half_of_a_slice, "gradient", (1, 3), "model", "times 0.5"),
        (UNREDUCED, "reduced gradient", (0, 1, 2, 3), "data", "not reduced along 'data'"),
        (
            _scale("after", "split", 0.5, (0, 1, 2, 3)),
            "reduced gradient",
            (0, 1, 2, 3),
            "data",
            "divided by the number",
        ),
        (_norm_without_a_slice, "norm", (0, 1, 2, 3), "model", "leaves out the slices [1]"),
        (STALE, "weight", (2, 3), "data", "stale"),
        (_on((1,), lambda one: one.update(is_skipped=True)), "skipped step", (1,), None, "ranks [1] alone skipped"),
        (_on(EVERYONE, _equal_slices), "first weight", (0, 1), "model", "equal values for different slices"),
    ],
)
def test_first_difference_is_explained(
    change: Callable[[Records], None], kind: str, ranks: tuple[int, ...], axis: str | None, cause: str, tmp_path: Path
) -> None:
    report = _compared(change, tmp_path)
    first = report.findings[0]
    assert (report.status, first.kind, first.ranks) == (1, kind, ranks)
    assert cause in first.causes[0]
    assert first.axis == axis


def _scale_all(kind: str, factor: float) -> Callable[[Records], None]:
    def change(records: Records) -> None:
        for record in records:
            if kind == "losses":
                record["losses"] = [loss * factor for loss in record["losses"]]
                continue
            for _, ((_, values),) in (*record[kind].values(), *(record["after"].values() if kind == "before" else ())):
                values *= factor

    return change


@pytest.mark.parametrize("factor", [0.921, 0.185, 0.43, 3.0])
@pytest.mark.parametrize("kind", ["losses", "before", "after"])
def test_a_factor_that_is_no_degree_is_no_cause(kind: str, factor: float, tmp_path: Path) -> None:
    report = _compared(_scale_all(kind, factor), tmp_path)
    assert report.status == 1
    causes = report.findings[0].causes
    words = ("averaged", "divided by", "summed over", "replicated along", "wrong group", "degree")
    assert not [cause for cause in causes if any(word in cause for word in words)]
    assert kind == "losses" or causes[-1].endswith(f"; it is the right value times {factor:.3g}"), "a fact, no cause"


@pytest.mark.parametrize(("factor", "text"), [(2.0, "the degree of"), (0.25, "1/ the square"), (4.0, "the square")])
def test_a_factor_of_degrees_is_named(factor: float, text: str, tmp_path: Path) -> None:
    report = _compared(_scale_all("losses", factor), tmp_path)
    assert text in report.findings[0].causes[0]


def test_a_scaled_gradient_that_clipping_hides_is_found(tmp_path: Path) -> None:
    """Clipping by its own norm gives the right gradients; the factor by which they were clipped tells."""

    def change(factor: float) -> Callable[[Records], None]:
        def clipped(records: Records) -> None:
            for record in records:
                norm, record["norm"], record["clip"] = record["norm"] * factor, None, 0.1
                record["clipped"] = 0.1 / norm
                for _, ((_, values),) in record["after"].values():
                    values *= factor * record["clipped"]

        return clipped

    def kinds(report: Report) -> set[str]:
        return {one.kind for one in report.findings} - {"weight"}

    assert kinds(_compared(change(1.0), tmp_path / "right")) == set()
    twice = _compared(change(2.0), tmp_path / "twice")
    assert {"reduced gradient", "norm"} <= kinds(twice)
    assert "summed over the replicas without a division" in twice.findings[0].causes[0]


def _read(records: Records, samples: list[list[int]]) -> None:
    for record in records:
        record["samples"] = samples[record["about"]["share"]]


@pytest.mark.parametrize(
    ("samples", "is_found"),
    [([[7, 8], [7, 8]], True), ([[7, 8], [8, 7]], False), ([[0, 0], [0, 0]], False), ([[], []], False)],
)
def test_replicas_with_the_same_samples_are_found(samples: list[list[int]], is_found: bool, tmp_path: Path) -> None:
    report = _compared(lambda records: _read(records, samples), tmp_path)
    assert report.status == int(is_found)
    if is_found:
        first = report.findings[0]
        assert str(first) == "samples, step 1, all ranks: the replicas train on the same ones"
        assert (first.axis, first.ranks) == ("data", (0, 1, 2, 3))
        assert "DistributedSampler" in first.causes[0]
        folders = (tmp_path / name for name in ("w", "r", "n"))
        assert compare(*folders, same_samples=True).status == 0, "the switch"


def test_digest_of_samples_tells_that_they_differ() -> None:
    first, second = torch.arange(4.0), torch.arange(4)
    assert digest_of_samples(((first,), {"labels": second})) != digest_of_samples(((first,), {"labels": second + 1}))
    assert digest_of_samples(((torch.ones(4),), {"mask": None})) == 0, "synthetic samples"


@pytest.mark.parametrize(("gradient", "is_found"), [(1e-7, False), (0.5, True), (0.0, True)])
def test_an_update_of_uncertain_sign_is_not_compared(gradient: float, is_found: bool, tmp_path: Path) -> None:
    """Adam moves a weight by a whole step, in the direction of a gradient that may be rounding alone."""

    def change(records: Records, turned: float) -> None:
        for record in records:
            for kind in ("before", "after"):
                record[kind]["whole"][1][0][1][0] = gradient
            record["states"]["weight"]["whole"][1][0][1][0] = record["start"]["whole"][1][0][1][0] + turned

    wanted, reference = _records(COORDINATES), _records([{"data": share} for share in range(2)])
    change(wanted, 0.1)
    change(reference, -0.1)
    square = sum(float(record["after"][name][1][0][1].square().sum()) for record, name in
                 ((wanted[0], "whole"), (wanted[0], "split"), (wanted[1], "split")))  # fmt: skip
    for record in (*wanted, *reference):
        record["norm"] = square**0.5
    folders = [_write(records, tmp_path / name) for name, records in (("w", wanted), ("r", reference))]
    report = compare(*folders, _write(copy.deepcopy(reference), tmp_path / "n"))
    assert [one.kind for one in report.findings] == (["weight"] if is_found else [])


def test_equal_records_are_equal(tmp_path: Path) -> None:
    report = _compared(lambda _: None, tmp_path)
    assert (report.status, report.findings, report.notes) == (0, (), ())


def test_loss_may_be_a_part_over_seq(tmp_path: Path) -> None:
    halve = _scale_all("losses", 0.5)
    coordinates = [{"data": data, "seq": seq} for data in range(2) for seq in range(2)]
    assert _compared(halve, tmp_path, coordinates).status == 0


def test_output_of_another_shape_is_not_compared(tmp_path: Path) -> None:
    report = _compared(_on(EVERYONE, lambda one: one["outputs"].update(layer=torch.ones(7))), tmp_path)
    assert report.status == 0
    assert "1 outputs are not compared" in report.notes[0]


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_slice_of_an_output_is_compared_with_the_same_pieces_of_the_whole(stride: int, tmp_path: Path) -> None:
    """A slice has ``stride`` pieces, as of query, key and value. Its width, 6, is not a multiple of 4."""
    run = Run(_write(_records(COORDINATES), tmp_path))
    whole = torch.randn(5, 12)
    pieces = whole.view(5, stride, 2, 6 // stride)
    outputs = {rank: pieces[:, :, rank % 2].reshape(5, 6) for rank in EVERYONE}
    assert output_errors(outputs, whole, run) == (dict.fromkeys(EVERYONE, 0.0), False)
    wrong, _ = output_errors(outputs | {1: outputs[0], 3: outputs[2]}, whole, run)
    assert max(wrong.values()) > 0.1


def test_rounding_that_was_measured_is_allowed(tmp_path: Path) -> None:
    assert _compared(_scale("outputs", "layer", 1 + 5e-6, (1, 3)), tmp_path).status == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_last_bit_of_a_weight_is_allowed(dtype: torch.dtype, tmp_path: Path) -> None:
    """A small learning rate changes weights of 1 by little more than one bit."""
    start, allowed = torch.ones(100, dtype=dtype), {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}[dtype]
    whole = start + 50 * torch.finfo(dtype).eps
    own = whole.clone()
    own[:90] += torch.finfo(dtype).eps
    for value, is_allowed in ((own, True), (start, False)):
        [error] = change_errors({0: ((100,), [((0,), value)])}, whole, start).values()
        assert (error <= allowed) == is_allowed


def test_error_of_a_norm_grows_with_the_number_of_gradients() -> None:
    """A norm of gradients of millions of parameters in fp32 has an error that no other run of the same kind shows."""
    small, large = (error_of_norm({"weight": torch.randn(size) * 1e-3}) for size in (10_000, 4_000_000))
    assert 0 < small < 1e-6 < 1e-5 < large < 1e-3
    assert Allowed([], "float32", large)(ComparedTensor("norm", "", {})) == 5 * large
    assert Allowed([], "float32", large)(ComparedTensor("output", "layer", {})) == 1e-5


@pytest.mark.parametrize("value", [0.0, inf, nan])
def test_norm_that_is_zero_or_not_finite_has_no_error(value: float) -> None:
    assert error_of_norm({"weight": torch.full((3,), value)}) == 0


def test_later_steps_are_allowed_twice_the_measured_rounding() -> None:
    allowed = Allowed([ComparedTensor("output", "layer", {0: 1e-4})], "float32")
    first, allowed.growth = allowed(ComparedTensor("output", "layer", {})), 2.0
    assert (first, allowed(ComparedTensor("output", "layer", {}))) == (5e-4, 1e-3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rounding_errors_are_half_of_the_precision(dtype: torch.dtype) -> None:
    tensor = torch.randn(1001, 33).to(dtype)
    half = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps) / 2
    up, down = ((tensor.double() * (1 + sign * half)).to(dtype) for sign in (1, -1))
    noisy = with_rounding_errors(tensor, torch.Generator().manual_seed(0))
    assert ((noisy == up) | (noisy == down)).all()
    assert 0.45 < float((noisy == up).double().mean()) < 0.55


def test_another_module_in_the_reference_is_undecided(tmp_path: Path) -> None:
    def rename(records: Records) -> None:
        for record in records:
            for parts, key in ((record, "start"), (record, "before"), (record, "after"), (record["states"], "weight")):
                parts[key] = {f"0.{name}": one for name, one in parts[key].items()}

    report = _compared(rename, tmp_path)
    assert (report.status, report.findings) == (2, ())
    assert "trains another module in the reference" in report.undecided[0]


def test_difference_with_dropout_is_undecided(tmp_path: Path) -> None:
    def change(records: Records) -> None:
        records[0]["is_random"] = True
        STALE(records)

    report = _compared(change, tmp_path)
    assert report.status == 2
    assert "--no-dropout" in report.undecided[0]


def test_report_is_printed(tmp_path: Path) -> None:
    from rich.console import Console

    report = _compared(UNREDUCED, tmp_path)
    console = Console(record=True, width=100, file=io.StringIO())
    print_report(console, report)
    assert "likely cause: not reduced along 'data'" in console.export_text()
    assert report.as_json()["findings"][0]["kind"] == "reduced gradient"


@pytest.mark.parametrize("name", ["h.0.mlp.weight", "model.layers.17.block_sparse_moe.experts.7.w2.lora_A.weight"])
def test_lines_break_no_cell_and_names_come_last(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    lost = [Deviation(step, "reduced gradient", name, (0,), "ranks with model=1", "model") for step in range(2)]
    print_report(new_console(), Report("data=2,model=2", "data=2", 2, 4, 9, tuple(lost), (), ()))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].split() == ["2", *["reduced", "gradient", "inf", "0", "ranks", "with", "model=1"], name]
    assert "relative error" not in lines[2], "there is none"
    assert lines[2].endswith(": not finite, absent, or not zero where the reference is zero")


def _errors(blocks: int) -> list[Error]:
    names = [f"h.{block}.{module}" for block in range(blocks) for module in ("attention", "mlp")]
    outputs = [Error(1, "output", name, (1e-6, 1e-6), 1e-5) for name in names]
    weights = [Error(1, "weight", f"{name}.{part}", (1e-6, nan), 1e-5) for name in names for part in ("weight", "bias")]
    return [*outputs, Error(1, "loss", "", (1e-6, 1e-6), 1e-5), *weights]


@pytest.mark.parametrize(("blocks", "rows", "framed"), [(4, 9, (1, 5)), (40, 41, (1, 2))])
def test_errors_are_drawn_as_layers_and_kinds_with_the_first_difference_framed(
    blocks: int, rows: int, framed: tuple[int, int]
) -> None:
    errors = _errors(blocks)
    wrong = next(index for index, one in enumerate(errors) if one.name == "h.2.mlp.bias")
    errors[wrong] = replace(errors[wrong], errors=(1e-2, nan))
    first = Deviation(1, "weight", "h.2.mlp.bias", (0,), "rank 0", None, error=1e-2, allowed=1e-5)
    report = Report("model=2", "data=1", 2, 2, len(errors), (first,), (), (), tuple(errors))
    figure = draw_errors(report)
    plot = figure.axes[0]
    powers = plot.images[0].get_array()
    assert powers.shape == (rows, 3), "output, loss, weight"
    kinds = [text.get_text() for text in plot.get_xticklabels()]
    assert kinds == ["output", "loss", "weight"]
    [frame] = plot.patches
    [legend] = figure.legends
    told = [text.get_text() for text in legend.get_texts()]
    assert told == ["a difference", "within what rounding allows", "no such tensor", "the first difference"]
    x, y = frame.get_xy()
    assert (kinds[round(x + 0.5)], round(y + 0.5)) == ("weight", framed[1])
    assert powers[framed[1], 2] == pytest.approx(3)
    assert (powers > 0).sum() == 1
    assert "first difference: `h.2.mlp.bias` weight, step 2, rank 0" in plot.get_title()
    assert all(inches < 16 for inches in figure.get_size_inches())


def test_equal_runs_are_drawn_without_a_frame() -> None:
    plot = draw_errors(Report("model=2", "data=1", 2, 2, 0, (), (), (), tuple(_errors(2)))).axes[0]
    assert (plot.get_title(), list(plot.patches)) == ("equal", [])
    assert draw_errors(Report("model=2", "data=1", 2, 2, 0, (), (), ())).axes[0].get_title() == "equal"


def test_imports_of_modules_beside_a_program_are_found(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text("import os\nfrom parts import layers\n")
    assert not uses_ds_topo(program)
    (tmp_path / "parts.py").write_text("from ds_topo import use\n")
    assert uses_ds_topo(program)
