"""Print what ds_topo patches, overrides or relies on in DeepSpeed and torch, and its changes in another release."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from textwrap import fill

from ds_topo.base import patches, releases
from ds_topo.base.classes import Override
from ds_topo.base.ledger import ONE_CALL, Patch, Reliance, Row
from ds_topo.engine.grid import rows

ROWS: tuple[Patch | Reliance | Override, ...] = rows()
_OF_OBJECTS = "Patches of one engine, optimizer, module or parameter"
_OF_CALLS = "Patches during one call"
_OF_PROCESS = "Process-wide patches"
_OF_USE = "Process-wide patches of ds_topo.use(grid)"
_SOURCES = """
import json
from ds_topo.engine.__main__ import ROWS
from ds_topo.base.releases import INSTALLED, sources
print(json.dumps([INSTALLED, sources(ROWS)]))
"""


def page(rows: Sequence[Row] = ROWS) -> str:
    """Return all patches, in sections by scope, then all overrides and reliances. Missing names are marked."""
    parts = [", ".join(f"{library} {release}" for library, release in releases.INSTALLED.items())]
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
    missing = [str(row) for row in rows if releases.is_missing(row)] + releases.no_longer_there(rows)
    return "\n".join([*parts, "", f"missing here: {', '.join(missing) or 'none'}"])


def _section_of(patch: Patch) -> str:
    if patch.process_wide:
        return _OF_USE if patch.during == patches.USE else _OF_PROCESS
    return _OF_CALLS if patch.during.startswith(ONE_CALL) else _OF_OBJECTS


def _title(row: Row) -> str:
    limits = "" if row.releases == "all" else f"  ({row.releases})"
    return f"{row}{limits}{'  MISSING' if releases.is_missing(row) else ''}"


def _line(label: str, text: str) -> str:
    return fill(f"{label}: {text}", 100, initial_indent=" " * 4, subsequent_indent=" " * 8)


def comparison(rows: Sequence[Row] = ROWS) -> str:
    """List the functions that differ from the recorded release that is nearest to the installed one."""
    parts = []
    for library, release in releases.INSTALLED.items():
        names, count, other = releases.changed(rows, library)
        parts += [f"\n{len(names)} of {count} functions and classes of {library} {release} differ from {other}"]
        parts += [f"    {name}" for name in names]
        if names and other:
            install = f"pip install --no-deps --target FOLDER {other.replace(' ', '==')}"
            parts += [f"    To see the differences: {install}; python -m ds_topo.engine --against FOLDER"]
    skipped = releases.without_source(rows)
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
    for name, source in releases.sources(rows).items():
        library = name.partition(".")[0]
        old = before.get(name, "")
        if not old or releases.fingerprint(old) != releases.fingerprint(source):
            labels = f"{name} ({library} {versions[library]})", f"{name} ({library} {releases.INSTALLED[library]})"
            yield from difflib.unified_diff(old.splitlines(), source.splitlines(), *labels, lineterm="")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``python -m ds_topo.engine``."""
    parser = argparse.ArgumentParser(prog="python -m ds_topo.engine", description=__doc__)
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
        releases.record(ROWS)
    print(page())
    print(comparison())


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # | head
    main()
