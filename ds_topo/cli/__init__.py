"""Run the command line, ``ds-topo``: one module per command, each with its texts, ``add_options`` and ``run``.

``ds-topo --help`` imports every command's module, so torch, rich and other heavy packages are imported inside ``run``.
Options that cannot be used raise an error of ``ds_topo.errors``, which ``main`` prints.
"""

from __future__ import annotations

import argparse
import difflib
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import NoReturn

from ds_topo.cli import (
    check_command,
    checkpoint_command,
    examples_command,
    export_command,
    plan_command,
    show_command,
    verify_command,
)
from ds_topo.errors import CheckpointError, DisagreementError, LaunchError, TopologyError, VerificationError

_COMMANDS: dict[str, ModuleType] = {
    "check": check_command,
    "checkpoint": checkpoint_command,
    "examples": examples_command,
    "export": export_command,
    "plan": plan_command,
    "show": show_command,
    "verify": verify_command,
}
_OF_FILES = ("FILE", "NAME|FILE", "FOLDER", "FROM", "TO", "PROGRAM")
"""The metavars of arguments that name files."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status: 0, 1 for a fault that was found, 2 for arguments that cannot be used."""
    parser, commands = parsers()
    parsed, unknown = parser.parse_known_args(arguments)
    if parsed.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        if unknown:
            raise TopologyError(_not_understood(parsed.command, unknown[0], commands[parsed.command]))
        return int(parsed.run(parsed))
    except (TopologyError, CheckpointError, LaunchError, DisagreementError, VerificationError, OSError) as error:
        print(f"ds-topo {parsed.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"ds-topo {parsed.command}: interrupted", file=sys.stderr)
        return 130


def parsers() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Return the parser of the command line, and that of each command."""
    parser = _Parser(
        prog="ds-topo",
        description="Show, check and plan layouts of distributed jobs.",
        epilog="ds-topo COMMAND --help explains a command",
    )
    parser.add_argument("--version", action="version", version=f"ds_topo {sys.modules['ds_topo'].__version__}")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # the deepspeed launcher passes it to every program
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    width = max(40, shutil.get_terminal_size().columns - 2)
    for name, command in _COMMANDS.items():
        added = subparsers.add_parser(
            name,
            help=command.SUMMARY,
            description=textwrap.fill(command.DESCRIPTION, width),
            epilog=command.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,  # examples stay as they are written
        )
        command.add_options(added)
        added.set_defaults(run=command.run)
    return parser, subparsers.choices


def command_line() -> argparse.ArgumentParser:
    """Return the parser of the command line, as ``shtab`` needs it to write the completion of a shell."""
    parser, commands = parsers()
    for action in (action for command in commands.values() for action in command._actions):
        if action.metavar in _OF_FILES:
            action.complete = {"bash": "_shtab_compgen_files", "zsh": "_files"}  # type: ignore[attr-defined]
    return parser


class _Parser(argparse.ArgumentParser):
    """A parser, also for each command, whose errors are one line as those of commands are."""

    def error(self, message: str) -> NoReturn:
        for given, better in (
            ("invalid int value:", "give a whole number, not"),
            ("invalid float value:", "give a number, not"),
        ):
            message = message.replace(given, better)
        self.exit(2, f"{self.prog}: {message}; {self.prog} --help explains every argument\n")


_OTHER_NAMES = {
    **dict.fromkeys(("--gpu", "--device", "--gpu-type"), "--accelerator"),
    **dict.fromkeys(("--nodes", "--nnodes"), "--hosts"),
    **dict.fromkeys(("--gpus", "--nproc-per-node", "--nproc_per_node", "--gpus-per-node"), "--slots"),
}
"""Names that other programs have for some of our options."""


def _not_understood(command: str, word: str, parser: argparse.ArgumentParser) -> str:
    """Return the error for a word that is no argument of the command, with the option that was probably meant."""
    options = [option for option in parser.format_help().replace(",", " ").split() if option.startswith("--")]
    name = word.partition("=")[0]
    near = difflib.get_close_matches(name, options, n=1, cutoff=0.7)
    near = [_OTHER_NAMES[name]] if _OTHER_NAMES.get(name) in options else near
    meant = f"did you mean {near[0]}? " if near else ""
    if command == "plan" and not word.startswith("-"):
        meant = f"plan searches for the best topology itself, and --compare {word} shows what that one loses; "
    return f"{word!r} is not an argument of this command: {meant}ds-topo {command} --help lists all"
