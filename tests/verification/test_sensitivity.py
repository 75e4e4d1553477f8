"""Verify finds faults that raise nothing, and names their kind, axis and cause."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.support.world import Worlds
from tests.verification.faults import FAULTS, planted
from tests.verification.recorded_training import References

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def references(world: Worlds, tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(world, tmp_path_factory.mktemp("references"))


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found(name: str, references: References, tmp_path: Path) -> None:
    fault = FAULTS[name]
    report = references.verify(fault.job, tmp_path, partial(planted, name), fault.before)
    assert report.status == 1, f"{name}: {report.undecided}"
    first = report.findings[0]
    print(f"| {name} | {first} | {first.axis} | {first.causes} |")
    problems = [
        *(["kind"] if first.kind not in fault.kinds else []),
        *(["cause"] if fault.causes and not any(word in first.causes[0] for word in fault.causes) else []),
        *(["axis"] if fault.axis is not None and fault.axis not in (first.axis or "") else []),
    ]
    assert not problems, f"{problems}: {first} {first.axis} {first.causes}"
