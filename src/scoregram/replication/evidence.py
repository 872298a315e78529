"""From the runs of a replication to its exhibits and verdicts, the same every time."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scoregram.exhibits import Exhibit, to_plain
from scoregram.replication import learning, noise, reasons, spectra, turns
from scoregram.replication.presets import read_setting
from scoregram.replication.readings import Evidence, read_evidence
from scoregram.replication.record import EXHIBITS, VERDICTS
from scoregram.replication.verdicts import judge
from scoregram.runs import write_atomically

SECTIONS = (
    (
        "The paper's table and figures",
        "Rows are A_i ψ_i, the pull of each rollout; the effective rank (Σσ)²/Σσ² says over how many directions a "
        "group's pulls are spread. A number means something only as far as it differs from its nulls: orthogonal "
        "scores have no directions in common at all, and still give a rank far below R when few rollouts are right.",
        ("table-1", "figure-1", "figure-2", "figure-3"),
    ),
    (
        "Spread and dead groups",
        "A group whose rewards are all alike has zero advantages: it costs rollouts and moves nothing. Everything "
        "about spectra here is said of the other groups alone.",
        ("figure-spread", "figure-dead"),
    ),
    (
        "Why the rank is what it is",
        "The rank of a group is taken apart exactly, factor by factor; then what it goes with, and whether it moves "
        "when the number of right rollouts does not.",
        ("accounting", "conditions", "figure-cosine", "by-right", "at-fixed-k"),
    ),
    (
        "Temperature and layers",
        "The same test prompts at several temperatures, and the same groups layer by layer: whether the finding hangs "
        "on either.",
        ("by-temperature", "by-layer"),
    ),
    (
        "Other baselines",
        "What other group baselines make of the same rollouts, of the gradient's error, and, where they were trained, "
        "of the accuracy.",
        ("by-estimator", "variance", "methods"),
    ),
    (
        "Saturation and group size",
        "Whether anything measured on the way foretells the next gain, and which group size the Gram asks for beside "
        "the one that did best.",
        ("prediction", "group-size"),
    ),
    (
        "Several turns",
        "Computed exactly in a small world, not measured on a model: what one advantage for a whole rollout misses "
        "when a task has turns.",
        ("turn-offset", "turn-credit"),
    ),
)
"""Title, text and exhibits of each section of the report."""


def exhibits_of(evidence: Evidence) -> tuple[Exhibit, ...]:
    """All tables and figures."""
    return (
        spectra.table_1(evidence),
        spectra.figure_1(evidence),
        spectra.figure_2(evidence),
        learning.figure_3(evidence),
        learning.figure_spread(evidence),
        learning.figure_dead(evidence),
        reasons.accounting(evidence),
        reasons.conditions(evidence),
        reasons.figure_cosine(evidence),
        spectra.by_right(evidence),
        reasons.at_fixed_right(evidence),
        spectra.by_temperature(evidence),
        spectra.by_layer(evidence),
        learning.by_estimator(evidence),
        noise.variance_table(evidence),
        learning.methods_table(evidence),
        reasons.prediction(evidence),
        noise.group_size_table(evidence),
        turns.offsets_table(),
        turns.credit_table(),
    )


def recompute(folder: Path) -> tuple[list[Any], list[Any]]:
    """Exhibits and verdicts as plain values, from the stored Grams, rewards and metrics alone."""
    evidence = read_evidence(folder)
    exhibits = exhibits_of(evidence)
    setting = read_setting(folder)
    verdicts = judge(exhibits, seeds=evidence.seeds, model=setting["model"], task=setting["task"])
    return to_plain(exhibits), verdicts


def lead(verdicts: Sequence[Mapping[str, Any]]) -> str:
    """The verdict on the paper's headline, in one sentence with its numbers."""
    headline = next(one for one in verdicts if one["claim"] == "abstract-effective-rank")
    return f"“Effective rank about 2 whatever the group size” is {headline['verdict']} here. {headline['sentence']}"


def write_evidence(folder: Path) -> tuple[list[Any], list[Any]]:
    """Compute exhibits and verdicts and write them into the folder of a replication: what was computed, no more."""
    exhibits, verdicts = recompute(folder)
    for name, content in ((EXHIBITS, {"exhibits": exhibits}), (VERDICTS, {"verdicts": verdicts})):
        text = json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False)
        write_atomically(folder / name, (text + "\n").encode())
    return exhibits, verdicts


def page_of(folder: Path, verdicts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Title, lead and sections of the report. They are made from the verdicts, so that nothing unverified is shown."""
    sections = [{"title": title, "text": text, "exhibits": list(ids)} for title, text, ids in SECTIONS]
    title = f"Is the effective rank of GRPO's gradients 2? {read_setting(folder)['about']}"
    return {"title": title, "lead": lead(verdicts), "sections": sections}
