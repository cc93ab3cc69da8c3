"""The package's source code, parsed: its modules, what each imports, and which classes it defines."""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import airflow_provider_jetstream

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(airflow_provider_jetstream.__file__).parent


@dataclass(frozen=True)
class Module:
    """One source file."""

    #: Its name within the package, ``jetstream.client.connection``; that of the package itself is empty.
    name: str
    path: Path

    @cached_property
    def source(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @property
    def room(self) -> str:
        """The folder directly below the package; empty for a module beside the folders."""
        first, _, rest = self.name.partition(".")
        return first if rest or self.path.name == "__init__.py" else ""


@functools.cache
def package_of_tests() -> Package:
    """Return the package, which each process parses once: its tests are in one group."""
    return Package()


class Package:
    """All modules below a folder."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        self._imported_names: dict[str, set[str]] = {}
        self.modules = {module.name: module for module in sorted(_modules(root), key=lambda module: module.name)}

    def in_rooms(self, *rooms: str) -> list[Module]:
        """Return the modules of these folders."""
        return [module for module in self.modules.values() if module.room in rooms]

    def imported_names(self, module: Module) -> set[str]:
        """Return the full dotted names that a module imports: in functions and for type checkers too."""
        if module.name not in self._imported_names:
            self._imported_names[module.name] = set(self._imports_of(module))
        return self._imported_names[module.name]

    def _imports_of(self, module: Module) -> Iterator[str]:
        package = (self.root.name, *module.path.relative_to(self.root).parent.parts)
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                above = package[: len(package) - node.level + 1] if node.level else ()
                base = ".".join([*above, *([node.module] if node.module else [])])
                # A name may be a module of its own: "from package import module".
                yield from (f"{base}.{alias.name}" for alias in node.names)
            elif (
                isinstance(node, ast.Call)
                and _last_name(node.func) in ("import_module", "__import__")
                and node.args
                and isinstance(node.args[0], ast.Constant)
            ):
                yield str(node.args[0].value)

    def distributions(self, module: Module) -> set[str]:
        """Return the first part of each imported name."""
        return {name.split(".")[0] for name in self.imported_names(module)}

    def own_imports(self, module: Module) -> set[str]:
        """Return the package's own modules that a module imports, itself excluded."""
        below = f"{self.root.name}."
        names = {name.removeprefix(below) for name in self.imported_names(module) if name.startswith(below)}
        return {self._module_of(name) for name in names} - {module.name, ""}

    @cached_property
    def imports(self) -> Mapping[str, set[str]]:
        """The package's own imports, by module."""
        return {name: self.own_imports(module) for name, module in self.modules.items()}

    def class_definitions(self) -> Iterator[tuple[str, Module]]:
        """Yield the classes that modules define at their top level."""
        for module in self.modules.values():
            yield from ((node.name, module) for node in module.tree.body if isinstance(node, ast.ClassDef))

    def _module_of(self, name: str) -> str:
        while name and name not in self.modules:
            name = name.rpartition(".")[0]
        return name


def _last_name(function: ast.expr) -> str:
    # Without the text of each call of the package, which takes most of the time.
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _modules(root: Path) -> Iterator[Module]:
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        yield Module(".".join(parts[:-1] if parts[-1] == "__init__" else parts), path)


def circles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other: Tarjan's strongly connected components."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = lowest[node] = len(index)
        stack.append(node)
        for target in imports.get(node, ()):
            if target not in index:
                visit(target)
            if target in stack:
                lowest[node] = min(lowest[node], lowest[target])
        if lowest[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                groups.append(sorted(group))

    for node in imports:
        if node not in index:
            visit(node)
    return sorted(groups)
