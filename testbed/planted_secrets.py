"""Secrets that are planted to be looked for afterwards, in every form in which something may have written them."""

import base64
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from uuid import uuid4

import psutil

# Every planted secret contains it. A seed of NATS is Base32, so it has only letters of that alphabet.
MARKER = "PLANTEDSEKRETQXZ"
# Quoted, escaped or encoded by whatever writes it; the marker beside them is not.
_SPECIAL = "@:/,%+&\"\\' \u00fc"
_NEAR = 40


def planted(name: str, *, plain: bool = False) -> str:
    """Make a secret that begins with its name.

    :param plain: whether it has only letters, digits and dashes
    """
    return f"{name}-{MARKER}-{uuid4().hex}{'' if plain else _SPECIAL + MARKER}"


def planted_seed_bytes() -> bytes:
    """Make the bytes of a key whose seed, in its Base32, contains the marker."""
    text = f"SUAA{MARKER}{base64.b32encode(uuid4().bytes * 2).decode()[: 56 - 4 - len(MARKER)]}"
    # Two bytes of prefix are in front of the key's 32; the checksum that follows is the encoder's.
    return base64.b32decode(text)[2:34]


@lru_cache(maxsize=1)
def _pattern() -> re.Pattern[bytes]:
    marker = MARKER.encode()
    forms = {marker, marker.lower(), MARKER.encode("utf-16-le"), marker.hex().encode(), marker.hex().upper().encode()}
    forms |= {marker[::-1], base64.b32encode(marker).rstrip(b"=")[:-1]}
    for shift in range(3):
        encoded = base64.b64encode(b"\0" * shift + marker)
        # Without the characters that depend on what is in front and behind.
        forms.add(encoded[0 if shift == 0 else 4 : len(encoded) - 4])
    return re.compile(b"|".join(map(re.escape, forms)))


def places_of_secrets(content: bytes) -> list[str]:
    """Return what is in front of each planted secret in some bytes: plain, quoted, as Base64, hexadecimal or UTF-16."""
    found = _pattern().finditer(content)
    return [content[max(0, match.start() - _NEAR) : match.start()].decode(errors="replace") for match in found]


def files_with_secrets(folders: Iterable[Path]) -> dict[str, list[str]]:
    """Return the files below some folders that contain a planted secret, and what is in front of it."""
    found = {}
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file() and (places := places_of_secrets(path.read_bytes())):
                found[str(path)] = places
    return found


def processes_with_secrets(
    known: Callable[[psutil.Process, str], bool] = lambda _process, _variable: False,
) -> dict[str, str]:
    """Return the running processes that show a planted secret in their command line or environment.

    :param known: returns whether a process is to have it in a variable
    """
    found = {}
    for process in psutil.process_iter():
        try:
            command = "\0".join(process.cmdline())
            if places_of_secrets(command.encode(errors="replace")):
                found[f"{process.pid} {process.name()}"] = "command line"
            for variable, value in process.environ().items():
                if places_of_secrets(value.encode(errors="replace")) and not known(process, variable):
                    found[f"{process.pid} {command[:200]}"] = variable
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess, OSError):
            continue
    return found
