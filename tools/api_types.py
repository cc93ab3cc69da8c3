"""Writes the types of the page's scripts, from the models that its API answers with."""

import importlib
import pkgutil
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from airflow_provider_jetstream.plugins.monitor import models

TYPES = Path(__file__).resolve().parent.parent / "web" / "src" / "api_types.d.ts"
_HEAD = "/** Made from airflow_provider_jetstream/plugins/monitor/models by `make api-types`. */\n"
_SIMPLE = {"integer": "number", "number": "number", "string": "string", "boolean": "boolean", "null": "null"}


def page_types() -> str:
    """Return the models as TypeScript."""
    found: list[type[BaseModel]] = []
    for module in pkgutil.iter_modules(models.__path__):
        imported = importlib.import_module(f"{models.__name__}.{module.name}")
        found += [
            item
            for item in vars(imported).values()
            if isinstance(item, type) and issubclass(item, BaseModel) and item.__module__ == imported.__name__
        ]
    _, schema = models_json_schema([(model, "serialization") for model in found])
    return _HEAD + "".join(_definition(name, item) for name, item in sorted(schema["$defs"].items()))


def _definition(name: str, schema: dict[str, Any]) -> str:
    if "properties" not in schema:
        return f"\nexport type {name} = {_type(schema)};\n"
    fields = "".join(f"  {field}: {_type(item)};\n" for field, item in schema["properties"].items())
    return f"\nexport interface {name} {{\n{fields}}}\n"


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "enum" in schema or "const" in schema:
        return " | ".join(f'"{value}"' for value in schema.get("enum", [schema.get("const")]))
    if "anyOf" in schema:
        return " | ".join(_type(item) for item in schema["anyOf"])
    return _container(schema) or _SIMPLE.get(str(schema.get("type")), "any")


def _container(schema: dict[str, Any]) -> str | None:
    if "prefixItems" in schema:
        return f"[{', '.join(_type(item) for item in schema['prefixItems'])}]"
    if schema.get("type") == "array":
        return f"({_type(schema.get('items', {}))})[]"
    if schema.get("type") == "object":
        values = schema.get("additionalProperties")
        return f"Record<string, {_type(values) if isinstance(values, dict) else 'any'}>"
    return None


if __name__ == "__main__":
    TYPES.write_text(page_types())
