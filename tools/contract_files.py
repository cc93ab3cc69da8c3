"""Writes the machine-readable contract, docs/contract, from the models that read these messages."""

import json
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel

from airflow_provider_jetstream.jetstream import Reason, contract
from airflow_provider_jetstream.jetstream.advisories import CancellationRequest, Cancelled, Completion, ReportedAttempt
from airflow_provider_jetstream.jetstream.dead_letters import record
from airflow_provider_jetstream.jetstream.limits import LINE
from airflow_provider_jetstream.jetstream.publishing.manifest_record import ManifestRecord
from tools.queue_schema import DIALECT, queue_schema, without_titles

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "contract"
_BODIES: dict[str, type[BaseModel]] = {
    "completion": Completion,
    "cancelled": Cancelled,
    "cancellation": CancellationRequest,
    "published": ManifestRecord,
    "attempt": ReportedAttempt,
}
_HEADERS = "dead-letter-headers"
# Not every implementation of JSON Schema knows classes of characters.
_CONTROL_CHARACTERS = {r"\p{C}": r"\u0000-\u001f\u007f-\u009f"}
_FORMS: dict[str, dict[str, Any]] = {
    "Version": {"const": record.VERSION},
    "Sequence": {"pattern": "^[0-9]{1,20}$"},
    "Deliveries": {"pattern": "^[0-9]{1,20}$"},
    "Reason": {"enum": [reason.value for reason in Reason]},
    "Traceback-Digest": {"pattern": "^[0-9a-f]{8,64}$"},
    "Seconds": {"pattern": "^[0-9]{1,9}([.][0-9]{1,9})?$"},
    "Fingerprint": {"pattern": "^[0-9a-f]{12}$"},
    "Time": {"format": "date-time"},
    "Stream-Created": {"format": "date-time"},
    "First-Failure": {"format": "date-time"},
    "Last-Failure": {"format": "date-time"},
}
_LINES = ("Explanation", "Error-Class", "Error-Message", "Error-Place", "Traceback", "Worker", "Parked")
_REQUIRED = ("Sequence", "Subject", "Reason")


def contract_files() -> dict[str, str]:
    """Return the content of each file by its name."""
    schemas = {name: _body_schema(model) for name, model in _BODIES.items()}
    schemas |= {_HEADERS: _header_schema(), "queue": queue_schema()}
    found = {f"{name}.schema.json": schema for name, schema in schemas.items()} | {"asyncapi.json": _asyncapi()}
    return {name: json.dumps(content, indent=2, ensure_ascii=False) + "\n" for name, content in found.items()}


def _body_schema(model: type[BaseModel]) -> dict[str, Any]:
    schema = _portable(without_titles(model.model_json_schema()))
    # It tells the bodies apart, so a reader takes none without it.
    schema["required"] = ["type", *schema["required"]]
    schema["description"] = (model.__doc__ or "").partition("\n")[0]
    return {"$schema": DIALECT, "title": schema["properties"]["type"]["const"], **schema}


def _portable(value: Any) -> Any:
    if isinstance(value, list):
        return [_portable(item) for item in value]
    if isinstance(value, dict):
        return {key: _portable(item) for key, item in value.items()}
    if isinstance(value, str):
        for form, plain in _CONTROL_CHARACTERS.items():
            value = value.replace(form, plain)
    return value


def _header_schema() -> dict[str, Any]:
    names = [
        text.removeprefix(record.PREFIX)
        for text in vars(record).values()
        if isinstance(text, str) and text.startswith(record.PREFIX) and text != record.PREFIX
    ]
    line: dict[str, Any] = {"maxLength": LINE, "pattern": r"^[^\u0000-\u001f\u007f]*$"}
    properties = {
        f"{record.PREFIX}{name}": {"type": "string", **(line if name in _LINES else _FORMS.get(name, {}))}
        for name in names
    }
    return {
        "$schema": DIALECT,
        "title": "The headers of a dead letter's record",
        "type": "object",
        "properties": properties | {contract.MSG_ID: {"type": "string"}},
        "required": [f"{record.PREFIX}{name}" for name in _REQUIRED],
        "additionalProperties": {"type": "string"},
    }


def _asyncapi() -> dict[str, Any]:
    queue, consumer, sequence = "{queue}", "{consumer}", cast("int", "{sequence}")
    addresses = {
        "completion": contract.completion_subject(queue, consumer, sequence),
        "cancelled": contract.completion_subject(queue, consumer, sequence),
        "cancellation": contract.cancellation_filter(queue).replace(">", "{token}"),
        "published": contract.manifest_subject(queue, "{key}"),
        "attempt": contract.attempt_subject(queue, consumer, sequence, cast("int", "{delivery}")),
        "dead-letter": contract.copy_subject(queue, consumer, sequence),
    }
    end_id = {
        "type": "object",
        "properties": {
            contract.MSG_ID: {"type": "string", "pattern": r"^done:[^\s.*>]+:[0-9]{1,20}:[0-9]{18,19}(:[^\s:]+)?$"}
        },
        "required": [contract.MSG_ID],
    }
    messages: dict[str, dict[str, Any]] = {
        name: {"contentType": "application/json", "payload": _reference(name)} for name in _BODIES
    }
    messages["completion"]["headers"] = messages["cancelled"]["headers"] = end_id
    messages["dead-letter"] = {"headers": _reference(_HEADERS), "payload": True}
    channels: dict[str, Any] = {}
    for name, address in addresses.items():
        # Both ends of a job have one subject.
        channel = channels.setdefault("end" if name in ("completion", "cancelled") else name, {"address": address})
        channel["parameters"] = {field.partition("}")[0]: {} for field in address.split("{")[1:]}
        channel.setdefault("messages", {})[name] = {"$ref": f"#/components/messages/{name}"}
    return {
        "asyncapi": "3.0.0",
        "info": {"title": "Workers of a work queue", "version": f"{contract.VERSION}.0.0"},
        "defaultContentType": "application/json",
        "channels": channels,
        "operations": {
            "storeEnd": {"action": "send", "channel": {"$ref": "#/channels/end"}},
            "storeDeadLetter": {"action": "send", "channel": {"$ref": "#/channels/dead-letter"}},
            "storeAttempt": {"action": "send", "channel": {"$ref": "#/channels/attempt"}},
            "readCancellation": {"action": "receive", "channel": {"$ref": "#/channels/cancellation"}},
        },
        "components": {"messages": messages},
    }


def _reference(name: str) -> dict[str, str]:
    return {"$ref": f"./{name}.schema.json"}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file_name, text in contract_files().items():
        (FOLDER / file_name).write_text(text, encoding="utf-8")
