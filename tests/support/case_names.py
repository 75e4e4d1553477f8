"""Name cases so that ``pytest -k`` can select them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

SPEC = re.compile(r"\w+=\d+(,\w+=\d+)*")
LENGTH = 40


def case_name(case: object) -> str | None:
    """Name a topology's spec, options, a string or an object of the tests; return None to let pytest choose a name.

    >>> case_name("pipe=2,data=2"), case_name(r"axis 'pipe': degree 2\\.0 is")
    ('pipe2-data2', 'axis_pipe_degree_2_0_is')
    >>> case_name({"zero": 1, "checkpointed": True, "bf16": {"enabled": True}, "types": {"gradients": "fp32"}})
    'zero1-checkpointed-bf16-gradients_fp32'
    """
    if isinstance(case, str):
        if SPEC.fullmatch(case):
            return case.replace("=", "").replace(",", "-")
        return "_".join(re.findall(r"[\w.-]+", case.replace("\\.", "_")))[:LENGTH] or "empty"
    if type(case).__module__.startswith("tests."):
        return str(case)
    if type(case).__name__ == "dtype":
        return str(case).removeprefix("torch.")
    if isinstance(case, Mapping):
        return "-".join(_option(name, value) for name, value in case.items()) or "default"
    return None


def _option(name: str, value: object) -> str:
    if value == {"enabled": True} or value is True:
        return name
    if isinstance(value, Mapping):
        return case_name(value) or name
    if isinstance(value, Iterable):
        return f"{name}_{value if isinstance(value, str) else '_'.join(map(str, value))}"
    return f"no_{name}" if value is False else f"{name}{value}"
