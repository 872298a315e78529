"""A step under the glass: what the script of a page needs to draw single groups, and how a long run is thinned."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from scoregram.reading import GroupDetail, RunReading, StepDetail, detailed_steps, rollouts_option, step_detail
from scoregram.runs import RolloutRecord, Rows, Run

MOST_STEPS, MOST_GROUPS = 40, 8
"""Steps of a run, and groups of a step, that a page holds."""
MOST_CHARACTERS, MOST_TOKENS = 2000, 600
"""Length from which the text of a prompt or rollout is cut, and its tokens are not coloured."""
GRADED_OUTCOMES: Mapping[str, str] = MappingProxyType(
    {"all right": "all rewards 1", "all wrong": "all rewards 0", "tied": "all rewards equal", "unjudged": "no reward"}
)
"""Outcome of a group → its name where rewards are graded: right and wrong have no meaning then."""
SHOWN_CHARACTERS = 60
"""Characters of a prompt that name it in a list or a map."""


@dataclass(frozen=True)
class Glass:
    """The steps that a page holds in detail."""

    steps: list[dict[str, Any]]
    """JSON values."""
    note: str
    """What was left out, in one or two sentences; empty if nothing was."""
    has_texts: bool = False
    """Whether the text of some rollout is stored."""
    rows: Rows = "scores"
    """What the cosines are between: scores, or gradients of a loss, which include their weights."""


def run_glass(folder: Run, run: RunReading) -> Glass:
    """The steps of a run in detail, thinned so that a page stays small; without steps if nothing is known of any."""
    steps = detailed_steps(folder, run.groups, MOST_STEPS)
    by_step: dict[int, list[Any]] = {step: [] for step in steps}
    for group in run.groups:
        if group.record.step in by_step:
            by_step[group.record.step].append(group)
    names = token_names(run.config)
    details = [step_detail(folder, by_step[step], step, MOST_GROUPS) for step in steps]
    words = GRADED_OUTCOMES if run.is_graded else {}
    plain = [step_json(detail, names, failed=detail.step in run.trust.failed, words=words) for detail in details]
    has_texts = any(group.has_text for detail in details for group in detail.groups)
    return Glass(plain, _note(run, details, has_texts), has_texts, run.rows)


def step_json(
    detail: StepDetail,
    names: Sequence[str] | None = None,
    *,
    failed: bool = False,
    words: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """A step as JSON values; undefined numbers are None.

    Args:
        detail: The step.
        names: Text of every token of the vocabulary, if each stands for some characters of its own.
        failed: Whether the self-check of the step failed.
        words: Outcome of a group → how the page calls it, where that is another word.
    """
    batch = detail.batch
    return {
        "step": detail.step,
        "failed": failed,
        "left_out": detail.left_out,
        "groups": [_group_json(group, names, words or {}) for group in detail.groups],
        "batch": None
        if batch is None
        else {
            "prompts": [prompt[:SHOWN_CHARACTERS] for prompt in batch.prompts],
            "cosines": _rounded_rows(batch.cosines),
            "shares": rounded_numbers(batch.shares),
        },
    }


def token_names(config: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Text of every token of the embedded policy, which reads characters; None for any other model."""
    if config.get("model") != "tiny":
        return None
    from scoregram.policy import tiny

    return tuple(tiny.VOCABULARY)


def _note(run: RunReading, details: Sequence[StepDetail], has_texts: bool) -> str:
    said = [f"Norms, cosines and shares here are in doubt{run.trust.mark}: {run.trust.doubt}"] if run.trust.mark else []
    recorded = len({group.record.step for group in run.groups})
    if recorded > len(details):
        which = "evenly spaced" if len(details) == MOST_STEPS else "those whose texts are stored"
        said.append(f"This page holds {len(details)} of {recorded} recorded steps, {which}.")
    if any(detail.left_out for detail in details):
        said.append(f"Of a step the page holds the {MOST_GROUPS} groups with the largest updates.")
    if not has_texts:
        option = rollouts_option(run.config, every=5)
        said.append(f"No rollout's text is stored in this run{f' ({option})' if option else ''}.")
    return " ".join(said)


def _group_json(group: GroupDetail, names: Sequence[str] | None, words: Mapping[str, str]) -> dict[str, Any]:
    return {
        "id": group.prompt_id,
        "number": group.number,
        "prompt": None if group.prompt is None else cut_text(group.prompt),
        "answer": None if group.answer is None else cut_text(group.answer),
        "outcome": words.get(group.outcome, group.outcome),
        "rewards": rounded_numbers(group.rewards),
        "lengths": group.lengths,
        "advantages": rounded_numbers(group.advantages),
        "norms": rounded_numbers(group.norms),
        "cosines": _rounded_rows(group.cosines),
        "shares": rounded_numbers(group.shares),
        "share_of": group.share_of,
        "rollouts": [None if one is None else _rollout_json(one, names) for one in group.rollouts],
    }


def _rollout_json(rollout: RolloutRecord, names: Sequence[str] | None) -> dict[str, Any]:
    plain: dict[str, Any] = {"finished": rollout.finished}
    if rollout.completion is not None:
        plain["text"] = cut_text(rollout.completion)
    sampled = range(rollout.prompt_length, len(rollout.token_ids))
    if rollout.completion_mask is not None:
        sampled = [place for place in sampled if bool(rollout.completion_mask[place])]
    if not 0 < len(sampled) <= MOST_TOKENS:
        return plain
    places = list(sampled)
    if names is not None:
        plain["tokens"] = [names[int(token)] for token in rollout.token_ids[places]]
    plain["surprise"] = rounded_numbers(-rollout.log_probs[places].numpy(), 2)
    if rollout.advantages is not None:
        plain["credit"] = rounded_numbers(rollout.advantages[places].numpy())
    if rollout.push is not None:
        plain["push"] = rounded_numbers(rollout.push[places].numpy(), 2)
    return plain


def cut_text(text: str) -> str:
    """The text, or its beginning and how many characters are missing.

    Example:
        >>> cut_text("x" * 2010)[-40:]
        'xxxxxxxxxxxxxxxxx … (10 more characters)'
    """
    more = len(text) - MOST_CHARACTERS
    return text if more <= 0 else f"{text[:MOST_CHARACTERS]} … ({more} more characters)"


def rounded_numbers(values: Sequence[float] | np.ndarray, digits: int = 3) -> list[float | None]:
    """Numbers with three significant digits or decimals, whichever is more; None where undefined."""
    numbers = np.asarray(values, dtype=np.float64)
    is_known = np.isfinite(numbers)
    if not is_known.any():
        return [None] * len(numbers)
    found: list[float | None] = np.round(numbers, digits).tolist()
    size = np.abs(numbers)
    for place in np.flatnonzero(~is_known | ((size < 0.1) & (size > 0))).tolist():
        found[place] = float(f"{numbers[place]:.{digits}g}") if is_known[place] else None
    return found


def _rounded_rows(rows: Sequence[Sequence[float]]) -> list[list[float | None]]:
    return [rounded_numbers(row) for row in rows]
