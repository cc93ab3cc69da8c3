"""Docstrings in their parts."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field

from docstring_parser import DocstringStyle, parse, parse_from_object

_FIRST_FIELD = re.compile(r"^:(?=param|ivar|return|raises)", re.MULTILINE)


@dataclass(frozen=True)
class DocText:
    """What a docstring says."""

    summary: str = ""
    description: str = ""
    arguments: dict[str, str] = field(default_factory=dict)
    returns: str = ""
    raises: dict[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Summary and description."""
        return f"{self.summary}\n\n{self.description}".strip()


def own_docstring(item: object) -> DocText:
    """Parse the docstring of an object itself, not one that it inherits or that a dataclass has made."""
    text = inspect.cleandoc((vars(item).get("__doc__") if isinstance(item, type) else item.__doc__) or "")
    if isinstance(item, type) and text.startswith(f"{item.__name__}("):
        text = ""
    before = _FIRST_FIELD.split(text, maxsplit=1)[0].strip()
    summary, _, description = before.partition("\n\n")
    parsed = parse(text, style=DocstringStyle.REST)
    returns = parsed.returns.description or "" if parsed.returns else ""
    raises = {found.type_name or "": found.description or "" for found in parsed.raises}
    arguments = {found.arg_name: found.description or "" for found in parsed.params}
    return DocText(" ".join(summary.split()), description.strip(), arguments, returns, raises)


def attribute_texts(item: type) -> dict[str, str]:
    """Return the docstrings that follow a class's attributes, such as the members of an enumeration."""
    documented = own_docstring(item).arguments
    found = {param.arg_name: param.description or "" for param in parse_from_object(item, DocstringStyle.REST).params}
    return {name: text for name, text in found.items() if name not in documented}
