"""Groups of unequal size in training, the ledger of noise by hand, and decisions that can be computed again."""

import math
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scoregram.advantages import ESTIMATORS
from scoregram.advice import advise_run
from scoregram.checks import ScoregramError
from scoregram.policy import PolicyConfig, load_policy
from scoregram.reading import OF_PROMPTS, read_run
from scoregram.rollouts import Rollouts
from scoregram.runs import open_run
from scoregram.statistics import (
    NoiseComponents,
    components_of_estimates,
    noise_components,
    shrunk_weights,
    unequal_prompt_estimates,
)
from scoregram.tasks import Problem, load_task
from scoregram.training.collect import collect, seeded_generator
from scoregram.training.config import TrainConfig
from scoregram.training.control import (
    PRIOR_ROLLOUTS,
    Controller,
    GroupSizeControl,
    NoiseLedger,
    group_size_choices,
    replayed_advice,
    replayed_allocation,
)
from scoregram.training.credit import PROMPT_WEIGHTS, advantages_of, credited_step, require_unequal_groups
from scoregram.training.loop import train
from scoregram.training.methods import METHODS
from scoregram.training.update import Updater
from tests.training_cases import JUDGE, config_for, save_policy, without_times


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def loaded(policy) -> Any:
    task = load_task("arithmetic:3", seed=0, reward=JUDGE)
    return SimpleNamespace(task=task, policy=load_policy(PolicyConfig(model=str(policy), prompt="plain"), task))


def drawn(loaded: Any, sizes: int | list[int]) -> Rollouts:
    sampling = TrainConfig(max_new_tokens=6).sampling(6)
    stream = seeded_generator(0, "rollouts", 1)
    problems = loaded.task.train[:3]
    return collect(loaded.policy, loaded.task, problems, group_size=sizes, sampling=sampling, generator=stream)


def test_unequal_groups_are_sampled_in_order(loaded):
    rollouts = drawn(loaded, [2, 6, 4])
    assert rollouts.group_sizes == [2, 6, 4] and rollouts.group_size is None
    starts = [tuple(ids[:n]) for ids, n in zip(rollouts.token_ids(), rollouts.prompt_lengths.tolist(), strict=True)]
    assert [starts.count(start) for start in dict.fromkeys(starts)] == [2, 6, 4]
    assert drawn(loaded, [4, 4, 4]).input_ids.equal(drawn(loaded, 4).input_ids)


def test_a_step_of_unequal_groups_is_the_mean_of_the_prompts_gradients(loaded):
    rollouts, model = drawn(loaded, [3, 5, 4]), loaded.policy.model
    updater = Updater(model, METHODS["rloo"], 1.0, 6, 0, loaded.policy.computing, 0.0, "k3")
    model.zero_grad()
    step, _ = updater.first(1, rollouts, measure=True)
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    logits = model(rollouts.input_ids, attention_mask=rollouts.attention_mask.long()).logits.log_softmax(-1)
    chosen = logits[:, :-1].gather(2, rollouts.input_ids[:, 1:, None]).squeeze(2)
    each = (chosen * rollouts.completion_mask[:, 1:]).sum(1)  # log-probability of every completion
    loss = torch.zeros(())
    for start, size in ((0, 3), (3, 5), (8, 4)):
        rewards = rollouts.rewards[start : start + size]
        for place in range(size):
            others = (rewards.sum() - rewards[place]) / (size - 1)
            loss = loss - float(rewards[place] - others) * each[start + place] / (3 * size)
    model.zero_grad()
    loss.backward()
    truth = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    assert float(truth.norm()) > 0.01
    torch.testing.assert_close(found, -found + 2 * truth, rtol=1e-4, atol=1e-5)
    assert step.gram is not None
    power = step.weights.double() @ step.gram.matrix @ step.weights.double()
    assert math.sqrt(float(power)) == pytest.approx(float(truth.norm()), rel=1e-4)


ALONE = [name for name, row in ESTIMATORS.items() if row.level == "group" and not row.couples_prompts]


@pytest.mark.parametrize(
    "estimator", [name for name in ALONE if set(ESTIMATORS[name].needs) <= {"lengths", "outcomes"}]
)
def test_advantages_of_unequal_groups_are_those_of_each_group_alone(estimator, loaded):
    rollouts = drawn(loaded, [3, 5, 4])
    together = rollouts.by_rollout(advantages_of(estimator, rollouts))
    for group, here in enumerate(rollouts.group_slices()):
        alone = advantages_of(estimator, rollouts.select(rollouts.group_ids == group))
        torch.testing.assert_close(together[here], alone.flatten())


def test_every_prompt_has_the_same_weight(loaded):
    rollouts = drawn(loaded, [3, 5, 4])
    step = credited_step(METHODS["reinforce"], 1, rollouts, length=6)
    torch.testing.assert_close(step.weights, torch.tensor([1 / 9] * 3 + [1 / 15] * 5 + [1 / 12] * 4) * rollouts.rewards)


def test_weights_of_prompts_scale_their_advantages(loaded):
    rollouts, weights = drawn(loaded, [3, 5, 4]), torch.tensor([0.5, 2.0, 0.0])
    plain, weighted = (
        credited_step(METHODS["rloo"], 1, rollouts, length=6, inputs=inputs)
        for inputs in (None, {PROMPT_WEIGHTS: weights})
    )
    torch.testing.assert_close(weighted.weights, plain.weights * weights.double()[rollouts.group_ids])
    assert bool(plain.weights.any())


def test_weights_reach_a_baseline_that_comes_with_the_gram(loaded):
    """`optimal` takes its baseline from the same backward pass where it can; with weights it must not."""
    rollouts, weights = drawn(loaded, 4), torch.tensor([0.5, 2.0, 0.0])
    model = loaded.policy.model
    updater = Updater(model, METHODS["optimal"], 1.0, 6, 0, nullcontext, 0.0, "k3")
    step, _ = updater.first(1, rollouts, measure=True, inputs={PROMPT_WEIGHTS: weights})
    model.zero_grad(set_to_none=True)
    plain, _ = updater.first(1, rollouts, measure=True)
    model.zero_grad(set_to_none=True)
    torch.testing.assert_close(step.weights, plain.weights * weights.double()[rollouts.group_ids])


# The ledger


def test_the_ledger_shrinks_to_the_mean_and_forgets():
    ledger = NoiseLedger()
    assert ledger.predicted(["a", "b"]).tolist() == [[1.0, 1.0], [1.0, 1.0]]
    ledger.learn(["a", "b"], [8, 8], torch.tensor([[4.0, 0.0], [2.0, 2.0]]))
    n = PRIOR_ROLLOUTS
    expected = [(n * 2.0 + 8 * 4.0) / (n + 8), (n * 2.0 + 8 * 0.0) / (n + 8), 2.0]
    torch.testing.assert_close(ledger.predicted(["a", "b", "new"])[0], torch.tensor(expected).double())
    ledger.learn(["a"], [4], torch.tensor([[-100.0], [2.0]]))
    mean = (0.95 * 4.0 - 100.0) / (0.95 * 2 + 1)  # every prompt counts once
    again = (n * mean + 0.5 * 32.0 - 400.0) / (n + 0.5 * 8 + 4)
    assert again < 0 and ledger.predicted(["a"])[0].tolist() == [0.0]  # a negative prediction counts as no noise
    ledger.learn(["a"], [8], torch.tensor([[200.0], [2.0]]))
    total = (0.95 * (0.95 * 4 - 100) + 200) / (0.95 * (0.95 * 2 + 1) + 1)
    own = 0.5 * (0.5 * 32 - 400) + 1600, 0.5 * (0.5 * 8 + 4) + 8
    assert float(ledger.predicted(["a"])[0]) == pytest.approx((n * total + own[0]) / (n + own[1]))


def test_the_mean_over_prompts_counts_each_once_or_by_the_inverse_of_its_probability():
    ledger = NoiseLedger()
    ledger.learn(["a", "b"], [12, 4], torch.tensor([[4.0, 0.0], [4.0, 0.0]]))
    assert ledger.predicted(["new"]).tolist() == [[2.0], [2.0]]
    # four prompts with noise 1, 2, 3, 4, drawn two at a time with unequal probabilities: over all draws, the mean of
    # the weighted sums is the mean noise of 2.5, and that of the weights is 1
    probabilities, noise = [0.8, 0.6, 0.4, 0.2], [1.0, 2.0, 3.0, 4.0]
    draws = {(0, 1): 0.4, (0, 2): 0.4, (1, 3): 0.2}  # the marginals are the probabilities
    expected = torch.zeros(2, dtype=torch.float64)
    for places, chance in draws.items():
        drawn = NoiseLedger()
        weights = torch.tensor([2 / (4 * probabilities[p]) for p in places], dtype=torch.float64)
        values = torch.tensor([[noise[p] for p in places]] * 2)
        drawn.learn([str(p) for p in places], [4, 4], values, weights)
        expected += chance * torch.tensor(drawn.population[:2], dtype=torch.float64) / 2
    torch.testing.assert_close(expected, torch.tensor([1.0, 2.5], dtype=torch.float64))


def test_shrinking_takes_each_prompt_with_the_rollouts_that_it_got():
    controller = Controller(TrainConfig(batch_size=32, group_size=8, allocate="measured", shrink=True))
    controller.ledger.learn("abcd", [8] * 4, torch.tensor([[4.0, 4.0, 0.0, 0.0], [0.0] * 4, [0.0, 9.0, 9.0, 0.0]]))
    problems = [Problem(name, name, "", {}) for name in "abcd"]
    sizes = controller.rollouts_of(problems)
    assert isinstance(sizes, list) and len(set(sizes)) > 1
    signal, noise = [2.25, 6.75, 6.75, 2.25], [3.0, 3.0, 1.0, 1.0]  # by hand, shrunk to means of 4.5 and 2
    errors = torch.tensor([n / size for n, size in zip(noise, sizes, strict=True)], dtype=torch.float64)
    expected = shrunk_weights(torch.tensor(signal, dtype=torch.float64), errors)
    torch.testing.assert_close(controller.inputs(problems)[PROMPT_WEIGHTS], expected)


def test_a_prompt_gets_from_half_to_twice_the_mean():
    controller = Controller(TrainConfig(allocate="measured", batch_size=32, group_size=8))
    problems = [Problem(name, name, "", {}) for name in "abcd"]
    assert controller.rollouts_of(problems) == 8
    controller.ledger.learn("abcd", [8] * 4, torch.tensor([[1000.0, 0.0, 0.0, 0.0]] * 2))
    noise = [(8 * 250 + 8 * v) / 16 for v in (1000, 0, 0, 0)]  # shrunk to the mean of 250

    def error(sizes: tuple[int, ...]) -> float:
        return sum(v / r + v / (r * (r - 1)) for v, r in zip(noise, sizes, strict=True))

    every = [sizes for sizes in product(range(4, 17), repeat=4) if sum(sizes) == 32]
    assert error(tuple(controller.rollouts_of(problems))) == pytest.approx(min(map(error, every)))  # pyright: ignore[reportArgumentType]
    controller.ledger.learn("abcd", [8] * 4, torch.tensor([[1e3, 1e3, -1e3, -1e3]] * 2))
    sizes = controller.rollouts_of(problems)
    assert isinstance(sizes, list) and sum(sizes) == 32 and min(sizes) == 4


def follower(**changes: Any) -> tuple[Controller, list[Problem]]:
    """A controller that has seen four of eight prompts: noise 4, 4, 0, 0 and 0, 0, 0, 0; signal 0, 9, 9, 0."""
    controller = Controller(TrainConfig(batch_size=16, group_size=4, **changes))
    learned = [[4.0, 4.0, 0.0, 0.0], [0.0] * 4, [0.0, 9.0, 9.0, 0.0]]
    controller.ledger.learn("abcd", [8] * 4, torch.tensor(learned))
    return controller, [Problem(name, name, "", {}) for name in "abcdefgh"]


def test_prompts_with_a_large_gradient_are_drawn_more_often():
    controller, problems = follower(draw="measured")
    # by hand: mean noise 2 and signal 4.5 count for 8 rollouts, as many as each visit; unseen prompts are at the mean
    moments = [(s + n / 4) for s, n in zip([2.25, 6.75, 6.75, 2.25] + [4.5] * 4, [3, 3, 1, 1] + [2] * 4, strict=True)]
    total = sum(moment**0.5 for moment in moments)
    expected = [4 * (0.25 / 8 + 0.75 * moment**0.5 / total) for moment in moments]
    assert controller.draw_probabilities(problems).tolist() == pytest.approx(expected)
    for number in range(20):
        drawn_now = controller.drawn_problems(problems, number)
        assert len({problem.id for problem in drawn_now}) == 4
        weights = controller.inputs(drawn_now)[PROMPT_WEIGHTS].tolist()  # n / (M π): unbiased whatever π
        assert weights == pytest.approx([4 / (8 * expected["abcdefgh".index(problem.id)]) for problem in drawn_now])


def test_prompts_without_signal_are_shrunk():
    controller, problems = follower(shrink=True)
    weights = controller.inputs(problems[:4])[PROMPT_WEIGHTS]
    signal, noise = torch.tensor([2.25, 6.75, 6.75, 2.25]), torch.tensor([3, 3, 1, 1]) / 4
    factors = (signal / (signal + noise)).double()
    torch.testing.assert_close(weights, factors / factors.mean())


def test_before_the_first_visit_all_prompts_are_alike():
    controller = Controller(TrainConfig(batch_size=16, group_size=4, draw="measured", shrink=True))
    problems = [Problem(name, name, "", {}) for name in "abcdefgh"]
    weights = controller.inputs(controller.drawn_problems(problems, 1))[PROMPT_WEIGHTS]
    assert weights.tolist() == pytest.approx([1.0] * 4)


def test_the_choices_leave_two_whole_groups():
    assert group_size_choices(16) == (4, 8) and group_size_choices(64) == (4, 8, 16, 32)
    assert group_size_choices(64, 64) == (4, 8, 16, 32) and group_size_choices(64, 16) == (4, 8)
    assert group_size_choices(80, 20) == (4,)  # 20 rollouts hold no whole groups of 8


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [({"allocate": "measured"}, (8, 4)), ({"allocate": "success"}, (8, 4)), ({}, (4, 8)), ({"shrink": True}, (4, 8))],
)
def test_a_group_size_that_moves_leaves_a_valid_config(changes, sizes):
    start, end = sizes
    config = TrainConfig(method="rloo", batch_size=32, micro_batch_size=16, group_size="auto", **changes)
    controller = Controller(config)
    assert controller.config.group_size == start
    noise = NoiseComponents(1.0, 5.0, 1.0, 0.1) if end < start else NoiseComponents(1.0, 0.01, 1.0, 50.0)
    for number in range(1, 11):
        controller.sizes.learn(number, noise)
    assert controller.config.group_size == end
    assert controller.config.allocate == (changes.get("allocate", "uniform") if end > 4 else "uniform")
    assert controller.rollouts_of([Problem(name, name, "", {}) for name in "ab"]) == end


def test_the_group_size_is_decided_every_ten_measured_steps():
    control = GroupSizeControl((4, 8, 16, 32), 0, 8)
    noise = NoiseComponents(1.0, 0.001, 1.0, 50.0)
    decided = [step for step in range(1, 31) if control.learn(step, noise if step % 2 else None) is not None]
    assert decided == [19] and control.group_size == 16


# Whole runs


RUN: dict[str, Any] = {
    "method": "rloo",
    "group_size": "auto",
    "allocate": "measured",
    "batch_size": 32,
    "train_problems": 6,
    "eval_every": 0,
    "checkpoint_every": 11,
    "rollouts_every": 0,
    "measure_every": 2,
    "layers": "none",
}


def test_a_controlled_run_keeps_its_budget_resumes_and_replays(policy, tmp_path):
    config = config_for(policy, tmp_path / "whole", steps=22, **RUN)
    train(config)
    train(config_for(policy, tmp_path / "halves", steps=11, **RUN))
    train(config_for(policy, tmp_path / "halves", steps=22, **RUN, resume=True))
    whole, halves = (open_run(tmp_path / name) for name in ("whole", "halves"))
    lines = list(whole.metrics())
    assert without_times(lines) == without_times(list(halves.metrics()))
    assert [line["rollouts"] for line in lines] == [32 * step for step in range(1, 23)]
    sizes = [group.rewards.numel() for group in whole.groups()]
    assert len(set(sizes)) > 1 and sum(sizes) == 11 * 32  # groups of every other step are stored
    decided = [line for line in lines if "control/next_group_size" in line]
    replayed = replayed_advice(config, lines)
    assert [(line["step"], line["control/next_group_size"]) for line in decided] == [
        (step, advice.recommended) for step, advice in replayed
    ]
    assert [line["step"] for line in decided] == [10, 20]
    assert [line["control/error_ratio"] for line in decided] == [advice.error_ratio for _, advice in replayed]
    used = {line["step"]: line["control/group_size"] for line in lines}
    assert used[11] == decided[0]["control/next_group_size"]


@pytest.mark.parametrize("changes", [{"allocate": "measured"}, {"allocate": "success"}, {"draw": "measured"}])
def test_a_controlled_run_in_passes_is_the_same_run(changes, policy, tmp_path):
    changes = RUN | {"group_size": 8, "allocate": "uniform"} | changes
    found = []
    for name, per_pass in (("whole", 0), ("passes", 16)):  # no group is larger than 16
        train(config_for(policy, tmp_path / name, steps=8, micro_batch_size=per_pass, **changes))
        found.append(list(open_run(tmp_path / name).metrics()))
    whole, passes = found
    for name in ("reward", "loss", "control/smallest_group", "control/largest_group", "control/largest_weight"):
        values = [[line[name] for line in lines if name in line] for lines in (whole, passes)]
        assert values[0] == pytest.approx(values[1], rel=1e-4, abs=1e-6), name
    assert "draw" in changes or any(line["control/largest_group"] > 8 for line in passes)


def test_a_run_that_draws_by_gradients_gives_no_noise(policy, tmp_path, capsys):
    changes = RUN | {"group_size": 8, "allocate": "uniform", "draw": "measured"}
    run = read_run(train(config_for(policy, tmp_path / "run", steps=14, **changes)).folder)
    assert run.noise().steps == 0 and run.noise().sentence() == ""
    assert all(math.isnan(line[name]) for line in run.lines for name in OF_PROMPTS if name in line)  # trackers too
    assert all("gram/snr" in line for line in run.lines)
    assert "signal to noise" not in capsys.readouterr().out.split("step 14/14")[-1]
    assert any("drawn by their measured gradients" in sentence for sentence in run.trust.sentences())
    assert "draw prompts evenly" in advise_run(run).undecided["batch size"]


def test_in_passes_the_noise_of_a_step_is_that_of_its_pairs_in_a_pass(policy, tmp_path):
    changes = RUN | {"allocate": "uniform", "batches_every": 2, "checkpoint_every": 0}
    whole = config_for(policy, tmp_path / "whole", steps=2, **changes)
    config = config_for(policy, tmp_path / "passes", steps=12, **changes | {"batches_every": 0, "micro_batch_size": 16})
    train(whole)
    train(config)
    (batch,) = open_run(tmp_path / "whole").batches()
    lines = list(open_run(tmp_path / "passes").metrics())
    scores_of_pass = [batch.gram[start : start + 16, start : start + 16] for start in (0, 16)]
    rewards_of_pass = batch.rewards.view(2, 4, 4)
    parts = [noise_components(gram.double(), r) for gram, r in zip(scores_of_pass, rewards_of_pass, strict=True)]
    for name in ("gradient_squared", "between_prompts", "within_prompt", "group_baseline"):
        mean = sum(getattr(part, name) for part in parts) / 2
        assert lines[1][f"control/{name}"] == pytest.approx(mean, rel=1e-3), name
    decided = [(line["step"], line["control/next_group_size"]) for line in lines if "control/next_group_size" in line]
    assert decided == [(step, advice.recommended) for step, advice in replayed_advice(config, lines)]


LARGER: dict[str, Any] = {"group_size": 8, "batch_size": 16}
"""Groups that can be divided."""


def test_an_allocation_is_decided_again_from_the_stored_groups(policy, tmp_path):
    changes = RUN | {"group_size": 8, "measure_every": 1, "checkpoint_every": 0}
    config = config_for(policy, tmp_path / "run", steps=10, **changes)
    train(config)
    groups = [group for group in open_run(tmp_path / "run").groups() if group.kind == "train"]
    given = {step: {g.prompt_id: len(g.rewards) for g in groups if g.step == step} for step in range(1, 11)}
    assert replayed_allocation(config, groups) == given
    assert any(len({*sizes.values()}) > 1 for sizes in given.values())
    with pytest.raises(ScoregramError, match="every step must be stored"):
        replayed_allocation(config, groups[len(given[1]) :])
    with pytest.raises(ScoregramError, match="needs --allocate measured alone"):
        replayed_allocation(replace(config, allocate="success"), groups)


def test_the_noise_of_a_run_does_not_depend_on_which_steps_had_equal_groups(policy, tmp_path):
    """Every step counts, those with unequal groups too: to drop them would be a selection by the controller."""
    changes = RUN | {"group_size": 8, "measure_every": 1, "checkpoint_every": 0, "batches_every": 1}
    train(config_for(policy, tmp_path / "run", steps=15, **changes))
    folder = open_run(tmp_path / "run")
    lines, last = list(folder.metrics()), list(folder.batches())[-1]
    assert any(line["control/smallest_group"] < line["control/largest_group"] for line in lines[-5:])
    noise = read_run(folder).noise()
    assert (noise.steps, noise.group_size, noise.is_conclusive) == (5, 8, True)
    prompt_of = torch.arange(len(last.sizes)).repeat_interleave(last.sizes)
    expected = components_of_estimates(unequal_prompt_estimates(last.gram.double(), last.rewards.double(), prompt_of))
    for name in ("gradient_squared", "between_prompts", "within_prompt", "group_baseline"):
        assert lines[-1][f"gram/{name}"] == pytest.approx(getattr(expected, name), rel=1e-3), name


def test_an_allocation_gives_no_prompt_more_rollouts_than_fit_into_a_pass():
    problems = [Problem(name, name, "", {}) for name in "abcd"]
    largest = []
    for per_pass in (0, 8):
        controller = Controller(
            TrainConfig(batch_size=32, group_size=8, allocate="measured", micro_batch_size=per_pass, method="rloo")
        )
        noise = torch.tensor([[9.0, 1.0, 1.0, 1.0]], dtype=torch.float64).expand(2, -1)
        controller.ledger.learn(list("abcd"), [8] * 4, noise)
        sizes = controller.rollouts_of(problems)
        largest.append(sizes if isinstance(sizes, int) else max(sizes))
    assert largest[0] > 8 == largest[1]


def test_a_run_that_draws_and_shrinks_resumes(policy, tmp_path):
    changes = RUN | {"group_size": 8, "allocate": "uniform", "draw": "measured", "shrink": True, "train_problems": 12}
    changes |= {"checkpoint_every": 3}
    train(config_for(policy, tmp_path / "whole", steps=6, **changes))
    train(config_for(policy, tmp_path / "halves", steps=3, **changes))
    train(config_for(policy, tmp_path / "halves", steps=6, **changes, resume=True))
    whole, halves = (list(open_run(tmp_path / name).metrics()) for name in ("whole", "halves"))
    assert without_times(whole) == without_times(halves)
    first, *later = whole
    assert first["control/smallest_weight"] == pytest.approx(1) == first["control/largest_weight"]
    assert all(line["control/smallest_weight"] < line["control/largest_weight"] for line in later)
    groups = [(group.step, group.prompt_id) for group in open_run(tmp_path / "whole").groups()]
    assert len(groups) == len(set(groups)) == 3 * 4  # no prompt twice in a step; every other step is stored


def test_a_run_by_success_learns_from_rewards_alone(policy, tmp_path):
    changes = RUN | {"group_size": 8, "allocate": "success", "measure_every": 0}
    train(config_for(policy, tmp_path / "run", steps=8, **changes))
    unequal = [line for line in open_run(tmp_path / "run").metrics() if line["control/largest_group"] > 8]
    assert unequal and all(8 > line["control/smallest_group"] >= 4 for line in unequal)
    assert all(0 < line["control/error_of_uniform"] < 1 for line in unequal)


def test_without_control_nothing_is_decided(policy, tmp_path):
    train(config_for(policy, tmp_path / "run", steps=1))
    assert not [name for line in open_run(tmp_path / "run").metrics() for name in line if name.startswith("control")]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"group_size": "auto", "batch_size": 4}, "needs at least two groups of 4"),
        ({"group_size": "auto", "batch_size": 16, "draw": "measured"}, "over prompts that are drawn evenly"),
        ({"allocate": "measured", "between_prompts": False}, "needs the Gram between prompts"),
        (
            {"group_size": "auto", "batch_size": 16, "micro_batch_size": 4},
            "two groups of 4 in a pass, got micro_batch_",
        ),
        ({"allocate": "success", "micro_batch_size": 6}, "a pass must hold whole groups"),
        ({"allocate": "measured", "method": "dapo"}, "samples each prompt once per step"),
        ({"allocate": "measured", "method": "agro", "sampling_temperature": 0.5}, "rollouts of the policy itself"),
        ({"train_problems": -1}, "must be finite and at least 0"),
        ({"draw": "measured", "allocate": "success"}, "success cannot be combined with --draw or --shrink"),
        ({"draw": "measured", "group_size": 2, "batch_size": 8}, "from 4 rollouts on, got group_size 2"),
        ({"allocate": "measured", "group_size": 2, "batch_size": 8}, "--group-size must be above 4, got group_size 2"),
        ({"allocate": "success", "group_size": 4, "batch_size": 8}, "at least 4 rollouts, .* Raise --group-size to 8"),
        ({"group_size": "auto", "allocate": "measured", "batch_size": 8}, "needs at least two groups of 8"),
        ({"draw": "measured", "method": "dapo"}, "samples each prompt once per step"),
        ({"shrink": True, "between_prompts": False}, "train --shrink: needs the Gram between prompts"),
    ],
)
def test_settings_that_cannot_be_controlled_are_refused(changes, words, policy, tmp_path):
    with pytest.raises(ScoregramError, match=words):
        config_for(policy, tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"allocate": "measured", "method": "ppo", **LARGER}, "one advantage per rollout"),
        ({"allocate": "measured", "method": "awr", **LARGER}, "linear in the advantages"),
        ({"allocate": "success", "task": "calculator:3", "reward": None, **LARGER}, "needs a task of one turn"),
        ({"draw": "measured", "task": "calculator:3", "reward": None}, "train --draw: needs a task of one turn"),
        ({"shrink": True, "method": "ppo"}, "train --shrink: needs one advantage per rollout"),
        ({"train_problems": 100_000}, "training problems"),
    ],
)
def test_methods_and_tasks_that_cannot_be_controlled_are_refused(changes, words, policy, tmp_path):
    with pytest.raises(ScoregramError, match=words):
        train(config_for(policy, tmp_path / "run", **changes))


@pytest.mark.parametrize("method", ["rloo", "grpo", "dr-grpo", "opo", "optimal", "optimal-loo", "reinforce++", "gspo"])
def test_methods_train_on_unequal_groups(method, policy, tmp_path):
    require_unequal_groups(METHODS[method], "train --allocate")
    changes = RUN | {"group_size": 8, "method": method, "inner_updates": 2}
    train(config_for(policy, tmp_path / "run", steps=3, **changes))
    assert any(g.rewards.numel() != 8 for g in open_run(tmp_path / "run").groups())
