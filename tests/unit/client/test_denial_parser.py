"""What a server says about a denied request is parsed; anything else is none."""

from __future__ import annotations

import pytest

from airflow_provider_jetstream.jetstream.client.denials import parse_denial


@pytest.mark.parametrize(
    ("text", "action", "subject"),
    [
        ('Permissions Violation for Publish to "a.B"', "publish", "a.B"),
        ('Permissions Violation for Publish with Reply of "_R_.x"', "publish", "_R_.x"),
        ('Permissions Violation for Subscription to "a.>" using queue "q"', "subscribe", "a.>"),
        (r'Permissions Violation for Publish to "a\"b\\c\xff\u00e4"', "publish", 'a"b\\c\udcff\xe4'),
    ],
)
def test_the_servers_report_is_parsed(text: str, action: str, subject: str) -> None:
    denial = parse_denial(text, "user 'u'")
    assert denial is not None
    assert (denial.action, denial.subject) == (action, subject)


@pytest.mark.parametrize("tail", ["", " for Publish", ' for Publish to "', ' for Publish to "' + 9_000 * "x" + '"'])
def test_other_reports_are_no_denials(tail: str) -> None:
    assert parse_denial(f"Permissions Violation{tail}", "") is None
