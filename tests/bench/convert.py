"""Measure the time to convert a checkpoint, compared with reading and writing as many bytes, and with DeepSpeed.

    OMP_NUM_THREADS=1 python -m tests.bench.convert [--width 2048] [--layers 16] [--rounds 3] [--folder .]

A checkpoint of ZeRO 1 on two ranks is converted to other numbers of replicas and to ZeRO 3. In turn with that, its
files are copied and flushed. "digested" reads the copies once more for their SHA-256, which every checkpoint's manifest
has. The benchmark also prints the memory that a conversion takes beside the files that it maps, and the bytes of the
largest parameter.

The commands ``ds-topo convert`` and DeepSpeed's ``ds_to_universal.py`` are then run in turn on the same checkpoint.
Last, two ranks load a checkpoint of their own layout by DeepSpeed's function and by ours, and one of four ranks with
``convert=True``.

Seconds on an idle machine of two cores with ext4:

=============================  =======  ========
..                               34 MB  1,074 MB
=============================  =======  ========
copied, digested                  0.05      1.49
data=2 -> data=4                  0.06      0.72
ds-topo convert                   1.90      2.63
ds_to_universal.py                2.02      6.55
load: DeepSpeed                   0.02      0.63
load: ours                        0.02      0.50
load: ours, converted             0.05      0.32
memory of its own for the last       0         0
=============================  =======  ========

``import torch`` takes 1.39 s of both commands, and ``import deepspeed`` with it 1.84 s. Without imports ours is 6 times
faster at 1 GB. The commands take 1.84 s + 0.74 s per GB and 1.84 s + 4.4 s per GB, so ours is 5 times faster from about
10 GB on.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import deepspeed
import torch.distributed as dist

from ds_topo import PipelineParallelGrid, checkpoint
from ds_topo.checkpoint.disk import digest_of, flush
from ds_topo.checkpoint.saving import deepspeeds_part
from tests.bench.linear_layers import engine_of_layers
from tests.support.ranks import run_ranks

TAG = "saved"


def save(width: int, layers: int, folder: Path) -> None:
    """Train a step and save a checkpoint, on one rank."""
    warnings.simplefilter("ignore")
    deepspeed.init_distributed(verbose=False)
    with PipelineParallelGrid(f"data={dist.get_world_size()}") as grid:
        engine = engine_of_layers(grid, width, layers, 1)
        checkpoint.save(engine, folder, TAG)
        engine.destroy()


def copied(source: Path, to: Path, *, digested: bool) -> None:
    """Copy all files and flush them to the disk."""
    shutil.copytree(source, to / TAG)
    for path in (to / TAG).iterdir():
        flush(path)
        if digested:
            digest_of(path)


class OwnMemory:
    """Sample the peak of this process's memory that does not belong to files."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._first = self.most = _own_bytes()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> OwnMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def more(self) -> int:
        """The peak in bytes, minus the memory at the start."""
        return self.most - self._first

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            self.most = max(self.most, _own_bytes())


def _own_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def commands(source: Path, to: Path) -> dict[str, Callable[[], object]]:
    """Return the commands that convert a checkpoint to another number of replicas, of ours and of DeepSpeed."""
    python = [sys.executable, "-W", "ignore", "-m"]
    ours = [*python, "ds_topo", "convert", str(source), str(to), "--topology", "data=4"]
    theirs = [
        *python,
        "deepspeed.checkpoint.ds_to_universal",
        "--input_folder",
        str(source),
        "--output_folder",
        str(to),
    ]

    def run(command: list[str]) -> Callable[[], object]:
        return lambda: subprocess.run(command, check=True, capture_output=True)

    return {"ds-topo convert": run(ours), "ds_to_universal.py": run([*theirs, "--inject_missing_state"])}


def load(width: int, layers: int, other: Path, own: Path, rounds: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Return the seconds and the peak of this rank's own memory for loads without and with a conversion."""
    warnings.simplefilter("ignore")
    deepspeed.init_distributed(verbose=False)
    with PipelineParallelGrid(f"data={dist.get_world_size()}") as grid:
        engine = engine_of_layers(grid, width, layers, 1)
        checkpoint.save(engine, own, TAG)

        def load_theirs() -> None:
            with deepspeeds_part(engine):
                engine.load_checkpoint(str(own), tag=TAG)

        sides: dict[str, Callable[[], object]] = {
            "load: DeepSpeed": load_theirs,
            "load: ours": lambda: checkpoint.load(engine, own),
            "load: ours, converted": lambda: checkpoint.load(engine, other, convert=True),
        }
        times: dict[str, list[float]] = {side: [] for side in sides}
        memory = dict.fromkeys(sides, 0)
        for _ in range(rounds + 1):
            for side, step in sides.items():
                dist.barrier()
                started = time.perf_counter()
                with OwnMemory() as used:
                    step()
                dist.barrier()
                times[side].append(time.perf_counter() - started)
                memory[side] = max(memory[side], used.more)
        engine.destroy()
    return times, memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="folder on the disk to measure")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        source, to = Path(folder, "from"), Path(folder, "to")
        run_ranks(2, save, arguments.width, arguments.layers, source, deadline=300.0)
        found = checkpoint.look_at(source, TAG)
        sides: dict[str, Callable[[], object]] = {
            "copied": lambda: copied(found.path, to, digested=False),
            "copied, digested": lambda: copied(found.path, to, digested=True),
            "data=2 -> data=4": lambda: checkpoint.convert(found, to, "data=4"),
            "ZeRO 1 -> 3": lambda: checkpoint.convert(found, to, "data=2", zero=3),
        }
        times: dict[str, list[float]] = {side: [] for side in sides}
        memory = dict.fromkeys(sides, 0)
        for _ in range(arguments.rounds + 1):
            for side, step in sides.items():
                shutil.rmtree(to, ignore_errors=True)
                os.sync()
                started = time.perf_counter()
                with OwnMemory() as own:
                    step()
                times[side].append(time.perf_counter() - started)
                memory[side] = max(memory[side], own.more)
        print(f"{found.bytes / 1e9:.2f} GB, the largest parameter {4 * arguments.width**2 / 1e6:.0f} MB")
        report(times, memory, "copied")
        by_command: dict[str, list[float]] = {}
        for _ in range(arguments.rounds):
            for side, step in commands(found.path, to).items():
                shutil.rmtree(to, ignore_errors=True)
                os.sync()
                started = time.perf_counter()
                step()
                by_command.setdefault(side, []).append(time.perf_counter() - started)
        shutil.rmtree(to, ignore_errors=True)
        report(by_command, {}, "ds-topo convert")
        other, same = Path(folder, "four"), Path(folder, "two")
        run_ranks(4, save, arguments.width, arguments.layers, other, deadline=300.0)
        loads = run_ranks(
            2, load, arguments.width, arguments.layers, other, same, arguments.rounds, deadline=600.0, timeout=300.0
        )
        of_loads, memory_of_loads = loads[0]
        report(of_loads, memory_of_loads, "load: ours")


def report(times: dict[str, list[float]], memory: dict[str, int], base: str) -> None:
    """Print medians, without the first round of several, and their ratio to one of them."""
    middles = {side: statistics.median(seconds[1:] or seconds) for side, seconds in times.items()}
    for side, middle in middles.items():
        most = f"  {memory[side] / 1e6:8.0f} MB of its own memory" if side in memory else ""
        print(f"{side:22} {middle:8.3f} s  {middle / middles[base]:5.2f} x {base}{most}", flush=True)


if __name__ == "__main__":
    main()
