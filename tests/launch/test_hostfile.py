"""Hostfiles that DeepSpeed accepts are read as DeepSpeed reads them; others raise an error that names the line."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from deepspeed.launcher import runner
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_topo.errors import HostError
from ds_topo.launch.hosts import Host, HostMap, Hosts, parse_hostfile, read_hostfile

names = st.from_regex(r"[a-z][a-z0-9.-]{0,8}", fullmatch=True)
pools = st.dictionaries(names, st.integers(1, 9), min_size=1, max_size=6)
newest_launcher = pytest.mark.skipif(
    not hasattr(runner, "apply_num_nodes_and_gpus"), reason="the launcher of this DeepSpeed chooses other hosts"
)


def _hosts_of(pool: dict[str, int]) -> Hosts:
    return Hosts(tuple(Host.of(name, slots) for name, slots in pool.items()))


def _as_deepspeed(hosts: Hosts) -> dict[str, list[int]]:
    return {host.name: list(host.slots) for host in hosts}


@settings(deadline=None)
@given(pools, st.data())
def test_a_hostfile_is_read_as_deepspeed_reads_it(pool: dict[str, int], data: st.DataObject) -> None:
    lines = []
    for name, slots in pool.items():
        lines += data.draw(st.lists(st.sampled_from(["", "   ", "# comment", "  # another slots=3"]), max_size=2))
        space = data.draw(st.sampled_from([" ", "\t", "   "]))
        lines.append(f"{data.draw(st.sampled_from(['', ' ']))}{name}{space}slots={slots}")
    text = "\n".join(lines)
    assert _as_deepspeed(parse_hostfile(text)) == {
        name: list(range(slots)) for name, slots in runner._parse_hostfile(text.splitlines()).items()
    }


@newest_launcher
@settings(deadline=None)
@given(pools, st.data())
def test_filters_choose_the_same_as_deepspeeds(pool: dict[str, int], data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(sorted(pool)), min_size=1, unique=True))
    parts = []
    for name in chosen:
        slots = data.draw(st.lists(st.integers(0, pool[name] - 1), max_size=3))
        parts.append(f"{name}:{','.join(map(str, slots))}" if slots else name)
    text = "@".join(parts)
    included = runner.parse_inclusion_exclusion(pool, text, "")
    excluded = runner.parse_inclusion_exclusion(pool, "", text)
    hosts = _hosts_of(pool)
    assert _as_deepspeed(hosts.including(text)) == dict(included)
    if excluded:
        assert _as_deepspeed(hosts.excluding(text)) == dict(excluded)
    else:
        with pytest.raises(HostError, match="leaves no slot"):
            hosts.excluding(text)


@newest_launcher
@settings(deadline=None)
@given(pools, st.data())
def test_the_first_hosts_and_slots_are_the_same_as_deepspeeds(pool: dict[str, int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(pool)))
    slots = data.draw(st.integers(1, min(pool.values())))
    active = runner.parse_inclusion_exclusion(pool, "", "")
    assert _as_deepspeed(_hosts_of(pool).first(count, slots)) == dict(
        runner.apply_num_nodes_and_gpus(active, count, slots)
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=2\nb slots=2\na slots=4", r"line 3, 'a slots=4': host 'a' is on line 1 already"),
        ("a slots=0", r"line 1, 'a slots=0': host 'a' has no slots"),
        ("a slots=5000", "slots=5000 is more than 4096"),
        ("a", r"the number of slots is missing; expected \"a slots=N\""),
        ("a:4", r"'a:4' is in the form of other launchers; expected \"a slots=4\""),
        ("slots=4", r"expected \"NAME slots=N\""),
        ("a slots=2 slots=3", r"'slots=3' is unknown; expected \"a slots=N\""),
        ("a slots=", "slots='' is not a whole number"),
        ("a slots=two", "slots='two' is not a whole number"),
        ("a slots=-1", "slots='-1' is not a whole number"),
        ("a slots=2 gpus=4", "'gpus=4' is unknown"),
        ("a 4", "'4' is unknown"),
        ("a:22 slots=4", "no spaces, colons"),
        ("# nothing\n\n", "hostfile names no host"),
        ("", "names no host"),
    ],
)
def test_a_malformed_line_is_named(text: str, message: str) -> None:
    with pytest.raises(HostError, match=message):
        parse_hostfile(text)


def test_open_mpis_max_slots_are_ignored() -> None:
    assert parse_hostfile("a slots=2 max_slots=4\nb slots=1 max-slots=1  # small").counts == (2, 1)


@settings(deadline=None)
@given(st.text(alphabet=st.sampled_from("ab1 =#slots-\n\t:,@[]\u0660\x00"), max_size=60) | st.text(max_size=40))
def test_any_hostfile_raises_only_documented_errors(text: str) -> None:
    with suppress(HostError):
        assert all(host.slots for host in parse_hostfile(text))


@settings(deadline=None)
@given(pools, st.text(alphabet=st.sampled_from("ab1,:@ -_\u0661"), max_size=20))
def test_any_filter_raises_only_documented_errors(pool: dict[str, int], text: str) -> None:
    for choose in (_hosts_of(pool).including, _hosts_of(pool).excluding):
        with suppress(HostError):
            assert sum(choose(text).counts) <= sum(pool.values())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("c", r"host 'c' is not among \['a', 'b'\]"),
        ("a:2", r"host 'a' has no slot 2, its slots are \[0, 1\]"),
        ("a:", 'expected "NAME'),
        ("a:x", 'expected "NAME'),
        ("", "host '' is not among"),
        ("a@", "host '' is not among"),
    ],
)
def test_a_malformed_filter_is_refused(text: str, message: str) -> None:
    hosts = _hosts_of({"a": 2, "b": 2})
    for choose in (hosts.including, hosts.excluding):
        with pytest.raises(HostError, match=message):
            choose(text)


def test_more_hosts_or_slots_than_there_are_raise() -> None:
    hosts = _hosts_of({"a": 2, "b": 1})
    with pytest.raises(HostError, match="3 hosts requested, but there are 2"):
        hosts.first(3)
    with pytest.raises(HostError, match="2 slots requested, but host 'b' has 1"):
        hosts.first(slots=2)


def test_an_unreadable_hostfile_is_named(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "absent", tmp_path, tmp_path / "binary"):
        with pytest.raises(HostError, match=f"hostfile '{path}' cannot be read"):
            read_hostfile(path)
    (tmp_path / "good").write_text("a slots=2\n")
    assert read_hostfile(str(tmp_path / "good")) == Hosts((Host.of("a", 2),))


def test_uneven_slots_number_ranks_host_by_host() -> None:
    host_map = HostMap.block(parse_hostfile("a slots=1\nb slots=3\nc slots=2").including("b:0,2@a@c"))
    assert [host_map.host_of(rank).name for rank in range(host_map.size)] == ["a", "b", "b", "c", "c"]
    assert [host_map.slot_of(rank) for rank in range(host_map.size)] == [0, 0, 2, 0, 1]
    with pytest.raises(HostError, match="rank 5 is out of range: the hosts have ranks 0 to 4"):
        host_map.host_of(5)
