"""Run a program in the wanted layout and in the reference, one after the other (``ds-topo verify``)."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ds_topo.errors import TopologyError, VerificationError
from ds_topo.launch.launchers import JOB_PORTS, REFERENCE, TOPOLOGY_OVERRIDE
from ds_topo.topology import ProcessTopology
from ds_topo.topology.axes import DATA, MODEL, PIPE, SHARD, check_meanings
from ds_topo.topology.rank_tables import degree, sample_axes
from ds_topo.verification.comparison import Report, compare

_LINES = 12
"""The lines of a failed rank's output in an error."""
_OF_LAUNCHERS = ("TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "CROSS_RANK")
"""Beginnings of variables that a launcher of this process may have set, and its ranks must not see."""
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Job:
    """A program and the layout to verify."""

    program: str
    arguments: tuple[str, ...]
    topology: ProcessTopology
    steps: int = 2
    has_dropout: bool = True
    timeout: float = 600.0
    """Seconds for each run."""

    @property
    def reference(self) -> ProcessTopology:
        """The layout of the reference: one process for each share of the samples.

        It has all axes that a program may ask its grid for. Those that DeepSpeed does not know have degree 1.
        """
        shares = degree(self.topology, sample_axes(self.topology))
        others = [axis for axis in self.topology.axes if axis not in (PIPE, DATA, MODEL, SHARD)]
        marked = [f"+{axis}" if axis in self.topology.extra_axes else axis for axis in others]
        return ProcessTopology.from_spec(",".join([f"data={shares}", *(f"{axis}=1" for axis in marked)]))


def verify_program(
    program: str | os.PathLike[str],
    *arguments: str,
    topology: str,
    steps: int = 2,
    has_dropout: bool = True,
    timeout: float = 600.0,
    keep: str | os.PathLike[str] | None = None,
    progress: Progress = lambda step, done, of: None,
) -> Report:
    """Compare the first steps of a program in a layout with a reference; ``ds-topo verify`` prints the result.

    The reference has one process for each share of the samples, without tensor, pipeline or sequence parallelism. Its
    gradients are averaged and its norm is computed here, not by DeepSpeed. It starts with the weights that the program
    has in the wanted layout. A second reference with artificial rounding errors measures what rounding allows.

    Args:
        program: a Python file that trains an engine of DeepSpeed.
        arguments: its arguments.
        topology: the layout, such as ``"pipe=2,data=2,model=2"``; it replaces the one in the program or its config.
        steps: the number of optimizer steps to compare.
        has_dropout: False disables dropout in all runs.
        timeout: seconds for each run.
        keep: a folder in which the recordings stay; by default they are deleted.
        progress: is called with a sentence, the steps done, and all steps.

    Raises:
        TopologyError: an argument is invalid.
        VerificationError: a run failed; the message has the last lines of a rank.
    """
    if not Path(program).is_file():
        raise TopologyError(f"program {str(program)!r}: there is no such file: give the program that trains")
    if steps < 1:
        raise TopologyError(f"steps={steps}: give a number of steps from 1 on")
    layout = ProcessTopology.from_spec(topology)
    check_meanings(layout.axes, layout.extra_axes)
    job = Job(str(program), arguments, layout, steps, has_dropout, timeout)
    with tempfile.TemporaryDirectory(
        prefix="ds_topo_verify_",
    ) as scratch:
        folder = Path(scratch if keep is None else keep)
        wanted, reference, noise = (folder / name for name in ("wanted", "reference", "rounding"))
        took = time.monotonic()
        run(job, job.topology, wanted, progress, f"running {job.topology.spec}")
        took = time.monotonic() - took
        run(job, job.reference, reference, progress, f"running the reference, {job.reference.spec}", wanted)
        run(job, job.reference, noise, progress, "measuring rounding", wanted, noise=1)
        progress("comparing", 0, steps)
        return compare(wanted, reference, noise)


def run(
    job: Job,
    topology: ProcessTopology,
    folder: Path,
    progress: Progress,
    what: str,
    weights_from: Path | None = None,
    noise: int | None = None,
) -> None:
    """Run the program on all ranks of a topology, and record it.

    Raises:
        VerificationError: a rank failed, ended before the last step, or took too long.
    """
    folder.mkdir(parents=True, exist_ok=True)
    size, port = topology.world_size(), _free_port()
    options = {
        "folder": str(folder),
        "steps": job.steps,
        "weights_from": None if weights_from is None else str(weights_from),
        "noise": noise,
        "has_dropout": job.has_dropout,
    }
    command = [sys.executable, "-m", "ds_topo.verification", json.dumps(options), job.program, *job.arguments]
    common = {
        **{name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHERS)},
        **({REFERENCE: "1"} if weights_from is not None else {}),
        TOPOLOGY_OVERRIDE: topology.spec,
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(size):
            with (folder / f"rank_{rank}.log").open("wb") as log:
                own = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                ranks.append(
                    subprocess.Popen(command, env=own, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
                )
        _wait(ranks, job, folder, progress, what)
    finally:
        for process in ranks:  # with everything that the program has started
            _kill(process)
        for leftover in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_{port}_*"):
            leftover.unlink(missing_ok=True)


def _wait(ranks: Sequence[subprocess.Popen[bytes]], job: Job, folder: Path, progress: Progress, what: str) -> None:
    deadline = time.monotonic() + job.timeout
    while True:
        done = _steps_in(folder, len(ranks))
        progress(what, done, job.steps)
        states = [process.poll() for process in ranks]
        failed = next((rank for rank, state in enumerate(states) if state), None)
        if failed is not None:
            time.sleep(0.5)  # others may have failed first, and write why
            failed = _first_to_fail(folder, failed, len(ranks))
            raise VerificationError(f"{what}: rank {failed} failed:\n{_tail(folder / f'rank_{failed}.log')}")
        if all(state == 0 for state in states):
            break
        if time.monotonic() > deadline:
            raise VerificationError(
                f"{what}: {job.steps} steps took longer than {job.timeout:g} seconds; rank 0 wrote:\n"
                f"{_tail(folder / 'rank_0.log')}"
            )
        time.sleep(0.05)
    if done < job.steps and (left := job.steps - _steps_in(folder, len(ranks))):
        raise VerificationError(
            f"{what}: the program ended {left} of {job.steps} steps too early: let it train longer, or give fewer "
            f"--steps; rank 0 wrote:\n{_tail(folder / 'rank_0.log')}"
        )


def _steps_in(folder: Path, size: int) -> int:
    return min(len(list(folder.glob(f"rank_{rank}/step_*.pt"))) for rank in range(size))


def _first_to_fail(folder: Path, failed: int, size: int) -> int:
    """Return a rank whose output ends with an error that is not the loss of another rank."""
    for rank in sorted(range(size), key=lambda rank: rank != failed):
        text = _tail(folder / f"rank_{rank}.log")
        if "Error" in text and "Connection closed" not in text:
            return rank
    return failed


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(f"  {line}" for line in lines[-_LINES:])


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the session of a rank, also what it has left behind, and wait for its end."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _free_port() -> int:
    """Return a port that no connection of another program takes before the run listens at it."""
    for port in random.sample(JOB_PORTS, len(JOB_PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise VerificationError(f"all ports from {JOB_PORTS[0]} to {JOB_PORTS[-1]} are in use: end other jobs on this host")
