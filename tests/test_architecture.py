"""The rooms of the package: imports point down, never in circles; who may import and create what."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import ds_topo
from tests.support.imports import circles_in, imports_in

PACKAGE = Path(ds_topo.__file__).parent
LAYERS: dict[int, set[str]] = {
    0: {"checkpoint_files", "errors", "ledger", "placement", "planner", "topology"},
    1: {"launch", "measurement", "process_groups"},
    2: {"check", "collectives", "partition", "reducer", "torch_checkpoint", "watch"},
    3: {"engine"},
    4: {"checkpoint", "conversion", "groups", "distributed", "parallel_state"},
    5: {"cli", "__main__"},
}
"""The rooms. Imports point down, or sideways inside a layer."""
ABOVE = {"__init__", "_moved"}
"""Files beside the rooms that import, lazily, whatever they are asked for; no room imports them."""

FILES = {
    ".".join(["ds_topo", *path.relative_to(PACKAGE).with_suffix("").parts]): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
"""Every file by its module; a package's ends in ``.__init__``."""
MODULES = {name.removesuffix(".__init__"): name for name in FILES if name.split(".")[1] not in ABOVE}
"""The modules of the rooms."""
ROOMS = {room: layer for layer, rooms in LAYERS.items() for room in rooms}
every_module = pytest.mark.parametrize("module", MODULES)


@cache
def imports_of(module: str, of_types_too: bool = True) -> frozenset[str]:
    name = MODULES[module]
    return frozenset(imports_in(FILES[name].read_text(), name, MODULES, of_types_too=of_types_too))


def own_imports_of(module: str, of_types_too: bool = True) -> set[str]:
    return {name for name in imports_of(module, of_types_too) if name.split(".")[0] == "ds_topo"}


def room_of(module: str) -> str:
    return module.split(".")[1]


def test_the_layers_name_the_rooms_that_exist() -> None:
    assert ROOMS.keys() | ABOVE == {room_of(name) for name in FILES}


@every_module
def test_imports_point_down(module: str) -> None:
    found = own_imports_of(module, of_types_too=False)
    assert found <= MODULES.keys(), "modules that exist, in rooms"
    assert {name for name in found if ROOMS[room_of(name)] > ROOMS[room_of(module)]} == set()


def test_there_are_no_circles() -> None:
    imports = {module: own_imports_of(module, of_types_too=False) for module in MODULES}
    assert list(circles_in(imports)) == []


@every_module
def test_imports_for_types_point_down_too(module: str) -> None:
    found = own_imports_of(module)
    assert found <= MODULES.keys()
    assert all(ROOMS[room_of(name)] <= ROOMS[room_of(module)] for name in found)


@pytest.mark.parametrize("module", [module for module in MODULES if ROOMS.get(room_of(module)) == 0])
def test_layer_0_needs_the_standard_library_alone(module: str) -> None:
    others = {name.split(".")[0] for name in imports_of(module, of_types_too=False)}
    assert others <= {*sys.stdlib_module_names, "ds_topo"}


def test_deepspeed_stays_in_its_rooms() -> None:
    importers = {
        room_of(module) for module in MODULES if any(name.split(".")[0] == "deepspeed" for name in imports_of(module))
    }
    assert "engine" in importers, "the search finds what there is to find"
    assert importers <= {"groups", "engine"}


def test_one_module_creates_process_groups() -> None:
    callers = {
        name
        for name, path in FILES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).split(".")[-1].startswith(("new_group", "new_subgroups"))
    }
    assert callers == {"ds_topo.process_groups.creation"}


def test_topologies_do_not_import_torch() -> None:
    code = (
        "import sys, ds_topo; from ds_topo.topology.rank_tables import grid_groups\n"
        "topology = ds_topo.ProcessTopology.from_spec('pipe=2,data=2')\n"
        "topology.get_coord(1), topology.get_axis_comm_lists('pipe'), grid_groups(topology, 1), dir(ds_topo)\n"
        "print([name for name in ('torch', 'deepspeed', 'numpy') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.stdout.strip(), result.stderr) == ("[]", "")


@pytest.mark.parametrize("name", ds_topo.__all__)
def test_every_public_name_exists(name: str) -> None:
    assert getattr(ds_topo, name).__name__.removeprefix("ds_topo.") == name
    assert name in dir(ds_topo)


def test_another_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Absent'"):
        ds_topo.Absent  # noqa: B018
