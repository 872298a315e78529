"""The comparison of estimators on a terminal and as strict JSON."""

import json
import math
from dataclasses import asdict

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from scoregram import __version__
from scoregram.checks import fail, lookup
from scoregram.machine import threads
from scoregram.theory.lab.comparison import Comparison, Row, comparison
from scoregram.theory.lab.exact import GroundTruth, ground_truth
from scoregram.theory.lab.listing import listing
from scoregram.theory.lab.policies import network_policy
from scoregram.theory.lab.worlds import WORLDS

READING = (
    "Exact, nothing sampled. rollouts: what the step really takes, those for baselines and values included. "
    "bias: |E ĝ - ∇J| / |∇J|. error: √E|ĝ - ∇J|² / |∇J|, bias and noise together; a small step is rewarded, so an "
    "estimator that only shrinks the update can win. SNR: |E ĝ|² over the variance, blind to the length of the step. "
    "cosine: between E ĝ and ∇J; below 1 the mean update points elsewhere. ★ least error, ☆ highest SNR, both among "
    "what a trainer can have; ° was given exact values, which no trainer has."
)


def show_comparison(*, world: str, budget: int, group_size: int, as_json: bool = False) -> int:
    """Print every estimator's exact error in one world at one rollout budget, least error first.

    The policy is the lab's small network with fixed random weights.

    Raises:
        ScoregramError: If the world is unknown or the budget pays for no group.
    """
    rows = listing(lookup(WORLDS, world, kind="lab"))
    if group_size < 1:
        fail("lab", "a group must have at least 1 rollout", group_size, "Raise --group-size.")
    with threads(1):
        truth = ground_truth(rows, network_policy(rows, generator=torch.Generator().manual_seed(0)))
        found = comparison(truth, budget=budget, group_size=group_size)
    if as_json:
        print(json.dumps(as_record(world, truth, found), indent=2, allow_nan=False, ensure_ascii=False))
    else:
        print_table(world, truth, found, Console())
    return 0


def as_record(world: str, truth: GroundTruth, found: Comparison) -> dict[str, object]:
    """The comparison as plain JSON values; a number that is not finite becomes null."""
    return {
        "scoregram": __version__,
        "world": world,
        "budget": found.budget,
        "objective": truth.objective,
        "gradient_norm": float(truth.objective_gradient.norm()),
        "least_error": found.least_error.estimator,
        "highest_snr": found.highest_snr.estimator,
        "rows": [{name: plain(value) for name, value in asdict(row).items()} for row in found.rows],
        "left_out": dict(found.left_out),
    }


def print_table(world: str, truth: GroundTruth, found: Comparison, console: Console) -> None:
    """One row an estimator, then what was left out and why."""
    group_size = found.rows[0].group_size
    title = f"{world}: a step of at most {found.budget} rollouts in groups of {group_size}"
    table = Table(title=Text(title), caption=Text(READING), title_justify="left", caption_justify="left")
    table.add_column("estimator", no_wrap=True)
    for name in ("groups", "rollouts", "bias", "error", "SNR", "cosine"):
        table.add_column(name, justify="right", no_wrap=True)
    unit = float(truth.objective_gradient.norm())
    for row in found.rows:
        error = math.sqrt(row.mse) / unit
        numbers = (row.relative_bias, error, row.snr_squared, row.cosine)
        cells = (str(row.prompts), f"{row.rollouts:.4g}", *(f"{number:.3f}" for number in numbers))
        table.add_row(marked(row, found), *cells, style="dim" if row.given_values else "")
    console.print(table)
    for name, reason in found.left_out:
        console.print(Text(f"left out: {name} ({reason})", style="dim"))


def marked(row: Row, found: Comparison) -> Text:
    """The name of an estimator with its marks."""
    marks = "★" * (row == found.least_error) + "☆" * (row == found.highest_snr) + "°" * row.given_values
    return Text(f"{row.estimator} {marks}".strip())


def plain(value: object) -> object:
    """`value`, with a number that JSON cannot hold turned into None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
