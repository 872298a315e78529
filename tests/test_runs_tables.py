import math
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scoregram.checks import ScoregramError
from scoregram.runs import BatchRecord, GroupRecord, RolloutRecord, UpdateRecord, records
from scoregram.runs.records import (
    batches_to_table,
    group_schema,
    groups_to_table,
    read_part,
    rollouts_to_table,
    table_to_batches,
    table_to_bytes,
    table_to_groups,
    table_to_rollouts,
    table_to_updates,
    updates_to_table,
)
from tests.run_cases import make_group, make_rollout, make_update


def assert_same(left, right):
    """Equal field by field, bit for bit, nan to nan."""
    assert type(left) is type(right)
    for name in (each.name for each in fields(left)):
        a, b = getattr(left, name), getattr(right, name)
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        elif name == "by_layer":
            assert list(a) == list(b)
            for layer in a:
                torch.testing.assert_close(a[layer], b[layer], rtol=0, atol=0, equal_nan=True)
        elif isinstance(a, dict):
            kept = {key: value for key, value in a.items() if value is not None}
            np.testing.assert_equal(b, kept)
        else:
            np.testing.assert_equal(a, b)


def through_a_file(table: pa.Table, folder: Path) -> pa.Table:
    path = folder / "step-000000000-000.parquet"
    path.write_bytes(table_to_bytes(table))
    return read_part(path)


sizes = st.lists(st.integers(0, 5), min_size=1, max_size=4)


@given(sizes=sizes, layers=st.integers(0, 3))
def test_groups_of_unequal_size_come_back_bit_for_bit(tmp_path_factory, sizes, layers):
    groups = [make_group(3, size, seed, layers=layers) for seed, size in enumerate(sizes)]
    table = through_a_file(groups_to_table(groups, "float64"), tmp_path_factory.mktemp("t"))
    for before, after in zip(groups, table_to_groups(table), strict=True):
        assert_same(before, after)


def test_layers_are_rounded_to_float32_and_nothing_else_is(tmp_path):
    group = make_group(0, 4)
    (after,) = table_to_groups(through_a_file(groups_to_table([group]), tmp_path))
    rounded = {name: gram.float().double() for name, gram in group.by_layer.items()}
    assert_same(GroupRecord(**{**vars(group), "by_layer": rounded}), after)


def test_layers_can_be_left_out(tmp_path):
    table = through_a_file(groups_to_table([make_group(0, 4)], "none"), tmp_path)
    assert not {"layers", "layer_grams"} & set(table.column_names)
    (after,) = table_to_groups(table)
    assert after.by_layer == {}
    assert after.gram is not None


def test_a_group_that_was_not_measured(tmp_path):
    before = GroupRecord(
        step=0, prompt_id="p", rewards=torch.ones(2), lengths=torch.ones(2).long(), advantages=torch.zeros(2)
    )
    (after,) = table_to_groups(through_a_file(groups_to_table([before, make_group(0, 3)]).slice(0, 1), tmp_path))
    assert after.gram is None and after.prompt is None and after.by_layer == {} and after.statistics == {}
    assert after.rewards.tolist() == [1.0, 1.0]


def test_undefined_and_infinite_numbers_come_back(tmp_path):
    odd = torch.tensor([[math.nan, math.inf], [math.inf, -0.0]], dtype=torch.float64)
    base = vars(make_group(0, 2))
    before = GroupRecord(
        **{**base, "gram": odd, "by_layer": {"a": odd}, "rewards": odd[0], "statistics": {"x": -math.inf}}
    )
    (after,) = table_to_groups(through_a_file(groups_to_table([before]), tmp_path))
    assert_same(before, after)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_any_floating_dtype_on_any_graph_is_stored(tmp_path, dtype):
    values = torch.tensor([0.25, -1.5], dtype=dtype, requires_grad=True)
    before = GroupRecord(**{**vars(make_group(0, 2)), "rewards": values, "advantages": values})
    (after,) = table_to_groups(through_a_file(groups_to_table([before]), tmp_path))
    assert after.rewards.tolist() == after.advantages.tolist() == [0.25, -1.5]


@given(tokens=st.lists(st.integers(0, 7), min_size=1, max_size=4))
def test_rollouts_come_back_bit_for_bit(tmp_path_factory, tokens):
    rollouts = [make_rollout(1, 0, i, count) for i, count in enumerate(tokens)]
    table = through_a_file(rollouts_to_table(rollouts), tmp_path_factory.mktemp("t"))
    for before, after in zip(rollouts, table_to_rollouts(table), strict=True):
        assert_same(before, after)


def test_masks_behaviour_and_token_advantages_come_back(tmp_path):
    more = {
        "completion_mask": torch.tensor([False, True, False]),
        "behaviour_log_probs": torch.randn(3),
        "advantage": None,
        "advantages": torch.randn(3),
        "push": torch.randn(3),
        "answer": "42",
        "prompt": None,
        "completion": None,
        "reward": math.nan,
        "kind": "fixed",
    }
    before = RolloutRecord(**{**vars(make_rollout(0, 0, 0, 3)), **more})
    (after,) = table_to_rollouts(through_a_file(rollouts_to_table([before]), tmp_path))
    assert_same(before, after)


def test_a_push_or_an_answer_that_no_rollout_has_is_no_column():
    assert not {"push", "answer"} & set(rollouts_to_table([make_rollout(0, 0, 0, 3)]).column_names)


def test_text_that_utf8_cannot_hold_is_spelt_out(tmp_path):
    before = RolloutRecord(**{**vars(make_rollout(0, 0, 0)), "completion": "a\ud800b", "answer": "\ud800"})
    (after,) = table_to_rollouts(through_a_file(rollouts_to_table([before]), tmp_path))
    assert after.completion == "a\\ud800b" and after.answer == "\\ud800"


def test_the_same_rows_give_the_same_bytes():
    def content():
        groups = groups_to_table([make_group(5, 4), make_group(5, 2, seed=1)])
        return bytes(table_to_bytes(groups)), bytes(table_to_bytes(rollouts_to_table([make_rollout(5, 0, 0)])))

    assert content() == content()


def test_a_triangle_is_all_that_is_stored_of_a_layer():
    table = groups_to_table([make_group(0, 4, layers=3)])
    assert len(table["layer_grams"][0].values) == 3 * (4 * 5 // 2)
    assert table["layers"][0].as_py() == ["layers.0.mlp", "layers.1.mlp", "layers.2.mlp"]


def test_columns_for_people():
    table = groups_to_table([make_group(0, 2)])
    assert table["statistics/effective_rank"][0].as_py() == make_group(0, 2).statistics["effective_rank"]
    assert table["gram"][0].as_py() == make_group(0, 2).gram.ravel().tolist()  # type: ignore[union-attr]
    assert rollouts_to_table([make_rollout(0, 0, 1)])["rewards/exact"][0].as_py() == 1.0


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"lengths": torch.ones(3).long()}, ["lengths of group p/0 must have shape (2,)", "(3,)"]),
        ({"gram": torch.eye(3)}, ["gram of group p/0 must have shape (2, 2)", "(3, 3)"]),
        ({"by_layer": {"a": torch.eye(3)}}, ["by_layer['a']", "(2, 2)", "(3, 3)"]),
        ({"by_layer": {"a": torch.tensor([[1.0, 2.0], [3.0, 1.0]])}}, ["Gram of a must be symmetric"]),
        ({"by_layer": {"a": 1e60 * torch.eye(2).double()}}, ["must fit float32", "1e+60", 'layers="float64"']),
    ],
)
def test_records_that_do_not_fit_are_refused(change, parts):
    with pytest.raises(ScoregramError) as caught:
        groups_to_table([GroupRecord(**{**vars(make_group(0, 2)), **change})])
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.mark.usefixtures("unchecked_shapes")
def test_a_token_too_few_is_refused():
    with pytest.raises(ScoregramError, match=r"log_probs of rollout 1 of p/0 must have shape \(6,\), got \(5,\)"):
        rollouts_to_table([RolloutRecord(**{**vars(make_rollout(0, 0, 1)), "log_probs": torch.zeros(5)})])


def test_a_newer_file_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "step-000000000-000.parquet"
    with monkeypatch.context() as newer:
        newer.setattr(records, "FORMAT_VERSION", 2)
        path.write_bytes(table_to_bytes(groups_to_table([make_group(0, 2)])))
    with pytest.raises(ScoregramError, match=r"schema 1 or older, got 2\. A newer scoregram wrote this run: upgrade"):
        read_part(path)


def test_a_file_of_somebody_else_is_refused(tmp_path):
    pq.write_table(group_schema().empty_table(), tmp_path / "x.parquet")
    with pytest.raises(ScoregramError, match="must be written by scoregram"):
        read_part(tmp_path / "x.parquet")


@pytest.mark.parametrize("keep", [0, 10, -1])
def test_a_damaged_file_is_named(tmp_path, keep):
    content = bytes(table_to_bytes(groups_to_table([make_group(0, 2)])))
    (tmp_path / "x.parquet").write_bytes(content[:keep])
    with pytest.raises(ScoregramError, match=r"x\.parquet must be a complete Parquet file"):
        read_part(tmp_path / "x.parquet")


def make_batch(sizes: list[int], seed: int = 0) -> BatchRecord:
    count, stream = sum(sizes), torch.Generator().manual_seed(seed)
    rows = torch.randn(count, 7, generator=stream)
    return BatchRecord(
        step=3,
        prompt_ids=tuple(f"p/{place}" for place in range(len(sizes))),
        sizes=torch.tensor(sizes),
        rewards=torch.rand(count, generator=stream, dtype=torch.float64),
        lengths=torch.arange(count),
        weights=torch.randn(count, generator=stream, dtype=torch.float64),
        gram=(rows @ rows.T).double(),
    )


def test_batches_come_back_with_a_gram_of_single_precision(tmp_path):
    batches = [make_batch([2, 3]), make_batch([4], seed=1)]
    after = list(table_to_batches(through_a_file(batches_to_table(batches), tmp_path)))
    for one, other in zip(batches, after, strict=True):
        torch.testing.assert_close(one.gram, other.gram, rtol=1e-7, atol=0)
        assert torch.equal(other.gram, other.gram.T)
        assert_same(replace(one, gram=other.gram), other)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sizes": torch.tensor([2, 2])}, "hold all rollouts"),
        ({"gram": torch.zeros(4, 4)}, "gram of the batch of step 3 must have shape"),
        ({"gram": torch.arange(25.0).view(5, 5)}, "must be symmetric"),
        ({"prompt_ids": ("a",)}, "sizes"),
    ],
)
def test_batches_that_do_not_fit_are_refused(change, said, unchecked_shapes):
    with pytest.raises(ScoregramError, match=said):
        batches_to_table([replace(make_batch([2, 3]), **change)])


def test_updates_come_back_in_float32(tmp_path):
    updates = [make_update(3, features=7), make_update(3, features=7, seed=2)]
    after = list(table_to_updates(through_a_file(updates_to_table(updates), tmp_path)))
    for before, read in zip(updates, after, strict=True):
        assert_same(before, read)
    wide = UpdateRecord(step=3, sketch=torch.tensor([1.0, 1 / 3], dtype=torch.float64))
    [read] = table_to_updates(through_a_file(updates_to_table([wide]), tmp_path))
    assert read.sketch.equal(wide.sketch.float())
