"""``ds-topo check`` finds faults of virtual hosts, and names the host and rank."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.cluster.launchers import VARIABLES, finish, start_job
from tests.cluster.rank_jobs import rank_environment
from tests.cluster.slurm import SLURM_TOOLS, start_slurm

StartCluster = Callable[..., Cluster]
LIBFAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")


def check(
    cluster: Cluster,
    folder: Path,
    spec: str,
    *options: str,
    ranks_per_host: int = 1,
    faulty: Mapping[int, str] | None = None,
    spec_of: Mapping[int, str] | None = None,
    env_of: Mapping[int, Mapping[str, str]] | None = None,
    missing: Sequence[int] = (),
) -> tuple[int, str, dict[str, Any]]:
    """Run the check on all ranks, some with other settings; return rank 0's exit code, output and JSON."""
    world = len(cluster.hosts) * ranks_per_host
    processes: list[subprocess.Popen[Any]] = []
    for rank in range(world):
        if rank in missing:
            continue
        start = ["-m", "tests.cluster.faulty_rank", faulty[rank]] if rank in (faulty or {}) else ["-m", "ds_topo"]
        own = (spec_of or {}).get(rank, spec)
        variables = rank_environment(rank, world, ranks_per_host, cluster.hosts[0].address)
        # set on the host: libfaketime leaves a file in /dev/shm for each process that preloads it
        own_variables = [f"{name}={value}" for name, value in (env_of or {}).get(rank, {}).items()]
        command = [sys.executable, *start, "check", own, "--json", str(folder / f"{rank}.json"), *options]
        processes.append(
            cluster.hosts[rank // ranks_per_host].start(
                ["env", *own_variables, *command],
                env={**VARIABLES, **variables, "COLUMNS": "80"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    output = processes[0].communicate(timeout=300)[0]
    for process in processes:
        process.kill()
        process.communicate()
    found = folder / "0.json"
    return processes[0].returncode, output, json.loads(found.read_text()) if found.exists() else {}


def only_fault(content: Mapping[str, Any]) -> dict[str, Any]:
    assert len(content["faults"]) == 1, content["faults"]
    [fault] = content["faults"]
    return dict(fault)


@pytest.mark.exhaustive
def test_check_of_healthy_hosts_reports_no_fault(
    start_cluster: StartCluster, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    cluster = start_cluster(hosts=2, rate="200mbit", tools=())
    code, output, content = check(cluster, tmp_path, "pipe=2,data=-1", "--slow", "0.1", ranks_per_host=2)
    assert code == 0, output
    assert "pipe=2,data=2: 4 ranks on 2 hosts, gloo" in output
    assert "No faults." in output
    assert all(len(line) <= 80 for line in output.splitlines() if "ds-topo" not in line and "c10d" not in line)
    assert [host["ranks"] for host in content["hosts"]] == [[0, 1], [2, 3]]
    assert list(content["axes"]) == ["pipe", "data"]
    assert content["axes"]["pipe"]["hosts"] == [2, 2]
    assert content["axes"]["data"]["hosts"] == [1, 1]
    assert content["rounds"] == {"played": 1, "all": 1}
    # the rate of tc is an upper limit; the report shows how close the link comes to it
    assert content["across"]["bandwidth"] * 8 < 1.1 * 200e6
    record_property("share of tc's rate", content["across"]["bandwidth"] * 8 / 200e6)


@pytest.mark.thorough
def test_check_finds_a_slow_link(start_cluster: StartCluster, tmp_path: Path) -> None:
    cluster = start_cluster(hosts=3, rate="200mbit", tools=())
    cluster.set_rate_of(2, "20mbit")
    code, output, content = check(cluster, tmp_path, "data=-1")
    assert code == 1, output
    fault = only_fault(content)
    assert (fault["kind"], fault["hosts"]) == ("link", ["host2"])
    assert "link: host2's link carries at most" in output
    assert content["rounds"] == {"played": 3, "all": 3}


@pytest.mark.exhaustive
def test_check_finds_two_slow_links_by_the_expected_rate(start_cluster: StartCluster, tmp_path: Path) -> None:
    cluster = start_cluster(hosts=2, rate="20mbit", tools=())
    code, output, content = check(cluster, tmp_path, "data=-1", "--expect", "200mbit")
    assert code == 1, output
    assert [fault["hosts"] for fault in content["faults"]] == [["host0"], ["host1"]]


@pytest.mark.exhaustive
def test_check_finds_a_wrong_clock(start_cluster: StartCluster, tmp_path: Path) -> None:
    cluster = start_cluster(hosts=2, tools=("faketime",))
    ahead = {"LD_PRELOAD": str(LIBFAKETIME), "FAKETIME": "+300s", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    code, output, content = check(cluster, tmp_path, "data=-1", "--slow", "0.01", env_of={1: ahead})
    assert code == 1, output
    fault = only_fault(content)
    assert (fault["kind"], fault["hosts"]) == ("clock", ["host1"])
    assert content["clocks"]["host1"] == pytest.approx(300, abs=30)


@pytest.mark.exhaustive
def test_check_finds_a_different_version(start_cluster: StartCluster, tmp_path: Path) -> None:
    cluster = start_cluster(hosts=3, tools=())
    code, output, content = check(cluster, tmp_path, "data=-1", "--slow", "0.01", faulty={1: "other_version"})
    assert code == 1, output
    fault = only_fault(content)
    assert (fault["kind"], fault["hosts"], fault["ranks"]) == ("version", ["host1"], [1])
    assert "but 2.12.0 on host1 (rank 1)" in output


@pytest.mark.exhaustive
def test_check_finds_a_different_topology_without_a_hang(start_cluster: StartCluster, tmp_path: Path) -> None:
    cluster = start_cluster(hosts=2, tools=())
    other = {2: "data=2,pipe=2", 3: "data=2,pipe=2"}
    code, output, content = check(cluster, tmp_path, "pipe=2,data=2", ranks_per_host=2, spec_of=other)
    assert code == 1, output
    fault = only_fault(content)
    assert (fault["kind"], fault["hosts"], fault["ranks"]) == ("topology", ["host1"], [2, 3])
    assert "topology is pipe=2,data=2 on most ranks, but data=2,pipe=2 on host1 (ranks 2-3)" in output
    assert content["axes"] == {}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("fault", "spec"),
    [("wrong_parts", "data=4"), ("wrong_sums", "pipe=2,data=2"), ("wrong_products", "pipe=2,data=2")],
)
def test_check_finds_a_rank_with_wrong_results(
    fault: str, spec: str, start_cluster: StartCluster, tmp_path: Path
) -> None:
    cluster = start_cluster(hosts=2, tools=())
    code, output, content = check(cluster, tmp_path, spec, "--slow", "0.01", ranks_per_host=2, faulty={3: fault})
    assert code == 1, output
    found = only_fault(content)
    assert (found["kind"], found["hosts"], found["ranks"]) == ("result", ["host1"], [3])
    assert "result: rank 3 on host1 gives wrong results" in output


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", ["dies", "hangs"])
def test_check_finds_a_rank_that_dies_or_hangs(fault: str, start_cluster: StartCluster, tmp_path: Path) -> None:
    cluster = start_cluster(hosts=2, tools=())
    code, output, content = check(cluster, tmp_path, "data=-1", "--timeout", "8", faulty={1: fault})
    assert code == 1, output
    named = [found for found in content["faults"] if 1 in found["ranks"]]
    assert named, content["faults"]
    assert named[0]["kind"] == "missing"
    assert named[0]["hosts"] == ["host1"]


@pytest.mark.exhaustive
def test_check_finds_a_missing_rank(start_cluster: StartCluster, tmp_path: Path) -> None:
    cluster = start_cluster(hosts=3, tools=())
    code, output, _ = check(cluster, tmp_path, "data=-1", "--timeout", "6", missing=[1])
    assert code == 1
    assert "1 of 3 ranks did not come within 0:00:05.400000: 1. These came: host0 (rank 0), host2 (rank 2)" in output


@pytest.mark.exhaustive
def test_check_runs_under_launchers_and_compares_hosts(start_cluster: StartCluster, tmp_path: Path) -> None:
    cluster = start_cluster(hosts=2, tools=("pdsh", *SLURM_TOOLS))
    variables = start_slurm(cluster, tmp_path)
    job = ["-m", "ds_topo", "check", "pipe=2,data=-1", "--slow", "0.01"]
    output = finish(start_job(cluster, "srun", [*job, "--slurm"], tmp_path, env=variables))
    assert "No faults." in output
    options = ["--module"]
    output = finish(start_job(cluster, "pdsh", [*job[1:], "--hostfile", "hosts"], tmp_path, options=options))
    assert "No faults." in output
    (tmp_path / "other").write_text("host1 slots=2\nhost0 slots=2\n")
    with pytest.raises(RuntimeError, match="rank 0 is on host0, not on host1 as the hosts given say"):
        finish(start_job(cluster, "srun", [*job, "--hostfile", "other"], tmp_path, env=variables))
