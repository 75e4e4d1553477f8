"""A job over a hostfile, launched over ssh as a user would, trains as it does on one host."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.support.ranks import run_ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"
OPTIONS = ["--topology", "pipe=2,data=2", "--steps", "3", "--batch-size", "16", "--context", "16", "--width", "32"]


def _train_gpt(out: str) -> None:
    import train_gpt

    sys.argv = [str(EXAMPLE), *OPTIONS, "--depth", "2", "--out", out]
    train_gpt.main()


def _losses(out: Path) -> list[float]:
    record = json.loads((out / "history.json").read_text())
    return [*(row["loss"] for row in record["history"]), record["validation_loss"]]


def test_two_hosts_train_as_one_does(start_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    cluster = start_cluster(hosts=2)
    # First, because it also compiles DeepSpeed's extension, once, before ranks of two hosts would wait for each other.
    run_ranks(4, _train_gpt, str(tmp_path / "alone"))

    (tmp_path / "hosts").write_text("host0 slots=2\nhost1 slots=2\n")
    # pdsh forwards few variables; DeepSpeed exports those of this file on every host.
    variables = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "eth0"}
    exports = {**variables, "PATH": os.environ["PATH"], "HOME": str(Path.home())}
    (tmp_path / ".deepspeed_env").write_text("".join(f"{name}={value}\n" for name, value in exports.items()))
    launcher = [str(Path(sys.executable).with_name("deepspeed")), "--hostfile", "hosts", "--launcher", "pdsh"]
    job = [str(EXAMPLE), *OPTIONS, "--depth", "2", "--out", "both"]
    cluster.hosts[0].run([*launcher, *job], env=variables, cwd=tmp_path, timeout=300)
    assert min(cluster.bytes_sent()) > 100_000

    both, alone = _losses(tmp_path / "both"), _losses(tmp_path / "alone")
    assert len(both) == 4
    assert both == pytest.approx(alone, rel=1e-5)
