"""Runs stored triggers as a triggerer does, in a process that a test can kill.

Arguments: a file with class paths and arguments as JSON lines, and the file to which the events are appended.
"""

from __future__ import annotations

import asyncio
import json
import pkgutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from airflow.triggers.base import BaseTrigger


async def run(stored: list[tuple[str, dict[str, Any]]], fired: Path) -> None:
    """Run every trigger until all have fired."""

    async def run_one(number: int, path: str, kwargs: dict[str, Any]) -> None:
        trigger: BaseTrigger = pkgutil.resolve_name(path)(**kwargs)
        async for event in trigger.run():
            with fired.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"trigger": number, "event": event.payload}) + "\n")

    await asyncio.gather(*(run_one(number, path, kwargs) for number, (path, kwargs) in enumerate(stored)))


if __name__ == "__main__":
    lines = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
    asyncio.run(run([json.loads(line) for line in lines], Path(sys.argv[2])))
