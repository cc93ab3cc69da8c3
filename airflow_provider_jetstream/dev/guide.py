"""What people read first: the addresses, the login, and what to click next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

USER: Final = "admin"
# No secret: the servers listen on the loopback address only.
PASSWORD: Final = "admin"  # noqa: S105
_NEXT: Final = """\
Click next:
  1. Log in. The page lists the queues: jobs of receipts and thumbnails die, nobody works on reminders.
  2. Open receipts, then its dead letters: addresses in capitals still fail, mailboxes were busy only at first.
  3. Redrive the letters of MailboxBusyError: those receipts are sent now.
  4. {airflow}/dags/{dag} is a DAG that publishes jobs and waits for them.
In another terminal:
  jetstream-queue letters diagnose receipts --server {nats}
Ctrl-C stops everything and removes {folder}."""
_OWN_DAGS: Final = """\
Airflow reads the DAGs in {dags}; those of a new file appear within seconds.
Ctrl-C stops everything and removes {folder}."""


def page_url(airflow_url: str) -> str:
    """Return the address of the page in an Airflow."""
    return f"{airflow_url}/plugin/jetstream"


def addresses(airflow_url: str, nats_url: str) -> str:
    """Return the lines with addresses and login, which are printed before the slow part begins."""
    page = page_url(airflow_url)
    return f"Page:  {page}   user {USER}, password {PASSWORD}   (answers in a few seconds)\nNATS:  {nats_url}"


def next_steps(airflow_url: str, nats_url: str, dag_id: str, folder: Path) -> str:
    """Return what to click next where the example queues are busy.

    :param dag_id: a DAG that publishes jobs and waits for them
    :param folder: what is removed at the end
    """
    return _NEXT.format(airflow=airflow_url, nats=nats_url, dag=dag_id, folder=folder)


def own_dags_steps(dags: Path, folder: Path) -> str:
    """Return what comes next where Airflow has the user's own DAGs.

    :param dags: their folder
    :param folder: what is removed at the end
    """
    return _OWN_DAGS.format(dags=dags, folder=folder)
