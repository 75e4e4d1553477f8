"""The coordinate of a rank is in environment variables, log records and file names."""

from __future__ import annotations

import logging
import os
import socket

import pytest

from ds_topo import ProcessTopology
from ds_topo.launch import RankFields, export_coordinates, rank_name


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("DS_TOPO_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")


def exported() -> dict[str, str]:
    return {name.removeprefix("DS_TOPO_"): value for name, value in os.environ.items() if name.startswith("DS_TOPO_")}


def test_exported_coordinates_are_restored() -> None:
    first, second = ProcessTopology.from_spec("pipe=2,data=2,model=2"), ProcessTopology.from_spec("seq=2,data=4")
    restore_first = export_coordinates(first, 5)
    of_first = {"PIPE": "1", "DATA": "0", "MODEL": "1", "TENSOR": "1", "COORDINATE": "pipe=1 data=0 model=1"}
    assert exported() == of_first
    restore_second = export_coordinates(second, 5)
    assert exported() == {"SEQ": "1", "DATA": "1", "COORDINATE": "seq=1 data=1"}
    restore_second()
    assert exported() == of_first
    restore_first()
    assert exported() == {}


def test_a_late_restore_changes_nothing() -> None:
    topology = ProcessTopology.from_spec("pipe=2,data=4")
    restore_first = export_coordinates(topology, 1)
    later = export_coordinates(topology, 6)
    restore_first()
    assert exported() == {"PIPE": "1", "DATA": "2", "COORDINATE": "pipe=1 data=2"}
    later()
    assert exported() == {"PIPE": "0", "DATA": "1", "COORDINATE": "pipe=0 data=1"}


def test_log_records_and_file_names_have_rank_and_coordinate() -> None:
    record = logging.LogRecord("training", logging.INFO, __file__, 1, "loss %d", (3,), None)
    form = logging.Formatter("[%(rank)s/%(world_size)s %(coordinate)s %(host)s] %(message)s")
    assert RankFields().filter(record)
    assert form.format(record) == f"[5/8  {socket.gethostname()}] loss 3"
    restore_first = export_coordinates(ProcessTopology.from_spec("pipe=2,data=4"), 5)
    assert RankFields().filter(record)
    assert form.format(record) == f"[5/8 pipe=1 data=1 {socket.gethostname()}] loss 3"
    assert rank_name("-") == f"rank5-pipe=1-data=1-{socket.gethostname()}"
    restore_first()
    assert rank_name() == f"rank5 {socket.gethostname()}"
