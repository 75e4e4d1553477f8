"""Check the layers of the package: imports point down and never in circles."""

from __future__ import annotations

import ast
import pkgutil
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import ds_topo
from tests.conftest import LONGEST
from tests.support.imports import circles_in, imports_in

PACKAGE = Path(ds_topo.__file__).parent
LAYERS: tuple[set[str], ...] = (
    {"errors"},
    {"base", "topology"},
    {"launch"},
    {"process_groups"},
    {"collectives"},
    {"health", "reduction"},
    {"mpu"},
    {"checkpoint"},
    {"engine"},
    {"distributed", "groups", "parallel_state", "plan", "verification"},
    {"cli", "layers"},
    {"__main__"},
)
"""Packages and top-level modules by layer. A module imports from its own package and from lower layers only."""
STANDARD_LIBRARY_ONLY = {
    "errors",
    "base.ledger",
    "base.classes",
    "base.lazy",
    "topology",
    "plan",
    "launch.hosts",
    "launch.placement",
    "checkpoint.folder",
    "checkpoint.manifest",
}
"""Packages and modules that work without torch."""
MEASURING = {"plan.calibrate"}
"""Modules of these packages that need torch."""
ABOVE = {"__init__"}
"""The package's ``__init__``, which imports lazily and which no module imports."""

FILES = {
    ".".join(["ds_topo", *path.relative_to(PACKAGE).with_suffix("").parts]): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
"""Every file by its module name; that of a package ends in ``.__init__``."""
MODULES = {name.removesuffix(".__init__"): name for name in FILES if name.split(".")[1] not in ABOVE}
"""The modules of the layers."""
PACKAGES = {name: layer for layer, names in enumerate(LAYERS) for name in names}
every_module = pytest.mark.parametrize("module", MODULES)


@cache
def imports_of(module: str, of_types_too: bool = True, of_tables_too: bool = True) -> frozenset[str]:
    name = MODULES[module]
    if module == "ds_topo.base":  # imports what it is asked for
        return frozenset({"sys", "importlib"})
    kinds = {"of_types_too": of_types_too, "of_tables_too": of_tables_too}
    return frozenset(imports_in(FILES[name].read_text(), name, MODULES, **kinds))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def own_imports_of(module: str, **kinds: bool) -> set[str]:
    return {name for name in imports_of(module, **kinds) if name.split(".")[0] == "ds_topo"}


def roots_of(module: str) -> set[str]:
    return {name.split(".")[0] for name in imports_of(module)}


def package_of(module: str) -> str:
    return module.split(".")[1]


def test_layers_name_all_packages() -> None:
    assert PACKAGES.keys() | ABOVE == {package_of(name) for name in FILES}


def _rows_of_readme() -> dict[str, tuple[int, list[str]]]:
    """Package -> its layer and its files, as the table of ``ds_topo/README.md`` lists them."""
    cells = [line.strip("| ").split(" | ") for line in (PACKAGE / "README.md").read_text().splitlines()]
    return {
        row[1].strip("`"): (int(row[0]), [name.strip("`") for name in row[3].split(", ")])
        for row in cells
        if len(row) == 4 and row[0].isdigit()
    }


def test_readme_lists_the_layers() -> None:
    assert {package: layer for package, (layer, _) in _rows_of_readme().items()} == PACKAGES


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_readme_lists_the_files(package: str) -> None:
    folder = PACKAGE / package
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"} if folder.is_dir() else {f"{package}.py"}
    files |= {f"{path.parent.name}/" for path in folder.glob("*/__init__.py")}
    assert sorted(_rows_of_readme()[package][1]) == sorted(files)


def test_readme_names_objects_that_exist() -> None:
    prose = (PACKAGE / "README.md").read_text()
    names = set(re.findall(r"`([a-z_]+(?:\.[A-Za-z_]+)+)`", prose))
    names = {name for name in names if name.split(".")[0] in PACKAGES and not name.endswith(".py")}
    assert len(names) > 15, "the search finds what there is to find"
    for name in names:
        pkgutil.resolve_name(f"ds_topo.{name}")


@every_module
def test_imports_point_down(module: str) -> None:
    found = own_imports_of(module)
    assert found <= MODULES.keys(), "every imported module exists"
    others = {name for name in found if package_of(name) != package_of(module)}
    assert {name for name in others if PACKAGES[package_of(name)] >= PACKAGES[package_of(module)]} == set()


def state_of(module: str) -> set[str]:
    """Return the module's own objects that can change, as the table of ``ds_topo/README.md`` names them.

    Constants have names in upper case. A name in lower case is state unless it is another name of a function.
    """
    return {
        f"{module.removeprefix('ds_topo.')}.{target.id}"
        for statement in tree_of(FILES[MODULES[module]]).body
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and not isinstance(statement.value, ast.Attribute)
        for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
        if isinstance(target, ast.Name) and target.id.strip("_").islower() and not target.id.startswith("__")
        if not (isinstance(statement.value, ast.Call) and ast.unparse(statement.value.func) in OF_FUNCTIONS)
    }


OF_FUNCTIONS = {"attrgetter", "getattr", "find", "vars"}
"""Functions that return another name of a function, or of DeepSpeed's own variables."""


def test_process_wide_state_is_listed() -> None:
    _, table = (PACKAGE / "README.md").read_text().split("## Process-wide state")
    listed = set(re.findall(r"`([\w.]+\.\w+)`", table))
    found = {name for module in MODULES for name in state_of(module)}
    assert {"engine.checks.grids", "base.ledger.ledger", "launch.council._rounds"} <= found, "the search finds state"
    assert found - listed == set()
    statements = (node for path in FILES.values() for node in ast.walk(tree_of(path)))
    assert not any(isinstance(node, ast.Global) for node in statements)


def test_imports_are_not_circular() -> None:
    """A part that is imported on demand may import the core, which has its row."""
    of_core = {module: own_imports_of(module, of_tables_too=False) - {module} for module in MODULES}
    assert list(circles_in(of_core)) == []


def test_file_names_are_unique() -> None:
    names = Counter(path.stem for path in FILES.values())
    assert {name for name, count in names.items() if count > 1} <= {"__init__", "__main__"}


@pytest.mark.parametrize(
    "module",
    [
        name
        for name in MODULES
        if {package_of(name), name.removeprefix("ds_topo.")} & STANDARD_LIBRARY_ONLY
        and name.removeprefix("ds_topo.") not in MEASURING
    ],
)
def test_modules_without_torch_import_the_standard_library_alone(module: str) -> None:
    """And pydantic, which reads manifests."""
    others = {name.split(".")[0] for name in imports_of(module, of_types_too=False)}
    assert others <= {*sys.stdlib_module_names, "ds_topo", "pydantic"}


def test_export_starts_without_distributed_checkpoints_of_torch() -> None:
    """They and what they import, DTensor and SymPy, would take a third of the start of ``ds-topo export``."""
    reached, left = set[str](), {"ds_topo.checkpoint.plain_weights"}
    while left:
        reached.add(module := left.pop())
        left |= own_imports_of(module, of_types_too=False) - reached
    assert "ds_topo.checkpoint.table" in reached, "the search finds indirect imports"
    names = {
        (module, ast.unparse(statement))
        for module in reached
        for statement in tree_of(FILES[MODULES[module]]).body
        if isinstance(statement, (ast.Import, ast.ImportFrom))
        and re.search(r"torch\.distributed\.(checkpoint|tensor|fsdp)", ast.unparse(statement))
    }
    assert names == set()


def test_only_engine_packages_import_deepspeed() -> None:
    importers = {package_of(module) for module in MODULES if "deepspeed" in roots_of(module)}
    assert "engine" in importers, "the search finds importers"
    assert importers <= {"base", "checkpoint", "engine", "groups", "mpu", "verification"}
    of_base = {name for name in MODULES if package_of(name) == "base" and "deepspeed" in roots_of(name)}
    described = {"ds_topo.base.marks", "ds_topo.base.supported"}
    assert of_base == described, "they describe its releases and optimizers"


def test_class_names_are_unique() -> None:
    names = Counter(
        node.name
        for path in FILES.values()
        for node in tree_of(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_one_module_creates_process_groups() -> None:
    callers = {
        name
        for name, path in FILES.items()
        for node in ast.walk(tree_of(path))
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
    result = _run(code)
    assert (result.stdout.strip(), result.stderr) == ("[]", "")


def test_import_takes_hardly_longer_than_deepspeeds() -> None:
    code = (
        "import sys, deepspeed; before = set(sys.modules)\n"
        "import ds_topo; [getattr(ds_topo, name) for name in ds_topo.__all__]\n"
        "slow = {'sympy', 'torch._dynamo', 'torch.distributed.tensor', 'torch.distributed.checkpoint'}\n"
        "print(sorted(slow & sys.modules.keys() - before))"
    )
    result = _run(code)
    assert result.stdout.splitlines()[-1:] == ["[]"], result.stderr


def _run(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("name", ds_topo.__all__)
def test_every_public_name_exists(name: str) -> None:
    assert getattr(ds_topo, name).__name__.removeprefix("ds_topo.") == name
    assert name in dir(ds_topo)


def test_dir_lists_public_names_alone() -> None:
    for package in (ds_topo, ds_topo.checkpoint):
        assert [name for name in dir(package) if not name.startswith("_")] == sorted(package.__all__)


def test_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Absent'"):
        ds_topo.Absent  # noqa: B018


def test_files_that_the_tests_start_with_exist() -> None:
    """A file that was renamed would start late, and be left at the end."""
    assert [name for name in LONGEST if not (PACKAGE.parent / f"tests/{name}.py").is_file()] == []
