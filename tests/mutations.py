"""Make small random changes to source files, one at a time, and tell which of them the tests do not notice.

::

    python tests/mutations.py ds_topo/reduction/partitions.py ds_topo/reduction --number 20 --seed 1
    python tests/mutations.py ds_topo/reduction/partitions.py --line 376      # every change of one line

A change turns a comparison, exchanges an operator, negates a condition, or adds one to a number. Each is made in a
copy of the working tree, in which the tests of that file run (``TESTS``, or those of the same name): first those of
one process, then those of several ranks. If README's tests do not notice it, those of the default set run. Tests that
fail run again without a change, the first one at once and the others at the end. If one fails then, too, the program
stops: there every change would seem to be noticed. Changes of messages, of annotations and of constants of a module
are left out, because no test should depend on them.

``--reaching`` runs the default set once more, with a probe at each change that these tests did not notice, and then for
each of those changes the other tests that reached its probe.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import itertools
import multiprocessing.util
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import Phase, settings

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
IMPORTS = (
    *("torch.distributed", "torch._dynamo", "torch.distributed.tensor.debug", "torch.utils.cpp_extension"),
    *("deepspeed", "deepspeed.pipe", "deepspeed.ops.op_builder.all_ops", "deepspeed.module_inject.auto_ep_layer"),
    *("deepspeed.runtime.zero.muon.original_muon", "matplotlib.figure", "rich.progress"),
)
"""What every run of tests and every rank needs besides this project: it is imported once, before the forks."""
MESSAGES = {"warn", "listed", "print", "write", "fill"}
"""Functions whose arguments are texts for people."""
PROBE = """
import os

seen = set()


def at(number):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if test and (number, test) not in seen:
        seen.add((number, test))
        with open(__file__ + ".txt", "a") as file:
            file.write(f"{number} {test}\\n")
"""
"""The module of the probes: it writes which tests evaluate an expression. A file of the copy of the working tree."""
TESTS = {
    "checkpoint/deepspeed_reader": "checkpoint/test_table.py checkpoint/test_loading_stock_checkpoints.py "
    "checkpoint/test_converting.py checkpoint/test_damaged_files.py",
    "checkpoint/engine_facts": "engine/test_autotp.py::test_splits_of_automatic_layers_are_known "
    "checkpoint/test_saving.py checkpoint/test_loading.py checkpoint/test_plain_weights.py "
    "checkpoint/test_converting_values.py checkpoint/test_universal.py",
    "checkpoint/saving": "checkpoint/test_saving.py checkpoint/test_unusual_input.py checkpoint/test_background.py",
    "checkpoint/engine_state": "checkpoint/test_torch.py checkpoint/test_table.py",
    "checkpoint/by_name": "checkpoint/test_matrix.py checkpoint/test_converting_values.py "
    "checkpoint/test_torch.py checkpoint/test_converting_experts.py",
    "checkpoint/folder": "checkpoint/test_folder.py checkpoint/test_odd_folders.py checkpoint/test_command.py",
    "checkpoint/manifest": "checkpoint/test_readable_layouts.py checkpoint/test_manifest.py",
    "checkpoint/plain_weights": "checkpoint/test_plain_weights.py checkpoint/test_command.py "
    "checkpoint/test_loading_stock_checkpoints.py",
    "checkpoint/meeting": "checkpoint/test_saving.py checkpoint/test_loading.py checkpoint/test_background.py",
    "checkpoint/safe_reading": "checkpoint/test_unusual_input.py checkpoint/test_damaged_files.py",
    "checkpoint/saved_model": "checkpoint/test_table.py checkpoint/test_converting.py "
    "checkpoint/test_converting_experts.py checkpoint/test_padded_vocabularies.py",
    "checkpoint/table": "checkpoint/test_table.py checkpoint/test_parts_of_tensors.py",
    "checkpoint/torch_format": "checkpoint/test_torch.py checkpoint/test_converting_values.py",
    "checkpoint/stock_checkpoints": "checkpoint/test_loading_stock_checkpoints.py",
    "engine/pipelines/activation_shapes": "engine/test_activation_shapes.py engine/test_pipeline.py",
    "engine/repairs/loss_scales": "engine/test_repairs.py engine/test_loss_scales.py engine/test_idle_stages.py "
    "engine/test_norms.py",
    "engine/autoparallel": "engine/test_autotp.py engine/test_autosp.py engine/test_autoep.py",
    "engine/repairs/adagrad_groups": "engine/test_repairs.py engine/test_zero_partitions.py",
    "engine/repairs/backward_passes": "engine/test_repairs.py engine/test_accumulation.py",
    "engine/repairs/bf16_infinities": "engine/test_repairs.py engine/test_half_precision_norms.py",
    "engine/repairs/kept_modules": "engine/test_repairs.py",
    "engine/repairs/linked_states": "engine/test_repairs.py engine/test_zero_partitions.py",
    "engine/repairs/micro_batches": "engine/test_repairs.py engine/test_accumulation.py",
    "engine/repairs/pipeline_timers": "engine/test_repairs.py engine/test_idle_stages.py",
    "engine/repairs/step_of_zeros": "engine/test_repairs.py engine/test_loss_scales.py",
    "engine/repairs/unused_parameters": "engine/test_repairs.py engine/test_accumulation.py",
    "engine/pipelines/batches": "engine/test_batches.py engine/test_shares.py mistakes/test_wrong_kinds.py "
    "mistakes/test_silent_mistakes.py",
    "engine/checks": "engine/test_options.py engine/test_use.py mistakes",
    "engine/config_options": "engine/test_options.py mistakes/test_options.py",
    "engine/current_mpu": "engine/test_engine_patches.py engine/test_experts_of_several_engines.py",
    "engine/grid": "engine/test_grid.py engine/test_experts_of_several_engines.py",
    "engine/shard": "engine/test_hybrid_sharding.py checkpoint/test_converting_experts.py",
    "engine/partition_sums": "engine/test_hybrid_sharding.py engine/test_quorum.py",
    "engine/experts": "engine/test_expert_groups.py engine/test_moe_checkpoints.py "
    "engine/test_experts_of_several_engines.py engine/test_moe.py",
    "engine/norms": "engine/test_norms.py engine/test_half_precision_norms.py",
    "engine/one_layout": "engine/test_one_layout.py engine/test_use.py mistakes",
    "engine/optimizer_gradients": "engine/test_zero_partitions.py engine/test_irregular_steps.py",
    "engine/optimizer_norms": "engine/test_norms.py engine/test_half_precision_norms.py engine/test_accumulation.py",
    "engine/on_grid": "engine/test_step_order.py engine/test_engine_patches.py engine/test_golden_trace.py "
    "engine/test_pipeline.py::test_pipeline_logs_and_returns_the_norm_of_all_stages",
    "engine/parameter_gathers": "engine/test_zero_partitions.py",
    "engine/late_parameters": "engine/test_arriving_parameters.py",
    "engine/partitioned_optimizers": "engine/test_zero_partitions.py",
    "engine/pipelines/pipeline": "mistakes/test_wrong_kinds.py engine/test_pipeline.py engine/test_dualpipe.py",
    "engine/gradient_reducer": "engine/test_gradient_reducer.py mistakes/test_errors_on_every_rank.py",
    "engine/engine_driver": "engine/test_gradient_reducer.py engine/test_irregular_steps.py",
    "engine/pipelines/pipeline_driver": "engine/test_gradient_reducer.py",
    "engine/gathers": "engine/test_zero_partitions.py",
    "engine/start": "engine/test_use.py engine/test_grid.py launch/test_joining.py",
    "engine/use": "engine/test_use.py programs/test_hugging_face.py",
    "launch/council": "process_groups/test_agreement.py process_groups/test_leftovers.py",
    "process_groups/creation": "process_groups/test_creation.py process_groups/test_agreement.py",
    "process_groups/process_grid": "process_groups/test_logged_numbers.py process_groups/test_device_mesh.py "
    "engine/test_grid.py engine/test_batches.py engine/test_expert_groups.py mistakes/test_wrong_kinds.py",
    "reduction/options": "mistakes/test_options.py reduction/test_mistakes.py reduction/test_buckets.py",
    "reduction/buckets": "reduction/test_buckets.py reduction/test_gradients.py reduction",
    "reduction/parameters": "reduction/test_buckets.py reduction/test_parameters.py reduction/test_interactions.py",
    "reduction/reducer": "reduction/test_gradients.py reduction/test_parameters.py reduction "
    "engine/test_zero_partitions.py::test_detach_between_micro_batches_warns_that_gradients_are_lost",
    "reduction/exchange": "reduction/test_exchange.py engine/test_hybrid_sharding.py",
    "reduction/partitions": "reduction/test_partitions.py reduction/test_exchange.py engine/test_zero_partitions.py",
    "reduction/arrivals": "engine/test_arriving_parameters.py",
}
"""The test files of source files of other names; those that fail soonest come first."""


@dataclass(frozen=True)
class Change:
    """One small change: new text for a part of a file."""

    file: Path
    source: bytes
    line: int
    kind: str
    start: int
    end: int
    text: str

    @property
    def package(self) -> str:
        """The package of the file."""
        return str(self.file.relative_to(ROOT).parent)

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}"

    def applied(self) -> bytes:
        """Return the source with the change."""
        return self.source[: self.start] + self.text.encode() + self.source[self.end :]

    def difference(self) -> str:
        """Return the changed line before and after."""
        before = self.source.decode().splitlines()[self.line - 1].strip()
        changed = self.applied().decode().splitlines()[self.line - 1].strip()
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
        text = ast.unparse(new)
        yield Change(file, source.encode(), node.lineno, kind, start, end, text if kind == "constant" else f"({text})")


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
    is_text = is_text or (isinstance(node, ast.keyword) and node.arg in ("usedforsecurity", "strict"))
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


class OneProcessFirst:
    """A plugin of pytest that moves the tests of several ranks to the end."""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Sort the tests."""
        items.sort(key=lambda item: any("world" in name for name in getattr(item, "fixturenames", ())))


class Tree:
    """A copy of the working tree, in which one file at a time is changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._failed: dict[str, None] = {}
        """The tests that noticed a change, and have not run without it."""
        self._is_confirmed = False
        self._times = itertools.count(10**9, 10)
        files = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, text=True)
        for name in filter(None, files.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)

    def write(self, file: Path, source: bytes) -> None:
        """Write a file with a time of its own, by which Python recognizes bytecode of another source."""
        (self.folder / file.relative_to(ROOT)).write_bytes(source)
        os.utime(self.folder / file.relative_to(ROOT), (time := next(self._times), time))

    def run(self, tests: list[str], deadline: float) -> tuple[str, float]:
        """Run these tests, those of one process first.

        Return ``passed``, pytest's line on the first test that fails, or ``timeout``; and seconds.

        They run in a fork, because importing torch and DeepSpeed takes longer than many tests.
        """
        begin = time.monotonic()
        with tempfile.TemporaryFile("w+") as output:
            child = os.fork()
            if child == 0:
                self._become_pytest(tests, output.fileno())
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
        if status == pytest.ExitCode.USAGE_ERROR:
            raise SystemExit(f"pytest cannot run {' '.join(tests)}: {text}")
        failed = re.search(r"^(?:FAILED|ERROR) (.+)$", text, re.MULTILINE)
        outcome = (
            "passed"
            if status in (0, pytest.ExitCode.NO_TESTS_COLLECTED)
            else failed[1] + (" (late)" if "missed the deadline" in text else "")
            if failed
            else f"pytest ended with {status}"
        )
        return outcome, time.monotonic() - begin

    def _become_pytest(self, tests: list[str], output: int) -> NoReturn:
        try:
            os.setsid()
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.chdir(self.folder)
            os.environ["COLUMNS"] = "200"  # of the summary
            os.environ["PYTHONPATH"] = sys.path[0] = str(self.folder)
            multiprocessing.util.spawnv_passfds = _fork_server
            forkserver.set_forkserver_preload(["tests.support.fork_server"])
            forkserver.ensure_running()  # before pytest imports anything
            settings.register_profile("without shrinking", phases=[Phase.explicit, Phase.generate])
            settings.load_profile("without shrinking")
            options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--tb=short", *tests]
            status = pytest.main(options, plugins=[OneProcessFirst()])
            sys.stdout.flush()
            os._exit(status)
        finally:
            os._exit(70)

    def outcome_of(self, change: Change, tests: list[str], deadline: float) -> str:
        """Make the change, run the tests, and undo the change; print and return the outcome."""
        self.write(change.file, change.applied())
        outcome, seconds = self.run(tests, deadline)
        self.write(change.file, change.source)
        verdict = {"passed": "NOT CAUGHT", "timeout": "timeout"}.get(outcome, f"caught by {outcome}")
        print(f"{change} ({change.kind}, {seconds:.0f} s): {verdict}\n{change.difference()}", flush=True)
        if outcome not in ("passed", "timeout"):
            self._failed |= dict.fromkeys([outcome.partition(" - ")[0]] if "::" in outcome else tests)
            if not self._is_confirmed:
                self.confirm(deadline)
        return outcome

    def reaching(self, changes: Sequence[Change]) -> dict[Change, list[str]]:
        """Run the default set with a probe at each change; return the tests that reached each."""
        probe = self.folder / "probe.py"
        probe.write_text(PROBE)
        for file, source in {change.file: change.source for change in changes}.items():
            texts = list[tuple[int, str]]()
            for number, change in enumerate(changes):
                if change.file == file:
                    texts += [(change.start, f"(__import__('probe').at({number}) or ("), (change.end, "))")]
            for place, text in sorted(texts, reverse=True):
                source = source[:place] + text.encode() + source[place:]
            self.write(file, source)
        environment = {**os.environ, "PYTHONPATH": str(self.folder)}
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], cwd=self.folder, env=environment
        )
        for change in changes:
            self.write(change.file, change.source)
        found: dict[Change, list[str]] = {change: [] for change in changes}
        for line in sorted({*Path(f"{probe}.txt").read_text().splitlines()}):
            number_, _, test = line.partition(" ")
            found[changes[int(number_)]].append(test)
        return found

    def confirm(self, deadline: float) -> None:
        """Stop the program if a test that noticed a change fails without one, too."""
        outcome, _ = self.run([*self._failed], deadline) if self._failed else ("passed", 0)
        if outcome != "passed":
            raise SystemExit(f"{outcome} without a change, too: mend the tests or the environment first")
        self._failed.clear()
        self._is_confirmed = True


def _fork_server(path: bytes, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """Start a process of ``multiprocessing``; the fork server of the ranks is a fork that has imported ``IMPORTS``."""
    if "forkserver" not in arguments[-1]:
        return int(_SPAWN(path, arguments, descriptors))
    child = os.fork()
    if child == 0:
        try:
            exec(arguments[-1], {})
        finally:
            os._exit(70)
    return child


_SPAWN = multiprocessing.util.spawnv_passfds


def one_of_each_function(tests: Sequence[str], choice: random.Random) -> list[str]:
    """Return the tests in random order, one case of each function first, then another of each."""
    cases = Counter[str]()
    turns = []
    for test in choice.sample(tests, len(tests)):
        turns.append((cases[test.partition("[")[0]], len(turns), test))
        cases[test.partition("[")[0]] += 1
    return [test for *_, test in sorted(turns)]


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
    parser.add_argument("--reaching", type=int, default=0, metavar="N", help="then run N tests that reach the change")
    options = parser.parse_args()
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # else it starts a thread, and forks of threads hang
    for module in IMPORTS:
        importlib.import_module(module)

    possible = [change for file in sources(options.paths) for change in changes_of(file)]
    if options.line is not None:
        chosen = [change for change in possible if change.line == options.line]
    else:
        chosen = random.Random(options.seed).sample(possible, min(options.number, len(possible)))
    missed, numbers, beyond = [], Counter[tuple[str, str]](), Counter[str]()
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        tree = Tree(Path(folder))
        for change in chosen:
            tests = options.tests or tests_of(change.file)
            outcome = tree.outcome_of(change, tests, options.deadline)
            if outcome == "passed":
                outcome = tree.outcome_of(change, ["-m", "not exhaustive", *tests], options.deadline * 2)
                beyond[change.package] += outcome not in ("passed", "timeout")
            missed += [change] if outcome == "passed" else []
            numbers[change.package, outcome if outcome in ("passed", "timeout") else "caught"] += 1
        tree.confirm(options.deadline * 3)
        for change, reaching in tree.reaching(missed).items() if missed and options.reaching else ():
            tests = one_of_each_function(reaching, random.Random(options.seed))[: options.reaching]
            print(f"{len(reaching)} tests reach it, of which {len(tests)} run")
            if tests and tree.outcome_of(change, tests, options.deadline * 5) not in ("passed", "timeout"):
                missed.remove(change)
                numbers[change.package, "passed"] -= 1
                numbers[change.package, "caught by others"] += 1
        tree.confirm(options.deadline * 3)
    print()
    for package in sorted({change.package for change in chosen}):
        caught, late, passed = (numbers[package, outcome] for outcome in ("caught", "timeout", "passed"))
        others = numbers[package, "caught by others"]
        of = sum(change.package == package for change in possible)
        caught_ = f"{caught} caught by the tests of their files ({beyond[package]} not by README's), {others} by others"
        print(f"{package}: {caught_}, {late} timed out, {passed} not caught, of {of} possible changes")
    for change in missed:
        print(f"NOT CAUGHT: {change}\n{change.difference()}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
