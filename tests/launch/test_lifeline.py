"""A rank watches its launcher, and no other ancestor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from ds_topo.launch.orphans import Ancestor, ancestors_of, kind_of, launcher_above

SSHD = "sshd: root@notty"


@pytest.mark.parametrize(
    ("argv", "kind"),
    [
        (["/usr/bin/python3", "/venv/bin/torchrun", "--nnodes", "2", "train.py"], "torchrun"),
        (["python", "-m", "torch.distributed.run", "train.py"], "torchrun"),
        (["python", "/venv/bin/deepspeed", "train.py"], "runner"),
        (["python", "-u", "-m", "deepspeed.launcher.launch", "--world_info=e30=", "train.py"], "launch"),
        (["slurmstepd: [7.0]"], "slurm"),
        (["/usr/bin/mpirun", "-n", "4"], "mpi"),
        (["orted", "-mca"], "mpi"),
        ([SSHD], "session"),
        (["sshd: /usr/sbin/sshd -D [listener] 0 of 10-100 startups"], "other"),
        (["bash", "-c", "deepspeed train.py"], "shell"),
        (["bash", "deepspeed.sh"], "other"),
        (["/sbin/init"], "init"),
        (["python", "train.py", "-m", "deepspeed.launcher.launch"], "other"),
        (["vi", "torchrun"], "other"),
        ([], "other"),
    ],
)
def test_ancestors_are_classified_by_their_command_line(argv: list[str], kind: str) -> None:
    assert kind_of(argv) == kind


@pytest.mark.parametrize(
    ("kinds", "watched"),
    [
        (["torchrun", "shell", "other", "session"], [0]),
        (["other", "torchrun", "other"], [1]),
        (["launch", "runner", "other", "session"], [0, 1]),
        (["launch", "shell", "shell", "session", "other"], [0, 3]),
        (["mpi", "other", "session"], [0]),
        (["slurm", "other"], [0]),
        (["shell", "session"], []),
        ([], []),
    ],
)
def test_the_launcher_and_its_session_are_watched(kinds: list[str], watched: list[int]) -> None:
    assert launcher_above([Ancestor(pid, kind) for pid, kind in enumerate(kinds)]) == watched


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_ancestors_are_found() -> None:
    assert ancestors_of(os.getpid())[0].pid == os.getppid()


@pytest.mark.skipif(sys.platform != "linux", reason="pidfds")
def test_a_rank_ends_when_its_launcher_has_ended() -> None:
    program = (
        "import sys, time; from ds_topo.launch.launchers import Launch; from ds_topo.launch import orphans\n"
        "launch = Launch('torchrun', 3, 4, 1, 'a', 29500)\n"
        "orphans._end_with(int(sys.argv[1]), launch)\n"
    )
    launcher = subprocess.Popen(["sleep", "600"])
    rank = subprocess.Popen([sys.executable, "-c", program, str(launcher.pid)], stderr=subprocess.PIPE, text=True)
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            rank.wait(1.0)
        launcher.kill()
        launcher.wait()
        said = rank.communicate(timeout=30)[1]
    finally:
        for process in (launcher, rank):
            process.kill()
            process.wait()
    assert rank.returncode == -signal.SIGTERM
    assert f"rank 3: its launcher (torchrun, process {launcher.pid}) has ended, so this rank ends" in said
