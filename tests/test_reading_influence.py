"""Which training prompts help held-out ones: products against their definition, planted effects, chance."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from scoregram.advice import GRAM_RULES, RunFinding, advise_run
from scoregram.advice.findings import Undecided
from scoregram.gram import adam_preconditioner, cross_gram
from scoregram.reading import (
    TRAINED_AND_FIXED,
    TRAINED_AND_FIXED_PRECONDITIONED,
    RunReading,
    held_out_influence,
    prompt_products,
    read_run,
)
from scoregram.reading.influence import probe_products
from scoregram.runs import BatchRecord, RunWriter, open_run
from scoregram.tasks import load_task
from scoregram.training import evaluate, train
from tests.training_cases import config_for, save_policy

SIZE, WIDTH = 8, 6


def joint_batches(step: int, scores: dict[str, torch.Tensor], rewards: dict[str, torch.Tensor]) -> list[BatchRecord]:
    """The probe's own batch, then the one with all groups; names with `test/` are held out."""
    found = []
    for kind, names in (("fixed", [n for n in scores if n.startswith("test/")]), (TRAINED_AND_FIXED, list(scores))):
        rows = torch.cat([scores[name] for name in names])
        found.append(
            BatchRecord(
                step=step,
                kind=kind,
                prompt_ids=tuple(names),
                sizes=torch.tensor([len(scores[name]) for name in names]),
                rewards=torch.cat([rewards[name] for name in names]),
                lengths=torch.ones(len(rows)).long(),
                weights=torch.zeros(len(rows), dtype=torch.float64),
                gram=rows @ rows.mT,
            )
        )
    return found


def planted_batches(seed: int, steps: int, pulls: dict[str, float]) -> list[BatchRecord]:
    """Right rollouts of a prompt point along `pull · e_1`, wrong ones against it, with noise; held-out pull is 1."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for step in range(1, steps + 1):
        scores, rewards = {}, {}
        for name, pull in pulls.items():
            rewards[name] = torch.randint(0, 2, (SIZE,), generator=generator).double()
            scores[name] = torch.randn(SIZE, WIDTH, generator=generator, dtype=torch.float64)
            scores[name][:, 0] += pull * (2 * rewards[name] - 1)
        found += joint_batches(step, scores, rewards)
    return found


HELD_OUT = {f"test/{place}": 1.0 for place in range(4)}


def test_products_are_those_of_leave_one_out_gradients():
    generator = torch.Generator().manual_seed(0)
    sizes = {"a": 4, "b": 6, "test/0": 5, "test/1": 5}  # groups may differ in size
    scores = {name: torch.randn(size, 3, generator=generator, dtype=torch.float64) for name, size in sizes.items()}
    rewards = {name: torch.rand(size, generator=generator, dtype=torch.float64) for name, size in sizes.items()}
    gradients = {}
    for name, size in sizes.items():
        each = []
        for i in range(size):
            others = [float(rewards[name][j]) for j in range(size) if j != i]
            each.append((float(rewards[name][i]) - sum(others) / len(others)) * scores[name][i])
        gradients[name] = torch.stack(each).mean(0)
    (probe,) = probe_products(joint_batches(3, scores, rewards))
    scale = float(torch.cat([*scores.values()]).square().sum(1).mean()) / 5  # mean squared score over the mean size
    for place, name in enumerate(probe.prompts):
        expected = sum(float(gradients[name] @ gradients[f"test/{h}"]) for h in range(2)) / 2 / scale
        assert probe.products[place] == pytest.approx(expected)
    assert probe.prompts == ("a", "b") and not np.allclose(probe.null, probe.products)


def test_a_group_of_one_has_no_gradient():
    """It has no other rollout to compare with; the products of the other prompts are as if it were not held out."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"a": 4, "alone": 1, "test/0": 5, "test/1": 1}
    scores = {name: torch.randn(size, 3, generator=generator, dtype=torch.float64) for name, size in sizes.items()}
    rewards = {name: torch.rand(size, generator=generator, dtype=torch.float64) for name, size in sizes.items()}
    (probe,) = probe_products(joint_batches(3, scores, rewards))
    assert probe.prompts == ("a", "alone") and probe.products[1] == 0 and not probe.null[:, 1].any()
    larger = {name: scores[name] for name in ("a", "test/0")}
    (other,) = probe_products(joint_batches(3, larger, {name: rewards[name] for name in larger}))
    scale, other_scale = (
        float(torch.cat([*one.values()]).square().sum(1).mean()) / (sum(map(len, one.values())) / len(one))
        for one in (scores, larger)
    )
    assert probe.products[0] * scale * 2 == pytest.approx(other.products[0] * other_scale)


def test_prompts_that_help_and_hurt_are_found_and_ordered():
    pulls = {"helps": 1.0, "helps more": 2.0, "hurts": -1.5, "neither": 0.0, **HELD_OUT}
    found = held_out_influence(planted_batches(1, 30, pulls))
    assert found.helping == ["helps more", "helps"] and found.hurting == ["hurts"]
    assert found.probes == 30 and found.by_chance < 0.5
    assert set(found.effects) == {"helps", "helps more", "hurts", "neither"}


def test_chance_finds_prompts_at_the_level_of_the_intervals(monkeypatch):
    """Without pull, one of 8 prompts is found in at most 5 % of runs, up to the error of 80 simulated runs.

    Five shuffles a run are 400 in all: 0.01 prompts are expected in each, so their mean has an error of 0.005.
    """
    monkeypatch.setattr("scoregram.reading.influence.NULL_DRAWS", 5)
    pulls = {f"p/{place}": 0.0 for place in range(8)} | dict.fromkeys(HELD_OUT, 0.0)
    runs = [held_out_influence(planted_batches(seed, 8, pulls)) for seed in range(80)]
    share = np.mean([bool(run.helping or run.hurting) for run in runs])
    assert share <= 0.05 + 2.6 * math.sqrt(0.05 * 0.95 / 80)
    assert np.mean([run.by_chance for run in runs]) <= 0.15


def test_few_visits_and_probes_without_training_rollouts_give_no_effect():
    pulls = {"a": 1.0, **HELD_OUT}
    assert not held_out_influence(planted_batches(0, 4, pulls)).effects
    alone = [batch for batch in planted_batches(0, 9, pulls) if batch.kind == "fixed"]
    assert not held_out_influence(alone).effects and held_out_influence(alone).probes == 0


def run_with(folder, batches: list[BatchRecord]) -> RunReading:
    with RunWriter.create(folder, {"group_size": SIZE}, environment={}) as writer:
        for step in sorted({batch.step for batch in batches}):
            writer.write_batches(step, [batch for batch in batches if batch.step == step])
            writer.write_metrics(step, {"reward": 0.5})
    return read_run(folder)


def test_advise_lists_the_prompts(tmp_path):
    rule = GRAM_RULES["held-out influence"]
    hurts = run_with(tmp_path / "hurts", planted_batches(1, 30, {"good": 2.0, "bad": -2.0, **HELD_OUT}))
    one = rule(hurts)
    assert isinstance(one, RunFinding) and one.severity == "warning" and one.change is not None
    assert one.sentence.startswith("1 of 2 training prompts push against") and "bad" in one.change.sentence
    assert [line.split()[0] for line in one.listing] == ["hurts", "helps"] and one.listing[1].endswith("good")
    (shown,) = [each for each in advise_run(hurts).findings if each.name == "held-out influence"]
    assert shown.lines()[-2:] == [f"  {line}" for line in one.listing] and shown.plain()["listing"] == list(one.listing)
    helps = rule(run_with(tmp_path / "helps", planted_batches(1, 30, {"good": 2.0, **HELD_OUT})))
    assert isinstance(helps, RunFinding) and helps.severity == "note"
    assert rule(run_with(tmp_path / "none", planted_batches(2, 9, {"a": 0.0, "b": 0.0, **HELD_OUT}))) is None
    assert isinstance(rule(RunReading({}, (), [], [])), Undecided)


def test_probes_whose_self_check_failed_are_left_out(tmp_path):
    run = run_with(tmp_path / "run", planted_batches(1, 30, {"good": 2.0, "bad": -2.0, **HELD_OUT}))
    rule = GRAM_RULES["held-out influence"]

    def with_failed(steps) -> RunReading:
        return replace(run, lines=[{**line, "check/passed": float(line["step"] not in steps)} for line in run.lines])

    assert isinstance(rule(with_failed(range(1, 31))), Undecided)
    one = rule(with_failed(range(1, 11)))
    assert isinstance(one, RunFinding) and "unbiased products at 20 probes" in one.evidence


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


def test_probes_store_training_rollouts_with_their_own_and_change_nothing(policy, tmp_path):
    probing = {"probe_every": 1, "probe_problems": 3, "steps": 2}
    for name, trained in (("plain", False), ("both", True)):
        train(config_for(policy, tmp_path / name, final_checkpoint=True, probe_trained=trained, **probing))
    run, plain = (open_run(tmp_path / name) for name in ("both", "plain"))
    assert [line["loss"] for line in run.metrics()[1:]] == [line["loss"] for line in plain.metrics()[1:]]
    assert [(b.step, b.kind) for b in run.batches() if b.kind == TRAINED_AND_FIXED] == [
        (1, TRAINED_AND_FIXED),
        (2, TRAINED_AND_FIXED),
    ]
    asked = [problem.id for problem in load_task("arithmetic:3", seed=0).test[-3:]]
    trained = [group.prompt_id for group in run.groups([2]) if group.kind == "train"]
    joint = next(b for b in run.batches([2]) if b.kind == TRAINED_AND_FIXED)
    fixed = next(b for b in run.batches([2]) if b.kind == "fixed")
    assert list(joint.prompt_ids) == trained + asked
    count = len(fixed.rewards)
    torch.testing.assert_close(joint.gram[-count:, -count:], fixed.gram, rtol=1e-4, atol=1e-4)
    assert torch.equal(joint.rewards[-count:], fixed.rewards)
    assert len(probe_products(run.batches())) == 2


def test_probes_store_the_preconditioned_gram_of_the_step(policy, tmp_path, monkeypatch):
    """Its blocks are those of `cross_gram` with the diagonal that AdamW's step was made with."""
    measured, probe = [], evaluate.run_probe

    def kept_probe(*given: Any) -> Any:
        config, own, _, _, step, trained, optimizer = given
        result = probe(*given)
        if trained is not None:
            assert int(next(iter(optimizer.state.values()))["step"]) == step
            part = trained.input_ids, trained.completion_mask, trained.attention_mask
            diagonal = adam_preconditioner(optimizer)
            found = cross_gram(own.model, part, part, temperature=config.temperature, preconditioner=diagonal)
            measured.append((found.train, len(trained.rewards)))
        return result

    monkeypatch.setattr(evaluate, "run_probe", kept_probe)
    probing = {"probe_every": 1, "probe_problems": 3, "steps": 2, "probe_trained": True}
    train(config_for(policy, tmp_path / "adamw", **probing))
    run = open_run(tmp_path / "adamw")
    by_kind = {
        kind: [b for b in run.batches() if b.kind == kind]
        for kind in (TRAINED_AND_FIXED, TRAINED_AND_FIXED_PRECONDITIONED)
    }
    plain, conditioned = by_kind.values()
    assert [batch.step for batch in conditioned] == [batch.step for batch in plain] == [1, 2]
    for one, other, (expected, count) in zip(plain, conditioned, measured, strict=True):
        torch.testing.assert_close(other.gram[:count, :count], expected, rtol=1e-4, atol=1e-4 * float(expected.max()))
        assert torch.equal(one.rewards, other.rewards) and one.prompt_ids == other.prompt_ids
        assert not torch.allclose(one.gram, other.gram)
    assert len(probe_products(run.batches(), preconditioned=True)) == len(probe_products(run.batches())) == 2


def test_sgd_has_no_preconditioner(policy, tmp_path):
    train(config_for(policy, tmp_path, probe_every=1, probe_problems=3, steps=1, probe_trained=True, optimizer="sgd"))
    run = open_run(tmp_path)
    assert {batch.kind for batch in run.batches()} == {"fixed", TRAINED_AND_FIXED}
    assert held_out_influence(run.batches(), preconditioned=True).probes == 0


def test_no_preconditioner_before_every_parameter_had_a_step():
    first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.AdamW([first, second])
    assert evaluate.latest_preconditioner(optimizer) is None
    first.grad = torch.ones(2)
    optimizer.step()
    assert evaluate.latest_preconditioner(optimizer) is None  # the other one still has no state
    second.requires_grad_(False)
    assert list(evaluate.latest_preconditioner(optimizer) or {}) == [first]
    assert evaluate.latest_preconditioner(None) is evaluate.latest_preconditioner(torch.optim.SGD([first])) is None


def test_preconditioned_grams_are_read_by_their_own_kind():
    """Plain Grams say that a prompt helps, those with the preconditioner that it hurts."""
    helps, hurts = (planted_batches(1, 30, {"a": pull, **HELD_OUT}) for pull in (2.0, -2.0))
    renamed = [replace(b, kind=TRAINED_AND_FIXED_PRECONDITIONED) for b in hurts if b.kind == TRAINED_AND_FIXED]
    both = [*helps, *renamed]
    assert held_out_influence(both).helping == ["a"] and held_out_influence(both).probes == 30
    found = held_out_influence(both, preconditioned=True)
    assert found.hurting == ["a"] and not found.helping and found.probes == 30
    assert not held_out_influence(helps, preconditioned=True).effects, "an old folder has no such Gram"


def test_a_held_out_rollout_on_weights_without_a_gradient_does_not_set_the_scale():
    """There `D = 1/ε`. Its group has equal rewards, so it has no gradient, and every effect stays as it is."""
    generator = torch.Generator().manual_seed(0)
    names = ("a", "b", "test/0", "test/1")
    scores = {name: torch.randn(4, 3, generator=generator, dtype=torch.float64) for name in names}
    rewards = {name: torch.rand(4, generator=generator, dtype=torch.float64) for name in names}
    rewards["test/1"].fill_(1.0)
    found = []
    for factor in (1.0, 1e4):
        scores["test/1"][0] *= factor
        batches = joint_batches(2, scores, rewards)
        batches[1] = replace(batches[1], kind=TRAINED_AND_FIXED_PRECONDITIONED)
        (probe,) = probe_products(batches, preconditioned=True)
        found.append(probe.products)
    assert found[0] == pytest.approx(found[1]) and np.abs(found[0]).max() > 0.01
    squares = torch.cat([scores["a"], scores["b"]]).square().sum(1).mean() / 4
    own, held = ((4 * rewards[n] - rewards[n].sum()) / 3 @ scores[n] / 4 for n in ("a", "test/0"))
    assert found[0][0] == pytest.approx(float(own @ held / 2 / squares))


def test_training_rollouts_are_stored_at_probes_only(policy, tmp_path):
    with pytest.raises(ValueError, match=r"train --probe-trained: needs probes .*, got probe_every 0 .*Add"):
        config_for(policy, tmp_path, probe_trained=True, probe_every=0)
    with pytest.raises(ValueError, match=r"probe at the policy's temperature, 1, got probe_temperatures 0.5\. Leave"):
        config_for(policy, tmp_path, probe_trained=True, probe_every=1, probe_temperatures=(0.5,))
    config_for(policy, tmp_path, probe_trained=True, probe_every=1, probe_temperatures=(0.5, 1.0))


def test_products_between_prompts_are_those_of_leave_one_out_gradients():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(12, 5, generator=generator, dtype=torch.float64)
    rewards = torch.randint(0, 2, (3, 4), generator=generator).double()
    gradients = []
    for prompt in range(3):
        mine = rewards[prompt]
        centred = torch.stack([mine[i] - (mine.sum() - mine[i]) / 3 for i in range(4)])
        gradients.append((centred[:, None] * scores[4 * prompt : 4 * prompt + 4]).mean(0))
    batch = BatchRecord(
        step=1,
        prompt_ids=("a", "b", "c"),
        sizes=torch.tensor([4, 4, 4]),
        rewards=rewards.flatten(),
        lengths=torch.ones(12).long(),
        weights=torch.zeros(12, dtype=torch.float64),
        gram=scores @ scores.mT,
    )
    scale = float((scores @ scores.mT).diagonal().mean()) / 4
    products = prompt_products([batch, batch])
    for place, name in enumerate("abc"):
        others = [gradients[other] for other in range(3) if other != place]
        expected = sum(float(gradients[place] @ other) for other in others) / 2 / scale
        assert products[name] == pytest.approx([expected, expected])
    unknown = replace(batch, gram=torch.full((12, 12), math.nan, dtype=torch.float64))
    assert prompt_products([unknown]) == {}
