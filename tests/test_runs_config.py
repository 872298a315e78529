from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from scoregram.checks import ScoregramError
from scoregram.runs import RunWriter, open_run
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


def laughs(depth: int = 9) -> str:
    """A config whose `depth` aliases stand for `10^depth` words."""
    levels = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, depth)]
    return "\n  ".join(["config:", f"a0: &a0 [{', '.join(['lol'] * 10)}]", *levels])


@pytest.mark.parametrize(
    "content",
    [
        laughs(),
        "config: &a {a: *a}",
        "config: {a: " + "[" * 600 + "]" * 600 + "}",
        "config:\n  " + "- " * 50_000,  # deeper than the stack of libyaml's composer
        "config: {a: 2001-99-99}",
        "config: {a: " + "9" * 5000 + "}",
        "config: {}\nresumed: [3]",
        "config: {}\nenvironment: 3",
        "config: {}\nremarks: [3]",
    ],
)
def test_a_hostile_config_is_one_sentence(content, tmp_path):
    (tmp_path / "config.yaml").write_text(f"schema: 1\n{content}\n")
    for read in (open_run, lambda folder: RunWriter.resume(folder, None, config={"a": 1})):
        with pytest.raises(ScoregramError, match=r"open_run: .*config\.yaml must be "):
            read(tmp_path)


def test_a_text_that_libyaml_refuses_is_read(tmp_path):
    (tmp_path / "config.yaml").write_text('schema: 1\nconfig: {a: "\\udc80"}\n')
    assert open_run(tmp_path).config == {"a": "\udc80"}


def test_remarks_are_stored_replaced_by_kind_and_survive_a_resumption(tmp_path):
    with RunWriter.create(tmp_path, {"a": 1}) as writer:
        assert open_run(tmp_path).remarks == {}
        writer.write_remarks({"approximate": "half", "model": "doubtful"})
        writer.write_remarks({"approximate": "all"})
    RunWriter.resume(tmp_path, None, config={"a": 1}).close()
    run = open_run(tmp_path)
    assert run.remarks == {"approximate": "all", "model": "doubtful"} and run.config == {"a": 1}
