"""Interrupt saves at any moment by kills, full disks and damaged files; continue, and compare bit by bit.

Every round starts a job of two ranks on a folder with a complete checkpoint of step 2, lets it save step 4 with slowed
ranks, and interrupts that. A second job loads step 2 or step 4 completely. Its parameters, optimizer states, random
states and losses must be those of an uninterrupted job. Then it saves into the same folder again.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from ds_topo import checkpoint
from ds_topo.checkpoint import folder as folders
from ds_topo.checkpoint.by_name import Loader
from ds_topo.checkpoint.folder import checkpoints_in, look_at, named_latest
from ds_topo.errors import CheckpointError
from tests.checkpoint.jobs import KINDS, Job, Kind, job
from tests.support.ranks import RankFailure, Ranks

RANKS = 2
INTERRUPTED = {
    **KINDS,
    "changed": Kind("data=2", zero=1, extra="added", saver=Kind("data=2", zero=3, extra="removed")),
}
"""The kinds of jobs that are interrupted."""
FAULTS = ("all", "one", "first", "full", "truncated", "byte")
"""SIGKILL of all ranks, of the last, or of rank 0; a full disk; after the save, a truncated file or a changed byte."""
_SLOW = 0.05
"""The most seconds by which each step of a save is delayed on a rank."""


@dataclass(frozen=True)
class Round:
    """One interrupted save, and the result of the job that continued."""

    kind: str
    fault: str
    moment: float
    """The part of a save's time that had passed, or of a file's bytes."""
    loaded: int
    """The step from which the second job continued."""
    warned: str
    seconds: float

    def __str__(self) -> str:
        told = self.warned.partition(": ")[2][:110]
        return f"{self.kind:9} {self.fault:8} at {self.moment:4.2f}: continued from step {self.loaded}  {told}"


class Rounds:
    """One kind of job, with its uninterrupted run."""

    def __init__(self, name: str, folder: Path, draw: random.Random) -> None:
        self.name, self.kind, self.folder, self.draw = name, INTERRUPTED[name], folder, draw
        self.before = folder / "before"
        self.wanted, self.save_seconds = self._uninterrupted()

    def _uninterrupted(self) -> tuple[list[dict[int, Any]], float]:
        with Ranks(RANKS) as ranks:
            results = ranks.call(
                _train_through, (self.kind, self.before, self.folder / "slow"), deadline=120, timeout=60
            )
        return [states for states, _ in results], max(seconds for _, seconds in results)

    def play(self, fault: str) -> Round:
        """Run one round.

        Raises:
            AssertionError: no complete checkpoint was left, or the second job differs from the uninterrupted one.
        """
        started = time.monotonic()
        folder = self.folder / "now"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.before, folder)
        moment = self.draw.random()
        if fault in ("all", "one", "first"):
            self._kill(folder, fault, moment)
        elif fault == "full":
            self._fill(folder, moment)
        else:
            self._damage(folder, fault, moment)
        whole = {one.tag for one in checkpoints_in(folder, digests=True) if one.is_whole}
        assert whole, f"{self.name}, {fault} at {moment}: no complete checkpoint is left"
        assert not _is_damaged(folder) or fault in ("truncated", "byte"), "a checkpoint under its own name is complete"
        with Ranks(RANKS) as ranks:
            results = ranks.call(_go_on, (self.kind, folder), deadline=120, timeout=60)
        step, warned = results[0][0], results[0][2]
        for rank, (loaded, states, _) in enumerate(results):
            assert loaded == step
            wanted = {done: self.wanted[rank][done] for done in states}
            assert states.pop(step)[0] == wanted.pop(step)[0], f"rank {rank} has another state, {fault} at {moment}"
            assert states == wanted, f"rank {rank} continues differently, {fault} at {moment}"
        if fault in ("truncated", "byte"):
            assert re.search(r"'step4' is damaged: \S+ (has [\d,]+ bytes|is missing|was changed)", warned), warned
            assert step == 2
        return Round(self.name, fault, moment, step, warned, time.monotonic() - started)

    def _kill(self, folder: Path, fault: str, moment: float) -> None:
        mark = folder / "saving"
        ranks = Ranks(RANKS)
        try:
            with ThreadPoolExecutor(1) as thread:
                seed = self.draw.random()
                call = thread.submit(ranks.call, _save_slowly, (self.kind, folder, mark, seed), deadline=60, timeout=10)
                end = time.monotonic() + 60
                while not mark.exists() and not call.done() and time.monotonic() < end:
                    time.sleep(0.001)
                time.sleep(moment * self.save_seconds)
                pids = [process.pid or 0 for process in ranks._processes]
                chosen = {"all": pids, "one": pids[-1:], "first": pids[:1]}[fault]
                for pid in chosen:
                    os.kill(pid, signal.SIGKILL)
                error = call.exception()
                assert error is None or isinstance(error, RankFailure), error
        finally:
            ranks.end()
        mark.unlink(missing_ok=True)

    def _fill(self, folder: Path, moment: float) -> None:
        rank = self.draw.randrange(RANKS)
        with Ranks(RANKS) as ranks:
            errors = ranks.call(_save_on_full_disk, (self.kind, folder, rank, moment), deadline=60, timeout=30)
        assert len(set(errors)) == 1, "the same error on all ranks"
        assert "No space left on device" in errors[0], errors[0]
        assert f"[{rank}] on " in errors[0] or "rank 0: " in errors[0], errors[0]
        assert named_latest(folder) == "step2"

    def _damage(self, folder: Path, fault: str, moment: float) -> None:
        with Ranks(RANKS) as ranks:
            ranks.call(_save_next, (self.kind, folder), deadline=60, timeout=30)
        files = sorted(path for path in (folder / "step4").iterdir() if path.name != "manifest.json")
        file = self.draw.choice(files)
        content = bytearray(file.read_bytes())
        place = int(moment * len(content))
        if fault == "byte":
            content[place] ^= 1 << self.draw.randrange(8)
        file.write_bytes(content if fault == "byte" else content[:place])


def _is_damaged(folder: Path) -> bool:
    return any(not one.is_whole for one in checkpoints_in(folder, digests=True))


# -- on every rank -----------------------------------------------------------------------------------------------------


def _train_through(kind: Kind, before: Path, slow: Path) -> tuple[dict[int, Any], float]:
    """Save step 2; return states and losses after every step from 2 on, and the seconds of a slowed save."""
    with job(kind.saver or kind) as here:
        here.train(range(2))
        checkpoint.save(here.engine, before, "step2", {"step": 2})
        if kind.saver is None:
            return _train_on(here, slow)
    with job(kind) as here:
        with _slowed(0.5):
            started = time.perf_counter()
            _load(here, before)
            seconds = time.perf_counter() - started
        states, of_save = _train_on(here, slow)
    return states, seconds + of_save


def _train_on(here: Job, slow: Path) -> tuple[dict[int, Any], float]:
    states: dict[int, Any] = {2: (here.state(), [])}
    for step in range(2, 6):
        losses = here.train(range(step, step + 1))
        states[step + 1] = (here.state(), losses)
    with _slowed(0.5):
        started = time.perf_counter()
        checkpoint.save(here.engine, slow, "last")
        return states, time.perf_counter() - started


def _load(here: Job, folder: Path, **options: Any) -> dict[str, Any]:
    """Load the newest checkpoint, also that of another job; return what the program saved."""
    is_changed = here.kind.saver is not None
    return checkpoint.load(here.engine, folder, load_module_strict=not is_changed, **options)[1]


def _go_on(kind: Kind, folder: Path) -> tuple[int, dict[int, Any], str]:
    """Return the step that was loaded, states and losses from there up to step 6, and the warning of rank 0."""
    with job(kind) as here, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", message="checkpoints in")
        state = _load(here, folder, verify="digests")
        first = int(state["step"])
        states: dict[int, Any] = {first: (here.state(), [])}
        for step in range(first, 6):
            losses = here.train(range(step, step + 1))
            states[step + 1] = (here.state(), losses)
        checkpoint.save(here.engine, folder, "step4", {"step": 6}, keep_last=1)
        assert look_at(folder, "step4", digests=True).is_whole
        left = {path.name for path in folder.iterdir() if not path.name.endswith(".py")}
        assert left == {"latest", "step4"}, left
    return first, states, str(caught[0].message) if caught else ""


def _save_next(kind: Kind, folder: Path) -> None:
    with job(kind) as here:
        _load(here, folder)
        here.train(range(2, 4))
        checkpoint.save(here.engine, folder, "step4", {"step": 4})


def _save_slowly(kind: Kind, folder: Path, mark: Path, seed: float) -> None:
    with job(kind) as here:
        dist.barrier()
        if dist.get_rank() == 0 and kind.saver is not None:
            mark.touch()
        with _slowed(seed):
            _load(here, folder)
        here.train(range(2, 4))
        dist.barrier()
        if dist.get_rank() == 0:
            mark.touch()
        with _slowed(seed):
            checkpoint.save(here.engine, folder, "step4", {"step": 4})


def _save_on_full_disk(kind: Kind, folder: Path, rank: int, moment: float) -> str:
    """Return the error of a save in which a rank's disk is full; on rank 0 also for the manifest and latest."""
    with job(kind) as here:
        _load(here, folder)
        here.train(range(2, 4))
        with _full_disk(rank, moment):
            try:
                checkpoint.save(here.engine, folder, "step4", {"step": 4})
            except CheckpointError as error:
                text = str(error)
            else:
                raise AssertionError("the disk was not full")
        dist.barrier()
        left = {path.name for path in folder.iterdir() if not path.name.endswith(".py")}
        assert left in ({"latest", "step2"}, {"latest", "step2", "step4"}), left
        return text


def _slow(real: Callable[..., Any], draw: random.Random) -> Callable[..., Any]:
    """Delay a function before and after."""

    def work_slowly(*arguments: Any, **options: Any) -> Any:
        time.sleep(draw.uniform(0, _SLOW))
        result = real(*arguments, **options)
        time.sleep(draw.uniform(0, _SLOW))
        return result

    return work_slowly


def _slowed(seed: float) -> Any:
    """Delay every step of a save, on each rank differently: writing, flushing, renaming, replacing."""
    draw = random.Random(f"{seed} {dist.get_rank()}")
    return _patched(lambda real: _slow(real, draw))


_STEPS: Sequence[tuple[Any, str]] = (
    (TorchCheckpointEngine, "save"),
    (folders, "flush"),
    (folders, "digest_of"),
    (folders, "replace_text"),
    (folders, "put_in_place"),
    (folders, "discard"),
    *((Loader, name) for name in ("compare", "copy", "finish")),
)


def _patched(make: Callable[[Callable[..., Any]], Callable[..., Any]], steps: Any = _STEPS) -> Any:
    with ExitStack() as stack:
        for owner, name in steps:
            stack.enter_context(mock.patch.object(owner, name, make(getattr(owner, name))))
        return stack.pop_all()


def _full_disk(rank: int, moment: float) -> Any:
    """Make the disk full from some write of a file of this rank on."""
    steps = [(folders, "flush"), (folders, "replace_text")] if rank == 0 else [(folders, "flush")]
    first = 0 if moment < 0.5 or rank else 1  # of the kinds of steps
    left = [int(moment * 2)]

    def full(real: Callable[..., Any]) -> Callable[..., Any]:
        def write(path: Path, *arguments: Any) -> Any:
            if dist.get_rank() == rank and not path.is_dir():
                if left[0] == 0:
                    raise OSError(28, "No space left on device")
                left[0] -= 1
            return real(path, *arguments)

        return write

    return _patched(full, steps[first:])
