"""docs/reference is what the code gives, has every public name, and says of each what a user needs."""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING, Any

import pytest
from test_exported_names import _AIRFLOW_NAMES, _FACES

from airflow_provider_jetstream.provider_info import get_provider_info
from airflow_provider_jetstream.spark.source.options import OPTIONS, option_names, read_options, write_options
from tools.reference.arguments import class_arguments
from tools.reference.docstrings import own_docstring
from tools.reference.pages import FOLDER, reference_links, reference_pages, reference_problems
from tools.room_picture import PICTURE, picture

if TYPE_CHECKING:
    from airflow_provider_jetstream.spark.source.options import Purpose

_PACKAGE = "airflow_provider_jetstream"
PAGES = reference_pages()
# The programs have pages of their own.
_PROGRAMS = {"main"}


def test_the_pages_are_what_the_code_gives() -> None:
    stored = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.iterdir()}
    different = [name for name in stored.keys() | PAGES.keys() if stored.get(name) != PAGES.get(name)]
    assert not different, f"run make reference: {different}"


def test_the_picture_of_the_rooms_is_what_the_imports_give() -> None:
    assert PICTURE.read_text(encoding="utf-8") == picture(), "run make reference"


def test_nothing_lacks_a_description_a_type_or_a_meaning() -> None:
    assert reference_problems() == []


def _public_names() -> set[str]:
    info = get_provider_info()
    names = {name for face in _FACES for name in importlib.import_module(f"{_PACKAGE}.{face}").__all__}
    named = [*_AIRFLOW_NAMES, *info["queues"], *info["notifications"], *info["extra-links"]]
    named += [decorator["class-name"] for decorator in info["task-decorators"]]
    named += [value for uris in info["asset-uris"] for key, value in uris.items() if key != "schemes"]
    named += [kind["hook-class-name"] for kind in info["connection-types"]]
    for kind in ("operators", "sensors", "triggers", "hooks"):
        for module in (module for group in info[kind] for module in group["python-modules"]):
            values = vars(importlib.import_module(module))
            named += [
                name
                for name, value in values.items()
                if isinstance(value, type)
                and value.__module__ == module
                and (name.startswith("JetStream") or name.endswith("Trigger"))
            ]
    return (names | {name.rpartition(".")[2] for name in named}) - _PROGRAMS


def test_every_public_name_has_a_section() -> None:
    links, names = reference_links(), _public_names()
    assert len(names) > 150
    assert sorted(names - links.keys()) == []
    for name in names:
        page, _, anchor = links[name].partition("#")
        headings = [line.lstrip("#") for line in PAGES[page].splitlines() if line.startswith("#")]
        anchors = [re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings]
        assert not anchor or anchors.count(anchor) == 1, f"{links[name]}: {anchors.count(anchor)} headings"


@pytest.mark.parametrize("purpose", ["read", "readStream", "write", "writeStream"])
def test_a_default_of_a_spark_option_is_what_its_absence_means(purpose: Purpose) -> None:
    stream = {"stream": "orders"}
    parse: Any = read_options if purpose.startswith("read") else write_options
    for name in option_names(purpose):
        option = OPTIONS.get(name)
        if option and option.default:
            assert parse(stream | {name: option.default}, purpose) == parse(stream, purpose), name


class _Base:
    """A base.

    :param room: seconds
    """

    def __init__(self, room: float, *, shape: str = "round", colour: str = "red") -> None:
        """Take both."""


class _Derived(_Base):
    """A class whose base takes further arguments.

    :param size: bytes, as :func:`~package.module.parse_size` parses ``"1MB"``
    :raises ValueError: it is too large
    """

    def __init__(self, size: int | None = None, **further: Any) -> None:
        super().__init__(colour="blue", **further)
        self.size = size

    def grow(self) -> None: ...


def test_arguments_that_go_to_a_base_are_listed_unless_the_class_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.reference.arguments.PACKAGE", __name__)
    listed = {argument.name: argument for argument in class_arguments(_Derived)}
    assert list(listed) == ["room", "size", "shape"]
    assert listed["size"][1:3] == ("int | None", "`None`")
    assert listed["room"][1:] == ("float", "required", "seconds")
    assert listed["shape"].problems == ["shape has no text"]
    assert own_docstring(_Derived).raises == {"ValueError": "it is too large"}
