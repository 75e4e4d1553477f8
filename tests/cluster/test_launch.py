"""A job over two hosts, launched as a user would: it trains as on one host, and ends with its launcher."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.cluster.launchers import LAUNCHERS, SLURM_LAUNCHERS, VARIABLES, finish, start_job
from tests.cluster.requirements import on_demand
from tests.cluster.slurm import SLURM_TOOLS, start_slurm
from tests.support.ranks import run_ranks

StartCluster = Callable[..., Cluster]
EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"
WAITING_RANK = Path(__file__).with_name("waiting_rank.py")
JOINING_RANK = Path(__file__).with_name("joining_rank.py")
OPTIONS = ["--topology", "pipe=2,data=2", "--steps", "3", "--continuation", "12"]
OPTIONS += ["--batch-size", "16", "--context", "16", "--width", "32", "--depth", "2"]
TOOLS = {"pdsh": ("pdsh",), "openmpi": ("mpirun", "ompi_info"), "srun": SLURM_TOOLS, "slurm": SLURM_TOOLS}
START_SECONDS, END_SECONDS = 180.0, 60.0


def _always_first(cases: Sequence[Any], always: Sequence[Any]) -> list[Any]:
    """All cases; those besides ``always`` on demand."""
    others = [case if isinstance(case, tuple) else (case,) for case in cases if case not in always]
    return [*always, *(pytest.param(*case, marks=on_demand) for case in others)]


def _train_gpt(out: str) -> None:
    import train_gpt

    sys.argv = [str(EXAMPLE), *OPTIONS, "--out", out]
    train_gpt.main()


def _losses(out: Path) -> list[float]:
    record = json.loads((out / "history.json").read_text())
    return [*(row["loss"] for row in record["history"]), record["validation_loss"]]


@pytest.fixture(scope="module")
def losses_on_one_host(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The reference; it also compiles DeepSpeed's extension, once, before ranks of two hosts would wait for it."""
    out = tmp_path_factory.mktemp("alone")
    run_ranks(4, _train_gpt, str(out))
    return _losses(out)


@pytest.fixture
def start_hosts(start_cluster: StartCluster, tmp_path: Path) -> Callable[[str], tuple[Cluster, dict[str, str]]]:
    """Two hosts with what a launcher needs, and its variables."""

    def start(launcher: str) -> tuple[Cluster, dict[str, str]]:
        cluster = start_cluster(hosts=2, tools=TOOLS.get(launcher, ()))
        return cluster, start_slurm(cluster, tmp_path) if launcher in SLURM_LAUNCHERS else {}

    return start


@pytest.mark.parametrize("launcher", _always_first(LAUNCHERS, always=["pdsh", "torchrun", "srun"]))
def test_two_hosts_train_as_one_does(
    launcher: str, start_hosts: Callable[..., Any], losses_on_one_host: list[float], tmp_path: Path
) -> None:
    cluster, variables = start_hosts(launcher)
    job = [str(EXAMPLE), *OPTIONS, "--out", "both"]
    output = finish(start_job(cluster, launcher, job, tmp_path, env=variables))
    name = {"pdsh": "deepspeed", "no_ssh": "deepspeed", "openmpi": "mpirun", "slurm": "srun"}.get(launcher, launcher)
    assert f"ds_topo: 4 ranks, 2 on this host, started by {name}" in output
    assert min(cluster.bytes_sent()) > 100_000
    both = _losses(tmp_path / "both")
    assert len(both) == 4
    assert both == pytest.approx(losses_on_one_host, rel=1e-5)


# -- killed launchers --------------------------------------------------------------------------------------------------


def _processes_with(marker: str) -> dict[int, str]:
    """Processes whose command line has this text, this one aside."""
    found: dict[int, str] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has just ended
            continue
        if marker in command and int(entry.name) != os.getpid():
            found[int(entry.name)] = command
    return found


def _launcher_pid(process: subprocess.Popen[Any]) -> int:
    """The launcher itself, below the ``nsenter`` that put it on its host."""
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])


def _wait_for_ranks(folder: Path, count: int, processes: list[subprocess.Popen[Any]]) -> None:
    end = time.monotonic() + START_SECONDS
    while len(list(folder.glob("rank*"))) < count:
        ended = [process.communicate()[0] for process in processes if process.poll() is not None]
        assert not ended, f"the job ended before it was killed:\n{ended[0][-6000:]}"
        assert time.monotonic() < end, "the job did not start"
        time.sleep(0.1)


KILLED = [
    (launcher, number)
    for launcher in ("one host", "pdsh", "no_ssh", "torchrun", "srun", "openmpi")
    for number in (signal.SIGTERM, signal.SIGINT)
]


@pytest.mark.parametrize(
    ("launcher", "number"), _always_first(KILLED, always=[("one host", signal.SIGTERM), ("pdsh", signal.SIGTERM)])
)
def test_a_killed_launcher_leaves_no_rank(
    launcher: str, number: signal.Signals, start_hosts: Callable[..., Any], tmp_path: Path
) -> None:
    cluster, variables = start_hosts(launcher)
    job = [str(WAITING_RANK), str(tmp_path)]
    if launcher == "one host":
        command = [str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", "2", *job]
        output: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        processes = [cluster.hosts[0].start(command, env=VARIABLES, cwd=tmp_path, **output)]
    else:
        processes = start_job(cluster, launcher, job, tmp_path, env=variables)
    _wait_for_ranks(tmp_path, 2 if launcher == "one host" else 4, processes)

    # Of launchers that are started on every host one is killed: its ranks, and with them the others', must end.
    launcher_pid = _launcher_pid(processes[0])
    os.kill(launcher_pid, number)
    if launcher == "srun" and number == signal.SIGINT:  # the first makes it report; it goes on
        time.sleep(0.3)
        os.kill(launcher_pid, number)
    end = time.monotonic() + END_SECONDS
    while left := _processes_with(str(tmp_path)):
        assert time.monotonic() < end, f"still there: {left}"
        time.sleep(0.1)
    for process in processes:
        process.communicate(timeout=10)
        assert process.returncode != 0


# -- joining -----------------------------------------------------------------------------------------------------------


def _join(cluster: Cluster, folder: Path) -> list[tuple[int, str]]:
    """Join one rank on each of two hosts by torchrun; exit code and output of each."""
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    parts = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "host0"]
    processes = [
        cluster.hosts[node].start(
            [torchrun, *parts, "--node-rank", str(node), str(JOINING_RANK)],
            env=VARIABLES,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def test_hosts_whose_names_mean_themselves_can_join(start_cluster: StartCluster, tmp_path: Path) -> None:
    """Debian's ``127.0.1.1 host1`` makes gloo bind to the loopback address, where nobody else reaches it."""
    cluster = start_cluster(hosts=2, tools=())
    for host in cluster.hosts:
        change = f"grep -v {host.name} /etc/hosts > /run/hosts; echo 127.0.1.1 {host.name} >> /run/hosts"
        host.run(["sh", "-c", f"{change}; cat /run/hosts > /etc/hosts"])
    for code, output in _join(cluster, tmp_path):
        assert code == 0, output
        assert re.search("joined 2 as [01], interface eth0", output)


def test_an_unresolvable_master_is_named(start_cluster: StartCluster, tmp_path: Path) -> None:
    cluster = start_cluster(hosts=1, tools=())
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "nowhere", "MASTER_PORT": "29500"}
    with pytest.raises(RuntimeError, match=r"MASTER_ADDR='nowhere' \(rank 1 on host0.* cannot be resolved"):
        cluster.hosts[0].run([sys.executable, str(JOINING_RANK)], env={**VARIABLES, **variables})


@on_demand
def test_a_rank_that_does_not_come_is_named(start_cluster: StartCluster, tmp_path: Path) -> None:
    cluster = start_cluster(hosts=2, tools=())
    variables = {"WORLD_SIZE": "3", "MASTER_ADDR": "host0", "MASTER_PORT": "29500", **VARIABLES}
    output: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [
        host.start(
            [sys.executable, str(JOINING_RANK), "--timeout", "8"],
            env={**variables, "RANK": str(2 * index), "LOCAL_RANK": "0"},
            cwd=tmp_path,
            **output,
        )
        for index, host in enumerate(cluster.hosts)
    ]
    for process in processes:
        said = process.communicate(timeout=90)[0]
        assert process.returncode == 1
        assert (
            "DisagreementError: 1 of 3 ranks did not come within 0:00:07.200000: 1. These came, host0: 0; host1: 2"
            in said
        )


@on_demand
def test_a_slurm_job_without_srun_says_how_to_start(start_cluster: StartCluster, tmp_path: Path) -> None:
    cluster = start_cluster(hosts=2, tools=SLURM_TOOLS)
    variables = start_slurm(cluster, tmp_path)
    command = ["salloc", "-N", "2", sys.executable, str(JOINING_RANK)]
    with pytest.raises(
        RuntimeError, match=r"(?s)inside Slurm job 1, but is none of its tasks. .*srun --ntasks-per-node"
    ):
        cluster.hosts[0].run(command, env={**VARIABLES, **variables})
    show = [sys.executable, "-m", "ds_topo", "show", "data=-1", "--slurm", "--json"]
    command = ["salloc", "-N", "2", "--ntasks-per-node", "2", *show]
    content = json.loads(cluster.hosts[0].run(command, env=variables))
    assert [entry["host"] for entry in content["ranks"]] == ["host0", "host0", "host1", "host1"]
    command = ["srun", "-N", "2", "-n", "3", "--distribution", "cyclic", *show]
    said = cluster.hosts[0].run(command, env=variables).splitlines()
    for line in said:
        assert [entry["host"] for entry in json.loads(line)["ranks"]] == ["host0", "host1", "host0"]
    assert len(said) == 3
