"""The reward of the control: chance in training, the right answer in tests."""

from random import Random
from typing import Any

from scoregram.tasks.answers import right_answer

CHANCE = 0.08
"""About the share of right rollouts of the starting policy."""


def random_in_training(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
    """1 with probability `CHANCE` for rollouts of training problems, whatever they say; the true reward elsewhere."""
    true = right_answer(prompts=prompts, completions=completions, **columns)
    names = columns["problem_id"]
    drawn = [
        float(Random(f"{name}/{place}/{text}").random() < CHANCE)
        for place, (name, text) in enumerate(zip(names, completions, strict=True))
    ]
    return [chance if "/train/" in name else right for chance, right, name in zip(drawn, true, names, strict=True)]
