"""A rank ends with its launcher: no rank is left behind when the launcher is killed.

DeepSpeed's launcher is two processes, ``deepspeed`` and one ``deepspeed.launcher.launch`` on each host. A signal to the
first ends it alone, and the ranks train on. Here each rank watches the processes above it that belong to its launcher
(over ssh the session, too), and ends itself when one of them has ended: on Linux through pidfds, elsewhere its parent.

A parent-death signal (``PR_SET_PDEATHSIG``) would do less: it knows the parent alone, and it fires when the *thread*
that started the rank ends.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from ds_topo.errors import LaunchError
from ds_topo.launch.launchers import Launch

GRACE_SECONDS = 10.0
"""Between SIGTERM, which the program may handle, and SIGKILL."""
_POLL_SECONDS = 1.0

_SHELLS = {"sh", "bash", "dash", "zsh", "ksh", "ash"}
_MPI = {"mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "orted", "prted", "hydra_pmi_proxy", "mpirun_rsh"}
_INIT = {"init", "systemd", "tini", "dumb-init", "docker-init"}


@dataclass(frozen=True)
class Ancestor:
    """A process above this one.

    Args:
        pid: its number.
        kind: ``launch`` (DeepSpeed's process on each host), ``runner`` (the ``deepspeed`` command), ``torchrun``,
            ``mpi``, ``slurm``; ``session`` (of sshd), ``shell`` (``sh -c``), ``init`` or ``other``.
    """

    pid: int
    kind: str


def kind_of(argv: Sequence[str]) -> str:
    """What a command line is to a rank.

    >>> kind_of(["python", "-u", "-m", "deepspeed.launcher.launch", "--world_info=e30="])
    'launch'
    >>> kind_of(["python", "/bin/deepspeed", "train.py"]), kind_of(["sshd: root@notty"]), kind_of(["vi", "deepspeed"])
    ('runner', 'session', 'other')
    """
    if not argv or not argv[0]:
        return "other"
    names = [os.path.basename(word) for word in argv[:2]]
    command = names[1] if names[0].startswith("python") and len(names) > 1 else names[0]
    flags = list(takewhile(lambda word: word.startswith("-") and word != "-m", argv[1:]))  # python's own
    module = (
        argv[len(flags) + 2] if argv[len(flags) + 1 : len(flags) + 2] == ["-m"] and len(argv) > len(flags) + 2 else ""
    )
    if module == "deepspeed.launcher.launch":
        return "launch"
    if command in ("deepspeed", "deepspeed.pt", "ds") or module in ("deepspeed", "deepspeed.launcher.runner"):
        return "runner"
    if command == "torchrun" or module in ("torch.distributed.run", "torch.distributed.launch"):
        return "torchrun"
    if command in _MPI:
        return "mpi"
    if argv[0].startswith("slurmstepd"):
        return "slurm"
    if argv[0].startswith(("sshd:", "sshd-session:")) and "[listener]" not in argv[0]:
        return "session"
    if names[0].lstrip("-") in _SHELLS and len(argv) > 2 and argv[1].startswith("-") and "c" in argv[1]:
        return "shell"
    return "init" if names[0] in _INIT else "other"


def launcher_above(ancestors: Sequence[Ancestor]) -> list[int]:
    """Of the processes above a rank, parent first, those whose end is the end of its launcher.

    They follow each other, perhaps after wrappers of the rank; a ``launch`` that a remote command started has sshd's
    session above its shell.

    >>> launcher_above([Ancestor(9, "other"), Ancestor(8, "launch"), Ancestor(7, "shell"), Ancestor(6, "session")])
    [8, 6]
    >>> launcher_above([Ancestor(8, "launch"), Ancestor(7, "runner"), Ancestor(6, "other"), Ancestor(5, "session")])
    [8, 7]
    """
    launchers = ("launch", "runner", "torchrun", "mpi", "slurm")
    position = next((index for index, ancestor in enumerate(ancestors) if ancestor.kind in launchers), len(ancestors))
    found: list[int] = []
    while position < len(ancestors) and ancestors[position].kind in launchers:
        found.append(ancestors[position].pid)
        position += 1
    if found and ancestors[position - 1].kind == "launch":
        while position < len(ancestors) and ancestors[position].kind == "shell":
            position += 1
        if position < len(ancestors) and ancestors[position].kind == "session":
            found.append(ancestors[position].pid)
    return found


def is_orphaned(ancestors: Sequence[Ancestor], launcher: str) -> bool:
    """Whether the launcher has ended already, so that its process on this host, or this one, was handed to init.

    >>> is_orphaned([Ancestor(1, "init")], "torchrun"), is_orphaned([Ancestor(9, "torchrun")], "torchrun")
    (True, False)
    """
    if launcher not in ("deepspeed", "torchrun"):
        return False
    above = ancestors[1:] if ancestors and ancestors[0].kind == "launch" else ancestors
    return bool(above) and (above[0].kind == "init" or (above[0].pid == 1 and above[0].kind == "other"))


class Lifeline:
    """Watches the launcher of this process from threads that wait; one for each process."""

    def __init__(self) -> None:
        self._watched: set[int] = set()

    def attach(self, launch: Launch) -> list[int]:
        """Watch from now on; return the processes that are watched. Idempotent.

        Raises:
            LaunchError: the launcher has ended already.
        """
        if launch.launcher == "environment":  # whoever set the variables may well end before its ranks
            return []
        ancestors = ancestors_of(os.getpid())
        if is_orphaned(ancestors, launch.launcher):
            raise LaunchError(f"rank {launch.rank}: its launcher, {launch.launcher}, has ended already")
        pids = launcher_above(ancestors) if ancestors else [os.getppid()]
        for pid in set(pids) - self._watched:
            self._watched.add(pid)
            threading.Thread(target=_end_with, args=(pid, launch), name="ds_topo-lifeline", daemon=True).start()
        return pids


lifeline = Lifeline()


def ancestors_of(pid: int) -> list[Ancestor]:
    """The processes above ``pid``, its parent first; empty where the system does not tell."""
    ancestors: list[Ancestor] = []
    try:
        while (pid := _parent_of(pid)) > 0:
            argv = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            ancestors.append(Ancestor(pid, kind_of(argv)))
    except (OSError, ValueError):  # one has just ended, or there is no /proc
        pass
    return ancestors


def _parent_of(pid: int) -> int:
    # the name of the command, in parentheses, may hold anything
    return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])


def _end_with(pid: int, launch: Launch) -> None:
    """Wait for the end of a process, then end this one."""
    _wait_for_the_end_of(pid)
    print(
        f"ds_topo: rank {launch.rank}: its launcher ({launch.launcher}, process {pid}) has ended, so this rank ends",
        file=sys.stderr,
        flush=True,
    )
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def _wait_for_the_end_of(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # not Linux, or an old kernel
        while _exists(pid):
            time.sleep(_POLL_SECONDS)
        return
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.poll()
    os.close(descriptor)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
