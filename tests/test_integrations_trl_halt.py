"""A training that a finding stops, and advice from what TRL logged."""

import dataclasses
import inspect
import warnings
from typing import Any

import pytest

pytest.importorskip("trl")

from trl.trainer.grpo_config import GRPOConfig  # pyright: ignore[reportMissingImports]
from trl.trainer.grpo_trainer import GRPOTrainer  # pyright: ignore[reportMissingImports]

from scoregram.advice import advise
from scoregram.advice.settings import SETTINGS
from scoregram.checks import ScoregramError
from scoregram.integrations.trl import attach
from scoregram.training import TrainConfig
from tests.trl_cases import graded, trainer_for

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]


def nothing(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """A verifier that never finds an answer."""
    return [0.0 for _ in completions]


def said_while_training(trainer: Any, **asked: Any) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attached = attach(trainer, 1000, **asked)
        trainer.train()
    return attached, [str(one.message) for one in caught if "scoregram: the training is stopped" in str(one.message)]


def test_cards_name_settings_of_both_trainers():
    theirs = {field.name for field in dataclasses.fields(GRPOConfig)} | {*inspect.signature(GRPOTrainer).parameters}
    ours = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(TrainConfig)}
    attached = {f"attach(trainer, {name})" for name in inspect.signature(attach).parameters}
    for names in SETTINGS.values():
        assert names["scoregram"] in ours and names.get("trl", "seed") in theirs | attached


def test_a_critical_finding_stops_the_training_with_its_sentence(tmp_path):
    trainer = trainer_for("GRPO", tmp_path, rewards=nothing, max_steps=40)
    attached, said = said_while_training(trainer, halt_on="critical")
    assert attached.halted is not None and attached.halted.name == "constant reward"
    assert 10 <= trainer.state.global_step < 15  # as soon as ten logged steps decide
    assert len(said) == 1 and "Every rollout gets the reward 0" in said[0] and "Change: Check the reward" in said[0]
    assert attached.advice().findings[0].name == "constant reward"


def test_without_halt_on_the_training_ends_by_itself(tmp_path):
    trainer = trainer_for("GRPO", tmp_path, rewards=nothing, max_steps=14)
    attached, said = said_while_training(trainer)
    assert trainer.state.global_step == 14 and attached.halted is None and said == []


def test_a_rule_that_fails_does_not_stop_the_training(tmp_path, monkeypatch):
    def broken(*_: Any) -> Any:
        raise ValueError("a rule failed")

    monkeypatch.setattr("scoregram.integrations.trl.recording.advise_log", broken)
    trainer = trainer_for("GRPO", tmp_path, rewards=nothing, max_steps=3)
    attached, said = said_while_training(trainer, halt_on="critical")
    assert trainer.state.global_step == 3 and attached.halted is None and said == []
    assert "ValueError: a rule failed" in attached.failures


def test_a_shaped_reward_over_a_silent_one_is_a_phantom(tmp_path):
    trainer = trainer_for("GRPO", tmp_path, rewards=[nothing, graded], max_steps=14)
    attached, _ = said_while_training(trainer, out=tmp_path / "run")
    names = [one.name for one in attached.advice().findings]
    assert names[0] == "phantom signal"
    trainer.save_state()
    assert advise(tmp_path / "trainer").findings[0].name == "phantom signal"  # the same from trainer_state.json


def test_an_unknown_severity_is_refused(tmp_path):
    with pytest.raises(ScoregramError, match="halt_on must be one of critical, warning, note, got 'fatal'"):
        attach(trainer_for("GRPO", tmp_path), halt_on="fatal")


def test_attach_says_once_how_to_follow_the_run(tmp_path, capsys):
    attach(trainer_for("GRPO", tmp_path / "a", rewards=nothing), 10)
    assert "scoregram view" not in capsys.readouterr().err
    attach(trainer_for("GRPO", tmp_path / "b", rewards=nothing), 10, out=tmp_path / "run")
    assert capsys.readouterr().err.count(f"Follow it in a browser: scoregram view {tmp_path / 'run'}") == 1
