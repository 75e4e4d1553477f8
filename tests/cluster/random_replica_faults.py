"""Break random replicas that torchft keeps together, again and again; compare the losses with one process's.

    PYTHONPATH=examples python -m tests.cluster.random_replica_faults --faults 60 --picture replicas.png

Three replicas of two ranks, each on a virtual host. A host is killed, cut off, stopped or slow for a while, a rank is
killed, or two hosts at once; the next fault comes when all are together again.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from matplotlib.figure import Figure

from tests.cluster import Cluster
from tests.cluster.replicas import ReplicaJob

HOSTS = (0, 1, 2)
OUTAGE = 8.0
"""The seconds for which a host is stopped, cut off or slow."""


def killed(job: ReplicaJob, index: int) -> None:
    """Kill a host, and start it again."""
    job.kill_host(index)
    job.add_host(index, "comes back")


def two_killed(job: ReplicaJob, index: int) -> None:
    """Kill two hosts, and start both again."""
    pair = (index, (index + 1) % len(HOSTS))
    for each in pair:
        job.kill_host(each)
    for each in pair:
        job.add_host(each, "comes back")


def rank_killed(job: ReplicaJob, index: int) -> None:
    """Kill one rank; torchrun starts its replica again."""
    job.kill_rank(index)


def stopped(job: ReplicaJob, index: int) -> None:
    """Stop a host for a while."""
    job.stop_host(index)
    time.sleep(OUTAGE)
    job.resume_host(index)


def cut_off(job: ReplicaJob, index: int) -> None:
    """Cut a host off for a while."""
    job.cut_cable(index)
    time.sleep(OUTAGE)
    job.cluster.plug_in(index)


def slow(job: ReplicaJob, index: int) -> None:
    """Give a host a slow link for a while."""
    job.cluster.set_rate_of(index, "100kbit")
    time.sleep(OUTAGE)
    job.cluster.set_rate_of(index, None)


FAULTS: list[Callable[[ReplicaJob, int], None]] = [killed, rank_killed, stopped, cut_off, slow, two_killed]


def until_together(job: ReplicaJob) -> None:
    """Wait until all replicas have committed a step together that began after this call."""
    newest = max(row["step"] for index in HOSTS for row in job.rows(index))

    def are_together() -> bool:
        steps = [{row["step"] for row in job.rows(index) if row["step"] > newest} for index in HOSTS]
        return bool(set.intersection(*steps))

    job.until(are_together)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=4.0, help="seconds of a sum over replicas")
    parser.add_argument("--picture", type=Path, help="a file for the losses")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    draw = random.Random(arguments.seed)
    gaps: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, Cluster(len(HOSTS) + 1) as cluster:
        options = ["--spec", "shard=2", "--zero", "1", "--pace", "0.3", "--timeout", str(arguments.timeout)]
        job = ReplicaJob(cluster, Path(folder), options)
        job.start(*HOSTS)
        job.until(lambda: all(job.rows(index) for index in HOSTS))
        began = time.time()
        for number in range(arguments.faults):
            until_together(job)
            fault, start = draw.choice(FAULTS), time.time()
            fault(job, draw.choice(HOSTS))
            until_together(job)
            gap = job.longest_gap(HOSTS, since=start)
            gaps.setdefault(fault.__name__, []).append(gap)
            print(
                f"{number + 1:3} {fault.__name__:12} no step for {gap:5.1f} s, all together after "
                f"{time.time() - start:5.1f} s",
                flush=True,
            )
        lasted = time.time() - began
        steps = max(row["step"] for index in HOSTS for row in job.rows(index)) + 20
        (job.out / "new").write_text(str(steps))
        (job.out / "new").rename(job.out / "stop")
        job.wait_for_end(*HOSTS)
        job.check_equal(HOSTS, steps)
        logs = [path.read_text(errors="replace") for path in job.out.glob("host*.log")]
        failed = sum(log.count("is not committed, and its gradients") for log in logs)
        healed = sum(log.count("ds_topo: healed from another replica") for log in logs)
        shares = sum(len(job.rows(index)) for index in HOSTS)
        print(f"\n{'fault':12} {'times':>5} {'no step for: median':>20} {'longest':>8}")
        for name, found in sorted(gaps.items()):
            print(f"{name:12} {len(found):5} {statistics.median(found):18.1f} s {max(found):6.1f} s")
        still = sum(sum(found) for found in gaps.values())
        print(
            f"{arguments.faults} faults in {lasted:.0f} s: {steps} steps, {failed} attempts not committed, "
            f"{healed} healings; no step for {still:.0f} s ({still / lasted:.0%}); replicas took part in "
            f"{shares / steps / len(HOSTS):.0%} of the steps; all ranks equal to the last bit after every step"
        )
        differences = job.replayed(HOSTS, steps)
        for last in (100, 1000, steps):
            part = differences[: min(last, steps)]
            print(
                f"greatest relative difference from one process in {len(part)} steps: norms "
                f"{max(one for _, one, *_ in part):.1e}, losses {max(one for *_, one, _ in part):.1e} "
                f"({max(one for *_, one in part):.1e} absolute)"
            )
        if arguments.picture:
            draw_picture(arguments.picture, job, differences, began)


def draw_picture(
    path: Path, job: ReplicaJob, differences: list[tuple[float, float, float, float]], began: float
) -> None:
    """Draw norms of gradients by step beside those of one process, and the steps of each replica over time."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    upper = figure.add_subplot(2, 1, 1, xlabel="step", ylabel="norm of gradients", title="each step")
    found = {row["step"]: row["norm"] for index in HOSTS for row in job.rows(index)}
    upper.plot(range(1, len(differences) + 1), [norm for norm, *_ in differences], "-", label="one process")
    upper.plot(*zip(*sorted(found.items()), strict=True), ":", label="replicas with faults")
    upper.legend()
    lower = figure.add_subplot(2, 1, 2, xlabel="seconds", ylabel="replica", title="committed steps", yticks=HOSTS)
    for index in HOSTS:
        times = [row["time"] - began for row in job.rows(index)]
        lower.plot(times, [index] * len(times), "|", markersize=18)
    for when, _ in job.faults:
        lower.axvline(when - began, color="0.8", zorder=0)
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    main()
