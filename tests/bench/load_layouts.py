"""Measure the time to load a checkpoint of the same layout, and of another one, on two ranks.

    OMP_NUM_THREADS=1 python -m tests.bench.load_layouts [--width 2048] [--layers 16] [--rounds 3] [--folder .]

Two ranks load a checkpoint of their own layout by DeepSpeed's function and by ours, and one of four ranks by name, in
turn. The benchmark also prints the memory that each takes beside the files that it maps.

Seconds on an idle machine of two cores with ext4 (``--width 1024 --layers 2 --rounds 15``; ``--rounds 4``):

=============================  =======  ========
..                               34 MB  1,074 MB
=============================  =======  ========
load: DeepSpeed                   0.02      0.83
load: ours                        0.03      0.64
load: another layout              0.06      0.35
memory of its own for the last       0         0
=============================  =======  ========

A load by name has four agreements more than one of files that fit.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import deepspeed
import torch.distributed as dist

from ds_topo import PipelineParallelGrid, checkpoint
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
            "load: another layout": lambda: checkpoint.load(engine, other),
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
