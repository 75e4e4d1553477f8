"""A manifest reads back as it was written; anything else raises an error with the reason."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings

from ds_topo import ProcessTopology
from ds_topo.checkpoint.manifest import Manifest, SavedLayout, from_text, to_text
from ds_topo.errors import CheckpointVersionError, DamagedCheckpointError
from tests.checkpoint.handmade import LAYOUT, make
from tests.support.topologies import topologies


def test_manifest_round_trip(tmp_path: Path) -> None:
    manifest = make(tmp_path, "last", 7)
    assert from_text((tmp_path / "last/manifest.json").read_text(), "manifest.json") == manifest
    assert (manifest.bytes, manifest.numel()) == (16, 12)


@settings(deadline=None)
@given(topologies())
def test_coordinates_match_topology(topology: ProcessTopology) -> None:
    size = topology.world_size()
    manifest = Manifest("a", 0, "", SavedLayout(topology.spec, size, 1, size, 0, None, "fp32"), (), ())
    text = to_text(manifest)
    assert from_text(text, "") == manifest
    strides = json.loads(text)["layout"]["coordinates"]
    for rank in range(size):
        index = {}
        for axis, factors in strides.items():
            index[axis] = 0
            for degree, stride in factors:
                index[axis] = index[axis] * degree + rank // stride % degree
        assert index == topology.get_coord(rank)._asdict()


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


def test_later_version_is_refused_with_its_release() -> None:
    text = json.dumps({"format": "ds_topo checkpoint", "version": 2, "versions": {"ds_topo": "9.9"}})
    with pytest.raises(CheckpointVersionError, match=r"last: version 2 .* reads versions up to 1: install .*\(9\.9\)"):
        from_text(text, "last")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": "another"}', '{"format": "ds_topo checkpoint", "version": 1}']
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(DamagedCheckpointError, match="last: "):
        from_text(text, "last")


def test_missing_entry_is_refused(tmp_path: Path) -> None:
    manifest = Manifest("a", 0, "", LAYOUT, (), ())
    content = json.loads(to_text(manifest))
    del content["layout"]["world_size"]
    with pytest.raises(DamagedCheckpointError):
        from_text(json.dumps(content), "a")


def test_reading_imports_neither_torch_nor_pickle() -> None:
    code = (
        "import sys, ds_topo.checkpoint.folder, ds_topo.checkpoint.manifest\n"
        "assert 'pickle' not in sys.modules\n"
        "import ds_topo.cli\n"
        "print([name for name in ('torch', 'deepspeed', 'numpy') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (result.stdout.strip(), result.stderr) == ("[]", "")
