"""A manifest reads back as it was written; anything else raises an error with the reason."""

from __future__ import annotations

import copy
import gc
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_topo.checkpoint.by_name import require_reachable
from ds_topo.checkpoint.deepspeed_reader import DeepSpeedFiles
from ds_topo.checkpoint.manifest import (
    MOST_EXPERTS,
    Manifest,
    SavedExperts,
    SavedFile,
    SavedLayer,
    SavedLayout,
    SavedParameter,
    SavedSplit,
    SavedStructure,
    SavedTable,
    from_text,
    merged,
    to_text,
    whole_structure,
    why_unreachable,
)
from ds_topo.checkpoint.saved_model import model_of
from ds_topo.errors import (
    CheckpointError,
    CheckpointLayoutError,
    CheckpointVersionError,
    DamagedCheckpointError,
    TopologyError,
)
from tests.checkpoint.handmade import LAYOUT, make


def test_manifest_round_trip(tmp_path: Path) -> None:
    manifest = make(tmp_path, "last", 7)
    assert from_text((tmp_path / "last/manifest.json").read_text(), "manifest.json") == manifest
    assert (manifest.bytes, manifest.numel()) == (16, 12)


def _calls(number: int) -> int:
    """Count the calls, of Python and of C, that merge, write and read the rows of so many parameters."""
    rows = [SavedParameter(f"layers.{index}.weight", (4, 2), "float32", (0,)) for index in range(number)]
    count = 0

    def called(_: object, event: str, __: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()  # it may call finalizers of other tests' objects
    sys.setprofile(called)
    try:
        from_text(to_text(Manifest("a", 0, "", LAYOUT, (), merged(rows))), "")
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def test_a_parameter_takes_as_many_calls_in_any_number_of_them() -> None:
    _calls(1)  # fills caches
    few, more, most = map(_calls, (100, 200, 400))
    assert most - more == 2 * (more - few)
    assert (more - few) / 100 < 70


def test_entries_of_earlier_manifests_are_left_out() -> None:
    content = copy.deepcopy(CONTENTS[0])
    content["layout"] |= {"coordinates": {"data": [[2, 1]]}, "first_rank": 0, "has_reducer": True}
    assert from_text(_signed(content), "manifest.json") == PIPELINE


def test_changed_byte_is_refused(tmp_path: Path) -> None:
    make(tmp_path, "last", 7)
    whole = (tmp_path / "last/manifest.json").read_bytes()
    found = json.loads(whole)
    for position in range(0, len(whole), 7):
        changed = bytearray(whole)
        changed[position] ^= 1
        try:
            text = changed.decode()
        except UnicodeDecodeError:
            continue
        try:
            says = json.loads(text)
        except ValueError:
            says = None
        if says == found:  # white space
            continue
        with pytest.raises((DamagedCheckpointError, CheckpointVersionError)):
            from_text(text, "manifest.json")


def test_a_file_may_be_empty_and_a_tensor_have_many_dimensions() -> None:
    assert SavedFile("layer_00-model_states.pt", 0, "0" * 64, 0).bytes == 0
    row = SavedParameter("weight", (0,) * 64, "float32", (0, 2), split_dim=-1, experts=1)
    assert len(row.shape) == 64, "as torch's tensors"


def test_tables_are_read() -> None:
    layout = SavedLayout("data=2", 2, 1, 2, 3, "DeepSpeedZeroOptimizer_Stage3", "fp32")
    tables = SavedTable("one.json", 0, (0, 1)), SavedTable("two.json", 0, (0, 1), partition=1, partitions=2)
    text = to_text(Manifest("last", 1, "", layout, (), (), tables=tables))
    assert from_text(text, "last").tables == tables


def test_later_version_is_refused_with_its_release() -> None:
    text = json.dumps({"format": "ds_topo checkpoint", "version": 5, "versions": {"ds_topo": "9.9"}})
    with pytest.raises(CheckpointVersionError, match=r"last: version 5 .* reads versions up to 4: install .*\(9\.9\)"):
        from_text(text, "last")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": "another"}', '{"format": "ds_topo checkpoint", "version": 1}']
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(DamagedCheckpointError, match="last: "):
        from_text(text, "last")


def test_reading_imports_neither_torch_nor_pickle() -> None:
    code = (
        "import sys, ds_topo.checkpoint.folder, ds_topo.checkpoint.manifest\n"
        "assert 'pickle' not in sys.modules\n"
        "import ds_topo.cli\n"
        "print([name for name in ('torch', 'deepspeed', 'numpy') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (result.stdout.strip(), result.stderr) == ("[]", "")


# -- manifests that were written to mislead ----------------------------------------------------------------------------

PIPELINE = Manifest(
    "last",
    7,
    "2026-01-31T12:00:00+00:00",
    SavedLayout("pipe=2,data=2,model=2", 8, 4, 2, 1, "DeepSpeedZeroOptimizer", "fp32", is_pipeline=True),
    (
        SavedFile("mp_rank_00_model_states.pt", 7, "0" * 64, 0),
        SavedFile("sub/zero_pp_rank_0_mp_rank_00_optim_states.pt", 9, "1" * 64, 3),
    ),
    (
        SavedParameter("0.weight", (4, 2), "float32", (0, 1), 0),
        SavedParameter("tied_modules.t.weight", (8, 2), "float32", (0, 1, 2, 3), 0),
    ),
    {"ds_topo": "0.1.0"},
    SavedStructure(
        "AdamW",
        ((("tied_modules.t.weight", "0.weight"),), (("tied_modules.t.weight",),)),
        {"0.weight": SavedSplit(0), "tied_modules.t.weight": SavedSplit(0)},
        layers=(SavedLayer("A"), SavedLayer("T", "t"), SavedLayer("T", "t")),
        bounds=(0, 2, 3),
    ),
)
EXPERTS = Manifest(
    "moe",
    7,
    "2026-01-31T12:00:00+00:00",
    SavedLayout("data=4", 4, 1, 4, 1, "DeepSpeedZeroOptimizer", "fp32", experts=(SavedExperts(2),)),
    (SavedFile("mp_rank_00_model_states.pt", 7, "0" * 64, 0),),
    (
        SavedParameter("w", (4, 2), "bfloat16", (0,)),
        SavedParameter("m.deepspeed_experts.*.weight", (8, 2), "float32", (0,), None, 4),
    ),
    structure=SavedStructure("AdamW", ((("w", "m.deepspeed_experts.0.weight"),),), experts={"m.deepspeed_experts": 2}),
)
CONTENTS = [json.loads(to_text(one)) for one in (PIPELINE, EXPERTS)]


def _signed(content: dict[str, Any]) -> str:
    """Return the text of a manifest whose digest agrees, as anybody can write it."""
    plain = {key: value for key, value in content.items() if key != "sha256"}
    return json.dumps({**plain, "sha256": hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()})


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container in JSON with each of its keys."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


VALUES = st.one_of(
    st.sampled_from([10**6, 2**62, 2**63, 10**400, "..", "/etc/passwd", "a//b", "\x1b[31m", "\ud800", "x" * 10_000]),
    st.sampled_from(["data=3", "data=1000000000", "pipe=2,data=2,model=2", "float32", "load", float("nan")]),
    st.recursive(
        st.none() | st.booleans() | st.integers(-2, 9) | st.floats() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
        max_leaves=4,
    ),
)


def _use(manifest: Manifest) -> None:
    """Do what lists and loads do with a manifest."""
    assert from_text(to_text(manifest), "again") == manifest
    assert manifest.numel() >= 0
    assert str(manifest.layout).isprintable()
    for other in (PIPELINE.layout, EXPERTS.layout):
        why_unreachable(manifest.layout, other)
        why_unreachable(other, manifest.layout)
    for other in (PIPELINE.layout, EXPERTS.layout):
        with suppress(CheckpointError, TopologyError):
            model = model_of(manifest)
            require_reachable(model, other, model.structure, has_states=True)


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_any_manifest_is_loaded_or_refused_by_our_errors(data: st.DataObject) -> None:
    content = copy.deepcopy(data.draw(st.sampled_from(CONTENTS)))
    for _ in range(data.draw(st.integers(1, 2))):
        container, key = data.draw(st.sampled_from(list(_places(content))))
        change = data.draw(st.sampled_from(["replace", "remove", "repeat"]))
        if change == "remove":
            del container[key]
        elif change == "repeat" and isinstance(container, list):
            container.append(container[key])
        else:
            container[key] = data.draw(VALUES)
    with suppress(DamagedCheckpointError, CheckpointVersionError):
        _use(from_text(_signed(content), "manifest.json"))


@pytest.mark.parametrize("manifest", [PIPELINE, EXPERTS], ids=["pipeline", "experts"])
def test_whole_manifest_is_used(manifest: Manifest) -> None:
    _use(manifest)
    model = model_of(manifest)
    require_reachable(model, manifest.layout, model.structure, has_states=True)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("files", 0, "path"), "../latest", "files[0]: path='../latest' is not inside the checkpoint's folder"),
        (("files", 0, "path"), "/etc/passwd", "files[0]: path='/etc/passwd' is not inside the checkpoint's folder"),
        (("files", 0, "bytes"), -1, "files[0].bytes: -1 is wrong: Input should be"),
        (("files", 0, "bytes"), "7", "files[0].bytes: '7' is wrong: Input should be a valid integer"),
        (("files", 0, "bytes"), True, "files[0].bytes: True is wrong: Input should be a valid integer"),
        (
            ("files", 0, "bytes"),
            1 << 63,
            "files[0].bytes: 9223372036854775808 is wrong: Input should be less than 9223372036854775808",
        ),
        (("files", 0, "sha256"), "0", "files[0].sha256: '0' is wrong: String should match pattern"),
        (("files",), {}, "files: {} is wrong: Input should be a valid array"),
        (
            ("parameters", 0, "name"),
            "\x1b[31m",
            "parameters[0].name: has characters that cannot be printed",
        ),
        (
            ("parameters", 0, "shape"),
            [-1],
            "parameters[0].shape[0]: -1 is wrong: Input should be",
        ),
        (("parameters", 0, "shape"), [1] * 65, "Tuple should have at most 64 items"),
        (("parameters", 0, "split_dim"), -2, "parameters[0].split_dim: -2 is wrong"),
        *((("parameters", 0, "experts"), count, f"[0].experts: {count} is wrong") for count in (0, -1, 2**62)),
        (("parameters", 0, "model_ranks"), [4], "'0.weight' is on model ranks (4,), and there are 4"),
        (
            ("layout", "world_size"),
            10**9,
            "layout.world_size: 1000000000 is wrong: Input should be less",
        ),
        (("layout", "topology"), "data=1000000000", "1,000,000,000 ranks are not in a world of 8"),
        (("layout", "topology"), "data=", "layout: malformed topology"),
        (("layout", "zero_stage"), 4, "layout.zero_stage: 4 is wrong: Input should be less than or equal to 3"),
        (("structure", "secret"), 1, "structure.secret: is an unknown entry"),
        (("layout",), {"topology": None}, "layout.world_size: is missing"),
        (
            ("structure", "experts"),
            {"a": 0},
            "structure.experts.a: 0 is wrong",
        ),
        (("step",), None, "step: None is wrong: Input should be a valid integer"),
        (("versions",), {"ds_topo": None}, "versions.ds_topo: None is wrong: Input should be a valid string"),
    ],
    ids=str,
)
def test_entries_of_a_manifest_are_checked(place: tuple[str | int, ...], value: Any, said: str) -> None:
    content = copy.deepcopy(CONTENTS[0])
    container = content
    for key in place[:-1]:
        container = container[key]
    container[place[-1]] = value
    with pytest.raises(DamagedCheckpointError) as raised:
        from_text(_signed(content), "manifest.json")
    assert said in str(raised.value)


def test_largest_number_of_experts_is_read() -> None:
    content = copy.deepcopy(CONTENTS[0])
    content["parameters"][0]["experts"] = MOST_EXPERTS
    assert from_text(_signed(content), "manifest.json").parameters[0].experts == MOST_EXPERTS


def test_deep_nesting_is_refused() -> None:
    deep: Any = []
    for _ in range(900):
        deep = [deep]
    text = json.dumps({**CONTENTS[0], "step": "HERE"}).replace('"HERE"', "[" * 100_000 + "]" * 100_000)
    for forged in (text, _signed({**CONTENTS[0], "step": deep})):
        with pytest.raises(DamagedCheckpointError):
            from_text(forged, "manifest.json")


def test_experts_without_tables_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointLayoutError, match="has experts, and no tables that say where they are"):
        DeepSpeedFiles(model_of(EXPERTS), tmp_path).weight("w")


def test_tied_and_sliced_parameters_count_once() -> None:
    assert PIPELINE.numel() == 2 * (4 * 2) + 2 * (8 * 2), "two slices of each, whatever the number of stages"
    frozen_there = replace(PIPELINE.parameters[1], model_ranks=(2, 3), is_trained=False)
    rows = (PIPELINE.parameters[0], replace(PIPELINE.parameters[1], model_ranks=(0, 1)), frozen_there)
    assert replace(PIPELINE, parameters=rows).numel() == PIPELINE.numel()
    assert EXPERTS.numel() == 4 * 2 + 4 * (8 * 2)


def test_merged_structure_has_the_buffers_of_all_stages() -> None:
    found = [
        {"stage": stage, "structure": {"optimizer": None, "groups": [], "buffers": {name: [stage]}}}
        for stage, name in enumerate("ab")
    ]
    whole = whole_structure([found[1], None, found[0]])
    assert (list(whole.buffers), whole.buffers["b"]) == (["a", "b"], (1,))


def test_split_that_a_stage_declares_counts_on_all_stages() -> None:
    split = {"dim": 0}
    found = [
        {"stage": 0, "structure": {"optimizer": None, "groups": [], "splits": {"tied": split}}},
        {"stage": 1, "structure": {"optimizer": None, "groups": [], "undeclared": ["tied", "own"]}},
    ]
    whole = whole_structure(found)
    assert (list(whole.splits), whole.undeclared) == (["tied"], ("own",))
