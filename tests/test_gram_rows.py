"""Turns and held-out rollouts against the definition: one backward pass for each."""

import functools
from typing import Any

import pytest
import torch

from scoregram.checks import ScoregramError
from scoregram.gram import cross_gram, measure_gram, segment_rows
from tests.cases import ARCHITECTURES, KeepDouble, rollouts
from tests.naive import score_rows

pytestmark = pytest.mark.filterwarnings("default")


def distance(measured: torch.Tensor, reference: torch.Tensor) -> float:
    return float((measured - reference).norm() / reference.norm())


@functools.cache
def model_of(name: str) -> Any:
    return ARCHITECTURES[name]()


def turns(batch) -> torch.Tensor:
    """Turn 4 at even positions of a completion, turn 1 at odd ones, and one token of no turn in the first rollout."""
    position = torch.arange(batch.input_ids.shape[1]).expand_as(batch.input_ids)
    segments = torch.where(batch.completion_mask, torch.where(position % 2 == 0, 4, 1), -1)
    segments[0, batch.completion_mask[0].nonzero()[-1]] = -2
    return segments


@pytest.mark.parametrize("name", ["llama-tied", "gpt2"])
@pytest.mark.parametrize("padding", ["left", "right"])
def test_the_gram_of_turns_matches_the_definition(name, padding):
    model, batch = model_of(name), rollouts(padding=padding)
    segments = turns(batch)
    rows = segment_rows(batch.input_ids, batch.attention_mask, segments)
    expected_keys = [(i, s) for i in range(5) for s in sorted(set(segments[i].tolist())) if s >= 0]
    assert list(zip(rows.owner.tolist(), rows.segment.tolist(), strict=True)) == expected_keys
    with KeepDouble():
        expected = torch.cat(
            [
                score_rows(model, batch.input_ids[[i]], segments[[i]] == s, batch.attention_mask[[i]])
                for i, s in expected_keys
            ]
        )
        gram = measure_gram(model, *rows.arguments).matrix
    assert distance(gram, expected @ expected.T) < 1e-12


def test_the_scores_of_turns_add_up_to_the_score_of_their_rollout():
    model, batch = model_of("llama"), rollouts()
    segments = turns(batch)
    rows = segment_rows(batch.input_ids, batch.attention_mask, segments)
    member = torch.nn.functional.one_hot(rows.owner, 5).double()  # (S, N)
    with KeepDouble():
        whole = score_rows(model, batch.input_ids, segments >= 0, batch.attention_mask)
        of_turns = measure_gram(model, *rows.arguments).matrix
        of_rollouts = measure_gram(model, batch.input_ids, segments >= 0, batch.attention_mask).matrix
    assert distance(member.T @ of_turns @ member, whole @ whole.T) < 1e-12
    assert distance(member.T @ of_turns @ member, of_rollouts) < 1e-12


def test_every_token_is_real_unless_said():
    batch = rollouts()
    rows = segment_rows(batch.input_ids, None, turns(batch))
    assert bool((rows.attention_mask == 1).all())
    assert torch.equal(rows.input_ids, batch.input_ids[rows.owner])


@pytest.mark.parametrize("tokens", [(11, 8), (7, 11), (9, 9)])
@pytest.mark.parametrize("padding", ["left", "right"])
def test_a_cross_gram_matches_the_definition(tokens, padding):
    model = model_of("llama-tied")
    train, held = rollouts(4, tokens[0], padding=padding), rollouts(3, tokens[1], seed=1, padding=padding)
    with KeepDouble():
        left, right = (score_rows(model, *batch.arguments) for batch in (train, held))
        measured = cross_gram(model, train.arguments, held.arguments)
    assert distance(measured.cross, left @ right.T) < 1e-12
    assert distance(measured.train, left @ left.T) < 1e-12


def test_a_cross_gram_at_a_temperature_without_attention_masks():
    model, train, held = model_of("llama"), rollouts(2, 9), rollouts(3, 7, seed=1)
    real = [torch.ones_like(batch.input_ids) for batch in (train, held)]
    with KeepDouble():
        left = score_rows(model, train.input_ids, train.completion_mask, real[0], temperature=0.7)
        right = score_rows(model, held.input_ids, held.completion_mask, real[1], temperature=0.7)
        measured = cross_gram(model, train.arguments[:2], (*held.arguments[:2], None), temperature=0.7)
    assert distance(measured.cross, left @ right.T) < 1e-12


@pytest.mark.usefixtures("unchecked_shapes")
def test_bad_input_is_named():
    batch = rollouts()
    ids, mask, attention = batch.arguments
    with pytest.raises(ScoregramError, match=r"segments must have the shape of input_ids \(5, 11\), got \(4, 11\)"):
        segment_rows(ids, attention, turns(batch)[:4])
    with pytest.raises(ScoregramError, match=r"attention_mask must have the shape"):
        segment_rows(ids, attention[:, 1:], turns(batch))
    for wrong in (mask, mask.float()):
        with pytest.raises(ScoregramError, match=rf"segments must be integers, got {wrong.dtype}"):
            segment_rows(ids, attention, wrong)
    with pytest.raises(ScoregramError, match="at least one segment, got only negative ids"):
        segment_rows(ids, attention, torch.full_like(ids, -1))
    model = model_of("llama")
    with pytest.raises(ScoregramError, match=r"held_out must be \(input_ids, completion_mask, attention_mask\), got"):
        cross_gram(model, batch.arguments, (ids,))
    with pytest.raises(ScoregramError, match=r"train must be \(N, T\) with at least one rollout, got \(0, 11\)"):
        cross_gram(model, (ids[:0], mask[:0]), batch.arguments)
    with pytest.raises(ScoregramError, match=r"completion_mask of held_out must have the shape of input_ids"):
        cross_gram(model, batch.arguments, (ids, mask[:, 1:], attention))
