"""Gram and gradient of a TRL trainer from one backward pass: the same training, and only where it is exact."""

import warnings
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from scoregram.integrations.trl import attach, fused_step, step_fusion
from tests.test_integrations_trl_losses import LOSSES, UNEVEN
from tests.trl_cases import run_in, trained, trainer_for, weights_of, with_tools

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error:scoregram"),
]

WHOLE = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "max_steps": 4,
    "learning_rate": 1e-3,
}
"""Two groups of four, all in one micro-batch: the shape of a step that can be fused."""
SEPARATE = "steps are measured in a separate pass"
REASONS = {
    "log-probabilities": "_get_per_token_logps_and_entropies of the trainer is overridden or wrapped",
    "step": "training_step of the trainer is overridden or wrapped",
    "hook": "a gradient hook is registered on parameter `model.embed_tokens.weight`",
    "module hook": "a backward hook is registered on `model.norm`",
    "compiled": "`model.norm` is compiled",
    "wrapped": "the model is wrapped in DataParallel",
    "lomo": "the LOMO optimiser updates parameters inside the backward pass",
}
"""What is wrong with a trainer, and what `not_fused` says about it."""


def trainer_of(tmp_path: Path, kind: str = "GRPO", **changes: Any) -> Any:
    try:
        return trainer_for(kind, tmp_path, **(WHOLE | changes))
    except (TypeError, ValueError) as error:
        pytest.skip(f"this version of TRL: {error}")


def train(trainer: Any, **asked: Any) -> Any:
    """The attachment, or None without one, after a training from the same random numbers."""
    torch.manual_seed(7)
    try:
        return trained(trainer, **asked) if asked else trainer.train() and None
    except ValueError as error:
        if "Unknown loss type" in str(error):
            pytest.skip(f"this version of TRL: {error}")
        raise


@pytest.fixture(autouse=True)
def every_fused_step_is_compared(monkeypatch):
    """Whatever it costs."""
    monkeypatch.setattr(step_fusion, "CHECK_SHARE", 1e9)


def compared(attached: Any) -> list[int]:
    """Rollouts whose gradient was compared at every measured step: 1 at those that were fused."""
    return [int(reading.scalars["check/rollouts"]) for reading in attached.readings]


def assert_same_training(
    tmp_path: Path, mode: str, kind: str = "GRPO", rtol: float = 1e-6, cuda_graphs: bool = False, **changes: Any
) -> Any:
    """Weights after four steps, three of them fused, as without any attachment, but for rounding; the attachment."""
    plain, measured = (trainer_of(tmp_path, kind, **changes) for _ in range(2))
    start = weights_of(plain)
    train(plain)
    has_no_gpu = cuda_graphs and measured.accelerator.device.type == "cpu"
    with pytest.warns(UserWarning, match="has no effect on the device cpu") if has_no_gpu else nullcontext():
        attached = train(measured, mode=mode, cuda_graphs=cuda_graphs)
    apart, way = (weights_of(plain) - weights_of(measured)).norm(), (weights_of(plain) - start).norm()
    assert float(way) > 0 and float(apart / weights_of(plain).norm()) <= rtol
    assert attached.failures == []
    assert max(reading.error for reading in attached.readings) <= 1e-5
    logs = list(zip(plain.state.log_history, measured.state.log_history, strict=True))[:-1]
    for one, other in logs:
        for key in {"loss", "grad_norm", "entropy", "kl", "clip_ratio/region_mean", "reward"} & one.keys():
            assert one[key] == pytest.approx(other[key], rel=1e-4, abs=1e-6)
    return attached


@pytest.mark.parametrize("name", LOSSES)
def test_scores_are_fused_and_the_training_is_the_same(name, tmp_path):
    attached = assert_same_training(tmp_path, "scores", **LOSSES[name])
    assert compared(attached) == [8, 1, 1, 1]
    logs = attached.trainer.state.log_history[1:4]
    lengths = [(line["completions/min_length"], line["completions/max_length"]) for line in logs]
    assert any(shortest < longest for shortest, longest in lengths), "one length would hide how a loss weights rollouts"


INNER = {name: changes for name, changes in UNEVEN.items() if "gradient_accumulation_steps" not in changes}


@pytest.mark.parametrize("name", [*LOSSES, *INNER])
def test_losses_are_fused_and_the_training_is_the_same(name, tmp_path):
    attached = assert_same_training(tmp_path, "loss", **(LOSSES | INNER)[name])
    assert compared(attached)[1:] == [1, 1, 1]


@pytest.mark.parametrize("mode", ["scores", "loss"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_rloo_is_fused(mode, beta, tmp_path):
    assert compared(assert_same_training(tmp_path, mode, "RLOO", beta=beta)) == [8, 1, 1, 1]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("mode", ["scores", "loss"])
def test_lora_is_fused(mode, checkpointing, tmp_path):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, lora_alpha=16, lora_dropout=0.0, target_modules=["q_proj", "v_proj", "down_proj"])
    attached = assert_same_training(tmp_path, mode, peft=lora, gradient_checkpointing=checkpointing)
    assert compared(attached) == [8, 1, 1, 1]


def test_clipped_gradients_and_a_few_other_arguments(tmp_path):
    changes = {"max_grad_norm": 0.01, "weight_decay": 0.1, "scale_rewards": "none", "temperature": 1.0}
    assert compared(assert_same_training(tmp_path, "scores", **changes)) == [8, 1, 1, 1]


@pytest.mark.parametrize("mode", ["scores", "loss"])
def test_gram_of_a_fused_step_is_that_of_a_pass_of_its_own(mode, tmp_path):
    for name, asked in (("fused", True), ("separate", False)):
        torch.manual_seed(7)
        attached = trained(trainer_of(tmp_path, beta=0.0), mode=mode, fused=asked, out=tmp_path / name)
        assert compared(attached) == ([8, 1, 1, 1] if asked else [8, 8, 8, 8])
    one, other = run_in(tmp_path / "fused"), run_in(tmp_path / "separate")
    for ours, theirs in zip(one.groups(), other.groups(), strict=True):
        size = float(theirs.gram.max())
        torch.testing.assert_close(ours.gram, theirs.gram, rtol=1e-5, atol=1e-5 * size)
        assert ours.by_layer.keys() == theirs.by_layer.keys() and ours.prompt_id == theirs.prompt_id
        for layer, gram in ours.by_layer.items():
            torch.testing.assert_close(gram, theirs.by_layer[layer], rtol=1e-4, atol=1e-5 * size)
        torch.testing.assert_close(ours.advantages, theirs.advantages)
    for ours, theirs in zip(one.batches(), other.batches(), strict=True):
        torch.testing.assert_close(ours.gram, theirs.gram, rtol=1e-5, atol=1e-5 * float(theirs.gram.max()))
    for ours, theirs in zip(one.rollouts(), other.rollouts(), strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        torch.testing.assert_close(ours.log_probs, theirs.log_probs, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(one.metrics(), other.metrics(), strict=True):
        for scalar in ("gram/update_norm", "gram/coherence", "group/effective_rank", "grad_norm"):
            assert ours.get(scalar) == pytest.approx(theirs.get(scalar), rel=1e-4)


def test_steps_that_are_not_measured_are_left_alone(tmp_path, monkeypatch):
    began = []
    begin = step_fusion.FusedSteps.begin
    monkeypatch.setattr(step_fusion.FusedSteps, "begin", lambda self, *args: began.append(1) or begin(self, *args))
    attached = train(trainer_of(tmp_path, max_steps=6), every=3)
    assert [reading.step for reading in attached.readings] == [1, 3, 6] and len(began) == 3
    assert "backward" not in vars(attached.trainer.accelerator)


def test_the_whole_gradient_is_compared_again_and_again(tmp_path, monkeypatch):
    monkeypatch.setattr(step_fusion, "FULL_CHECK_EVERY", 3)
    assert compared(train(trainer_of(tmp_path, max_steps=7), every=1)) == [8, 1, 1, 8, 1, 1, 8]


def test_comparisons_take_a_small_share_of_the_time(tmp_path, monkeypatch):
    """After the first one they wait until the share allows another; the norm is held against the Gram at every step."""
    norms, norm_error = [], fused_step.norm_error
    ticks = count()  # every interval takes a second: forward and backward pass two, a comparison one
    monkeypatch.setattr(fused_step, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    monkeypatch.setattr(step_fusion, "CHECK_SHARE", 0.2)
    monkeypatch.setattr(fused_step, "norm_error", lambda *given: norms.append(norm_error(*given)) or norms[-1])
    attached = train(trainer_of(tmp_path, max_steps=6), every=1)
    assert compared(attached) == [8, 1, 0, 0, 1, 0]
    errors = [reading.error for reading in attached.readings]
    assert [errors[step] for step in (2, 3, 5)] == [norms[step - 1] for step in (2, 3, 5)]
    assert len(norms) == 5 and max(norms) < 1e-5
    assert all(reading.passed for reading in attached.readings)


@pytest.mark.parametrize("mode", ["scores", "loss"])
def test_tools_and_truncated_rollouts(mode, tmp_path):
    tools = assert_same_training(tmp_path, mode, cls=with_tools())
    truncated = assert_same_training(tmp_path, mode, mask_truncated_completions=True)
    assert compared(tools) == compared(truncated) == [8, 1, 1, 1]
    assert any(reading.scalars["masked_out"] for reading in truncated.readings)


def test_absolute_positions_and_a_head_that_is_not_tied(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=99, n_positions=64, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=False,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "policy")
    assert compared(assert_same_training(tmp_path, "scores")) == [8, 1, 1, 1]


# accumulated micro-batches

ACCUMULATED: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}


@pytest.mark.parametrize("mode", ["scores", "loss"])
@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_accumulated_steps_are_fused(mode, kind, cuda_graphs, tmp_path, monkeypatch):
    """The micro-batches go through the engine together; without a GPU, CUDA graphs change nothing."""
    monkeypatch.setattr(step_fusion, "CHECK_SHARE", 1e9 if not cuda_graphs else 0.0)
    attached = assert_same_training(tmp_path, mode, kind, cuda_graphs=cuda_graphs, **ACCUMULATED)
    assert compared(attached) == ([8, 1, 1, 1] if not cuda_graphs else [8, 1, 0, 0])
    assert attached.not_fused is None


def test_gram_of_an_accumulated_step_is_that_of_a_pass_of_its_own(tmp_path):
    """Micro-batches are shuffled, so groups are spread over them: every block is there nevertheless."""
    grams = []
    for fused in (True, False):
        trainer = trainer_of(tmp_path, **ACCUMULATED)
        attached = train(trainer, every=1, out=tmp_path / f"run-{fused}", fused=fused)
        assert compared(attached) == ([8, 1, 1, 1] if fused else [8] * 4)
        grams.append([reading.scalars["gram/snr"] for reading in attached.readings])
        grams.append([reading.scalars["group/effective_rank"] for reading in attached.readings])
    assert grams[0] == pytest.approx(grams[2], rel=1e-4, nan_ok=True)
    assert grams[1] == pytest.approx(grams[3], rel=1e-4, nan_ok=True)


@pytest.mark.parametrize("part", [0, 1, 3])
@pytest.mark.parametrize("what", ["forward", "tokens", "loss"])
def test_an_accumulated_step_that_fails_midway_keeps_the_trainers_gradient(part, what, tmp_path, monkeypatch):
    """The engine has answered the micro-batches before: their gradients come from the trainer's own passes."""
    plain, measured = (trainer_of(tmp_path, **ACCUMULATED) for _ in range(2))
    train(plain)
    step = fused_step.FusedStep
    if what == "forward":
        answer = step.log_probs

        def fails(self, *args, **kwargs):
            if len(self.parts) == part + 1:
                raise RuntimeError("no")
            return answer(self, *args, **kwargs)

        monkeypatch.setattr(step, "log_probs", fails)
    elif what == "tokens":
        reason = step.reason_to_decline
        monkeypatch.setattr(
            step, "reason_to_decline", lambda self, call: "no" if len(self.parts) == part + 1 else reason(self, call)
        )
    else:
        calls = count()
        loss = type(measured)._compute_loss

        def breaks_once(self, *args, **kwargs):
            found = loss(self, *args, **kwargs)
            if next(calls) == 4 + part:  # in the second step, which is the first that is fused
                raise RuntimeError("no")
            return found

        monkeypatch.setattr(type(measured), "_compute_loss", breaks_once)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(measured, mode="scores", every=1)
    apart = (weights_of(plain) - weights_of(measured)).norm() / weights_of(plain).norm()
    assert float(apart) <= 1e-6


def test_an_accumulated_step_that_does_not_fit_into_memory_is_measured_separately(tmp_path, monkeypatch):
    trainer = trainer_of(tmp_path, **ACCUMULATED)
    bytes_of_pass = step_fusion.bytes_of_pass
    monkeypatch.setattr(step_fusion, "bytes_of_pass", lambda *given, **named: 10**15 + bytes_of_pass(*given, **named))
    assert compared(train(trainer, every=1)) == [8] * 4


# steps that are not fused, or for which the trainer's own pass runs after all


def test_parts_of_generations_are_not_fused(tmp_path):
    several = trainer_of(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2, steps_per_generation=1)
    attached = train(several, every=1)
    assert set(compared(attached)) == {8}
    assert attached.not_fused == f"2 micro-batches are accumulated, and a generation has 1; {SEPARATE}"
    inner = trainer_of(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2, num_iterations=2)
    attached = train(inner, every=1, mode="loss")
    assert set(compared(attached)) == {8}
    assert attached.not_fused == f"2 micro-batches are accumulated, and a generation is used for 2 steps; {SEPARATE}"
    halves = trainer_of(tmp_path, per_device_train_batch_size=4, steps_per_generation=2)
    attached = train(halves, every=1)
    assert set(compared(attached)) == {8}  # the rows are those of the generation, the step has half of it
    assert attached.not_fused == f"a generation is split over 2 steps, and mode='scores' measures it whole; {SEPARATE}"


def test_a_loss_that_weights_tokens_unevenly_gets_the_trainers_own_pass(tmp_path):
    """At the first step the KL term has no gradient, so the step after it is tried fused."""
    plain, measured = (trainer_of(tmp_path, beta=0.5) for _ in range(2))
    train(plain)
    with pytest.warns(UserWarning, match="the loss has a KL term"):
        attached = train(measured, mode="scores", tolerance=10.0)
    assert compared(attached) == [8] * 4 and attached.failures == [] and attached.readings[1].error > 1e-3
    assert float((weights_of(plain) - weights_of(measured)).norm() / weights_of(plain).norm()) <= 1e-6


def test_fused_false_leaves_the_gradient_to_the_trainer(tmp_path):
    plain, measured = (trainer_of(tmp_path) for _ in range(2))
    train(plain)
    attached = train(measured, fused=False)
    assert compared(attached) == [8] * 4 and attached.not_fused == f"attach was called with fused=False; {SEPARATE}"
    assert torch.equal(weights_of(plain), weights_of(measured))


def test_active_dropout_is_not_fused(tmp_path):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, lora_alpha=64, lora_dropout=0.3, target_modules=["q_proj"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        attached = train(trainer_of(tmp_path, peft=lora), every=1)
    assert compared(attached) == [8] * 4 and not attached.readings[-1].passed
    place = "base_model.model.model.layers.0.self_attn.q_proj.lora_dropout.default"
    model = attached.trainer.model
    assert step_fusion.reason_not_fused(model, model) == f"dropout is active in `{place}`"


def test_an_entropy_bonus_is_not_fused(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        attached = train(trainer_of(tmp_path, entropy_coef=1.0), mode="loss")
    assert compared(attached) == [8] * 4 and attached.readings[-1].error > 1e-3


def test_a_gradient_through_entropies_is_noticed_when_it_appears_late(tmp_path):
    """A loss that uses the entropies only after the whole gradient has agreed."""
    import trl  # pyright: ignore[reportMissingImports]

    class Late(trl.GRPOTrainer):  # pyright: ignore[reportPrivateImportUsage]
        def _compute_loss(self, model, inputs):
            kept = []
            ask = self._get_per_token_logps_and_entropies

            def asked(*args, **kwargs):
                kept.append(ask(*args, **kwargs))
                return kept[-1]

            self._get_per_token_logps_and_entropies = asked
            try:
                loss = super()._compute_loss(model, inputs)
            finally:
                self._get_per_token_logps_and_entropies = ask
            return loss if self.state.global_step < 2 else loss - (kept[0][1] * inputs["completion_mask"]).mean()

    plain, measured = (trainer_of(tmp_path, cls=Late, max_steps=3) for _ in range(2))
    train(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        attached = train(measured, mode="loss")
    if not plain._get_per_token_logps_and_entropies(
        plain.model, torch.ones(1, 4).long(), torch.ones(1, 4).long(), 2, compute_entropy=True
    )[1].requires_grad:
        pytest.skip("entropies have no gradient in this version of TRL")
    assert compared(attached) == [8, 1, 8] and attached.readings[2].error > 1e-3
    torch.testing.assert_close(weights_of(plain), weights_of(measured), rtol=1e-5, atol=1e-6)


def test_other_gradients_of_a_loss_are_kept(tmp_path):
    """A penalty on the weights themselves, which does not go through log-probabilities, from the third step on."""
    import trl  # pyright: ignore[reportMissingImports]

    class Penalised(trl.GRPOTrainer):  # pyright: ignore[reportPrivateImportUsage]
        def _compute_loss(self, model, inputs):
            late = 0.0 if self.state.global_step < 2 else 3e-4
            return super()._compute_loss(model, inputs) + late * sum(p.square().sum() for p in model.parameters())

    plain, measured = (trainer_of(tmp_path, cls=Penalised) for _ in range(2))
    train(plain)
    attached = train(measured, mode="scores", tolerance=1.0)
    assert compared(attached) == [8, 1, 8, 8] and attached.readings[2].error > 1e-4
    assert float((weights_of(plain) - weights_of(measured)).norm() / weights_of(plain).norm()) <= 1e-6


@pytest.mark.parametrize("every", [1, 2])
def test_a_pass_that_fails_is_made_by_the_trainer(every, tmp_path, monkeypatch):
    plain, measured = (trainer_of(tmp_path) for _ in range(2))
    train(plain)

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(fused_step.DeferredGram, "finish", broken)
    with pytest.warns(UserWarning, match="The trainer's own pass replaced it.*no such kernel") as caught:
        attached = train(measured, every=every)
    assert sum("no such kernel" in str(one.message) for one in caught) == 1
    assert attached.not_fused == f"RuntimeError: no such kernel; {SEPARATE}"
    assert attached.failures == ["RuntimeError: no such kernel"]
    assert [reading.step for reading in attached.readings] == ([1, 2, 3, 4] if every == 1 else [1, 2, 4])
    assert set(compared(attached)) == {8}
    assert torch.equal(weights_of(plain), weights_of(measured))


def test_a_forward_pass_that_fails_is_left_to_the_trainer(tmp_path, monkeypatch):
    plain, measured = (trainer_of(tmp_path) for _ in range(2))
    train(plain)

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(fused_step, "DeferredGram", broken)
    with pytest.warns(UserWarning, match="could not be fused.*no room"):
        attached = train(measured, every=1)
    assert compared(attached) == [8] * 4
    assert torch.equal(weights_of(plain), weights_of(measured))


def test_wrong_rows_are_found_and_never_trained_with(tmp_path, monkeypatch):
    """Sums that are off by a hundredth in one layer: the check of the very step sees it."""
    plain, measured = (trainer_of(tmp_path) for _ in range(2))
    train(plain)
    finish = fused_step.DeferredGram.finish

    def off(self, *args):
        gram, sums = finish(self, *args)
        chosen = next(parameter for parameter in sums if parameter.ndim == 2)
        return gram, {**sums, chosen: sums[chosen] * 1.01}

    monkeypatch.setattr(fused_step.DeferredGram, "finish", off)
    message = "must agree with the trainer's own pass to 1e-05, got a relative error of 0.0"
    with pytest.warns(UserWarning, match=message):
        attached = train(measured, every=1)
    assert compared(attached) == [8] * 4 and len(attached.failures) == 1
    assert torch.equal(weights_of(plain), weights_of(measured))


def test_a_loss_that_asks_for_gradients_of_its_own_is_taken_again(tmp_path):
    import trl  # pyright: ignore[reportMissingImports]

    class Curious(trl.GRPOTrainer):  # pyright: ignore[reportPrivateImportUsage]
        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            torch.autograd.grad(loss, [model.lm_head.weight], retain_graph=True)
            return loss

    plain, measured = (trainer_of(tmp_path, cls=Curious) for _ in range(2))
    train(plain)
    with pytest.warns(UserWarning, match="could not be fused"):
        attached = train(measured, every=1)
    assert compared(attached) == [8] * 4
    assert torch.equal(weights_of(plain), weights_of(measured))


@pytest.mark.parametrize("what", REASONS)
def test_the_reason_is_named(what, tmp_path, monkeypatch):
    trainer = trainer_of(tmp_path, max_steps=2)
    if what in ("log-probabilities", "step"):
        name = "_get_per_token_logps_and_entropies" if what == "log-probabilities" else "training_step"
        inner = getattr(trainer, name)
        setattr(trainer, name, lambda *args, **kwargs: inner(*args, **kwargs))
    if what == "hook":
        next(trainer.model.parameters()).register_post_accumulate_grad_hook(lambda parameter: None)
    if what == "module hook":
        trainer.model.model.norm.register_full_backward_hook(lambda *_: None)
    if what == "compiled":
        monkeypatch.setattr(trainer.model.model.norm, "_compiled_call_impl", trainer.model.model.norm.forward)
    if what == "wrapped":
        wrapped = torch.nn.DataParallel(trainer.model)
        assert step_fusion.reason_not_fused(wrapped, trainer.model) == REASONS[what]
        return
    if what == "lomo":
        monkeypatch.setattr(trainer.accelerator, "has_lomo_optimizer", True, raising=False)
    attached = train(trainer, every=1)
    assert compared(attached) == [8, 8] and attached.not_fused == f"{REASONS[what]}; {SEPARATE}"


@pytest.mark.parametrize("mode", ["scores", "loss"])
def test_autocast_is_fused_to_its_own_precision(mode, tmp_path):
    plain, measured = (trainer_of(tmp_path, bf16=True, learning_rate=1e-4) for _ in range(2))
    start = weights_of(plain)
    train(plain)
    attached = train(measured, mode=mode)
    assert compared(attached) == [8, 1, 1, 1] and all(0 < r.error < 5e-2 for r in attached.readings)
    way = float((weights_of(plain) - start).norm())
    assert float((weights_of(plain) - weights_of(measured)).norm()) < 0.2 * way


@pytest.mark.parametrize("mode", ["scores", "loss"])
def test_a_scaled_loss_leaves_a_scaled_gradient(mode, tmp_path, monkeypatch):
    """What float16 does against underflow: `.grad` is that of the scaled loss, the Gram that of the loss."""
    from accelerate.optimizer import AcceleratedOptimizer

    class Scaler:
        def get_scale(self) -> float:
            return 1024.0

        def scale(self, loss: torch.Tensor) -> torch.Tensor:
            return loss * 1024.0

    norms: dict[bool, list[torch.Tensor]] = {}
    readings = {}
    # no update: an optimiser would ask the scaler for more than this one knows
    monkeypatch.setattr(AcceleratedOptimizer, "step", lambda self, closure=None: None)
    for scaled in (False, True):
        trainer = trainer_of(tmp_path, max_steps=2, max_grad_norm=0.0)
        attached = attach(trainer, every=1, mode=mode)

        def noted(window: Any, measure: Any = attached._measure, trainer: Any = trainer, scaled: bool = scaled) -> None:
            norms[scaled] = [p.grad.norm() for p in trainer.model.parameters() if p.grad is not None]
            measure(window)

        monkeypatch.setattr(attached, "_measure", noted)
        if scaled:
            trainer.accelerator.scaler = Scaler()
        torch.manual_seed(7)
        trainer.train()
        assert compared(attached) == [8, 1]
        readings[scaled] = attached.readings[-1]
    torch.testing.assert_close(torch.stack(norms[True]), 1024 * torch.stack(norms[False]), rtol=1e-5, atol=1e-4)
    # norm and coherence of the update give the energy of its rows, also where rows are no scores
    names = ("gram/update_norm", "gram/coherence", "advantage_abs", *["group/score_norm"] * (mode == "scores"))
    assert [readings[True].scalars[n] for n in names] == pytest.approx(
        [readings[False].scalars[n] for n in names], 1e-5
    )


@pytest.mark.parametrize("what", ["nothing", "row", "sum", "gram"])
def test_every_part_of_a_fused_gradient_is_held_against_another(what):
    """The row against the trainer's, the sum against row and Gram: whichever is off by a hundredth is found."""
    torch.manual_seed(0)
    rows = torch.randn(4, 30).double()
    weights = torch.tensor([0.5, -0.3, 0.0, 0.2]).double()
    theirs = (weights[1] * rows[1]).split(10)
    gram, whole, row = rows @ rows.T, weights @ rows, rows[1].clone()
    whole[:5] *= 1.01 if what == "sum" else 1.0
    row[:5] *= 1.01 if what == "row" else 1.0
    gram[1] *= 1.01 if what == "gram" else 1.0
    sums = torch.stack([whole, row]).split(10, 1)
    error = fused_step.fused_row_error(sums, theirs, gram, weights, 1)
    error = max(error, fused_step.norm_error([both[0] for both in sums], gram, weights))
    assert error < 1e-12 if what == "nothing" else 1e-4 < error < 2e-2


def test_an_overflow_is_left_to_the_trainer_and_fused_steps_go_on(tmp_path):
    """As happens in float16: a loss that is not finite at one step."""
    import trl  # pyright: ignore[reportMissingImports]

    class Overflowing(trl.GRPOTrainer):  # pyright: ignore[reportPrivateImportUsage]
        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            return loss * torch.inf if self.state.global_step == 2 else loss

        def _clip_grad_norm(self, model):
            if self.state.global_step == 2:
                model.zero_grad(set_to_none=False)  # as a scaler does: no update
            return super()._clip_grad_norm(model)

    trainer = trainer_of(tmp_path, cls=Overflowing, max_steps=6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        attached = train(trainer, every=1)
    steps = {reading.step: int(reading.scalars["check/rollouts"]) for reading in attached.readings}
    assert steps == {1: 8, 2: 1, 4: 8, 5: 1, 6: 1} and attached.not_fused is None


def test_answers_that_could_not_be_given():
    """An auxiliary loss goes back through the router, and has no place in a fused step."""
    one, returned = torch.zeros(2, 3, requires_grad=True), fused_step.LogProbsFormat
    assert returned.of((one, one.detach())) == returned(2, (torch.float32, torch.float32), False)
    assert returned.of((one, None, None)) == returned(3, (torch.float32, None), False)
    assert returned.of((one, one, one.sum())) is None and returned.of({"logps": one}) is None
