"""The pages about what users import: Airflow's classes, the hook, the faces of the core, the worker and Spark."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, NamedTuple

from airflow_provider_jetstream.connection_form import CONNECTION_FIELDS
from airflow_provider_jetstream.provider_info import get_provider_info
from tools.reference.arguments import PACKAGE
from tools.reference.entries import Entry, names_of, render_entry
from tools.reference.markdown import code, heading, join, table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_AIRFLOW_INTRO = (
    "What Airflow discovers besides [operators and sensors](operators.md), [triggers](triggers.md) and the"
    " [hook](hook.md)."
)
QUEUE_MODELS = ("WorkQueue", "Consumer", "DeadLetterQueue", "Retention", "Events", "Archive", "Audit")


class ApiPage(NamedTuple):
    """A page of entries.

    :param file: the name of its file
    :param intro: what it is about, and where the guides are
    """

    file: str
    title: str
    intro: str
    entries: list[Entry]


def api_pages() -> list[ApiPage]:
    """Return the pages that consist of entries only."""
    info = get_provider_info()
    core, worker, spark = (list(_face_entries(face)) for face in ("jetstream", "worker", "spark"))
    functions = [entry for entry in core if not isinstance(entry.item, type)]
    classes = [entry for entry in core if isinstance(entry.item, type) and entry.name not in QUEUE_MODELS]
    return [
        ApiPage(
            "operators.md",
            "Operators and sensors",
            "Each waits in the triggerer where `deferrable` is set, and takes the queue as a `WorkQueue`, its dict, or"
            " the path of its YAML. Guides: [publishing](../publishing.md), [waiting](../waiting.md),"
            " [redriving](../redrive.md), [draining](../draining.md), [messages](../events.md),"
            " [Spark in DAGs](../spark-airflow.md).",
            [*_components(info, "operators"), *_components(info, "sensors")],
        ),
        ApiPage(
            "triggers.md",
            "Triggers",
            "Operators and sensors make most of them; DAGs name `JetStreamMessageTrigger`, or"
            ' `MessageQueueTrigger(scheme="jetstream")` ([guide](../events.md)).',
            [
                *_components(info, "triggers"),
                Entry(f"{PACKAGE}.triggers.message_event", "PayloadOptions", with_methods=False),
                *(_entry(path, with_methods=False) for path in info["queues"]),
            ],
        ),
        ApiPage(
            "core-functions.md",
            "Functions of the core",
            "They need neither Airflow nor Spark, and are imported from `airflow_provider_jetstream.jetstream`.",
            functions,
        ),
        ApiPage(
            "core-classes.md",
            "Classes of the core",
            "What the [functions](core-functions.md) take and return, imported from"
            " `airflow_provider_jetstream.jetstream`. The declaration of a queue is on [a page of its"
            " own](queue-fields.md), and so are the [errors](errors.md).",
            classes,
        ),
        ApiPage(
            "worker.md",
            "Classes of the worker",
            "Imported from `airflow_provider_jetstream.worker` ([guide](../worker.md)). Its errors are on the page of"
            " [errors](errors.md).",
            worker,
        ),
        ApiPage(
            "spark-functions.md",
            "Functions for Spark",
            "Imported from `airflow_provider_jetstream.spark` ([reading and writing](../spark.md),"
            " [dead letters](../spark-dead-letters.md), [redriving](../spark-redrive.md)).",
            spark,
        ),
    ]


def airflow_entries() -> list[Entry]:
    """Return what DAGs and deployments name besides operators, sensors, triggers and the hook."""
    info = get_provider_info()
    assets = (info["asset-uris"][0][key] for key in ("handler", "factory", "to_openlineage_converter"))
    return [
        *(_entry(path, with_methods=False) for path in info["notifications"]),
        *(_entry(decorator["class-name"]) for decorator in info["task-decorators"]),
        Entry(f"{PACKAGE}.assets.stream_asset", "queue_asset"),
        Entry(f"{PACKAGE}.assets.stream_asset", "dead_letter_asset"),
        *map(_entry, assets),
        Entry(f"{PACKAGE}.reprocessing", "reprocess_dag"),
        *(_entry(path, with_methods=False) for path in info["extra-links"]),
        Entry(f"{PACKAGE}.plugins.monitor", "JetStreamMonitorPlugin", with_methods=False),
        Entry(f"{PACKAGE}.provider_info", "get_provider_info"),
    ]


def entry_page(page: ApiPage, links: Mapping[str, str]) -> str:
    """Return a page of entries."""
    sections = [render_entry(entry, links, page.file) for entry in page.entries]
    return join([heading(1, page.title), page.intro, *sections])


def airflow_page(links: Mapping[str, str]) -> str:
    """Return the page about the rest of what Airflow discovers, with the settings."""
    file = "airflow.md"
    (section,) = get_provider_info()["config"].values()
    settings = [
        [code(name), option["type"], code(option["default"]), option["description"]]
        for name, option in section["options"].items()
    ]
    fields = [
        [code(name), next(kind for kind in field["schema"]["type"] if kind != "null"), field["description"]]
        for name, field in CONNECTION_FIELDS.items()
    ]
    return join(
        [
            heading(1, "Notifier, decorator, assets, links and settings"),
            _AIRFLOW_INTRO,
            *(render_entry(entry, links, file) for entry in airflow_entries()),
            heading(2, "Settings"),
            "Options of the section `[jetstream]` of Airflow's configuration, for [the page](../monitor.md) in its UI.",
            table(["option", "type", "default", "meaning"], settings),
            heading(2, "Connection fields"),
            "Extras of a connection of type `nats`, besides host, port, login, password ([guide](../connection.md)).",
            table(["field", "type", "meaning"], fields),
        ]
    )


def api_links() -> dict[str, str]:
    """Return where each name is described, as ``page.md#anchor``."""
    links = names_of(airflow_entries(), "airflow.md") | {"JetStreamHook": "hook.md"}
    for page in api_pages():
        links |= names_of(page.entries, page.file)
    return links | {name: f"queue-fields.md#{name.lower()}" for name in QUEUE_MODELS}


def _components(info: dict[str, list[dict[str, list[str]]]], kind: str) -> Iterator[Entry]:
    for group in info[kind]:
        for module in group["python-modules"]:
            for name, value in vars(importlib.import_module(module)).items():
                is_public = name.startswith("JetStream") or name.endswith("Trigger")
                if is_public and isinstance(value, type) and value.__module__ == module:
                    yield Entry(module, name, with_methods=False)


def _entry(path: str, *, with_methods: bool = True) -> Entry:
    module, _, name = path.rpartition(".")
    return Entry(module, name, with_methods)


def _face_entries(face: str) -> Iterator[Entry]:
    module = f"{PACKAGE}.{face}"
    for name in importlib.import_module(module).__all__:
        entry = Entry(module, name)
        if not (isinstance(entry.item, type) and issubclass(entry.item, BaseException)):
            yield entry
