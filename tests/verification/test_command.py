"""``ds-topo verify`` runs programs, reports by its exit status, and refuses what it cannot run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from deepspeed.runtime.config import DeepSpeedConfig

from ds_topo import PipelineParallelGrid, ProcessTopology
from ds_topo.base import patches
from ds_topo.base.ledger import ledger
from ds_topo.cli import main
from ds_topo.launch.launchers import REFERENCE
from ds_topo.verification.__main__ import of_reference
from ds_topo.verification.recorder import Recording
from ds_topo.verification.runs import Ranks, fit_together
from tests.support.fake_world import fake_world

ROOT = Path(__file__).parents[2]
GPT = ["examples/train_gpt.py", "--batch-size", "8", "--context", "16", "--width", "32", "--depth", "2", "--steps", "3"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train.py"], "--topology is missing"),
        (["train.py", "--topology", "data=2"], "program 'train.py': there is no such file"),
        (["train.py", "--topology", "data=-1"], "give all degrees"),
        (["train.py", "--topology", "colour=2"], "colour"),
        (["--steps", "0", __file__, "--topology", "data=2"], "steps=0: give a number of steps from 1 on"),
        (["--timeout", "0", "train.py", "--topology", "data=2"], "--timeout 0.0: give seconds above 0"),
        (["--png", "errors.svg", "train.py", "--topology", "data=2"], "give a file name that ends in .png"),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("places", "free", "fit"), [(4, 8000, True), (3, 8000, False), (4, 7999, False), (8, 8000, True)]
)
def test_references_run_together_if_they_fit(places: int, free: int, fit: bool, tmp_path: Path) -> None:
    wanted, reference = (
        Ranks(ProcessTopology.from_spec(spec), Recording(tmp_path, 1), "running")
        for spec in ("data=2,model=2", "data=2")
    )
    for rank in range(4):
        wanted.recording.folder_of(rank).mkdir()
        torch.save({"memory": 1000}, wanted.recording.folder_of(rank) / "step_0.pt")
    assert fit_together(wanted, reference, places, free) == fit
    assert not fit_together(reference, reference, places, free), "no more processes than in the layout"


def test_grid_of_a_reference_leaves_its_config_to_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REFERENCE, "1")
    config = {"train_batch_size": 8, "zero_optimization": {"stage": 1}}
    with ledger.bound(patches.CONFIGURE, of_reference), fake_world(0, 2), PipelineParallelGrid("data=2") as grid:
        assert DeepSpeedConfig(config, mpu=grid).zero_optimization_stage == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("topology", ["data=2", "data=2,pipe=2", "model=2,pipe=2", "pipe=2,model=2,data=2"])
def test_gpt_is_equal_in_a_layout(topology: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = tmp_path / "found.json"
    options = ["--json", str(found), "--png", str(tmp_path / "errors.png")]
    assert main(["verify", *options, *GPT, "--out", str(tmp_path), "--topology", topology]) == 0
    report = json.loads(found.read_text())
    assert (report["topology"], report["findings"], report["steps"]) == (topology, [], 2)
    assert list(tmp_path.glob("global_step*")) == [], "the program did not go on"


@pytest.mark.exhaustive
def test_fault_of_a_program_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for source in (ROOT / "examples").glob("*.py"):
        (tmp_path / source.name).write_text(source.read_text())
    gpt = tmp_path / "gpt.py"
    lost = "projection = F.linear(self.attention(self.attention_norm(hidden)), self.projection.weight)"
    text = gpt.read_text().replace(
        "hidden = hidden + self.projection(self.attention(self.attention_norm(hidden)))",
        f"{lost}\n        hidden = hidden + projection + self.projection.bias",
    )
    assert text != gpt.read_text()
    gpt.write_text(text)
    monkeypatch.chdir(ROOT)
    arguments = [str(tmp_path / GPT[0].split("/")[1]), *GPT[1:], "--config", "examples/train_gpt.json"]
    assert main(["verify", *arguments, "--out", str(tmp_path), "--topology", "data=2,model=2"]) == 1
    assert "first difference" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_program_without_an_engine_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "train.py"
    program.write_text("import torch; print(float(torch.nn.Linear(2, 2)(torch.ones(2)).sum()))")
    assert main(["verify", str(program), "--topology", "data=1"]) == 2
    assert "the program ended without a step of an engine, which verify compares" in capsys.readouterr().err


@pytest.mark.thorough
def test_failure_of_a_program_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "train.py"
    program.write_text("raise ValueError('no data')\n")
    assert main(["verify", str(program), "--topology", "data=2"]) == 2
    assert "ValueError: no data" in capsys.readouterr().err


PIPELINE = """
import os, sys, warnings
warnings.simplefilter("ignore")
import deepspeed, torch
from torch import nn
from torch.nn import functional as F
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(8, 4), nn.Embedding(6, 4)
    @property
    def words_weight(self):
        return self.words.weight
    def forward(self, tokens):
        return self.words(tokens) + self.positions.weight

deepspeed.init_distributed(verbose=False)
torch.manual_seed(int(os.environ["RANK"]) // 2)  # another seed on each stage, as Megatron's
layers = [
    TiedLayerSpec("embed", Embedding, tied_weight_attr="words_weight"), LayerSpec(nn.Linear, 4, 4), torch.tanh,
    TiedLayerSpec("embed", Embedding, tied_weight_attr="words_weight",
                  forward_fn=lambda module, hidden: F.linear(hidden, module.words_weight)),
]
loss = lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten())
tokens = torch.arange(16 * 6).view(16, 6) * 5 % 8
config = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0,
          "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}}
model = PipelineModule(layers, num_stages=2, loss_fn=loss)
engine, *_ = deepspeed.initialize(model=model, config=config, training_data=[(one, one) for one in tokens])
if sys.argv[1:] == ["fault"] and os.environ["RANK"] == "1" and os.environ["WORLD_SIZE"] == "4":
    next(one for name, one in engine.module.named_parameters() if "position" in name).register_hook(lambda g: 2 * g)
for _ in range(3):
    engine.train_batch()
"""


@pytest.mark.exhaustive
def test_pipeline_of_stock_deepspeed_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its number of stages is replaced, and what a later stage does not use of a tied module is ignored."""
    program = tmp_path / "train.py"
    program.write_text(PIPELINE)
    command = ["verify", "--topology", "pipe=2,data=2", str(program)]
    assert main(command) == 0, capsys.readouterr()
    assert main([*command, "fault"]) == 1
    found = "".join(capsys.readouterr().out.split())
    assert "`tied_modules.embed.positions.weight`gradient,step1" in found


@pytest.mark.exhaustive
def test_nothing_stays_after_sigterm(tmp_path: Path) -> None:
    program, pids = tmp_path / "train.py", tmp_path / "pids"
    pids.mkdir()
    program.write_text(
        f"import os, pathlib, time\npathlib.Path({str(pids)!r}, str(os.getpid())).touch()\ntime.sleep(300)\n"
    )
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-m", "ds_topo", "verify", "--topology", "data=2", str(program)]
    with subprocess.Popen(command, env={**os.environ, "TMPDIR": str(scratch)}, stderr=subprocess.DEVNULL) as running:
        until = time.monotonic() + 120
        while len(list(pids.iterdir())) < 2 and time.monotonic() < until:
            time.sleep(0.1)
        running.terminate()
    assert running.returncode == 143
    assert list(scratch.glob("ds_topo_verify_*")) == []
    for pid in pids.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.name), 0)
    assert len(list(pids.iterdir())) == 2
