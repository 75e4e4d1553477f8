"""What a rank is doing, read off the stack of its main thread: no call is wrapped, so training pays nothing for it."""

from __future__ import annotations

import dis
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import reduce
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch.distributed as dist

from ds_topo.errors import listed
from ds_topo.process_groups.torch_names import describe, is_known

OTHERWISE = "running"
_DEEPSPEED, _PIPELINE = "deepspeed/runtime/engine.py", "deepspeed/runtime/pipe/engine.py"
_PHASES = {
    (_DEEPSPEED, "forward"): "forward",
    (_DEEPSPEED, "backward"): "backward",
    (_DEEPSPEED, "step"): "step",
    (_DEEPSPEED, "save_checkpoint"): "save",
    (_DEEPSPEED, "load_checkpoint"): "load",
    (_PIPELINE, "train_batch"): "train_batch",
    (_PIPELINE, "eval_batch"): "evaluation",
    (_PIPELINE, "_exec_backward_pass"): "backward",
    (_PIPELINE, "_exec_optimizer_step"): "step",
    ("torch/_tensor.py", "backward"): "backward",
    ("torch/autograd/__init__.py", "backward"): "backward",
    ("torch/nn/modules/module.py", "_call_impl"): "forward",
    ("torch/serialization.py", "save"): "save",
    ("ds_topo/engine/checkpoints/saving.py", "save"): "save",
    ("ds_topo/engine/checkpoints/loading.py", "load"): "load",
    ("torch/distributed/distributed_c10d.py", "init_process_group"): "start",
    ("torch/distributed/distributed_c10d.py", "new_group"): "start",
    ("deepspeed/__init__.py", "initialize"): "start",
    ("ds_topo/engine/initialize.py", "initialize"): "start",
    ("ds_topo/reducer/reducer.py", "finish"): "finish",
}
"""Functions by the end of their file's name, and the phases that they are. The innermost one counts, but for these:"""
_AROUND = ("evaluation", "save", "load", "start")
_STEPS = ("global_steps", "step_count")
"""Attributes of engines and reducers: how many steps are over."""
_COLLECTIVES = "torch/distributed/distributed_c10d.py"
_BETWEEN = ("torch/distributed/c10d_logger.py", "/threading.py", "/concurrent/futures/_base.py")
"""Files whose functions may be inside one that waits."""
_ANY = ""
_WAITS = {
    ("ds_topo/reducer/reductions.py", _ANY): "the reduction of gradients",
    ("ds_topo/reducer/two_level.py", _ANY): "the reduction of gradients",
    ("ds_topo/reducer/used_parameters.py", "settle"): "the reduction of gradients",
    ("ds_topo/partition/arrivals.py", "wait"): "parameters from their owners",
    ("ds_topo/partition/exchange.py", _ANY): "slices from other ranks",
    ("ds_topo/process_groups/deadline.py", "within"): "the store of the job",
    ("ds_topo/process_groups/agreement.py", "agree"): "an agreement of the ranks",
    ("ds_topo/engine/checkpoints/meeting.py", _ANY): "the other ranks' parts of a checkpoint",
    ("torch/distributed/rendezvous.py", "rendezvous"): "the other ranks of the job",
}
"""Functions that wait for other ranks outside torch's collectives."""
_GROUPS = (("route", "group"), ("_route", "group"), ("_peers", "living_group"), ("peers", "living_group"))
"""Where objects with such functions have their process group."""
_IDLE_SECONDS = 0.01
"""Of processor time: what a thread that waits may use meanwhile."""
MAX_RANKS = 64
"""Of a larger group, members are not told."""


@dataclass(frozen=True)
class Wait:
    """A call that other ranks must join."""

    call: str
    """Its name, such as ``all_reduce``."""
    group: str = ""
    """What it is over, for people."""
    name: str = ""
    """Of the group, the same on all members; empty where it is not known."""
    ranks: tuple[int, ...] = ()
    """Its members, of groups that are not too large."""

    def __str__(self) -> str:
        return f"{self.call} of {self.group}" if self.group else self.call


@dataclass(frozen=True)
class Activity:
    """What a rank is doing."""

    step: int | None = None
    """Steps that are over, once that is known."""
    phase: str = OTHERWISE
    where: str = ""
    """The innermost line of the program itself."""
    wait: Wait | None = None
    seconds: float = 0.0
    """For so long it has waited in the same call."""
    quiet: float = 0.0
    """For so long no byte has come or gone meanwhile."""
    still: float = 0.0
    """For so long it has been at one instruction without any processor time: in a call that waits for something."""
    handling: str = ""
    """The exception inside whose handler it is."""
    handled: float = 0.0
    """Seconds since then."""

    def __str__(self) -> str:
        """For a sentence.

        >>> print(Activity(5, "backward", "train.py:8 in main", Wait("all_reduce", "data"), seconds=3.2))
        after 5 steps, in backward, at train.py:8 in main, waiting in all_reduce of data for 3 s
        """
        words = ["before the first step" if self.step is None else f"after {self.step} step{'s' * (self.step != 1)}"]
        words += [f"in {self.phase}"] if self.phase != OTHERWISE else []
        words += [f"at {self.where}"] if self.where else []
        words += [f"waiting in {self.wait}{_for(self.seconds)}"] if self.wait else []
        words += [f"handling {self.handling}{_for(self.handled)}"] if self.handling else []
        return ", ".join(words)

    def to_json(self) -> dict[str, Any]:
        """What :meth:`from_json` takes."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Activity:
        """From another rank."""
        wait = fields.pop("wait")
        return cls(wait=Wait(**{**wait, "ranks": tuple(wait["ranks"])}) if wait else None, **fields)


class Observer:
    """Looks at one thread from another one."""

    def __init__(self) -> None:
        self._thread = threading.main_thread().ident
        self._subject: weakref.ref[Any] | None = None
        """What counts steps."""
        self._seen: dict[CodeType, tuple[str, str]] = {}
        self._calls: dict[tuple[CodeType, int], str] = {}
        self._waits_since = self._handles_since = 0.0
        self._last: tuple[FrameType, Wait] | None = None
        self._handled: object = None
        self._place: tuple[FrameType, int] | None = None
        self._still_since = self._used = 0.0
        self._last_quiet: float | None = None

    def look(self, count: Callable[[], int | None] = lambda: None) -> Activity:
        """What it does now; ``count()`` is a number that changes when bytes come or go, None where nothing is known."""
        frame = sys._current_frames().get(self._thread or 0)
        activity, waiting_frame = self._read(_outwards(frame))
        now = time.monotonic()
        moved = count() if activity.wait is not None else None
        if activity.wait is None or waiting_frame is None:
            self._last, self._last_quiet = None, None
        elif self._last is None or self._last[0] is not waiting_frame or self._last[1] != activity.wait:
            self._last, self._waits_since, self._quiet_at = (waiting_frame, activity.wait), now, moved
            self._last_quiet = now
        else:
            if moved is None or moved != self._quiet_at:
                self._quiet_at, self._last_quiet = moved, now
            quiet = now - (self._last_quiet or now)
            activity = replace(activity, seconds=now - self._waits_since, quiet=quiet)
        return self._with_handler(replace(activity, still=self._still(frame, now)), now)

    def _still(self, frame: FrameType | None, now: float) -> float:
        used = time.clock_gettime(time.pthread_getcpuclockid(self._thread)) if self._thread else 0.0
        place = (frame, frame.f_lasti) if frame is not None else None
        if place != self._place or used - self._used > _IDLE_SECONDS:
            self._place, self._used, self._still_since = place, used, now
        return now - self._still_since

    def read_traceback(self, trace: TracebackType | None) -> Activity:
        """What it did when an exception was raised."""
        frames = [frame for frame, _ in traceback.walk_tb(trace)]
        activity, _ = self._read(iter(reversed(frames)))
        lines = [entry for entry in traceback.extract_tb(trace) if _is_own(entry.filename)]
        if lines:
            activity = replace(activity, where=f"{_short(lines[-1].filename)}:{lines[-1].lineno} in {lines[-1].name}")
        return activity

    def _with_handler(self, activity: Activity, now: float) -> Activity:
        handled = sys._current_exceptions().get(self._thread or 0)
        error = handled[1] if isinstance(handled, tuple) else handled  # before Python 3.12 as sys.exc_info()
        if error is not self._handled:
            self._handled, self._handles_since = error, now
        if error is None:
            return activity
        return replace(activity, handling=first_line(error), handled=now - self._handles_since)

    def _read(self, frames: Iterator[FrameType]) -> tuple[Activity, FrameType | None]:
        """The activity, without durations, and the frame that waits."""
        phase, where, wait, waiting_frame = "", "", None, None
        is_innermost, innermost = True, None
        for frame in frames:
            innermost = innermost or frame
            role, name = self._role(frame.f_code)
            if waiting_frame is None and frame is innermost and role not in ("collective", "wait"):
                if self._call_of(frame) == "wait":  # of torch's work or future: all others have frames of their own
                    wait, waiting_frame = Wait("wait() for a collective"), frame
            elif is_innermost and role in ("collective", "wait"):
                wait = _collective(frame) if role == "collective" else _known_wait(name, frame)
                waiting_frame = frame
            is_innermost = is_innermost and role in ("collective", "between")
            if role == "phase":
                owner = frame.f_locals.get("self", frame.f_locals.get("engine"))
                self._note_subject(owner)
                if name == "forward" and getattr(getattr(owner, "module", None), "training", True) is False:
                    name = "evaluation"
                if not phase or name in _AROUND:
                    phase = name
            elif role == "counts":
                self._note_subject(frame.f_locals.get("self", frame.f_locals.get("engine")))
            if not where and role == "own":
                where = f"{_short(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"
        return Activity(self._step(), phase or OTHERWISE, where, wait), waiting_frame

    def _role(self, code: CodeType) -> tuple[str, str]:
        """What a function is to us, and which."""
        known = self._seen.get(code)
        if known is None:
            known = self._seen[code] = _role_of(code.co_filename.replace("\\", "/"), code.co_name)
        return known

    def _call_of(self, frame: FrameType) -> str:
        """The method that a frame is calling, as far as its instructions tell."""
        place = (frame.f_code, frame.f_lasti)
        if place not in self._calls:
            before = (each for each in dis.get_instructions(frame.f_code) if each.offset <= frame.f_lasti)
            names = [str(each.argval) for each in before if each.opname in ("LOAD_METHOD", "LOAD_ATTR")]
            self._calls[place] = names[-1] if names else ""
        return self._calls[place]

    def _note_subject(self, owner: object) -> None:
        if any(isinstance(getattr(owner, name, None), int) for name in _STEPS):
            self._subject = weakref.ref(owner)

    def _step(self) -> int | None:
        subject = self._subject() if self._subject is not None else None
        return next((getattr(subject, name) for name in _STEPS if hasattr(subject, name)), None)

    _quiet_at: object = None


def _for(seconds: float) -> str:
    return f" for {seconds:.0f} s" if seconds >= 1 else ""


def first_line(error: BaseException | type[BaseException]) -> str:
    """An exception in a line.

    >>> first_line(ValueError("no\\nway"))
    'ValueError: no'
    """
    text = str(error).strip().partition("\n")[0][:200]
    kind = type(error).__name__
    return f"{kind}: {text}" if text else kind


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _role_of(file: str, function: str) -> tuple[str, str]:
    for table, role in ((_WAITS, "wait"), (_PHASES, "phase")):
        for (ending, name), meaning in table.items():
            if name in (function, _ANY) and file.endswith(ending):
                return role, meaning
    if file.endswith(_COLLECTIVES) and not function.startswith("_"):
        return "collective", function
    if file.endswith(_BETWEEN):
        return "between", function
    if file.endswith((_DEEPSPEED, _PIPELINE, "ds_topo/reducer/reducer.py", "ds_topo/engine/current_mpu.py")):
        return "counts", function
    return ("own" if _is_own(file) else "library"), function


def _is_own(file: str) -> bool:
    """Whether a file is neither a library's nor ours."""
    return not file.startswith("<") and not any(
        part in file for part in ("site-packages/", "/lib/python", "/ds_topo/", "dist-packages/")
    )


def _short(file: str) -> str:
    return "/".join(file.replace("\\", "/").split("/")[-2:])


def _collective(frame: FrameType) -> Wait:
    """Which call of torch's, and over what."""
    call, values = frame.f_code.co_name, frame.f_locals
    group = values.get("group") or values.get("pg") or dist.group.WORLD
    peer = next(
        (values[name] for name in ("src", "dst", "group_src", "group_dst") if values.get(name) is not None), None
    )
    if call in ("send", "recv", "isend", "irecv") and isinstance(peer, int):
        call = f"{call} {'to' if 'send' in call else 'from'} {peer}"
    return _over(call, group)


def _known_wait(call: str, frame: FrameType) -> Wait:
    """One of ours."""
    for path in _GROUPS:
        try:
            group = reduce(getattr, path, frame.f_locals.get("self"))
        except (AttributeError, RuntimeError):  # another kind of object; its group is gone
            continue
        return _over(call, group)
    return Wait(call)


def _over(call: str, group: object) -> Wait:
    if not isinstance(group, dist.ProcessGroup) or not is_known(group):
        return Wait(call)
    ranks = dist.get_process_group_ranks(group)
    label, name = describe(group)
    label = "all ranks" if group == dist.group.WORLD else label or f"ranks {listed(ranks)}"
    return Wait(call, label, name, tuple(ranks) if len(ranks) <= MAX_RANKS else ())
