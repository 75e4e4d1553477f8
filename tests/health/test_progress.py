"""After a fault a rank that makes no progress is ended, whatever its processor does; one that makes some is spared."""

from __future__ import annotations

import _thread
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from ds_topo.health.activity import BUSY_GRACE, GRACE, PATIENCE, Activity, MainThread, Progress
from ds_topo.health.blocked_calls import EXIT_CODE
from tests.health import stuck_rank
from tests.health.stuck_rank import SURVIVED, inside
from tests.support.exhaustive import mark_exhaustive
from tests.support.ports import free_port
from tests.support.rank_main import RANK_ENVIRONMENT

TIMEOUT = 120.0


@dataclass(frozen=True)
class Ended:
    """The end of a rank."""

    code: int
    seconds: float
    """The time since rank 0 ended."""
    output: str


def ends_of(*does: str) -> dict[str, Ended]:
    """Run a job whose rank 0 fails, and return the ends of the ranks that do these things."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("DS_TOPO_")}
    environment = {**inherited, **RANK_ENVIRONMENT, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.health.stuck_rank", *does],
            env={**environment, "RANK": str(rank), "WORLD_SIZE": str(len(does) + 1)},
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(len(does) + 1)
    ]
    process_in_debugger = processes[does.index("debug") + 1 if "debug" in does else 0]
    ends: dict[int, float] = {}
    try:
        until = time.monotonic() + TIMEOUT
        while len(ends) < len(processes) and time.monotonic() < until:
            for rank, process in enumerate(processes):
                if rank not in ends and process.poll() is not None:
                    ends[rank] = time.monotonic()
            if process_in_debugger.stdin and 0 in ends and time.monotonic() > ends[0] + stuck_rank.SECONDS:
                process_in_debugger.stdin.close()  # which ends the debugger, and by bdb.BdbQuit the rank
                process_in_debugger.stdin = None
            time.sleep(0.05)
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
    outputs = [process.communicate()[0] for process in processes]
    assert len(ends) == len(processes), "\n".join(outputs)
    assert "ValueError: a sample that cannot be read" in outputs[0]
    return {
        what: Ended(processes[rank].returncode, ends[rank] - ends[0], outputs[rank])
        for rank, what in enumerate(does, start=1)
    }


@pytest.mark.exhaustive
def test_saves_are_ended_only_if_nothing_is_written() -> None:
    ends = ends_of("spin in save", "sleep in save", "write")
    assert ends["spin in save"].code == EXIT_CODE, ends
    assert ends["sleep in save"].code == EXIT_CODE, ends
    assert ends["write"].code == SURVIVED, ends


SPARED = {"loop of calls", "loop", "compile", "hold"}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "does",
    mark_exhaustive(
        [
            ["spin in forward", "sleep in forward", "loop of calls"],
            ["spin", "spin in step", "sleep"],
            ["spin in evaluation", "loop", "hold"],
            ["compile", "debug"],
        ],
        default=lambda number, _: number == 0,
    ),
    ids=", ".join,
)
def test_ranks_are_ended_in_calls_that_do_not_end_and_spared_if_they_make_progress(does: list[str]) -> None:
    ends = ends_of(*does)
    if "debug" in does:
        debugged = ends.pop("debug")
        assert debugged.code != EXIT_CODE, debugged
        assert debugged.seconds > stuck_rank.SECONDS, debugged
        assert "BdbQuit" in debugged.output, debugged
    for what, ended in ends.items():
        if what in SPARED:
            assert ended.code == SURVIVED, f"{what}: {ended}"
            continue
        assert ended.code == EXIT_CODE, f"{what}: {ended}"
        assert ended.seconds < GRACE + 16, f"{what}: {ended}"
        assert "rank 0 on" in ended.output, what
        assert "has failed: ValueError: a sample that cannot be read" in ended.output, what
        assert "Here: rank" in ended.output, what
        assert "stuck_rank.py" in ended.output, f"{what}: no stacks"


# -- the parts ---------------------------------------------------------------------------------------------------------


def _seconds_while(blocks: Callable[[], object], progress: Progress, doing: Activity) -> float:
    """Return the seconds without progress at the end of a call in this thread."""
    end = threading.Event()

    def judge() -> None:
        while not end.wait(0.05):
            progress.look(doing, 0.05)

    judging = threading.Thread(target=judge)
    judging.start()
    time.sleep(0.2)
    try:
        blocks()
        return progress.seconds
    finally:
        end.set()
        judging.join()


def _progress() -> Progress:
    return Progress(lambda: None)


@pytest.mark.thorough
def test_one_call_is_told_from_a_loop_of_calls() -> None:
    assert _seconds_while(lambda: time.sleep(1.5), _progress(), Activity()) > 1
    assert _seconds_while(lambda: [time.sleep(0.1) for _ in range(15)], _progress(), Activity()) < 0.6


def test_a_passed_thread_is_asked_again() -> None:
    thread = MainThread()
    assert [thread.has_passed() for _ in range(100)].count(True) > 50  # the answer may come before the question returns


@pytest.mark.thorough
@pytest.mark.parametrize("reaches_lines", [True, False])
def test_lines_of_autograds_threads_are_progress_of_backward(reaches_lines: bool) -> None:
    ended = _thread.allocate_lock()
    ended.acquire()

    def run_hook() -> None:
        time.sleep(0.01 if reaches_lines else 2)

    def run_hooks() -> None:
        until = time.monotonic() + 2
        while time.monotonic() < until:
            run_hook()
        ended.release()

    def backward() -> None:
        _thread.start_new_thread(run_hooks, ())  # threading does not know it, as those of autograd
        inside("torch/autograd/graph.py", "_engine_run_backward", ended.acquire)

    seconds = _seconds_while(backward, _progress(), Activity(phase="backward"))
    assert (seconds < 1) is reaches_lines, seconds


@pytest.mark.parametrize(
    ("doing", "limit"),
    [
        (Activity(), BUSY_GRACE),
        (Activity(still=2), PATIENCE),
        (Activity(phase="forward"), BUSY_GRACE),
        (Activity(phase="forward", still=2), GRACE),
        (Activity(phase="save"), PATIENCE),
        (Activity(phase="compilation", still=2), float("inf")),
        (Activity(phase="the debugger", still=2), float("inf")),
    ],
)
def test_the_patience_depends_on_the_activity(doing: Activity, limit: float) -> None:
    progress = _progress()
    progress.seconds = min(limit, 1e9) - 0.1
    assert not progress.is_stuck(doing)
    progress.seconds = min(limit, 1e9) + 0.1
    assert progress.is_stuck(doing) is (limit < float("inf"))


@pytest.mark.thorough
def test_a_traced_process_is_spared() -> None:
    code = """
import ctypes, os, sys, time
from ds_topo.health.activity import Activity, Progress
libc = ctypes.CDLL(None)
PTRACE_SEIZE, PTRACE_DETACH = 0x4206, 17
progress = Progress(lambda: None)
progress.seconds = 1e6
print(progress.is_stuck(Activity()), flush=True)
parent = os.getpid()
libc.prctl(0x59616D61, ctypes.c_ulong(-1 & (1 << 64) - 1), 0, 0, 0)  # PR_SET_PTRACER: any process
ready, done = os.pipe(), os.pipe()
if not os.fork():
    assert libc.ptrace(PTRACE_SEIZE, parent, None, None) == 0
    os.write(ready[1], b"!")
    os.read(done[0], 1)
    os._exit(0)
os.read(ready[0], 1)
print(progress.is_stuck(Activity()), flush=True)
os.write(done[1], b"!")
os.wait()
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    if "AssertionError" in ran.stderr:
        pytest.skip("this system forbids tracing")
    assert ran.stdout.split() == ["True", "False"], ran.stderr
