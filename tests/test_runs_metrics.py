import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scoregram.checks import ScoregramError
from scoregram.reading import Step, read_step, rollout_scalars
from scoregram.runs.metrics import beside_foreign, metrics_line, own_name, read_metrics
from tests.report_cases import step_of

names = st.text(min_size=1).filter(lambda name: name != "step")
scalars = st.dictionaries(names, st.one_of(st.none(), st.booleans(), st.integers(-(2**60), 2**60), st.floats()))


def refuse(constant: str):
    raise AssertionError(f"not strict JSON: {constant}")


@given(scalars=scalars, step=st.integers(0, 10**9 - 1))
def test_a_line_is_strict_json_and_comes_back(tmp_path_factory, scalars, step):
    line = metrics_line(step, scalars)
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    parsed = json.loads(line, parse_constant=refuse)
    expected = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in scalars.items()
    }
    assert parsed == {"step": step} | expected
    path = tmp_path_factory.mktemp("m") / "metrics.jsonl"
    path.write_bytes(line)
    (read,) = read_metrics(path).lines
    np.testing.assert_equal(
        read, {"step": step} | {name: math.nan if value is None else value for name, value in expected.items()}
    )


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (torch.tensor(0.5), 0.5),
        (torch.tensor([3]), 3),
        (torch.tensor(math.inf), None),
        (torch.tensor(True), True),
        (np.float32(0.25), 0.25),
        (np.int64(4), 4),
        (np.float64("nan"), None),
        (np.bool_(False), False),
    ],
)
def test_numbers_of_torch_and_numpy_are_numbers(value, stored):
    assert (
        json.loads(metrics_line(0, {"x": value}))["x"] is stored
        or json.loads(metrics_line(0, {"x": value}))["x"] == stored
    )


@pytest.mark.parametrize("value", ["text", [1.0], torch.zeros(2), np.zeros(0), torch.zeros(0), 1j, object()])
def test_what_is_not_one_number_is_refused(value):
    with pytest.raises(ScoregramError, match="loss must be one number"):
        metrics_line(0, {"loss": value})


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("name", ["step", 3])
def test_a_name_must_be_free(name):
    with pytest.raises(ScoregramError, match="a string other than `step`"):
        metrics_line(0, {name: 1.0})


LINES = [metrics_line(step, {"reward": step / 7, "rank": math.nan}) for step in (0, 2, 10)]


def test_every_torn_end_leaves_the_lines_before_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    whole = b"".join(LINES)
    for size in range(len(whole) + 1):  # a kill can cut the file anywhere
        path.write_bytes(whole[:size])
        complete = whole[:size].count(b"\n")
        read = read_metrics(path)
        assert [line["step"] for line in read.lines] == [0, 2, 10][:complete]
        assert read.ends == tuple(len(b"".join(LINES[: i + 1])) for i in range(complete))
        assert read.torn_bytes == size - len(b"".join(LINES[:complete]))


@pytest.mark.parametrize(
    "tail", [b"\0" * 40, b"\0\n\0\n", b'{"step": 1', b"[]\n", b'{"step": 10, "x": 1}\n', b"\xff\n"]
)
def test_a_spoilt_end_is_ignored(tmp_path, tail):
    (tmp_path / "m").write_bytes(b"".join(LINES) + tail)
    read = read_metrics(tmp_path / "m")
    assert len(read.lines) == 3 and read.torn_bytes == len(tail)


@pytest.mark.parametrize("spoilt", [b"{\n", b"\n", b'{"step": true}\n', b'{"reward": 1}\n', LINES[0]])
def test_a_spoilt_line_in_the_middle_is_named(tmp_path, spoilt):
    (tmp_path / "m").write_bytes(LINES[0] + spoilt + LINES[1])
    with pytest.raises(ScoregramError, match="got an invalid line 2"):
        read_metrics(tmp_path / "m")


def test_an_absent_file_has_no_lines(tmp_path):
    assert read_metrics(tmp_path / "m").lines == ()


@pytest.mark.parametrize("kind", ["train", "loss"])
def test_no_name_that_we_write_replaces_a_foreign_one(kind):
    """By enumeration: another trainer may use every name of ours, in this line or in another one."""
    scores = torch.randn(12, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    step: Step = step_of(1, rewards, rewards - rewards.mean(1, keepdim=True), scores @ scores.mT, kind=kind)
    ours = read_step(step).scalars | rollout_scalars(step) | {"check/passed": 1.0, "time/measure": 2.0}
    assert {"reward", "gram/update_norm", "group/effective_rank", "length"} <= ours.keys()
    foreign = {name: float(place) for place, name in enumerate([*ours, *map(own_name, ours), "loss"])}
    assert beside_foreign(ours, foreign) == foreign  # not even where the trainer logs scoregram/NAME
    few = {name: foreign[name] for name in [*list(ours)[::2], "loss"]}
    line = beside_foreign(ours, few, taken=list(ours)[1::4])
    assert {name: line[name] for name in few} == few and len(line) == len(few) + len(ours)
    assert {name: line.get(own_name(name), line.get(name)) for name in ours} == pytest.approx(ours, nan_ok=True)
    assert not set(list(ours)[1::4]) & line.keys()  # a name of the trainer means the same in every line
