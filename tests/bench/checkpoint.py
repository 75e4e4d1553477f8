"""Time to save and load an engine's checkpoint: ours beside DeepSpeed's own.

    OMP_NUM_THREADS=1 python -m tests.bench.checkpoint [--width 1024] [--layers 12] [--zero 1] [--rounds 8] [--folder .]
    OMP_NUM_THREADS=1 python -m tests.bench.checkpoint --width 4 --layers 2500    # 5,000 tensors

Sides alternate in the same two processes; the output has medians and quartiles of the slower rank, and ratios.
DeepSpeed's own function leaves files in the system's cache. "flushed" is its own function followed by an fsync of every
file, by the rank that has written it.

Medians in milliseconds on an idle machine of two cores with ext4; the goals are ratios to DeepSpeed's times. The disk
varies: the quartiles of a save of 1,074 MB by DeepSpeed were 0.7 and 3.1 s.

=====================  ======  ======  ========  =================
..                      34 MB  202 MB  1,074 MB  5,000 tensors
=====================  ======  ======  ========  =================
save: DeepSpeed            45     216     1,884  495
save: DeepSpeed, flushed   48     194     1,481  271
save: ours                 70     225     1,815  826, goal 3 times
goal: 1.1 times          1.46    1.16      1.23  3.05
in the background          23      45       123  430
goal: 0.1 times          0.48    0.23      0.08
load: DeepSpeed            10      83       828  446
load: ours                 23      98       616  1,035, goal 3 times
goal: 1.05 times         2.30    1.18      0.74  2.32
=====================  ======  ======  ========  =================

Of 5,000 tensors, describing where they are (``table.py``) takes a third of a save.

Small checkpoints miss the goals by a constant time:

- A save writes and flushes its files in the 51 ms of DeepSpeed's flushed save; digests take no time, because they are
  computed while the disk is busy. The manifest, ``latest`` and their two folders are flushed afterwards, 3 to 5 ms.
  Two agreements of all ranks take 1 ms each, rank 0's decisions before and after the save 1 to 2 ms.
- A background save of 34 MB copies 21 MB on rank 0, 2 ms at best and 4 to 5 ms while both ranks copy. The agreement,
  rank 0's preparations, and DeepSpeed's barriers and all-reduces take 8 ms. Of 202 MB rank 0 copies 126 MB in about
  30 ms, and a tenth of DeepSpeed's save is 23 ms.
- A load has two agreements and two decisions of rank 0, and checks the manifest, archives and types before anything
  changes, 5 ms in total; a twentieth of DeepSpeed's load of 34 MB is 0.5 to 1 ms. Mapping the files into memory instead
  of reading them would take 6 ms less, but a disk that fails would then kill the process without a message.

Loading does not compare tensors with a checksum by default, because every way to do that costs more than a tenth of its
time. Of 1,074 MB at ZeRO 1, in the page cache and on busy cores, ``load: ours`` took 756 ms; with a sum of each page
while torch reads 1.50 times that, with the CRC-32 of torch's archives 1.81 times, and with ``verify="digests"`` 1.97
times. The fastest rounds have ratios of 1.55, 1.97 and 1.77.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import tempfile
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import numpy as np
import torch
import torch.distributed as dist

from ds_topo import PipelineParallelGrid, checkpoint
from ds_topo.checkpoint.folder import flush
from ds_topo.checkpoint.saving import deepspeeds_part
from tests.bench.linear_layers import engine_of_layers
from tests.bench.sides import Times, alternate, ratios, table
from tests.support.ranks import run_ranks


class CheckedFile(io.FileIO):
    """A file that computes a checksum of what torch reads from it, while that is in the processor's cache."""

    check: Callable[[memoryview], object]

    def readinto(self, buffer: Any) -> int:
        room, read = memoryview(buffer).cast("B"), 0
        while read < len(room) and (count := super().readinto(room[read : read + (1 << 18)])):
            self.check(room[read : read + count])
            read += count
        return read


def sum_of(part: memoryview) -> None:
    """Add up each page of a part, as 64-bit numbers: the cheapest check that sees every changed bit."""
    np.frombuffer(part[: len(part) // 4096 * 4096], np.uint64).reshape(-1, 512).sum(1)


def loading_checked(load: Callable[[], object], check: Callable[[memoryview], object]) -> Callable[[], None]:
    """Return a function that loads, and checks all that DeepSpeed reads."""
    read = torch.load

    def read_checked(path: Any, *arguments: Any, **options: Any) -> Any:
        if options.get("mmap"):
            return read(path, *arguments, **options)
        file: Any = CheckedFile(path)
        file.check = check
        with file:
            return read(file, *arguments, **options)

    def load_checked() -> None:
        with mock.patch.object(torch, "load", read_checked):
            load()

    return load_checked


def measure(width: int, layers: int, zero: int, rounds: int, folder: Path) -> tuple[Times, Times, int]:
    """Return seconds of saving (in the background: of the call alone) and of loading, and bytes of a checkpoint."""
    warnings.simplefilter("ignore")
    deepspeed.init_distributed(verbose=False)
    with PipelineParallelGrid(f"data={dist.get_world_size()}") as grid:
        engine = engine_of_layers(grid, width, layers, zero)
        theirs, flushed, ours, background = (folder / name for name in ("theirs", "flushed", "ours", "background"))
        tag = "0"

        def save_theirs(where: Path) -> None:
            with deepspeeds_part(engine):
                engine.save_checkpoint(str(where), tag=tag)

        def save_flushed() -> None:
            save_theirs(flushed)
            for path in sorted((flushed / tag).iterdir())[dist.get_rank() :: dist.get_world_size()]:
                flush(path)
            dist.barrier()

        started: list[checkpoint.BackgroundSave] = []

        def remove_others() -> None:
            """Save a new checkpoint each time and remove the previous one, which frees the memory of its files."""
            nonlocal tag
            while started:
                started.pop().finish()
            dist.barrier()
            if dist.get_rank() == 0:
                for old in (path for where in (theirs, flushed, ours, background) for path in where.glob("*[0-9]")):
                    if old.name != tag:
                        shutil.rmtree(old)
                os.sync()
            dist.barrier()
            tag = str(int(tag) + 1)

        def load_theirs() -> Any:
            with deepspeeds_part(engine):
                return engine.load_checkpoint(str(theirs), tag=(theirs / "latest").read_text())

        def load_ours() -> Any:
            return checkpoint.load(engine, ours)

        saving = alternate(
            {
                "save: DeepSpeed": lambda: save_theirs(theirs),
                "save: DeepSpeed, flushed": save_flushed,
                "save: ours": lambda: checkpoint.save(engine, ours, tag),
                "save: ours, background": lambda: started.append(
                    checkpoint.save_in_background(engine, background, tag)
                ),
            },
            rounds,
            remove_others,
            warmup=1,
        )
        remove_others()
        loading: Times = {}
        if zero != 3:  # at this stage DeepSpeed loads only into engines that have not trained
            loading = alternate(
                {
                    "load: DeepSpeed": load_theirs,
                    "load: ours": load_ours,
                    "load: ours, sums while reading": loading_checked(load_ours, sum_of),
                    "load: ours, CRC-32 while reading": loading_checked(load_ours, zlib.crc32),
                    "load: ours, digests": lambda: checkpoint.load(engine, ours, verify="digests"),
                },
                rounds,
                lambda: None,
                warmup=1,
            )
        size = checkpoint.checkpoints_in(ours)[0].bytes
        engine.destroy()
    return saving, loading, size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--zero", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    options = (arguments.width, arguments.layers, arguments.zero, arguments.rounds, folder)
    try:
        saving, loading, size = run_ranks(2, measure, *options, deadline=900, timeout=300)[0]
    finally:
        shutil.rmtree(folder)
    print(f"{size / 1e6:,.0f} MB in two ranks at ZeRO {arguments.zero}\n{table(saving)}")
    pairs = [
        ("save: ours", "save: DeepSpeed"),
        ("save: ours", "save: DeepSpeed, flushed"),
        ("save: ours, background", "save: ours"),
        ("save: ours, background", "save: DeepSpeed, flushed"),
    ]
    print(ratios(saving, pairs))
    if loading:
        print(table(loading))
        print(ratios(loading, [(side, "load: ours") for side in loading]))
        fastest = min(loading["load: ours"])
        print("fastest rounds:", ", ".join(f"{side} {min(times) / fastest:.2f}" for side, times in loading.items()))


if __name__ == "__main__":
    main()
