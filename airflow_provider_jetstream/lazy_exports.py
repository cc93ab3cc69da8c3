"""Lazy package exports: a name's module is imported when the name is first used.

DAG files, workers and Spark tasks import one or two names each; without laziness every import of a package would load
all of its modules. A module says once where its names are defined: by its imports for type checkers, which are read
when the first name is used.
"""

from __future__ import annotations

import re
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_BLOCK: Final = "\nif TYPE_CHECKING:\n"
_IMPORT: Final = re.compile(r"^    from (\S+) import (?:\(([^)]*)\)|(.*))$", re.MULTILINE)


def lazy_exports(package: str) -> Callable[[str], Any]:
    """Make the ``__getattr__`` of a package or module (PEP 562) from its imports for type checkers.

    :param package: its ``__name__``
    :return: the function; it raises :class:`AttributeError` for every other name
    """
    homes: dict[str, str] = {}

    def get_export(name: str) -> Any:
        if not homes and not name.startswith("__"):
            homes.update(_homes(package))
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        export = getattr(import_module(homes[name]), name)
        setattr(sys.modules[package], name, export)
        return export

    return get_export


def _homes(package: str) -> dict[str, str]:
    """Return by name the module that defines each name which a module imports for type checkers."""
    # The loader of a zip file, such as Spark's executors get, has it as well.
    get_source = getattr(getattr(sys.modules[package].__spec__, "loader", None), "get_source", None)
    source: str | None = get_source(package) if get_source else None
    if source is None:
        raise ImportError(
            f"expected the source of {package}, which says where its names are, found none: install the package with"
            " its .py files",
            name=package,
        )
    imports = _IMPORT.findall(source.partition(_BLOCK)[2])
    return {name: module for module, many, few in imports for name in re.findall(r"\w+", many or few)}
