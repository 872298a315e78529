"""The rows of a measured step add up to the gradient of the trainer, for every loss that TRL has."""

from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from scoregram.integrations.trl import attach
from scoregram.runs import open_run
from tests.trl_cases import trainer_for

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error:scoregram"),
]

LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "sapo": {"loss_type": "sapo"},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "vespo": {"loss_type": "vespo"},
    "sequence-ratio": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "unscaled": {"scale_rewards": "none"},
    "truncated-masked": {"mask_truncated_completions": True},
    "checkpointing": {"gradient_checkpointing": True},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
}
"""On-policy: the gradient is a sum of weighted scores."""

UNEVEN: dict[str, dict[str, Any]] = {
    "kl": {"beta": 0.1, "num_iterations": 2},
    "entropy-mask": {"top_entropy_quantile": 0.5},
    "two-sided": {"delta": 1.5, "num_iterations": 2},
    "inner-grpo": {"loss_type": "grpo", "num_iterations": 3},
    "inner-sequence": {"loss_type": "grpo", "importance_sampling_level": "sequence", "num_iterations": 2},
    "inner-cispo": {"loss_type": "cispo", "epsilon_high": 5.0, "num_iterations": 2},
    "inner-sapo": {"loss_type": "sapo", "num_iterations": 2},
    "inner-vespo": {"loss_type": "vespo", "num_iterations": 2},
    "split-generation": {"steps_per_generation": 4},
    "small-generations": {"steps_per_generation": 1, "gradient_accumulation_steps": 2},
}
"""Off-policy, or with other weights for every token: only `mode="loss"` is exact."""


def run(tmp_path: Any, changes: dict[str, Any], **asked: Any) -> Any:
    """The attachment after three or four measured steps; skips what this version of TRL does not know."""
    try:
        trainer = trainer_for("GRPO", tmp_path, **({"max_steps": 3} | changes))
    except (TypeError, ValueError) as error:
        pytest.skip(f"this version of TRL: {error}")
    attachment = attach(trainer, every=1, out=tmp_path / "run", **asked)
    try:
        trainer.train()
    except ValueError as error:
        if "Unknown loss type" in str(error):
            pytest.skip(f"this version of TRL: {error}")
        raise
    assert attachment.failures == []
    lengths = {length for record in open_run(tmp_path / "run").groups() for length in record.lengths.tolist()}
    assert len(lengths) > 1, "rollouts of one length would hide how a loss weights them"
    assert sum(reading.scalars["gram/update_norm"] > 0 for reading in attachment.readings) > 1, "nothing pulls"
    return attachment


@pytest.mark.parametrize("name", LOSSES)
def test_scores_with_their_weights_are_the_gradient(name, tmp_path):
    attachment = run(tmp_path, LOSSES[name], mode="scores")
    assert [reading.step for reading in attachment.readings] == [1, 2, 3]
    assert max(reading.error for reading in attachment.readings) <= 1e-5


@pytest.mark.parametrize("name", [*LOSSES, *UNEVEN])
def test_loss_rows_are_the_gradient(name, tmp_path):
    attachment = run(tmp_path, (LOSSES | UNEVEN)[name], mode="loss")
    assert [reading.step for reading in attachment.readings] == [1, 2, 3]
    assert max(reading.error for reading in attachment.readings) <= 1e-5


@pytest.mark.parametrize("mode", ["scores", "loss"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora(mode, checkpointing, tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=16, lora_dropout=0.0, target_modules=["q_proj", "v_proj", "down_proj"])
    trainer = trainer_for("GRPO", tmp_path, peft=config, max_steps=3, gradient_checkpointing=checkpointing, beta=0.0)
    attachment = attach(trainer, every=1, mode=mode)
    trainer.train()
    assert attachment.failures == []
    assert max(reading.error for reading in attachment.readings) <= 1e-5


@pytest.mark.parametrize("mode", ["scores", "loss"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_rloo(mode, beta, tmp_path):
    trainer = trainer_for("RLOO", tmp_path, max_steps=3, beta=beta)
    attachment = attach(trainer, every=1, mode=mode)
    trainer.train()
    assert attachment.failures == []
    assert max(reading.error for reading in attachment.readings) <= 1e-5


def test_a_later_inner_step_waits_for_the_next_generation(tmp_path):
    attachment = run(tmp_path, {"num_iterations": 2, "max_steps": 5}, mode="scores")
    assert [reading.step for reading in attachment.readings] == [1, 3, 5]
    assert max(reading.error for reading in attachment.readings) <= 1e-5


def test_a_generation_that_feeds_several_steps_is_measured_whole(tmp_path):
    attachment = run(tmp_path, {"steps_per_generation": 4, "max_steps": 4}, mode="scores")
    assert [reading.step for reading in attachment.readings] == [1, 3]
    assert max(reading.error for reading in attachment.readings) <= 1e-5
    assert all(reading.scalars["groups"] == 4 for reading in attachment.readings)


def test_several_generations_of_one_step_are_measured_together(tmp_path):
    changes = {"steps_per_generation": 1, "gradient_accumulation_steps": 2, "max_steps": 2}
    attachment = run(tmp_path, changes, mode="scores")
    assert [reading.scalars["groups"] for reading in attachment.readings] == [2, 2]
    assert max(reading.error for reading in attachment.readings) <= 1e-5
    assert torch.isfinite(torch.tensor([r.scalars["gram/update_norm"] for r in attachment.readings])).all()
