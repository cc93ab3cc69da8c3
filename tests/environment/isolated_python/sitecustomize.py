"""Python as on an isolated shared cluster: it reads and starts nothing, and connects to nothing, that isn't listed.

Every Python process whose ``PYTHONPATH`` begins with this folder obeys it, and writes what it was refused to a file.
"""

import os
import sys
from typing import Any

_READABLE = tuple(os.path.realpath(path) for path in os.environ["ISOLATED_READABLE"].split(os.pathsep))
_ADDRESSES = frozenset(os.environ["ISOLATED_ADDRESSES"].split(","))
_SOCKETS = os.environ["ISOLATED_SOCKETS"]
_REFUSED = os.open(os.environ["ISOLATED_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
_PROGRAMS = frozenset({"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "pty.spawn"})
_CHANGES = frozenset({"os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.chown"})
_DEVICES = frozenset({"/dev/null", "/dev/urandom"})
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC


def _is_allowed(event: str, args: tuple[Any, ...]) -> bool:
    if event in _PROGRAMS or event in _CHANGES:
        return False
    if event == "os.remove":
        return str(args[0]).startswith(_SOCKETS)
    if event == "open" and not isinstance(args[0], int):
        path = os.path.realpath(os.fsdecode(args[0]))
        return path in _DEVICES or (not (args[2] or 0) & _WRITING and path.startswith(_READABLE))
    if event == "socket.connect":
        address = args[1]
        # By sockets of the file system Python talks to the JVM that has started it.
        return isinstance(address, str) or ":".join(map(str, address[:2])) in _ADDRESSES
    return True


def _refuse(event: str, args: tuple[Any, ...]) -> None:
    if not _is_allowed(event, args):
        os.write(_REFUSED, f"{event} {args!r}\n".encode(errors="replace"))
        raise PermissionError(f"not on this cluster: {event} {args!r}")


sys.addaudithook(_refuse)
