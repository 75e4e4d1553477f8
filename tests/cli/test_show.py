"""``ds-topo show`` prints layouts in terminals of any width, draws them, and refuses malformed arguments."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ds_topo import ProcessTopology
from ds_topo.cli import main
from ds_topo.cli.show_report import LayoutView, draw
from ds_topo.launch.hosts import Host, HostMap, Hosts

SEED = {
    *(f"group pipe, ranks: [{rank}, {rank + 8}]" for rank in range(8)),
    *(f"group tensor, ranks: [{rank}, {rank + 4}]" for first in (0, 8) for rank in range(first, first + 4)),
    *(f"group data, ranks: [{rank}, {rank + 1}, {rank + 2}, {rank + 3}]" for rank in (0, 4, 8, 12)),
    *(f"group model, ranks: [{rank}, {rank + 4}, {rank + 8}, {rank + 12}]" for rank in range(4)),
}
"""The groups that TorchDistPackage's README prints for this layout."""


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["show", *arguments]) == 0
    return capsys.readouterr().out


def fail(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["show", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)


def test_groups_match_those_of_torchdistpackage(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(capsys, "pipe=2,tensor=2,data=4", "--groups").splitlines()
    printed = [line for line in lines if line.startswith("group ") and "ranks: [" in line]
    assert len(printed) == len(SEED) == 24
    assert set(printed) == SEED


def test_hosts_slots_and_coordinates_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        line.rstrip() for line in run(capsys, "pipe=2,data=2,model=2", "--hosts", "2", "--slots", "4").splitlines()
    ]
    assert lines[0] == "pipe=2,data=2,model=2: 8 ranks on 2 hosts (4 slots each)"
    assert "host0  0 0,0,0  1 0,0,1  2 0,1,0  3 0,1,1" in lines
    assert "host1  4 1,0,0  5 1,0,1  6 1,1,0  7 1,1,1" in lines
    cells = {line.split()[0]: line.split()[1:] for line in lines if re.match(r"(pipe|data|model) +\d", line)}
    assert cells["pipe"] == ["4", "2", "2", "4", "of", "4", "4", "of", "4"]
    assert cells["data"] == ["4", "2", "1", "none", "none"]


@pytest.mark.parametrize(
    ("spec", "sums", "exchanges"), [("data=2,shard=4", "1", "0"), ("shard=2,data=4", "0", "2"), ("shard=8", "0", "0.5")]
)
def test_bytes_of_zero_across_hosts_are_printed(
    capsys: pytest.CaptureFixture[str], spec: str, sums: str, exchanges: str
) -> None:
    out = " ".join(run(capsys, spec, "--hosts", "2", "--slots", "4").split())
    along = "no axis" if spec == "shard=8" else "data"
    assert f"a host sends {sums} P along {along} in each step" in out
    assert f"and {exchanges} P along shard in each reduction or gathering" in out


def test_a_hostfile_is_filtered(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a slots=2\nb slots=4  # the big one\n")
    out = run(capsys, "data=-1", "--hostfile", str(hostfile), "--include", "b:1,3@a")
    assert out.startswith("data=4: 4 ranks on 2 hosts (2 slots each)")
    assert run(capsys, "data=-1", "--hostfile", str(hostfile), "--exclude", "a:0").startswith(
        "data=5: 5 ranks on 2 hosts"
    )
    assert run(capsys, "data=-1", "-H", str(hostfile), "--num-nodes", "1").startswith("data=2: 2 ranks on 1 host (")


def test_hosts_of_a_slurm_job_are_used(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "not inside a Slurm job" in fail(capsys, "data=-1", "--slurm")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    assert "the Slurm job has no tasks" in fail(capsys, "data=-1", "--slurm")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "2,1")
    monkeypatch.setenv("SLURM_DISTRIBUTION", "cyclic")
    content = json.loads(run(capsys, "data=-1", "--slurm", "--json"))
    assert [entry["host"] for entry in content["ranks"]] == ["n1", "n2", "n1"]


def test_a_topology_is_read_from_a_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "ds_config.json"
    for section in ("data=2,pipe=2", {"data": 2, "pipe": 2}):
        config.write_text(json.dumps({"train_batch_size": 8, "topology": section}))
        assert run(capsys, str(config)).startswith("data=2,pipe=2: 4 ranks")


def test_one_rank_is_shown_with_its_groups_and_neighbors(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "pipe=2,data=2,model=2", "--hosts", "2", "--slots", "4", "--rank", "5")
    assert out.startswith("rank 5: pipe=1, data=0, model=1 on host1, slot 1\n")
    assert re.search(r"pipe x model +\[0, 1, 4, 5\] +host0, host1 +3", out)
    assert "along pipe: previous rank 1, next rank 1" in out
    assert "It creates 4 process groups besides the world's: pipe, data, model, pipe x model." in out
    # the only axis spans the whole world
    assert "It creates 0 process groups besides the world's." in run(capsys, "data=4", "--rank", "1")


def test_replicas_are_shown_with_their_ranks_and_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(capsys, "data=2,shard=2,model=2", "--replicas", "data", "--hosts", "2", "--slots", "4").splitlines()
    assert [line.split() for line in lines[2:]] == [
        ["0", "[0,", "1,", "2,", "3]", "host0"],
        ["1", "[4,", "5,", "6,", "7]", "host1"],
    ]
    assert lines[0] == "2 replicas of 4 ranks, each a job with 'shard=2,model=2'"


def test_json_has_every_rank_and_group(capsys: pytest.CaptureFixture[str]) -> None:
    spec = "pipe=2,tensor=2,data=4"
    content = json.loads(run(capsys, spec, "--hosts", "n[1-2]", "--slots", "8", "--json", "--groups"))
    topology = ProcessTopology.from_spec(spec)
    assert content["world_size"] == 16
    assert [axis["name"] for axis in content["axes"]] == ["pipe", "tensor", "data"]
    for entry in content["ranks"]:
        assert topology.get_rank(**entry["coordinate"]) == entry["rank"]
        assert (entry["host"], entry["slot"]) == (f"n{entry['rank'] // 8 + 1}", entry["rank"] % 8)
    kinds = {kind["name"]: kind for kind in content["groups"]}
    assert kinds["tensor"]["ranks"] == topology.get_axis_comm_lists("model")
    assert kinds["pipe"]["pairs_across_hosts"] == 8
    assert kinds["model"]["axes"] == ["pipe", "tensor"]


def test_many_hosts_are_summarised(capsys: pytest.CaptureFixture[str]) -> None:
    spec = "pipe=16,data=128,model=8"
    lines = run(capsys, spec, "--hosts", "n[0001-2048]", "--slots", "8", "--groups").splitlines()
    assert len(lines) < 50
    assert re.match(r"n\[0129-0256\] +1 +0-127 +0-7 +128 +1024-2047", lines[4])
    assert any(line.startswith("2,048 hosts hold, each: 1 of 16 pipe, 1 of 128 data, 8 of 8 model.") for line in lines)
    other = run(capsys, "data=128,pipe=16,model=8", "--hosts", "2048", "--slots", "8").splitlines()
    assert len(other) < 25
    assert "... 122 more" in [line.strip() for line in other]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 12), st.sampled_from([40, 60, 80, 200]))
@example([2, 4], 8, 60)
def test_no_table_is_wider_than_the_terminal(degrees: list[int], slots: int, width: int) -> None:
    from io import StringIO

    from rich.console import Console

    from ds_topo.cli import show_report

    axes = ["pipe", "data", "model"][: len(degrees)]
    topology = ProcessTopology(axes, degrees)
    full, rest = divmod(topology.world_size(), slots)
    counts = [*[slots] * full, *([rest] if rest else [])]
    hosts = Hosts(tuple(Host.of(f"h{index}", count) for index, count in enumerate(counts)))
    view = LayoutView.of(topology.spec, HostMap.block(hosts))
    out = StringIO()
    console = Console(file=out, width=width, color_system=None)
    show_report.print_layout(console, view)
    table = out.getvalue().split("\n\n")[1].splitlines()[1:-1]
    if view.is_large:
        assert len(table) < show_report.MOST_ROWS + 4
        return
    assert all(len(line) <= width for line in table)
    cells = [line.split() for line in table if line.strip()]
    if " ranks " in out.getvalue().split("\n\n")[1].splitlines()[0]:  # a range for the ranks of each host
        shown = [cell for _, _, *coordinates in cells for cell in coordinates]
    else:
        words = [word for line in cells for word in line if not word.startswith("h")]
        shown = words[1::2]
        assert words[::2] == [str(rank) for rank in range(topology.world_size())]
    assert shown == [view.coordinate(rank) for rank in range(topology.world_size())]


def test_a_host_of_eight_slots_has_one_line_in_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(capsys, "pipe=4,data=4,seq=2,model=4", "--hosts", "16", "--slots", "8").splitlines()
    assert lines[2].split() == ["host", "ranks", *(word for slot in range(8) for word in ("slot", f"{slot}"))]
    assert lines[17].split() == ["host14", "112-119", *(f"3,2,{seq},{model}" for seq in (0, 1) for model in range(4))]
    assert max(map(len, lines)) <= 80
    without_hosts = run(capsys, "pipe=2,data=4,model=2").splitlines()
    assert without_hosts[3].split() == ["0-7", *(f"0,{data},{model}" for data in range(4) for model in (0, 1))]


def test_slots_are_named_only_if_each_host_uses_its_first_ones(capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--hosts", "a,b", "--slots", "4")
    assert "slot" not in run(capsys, "data=-1", *where, "--include", "a:1,3@b:0,1").splitlines()[2]
    assert "slot 1" in run(capsys, "data=-1", *where, "--include", "a:0,1@b:0,1").splitlines()[2]


def in_terminal(*arguments: str, **variables: str) -> str:
    """Return what the command writes to a terminal of 80 columns."""
    controller, terminal = pty.openpty()
    environment = {**os.environ, "COLUMNS": "80", "TERM": "xterm-256color", **variables}
    environment = {name: value for name, value in environment.items() if value}
    command = [sys.executable, "-m", "ds_topo", "show", *arguments]
    process = subprocess.Popen(command, stdout=terminal, stderr=subprocess.PIPE, env=environment)
    os.close(terminal)
    written = b""
    while True:
        try:
            chunk = os.read(controller, 65536)
        except OSError:  # the other end is closed
            break
        if not chunk:
            break
        written += chunk
    os.close(controller)
    assert (process.communicate(timeout=60)[1], process.returncode) == (b"", 0)
    return written.decode()


def test_colours_are_used_in_terminals_unless_disabled(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("pipe=2,data=2", "--hosts", "2", "--slots", "2")
    colourful = in_terminal(*arguments, NO_COLOR="")
    assert "\x1b[36m0 0,0" in colourful  # stage 0
    assert "\x1b[35m2 1,0" in colourful  # stage 1
    plain = in_terminal(*arguments, NO_COLOR="1")
    assert "\x1b" not in plain, "NO_COLOR also disables bold"
    piped = run(capsys, *arguments)
    assert "\x1b" not in piped
    without_codes = [re.sub(r"\x1b\[[0-9;]*m", "", text).replace("\r", "") for text in (colourful, plain)]
    assert without_codes == [piped.replace("pipe,data.", "pipe,data; a colour for each pipe."), piped]


@pytest.mark.thorough
def test_a_closed_pipe_causes_no_error(tmp_path: Path) -> None:
    picture = tmp_path / "layout.png"
    command = f"{sys.executable} -m ds_topo show data=64,pipe=2 --groups --png {picture} | head -1"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert result.stdout.startswith("data=64,pipe=2: 128 ranks")
    assert result.stderr == f"picture: {picture}\n"
    assert picture.exists()


def test_show_does_not_import_torch() -> None:
    code = (
        "import sys; from ds_topo.cli import main\n"
        "main(['show', 'pipe=2,data=-1', '--hosts', '2', '--slots', '4', '--groups'])\n"
        "main(['show', 'pipe=2,data=-1', '--hosts', '2', '--slots', '4', '--json'])\n"
        "sys.exit([name for name in ('torch', 'deepspeed', 'numpy', 'matplotlib') if name in sys.modules] or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")


def test_help_does_not_import_heavy_packages() -> None:
    code = (
        "import sys; from ds_topo.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "sys.exit([name for name in ('torch', 'deepspeed', 'numpy', 'rich') if name in sys.modules] or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
    assert "show" in result.stdout


# -- pictures ----------------------------------------------------------------------------------------------------------


def test_pictures_are_written_and_reproducible(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    svg, png = tmp_path / "a.svg", tmp_path / "a.png"
    where = ("--hosts", "2", "--slots", "4")
    run(capsys, "pipe=2,data=4", *where, "--svg", str(svg), "--png", str(png), "--links", "pipe")
    assert png.read_bytes().startswith(b"\x89PNG")
    words = "".join(ElementTree.parse(svg).getroot().itertext())
    for text in ("pipe=2,data=4 on 2 hosts", "host0", "host1", "1,3", "lines: pipe groups"):
        assert text in words
    again = tmp_path / "b.svg"
    run(capsys, "pipe=2,data=4", *where, "--svg", str(again), "--links", "pipe")
    assert again.read_bytes() == svg.read_bytes()


@pytest.mark.parametrize(
    ("spec", "hosts", "slots", "axis", "inside", "across"),
    [
        ("pipe=2,data=4", 2, 4, "pipe", 0, 4),
        ("pipe=2,data=4", 2, 4, "data", 6, 0),
        ("data=4,pipe=2", 2, 4, "data", 4, 2),
        # with many ranks, only rank 0's group
        ("pipe=4,data=128", 64, 8, "pipe", 0, 3),
    ],
)
def test_links_of_an_axis_are_drawn(spec: str, hosts: int, slots: int, axis: str, inside: int, across: int) -> None:
    from matplotlib.collections import LineCollection

    view = LayoutView.of(spec, HostMap.block(Hosts.uniform(hosts, slots)))
    [plot] = draw(view, axis).axes
    drawn = [len(item.get_paths()) for item in plot.collections if isinstance(item, LineCollection)]
    assert drawn == [inside, across]


def test_ranks_are_coloured_by_stage() -> None:
    from matplotlib.collections import PolyCollection

    [plot] = draw(LayoutView.of("data=2,pipe=2", None), "pipe").axes
    boxes = [item for item in plot.collections if isinstance(item, PolyCollection)][-1]
    colors: Any = boxes.get_facecolors()
    assert [tuple(color) for color in colors[:2]] == [tuple(color) for color in colors[2:]]
    assert tuple(colors[0]) != tuple(colors[1])


# -- refused arguments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pipe=2,pipe=2"], "axis 'pipe' is given twice"),
        (["pipe=2,data=-1"], "pipe=2,data=-1: one degree is -1, what is left of the slots: give --hostfile FILE"),
        (["pipe=2,data=8", "--hosts", "2", "--slots", "4"], "Nearest that does: 'pipe=2,data=4'"),
        (["data=2", "--hosts", "2"], "--hosts 2 needs --slots M"),
        (["data=2", "--slots", "2"], "--slots needs hosts"),
        (["data=2", "--include", "a"], "--include needs hosts"),
        (["data=2", "--hosts", "1", "--slots", "2", "--slurm"], "--hosts and --slurm both say"),
        (["data=2", "--hosts", "n[1-", "--slots", "2"], "expected names and bracketed ranges"),
        (["data=2", "--hosts", "n1,n1", "--slots", "1"], "host 'n1' is named twice"),
        (["data=2", "--hosts", "0", "--slots", "1"], "both must be >= 1"),
        (["data=4", "--hosts", "2", "--slots", "2", "--include", "host0", "--exclude", "host1"], "give one of them"),
        (["data=4", "--hosts", "2", "--slots", "2", "--include", "host0", "--num-nodes", "1"], "do not go with"),
        (["data=4", "--hosts", "2", "--slots", "2", "--include", "host7"], "host 'host7' is not among"),
        (["data=2", "--hostfile", "/nowhere/hosts"], "hostfile '/nowhere/hosts' cannot be read"),
        (["data=2", "--rank", "2"], "rank 2 is out of range"),
        (["pip=2,data=2"], "axis 'pip' has no meaning here: did you mean 'pipe'?"),
        (["data=2", "--links", "expert", "--svg", "a.svg"], "axis 'expert' is not in the topology"),
        (["data=2", "--links", "pp", "--svg", "a.svg"], "axis 'pp' is not in the topology"),
        (["data=2", "--links", "data"], "--links has no effect: it is for a picture: give --svg FILE or --png FILE"),
        (["data=2", "--png", "a.svg"], "--png 'a.svg': give a file name that ends in .png"),
        (["data=2", "--svg", "a"], "--svg 'a': give a file name that ends in .svg"),
        (["data=2", "--rank", "0", "--json"], "--rank shows one rank, --json all ranks: give one of them"),
        (["data=2", "--rank", "0", "--groups"], "--rank shows one rank, --groups all ranks"),
        (["data=2", "--hosts", "NODE1,node1", "--slots", "1"], "'NODE1' is named twice, as 'node1' too (capitals do"),
        (["data=-1", "--hosts", "1000000", "--slots", "8"], "8,000,000 ranks are more than the 1,048,576 that can"),
        (["data=-1", "--hosts", "n[1-999999]", "--slots", "8"], "7,999,992 ranks are more than the 1,048,576"),
        ([f"data={2**31 - 1},pipe={2**31 - 1}"], "ranks are more than the 1,048,576 that can be listed"),
        (["+tp=2,data=2"], "extra axis 'model': it means slices of every layer"),
        (["data=2", "--grups"], "'--grups' is not an argument of this command: did you mean --groups?"),
        (["data=2", "--nodes", "2"], "did you mean --hosts?"),
        (["data=2,shard=2", "--replicas", "shard"], "groups along data join ranks of several replicas, which cannot"),
        (["data=2", "--replicas", "shard"], "--replicas 'shard' is no axis of data=2: choose 'data'"),
        (["data=2", "--replicas", "data", "--json"], "--replicas shows replicas, --json all ranks"),
        (["data=2", "--png", "/nowhere/a.png"], "picture '/nowhere/a.png' cannot be written"),
        (["data=2", "--replicas", "data", "--rank", "0"], "--rank and --replicas both say what to show"),
        (["nowhere.json"], "config 'nowhere.json' cannot be read"),
    ],
)
def test_malformed_arguments_raise(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert message in fail(capsys, *arguments)


def test_pictures_need_matplotlib(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install matplotlib" in fail(capsys, "data=2", "--png", "a.png")
