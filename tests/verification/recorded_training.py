"""Record the tiny GPT on ranks of a test, with a fault or without one, and compare it with a reference."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from ds_topo import PipelineParallelGrid, ProcessTopology
from ds_topo.topology.rank_tables import degree, sample_axes
from ds_topo.verification.comparison import Report, compare
from ds_topo.verification.recorder import Finished, Recording, recording
from tests.support.gpt_training import batch, loss_of, pipeline, plain_engine
from tests.support.training import own_samples, train_engine
from tests.support.world import Worlds

STEPS = 2
Plant: TypeAlias = Callable[[Any, PipelineParallelGrid], "AbstractContextManager[object] | None"]
"""Change an engine of a rank, until the end of the context."""


@dataclass(frozen=True)
class Job:
    """A layout, the kind of engine and its settings."""

    topology: str
    is_pipeline: bool = True
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def reference(self) -> Job:
        """The job of the reference."""
        topology = ProcessTopology.from_spec(self.topology)
        is_half = self.settings.keys() & {"bf16", "fp16"}  # as in ds_topo.verification.__main__
        settings = {key: value for key, value in self.settings.items() if is_half or key != "zero_optimization"}
        return Job(f"data={degree(topology, sample_axes(topology))}", self.is_pipeline, settings)


def record(
    what: Recording,
    job: Job,
    plant: Plant | None = None,
    before: Callable[[], AbstractContextManager[object]] | None = None,
) -> None:
    """Record one rank; a fault is planted in the engine, or ``before`` it is built."""
    settings = {"zero_optimization": {"stage": 0}, **job.settings}
    with ExitStack() as stack:
        stack.enter_context(recording(what))
        stack.enter_context(nullcontext() if before is None else before())
        if job.is_pipeline:
            zero = settings.pop("zero_optimization")["stage"]
            engine, grid = stack.enter_context(pipeline(job.topology, zero, **settings))
        else:
            engine, grid = stack.enter_context(plain_engine(job.topology, settings))
        with (plant and plant(engine, grid)) or nullcontext():
            try:
                train_engine(engine, grid, (own_samples(batch(step), grid) for step in range(STEPS)), loss_of)
            except Finished:
                return
    raise AssertionError("the recording did not end")


class References:
    """The recorded references of jobs, each recorded once."""

    def __init__(self, world: Worlds, folder: Path) -> None:
        self._world, self._folder = world, folder
        self._known: dict[str, tuple[Path, Path]] = {}

    def of(self, job: Job, weights_from: Path) -> tuple[Path, Path]:
        """Return the recordings without and with artificial rounding errors."""
        key = str(job.reference)
        if key not in self._known:
            folders = tuple(self._folder / f"{kind}_{len(self._known)}" for kind in ("reference", "rounding"))
            size = ProcessTopology.from_spec(job.reference.topology).world_size()
            for folder, noise in zip(folders, (None, 1), strict=True):
                self._world(size).run(record, Recording(folder, STEPS, weights_from, noise), job.reference)
            self._known[key] = folders[0], folders[1]
        return self._known[key]

    def verify(
        self,
        job: Job,
        folder: Path,
        plant: Plant | None = None,
        before: Callable[[], AbstractContextManager[object]] | None = None,
    ) -> Report:
        """Compare a job with its reference."""
        size = ProcessTopology.from_spec(job.topology).world_size()
        self._world(size).run(record, Recording(folder, STEPS), job, plant, before)
        return compare(folder, *self.of(job, folder))
