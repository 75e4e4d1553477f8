"""Compare the next steps of an engine with the whole model in plain PyTorch, inside a program (``ds_topo.verify``)."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn

from ds_topo.errors import EngineOptionError, VerificationError
from ds_topo.mpu.mpu import MpuGrid
from ds_topo.topology.axes import MODEL
from ds_topo.verification.comparison import Report, compare
from ds_topo.verification.recorder import Finished, Recorder, Recording, about, recording
from ds_topo.verification.records import Run


def verify(
    engine: DeepSpeedEngine,
    batches: Sequence[Any],
    *,
    reference: nn.Module | None = None,
    loss: Callable[..., torch.Tensor] | None = None,
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
        folders: list[Any] = [None]
        if dist.get_rank() == 0:
            folders = [stack.enter_context(tempfile.TemporaryDirectory(prefix="ds_topo_verify_"))]
        dist.broadcast_object_list(folders)
        folder = Path(folders[0])
        _meet("" if folder.is_dir() else f"{folder} is not there: set TMPDIR to a folder that all ranks share")
        with recording(Recording(folder / "wanted", len(steps)), engine):
            try:
                for step in steps:
                    _take(engine, step, loss_of)
            except Finished:
                pass
        dist.barrier()
        run, mine = Run(folder / "wanted"), about(engine)
        problem = ""
        if run.about[dist.get_rank()] == next(one for one in run.about if one["share"] == mine["share"]):
            try:
                whole.to(getattr(torch, mine["dtype"])).train()
                for name, noise in (("reference", None), ("rounding", 1)):
                    recorder = Recorder(Recording(folder / name, len(steps), noise=noise))
                    try:
                        recorder.record_whole(whole, _with_weights(run, steps), loss_of, mine)
                    finally:
                        recorder.detach()
            except Exception as error:  # any exception: the other ranks must raise, too
                problem = f"the reference failed on rank {dist.get_rank()}: {type(error).__name__}: {error}"
        _meet(problem)
        reports: list[Any] = [None]
        if dist.get_rank() == 0:
            reports = [compare(folder / "wanted", folder / "reference", folder / "rounding")]
        dist.broadcast_object_list(reports)
    report: Report = reports[0]
    return report


def _take(engine: DeepSpeedEngine, micro_batches: Sequence[Any], loss_of: Callable[..., torch.Tensor]) -> None:
    if isinstance(engine, PipelineEngine):
        engine.train_batch(iter(micro_batches))
        return
    for micro_batch in micro_batches:
        engine.backward(loss_of(engine, *micro_batch))
        engine.step()


def _with_weights(run: Run, steps: Sequence[Any]) -> Iterator[tuple[Mapping[str, torch.Tensor], Any]]:
    for number, micro_batches in enumerate(steps):
        yield run.start if number == 0 else run.step(number - 1).whole_weights, micro_batches


def _meet(problem: str) -> None:
    """Raise a problem of any rank on all ranks.

    Raises:
        VerificationError: there is one.
    """
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, problem)
    if first := next(filter(None, found), None):
        raise VerificationError(f"verify: {first}")
