"""True advantages against the enumeration of every completion, and the push against gradients of single tokens."""

import math
from dataclasses import replace
from itertools import pairwise
from statistics import pvariance
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from scoregram.checks import ScoregramError
from scoregram.policy import Policy, PolicyConfig, SamplingConfig, load_policy
from scoregram.reading import CreditTruth, Step
from scoregram.rollouts import Rollouts
from scoregram.runs import open_run
from scoregram.tasks import Problem, Task
from scoregram.training import loop
from scoregram.training.config import TrainConfig
from scoregram.training.credit import advantages_of, token_advantages_of
from scoregram.training.inputs import input_sources
from scoregram.training.loop import train
from scoregram.training.prefix_values import PrefixRewards, PrefixRollouts, Segments, SolutionValues
from scoregram.training.truth import ExactTruth, SampledTruth
from tests.training_cases import config_for, save_policy

PAD, STOP, END, A, B, C = range(6)
LETTERS = {"a": A, "b": B, "c": C}
PROBLEM = Problem("p", "c", "ab")
RATE, ROUNDING = 1e-4, 3e-6
"""A rate at which second orders are small, and the rounding of log-probabilities: Llama's norms use float32."""


def letter_policy() -> Policy:
    """A policy over six tokens, small enough to enumerate every completion."""

    def tokenizer(text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [LETTERS[letter] for letter in text]}

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        shape: dict[str, Any] = {"vocab_size": 6, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
        model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=1)).double().eval()
    for parameter in model.parameters():
        parameter.data *= 4.0
    return Policy(model, tokenizer, PolicyConfig(), (STOP, END), PAD, 64, False)


def enumerated_value(policy: Policy, prompt: list[int], written: list[int], limit: int, temperature: float) -> float:
    """Probability that the completion is `ab`, stopped or cut off there, by a walk over every continuation."""
    if written and written[-1] in (STOP, END):
        return float(written[:-1] == [A, B])
    if len(written) == limit:
        return float(written == [A, B])
    with torch.no_grad():
        logits = policy.model(torch.tensor([[*prompt, *written]])).logits[0, -1]
    chances = (logits / temperature).softmax(0).tolist()
    return sum(
        chance * enumerated_value(policy, prompt, [*written, token], limit, temperature)
        for token, chance in enumerate(chances)
    )


def letter_rollouts(completions: list[list[int]], rewards: list[float]) -> Rollouts:
    width = 1 + max(map(len, completions))
    rows = [[C, *ids] for ids in completions]
    mask = torch.tensor([[place < len(row) for place in range(width)] for row in rows])
    return Rollouts(
        input_ids=torch.tensor([row + [PAD] * (width - len(row)) for row in rows]),
        attention_mask=mask,
        completion_mask=mask & (torch.arange(width) > 0),
        prompt_lengths=torch.ones(len(rows), dtype=torch.int64),
        group_ids=torch.zeros(len(rows), dtype=torch.int64),
        rewards=torch.tensor(rewards, dtype=torch.float64),
    )


def letter_task() -> Task:
    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float | None]:
        return [float(text == "ab") for text in completions]

    return Task(
        *("letters", [PROBLEM], [], reward, 4), solution=lambda problem: problem.answer, rewards_solution_alone=True
    )


@pytest.mark.parametrize(("limit", "temperature"), [(4, 1.0), (3, 0.7), (2, 1.0), (1, 1.0)])
def test_exact_advantages_are_those_of_every_completion_enumerated(limit, temperature):
    policy = letter_policy()
    completions = [[A, B, STOP], [A, B, END], [A, C, B, STOP], [B, A, B, A], [A, B, B, STOP], [STOP]]
    completions = list({tuple(ids[:limit]): ids[:limit] for ids in completions}.values())
    rewards = [float(ids in ([A, B, STOP], [A, B, END], [A, B][: limit + 1])) for ids in completions]
    rollouts = letter_rollouts(completions, rewards)
    values = SolutionValues(policy, letter_task(), temperature, limit)
    truth = ExactTruth(values).truth(1, rollouts, [PROBLEM])
    expected = []
    for ids in completions:
        values = [enumerated_value(policy, [C], ids[:end], limit, temperature) for end in range(len(ids) + 1)]
        expected += [late - early for early, late in pairwise(values)]
    torch.testing.assert_close(truth.advantages, torch.tensor(expected, dtype=torch.float64))
    assert truth.unit_of[rollouts.completion_mask].tolist() == list(range(len(expected)))
    assert truth.agreement == 1 and truth.variances is None


def test_a_reward_that_the_right_solution_does_not_explain_lowers_the_agreement():
    rollouts = letter_rollouts([[A, B, STOP], [A, C, STOP]], [1.0, 1.0])
    source = ExactTruth(SolutionValues(letter_policy(), letter_task(), 1.0, 4))
    assert source.truth(1, rollouts, [PROBLEM]).agreement == 0.5
    missing = source.truth(1, replace(rollouts, rewards=torch.tensor([1.0, math.nan]).double()), [PROBLEM])
    assert missing.agreement == 1 and bool((missing.unit_of[1] == -1).all()) and len(missing.advantages) == 3


def test_sampled_advantages_are_gains_in_mean_reward_with_their_variance(monkeypatch):
    """Three prefixes with known rewards: the prompt, and the second segment of either rollout."""
    starts = torch.tensor([[False, True, False, True], [False, True, True, False]])
    prefix_of = torch.tensor([[0, 0, 0, 1], [0, 0, 2, 0]])
    rewards = torch.tensor([[0.0, 1, 0, 1], [1, 1, 1, 1], [0, 0, 0, 1]], dtype=torch.float64)
    monkeypatch.setattr(PrefixRollouts, "draw", lambda *_: PrefixRewards(starts, prefix_of, rewards))
    policy, task, config = letter_policy(), letter_task(), TrainConfig()
    segments = Segments(policy, task, config, every_token=False)
    prefixes = PrefixRollouts(policy, task, SamplingConfig(4), config, segments)
    rollouts = letter_rollouts([[A, B, STOP], [A, C, STOP]], [1.0, 0.0])
    truth = SampledTruth(prefixes).truth(1, rollouts, [PROBLEM])
    assert truth.unit_of[rollouts.completion_mask].tolist() == [0, 0, 1, 2, 3, 3]
    assert truth.advantages.tolist() == [0.5, 0.0, -0.25, -0.25]
    half, quarter = (1 / 3) / 4, (3 / 4 * 1 / 4 * 4 / 3) / 4  # sample variances of the four rewards, over four
    assert truth.variances is not None
    torch.testing.assert_close(truth.variances, torch.tensor([half, 0.0, half + quarter, quarter]).double())


def all_completions(limit: int) -> list[list[int]]:
    """Every completion of the letter policy: stopped, or cut off at the limit."""
    done, open_ones = [], [[]]
    for _ in range(limit):
        longer = [[*written, token] for written in open_ones for token in range(6)]
        done += [ids for ids in longer if ids[-1] in (STOP, END)]
        open_ones = [ids for ids in longer if ids[-1] not in (STOP, END)]
    return done + open_ones


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("reinforce-critic", {}),
        ("ppo", {}),
        ("ppo-monte-carlo", {}),
        ("vineppo", {"segments": "even", "segment_tokens": 2}),
        ("vineppo", {"estimator": "vineppo"}),
    ],
)
def test_the_expected_update_with_exact_values_is_the_gradient(method, options):
    """Over every completion of at most three tokens, weighted by its probability."""
    policy, task, limit = letter_policy(), letter_task(), 3
    config = TrainConfig(method=method, exact_values=True, max_new_tokens=limit, **options)
    completions = all_completions(limit)
    rewards = [float(ids in ([A, B, STOP], [A, B, END])) for ids in completions]
    rollouts = letter_rollouts(completions, rewards)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scoregram.training.prefix_values.exact_obstacle", lambda *_: None)  # its tokenizer has no length
        (source,) = input_sources(config.chosen_method, config, policy, task)
    inputs = source.inputs(1, rollouts, [PROBLEM])
    if method == "reinforce-critic":
        credit = advantages_of(config.chosen_method.estimator, rollouts, inputs=inputs).flatten()[:, None]
    else:
        credit = token_advantages_of(config.chosen_method.estimator, rollouts, inputs)
    logits = policy.model(rollouts.input_ids).logits[:, :-1].log_softmax(2)
    taken = torch.nn.functional.pad(logits.gather(2, rollouts.input_ids[:, 1:, None]).squeeze(2), (1, 0))
    log_probs = torch.where(rollouts.completion_mask, taken, 0.0)
    chances = log_probs.sum(1).exp()
    assert float(chances.detach().sum()) == pytest.approx(1)
    parameters = list(policy.model.parameters())
    update = torch.autograd.grad((chances.detach()[:, None] * credit * log_probs).sum(), parameters, retain_graph=True)
    gradient = torch.autograd.grad((chances * rollouts.rewards).sum(), parameters)
    found, expected = (torch.cat([part.flatten() for part in parts]) for parts in (update, gradient))
    assert float((found - expected).norm()) < ROUNDING * float(expected.norm())
    tokens = [(rewards[row], float(inputs["values"][row, place])) for row, place in rollouts.completion_mask.nonzero()]
    left, spread = pvariance([reward - value for reward, value in tokens]), pvariance([reward for reward, _ in tokens])
    assert source.extra_rollouts is None
    assert source.learn(rollouts) == {"credit/explained_variance": pytest.approx(1 - left / spread, rel=1e-6)}
    if options.get("estimator") == "vineppo":  # the true advantage of every token
        truth = ExactTruth(SolutionValues(policy, task, 1.0, limit)).truth(1, rollouts, [PROBLEM])
        torch.testing.assert_close(credit[rollouts.completion_mask], truth.advantages)


def test_credit_of_a_segment_is_the_mean_over_its_tokens():
    truth = CreditTruth(unit_of=torch.tensor([[-1, 0, 0, 1]]), advantages=torch.zeros(2, dtype=torch.float64))
    assert truth.by_unit(torch.tensor([[9.0, 1.0, 3.0, 5.0]])).tolist() == [2.0, 5.0]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


def caught_steps(monkeypatch) -> list[Step]:
    steps: list[Step] = []
    original = loop.read_step
    monkeypatch.setattr(loop, "read_step", lambda step: steps.append(step) or original(step))
    return steps


@pytest.mark.parametrize("method", ["grpo", "ppo"])
def test_the_push_of_a_small_step_is_the_gradient_of_every_token_along_it(method, policy, tmp_path, monkeypatch):
    steps = caught_steps(monkeypatch)
    settings = {"dtype": "float64", "optimizer": "sgd", "learning_rate": RATE, "max_grad_norm": 0.0, "eval_every": 0}
    train(config_for(policy, tmp_path / "run", method=method, steps=1, push=True, rollouts_every=1, **settings))
    (step,) = steps
    assert step.push is not None
    for row, record in enumerate(open_run(tmp_path / "run").rollouts()):  # it is stored token by token
        expected = step.push[row][step.rollouts.attention_mask[row]].float()
        assert record.push is not None and torch.equal(record.push, expected)
    start = load_policy(PolicyConfig(model=str(policy), dtype="float64", device="cpu", prompt="plain")).model
    latest = open_run(tmp_path / "run").latest_checkpoint
    assert latest is not None
    end = type(start).from_pretrained(latest[1] / "model", dtype=torch.float64)
    moves = {name: (end.get_parameter(name) - p).detach() for name, p in start.named_parameters()}
    rollouts = step.rollouts

    def slope(model: Any, row: int, place: int) -> float:
        """Derivative of one token's log-probability along the update, one backward pass."""
        model.zero_grad()
        logits = model(rollouts.input_ids[row : row + 1, :place]).logits[0, -1]
        logits.log_softmax(0)[rollouts.input_ids[row, place]].backward()
        return float(sum((p.grad * moves[name]).sum() for name, p in model.named_parameters() if p.grad is not None))

    tokens = rollouts.completion_mask.nonzero().tolist()
    for row, place in tokens[::11]:  # the mean slope of both ends is right up to third order
        mean = (slope(start, row, place) + slope(end, row, place)) / 2
        assert float(step.push[row, place]) == pytest.approx(mean, rel=1e-3, abs=ROUNDING)
    if step.rows == "scores":  # to first order, summed over a rollout, it is η (K w)_i
        assert step.gram is not None
        predicted = RATE * float((step.gram.matrix @ step.weights)[0])
        first = sum(slope(start, row, place) for row, place in tokens if row == 0)
        assert first == pytest.approx(predicted, rel=1e-4, abs=1e-9)


def test_credit_is_compared_at_measured_steps_and_changes_nothing(policy, tmp_path):
    shared = {"steps": 2, "measure_every": 2, "eval_every": 0, "rollouts": 0}
    train(config_for(policy, tmp_path / "plain", **shared))
    given = {"credit_truth": "sampled", "truth_rollouts": 2, "segments": "even", "segment_tokens": 2, "push": True}
    train(config_for(policy, tmp_path / "seen", **shared, **given))
    plain, seen = (open_run(tmp_path / name).metrics() for name in ("plain", "seen"))
    for before, after in zip(plain, seen, strict=True):
        assert {k: v for k, v in before.items() if "time" not in k}.items() <= after.items()
    names = {"credit/correlation", "credit/error", "credit/truth_error", "credit/truth_rollouts", "push/size"}
    assert names.isdisjoint(seen[0]) and names <= seen[1].keys()
    assert seen[1]["rollouts"] == 24 and seen[1]["credit/truth_rollouts"] > 0


def test_uniform_credit_puts_its_share_of_filler_on_filler(policy, tmp_path):
    train(config_for(policy, tmp_path / "run", steps=1, eval_every=0, credit_truth="exact", reward=None))
    line = open_run(tmp_path / "run").metrics()[0]
    assert line["credit/truth_agreement"] == 1 and 0 <= line["credit/filler_tokens"] <= 1
    assert math.isnan(line["credit/filler_share"])  # a random policy is never right: no group is live


@pytest.mark.filterwarnings("ignore::scoregram.policy.BiasedSamplingWarning")
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {},
            "exact values need a task .*, got reward tests.training_cases:judge",
        ),
        ({"reward": None, "top_k": 5}, "got top_k or top_p"),
    ],
)
def test_exact_truth_is_refused_where_it_would_not_be_exact(changes, says, policy, tmp_path):
    with pytest.raises(ScoregramError, match=says):
        train(config_for(policy, tmp_path / "run", credit_truth="exact", **changes))
    train(config_for(policy, tmp_path / "auto", credit_truth="auto", steps=1, eval_every=0, **changes))
    assert "credit/correlation" not in open_run(tmp_path / "auto").metrics()[0]


@pytest.mark.parametrize("method", ["ppo", "vineppo", "reinforce-critic"])
def test_a_run_with_exact_values_samples_nothing_more_and_learns_no_critic(method, policy, tmp_path):
    settings = {"steps": 2, "eval_every": 0, "reward": None, "exact_values": True, "credit_truth": "exact"}
    train(config_for(policy, tmp_path / "run", method=method, task="arithmetic-strict:3", **settings))
    lines = list(open_run(tmp_path / "run").metrics())
    assert [line["rollouts"] for line in lines] == [12, 24]
    assert all(line["credit/truth_agreement"] == 1 for line in lines)
    assert not any("extra" in name or "value_loss" in name for line in lines for name in line)


def test_exact_values_are_refused_where_there_are_none(policy, tmp_path):
    says = "train --exact-values: exact values need a task and a policy with one right token sequence, got reward"
    with pytest.raises(ScoregramError, match=says):
        train(config_for(policy, tmp_path / "run", method="ppo", exact_values=True))
    with pytest.raises(ScoregramError, match="rewards the right solution alone, got arithmetic:3"):
        train(config_for(policy, tmp_path / "run", method="ppo", exact_values=True, reward=None))


def test_too_few_truth_rollouts_have_no_variance(policy, tmp_path):
    with pytest.raises(ScoregramError, match="train --truth-rollouts: must be finite and at least 2, got 1"):
        config_for(policy, tmp_path / "run", truth_rollouts=1)
