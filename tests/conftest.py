"""Fixtures and hooks of all tests: worlds of ranks, names of cases, and the order of the files."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import pytest
from hypothesis import settings

# torch asks for the name of each address that connects to a store. An answer of the name server that is lost costs
# the resolver's timeout, which is 5 seconds by default.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

pytest.register_assert_rewrite("tests.support", "tests.cluster")  # before they are imported

from ds_topo.base.supported import DEEPSPEED, number  # noqa: E402
from tests.support.case_names import case_name  # noqa: E402
from tests.support.exhaustive import mark_exhaustive  # noqa: E402
from tests.support.lacking_features import lacking  # noqa: E402
from tests.support.world import Worlds  # noqa: E402

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in jobs of a shell that run in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # else launchers that tests interrupt would ignore it

IS_OLDER_DEEPSPEED = number(version("deepspeed")) < DEEPSPEED.newest
collect_ignore = ["support/fork_server.py", "programs/deepspeeds_tests.py"]
"""The search for doctests must not import these: the import does the work of the fork server, or changes DeepSpeed."""


@pytest.fixture(scope="session")
def world() -> Iterator[Worlds]:
    """``world(4).run(function, *args)``: four ranks, started at first use and kept until the session ends."""
    with Worlds() as of_size:
        yield of_size


@pytest.fixture(scope="module")
def other_world() -> Iterator[Worlds]:
    """Ranks apart from those of ``world``, for a job that resumes from a checkpoint of another job."""
    with Worlds() as of_size:
        yield of_size


@pytest.fixture(autouse=True)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """The backend on which ``world`` and ``other_world`` run a test; see the marker ``backends``."""
    name: str = getattr(request, "param", request.config.getoption("backend"))
    found = [
        request.getfixturevalue(fixture) for fixture in ("world", "other_world") if fixture in request.fixturenames
    ]
    worlds = [each for each in found if isinstance(each, Worlds)]  # a test may have a parameter of this name
    for of_size in worlds:
        of_size.backend = name
    yield name
    for of_size in worlds:  # fixtures of modules and of the session run on gloo
        of_size.backend = "gloo"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let ``pytest --backend strict`` run tests of ``world`` on the stand-in for NCCL."""
    parser.addoption("--backend", default="gloo", help="backend of tests that do not name theirs: gloo, strict")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test of ``world`` on every backend of the marker ``backends``."""
    marker = metafunc.definition.get_closest_marker("backends")
    if marker is not None and "world" in metafunc.fixturenames:
        names = [*marker.args, *marker.kwargs.get("exhaustive", ())]
        cases = mark_exhaustive(names, lambda number, _: number < len(marker.args))
        metafunc.parametrize("backend", cases, indirect=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Skip a test of a feature that an older release of DeepSpeed lacks, with the error of the feature as reason."""
    report: Any = yield
    if report.failed and IS_OLDER_DEEPSPEED and (lacks := lacking(str(report.longrepr))):
        report.outcome, report.longrepr = "skipped", (str(item.path), item.location[1], lacks)
    return report  # type: ignore[return-value]


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name cases without ids of their own so that ``-k`` finds them."""
    return case_name(val)


LONGEST = [
    *("cluster/test_launch", "test_guides", "examples/test_jobs", "health/test_faults", "engine/test_patches"),
    *("cluster/test_elastic", "cluster/test_virtual_hosts", "checkpoint/test_torch", "engine/test_arriving_parameters"),
    *("engine/test_plain_engine", "engine/test_replica_comparison", "cluster/test_check"),
    "engine/test_gradient_reducer",
    *("engine/test_moe", "engine/test_zero_partitions", "examples/test_porting", "programs/test_hugging_face"),
    *("launch/test_joining", "checkpoint/test_saving", "health/test_progress", "health/test_watch", "gpu/test_gpu"),
    *("checkpoint/test_background", "engine/test_autoep"),
]
"""The files whose default tests take half a minute or more, the longest first."""


@pytest.hookimpl(tryfirst=True)  # pytest then deselects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark cases that README's tests leave out, and start with the longest files.

    So no worker of pytest-xdist is left with one of them at the end.
    """
    _mark_cases_beyond_samples(items)
    places = {f"tests/{name}.py": place for place, name in enumerate(LONGEST)}
    repeated = {item for item in items if _is_repeated_on_gloo(item)}
    config.hook.pytest_deselected(items=[*repeated])
    items[:] = [item for item in items if item not in repeated]
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))


def _mark_cases_beyond_samples(items: list[pytest.Item]) -> None:
    cases: Counter[str] = Counter()
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if sampled is None or item.get_closest_marker("exhaustive"):
            continue
        name = item.nodeid.partition("[")[0]
        if cases[name] % sampled.args[0]:
            item.add_marker(pytest.mark.thorough)
        cases[name] += 1


def _is_repeated_on_gloo(item: pytest.Item) -> bool:
    """Tell whether a case beyond the default set also runs on the stand-in for NCCL, whose rules are stricter."""
    marker, case = item.get_closest_marker("backends"), getattr(item, "callspec", None)
    if marker is None or case is None or case.params.get("backend") != "gloo":
        return False
    others = marker.kwargs.get("exhaustive", ())
    marks = sum(mark.name == "exhaustive" for mark in item.iter_markers())
    return "strict" in (*marker.args, *others) and marks > ("gloo" in others)
