"""The JSON Schema of a queue's file, for editors: made from the declaration's models.

It says of each value what the loader says. What is about several values, such as filters that overlap, only the loader
can say: ``jetstream-queue lint``.
"""

import re
from typing import Any

from airflow_provider_jetstream.jetstream import (
    Archive,
    Attempts,
    Audit,
    Consumer,
    DeadLetterQueue,
    Events,
    Retention,
    Schedules,
    WorkQueue,
)
from airflow_provider_jetstream.jetstream.queue.declaration import Stream

_PARAM = re.compile(r":(?:param|ivar) (\w+): (.*?)(?=\n\s*:|\Z)", re.DOTALL)
_MODELS = (WorkQueue, Consumer, DeadLetterQueue, Events, Archive, Audit, Schedules, Attempts, Retention)
_ONE_OR_MORE = ("subjects", "advisory_subjects")
# They have a name by default, and may be declared by True and False.
_NAMED_BY_DEFAULT = ("archive", "audit", "schedules", "attempts")
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def queue_schema() -> dict[str, Any]:
    """Return the schema of a queue's YAML file."""
    schema = without_titles(WorkQueue.model_json_schema())
    definitions = schema["$defs"]
    described = {model.__name__: model for model in _MODELS}
    for name, definition in [("WorkQueue", schema), *definitions.items()]:
        # What a model says of a field counts before what its base says.
        for model in (Stream, described[name]):
            _describe(definition, model.__doc__ or "")
    for name in ("Archive", "Audit", "Schedules", "Attempts"):
        definitions[name].pop("required")
    # It follows from partitions.
    definitions["Consumer"]["properties"].pop("partition")
    filters = definitions["Consumer"]["properties"]
    filters["filter_subject"] = {"type": "string", "description": "the subjects of its jobs, as one filter"}
    definitions["Consumer"]["not"] = {"required": ["filter_subject", "filter_subjects"]}
    properties = schema["properties"]
    for field in _ONE_OR_MORE:
        declared = properties[field]
        declared["anyOf"] = [{"type": "string"}, {"type": declared.pop("type"), "items": declared.pop("items")}]
    for field in ("dead_letters", "events", *_NAMED_BY_DEFAULT):
        properties[field]["anyOf"].append({"type": "string"})
        if field in _NAMED_BY_DEFAULT:
            properties[field]["anyOf"].append({"type": "boolean"})
    schema["required"] = ["name", "subjects"]
    return {"$schema": DIALECT, "title": "A work queue of airflow-provider-jetstream", **schema}


def without_titles(value: Any) -> Any:
    """Return a schema without the titles that pydantic makes of names; a property called title stays."""
    if isinstance(value, list):
        return [without_titles(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: without_titles(item) for key, item in value.items() if not (key == "title" and isinstance(item, str))}


def _describe(definition: dict[str, Any], docstring: str) -> None:
    text, _, _ = docstring.partition("\n")
    definition["description"] = _plain(text)
    for field, meaning in _PARAM.findall(docstring):
        if (described := definition["properties"].get(field)) is not None:
            described["description"] = _plain(meaning)


def _plain(text: str) -> str:
    return " ".join(text.replace("``", "`").split())
