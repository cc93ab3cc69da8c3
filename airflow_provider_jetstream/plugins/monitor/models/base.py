"""The base of the page's models."""

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from airflow_provider_jetstream.jetstream.client.wire_text import readable_text


class MonitorModel(BaseModel):
    """Base of the page's models: immutable, without unknown fields, and with text that JSON can hold."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _make_readable(cls, values: Any) -> Any:
        return _readable(values)


def _readable(value: Any) -> Any:
    # Text of the wire may stand for any bytes: in subjects, headers, names, and what is made of them.
    if isinstance(value, str):
        return readable_text(value)
    if isinstance(value, dict):
        return {_readable(name): _readable(item) for name, item in value.items()}
    return type(value)(map(_readable, value)) if type(value) in (list, tuple) else value
