"""The environment of commands as a person types them."""

import os
import sys
from pathlib import Path


def terminal_env(url: str) -> dict[str, str]:
    """Return the environment of a terminal: this interpreter's programs, and no settings for NATS but the address.

    :param url: of the nats-server
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("NATS_")}
    return env | {"NATS_URL": url, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
