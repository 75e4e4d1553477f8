"""Tell from the report of a failed test whether the installed release of DeepSpeed lacks the tested feature."""

from __future__ import annotations

import re

_RAISED = re.compile(
    r"^(?:E +|\[?(?:rank ?\d+|.*\b[Rr]ank \d+)\]?: )*(?:--- rank [\d, ]+: error: )?"
    r"(?:\w+\.)*(\w*(?:Error|Exception|Failure|Interrupt|Warning)\b.*)$",
    re.MULTILINE,
)
"""Lines of a report that name an exception, of the test itself, of ranks or of programs that it has started."""
_LACKS = re.compile(r"RuntimeError\b\W+(.*? needs DeepSpeed >= [\d.]+\d, but [\d.]+ is installed)")
"""The error of a feature that the installed release of DeepSpeed lacks."""
_OTHERWISE = re.compile(r"^E +(?:AssertionError: )?assert (?!-?\d+ == 0$)|--- rank [\d, ]+: (?!error|ok)", re.MULTILINE)
"""A wrong result, other than the exit code of a program, or a rank that died or missed its deadline."""
_REPEATING = ("AssertionError", "RankFailure", "CalledProcessError", "ChildFailedError")
"""Exceptions that say only that another process failed; its own error is in the same report."""


def lacking(report: str) -> str | None:
    """Return the error of a feature that this release lacks if nothing else was raised in a failed test."""
    if _OTHERWISE.search(report):
        return None
    raised = [line for line in _RAISED.findall(report) if not line.startswith(_REPEATING)]
    found = [_LACKS.match(line) for line in raised]
    return found[0][1] if found and found[0] and all(found) else None
