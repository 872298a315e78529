"""One step in detail: cosines, shares, texts and interference, against direct computations from the known Gram."""

import math
from dataclasses import replace

import pytest
import torch

from scoregram.reading import StoredGroup, detailed_steps, read_run, step_detail
from scoregram.reading.glass import group_detail
from scoregram.report.glass import MOST_GROUPS, MOST_STEPS, cut_text, rounded_numbers, run_glass, step_json, token_names
from scoregram.runs import GroupRecord, open_run
from tests.report_cases import write_run

SIZE = 4


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    known = write_run(folder, steps=3, text="<b>")
    run = open_run(folder)
    return run, read_run(run), known


def test_rollouts_are_sorted_by_reward_with_their_texts_cosines_and_shares(stored):
    run, reading, known = stored
    gram, rewards = known[2]
    weights = (rewards - rewards.mean(dim=1, keepdim=True)).flatten() / rewards.numel()
    detail = step_detail(run, reading.groups, 2)
    assert detail.step == 2 and len(detail.groups) == 3 and detail.left_out == 0
    for place, group in enumerate(detail.groups):
        order = sorted(range(SIZE), key=lambda i: (-float(rewards[place, i]), i))
        assert group.rewards == [float(rewards[place, i]) for i in order]
        assert [one and one.completion for one in group.rollouts] == [f"completion {place}.{i} <b>" for i in order]
        assert group.prompt == f"prompt {place} <b>" and group.has_text and group.share_of == "step"
        for row, i in enumerate(order):
            a = SIZE * place + i
            share = float(weights[a] * (gram[a] @ weights) / (weights @ gram @ weights))
            assert group.shares[row] == pytest.approx(share, abs=1e-6)  # the batch is stored in float32
            assert group.norms[row] == pytest.approx(math.sqrt(gram[a, a]))
            for column, j in enumerate(order):
                b = SIZE * place + j
                cosine = float(gram[a, b] / math.sqrt(gram[a, a] * gram[b, b]))
                assert group.cosines[row][column] == pytest.approx(cosine)


def test_a_stored_push_colours_the_sampled_tokens(stored):
    run, reading, _ = stored
    detail = step_detail(run, reading.groups, 2)
    first = detail.groups[0].rollouts[0]
    assert first is not None and "push" not in step_json(detail)["groups"][0]["rollouts"][0]
    push = torch.arange(len(first.token_ids)).float() / 8
    pushed = replace(detail.groups[0], rollouts=[replace(first, push=push), *detail.groups[0].rollouts[1:]])
    shown = step_json(replace(detail, groups=[pushed]))["groups"][0]["rollouts"][0]
    sampled = range(first.prompt_length, len(first.token_ids))
    assert shown["push"] == [pytest.approx(place / 8, abs=0.01) for place in sampled]


def test_the_expected_answer_of_a_stored_rollout_is_shown(stored):
    run, reading, _ = stored
    group = reading.groups[0]
    rollouts = {one.index: one for one in run.rollouts({group.record.step}, prompts={group.record.prompt_id})}
    assert group_detail(group, rollouts).answer is None
    answered = group_detail(group, {place: replace(one, answer="42") for place, one in rollouts.items()})
    assert answered.answer == "42"
    detail = replace(step_detail(run, reading.groups, 2), groups=[answered])
    assert step_json(detail)["groups"][0]["answer"] == "42"


def test_prompts_interfere_as_their_updates_do(stored):
    run, reading, known = stored
    gram, rewards = known[1]
    weights = (rewards - rewards.mean(dim=1, keepdim=True)).flatten() / rewards.numel()
    parts = [torch.zeros(12, dtype=torch.float64) for _ in range(3)]
    for place, part in enumerate(parts):
        part[SIZE * place : SIZE * place + SIZE] = weights[SIZE * place : SIZE * place + SIZE]
    batch = step_detail(run, reading.groups, 1).batch
    assert batch is not None and sum(batch.shares) == pytest.approx(1)
    for p, one in enumerate(parts):
        for q, other in enumerate(parts):
            inner, own, others = (float(a @ gram @ b) for a, b in ((one, other), (one, one), (other, other)))
            found = batch.cosines[p][q]
            assert (
                math.isnan(found)
                if own * others == 0
                else found == pytest.approx(inner / math.sqrt(own * others), abs=1e-5)
            )


def test_without_a_batch_shares_are_those_of_the_group():
    gram, rewards = torch.diag(torch.tensor([4.0, 1.0, 1.0])).double(), torch.tensor([math.nan, 0.0, 1.0]).double()
    record = GroupRecord(
        step=1,
        prompt_id="p",
        rewards=rewards,
        lengths=torch.tensor([1, 2, 3]),
        advantages=torch.tensor([0.0, -0.5, 0.5]).double(),
        gram=gram,
    )
    detail = group_detail(StoredGroup(record))
    assert detail.share_of == "group" and detail.shares == pytest.approx([0.5, 0.5, 0.0])
    assert detail.lengths == [3, 2, 1] and math.isnan(detail.rewards[-1])  # no reward comes last
    assert not detail.rollouts and detail.prompt is None


def test_only_the_largest_groups_are_kept(stored):
    run, reading, _ = stored
    sizes = [group.reading.update_norm for group in reading.groups if group.record.step == 3]
    detail = step_detail(run, reading.groups, 3, most_groups=1)
    assert detail.left_out == 2
    assert detail.groups[0].prompt_id == f"p/{sizes.index(max(sizes))}"


def test_steps_are_evenly_spaced_and_keep_both_ends(stored, tmp_path):
    run, reading, _ = stored
    assert detailed_steps(run, reading.groups, 5) == [1, 2, 3] and detailed_steps(run, reading.groups, 2) == [1, 3]
    write_run(tmp_path / "bare", measured=False)
    bare = open_run(tmp_path / "bare")
    assert detailed_steps(bare, read_run(bare).groups, 5) == [] and not run_glass(bare, read_run(bare)).steps


def test_what_a_page_holds_and_what_it_leaves_out(tmp_path):
    write_run(tmp_path / "run", steps=MOST_STEPS + 1, prompts=MOST_GROUPS + 1)
    run = open_run(tmp_path / "run")
    glass = run_glass(run, read_run(run))
    assert len(glass.steps) == MOST_STEPS and {len(step["groups"]) for step in glass.steps} == {MOST_GROUPS}
    assert "40 of 41 recorded steps" in glass.note and "8 groups with the largest updates" in glass.note
    assert "No rollout's text is stored" in glass.note


def test_tokens_have_credit_where_it_differs_and_surprise_everywhere(stored):
    run, reading, _ = stored
    plain = step_json(step_detail(run, reading.groups, 1), ("a", "b", "c", "d", "e", "f"), failed=True)
    rollouts = [one for group in plain["groups"] for one in group["rollouts"]]
    with_credit = [one for one in rollouts if "credit" in one]
    assert len(rollouts) == 12 and len(with_credit) == 3 and plain["failed"]
    assert with_credit[0]["credit"] == [1.0, -1.0, 0.5, 0.0, 0.25] and with_credit[0]["tokens"] == [*"bcdef"]
    assert all(one["surprise"] == [0.5, 1.0, 2.0, 0.0, 0.25] for one in rollouts)
    assert sum(not one["finished"] for one in rollouts) == 3


def test_texts_are_cut_and_only_the_embedded_policy_has_characters():
    assert cut_text("x" * 2000) == "x" * 2000 and cut_text("y" * 2001).endswith(" … (1 more characters)")
    assert token_names({"model": "elsewhere"}) is None
    names = token_names({"model": "tiny"})
    assert names is not None and "7" in names


def test_numbers_are_rounded_one_by_one_or_together_alike():
    values = [0.0, -0.0, 1.23456, -7.0, 0.1, 0.0999949, -0.00123456, 1e-9, 123456.789, 2.5e-3, 0.125, 0.3125]
    for digits in (2, 3):
        naive = [round(x, digits) if abs(x) >= 0.1 or x == 0 else float(f"{x:.{digits}g}") for x in values]
        assert rounded_numbers(values, digits) == naive
    assert rounded_numbers([math.nan, 1.0, math.inf, -math.inf]) == [None, 1.0, None, None]
    assert rounded_numbers([]) == [] and rounded_numbers([math.nan]) == [None]
