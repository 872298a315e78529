"""The four indicators of a run: what they say, and when they say nothing."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy.stats import t as student

from scoregram.exhibits import Estimate, cell_text
from scoregram.reading import (
    RunReading,
    bounded_band,
    indicators,
    lost_randomness,
    paired_gain,
    read_run,
    running_curve,
    steps_to_show,
)
from scoregram.reading.indicators import _asked, _count, _needs, _signal, last_live_share
from scoregram.report.page import sparkline
from scoregram.runs import RunWriter, open_run
from tests.report_cases import CONFIG, write_run


def shown(folder):
    return {one.name: one for one in indicators(read_run(open_run(folder)))}


def logged(folder, lines):
    with RunWriter.create(folder, CONFIG, environment={}) as writer:
        for step, line in enumerate(lines, start=1):
            writer.write_metrics(step, line)
    return shown(folder)


@pytest.mark.parametrize(("first", "last", "state"), [(0.2, 0.8, "good"), (0.8, 0.2, "act"), (0.5, 0.5, "watch")])
def test_learning_compares_the_first_third_with_the_last(first, last, state, tmp_path):
    noise = [0.01, -0.01, 0.0]
    lines = [{"reward": first + noise[i % 3]} for i in range(6)] + [{"reward": last + noise[i % 3]} for i in range(6)]
    found = logged(tmp_path / "run", lines)["learning"]
    assert found.state == state and found.headline == f"training reward {first:.2f} → {last:.2f}"


def test_a_few_logged_rewards_are_read_along_a_line(tmp_path):
    rewards = [0.42, 0.71, 0.93, 0.97, 0.98, 0.99]
    found = logged(tmp_path / "run", [{"reward": reward} for reward in rewards])["learning"]
    line, covariance = np.polyfit(range(6), rewards, 1, cov=True)
    half = 5 * student.ppf(0.975, 4) * math.sqrt(covariance[0, 0])
    assert (found.change.value, found.change.low) == pytest.approx((5 * line[0], 5 * line[0] - half), rel=1e-5)
    assert found.state == "good" and found.headline == "training reward 0.42 → 0.99"
    assert "Change 0.57, last minus first of 6 logged values" in found.sentence
    assert f"A straight line through all of them rises by {cell_text(found.change)};" in found.sentence


def test_the_share_of_live_groups_is_that_of_all_logged_steps(tmp_path):
    write_run(tmp_path / "run")
    run = read_run(open_run(tmp_path / "run"))
    lines = [{"step": step, "reward": 0.5, "live_groups": 1 if step > 6 else 4, "groups": 4} for step in range(1, 10)]
    found = last_live_share(dataclasses.replace(run, lines=lines))
    assert found.value == 0.25


def test_accuracy_on_test_problems_comes_first(tmp_path):
    write_run(tmp_path / "run")
    found = shown(tmp_path / "run")["learning"]
    assert found.headline == "test accuracy 0.25 → 0.75" and found.state == "good"  # 0.5 ± √2 · 0.1


def told_parts(found):
    return found.quantity, found.is_test, found.span


def test_what_is_learnt_and_between_which_points_is_told_apart_from_the_words(tmp_path):
    write_run(tmp_path / "run")
    accuracy = shown(tmp_path / "run")["learning"]
    assert told_parts(accuracy) == ("test accuracy", True, "first to the last evaluation")
    sampled = evaluated(tmp_path / "sampled", (0.2, 0.22), (0.3, 0.3))
    assert told_parts(sampled) == ("test reward", True, "first to the last evaluation")
    assert sampled.arrow == "0.200 → 0.220"
    thirds = logged(tmp_path / "thirds", [{"reward": 0.1 * step} for step in range(9)])["learning"]
    assert told_parts(thirds) == ("training reward", False, "first to the last third of the steps")
    few = logged(tmp_path / "few", [{"reward": 0.1 * step} for step in range(6)])["learning"]
    assert told_parts(few) == ("training reward", False, "first to the last logged value")
    for found in (accuracy, sampled, thirds, few):
        assert found.headline == f"{found.quantity} {found.arrow}"
    early = logged(tmp_path / "early", [{"reward": 0.1}])
    assert all((*told_parts(found), found.arrow) == ("", False, "", "") for found in early.values())


def test_every_evaluation_has_its_accuracy_interval_and_problems(tmp_path):
    write_run(tmp_path / "run")
    first, last = read_run(open_run(tmp_path / "run")).greedy_accuracies
    assert (first.step, first.accuracy, first.problems) == (0, Estimate(0.25, 0.25 - 0.1, 0.25 + 0.1), 8)
    assert (last.step, last.accuracy, last.problems) == (6, Estimate(0.75, 0.75 - 0.1, 0.75 + 0.1), 8)
    lines = [{"step": 1, "eval/accuracy": 0.5}, {"step": 2, "eval/accuracy": math.nan}, {"step": 3, "reward": 1.0}]
    (bare,) = RunReading({}, (), lines, []).greedy_accuracies
    assert (bare.step, bare.accuracy.value, bare.problems) == (1, 0.5, 0) and math.isnan(bare.accuracy.low)


def test_a_few_steps_have_no_trend(tmp_path):
    assert logged(tmp_path / "run", [{"reward": 0.1}] * 5)["learning"].state == "unknown"


@pytest.mark.parametrize(("live", "state"), [(1, "act"), (2, "watch"), (3, "watch"), (6, "good")])
def test_prompts_that_teach(live, state, tmp_path):
    def rewards(step, prompt, generator):
        place = 3 * (step - 5) + prompt  # 0 to 5 in the last third
        return torch.tensor([1.0, 0.0, 0.0, 0.0] if 0 <= place < live else [0.0] * 4, dtype=torch.float64)

    write_run(tmp_path / "run", rewards=rewards)
    found = shown(tmp_path / "run")["prompts that teach"]
    assert found.state == state and found.headline == f"{live / 6:.0%} of groups are live"
    assert ("The interval includes the target." in found.sentence) == (live == 3)
    assert "graded" not in found.sentence


def test_graded_rewards_make_groups_live_easily(tmp_path):
    write_run(tmp_path / "run", rewards=lambda step, prompt, generator: torch.tensor([0.9, 1.0, 1.0, 1.0]).double())
    assert "Rewards are graded" in shown(tmp_path / "run")["prompts that teach"].sentence


@pytest.mark.parametrize(("finished", "state"), [(0.95, "good"), (0.8, "watch"), (0.5, "act")])
def test_truncation(finished, state, tmp_path):
    found = logged(tmp_path / "run", [{"reward": 0.0, "finished": finished}] * 4)["truncated or clipped"]
    assert found.state == state and found.headline == f"{1 - finished:.0%} of rollouts truncated"
    assert found.curve.raw[0] == pytest.approx(1 - finished)


def test_names_of_another_trainer(tmp_path):
    lines = [{"reward": 0.0, "completions/clipped_ratio": 0.4, "clip_ratio": 0.02}] * 3
    found = logged(tmp_path / "run", lines)["truncated or clipped"]
    assert found.state == "act" and "2.0% of the importance ratios were clipped" in found.sentence


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"inner_updates": 1}, "With one update per batch every importance ratio is 1, so none is clipped."),
        ({"arguments": {"num_iterations": 2}}, "Clipped ratios were not logged."),
        ({"arguments": {"max_completion_length": 8}}, "20% of rollouts truncated at 8 tokens"),
        ({"max_new_tokens": 0}, "20% of rollouts truncated"),
    ],
)
def test_limits_are_told_as_the_config_has_them(config, told, tmp_path):
    logged(tmp_path / "run", [{"reward": 0.0, "finished": 0.8}] * 4)
    run = dataclasses.replace(read_run(open_run(tmp_path / "run")), config=config)
    found = indicators(run)[3]
    assert told in (found.sentence if "." in told else (found.headline,))


def test_few_measured_steps_leave_the_signal_unknown(tmp_path):
    write_run(tmp_path / "run", steps=6)
    found = shown(tmp_path / "run")["signal in a step"]
    assert (
        found.state == "unknown"
        and "takes 5 steps in the last third of the measured ones; here are 2." in found.sentence
    )


@pytest.mark.parametrize(("high", "headline"), [(math.inf, "not resolved"), (8.0, "at most 8.00")])
def test_no_number_of_rollouts_is_divided_by_infinity(high, headline, tmp_path):
    """Five steps whose error differs so much that the signal to noise may have any value."""
    write_run(tmp_path / "run", steps=15)
    run = read_run(tmp_path / "run")
    scale = Estimate(1597.0, 0.0 if math.isinf(high) else run.batch_size / high, math.inf)
    run.__dict__["summary"] = dataclasses.replace(run.summary, snr=Estimate(0.0401, -high, high), noise_scale=scale)
    found = {one.name: one for one in indicators(run)}["signal in a step"]
    assert found.headline.startswith(f"signal to noise {headline}")
    assert "∞" not in found.headline + found.sentence and " 0.0 rollouts" not in found.sentence
    assert ("Measure more steps" in found.sentence) == math.isinf(high)


def test_a_policy_that_is_less_random_is_told_with_its_numbers(tmp_path):
    lines = [{"reward": 0.0, "token_log_prob": -1.0 + step / 20, "finished": 0.5 + step / 20} for step in range(9)]
    logged(tmp_path / "run", lines)
    told = lost_randomness(read_run(open_run(tmp_path / "run")))
    fell = "first to last third: entropy 0.95 → 0.65, truncated 45.0% → 15.0%"
    assert told == f"The policy may only have become less random ({fell})."
    logged(tmp_path / "still", [{"reward": 0.0, "token_log_prob": -1.0, "finished": 1.0}] * 9)
    assert lost_randomness(read_run(open_run(tmp_path / "still"))) == ""


def test_what_a_run_lacks_is_not_known(tmp_path):
    RunWriter.create(tmp_path / "run", CONFIG, environment={}).close()
    assert {one.state for one in shown(tmp_path / "run").values()} == {"unknown"}


def test_a_failed_self_check_withholds_the_signal(tmp_path):
    write_run(tmp_path / "run", errors=dict.fromkeys(range(1, 7), 1.0))
    found = shown(tmp_path / "run")["signal in a step"]
    assert found.state == "unknown" and "self-check failed" in found.headline


def test_what_a_step_needs_in_words():
    assert _needs(Estimate(220.4, 110.0, 829.0), 64) == "needs 220 [110, 829] rollouts, you use 64"
    assert _needs(Estimate(220.0, 110.0, math.inf), 64) == "needs at least 110 rollouts, you use 64"
    assert _needs(Estimate(math.inf), 64) == "has no signal that 64 rollouts resolve"


def test_the_gain_needs_two_evaluations():
    assert paired_gain({"test": {1: {"a": 0.0}}}, "test") is None
    gain = paired_gain({"test": {1: {"a": 0.0, "b": 1.0}, 5: {"a": 1.0, "c": 0.0}}}, "test")
    assert gain is not None and gain.problems == 1 and gain.change.value == 1


def evaluated_run(folder, sampled, greedy, end=2):
    """A run with two evaluations: rewards of 200 problems sampled, and greedy accuracies with their intervals."""
    write_run(folder, steps=2)
    run = read_run(open_run(folder))
    rewards = {
        step: {f"p{i}": float(i < share * 200) for i in range(200)}
        for step, share in zip((0, end), sampled, strict=True)
    }
    lines = [
        {
            "step": step,
            "reward": 0.5,
            "eval/accuracy": one,
            "eval/accuracy_low": one - 0.02,
            "eval/accuracy_high": one + 0.02,
        }
        for step, one in zip((0, end), greedy, strict=True)
    ]
    return dataclasses.replace(run, lines=lines, tests={"test": rewards})


def evaluated(folder, sampled, greedy):
    return indicators(evaluated_run(folder, sampled, greedy))[0]


def test_a_longer_run_is_as_long_as_a_greedy_rise_needs_to_show(tmp_path):
    """Sampled +0.02 in 1000 steps; the greedy change has a half-width of 0.02 √2, so one error is 0.0144."""
    wanted = 1000 * 2.8 * (0.02 * math.sqrt(2) / 1.96) / 0.02
    assert wanted == pytest.approx(2020, abs=1)
    assert steps_to_show(evaluated_run(tmp_path / "slow", (0.2, 0.22), (0.3, 0.3), 1000)) == 2100
    for sampled, greedy in (
        ((0.2, 0.2), (0.3, 0.3)),  # nothing rises
        ((0.2, 0.22), (0.3, 0.5)),  # the greedy accuracy rises already
        ((0.2, 0.3), (0.3, 0.3)),  # such a rise would have shown by now
        ((0.2, 0.2 + 1e-9), (0.3, 0.3)),
    ):
        other = evaluated_run(tmp_path / f"{sampled}-{greedy}", sampled, greedy, 1000)
        assert steps_to_show(other) is None


def test_what_only_sampled_rollouts_gain_is_to_be_watched(tmp_path):
    flat = evaluated(tmp_path / "flat", (0.2, 0.4), (0.3, 0.3))
    assert flat.state == "watch" and "Greedy accuracy 0.300 → 0.300, no rise can be shown." in flat.sentence
    both = evaluated(tmp_path / "both", (0.2, 0.22), (0.3, 0.5))
    assert both.state == "good" and both.headline == "test reward 0.200 → 0.220"
    assert both.curve.raw == (0.2, 0.22) and "no rise" not in both.sentence


def test_a_band_ends_where_the_quantity_does():
    curve = bounded_band(running_curve(range(30), [0.0, 1.0] * 15), 0.0, 1.0)
    assert curve.is_smoothed and min(curve.low) == 0 and max(curve.high) == 1


def test_the_signal_is_told_in_the_unit_of_its_curve_and_of_its_headline(tmp_path):
    write_run(tmp_path / "run", steps=18)
    run = read_run(open_run(tmp_path / "run"))
    found = indicators(run)[2]
    snr, scale = run.summary.snr, run.summary.noise_scale
    assert scale.high == math.inf and scale.low == pytest.approx(run.batch_size / snr.high)
    assert f"{cell_text(snr.high)} is the upper end of its 95 % interval" in found.sentence
    assert f"{run.batch_size:g} / {cell_text(snr.high)} = {_count(scale.low)} rollouts or more." in found.sentence
    assert found.headline.startswith(f"signal to noise at most {cell_text(snr.high)}")
    # the line of the tile is that of the figure, below 0 too
    assert found.curve.mean == running_curve(*run.series("gram/snr")).mean and min(found.curve.mean) < 0
    drawn = sparkline(found)
    assert drawn is not None and found.target == 1
    heights = {label: height for height, label in drawn["ticks"]}
    # the box has 76 units between the least value and the target; 0 is above the least value
    zero = 78 - 76 * (0 - min(found.curve.mean)) / (1 - min(found.curve.mean))
    assert heights["1"] == 2 == drawn["target"] and heights["0"] == pytest.approx(zero, abs=0.05) and zero < 78


def test_the_greedy_accuracy_stands_beside_the_sampled_reward_with_both_intervals(tmp_path):
    run = evaluated_run(tmp_path / "run", (0.2, 0.4), (0.3, 0.3), 60)
    found = indicators(run)[0]
    assert found.beside.mean == (0.3, 0.3) and found.beside_name == "test accuracy, greedy"
    ends = zip(found.curve.low, found.curve.mean, found.curve.high, strict=True)
    assert all(low < mean < high for low, mean, high in ends)
    drawn = sparkline(found)
    assert drawn is not None and drawn["beside"] and drawn["band"].count(",") == 4  # two evaluations, both ends
    alone = dataclasses.replace(run, lines=[line for line in run.lines if "eval/accuracy" not in line])
    assert not indicators(alone)[0].beside


def test_a_resolved_signal_is_told_with_its_estimate():
    told = _signal(Estimate(0.5, 0.25, 1.0), Estimate(128.0, 64.0, 256.0), 64)
    assert told == "Signal to noise is 0.50 [0.25, 1.00], about the rollouts you use over those needed."


def test_live_groups_of_some_steps_say_at_how_many(tmp_path):
    lines = [{"reward": 0.5} | ({"live_groups": 3, "groups": 4} if step % 2 else {}) for step in range(12)]
    # steps 2, 4, … 12 have groups; the last third is 9 to 12
    assert ", at 2 of the 4 steps." in logged(tmp_path / "some", lines)["prompts that teach"].sentence
    every = [{"reward": 0.5, "live_groups": 3, "groups": 4}] * 12
    assert "steps" not in logged(tmp_path / "all", every)["prompts that teach"].sentence


def test_a_step_of_much_noise_is_told_what_to_do():
    assert _asked(Estimate(50.0, 40.0, 60.0), 64).startswith("Enough rollouts: a step has more signal than noise")
    for open_ in (Estimate(60.0, 50.0, 70.0), Estimate(math.inf, 246.0, math.inf)):
        told = _asked(open_, 64)
        assert told == "Undecided: to know whether more rollouts per step would pay takes more measured steps."
    assert _asked(Estimate(900.0, 300.0, 2000.0), 64).startswith("Use more rollouts per step")
    told = "More rollouts per step would help; it is urgent once the whole interval lies above 4 times as many."
    assert _asked(Estimate(362.0, 211.0, 1790.0), 64) == told
