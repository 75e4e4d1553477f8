"""Break random hosts and ranks of the example on two virtual hosts; compare its losses with an undisturbed job's.

    PYTHONPATH=examples python -m tests.cluster.random_faults --faults 20 --picture elastic.png

A rank is killed, or the second of two hosts is killed, cut off or stopped, and comes back at once or some steps later.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

from attempts import draw_attempts
from matplotlib.figure import Figure

from tests.cluster import Cluster
from tests.cluster.elastic import ROOT, ElasticJob
from tests.restarts import curve, train_and_kill

ROUNDING = 1e-3
"""The greatest relative difference of a loss that rounding makes in hundreds of steps on other numbers of replicas."""


def train_and_lose_hosts(out: Path, faults: int, options: Sequence[str], seed: int) -> ElasticJob:
    """Train on two virtual hosts of two ranks, and break a rank or a host again and again."""
    draw = random.Random(seed)
    with Cluster(2) as cluster:
        job = ElasticJob(cluster, out, options, ranks=2, hosts="1:2", program=ROOT / "examples" / "train_gpt.py")
        job.start(0, 1)
        attempts = 0
        for _ in range(faults):
            attempts = _until_some_steps(job, attempts, draw)
            fault = draw.choice([job.kill_host, job.cut_cable, job.stop_host, job.kill_rank])
            fault(draw.choice([0, 1]) if fault == job.kill_rank else 1)
            if fault != job.kill_rank:
                if draw.random() < 0.5:
                    attempts = _until_some_steps(job, attempts, draw)
                job.add_host(1, "comes back")
        job.finish(0, seconds=3000.0)  # the other may come back too late
    return job


def _until_some_steps(job: ElasticJob, attempts: int, draw: random.Random) -> int:
    """Wait until a new attempt has done a few steps; return the number of attempts."""
    job.until_continued(attempts + 1)
    job.until_step(job.step() + draw.randrange(1, 12))
    return len(job.attempts())


def draw_picture(path: Path, through: Path, broken: Path) -> None:
    """Draw the losses of both jobs by step, and those of the broken one over time."""
    figure = Figure(figsize=(8, 7), layout="constrained")
    axes = figure.add_subplot(2, 1, 1, xlabel="step", ylabel="nats per byte", title="loss of each step")
    for folder, label, style in ((through, "undisturbed", "-"), (broken, "with faults", ":")):
        axes.plot(*zip(*curve(folder)[0], strict=True), style, label=label)
    axes.grid(alpha=0.3)
    axes.legend()
    draw_attempts(figure.add_subplot(2, 1, 2), broken)
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--steps", type=int, help="steps of training (100 for each fault: it must not end before)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", type=Path, help="a file for the losses")
    arguments = parser.parse_args()
    options = ["--topology", "pipe=2,data=-1", "--micro-batch-size", "4", "--save-every", "5", "--keep-last", "2"]
    options += ["--steps", str(arguments.steps or 100 * arguments.faults)]
    with tempfile.TemporaryDirectory() as folder:
        through, broken = Path(folder, "through"), Path(folder, "broken")
        train_and_kill(through, 2, [], options)
        job = train_and_lose_hosts(broken, arguments.faults, options, arguments.seed)
        print(job.table(), job.report(), sep="\n")
        (undisturbed, validation), (losses, last) = curve(through), curve(broken)
        difference = max(abs(mine[1] / theirs[1] - 1) for mine, theirs in zip(losses, undisturbed, strict=True))
        print(
            f"greatest relative difference of a loss {difference:.1e}; validation {last:.5f}, {validation:.5f} without"
        )
        if arguments.picture:
            draw_picture(arguments.picture, through, broken)
    raise SystemExit(difference > ROUNDING)


if __name__ == "__main__":
    main()
