"""Compare the time of the steps of ``ds-topo verify`` with that of the same steps of the program alone, alternately.

    python -m tests.bench.verify [--rounds 3] [--topology SPEC] [--program FILE] [ARGUMENT ...]

A run takes from the start of its first step on the first rank to the end of its last one on the last rank; verify takes
the union of its runs. All runs have the same number of threads. Peaks of memory and the size of recordings follow.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from functools import wraps
from pathlib import Path
from typing import Any

from ds_topo.topology import ProcessTopology
from ds_topo.verification.recorder import memory_of
from ds_topo.verification.runs import verify_program
from tests.bench.sides import Times, ratios, table

PROGRAM = "examples/train_gpt.py"
TOPOLOGY = "pipe=2,data=2,model=2"
Span = tuple[float, float]


def alone(program: str, words: list[str], topology: str, steps: int) -> tuple[Span, int]:
    """Run the program without verify; return its span and the peak memory of a rank."""
    size = ProcessTopology.from_spec(topology).world_size()
    with tempfile.TemporaryDirectory() as folder:
        common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "28471", "WORLD_SIZE": str(size)}
        command = [sys.executable, "-m", "tests.bench.verify", "--timed", folder, "--steps", str(steps), "--program"]
        command += [program, *words, "--topology", topology]
        ranks = [
            subprocess.Popen(
                command,
                env={**common, "LOCAL_WORLD_SIZE": str(size), "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.DEVNULL,
            )
            for rank in range(size)
        ]
        if any(process.wait() for process in ranks):
            raise RuntimeError(f"{program} failed without verify")
        found = [json.loads(path.read_text()) for path in Path(folder).iterdir()]
    return (min(one[0] for one in found), max(one[1] for one in found)), max(one[2] for one in found)


def run_timed(folder: Path, steps: int, program: str, words: list[str]) -> None:
    """Run a program that trains a pipeline as one rank, write the span of its first steps, and end."""
    import torch.distributed as dist
    from deepspeed.runtime.pipe.engine import PipelineEngine

    train_batch, started, done = PipelineEngine.train_batch, [], []

    @wraps(train_batch)
    def timed(engine: Any, *arguments: Any, **named: Any) -> Any:
        started.append(time.time())
        result = train_batch(engine, *arguments, **named)
        done.append(time.time())
        if len(done) == steps:
            peak = memory_of("/proc/self/status", "VmHWM")
            (folder / str(dist.get_rank())).write_text(json.dumps([started[0], done[-1], peak]))
            dist.barrier()
            os._exit(0)
        return result

    PipelineEngine.train_batch = timed
    sys.argv, sys.path[0] = [program, *words], str(Path(program).resolve().parent)
    runpy.run_path(program, run_name="__main__")


def verified(program: str, words: list[str], topology: str, steps: int) -> dict[str, Any]:
    """Run verify; return the spans of its runs, and the bytes that a rank of each wrote."""
    with tempfile.TemporaryDirectory() as folder:
        report = verify_program(program, *words, topology=topology, steps=steps, keep=folder)
        if report.status:
            print(*report.undecided, *report.findings[:9], *report.notes, sep="\n")
        return {name: measured(Path(folder) / name) for name in ("wanted", "reference", "rounding")}


def measured(folder: Path) -> tuple[Span, int, int]:
    """Return the span of a run, the bytes that its largest rank wrote, and the peak memory of a rank in bytes."""
    import torch

    starts = [torch.load(path, mmap=True)["about"] for path in folder.glob("rank_*/start.pt")]
    last = [max(one.glob("step_*.pt")) for one in folder.glob("rank_*") if one.is_dir()]
    written = max(sum(file.stat().st_size for file in one.parent.iterdir()) for one in last)
    memory = max(torch.load(one, mmap=True)["memory"] for one in last)
    return (min(one["began"] for one in starts), max(one.stat().st_mtime for one in last)), written, memory


def union(spans: list[Span]) -> float:
    """Return the seconds in which at least one run was in its steps.

    >>> union([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
    4.0
    """
    total, until = 0.0, 0.0
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="at least 2")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--topology", default=TOPOLOGY)
    parser.add_argument("--program", default=PROGRAM)
    parser.add_argument("--timed", type=Path, help=argparse.SUPPRESS)
    options, words = parser.parse_known_args()
    if options.timed:
        run_timed(options.timed, options.steps, options.program, [*words, "--topology", options.topology])
        return
    times: Times = {"program": [], "verify": [], "wanted": [], "reference": [], "rounding": []}
    whole: Times = {"program": [], "verify": []}
    for _ in range(options.rounds):
        began = time.time()
        (start, end), peak = alone(options.program, words, options.topology, options.steps)
        times["program"].append(end - start)
        middle = time.time()
        runs = verified(options.program, words, options.topology, options.steps)
        whole["program"].append(middle - began)
        whole["verify"].append(time.time() - middle)
        times["verify"].append(union([span for span, *_ in runs.values()]))
        for name, ((start, end), *_) in runs.items():
            times[name].append(end - start)
        last = {side: round(values[-1], 2) for side, values in times.items()}
        print(last, "commands:", *(round(values[-1], 1) for values in whole.values()), flush=True)
    print(f"steps:\n{table(times)}\n{ratios(times, [(side, 'program') for side in times])}")
    print(f"commands:\n{table(whole)}\n{ratios(whole, [('verify', 'program')])}")
    sizes = {name: f"{written >> 20} MiB" for name, (_, written, _) in runs.items()}
    peaks = {"program": f"{peak >> 20} MiB", **{name: f"{memory >> 20} MiB" for name, (*_, memory) in runs.items()}}
    print(f"peak memory of a rank: {peaks}\nfiles of a rank: {sizes}")


if __name__ == "__main__":
    main()
