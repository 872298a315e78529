"""From the runs of a replication to its exhibits, verdicts and page. The same runs always give the same evidence."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from scoregram.exhibits import Cell, Exhibit, Table, to_plain
from scoregram.runs import write_atomically
from scoregram.studies.grpo_rank import PAPER_VERSION, cause_exhibits, learning_exhibits, rank_exhibits
from scoregram.studies.grpo_rank.presets import read_setting
from scoregram.studies.grpo_rank.readings import Evidence, read_evidence
from scoregram.studies.grpo_rank.verdicts import MAIN_CLAIM, judge_claims
from scoregram.studies.ledger import replication_setting
from scoregram.studies.page import verdict_counts, write_replication_page
from scoregram.studies.record import EXHIBITS, SETTING, VERDICTS, Assessment
from scoregram.theory import WORLDS, GroundTruth, credit_costs, ground_truth, listing, network_policy, offsets_by_turn

TURN_WORLD = "user_turns"
"""World of the exact lab on which Section 6 of the paper is computed."""
TURN_GROUP_SIZE = 4
_ROUNDING = 1e-12

SECTIONS = (
    (
        "The paper's table and figures",
        "The rows of a group's stack are A_i ψ_i, the contribution of each rollout to the update. The effective rank "
        "(Σσ)²/Σσ² counts the directions over which the rows are spread. Compare it with its null models: orthogonal "
        "scores share no direction at all, and still give a rank far below R when few rollouts are right.",
        ("table-1", "figure-1", "figure-2", "figure-3"),
    ),
    (
        "Spread and dead groups",
        "A group with equal rewards has zero advantages: it costs rollouts and adds nothing to the update. All spectra "
        "on this page are of the other groups.",
        ("figure-spread", "figure-dead"),
    ),
    (
        "Why the rank is what it is",
        "The rank of a group is an exact product of factors. The next tables show what the rank correlates with, and "
        "whether it changes while the number of right rollouts stays the same.",
        ("accounting", "conditions", "figure-cosine", "by-right", "at-fixed-k", "trend"),
    ),
    (
        "Temperature and layers",
        "Whether the result depends on the temperature (the same test prompts at several temperatures) or on the layer "
        "(the same groups, layer by layer).",
        ("by-temperature", "by-layer"),
    ),
    (
        "Other baselines",
        "Other group baselines on the same rollouts: their spectrum, the error of the gradient, and the accuracy of "
        "those that were trained.",
        ("by-estimator", "variance", "methods"),
    ),
    (
        "Saturation and group size",
        "Whether any quantity predicts the next gain in accuracy, and the group size that the Gram recommends beside "
        "the accuracy of each group size.",
        ("prediction", "group-size"),
    ),
    (
        "Several turns",
        "Computed exactly in a small world, not measured on a model: the error of one advantage for a whole rollout "
        "when a task has several turns.",
        ("turn-offset", "turn-credit"),
    ),
)
"""Title, text and exhibit ids of each section of the page."""


def exhibits_of(evidence: Evidence) -> tuple[Exhibit, ...]:
    """All tables and figures, in the order of the record."""
    return (
        rank_exhibits.table_1(evidence),
        rank_exhibits.figure_1(evidence),
        rank_exhibits.figure_2(evidence),
        learning_exhibits.figure_3(evidence),
        learning_exhibits.figure_spread(evidence),
        learning_exhibits.figure_dead(evidence),
        cause_exhibits.accounting(evidence),
        cause_exhibits.conditions(evidence),
        cause_exhibits.figure_cosine(evidence),
        rank_exhibits.by_right(evidence),
        cause_exhibits.at_fixed_right(evidence),
        cause_exhibits.trend_table(evidence),
        rank_exhibits.by_temperature(evidence),
        rank_exhibits.by_layer(evidence),
        learning_exhibits.by_estimator(evidence),
        learning_exhibits.variance_table(evidence),
        learning_exhibits.methods_table(evidence),
        cause_exhibits.prediction(evidence),
        learning_exhibits.group_size_table(evidence),
        turn_offset_table(),
        turn_credit_table(),
    )


def recompute(folder: Path) -> tuple[list[Any], list[Any]]:
    """Exhibits and verdicts as plain values, from the stored Grams, rewards and metrics alone."""
    evidence = read_evidence(folder)
    exhibits = exhibits_of(evidence)
    setting = read_setting(folder)
    verdicts = judge_claims(exhibits, seeds=evidence.seeds, model=setting["model"], task=setting["task"])
    return to_plain(exhibits), verdicts


def headline(verdicts: Sequence[Mapping[str, Any]]) -> str:
    """The verdict on the paper's main claim, with its numbers and what was replicated."""
    main = _main(verdicts)
    where = replication_setting(main)
    return f"“Effective rank about 2 whatever the group size” is {main['verdict']} here ({where}). {main['sentence']}"


def _main(verdicts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The verdict on the paper's main claim."""
    return next(one for one in verdicts if one["claim"] == MAIN_CLAIM)


REFERENCES = ("arXiv:2606.29238", "arXiv:2603.01162", "arXiv:2402.03300", "arXiv:2402.14740", "arXiv:2110.14168")
"""The paper; GRPO's gradient as a U-statistic; GRPO; RLOO; GSM8K."""


WEAKEST = (
    "That this policy stands for the paper's: its size, its success rate and its training differ, and the rank of a "
    "group depends on how many of its rollouts are right."
)
"""The assumption that the conclusion rests on and that is least certain."""


def assessment(verdicts: Sequence[Mapping[str, Any]]) -> Assessment:
    """What the study concludes, with the numbers of its verdicts."""
    main = _main(verdicts)
    return Assessment(
        summary=headline(verdicts),
        strongest_claim="Advantages and score norms account for the effective rank of a group here "
        f"({replication_setting(main)}). {main['sentence']}",
        weakest_assumption=WEAKEST,
        references=REFERENCES,
        about_version=PAPER_VERSION,
    )


def write_evidence(folder: Path) -> tuple[list[Any], list[Any]]:
    """Compute exhibits and verdicts, write them into the folder of a replication, and return them."""
    exhibits, verdicts = recompute(folder)
    for name, content in ((EXHIBITS, {"exhibits": exhibits}), (VERDICTS, {"verdicts": verdicts})):
        text = json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False)
        write_atomically(folder / name, (text + "\n").encode())
    return exhibits, verdicts


def write_replication_report(folder: Path | str, out: Path | str | None = None) -> Path:
    """Write the page of a replication, to `report.html` in its folder if `out` is not given; returns its path."""
    return write_replication_page(folder, out, text=_page_text)


def _page_text(folder: Path, verdicts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Title, lead and sections of the page; empty without settings. The numbers in the lead come from the verdicts."""
    if not (folder / SETTING).is_file():
        return {}
    sections = [{"title": title, "text": text, "exhibits": list(ids)} for title, text, ids in SECTIONS]
    title = f"Is the effective rank of GRPO's gradients 2? {read_setting(folder)['about']}"
    answers = reader_answers(verdicts, read_setting(folder))
    return {"title": title, "lead": headline(verdicts), "answers": answers, "sections": sections}


def reader_answers(verdicts: Sequence[Mapping[str, Any]], setting: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a reader asks first: what was claimed, what was done, what was seen, and what it does not show."""
    main = _main(verdicts)
    sizes = ", ".join(map(str, setting["sizes"]))
    return [
        (
            "What was claimed?",
            f"By {REFERENCES[0]}: {main['statement']} More rollouts per prompt would then add no new direction.",
        ),
        (
            "What did we do?",
            f"We trained {setting['model']} on {setting['task']} with groups of {sizes} rollouts, {setting['seeds']} "
            f"seeds each, {setting['steps']} steps of {setting['batch_size']} rollouts. Every "
            f"{setting['measure_every']} steps we measured the Gram of every group and computed its rank exactly. In "
            f"short: {replication_setting(main)}.",
        ),
        ("What did we see?", f"{main['sentence']} {verdict_counts(verdicts)}"),
        ("What does it not show?", WEAKEST.replace("That", "Whether", 1)),
    ]


def _turn_truth() -> GroundTruth:
    """Exact values of the lab's small network in the world of turns."""
    rows = listing(WORLDS[TURN_WORLD])
    return ground_truth(rows, network_policy(rows, generator=torch.Generator().manual_seed(0)))


def turn_offset_table() -> Table:
    """Mean and standard deviation of the error of a rollout-level advantage, by turn."""
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (one.turn, *map(_settled, (one.alive, one.mean, one.sd, one.largest))) for one in offsets_by_turn(_turn_truth())
    )
    return Table(
        "turn-offset",
        "What a rollout-level advantage misses, by turn",
        "Exact, nothing sampled. The offset past rewards + v(s_h) - v(s_0) has mean zero at every turn: it is a "
        "martingale. Its spread grows, and with it the noise, not the bias, of the gradient.",
        ("turn", "still going", "mean offset", "standard deviation", "largest"),
        rows,
    )


def turn_credit_table() -> Table:
    """Error of the advantage, and bias and variance of the gradient, for several ways to assign credit to turns."""
    costs = credit_costs(_turn_truth(), group_size=TURN_GROUP_SIZE)
    names = tuple(name for name in vars(costs[0]) if name != "formula_gap")
    rows: tuple[tuple[Cell, ...], ...] = tuple(tuple(_settled(getattr(cost, name)) for name in names) for cost in costs)
    return Table(
        "turn-credit",
        f"Ways of giving credit to turns, R = {TURN_GROUP_SIZE}",
        "Exact, nothing sampled: error of the advantage given state and action, bias and noise of the gradient.",
        tuple(name.replace("_", " ") for name in names),
        rows,
    )


def _settled(value: Cell) -> Cell:
    """The value, with a number below rounding set to 0, so that it is the same on every machine."""
    return 0.0 if isinstance(value, float) and abs(value) < _ROUNDING else value
