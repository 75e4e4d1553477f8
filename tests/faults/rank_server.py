"""Fork the ranks of a host: this process has imported what they need, so they start at once.

``python -m tests.faults.rank_server`` reads requests from its standard input, one line of JSON each. A request
``{"start": {...}}`` starts a rank with ``arguments``, ``variables`` and a ``log``; its exit code is written beside the
log. ``{"kill": true}`` kills all processes that ranks have left.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import sys
from pathlib import Path
from typing import Any

from tests.faults import job

READY = "ready"
_WAKE_SECONDS = 0.02


def exit_code_of(log: Path) -> Path:
    """Return the file with a rank's exit code; it exists after the rank has ended."""
    return log.with_suffix(".exit-code")


def _become_rank(request: dict[str, Any]) -> None:
    """Give a fork the variables, arguments and output of a rank."""
    with open(os.devnull, "rb") as nothing, open(request["log"], "ab") as log:
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source.fileno(), target)
    os.setsid()
    os.environ.update(request["variables"])
    sys.argv = ["job", *request["arguments"]]


def _kill_others() -> None:
    """Kill all processes of this host, also stopped ones, except the first process and this one."""
    own = {1, os.getpid()}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) not in own:
            try:
                os.kill(int(entry.name), signal.SIGKILL)
            except ProcessLookupError:
                continue


def main() -> None:
    """Serve requests until standard input ends; in a fork, run a rank."""
    importlib.import_module("tests.support.fork_server")
    ranks: dict[int, Path] = {}
    unread = b""
    print(READY, flush=True)
    while True:
        readable, _, _ = select.select([0], [], [], _WAKE_SECONDS)
        if readable:
            received = os.read(0, 1 << 16)
            if not received:
                return
            *lines, unread = (unread + received).split(b"\n")
            for request in map(json.loads, lines):
                if "kill" in request:
                    _kill_others()
                    while ranks:
                        os.waitpid(ranks.popitem()[0], 0)
                    continue
                pid = os.fork()
                if not pid:
                    _become_rank(request["start"])
                    job.main()
                    return
                ranks[pid] = Path(request["start"]["log"])
        for pid in list(ranks):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                exit_code = exit_code_of(ranks.pop(pid))
                exit_code.with_suffix(".part").write_text(str(os.waitstatus_to_exitcode(status)))
                exit_code.with_suffix(".part").replace(exit_code)


if __name__ == "__main__":
    main()
