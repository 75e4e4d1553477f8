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
_CALLING = re.compile(r"^(.*File \".*\", line \d+, in .*)\nE +assert .*$", re.MULTILINE)
"""A line of a traceback, and below it the assertion that called the function of the next line."""
_ANOTHER_MESSAGE = re.compile(
    r"^(.*AssertionError): Regex pattern.*\n.*Expected regex: .*\n.*Actual message: (.*)$", re.MULTILINE
)
"""The error of ``pytest.raises`` for an exception with another message than expected."""
_REPEATING = ("AssertionError", "RankFailure", "CalledProcessError", "ChildFailedError")
"""Exceptions that say only that another process failed; its own error is in the same report."""


def _with_its_message(found: re.Match[str]) -> str:
    """Return the message of an exception as lines of a report; a message of several lines is one of ranks."""
    lines = found[2].strip("'\"").replace("\\n", "\n")
    return f"{found[1]}\n" + (lines if "--- rank" in lines else f"E   RuntimeError: {lines}")


def lacking(report: str) -> str | None:
    """Return the error of a feature that this release lacks if nothing else was raised in a failed test."""
    report = _CALLING.sub(r"\1", report)
    report = _ANOTHER_MESSAGE.sub(_with_its_message, report)
    if _OTHERWISE.search(report):
        return None
    raised = [line for line in _RAISED.findall(report) if not line.startswith(_REPEATING)]
    found = [_LACKS.match(line) for line in raised]
    return found[0][1] if found and found[0] and all(found) else None
