"""Products between prompts: against their definition, unbiased by enumeration, planted conflicts, chance."""

import itertools
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch

from scoregram.exhibits import Estimate
from scoregram.reading import interference_map, read_run
from scoregram.reading.interference import MOST_PROMPTS, InterferenceMap, map_of_batches, step_products
from scoregram.runs import BatchRecord, open_run
from scoregram.training import train
from tests.training_cases import config_for, save_policy

SIZE, WIDTH = 4, 6


def batch_of(
    step: int, scores: dict[str, torch.Tensor], rewards: dict[str, torch.Tensor], kind: str = "train"
) -> BatchRecord:
    rows = torch.cat([*scores.values()])
    return BatchRecord(
        step=step,
        kind=kind,
        prompt_ids=tuple(scores),
        sizes=torch.tensor([len(one) for one in scores.values()]),
        rewards=torch.cat([rewards[name] for name in scores]),
        lengths=torch.ones(len(rows)).long(),
        weights=torch.zeros(len(rows), dtype=torch.float64),
        gram=rows @ rows.mT,
    )


def planted(seed: int, steps: int, pulls: dict[str, float], size: int = SIZE) -> list[BatchRecord]:
    """Right rollouts of a prompt point along `pull · e_1`, wrong ones against it, in noise."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for step in range(1, steps + 1):
        scores, rewards = {}, {}
        for name, pull in pulls.items():
            rewards[name] = torch.randint(0, 2, (size,), generator=generator).double()
            scores[name] = torch.randn(size, WIDTH, generator=generator, dtype=torch.float64)
            scores[name][:, 0] += pull * (2 * rewards[name] - 1)
        found.append(batch_of(step, scores, rewards))
    return found


def found_map(batches: Iterable[BatchRecord], *names: str) -> InterferenceMap:
    found = map_of_batches(batches, {*names})
    assert found is not None
    return found


def test_products_are_those_of_leave_one_out_gradients():
    batches = planted(0, 5, {"a": 1.0, "b": -1.0, "c": 0.0})
    generator = torch.Generator().manual_seed(0)
    wanted: dict[tuple[str, str], list[float]] = {}
    for _ in range(5):
        gradients, norms = {}, []
        for name, pull in (("a", 1.0), ("b", -1.0), ("c", 0.0)):
            r = torch.randint(0, 2, (SIZE,), generator=generator).tolist()
            psi = torch.randn(SIZE, WIDTH, generator=generator, dtype=torch.float64)
            g = torch.zeros(WIDTH, dtype=torch.float64)
            for i in range(SIZE):
                psi[i, 0] += pull * (2 * r[i] - 1)
                others = sum(r[j] for j in range(SIZE) if j != i) / (SIZE - 1)
                g += (r[i] - others) * psi[i] / SIZE
                norms.append(float(psi[i] @ psi[i]))
            gradients[name] = g
        scale = sum(norms) / len(norms) / SIZE
        for one, other in itertools.combinations("abc", 2):
            wanted.setdefault((one, other), []).append(float(gradients[one] @ gradients[other]) / scale)
    found = found_map(batches, "a", "b", "c")
    assert {pair: estimate.value for pair, estimate in found.pairs.items()} == pytest.approx(
        {pair: sum(values) / 5 for pair, values in wanted.items()}
    )
    for (one, other), estimate in found.pairs.items():
        i, j = found.prompts.index(one), found.prompts.index(other)
        assert found.products[i, j] == found.products[j, i] == estimate.value


def test_the_mean_over_all_outcomes_is_the_product_of_the_gradients():
    """One logit, `π(1) = σ(θ)`, two prompts with other success rates; every outcome of two groups of four."""
    rates, lengths = (
        {"a": 0.3, "b": 0.8},
        {"a": 1.0, "b": -0.5},
    )  # score = length · (action - rate): gradients p(1-p) length
    expected = np.zeros(3)
    for actions in itertools.product([0.0, 1.0], repeat=2 * SIZE):
        of = {"a": torch.tensor(actions[:SIZE]), "b": torch.tensor(actions[SIZE:])}
        chance = np.prod(
            [rates[n] ** float(x.sum()) * (1 - rates[n]) ** (SIZE - float(x.sum())) for n, x in of.items()]
        )
        scores = {n: (lengths[n] * (x.double() - rates[n]))[:, None] for n, x in of.items()}
        mean_norm = float(torch.cat([*scores.values()]).square().mean()) / SIZE  # the scale that a step is divided by
        found = step_products(batch_of(1, scores, {n: x.double() for n, x in of.items()}), {"a", "b"})
        assert found is not None
        names, products, squared = found
        assert names == ["a", "b"]
        expected += chance * mean_norm * np.array([products[0, 0, 1], *squared])
    gradients = {n: lengths[n] * rates[n] * (1 - rates[n]) for n in rates}
    wanted = [gradients["a"] * gradients["b"], gradients["a"] ** 2, gradients["b"] ** 2]
    assert expected == pytest.approx(wanted, rel=1e-9)


def test_a_planted_conflict_is_found_and_a_planted_help_too():
    found = found_map(planted(1, 60, {"a": 1.0, "b": 1.0, "against": -1.0, "idle": 0.0}), "a", "b", "against", "idle")
    assert found.helping == [("a", "b")]
    assert {*found.hurting} == {("a", "against"), ("against", "b")}
    values = [found.pairs[pair].value for pair in found.hurting]
    assert values == sorted(values)
    assert found.by_chance < 0.5


def test_runs_of_noise_have_a_pair_beyond_chance_in_at_most_one_in_twenty():
    """Six prompts without a gradient, 15 pairs, 6 or 12 shared steps; 80 runs, standard error 2.4 points."""
    wrong, by_chance = 0, []
    for seed in range(80):
        found = found_map(planted(seed, (6, 12)[seed % 2], dict.fromkeys("abcdef", 0.0)), *"abcdef")
        wrong += bool(found.helping or found.hurting)
        by_chance.append(found.by_chance)
    assert wrong / 80 <= 0.05 + 2 * 0.0244
    assert sum(by_chance) / 80 <= 0.05 + 2 * 0.0244  # shuffled rewards say the same


@pytest.mark.parametrize(
    "batches",
    [
        planted(0, 4, {"a": 1.0, "b": 1.0}),
        planted(0, 9, {"a": 1.0, "b": 1.0}, size=3),
        [batch_of(s, {"a": torch.ones(4, 1).double()}, {"a": torch.ones(4).double()}) for s in range(9)],
    ],
    ids=["four shared steps", "groups of three", "one prompt"],
)
def test_too_little_gives_no_map(batches):
    assert map_of_batches(batches, {"a", "b"}) is None


def test_the_gradient_of_a_prompt_with_two_groups_is_their_mean():
    one = planted(3, 1, {"a": 1.0, "b": 1.0, "c": 0.5})[0]
    found, split = (
        step_products(one, {"a", "b", "c"}),
        step_products(replace(one, prompt_ids=("a", "b", "a")), {"a", "b"}),
    )
    assert found is not None and split is not None
    (names, three, squares), (two_names, two, two_squares) = found, split
    assert (names, two_names) == (["a", "b", "c"], ["a", "b"])
    np.testing.assert_allclose(two[:, 0, 1], (three[:, 0, 1] + three[:, 2, 1]) / 2)
    assert two_squares == pytest.approx([(squares[0] + squares[2]) / 2, squares[1]])


def test_probes_uneven_groups_and_missing_rewards_do_not_count():
    good = planted(0, 6, {"a": 1.0, "b": -1.0})
    rows = {"a": torch.randn(4, WIDTH).double(), "b": torch.randn(5, WIDTH).double()}
    uneven = batch_of(7, rows, {name: torch.ones(len(x)).double() for name, x in rows.items()})
    missing = planted(1, 1, {"a": 1.0, "b": 1.0})[0]
    missing.rewards[0] = torch.nan
    probe = batch_of(8, dict(itertools.islice(rows.items(), 1)), {"a": torch.ones(4).double()}, kind="fixed")
    expected = found_map(good, "a", "b")
    found = found_map([*good, uneven, missing, probe], "a", "b")
    assert found.pairs == expected.pairs and isinstance(found.pairs["a", "b"], Estimate)


def test_the_map_of_a_trained_run(tmp_path):
    config = config_for(
        save_policy(tmp_path / "model"),
        tmp_path / "run",
        steps=6,
        batch_size=12,
        train_problems=3,
        measure_every=1,
        batches_every=1,
        eval_every=0,
    )
    train(config)
    run = read_run(open_run(tmp_path / "run"))
    found = interference_map(run)
    assert found is not None and 2 <= len(found.prompts) <= 3 <= MOST_PROMPTS
    assert found.products.shape == (len(found.prompts),) * 2 and np.isfinite(found.products.diagonal()).all()
    train(config_for(tmp_path / "model", tmp_path / "plain", steps=2, eval_every=0))
    assert interference_map(read_run(open_run(tmp_path / "plain"))) is None
