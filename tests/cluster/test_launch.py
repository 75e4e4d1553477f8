"""Jobs over two hosts train as on one host under every launcher, and end with their launcher."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.cluster.launchers import LAUNCHERS, SLURM_LAUNCHERS, VARIABLES, finish, output_until, start_job
from tests.cluster.slurm import SLURM_TOOLS, start_slurm
from tests.faults.job import HAPPENED
from tests.support.example_jobs import SMALL, record_in, run_main
from tests.support.exhaustive import mark_exhaustive
from tests.support.ranks import run_ranks

StartCluster = Callable[..., Cluster]
EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"
FAULTY_JOB = Path(__file__).parents[1] / "faults" / "job.py"
JOINING_RANK = Path(__file__).with_name("joining_rank.py")
OPTIONS = [*SMALL, "--topology", "pipe=2,data=2", "--steps", "3", "--continuation", "12"]
TOOLS = {"pdsh": ("pdsh",), "openmpi": ("mpirun", "ompi_info"), "srun": SLURM_TOOLS, "slurm": SLURM_TOOLS}
START_SECONDS, END_SECONDS = 180.0, 60.0


def _losses(out: Path) -> list[float]:
    record = record_in(out)
    return [*(row["loss"] for row in record["history"]), record["validation_loss"]]


@pytest.fixture(scope="module")
def losses_on_one_host(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Train on one host, for the reference; this also compiles DeepSpeed's extension before two hosts need it."""
    out = tmp_path_factory.mktemp("alone")
    run_ranks(4, run_main, EXAMPLE.stem, *OPTIONS, "--out", str(out))
    return _losses(out)


@pytest.fixture
def start_hosts(start_cluster: StartCluster, tmp_path: Path) -> Callable[[str], tuple[Cluster, dict[str, str]]]:
    """Start two hosts with the tools of a launcher; return them and the launcher's variables."""

    def start(launcher: str) -> tuple[Cluster, dict[str, str]]:
        cluster = start_cluster(hosts=2, tools=TOOLS.get(launcher, ()))
        return cluster, start_slurm(cluster, tmp_path) if launcher in SLURM_LAUNCHERS else {}

    return start


@pytest.mark.thorough
@pytest.mark.parametrize("launcher", mark_exhaustive(LAUNCHERS, lambda _, launcher: launcher == "pdsh"))
def test_two_hosts_train_as_one_host(
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
    """Find the other processes whose command line has this text."""
    found: dict[int, str] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # the process has just ended
            continue
        if marker in command and int(entry.name) != os.getpid():
            found[int(entry.name)] = command
    return found


def _launcher_pid(process: subprocess.Popen[Any]) -> int:
    """Return the launcher's process, a child of the ``nsenter`` that put it on its host."""
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])


def _wait_for_ranks(folder: Path, count: int, processes: list[subprocess.Popen[Any]]) -> None:
    end = time.monotonic() + START_SECONDS
    while len(list(folder.glob("rank*"))) < count:
        ended = [process.communicate()[0] for process in processes if process.poll() is not None]
        assert not ended, f"the job ended before it was killed:\n{ended[0][-6000:]}"
        assert time.monotonic() < end, "the job did not start"
        time.sleep(0.1)


KILLED = mark_exhaustive(
    product(("one host", "pdsh", "no_ssh", "torchrun", "srun", "openmpi"), (signal.SIGTERM, signal.SIGINT)),
    default=lambda _number, _case: False,  # launch/test_lifeline.py has one
)


@pytest.mark.parametrize(("launcher", "number"), KILLED)
def test_a_killed_launcher_leaves_no_rank(
    launcher: str, number: signal.Signals, start_hosts: Callable[..., Any], tmp_path: Path
) -> None:
    cluster, variables = start_hosts(launcher)
    job = [str(JOINING_RANK), "--until-killed", str(tmp_path)]
    if launcher == "one host":
        command = [str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", "2", *job]
        output: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        processes = [cluster.hosts[0].start(command, env=VARIABLES, cwd=tmp_path, **output)]
    else:
        processes = start_job(cluster, launcher, job, tmp_path, env=variables)
    _wait_for_ranks(tmp_path, 2 if launcher == "one host" else 4, processes)

    # One launcher is killed, even if each host has its own: its ranks and those of the other host must end.
    launcher_pid = _launcher_pid(processes[0])
    os.kill(launcher_pid, number)
    if launcher == "srun" and number == signal.SIGINT:  # the first SIGINT only makes srun print its state
        time.sleep(0.3)
        os.kill(launcher_pid, number)
    end = time.monotonic() + END_SECONDS
    while left := _processes_with(str(tmp_path)):
        assert time.monotonic() < end, f"still there: {left}"
        time.sleep(0.1)
    for process in processes:
        process.communicate(timeout=10)
        assert process.returncode != 0


# -- ranks that fail alone ---------------------------------------------------------------------------------------------

ALONE = [
    (launcher, fault, victim, watch)
    for launcher in ("srun", "openmpi", "torchrun")
    for faults, victims, watch in (
        (("exception forward", "exception between", "exit between"), (0, 1), 0),
        (("exception start", "exception construction", "kill forward"), (0,), 0),
        (("exception forward", "kill forward"), (0,), 4),
    )
    for fault, victim in product(faults, victims)
]


@pytest.mark.parametrize(("launcher", "fault", "victim", "watch"), mark_exhaustive(ALONE, default=lambda *_: False))
def test_all_ranks_end_soon_after_one_fails_alone(
    launcher: str, fault: str, victim: int, watch: int, start_hosts: Callable[..., Any], tmp_path: Path
) -> None:
    """The job has its default timeout. ``health/test_faults.py`` has ranks without a launcher."""
    cluster, variables = start_hosts(launcher)
    job = [str(FAULTY_JOB), "plain1", *fault.split(), str(victim), str(watch), "600", str(tmp_path)]
    processes = start_job(cluster, launcher, job, tmp_path, env=variables)
    ended: list[float] = []

    def wait() -> None:
        while len(_ranks_of(tmp_path)) < 4:
            time.sleep(0.05)
        while _ranks_of(tmp_path):
            time.sleep(0.05)
        ended.append(time.monotonic())

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    end = time.monotonic() + START_SECONDS
    output = "".join(output_until(end, process) for process in processes)
    happened = re.search(rf"{HAPPENED} at ([\d.]+)", output)
    assert happened, output[-6000:]
    waiting.join(END_SECONDS)
    assert ended, f"ranks are left: {output[-6000:]}"
    print(f"{launcher}, {fault}, rank {victim}, watch {watch}: {ended[0] - float(happened[1]):.1f} s")
    if fault.startswith("exception"):
        assert "ValueError: a sample that cannot be read" in output
    if launcher == "srun" and not watch:  # the other launchers end the ranks at once
        assert (
            len(re.findall("FailedRankError: .*|the cause is probably that .*|-> failed: ValueError: .*", output)) >= 3
        ), output[-6000:]
        assert re.search(rf"rank {victim}( \(.*\))? on host0 (failed|has ended)|rank 0, which served", output)


def _ranks_of(folder: Path) -> list[str]:
    commands = _processes_with(f" 600 {folder}").values()
    return [each for each in commands if not any(name in each for name in ("torchrun", "deepspeed", "srun", "mpirun"))]


# -- joining -----------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("launcher", ["srun", pytest.param("torchrun", marks=pytest.mark.exhaustive)])
def test_ranks_of_two_hosts_join(launcher: str, start_hosts: Callable[..., Any], tmp_path: Path) -> None:
    cluster, variables = start_hosts(launcher)
    output = finish(start_job(cluster, launcher, [str(JOINING_RANK)], tmp_path, env=variables))
    assert sorted(re.findall(r"joined 4 as (\d)", output)) == ["0", "1", "2", "3"]


def _join(cluster: Cluster, ranks: Sequence[int], world_size: int, *options: str) -> list[tuple[int, str]]:
    """Join one rank on each host, with the variables that launchers set; return the exit code and output of each."""
    variables = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "host0", "MASTER_PORT": "29500", **VARIABLES}
    processes = [
        host.start(
            [sys.executable, str(JOINING_RANK), *options],
            env={**variables, "RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for host, rank in zip(cluster.hosts, ranks, strict=True)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


@pytest.mark.exhaustive
def test_hosts_whose_names_resolve_to_loopback_join(start_cluster: StartCluster) -> None:
    """Debian's ``127.0.1.1 host1`` makes gloo bind to the loopback address, which other hosts cannot reach."""
    cluster = start_cluster(hosts=2, tools=())
    for host in cluster.hosts:
        change = f"grep -v {host.name} /etc/hosts > /run/hosts; echo 127.0.1.1 {host.name} >> /run/hosts"
        host.run(["sh", "-c", f"{change}; cat /run/hosts > /etc/hosts"])
    for code, output in _join(cluster, (0, 1), 2):
        assert code == 0, output
        assert re.search("joined 2 as [01], interface eth0", output)


@pytest.mark.exhaustive
def test_error_names_unresolvable_master(start_cluster: StartCluster) -> None:
    cluster = start_cluster(hosts=1, tools=())
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "nowhere", "MASTER_PORT": "29500"}
    with pytest.raises(RuntimeError, match=r"MASTER_ADDR='nowhere' \(rank 1 on host0.* cannot be resolved"):
        cluster.hosts[0].run([sys.executable, str(JOINING_RANK)], env={**VARIABLES, **variables})


@pytest.mark.exhaustive
def test_error_names_missing_rank(start_cluster: StartCluster) -> None:
    cluster = start_cluster(hosts=2, tools=())
    error = "1 of 3 ranks did not come within 0:00:07.200000: 1. These came: host0 (rank 0), host1 (rank 2)"
    for code, output in _join(cluster, (0, 2), 3, "--timeout", "8"):
        assert code == 1
        assert f"DisagreementError: {error}" in output


@pytest.mark.exhaustive
def test_slurm_job_without_srun_raises_with_commands(start_cluster: StartCluster, tmp_path: Path) -> None:
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
