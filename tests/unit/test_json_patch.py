"""Changes of many letters by a JSON Patch: what they change, what they leave as it was, and what they refuse."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_jetstream.jetstream.errors import RedriveError, RedriveRequestError
from airflow_provider_jetstream.jetstream.redrive.json_patch import LARGEST_BODY, LONGEST_PATCH, JsonPatch
from airflow_provider_jetstream.jetstream.redrive.operation import plan_of
from airflow_provider_jetstream.jetstream.redrive.preview import body_difference
from airflow_provider_jetstream.jetstream.redrive.request import Protocol, RedriveRequest

if TYPE_CHECKING:
    from collections.abc import Callable

_SPACE = st.text(" \t\n\r", max_size=2)
_NUMBERS = st.sampled_from(
    ["0", "-0", "1.10", "1E400", "-2.50e-7", "12345678901234567890123456789", "0.1000000000000000055511151231257827"]
)
_TEXTS = st.one_of(
    st.text(max_size=4).map(json.dumps),
    st.sampled_from(['"\\/"', '"\\u00e9"', '"é"', '"\\ud800"', '"\\b\\""', '"\u2028"', '"{\\"a\\":1}"']),
)
_NAMES = st.sampled_from(["a", "b", "a~b", "c/d", "", "0", "é"])


class Written:
    """A JSON text with the spans of all its values by their paths."""

    def __init__(self) -> None:
        self.text = ""
        self.spans: dict[str, tuple[int, int]] = {}


@st.composite
def texts(draw: Callable[[st.SearchStrategy[Any]], Any]) -> Written:
    written = Written()

    def value(path: str, levels: int) -> None:
        start = len(written.text)
        kind = draw(st.sampled_from(["number", "text", "literal", "object", "array"] if levels else ["number", "text"]))
        if kind == "object":
            part("{", draw(st.lists(_NAMES, unique=True, max_size=4)), "}", path, levels)
        elif kind == "array":
            part("[", list(range(draw(st.integers(0, 3)))), "]", path, levels)
        else:
            scalars = {"number": _NUMBERS, "text": _TEXTS, "literal": st.sampled_from(["true", "false", "null"])}
            written.text += draw(scalars[kind])
        written.spans[path] = start, len(written.text)

    def part(opening: str, names: list[Any], closing: str, path: str, levels: int) -> None:
        written.text += opening
        for number, name in enumerate(names):
            written.text += "," if number else ""
            written.text += draw(_SPACE)
            if opening == "{":
                written.text += json.dumps(name, ensure_ascii=draw(st.booleans())) + draw(_SPACE) + ":" + draw(_SPACE)
            value(f"{path}/{str(name).replace('~', '~0').replace('/', '~1')}", levels - 1)
            written.text += draw(_SPACE) if number < len(names) - 1 else ""
        written.text += draw(_SPACE) + closing

    written.text += draw(_SPACE)
    value("", 3)
    written.text += draw(_SPACE)
    return written


def raw(text: str | bytes) -> Any:
    """Parse JSON with another parser, numbers as their text."""
    return json.loads(text, parse_int=lambda number: ("number", number), parse_float=lambda number: ("number", number))


@given(texts(), st.data())
def test_a_replaced_value_leaves_every_other_value_as_it_was(written: Written, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(written.spans)))
    start, end = written.spans[path]
    patch = JsonPatch.of([{"op": "replace", "path": path, "value": 1.25}])
    patched = patch.patched(written.text.encode())
    assert raw(patched) == raw(f"{written.text[:start]}1.25{written.text[end:]}")
    # A patch that changes no value changes no byte.
    same = JsonPatch.of(f'[{{"op": "replace", "path": {json.dumps(path)}, "value": {written.text[start:end]}}}]')
    assert same.patched(written.text.encode()) == written.text.encode()


@given(texts(), st.data())
def test_what_is_added_moved_and_removed_leaves_the_other_values_as_they_were(
    written: Written, data: st.DataObject
) -> None:
    before = raw(written.text)
    paths = [path for path in sorted(written.spans) if path.count("/") == 1]
    if not paths:
        return
    path = data.draw(st.sampled_from(paths))
    kept = json.dumps(before)
    removed = raw(JsonPatch.of([{"op": "remove", "path": path}]).patched(written.text.encode()))
    if isinstance(before, dict):
        name = path[1:].replace("~1", "/").replace("~0", "~")
        assert removed == {key: value for key, value in before.items() if key != name}
        assert list(removed) == [key for key in before if key != name]
        added = raw(
            JsonPatch.of([{"op": "add", "path": "/new", "value": {"x": [1, 2]}}]).patched(written.text.encode())
        )
        assert added == before | {"new": {"x": [("number", "1"), ("number", "2")]}}
        moved = raw(JsonPatch.of([{"op": "move", "from": path, "path": "/new"}]).patched(written.text.encode()))
        assert moved == removed | {"new": before[name]}
    else:
        position = int(path[1:])
        assert removed == [*before[:position], *before[position + 1 :]]
        twice = JsonPatch.of([{"op": "copy", "from": path, "path": "/-"}]).patched(written.text.encode())
        assert raw(twice) == [*before, before[position]]
    assert json.dumps(before) == kept


@pytest.mark.parametrize(
    ("value", "other", "same"),
    [
        ("1", "1.0e0", True),
        ("1", "true", False),
        ("0", "false", False),
        ("1E400", "10E399", True),
        ("1E400", "1E401", False),
        ("1E9999999999999999999999", "1E9999999999999999999999", True),
        ('"\\u00e9"', '"é"', True),
        ('"1"', "1", False),
        ("null", "null", True),
        ('{"a":1,"b":[2]}', '{"b":[2.0],"a":1}', True),
        ('{"a":1}', '{"a":1,"b":2}', False),
        ("[]", "{}", False),
    ],
)
def test_a_test_compares_values_by_the_standard(value: str, other: str, *, same: bool) -> None:
    patch = JsonPatch.of(f'[{{"op":"test","path":"/v","value":{other}}},{{"op":"add","path":"/ok","value":1}}]')
    body = f'{{"v":{value}}}'.encode()
    if same:
        assert patch.patched(body).endswith(b'"ok":1}')
    else:
        with pytest.raises(RedriveError, match="operation 1 of the patch, test /v: the body has another value there"):
            patch.patched(body)


_NESTED = b"[" * 101 + b"]" * 101


@pytest.mark.parametrize(
    ("body", "operations", "expected"),
    [
        (
            b'{"b":1}',
            [{"op": "replace", "path": "/a", "value": 1}],
            "operation 1 of the patch, replace /a: the body has no",
        ),
        (b'{"a":[1]}', [{"op": "remove", "path": "/a/01"}], "remove /a/01: the body has no such place"),
        (b'{"a":[1]}', [{"op": "add", "path": "/a/5", "value": 1}], "add /a/5: the body has no such place"),
        (b'{"a":"text"}', [{"op": "replace", "path": "/a/0", "value": 1}], "the body has no such place"),
        (b'{"a":1}', [{"op": "copy", "from": "/b", "path": "/c"}], "copy /c: the body has no such place"),
        (b'{"a":1,"a":2,"b":3}', [{"op": "remove", "path": "/b"}], 'each name of an object once, found "a" twice'),
        (
            b'{"a":1,"\\u0061":2}',
            [{"op": "remove", "path": "/a"}],
            'each name of an object once, found "a" twice',
        ),
        (b'{"a":"\xff"}', [{"op": "remove", "path": "/a"}], "found bytes that aren't UTF-8"),
        ("\ufeff{}".encode(), [{"op": "add", "path": "/a", "value": 1}], "found something else at character 0"),
        ("{}".encode("utf-16"), [{"op": "add", "path": "/a", "value": 1}], "found bytes that aren't UTF-8"),
        (b"", [{"op": "add", "path": "", "value": 1}], "expected JSON, found something else at character 0"),
        (b'{"a":NaN}', [{"op": "remove", "path": "/a"}], "expected JSON, found NaN"),
        (b'{"a":01}', [{"op": "remove", "path": "/a"}], "expected JSON, found something else at character 6"),
        (b'{"a":1} x', [{"op": "remove", "path": "/a"}], "expected JSON, found something else at character 8"),
        (b'{"a":"\n"}', [{"op": "remove", "path": "/a"}], "expected JSON, found something else at character 6"),
        (_NESTED, [{"op": "add", "path": "/0", "value": 1}], "expected at most 100 levels"),
        (
            b" " * (LARGEST_BODY + 1),
            [{"op": "add", "path": "", "value": 1}],
            f"at most {LARGEST_BODY} bytes for the patch",
        ),
        (
            b'{"a":"%b"}' % (b"x" * 9_000),
            [{"op": "copy", "from": "", "path": f"/a{number}"} for number in range(80)],
            "the patched body would have more than 2097152 bytes",
        ),
        (
            b"{}",
            [{"op": "add", "path": "/a" * level, "value": {}} for level in range(1, 60)]
            + [{"op": "copy", "from": "", "path": "/a" * level} for level in (59,)],
            "expected at most 100 levels",
        ),
        (
            b"{}",
            [{"op": "add", "path": "/a" * level, "value": {}} for level in range(1, 60)]
            + [{"op": "copy", "from": "", "path": "/a" * level} for level in (59, 118, 236, 472, 944)],
            "levels",
        ),
    ],
)
def test_a_body_that_the_patch_does_not_fit_is_refused_with_its_reason(
    body: bytes, operations: list[dict[str, Any]], expected: str
) -> None:
    with pytest.raises(RedriveError) as refused:
        JsonPatch.of(operations).patched(body)
    assert expected in str(refused.value)
    assert str(refused.value).endswith("; the letter is untouched")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("[]", "an array of 1 to 100 operations"),
        ([{"op": "remove", "path": "/a"}] * 101, "an array of 1 to 100 operations"),
        ("{}", "an array of 1 to 100 operations"),
        ("no JSON", "expected a JSON Patch, a JSON array of operations: expected JSON"),
        ("[1]", "expected an op (add, copy, move, remove, replace, test) and a path in operation 1"),
        ([{"op": "append", "path": "/a", "value": 1}], "expected an op"),
        ([{"op": "add", "path": 5, "value": 1}], "expected an op"),
        ([{"op": "add", "path": "a", "value": 1}], "expected a JSON Patch, found otherwise in operation 1"),
        ([{"op": "add", "path": "/~2", "value": 1}], "found otherwise in operation 1"),
        ([{"op": "remove", "path": "/a"}, {"op": "add", "path": "/a"}], "expected value in operation 2"),
        ([{"op": "move", "path": "/a"}], "expected from in operation 1"),
        ([{"op": "copy", "path": "/a", "from": "b"}], "found otherwise in operation 1"),
        ([{"op": "move", "path": "/a/b", "from": "/a"}], "expected another place in operation 1"),
        ([{"op": "remove", "path": ""}], "a body can't be removed"),
        ('[{"op":"add","op":"add","path":"/a","value":1}]', 'found "op" twice'),
        ([{"op": "add", "path": "/a", "value": "x" * LONGEST_PATCH}], f"at most {LONGEST_PATCH} bytes"),
        (" " * 10 * LONGEST_PATCH, f"at most {LONGEST_PATCH} bytes"),
        ("[" * 5_000 + "]" * 5_000, "at most 100 levels"),
        ([{"op": "add", "path": "/a", "value": float("nan")}], "expected a JSON Patch as JSON values"),
        (b"[]", "expected a JSON Patch as JSON values"),
        (7, "an array of 1 to 100 operations"),
    ],
)
def test_what_is_no_patch_is_refused(source: Any, expected: str) -> None:
    with pytest.raises(RedriveRequestError) as refused:
        JsonPatch.of(source)
    assert expected in str(refused.value)


def test_a_patch_without_its_library_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonpatch", None)
    with pytest.raises(
        RedriveRequestError, match=r"expected jsonpatch for a JSON Patch, found none .* its extra patch"
    ):
        JsonPatch.of([{"op": "remove", "path": "/only-in-this-test"}])


def test_a_request_takes_a_patch_in_any_form_and_refuses_what_excludes_it() -> None:
    text = '[ {"op": "replace", "path": "/f", "value": 1.10} ]'
    compact = '[{"op":"replace","path":"/f","value":1.10}]'
    request = RedriveRequest(patch=text)
    assert request.patch == RedriveRequest(patch=JsonPatch.of(text)).patch == JsonPatch(compact)
    assert plan_of(request)["patch"] == compact
    assert RedriveRequest(patch=[{"op": "remove", "path": "/a"}]).patch == JsonPatch('[{"op":"remove","path":"/a"}]')
    for fields, expected in (
        ({"transform": lambda _: None}, "expected either a patch or a transform"),
        ({"max_redrives": 0}, "parks all as they are"),
        ({"protocol": Protocol.IN_PLACE}, "found patch: a redrive in place"),
    ):
        with pytest.raises(RedriveRequestError, match=expected):
            RedriveRequest(patch=text, **fields)


def test_a_difference_shows_json_with_a_line_for_each_value_as_it_is_written() -> None:
    before = b'{"a":1.10,"b":{"c":[1,{}]},"d":"x"}'
    after = b'{"a":1.10,"b":{"c":[2,{}]},"d":"x"}'
    assert body_difference(before, after).splitlines()[2:] == [
        "@@ -2,7 +2,7 @@",
        '   "a": 1.10,',
        '   "b": {',
        '     "c": [',
        "-      1,",
        "+      2,",
        "       {}",
        "     ]",
        "   },",
    ]
    assert body_difference(before, before) == ""
    assert "+{ }" in body_difference(b"{}", b"{ }")
    assert "-\\xff" in body_difference(b"\xff", b"text")
    assert "too long to show" in body_difference(b"x" * 100_000, b"y")
    many = b"[" + b",".join(b"%d" % number for number in range(100)) + b"]"
    lines = body_difference(b"[]", many).splitlines()
    assert (len(lines), lines[-1]) == (41, "… 66 more lines")
    assert "(1003 characters)" in body_difference(b'"a"', b'"' + b"b" * 1_000 + b'"')
