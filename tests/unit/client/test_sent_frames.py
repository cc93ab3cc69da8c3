"""The frames that a client sends are parsed, however they are cut."""

from __future__ import annotations

import pytest

from airflow_provider_jetstream.jetstream.client.sent_frames import SentFrameReader


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_frames_of_a_client_are_divided_wherever_they_are_cut(size: int) -> None:
    frames = [
        b'CONNECT {"verbose":false}\r\n',
        b"PUB a.b 5\r\nPUB \r\r\n",
        b"pub  a.b\treply 0\r\n\r\n",
        b"HPUB c reply 14 16\r\nNATS/1.0\r\nA:\r\nhi\r\n",
        b"HPUB c 12 12\r\nNATS/1.0\r\n\r\n\r\n",
        b"PING\r\n",
    ]
    data = b"".join(frames)
    reader = SentFrameReader()
    found = [frame for start in range(0, len(data), size) for frame in reader.feed(data[start : start + size])]
    assert [frame.data for frame in found] == frames
    assert [(frame.subject, frame.payload) for frame in found] == [
        ("", b""),
        ("a.b", b"PUB \r"),
        ("a.b", b""),
        ("c", b"hi"),
        ("c", b""),
        ("", b""),
    ]
