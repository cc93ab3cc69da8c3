"""A table in plain text."""

from collections.abc import Sequence


def text_table(head: tuple[str, ...], rows: Sequence[tuple[object, ...]]) -> str:
    """Align columns: the first one to the left, the others to the right."""
    lines = [head, *(tuple(str(value) for value in row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    padded = [
        "  ".join(
            value.ljust(width) if column == 0 else value.rjust(width)
            for column, (value, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return "\n".join([padded[0], "  ".join("-" * width for width in widths), *padded[1:]])
