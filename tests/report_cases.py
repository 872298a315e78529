"""Run folders for the tests of the report: real algebra on random scores, no model."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import torch

from scoregram.gram import Gram
from scoregram.reading import (
    CHECK_COLUMN,
    CHECK_ERROR,
    Step,
    batch_records,
    group_records,
    read_step,
)
from scoregram.rollouts import Rollouts
from scoregram.runs import CHECK_PASSED, RolloutRecord, RunWriter, UpdateRecord

CONFIG = {"model": "tiny", "task": "arithmetic", "group_size": 4, "batch_size": 12, "seed": 3}
VOID = {"meta", "br", "hr", "img", "link", "input"}

Drawing = Callable[[int, int, torch.Generator], torch.Tensor]
"""Step, prompt and generator → the rewards of the group."""


def coin(step: int, prompt: int, generator: torch.Generator, size: int = 4) -> torch.Tensor:
    return torch.randint(0, 2, (size,), generator=generator).double()


def write_run(
    folder: Path,
    *,
    steps: int = 6,
    prompts: int = 3,
    size: int = 4,
    rewards: Drawing | None = None,
    measured: bool = True,
    statistics: bool = True,
    evaluated: bool = True,
    prompt_id: str = "p/{}",
    kind: str = "train",
    errors: Mapping[int, float] | None = None,
    exact: float | None = None,
    text: str | None = None,
    sketched: bool = False,
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """A run of which everything is known; step → the whole Gram and the rewards.

    `errors` are those of the self-check, with a tolerance of 1e-3; `exact` is the share with sampled tokens.
    With `text`, every step stores its batch and its rollouts, whose completions contain the text. `sketched` stores a
    sketch of 64 numbers of every step's gradient.
    """
    known = {}
    with RunWriter.create(folder, CONFIG, environment={"python": "3"}) as writer:
        if evaluated:
            writer.write_metrics(0, evaluation(0.25))
        for step in range(1, steps + 1):
            generator = torch.Generator().manual_seed(step)
            scores = torch.randn(prompts * size, 7, generator=generator, dtype=torch.float64)
            gram = scores @ scores.mT
            drawn = rewards or (lambda s, p, g: coin(s, p, g, size))
            given = torch.stack([drawn(step, prompt, generator) for prompt in range(prompts)])
            advantages = given - given.mean(dim=1, keepdim=True)
            known[step] = gram, given
            made = step_of(step, given, advantages, gram if measured else None, prompt_id=prompt_id, kind=kind)
            passed = {} if errors is None else {CHECK_COLUMN: float(errors[step] <= 1e-3)}
            marks = passed | ({} if exact is None else {"exact": exact})
            made = replace(made, group_marks=[marks] * prompts)
            reading = read_step(made)
            scalars = reading.scalars | {"finished": 1.0}
            if errors is not None:
                scalars |= {CHECK_ERROR: errors[step], CHECK_PASSED: passed[CHECK_COLUMN]}
            if measured:
                records = group_records(made, reading.groups)
                if not statistics:
                    records = [replace(record, statistics={}) for record in records]
                    scalars = {name: value for name, value in scalars.items() if not name.startswith("group/")}
                writer.write_groups(step, records)
            if sketched:
                sketch = 0.5 * torch.ones(64) + torch.randn(64, generator=generator)
                writer.write_updates(step, [UpdateRecord(step=step, sketch=sketch)])
            if text is not None:
                writer.write_batches(step, batch_records(made))
                writer.write_rollouts(step, rollouts_of(made, text))
            if evaluated and step == steps:
                scalars |= evaluation(0.75)
            writer.write_metrics(step, scalars)
    return known


def step_of(
    number: int,
    rewards: torch.Tensor,
    advantages: torch.Tensor,
    gram: torch.Tensor | None,
    *,
    prompt_id: str = "p/{}",
    kind: str = "train",
) -> Step:
    """A step of `(P, R)` rewards whose rollouts have one prompt token and five of completion each."""
    prompts, size = rewards.shape
    ids = torch.zeros(rewards.numel(), 6, dtype=torch.int64)
    rollouts = Rollouts(
        input_ids=ids,
        attention_mask=torch.ones_like(ids, dtype=torch.bool),
        completion_mask=(torch.arange(6) > 0).expand(ids.shape),
        prompt_lengths=torch.ones(len(ids), dtype=torch.int64),
        group_ids=torch.arange(prompts).repeat_interleave(size),
        prompt_names=[prompt_id.format(place) for place in range(prompts)],
        rewards=rewards.flatten(),
    )
    return Step(
        number=number,
        rollouts=rollouts,
        advantages=advantages.flatten(),
        weights=advantages.flatten() / rewards.numel(),
        gram=None if gram is None else Gram(gram, {}, torch.zeros(ids.shape)),
        kind=kind,
    )


def rollouts_of(step: Step, text: str) -> list[RolloutRecord]:
    """Rollouts of a step in reverse order, whose texts tell prompt and position."""
    made = []
    for group, here in enumerate(step.rollouts.group_slices()):
        for index, row in enumerate(range(here.start, here.stop)):
            made.append(
                RolloutRecord(
                    step=step.number,
                    prompt_id=step.rollouts.prompt_names[group],
                    group=group,
                    index=index,
                    prompt=f"prompt {group} {text}",
                    completion=f"completion {group}.{index} {text}",
                    token_ids=torch.arange(6),
                    prompt_length=1,
                    reward=float(step.rollouts.rewards[row]),
                    log_probs=torch.tensor([0.0, -0.5, -1.0, -2.0, 0.0, -0.25]),
                    advantages=torch.tensor([0.0, 1.0, -1.0, 0.5, 0.0, 0.25]) if index == 0 else None,
                    advantage=None if index == 0 else float(step.advantages[row]),
                    finished=index != 1,
                )
            )
    return made[::-1]


def evaluation(accuracy: float) -> dict[str, float]:
    return {
        "eval/accuracy": accuracy,
        "eval/accuracy_low": accuracy - 0.1,
        "eval/accuracy_high": accuracy + 0.1,
        "eval/problems": 8,
    }


class Page(HTMLParser):
    """What a browser would make of a page: elements with attributes and text; unbalanced tags are an error."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[tuple[str, str]] = []
        self._within: list[tuple[tuple[str, ...], str]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: D102
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:  # noqa: D102
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:  # noqa: D102
        self.texts.append((self._open[-1] if self._open else "", data))
        self._within.append((tuple(self._open), data))

    def named(self, tag: str) -> list[dict[str, str]]:
        """Attributes of every element of a kind."""
        return [attributes for name, attributes in self.elements if name == tag]

    def text(self, *tags: str) -> str:
        """All text inside these elements, or all that a reader sees."""
        hidden = {"script", "style"}
        return "".join(
            text for tags_, text in self._within if (hidden.isdisjoint(tags_) if not tags else {*tags} & {*tags_})
        )


def contrast(colour: str, other: str) -> float:
    """Contrast of two colours as WCAG 2 defines it, from 1 to 21."""
    light, dark = sorted((luminance(colour), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else math.pow((c + 0.055) / 1.055, 2.4) for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
