"""Measure the tables of a large checkpoint: their bytes, and the time and memory to plan one rank's load.

    python -m tests.bench.tables [--folder .]

The checkpoint is synthetic: ``pipe=16,data=128,model=8`` (16,384 ranks) at ZeRO 1 with 100,000 parameters. One rank of
``pipe=8,data=256,model=8`` finds where the elements of its partition are. The bytes of a model of 70 billion parameters
on 1,024 ranks are those of real tables, of one rank of each kind, times the number of such ranks.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
import tracemalloc
from pathlib import Path

from ds_topo.checkpoint.deepspeed_reader import DeepSpeedFiles
from ds_topo.checkpoint.manifest import (
    Manifest,
    SavedLayer,
    SavedLayout,
    SavedParameter,
    SavedSplit,
    SavedStructure,
    SavedTable,
    from_text,
    to_text,
)
from ds_topo.checkpoint.saved_model import model_of
from ds_topo.checkpoint.table import GROUP, MASTER, WEIGHT, Order, Part, Piece, Table, Vector

STAGES, SLICES, REPLICAS, PARAMETERS, SHAPE = 16, 8, 128, 100_000, (512, 4096)
STATES = ("exp_avg", "exp_avg_sq")
BASE = ("optimizer_state_dict", "base_optimizer_state", "state", 0)


def tables_of_rank(
    names: list[str],
    shape: tuple[int, ...],
    model_rank: int,
    place: tuple[int, int],
    replica: tuple[int, int],
    is_zero_3: bool,
) -> Table:
    """Return the table of a rank: its partition, and on the first replica the weights."""
    pieces = [Piece(name, shape, 0, place[1], place[0]) for name in names]
    numel, partitions = math.prod(shape), replica[1]
    step = -(-numel // partitions) if is_zero_3 else numel
    size = -(-numel * len(names) // (2 * partitions)) * 2
    low, high = replica[0] * size // numel, -(-(replica[0] + 1) * size // numel)
    own = range(len(names)) if is_zero_3 else range(low, min(high, len(names)))
    order = Order([(number, number * step) for number in own], *replica)
    parts = tuple(order.parts(pieces, size, is_by_parameter=is_zero_3))
    file = f"zero_pp_rank_{replica[0]}_mp_rank_{model_rank:02d}_optim_states.pt"
    paths = {key: ((*BASE, key), "float32") for key in STATES}
    tensors = {MASTER: (("optimizer_state_dict", "single_partition_of_fp32_groups", 0), "float32"), **paths}
    values = {"step": (*BASE, "step"), GROUP: (*BASE[:2], "param_groups", 0)}
    vectors = [Vector(file, tensors, values, parts)]
    if replica[0] == 0 and not is_zero_3:
        whole = f"mp_rank_{model_rank:02d}_model_states.pt"
        for number, name in enumerate(names):
            vectors.append(Vector(whole, {WEIGHT: (("module", name), "bfloat16")}, {}, (Part(number, 0, numel, 0),)))
    used = sorted({part.piece for vector in vectors for part in vector.parts})
    at = {piece: number for number, piece in enumerate(used)}
    renumbered = [
        Vector(
            one.file,
            one.tensors,
            one.values,
            tuple(Part(at[part.piece], part.start, part.stop, part.offset) for part in one.parts),
        )
        for one in vectors
    ]
    return Table(model_rank, tuple(pieces[number] for number in used), tuple(renumbered))


def make(folder: Path) -> Manifest:
    """Write all tables and return the manifest."""
    per_stage = PARAMETERS // STAGES
    names = [f"{number}.weight" for number in range(PARAMETERS)]
    tables: list[SavedTable] = []
    rows = []
    for model_rank in range(STAGES * SLICES):
        stage, place = divmod(model_rank, SLICES)
        own = names[stage * per_stage : (stage + 1) * per_stage]
        for replica in range(REPLICAS):
            table = tables_of_rank(own, SHAPE, model_rank, (place, SLICES), (replica, REPLICAS), False)
            path = f"table_replica_{replica}_mp_rank_{model_rank:02d}.json"
            (folder / path).write_text(table.to_text())
            tables.append(table.described(path, own))
    for stage in range(STAGES):
        ranks = tuple(range(stage * SLICES, (stage + 1) * SLICES))
        rows += [
            SavedParameter(name, SHAPE, "bfloat16", ranks, 0)
            for name in names[stage * per_stage : (stage + 1) * per_stage]
        ]
    groups = tuple((tuple(names[stage * per_stage : (stage + 1) * per_stage]),) for stage in range(STAGES))
    structure = SavedStructure(
        "AdamW",
        groups,
        {name: SavedSplit(0) for name in names},
        layers=(SavedLayer("Linear"),) * PARAMETERS,
        bounds=tuple(range(0, PARAMETERS + 1, per_stage)),
    )
    spec = f"pipe={STAGES},data={REPLICAS},model={SLICES}"
    world = STAGES * SLICES * REPLICAS
    layout = SavedLayout(spec, world, STAGES * SLICES, REPLICAS, 1, "DeepSpeedZeroOptimizer", "bf16", True)
    return Manifest("saved", 1, "", layout, (), tuple(rows), {}, structure, tuple(tables))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="folder on the disk to use")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        manifest = make(folder)
        sizes = [path.stat().st_size for path in folder.iterdir()]
        text = to_text(manifest)
        print(f"{len(sizes):,} tables: {sum(sizes) / 1e6:.0f} MB, the median {sorted(sizes)[len(sizes) // 2]:,} bytes")
        print(
            f"manifest {len(text) / 1e6:.1f} MB, with {len(str(manifest.tables)) / 1e6:.1f} MB for the list of tables"
        )
        started = time.perf_counter()
        manifest = from_text(text, "manifest")
        parsed = time.perf_counter() - started
        started = time.perf_counter()
        files = DeepSpeedFiles(model_of(manifest), folder)
        described = time.perf_counter() - started
        first, count = 77 * 48, 49  # a partition of 12,500 parameters over 256 ranks
        tracemalloc.start()
        started = time.perf_counter()
        found = [
            files._parts(f"{number}.weight", key) for number in range(first, first + count) for key in (MASTER, *STATES)
        ]
        seconds, (_, peak) = time.perf_counter() - started, tracemalloc.get_traced_memory()
        tracemalloc.stop()
        print(f"manifest parsed in {parsed:.1f} s, model described in {described:.1f} s")
        print(f"{len(files._known)} tables read, {sum(map(len, found)):,} parts, {seconds:.2f} s, {peak / 1e6:.1f} MB")
    names = [f"model.layers.{layer}.{kind}.weight" for layer in range(80) for kind in range(9)]
    for spec, slices, replicas, is_zero_3 in (
        ("data=1024, ZeRO 3", 1, 1024, True),
        ("data=128,model=8, ZeRO 1", 8, 128, False),
    ):
        own = tables_of_rank(names, (8192 // slices, 11_900), 0, (0, slices), (1, replicas), is_zero_3)
        zero = tables_of_rank(names, (8192 // slices, 11_900), 0, (0, slices), (0, replicas), is_zero_3)
        total = slices * (len(zero.to_text()) + (replicas - 1) * len(own.to_text()))
        print(f"70 B parameters, {spec}: {total / 1e6:.1f} MB of tables, {len(own.to_text()):,} bytes on a rank")


if __name__ == "__main__":
    main()
