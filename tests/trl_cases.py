"""A TRL trainer small enough for a test: a random Llama that reads characters, and rewards that random text gets."""

from pathlib import Path
from typing import Any

import torch

from scoregram.gram import gradient_sketch
from scoregram.integrations.trl import attach
from scoregram.policy import character_tokenizer
from scoregram.runs import open_run
from tests.training_cases import save_policy

END_WEIGHT = 8.0
"""How much larger the embedding of the end token is than others: so that some rollouts end early and some do not."""
PROMPTS = ("1+2=", "10+3=", "7+7=", "2+25=", "9+1=", "30+4=")


def graded(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """A reward of many values, so that hardly any group has equal rewards and every test has a gradient."""
    return [sum(map(ord, text)) % 7 / 6 for text in completions]


def dataset(repeats: int = 8) -> Any:
    from datasets import Dataset  # pyright: ignore[reportMissingImports]

    return Dataset.from_dict({"prompt": list(PROMPTS) * repeats})


def arguments(kind: str, folder: Path, **changes: Any) -> Any:
    """`GRPOConfig` or `RLOOConfig` in float32 on the CPU: two groups of four a step, two micro-batches."""
    import trl  # pyright: ignore[reportMissingImports]

    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 8,
        "learning_rate": 1e-2,
        "max_steps": 2,
        "logging_steps": 1,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "temperature": 0.9,
        "beta": 0.0,
    }
    return getattr(trl, f"{kind}Config")(**(settings | changes))


def trainer_for(
    kind: str, folder: Path, *, rewards: Any = graded, peft: Any = None, cls: Any = None, **changes: Any
) -> Any:
    """A trainer of TRL, ready to train."""
    import trl  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    policy = folder / "policy"
    if not policy.exists():
        save_policy(policy)
        made: Any = AutoModelForCausalLM.from_pretrained(policy)
        with torch.no_grad():
            made.get_input_embeddings().weight[1] *= END_WEIGHT
        made.save_pretrained(policy)
    return (cls or getattr(trl, f"{kind}Trainer"))(
        model=AutoModelForCausalLM.from_pretrained(policy),
        reward_funcs=rewards,
        args=arguments(kind, folder / "trainer", **changes),
        train_dataset=dataset(),
        eval_dataset=dataset(1).select(range(2)),
        processing_class=character_tokenizer(64),
        peft_config=peft,
    )


def trained(trainer: Any, **asked: Any) -> Any:
    """The attachment after the training."""
    attached = attach(trainer, asked.pop("every", 1), **asked)
    trainer.train()
    assert not attached.readings or max(reading.scalars["gram/update_norm"] for reading in attached.readings) != 0
    return attached


def watch_gradients(trainer: Any) -> list[torch.Tensor]:
    """The sketch of `.grad` when the optimiser is about to use it, for every step of a training to come."""
    from transformers import TrainerCallback

    found: list[torch.Tensor] = []

    class Watcher(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            parameters = trainer.accelerator.unwrap_model(trainer.model).named_parameters()
            found.append(gradient_sketch({name: one.grad for name, one in parameters if one.requires_grad}))

    trainer.add_callback(Watcher())
    return found


def run_in(folder: Any) -> Any:
    """The run, without asking which of its fields may be None."""
    return open_run(folder)


def weights_of(trainer: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def with_tools() -> Any:
    """A GRPOTrainer in whose completions every second token comes from a tool."""
    import trl  # pyright: ignore[reportMissingImports]

    class WithTools(trl.GRPOTrainer):  # pyright: ignore[reportPrivateImportUsage]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            tool_mask = torch.ones_like(output["completion_mask"])
            tool_mask[:, 1::2] = 0
            return {**output, "tool_mask": tool_mask}

    return WithTools
