"""Every command explains its options, and refuses arguments that it would otherwise ignore."""

from __future__ import annotations

import argparse
import re
import subprocess
from pathlib import Path

import pytest

from ds_topo import __version__
from ds_topo.cli import command_line, main, parsers

COMMANDS = ["check", "checkpoint", "examples", "export", "plan", "show", "verify"]


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_explains_every_option_in_80_columns(command: str) -> None:
    parser = parsers()[1][command]
    text = parser.format_help()
    assert "`" not in text
    assert [line for line in text.splitlines() if len(line) > 80] == []
    for action in parser._actions:
        assert action.help, action.option_strings
        shown = (action.help % {**vars(action), "prog": "ds-topo"}).lower()
        if isinstance(action.default, (int, float, str)) and action.default not in (False, argparse.SUPPRESS):
            assert f"default: {action.default:g}" in shown, action.option_strings


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("show", ["--rank", "--links", "--include", "--exclude", "--num-nodes", "--num-gpus"]),
        ("check", ["--backend", "--timeout", "--seconds", "--slow", "--expect", "--clock"]),
        ("export", ["--tag", "--largest"]),
        ("plan", ["--kv-heads", "--ffn", "--sequence", "--experts", "--gated", "--memory-gb", "--link-inside-gbps"]),
        ("plan", ["--precision", "--software", "--expert-load", "--top"]),
    ],
)
def test_help_states_what_is_used_without_an_option(command: str, options: list[str]) -> None:
    helps = {name: action.help or "" for action in parsers()[1][command]._actions for name in action.option_strings}
    assert [option for option in options if "default: " not in helps[option]] == []


def test_config_has_one_meaning() -> None:
    for parser in parsers()[1].values():
        assert "--config" not in parser.format_help()


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"ds_topo {__version__}\n"


def test_help_is_printed_without_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert re.search(r"usage: ds-topo .*\n  COMMAND", capsys.readouterr().err, re.DOTALL)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sho"], "ds-topo: argument COMMAND: invalid choice: 'sho' (choose from "),
        (["show"], "ds-topo show: the following arguments are required: SPEC; ds-topo show --help explains"),
        (["show", "data=2", "--rank", "five"], "ds-topo show: argument --rank: give a whole number, not 'five'; "),
        (["check", "data=2", "--slow", "50%"], "ds-topo check: argument --slow: give a number, not '50%'; "),
        (["plan", "--zero", "4"], "ds-topo plan: argument --zero: invalid choice: 4 (choose from "),
    ],
)
def test_malformed_arguments_have_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--slow", "5"], "--slow 5.0: give a share of the median"),
        *(
            ([f"--{name}", value], f"--{name} {value}: give seconds above 0")
            for name in ("timeout", "seconds", "clock")
            for value in ("0.0", "nan", "inf")
        ),
        (["--expect", "fast"], "expected a number with a unit"),
    ],
)
def test_check_refuses_options_before_it_joins(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "data=2", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["new.npz"], "give a file that ends in .safetensors, .pt, .pth or .bin, or a folder"),
        (["new.pt", "--largest", "5"], "--largest has no effect: it needs a folder as TO"),
        (["new.pt", "--tags", "x"], "'--tags' is not an argument of this command: did you mean"),
    ],
)
def test_export_refuses_arguments_before_it_reads(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(tmp_path / "absent"), str(tmp_path / options[0]), *options[1:]]) == 2
    assert message in capsys.readouterr().err


def test_plan_names_the_option_for_a_spec(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "data=2,model=2"]) == 2
    said = capsys.readouterr().err
    assert "'data=2,model=2' is not an argument of this command: plan searches for the best topology itself" in said
    assert "--compare data=2,model=2" in said


def test_shells_complete_commands_options_choices_and_files(tmp_path: Path) -> None:
    shtab = pytest.importorskip("shtab")
    script = tmp_path / "ds-topo"
    script.write_text(shtab.complete(command_line(), shell="bash"))
    (tmp_path / "links.json").touch()
    attempts = {
        "ds-topo ch": ["check", "checkpoint"],
        "ds-topo plan --ze": ["--zero"],
        "ds-topo plan --zero ": ["0", "1", "2", "3"],
        "ds-topo plan --machine li": ["links.json"],
    }
    for line, found in attempts.items():
        words = line.split(" ")
        program = f"""
source {script}
COMP_WORDS=({" ".join(word or "''" for word in words)}) COMP_CWORD={len(words) - 1}
_shtab_ds_topo ds-topo "{words[-1]}" "{words[-2]}"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
        result = subprocess.run(["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert result.stdout.split() == found, (line, result.stderr)
    assert shtab.complete(command_line(), shell="zsh").startswith("#compdef ds-topo")
