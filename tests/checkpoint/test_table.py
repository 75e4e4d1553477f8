"""The tables that ranks record while they save equal what the files themselves say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_topo import checkpoint
from ds_topo.checkpoint import deepspeed_reader
from ds_topo.checkpoint.deepspeed_reader import DeepSpeedFiles, tables_of_files
from ds_topo.checkpoint.manifest import SavedTable
from ds_topo.checkpoint.saved_model import model_of
from ds_topo.checkpoint.table import Box, Elements, Part, Piece, Slice, Table, Vector
from ds_topo.errors import DamagedCheckpointError
from tests.checkpoint.continued_jobs import TAG
from tests.checkpoint.gpt_jobs import Layout, save
from tests.checkpoint.matrix.pairs import SPECIAL, Side, draw_pair, save_all
from tests.support.exhaustive import mark_exhaustive
from tests.support.world import Worlds

Row = tuple[Any, ...]


def _rows_of(table: Table) -> set[Row]:
    """Spell out every tensor of every parameter: its name, key, type and boxes in the whole, and its place in files."""
    found: set[Row] = set()
    for vector in table.vectors:
        for number, start, stop, offset in vector.parts:
            name, own = table.pieces[number]
            where = name, own.whole_shape, tuple(Elements(own, start, stop).boxes()), vector.file, offset
            found |= {(*where, key, *place) for key, place in vector.tensors.items()}
            found |= {(name, key, vector.file, path) for key, path in vector.values.items()}
    return found


def _rows(path: Path) -> tuple[set[Row], set[Row]]:
    """Return the recorded rows of a checkpoint, and those that its files yield without them."""
    manifest = checkpoint.look_at(path.parent, path.name, digests=True).manifest
    assert manifest is not None
    tables = [Table.from_text((path / one.path).read_text(), one.path) for one in manifest.tables]
    of_tables = {one.path: _rows_of(table) for table, one in zip(tables, manifest.tables, strict=True)}
    recorded = set[Row]().union(*of_tables.values())
    model = model_of(manifest)
    for row in recorded - {row for row in recorded if "buffer" in row}:
        assert any(row in of_tables[one] for one in model.tables_of(row[0])), "the manifest says which table has it"
    found = tables_of_files(DeepSpeedFiles(replace(model, tables=()), path))
    return recorded, set[Row]().union(*map(_rows_of, found))


def _require_equal(path: Path) -> None:
    recorded, found = _rows(path)
    assert recorded
    assert sorted(map(str, recorded - found)) == sorted(map(str, found - recorded)) == []


def _sides(numbers: range) -> list[Side]:
    pairs = [draw_pair(0, number) for number in numbers]
    drawn = [side for pair in pairs for side in (pair.source, pair.target) if not (side.is_stock or side.experts)]
    return [side for number, side in enumerate(drawn) if side not in drawn[:number]]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param(range(8), id="few"),
        *(
            pytest.param(range(first, first + 25), id=f"{first}", marks=pytest.mark.exhaustive)
            for first in (8, 33, 58, 83, SPECIAL, SPECIAL + 25)
        ),
    ],
)
def test_tables_of_random_engines_equal_their_files(world: Worlds, tmp_path: Path, numbers: range) -> None:
    sides = _sides(numbers)
    for ranks in {side.ranks for side in sides}:
        own = [(number, side) for number, side in enumerate(sides) if side.ranks == ranks]
        cases = [(side, tmp_path / str(number), "live") for number, side in own]
        results = world(ranks).run(save_all, cases, deadline=20 + 8 * len(cases))
        for (number, side), (kind, *_) in zip(own, results[0], strict=True):
            assert kind == "done", side
            _require_equal(tmp_path / str(number) / "saved")


MIXED = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
SUMS = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}
"""``BF16_Optimizer``, with and without ZeRO."""
LAYOUTS = [
    Layout("pipe=2,data=2"),
    Layout("pipe=2,data=2", 0, settings=SUMS),
    Layout("model=2,data=2", 3, is_pipeline=False),
    Layout("pipe=2,data=2", settings=MIXED),
    Layout("data=2,shard=2", 3, is_pipeline=False),
    Layout("data=2,shard=2,pipe=2", 1),
]


@pytest.mark.parametrize("layout", mark_exhaustive(LAYOUTS, lambda number, _: number < 2), ids=str)
def test_tables_of_slices_and_ties_equal_their_files(world: Worlds, tmp_path: Path, layout: Layout) -> None:
    world(layout.ranks).run(save, layout, tmp_path)
    _require_equal(tmp_path / TAG)


@pytest.mark.thorough
def test_rank_opens_only_tables_at_zero_3_that_hold_its_elements(
    world: Worlds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world(4).run(save_all, [(Side("data=2,model=2", 3), tmp_path, "live"), (Side("data=4", 3), tmp_path / "4", "live")])
    opened: list[str] = []

    def text_of(path: Path) -> str:
        opened.append(path.name)
        return path.read_text()

    monkeypatch.setattr(deepspeed_reader, "text_of", text_of)

    def read(
        path: Path, name: str, place: int, slices: int, *, is_older: bool = False
    ) -> tuple[torch.Tensor, set[str]]:
        """Read the second half of a slice."""
        found = checkpoint.look_at(path, "saved").manifest
        assert found is not None
        tables = tuple(replace(one, partition=0, partitions=1) for one in found.tables)
        source = DeepSpeedFiles(model_of(replace(found, tables=tables) if is_older else found), path / "saved")
        numel = source.model.parameters[name].numel_of_slice(slices)
        opened.clear()
        half = source.elements(name, "exp_avg", place, slices, numel // 2, numel)
        opened_here = {"_".join(one.split("_")[2:6]).removesuffix(".json") for one in opened}
        assert torch.equal(half, source.elements(name, "exp_avg", place, slices, 0, numel)[numel // 2 :])
        assert source.group_of(name)["lr"] == 0.01
        return half, opened_here

    of_four = {f"{replica}_mp_rank_00" for replica in range(4)}
    whole, ranks = read(tmp_path / "4", "first.weight", 0, 1)
    assert ranks == {"2_mp_rank_00", "3_mp_rank_00"}
    again, ranks = read(tmp_path / "4", "first.weight", 0, 1, is_older=True)
    assert (ranks, torch.equal(whole, again)) == (of_four, True)
    _, ranks = read(tmp_path, "first.weight", 0, 1)
    assert ranks == {"1_mp_rank_00"}, "slices hold equal copies"
    whole, ranks = read(tmp_path, "blocks.0.split.expand.weight", 0, 1)
    assert ranks == {"0_mp_rank_01", "1_mp_rank_01"}, "the second half of the rows is the second slice"
    part, ranks = read(tmp_path, "blocks.0.split.expand.weight", 1, 2)
    assert ranks == {"1_mp_rank_01"}
    assert torch.equal(whole[-len(part) :], part)
    _, ranks = read(tmp_path, "blocks.0.split.contract.weight", 0, 1)
    assert ranks == {"1_mp_rank_00", "1_mp_rank_01"}, "the last rows are in both slices of the columns"


# -- the text of a table ----------------------------------------------------------------------------------------------

TABLE = Table(
    3,
    (Piece("0.weight", Slice((4, 6), 1, 2, 1, 3)), Piece("0.bias", Slice((4,)))),
    (
        Vector(
            "a.pt",
            {"fp32": (("states", 0), "float32")},
            {"step": ("state", 0, "step")},
            (Part(0, 5, 9, 0), Part(1, 0, 2, 4)),
        ),
        Vector("b.pt", {"weight": (("module", "#0.weight"), "bfloat16")}, {}, (Part(0, 0, 24, 0),)),
    ),
)


def test_text_of_a_table_reads_back() -> None:
    assert Table.from_text(TABLE.to_text(), "table") == TABLE
    names = ["0.bias", "0.weight", "1.bias"]
    assert TABLE.described("table", names, (0, 1)) == SavedTable("table", 3, (0, 2))
    vectors = replace(TABLE, vectors=TABLE.vectors[:1])
    assert vectors.described("table", names, (0, 2)) == SavedTable("table", 3, (0, 2), False, 0, 2)
    assert vectors.described("table", names, (1, 2)) == SavedTable("table", 3, (0, 2)), "it holds other elements"
    assert len(_rows_of(TABLE)) == 5, "a master weight and a step of two parameters, and a weight"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"a.pt"', "7"),
        ("[0,5,9,0]", "[0,5,99,0]"),
        ("[1,0,2,4]", "[2,0,2,4]"),
        ("[0,0,24,0]", "[0,0,25,0]"),
        ("[0,0,24,0]", "[0,0,24,-1]"),
        ("[4,6]", "[-4,6]"),
        ("[4,6],1", "[4,6],2"),
        ('"pieces"', '"parts"'),
        ("{", "["),
    ],
)
def test_changed_text_of_a_table_is_refused(old: str, new: str) -> None:
    assert old in TABLE.to_text()
    with pytest.raises(DamagedCheckpointError, match="table: "):
        Table.from_text(TABLE.to_text().replace(old, new, 1), "table")


@given(st.data())
def test_span_around_a_box_has_its_elements(data: st.DataObject) -> None:
    shape, stride = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))), data.draw(st.integers(1, 2))
    dim, slices = data.draw(st.integers(0, len(shape) - 1)), data.draw(st.integers(1, 3))
    shape = tuple(size * stride if number == dim else size for number, size in enumerate(shape))
    own = Slice(shape, dim, slices, data.draw(st.integers(0, slices - 1)), stride)
    lows = [data.draw(st.integers(0, size - 1)) for size in own.whole_shape]
    sizes = [data.draw(st.integers(1, size - low)) for low, size in zip(lows, own.whole_shape, strict=True)]
    inside = torch.zeros(own.whole_shape, dtype=torch.bool)
    inside[tuple(slice(low, low + size) for low, size in zip(lows, sizes, strict=True))] = True
    held = torch.cat(inside.chunk(stride * slices, dim)[own.place :: slices], dim).flatten().nonzero().flatten()
    expected = (int(held[0]), int(held[-1]) + 1) if len(held) else None
    assert own.span_of(Box(tuple(lows), tuple(sizes))) == expected
