"""A measurement that cannot be trusted says so, and no error in a measurement changes the training."""

import math
import re
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from scoregram.checks import ScoregramError
from scoregram.integrations.trl import attach, separate_pass, step
from scoregram.integrations.trl.support import NEWEST_TESTED, OLDEST_TESTED, WRAPPED_METHODS
from scoregram.reading import STEP_NAMES, read_run
from tests.trl_cases import run_in, trained, trainer_for, weights_of

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error:scoregram"),
]


def test_dropout_gives_a_warning_and_a_mark(tmp_path):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, lora_alpha=64, lora_dropout=0.3, target_modules=["q_proj", "down_proj"])
    trainer = trainer_for("GRPO", tmp_path, peft=lora, max_steps=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attached = trained(trainer, out=tmp_path / "run")
    said = [str(one.message) for one in caught]
    assert any(text.startswith("scoregram: at step 2 ") and "cause: active dropout" in text for text in said)
    assert not attached.readings[1].passed
    assert {record.statistics["check_passed"] for record in run_in(tmp_path / "run").groups({2})} == {0.0}
    run = run_in(tmp_path / "run")
    assert run.series("check/passed")[1][-1] == 0
    assert 2 in run.series("gram/score_norm", failed=True)[0]
    assert "Likely cause: active dropout" in attached.not_fused


def test_scores_do_not_explain_a_kl_term(tmp_path):
    trainer = trainer_for("GRPO", tmp_path, max_steps=6, beta=2.0)
    with pytest.warns(UserWarning, match=r"scoregram: the loss has a KL term .beta=2.,.*mode='loss'") as caught:
        attached = attach(trainer, 1, out=tmp_path / "run")
    assert len(caught) == 1
    trainer.train()  # a warning would be an error here: `attach` told it once for all steps
    failed = [reading.step for reading in attached.readings if not reading.passed]
    assert failed and attached.readings[0].passed and attached.readings[-1].step in failed
    assert attached.trust.failed == set(failed) == read_run(run_in(tmp_path / "run")).trust.failed
    assert_failed_steps_are_apart(attached, trainer)


def assert_failed_steps_are_apart(attached: Any, trainer: Any) -> None:
    """In the printout, the summary and the trainer's log, numbers of failed steps do not look like others."""
    text, count = str(attached), len(attached.readings)
    assert f"Self-check passed at {count - len(attached.trust.failed)} of {count} measured steps, worst" in text
    assert re.search(r"^effective rank of a group +\S+ +failed +–$", text, re.MULTILINE)
    rows = {row[0]: row[1:] for row in attached.summary().rows}
    assert math.isnan(rows["gram/update_norm"][1]) and math.isnan(rows["gram/update_norm"][2])
    assert not math.isnan(rows["reward"][2])
    for line in (line for line in trainer.state.log_history if "loss" in line):
        is_failed = line["step"] in attached.trust.failed
        assert ("scoregram/gram/update_norm" in line) != is_failed
        assert ("scoregram/failed/gram/update_norm" in line) == is_failed
        assert line["scoregram/check/passed"] == 1 - is_failed and "scoregram/reward" in line


def test_kl_in_the_rewards_or_in_a_loss_that_is_measured_whole_is_no_warning(tmp_path):
    attach(trainer_for("RLOO", tmp_path, max_steps=1, beta=0.5), mode="scores").detach()
    attach(trainer_for("GRPO", tmp_path, max_steps=1, beta=0.5), mode="loss").detach()


def test_names_of_the_trainer_keep_the_trainers_values(tmp_path):
    for mode in ("scores", "loss"):
        trainer = trainer_for("GRPO", tmp_path, max_steps=3, logging_steps=2)
        attached = trained(trainer, mode=mode, every=1, out=tmp_path / mode)
        logged = {line["step"]: line for line in trainer.state.log_history if "loss" in line}
        written = {line["step"]: line for line in run_in(tmp_path / mode).metrics()}
        theirs = {name for line in logged.values() for name in line if not name.startswith("scoregram/")} - {"step"}
        assert {"reward", "reward_std"} <= theirs and sorted(written) == [1, 2, 3] and sorted(logged) == [2]
        assert {name: written[2][name] for name in theirs} == {name: logged[2][name] for name in theirs}
        # the trainer logged nothing at step 1: its names are not filled with ours
        assert not theirs & written[1].keys() and "scoregram/reward" in written[1]
        for reading in attached.readings:
            for name, value in reading.scalars.items():
                line = written[reading.step]
                stored = line[f"scoregram/{name}"] if name in theirs else line[name]
                assert stored == pytest.approx(value, nan_ok=True) or math.isinf(value), name


def test_the_log_has_no_mean_of_ratios(tmp_path, monkeypatch):
    """Half of the steps resolve no signal: their noise scale is infinite, and the mean of the others is meaningless."""
    trainer = trainer_for("GRPO", tmp_path, max_steps=14, logging_steps=7, learning_rate=0.0)
    attached = trained(trainer, fused=False)
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["step"] for line in lines] == [7, 14]
    ratios = {f"scoregram/{name}" for name in STEP_NAMES}
    assert not any(ratios & line.keys() for line in lines)
    halves = [attached.readings[:7], attached.readings[7:]]
    for line, half in zip(lines, halves, strict=True):
        squares = [reading.scalars["gram/gradient_squared"] for reading in half]
        assert line["scoregram/gram/gradient_squared"] == pytest.approx(sum(squares) / 7)  # a mean of what adds up
        assert line["scoregram/check/relative_error"] == max(reading.error for reading in half)
        assert line["scoregram/check/passed"] == 1 and line["scoregram/check/rollouts"] == 7 * 8
    pooled = {f"scoregram/{name}": value for name, value in attached.noise().scalars().items()}
    assert not any(name.startswith("scoregram/run/") for name in lines[0])  # 3 steps are pooled: no interval
    assert attached.noise().steps == 5 and "scoregram/run/snr" in pooled
    assert {name: value for name, value in lines[1].items() if name.startswith("scoregram/run/")} == pytest.approx(
        pooled
    )


def test_what_keeps_a_step_from_being_fused_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "scoregram.integrations.trl.step_fusion.bytes_of_pass", lambda model, rollouts, tokens, **_: rollouts * 1e9
    )
    attached = trained(trainer_for("GRPO", tmp_path, max_steps=2), memory_gb=7)
    assert [reading.scalars["check/rollouts"] for reading in attached.readings] == [8, 8]
    assert attached.not_fused is not None and attached.not_fused.startswith("memory is short: all rollouts of the step")
    assert attached.not_fused.endswith("the limit is 7 GB; steps are measured in a separate pass")


def test_an_entropy_bonus_gives_a_warning(tmp_path):
    try:
        trainer = trainer_for("GRPO", tmp_path, max_steps=1, entropy_coef=1.0)
    except TypeError:
        pytest.skip("this version of TRL has no entropy bonus")
    with pytest.warns(UserWarning, match="scoregram: at step 1 .* Likely cause: an entropy bonus"):
        attached = trained(trainer, mode="loss")
    assert attached.readings[0].error > 1e-3


def test_autocast_gives_a_warning_below_its_rounding(tmp_path):
    trainer = trainer_for("GRPO", tmp_path, max_steps=1, bf16=True)
    with pytest.warns(UserWarning, match="autocast to bf16"):
        attached = trained(trainer, tolerance=1e-7)
    assert 1e-7 < attached.readings[0].error < 5e-2
    assert trained(trainer_for("GRPO", tmp_path, max_steps=1, bf16=True)).readings[0].passed


def test_a_failing_measurement_does_not_change_the_training(tmp_path, monkeypatch):
    plain, measured = (trainer_for("GRPO", tmp_path, max_steps=3) for _ in range(2))
    torch.manual_seed(7)
    plain.train()

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(step, "measure_separately", broken)
    torch.manual_seed(7)
    with pytest.warns(UserWarning, match="skipped; the training goes on. RuntimeError: no such kernel") as caught:
        attached = trained(measured)
    assert sum("was skipped" in str(one.message) for one in caught) == 1
    assert len(attached.failures) == 3 and attached.readings == []
    assert torch.equal(weights_of(plain), weights_of(measured))


def test_memory_is_bounded(tmp_path, monkeypatch):
    whole = trained(trainer_for("GRPO", tmp_path, max_steps=1), out=tmp_path / "whole")
    monkeypatch.setattr(
        "scoregram.integrations.trl.separate_pass.bytes_of_pass", lambda model, rollouts, tokens, **_: rollouts * 1e9
    )
    with pytest.warns(UserWarning, match="step 1 was not measured: one group alone would take more than 3.5 GB"):
        none = trained(trainer_for("GRPO", tmp_path, max_steps=1), memory_gb=3.5)
    assert none.readings == [] and none.failures == [] and [skipped.step for skipped in none.skipped] == [1]
    assert str(none).endswith(
        "Steps not measured: 1. The last one is step 1, because "
        "one group alone would take more than 3.5 GB by estimate."
    )
    split = trained(trainer_for("GRPO", tmp_path, max_steps=1), memory_gb=5, out=tmp_path / "split")
    assert split.readings[0].error <= 1e-5
    assert math.isnan(split.readings[0].scalars["gram/update_norm"]) != math.isnan(
        whole.readings[0].scalars["gram/update_norm"]
    )
    pairs = zip(run_in(tmp_path / "whole").groups(), run_in(tmp_path / "split").groups(), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one.gram, other.gram, rtol=1e-5, atol=1e-5 * float(one.gram.max()))


def test_score_norms_for_an_estimator_stay_within_memory_too(tmp_path, monkeypatch):
    whole = trained(trainer_for("GRPO", tmp_path, max_steps=1), estimator="optimal-loo", out=tmp_path / "whole")
    sizes, inner = [], separate_pass.measure_gram
    monkeypatch.setattr(separate_pass, "bytes_of_pass", lambda model, rollouts, tokens, **_: rollouts * 1e9)
    monkeypatch.setattr(
        separate_pass, "measure_gram", lambda **given: sizes.append(len(given["input_ids"])) or inner(**given)
    )
    trainer = trainer_for("GRPO", tmp_path, max_steps=1)
    split = trained(trainer, estimator="optimal-loo", out=tmp_path / "split", memory_gb=5)
    assert sizes == [5, 3] and whole.failures == split.failures == []
    for one, other in zip(run_in(tmp_path / "whole").groups(), run_in(tmp_path / "split").groups(), strict=True):
        torch.testing.assert_close(one.advantages, other.advantages, rtol=1e-5, atol=1e-6)
    trainer = trainer_for("GRPO", tmp_path, max_steps=1)
    attach(trainer, estimator="optimal-loo", memory_gb=0.5)
    with pytest.raises(ScoregramError, match=r"estimator='optimal-loo'.: each rollout must fit into memory alone"):
        trainer.train()


def test_a_loss_without_log_probabilities_is_measured_without_a_check(tmp_path):
    import trl  # pyright: ignore[reportMissingImports]

    class Fused(trl.GRPOTrainer):  # pyright: ignore[reportPrivateImportUsage]
        """Its loss goes past the methods that are wrapped, as that of a fused kernel does."""

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return trl.GRPOTrainer._compute_loss(self, model, inputs)  # pyright: ignore[reportPrivateImportUsage]

    trainer = trainer_for("GRPO", tmp_path, cls=Fused, max_steps=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attached = trained(trainer)
    assert any("step 2 could not be checked against the trainer's gradient" in str(one.message) for one in caught)
    assert [math.isnan(reading.error) for reading in attached.readings] == [True, True]
    assert all(reading.scalars["gram/update_norm"] > 0 and not reading.passed for reading in attached.readings)
    with pytest.warns(UserWarning, match="step 1 was not measured: the trainer's loss did not call its method"):
        assert trained(trainer_for("GRPO", tmp_path, cls=Fused, max_steps=1), mode="loss").readings == []


def test_rloo_takes_no_advantages_per_token(tmp_path):
    trainer = trainer_for("RLOO", tmp_path, max_steps=1)
    attach(trainer, estimator=lambda generation: generation.loss_mask.double())
    with pytest.raises(ScoregramError, match=r"must be a tensor of shape \(8,\), got"):
        trainer.train()


def test_an_estimator_that_fails_ends_the_training(tmp_path):
    trainer = trainer_for("GRPO", tmp_path, max_steps=1)
    attach(trainer, estimator=lambda generation: generation.rewards[:3])
    with pytest.raises(ScoregramError, match=r"advantages must be a tensor of shape \(8,\) or \(8, \d\), got \(3,\)"):
        trainer.train()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"every": 0}, "every must be at least 1, got 0"),
        ({"mode": "psi"}, "mode must be one of loss, scores, got 'psi'"),
        ({"memory_gb": 0}, "memory_gb must be positive"),
        ({"fused": "no"}, "fused must be True or False, got 'no'"),
        ({"cuda_graphs": 1}, "cuda_graphs must be True or False, got 1"),
        ({"cuda_graphs": True, "fused": False}, "cuda_graphs=True needs fused=True, got fused=False"),
        ({"every": 2.5}, "every must be a whole number, got 2.5"),
        ({"tolerance": -1.0}, "tolerance must be positive and finite, got -1.0"),
        ({"tolerance": math.nan}, "tolerance must be positive and finite, got nan"),
        ({"tolerance": "small"}, "tolerance must be a number, got 'small'"),
        ({"memory_gb": "8"}, "memory_gb must be a number, got '8'"),
        ({"estimator": 3}, "must be a name or a function, got 3"),
        ({"layers": "bogus"}, "layers must be one of float32, float64, none, got 'bogus'"),
        ({"resume": True, "overwrite": True, "out": "run"}, "overwrite=True and resume=True exclude each other"),
        ({"resume": True}, "resume=True needs out, the run folder"),
        ({"overwrite": True}, "overwrite=True needs out, the run folder"),
        ({"estimator": "gae"}, r"estimator=….: must be one of dapo, .*, got 'gae'"),
        ({"estimator": "grpoo"}, "the name must be one of"),
    ],
)
def test_settings_that_cannot_work(asked, message, tmp_path, unchecked_shapes):
    trainer = trainer_for("GRPO", tmp_path, max_steps=1)
    with pytest.raises(ScoregramError, match=message):
        attach(trainer, **asked)
    assert not WRAPPED_METHODS.keys() & vars(trainer).keys()


def test_trainers_that_cannot_be_measured(tmp_path, monkeypatch):
    import trl  # pyright: ignore[reportMissingImports]

    with pytest.raises(ScoregramError, match="must be a GRPOTrainer or an RLOOTrainer of TRL, got object"):
        attach(object())
    trainer = trainer_for("GRPO", tmp_path, max_steps=1)
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 2)
    with pytest.raises(ScoregramError, match="several processes must be connected, got 2 processes without torch"):
        attach(trainer)
    monkeypatch.undo()
    for kind, message in {
        "DEEPSPEED": "whole in every process, or sharded by FSDP2, got DEEPSPEED",
        "FSDP": "must be sharded by FSDP2, got FSDP of version 1",
    }.items():
        with monkeypatch.context() as changed:
            changed.setattr(type(trainer.accelerator), "distributed_type", f"DistributedType.{kind}")
            changed.setattr(type(trainer.accelerator), "is_fsdp2", False)
            with pytest.raises(ScoregramError, match=message):
                attach(trainer)
    with monkeypatch.context() as changed:
        split = SimpleNamespace(tp_enabled=True)
        changed.setattr(type(trainer.accelerator), "parallelism_config", split)
        with pytest.raises(ScoregramError, match="whole rollouts of its own, got a parallelism_config with tp"):
            attach(trainer)
    monkeypatch.setattr(trl, "__version__", "0.19.1")
    with pytest.raises(ScoregramError, match=f"needs TRL {OLDEST_TESTED} or newer, got 0.19.1"):
        attach(trainer)
    monkeypatch.setattr(trl, "__version__", "7.0.0")
    with pytest.warns(UserWarning, match=f"TRL 7.0.0 is newer than {NEWEST_TESTED}"):
        attach(trainer).detach()
    with monkeypatch.context() as changed:
        changed.delattr(trl.GRPOTrainer, "_compute_loss")  # pyright: ignore[reportPrivateImportUsage]
        with pytest.raises(
            ScoregramError,
            match=rf"tested with TRL {OLDEST_TESTED} and {NEWEST_TESTED}\).* got TRL 7.0.0, where these are missing or "
            r"take other arguments: _compute_loss\.",
        ):
            attach(trainer)
    with monkeypatch.context() as changed:
        changed.setattr(trainer, "_calculate_rewards", lambda rollouts: None)
        with pytest.raises(ScoregramError, match="missing or take other arguments: _calculate_rewards"):
            attach(trainer)


def test_an_older_run_is_not_overwritten(tmp_path):
    with attach(trainer_for("GRPO", tmp_path), out=tmp_path / "run"):
        pass
    trainer = trainer_for("GRPO", tmp_path)
    with pytest.raises(ScoregramError, match=r"^attach: .*run must be empty, got a run\. .*overwrite=True"):
        attach(trainer, out=tmp_path / "run")
    attach(trainer, out=tmp_path / "run", overwrite=True).detach()
