"""`results/false-findings`: what each rule must be silent on, worlds whose truth is known, and the simulated record."""

from itertools import product
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from scoregram.advice import GRAM_RULES, LOG_RULES, advise, advise_run
from scoregram.gram import Gram
from scoregram.reading import Step, read_run, read_step
from scoregram.rollouts import Rollouts
from tests.test_results_allocation import module

FOLDER = Path(__file__).parent.parent / "results" / "false-findings"

NULLS = {
    "NaN": "every logged value is finite",
    "constant reward": "rewards are drawn",
    "stuck batch": "steps are drawn anew; on wandering logs rewards are coarse, drift, and all lengths are equal",
    "lost seed": "as for stuck batch",
    "phantom signal": "both reward functions vary",
    "reward against held-out score": "reward and held-out score are stationary, each with a drift of its own",
    "KL blow-up": "the KL is stationary at 0.05 nats",
    "entropy collapse": "the entropy is stationary",
    "repetition": "tokens are drawn uniformly",
    "dead groups": "at most a quarter of the groups is dead on average; on wandering logs the finding is true",
    "truncation": "5 % of the completions are cut off",
    "falling reward": "the success rate is stationary, also where it wanders",
    "reward spread death": "the spread is stationary",
    "length gaming": "length and reward are independent and stationary",
    "gradient spikes": "the logarithm of the norm is normal with deviation 0.4",
    "clip saturation": "2 % of the tokens are clipped",
    "idle clipping": "some tokens are clipped",
    "throughput rot": "the speed is stationary",
    "dominating rollouts": "rollouts are exchangeable",
    "dominating prompts": "prompts are exchangeable; some are dead, and steps with three live ones count",
    "exploding layer": "all layers have one law, at every step",
    "conflicting prompts": "no signal: all gradients are zero; balanced: every two prompts share a direction",
    "held-out influence": "the gradients of training prompts and of held-out ones are orthogonal, or zero",
    "lost exploration": "rollouts have one law at every step",
    "estimator": "rloo and mean differ by a factor; optimal-loo has nothing to gain where the saving is small",
    "batch size": "balanced: the noise scale is the batch; without a signal the finding is true",
    "group size": "balanced: the best size is the one used; without a signal the finding is true",
    "group size by phase": "all steps have one law",
    "baseline": "optimal-loo has 1 to 5 % more variance than rloo; the threshold is a saving of 5 %",
    "overfitting to prompts": "training prompts and test problems have one law",
    "layers that carry the update": "all layers have one law",
}
"""Rule → the world in which it must be silent."""


@pytest.fixture
def worlds(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return module("false-findings", "worlds")


def test_every_rule_has_a_null():
    assert NULLS.keys() == LOG_RULES.keys() | GRAM_RULES.keys()


@pytest.mark.parametrize("shift", [0.0, 0.7])
def test_moments_are_those_of_the_law(worlds, shift):
    """By enumeration of both outcomes; the noise enters by its second moment alone."""
    law = worlds.Law(shared=0.7, own=0.4, right=2.5)
    gradients, found = [], []
    for rate in worlds.RATES:
        p = float(worlds.shifted(np.array(rate), shift))
        assert np.log(p / (1 - p)) == pytest.approx(np.log(rate / (1 - rate)) + shift)
        outcomes = [(p, 1.0, 2.5), (1 - p, 0.0, 1.0)]
        length = 0.7 + 0.4  # |u|², along which a rollout has (r - p)
        norm = sum(chance * ((r - p) ** 2 * length + noise) for chance, r, noise in outcomes)
        slope = sum(chance * (r - p) ** 2 for chance, r, _ in outcomes)  # g = slope · u
        square = sum(chance * (r - p) ** 2 * ((r - p) ** 2 * length + noise) for chance, r, noise in outcomes)
        gradients.append(slope)
        baseline = slope * norm + slope**2 * length
        found.append((square - slope**2 * length, baseline))
    signal = np.mean(gradients) ** 2 * 0.7
    between = np.mean(np.square(gradients)) * 1.1 - signal
    assert law.moments(shift).tolist() == pytest.approx([signal, between, *np.mean(found, axis=0)])


@pytest.mark.slow  # runs in `make test-results`
def test_drawn_rollouts_have_the_moments(worlds, monkeypatch):
    """Means over 16,000 prompts within 4 standard errors, the saving among them: it has no bias."""
    monkeypatch.setattr(worlds, "SAVED_GROUPS", 200_000)
    law, rng = worlds.Law(shared=0.7, own=0.4, right=2.5), np.random.default_rng(0)
    prompts = worlds.draw_prompts(rng, 16_000, law, "p")
    drawn = worlds.draw_rollouts(rng, prompts, np.full(16_000, 8), law)
    rewards, scores = drawn.rewards.reshape(-1, 4, 8), drawn.scores.reshape(-1, 4, 8, worlds.LAYERS * worlds.WIDTH)
    rows = worlds.noise_scalars(rewards, scores)
    error = rows.std(axis=0) / np.sqrt(len(rows))
    moments, saved = law.moments(), worlds.saved_variance(law, 8)
    known = np.array([*moments, *saved, moments[2] + moments[3] / 7])
    assert (np.abs(rows.mean(axis=0) - known) < 4 * error).all() and saved > 10 * error[4]
    held = worlds.draw_prompts(rng, 3, law, "h", held_out=True)
    assert np.abs(held.directions @ prompts.directions[:50].T).max() == 0


def test_a_law_has_the_truths_it_was_made_for(worlds):
    law = worlds.law_with(noise_scale=40.0, best_group_size=6.0, size=4, right=2.0)
    truths = worlds.truths([*law.moments(), 0.0], 5, 4)
    assert truths["noise_scale"] == pytest.approx(40) and truths["best_group_size"] == pytest.approx(6)
    assert truths["snr"] == pytest.approx(20 / 40)


def test_scalars_are_those_of_a_trainer(worlds):
    """The scalars of a drawn step, by `read_step` on the same rollouts."""
    run = worlds.draw_run(worlds.World(law=worlds.Law(shared=0.5, own=0.5), size=4, steps=3), seed=0)
    for line in run.lines:
        (batch,) = [one for one in run.batches([line["step"]]) if one.kind == "train"]
        groups = [group for group in run.groups([line["step"]]) if group.kind == "train"]
        advantages = torch.cat([group.advantages for group in groups])
        ids = torch.zeros(16, 2, dtype=torch.int64)
        rollouts = Rollouts(
            input_ids=ids,
            attention_mask=ids == 0,
            completion_mask=ids == 0,
            prompt_lengths=torch.zeros(16, dtype=torch.int64),
            group_ids=torch.arange(4).repeat_interleave(4),
            rewards=batch.rewards,
        )
        step = Step(
            number=1,
            rollouts=rollouts,
            advantages=advantages,
            weights=advantages / 16,
            gram=Gram(batch.gram, {}, torch.zeros(16, 2)),
        )
        scalars = read_step(step).scalars
        for name in (*worlds.NOISE_SCALARS, *(key for key in line if key in scalars and key != "length")):
            assert line[name] == pytest.approx(scalars[name], rel=1e-9, abs=1e-12), name


@pytest.mark.slow  # runs in `make test-results`
@pytest.mark.parametrize("is_uneven", [False, True])
def test_a_run_in_memory_is_read_as_its_folder(worlds, tmp_path, is_uneven):
    law = worlds.law_with(noise_scale=16.0, best_group_size=4.0, size=4)
    run = worlds.draw_run(worlds.World(law=law, size=4, steps=30, is_uneven=is_uneven), seed=1)
    run.write(tmp_path / "run")
    ours, stored = advise_run(read_run(run)), advise(tmp_path / "run")
    assert (ours.findings, ours.fine, ours.undecided) == (stored.findings, stored.fine, stored.undecided)


@pytest.mark.slow  # runs in `make test-results`
def test_every_rule_decides_in_some_world(worlds):
    """So that the simulation tests rules, and not their silence."""
    open_rules = set(GRAM_RULES) | set(LOG_RULES)
    for law, size in product((worlds.Law(), worlds.law_with(noise_scale=32.0, best_group_size=8.0, size=8)), (8,)):
        found = advise_run(read_run(worlds.draw_run(worlds.World(law=law, size=size, steps=45), seed=0)))
        open_rules &= set(found.undecided)
    assert not open_rules


@pytest.mark.slow  # runs in `make test-results`
def test_the_page_follows_from_the_record(worlds):
    tables = module("false-findings", "summarise")
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert tables.filled(page) == page
    runs = [run for run in tables.stored_runs() if not run["cell"].startswith("wandering")]
    assert tables.count_wrong(runs) / len(runs) <= 0.05


@pytest.mark.slow
def test_the_record_can_be_simulated_again(worlds):
    """The verdicts of every fiftieth run of 60 steps; findings on noise follow from the seed."""
    run = module("false-findings", "run")
    cells = {cell.name: cell for cell in run.CELLS}
    short = [row for row in module("false-findings", "summarise").stored_runs() if "60 steps" in row["cell"]]
    for row in short[::50]:
        assert run.simulate(cells[row["cell"]], row["seed"]) == row
