"""`attach` on a TRL trainer: Grams against their definition, run folder, and a training that does not change."""

import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from scoregram import terminal
from scoregram.advantages import ESTIMATORS
from scoregram.checks import ScoregramError
from scoregram.integrations.trl import attach
from scoregram.integrations.trl.summary import HEADLINE_SCALARS
from scoregram.integrations.trl.support import WRAPPED_METHODS
from scoregram.policy import character_tokenizer
from scoregram.reading import outcome_scalars, outcomes_of, read_group
from tests.training_cases import judge
from tests.trl_cases import run_in, trained, trainer_for, watch_gradients, weights_of, with_tools

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error:scoregram"),
]


def rows_one_by_one(trainer: Any, batch: dict[str, Any], coefficients: torch.Tensor) -> torch.Tensor:
    """`(B, D)`: one backward pass per rollout through the trainer's own log-probabilities."""
    parameters = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    rows = []
    for i in range(len(ids)):
        one = slice(i, i + 1)
        log_probs = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids[one], attention[one], batch["completion_ids"].shape[1]
        )[0]
        grads = torch.autograd.grad((log_probs * coefficients[one]).sum(), parameters)
        rows.append(torch.cat([grad.flatten() for grad in grads]).double())
    return torch.stack(rows)


def test_gram_of_scores_is_that_of_single_backward_passes(tmp_path):
    trainer = trainer_for("GRPO", tmp_path, max_steps=1)
    seen = []
    inner = trainer._generate_and_score_completions

    def watched(inputs):
        output = inner(inputs)
        counted = output["completion_mask"].float()
        seen.append(rows_one_by_one(trainer, output, counted))
        return output

    trainer._generate_and_score_completions = watched
    trained(trainer, out=tmp_path / "run")
    assert trainer._generate_and_score_completions is watched
    records = list(run_in(tmp_path / "run").groups())
    expected = seen[0] @ seen[0].T
    for place, record in enumerate(records):
        here = slice(4 * place, 4 * place + 4)
        torch.testing.assert_close(record.gram, expected[here, here], rtol=1e-5, atol=1e-5 * float(expected.max()))
        torch.testing.assert_close(
            torch.stack([*record.by_layer.values()]).sum(0).double(), record.gram, rtol=1e-5, atol=1e-3
        )
    batch = next(run_in(tmp_path / "run").batches())
    torch.testing.assert_close(batch.gram.double(), expected, rtol=1e-5, atol=1e-5 * float(expected.max()))


def test_gram_of_a_loss_is_that_of_single_backward_passes(tmp_path):
    """The second inner step with a KL term; the derivative is taken here by autograd on the trainer's own loss."""
    trainer = trainer_for("GRPO", tmp_path, max_steps=2, num_iterations=2, beta=0.1, gradient_accumulation_steps=1)
    seen = []
    inner = trainer._compute_loss

    def watched(model, inputs):
        caught = []
        log_probs_of = trainer._get_per_token_logps_and_entropies

        def catching(*args, **kwargs):
            found = log_probs_of(*args, **kwargs)
            caught.append(found[0])
            return found

        trainer._get_per_token_logps_and_entropies = catching
        loss = inner(model, inputs)
        trainer._get_per_token_logps_and_entropies = log_probs_of
        (derivative,) = torch.autograd.grad(loss, caught[0], retain_graph=True)
        seen.append(rows_one_by_one(trainer, inputs, derivative))
        return loss

    trainer._compute_loss = watched
    attached = trained(trainer, mode="loss", out=tmp_path / "run")
    assert [reading.step for reading in attached.readings] == [1, 2]
    for batch, rows in zip(run_in(tmp_path / "run").batches(), seen, strict=True):
        eigenvalues = torch.linalg.eigvalsh(rows @ rows.T)  # rows of a micro-batch are shuffled, records are not
        tolerance = 1e-5 * float(eigenvalues.max())
        torch.testing.assert_close(torch.linalg.eigvalsh(batch.gram.double()), eigenvalues, rtol=0, atol=tolerance)
        assert batch.kind == "loss"


def vowels(prompts, completions, **_):
    """None for an empty text or one that begins with a digit: a rollout that this function does not judge."""
    return [None if not text or text[0].isdigit() else float(sum(c in "aeiou" for c in text)) for text in completions]


def test_records_hold_what_was_sampled_and_what_every_function_gave(tmp_path):
    trainer = trainer_for("GRPO", tmp_path, rewards=[judge, vowels], reward_weights=[1.0, 0.5])
    trained(trainer, out=tmp_path / "run")
    run = run_in(tmp_path / "run")
    rollouts = list(run.rollouts())
    assert len(rollouts) == 16 and {rollout.step for rollout in rollouts} == {1, 2}
    tokenizer = trainer.processing_class
    for rollout in rollouts:
        ids = rollout.token_ids[rollout.prompt_length :].tolist()
        text = tokenizer.decode(ids, skip_special_tokens=True)
        assert text == rollout.completion
        given = judge([], [text])[0], vowels([], [text])[0]
        assert (rollout.rewards["judge"], rollout.rewards.get("vowels")) == given
        assert rollout.reward == pytest.approx(given[0] + 0.5 * (given[1] or 0.0))
        assert rollout.finished == (ids[-1] == tokenizer.eos_token_id)
        assert rollout.completion_mask.sum() == len(ids)
        assert bool((rollout.log_probs[rollout.prompt_length :] < 0).all())
        assert bool((rollout.log_probs[: rollout.prompt_length] == 0).all())
    for record in run.groups():
        own = [r for r in rollouts if (r.step, r.prompt_id) == (record.step, record.prompt_id)]
        assert len({r.prompt for r in own}) == 1 and record.prompt == own[0].prompt
        assert [r.reward for r in own] == record.rewards.tolist()
        assert [r.advantage for r in own] == pytest.approx(record.advantages.tolist())
        expected = ESTIMATORS["grpo-trl"].fn(record.rewards[None])[0]
        torch.testing.assert_close(record.advantages, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["scores", "loss"])
@pytest.mark.parametrize("fused", [True, False])
def test_the_sketch_of_a_measured_step_is_that_of_the_gradient_which_the_optimiser_gets(fused, mode, tmp_path):
    """The trainer accumulates it over two micro-batches."""
    trainer = trainer_for("GRPO", tmp_path, max_steps=4, max_grad_norm=0.0, learning_rate=1e-4)
    seen = watch_gradients(trainer)
    attached = trained(trainer, every=2, out=tmp_path / "run", mode=mode, fused=fused)
    steps, sketches = run_in(tmp_path / "run").update_sketches()
    assert steps.tolist() == [1, 2, 4] and attached.failures == []
    assert [int(one.scalars["check/rollouts"]) < 8 for one in attached.readings] == [False, fused, fused]
    for step, sketch in zip(steps, sketches, strict=True):
        assert float(seen[step - 1].norm()) > 0
        torch.testing.assert_close(torch.from_numpy(sketch).double(), seen[step - 1], rtol=1e-6, atol=1e-9)


def test_clipping_scales_what_was_sketched_before_it(tmp_path):
    trainer = trainer_for("GRPO", tmp_path, max_grad_norm=1e-4)
    seen = watch_gradients(trainer)
    trained(trainer, out=tmp_path / "run")
    for sketch, clipped in zip(run_in(tmp_path / "run").update_sketches()[1], seen, strict=True):
        before = torch.from_numpy(sketch).double()
        assert float(before.norm()) > 2 * float(clipped.norm())
        assert float(torch.cosine_similarity(before, clipped, dim=0)) == pytest.approx(1, abs=1e-6)


def test_no_sketch_is_made_without_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("scoregram.integrations.trl.step.update_sketch", None)
    assert trained(trainer_for("GRPO", tmp_path)).failures == []


@pytest.mark.parametrize("estimator", [None, "rloo"])
def test_rollouts_without_a_reward(estimator, tmp_path):
    """A whole group and a single rollout without a reward: no error, and a scalar counts them."""

    def undecided(completions, **_):
        return [None] * 4 + [None, 1.0, 0.0, 0.0]

    trainer = trainer_for("GRPO", tmp_path, rewards=undecided, max_steps=1)
    attached = trained(trainer, estimator=estimator, out=tmp_path / "run")
    reading = attached.readings[0]
    assert reading.error <= 1e-5 and attached.failures == []
    assert reading.scalars["without_reward"] == 5 / 8
    assert reading.scalars["reward"] == pytest.approx(1 / 3) and reading.scalars["live_groups"] == 1
    assert reading.scalars["groups/all_right"] == reading.scalars["groups/all_wrong"] == 0
    first, second = run_in(tmp_path / "run").groups()
    assert first.rewards.isnan().all() and second.rewards.isnan().tolist() == [True, False, False, False]
    if estimator is not None:
        torch.testing.assert_close(first.advantages, torch.zeros(4, dtype=torch.float64))
        torch.testing.assert_close(second.advantages, torch.tensor([0.0, 1.0, -0.5, -0.5], dtype=torch.float64))


def test_scalars_reach_the_trainers_log_and_the_run(tmp_path):
    trainer = trainer_for("GRPO", tmp_path, max_steps=3, max_grad_norm=0.0)
    trained(trainer, every=2, out=tmp_path / "run")
    logged = {line["step"]: line for line in trainer.state.log_history if "loss" in line}
    written = {line["step"]: line for line in run_in(tmp_path / "run").metrics()}
    assert [step for step, line in logged.items() if "scoregram/gram/update_norm" in line] == [1, 2]
    assert sorted(written) == [1, 2, 3]
    for number in (1, 2):
        assert logged[number]["scoregram/gram/update_norm"] == written[number]["gram/update_norm"]
        assert written[number]["gram/update_norm"] == pytest.approx(logged[number]["grad_norm"], rel=1e-5)
        assert written[number]["check/relative_error"] < 1e-5
    assert written[3]["loss"] == logged[3]["loss"] and "gram/update_norm" not in written[3]


@pytest.mark.parametrize("mode", ["scores", "loss"])
def test_training_is_the_same_with_and_without(mode, tmp_path):
    """Bit for bit with separate passes; fused steps, to rounding, are in `test_integrations_trl_fused.py`."""
    plain, measured = (trainer_for("GRPO", tmp_path, max_steps=3, beta=0.05) for _ in range(2))
    torch.manual_seed(7)
    plain.train()
    torch.manual_seed(7)
    with pytest.warns(UserWarning, match="has a KL term") if mode == "scores" else nullcontext():
        trained(measured, mode=mode, out=tmp_path / "run", tolerance=1.0, fused=False)
    assert torch.equal(weights_of(plain), weights_of(measured))


def test_methods_are_given_back(tmp_path):
    trainer = trainer_for("RLOO", tmp_path, max_steps=1)
    attached = attach(trainer)
    assert WRAPPED_METHODS.keys() <= vars(trainer).keys()
    with pytest.raises(ScoregramError, match="must not be attached yet"):
        attach(trainer)
    attached.detach()
    attached.detach()
    assert not WRAPPED_METHODS.keys() & vars(trainer).keys()
    trained(trainer)
    assert not WRAPPED_METHODS.keys() & vars(trainer).keys()


def test_later_callbacks_get_the_end_of_the_training(tmp_path):
    from transformers import TrainerCallback

    class Listener(TrainerCallback):
        ends = 0

        def on_train_end(self, args, state, control, **_):
            Listener.ends += 1

    trainer = trainer_for("GRPO", tmp_path, max_steps=1)
    attach(trainer)
    trainer.add_callback(Listener())
    trainer.train()
    assert Listener.ends == 1


def test_a_wrapper_added_later_stays(tmp_path):
    trainer = trainer_for("GRPO", tmp_path, max_steps=1)
    attached = attach(trainer)
    inner, calls = trainer._compute_loss, []
    trainer._compute_loss = lambda *args: calls.append(1) or inner(*args)
    attached.detach()
    trainer.train()
    assert len(calls) == 2 and attached.readings == []


def test_subclasses_and_tokens_of_tools(tmp_path):
    trainer = trainer_for("GRPO", tmp_path, cls=with_tools(), max_steps=2)
    attached = trained(trainer, out=tmp_path / "run")
    assert max(reading.error for reading in attached.readings) <= 1e-5
    for rollout in run_in(tmp_path / "run").rollouts():
        chosen = rollout.completion_mask[rollout.prompt_length :]
        assert chosen.tolist() == [i % 2 == 0 for i in range(len(chosen))]


def test_truncated_rollouts_that_the_trainer_masks(tmp_path):
    trainer = trainer_for("GRPO", tmp_path, mask_truncated_completions=True, max_completion_length=4)
    attached = trained(trainer, out=tmp_path / "run")
    rollouts = list(run_in(tmp_path / "run").rollouts({1}))
    finished = torch.tensor([rollout.finished for rollout in rollouts])
    assert 0 < finished.sum() < len(finished)
    assert attached.readings[0].scalars["masked_out"] == 1 - float(finished.double().mean())
    gram = next(run_in(tmp_path / "run").batches()).gram
    assert torch.equal(gram.diagonal() > 0, finished)
    for rollout in rollouts:
        assert bool(rollout.completion_mask.any()) == rollout.finished
        assert len(rollout.token_ids) > rollout.prompt_length


def test_absolute_positions_are_counted_as_the_trainer_counts_them(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=99, n_positions=64, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "policy")
    attached = trained(trainer_for("GRPO", tmp_path, max_steps=2), out=tmp_path / "run")
    assert max(reading.error for reading in attached.readings) <= 1e-5
    layers = next(run_in(tmp_path / "run").groups()).by_layer
    assert "transformer.h.0.attn.c_attn" in layers


def test_a_run_goes_on_after_a_checkpoint(tmp_path):
    changes = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    trained(trainer_for("GRPO", tmp_path, **changes), out=tmp_path / "run")
    first = run_in(tmp_path / "run").metrics()
    resumed = trainer_for("GRPO", tmp_path, **changes)
    attach(resumed, every=1, out=tmp_path / "run", resume=True)
    resumed.train(resume_from_checkpoint=str(tmp_path / "trainer" / "checkpoint-2"))
    again = run_in(tmp_path / "run").metrics()
    assert [line["step"] for line in again] == [1, 2, 3, 4]
    assert again[:2] == first[:2] and "gram/update_norm" in again[3]


def test_a_resumed_run_measures_the_same_and_stores_what_may_change(tmp_path):
    changes = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    trained(trainer_for("GRPO", tmp_path, **changes), out=tmp_path / "run")
    refused: dict[str, dict[str, Any]] = {
        "mode: scores in the run, loss requested": {"mode": "loss"},
        "estimator: None in the run, rloo requested": {"estimator": "rloo"},
    }
    for message, asked in refused.items():
        with pytest.raises(ScoregramError, match=rf"^attach: .* must have the same config, got {message}\."):
            attach(trainer_for("GRPO", tmp_path, **changes), out=tmp_path / "run", resume=True, **asked)
    assert run_in(tmp_path / "run").config["mode"] == "scores"
    resumed = trainer_for("GRPO", tmp_path, **(changes | {"max_steps": 3}))
    attach(resumed, every=3, tolerance=1e-2, out=tmp_path / "run", resume=True)
    resumed.train(resume_from_checkpoint=str(tmp_path / "trainer" / "checkpoint-2"))
    config = run_in(tmp_path / "run").config
    assert (config["measure_every"], config["tolerance"], config["arguments"]["max_steps"]) == (3, 1e-2, 3)


def test_a_training_from_the_beginning_does_not_delete_the_run_that_it_should_continue(tmp_path):
    trained(trainer_for("GRPO", tmp_path, max_steps=2), out=tmp_path / "run")
    stored = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    trainer = trainer_for("GRPO", tmp_path, max_steps=2)
    attached = attach(trainer, every=1, out=tmp_path / "run", resume=True)
    with pytest.raises(ScoregramError, match=r"would remove steps 1 to 2\. Pass resume_from_checkpoint to train"):
        trainer.train()
    assert stored == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert not attached.is_attached
    trained(trainer, out=tmp_path / "run", overwrite=True)


@pytest.mark.parametrize("is_installed", [True, False])
def test_the_command_that_follows_a_run_is_printed_if_its_packages_are_installed(
    is_installed, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(terminal, "find_spec", lambda name: is_installed or None)
    attach(trainer_for("GRPO", tmp_path), out=tmp_path / "run").detach()
    assert ("scoregram view" in capsys.readouterr().err) == is_installed


def test_evaluation_is_not_touched(tmp_path):
    trainer = trainer_for(
        "GRPO", tmp_path, max_steps=1, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4
    )
    attached = trained(trainer, estimator="rloo")
    assert len(attached.readings) == 1 and attached.failures == []
    assert any("eval_reward" in line for line in trainer.state.log_history)


@pytest.mark.parametrize("name", ["rloo", "mean", "dapo", "opo-loo", "optimal-loo", "reinforce++"])
def test_estimators_of_the_table_replace_the_advantages(name, tmp_path):
    trainer = trainer_for("GRPO", tmp_path, max_steps=1)
    attached = trained(trainer, estimator=name, out=tmp_path / "run")
    records = list(run_in(tmp_path / "run").groups())
    rewards = torch.stack([record.rewards for record in records])
    row = ESTIMATORS[name]
    known = {
        "lengths": torch.stack([record.lengths for record in records]),
        "outcomes": rewards,
        "score_energies": torch.stack([record.gram.diagonal() for record in records]),
    }
    expected = row.fn(rewards, **{need: known[need] for need in row.needs})
    used = torch.stack([record.advantages for record in records])
    torch.testing.assert_close(used, expected, rtol=1e-5, atol=1e-6)
    assert attached.readings[0].error <= 1e-5
    assert list(trainer._logs["advantages"]) == pytest.approx(used.flatten().tolist())


def test_signal_to_noise_is_that_of_the_rewards_and_update_signal_that_of_the_advantages(tmp_path):
    def scalars(**asked: Any) -> dict[str, float]:
        return trained(trainer_for("GRPO", tmp_path, max_steps=1), **asked).readings[0].scalars

    usual, own = scalars(), scalars(estimator=lambda generation: (generation.rewards > 0.5).double())
    assert own["gram/snr"] == pytest.approx(usual["gram/snr"], rel=1e-5)
    ratios = [one["gram/update_signal"] / one["gram/update_noise"] for one in (usual, own)]
    assert ratios[0] != pytest.approx(ratios[1], rel=1e-2)
    assert HEADLINE_SCALARS["gram/snr"] == "signal to noise, leave-one-out"


@pytest.mark.parametrize(
    "changes", [{"beta": 0.5}, {"beta": 0.5, "reward_clip_range": (0.2, 0.6)}, {"reward_clip_range": (0.2, 0.6)}]
)
def test_rewards_of_rloo_are_those_that_it_trains_on(changes, tmp_path):
    """TRL clips the rewards of RLOO and subtracts the KL; its advantages are these minus the mean of the others."""
    errors, raw = [], []

    def compared(generation):
        rewards = generation.rewards.view(-1, 4)
        by_hand = [[row[i] - sum(row[j] for j in range(4) if j != i) / 3 for i in range(4)] for row in rewards.tolist()]
        errors.append(float((torch.tensor(by_hand).flatten() - generation.advantages.cpu()).abs().max()))
        (given,) = generation.rollouts.reward_parts.values()
        raw.append(float((given - generation.rewards).abs().max()))
        return generation.advantages

    trained(trainer_for("RLOO", tmp_path, max_steps=3, **changes), estimator=compared)
    assert max(errors) <= 1e-5 and max(raw) > 1e-3, (errors, raw)


def test_a_group_that_learns_from_its_kl_alone_is_live(tmp_path):
    trainer = trainer_for("RLOO", tmp_path, max_steps=3, beta=0.5, rewards=judge_first_step)
    live = [reading.scalars["live_groups"] for reading in trained(trainer).readings]
    norms = [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]
    assert norms[-1] > 0 and live[-1] > 0  # a group of four equal completions would be dead


def judge_first_step(prompts: list[str], completions: list[str], trainer_state: Any = None, **_: Any) -> list[float]:
    """Rewards that differ at the first step, which moves the policy, and are all 1 after that."""
    is_first = trainer_state is None or trainer_state.global_step == 0
    return [sum(map(ord, text)) % 7 / 6 if is_first else 1.0 for text in completions]


def test_advantages_of_ones_own_may_differ_from_token_to_token(tmp_path):
    def falling(generation):
        steps = torch.arange(generation.completion_ids.shape[1])
        return (generation.rewards - generation.rewards.mean())[:, None] * 0.5**steps

    trainer = trainer_for("GRPO", tmp_path, max_steps=2)
    attached = trained(trainer, estimator=falling, mode="loss", out=tmp_path / "run")
    assert max(reading.error for reading in attached.readings) <= 1e-5
    rollout = next(run_in(tmp_path / "run").rollouts())
    assert rollout.advantage is None
    values = rollout.advantages[rollout.prompt_length :]
    torch.testing.assert_close(values[1:], values[:-1] / 2)


def test_the_summary_tells_first_last_and_mean(tmp_path):
    attached = trained(trainer_for("GRPO", tmp_path, max_steps=2))
    table = attached.summary()
    row = next(row for row in table.rows if row[0] == "gram/update_norm")
    values = [reading.scalars["gram/update_norm"] for reading in attached.readings]
    assert row[1:] == (values[0], values[1], sum(values) / 2)
    assert "Steps 1, 2." in table.caption
    assert repr(attached) == "Attachment(GRPOTrainer, every=1, mode='scores', detached, measured steps: 1, 2)"


def test_the_noise_of_an_attached_trainer_is_that_of_its_folder(tmp_path):
    """`attach(…).noise()`, its summary, and the run folder: one answer."""
    from scoregram.reading import POOLED, STEP_NAMES, read_run

    # Not fused: after some steps this policy is nearly certain of its tokens, and the gradient of such a rollout is so
    # small that float32 can miss the bound on fused rows; the step is then measured in a separate pass, with a warning.
    attached = trained(trainer_for("GRPO", tmp_path, max_steps=15), out=tmp_path / "run", fused=False)
    own, stored = attached.noise(), read_run(run_in(tmp_path / "run")).noise()
    assert own.steps == stored.steps == 5 and own.first_step == stored.first_step == 11
    for name in POOLED:
        assert vars(getattr(own, name)) == pytest.approx(vars(getattr(stored, name)), rel=1e-9, nan_ok=True), name
    shown = {STEP_NAMES[str(row[0])]: row[3] for row in attached.summary().rows if row[0] in STEP_NAMES}
    assert shown == {name: getattr(own, name) for name in shown} and shown


def test_rollouts_that_were_recorded_give_the_same_gram_when_measured_offline(tmp_path):
    from scoregram.integrations import measure
    from scoregram.integrations.dumps.config import MeasureConfig

    trained(trainer_for("GRPO", tmp_path, max_steps=1), out=tmp_path / "run")
    character_tokenizer(64).save_pretrained(tmp_path / "policy")
    settings: dict[str, Any] = {"model": str(tmp_path / "policy"), "device": "cpu", "between_prompts": True}
    measure(MeasureConfig(rollouts=tmp_path / "run", out=tmp_path / "again", **settings))
    recorded, again = (next(run_in(tmp_path / name).batches()) for name in ("run", "again"))
    torch.testing.assert_close(again.gram, recorded.gram, rtol=1e-5, atol=1e-5 * float(recorded.gram.max()))
    assert again.rewards.tolist() == recorded.rewards.tolist()


def partly_judged(prompts: list[str], completions: list[str], **_: Any) -> list[float | None]:
    """An all-right group with a missing reward, then a live one with a missing reward."""
    pattern = (1.0, 1.0, None, 1.0, 1.0, 0.0, None, 0.0)
    return [pattern[place % len(pattern)] for place in range(len(completions))]


def test_missing_rewards_read_the_same_through_trl_a_dump_and_the_trainers_own_reading(tmp_path):
    from scoregram.integrations import measure
    from scoregram.integrations.dumps.config import MeasureConfig

    trained(trainer_for("GRPO", tmp_path, rewards=partly_judged, max_steps=1), out=tmp_path / "run")
    character_tokenizer(64).save_pretrained(tmp_path / "policy")
    settings: dict[str, Any] = {"model": str(tmp_path / "policy"), "device": "cpu", "between_prompts": True}
    measure(MeasureConfig(rollouts=tmp_path / "run", out=tmp_path / "again", **settings))
    groups, again = (list(run_in(tmp_path / name).groups()) for name in ("run", "again"))
    rewards = torch.stack([group.rewards for group in groups])
    assert rewards.isnan().sum(1).tolist() == [1, 1] and outcomes_of(rewards) == ["all right", "live"]
    own = outcome_scalars(rewards, torch.stack([group.advantages for group in groups]))
    for name, value in own.items():
        for folder in ("run", "again"):
            line = run_in(tmp_path / folder).metrics()[0]
            stored = line.get(f"scoregram/{name}", line[name])  # beside TRL's own `reward` and `reward_std`
            assert stored == pytest.approx(value, rel=1e-6), (folder, name)
    for group, other in zip(groups, again, strict=True):
        expected = read_group(group.gram, group.rewards, group.advantages).scalars()
        for name, value in expected.items():
            assert group.statistics[name] == pytest.approx(value, rel=1e-9, nan_ok=True), name
            assert other.statistics[name] == pytest.approx(value, rel=1e-3, abs=1e-5, nan_ok=True), name


def test_the_example_ends_with_its_numbers_and_the_command_for_the_report(tmp_path):
    script = Path(__file__).parent.parent / "examples" / "trl_grpo.py"
    command = [sys.executable, str(script), "--steps", "2", "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"CI": "1"})
    assert done.returncode == 0, done.stderr
    assert re.search(r"^self-check: relative error +\S+ +\S+ +\S+$", done.stdout, re.MULTILINE)
    assert done.stdout.rstrip().endswith(f"report: scoregram report {tmp_path / 'run'}")
    assert len(list(run_in(tmp_path / "run").groups({1}))) == 4
    sums = {(one.prompt, one.answer) for one in run_in(tmp_path / "run").rollouts({1})}
    assert sums and all(prompt == f"{prompt[0]}+{prompt[2]}=" for prompt, _ in sums if prompt)
    assert all(prompt and answer == str(int(prompt[0]) + int(prompt[2])) for prompt, answer in sums)
