"""The code blocks of the README and of the pages in docs."""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_FENCED = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<code>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class CodeBlock:
    """A fenced block of a Markdown page."""

    page: str
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        """Say where the block starts."""
        return f"{self.page}:{self.line}"

    @property
    def numbered_code(self) -> str:
        """The code below as many empty lines as precede it, so that a traceback names the page's line."""
        return "\n" * self.line + self.code


def pages() -> list[str]:
    """Return the Markdown pages, relative to the project's root."""
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    return sorted(path.relative_to(ROOT).as_posix() for path in documents)


def code_blocks(*languages: str) -> list[CodeBlock]:
    """Return the blocks of all pages, or those in some languages."""
    blocks = [block for page in pages() for block in _blocks_of(page)]
    return [block for block in blocks if block.language in languages] if languages else blocks


def write_readme_queue(folder: Path) -> Path:
    """Write the queue's file that the README shows, and that its DAGs and commands name; return its path."""
    (declaration,) = (block.code for block in code_blocks("yaml") if block.page == "README.md")
    path = folder / "emails.yaml"
    path.write_text(declaration, encoding="utf-8")
    return path


def _blocks_of(page: str) -> Iterator[CodeBlock]:
    text = (ROOT / page).read_text(encoding="utf-8")
    for found in _FENCED.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        yield CodeBlock(page, line, found["language"], textwrap.dedent(found["code"]))
