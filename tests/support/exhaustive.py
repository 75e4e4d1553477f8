"""Divide cases into the default set and those that only ``pytest -m exhaustive`` runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def mark_exhaustive(cases: Iterable[Any], default: Callable[[int, Any], bool]) -> list[Any]:
    """Mark all cases as exhaustive except those for which ``default(number, case)`` is true.

    A plain tuple holds the values of several parameters, as in ``pytest.mark.parametrize``.
    """
    return [
        case
        if default(number, case)
        else pytest.param(*(case if type(case) is tuple else (case,)), marks=pytest.mark.exhaustive)
        for number, case in enumerate(cases)
    ]
