"""A job over a hostfile, launched over ssh as a user would, trains as it does on one host."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster import Cluster, Host

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"
MODEL = ["--batch-size", "16", "--context", "16", "--width", "32", "--depth", "2"]
TOPOLOGY = "pipe=2,data=2"


def _launch(host: Host, folder: Path, slots: dict[str, int]) -> dict[str, object]:
    """Run the example from ``host`` with the hostfile of ``slots``; return what it wrote about its losses."""
    folder.mkdir()
    (folder / "hosts").write_text("".join(f"{name} slots={count}\n" for name, count in slots.items()))
    # pdsh forwards few variables; DeepSpeed exports those of this file on every host.
    variables = {
        "PATH": os.environ["PATH"],
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": "eth0",
    }
    (folder / ".deepspeed_env").write_text("".join(f"{name}={value}\n" for name, value in variables.items()))
    launcher = str(Path(sys.executable).with_name("deepspeed"))
    job = [str(EXAMPLE), "--topology", TOPOLOGY, "--steps", "3", "--out", str(folder / "out"), *MODEL]
    options = ["--hostfile", "hosts", "--launcher", "pdsh", "--force_multi"]
    host.run([launcher, *options, *job], env=variables, cwd=folder, timeout=180)
    record: dict[str, object] = json.loads((folder / "out" / "history.json").read_text())
    return record


def test_two_hosts_train_as_one_does(start_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    cluster = start_cluster(hosts=2)
    before = cluster.bytes_sent()
    alone = _launch(cluster.hosts[0], tmp_path / "alone", {"host0": 4})
    between = cluster.bytes_sent()
    both = _launch(cluster.hosts[0], tmp_path / "both", {"host0": 2, "host1": 2})
    after = cluster.bytes_sent()

    assert sum(between) - sum(before) < 20_000 < min(end - start for end, start in zip(after, between, strict=True))
    losses = [[row["loss"] for row in record["history"]] for record in (alone, both)]
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert both["validation_loss"] == pytest.approx(alone["validation_loss"], rel=1e-5)
