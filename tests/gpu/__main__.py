"""Run the checks that need a GPU, and print one table: ``tests/gpu.sh [--list] [--only NAME ...] [--rehearse]``.

Each check runs in processes of its own, with a deadline. With one GPU there is one rank on NCCL, and two or four ranks
on gloo whose tensors are on the same GPU. With more GPUs there is also one rank on NCCL for each of up to eight. With
``--rehearse`` the ranks run on the CPU, on gloo and on the tests' stand-in for NCCL, without what CUDA alone can do.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]
NO_GPU = (
    "tests/gpu.sh: torch finds no NVIDIA GPU here, so nothing was checked: run it on a machine with a GPU and a torch "
    "built for CUDA, or try the checks on this CPU with tests/gpu.sh --rehearse."
)
NOT_POSSIBLE = 77
"""The exit status of a check that cannot run here; the last line of its output says why."""
GRACE = 20.0
"""The seconds that other ranks have after the first failure."""
LINES = 25
"""The lines of a rank's output that a failure shows."""
WATCH_LIMIT = 4.0
WATCH_SLACK = 16.0
"""The seconds beyond the limit in which the watch must have ended a rank that waits for its device.

A rank that uses the processor in one call has 10 s to go on, and NCCL has 3 s to abort; the rest is for its exit.
"""
WATCH_EXIT = 70
_ABOUT = """
import json, torch, deepspeed
gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus else "none"
print(json.dumps({"GPU": gpus, "torch": torch.__version__, "CUDA": torch.version.cuda or "none", "NCCL": nccl,
                  "DeepSpeed": deepspeed.__version__}))
"""


@dataclass(frozen=True)
class Place:
    """The ranks of a check."""

    name: str
    ranks: int
    backend: str
    device: str
    reason: str = ""
    """Why this machine has no such place; empty if it has."""

    def __str__(self) -> str:
        return f"{self.backend} {self.device}"


@dataclass(frozen=True)
class Check:
    """A check and where it runs."""

    name: str
    what: str
    places: tuple[str, ...]
    seconds: float = 300.0
    """The deadline."""
    command: tuple[str, ...] = ()
    """The module and arguments to run instead of a function of ``tests/gpu/checks.py``."""
    by_torchrun: bool = False


EVERYWHERE = ("one", "shared", "many")
SEVERAL = ("shared", "many")
PLAN = ("--layers", "2", "--hidden", "64", "--heads", "4", "--vocab", "256", "--sequence", "64", "--batch", "16")
CHECKS = (
    Check("joining", "torchrun, backend, device, groups, mesh", EVERYWHERE, by_torchrun=True),
    Check("reducer", "gradients of a reducer against one process", EVERYWHERE),
    Check("zero", "ZeRO 0 to 3 against DeepSpeed's own reduction", EVERYWHERE, 900.0),
    Check("arriving", "readers of parameters in flight, other streams", SEVERAL, 900.0),
    Check("streams", "side streams, freed memory, pinned copies", EVERYWHERE),
    Check("two_level", "reduction in two levels", ("four", "many")),
    Check("collectives", "differentiable collectives", SEVERAL),
    Check("checkpoints", "save, background, load, other ZeRO stage", EVERYWHERE, 600.0),
    Check("compiled", "torch.compile with the reducer", EVERYWHERE, 900.0),
    Check("pipeline", "two stages with the reducer, ZeRO 0 and 1", SEVERAL),
    Check("replicas", "torchft: a replica leaves and comes back, ZeRO 0, 1, 3", EVERYWHERE),
    Check("watch_synchronize", "a rank raises, others wait in synchronize()", SEVERAL),
    Check("watch_item", "a rank raises, others wait in item()", SEVERAL),
    Check("check", "ds-topo check", ("one", "many"), command=("ds_topo", "check", "data=-1"), by_torchrun=True),
    Check(
        "calibrate",
        "ds-topo plan --calibrate",
        ("one",),
        command=("ds_topo", "plan", *PLAN, "--calibrate"),
        by_torchrun=True,
    ),
    Check(
        "overhead",
        "tests.bench.reducer_overhead",
        ("bench",),
        command=("tests.bench.reducer_overhead", "--rounds", "10", "--device"),
    ),
    Check(
        "steps",
        "steps of engines over DeepSpeed's: tests.bench.reducer_overhead --engines",
        ("bench",),
        command=("tests.bench.reducer_overhead", "--engines", "--bf16", "--layers", "50", "--rounds", "20", "--device"),
    ),
)


@dataclass(frozen=True)
class Outcome:
    """A row of the table."""

    check: str
    place: Place
    result: str
    """``passed``, ``failed`` or ``not possible here``, with the reason or what was measured."""
    seconds: float = 0.0

    @property
    def is_failure(self) -> bool:
        return self.result.startswith("failed")


def places(gpus: int) -> dict[str, Place]:
    """Return the places of a machine with so many GPUs; with none, those of a rehearsal."""
    backend, device = ("nccl", "cuda") if gpus else ("strict", "cpu")
    many = next(count for count in (8, 4, 2, 1) if count <= (gpus or 2))  # tensors are divided by it
    reason = "" if many > 1 else "needs two GPUs"
    return {
        place.name: place
        for place in (
            Place("one", 1, backend, device),
            Place("shared", 2, "gloo", device),
            Place("four", 4, "gloo", device),
            Place("many", max(many, 2), backend, device, reason),
            Place("bench", 1, backend if gpus else "gloo", device),
        )
    }


def unable(check: Check, place: Place) -> str:
    """Return why a check cannot run at a place; empty if it can."""
    if place.reason:
        return place.reason
    if check.name == "two_level" and place.ranks < 4:
        return "needs four ranks"
    if check.name.startswith("watch") and (place.device, place.backend) == ("cpu", "gloo"):
        return "gloo does not wait in C with the processor in use"
    if check.name == "calibrate" and place.device == "cpu":
        return "it measures GPUs"
    return ""


# -- processes ---------------------------------------------------------------------------------------------------------


@dataclass
class Rank:
    """A process, its output, and when it ended."""

    process: subprocess.Popen[bytes]
    output: Path
    ended: float | None = None
    status: int | None = None


def run(check: Check, place: Place, folder: Path) -> Outcome:
    """Run a check in new processes; print what every rank has written if it fails."""
    started = time.monotonic()
    ranks = start(check, place, folder)
    try:
        late = wait(ranks, started + check.seconds, ends_alone=check.name.startswith("watch"))
    finally:
        end(ranks)
    text = "\n".join(path.read_text(errors="replace") for path in outputs(ranks, folder))
    result = (
        judge_watch(ranks, on_gpu=place.device == "cuda")
        if check.name.startswith("watch")
        else judge(ranks, text, late)
    )
    outcome = Outcome(check.name, place, result, time.monotonic() - started)
    if "bench" in check.places and not outcome.is_failure:
        print(text)
    if outcome.is_failure:
        print(f"\n{check.name} on {place.ranks} x {place.backend}: {result}")
        for path in outputs(ranks, folder):
            lines = path.read_text(errors="replace").splitlines()[-LINES:]
            print(f"--- {path.relative_to(folder)}:", *lines, sep="\n")
    return outcome


def start(check: Check, place: Place, folder: Path) -> list[Rank]:
    """Start the ranks of a check, or torchrun, which starts them."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "TORCHELASTIC_"))},
        **{"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "DS_ACCELERATOR": place.device},
        **{"PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}:{os.environ.get('PYTHONPATH', '')}"},
        **{"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"},
        **{"DS_TOPO_CHECK_SECONDS": str(check.seconds - 15), "DS_TOPO_CHECK_LIMIT": str(WATCH_LIMIT)},
        **{"DS_TOPO_WATCH": "", "TMPDIR": str(folder)},
    }
    command = ["tests.gpu.checks", check.name, place.backend, place.device]
    if check.command:
        command = list(check.command)
        if "bench" in check.places:
            command.append(place.device)
    if not check.by_torchrun:
        environment["MASTER_PORT"] = str(free_port())
        return [
            start_one(["-m", *command], {**environment, **variables(rank, place)}, folder, f"rank{rank}")
            for rank in range(place.ranks)
        ]
    options = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(place.ranks)]
    options += ["--redirects", "3", "--log-dir", str(folder / "ranks")]
    return [start_one(["-m", "torch.distributed.run", *options, "-m", *command], environment, folder, "torchrun")]


def variables(rank: int, place: Place) -> dict[str, str]:
    """Return the variables of a rank. Ranks that share a GPU all have local rank 0, as on hosts of their own."""
    local = 0 if place.backend == "gloo" else rank
    return {"RANK": str(rank), "WORLD_SIZE": str(place.ranks), "LOCAL_RANK": str(local)}


def start_one(arguments: Sequence[str], environment: dict[str, str], folder: Path, name: str) -> Rank:
    output = folder / name
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    return Rank(process, output)


def wait(ranks: Sequence[Rank], deadline: float, *, ends_alone: bool) -> bool:
    """Wait for all ranks, or for a short time after the first failure; return True if some missed the deadline.

    With ``ends_alone`` ranks have to end by themselves after a failure.
    """
    while any(rank.ended is None for rank in ranks):
        for rank in ranks:
            if rank.ended is None and rank.process.poll() is not None:
                rank.ended, rank.status = time.time(), rank.process.returncode
                if rank.status not in (0, NOT_POSSIBLE) and not ends_alone:
                    deadline = min(deadline, time.monotonic() + GRACE)
        if time.monotonic() > deadline:
            return True
        time.sleep(0.05)
    return False


def end(ranks: Sequence[Rank]) -> None:
    """Kill what is left of the processes that were started, and of those that they have started."""
    for rank in ranks:
        if rank.process.poll() is None:
            for pid in [*reversed(descendants(rank.process.pid)), rank.process.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            rank.process.wait()


def descendants(pid: int) -> list[int]:
    """Return the ids of a process's children, their children, and so on; parents come first."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in task.read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


def outputs(ranks: Sequence[Rank], folder: Path) -> list[Path]:
    """Return the files with what the ranks have written."""
    logs = [path for path in sorted(folder.glob("ranks/**/*.log")) if path.stat().st_size]
    return [rank.output for rank in ranks] + logs


# -- results -----------------------------------------------------------------------------------------------------------


def judge(ranks: Sequence[Rank], text: str, late: bool) -> str:
    """Return the result of a check whose ranks must all end without an error."""
    statuses = [rank.status for rank in ranks]
    if all(status == 0 for status in statuses):
        return "passed"
    if NOT_POSSIBLE in statuses and not late:
        reason = re.findall(r"^not possible here: .*$", text, re.MULTILINE)
        return reason[-1] if reason else "not possible here"
    wrong = {number: status for number, status in enumerate(statuses) if status}
    hung = [number for number, status in enumerate(statuses) if status is None]
    problems = [f"rank {number} ended with status {status}" for number, status in wrong.items()]
    problems += [f"rank {number} did not end and was killed" for number in hung]
    return f"failed: {'; '.join(problems[:3])}"


def judge_watch(ranks: Sequence[Rank], *, on_gpu: bool) -> str:
    """Return the result of a check in which rank 0 raises, and the watch has to end the others in time."""
    raised = re.search(r"raises at ([0-9.]+)", ranks[0].output.read_text(errors="replace"))
    if raised is None:
        return "failed: rank 0 did not come to the point where it raises"
    times = []
    for number, rank in enumerate(ranks[1:], 1):
        if rank.ended is None:
            return f"failed: rank {number} was not ended by the watch"
        if rank.status != WATCH_EXIT and (on_gpu or not rank.status):  # the stand-in for NCCL raises by itself
            return f"failed: rank {number} ended with status {rank.status} instead of {WATCH_EXIT}"
        times.append(rank.ended - float(raised[1]))
        if times[-1] < 0:
            return f"failed: rank {number} ended {-times[-1]:.1f} s before rank 0 raised, so not by the watch"
    if max(times) > WATCH_LIMIT + WATCH_SLACK:
        return f"failed: ended after {max(times):.1f} s, which is more than {WATCH_LIMIT + WATCH_SLACK:.0f} s"
    return f"passed: ended after {max(times):.1f} s with watch={WATCH_LIMIT:g}"


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the results as a table."""
    rows = [("check", "ranks", "backend", "seconds", "result")]
    rows += [
        (each.check, str(each.place.ranks), str(each.place), f"{each.seconds:.0f}", each.result) for each in outcomes
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [[*(f"{row[column]:{widths[column]}}" for column in range(4)), row[4]] for row in rows]
    return "\n".join(map("  ".join, lines))


def main() -> int:
    """Run the checks; return the exit status."""
    parser = argparse.ArgumentParser(prog="tests/gpu.sh", description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="run this check only; may be repeated")
    parser.add_argument("--place", action="append", choices=sorted(places(0)), help="run checks at this place only")
    parser.add_argument("--list", action="store_true", help="list the checks")
    parser.add_argument("--rehearse", action="store_true", help="run on the CPU what does not need CUDA")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(f"{check.name:18} {', '.join(check.places):18} {check.what}" for check in CHECKS))
        return 0
    unknown = {*(arguments.only or ())} - {check.name for check in CHECKS}
    if unknown:
        parser.error(f"--only {', '.join(sorted(unknown))}: choose among {', '.join(check.name for check in CHECKS)}")
    # in a process of its own: this one must not use the GPU, which may admit one process per rank only
    asked = subprocess.run([sys.executable, "-c", _ABOUT], stdout=subprocess.PIPE, check=False)
    if asked.returncode != 0:
        print(
            f"tests/gpu.sh: {sys.executable} cannot use torch and DeepSpeed, as the error above says: "
            "activate an environment that has both, and check the driver of the GPU.",
            file=sys.stderr,
        )
        return 1
    about = json.loads(asked.stdout.splitlines()[-1])
    if not about["GPU"] and not arguments.rehearse:
        print(NO_GPU, file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks are killed, too
    here = places(0 if arguments.rehearse else len(about["GPU"]))
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="gpu-checks-") as name:
        for check in CHECKS:
            if arguments.only and check.name not in arguments.only:
                continue
            for place in (here[each] for each in check.places if not arguments.place or each in arguments.place):
                if check.command and arguments.rehearse:  # these programs do not know the stand-in for NCCL
                    place = replace(place, backend="gloo")
                reason = unable(check, place)
                if reason:
                    outcomes.append(Outcome(check.name, place, f"not possible here: {reason}"))
                    continue
                folder = Path(name, f"{check.name}-{place.name}")
                folder.mkdir()
                outcomes.append(run(check, place, folder))
                print(f"{check.name}, {place.ranks} x {place}: {outcomes[-1].result}", flush=True)
    print(f"\n{table(outcomes)}\n")
    gpus = about.pop("GPU")
    versions = [f"{name} {version}" for name, version in about.items()]
    print(", ".join([f"{len(gpus)} x {gpus[0]}" if gpus else "no GPU", *versions]))
    if arguments.rehearse:
        print("This was a rehearsal on the CPU: nothing was checked on a GPU.")
    return 1 if any(outcome.is_failure for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
