"""Calls are found whatever stands around them, and are the same exactly when they are by value."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprobe.tasks.calls import Call, canonical, find_call, locate_call

NAMES = st.text("abcdefgh_", min_size=1, max_size=8)
NUMBERS = st.integers(-5, 5) | st.floats(-2, 2).map(lambda number: round(number, 1))
LEAVES = (
    st.none() | st.booleans() | NUMBERS | st.text(max_size=6) | st.sampled_from(["1", "true", "null", "{", '"}', "\\"])
)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3))
ARGUMENTS = st.dictionaries(NAMES, VALUES, max_size=4)


def same(ours: Any, theirs: Any) -> bool:
    """Equality of JSON values by the letter of the standard, written out."""
    if isinstance(ours, bool) or isinstance(theirs, bool) or ours is None or theirs is None:
        return ours is theirs
    if isinstance(ours, int | float) and isinstance(theirs, int | float):
        return ours == theirs
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return set(ours) == set(theirs) and all(same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return isinstance(ours, str) and isinstance(theirs, str) and ours == theirs


def shuffled(value: Any, rng: random.Random) -> Any:
    """The same value with its keys in another order."""
    if isinstance(value, dict):
        keys = list(value)
        rng.shuffle(keys)
        return {key: shuffled(value[key], rng) for key in keys}
    return [shuffled(item, rng) for item in value] if isinstance(value, list) else value


STYLES = st.fixed_dictionaries({"indent": st.sampled_from([None, 0, 3]), "ensure_ascii": st.booleans()})
AROUND = st.tuples(
    st.sampled_from(["", " ", "Call: ", "```json\n", 'I\'d say "this" {thing}:\n', "[", "} "]),
    st.sampled_from(["", "\n", "```", "]", "}", ' {"name": "other", "arguments": {}}', " and {so on"]),
)


@settings(max_examples=60)
@given(name=NAMES, arguments=ARGUMENTS, rng=st.randoms(), style=STYLES, around=AROUND)
def test_order_blanks_and_what_stands_around_do_not_matter(
    name: str, arguments: dict[str, Any], rng: random.Random, style: dict[str, Any], around: tuple[str, str]
) -> None:
    written = json.dumps(shuffled({"name": name, "arguments": arguments}, rng), **style)
    text = written.join(around)
    call = Call.of(name, arguments)
    assert find_call(text) == call
    assert text[: locate_call(text)[1]] == around[0] + written
    assert find_call(call.text) == call
    assert same(json.loads(call.arguments), arguments)


@settings(max_examples=300)
@given(ours=VALUES, theirs=VALUES)
def test_canonical_text_is_equal_exactly_for_equal_values(ours: Any, theirs: Any) -> None:
    assert (canonical(ours) == canonical(theirs)) == same(ours, theirs)


@settings(max_examples=30)
@given(name=NAMES, arguments=ARGUMENTS, data=st.data())
def test_an_unfinished_call_is_none(name: str, arguments: dict[str, Any], data: st.DataObject) -> None:
    written = json.dumps({"arguments": arguments, "name": name})
    kept = data.draw(st.integers(0, len(written) - 1))
    assert find_call(written[:kept]) is None


@pytest.mark.parametrize(
    ("ours", "theirs", "equal"),
    [
        ({"n": 3}, {"n": 3.0}, True),
        ({"n": 3}, {"n": "3"}, False),
        ({"n": 1}, {"n": True}, False),
        ({"n": 0}, {"n": False}, False),
        ({"n": None}, {}, False),
        ({"n": ["a", "b"]}, {"n": ["b", "a"]}, False),
        ({"n": "Paris"}, {"n": "paris"}, False),
        ({"n": {"a": 1, "b": [2]}}, {"n": {"b": [2.0], "a": 1}}, True),
        ({"n": 1, "m": 2}, {"n": 1}, False),
    ],
)
def test_values_that_are_nearly_the_same(ours: dict[str, Any], theirs: dict[str, Any], equal: bool) -> None:
    assert (Call.of("f", ours) == Call.of("f", theirs)) is equal


@pytest.mark.parametrize(
    "text",
    [
        "",
        "get_weather(city='Paris')",
        '{"name": "f"}',
        '{"name": "f", "arguments": "x"}',
        '{"name": "f", "arguments": ["x"]}',
        '{"name": 5, "arguments": {}}',
        '{"name": "f\\ud800", "arguments": {}}',
        '{"name": "f", "arguments": {}, "more": 1}',
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": {"a": 1e999}}',
        '{"name": "f", "arguments": {"a": 1, "a": 2}}',
        "{'name': 'f', 'arguments': {}}",
        '{"tool": {"name": "f", "arguments": {}}}',
        '{"name": "f", "arguments": {"inner": {"name": "f", "arguments": {}}',
        '{"a": ' * 3000 + "1" + "}" * 3000,
        '{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}",
    ],
)
def test_what_is_no_call(text: str) -> None:
    assert find_call(text) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, b"x"])
def test_values_that_json_does_not_have_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        canonical(value)
