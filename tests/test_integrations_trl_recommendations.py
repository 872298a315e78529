"""Recommendations every N steps: printed, logged, stored, shown as not applied, computed again, never in the way."""

import math
import pickle
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from scoregram.advice import Diagnosis, RunFinding
from scoregram.checks import ScoregramError
from scoregram.exhibits import Estimate, Table
from scoregram.integrations.trl import attach
from scoregram.integrations.trl.recommendations import (
    batch_recommendation,
    recommendation,
    recommendation_line,
    replayed_recommendations,
)
from scoregram.integrations.trl.step import MeasuredStep
from scoregram.reading import Recommendation, RunNoise, read_run, recorded_recommendations
from scoregram.report.prompt_exhibits import control_exhibits, control_text
from scoregram.statistics import NoiseComponents
from scoregram.training import GroupSizeControl
from tests.trl_cases import run_in, trainer_for, weights_of

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

NOISE = {
    "gram/gradient_squared": 1.0,
    "gram/between_prompts": 0.01,
    "gram/within_prompt": 4.0,
    "gram/group_baseline": 9.0,
}
"""`c1 R + c2 + c3/(R-1)`: 7.04 for groups of 4, 5.37 for 8, 4.76 for 16."""


def measured(step: int, passed: bool = True, **changes: float) -> MeasuredStep:
    scalars = NOISE | {"groups": 16.0} | changes
    return MeasuredStep(step, scalars, 1e-7, passed, ())


def diagnosis(*findings: RunFinding) -> Diagnosis:
    return Diagnosis(source="", findings=findings, fine=(), undecided={})


def found(name: str, severity: Any = "warning") -> RunFinding:
    return RunFinding(name=name, severity=severity, sentence=f"What {name} is.", evidence="")


def same(one: Recommendation, other: Recommendation) -> bool:
    """Whether both name the same sizes for the same reasons; undefined ratios are equal."""
    sizes = (replace(each, findings={}, worst="") for each in (one, other))
    first, second = (torch.tensor([*map(float, each.scalars().values())], dtype=torch.float64) for each in sizes)
    return one.sizes == other.sizes and torch.equal(first.nan_to_num(-1.0), second.nan_to_num(-1.0))


def test_the_sizes_are_those_of_the_controller_and_of_the_finding_on_the_batch():
    readings = [measured(step) for step in range(1, 13)]
    noise = RunNoise(steps=5, noise_scale=Estimate(900.0, 400.0, math.inf))
    made = recommendation(
        12, diagnosis(found("batch size"), found("truncation")), readings, noise, group_size=4, seed=3
    )
    control = GroupSizeControl((4, 8, 16, 32), 3, 4)
    learnt = [control.learn(step, NoiseComponents(*NOISE.values())) for step in range(1, 11)][-1]
    assert made.group_size is not None and learnt is not None and made.batch_size is not None
    assert (made.group_size.recommended, made.group_size.best) == (learnt.recommended, learnt.best) == (8, learnt.best)
    assert made.group_size.steps == 12
    assert (made.batch_size.current, made.batch_size.recommended) == (64, 256)  # far below the noise scale: four times
    assert made.findings == {"warning": 2} and made.worst == "truncation (warning): What truncation is."
    line = recommendation_line(made)
    assert line.startswith("scoregram, step 12, recommended and not applied: group size 4 becomes 8: groups of ")
    assert "rollouts per step 64 become 256: the noise scale is 900" in line and line.endswith("What truncation is.")
    assert "\n" not in line


def test_steps_whose_self_check_failed_do_not_count():
    readings = [measured(step, passed=step > 5) for step in range(1, 13)]
    made = recommendation(12, diagnosis(), readings, RunNoise(steps=0), group_size=4, seed=0)
    assert made.group_size is not None and made.group_size.steps == 7
    assert "stays 4: 7 measured steps are too few" in made.sentence
    assert "rollouts per step stay 64: too few steps are measured" in made.sentence
    assert made.sentence.endswith("no finding")


def test_a_training_without_noise_still_hears_of_findings():
    lost = [replace(measured(step), scalars={"groups": 2.0}) for step in range(1, 13)]  # rows of a loss
    made = recommendation(12, diagnosis(found("NaN", "critical")), lost, RunNoise(steps=0), group_size=4, seed=0)
    assert made.group_size is None and made.batch_size is None
    assert made.sentence == "the noise of these steps cannot be measured; NaN (critical): What NaN is."
    assert "control/next_group_size" not in made.scalars() and made.scalars()["control/critical_findings"] == 1


@pytest.mark.parametrize(
    ("signal", "rollouts", "told"),
    [
        (Estimate(1 / 64, 1 / 100, 1 / 40), 64, "rollouts per step stay 64: the noise scale is 64"),
        (Estimate(1.0, 0.5, 2.0), 8, "rollouts per step 64 become 8: the noise scale is 1"),
        (Estimate(0.0, 0.0, 0.0), 64, "no signal that more of them could resolve; check the reward"),
        (Estimate(0.01), 64, "too few steps are measured"),
    ],
)
def test_the_number_of_rollouts_follows_the_interval_of_the_noise_scale(signal, rollouts, told):
    advice = batch_recommendation(signal, 4, 64)
    assert advice.recommended == rollouts and told in advice.sentence


def test_a_recommendation_reaches_log_folder_page_and_terminal(tmp_path, capsys):
    trainer = trainer_for("GRPO", tmp_path, max_steps=14, logging_steps=1)
    attached = attach(trainer, 1, out=tmp_path / "run", advise_every=6)
    trainer.train()
    printed = [line for line in capsys.readouterr().err.splitlines() if line.startswith("scoregram, step")]
    assert [one.step for one in attached.recommendations] == [6, 12] and attached.failures == []
    assert printed == [recommendation_line(one) for one in attached.recommendations]
    run = read_run(tmp_path / "run")
    recorded = recorded_recommendations(run.lines)
    assert len(recorded) == 2 and all(map(same, attached.recommendations, recorded))
    assert all(one.group_size is not None and one.batch_size is not None for one in recorded)
    assert recorded[1].group_size is not None and recorded[1].group_size.steps == 12
    again = replayed_recommendations(run.config, run.lines)
    assert len(again) == 2 and all(map(same, again, recorded))
    logged = {line["step"]: line for line in trainer.state.log_history if "scoregram/control/batch_size" in line}
    assert [*logged] == [6, 12] and logged[12]["scoregram/control/applied"] == 0
    assert logged[12]["scoregram/control/next_group_size"] == recorded[1].group_size.recommended
    (table,) = control_exhibits(run)
    assert (
        isinstance(table, Table) and table.id == "control-recommendations" and [row[0] for row in table.rows] == [6, 12]
    )
    assert "not applied" in table.title and recorded[1].group_size.sentence in str(table.rows[1][-1])
    assert control_text(run.config) == "Recommended by `attach(trainer, advise_every=6)`, not applied."


def test_without_it_nothing_is_recorded(tmp_path, capsys):
    trainer = trainer_for("GRPO", tmp_path, max_steps=2)
    attached = attach(trainer, 1, out=tmp_path / "run")
    trainer.train()
    assert attached.recommendations == [] and "recommended" not in capsys.readouterr().err
    assert not [name for line in run_in(tmp_path / "run").metrics() for name in line if name.startswith("control/")]


def test_a_training_with_recommendations_is_the_same_training(tmp_path):
    weights = []
    for every in (None, 1):
        trainer = trainer_for("GRPO", tmp_path / str(every), max_steps=3)
        attached = attach(trainer, 1, fused=False, advise_every=every)
        trainer.train()
        assert len(attached.recommendations) == (3 if every else 0)
        weights.append(weights_of(trainer))
    assert torch.equal(*weights)


@pytest.mark.parametrize("place", ["advise_log", "advise"])
def test_an_error_in_it_does_not_stop_the_training(place, tmp_path, monkeypatch):
    def broken(*_: Any) -> Any:
        raise ValueError("a rule failed")

    monkeypatch.setattr(f"scoregram.integrations.trl.recording.{place}", broken)
    trainer = trainer_for("GRPO", tmp_path, max_steps=3)
    attached = attach(trainer, 1, out=tmp_path / "run" if place == "advise" else None, advise_every=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    assert trainer.state.global_step == 3 and attached.recommendations == []
    assert "ValueError: a rule failed" in attached.failures
    assert sum("a rule failed" in str(one.message) for one in caught) == 1


def test_a_resumed_training_remembers_the_noise_before(tmp_path):
    first = trainer_for("GRPO", tmp_path, max_steps=4, save_strategy="steps", save_steps=4)
    attach(first, 1, out=tmp_path / "run", advise_every=4)
    first.train()
    second = trainer_for("GRPO", tmp_path, max_steps=8)
    attached = attach(second, 1, out=tmp_path / "run", advise_every=4, resume=True)
    second.train(resume_from_checkpoint=str(tmp_path / "trainer" / "checkpoint-4"))
    (made,) = attached.recommendations
    run = read_run(tmp_path / "run")
    assert made.group_size is not None and made.group_size.steps == 8
    (_, again) = replayed_recommendations(run.config, run.lines)
    assert same(made, again) and same(made, recorded_recommendations(run.lines)[1])


def test_all_processes_get_the_recommendation_of_the_first(tmp_path):
    """It is broadcast, so it must survive pickling."""
    noise = RunNoise(steps=5, noise_scale=Estimate(900.0, 400.0, math.inf))
    made = recommendation(1, diagnosis(found("NaN", "critical")), [measured(1)], noise, group_size=4, seed=0)
    assert same(pickle.loads(pickle.dumps(made)), made)


@pytest.mark.parametrize("every", [0, -1, 2.5, True, "10"])
def test_a_wrong_interval_is_refused(every, tmp_path, unchecked_shapes):
    with pytest.raises(ScoregramError, match="advise_every must be a whole number of steps, at least 1, got"):
        attach(trainer_for("GRPO", tmp_path), advise_every=every)
