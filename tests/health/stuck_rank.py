"""Fail on rank 0 of a job, and do something else on each other rank: ``python -m tests.health.stuck_rank WHAT ...``."""

from __future__ import annotations

import collections
import hashlib
import itertools
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from ds_topo.health import Watch, activity

LIMIT = 2.0
BUSY_GRACE, PATIENCE = 3.0, 4.0
"""Shorter than those of the package."""
SECONDS = 9.0
"""The time for which ranks do what must be spared."""
SURVIVED = 3
"""Their exit code."""


def inside(file: str, function: str, call: Callable[[], object]) -> None:
    """Call a function inside another one of this name in a file of this name."""
    names: dict[str, Callable[[Callable[[], object]], None]] = {}
    exec(compile(f"def {function}(call):\n    call()\n", f"/lib/{file}", "exec"), names)
    names[function](call)


def spin() -> None:
    """Use the processor in one call that releases the interpreter, as ``torch.cuda.synchronize()`` does."""
    hashlib.pbkdf2_hmac("sha256", b"", b"", 1 << 30)


def sleep() -> None:
    """Wait in one call, as for a GPU with blocking synchronisation."""
    time.sleep(1000)


def hold() -> None:
    """Use the processor in one call that holds the interpreter."""
    count = 10_000_000
    start = time.monotonic()
    collections.deque(itertools.repeat(0, count), maxlen=0)
    collections.deque(itertools.repeat(0, int(count * SECONDS / (time.monotonic() - start))), maxlen=0)


def loop() -> None:
    """Run lines."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        pass


def loop_of_calls() -> None:
    """Make calls in one line, in which every sample finds the thread at the same instruction.

    A call takes a quarter of a second, so that it stays far below ``BUSY_GRACE`` on a machine with other work.
    """
    start = time.monotonic()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000)
    in_a_quarter = int(25_000 / (time.monotonic() - start))
    for _ in range(int(4 * SECONDS)):
        hashlib.pbkdf2_hmac("sha256", b"", b"", in_a_quarter)


def compile_long() -> None:
    """Wait for a compiler."""
    inside("torch/utils/cpp_extension.py", "_jit_compile", lambda: subprocess.run(["sleep", str(SECONDS)], check=True))


def debug() -> None:
    """Wait for a command in the debugger, until the test sends one."""
    breakpoint()


def write() -> None:
    """Write bytes for some time while no line is reached, as a large tensor to a slow disk."""
    end = threading.Event()

    def write_slowly() -> None:
        with tempfile.TemporaryFile() as file:
            until = time.monotonic() + SECONDS
            while time.monotonic() < until:
                file.write(bytes(3 << 20))
                file.flush()
                time.sleep(1)
        end.set()

    threading.Thread(target=write_slowly).start()
    inside("torch/serialization.py", "save", end.wait)


ENGINE, PIPELINE = "deepspeed/runtime/engine.py", "deepspeed/runtime/pipe/engine.py"
DOES: dict[str, Callable[[], object]] = {
    "spin": spin,
    "spin in forward": lambda: inside(ENGINE, "forward", spin),
    "spin in step": lambda: inside(ENGINE, "step", spin),
    "spin in evaluation": lambda: inside(PIPELINE, "eval_batch", spin),
    "spin in save": lambda: inside("torch/serialization.py", "save", spin),
    "sleep": sleep,
    "sleep in forward": lambda: inside(ENGINE, "forward", sleep),
    "sleep in save": lambda: inside("torch/serialization.py", "save", sleep),
    "hold": hold,
    "loop": loop,
    "loop of calls": loop_of_calls,
    "compile": compile_long,
    "debug": debug,
    "write": write,
}


def main() -> None:
    """Join the job, start the watch, and do what the arguments say for this rank."""
    does = ["fail", *sys.argv[1:]][int(os.environ["RANK"])]
    dist.init_process_group("gloo", timeout=timedelta(seconds=100))
    activity.BUSY_GRACE, activity.PATIENCE = BUSY_GRACE, PATIENCE
    Watch(LIMIT)
    dist.barrier()
    if does == "fail":
        raise ValueError("a sample that cannot be read")
    DOES[does]()
    os._exit(SURVIVED)


if __name__ == "__main__":
    main()
