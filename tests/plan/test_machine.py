"""Test machine files of ``plan --calibrate`` and of ``check --json``."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from ds_topo.cli import main
from ds_topo.plan import calibrate as calibrating
from ds_topo.plan.hardware import HostRanks, Link, Machine, read_machine, usable_bytes
from tests.plan.jobs import SPEEDS

CHECKED: dict[str, Any] = {
    "topology": "pipe=2,data=2",
    "backend": "gloo",
    "world_size": 4,
    "hosts": [{"name": "node1", "ranks": [0, 1]}, {"name": "node2", "ranks": [2, 3]}],
    "inside": {"bandwidth": 2e9, "latency": 1e-4, "slowest": [], "pairs": []},
    "across": {"bandwidth": 125e6, "latency": 2e-4, "slowest": [], "pairs": []},
    "faults": [],
}
MODEL = ["--layers", "4", "--hidden", "128", "--heads", "4", "--vocab", "256", "--sequence", "128"]
JOB = [*MODEL, "--batch", "32", "--json"]


def _plan(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main(["plan", *JOB, *options]) == 0
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content


def test_plan_uses_the_links_of_a_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seconds = {}
    for name, across in (("slow", 12.5e6), ("fast", 12.5e9)):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(CHECKED | {"across": {"bandwidth": across, "latency": 1e-4}}))
        content = _plan(capsys, "--machine", str(path), "--accelerator", "A100", "--topology", "data=4")
        assert (content["job"]["hosts"], content["job"]["slots"]) == (2, 2)
        seconds[name] = content["plans"][0]["seconds"]
    assert seconds["slow"] > 2 * seconds["fast"]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "is not JSON"),
        ("9" * 5000, "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "[] is wrong: Input should be an object"),
        ("{}", "hosts: is missing; give a file that ds-topo plan --calibrate FILE or ds-topo check SPEC --json FILE"),
        (json.dumps({"train_batch_size": 8}), "machine.json' cannot be used: hosts: is missing; give a file that"),
        (json.dumps({"hosts": []}), "hosts: [] is wrong: List should have at least 1 item"),
        (json.dumps({"hosts": [{"ranks": 2}]}), "no links and no speeds"),
        (
            json.dumps(CHECKED | {"across": {"bandwidth": 0, "latency": 1e-4}}),
            "machine.json' cannot be used: across.bandwidth: 0 is wrong: Input should be greater than 0",
        ),
        (json.dumps(CHECKED | {"inside": {"bandwidth": 1e9, "latency": -1}}), "inside.latency: -1 is wrong"),
        (
            json.dumps(asdict(Machine([HostRanks(4)], replace(SPEEDS, memory_bandwidth=0.0)))),
            "speeds.memory_bandwidth: 0.0 is wrong: Input should be greater than 0",
        ),
        (
            json.dumps(asdict(Machine([HostRanks(4)], replace(SPEEDS, product_flops={})))),
            "speeds.product_flops: {} is wrong",
        ),
    ],
)
def test_plan_refuses_invalid_machine_file(
    content: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "machine.json"
    path.write_text(content)
    assert main(["plan", *JOB, "--machine", str(path)]) == 2
    assert text in capsys.readouterr().err


def test_calibrate_refuses_a_launcher(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["plan", "--calibrate"]) == 2
    assert "--calibrate measures one GPU: start it without a launcher" in capsys.readouterr().err


def test_calibrate_refuses_an_absent_folder_before_it_measures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--calibrate", str(tmp_path / "absent" / "machine.json")]) == 2
    assert "there is no folder" in capsys.readouterr().err


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a GPU here")
def test_calibrate_without_a_gpu_names_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *JOB, "--hosts", "1", "--calibrate"]) == 2
    text = capsys.readouterr().err
    assert "--calibrate measures GPUs, and torch finds none on this machine: name the GPU to plan for" in text
    assert "(one of V100-16GB, " in text
    assert "--machine FILE" in text


def test_plan_reads_the_speeds_of_a_machine_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "machine.json"
    machine = Machine([HostRanks(4)], SPEEDS, inside=Link(1e9, 1e-4))
    path.write_text(json.dumps(asdict(machine)))
    assert read_machine(path) == machine
    content = _plan(capsys, "--machine", str(path))
    assert content["job"]["accelerator"] == SPEEDS.name
    assert content["job"]["precision"] == "bf16"
    assert content["job"]["memory_limit"] == usable_bytes(SPEEDS.memory_bytes)
    assert (content["job"]["hosts"], content["job"]["slots"]) == (1, 4)
    for option in ("--accelerator", "--peak-tflops", "--memory-gb", "--memory-gbps"):
        value = "H100" if option == "--accelerator" else "9"
        assert main(["plan", *JOB, "--machine", str(path), option, value]) == 2
        assert f"{option} and measured speeds both say what a rank has" in capsys.readouterr().err


def test_calibrate_writes_speeds_beside_the_links_of_a_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A CPU is measured in place of a GPU, with small shapes."""
    small = {"SMALL_PRODUCT": (64, 64, 16), "LARGE_PRODUCT": (64, 64, 64), "ATTENTION_SHAPE": (1, 2, 32, 16)}
    small |= {"VECTORS": (64, 64), "LARGE": (2, 32, 64, 2), "ROUNDS": 2, "UPDATED_PARAMETERS": 1 << 16}
    on_cpu = {"name_and_memory": Mock(return_value=("CPU", 8e9)), "current_device": lambda: torch.device("cpu")}
    monkeypatch.setattr("ds_topo.base.backends.accelerator", lambda: torch.device("cpu"))
    links, path = tmp_path / "links.json", tmp_path / "machine.json"
    links.write_text(json.dumps(CHECKED))
    with patch.multiple(calibrating, **small, **on_cpu):
        assert main(["plan", "--machine", str(links), "--calibrate", str(path)]) == 0
    machine = read_machine(path)
    assert (len(machine.hosts), machine.slots) == (2, 2)
    assert (machine.inside, machine.across) == (Link(2e9, 1e-4), Link(125e6, 2e-4))
    assert machine.speeds is not None
    assert all(1e8 < machine.speeds.product_flops[name] < 1e15 for name in ("fp32", "bf16", "fp16"))
