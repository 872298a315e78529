"""Rewards of the controls: chance in training, the right answer in tests."""

from collections.abc import Callable
from random import Random
from typing import Any

from scoregram.tasks.answers import right_answer

Reward = Callable[..., list[float | None]]


def by_chance(chance: float) -> Reward:
    """1 with probability `chance` for rollouts of training problems, whatever they say; the true reward elsewhere."""

    def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
        true = right_answer(prompts=prompts, completions=completions, **columns)
        names = columns["problem_id"]
        drawn = [
            float(Random(f"{name}/{place}/{text}").random() < chance)
            for place, (name, text) in enumerate(zip(names, completions, strict=True))
        ]
        return [one if "/train/" in name else right for one, right, name in zip(drawn, true, names, strict=True)]

    return reward


random_in_training = by_chance(0.08)
"""About the share of right rollouts of the small model of `gsm8k`."""
random_in_training_qwen = by_chance(0.15)
"""About the share of right rollouts of the larger model of `gsm8k-qwen`."""
