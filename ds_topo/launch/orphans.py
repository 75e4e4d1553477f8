"""End a rank whose launcher has ended.

DeepSpeed's launcher consists of ``deepspeed`` and one ``deepspeed.launcher.launch`` on each host. A signal to the first
ends only that process, and the ranks continue to train. Here each rank watches its ancestors that belong to the
launcher, and sshd's session if there is one. It ends itself when one of them has ended. On Linux it uses pidfds;
elsewhere it watches its parent. A parent-death signal (``PR_SET_PDEATHSIG``) would not suffice: it covers the parent
only, and it is sent when the *thread* that started the rank ends.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import dropwhile, islice, takewhile
from pathlib import Path

from ds_topo.errors import LaunchError, tell
from ds_topo.launch.launchers import Launch

GRACE_SECONDS = 10.0
"""The seconds between SIGTERM, which the program may handle, and SIGKILL."""
_POLL_SECONDS = 1.0

_MPI = ("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "orted", "prted", "hydra_pmi_proxy", "mpirun_rsh")
_KINDS = {
    "deepspeed.launcher.launch": "launch",
    **dict.fromkeys(("deepspeed", "deepspeed.launcher.runner", "deepspeed.pt", "ds"), "runner"),
    **dict.fromkeys(("torchrun", "torch.distributed.run", "torch.distributed.launch"), "torchrun"),
    **dict.fromkeys(_MPI, "mpi"),
    **dict.fromkeys(("init", "systemd", "tini", "dumb-init", "docker-init"), "init"),
}
"""The kinds of ancestors by the names of commands and modules."""
_LAUNCHERS = ("launch", "runner", "torchrun", "mpi", "slurm")
"""The kinds that are processes of a launcher."""
_SHELLS = {"sh", "bash", "dash", "zsh", "ksh", "ash"}


@dataclass(frozen=True)
class Ancestor:
    """An ancestor of this process, and its kind as :func:`kind_of` returns it."""

    pid: int
    kind: str


def kind_of(argv: Sequence[str]) -> str:
    """Return the kind of an ancestor by its command line, as in ``_KINDS``, or of sshd's session or a shell."""
    if not argv or not argv[0]:
        return "other"
    names = [os.path.basename(word) for word in argv[:2]]
    command = names[1] if names[0].startswith("python") and len(names) > 1 else names[0]
    after_flags = list(dropwhile(lambda word: word.startswith("-") and word != "-m", argv[1:]))  # python's own flags
    module = after_flags[1] if after_flags[:1] == ["-m"] and len(after_flags) > 1 else ""
    if argv[0].startswith("slurmstepd"):
        return "slurm"
    if argv[0].startswith(("sshd:", "sshd-session:")) and "[listener]" not in argv[0]:
        return "session"
    if names[0].lstrip("-") in _SHELLS and len(argv) > 2 and argv[1].startswith("-") and "c" in argv[1]:
        return "shell"
    return _KINDS.get(module) or _KINDS.get(command, "other")


def launcher_above(ancestors: Sequence[Ancestor]) -> list[int]:
    """Return the ancestors, of those listed parent first, whose end is the end of the launcher.

    They follow each other, perhaps after wrappers of the rank. A ``launch`` that a remote command started has sshd's
    session above its shell.
    """
    from_first = list(dropwhile(lambda ancestor: ancestor.kind not in _LAUNCHERS, ancestors))
    found = list(takewhile(lambda ancestor: ancestor.kind in _LAUNCHERS, from_first))
    if found and found[-1].kind == "launch":
        above = dropwhile(lambda ancestor: ancestor.kind == "shell", from_first[len(found) :])
        found += [ancestor for ancestor in islice(above, 1) if ancestor.kind == "session"]
    return [ancestor.pid for ancestor in found]


def is_orphaned(ancestors: Sequence[Ancestor], launcher: str) -> bool:
    """Return whether the launcher has ended already, so that init adopted its process on this host, or this one.

    >>> is_orphaned([Ancestor(1, "init")], "torchrun"), is_orphaned([Ancestor(9, "torchrun")], "torchrun")
    (True, False)
    """
    if launcher not in ("deepspeed", "torchrun"):
        return False
    above = ancestors[1:] if ancestors and ancestors[0].kind == "launch" else ancestors
    return bool(above) and (above[0].kind == "init" or (above[0].pid == 1 and above[0].kind == "other"))


_watched: set[int] = set()


def end_with_launcher(launch: Launch) -> None:
    """End this process when a process of its launcher has ended; raise if it has ended already. Idempotent."""
    ancestors = ancestors_of(os.getpid())
    if is_orphaned(ancestors, launch.launcher):
        raise LaunchError(
            f"rank {launch.rank}: its launcher, {launch.launcher}, has ended already; start the job again"
        )
    for pid in set(launcher_above(ancestors) if ancestors else [os.getppid()]) - _watched:
        _watched.add(pid)
        threading.Thread(target=_end_with, args=(pid, launch), name="ds_topo-lifeline", daemon=True).start()


def ancestors_of(pid: int) -> list[Ancestor]:
    """Return the ancestors of ``pid``, its parent first; none on other systems than Linux."""
    ancestors: list[Ancestor] = []
    with suppress(OSError, ValueError):  # one has just ended, or there is no /proc
        # the name of the command, in parentheses, may contain anything
        while (pid := int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])) > 0:
            argv = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            ancestors.append(Ancestor(pid, kind_of(argv)))
    return ancestors


def _end_with(pid: int, launch: Launch) -> None:
    _wait_for_the_end_of(pid)
    tell(f"ds_topo: rank {launch.rank}: its launcher ({launch.launcher}, process {pid}) has ended, so this rank ends")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def _wait_for_the_end_of(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # not Linux, or an old kernel
        with suppress(ProcessLookupError):
            while True:
                with suppress(PermissionError):  # it exists
                    os.kill(pid, 0)
                time.sleep(_POLL_SECONDS)
        return
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.poll()
    os.close(descriptor)
