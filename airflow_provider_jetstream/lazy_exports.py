"""Lazy package exports: a name's module is imported when the name is first used.

DAG files, workers and Spark tasks import one or two names each; without laziness every import of a package would load
all of its modules.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


def lazy_exports(
    package: str, modules: Mapping[str, Iterable[str]], *, root: str | None = None
) -> Callable[[str], Any]:
    """Make the ``__getattr__`` of a package or module (PEP 562).

    :param package: its ``__name__``
    :param modules: the exported names by the module that defines them
    :param root: the package that the names of modules are relative to; ``package`` itself where absent
    :return: the function; it raises :class:`AttributeError` for every other name
    """
    module_of = {name: module for module, names in modules.items() for name in names}

    def get_export(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        export = getattr(import_module(f"{root or package}.{module_of[name]}"), name)
        setattr(sys.modules[package], name, export)
        return export

    return get_export
