"""A reading of a group is what the definitions give; its null models know what they should and nothing more."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from scoregram.checks import ScoregramError
from scoregram.reading.nulls import SHUFFLES, equal_cosine_gram, two_kinds_gram
from scoregram.runs import GroupRecord, Run
from scoregram.spectra import (
    MEASURED_RTOL,
    common_cosine_null,
    orthogonal_null,
    shuffled_null,
    spectrum_summary,
    spectrum_with_nulls,
)
from scoregram.studies.grpo_rank.presets import PAPER_METHOD
from scoregram.studies.grpo_rank.rank_exhibits import UNRELATED_DRAWS, matching_rollouts, unrelated_groups
from scoregram.studies.grpo_rank.readings import Trial, has_spectrum, read_evidence, readings_of
from tests.replication_cases import draw_batch, draw_group, stream, write_trial
from tests.run_cases import write

CLOSE: dict[str, Any] = {"rel": 1e-7, "abs": 1e-9}
"""A singular value whose square is rounding is half as exact as the rest."""


def trial(size: int, method: str = PAPER_METHOD) -> Trial:
    """A trial with an empty run, which the test does not read."""
    return Trial(f"R{size}", size, 0, method, Run(Path(), {}, {}, (), ()))


@st.composite
def live_groups(draw) -> GroupRecord:
    """Groups of 2 to 6 with different rewards, right-or-wrong or real, some rollouts being copies of others."""
    size = draw(st.integers(2, 6))
    generator = stream(draw(st.integers(0, 10**6)))
    if draw(st.booleans()):
        right = draw(st.integers(1, size - 1))
        rewards = torch.tensor([1.0] * right + [0.0] * (size - right), dtype=torch.float64)
        rewards = rewards[torch.randperm(size, generator=generator)]
    else:
        rewards = torch.rand(size, generator=generator, dtype=torch.float64) * 10 ** draw(st.floats(-3, 3))
    copied = draw(st.lists(st.integers(0, size - 1), min_size=size, max_size=size))
    scores = torch.randn(size, 7, generator=generator, dtype=torch.float64)
    scores = scores[copied] if draw(st.booleans()) else scores
    return draw_group(1, size, generator, rewards=rewards, gram=scores @ scores.mT)


def gram_of(group: GroupRecord) -> Tensor:
    assert group.gram is not None
    return group.gram


@given(group=live_groups())
def test_a_reading_is_what_the_definitions_give(group):
    (reading,) = readings_of(trial(len(group.rewards)), [group])
    gram, advantages = gram_of(group), group.rewards - group.rewards.mean()
    full = spectrum_with_nulls(gram, advantages, draws=SHUFFLES, exact_up_to=SHUFFLES, psd_rtol=MEASURED_RTOL)
    assert reading.rank == pytest.approx(full.measured.effective_rank, **CLOSE)
    assert reading.top == pytest.approx(full.measured.top1_fraction, **CLOSE)
    assert reading.numerical_rank == full.measured.numerical_rank
    assert reading.orthogonal == pytest.approx(orthogonal_null(gram, advantages).effective_rank, **CLOSE)
    assert reading.orthogonal_top == pytest.approx(full.orthogonal.top1_fraction, **CLOSE)
    assert reading.alike == pytest.approx(common_cosine_null(gram, advantages).effective_rank, **CLOSE)
    assert reading.cosine == pytest.approx(full.cosine, **CLOSE)
    shuffled = shuffled_null(gram, advantages, draws=SHUFFLES, exact_up_to=SHUFFLES).metrics
    assert reading.shuffled == pytest.approx(shuffled["effective_rank"].mean, **CLOSE)
    assert reading.shuffled_top == pytest.approx(shuffled["top1_fraction"].mean, **CLOSE)
    equal = spectrum_summary(torch.eye(len(gram), dtype=torch.float64), advantages)
    assert reading.shape == pytest.approx(equal.effective_rank, **CLOSE)
    kinds = spectrum_summary(two_kinds_gram(gram, group.rewards), advantages, psd_rtol=MEASURED_RTOL)
    assert reading.two_kinds == pytest.approx(kinds.effective_rank, **CLOSE)


def test_the_rest_of_a_reading_is_counted():
    group = draw_group(3, 4, stream(0), rewards=[1.0, 0.0, 1.0, 1.0], lengths=torch.tensor([1, 2, 3, 6]))
    (reading,) = readings_of(trial(4), [group])
    assert (reading.right, reading.length, reading.step, reading.kind) == (3, 3.0, 3, "train")
    assert reading.deviation == pytest.approx(math.sqrt(3) / 4)
    assert reading.is_binary and reading.cluster == ("R4", group.prompt_id)


@pytest.mark.parametrize(
    ("rewards", "right", "is_binary"),
    [
        ([1.0, 0.0, 0.0], 1, True),
        ([1.0, 0.5, 0.0], 1, False),
        ([1.0, 0.5, 0.5], 1, False),
        ([0.5, 0.0, 0.0], 0, False),
        ([2.0, 1.0, 1.0], 3, False),
        ([0.1, 0.2, 0.3], 0, False),
    ],
)
def test_right_or_wrong_is_told_from_other_rewards(rewards, right, is_binary):
    (reading,) = readings_of(trial(3), [draw_group(1, 3, stream(0), rewards=rewards)])
    assert (reading.right, reading.is_binary) == (right, is_binary)


def test_shuffles_are_drawn_for_training_groups_of_the_paper_alone():
    group, probe = (draw_group(1, 3, stream(0), rewards=[1.0, 0.0, 0.0], kind=kind) for kind in ("train", "fixed"))
    assert not math.isnan(readings_of(trial(3), [group])[0].shuffled)
    assert math.isnan(readings_of(trial(3), [probe])[0].shuffled)
    assert math.isnan(readings_of(trial(3, "rloo"), [group])[0].shuffled)
    assert readings_of(trial(3), []) == []


def test_what_single_precision_leaves_is_tolerated_by_every_null():
    """An eigenvalue a few parts in a million below zero, and a cosine as much above 1."""
    gram = torch.ones(3, 3, dtype=torch.float64) + torch.diag(torch.tensor([0.0, 0, 1.0], dtype=torch.float64))
    gram[0, 1] = gram[1, 0] = 1 + 5e-6
    (reading,) = readings_of(trial(3), [draw_group(1, 3, stream(0), rewards=[1.0, 0.0, 0.0], gram=gram)])
    numbers = [getattr(reading, name) for name in ("rank", "alike", "two_kinds", "shuffled", "orthogonal")]
    assert all(1 <= value <= 3 for value in numbers)


def averaged_by_enumeration(gram: Tensor, rewards: Tensor) -> Tensor:
    """Mean of the cosines over all orders within the rollouts above the mean and within the others, norms put back."""
    norms = gram.diagonal().sqrt()
    cosines = gram / torch.outer(norms, norms)
    above = [i for i, reward in enumerate(rewards.tolist()) if reward > float(rewards.mean())]
    below = [i for i in range(len(rewards)) if i not in above]
    total, count = torch.zeros_like(gram), 0
    for first, second in itertools.product(itertools.permutations(above), itertools.permutations(below)):
        order = torch.zeros(len(rewards), dtype=torch.long)
        order[above], order[below] = torch.tensor(first), torch.tensor(second)
        total, count = total + cosines[order][:, order], count + 1
    return torch.outer(norms, norms) * total / count


@given(group=live_groups())
def test_two_kinds_is_the_average_over_orders_and_a_gram(group):
    gram, rewards = gram_of(group), group.rewards
    made = two_kinds_gram(gram, rewards)
    scale = float(gram.abs().max())
    torch.testing.assert_close(made, averaged_by_enumeration(gram, rewards), rtol=0, atol=1e-12 * scale)
    torch.testing.assert_close(made, made.mT, rtol=0, atol=1e-15 * scale)
    assert float(torch.linalg.eigvalsh(made).min()) > -1e-12 * scale * len(gram)
    torch.testing.assert_close(made.diagonal(), gram.diagonal())
    if len(gram) == 2:
        torch.testing.assert_close(made, gram)


def test_zero_scores_stay_out_of_the_two_kinds():
    scores = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 0.0], [0.0, 2.0], [0.0, 0.0]], dtype=torch.float64)
    gram, rewards = scores @ scores.mT, torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    made = two_kinds_gram(gram, rewards)
    kept = torch.tensor([0, 1, 3])
    torch.testing.assert_close(made[kept][:, kept], averaged_by_enumeration(gram[kept][:, kept], rewards[kept]))
    assert not made[2].any() and not made[:, 4].any()


def test_equal_cosines_keep_the_norms():
    group = draw_group(1, 4, stream(3))
    made = equal_cosine_gram(gram_of(group), 0.3)
    norms = gram_of(group).diagonal().sqrt()
    cosines = made / torch.outer(norms, norms)
    torch.testing.assert_close(cosines, torch.full((4, 4), 0.3).double() + torch.eye(4).double() * 0.7)
    torch.testing.assert_close(equal_cosine_gram(gram_of(group), math.nan), torch.diag(norms.square()))


def test_a_group_in_which_nothing_pulls_has_no_spectrum():
    rewards = [1.0, 0.5, 0.0]
    assert has_spectrum(draw_group(1, 3, stream(0), rewards=rewards))
    assert not has_spectrum(draw_group(1, 3, stream(0), rewards=rewards, gram=None))
    assert not has_spectrum(draw_group(1, 3, stream(0), rewards=rewards, gram=torch.zeros(3, 3).double()))
    only_middle = torch.diag(torch.tensor([0.0, 1.0, 0.0]).double())
    assert not has_spectrum(draw_group(1, 3, stream(0), rewards=rewards, gram=only_middle))


def test_dead_and_unjudged_groups_are_counted_but_not_read(tmp_path):
    nan = math.nan
    rewards = ([1.0, 0.0], [1.0, 1.0], [0.1, 0.1], [1.0, nan])
    groups = [draw_group(1, 2, stream(place), rewards=given) for place, given in enumerate(rewards)]
    groups.append(draw_group(1, 2, stream(9), rewards=[1.0, 0.0], kind="test", gram=None, by_layer={}))
    write_trial(tmp_path / "runs/a", size=2, groups=groups)
    evidence = read_evidence(tmp_path)
    assert [reading.prompt_id for reading in evidence.readings] == [groups[0].prompt_id]
    (census,) = evidence.census
    assert (census.alive, census.groups, census.kind) == (1, 3, "train")
    assert census.deviation == pytest.approx(0.5 / 3)


def test_a_folder_that_is_no_run_of_training_is_named(tmp_path):
    with pytest.raises(ScoregramError, match="must hold runs, got none"):
        read_evidence(tmp_path)
    write(tmp_path / "runs/other", range(1))
    with pytest.raises(ScoregramError, match=r"other must be a run of training, got no group_size in its config"):
        read_evidence(tmp_path)


def test_an_empty_run_has_nothing(tmp_path):
    write_trial(tmp_path / "runs/a", size=4)
    evidence = read_evidence(tmp_path)
    assert (evidence.sizes, evidence.seeds, evidence.readings, evidence.census) == ((4,), (0,), (), ())
    assert evidence.trials[0].metrics("reward") == ([], [])


def prompts_of(batch, places: Tensor) -> list[int]:
    return torch.arange(len(batch.sizes)).repeat_interleave(batch.sizes)[places].tolist()


def most_prompts(rewards: list[float], pool: list[float], prompt_of: list[int]) -> int:
    """Largest number of different prompts that can stand for these rewards, by enumeration."""
    options = [sorted({p for p, r in zip(prompt_of, pool, strict=True) if r == reward}) for reward in rewards]
    return max(len(set(chosen)) for chosen in itertools.product(*options))


@given(prompts=st.integers(1, 4), size=st.integers(2, 4), seed=st.integers(0, 10**6))
def test_stand_ins_have_the_same_rewards_and_as_many_prompts_as_can_be(prompts, size, seed):
    batch = draw_batch(1, prompts, size, stream(seed))
    prompt_of = torch.arange(prompts).repeat_interleave(size)
    for start in range(0, prompts * size, size):
        rewards = batch.rewards[start : start + size]
        places = matching_rollouts(rewards, batch.rewards, prompt_of, stream(seed + 1))
        assert batch.rewards[places].tolist() == rewards.tolist()
        assert len(set(places.tolist())) == size
        wanted = most_prompts(rewards.tolist(), batch.rewards.tolist(), prompt_of.tolist())
        assert len(set(prompts_of(batch, places))) == wanted


def test_scarce_prompts_are_kept_for_whom_they_alone_can_serve():
    """Prompt 0 alone holds a wrong rollout; a right one may stand anywhere."""
    batch = draw_batch(1, 2, 2, stream(0), rewards=torch.tensor([1.0, 0.0, 1.0, 1.0]).double())
    for seed in range(20):
        places = matching_rollouts(batch.rewards[:2], batch.rewards, torch.tensor([0, 0, 1, 1]), stream(seed))
        assert prompts_of(batch, places) == [1, 0]


def test_unrelated_groups_are_blocks_of_the_batch_and_the_same_every_time():
    batch = draw_batch(3, 6, 4, stream(5))
    first, second = (unrelated_groups(batch, seed=1) for _ in range(2))
    live = {place: r for place, r in enumerate(batch.rewards.view(6, 4)) if r.max() > r.min()}
    assert first.keys() == second.keys() == live.keys() and live
    for place, rewards in live.items():
        assert len(first[place]) == UNRELATED_DRAWS
        for (gram, advantages), (again, _) in zip(first[place], second[place], strict=True):
            torch.testing.assert_close(gram, again, rtol=0, atol=0)
            assert advantages.tolist() == (rewards - rewards.mean()).tolist()
            assert set(gram.diagonal().tolist()) <= set(batch.gram.diagonal().tolist())
    other = unrelated_groups(batch, seed=2)
    assert any(not torch.equal(first[place][0][0], other[place][0][0]) for place in live)
    dead = draw_batch(3, 2, 4, stream(5), rewards=torch.ones(8).double())
    assert unrelated_groups(dead, seed=1) == {}


def test_no_unrelated_score_comes_from_the_groups_own_prompt():
    for seed in range(5):
        batch = draw_batch(3, 4, 4, stream(seed))
        norms = batch.gram.diagonal().view(4, 4)
        for place, drawn in unrelated_groups(batch, seed=seed).items():
            own = set(norms[place].tolist())
            assert all(own.isdisjoint(gram.diagonal().tolist()) for gram, _ in drawn)


def test_a_group_without_enough_stand_ins_is_left_out():
    """Prompt 0 has three right rollouts; the others have two between them. Prompt 1 finds its one."""
    rewards = torch.tensor([1, 1, 1, 0, 1, 0, 0, 0, 1, 0, 0, 0]).double()
    batch = draw_batch(3, 3, 4, stream(0), rewards=rewards)
    assert unrelated_groups(batch, seed=0).keys() == {1, 2}
