from __future__ import annotations

import importlib
import inspect
import json
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import airflow
import jsonschema
import pytest
from airflow.api_fastapi.core_api.services.ui.connections import HookMetaService
from packaging.utils import canonicalize_name

import airflow_provider_jetstream
from airflow_provider_jetstream import __version__
from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings
from airflow_provider_jetstream.provider_info import get_provider_info

if TYPE_CHECKING:
    from pytest_mock import MockerFixture

_PACKAGE = "airflow_provider_jetstream"
_INFO = get_provider_info()
_COMPONENTS = ("hooks", "operators", "sensors", "triggers")


def _schema() -> dict[str, Any]:
    schema: dict[str, Any] = json.loads((Path(airflow.__file__).parent / "provider_info.schema.json").read_text())
    return schema


def _resolve(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _is_component(name: str) -> bool:
    return name.startswith("JetStream") or name.endswith("Trigger")


def test_it_follows_airflows_own_schema() -> None:
    jsonschema.validate(_INFO, _schema())


def test_the_package_name_is_the_distributions_canonical_name() -> None:
    distribution = metadata.distribution("airflow-provider-jetstream")
    assert _INFO["package-name"] == canonicalize_name(distribution.metadata["Name"])
    assert _INFO["versions"] == [distribution.version] == [__version__]


@pytest.mark.parametrize("kind", _COMPONENTS)
def test_every_component_of_the_package_is_in_a_named_module(kind: str) -> None:
    named = {module for group in _INFO[kind] for module in group["python-modules"]}
    folder = Path(airflow_provider_jetstream.__file__).parent / kind
    modules = [importlib.import_module(f"{_PACKAGE}.{kind}.{file.stem}") for file in folder.glob("[a-z]*.py")]
    holding = {
        module.__name__
        for module in modules
        for name, value in vars(module).items()
        if _is_component(name) and value.__module__ == module.__name__ and not inspect.isabstract(value)
    }
    assert holding == named


def test_every_integration_of_a_component_is_declared() -> None:
    declared = {integration["integration-name"] for integration in _INFO["integrations"]}
    used = {group["integration-name"] for kind in _COMPONENTS for group in _INFO[kind]}
    assert used == declared


def test_the_connection_type_is_the_hooks_own() -> None:
    (connection_type,) = _INFO["connection-types"]
    hook = _resolve(connection_type["hook-class-name"])
    assert connection_type["connection-type"] == hook.conn_type == "nats"
    assert connection_type["hook-name"] == hook.hook_name
    assert hook.default_conn_name == "nats_default"


def test_the_form_has_the_fields_of_the_settings_and_masks_secrets() -> None:
    (connection_type,) = _INFO["connection-types"]
    fields = connection_type["conn-fields"]
    assert set(fields) == set(ConnectionSettings.model_fields) - {"servers", "user", "password", "name"}
    secret = {name for name, field in ConnectionSettings.model_fields.items() if "SecretStr" in str(field.annotation)}
    masked = {name for name, field in fields.items() if field["schema"].get("format") == "password"}
    assert masked == secret - {"password"}
    # Airflow masks the values of such names in logs.
    assert all("secret" in name or "token" in name for name in masked)
    for field in fields.values():
        jsonschema.Draft202012Validator.check_schema(field["schema"])


def test_every_guide_is_a_page_and_the_logo_is_one_that_the_plugin_serves() -> None:
    (integration,) = _INFO["integrations"]
    root = Path(__file__).resolve().parents[2]
    assert [page for page in integration["how-to-guide"] if not (root / page.removeprefix("/")).exists()] == []
    static = Path(airflow_provider_jetstream.__file__).parent / "plugins" / "monitor" / "static"
    assert (static / integration["logo"].rpartition("/")[2]).exists()


def test_every_named_class_and_function_can_be_loaded() -> None:
    (assets,) = _INFO["asset-uris"]
    names = [value for key, value in assets.items() if key != "schemes"]
    names += [*_INFO["notifications"], *_INFO["extra-links"], *_INFO.get("queues", ())]
    names += [decorator["class-name"] for decorator in _INFO.get("task-decorators", ())]
    assert all(callable(_resolve(name)) for name in names)


def _tasks() -> list[Any]:
    """Return the operators and sensors that a DAG uses."""
    modules = [
        importlib.import_module(module)
        for kind in ("operators", "sensors")
        for group in _INFO[kind]
        for module in group["python-modules"]
    ]
    return [
        value
        for module in modules
        for name, value in vars(module).items()
        if name.startswith("JetStream") and value.__module__ == module.__name__
    ]


def test_every_task_has_links_and_shows_its_fields_as_what_they_are() -> None:
    tasks = _tasks()
    assert len(tasks) >= 8
    listed = set(_INFO["extra-links"])
    for task in tasks:
        assert task.operator_extra_links, task
        links = {f"{type(link).__module__}.{type(link).__name__}" for link in task.operator_extra_links}
        assert links <= listed
        assert task.template_fields_renderers, task
        assert set(task.template_fields_renderers) <= set(task.template_fields), task


def test_airflow_3_1_reads_the_same_form_from_the_hook(mocker: MockerFixture) -> None:
    # What Airflow 3.1 puts in the place of a form's library, which isn't installed.
    service = HookMetaService
    mocker.patch.dict(
        sys.modules,
        {
            "wtforms": SimpleNamespace(
                BooleanField=service.MockBooleanField,
                PasswordField=service.MockPasswordField,
                StringField=service.MockStringField,
            ),
            "wtforms.validators": SimpleNamespace(Optional=service.MockOptional),
            "flask_appbuilder": SimpleNamespace(),
            "flask_appbuilder.fieldwidgets": SimpleNamespace(
                BS3PasswordFieldWidget=service.MockAnyWidget, BS3TextFieldWidget=service.MockAnyWidget
            ),
        },
    )
    (connection_type,) = _INFO["connection-types"]
    hook = _resolve(connection_type["hook-class-name"])
    # Airflow reads them of the class itself only.
    assert {"get_connection_form_widgets", "get_ui_field_behaviour"} <= set(vars(hook))
    widgets = {name: widget.param.dump() for name, widget in hook.get_connection_form_widgets().items()}
    fields = connection_type["conn-fields"]
    assert set(widgets) == set(fields)
    for name, widget in widgets.items():
        schema = fields[name]["schema"]
        kind = "string" if "number" in schema["type"] else schema["type"][0]
        assert widget["schema"]["type"] == [kind, "null"]
        assert (widget["schema"]["title"], widget["description"]) == (
            fields[name]["label"],
            fields[name]["description"],
        )
        assert widget["schema"].get("format") == schema.get("format")
    assert hook.get_ui_field_behaviour()["hidden_fields"] == ["schema", "extra"]


def test_every_entry_point_can_be_loaded() -> None:
    points = {
        (point.group, point.name): point for point in metadata.distribution("airflow-provider-jetstream").entry_points
    }
    assert points["apache_airflow_provider", "provider_info"].load() is get_provider_info
    assert points["airflow.plugins", "jetstream_monitor"].load().name
    for program in ("jetstream-queue", "jetstream-worker"):
        assert callable(points["console_scripts", program].load())
    assert len(points) == 4
