"""What docker/Dockerfile installs into the images, without an engine that builds them."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from testbed.environments import find_uv

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
_TIME_LIMIT = 300


def copied_sources() -> list[str]:
    """Return what is copied from this repository into the images that are built."""
    copies = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE.read_text(), re.MULTILINE)
    return [source for line in copies for source in line.split()]


def installations() -> dict[str, list[str]]:
    """Return the options of ``uv sync`` for the environment of each image."""
    found = re.findall(r"AS (\w+)-environment\nRUN uv sync (.+)$", DOCKERFILE.read_text(), re.MULTILINE)
    return {image: options.split() for image, options in found}


def create_image_environment(image: str, folder: Path, *, compiled: bool = False) -> Path:
    """Create the environment of an image from what is copied into it, and return the folder of its programs.

    :param compiled: have all bytecode now, for programs that start at the same time and would each compile the same
    """
    sources = folder / "src"
    sources.mkdir(parents=True)
    for name in copied_sources():
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, sources / name)
    settings = {"UV_PROJECT_ENVIRONMENT": str(folder / "environment"), "UV_PYTHON": sys.executable}
    if compiled:
        settings["UV_COMPILE_BYTECODE"] = "1"
    done = subprocess.run(
        [find_uv(), "sync", "--quiet", *installations()[image]],
        cwd=sources,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=_TIME_LIMIT,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the environment of the image {image} can't be created: {done.stderr.strip()}")
    return folder / "environment" / "bin"
