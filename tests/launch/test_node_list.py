"""Slurm's compact lists are expanded as ``scontrol`` does and folded back; malformed lists raise."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_topo.errors import HostError, fold_node_list
from ds_topo.launch.hosts import expand_counts, expand_node_list

names = st.from_regex(r"[a-z][a-z-]{0,3}[0-9]{0,4}(-[a-z]{1,2})?", fullmatch=True)
numbered = st.tuples(st.sampled_from(["n", "gpu-", "rack1-n"]), st.integers(0, 120), st.integers(0, 4)).map(
    lambda parts: f"{parts[0]}{parts[1]:0{parts[2]}d}"
)


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("n[01-03,7],gpu-a", "n01 n02 n03 n7 gpu-a"),
        ("rack[0-1]-n[8-10]", "rack0-n8 rack0-n9 rack0-n10 rack1-n8 rack1-n9 rack1-n10"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("n[9-011]", "n9 n10 n11"),
        ("a", "a"),
        ("n[5]", "n5"),
        ("x,n[1,3,5-6]", "x n1 n3 n5 n6"),
    ],
)
def test_a_list_is_expanded_as_scontrol_does(text: str, expanded: str, tmp_path: Path) -> None:
    assert expand_node_list(text) == expanded.split()
    scontrol = shutil.which("scontrol")
    if scontrol is None:
        pytest.skip("scontrol is not installed")
    (tmp_path / "slurm.conf").write_text("ClusterName=any\nSlurmctldHost=localhost\n")
    environment = {**os.environ, "SLURM_CONF": str(tmp_path / "slurm.conf")}
    command = [scontrol, "show", "hostnames", text]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=30)
    assert said.stdout.split() == expanded.split()


@settings(deadline=None)
@given(st.lists(names | numbered, min_size=1, max_size=40, unique=True))
def test_expanding_inverts_folding(hosts: list[str]) -> None:
    assert expand_node_list(fold_node_list(hosts)) == hosts


@settings(deadline=None)
@given(st.sampled_from(["n", "gpu-"]), st.integers(0, 2000), st.integers(2, 300), st.integers(0, 5))
def test_a_range_folds_to_one_item(prefix: str, first: int, count: int, width: int) -> None:
    hosts = [f"{prefix}{number:0{width}d}" for number in range(first, first + count)]
    assert fold_node_list(hosts).count("[") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n[1-2", r"at 'n\[1-2': expected names"),
        ("n1]", "expected names"),
        ("n[[1]]", "expected names"),
        ("n[]", "expected numbers and rising ranges"),
        ("n[a-b,2]", r"at \[a-b,2\]: expected numbers and rising ranges"),
        ("n[3-1]", "expected numbers and rising ranges"),
        ("n[1;2]", r"at \[1;2\]: expected numbers and rising ranges"),
        ("n1,,n2", "expected names"),
        ("", "expected names"),
        ("n 1", "expected names"),
        ("n[1-9999999]", "more than 1000000 names"),
        ("a[0-999]b[0-999]c[0-9]", "more than 1000000 names"),
    ],
)
def test_a_malformed_list_is_refused(text: str, message: str) -> None:
    with pytest.raises(HostError, match=message):
        expand_node_list(text)


@settings(deadline=None)
@given(st.text(alphabet=st.sampled_from("n0129[]-,x \u0663"), max_size=16) | st.text(max_size=12))
def test_any_list_raises_only_documented_errors(text: str) -> None:
    with suppress(HostError):
        assert expand_node_list(text)


@settings(deadline=None)
@given(st.text(alphabet=st.sampled_from("12(x), "), max_size=12))
def test_any_counts_raise_only_documented_errors(text: str) -> None:
    with suppress(HostError):
        assert expand_counts(text)
