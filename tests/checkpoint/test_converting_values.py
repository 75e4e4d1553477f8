"""Conversions keep the type and value of every state and buffer, and refuse what they cannot know."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from deepspeed.ops.lamb import FusedLamb
from torch import nn

from ds_topo import checkpoint, cli
from ds_topo.base.ledger import find, is_absent
from ds_topo.checkpoint.engine_facts import is_element_by_element
from ds_topo.checkpoint.manifest import NAME, Manifest, SavedLayout, SavedParameter, SavedStructure, to_text
from ds_topo.checkpoint.plain_weights import to_single_file
from ds_topo.errors import CheckpointError, CheckpointLayoutError, MissingCheckpointError
from tests.checkpoint.continued_jobs import engine_with_slices
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("gloo", exhaustive=("strict",))


class Layers(nn.Module):
    """Three layers of different sizes, so that no two orders of their parameters are alike."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(hidden)
        return result


def _engine(topology: str, module: nn.Module, zero: dict[str, Any], kind: Any = torch.optim.AdamW) -> Any:
    return engine_with_slices(topology, lambda grid: module, zero, optimizer=kind)


def _train(engine: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        inputs = torch.randn(2, 4, generator=torch.Generator().manual_seed(step + 10 * engine.mpu.get_sample_rank()))
        loss = F.mse_loss(engine(inputs), inputs.sin())
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


class Unusual(torch.optim.AdamW):
    """An optimizer with states of other types than fp32, and with one that is None."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("exact", torch.full_like(parameter, 1 / 3, dtype=torch.float64))
                state.setdefault("count", torch.full_like(parameter, 2**24 + 1, dtype=torch.int64))
                state.setdefault("nothing", None)
        return result


class Declared(Unusual):
    """The same, declared to update each element by itself."""

    is_element_by_element = True


OPTIMIZERS: dict[str, Any] = {"AdamW": torch.optim.AdamW, "Adafactor": torch.optim.Adafactor, "Unusual": Declared}


def _save(folder: Path, topology: str, zero: dict[str, Any], kind: str) -> None:
    with _engine(topology, Layers(), zero, OPTIMIZERS[kind]) as engine:
        _train(engine, range(2))
        checkpoint.save(engine, folder, "saved")


# -- entries of groups -------------------------------------------------------------------------------------------------


class CountsInGroups(torch.optim.Optimizer):
    """Adam that adds to its groups while it steps: its count of steps, as fused kernels keep it, and other types."""

    is_element_by_element = True

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            count = group["step"] = group.get("step", 0) + 1
            group.setdefault("seen", torch.zeros(2)).add_(count)
            group["phase"] = "even" if count % 2 == 0 else "odd"
            for parameter in (each for each in group["params"] if each.grad is not None):
                state = self.state[parameter]
                for key, power in (("mean", 1), ("square", 2)):
                    state.setdefault(key, torch.zeros_like(parameter)).lerp_(parameter.grad**power, 0.1)
                unbiased = (state[key] / (1 - 0.9**count) for key in ("mean", "square"))
                parameter.add_(next(unbiased) / (next(unbiased).sqrt() + 1e-3), alpha=-group["lr"])


def _load_groups(folder: Path) -> None:
    with _engine("data=2", Layers(), {"stage": 1}, CountsInGroups) as engine:
        _train(engine, range(3))
        checkpoint.save(engine, folder, "saved")
        dcp.save({"app": checkpoint.TorchState(engine)}, checkpoint_id=folder / "torch")
        expected = _train(engine, range(3, 6))
    for stage, form in ((1, "files that fit"), (3, "by name"), (2, "torch"), (2, "torch in place")):
        with _engine("data=2", Layers(), {"stage": stage}, CountsInGroups) as engine:
            (group,) = groups = engine.optimizer.optimizer.param_groups  # a schedule of the program has them
            if form == "torch in place":
                dcp.load({"app": checkpoint.TorchState(engine)}, checkpoint_id=folder / "torch")
            elif form == "torch":
                checkpoint.load_torch(engine, folder / "torch")
            else:
                checkpoint.load(engine, folder, "saved", convert=form == "by name")
            assert engine.optimizer.optimizer.param_groups is groups, form
            assert groups[0] is group, form
            assert group["step"] == 3, form
            if form != "torch in place":  # which finds numbers and tensors alone, because no step has been taken here
                assert (group["phase"], group["seen"].tolist()) == ("odd", [6.0, 6.0]), form
            assert _train(engine, range(3, 6)) == pytest.approx(expected, rel=1e-5), form


@pytest.mark.thorough
def test_entries_that_an_optimizer_adds_to_its_groups_are_restored_in_place(world: Worlds, tmp_path: Path) -> None:
    world(2).run(_load_groups, tmp_path)


# -- options of ZeRO that order the optimizer's vectors ----------------------------------------------------------------

HAS_PARAMETER_ALIGNMENT = not is_absent(find("deepspeed.checkpoint.constants.PARAM_ALIGNMENT_PADDINGS"))
ALIGNED: list[dict[str, Any]] = [{"parameter_alignment": True}] if HAS_PARAMETER_ALIGNMENT else []
OPTIONS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"stage": 1, "round_robin_gradients": True}, {"stage": 1}, "round_robin_gradients is True"),
    ({"stage": 2}, {"stage": 2, "round_robin_gradients": True}, "round_robin_gradients is False"),
    ({"stage": 3, "sub_group_size": 10}, {"stage": 3}, "sub_group_size is 10 in the checkpoint and 1000000000 in this"),
    *(
        ({"stage": 1, **aligned}, {"stage": 1}, "parameter_alignment is True in the checkpoint and False")
        for aligned in ALIGNED
    ),
    ({"stage": 1}, {"stage": 2, "sub_group_size": 10}, ""),
    (
        {"stage": 3},
        {"stage": 1, "round_robin_gradients": True, **dict(*ALIGNED)},
        "is of data=2 (2 ranks), ZeRO 3",
    ),
]
"""Options of the section ``zero_optimization`` before and after, and the refusal without conversion."""


def _require_own_weights(engine: Any) -> None:
    """Check that the state for torch's checkpoints has every weight's own elements."""
    weights = checkpoint.TorchState(engine).state_dict()["model"]
    for name, parameter in engine.module.named_parameters() if engine.zero_optimization_stage() < 3 else ():
        for offsets, box in getattr(weights.get(name), "boxes", {}).items():
            there = tuple(slice(first, first + size) for first, size in zip(offsets, box.shape, strict=True))
            assert torch.equal(box, parameter.detach()[there]), name


def _change_options(folder: Path) -> list[tuple[str, list[float], list[float]]]:
    found = []
    for number, (before, after, _) in enumerate(OPTIONS):
        with _engine("data=2", Layers(), before) as engine:
            _train(engine, range(2))
            checkpoint.save(engine, folder / str(number), "saved")
            expected = _train(engine, range(2, 4))
            _require_own_weights(engine)
        with _engine("data=2", Layers(), after) as engine:
            said = ""
            try:
                checkpoint.load(engine, folder / str(number), convert=False)
            except CheckpointLayoutError as error:
                said = str(error)
                checkpoint.load(engine, folder / str(number))
            found.append((said, expected, _train(engine, range(2, 4))))
    return found


@pytest.mark.thorough
def test_changed_options_of_zero_are_refused_and_converted(world: Worlds, tmp_path: Path) -> None:
    for found in world(2).run(_change_options, tmp_path):
        for (said, expected, losses), (*_, refusal) in zip(found, OPTIONS, strict=True):
            assert refusal in said
            assert bool(said) == bool(refusal), "options without effect do not matter"
            assert losses == pytest.approx(expected, rel=1e-5)


# -- what slices hold --------------------------------------------------------------------------------------------------


def _save_slices(folder: Path) -> None:
    for case in ("equal", "parameter", "buffer", "state", "declared"):
        module = Layers()
        module.register_buffer("start", torch.zeros(2, 3))
        module.own = nn.Parameter(torch.zeros(2))
        with _engine("data=1,model=2", module, {"stage": 1}) as engine:
            place = engine.mpu.get_slice_parallel_rank()
            _train(engine, range(1))
            if case == "parameter":
                module.own.data += place
            elif case == "state":
                next(iter(engine.optimizer.optimizer.state.values()))["exp_avg_sq"][0] += place
            elif case != "equal":
                module.start += place
            if case == "declared":
                module.start.partition_dim = 1
            checkpoint.save(engine, folder / case, "saved")


@pytest.fixture(scope="module")
def sliced(world: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the checkpoints of all cases."""
    folder = tmp_path_factory.mktemp("sliced")
    world(2).run(_save_slices, folder)
    return folder


def _load_sliced(folder: Path, topology: str, width: int, to: Path | None = None) -> str:
    """Load into an engine with a buffer of a width, and save again; return why that is refused."""
    module = Layers()
    module.register_buffer("start", torch.zeros(2, width))
    module.own = nn.Parameter(torch.zeros(2))
    with _engine(topology, module, {"stage": 1}) as engine:
        module.start.partition_dim = 1 if width != 3 or "declared" in str(folder) else -1
        try:
            checkpoint.load(engine, folder)
        except CheckpointError as error:
            return str(error)
        if to is not None:
            checkpoint.save(engine, to, "saved")
    return ""


@pytest.mark.thorough
def test_slices_are_joined_only_if_they_are_equal_or_declared(world: Worlds, sliced: Path, tmp_path: Path) -> None:
    for case, said in (
        ("parameter", r"slices 0 and 1 of model=2 .* parameter 'own'.*set tensor_model_parallel and partition_dim"),
        ("buffer", r"slices 0 and 1 of model=2 .* buffer 'start'.*persistent=False"),
        ("state", r"exp_avg_sq of 'own'"),
        ("equal", "^$"),
    ):
        assert [bool(re.search(said, one)) for one in world(2).run(_load_sliced, sliced / case, "data=2", 3)] == [
            True
        ] * 2
        assert world(4).run(_load_sliced, sliced / case, "data=2,model=2", 3) == [""] * 4
        found = checkpoint.look_at(sliced / case, "saved")
        if case in ("state", "equal"):
            to_single_file(found, tmp_path / "weights.pt")
            continue
        with pytest.raises(CheckpointLayoutError, match=said):
            to_single_file(found, tmp_path / "weights.pt")


def test_declared_buffers_are_put_together_and_cut(world: Worlds, sliced: Path, tmp_path: Path) -> None:
    [found] = checkpoint.checkpoints_in(str(sliced / "declared"))  # text names folders, too
    whole = torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0, 1.0]).expand(2, 6)
    assert torch.equal(torch.load(to_single_file(found, str(tmp_path / "weights.pt")))["start"], whole)
    there, back = tmp_path / "declared there", tmp_path / "declared back"
    assert world(3).run(_load_sliced, sliced / "declared", "data=1,model=3", 2, there) == [""] * 3
    pieces = [torch.load(there / f"saved/mp_rank_0{place}_model_states.pt", weights_only=False) for place in range(3)]
    assert torch.equal(torch.cat([piece["module"]["start"] for piece in pieces], 1), whole)
    assert world(2).run(_load_sliced, there, "data=1,model=2", 3, back) == [""] * 2
    alone, again = tmp_path / "declared alone", tmp_path / "declared again"
    assert world(1).run(_load_sliced, sliced / "declared", "data=1", 6, alone) == [""]
    assert world(2).run(_load_sliced, alone, "data=1,model=2", 3, again) == [""] * 2
    for name in ("mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"):
        for path in (back / "saved", again / "saved"):
            one, other = (torch.load(at / name, weights_only=False)["module"]["start"] for at in (found.path, path))
            assert torch.equal(one, other)
    for said in world(4).run(_load_sliced, sliced / "declared", "data=1,model=4", 1):
        assert "buffer 'start'" in said


def _load_into_slices(folder: Path) -> str:
    module = Layers()
    module.register_buffer("start", torch.zeros(2, 3))
    module.own = nn.Parameter(torch.zeros(2))
    with _engine("data=1,model=2", module, {"stage": 1}) as engine:
        checkpoint.load(engine, folder)
        module.start += engine.mpu.get_slice_parallel_rank()
        with pytest.raises(CheckpointLayoutError) as caught:
            checkpoint.load(engine, folder)
    return str(caught.value)


def test_load_refuses_one_value_for_buffers_of_several_slices(world: Worlds, sliced: Path, tmp_path: Path) -> None:
    assert world(1).run(_load_sliced, sliced / "equal", "data=1", 3, tmp_path / "one") == [""]
    for said in world(2).run(_load_into_slices, tmp_path / "one"):
        assert "the buffer 'start' differs between slices of this job" in said


# -- types of states, and optimizers that look at more than one element -----------------------------------------------


def _load_kind(folder: Path, topology: str, zero: int, kind: str, to: Path) -> str:
    with _engine(topology, Layers(), {"stage": zero}, OPTIMIZERS[kind]) as engine:
        try:
            checkpoint.load(engine, folder, "saved")
        except CheckpointLayoutError as error:
            return str(error)
        checkpoint.save(engine, to, "saved")
    return ""


@pytest.mark.thorough
def test_states_keep_their_type_and_none(world: Worlds, tmp_path: Path) -> None:
    for before, zero in ((1, 0), (0, 1), (1, 1)):
        path = tmp_path / f"{before}{zero}"
        world(1).run(_save, path, "data=1", {"stage": before}, "Unusual")
        assert world(2).run(_load_kind, path, "data=2", zero, "Unusual", path / "there") == ["", ""]
        name = "zero_pp_rank_0_mp_rank_00_optim_states.pt" if zero else "mp_rank_00_model_states.pt"
        content = torch.load(path / "there/saved" / name, weights_only=False)
        states = content["optimizer_state_dict"]["base_optimizer_state"] if zero else content["optimizer"]
        state = states["state"][0]
        assert state["exact"].dtype == torch.float64
        assert state["exact"].eq(1 / 3).all()
        assert state["count"].dtype == torch.int64
        assert state["count"].eq(2**24 + 1).all()
        assert state["exp_avg"].dtype == torch.float32
        assert state["nothing"] is None


@pytest.mark.parametrize(("before", "topology", "zero"), [(1, "data=1", 0), (1, "data=2", 1), (0, "model=2", 0)])
def test_optimizer_of_whole_tensors_is_refused(
    world: Worlds, tmp_path: Path, before: int, topology: str, zero: int
) -> None:
    world(1).run(_save, tmp_path / "saved", "data=1", {"stage": before}, "Adafactor")
    ranks = int(topology[-1])
    for said in world(ranks).run(_load_kind, tmp_path / "saved", topology, zero, "Adafactor", tmp_path / "to"):
        assert "Adafactor is not known to update each element" in said
        assert "or its weights alone (load_optimizer_states=False)" in said
    to_single_file(checkpoint.look_at(tmp_path / "saved", "saved"), tmp_path / "weights.pt")


def _save_by_torch(folder: Path, topology: str, zero: int) -> None:
    with _engine(topology, Layers(), {"stage": zero}, torch.optim.Adafactor) as engine:
        _train(engine, range(2))
        dcp.save({"app": checkpoint.TorchState(engine)}, checkpoint_id=folder)


def _said_by(way: Any) -> str:
    try:
        way()
    except CheckpointLayoutError as error:
        return str(error)
    return ""


def _load_by_torch(folder: Path, topology: str, zero: int) -> list[str]:
    """Return the errors of both ways to load, and "" where there is none."""
    with _engine(topology, Layers(), {"stage": zero}, torch.optim.Adafactor) as engine:
        ways: list[Any] = [
            lambda: checkpoint.load_torch(engine, folder),
            lambda: dcp.load({"app": checkpoint.TorchState(engine)}, checkpoint_id=folder),
            lambda: checkpoint.load_torch(engine, folder, load_optimizer_states=False),
        ]
        return [_said_by(way) for way in ways]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("topology", "zero", "is_refused"),
    [("data=1", 1, False), ("data=2", 1, True), ("data=1", 0, True), ("data=2", 2, True)],
)
def test_optimizer_of_whole_tensors_is_refused_in_the_format_of_torch(
    world: Worlds, tmp_path: Path, topology: str, zero: int, is_refused: bool
) -> None:
    world(1).run(_save_by_torch, tmp_path / "saved", "data=1", 1)
    for said in world(int(topology[-1])).run(_load_by_torch, tmp_path / "saved", topology, zero):
        assert ["Adafactor is not known to update each element" in one for one in said] == [is_refused] * 2 + [False]
        assert said[2] == ""


@pytest.mark.parametrize(
    ("kind", "is_known"),
    [
        *((kind, True) for kind in (torch.optim.AdamW, torch.optim.SGD, torch.optim.NAdam, Declared)),
        *((kind, False) for kind in (torch.optim.Adafactor, FusedLamb)),
        *((kind, False) for kind in [getattr(torch.optim, "Muon", None)] if kind is not None),  # not in torch 2.8
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_optimizers_that_look_at_several_elements_are_known_by_their_class(kind: Any, is_known: bool) -> None:
    assert is_element_by_element(kind.__new__(kind)) == is_known


@pytest.mark.thorough
def test_muon_of_deepspeed_looks_at_several_elements() -> None:
    from deepspeed.runtime.zero.muon.original_muon import MuonWithAuxAdam  # imports dynamo, which takes seconds

    assert not is_element_by_element(MuonWithAuxAdam.__new__(MuonWithAuxAdam))


# -- weights alone -----------------------------------------------------------------------------------------------------


def _load_module_only(topology: str, folder: Path) -> list[list[float]]:
    with _engine(topology, Layers(), {"stage": 3}) as engine:
        _train(engine, range(2))
        checkpoint.save(engine, folder, "saved")
        losses = [_train(engine, range(5, 6))]
        checkpoint.save(engine, folder, "later")  # which 'latest' names
    for option in ({"load_module_only": True}, {"load_optimizer_states": False}):
        with _engine(topology, Layers(), {"stage": 3}) as engine:
            checkpoint.load(engine, folder, "saved", **option)
            losses.append(_train(engine, range(5, 6)))
    return losses


@pytest.mark.sampled(2)
@pytest.mark.parametrize("topology", ["data=2", "data=1,model=2"])
def test_zero_3_loads_weights_alone(world: Worlds, tmp_path: Path, topology: str) -> None:
    for saved, *loaded in world(2).run(_load_module_only, topology, tmp_path):
        assert loaded == [pytest.approx(saved, rel=1e-5)] * 2


def _load_with_frozen(folder: Path) -> list[str]:
    said = []
    for number, late in enumerate((False, True)):
        module = Layers()
        module.layers[0].requires_grad_(late)
        with _engine("data=1", module, {"stage": 1}) as engine:
            _train(engine, range(1))
            module.layers[0].requires_grad_(False)
            checkpoint.save(engine, folder, f"saved{number}", exclude_frozen_parameters=True)
    module = Layers()
    module.layers[0].requires_grad_(False)
    with _engine("data=1", module, {"stage": 3}) as engine:
        checkpoint.load(engine, folder, "saved0", load_module_strict=False)
        for tag, options in (("saved0", {}), ("saved1", {"load_module_strict": False})):
            with pytest.raises(CheckpointError) as caught:
                checkpoint.load(engine, folder, tag, **options)
            said.append(str(caught.value))
    return said


def test_checkpoint_without_frozen_parameters_is_converted(world: Worlds, tmp_path: Path) -> None:
    [(strict, late)] = world(1).run(_load_with_frozen, tmp_path)
    assert "it has no parameter 'layers.0.weight' [7, 4]" in strict
    assert "'layers.0.bias'] are in the optimizer and were left out of the checkpoint" in late


class Three(nn.Module):
    """Three vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Parameter(torch.zeros(2)) for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def _load_three(folder: Path) -> tuple[list[Any], str]:
    module, said = Three(), ""
    with _engine("data=2", module, {"stage": 0}, torch.optim.Adam) as engine:
        for number, one in enumerate(module.parameters()):
            engine.optimizer.state[one]["exp_avg"] = torch.full((2,), float(number))
        checkpoint.load(engine, folder, "saved")
        kept = [dict(engine.optimizer.state.get(one, {})) for one in module.parameters()]
    with _engine("data=2", Three(), {"stage": 1}, torch.optim.Adam) as engine:
        try:
            checkpoint.load(engine, folder, "saved")
        except CheckpointLayoutError as error:
            said = str(error)
    return kept, said


def test_parameters_without_zero_keep_states_of_their_own(world: Worlds, tmp_path: Path) -> None:
    names, path = ("third", "first", "second"), tmp_path / "from" / "saved"
    states = {
        1: {"step": torch.tensor(5.0), "exp_avg": torch.ones(2)},
        2: {"step": torch.tensor(3.0), "exp_avg": torch.arange(2.0)},
    }  # the third had no gradient
    optimizer = {"state": states, "param_groups": [{"lr": 0.1, "params": [0, 1, 2]}]}
    path.mkdir(parents=True)
    content = {"module": {name: torch.zeros(2) for name in names}, "optimizer": optimizer, "buffer_names": []}
    content |= {"global_steps": 5, "lr_scheduler": None}
    torch.save(content, path / "mp_rank_00_model_states.pt")
    rows = tuple(SavedParameter(name, (2,), "float32", (0,)) for name in names)
    layout = SavedLayout("data=1", 1, 1, 1, 0, "Adam", "fp32")
    manifest = Manifest("saved", 5, "", layout, (), rows, structure=SavedStructure("Adam", ((names,),)))
    (path / NAME).write_text(to_text(manifest))
    for kept, said in world(2).run(_load_three, path.parent):
        assert [one.keys() for one in kept] == [states[1].keys(), states[2].keys(), {}.keys()]
        for own, expected in zip(kept, states.values(), strict=False):
            assert all(torch.equal(own[key], expected[key]) for key in expected)
        assert "have different values or types of 'step'" in said


def _load_others(folder: Path) -> list[str]:
    said = []
    (folder / "empty").mkdir()
    (folder / "model").mkdir()
    (folder / "model/model.safetensors").write_bytes(b"")
    (folder / "pytorch_model.bin").write_bytes(b"")
    with _engine("data=1", Layers(), {"stage": 1}) as engine:
        dcp.save({"app": checkpoint.TorchState(engine)}, checkpoint_id=folder / "torch")
        checkpoint.save(engine, folder / "ours", "step1")
        load, load_torch = checkpoint.load, checkpoint.load_torch
        for function, path in (
            (load, "torch"),
            (load, "model"),
            (load, "pytorch_model.bin"),
            (load, "empty"),
            (load, "ours/step1"),
            (load_torch, "ours"),
            (load_torch, "ours/step1"),
            (load_torch, "pytorch_model.bin"),
            (load_torch, "empty"),
            (load, "ours/step1/mp_rank_00_model_states.pt"),
        ):
            options = {"convert": False} if function is load else {}  # else weights alone are read
            with pytest.raises(MissingCheckpointError) as caught:
                function(engine, folder / path, **options)
            said.append(str(caught.value))
        advice = said[-1][said[-1].index("load(engine,") :]
        assert eval(advice, {"load": load, "engine": engine})[0], "the advice can be followed"
        engine.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(engine.optimizer.optimizer)
        with pytest.raises(CheckpointError) as caught:
            checkpoint.load(engine, folder / "ours")
        said.append(str(caught.value))
        checkpoint.load(engine, folder / "ours", load_lr_scheduler_states=False)
        checkpoint.save(engine, folder / "ours", "step2")
        engine.lr_scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer.optimizer, 1)
        with pytest.raises(CheckpointError) as caught:
            checkpoint.load(engine, folder / "ours")
        said.append(str(caught.value))
        with pytest.raises(MissingCheckpointError, match="is one checkpoint: give the folder around it"):
            engine.load_checkpoint(folder / "ours/step1")
    return said


def test_checkpoints_of_other_programs_are_named_with_the_function_that_loads_them(
    world: Worlds, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [said] = world(1).run(_load_others, tmp_path)
    for found, expected in zip(
        said,
        (
            "load it with load_torch(engine,",
            "or into the engine, by load(engine,",
            "by from_pretrained() or load_state_dict()",
            "no checkpoint in",
            "and tag='step1'",
            "it has checkpoints of DeepSpeed, ['step1']: load one with load(engine,",
            "it is one of DeepSpeed: load it with load(engine,",
            "pytorch_model.bin seems to hold weights alone",
            "no checkpoint of torch.distributed.checkpoint",
            "it is one file of a checkpoint: load the whole checkpoint with load(engine,",
            "has no state of a learning-rate scheduler, and this job has a ConstantLR",
            "another learning-rate scheduler, with ['factor', 'total_iters'], and this job has a StepLR",
        ),
        strict=True,
    ):
        assert expected in found
    for command in (["checkpoint", str(tmp_path / "torch")], ["export", str(tmp_path / "torch"), str(tmp_path / "to")]):
        assert cli.main(command) == 2
        assert "load it with load_torch(engine," in capsys.readouterr().err
