"""The monitor page without a web server, for tests of what it answers: its service, its routes and their questions."""

from airflow_provider_jetstream.jetstream.dead_letters.group import GroupField
from airflow_provider_jetstream.jetstream.dead_letters.table import LetterQuery
from airflow_provider_jetstream.plugins.monitor.app import make_app
from airflow_provider_jetstream.plugins.monitor.configuration import MonitorSettings, monitor_settings
from airflow_provider_jetstream.plugins.monitor.errors import LettersUnreadError
from airflow_provider_jetstream.plugins.monitor.letter_history import read_records
from airflow_provider_jetstream.plugins.monitor.letter_search import PLACES
from airflow_provider_jetstream.plugins.monitor.letter_view import Hiding
from airflow_provider_jetstream.plugins.monitor.models.redrives import EditRequest, PauseRequest, SteerRequest
from airflow_provider_jetstream.plugins.monitor.routes import parse_task_query
from airflow_provider_jetstream.plugins.monitor.sampler import Sampler
from airflow_provider_jetstream.plugins.monitor.server_poller import ServerPoller
from airflow_provider_jetstream.plugins.monitor.service import MonitorService
from airflow_provider_jetstream.plugins.monitor.task_jobs import TaskQuery

__all__ = [
    "PLACES",
    "EditRequest",
    "GroupField",
    "Hiding",
    "LetterQuery",
    "LettersUnreadError",
    "MonitorService",
    "MonitorSettings",
    "PauseRequest",
    "Sampler",
    "ServerPoller",
    "SteerRequest",
    "TaskQuery",
    "make_app",
    "monitor_settings",
    "parse_task_query",
    "read_records",
]
