"""The code blocks of the README and of the pages in docs, and the sections of a page."""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIRST_STEPS = "docs/first-steps.md"

_FENCED = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<code>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"# ([\w./-]+\.(?:py|yaml))\n")


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

    @property
    def file(self) -> str | None:
        """The path of the file that the block is, which a comment in its first line names."""
        found = _FILE.match(self.code)
        return found[1] if found else None

    def is_printed_in(self, output: str, *, wholly: bool = True) -> bool:
        """Return whether a program has printed what the block shows.

        In the block ``…`` stands for anything within a line; the widths of columns don't count.

        :param wholly: the block is all of the output; else each of its lines is part of a line there, in this order
        """
        shown = [_line_pattern(line) for line in self.code.splitlines()]
        printed = output.strip().splitlines()
        if wholly:
            return len(shown) == len(printed) and all(map(re.Pattern[str].fullmatch, shown, printed))
        left = iter(printed)
        return all(any(pattern.search(line) for line in left) for pattern in shown)


@dataclass(frozen=True)
class Section:
    """What is under a heading of the second level.

    :param text: without the code blocks, in one line
    """

    title: str
    text: str
    blocks: tuple[CodeBlock, ...]


def pages() -> list[str]:
    """Return the Markdown pages, relative to the project's root."""
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    return sorted(path.relative_to(ROOT).as_posix() for path in documents)


def code_blocks(*languages: str) -> list[CodeBlock]:
    """Return the blocks of all pages, or those in some languages."""
    blocks = [block for page in pages() for block in _blocks_of(page)]
    return [block for block in blocks if block.language in languages] if languages else blocks


def sections(page: str) -> list[Section]:
    """Return the sections of a page, in their order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    starts = [*re.finditer(r"^## (.+)$", text, re.MULTILINE)]
    ends = [*(start.start() for start in starts[1:]), len(text)]
    return [
        Section(
            start[1],
            " ".join(_FENCED.sub("", text[start.end() : end]).split()),
            tuple(block for block in _blocks_of(page) if start.start() <= _offset(text, block.line) < end),
        )
        for start, end in zip(starts, ends, strict=True)
    ]


def write_readme_queue(folder: Path) -> Path:
    """Write the queue's file that the first steps show, and that the README's DAG names; return its path."""
    (declaration,) = (block.code for block in code_blocks("yaml") if block.page == FIRST_STEPS)
    path = folder / "emails.yaml"
    path.write_text(declaration, encoding="utf-8")
    return path


def _blocks_of(page: str) -> Iterator[CodeBlock]:
    text = (ROOT / page).read_text(encoding="utf-8")
    for found in _FENCED.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        yield CodeBlock(page, line, found["language"], textwrap.dedent(found["code"]))


def _offset(text: str, line: int) -> int:
    return sum(map(len, text.splitlines(keepends=True)[: line - 1]))


def _line_pattern(line: str) -> re.Pattern[str]:
    words = (".*".join(map(re.escape, word.split("…"))) for word in line.split())
    return re.compile(" *" + " +".join(words) + " *")
