"""Make the wanted run and its references, and compare them.

``ds-topo verify`` starts a program on new processes for each run. ``ds_topo.verify`` takes the next steps of an engine
in a program, and runs the whole model in plain PyTorch on some of its ranks.
"""

from __future__ import annotations

import copy
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn

from ds_topo.errors import EngineOptionError, TopologyError, VerificationError
from ds_topo.launch.launchers import JOB_PORTS, REFERENCE, TOPOLOGY_OVERRIDE
from ds_topo.mpu import MpuGrid
from ds_topo.process_groups.creation import gathered
from ds_topo.topology import ProcessTopology
from ds_topo.topology.axes import DATA, MODEL, PIPE, SHARD, check_meanings
from ds_topo.topology.rank_tables import degree, sample_axes
from ds_topo.verification.comparison import Report, compare
from ds_topo.verification.recorder import Finished, Recorder, Recording, Run, about, memory_of, recording

_LINES = 12
"""The lines of a failed rank's output in an error."""
_OF_LAUNCHERS = ("TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "CROSS_RANK")
"""Beginnings of variables that a launcher of this process may have set, and its ranks must not see."""
Progress = Callable[[str, int, int], None]


def layout_of_reference(topology: ProcessTopology) -> ProcessTopology:
    """Return the layout of the reference: one process for each share of the samples.

    It has all axes that a program may ask its grid for. Those that DeepSpeed does not know have degree 1.
    """
    shares = degree(topology, sample_axes(topology))
    others = [axis for axis in topology.axes if axis not in (PIPE, DATA, MODEL, SHARD)]
    marked = [f"+{axis}" if axis in topology.extra_axes else axis for axis in others]
    return ProcessTopology.from_spec(",".join([f"data={shares}", *(f"{axis}=1" for axis in marked)]))


@dataclass(frozen=True)
class Ranks:
    """The ranks of one run of a program, and what they record."""

    topology: ProcessTopology
    recording: Recording
    what: str
    """The words of the progress bar and of errors."""
    program: tuple[str, ...] = ()
    """The program and its arguments."""
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.topology.world_size()

    def steps_done(self) -> int:
        """Return the number of steps that all ranks have recorded."""
        return min(len(list(self.recording.folder_of(rank).glob("step_*.pt"))) for rank in range(self.size))

    def last_lines(self, rank: int) -> str:
        """Return the last lines that a rank has printed."""
        log = self.recording.folder / f"rank_{rank}.log"
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-_LINES:])


def verify_program(
    program: str | os.PathLike[str],
    *arguments: str,
    topology: str,
    steps: int = 2,
    has_dropout: bool = True,
    same_samples: bool = False,
    timeout: float = 600.0,
    keep: str | os.PathLike[str] | None = None,
    progress: Progress = lambda step, done, of: None,
) -> Report:
    """Compare the first steps of a program in a layout with a reference; ``ds-topo verify`` prints the result.

    The reference has one process for each share of the samples, without tensor, pipeline or sequence parallelism. Its
    gradients are averaged and its norm is computed here, not by DeepSpeed. It starts with the weights that the program
    has in the wanted layout. A second reference with artificial rounding errors measures what rounding allows. The two
    run at the same time if there are enough processors or devices, and twice the memory of the wanted layout is free.

    Args:
        program: a Python file that trains an engine of DeepSpeed.
        arguments: its arguments.
        topology: the layout, such as ``"pipe=2,data=2,model=2"``; it replaces the one in the program or its config.
        steps: the number of optimizer steps to compare.
        has_dropout: False disables dropout in all runs.
        same_samples: True allows replicas to train on the same samples.
        timeout: seconds for each run.
        keep: a folder in which the recordings stay; by default they are deleted.
        progress: is called with a sentence, the steps done, and all steps.

    Raises:
        TopologyError: an argument is invalid.
        VerificationError: a run failed; the message has the last lines of a rank.
    """
    layout = ProcessTopology.from_spec(topology)
    check_meanings(layout.axes, layout.extra_axes)
    if not Path(program).is_file():
        raise TopologyError(f"program {str(program)!r}: there is no such file: give the program that trains")
    if steps < 1:
        raise TopologyError(f"steps={steps}: give a number of steps from 1 on")
    execute = partial(run, wanted=layout.world_size(), timeout=timeout, progress=progress)
    with tempfile.TemporaryDirectory(prefix="ds_topo_verify_") as scratch:
        folder, whole = Path(scratch if keep is None else keep), layout_of_reference(layout)

        def ranks(name: str, topology: ProcessTopology, what: str, **options: Any) -> Ranks:
            recording = Recording(folder / name, steps, has_dropout=has_dropout, **options)
            return Ranks(topology, recording, what, (str(program), *arguments))

        wanted = ranks("wanted", layout, f"running {layout.spec}")
        execute([wanted])
        weights = wanted.recording.folder
        reference = ranks("reference", whole, f"running the reference, {whole.spec}", weights_from=weights)
        options = {"weights_from": weights, "noise": 1}
        rounding = ranks("rounding", whole, "measuring rounding", until_update=True, **options)
        places = get_accelerator().device_count() if get_accelerator().device_name() != "cpu" else processors()
        if fit_together(wanted, reference, places, memory_of("/proc/meminfo", "MemAvailable")):
            execute([reference, rounding])
        else:
            execute([reference])
            execute([rounding])
        progress("comparing", 0, steps)
        report = compare(weights, reference.recording.folder, rounding.recording.folder, same_samples)
        if report.findings and report.findings[0].step >= rounding.steps_done():
            # Adam turns even the rounding of a gradient that should be 0 into a whole step, whose effect is unknown
            again = ranks("rounding of all steps", whole, "measuring rounding in all steps", **options)
            execute([again])
            report = compare(weights, reference.recording.folder, again.recording.folder, same_samples)
        return report


def fit_together(wanted: Ranks, reference: Ranks, places: int, free: int) -> bool:
    """Tell whether two references can run at the same time, after the wanted run.

    There are ``places`` devices, or processors, and ``free`` bytes of memory. All slices and stages of a share together
    need about as much memory as its process in the reference.
    """
    last = f"step_{wanted.recording.steps - 1}.pt"
    needed = sum(
        int(torch.load(wanted.recording.folder_of(rank) / last, mmap=True)["memory"]) for rank in range(wanted.size)
    )
    return 2 * reference.size <= min(places, wanted.size) and 0 < 2 * needed <= free


def processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run(runs: Sequence[Ranks], *, wanted: int, timeout: float, progress: Progress) -> None:
    """Run a program on all ranks of some runs at the same time, for ``timeout`` seconds at most, and record it."""
    given = int(os.environ.get("OMP_NUM_THREADS", "1").partition(",")[0])
    ranks = sum(each.size for each in runs)  # together they do the work of the wanted layout
    threads, first = max(given, min(given * wanted, processors()) // ranks), 0
    with ExitStack() as stack:
        for each in runs:
            stack.enter_context(_started(each, {"OMP_NUM_THREADS": str(threads), **_devices(first, each.size)}))
            first += each.size
        _wait(runs, timeout, progress)


def _devices(first: int, count: int) -> dict[str, str]:
    """Return the variables that hide all devices but ``count`` of them, if ``first`` is not 0."""
    accelerator = get_accelerator()
    if not first or accelerator.device_name() == "cpu":
        return {}
    found = {}
    for name in accelerator.visible_devices_envs():
        visible = os.environ[name].split(",") if os.environ.get(name) else range(accelerator.device_count())
        found[name] = ",".join(map(str, visible[first : first + count]))
    return found


@contextmanager
def _started(run: Ranks, own: Mapping[str, str]) -> Iterator[None]:
    """Start the ranks of a run with variables of their ``own``, and end them with everything that they leave behind."""
    recording, port = run.recording, _free_port()
    recording.folder.mkdir(parents=True, exist_ok=True)
    options = json.dumps(asdict(recording), default=str)
    command = [sys.executable, "-m", "ds_topo.verification", options, *run.program]
    common = {
        **{name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHERS)},
        **({REFERENCE: "1"} if recording.is_reference else {}),
        **own,
        TOPOLOGY_OVERRIDE: run.topology.spec,
        "WORLD_SIZE": str(run.size),
        "LOCAL_WORLD_SIZE": str(run.size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    try:
        for rank in range(run.size):
            with (recording.folder / f"rank_{rank}.log").open("wb") as log:
                env = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                run.processes.append(
                    subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
                )
        yield
    finally:
        for process in run.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what the rank has left behind
            process.wait()
        for leftover in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_{port}_*"):
            leftover.unlink(missing_ok=True)


def _wait(runs: Sequence[Ranks], timeout: float, progress: Progress) -> None:
    """Wait until all ranks of some runs have ended, and report their progress."""
    deadline, what = time.monotonic() + timeout, " and ".join(each.what for each in runs)
    steps = runs[0].recording.steps
    while not all(process.poll() == 0 for each in runs for process in each.processes):
        progress(what, min(each.steps_done() for each in runs), steps)
        for each in runs:
            if failed := [rank for rank, process in enumerate(each.processes) if process.poll()]:
                time.sleep(0.5)  # others may have failed first, and write why
                texts = {rank: each.last_lines(rank) for rank in (failed[0], *range(each.size))}
                # an error that is not the loss of another rank
                own = (rank for rank, text in texts.items() if "Error" in text and "Connection closed" not in text)
                rank = next(own, failed[0])
                raise VerificationError(f"{each.what}: rank {rank} failed:\n{texts[rank]}")
        if time.monotonic() > deadline:
            slowest = min(runs, key=Ranks.steps_done)
            raise VerificationError(
                f"{slowest.what}: {steps} steps took longer than {timeout:g} seconds; rank 0 wrote:\n"
                f"{slowest.last_lines(0)}"
            )
        time.sleep(0.05)
    for each in runs:
        needed = 1 if each.recording.until_update else steps
        if (left := needed - each.steps_done()) > 0:
            cause = f"the program ended {left} of {steps} steps too early: let it train longer, or give fewer --steps"
            if not each.steps_done():
                cause = (
                    "the program ended without a step of an engine, which verify compares: train by an engine of "
                    "deepspeed.initialize or ds_topo.initialize, and long enough for one step"
                )
            raise VerificationError(f"{each.what}: {cause}; rank 0 wrote:\n{each.last_lines(0)}")


def _free_port() -> int:
    """Return a port that no connection of another program takes before the run listens at it."""
    for port in random.sample(JOB_PORTS, len(JOB_PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise VerificationError(f"all ports from {JOB_PORTS[0]} to {JOB_PORTS[-1]} are in use: end other jobs on this host")


# -- in a program ------------------------------------------------------------------------------------------------------


def verify(
    engine: DeepSpeedEngine,
    batches: Sequence[Any],
    *,
    reference: nn.Module | None = None,
    loss: Callable[..., torch.Tensor] | None = None,
    same_samples: bool = False,
) -> Report:
    """Take an engine's next steps, and compare them with the whole model in plain PyTorch; collective over all ranks.

    One rank for each share of the samples then runs the whole model, from the weights that the engine had before each
    step. It has no optimizer: outputs, losses, gradients before and after reduction, their norm and replicas are
    compared, weights after a step are not. ``ds-topo verify`` compares these, too. The engine keeps the steps.

    ::

        report = ds_topo.verify(engine, batches, reference=build_model())
        assert report.status == 0, report.findings[0]

    Args:
        engine: the result of ``deepspeed.initialize``.
        batches: this rank's micro-batches of all steps, each a tuple of arguments, such as inputs and labels.
        reference: the whole model, with the same names of parameters; by default a copy of the engine's module.
        loss: ``loss(model, *micro_batch)``, for the engine and the reference; by default ``model(*micro_batch)``. A
            pipeline uses its own loss, and its reference this one.
        same_samples: True allows replicas to train on the same samples.

    Raises:
        EngineOptionError: the number of micro-batches is no multiple of those of a step, or the engine's module is a
            part of the model and there is no ``reference``.
        VerificationError: the reference failed on a rank, or ranks do not share a folder for temporary files.
    """
    count = int(engine.gradient_accumulation_steps())
    if not batches or len(batches) % count:
        raise EngineOptionError(
            f"batches: {len(batches)} micro-batches, but a step has {count}: give a multiple of them"
        )
    is_pipeline = isinstance(engine, PipelineEngine)
    is_part = is_pipeline or (isinstance(engine.mpu, MpuGrid) and engine.mpu.get_axis_size(MODEL) > 1)
    if reference is None and is_part:
        raise EngineOptionError(
            "verify: the engine's module is a stage or a slice of the model: pass reference=, the whole model"
        )
    steps = [list(batches[start : start + count]) for start in range(0, len(batches), count)]
    whole = copy.deepcopy(engine.module) if reference is None else reference
    loss_of = loss or (lambda model, *micro_batch: model(*micro_batch))
    with ExitStack() as stack:
        own = ""
        if dist.get_rank() == 0:
            own = stack.enter_context(tempfile.TemporaryDirectory(prefix="ds_topo_verify_"))
        folder = Path(gathered(own)[0])
        _meet("" if folder.is_dir() else f"{folder} is not there: set TMPDIR to a folder that all ranks share")
        with recording(Recording(folder / "wanted", len(steps)), engine), suppress(Finished):
            for step in steps:
                if is_pipeline:
                    engine.train_batch(iter(step))
                    continue
                for micro_batch in step:
                    engine.backward(loss_of(engine, *micro_batch))
                    engine.step()
        dist.barrier()
        _meet(_problem_of_reference(engine, whole, steps, loss_of, folder))
        paths = folder / "wanted", folder / "reference", folder / "rounding"
        report = gathered(compare(*paths, same_samples=same_samples) if dist.get_rank() == 0 else None)[0]
    assert report is not None
    return report


def _problem_of_reference(
    engine: DeepSpeedEngine, whole: nn.Module, steps: Sequence[Any], loss_of: Callable[..., torch.Tensor], folder: Path
) -> str:
    """Run the reference and its rounding on the first rank of each share; return why it failed, or nothing."""
    run, mine = Run(folder / "wanted"), about(engine)
    if dist.get_rank() != run.share_of.index(mine["share"]):
        return ""
    try:
        whole.to(getattr(torch, mine["dtype"])).train()
        for name, noise in (("reference", None), ("rounding", 1)):
            weights = (run.step(number).previous for number in range(len(steps)))
            recorder = Recorder(Recording(folder / name, len(steps), noise=noise))
            recorder.record_whole(whole, zip(weights, steps, strict=True), loss_of, mine)
    except Exception as error:  # any exception: the other ranks must raise, too
        return f"the reference failed on rank {dist.get_rank()}: {type(error).__name__}: {error}"
    return ""


def _meet(problem: str) -> None:
    """Raise a problem of any rank on all ranks."""
    if first := next(filter(None, gathered(problem)), None):
        raise VerificationError(f"verify: {first}")
