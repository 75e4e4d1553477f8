"""Tell which rows the installed releases need, keep the fingerprints of releases, and warn of new releases.

A fingerprint is a hash of the syntax tree of a function or class that a row names, without comments, docstrings, blank
lines and line breaks. It is equal on every version of Python that ds_topo supports, because the tree is written out
here and not by ``ast.dump`` or ``ast.unparse``, which differ between versions. ``fingerprints.json`` stores the
fingerprints of the releases for which the rows were checked, so that another release shows which functions it has
changed.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from textwrap import indent
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ds_topo.base.ledger import Row, exists, find, name_of
from ds_topo.base.supported import DEEPSPEED, TORCH, number
from ds_topo.errors import listed, warn

FILE = Path(__file__).with_name("fingerprints.json")
INSTALLED = {
    library.__name__: Version(library.__version__).base_version  # without a local part such as +cpu
    for library in (deepspeed, torch)
}
"""The installed release of each library."""
_OF_ONE_VERSION = {"ctx", "kind", "type_comment", "type_params"}
"""Fields of syntax trees that some versions of Python lack, or that say nothing about the code."""


def is_missing(row: Row) -> bool:
    """Tell whether the installed release lacks a name that it should have."""
    return is_due(row) and not exists(row)


def is_due(row: Row) -> bool:
    """Tell whether the row is for the installed release."""
    if row.releases == "all":
        return True
    if row.releases == "builds with NCCL":
        return dist.is_nccl_available()
    release = {"deepspeed": deepspeed.__version__, "torch": torch.__version__}[name_of(row.owner).split(".")[0]]
    return number(release) in SpecifierSet(row.releases)


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


def release_to_compare(library: str, releases: Iterable[str]) -> str | None:
    """Return the newest recorded release of a library up to the installed one, else the oldest one, if any.

    >>> release_to_compare("torch", ["torch 1.9", "torch 1.10", "deepspeed 1.11"])
    'torch 1.10'
    """
    known = sorted((name for name in releases if name.startswith(f"{library} ")), key=_version_of)
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


@cache
def warn_of_newer_releases(rows: Callable[[], Iterable[Row]]) -> None:
    """Warn once about each installed release that is newer than all tested ones, and name the functions it changed.

    Args:
        rows: return the patches, overrides and reliances.
    """
    for name, _, newest in (DEEPSPEED, TORCH):
        release = INSTALLED[library := name.lower()]
        if number(release) > newest:
            names, _, other = changed(all_rows := tuple(rows()), library)
            gone = [str(row) for row in all_rows if is_missing(row) and name_of(row.owner).startswith(library)]
            gone += no_longer_there(all_rows) if library == "deepspeed" else []
            names += [f"{name} (missing)" for name in gone]
            warn(
                f"{name} {release} is newer than {newest}, the newest that ds_topo was run with. Functions that it "
                f"replaces or relies on and that differ from {other}: {listed(names)}. Compare losses and norms of the "
                "first steps; python -m ds_topo.engine lists all of them"
            )


def _version_of(release: str) -> Version:
    return Version(release.partition(" ")[2])
