"""Numbers on the command line."""

from __future__ import annotations

import argparse
from math import isfinite

from airflow_provider_jetstream.jetstream.limits import SEQUENCE

_MAX_PORT = 65_535


def positive_int(text: str) -> int:
    """Parse a whole number of at least 1, as large as a stream sequence at most."""
    digits = len(str(SEQUENCE))
    if not (text.isascii() and text.isdecimal() and len(text) <= digits and 1 <= int(text) <= SEQUENCE):
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, found {text!r}")
    return int(text)


def positive_float(text: str) -> float:
    """Parse a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not (isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"expected a number above 0, found {text!r}")
    return value


def port(text: str) -> int:
    """Parse a TCP port; 0 means any."""
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(_MAX_PORT)) and int(text) <= _MAX_PORT):
        raise argparse.ArgumentTypeError(f"expected a port from 0 (any) to {_MAX_PORT}, found {text!r}")
    return int(text)
