"""The noise of a run: pooled by hand, the same through every door, with intervals that cover."""

import io
import itertools
import json
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from rich.console import Console
from scipy.stats import t as student

from scoregram.bootstrap import FEWEST, fieller_ratio
from scoregram.errors import ScoregramError
from scoregram.exhibits import json_value
from scoregram.reading import GROUP_SIZE, POOLED, read_run, run_noise
from scoregram.reading.step import block_scalars
from scoregram.report.replay_table import show_replay
from scoregram.report.run_page import summary_table
from scoregram.runs import open_run
from scoregram.statistics import NoiseComponents, batch_mse, group_blocks, noise_components
from scoregram.training import loop, train
from tests.report_cases import write_run
from tests.training_cases import config_for, save_policy

NAMES = ("gram/gradient_squared", "gram/between_prompts", "gram/within_prompt", "gram/group_baseline")


def line(
    step: int, components: NoiseComponents, prompts: int = 3, saved: float = 0.5, variance: float = 6.0
) -> dict[str, float]:
    return {
        "step": step,
        "gram/score_norm": 1.0,
        **dict(zip(NAMES, vars(components).values(), strict=True)),
        "gram/optimal_loo_saved": saved,
        "gram/rloo_variance": variance,
        "gram/complete_prompts": prompts,
    }


def test_steps_without_signal_are_pooled_and_not_dropped():
    """By hand: |g|² is 3 and -1, so 1 on average; a mean over positive steps would say 3."""
    rows = [NoiseComponents(3.0, 1.0, 4.0, 6.0), NoiseComponents(-1.0, 1.0, 4.0, 6.0)]
    noise = run_noise([line(step, one) for step, one in enumerate([*rows * 2, *rows])], 4)  # the last third
    assert (noise.steps, noise.first_step, noise.last_step) == (2, 4, 5)
    assert noise.components == NoiseComponents(1.0, 1.0, 4.0, 6.0)
    assert noise.noise_scale.value == pytest.approx(4 * 1 + 4 + 6 / 3)
    assert noise.snr.value == pytest.approx(1 / (1 / 3 + 4 / 12 + 6 / 36))
    assert noise.best_group_size.value == pytest.approx(1 + math.sqrt(6))
    assert noise.baseline_saving.value == pytest.approx(0.5 / 6)
    assert not noise.is_conclusive and math.isnan(noise.snr.low) and "too few for a conclusion" in noise.sentence()


def test_the_first_third_is_pooled_in_the_same_way():
    first, rest = NoiseComponents(2.0, 1.0, 4.0, 9.0), NoiseComponents(1.0, 1.0, 4.0, 4.0)
    lines = [line(step, one) for step, one in enumerate([first] * 5 + [rest] * 10)]
    sizes = [run_noise(lines, 4, phase=phase).best_group_size.value for phase in ("first", "last")]
    assert sizes == pytest.approx([1 + math.sqrt(9), 1 + math.sqrt(4)])
    assert run_noise(lines, 4, failed=[2], phase="first").steps == 0
    with pytest.raises(ScoregramError, match=r"noise: phase must be one of first, last, got 'middle'\."):
        run_noise(lines, 4, phase="middle")


def test_the_interval_of_a_ratio_is_the_set_that_a_t_test_does_not_reject():
    rng = np.random.default_rng(3)
    above, below = rng.normal(1.0, 1.0, 12), rng.normal(5.0, 1.0, 12)
    found = fieller_ratio(above, below)
    for ratio, is_edge in ((found.low, True), (found.high, True), (found.value, False), (found.high * 1.1, False)):
        rest = above - ratio * below
        statistic = abs(rest.mean()) / (rest.std(ddof=1) / math.sqrt(len(rest)))
        limit = student.ppf(0.975, len(rest) - 1)
        assert statistic == pytest.approx(limit, rel=1e-5) if is_edge else (statistic < limit) == (ratio < found.high)
    noisy = fieller_ratio(above, below - below.mean() + 0.01)
    assert (noisy.low, noisy.high) == (-math.inf, math.inf)  # the denominator may be zero: any ratio is possible
    assert math.isnan(fieller_ratio(above[: FEWEST - 1], below[: FEWEST - 1]).low)
    assert math.isnan(fieller_ratio(above, -below).value) and math.isnan(fieller_ratio([], []).value)


def test_the_level_of_the_intervals_can_be_chosen():
    rng = np.random.default_rng(4)
    above, below = rng.normal(1.0, 1.0, 12), rng.normal(5.0, 1.0, 12)
    found = fieller_ratio(above, below, level=0.9)
    for end in (found.low, found.high):
        rest = above - end * below
        statistic = abs(rest.mean()) / (rest.std(ddof=1) / math.sqrt(len(rest)))
        assert statistic == pytest.approx(student.ppf(0.95, len(rest) - 1), rel=1e-5)
    rows = [NoiseComponents(*values) for values in rng.normal((5.0, 3.0, 5.0, 40.0), 0.5, (5, 4))]
    lines = [line(step, one, saved=one.within_prompt / (2 + step % 2)) for step, one in enumerate([*rows * 3])]
    narrow, usual = run_noise(lines, 4, level=0.9), run_noise(lines, 4)
    for name in POOLED:
        inner, outer = getattr(narrow, name), getattr(usual, name)
        assert outer.low < inner.low <= inner.value == outer.value <= inner.high < outer.high, name


def test_every_step_has_its_own_group_size():
    """Half of the pooled steps have groups of 4, the others of 8; each step alone has its error by its own size."""
    rng = np.random.default_rng(2)
    rows = [NoiseComponents(*(1 + rng.random(4))) for _ in range(18)]
    lines = [line(step, one) | ({"control/group_size": 8} if step % 2 else {}) for step, one in enumerate(rows)]
    last = list(enumerate(rows))[-6:]
    sizes = [8 if step % 2 else 4 for step, _ in last]
    alone = [run_noise([line(0, one)], size) for (_, one), size in zip(last, sizes, strict=True)]
    signals = np.array([one.gradient_squared for _, one in last])
    signal, error = signals.mean(), np.mean(signals / [noise.snr.value for noise in alone])
    scale = np.mean(signals * [noise.noise_scale.value for noise in alone])
    found = run_noise(lines, 4)
    assert found.snr.value == pytest.approx(signal / error) and found.group_size == 8
    assert found.noise_scale.value == pytest.approx(scale / signal)
    assert run_noise([one | {"control/group_size": 4} for one in lines], None).steps == 6


def test_no_signal_gives_an_infinite_noise_scale_and_no_difference_an_infinite_group():
    noise = run_noise([line(step, NoiseComponents(-1.0, -1.0, 4.0, 6.0)) for step in range(15)], 4)
    assert noise.noise_scale.value == math.inf == noise.noise_scale.low and noise.snr.high < 0
    assert noise.best_group_size.value == math.inf


def test_a_failed_step_withholds_the_answer():
    lines = [line(step, NoiseComponents(1.0, 1.0, 1.0, 1.0)) for step in range(15)]
    assert run_noise(lines, 4, failed=[2]).steps == 5
    assert run_noise(lines, 4, failed=[14]).steps == 0 and run_noise(lines, 3).steps == 0
    assert run_noise([], 4).sentence() == ""


def test_an_older_folder_gives_the_same_answer_from_its_grams(tmp_path):
    known = write_run(tmp_path / "run", steps=15)
    new = read_run(tmp_path / "run")
    saving = {"gram/optimal_loo_saved", "gram/rloo_variance", "gram/baseline_saving"}
    for added in (saving, saving | {"gram/within_prompt", "gram/group_baseline", "gram/complete_prompts"}):
        old = read_run(tmp_path / "run")
        lines = [{name: value for name, value in one.items() if name not in added} for one in old.lines]
        vars(old)["lines"] = [{**one, "gram/saved_variance": 7.0} for one in lines]  # another quantity: never read
        assert new.noise().steps == old.noise().steps == 5
        for name in POOLED:
            assert vars(getattr(old.noise(), name)) == pytest.approx(vars(getattr(new.noise(), name)), rel=1e-9)
    expected = np.mean([list(vars(noise_components(*known[step])).values()) for step in range(11, 16)], axis=0)
    assert list(vars(new.noise().components).values()) == pytest.approx(expected.tolist())


# Doors


class Heard:
    """A tracker that keeps what it is sent."""

    def __init__(self, kept: dict) -> None:
        self.kept = kept

    def __enter__(self) -> "Heard":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def log(self, step: int, scalars: dict) -> None:
        """Keep what the run sums up."""
        self.kept |= {name: value for name, value in scalars.items() if name.startswith("run/")}


MOVING = {"group_size": "auto", "batch_size": 32, "steps": 22, "rollouts_every": 5}
"""The group size moves twice, and not every measured step is stored."""


@pytest.mark.parametrize("changes", [{}, MOVING], ids=["fixed groups", "moving groups"])
def test_every_door_gives_the_same_numbers(changes, tmp_path, monkeypatch, capsys):
    """API, page, terminal, `whatif` and tracker of a run; `tests/test_integrations_trl.py` has `attach(…).summary()`.

    Where the size moves, the terminal once took the next one for every step, and the page the most common one.
    """
    heard: dict[str, float] = {}
    monkeypatch.setattr(loop, "open_trackers", lambda *_, **__: Heard(heard))
    screen = Console(file=io.StringIO(), width=400)
    changes = {"steps": 16, "eval_every": 0, "rollouts_every": 1} | changes
    config = config_for(save_policy(tmp_path / "model"), tmp_path / "run", **changes)
    train(config, console=screen)
    run = read_run(tmp_path / "run")
    noise = run.noise()
    sizes = [one[GROUP_SIZE] for one in run.lines if GROUP_SIZE in one]
    assert noise.is_conclusive and (len(set(sizes)) > 1) == ("group_size" in changes)
    assert run.group_size == (sizes[-1] if sizes else 4)
    assert run.trust.measured == sum("gram/score_norm" in one for one in run.lines)
    page = {str(row[0]): row[1] for row in summary_table(run).rows}
    labels = {
        "snr": "signal to noise of a step",
        "noise_scale": "noise scale, in rollouts",
        "best_group_size": "best group size",
        "baseline_saving": "variance saved by optimal-loo",
    }
    doors = {
        "page": {name: page[label] for name, label in labels.items()},
        "summary": {name: getattr(run.summary, name) for name in POOLED},
        "metrics": {name: getattr(run_noise(open_run(config.out).metrics(), 4), name) for name in POOLED},
    }
    for door, found in doors.items():
        assert found == {name: getattr(noise, name) for name in POOLED}, door
    capsys.readouterr()
    assert show_replay(config.out, ["rloo"], as_json=True) == 0
    said = json.loads(capsys.readouterr().out)["noise"]
    assert {name: said[name] for name in POOLED} == json_value({name: getattr(noise, name) for name in POOLED})
    finite = {name: getattr(noise, name).value for name in POOLED if math.isfinite(getattr(noise, name).value)}
    assert {name: heard[f"run/{name}"] for name in finite} == finite
    assert noise.sentence() in screen.file.getvalue()  # type: ignore[attr-defined]


def test_each_question_is_a_line(tmp_path):
    train(config_for(save_policy(tmp_path / "model"), tmp_path / "run", rollouts_every=1), console=Console(quiet=True))
    run = read_run(tmp_path / "run")
    frame = run.to_pandas()
    assert frame.loc[2, "reward"] == run.lines[2]["reward"] and list(frame.index) == [0, 1, 2, 3]
    name = run.groups[0].record.prompt_id
    assert [(one.prompt_id, one.step) for one in run.rollouts_of(1, name)] == [(name, 1)] * 4
    assert len(run.rollouts_of(1)) == 12
    with pytest.raises(Exception, match="step 9 needs stored rollouts, got those of 3 other steps from 1 to 3"):
        run.rollouts_of(9)
    (row,) = run.what_if("rloo").rows
    assert row.estimator == "rloo"
    assert json.dumps(run.noise().scalars())


# Coverage, against a world whose truth is enumerated


@dataclass(frozen=True)
class World:
    """Prompts drawn uniformly; a rollout is one of a few actions, with a score, a probability and a reward each."""

    scores: np.ndarray
    """`(prompts, actions, D)`, with mean 0 under `chances`."""
    chances: np.ndarray
    rewards: np.ndarray

    @property
    def components(self) -> NoiseComponents:
        """Sums over all prompts and actions."""
        chances, centred = self.chances, self.rewards - (self.chances * self.rewards).sum(1, keepdims=True)
        pulls = self.scores * centred[..., None]
        gradients = (chances[..., None] * pulls).sum(1)
        mean = gradients.mean(0)
        oracle = (chances * (pulls**2).sum(-1)).sum(1) - (gradients**2).sum(-1)
        fisher = (chances * (self.scores**2).sum(-1)).sum(1)
        variance = (chances * centred**2).sum(1)
        return NoiseComponents(
            float(mean @ mean),
            float(((gradients - mean) ** 2).sum(-1).mean()),
            float(oracle.mean()),
            float((variance * fisher + (gradients**2).sum(-1)).mean()),
        )

    def saving(self, size: int) -> float:
        """Share of the variance with `rloo` that `optimal-loo` saves: a sum over every group of every prompt."""
        squares = {"rloo": 0.0, "optimal-loo": 0.0}
        signal = 0.0
        for chances, scores, rewards in zip(self.chances, self.scores, self.rewards, strict=True):
            gradient = np.zeros(scores.shape[1])
            for picks in itertools.product(range(len(chances)), repeat=size):
                index = list(picks)
                chance, r, psi = float(chances[index].prod()), rewards[index], scores[index]
                for name, weights in (("rloo", np.ones(size)), ("optimal-loo", (psi**2).sum(1))):
                    kept = [[j for j in range(size) if j != i] for i in range(size)]
                    baseline = np.array([np.average(r[others], weights=weights[others]) for others in kept])
                    pull = ((r - baseline)[:, None] * psi).mean(0)
                    squares[name] += chance * float(pull @ pull)
                    gradient += chance * pull / 2  # both are unbiased
            signal += float(gradient @ gradient)
        return (squares["rloo"] - squares["optimal-loo"]) / (squares["rloo"] - signal)

    def step(self, rng: np.random.Generator, number: int, prompts: int, size: int) -> dict[str, float]:
        """Scalars of one sampled step."""
        drawn = rng.integers(len(self.chances), size=prompts)
        actions = np.array([rng.choice(self.chances.shape[1], size=size, p=self.chances[one]) for one in drawn])
        scores = self.scores[drawn[:, None], actions].reshape(prompts * size, -1)
        rewards = self.rewards[drawn[:, None], actions]
        gram, grid = torch.from_numpy(scores @ scores.T), torch.from_numpy(rewards)
        found = block_scalars(group_blocks(gram, size), grid)
        saving = (found["gram/optimal_loo_saved"], found["gram/rloo_variance"])
        return line(number, noise_components(gram, grid), prompts, *saving)


def world(seed: int, signal: float) -> World:
    """Six prompts, four actions, rewards 0 or 1; `signal` scales what the prompts' features share."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(6, 4, 5)) + signal * rng.normal(size=(1, 4, 5))
    logits = rng.normal(size=(6, 4))
    chances = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    scores = features - (chances[..., None] * features).sum(1, keepdims=True)
    return World(scores, chances, np.tile([0.0, 1.0, 0.0, 1.0], (6, 1)))


def coverage(case: World, *, runs: int, steps: int, prompts: int = 8, size: int = 4) -> dict[str, float]:
    """Share of simulated runs whose interval holds the truth."""
    truth = case.components
    error = batch_mse(truth, prompts, size)
    known = {
        "snr": truth.gradient_squared / error,
        "noise_scale": prompts * size * error / truth.gradient_squared if truth.gradient_squared > 0 else math.inf,
        "best_group_size": max(2.0, 1 + math.sqrt(truth.group_baseline / truth.between_prompts)),
        "baseline_saving": case.saving(size),
    }
    rng, held = np.random.default_rng(7), dict.fromkeys(known, 0)
    for _ in range(runs):
        lines = [case.step(rng, step, prompts, size) for step in range(steps)]
        # the window is the last third; fill the first two with steps that are not used
        noise = run_noise([*lines, *lines, *lines], size)
        for name, value in known.items():
            held[name] += getattr(noise, name).low <= value <= getattr(noise, name).high
    return {name: count / runs for name, count in held.items()}


def check_coverage(signal: float, *, runs: int, steps: int) -> None:
    found = coverage(world(1, signal), runs=runs, steps=steps)
    slack = 3 * math.sqrt(0.95 * 0.05 / runs)  # three standard errors of the simulation
    for name, share in found.items():
        assert share >= 0.95 - slack - 0.03, (name, found)  # at most 3 points below the level for skewed estimates


@pytest.mark.parametrize("signal", [0.0, 1.0])
def test_intervals_cover_the_truth(signal):
    check_coverage(signal, runs=60, steps=8)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [5, 10, 40])
@pytest.mark.parametrize("signal", [0.0, 0.3, 1.0])
def test_intervals_cover_the_truth_over_many_runs(signal, steps):
    check_coverage(signal, runs=1000, steps=steps)
