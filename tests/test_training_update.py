"""The gradient of a step against autograd on the loss itself, for every method; one pass against many."""

import copy
import math
import statistics
from contextlib import nullcontext
from dataclasses import replace
from inspect import signature
from itertools import pairwise
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from scoregram.advantages import ESTIMATORS, estimate
from scoregram.gram import measure_gram
from scoregram.objectives import OBJECTIVES
from scoregram.reading import outcomes_of
from scoregram.rollouts import Rollouts, concatenated_rollouts
from scoregram.training.config import TrainConfig
from scoregram.training.credit import (
    advantages_of,
    compares_with_reference,
    credited_step,
    estimator_options,
    loss_options,
    loss_value,
    score_weights,
    takes_clip,
)
from scoregram.training.methods import METHODS, REFERENCE_STRENGTHS, Method
from scoregram.training.update import Reference, Updater, gram_inputs
from tests.cases import KeepDouble, build
from tests.naive import discriminative_tokens_by_hand

PROMPTS, SIZE, TOKENS, LENGTH = 3, 4, 9, 6


@pytest.fixture(autouse=True)
def double_throughout() -> Any:
    with KeepDouble():
        yield


@pytest.fixture(scope="module")
def model() -> Any:
    return build("Llama", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def rollouts(model) -> Rollouts:
    draw = torch.Generator().manual_seed(0)
    count = PROMPTS * SIZE
    lengths = torch.randint(1, LENGTH + 1, (count, 1), generator=draw)
    place = torch.arange(TOKENS)
    mask = (place >= 3) & (place < 3 + lengths)
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 1.0, 0.0]], dtype=torch.float64)
    drawn = Rollouts(
        input_ids=torch.randint(2, 60, (count, TOKENS), generator=draw),
        attention_mask=place < 3 + lengths,
        completion_mask=mask,
        prompt_lengths=torch.full((count,), 3),
        group_ids=torch.arange(PROMPTS).repeat_interleave(SIZE),
        prompt_names=[f"p{i}" for i in range(PROMPTS)],
        completions=["x"] * count,
        rewards=rewards.flatten(),
        finished=torch.ones(count, dtype=torch.bool),
    )
    with KeepDouble(), torch.no_grad():  # what a sampler would have found
        return replace(drawn, log_probs=plain_log_probs(model, drawn))


def updater_for(model: Any, method: Method, **changes: Any) -> Updater:
    settings = {"temperature": 0.8, "length": LENGTH, "rollouts_per_pass": 0, "computing": nullcontext, "beta": 0.0}
    return Updater(model=model, method=method, kl="k3", **(settings | changes))


def plain_log_probs(model: Any, rollouts: Rollouts, temperature: float = 0.8) -> Tensor:
    """Log-probabilities by the definition: all logits, one softmax."""
    ids = rollouts.input_ids
    logits = model(input_ids=ids, attention_mask=rollouts.attention_mask.long()).logits / temperature
    chosen = logits[:, :-1].log_softmax(2).gather(2, ids[:, 1:, None]).squeeze(2)
    return torch.nn.functional.pad(chosen, (1, 0)) * rollouts.completion_mask


def taken(model: Any) -> Tensor:
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad(set_to_none=True)
    return flat


def inputs_of(method: Method, rollouts: Rollouts) -> dict[str, Tensor]:
    """Arbitrary inputs for the estimator of a method, as sources supply them: `(P,)`, or `(N, T)` for tokens."""
    generator = torch.Generator().manual_seed(5)
    mask = rollouts.completion_mask
    drawn = torch.rand(mask.shape, generator=generator, dtype=torch.float64)
    is_last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    ends = is_last | (mask & (drawn > 0.6))
    given = {
        "greedy_rewards": torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64),
        "baselines": torch.tensor([0.3, 0.3, 0.3], dtype=torch.float64),
        "best_of": torch.tensor([2, 3, 4]),
        "step_ends": ends,
        "prefix_values": drawn,
        "segment_starts": mask & (drawn > 0.5),
        "values": drawn,
        "path_energies": drawn.cumsum(1) * mask,
        "token_features": torch.randn(*mask.shape, 3, generator=generator, dtype=torch.float64),
    }
    if not method.exact_geometry:
        proxies = torch.randn(PROMPTS, SIZE, 3, generator=generator, dtype=torch.float64)
        given["score_grams"] = proxies @ proxies.mT
    inputs = {name: given[name] for name in ESTIMATORS[method.estimator].needs if name in given}
    if "step_ends" in inputs:
        inputs["token_rewards"] = torch.where(ends, (drawn > 0.8).double(), 0.0)
    return inputs


def test_ppo_with_another_lambda_is_ppo_with_that_lambda(model, rollouts):
    """λ = 1 is `ppo-monte-carlo`, 0.95 is `ppo` itself, 0 takes one difference of values."""
    method = TrainConfig(method="ppo", gae_lambda=1.0).chosen_method
    inputs = inputs_of(method, rollouts)
    steps = {
        name: credited_step(one, 1, rollouts, length=LENGTH, inputs=inputs)
        for name, one in {
            "given": method,
            "own": METHODS["ppo-monte-carlo"],
            "default": METHODS["ppo"],
            "spelled out": TrainConfig(method="ppo", gae_lambda=0.95).chosen_method,
            "0": TrainConfig(method="ppo", gae_lambda=0.0).chosen_method,
        }.items()
    }
    torch.testing.assert_close(steps["given"].credit, steps["own"].credit, rtol=1e-12, atol=0)
    assert torch.equal(steps["spelled out"].credit, steps["default"].credit)
    for row, mask in enumerate(rollouts.completion_mask):
        places = mask.nonzero().flatten().tolist()
        values = [float(inputs["values"][row, place]) for place in places] + [0.0]
        gains = [after - before for before, after in pairwise(values)]
        gains[-1] += float(rollouts.rewards[row])
        assert steps["0"].credit[row, places].tolist() == pytest.approx(gains)


@pytest.mark.parametrize(("side", "moved"), [("clip_low", -0.3), ("clip_high", 0.3)])
def test_a_clip_that_is_given_decides_which_tokens_keep_their_gradient(rollouts, side, moved):
    """Every ratio is `exp(±0.3)`: inside a clip of 0.5, outside one of 0.1."""
    kept = {}
    for limit in (0.1, 0.5):
        method = replace(TrainConfig(method="grpo"), **{side: limit}).chosen_method
        step = credited_step(method, 1, rollouts, length=LENGTH)
        now = (rollouts.log_probs + moved * rollouts.completion_mask).requires_grad_()
        loss_value(method, step, now, rollouts.log_probs, length=LENGTH).backward()
        assert now.grad is not None
        kept[limit] = now.grad != 0
    advantages = step.advantages[:, None] * rollouts.completion_mask
    assert torch.equal(kept[0.5], advantages != 0)
    assert torch.equal(kept[0.1], advantages < 0 if moved > 0 else advantages > 0)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_that_takes_no_such_option_is_unchanged_by_it(name, model, rollouts):
    """As in a comparison, which gives an option to all of its methods: `--gae-lambda 0.5 --clip-high 1e-6`."""
    own = METHODS[name]
    given = TrainConfig(method=name, gae_lambda=0.5, clip_low=1e-6, clip_high=1e-6, group_size=SIZE).chosen_method
    if ESTIMATORS[own.estimator].level == "turn":
        assert estimator_options(given) == {}
    elif own.estimator not in ("gae", "gae-whitened"):
        inputs, steps, gram = inputs_of(own, rollouts), [], measure_gram(model, *gram_inputs(rollouts))
        if not compares_with_reference(own.objective):
            steps = [credited_step(one, 1, rollouts, length=LENGTH, gram=gram, inputs=inputs) for one in (own, given)]
            assert torch.equal(steps[0].credit, steps[1].credit)
        if steps and not takes_clip(own.objective, "eps_high"):
            now = rollouts.log_probs + 0.3 * rollouts.completion_mask
            values = [loss_value(m, steps[0], now, rollouts.log_probs, length=LENGTH) for m in (own, given)]
            assert float(values[0]) == float(values[1])
    assert loss_options(given).keys() <= signature(OBJECTIVES[own.objective].fn).parameters.keys()


def token_advantages_by_definition(method: Method, rollouts: Rollouts, inputs: dict[str, Tensor]) -> Tensor:
    """`(N, T)`, rollout by rollout, in loops."""
    mask, result = rollouts.completion_mask, torch.zeros(rollouts.completion_mask.shape, dtype=torch.float64)
    if method.estimator == "grpo-process":
        for group in range(PROMPTS):
            rows = range(group * SIZE, (group + 1) * SIZE)
            steps = [(i, int(t)) for i in rows for t in inputs["step_ends"][i].nonzero()]
            scores = [float(inputs["token_rewards"][at]) for at in steps]
            mean, spread = statistics.fmean(scores), statistics.stdev(scores)
            for i in rows if spread else ():
                for t in mask[i].nonzero().flatten().tolist():
                    later = [s for (j, end), s in zip(steps, scores, strict=True) if j == i and end >= t]
                    result[i, t] = sum((s - mean) / spread for s in later)
        return result
    if method.estimator in ("gae", "gae-whitened", "gae-monte-carlo"):
        decay = 1.0 if method.estimator == "gae-monte-carlo" else 0.95
        for i in range(rollouts.count):
            after = advantage = 0.0
            reward = float(rollouts.rewards[i])
            for t in reversed(mask[i].nonzero().flatten().tolist()):
                value = float(inputs["values"][i, t])
                advantage = result[i, t] = reward + after - value + decay * advantage
                after, reward = value, 0.0
        if method.estimator == "gae-whitened":
            result[mask] = (result[mask] - result[mask].mean()) / result[mask].std()
        return result
    if method.estimator in ("optimal-token", "optimal-token-loo"):
        for i in range(rollouts.count):
            rows = range(i // SIZE * SIZE, (i // SIZE + 1) * SIZE)
            for t in mask[i].nonzero().flatten().tolist():
                others = [j for j in rows if bool(mask[j, t]) and not (j == i and method.estimator.endswith("loo"))]
                weights = [float(inputs["path_energies"][j, t]) for j in others]
                level = sum(w * float(rollouts.rewards[j]) for w, j in zip(weights, others, strict=True))
                result[i, t] = float(rollouts.rewards[i]) - (level / sum(weights) if others else 0.0)
        return result
    if method.estimator == "delta":
        last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
        rewards = (last * rollouts.rewards[:, None]).view(PROMPTS, SIZE, -1)
        features = inputs["token_features"].view(PROMPTS, SIZE, mask.shape[1], -1)
        return discriminative_tokens_by_hand(rewards, mask.view(PROMPTS, SIZE, -1), features).view(mask.shape)
    if ESTIMATORS[method.estimator].level == "turn":  # these rollouts have one turn, and no two prompts are equal
        for i in range(rollouts.count):
            own = float(rollouts.rewards[i])
            among = rollouts.reward_grid[i // SIZE].tolist()
            spread = statistics.stdev(among)
            centred = {"turn-mean": own - statistics.fmean(among), "turn-rloo": own - (sum(among) - own) / (SIZE - 1)}
            standard = (own - statistics.fmean(among)) / spread if spread else 0.0
            result[i][mask[i]] = centred.get(method.estimator, standard)
        return result
    assert method.estimator == "spo-chain"
    for i in range(rollouts.count):
        tokens = mask[i].nonzero().flatten().tolist()
        starts = [t for t in tokens if t == tokens[0] or bool(inputs["segment_starts"][i, t])]
        for start, end in zip(starts, [*starts[1:], None], strict=True):
            after = float(rollouts.rewards[i]) if end is None else float(inputs["prefix_values"][i, end])
            for t in tokens:
                if t >= start and (end is None or t < end):
                    result[i, t] = after - float(inputs["prefix_values"][i, start])
    return result


def some_reference(rollouts: Rollouts) -> Tensor:
    """`(N, T)` log-probabilities of some other policy."""
    drawn = torch.rand(rollouts.input_ids.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    return -2 * drawn * rollouts.completion_mask


def pairs_by_definition(rollouts: Rollouts) -> list[tuple[int, int]]:
    pairs = []
    for group in range(PROMPTS):
        rows = range(group * SIZE, (group + 1) * SIZE)
        rewards = {row: float(rollouts.rewards[row]) for row in rows}
        best, worst = max(rows, key=lambda row: rewards[row]), min(rows, key=lambda row: rewards[row])
        if rewards[best] > rewards[worst]:
            pairs.append((best, worst))
    return pairs


def reference_loss(log_probs: Tensor, rollouts: Rollouts, objective: str, beta: float) -> Tensor:
    """AGRO and DPO, written out rollout by rollout."""
    ratios = ((log_probs - some_reference(rollouts)) * rollouts.completion_mask).sum(1)
    if objective == "dpo":
        pairs = pairs_by_definition(rollouts)
        return -torch.stack([(beta * (ratios[w] - ratios[v])).sigmoid().log() for w, v in pairs]).mean()
    regularised = (rollouts.rewards - beta * ratios).view(PROMPTS, SIZE)
    return torch.stack([row.var(correction=1) / 2 for row in regularised]).mean()


def gradient_by_definition(model: Any, rollouts: Rollouts, method: Method, inputs: dict[str, Tensor]) -> Tensor:
    """Autograd on the method's loss, the old policy being the same one."""
    if method.objective in ("agro", "dpo"):
        reference_loss(plain_log_probs(model, rollouts), rollouts, method.objective, 0.3).backward()
        return taken(model)
    rows = measure_gram(
        model, rollouts.input_ids, rollouts.completion_mask, rollouts.attention_mask, temperature=0.8
    ).matrix
    blocks = [rows[i : i + SIZE, i : i + SIZE] for i in range(0, len(rows), SIZE)]
    given = {
        "lengths": rollouts.lengths.view(PROMPTS, SIZE),
        "outcomes": rollouts.reward_grid,
        "score_energies": rows.diagonal().view(PROMPTS, SIZE),
        "score_grams": torch.stack(blocks),
        **inputs,
    }
    if ESTIMATORS[method.estimator].level != "group":
        advantages = token_advantages_by_definition(method, rollouts, inputs)
    else:
        needed: Any = {name: given[name] for name in ESTIMATORS[method.estimator].needs}
        advantages = estimate(method.estimator, rollouts.reward_grid, **needed).flatten()
    log_probs = plain_log_probs(model, rollouts)
    known = {
        "log_probs": log_probs,
        "old_log_probs": log_probs.detach(),
        "advantages": advantages,
        "mask": rollouts.completion_mask,
        "length": LENGTH,
    }
    row = OBJECTIVES[method.objective]
    row.fn(**{name: known[name] for name in row.needs}).backward()
    return taken(model)


@pytest.mark.parametrize("measure", [True, False])
@pytest.mark.parametrize("name", sorted(METHODS))
def test_the_gradient_is_that_of_the_loss(model, rollouts, name, measure):
    method, inputs = METHODS[name], inputs_of(METHODS[name], rollouts)
    expected = gradient_by_definition(model, rollouts, method, inputs)
    reference = some_reference(rollouts) if method.objective in REFERENCE_STRENGTHS else None
    updater = updater_for(model, method, beta=0.0 if reference is None else 0.3)
    step, _ = updater.first(1, rollouts, measure=measure, inputs=inputs, reference=reference)
    torch.testing.assert_close(taken(model), expected, rtol=1e-9, atol=1e-12)
    gram = step.gram
    assert (gram is not None) == (measure or name in ("optimal", "optimal-loo", "salt-exact", "g2rl-exact"))
    if gram is not None:
        w = step.row_weights
        torch.testing.assert_close(w @ gram.matrix @ w, expected.square().sum(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("measure", [True, False])
def test_regression_leaves_out_a_rollout_without_a_reward(model, rollouts, measure):
    """Its advantage is 0, which the loss would weigh with exp(0) = 1."""
    rewards = rollouts.rewards.clone()
    rewards[1] = torch.nan
    log_probs, mask = plain_log_probs(model, rollouts), rollouts.completion_mask
    total = torch.zeros((), dtype=torch.float64)
    for group in range(PROMPTS):
        rows = [row for row in range(group * SIZE, (group + 1) * SIZE) if not rewards[row].isnan()]
        judged = [float(rewards[row]) for row in rows]
        spread = statistics.stdev(judged)
        for row in rows:
            standard = (float(rewards[row]) - statistics.fmean(judged)) / spread if spread else 0.0
            total = total - math.exp(standard) * (log_probs[row] * mask[row]).sum() / (PROMPTS * SIZE)
    total.backward()
    expected = taken(model)
    updater = updater_for(model, METHODS["awr"])
    step, loss = updater.first(1, replace(rollouts, rewards=rewards), measure=measure, reference=None)
    torch.testing.assert_close(taken(model), expected, rtol=1e-9, atol=1e-12)
    assert loss == pytest.approx(float(total.detach()), rel=1e-9)
    assert updater.further_update(step, reference=None)[0] == pytest.approx(loss, rel=1e-9)
    torch.testing.assert_close(taken(model), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["rloo", "dapo", "optimal", "dr-grpo"])
@pytest.mark.parametrize("measure", [True, False])
def test_passes_of_whole_groups_add_up(model, rollouts, name, measure):
    one = updater_for(model, METHODS[name])
    whole, _ = one.first(1, rollouts, measure=measure, reference=None)
    expected = taken(model)
    parts, _ = replace(one, rollouts_per_pass=SIZE).first(1, rollouts, measure=measure, reference=None)
    torch.testing.assert_close(taken(model), expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(parts.log_probs, whole.log_probs)
    if parts.gram is not None and whole.gram is not None:
        known = parts.gram.matrix.isfinite()
        assert int(known.sum()) == PROMPTS * SIZE**2
        torch.testing.assert_close(parts.gram.matrix[known], whole.gram.matrix[known])


@pytest.mark.parametrize("name", ["rloo", "optimal", "optimal-loo"])
def test_blocks_within_groups_suffice_for_the_update(model, rollouts, name):
    one = updater_for(model, METHODS[name])
    whole, _ = one.first(1, rollouts, measure=True, reference=None)
    expected = taken(model)
    blocks, _ = replace(one, group_size=SIZE).first(1, rollouts, measure=True, reference=None)
    torch.testing.assert_close(taken(model), expected, rtol=1e-9, atol=1e-12)
    assert blocks.gram is not None and whole.gram is not None
    known = blocks.gram.matrix.isfinite()
    assert int(known.sum()) == PROMPTS * SIZE**2
    torch.testing.assert_close(blocks.gram.matrix[known], whole.gram.matrix[known])


@pytest.mark.parametrize("passes", [0, SIZE])
@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "tic"])
def test_a_second_update_follows_the_ratio(model, rollouts, name, passes):
    method = METHODS[name]
    updater = updater_for(model, method, rollouts_per_pass=passes)
    before, _ = updater.first(1, rollouts, measure=False, reference=None)
    model.zero_grad(set_to_none=True)
    saved = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    log_probs = plain_log_probs(model, rollouts)
    known = {
        "log_probs": log_probs,
        "old_log_probs": before.log_probs,
        "advantages": before.advantages.flatten(),
        "mask": rollouts.completion_mask,
        "length": LENGTH,
    }
    row = OBJECTIVES[method.objective]
    expected_loss = row.fn(**{key: known[key] for key in row.needs})
    expected_loss.backward()
    expected = taken(model)
    loss, _ = updater.further_update(before, reference=None)
    found = taken(model)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), saved, strict=True):
            parameter.copy_(value)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-12)
    assert loss == pytest.approx(float(expected_loss.detach()), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("passes", [0, SIZE])
def test_a_kl_term_pulls_towards_the_reference(model, rollouts, passes):
    method = METHODS["rloo"]
    updater = updater_for(model, method, beta=0.3, rollouts_per_pass=passes)
    plain_log_probs(model, rollouts)
    reference = Reference(updater, new_adapters=False).log_probs(rollouts)
    torch.testing.assert_close(reference, plain_log_probs(model, rollouts).detach())
    shifted = reference - 0.1 * rollouts.completion_mask
    log_probs = plain_log_probs(model, rollouts)
    advantages = advantages_of("rloo", rollouts).flatten()
    mask = rollouts.completion_mask
    distance = shifted - log_probs
    kl = ((distance.exp() - 1 - distance) * mask).sum(1) / mask.sum(1)
    (-(advantages * log_probs.sum(1)).mean() + 0.3 * kl.mean()).backward()
    expected = taken(model)
    step, _ = updater.first(1, rollouts, measure=True, reference=shifted)
    torch.testing.assert_close(taken(model), expected, rtol=1e-9, atol=1e-12)
    assert step.gram is not None


@pytest.mark.parametrize("new_adapters", [True, False])
def test_the_reference_of_loaded_adapters_has_them_and_of_new_ones_is_the_base(rollouts, new_adapters):
    base = build("Llama", tie_word_embeddings=True)
    own: Any = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    reference = Reference(updater_for(own, METHODS["rloo"], beta=0.3), new_adapters=new_adapters)
    before = plain_log_probs(own, rollouts).detach()
    with torch.no_grad():
        for name, parameter in own.named_parameters():
            if "lora_B" in name:
                parameter.fill_(1.0)
    torch.testing.assert_close(reference.log_probs(rollouts), before)  # B was 0, so base and copy are the same
    again = Reference(updater_for(own, METHODS["rloo"], beta=0.3), new_adapters=False)
    torch.testing.assert_close(again.log_probs(rollouts), plain_log_probs(own, rollouts).detach())
    assert not torch.allclose(plain_log_probs(own, rollouts).detach(), before)


def test_weights_of_rollouts_are_those_of_the_table(rollouts):
    mask = rollouts.completion_mask
    advantages = torch.randn(PROMPTS, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    lengths, count = mask.sum(1), PROMPTS * SIZE
    flat = advantages.flatten()
    formulas = {
        "reinforce": flat / count,
        "grpo": flat / (count * lengths),
        "dr_grpo": flat / (count * LENGTH),
        "dapo": flat / lengths.sum(),
        "cispo": flat / lengths.sum(),
    }
    for objective, expected in formulas.items():
        torch.testing.assert_close(score_weights(objective, flat, mask, length=LENGTH), expected)


def test_groups_can_be_selected_and_concatenated(rollouts):
    live = torch.tensor([outcome == "live" for outcome in outcomes_of(rollouts.reward_grid)])
    assert live.tolist() == [True, False, True]
    rows = live.repeat_interleave(SIZE)
    kept = rollouts.select(rows)
    assert kept.prompt_names == ["p0", "p2"] and kept.group_ids.tolist() == [0] * SIZE + [1] * SIZE
    assert torch.equal(kept.reward_grid, rollouts.reward_grid[live])
    again = concatenated_rollouts([rollouts.select(~rows), kept], pad_id=0)
    assert again.prompt_names == ["p1", "p0", "p2"] and again.group_sizes == [SIZE] * PROMPTS
    order = torch.cat([torch.arange(4, 8), torch.arange(0, 4), torch.arange(8, 12)])
    for row, place in enumerate(order.tolist()):
        real = rollouts.attention_mask[place]
        assert torch.equal(again.input_ids[row][again.attention_mask[row]], rollouts.input_ids[place][real])
        assert int(again.completion_mask[row].sum()) == int(rollouts.completion_mask[place].sum())


@pytest.mark.parametrize("name", ["agro", "dpo"])
def test_a_second_update_follows_the_loss_against_the_reference(model, rollouts, name):
    method, reference, model = METHODS[name], some_reference(rollouts), copy.deepcopy(model)
    updater = updater_for(model, method, beta=0.3)
    step, _ = updater.first(1, rollouts, measure=False, reference=reference)
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    loss, _ = updater.further_update(step, reference=reference)
    found = taken(model)
    expected = reference_loss(plain_log_probs(model, rollouts), rollouts, method.objective, 0.3)
    assert loss == pytest.approx(float(expected.detach()), rel=1e-9)
    expected.backward()
    torch.testing.assert_close(found, taken(model), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["agro", "dpo"])
def test_rollouts_without_a_reward_are_not_compared_with_the_reference(model, rollouts, name):
    rewards = rollouts.rewards.clone()
    rewards[1] = torch.nan
    missing = replace(rollouts, rewards=rewards)
    step, _ = updater_for(model, METHODS[name], beta=0.3).first(
        1, missing, measure=True, reference=some_reference(rollouts)
    )
    assert float(step.weights[1]) == 0 and bool(step.weights.isfinite().all())
    assert float(step.weights.abs().sum()) > 0
