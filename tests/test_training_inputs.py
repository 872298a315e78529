"""Sources of estimator inputs: baselines, process rewards, Monte-Carlo values."""

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from scoregram.checks import ScoregramError
from scoregram.policy import Policy, PolicyConfig, load_policy, sample_policy
from scoregram.rollouts import Rollouts
from scoregram.runs import open_run
from scoregram.tasks import Problem, SolutionStep, Task, load_task
from scoregram.training import TrainConfig
from scoregram.training.collect import collect, seeded_generator
from scoregram.training.inputs import BaselineRewards, StepScores, input_sources
from scoregram.training.loop import train
from scoregram.training.methods import METHODS
from scoregram.training.prefix_values import PrefixRollouts, Segments
from tests.training_cases import config_for, save_policy, without_times

TASK = load_task("arithmetic:3", seed=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def policy(folder) -> Policy:
    return load_policy(PolicyConfig(model=str(folder), device="cpu", prompt="plain"), TASK)


def rollouts_of(policy: Policy, texts: list[str], problems: list[Problem], stop: bool = True) -> Rollouts:
    """Rollouts with these completions, the same number for every problem, each with a stop token."""
    size = len(texts) // len(problems)
    rows, masks = [], []
    for index, text in enumerate(texts):
        prompt = policy.encode_prompt(TASK.prompt(problems[index // size]))
        completion = policy.tokenizer(text, add_special_tokens=False)["input_ids"] + [policy.stop_ids[0]] * stop
        rows.append(torch.tensor([*prompt, *completion]))
        masks.append(torch.arange(len(rows[-1])) >= len(prompt))
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=policy.pad_id)
    mask = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True)
    real = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True).bool()
    return Rollouts(
        input_ids=ids,
        attention_mask=real,
        completion_mask=mask,
        prompt_lengths=torch.tensor([int((~mask).sum()) for mask in masks]),
        group_ids=torch.arange(len(texts)) // size,
        completions=texts,
        rewards=torch.zeros(len(texts), dtype=torch.float64),
    )


def problem(terms: str) -> Problem:
    return Problem("one", f"{terms}=", str(eval(terms)), {"terms": tuple(map(int, terms.split("+")))})


# Baselines


def test_a_running_mean_is_the_weighted_mean_of_earlier_rewards(policy):
    source, past = BaselineRewards(None, 0.8), []
    for step in range(5):
        rewards = torch.rand(6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        rewards[0] = math.nan
        rollouts = replace(rollouts_of(policy, ["1"] * 6, [problem("11+1+1")] * 2), rewards=rewards)
        weights = [0.8 ** (step - 1 - i) for i in range(step)]
        expected = sum(w * r for w, r in zip(weights, past, strict=True)) / sum(weights) if step else 0.0
        assert source.inputs(step, rollouts, [])["baselines"].tolist() == pytest.approx([expected] * 2)
        assert source.learn(rollouts) == {"credit/baseline": pytest.approx(expected)}
        past.append(float(rewards[1:].mean()))


def test_a_constant_baseline_learns_nothing(policy):
    source = BaselineRewards(0.25, 0.9)
    rollouts = replace(rollouts_of(policy, ["1"] * 2, [problem("11+1+1")]), rewards=torch.ones(2).double())
    source.learn(rollouts)
    assert source.inputs(1, rollouts, [])["baselines"].tolist() == [0.25]


def test_a_resumed_run_continues_the_running_mean(folder, tmp_path):
    changes: dict[str, Any] = {"method": "reinforce-baseline"}
    train(config_for(folder, tmp_path / "whole", steps=4, **changes))
    train(config_for(folder, tmp_path / "parts", steps=2, **changes))
    train(config_for(folder, tmp_path / "parts", steps=4, resume=True, **changes))
    whole, parts = (without_times(open_run(tmp_path / name).metrics()) for name in ("whole", "parts"))
    assert whole == parts
    assert whole[-1]["credit/baseline"] != 0


# Process rewards


@pytest.mark.parametrize(
    ("text", "ends", "rewards"),
    [
        ("12,13.", [2, 5], [1, 1]),
        ("13,14.", [2, 5], [0, 1]),  # a step is judged by the number before it
        ("12,13", [2, 4], [1, 0]),  # no full stop
        ("12,13.7.", [2, 5, 7], [1, 1, 0]),
        ("", [0], [0]),  # the stop token alone is one wrong step
    ],
)
def test_every_verified_step_is_rewarded_at_its_last_token(policy, text, ends, rewards):
    one = problem("11+1+1")
    rollouts = rollouts_of(policy, [text, "12,13."], [one])
    inputs = StepScores(policy, TASK).inputs(1, rollouts, [one])
    prompt = int(rollouts.prompt_lengths[0])
    found = inputs["step_ends"][0].nonzero().flatten() - prompt
    assert found.tolist() == ends
    assert inputs["token_rewards"][0, found + prompt].tolist() == rewards
    assert int((inputs["token_rewards"][0] != 0).sum()) == sum(rewards)


def test_a_task_without_steps_is_refused(folder, policy, tmp_path):
    task = replace(TASK, steps=None)
    config = config_for(folder, tmp_path / "run", method="grpo-process")
    with pytest.raises(ScoregramError, match="needs a task that verifies steps, got arithmetic:3"):
        input_sources(config.chosen_method, config, policy, task)


def test_estimators_without_a_source_are_refused(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("scoregram.training.credit.TRAINER_INPUTS", frozenset({"lengths"}))
    with pytest.raises(ScoregramError, match=r"train --estimator: must be one of .* got 'gigpo'"):
        train(config_for(folder, tmp_path / "run", estimator="gigpo"))


# Monte-Carlo values


def prefix_source(policy: Policy, folder: Path, task: Task = TASK, **changes: Any) -> PrefixRollouts:
    config = config_for(folder, Path("nowhere"), method="vineppo", **changes)
    segments = Segments(policy, task, config, every_token=False)
    return PrefixRollouts(policy, task, config.sampling(task.max_new_tokens), config, segments)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"segments": "steps"}, [0, 3]),  # none after the full stop: no fresh rollouts of a finished solution
        ({"segments": "even", "segment_tokens": 2}, [0, 2, 4, 6]),
        ({"segments": "even", "segment_tokens": 1}, [0, 1, 2, 3, 4, 5, 6]),
        ({"segments": "even", "segment_tokens": 99}, [0]),
        ({"segments": "unlikely", "segment_probability": 0.5}, [0, 2, 5]),
    ],
)
def test_segments_start_after_their_cuts(policy, folder, changes, expected):
    one = problem("11+1+1")
    rollouts = rollouts_of(policy, ["12,13."], [one])  # and a stop token
    prompt = int(rollouts.prompt_lengths[0])
    log_probs = torch.zeros(rollouts.input_ids.shape)
    log_probs[0, [prompt + 1, prompt + 4]] = math.log(0.4)
    starts = prefix_source(policy, folder, **changes).segments.starts(replace(rollouts, log_probs=log_probs), [one])
    assert (starts[0].nonzero().flatten() - prompt).tolist() == expected


def test_without_verified_steps_lines_are_segments(policy, folder):
    task = replace(TASK, steps=None)
    source = prefix_source(policy, folder, task, segments="steps")
    rollouts = replace(rollouts_of(policy, ["12,13."], [problem("11+1+1")]), completions=["12\n13\n"])
    starts = source.segments.starts(rollouts, [problem("11+1+1")])
    assert (starts[0].nonzero().flatten() - int(rollouts.prompt_lengths[0])).tolist() == [0, 3, 6]


def test_a_value_is_the_mean_reward_of_fresh_rollouts_from_the_prefix(policy, folder):
    seen: list[str] = []

    def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
        seen.extend(completions)
        return [float(len(text)) for text in completions]

    task, problems = replace(TASK, reward=reward), [problem("11+1+1"), problem("12+1+1")]
    source = prefix_source(policy, folder, task, prefix_rollouts=3, segments="even", segment_tokens=2)
    rollouts = rollouts_of(policy, ["12,1", "12,1", "99", "12,1"], problems, stop=False)
    inputs = source.inputs(7, rollouts, problems)
    # Prefixes: "", "12" of the first problem (twice, once sampled), "" and "12" of the second.
    starts = inputs["segment_starts"]
    assert int(starts.sum()) == 2 + 2 + 1 + 2
    assert len(seen) == 4 * 3
    means = torch.tensor([len(text) for text in seen], dtype=torch.float64).view(4, 3).mean(1).tolist()
    assert [text.startswith("12") for text in seen[3:6] + seen[9:]] == [True] * 6
    limit = source.sampling.max_new_tokens
    assert all(len(text) <= limit for text in seen)
    values = [inputs["prefix_values"][i][starts[i]].tolist() for i in range(4)]
    assert values == [means[:2], means[:2], [means[2]], means[2:]]
    again = source.inputs(7, rollouts, problems)["prefix_values"]
    torch.testing.assert_close(again, inputs["prefix_values"], rtol=0, atol=0)
    assert not torch.equal(source.inputs(8, rollouts, problems)["prefix_values"], again)


def test_values_agree_with_enumeration(policy, folder):
    """The value of a prompt under a limit of two tokens, over all completions; Monte Carlo within four errors."""
    one, limit, samples = problem("11+1+1"), 2, 4000

    def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
        return [float(sum(map(ord, text)) % 7) for text in completions]

    task = replace(TASK, reward=reward)
    source = prefix_source(policy, folder, task, prefix_rollouts=samples, max_new_tokens=limit)
    prompt = policy.encode_prompt(TASK.prompt(one))
    vocabulary = range(policy.model.config.vocab_size)
    with torch.no_grad():
        first = policy.model(torch.tensor([prompt])).logits[0, -1].double().softmax(0)
        rows = torch.tensor([[*prompt, token] for token in vocabulary])
        second = policy.model(rows).logits[:, -1].double().softmax(1)
    mean = square = 0.0
    for a, b in itertools.product(vocabulary, vocabulary):
        if a in policy.stop_ids:
            chance, ids = float(first[a]) / len(vocabulary), [a]
        else:
            chance, ids = float(first[a] * second[a, b]), [a, b]
        (value,) = reward([""], [policy.decode(ids)])
        assert value is not None
        mean, square = mean + chance * value, square + chance * value**2
    rollouts = rollouts_of(policy, ["1"], [one], stop=False)
    found = float(source.inputs(1, rollouts, [one])["prefix_values"].sum())
    error = math.sqrt((square - mean**2) / samples)
    assert abs(found - mean) < 4 * error


def test_fresh_rollouts_of_prefixes_are_sampled_a_few_at_a_time(policy, folder, monkeypatch):
    """A call of the sampler never has more rows than the limit, and every completion begins with its prefix."""
    asked, texts = [], []

    def counted(policy, prompts, **options):
        asked.append(len(prompts) * options["rollouts_per_prompt"])
        return sample_policy(policy, prompts, **options)

    def reward(prompts, completions, **columns):
        texts.extend(completions)
        return [0.0] * len(completions)

    monkeypatch.setattr("scoregram.training.prefix_values.sample_policy", counted)
    monkeypatch.setattr("scoregram.training.prefix_values.ROWS_SAMPLED_AT_ONCE", 7)
    task, one = replace(TASK, reward=reward), problem("11+1+1")
    source = prefix_source(policy, folder, task, prefix_rollouts=3, segments="even", segment_tokens=2)
    rollouts = rollouts_of(policy, ["12,13.", "98,76."], [one], stop=False)
    drawn = source.draw(1, rollouts, [one])
    assert max(asked) == 6 and sum(asked) == drawn.rewards.numel() == source.extra_rollouts == len(texts)
    begun = {
        int(drawn.prefix_of[row, t]): rollouts.completions[row][: t - int(rollouts.prompt_lengths[row])]
        for row, t in drawn.starts.nonzero().tolist()
    }
    assert all(text.startswith(begun[place // 3]) for place, text in enumerate(texts))


def test_long_prefixes_are_sampled_apart_from_short_ones_where_the_context_is_short(policy, folder, monkeypatch):
    """A prompt and a whole completion fit; a long prefix with the tokens left to a short one does not."""
    task, one = replace(TASK, reward=lambda **columns: [0.0] * len(columns["completions"])), problem("11+1+1")
    source = prefix_source(policy, folder, task, prefix_rollouts=2, segments="even", segment_tokens=1)
    rollouts = rollouts_of(policy, ["12,13.", "98,76."], [one], stop=False)
    context = int(rollouts.prompt_lengths[0]) + source.sampling.max_new_tokens
    asked = []

    def counted(policy, prompts, **options):
        asked.append(max(map(len, prompts)) + options["sampling"].max_new_tokens)
        return sample_policy(policy, prompts, **options)

    monkeypatch.setattr("scoregram.training.prefix_values.sample_policy", counted)
    whole = source.draw(1, rollouts, [one])
    assert len(asked) == 1 and asked[0] > context
    asked.clear()
    source.policy = replace(policy, context=context)
    apart = source.draw(1, rollouts, [one])
    assert max(asked) == context and apart.rewards.shape == whole.rewards.shape


def test_missing_rewards_are_refused_for_prefixes(policy, folder):
    task = replace(TASK, reward=lambda **columns: [None] * len(columns["completions"]))
    rollouts = rollouts_of(policy, ["12,13."], [problem("11+1+1")])
    with pytest.raises(ScoregramError, match="values of prefixes need a reward for every rollout"):
        prefix_source(policy, folder, task).inputs(1, rollouts, [problem("11+1+1")])


def test_the_credit_of_tokens_is_stored_with_the_rollouts(folder, tmp_path):
    train(config_for(folder, tmp_path / "run", method="vineppo", reward=None))
    rollouts = list(open_run(tmp_path / "run").rollouts())
    assert all(rollout.advantages is not None for rollout in rollouts)
    assert {group.kind for group in open_run(tmp_path / "run").groups()} == {"loss"}


def test_sampled_rollouts_reach_every_source(policy, folder, tmp_path):
    """Real rollouts, with padding and cut-off completions, through every source of every method."""
    problems = list(TASK.train[:3])
    for name, method in METHODS.items():
        config = config_for(folder, tmp_path, method=name)
        rollouts = collect(
            policy,
            TASK,
            problems,
            group_size=4,
            sampling=config.sampling(TASK.max_new_tokens),
            generator=seeded_generator(0, "rollouts", 1),
        )
        for source in input_sources(method, config, policy, TASK):
            for value in source.inputs(1, rollouts, problems).values():
                assert bool(value.double().isfinite().all())


@pytest.mark.parametrize("objective", ["agro", "dpo"])
def test_a_loss_with_a_reference_replaces_that_of_any_method(folder, tmp_path, objective):
    train(config_for(folder, tmp_path / "run", method="grpo", objective=objective, inner_updates=2))
    assert all("gram/update_norm" in line for line in list(open_run(tmp_path / "run").metrics())[1:])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"baseline": math.nan}, "train --baseline: must be finite, got nan"),
        ({"baseline_decay": 1.0}, "train --baseline-decay: must be below 1, got 1.0"),
        ({"gae_lambda": 1.5}, "train --gae-lambda: must be at most 1, got 1.5"),
        ({"gae_lambda": float("nan")}, "train --gae-lambda: must be finite and at least 0, got nan"),
        ({"clip_low": 2.0}, "train --clip-low: must be at most 1, got 2.0"),
        ({"clip_high": -0.1}, "train --clip-high: must be finite and at least 0, got -0.1"),
        ({"segment_probability": 7.0}, "train --segment-probability: must be at most 1, got 7.0"),
        (
            {"segment_probability": 0.0},
            "train --segment-probability: must be above 0, got 0.0. No token is less likely",
        ),
        ({"segment_probability": math.nan}, "train --segment-probability: must be above 0, got nan"),
        ({"critic_warmup": 2}, "train --critic-warmup: needs a method with a critic, got estimator grpo"),
    ],
)
def test_wrong_options_are_refused_before_the_first_step(changes, says, folder, tmp_path):
    with pytest.raises((ScoregramError, ValueError), match=says):
        train(config_for(folder, tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"method": "vineppo", "task": "calculator"},
            "--method: vineppo needs a task of one turn, got calculator:4. Ch",
        ),
        (
            {"method": "grpo", "estimator": "spo-chain", "task": "stopping"},
            "--estimator: spo-chain needs a task of one",
        ),
        ({"method": "grpo-process", "task": "forecast"}, "--method: grpo-process needs a task that verifies steps"),
        ({"method": "ppo", "exact_values": True, "task": "calculator"}, "--exact-values: exact values need a task"),
        ({"method": "ppo", "exact_values": True}, "--exact-values: needs a task that rewards the right solution alone"),
        (
            {"method": "pass-at-k", "best_of": 5},
            "--best-of: must be at most group_size, got best_of 5 and group_size 4",
        ),
        ({"method": "tl-grpo", "estimator": "remax"}, "tl-grpo takes an estimator that needs only the rollouts"),
        ({"credit_truth": "exact", "task": "forecast"}, "--credit-truth: exact values need a task .* Choose sampled"),
        ({"method": "grpo", "critic_warmup": 1}, "--critic-warmup: needs a method with a critic"),
    ],
)
def test_what_the_task_excludes_is_refused_before_a_model_is_loaded(changes, says, folder, tmp_path, monkeypatch):
    def loaded(*_: Any, **__: Any) -> Policy:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("scoregram.training.loop.load_policy", loaded)
    given = {"reward": None, "max_new_tokens": 0, **changes}
    with pytest.raises(ScoregramError, match=says):
        train(config_for(folder, tmp_path / "run", **given))


def test_what_a_verifier_returns_is_checked(policy):
    def inputs(found: Any) -> Any:
        task = replace(TASK, steps=lambda problem, text: found)
        return StepScores(policy, task).inputs(1, rollouts_of(policy, ["12,13."] * 2, [one]), [one])

    one = problem("11+1+1")
    with pytest.raises(ScoregramError, match=r"arithmetic:3\.steps must return a tuple of SolutionStep, got NoneType"):
        inputs(None)
    with pytest.raises(ScoregramError, match=r"must return a tuple of SolutionStep, got .*3, 1"):
        inputs([(3, 1)])
    with pytest.raises(ScoregramError, match=r"the scores of arithmetic:3\.steps must be finite numbers, got nan"):
        inputs((SolutionStep(0, 3, math.nan),))
    with pytest.raises(ScoregramError, match="whole number from 1 to the length of the completion, got 7 for 6 char"):
        inputs((SolutionStep(0, 7, True),))
    broken: Any = lambda *_: None  # noqa: E731
    cuts = Segments(policy, replace(TASK, steps=broken), TrainConfig(method="vineppo"), every_token=False)
    with pytest.raises(ScoregramError, match="must return a tuple of SolutionStep, got NoneType"):
        cuts.starts(rollouts_of(policy, ["12,13."] * 2, [one]), [one])
    half = inputs((SolutionStep(0, 3, 0.5), SolutionStep(3, 6, True)))
    assert half["token_rewards"][half["step_ends"]].tolist() == [0.5, 1.0] * 2


def score_of(policy: Policy, ids: list[int], start: int, end: int, temperature: float) -> torch.Tensor:
    """Gradient of the log-probability of tokens `start … end`, by autograd."""
    model = policy.model
    logits = model(input_ids=torch.tensor([ids])).logits[0] / temperature
    total = sum((logits[t - 1].log_softmax(0)[ids[t]] for t in range(start, end + 1)), torch.zeros(()))
    return torch.cat([g.flatten() for g in torch.autograd.grad(total, list(model.parameters()))]).double()


def test_energies_of_paths_are_squared_gradients(policy, folder, tmp_path):
    """Exactly over all parameters, and the proxy over the logits; both by autograd, token by token."""
    problems = [problem("11+1+1")]
    texts = ["12,13.", "12,1", "9", "12,13."]
    rollouts = rollouts_of(policy, texts, problems)
    for method, exact in (("optimal-token", False), ("optimal-token-exact", True)):
        config = config_for(folder, tmp_path, method=method, temperature=0.7)
        (source,) = input_sources(METHODS[method], config, policy, TASK)
        found = source.inputs(1, rollouts, problems)["path_energies"]
        assert bool((found[~rollouts.completion_mask] == 0).all())
        for row in range(4):
            ids = rollouts.input_ids[row][rollouts.attention_mask[row]].tolist()
            first, total = int(rollouts.prompt_lengths[row]), 0.0
            for t in range(first, len(ids)):
                logits = policy.model(input_ids=torch.tensor([ids])).logits[0, t - 1].detach() / 0.7
                leaf = logits.requires_grad_()
                (gradient,) = torch.autograd.grad(leaf.log_softmax(0)[ids[t]], leaf)
                total += float(gradient.square().sum())
                expected = float(score_of(policy, ids, first, t, 0.7).square().sum()) if exact else total
                assert float(found[row, t]) == pytest.approx(expected, rel=1e-4)
    assert all(parameter.grad is None for parameter in policy.model.parameters())


def test_proxies_and_exact_features_are_gradients(policy, folder, tmp_path):
    """In the last hidden state, in the token's own output embedding, and over all parameters; each by autograd."""
    problems, texts = [problem("11+1+1")], ["12,13.", "12,1", "9", "12,13."]
    rollouts = rollouts_of(policy, texts, problems)
    model, head = policy.model, policy.model.get_output_embeddings().weight.detach()
    found = {}
    for method in ("g2rl", "delta", "delta-exact"):
        config = config_for(folder, tmp_path, method=method, temperature=0.7)
        (source,) = input_sources(METHODS[method], config, policy, TASK)
        found |= {(method, name): value for name, value in source.inputs(1, rollouts, problems).items()}
    sums, scores, places = [], [], rollouts.completion_mask.nonzero().tolist()
    for row in range(4):
        ids = rollouts.input_ids[row][rollouts.attention_mask[row]].tolist()
        first, total = int(rollouts.prompt_lengths[row]), torch.zeros(head.shape[1])
        hidden = model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0].detach()
        for t in range(first, len(ids)):
            leaf = hidden[t - 1].clone().requires_grad_()
            log_prob = (head @ leaf / 0.7).log_softmax(0)[ids[t]]
            total += torch.autograd.grad(log_prob, leaf)[0]
            feature = (1 - log_prob.detach().exp()) * hidden[t - 1]
            torch.testing.assert_close(found["delta", "token_features"][row, t], feature, rtol=1e-3, atol=1e-5)
            scores.append(score_of(policy, ids, t, t, 0.7))
        sums.append(total.double())
    stacked = torch.stack(sums)
    torch.testing.assert_close(found["g2rl", "score_grams"][0], stacked @ stacked.mT, rtol=1e-3, atol=1e-5)
    exact = torch.stack([found["delta-exact", "token_features"][row, t] for row, t in places])
    gram = torch.stack(scores) @ torch.stack(scores).mT
    torch.testing.assert_close(exact @ exact.mT, gram, rtol=1e-3, atol=1e-4 * float(gram.abs().max()))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_exact_token_gradients_refuse_long_steps(policy, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("scoregram.training.inputs.MOST_TOKEN_SCORES", 3)
    problems = [problem("11+1+1")]
    (source,) = input_sources(METHODS["delta-exact"], config_for(folder, tmp_path, method="delta-exact"), policy, TASK)
    with pytest.raises(ScoregramError, match="at most 3 completion tokens, got"):
        source.inputs(1, rollouts_of(policy, ["12,13."], problems), problems)
