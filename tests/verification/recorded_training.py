"""Record small models on ranks of a test, with a fault or without one, and compare them with references."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import deepspeed
import torch
import torch.nn.functional as F

from ds_topo import PipelineParallelGrid, ProcessTopology, initialize
from ds_topo.topology.axes import SEQ
from ds_topo.verification import runs
from ds_topo.verification.comparison import Report, compare
from ds_topo.verification.recorder import Finished, Recording, recording
from tests.checkpoint.matrix import pairs
from tests.checkpoint.matrix.pairs import Side
from tests.engine import test_random_engines as random_engines
from tests.engine import test_sequence_parallel as sequences
from tests.engine.test_random_engines import Engine
from tests.support import gpt_training, moe_training
from tests.support.gpt_training import pipeline, plain_engine
from tests.support.training import Batch, Loss, destroy_engine, engine_config, own_samples, train_engine
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
    model: str = "GPT"
    """Or ``experts``, whose settings are those of a :class:`moe_training.Case`, or ``sequences``."""
    drawn: Side | Engine | None = None
    """A small engine that was drawn at random, in place of all other fields but the layout."""

    @property
    def reference(self) -> Job:
        """The job of the reference, as in ds_topo.verification.__main__."""
        topology = ProcessTopology.from_spec(self.topology)
        settings, spec = dict(self.settings), runs.layout_of_reference(topology).spec
        if isinstance(self.drawn, Side):
            is_half, experts = self.drawn.precision != "fp32", min(1, self.drawn.experts)
            zero, options = (self.drawn.zero, self.drawn.options) if is_half or self.drawn.zero == 3 else (0, ())
            return Job(spec, drawn=replace(self.drawn, topology=spec, zero=zero, options=options, experts=experts))
        if isinstance(self.drawn, Engine):
            zero = self.drawn.zero if self.drawn.bf16 else 0
            own = f"pipe=1,{spec}" if self.drawn.is_pipeline else spec  # the name of the axis chooses the engine
            return Job(own, drawn=replace(self.drawn, topology=own, zero=zero))
        if self.model == "experts":
            settings |= {
                "zero": 0,
                "tensor_parallel": False,
                "sizes": tuple(min(1, size) for size in settings["sizes"]),
            }
        elif not settings.keys() & {"bf16", "fp16"}:
            settings.pop("zero_optimization", None)
        return Job(spec, self.is_pipeline, settings, self.model)

    @contextmanager
    def engine(self) -> Iterator[tuple[Any, PipelineParallelGrid, Callable[[int], Batch], Loss]]:
        """Yield an engine, its grid, this rank's samples of a step, and the loss of an engine without a pipeline."""
        settings = {"zero_optimization": {"stage": 0}, **self.settings}
        with ExitStack() as stack:
            if self.drawn is not None:
                open_engine = _of_side if isinstance(self.drawn, Side) else _of_engine
                engine, grid, samples, loss_of = stack.enter_context(open_engine(self.drawn))
                yield engine, grid, samples, loss_of
                return
            if self.model == "experts":
                case = moe_training.Case(self.topology, pipeline=self.is_pipeline, **self.settings)
                rank = stack.enter_context(moe_training.trainer(case))
                engine, grid, source, loss_of = rank.engine, rank.grid, moe_training.batch, moe_training.loss_of
            elif self.model == "sequences":
                engine, grid, source, loss_of = stack.enter_context(_sequences(self.topology, settings))
            elif self.is_pipeline:
                zero = settings.pop("zero_optimization")["stage"]
                engine, grid = stack.enter_context(pipeline(self.topology, zero, **settings))
                source, loss_of = gpt_training.batch, gpt_training.loss_of
            else:
                engine, grid = stack.enter_context(plain_engine(self.topology, settings))
                source, loss_of = gpt_training.batch, gpt_training.loss_of

            def samples(step: int) -> Batch:
                """Return as many samples as the engine takes."""
                count, number = engine.train_micro_batch_size_per_gpu() * engine.gradient_accumulation_steps(), step
                found = own_samples(source(step), grid)
                while len(found[0]) < count:
                    number += 1
                    more = own_samples(source(number), grid)
                    found = torch.cat([found[0], more[0]]), torch.cat([found[1], more[1]])
                return found

            yield engine, grid, samples, loss_of


def _mean_squares(grid: PipelineParallelGrid) -> Loss:
    """Return a loss whose sum over an axis ``seq`` is the loss of the sample."""
    pieces = grid.get_axis_size(SEQ) if SEQ in grid.topology().axes else 1
    return lambda module, inputs, targets: F.mse_loss(module(inputs).float(), targets.float()) / pieces


@contextmanager
def _of_side(side: Side) -> Iterator[tuple[Any, PipelineParallelGrid, Callable[[int], Batch], Loss]]:
    """Yield an engine of the conversions of checkpoints."""
    made = pairs.Job(side)
    assert made.grid is not None
    for parameter in made.engine.module.parameters():
        if hasattr(parameter, "partition_dim"):  # conversions do without the mark, norms do not
            parameter.tensor_model_parallel = True

    def samples(step: int) -> Batch:
        inputs = torch.randn(pairs.SAMPLES, pairs.WIDTH, generator=torch.Generator().manual_seed(step))
        own = own_samples((inputs, inputs.roll(1, dims=1).sin()), made.grid)
        return own[0].to(made.dtype), own[1].to(made.dtype)

    yield made.engine, made.grid, samples, _mean_squares(made.grid)
    destroy_engine(made.engine)
    made.grid.destroy()


@contextmanager
def _of_engine(engine: Engine) -> Iterator[tuple[Any, PipelineParallelGrid, Callable[[int], Batch], Loss]]:
    """Yield an engine of the tests of the reducer."""
    warnings.simplefilter("ignore")
    deepspeed.init_distributed(verbose=False)
    with PipelineParallelGrid(engine.topology) as grid:
        made = random_engines.build(engine, grid, reduced=engine.evaluates)

        def samples(step: int) -> Batch:
            random_engines.Layer.step = step
            parts = [random_engines.samples(step, number, grid, engine.bf16) for number in range(engine.accumulation)]
            return torch.cat([inputs for inputs, _ in parts]), torch.cat([targets for _, targets in parts])

        yield made, grid, samples, _mean_squares(grid)
        destroy_engine(made)


@contextmanager
def _sequences(topology: str, settings: dict[str, Any]) -> Iterator[tuple[Any, PipelineParallelGrid, Any, Loss]]:
    """Yield the engine of a layer whose positions are split along ``seq``."""
    warnings.simplefilter("ignore", FutureWarning)
    deepspeed.init_distributed(verbose=False)
    with PipelineParallelGrid(topology) as grid:
        pieces, own, attention = 1, 0, sequences.local_attention
        if SEQ in grid.topology().axes:
            pieces, own = grid.get_axis_size(SEQ), grid.get_axis_rank(SEQ)
            attention = sequences.Ulysses(grid.get_group(SEQ))
        model = sequences.Model(attention)
        config = engine_config(
            sequences.BATCH // grid.get_sample_world_size(),
            optimizer={"type": "SGD", "params": sequences.DESCENT},
            **settings,
        )
        engine, *_ = initialize(model=model, mpu=grid, config=config, model_parameters=list(model.parameters()))

        def batch(step: int) -> Batch:
            inputs, targets = (part.chunk(pieces, 1)[own] for part in sequences.batch(step))
            return inputs, targets

        yield engine, grid, batch, lambda *arguments: sequences.loss_of(*arguments) / pieces
        destroy_engine(engine)


def record(
    what: Recording,
    job: Job,
    plant: Plant | None = None,
    before: Callable[[], AbstractContextManager[object]] | None = None,
) -> None:
    """Record one rank; a fault is planted in the engine, or ``before`` it is built."""
    with (
        recording(what),
        nullcontext() if before is None else before(),
        job.engine() as (engine, grid, samples, loss_of),
        (plant and plant(engine, grid)) or nullcontext(),
    ):
        try:
            train_engine(engine, grid, map(samples, range(STEPS)), loss_of)
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
        key = f"{job.reference} {weights_from if job.model == 'experts' else ''}"  # faults change these weights
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
