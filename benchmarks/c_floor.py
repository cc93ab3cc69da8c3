"""Compiles the C programs of benchmarks/floor, where there is a compiler, and runs them."""

import functools
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

from benchmarks.report import Sample, server_cpu
from testbed.nats_server import NatsServer

_SOURCES = Path(__file__).resolve().parent / "floor"


@functools.cache
def compiled(name: str) -> Path | None:
    """Compile a program and return its path; ``None`` where the machine has no compiler."""
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None:
        return None
    program = Path(tempfile.mkdtemp(prefix="c-floor-")) / name
    subprocess.run([compiler, "-O2", "-o", program, _SOURCES / f"{name}.c"], check=True)
    return program


def run_floor(program: Path, server: NatsServer, *arguments: object) -> Sample:
    """Run a compiled program, which gets the server's port and more arguments."""
    before = server_cpu(server)
    ended = subprocess.run(
        [program, str(server.port), *map(str, arguments)], check=True, capture_output=True, text=True
    )
    figures: dict[str, float] = json.loads(ended.stdout)
    return Sample(int(figures["count"]), figures["seconds"], figures["cpu"], server_cpu(server) - before)
