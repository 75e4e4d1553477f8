"""Make small random changes to source files, one at a time, and tell which of them the tests do not notice.

::

    python tests/mutations.py ds_topo/zero/partitions.py ds_topo/reducer --number 20 --seed 1
    python tests/mutations.py ds_topo/zero/partitions.py --line 376      # every change of one line

A change turns a comparison, exchanges an operator, negates a condition, or adds one to a number. Each is made in a copy
of the working tree, in which the tests of that file run (``TESTS``, or those of the same name): first those of one
process, and if they pass those of several ranks. Changes of messages, of annotations and of constants of a module are
left out, because no test should depend on them.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).resolve().parent.parent
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
MESSAGES = {"warn", "listed", "print", "write"}
"""Functions whose arguments are texts for people."""
TESTS = {
    "checkpoint/engine_facts": "checkpoint/test_saving.py checkpoint/test_loading.py",
    "checkpoint/engine_state": "checkpoint/test_torch.py checkpoint/test_optimizer_groups.py",
    "checkpoint/manifest": "checkpoint/test_readable_layouts.py checkpoint/test_manifest.py",
    "checkpoint/shards": "checkpoint/test_parts_of_tensors.py checkpoint/test_converting_values.py",
    "checkpoint/torch_format": "checkpoint/test_torch.py",
    "engine/checks": "engine/test_options.py engine/test_use.py mistakes",
    "engine/experts": "engine/test_experts_of_several_engines.py engine/test_moe.py",
    "engine/optimizer_gradients": "engine/test_zero_partitions.py engine/test_irregular_steps.py",
    "engine/parameter_gathers": "engine/test_shares.py",
    "engine/start": "engine/test_use.py engine/test_grid.py",
    "process_groups/process_grid": "process_groups/test_creation.py engine/test_grid.py",
    "reducer/options": "reducer/test_mistakes.py reducer/test_buckets.py",
    "reducer/buckets": "reducer/test_buckets.py reducer/test_gradients.py reducer/test_interactions.py",
    "reducer/parameters": "reducer/test_buckets.py reducer/test_parameters.py reducer/test_interactions.py",
    "reducer/reducer": "reducer/test_gradients.py reducer/test_parameters.py reducer/test_mistakes.py",
    "zero/partitions": "zero/test_partitions.py engine/test_zero_partitions.py",
    "zero/arrivals": "engine/test_arriving_parameters.py",
}
"""The test files of source files of other names; those that fail soonest come first."""


@dataclass(frozen=True)
class Change:
    """One small change: new text for a part of a file."""

    file: Path
    line: int
    kind: str
    start: int
    end: int
    text: str

    def applied(self) -> str:
        """Return the source with the change."""
        source = self.file.read_bytes()
        return (source[: self.start] + self.text.encode() + source[self.end :]).decode()

    def difference(self) -> str:
        """Return the changed line before and after."""
        before = self.file.read_text().splitlines()[self.line - 1].strip()
        changed = self.applied().splitlines()[self.line - 1].strip()
        return f"    - {before}\n    + {changed}"


def changes_of(file: Path) -> Iterator[Change]:
    """Yield every change of a source file."""
    source = file.read_text()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    for node, kind, new in _changed_nodes(ast.parse(source)):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        yield Change(
            file, node.lineno, kind, start, end, f"({ast.unparse(new)})" if kind != "constant" else ast.unparse(new)
        )


def _changed_nodes(tree: ast.AST) -> Iterator[tuple[ast.expr, str, ast.expr]]:
    for node in _code(tree, is_module=True):
        if isinstance(node, ast.Compare):
            for place, operator in enumerate(node.ops):
                operators = [*node.ops]
                operators[place] = COMPARISONS[type(operator)]()
                yield node, "comparison", ast.Compare(node.left, operators, node.comparators)
        elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS and not _is_text(node):
            yield node, "operator", ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
        elif isinstance(node, ast.BoolOp):
            other = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
            yield node, "and/or", ast.BoolOp(other, node.values)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield node, "negation", node.operand
        elif isinstance(node, (ast.If, ast.While, ast.IfExp)) and not isinstance(node.test, (ast.Compare, ast.UnaryOp)):
            yield node.test, "condition", ast.UnaryOp(ast.Not(), node.test)
        elif isinstance(node, ast.comprehension):
            for test in node.ifs:
                if not isinstance(test, (ast.Compare, ast.UnaryOp)):
                    yield test, "condition", ast.UnaryOp(ast.Not(), test)
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield node, "constant", ast.Constant(not node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            yield node, "constant", ast.Constant(node.value + 1)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
            yield node.func, "constant", ast.Name(CALLS[node.func.id])


def _code(node: ast.AST, is_module: bool = False) -> Iterator[ast.AST]:
    """Yield the nodes below one that are neither annotations nor messages nor constants of a module."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases"):
            continue
        for child in value if isinstance(value, list) else [value]:
            is_constant = is_module and isinstance(child, (ast.Assign, ast.AnnAssign))
            if isinstance(child, ast.AST) and not is_constant and not _is_for_people(child):
                yield child
                yield from _code(child)


def _is_for_people(node: ast.AST) -> bool:
    called = node.func if isinstance(node, ast.Call) else None
    name = called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else ""
    is_text = isinstance(node, ast.FunctionDef) and node.name in ("__repr__", "__str__")
    is_text = is_text or (isinstance(node, ast.keyword) and node.arg == "usedforsecurity")
    return is_text or isinstance(node, ast.JoinedStr) or name in MESSAGES


def _is_text(node: ast.BinOp) -> bool:
    sides = (node.left, node.right)
    return any(isinstance(side, ast.JoinedStr) or isinstance(getattr(side, "value", None), str) for side in sides)


def tests_of(file: Path) -> list[str]:
    """Return the source file itself, for its doctests, and its test files, the most specific one first."""
    name = file.relative_to(ROOT / "ds_topo").with_suffix("")
    listed = TESTS.get(str(name), "").split()
    same = [] if listed else sorted((ROOT / "tests" / name.parent).glob(f"test_{name.name}*.py"))
    found = [f"tests/{test}" for test in listed] or [str(test.relative_to(ROOT)) for test in same]
    if not found:
        raise SystemExit(f"{file}: no test file has its name; add a row to TESTS in {Path(__file__).name}")
    return [str(file.relative_to(ROOT)), *found]


@dataclass(frozen=True)
class Selection:
    """A plugin of pytest that selects the tests of one process, or those of several ranks."""

    on_ranks: bool

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Select the tests."""
        items[:] = [
            item
            for item in items
            if self.on_ranks == any("world" in name for name in getattr(item, "fixturenames", ()))
        ]


class Tree:
    """A copy of the working tree, in which one file at a time is changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        files = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, text=True)
        for name in filter(None, files.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)

    def run(self, tests: list[str], deadline: float, *, on_ranks: bool) -> tuple[str, float]:
        """Run these tests, either those of one process or those of several ranks.

        Return ``passed``, the name of the first test that fails, or ``timeout``; and seconds.

        They run in a fork, because importing torch and DeepSpeed takes longer than many tests.
        """
        begin = time.monotonic()
        with tempfile.TemporaryFile("w+") as output:
            child = os.fork()
            if child == 0:
                self._become_pytest(tests, output.fileno(), on_ranks)
            status = None
            while status is None and time.monotonic() - begin < deadline:
                found, ended = os.waitpid(child, os.WNOHANG)
                status = os.waitstatus_to_exitcode(ended) if found else time.sleep(0.1)
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # its ranks, too
            if status is None:
                os.waitpid(child, 0)
                return "timeout", time.monotonic() - begin
            output.seek(0)
            text = output.read()
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
        outcome = (
            "passed"
            if status in (0, pytest.ExitCode.NO_TESTS_COLLECTED)
            else failed[1]
            if failed
            else f"pytest ended with {status}"
        )
        return outcome, time.monotonic() - begin

    def _become_pytest(self, tests: list[str], output: int, on_ranks: bool) -> NoReturn:
        try:
            os.setsid()
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.chdir(self.folder)
            os.environ.update(PYTHONPATH=str(self.folder), PYTHONDONTWRITEBYTECODE="1")
            sys.path[0], sys.dont_write_bytecode = str(self.folder), True
            options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--tb=line", *tests]
            status = pytest.main(options, plugins=[Selection(on_ranks)])
            sys.stdout.flush()
            os._exit(status)
        finally:
            os._exit(70)

    def outcome_of(self, change: Change, tests: list[str], deadline: float) -> str:
        """Make the change, run the tests, and undo the change; print and return the outcome."""
        name = change.file.relative_to(ROOT)
        (self.folder / name).write_text(change.applied())
        outcome, total = "passed", 0.0
        for on_ranks in (False, True):
            if outcome == "passed":
                outcome, seconds = self.run(tests, deadline, on_ranks=on_ranks)
                total += seconds
        shutil.copy2(change.file, self.folder / name)
        verdict = {"passed": "NOT CAUGHT", "timeout": "timeout"}.get(outcome, f"caught by {outcome}")
        print(f"{name}:{change.line} ({change.kind}, {total:.0f} s): {verdict}\n{change.difference()}", flush=True)
        return outcome


def sources(paths: Iterable[Path]) -> list[Path]:
    """Return the files of these paths, of which some are folders."""
    given = [path.resolve() for path in paths]
    return [file for path in given for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]


def main() -> int:
    """Run the program; return 1 if a change was not caught."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("paths", nargs="+", type=Path, help="source files, or folders of them")
    parser.add_argument("--number", type=int, default=20, help="how many changes (20)")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--line", type=int, help="all changes of this line instead of random ones")
    parser.add_argument("--tests", nargs="+", help="test files in place of those of each file")
    parser.add_argument("--deadline", type=float, default=120, help="seconds for the tests of one change (120)")
    options = parser.parse_args()
    import deepspeed  # noqa: F401  before the forks

    possible = [change for file in sources(options.paths) for change in changes_of(file)]
    if options.line is not None:
        chosen = [change for change in possible if change.line == options.line]
    else:
        chosen = random.Random(options.seed).sample(possible, min(options.number, len(possible)))
    missed, late = [], []
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        tree = Tree(Path(folder))
        for change in chosen:
            outcome = tree.outcome_of(change, options.tests or tests_of(change.file), options.deadline)
            missed += [change] if outcome == "passed" else []
            late += [change] if outcome == "timeout" else []
    caught = len(chosen) - len(missed) - len(late)
    print(f"\n{caught} of {len(chosen)} changes were caught, {len(late)} timed out ({len(possible)} are possible)")
    for change in missed:
        print(f"NOT CAUGHT: {change.file.relative_to(ROOT)}:{change.line}\n{change.difference()}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
