"""Print what ds_topo patches, overrides or relies on in DeepSpeed and torch, and its changes in another release.

``python -m tests.names`` prints the page, ``--against FOLDER`` the lines that differ from copies of the libraries in a
folder, and ``--update`` records the fingerprints of the installed releases.

A fingerprint is a hash of the syntax tree of a function or class that a row names, without comments, docstrings, blank
lines and line breaks. It is equal on every version of Python that ds_topo supports, because the tree is written out
here and not by ``ast.dump`` or ``ast.unparse``, which differ between versions. ``fingerprints.json`` stores the
fingerprints of the releases for which the rows were checked, so that another release shows which functions it has
changed.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import hashlib
import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from textwrap import fill, indent
from typing import Any

import deepspeed
import torch
from packaging.version import Version

from ds_topo.base import patches
from ds_topo.base.ledger import ONE_CALL, Patch, Reliance, Row, find
from ds_topo.base.overrides import Override
from ds_topo.base.supported import is_due, is_missing
from ds_topo.engine.grid import rows as all_rows

FILE = Path(__file__).with_name("fingerprints.json")
INSTALLED = {
    library.__name__: Version(library.__version__).base_version  # without a local part such as +cpu
    for library in (deepspeed, torch)
}
"""The installed release of each library."""
ROWS = all_rows()
_OF_OBJECTS = "Patches of one engine, optimizer, module or parameter"
_OF_CALLS = "Patches during one call"
_OF_PROCESS = "Process-wide patches"
_OF_USE = "Process-wide patches of ds_topo.use(grid)"
_SOURCES = """
import json
from tests.names import INSTALLED, ROWS, sources
print(json.dumps([INSTALLED, sources(ROWS)]))
"""
_OF_ONE_VERSION = {"ctx", "kind", "type_comment", "type_params"}
"""Fields of syntax trees that some versions of Python lack, or that say nothing about the code."""


# -- fingerprints -----------------------------------------------------------------------------------------------------


def fingerprint(source: str) -> str:
    """Return the fingerprint of the source of a function or class, which may be indented.

    >>> fingerprint("def f(x):\\n    return x") == fingerprint("  def f(x):  # text\\n    'Text.'\\n    return (x)")
    True
    >>> fingerprint("def f(x): return x") == fingerprint("def f(x): return -x")
    False
    """
    block = ast.parse("if True:\n" + indent(source, " ", lambda line: True)).body[0]
    assert isinstance(block, ast.If)
    return hashlib.sha256(repr(_shape(block.body)).encode()).hexdigest()[:16]


def _shape(node: Any) -> Any:
    if isinstance(node, list):
        return [_shape(item) for item in node]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = dict(ast.iter_fields(node))
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and ast.get_docstring(node) is not None:
        fields["body"] = node.body[1:]
    if isinstance(node, ast.JoinedStr):  # Python 3.12 has empty constants in format specifications
        fields["values"] = [part for part in node.values if not (isinstance(part, ast.Constant) and part.value == "")]
    shapes = [(name, _shape(value)) for name, value in fields.items() if name not in _OF_ONE_VERSION and value != []]
    return type(node).__name__, shapes


def source_of(row: Row) -> str | None:
    """Return the source of the function or class that a row names; None for a value, or a function written in C."""
    value = getattr(row.owner, row.name, None)
    if isinstance(value, property):
        value = value.fget
    while callable(value) and (inner := _decorated_by_deepspeed(value)):
        value = inner
    try:
        return inspect.getsource(inspect.unwrap(value)) if callable(value) else None
    except (OSError, TypeError):
        return None


def _decorated_by_deepspeed(value: Any) -> Any:
    """Return the function inside ``instrument_w_nvtx``, a decorator that keeps it in a closure, without wraps()."""
    code = getattr(value, "__code__", None)
    if code is None or "instrument_w_nvtx" not in value.__qualname__:
        return None
    cells = (cell.cell_contents for cell in value.__closure__ or ())
    return dict(zip(code.co_freevars, cells, strict=True)).get("func")


def sources(rows: Iterable[Row]) -> dict[str, str]:
    """Return the sources of the rows that the installed releases need, by the names of rows; without rows of values."""
    found = {str(row): source_of(row) for row in rows if is_due(row)}
    return {name: source for name, source in sorted(found.items()) if source is not None}


def without_source(rows: Iterable[Row]) -> list[str]:
    """Return the names of rows that have no fingerprint: values, and functions written in C."""
    return sorted({str(row) for row in rows if is_due(row) and source_of(row) is None})


def fingerprints(rows: Iterable[Row]) -> dict[str, dict[str, str]]:
    """Return the fingerprints of the installed releases: ``{"deepspeed 0.19.8": {name of a row: fingerprint}}``."""
    found: dict[str, dict[str, str]] = {f"{library} {release}": {} for library, release in INSTALLED.items()}
    for name, source in sources(rows).items():
        library = name.partition(".")[0]
        found[f"{library} {INSTALLED[library]}"][name] = fingerprint(source)
    return found


def recorded(file: Path = FILE) -> dict[str, dict[str, str]]:
    """Read the fingerprints of all recorded releases."""
    content: dict[str, dict[str, str]] = json.loads(file.read_text(encoding="utf-8"))
    return content


def record(rows: Iterable[Row], file: Path = FILE) -> None:
    """Write the fingerprints of the installed releases to the file, beside those of other releases."""
    content = dict(sorted((recorded(file) | fingerprints(rows)).items()))
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def release_to_compare(library: str, known: Iterable[str]) -> str | None:
    """Return the newest recorded release of a library up to the installed one, else the oldest one, if any.

    >>> release_to_compare("torch", ["torch 1.9", "torch 1.10", "deepspeed 1.11"])
    'torch 1.10'
    """
    known = sorted((name for name in known if name.startswith(f"{library} ")), key=_version_of)
    older = [name for name in known if _version_of(name) <= Version(INSTALLED[library])]
    return older[-1] if older else next(iter(known), None)


def changed(rows: Iterable[Row], library: str) -> tuple[list[str], int, str | None]:
    """Return the names of the functions of a library that differ from the recorded release next to the installed one.

    Also return the number of functions that were compared, and that release, or None if there is none.
    """
    now, known = fingerprints(rows)[f"{library} {INSTALLED[library]}"], recorded()
    other = release_to_compare(library, known)
    before = known[other] if other else {}
    return [name for name, value in now.items() if before.get(name) != value], len(now), other


def no_longer_there(rows: Iterable[Row]) -> list[str]:
    """Return the names of overrides that the recorded release next to the installed one had.

    A method of a mixin whose name no class of DeepSpeed has any more overrides nothing, so it is in no row.
    """
    known = recorded()
    other = release_to_compare("deepspeed", known)
    before = known[other] if other else {}
    ours = {name for name in before if hasattr(find(name.rpartition(".")[0]), name.rpartition(".")[2])}
    return sorted(before.keys() - ours - {str(row) for row in rows})


def _version_of(release: str) -> Version:
    return Version(release.partition(" ")[2])


# -- the page ----------------------------------------------------------------------------------------------------------


def page(rows: Sequence[Row] = ROWS) -> str:
    """Return all patches, in sections by scope, then all overrides and reliances. Missing names are marked."""
    parts = [", ".join(f"{library} {release}" for library, release in INSTALLED.items())]
    for section in (_OF_PROCESS, _OF_USE, _OF_CALLS, _OF_OBJECTS):
        found = [row for row in rows if isinstance(row, Patch) and _section_of(row) == section]
        parts += ["", f"{section}: {len(found)}"]
        for patch in found:
            parts += ["", _title(patch), _line("becomes", patch.instead), _line("why", patch.why)]
            parts += [_line("while", patch.during)]
            parts += [_line("process-wide because", patch.process_wide)] if section == _OF_PROCESS else []
    overridden = [row for row in rows if isinstance(row, Override)]
    private = [row for row in overridden if row.name.startswith("_")]
    parts += [
        "",
        f"Overridden by classes of ours: {len(overridden)}, of which {len(private)} are private",
    ]
    for override in overridden:
        parts += ["", _title(override), _line("by", override.by), _line("why", override.why)]
    relied_on = [row for row in rows if isinstance(row, Reliance)]
    parts += ["", f"Private names that ds_topo relies on: {len(relied_on)}", ""]
    for reliance in relied_on:
        parts += [_title(reliance), _line("use", reliance.use)]
    missing = [str(row) for row in rows if is_missing(row)] + no_longer_there(rows)
    return "\n".join([*parts, "", f"missing here: {', '.join(missing) or 'none'}"])


def _section_of(patch: Patch) -> str:
    if patch.process_wide:
        return _OF_USE if patch.during == patches.USE else _OF_PROCESS
    return _OF_CALLS if patch.during.startswith(ONE_CALL) else _OF_OBJECTS


def _title(row: Row) -> str:
    limits = "" if row.releases == "all" else f"  ({row.releases})"
    return f"{row}{limits}{'  MISSING' if is_missing(row) else ''}"


def _line(label: str, text: str) -> str:
    return fill(f"{label}: {text}", 100, initial_indent=" " * 4, subsequent_indent=" " * 8)


def comparison(rows: Sequence[Row] = ROWS) -> str:
    """List the functions that differ from the recorded release that is nearest to the installed one."""
    parts = []
    for library, release in INSTALLED.items():
        names, count, other = changed(rows, library)
        parts += [f"\n{len(names)} of {count} functions and classes of {library} {release} differ from {other}"]
        parts += [f"    {name}" for name in names]
        if names and other:
            install = f"pip install --no-deps --target FOLDER {other.replace(' ', '==')}"
            parts += [f"    To see the differences: {install}; python -m tests.names --against FOLDER"]
    skipped = without_source(rows)
    parts += [f"\n{len(skipped)} names are values, or functions written in C, and have no fingerprint"]
    return "\n".join([*parts, *(f"    {name}" for name in skipped)])


def differences(folder: str, rows: Sequence[Row] = ROWS) -> Iterator[str]:
    """Yield the lines that differ between the copies of DeepSpeed or torch in a folder and the installed ones.

    Raises:
        RuntimeError: ds_topo cannot be imported with these copies.
    """
    paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")]), *filter(None, sys.path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    result = subprocess.run([sys.executable, "-c", _SOURCES], env=environment, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(
            f"--against {folder}: ds_topo cannot be imported with the libraries of this folder. Give a folder that "
            f"pip install --no-deps --target FOLDER has filled with a supported release.\n{result.stderr}"
        )
    versions, before = json.loads(result.stdout.splitlines()[-1])
    for name, source in sources(rows).items():
        library = name.partition(".")[0]
        old = before.get(name, "")
        if not old or fingerprint(old) != fingerprint(source):
            labels = f"{name} ({library} {versions[library]})", f"{name} ({library} {INSTALLED[library]})"
            yield from difflib.unified_diff(old.splitlines(), source.splitlines(), *labels, lineterm="")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``python -m tests.names``."""
    parser = argparse.ArgumentParser(prog="python -m tests.names", description=str(__doc__).partition("\n")[0])
    parser.add_argument(
        "--against",
        metavar="FOLDER",
        help="print the lines that differ from the copies of DeepSpeed or torch in this folder, and nothing else",
    )
    parser.add_argument(
        "--update", action="store_true", help="record the fingerprints of the installed releases in fingerprints.json"
    )
    options = parser.parse_args(arguments)
    if options.against is not None:
        print("\n".join(differences(options.against)))
        return
    if options.update:
        record(ROWS)
    print(page())
    print(comparison())


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # | head
    main()
