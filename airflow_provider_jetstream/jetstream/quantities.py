"""Durations and sizes as fields of models; see :mod:`.units` for how they are written."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

from airflow_provider_jetstream.jetstream.units import parse_duration, parse_size

Duration = Annotated[int, BeforeValidator(parse_duration)]
Size = Annotated[int, BeforeValidator(parse_size)]
