"""torch's analyzer reads the files with the last collectives of every rank."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch._C._distributed_c10d as _C
import torch.distributed as dist

from ds_topo.health.watch import save_flight_record
from tests.support.ranks import run_ranks

HAS_RECORDER = hasattr(_C, "_dump_fr_trace") and find_spec("torch.distributed.flight_recorder") is not None


def _record(folder: str) -> str | None:
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = f"{folder}/trace_"
    dist.all_reduce(torch.ones(3))
    dist.broadcast(torch.ones(2), 0)
    path = save_flight_record(dist.get_rank())
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = f"{folder}/there/is/no/such/folder/trace_"
    assert save_flight_record(dist.get_rank()) is None
    return str(path) if path else None


@pytest.mark.skipif(not HAS_RECORDER, reason="this torch has no flight recorder for gloo")
def test_torchs_analyzer_reads_the_records_of_all_ranks(tmp_path: Path) -> None:
    assert run_ranks(2, _record, str(tmp_path)) == [str(tmp_path / "trace_0"), str(tmp_path / "trace_1")]
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", "-p", "trace_", str(tmp_path)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert told.returncode == 0, told.stderr
    for rank in range(2):
        record = pickle.loads((tmp_path / f"trace_{rank}").read_bytes())
        assert [entry["profiling_name"] for entry in record["entries"]][-2:] == ["gloo:all_reduce", "gloo:broadcast"]
        assert {entry["process_group"][0] for entry in record["entries"]} <= record["pg_config"].keys()
