"""Jobs under torchrun that lose and get hosts end by themselves, with the losses of an undisturbed job."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster import Cluster, elastic_rank
from tests.cluster.elastic import PORT, PROGRAM, SHAPE, ElasticJob, losses_in
from tests.support.exhaustive import mark_exhaustive
from tests.support.ranks import run_ranks

StartCluster = Callable[..., Cluster]
SAVE_EVERY = 5


def _host_killed(job: ElasticJob) -> list[float]:
    job.start(0, 1)
    job.until_step(7)
    job.kill_host(1)
    return job.finish(0)


def _first_host_killed(job: ElasticJob) -> list[float]:
    job.serve_store(2)
    job.start(0, 1)
    job.until_step(7)
    job.kill_host(0)
    return job.finish(1)


def _spare_takes_over(job: ElasticJob) -> list[float]:
    job.start(0, 1, 2)
    job.until_step(7)
    [spare] = [index for index in (0, 1, 2) if job.is_in_rendezvous(index)]
    lost = 1 if spare != 1 else 2
    job.kill_host(lost)
    return job.finish(*{0, 1, 2} - {lost})


def _cable_cut(job: ElasticJob) -> list[float]:
    job.start(0, 1, 2)
    job.until_step(7)
    job.cut_cable(2)
    return job.finish(0, 1)


def _rank_killed(job: ElasticJob) -> list[float]:
    job.start(0, 1)
    job.until_step(7)
    job.kill_rank(1)
    losses = job.finish(0, 1)
    assert job.attempts()[-1]["what"] == job.attempts()[-2]["what"]
    return losses


def _host_stopped(job: ElasticJob) -> list[float]:
    job.start(0, 1)
    job.until_step(7)
    job.stop_host(1)
    return job.finish(0)


def _host_comes(job: ElasticJob) -> list[float]:
    job.start(0)
    job.until_step(7)
    job.add_host(1)
    losses = job.finish(0, 1)
    assert ", 0 of" in job.report(), "the job saves before it grows"
    return losses


def _host_comes_back(job: ElasticJob) -> list[float]:
    job.start(0, 1)
    job.until_step(7)
    job.kill_host(1)
    job.until_continued(2)
    job.add_host(1, "comes back")
    losses = job.finish(0, 1)
    whats = [attempt["what"] for attempt in job.attempts()[-3:]]
    assert whats[0] == whats[2] != whats[1]
    return losses


def _two_faults_at_once(job: ElasticJob) -> list[float]:
    job.start(0, 1, 2)
    job.until_step(7)
    job.kill_host(1)
    job.kill_rank(2)
    return job.finish(0, 2)


def _fault_during_save(job: ElasticJob) -> list[float]:
    job.start(0, 1)
    job.until_step(7)
    job.make_slow("save")
    job.kill_host(1)
    losses = job.finish(0)
    assert job.attempts()[1]["step"] <= 10, "the save of step 10 or 15 was not finished"
    return losses


def _fault_during_loading(job: ElasticJob) -> list[float]:
    job.start(0, 1, 2)
    job.until_step(7)
    job.kill_host(2)
    job.make_slow("load")
    job.kill_host(1)
    return job.finish(0)


def _fault_during_rendezvous(job: ElasticJob) -> list[float]:
    job.start(0, 1)
    job.until_step(7)
    job.kill_host(1)
    job.add_host(2)
    job.until(lambda: job.is_in_rendezvous(2))
    job.kill_host(2)
    return job.finish(0)


def _preempted(job: ElasticJob) -> list[float]:
    job.start(0, 1)
    job.until_step(7)
    job.terminate()
    job.start(0, 1)
    losses = job.finish(0, 1)
    assert ", 0 of" in job.report(), "SIGTERM saves"
    return losses


@dataclass(frozen=True)
class Case:
    """What happens to a job, its options, and the ranks of each host and of a job without replicas."""

    happens: Callable[[ElasticJob], list[float]]
    options: str
    ranks: int = 1
    least: int = 1
    store: str = "host0"
    hosts: str = "1:3"

    def __str__(self) -> str:
        """Return a name for ``pytest -k``."""
        return f"{self.happens.__name__.strip('_')}-{self.options.replace('--', '').replace(' ', '-')}"


CASES = [
    Case(_host_killed, "--topology data=-1 --zero 1"),
    Case(_first_host_killed, "--topology data=-1 --zero 1", store="host2"),
    Case(_spare_takes_over, "--topology data=-1,model=2,pipe=2 --zero 1", ranks=2, least=4, hosts="2"),
    Case(_cable_cut, "--topology data=-1 --zero 2 --plain"),
    Case(_rank_killed, "--topology data=-1,shard=2 --zero 3 --plain", ranks=2, least=2),
    Case(_host_stopped, "--topology pipe=2,data=-1 --zero 1", ranks=2, least=2),
    Case(_host_comes, "--topology data=-1 --zero 3 --plain"),
    Case(_host_comes_back, "--topology data=-1,model=2 --zero 1", ranks=2, least=2),
    Case(_two_faults_at_once, "--topology data=-1 --zero 0"),
    Case(_fault_during_save, "--topology data=-1,model=2 --zero 0 --plain", ranks=2, least=2),
    Case(_fault_during_loading, "--topology data=-1 --zero 3 --plain"),
    Case(_fault_during_rendezvous, "--topology data=-1 --zero 2 --plain"),
    Case(_preempted, "--topology data=-1,pipe=2 --zero 1", ranks=2, least=2),
]


def _run(*options: str) -> None:
    sys.argv = [PROGRAM.name, *options]
    elastic_rank.main()


@pytest.mark.thorough
@pytest.mark.parametrize("case", mark_exhaustive(CASES, default=lambda number, _: number == 0), ids=str)
def test_job_ends_with_the_losses_of_an_undisturbed_one(
    case: Case, start_cluster: StartCluster, tmp_path: Path
) -> None:
    is_default = case.happens is _host_killed
    pace = ["--steps", "30", "--pace", "0.05"] if is_default else ["--steps", "150", "--pace", "0.1"]
    options = [*SHAPE, *case.options.split(), *pace, "--save-every", str(SAVE_EVERY), "--keep-last", "2"]
    cluster, endpoint = start_cluster(hosts=3), f"{case.store}:{PORT}"
    job = ElasticJob(cluster, tmp_path / "elastic", options, ranks=case.ranks, hosts=case.hosts, endpoint=endpoint)
    losses = case.happens(job)
    print(f"\n{job.table()}\n{job.report()}")
    run_ranks(case.least, _run, *options, "--pace", "0", "--out", str(tmp_path / "whole"))
    assert losses == pytest.approx(losses_in(tmp_path / "whole"), rel=1e-5)
