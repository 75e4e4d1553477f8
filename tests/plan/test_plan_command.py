"""Test ``ds-topo plan`` on the command line: its output, its files, and its errors."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from ds_topo.cli import main, plan_command
from ds_topo.cli.plan_command import POSITIVE, WHOLE
from ds_topo.topology.process_topology import ProcessTopology

GPT = ["--layers", "8", "--hidden", "512", "--heads", "8", "--vocab", "1024", "--sequence", "256"]
JOB = [*GPT, *["--hosts", "2", "--slots", "4", "--accelerator", "A100", "--batch", "64"]]

SLOTS = ["--hosts", "1", "--slots", "4", "--batch", "64"]


def plan(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["plan", *options]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["plan", *options]) == 2
    return capsys.readouterr().err


def found(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(plan(capsys, *JOB, "--json", *options))
    return content


def test_plan_prints_a_table_and_a_reason(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    lines = plan(capsys, *JOB, "--top", "3").splitlines()
    assert lines[0] == "8 layers of 512: 25,875,456 parameters, trained by deepspeed"
    assert lines[1].startswith("2 x 4 A100-80GB, 78.7 GB each for tensors; 64 sequences of 256 in bf16")
    assert lines[3].split() == ["topology", "s/step", "GB", "ZeRO", "micro", "waits", "for", "tokens/s"]
    assert [line.split()[0].count("=") > 0 for line in lines[4:7]] == [True] * 3
    assert lines[8].startswith("The ")


@pytest.mark.parametrize(
    "options",
    [["--explain", "--compare", "pipe=8,data=1"], ["--software", "megatron", "--fix", "pipe=2"], ["--fix", "seq=2"]],
)
def test_output_fits_into_80_columns(
    options: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for line in plan(capsys, *JOB, *options).splitlines():
        assert len(line.rstrip()) <= 80, line


def test_first_example_of_the_help_works(capsys: pytest.CaptureFixture[str]) -> None:
    command = plan_command.EXAMPLES.splitlines()[1]
    out = plan(capsys, *shlex.split(command)[2:], "--top", "1")
    assert out.startswith("llama-3-70b: 70,553,706,496 parameters")


def test_nothing_is_wrapped_in_a_pipe(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    lines = plan(capsys, *JOB, "--explain").splitlines()
    assert any(re.match(r"compute .* \(.*forward.*backward\) in stage 0 \(8 layers, output\)", line) for line in lines)
    assert not any(line.startswith("  with ") for line in lines), "columns have room for everything"


def test_plan_says_what_its_axes_need(capsys: pytest.CaptureFixture[str]) -> None:
    out = plan(capsys, *JOB, "--topology", "seq=2,model=2,data=2")
    assert "seq needs Ulysses attention; model needs layers that split their weights\n" in out
    assert "pipe needs a PipelineModule" in plan(capsys, *JOB, "--fix", "pipe=2")


def test_write_does_not_change_the_plans(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert found(capsys) == found(capsys, "--write", str(tmp_path / "ds_config.json"))


def test_json_terms_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    content = found(capsys, "--compare", "pipe=2,data=2,model=2")
    best = content["plans"][0]
    assert best["seconds"] == pytest.approx(sum(best["seconds_by_term"].values()))
    assert best["memory_bytes"] == pytest.approx(sum(best["memory_by_term"].values()))
    assert ProcessTopology.from_spec(best["topology"]).world_size() == 8
    assert len({plan["topology"] for plan in content["plans"]}) == len(content["plans"])
    lost = content["compared"]["seconds"] - best["seconds"]
    assert sum(term["value"] for term in content["compared"]["loses"]) == pytest.approx(lost)
    assert content["search"]["timed"] > 0


def test_explain_prints_every_section(capsys: pytest.CaptureFixture[str]) -> None:
    out = plan(capsys, *JOB, "--explain", "--compare", "pipe=8,data=1")
    for title in ("seconds of ", "bytes of the fullest rank", "axes on hosts", "the rest", "pipe=8,data=1"):
        assert title in out
    assert re.search(r"bubble +\+\d", out)


LARGE = [*JOB, *["--hidden", "8192", "--layers", "32", "--heads", "64", "--top", "1"]]
"""A model that fits only if its states are sharded."""


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ([], r"it needs [\d.]+ GB per rank, of 78.7 GB \(pipe=2,data=4, micro-batch \d+, ZeRO 1\)"),
        (["--zero", "2"], "it is not possible: deepspeed has no ZeRO 2 with a pipeline"),
    ],
)
def test_impossible_comparison_does_not_hide_the_plan(
    options: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = [*LARGE, "--compare", "pipe=2,data=4", *options]
    lines = plan(capsys, *job).splitlines()
    [said] = [line for line in lines if line.startswith("--compare")]
    assert re.match(rf"--compare 'pipe=2,data=4': {text}", said)
    content = json.loads(plan(capsys, *job, "--json"))
    assert content["plans"]
    assert content["compared"]["topology"] == "pipe=2,data=4"
    assert re.match(text, content["compared"]["problem"])


def test_memory_error_names_the_decisions(capsys: pytest.CaptureFixture[str]) -> None:
    text = refused(capsys, *LARGE, "--zero", "0", "--fix", "model=1,pipe=1")
    assert "does not fit in the memory of 8 ranks of A100-80GB with what is decided (model=1, pipe=1, ZeRO 0): " in text
    text = refused(capsys, *LARGE, "--hidden", "65536")
    assert "does not fit in the memory of 8 ranks of A100-80GB: " in text


def test_error_has_one_reason_per_rule_and_the_batch_first(capsys: pytest.CaptureFixture[str]) -> None:
    text = refused(capsys, *JOB, "--hosts", "25", "--slots", "8", "--batch", "64")
    reasons = text.split("is possible: ")[1].split("; ")
    assert re.match(r"data=\d+ does not divide the batch of 64 sequences", reasons[0])
    assert sum("attention heads" in reason and "model=" in reason for reason in reasons) == 1
    assert any(reason.startswith("pipe=") for reason in reasons)


@pytest.mark.parametrize("option", [["--topology", "data=8"], ["--fix", "data=8"]])
def test_reason_tells_untried_degrees_from_too_large_ones(
    option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "No other degrees were tried." in plan(capsys, *JOB, *option)


def test_picture_is_written_by_file_ending(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, start in (("plan.png", b"\x89PNG"), ("plan.svg", b"<?xml")):
        assert main(["plan", *JOB, "--picture", str(tmp_path / name)]) == 0
        assert capsys.readouterr().err == f"picture: {tmp_path / name}\n"
        assert (tmp_path / name).read_bytes().startswith(start)
    assert "cannot be written" in refused(capsys, *JOB, "--picture", str(tmp_path / "absent" / "plan.png"))


def test_written_config_has_the_best_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds_config.json"
    out = plan(capsys, *JOB, "--write", str(path), "--fix", "pipe=2,model=2")
    config = json.loads(path.read_text())
    topology = ProcessTopology.from_config(path)
    assert dict(zip(topology.axes, topology.dims, strict=True)) == {"pipe": 2, "data": 2, "model": 2}
    data, micro = 2, config["train_micro_batch_size_per_gpu"]
    assert config["train_batch_size"] == 64 == data * micro * config["gradient_accumulation_steps"]
    assert config["bf16"] == {"enabled": True}
    assert f"\n{path}:\n{path.read_text()}" in out
    for not_planned in ("optimizer", "gradient_clipping", "steps_per_print"):
        assert not_planned not in config
    assert "cannot be written" in refused(capsys, *JOB, "--write", str(tmp_path / "absent" / "x.json"))
    plan(capsys, *JOB, "--write", str(path), "--fix", "pipe=2", "--recompute", "full")
    assert json.loads(path.read_text())["pipeline"] == {"activation_checkpoint_interval": 1, "use_reentrant": False}


def test_speed_is_told_per_gpu_and_as_a_share_of_the_peak(capsys: pytest.CaptureFixture[str]) -> None:
    best = found(capsys)["plans"][0]
    job = found(capsys)["job"]
    flops = best["tokens_per_second"] * job["flops_per_token"]
    assert best["mfu"] == pytest.approx(flops / (8 * 312e12))
    tokens = best["tokens_per_second"]
    line = (
        f"The first: {tokens:,.0f} tokens/s, {tokens / 8:,.0f} per GPU, MFU {best['mfu']:.0%} of 312 TFLOP/s in bf16."
    )
    assert line in plan(capsys, *JOB)


@pytest.mark.parametrize(
    ("model", "options", "is_told"),
    [
        ("llama-3.1-70b", (), True),
        ("llama-3.1-70b", ("--sequence", "131072"), False),
        ("llama-3-8b", (), False),
    ],
)
def test_a_long_maximum_of_a_model_is_told_if_no_sequence_is_given(
    model: str, options: tuple[str, ...], is_told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = ("--hosts", "8", "--accelerator", "H100", "--batch", "64", "--top", "1", "--json")
    assert main(["plan", "--model", model, *cluster, *options]) == 0
    said = capsys.readouterr().err
    assert ("planned for 131,072 positions, the most of llama-3.1-70b" in said and "give --sequence" in said) == is_told


@pytest.mark.parametrize(
    ("options", "beside"),
    [
        (["--zero", "1"], "must bring an optimizer with its learning rate."),
        (["--experts", "4", "--top-k", "2", "--no-gated", "--expert-parallel", "2"], "must bring experts over 2 ranks"),
        (["--fix", "model=2", "--sequence-parallel"], "must bring sequence parallelism"),
    ],
)
def test_written_config_names_what_a_program_must_bring(
    options: list[str], beside: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds_config.json"
    assert beside in " ".join(plan(capsys, *JOB, *options, "--write", str(path)).split())
    assert path.exists()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            ["--software", "megatron"],
            "--software megatron does not read a DeepSpeed config: choose one of ['deepspeed',",
        ),
        (["--precision", "fp8", "--accelerator", "H100"], "--precision fp8: a DeepSpeed config cannot ask for it"),
    ],
)
def test_write_refuses_plans_that_no_config_can_express(
    options: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert text in refused(capsys, *JOB, *options, "--write", str(tmp_path / "ds_config.json"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--fix", "model=4"], {"model": 4}),
        (["--fix", "tensor=2,pipe=2"], {"model": 2, "pipe": 2}),
        (["--topology", "model=2,data=-1"], {"model": 2, "data": 4}),
    ],
)
def test_plans_keep_decided_degrees(
    options: list[str], expected: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    for one in found(capsys, *options)["plans"]:
        topology = ProcessTopology.from_spec(one["topology"])
        assert {axis: topology.get_dim(axis) for axis in expected} == expected


def test_plans_keep_other_decisions(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--micro-batch", "2", "--zero", "1", "--recompute", "full", "--no-sequence-parallel", "--fix", "pipe=1"]
    for one in found(capsys, *options)["plans"]:
        assert (one["micro_batch"], one["zero"], one["recompute"], one["sequence_parallel"]) == (2, 1, "full", False)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ([], "a model is needed: --model NAME or FILE, or its numbers; --layers --hidden --heads --vocab"),
        (GPT, "--accelerator NAME is missing: name the GPU to plan for, one of V100-16GB, V100-32GB, A100-40GB,"),
        ([*GPT, "--hosts", "1", "--accelerator", "A10"], "'A10' is not in the table: choose one of ['V100-16GB'"),
        ([*GPT, "--hosts", "1", "--accelerator", "A100"], "--batch is missing"),
        ([*GPT, "--accelerator", "A100"], "hosts are needed: --hosts N [--slots M], --hostfile FILE, --slurm"),
        ([*JOB, "--hostfile", "absent"], "--hostfile and --hosts both say which hosts there are"),
        ([*GPT, *["--hosts", "0", "--accelerator", "A100", "--batch", "8"]], "0 hosts with 8 slots: both must be >= 1"),
        ([*JOB, "--micro-batch", "5"], "x micro-batch 5; choose a micro-batch among [1, 2, 4,"),
        ([*JOB, "--micro-batch", "0"], "--micro-batch 0: give a number from 1 on"),
        ([*JOB, "--batch", "7", "--fix", "data=4"], "batch of 7 sequences (a batch of 4 or 8 would do)"),
        ([*JOB, "--fix", "model=5"], "5 does not divide the 8 ranks (2 hosts x 4 slots)"),
        (
            [*JOB, "--fix", "row=2"],
            "axes ['row'] cannot be planned; choose among ['pipe', 'data', 'shard', 'seq', 'model']",
        ),
        (
            [*JOB, "--heads", "4", "--topology", "model=8"],
            "model=8 does not divide the 4 attention heads; choose one of",
        ),
        ([*JOB, "--heads", "3"], "--heads 3 must divide --hidden 512"),
        ([*JOB, "--topology", "pipe=3,data=3"], "is for 9 ranks (3 x 3), but the job has 8"),
        ([*JOB, "--compare", "pipe=3,data=-1"], "(pipe=3) make 3, which does not divide the world size 8"),
        ([*JOB, "--topology", "pipe=8", "--zero", "3"], "deepspeed has no ZeRO 3 with a pipeline, only [1]"),
        ([*JOB, "--topology", "pipe=2,seq=4"], "deepspeed cannot split sequences in a pipeline"),
        ([*JOB, "--virtual-stages", "2", "--fix", "pipe=2"], "no 2 virtual stages"),
        ([*JOB, "--memory-gb", "1"], "3 GB of it are not available for tensors"),
        ([*JOB, "--expert-load", "0.5"], "the fullest expert has at least the mean"),
        ([*JOB, "--precision", "fp8"], "accelerator A100-80GB has no fp8: choose one of"),
        ([*JOB, "--topology", "foo=8"], "--topology 'foo=8': axes ['foo'] cannot be planned; choose among ['pipe',"),
        (
            [*JOB, "--fix", "tp_size=2"],
            "axes ['tp_size'] cannot be planned: did you mean 'model'? Choose among ['pipe',",
        ),
        ([*JOB, "--compare", "modle=2,data=4"], "--compare 'modle=2,data=4': axes ['modle'] cannot be planned"),
        ([*JOB, "--fix", "model=-1"], "--fix 'model=-1': give degrees from 1 on"),
        ([*JOB, "--fix", "model=2:1"], "give degrees from 1 on, without strides"),
        ([*JOB, "--fix", "model=2", "--topology", "data=8"], "--topology and --fix both decide degrees"),
        ([*JOB, "--memory-gbps", "2000"], "--accelerator and --memory-gbps both say how fast it is"),
        ([*JOB, "--peak-tflops", "400"], "--accelerator and --peak-tflops both say how fast it is"),
        ([*JOB, "--expert-load", "nan"], "--expert-load nan: the fullest expert"),
        ([*JOB, "--top-k", "9", "--experts", "8"], "--experts 8 --top-k 9: give both, with 1 <= top-k <= experts"),
        ([*JOB, "--hosts", "-3"], "--hosts -3: give a whole number from 1 on, or names"),
        ([*JOB, "--hosts", "2.5"], "--hosts 2.5: give a whole number from 1 on, or names"),
        (
            [*GPT, *SLOTS, "--peak-tflops", "9", "--memory-gb", "9", "--memory-gbps", "9", "--precision", "fp8"],
            "ds-topo plan: accelerator of 9 TFLOP/s has no fp8",
        ),
        ([*JOB, "--virtual-stages", "4"], "deepspeed has no 4 virtual stages, at most 1\n"),
        (
            [*JOB, "--virtual-stages", "9", "--fix", "pipe=2", "--software", "megatron"],
            "(pipe=2, 9 virtual stages): pipe=2 x 9 virtual stages are too many for 8 layers\n",
        ),
        (
            [*JOB, "--virtual-stages", "2", "--fix", "pipe=1", "--software", "megatron"],
            "): 2 virtual stages need a pipeline, pipe=2 or more\n",
        ),
        ([*JOB, "--recompute", "selective"], "cannot recompute 'selective'\n"),
        ([*JOB, "--sequence-parallel", "--fix", "model=1"], "parallelism needs a model axis, model=2 or more\n"),
        ([*JOB, "--fix", "ep=2"], "experts are distributed with --expert-parallel N"),
        ([*JOB, "--expert-load", "2"], "--expert-load has no effect: the model has no experts"),
        ([*JOB, "--picture", "plan"], "--picture 'plan': give a file name that ends in .png or .svg or .pdf"),
        (["--model", __file__], "is not JSON"),
        ([*JOB, "--layers", "2049"], "2049 layers: the planner takes at most 2048"),
        ([*JOB, "--batch", "2147483648"], "--batch 2147483648: give a number from 1 on, at most 2147483647"),
        (["--model", "gpt2"], "model 'gpt2' is neither a file nor a known model: Give the config.json of a"),
        ([*JOB, "--topology", "pipe=2"], "--topology: topology 'pipe=2' is for 2 ranks (2), but the job has 8"),
        ([*JOB, "--topology", "pipe=2"], "'pipe=2,data=4'; --fix decides the degrees of some axes only"),
        (["--machine", "absent.json", *JOB], "machine file 'absent.json' cannot be read"),
    ],
)
def test_plan_refuses_bad_input(options: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert text in refused(capsys, *options)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *((option, value) for option in WHOLE for value in ("0", "-4")),
        *((option, value) for option in POSITIVE for value in ("0", "-4", "nan", "inf")),
    ],
)
def test_plan_refuses_numbers_that_are_not_positive(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = "--" + option.replace("_", "-")
    text = refused(capsys, *JOB, typed, value)
    assert re.search(rf"{typed} {value}(\.0)?: give a (number from 1 on|positive number)", text)


BY_HAND = ["layers", "hidden", "heads", "kv-heads", "ffn", "vocab", "experts", "top-k", "gated"]


@pytest.mark.parametrize("option", BY_HAND)
def test_plan_refuses_config_together_with_numbers_by_hand(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    value = [] if option == "gated" else ["8"]
    text = refused(capsys, *JOB[len(GPT) :], "--model", "absent", f"--{option}", *value)
    assert f"--model and --{option} both describe the model: give one of them" in text


def test_plan_reads_a_hostfile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "hosts"
    job = [*GPT, "--accelerator", "A100", "--batch", "64", "--json", "--hostfile", str(path)]
    path.write_text("node1 slots=4\nnode2 slots=4\n")
    content = json.loads(plan(capsys, *job))
    assert (content["job"]["hosts"], content["job"]["slots"]) == (2, 4)
    path.write_text("node1 slots=4\nnode2 slots=2\n")
    assert "between 2 and 4 slots; a plan needs the same number on every host: use the first 2" in refused(capsys, *job)
    content = json.loads(plan(capsys, *job, "--num-gpus", "2"))
    assert (content["job"]["hosts"], content["job"]["slots"]) == (2, 2)


def test_plan_reads_the_hosts_of_a_slurm_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "4(x2)")
    job = [*GPT, "--slurm", "--accelerator", "A100", "--batch", "64", "--json"]
    content = json.loads(plan(capsys, *job))
    assert (content["job"]["hosts"], content["job"]["slots"]) == (2, 4)
    monkeypatch.setenv("SLURM_DISTRIBUTION", "cyclic")
    assert "ranks are not numbered host by host" in refused(capsys, *job)


def test_plan_accepts_numbers_in_place_of_a_known_accelerator(capsys: pytest.CaptureFixture[str]) -> None:
    job = [*SLOTS, "--json"]
    numbers = [*job, "--peak-tflops", "100", "--memory-gb", "40", "--memory-gbps", "1000"]
    slow, fast = (
        json.loads(plan(capsys, *GPT, *numbers, "--topology", "model=4", "--link-inside-gbps", speed))
        for speed in ("1", "100")
    )
    assert slow["plans"][0]["seconds"] > fast["plans"][0]["seconds"]
    assert slow["job"]["memory_limit"] == pytest.approx(0.96 * 37e9)
