"""The parser hands messages over as they are, however they were cut, and believes no answer that looks like several."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_jetstream.jetstream.client.wire import FrameReader, PublishAckForm

Fields = tuple[bytes, bytes, bytes | None, bytes]

_BODIES = st.one_of(
    st.binary(max_size=40),
    st.sampled_from(
        [b'{"stream":"q","seq":7}', b"MSG i.1 1 2\r\nok\r\n", b"\r\n", b'{"stream":"q","seq":7,"duplicate":true}']
    ),
)


class Receiver:
    """Has a subscription with the number 1, whose PubAcks of the stream q are taken many at a time."""

    def __init__(self, domain: str = "") -> None:
        self.others: list[bytes] = []
        self.received: list[Fields] = []
        self.runs: list[tuple[int, int]] = []
        self.reader = FrameReader()
        run = PublishAckForm(
            b"i.", "q", domain, lambda indexes, sequences: self.runs.extend(zip(indexes, sequences, strict=True))
        )
        run.bind(1)
        self.reader.forms[b"1"] = run

    def _receive(self, sid: bytes, subject: bytes, reply: bytes, headers: bytes | None, body: bytes) -> None:
        if sid == b"1":
            self.received.append((subject, reply, headers, body))
        else:
            self.others.append(body)

    def parse(self, *chunks: bytes) -> None:
        for chunk in chunks:
            self.reader.feed(chunk)
            while self.reader.read(self._receive, lambda *_: None, 64):
                pass


def message(subject: bytes, body: bytes, *, sid: int = 1, size: int | None = None) -> bytes:
    return b"MSG %b %d %d\r\n%b\r\n" % (subject, sid, len(body) if size is None else size, body)


def ack(index: int, sequence: int, text: bytes = b'{"stream":"q","seq":%d}') -> bytes:
    return message(b"i.%d" % index, text % sequence)


@given(st.lists(st.tuples(st.integers(0, 9), _BODIES, st.booleans(), st.integers(1, 2)), max_size=12), st.data())
def test_what_is_received_does_not_depend_on_how_it_was_cut(
    sent: list[tuple[int, bytes, bool, int]], data: st.DataObject
) -> None:
    stream = b""
    for number, body, has_headers, sid in sent:
        if has_headers:
            block = b"NATS/1.0\r\nA: 1\r\n\r\n"
            sizes = (b"i.%d" % number, sid, len(block), len(block) + len(body))
            stream += b"HMSG %b %d r %d %d\r\n" % sizes + block + body + b"\r\n"
        else:
            stream += message(b"i.%d" % number, body, sid=sid)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    whole, cut = Receiver(), Receiver()
    whole.parse(stream)
    cut.parse(*(stream[start:end] for start, end in pairwise([0, *cuts, len(stream)])))
    # A PubAck that came in two parts is received by the slow path.
    for client in (whole, cut):
        acks = [(int(subject[2:]), body) for subject, _, headers, body in client.received if headers is None]
        client.runs += [(index, 7) for index, body in acks if body == b'{"stream":"q","seq":7}']
        client.received = [fields for fields in client.received if fields[3] != b'{"stream":"q","seq":7}' or fields[2]]
    assert (cut.received, sorted(cut.runs), cut.others) == (whole.received, sorted(whole.runs), whole.others)
    assert len(whole.received) + len(whole.runs) + len(whole.others) == len(sent)
    assert whole.reader.messages == len(sent)


@pytest.mark.parametrize(
    "text", [b'{"stream":"q","seq":%d}', b'{"stream":"q", "seq": %d}', b'{"stream": "q", "seq":%d}']
)
def test_the_pubacks_of_the_stream_are_taken_together(text: bytes) -> None:
    client = Receiver()
    client.parse(b"".join(ack(index, 2**60 + index, text) for index in range(1_000)))
    assert client.runs == [(index, 2**60 + index) for index in range(1_000)]
    assert client.received == []
    assert (client.reader.messages, client.reader.size) == (1_000, 1_000 * len(text % 2**60))


@pytest.mark.parametrize(
    "answer",
    [
        message(b"i.0", b'{"stream":"other","seq":1}'),
        message(b"i.0", b'{"stream":"q","seq":1,"duplicate":true}'),
        message(b"i.0", b'{"stream":"q","seq":0}'),
        message(b"i.0", b'{"stream":"q","seq":1} '),
        message(b"i.0", b'{"error":{"code":503},"stream":"q","seq":0}'),
        message(b"i.x", b'{"stream":"q","seq":1}'),
        message(b"j.0", b'{"stream":"q","seq":1}'),
        # One body that looks like two answers.
        message(b"i.0", b'{"stream":"q","seq":1}\r\n' + ack(1, 2)[:-2]),
    ],
)
def test_any_other_answer_is_received_by_itself(answer: bytes) -> None:
    client = Receiver()
    client.parse(ack(8, 8) + answer + ack(9, 9))
    (received,) = [body for subject, _, _, body in client.received if subject not in (b"i.8", b"i.9")]
    assert received == answer.partition(b"\r\n")[2][:-2]
    assert [run for run in client.runs if run not in ((8, 8), (9, 9))] == []
    by_itself = [int(subject[2:]) for subject, _, _, _ in client.received if subject in (b"i.8", b"i.9")]
    assert sorted(by_itself + [index for index, _ in client.runs]) == [8, 9]
