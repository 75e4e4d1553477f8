"""Read from a source file which modules it imports."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping


def imports_in(
    source: str, module: str, modules: Collection[str], *, of_types_too: bool = True, of_tables_too: bool = True
) -> set[str]:
    """Return the absolute names of the modules that a module imports, at any depth and also by ``importlib``.

    Args:
        source: The text of the module.
        module: The name of the module; that of a package's ``__init__.py`` ends in ``.__init__``.
        modules: All existing modules, to tell ``from package import module`` from ``from module import name``.
        of_types_too: Include imports under ``if TYPE_CHECKING``.
        of_tables_too: Include the rows of a table, each of which is imported when a program first asks for it.

    Raises:
        ValueError: The name of an imported module is computed.

    >>> modules = ["a", "a.b", "a.b.c", "d"]
    >>> sorted(imports_in("import d\\ndef f():\\n    from a import b, x\\n    from .. import y", "a.b.c", modules))
    ['a', 'a.b', 'd']
    >>> imports_in("from . import c", "a.b.__init__", modules)
    {'a.b.c'}
    >>> imports_in("NAME = 'a.b'\\nimport_module(NAME)\\nimportlib.import_module(f'{__name__}.b')", "a", modules)
    {'a.b'}
    >>> imports_in("ROW = Row('d')\\nimport_module(self.where)", "a", modules)
    {'d'}
    >>> imports_in("import_module(sys.argv[1])", "a", modules)
    Traceback (most recent call last):
    ValueError: a, line 1: what is imported must be a constant, not sys.argv[1]
    >>> imports_in("if TYPE_CHECKING:\\n    import d", "a", modules, of_types_too=False)
    set()
    """
    tree, package = ast.parse(source), module.rpartition(".")[0]
    if not of_types_too:
        tree.body = [node for node in tree.body if not _is_for_types(node)]
    constants = _constants_of(tree) | {"__name__": module.removesuffix(".__init__")}
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            submodules = {f"{base}.{alias.name}" for alias in node.names} & set(modules)
            found.update(submodules if len(submodules) == len(node.names) else {base, *submodules})
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            if ast.unparse(node.args[0]) in ("self.where", "where"):  # the rows of a table in this module
                rows = {each.value for each in ast.walk(tree) if isinstance(each, ast.Constant)}
                rows |= {f"{package}.{row}" for row in rows}  # within the package
                found.update(rows & set(modules) if of_tables_too else ())
                continue
            found.add(_text_of(node.args[0], constants, f"{module}, line {node.lineno}"))
    return found


def circles_in(imports: Mapping[str, Collection[str]]) -> Iterator[list[str]]:
    """Yield circles of imports; at least one of each strongly connected component.

    >>> list(circles_in({"a": ["b"], "b": ["c"], "c": ["b", "d"], "d": []}))
    [['b', 'c', 'b']]
    """
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> Iterator[list[str]]:
        if name in path:
            yield [*path[path.index(name) :], name]
        elif name not in done:
            for imported in imports[name]:
                yield from visit(imported, [*path, name])
            done.add(name)

    for name in imports:
        yield from visit(name, [])


def _is_for_types(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _constants_of(tree: ast.Module) -> dict[str, str]:
    """Return the module's names for string constants."""
    return {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _text_of(node: ast.expr, constants: Mapping[str, str], place: str) -> str:
    """Return the text of a constant, of a name for one, or of an f-string of them."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.Name) and node.id in constants:
        return constants[node.id]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text_of(node.left, constants, place) + _text_of(node.right, constants, place)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text_of(part, constants, place) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return _text_of(node.value, constants, place)
    raise ValueError(f"{place}: what is imported must be a constant, not {ast.unparse(node)}")
