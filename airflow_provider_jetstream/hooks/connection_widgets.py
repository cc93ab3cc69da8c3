"""The fields of a connection as Airflow 3.1 reads them from a hook; newer ones read the provider's metadata."""

from __future__ import annotations

from typing import Any

from airflow_provider_jetstream.connection_form import CONNECTION_FIELDS


def form_widgets() -> dict[str, Any]:
    """Return the fields; a number is text there.

    :raises ImportError: nothing is there that shows a form
    """
    from flask_appbuilder.fieldwidgets import BS3PasswordFieldWidget, BS3TextFieldWidget
    from wtforms import BooleanField, PasswordField, StringField
    from wtforms.validators import Optional

    widgets: dict[str, Any] = {}
    for name, field in CONNECTION_FIELDS.items():
        schema = field["schema"]
        default = schema.get("default")
        texts = {"description": field["description"], "default": None if default is None else str(default)}
        if "boolean" in schema["type"]:
            widgets[name] = BooleanField(field["label"], validators=[Optional()], **texts)
        elif schema.get("format") == "password":
            widget = BS3PasswordFieldWidget()
            widgets[name] = PasswordField(field["label"], validators=[Optional()], widget=widget, **texts)
        else:
            widgets[name] = StringField(field["label"], validators=[Optional()], widget=BS3TextFieldWidget(), **texts)
    return widgets
