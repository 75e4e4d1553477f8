"""Measure how long a rank plans its load of a checkpoint of 16,384 ranks at ZeRO 3, and how much memory that takes.

    python -m tests.bench.many_ranks [--replicas 2048] [--slices 8] [--parameters 1000] [--into 4096]

The checkpoint has a manifest and the tables that the rank opens, and no tensors. The rank looks up where each of its
elements is, for every parameter.

A rank of ``data=4096`` opens 4 of the 16,384 tables of ``data=2048,model=8`` (two cores, shared with other work):

=====================  =======  =======
parameters               1,000  100,000
=====================  =======  =======
MB of the manifest         2.7     29.7
s to read it               0.9      5.4
s to choose tables         0.2     10.7
s to read them             0.5     39.5
MiB of memory                1      527
=====================  =======  =======
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

from ds_topo.checkpoint.deepspeed_reader import DeepSpeedFiles
from ds_topo.checkpoint.folder import manifest_of
from ds_topo.checkpoint.manifest import (
    NAME,
    Manifest,
    SavedLayout,
    SavedParameter,
    SavedSplit,
    SavedStructure,
    SavedTable,
    to_text,
)
from ds_topo.checkpoint.saved_model import model_of
from ds_topo.checkpoint.table import Elements, Part, Piece, Slice, Table, Vector, partition_of

WIDTH = 1024


def write(folder: Path, replicas: int, slices: int, count: int) -> None:
    """Write the manifest, which lists a table for each rank."""
    names = [f"layers.{number}.weight" for number in range(count)]
    layout = SavedLayout(
        f"data={replicas},model={slices}",
        replicas * slices,
        slices,
        replicas,
        3,
        "DeepSpeedZeroOptimizer_Stage3",
        "bf16",
    )
    shape, ranks = (WIDTH // slices, WIDTH), tuple(range(slices))
    rows = tuple(SavedParameter(name, shape, "bfloat16", ranks, 0) for name in names)
    splits = {name: SavedSplit(0) for name in names}
    tables = tuple(
        SavedTable(
            _name(replica, rank),
            rank,
            (0, count),
            partition=replica,
            partitions=replicas,
        )
        for rank in ranks
        for replica in range(replicas)
    )
    structure = SavedStructure("AdamW", ((tuple(names),),), splits)
    manifest = Manifest("saved", 1, "2026-01-31T12:00:00+00:00", layout, (), rows, {}, structure, tables)
    (folder / NAME).write_text(to_text(manifest))


def _name(replica: int, rank: int) -> str:
    return f"table_replica_{replica}_mp_rank_{rank:02d}.json"


def write_table(path: Path, replicas: int, slices: int, count: int) -> None:
    """Write the table of one rank."""
    replica, rank = int(path.stem.split("_")[2]), int(path.stem.split("_")[-1])
    shape = (WIDTH // slices, WIDTH)
    start, stop = partition_of(shape[0] * shape[1], replica, replicas)
    pieces = tuple(Piece(f"layers.{number}.weight", Slice(shape, 0, slices, rank)) for number in range(count))
    parts = tuple(Part(number, start, stop, number * (stop - start)) for number in range(count))
    tensors = {key: (("states", key), "float32") for key in ("fp32", "exp_avg", "exp_avg_sq")}
    values = {"step": ("step",), "group": ("group",)}
    path.write_text(Table(rank, pieces, (Vector("states.pt", tensors, values, parts),)).to_text())


def main() -> None:
    """Print seconds, memory and the number of tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2048)
    parser.add_argument("--slices", type=int, default=8)
    parser.add_argument("--parameters", type=int, default=1000)
    parser.add_argument("--into", type=int, default=4096, help="the replicas of the job that loads, of one slice each")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, given.replicas, given.slices, given.parameters)
        numel, rank = WIDTH * WIDTH, given.into // 3
        wanted = Elements(Slice((WIDTH, WIDTH)), *partition_of(numel, rank, given.into))
        before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
        manifest = manifest_of(folder)
        assert manifest is not None
        model = model_of(manifest)
        read = time.perf_counter()
        paths = {path for one in model.parameters for path in model.tables_of(one, wanted)}
        found = time.perf_counter()
        for path in paths:
            write_table(folder / path, given.replicas, given.slices, given.parameters)
        source, opened = DeepSpeedFiles(model, folder), time.perf_counter()
        elements = 0
        for one in model.parameters:
            parts = source._of_slice(one, "exp_avg", None, wanted)
            elements += sum(each.part.stop - each.part.start for own in parts.values() for each in own)
        ended, after = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert elements >= (wanted.stop - wanted.start) * given.parameters
        size, ranks = (folder / NAME).stat().st_size, given.replicas * given.slices
        print(f"{ranks:,} ranks, {given.parameters:,} parameters; rank {rank:,} of {given.into:,} opens", end=" ")
        print(f"{len(paths):,} of {ranks:,} tables. Manifest of {size / 1e6:.1f} MB: {read - begun:.2f} s;", end=" ")
        print(f"tables chosen: {found - read:.2f} s; tables read: {ended - opened:.2f} s;", end=" ")
        print(f"memory: {(after - before) / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
