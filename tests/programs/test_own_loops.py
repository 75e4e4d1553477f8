"""Megatron-DeepSpeed, GPT-NeoX and torchtitan do on a grid, through their own loops, what they do without it.

Compared are the samples that each rank reads, losses, rates, norms, loss scales, skipped steps and evaluations.
``MEGATRON_DEEPSPEED``, ``GPT_NEOX`` and ``TORCHTITAN`` give the folders of the programs' source.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.programs import gpt_neox, megatron_deepspeed, torchtitan
from tests.programs.cases import SAVED_STEP, STEPS, Case
from tests.support.ranks import run_ranks

pytest.importorskip("transformers")
pytestmark = pytest.mark.exhaustive

PROGRAMS: dict[str, tuple[Any, str]] = {
    "Megatron-DeepSpeed": (megatron_deepspeed, "MEGATRON_DEEPSPEED"),
    "GPT-NeoX": (gpt_neox, "GPT_NEOX"),
    "torchtitan": (torchtitan, "TORCHTITAN"),
}
EXPERTS = ("--num-experts", "4", "--moe-expert-parallel-size", "2", "--moe-min-capacity", "2")
EXPERTS += ("--expert-interval", "2", "--create-moe-param-group")
TOP2 = ("--topk", "2", "--disable-moe-top2-2nd-expert-sampling")
SLICED = ("--enable-expert-tensor-parallelism",)
CASES: list[tuple[str, Case, tuple[str, ...]]] = [
    ("Megatron-DeepSpeed", Case("pipeline", pipe=2, model=2), ("pipe=2,model=2", "model=2,pipe=2")),
    ("Megatron-DeepSpeed", Case("fp16", pipe=2, zero=1, precision="fp16"), ("pipe=2,data=2", "data=2,pipe=2")),
    ("Megatron-DeepSpeed", Case("tensor", model=2, zero=2), ("model=2,data=2",)),
    ("Megatron-DeepSpeed", Case("sequence", seq=2), ("seq=2,data=2",)),
    ("Megatron-DeepSpeed", Case("sequence-zero1", seq=2, zero=1), ("data=2,seq=2", "seq=2,data=2")),
    ("Megatron-DeepSpeed", Case("sequence-experts", seq=2, zero=1, options=EXPERTS), ("data=2,seq=2",)),
    ("Megatron-DeepSpeed", Case("experts", options=EXPERTS), ("data=4",)),
    ("Megatron-DeepSpeed", Case("experts-zero1", zero=1, options=EXPERTS), ("data=4",)),
    ("Megatron-DeepSpeed", Case("experts-top2", zero=1, options=EXPERTS + TOP2), ("data=4",)),
    ("Megatron-DeepSpeed", Case("experts-residual", options=(*EXPERTS, "--mlp-type", "residual")), ("data=4",)),
    ("Megatron-DeepSpeed", Case("experts-pipeline", pipe=2, options=EXPERTS), ("pipe=2,data=2", "data=2,pipe=2")),
    (
        "Megatron-DeepSpeed",
        Case("experts-tensor", model=2, zero=1, options=EXPERTS + SLICED),
        ("data=2,model=2", "model=2,data=2"),
    ),
    ("GPT-NeoX", Case("pipeline", pipe=2, model=2), ("pipe=2,model=2", "model=2,pipe=2")),
    ("GPT-NeoX", Case("pipeline-zero1", pipe=2, zero=1), ("data=2,pipe=2",)),
    ("GPT-NeoX", Case("tensor", model=2), ("model=2,data=2",)),
    ("GPT-NeoX", Case("zero2", zero=2), ("data=4",)),
    ("GPT-NeoX", Case("zero3", zero=3), ("data=4",)),
    ("GPT-NeoX", Case("fp16", model=2, zero=1, precision="fp16"), ("model=2,data=2",)),
    ("torchtitan", Case("tensor", model=2), ("shard=2,model=2",)),  # torch itself refuses to clip with tp first
    ("torchtitan", Case("pipeline", pipe=2), ("pipe=2,shard=2", "shard=2,pipe=2")),
    ("torchtitan", Case("hybrid", options=("replicate",)), ("data=2,shard=2",)),
]
ORDER = ("pipe", "data", "shard", "seq", "model")
"""The order of axes in the programs' own groups."""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that makes a copy of a program once, and skips the test where its source is absent."""

    @cache
    def copied(program: str) -> str:
        module, variable = PROGRAMS[program]
        source = os.environ.get(variable)
        if source is None:
            pytest.skip(f"the source of {program} is needed: set {variable} to the folder of a clone")
        return str(module.copy_of(Path(source), tmp_path_factory.mktemp(program)))

    return copied


def run(programs: Any, program: str, spec: str, case: Case, folder: Path, **options: bool) -> dict[Any, list[Any]]:
    """Return what each rank did, by its place in the program's own groups."""
    pretrain = PROGRAMS[program][0].pretrain
    arguments = (programs(program), spec, case, str(folder))
    return dict(run_ranks(4, _call, pretrain, arguments, options, deadline=240))


def _call(pretrain: Any, arguments: tuple[Any, ...], options: dict[str, bool]) -> Any:
    return pretrain(*arguments, **options)


def near(mine: Any, theirs: Any) -> bool:
    """Compare numbers with a tolerance, everything else exactly."""
    if isinstance(theirs, (tuple, list)):
        return len(mine) == len(theirs) and all(map(near, mine, theirs))
    if isinstance(theirs, dict):
        return mine.keys() == theirs.keys() and all(near(mine[name], theirs[name]) for name in theirs)
    return bool(mine == pytest.approx(theirs, rel=1e-6) if isinstance(theirs, float) else mine == theirs)


def compare(found: dict[Any, list[Any]], stock: dict[Any, list[Any]], spec: str) -> None:
    """Compare each place of the layout: exactly, or nearly where the ranks of a sum have another order."""
    assert found.keys() == stock.keys()
    axes = [axis.split("=")[0] for axis in spec.split(",")]
    for place, theirs in stock.items():
        assert len(theirs) > STEPS - SAVED_STEP
        if axes == [axis for axis in ORDER if axis in axes]:
            assert found[place] == theirs, place
        for mine, expected in zip(found[place], theirs, strict=True):
            assert near(mine, expected), f"{place}: {mine} on the grid, {expected} with stock DeepSpeed"


@pytest.mark.parametrize(("program", "case", "specs"), CASES, ids=str)
def test_program_trains_on_a_grid_as_with_stock_deepspeed(
    programs: Any, program: str, case: Case, specs: tuple[str, ...], tmp_path: Path
) -> None:
    stock = run(programs, program, "stock", case, tmp_path)
    for spec in specs:
        compare(run(programs, program, spec, case, tmp_path), stock, spec)


def test_sequence_parallel_zero3_trains_as_zero1(programs: Any, tmp_path: Path) -> None:
    """Stock DeepSpeed halves gradients over two ranks along ``seq`` at ZeRO 3; a grid does not.

    At ZeRO 3 the program's parameters have no shape when it chooses those that decay, so it runs without decay here.
    """
    case = Case("sequence-zero3", seq=2, zero=3, options=("--weight-decay", "0"))
    found = run(programs, "Megatron-DeepSpeed", "seq=2,data=2", case, tmp_path)
    stock = run(programs, "Megatron-DeepSpeed", "stock", replace(case, zero=1), tmp_path)
    for place, theirs in stock.items():
        for mine, expected in zip(found[place], theirs, strict=True):
            assert near(mine, expected), f"{place}: {mine} at ZeRO 3, {expected} with stock DeepSpeed at ZeRO 1"


@pytest.mark.parametrize(
    ("program", "case", "saver", "loader"),
    [
        ("Megatron-DeepSpeed", Case("pipeline", pipe=2, model=2), "pipe=2,model=2", "model=2,pipe=2"),
        ("Megatron-DeepSpeed", Case("stock's", model=2, zero=1), "stock", "model=2,data=2"),
        ("Megatron-DeepSpeed", Case("sequence", seq=2, zero=1), "seq=2,data=2", "data=2,seq=2"),
        ("Megatron-DeepSpeed", Case("experts", pipe=2, options=EXPERTS), "pipe=2,data=2", "data=2,pipe=2"),
        ("GPT-NeoX", Case("pipeline", pipe=2, model=2), "model=2,pipe=2", "pipe=2,model=2"),
        ("GPT-NeoX", Case("stock's", model=2, zero=1), "stock", "model=2,data=2"),
        ("torchtitan", Case("stock's", model=2), "stock", "shard=2,model=2"),
    ],
    ids=str,
)
def test_program_loads_in_one_order_what_it_saved_in_another(
    programs: Any, program: str, case: Case, saver: str, loader: str, tmp_path: Path
) -> None:
    found = []
    for layouts in (("stock", "stock"), (saver, loader)):
        folder = tmp_path / "-".join(layouts).replace("=", "")
        folder.mkdir()
        run(programs, program, layouts[0], case, folder, save=True)
        found.append(run(programs, program, layouts[1], case, folder, load=True))
    compare(found[1], found[0], "model=2,data=2")
