from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from scoregram.checks import ScoregramError
from scoregram.runs.config import config_differences, config_text, plain_values

text = st.text(st.characters(codec="utf-8"))
leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), text)
configs = st.dictionaries(
    text,
    st.recursive(
        leaves, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(text, inner, max_size=3))
    ),
    max_size=3,
)


@given(config=configs)
def test_a_config_comes_back(config):
    stored = yaml.safe_load(config_text(config, {}))
    np.testing.assert_equal(stored["config"], config)
    assert config_differences(stored["config"], config) == []


def test_every_value_stands_in_one_place():
    shared = {"lr": 1e-6}
    content = config_text({"a": shared, "b": shared}, {}).decode()
    assert "&" not in content and content.count("lr: 1.0e-06") == 2


def test_dataclasses_paths_and_tuples_become_plain():
    @dataclass(frozen=True)
    class Inner:
        sizes: tuple[int, ...]
        out: Path

    assert plain_values({"inner": Inner((2, 4), Path("runs") / "x")}) == {"inner": {"sizes": [2, 4], "out": "runs/x"}}


@pytest.mark.parametrize("value", [{1, 2}, b"x", 1j, {"a": {3: 1}}, np.float64(1.0), "\ud800"])
def test_what_yaml_cannot_hold_is_refused(value):
    with pytest.raises(ScoregramError, match=r"config\.x"):
        plain_values({"x": value})


@pytest.mark.parametrize(
    ("stored", "asked", "expected"),
    [
        ({"a": 1}, {"a": 1.0}, []),
        ({"a": float("nan")}, {"a": float("nan")}, []),
        ({"a": (1, 2)}, {"a": [1, 2]}, []),
        ({"a": [{"b": float("nan")}]}, {"a": [{"b": float("nan")}]}, []),
        ({"a": [1, 2]}, {"a": [1]}, ["a: [1, 2] in the run, [1] requested"]),
        ({"a": 1}, {"a": 2}, ["a: 1 in the run, 2 requested"]),
        ({"a": {"b": {"c": None}}}, {"a": {"b": {}}}, ["a.b", "a.b.c"]),
        ({}, {"a": 1}, ["a: nothing in the run, 1 requested"]),
        ({"free": {"x": 1}}, {"free": 2}, []),
    ],
)
def test_differences(stored, asked, expected):
    found = config_differences(stored, asked, may_differ=["free"])
    assert len(found) == len(expected)
    assert all(phrase.startswith(start) for phrase, start in zip(found, expected, strict=True)), found
