"""Section 6 of the paper on the exact lab: the advantage's error by turn, and what it does to the gradient."""

import torch

from scoregram.exhibits import Cell, Table
from scoregram.theory import WORLDS, GroundTruth, credit_costs, ground_truth, listing, network_policy, offsets_by_turn

WORLD = "user_turns"
GROUP_SIZE = 4
ROUNDING = 1e-12


def lab_truth(world: str = WORLD) -> GroundTruth:
    """The lab's small network in one of its worlds."""
    rows = listing(WORLDS[world])
    return ground_truth(rows, network_policy(rows, generator=torch.Generator().manual_seed(0)))


def offsets_table() -> Table:
    """Mean and spread of what a rollout-level advantage misses, by turn."""
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (one.turn, *map(settled, (one.alive, one.mean, one.sd, one.largest))) for one in offsets_by_turn(lab_truth())
    )
    return Table(
        "turn-offset",
        "What a rollout-level advantage misses, by turn",
        "Exact, nothing sampled. The offset past rewards + v(s_h) - v(s_0) has mean zero at every turn: it is a "
        "martingale. Its spread grows, and with it the noise, not the bias, of the gradient.",
        ("turn", "still going", "mean offset", "standard deviation", "largest"),
        rows,
    )


def credit_table() -> Table:
    """Error of the advantage, bias and variance of the gradient for ways of giving credit to turns."""
    costs = credit_costs(lab_truth(), group_size=GROUP_SIZE)
    names = tuple(name for name in vars(costs[0]) if name != "formula_gap")
    rows: tuple[tuple[Cell, ...], ...] = tuple(tuple(settled(getattr(cost, name)) for name in names) for cost in costs)
    return Table(
        "turn-credit",
        f"Ways of giving credit to turns, R = {GROUP_SIZE}",
        "Exact, nothing sampled: error of the advantage given state and action, bias and noise of the gradient.",
        tuple(name.replace("_", " ") for name in names),
        rows,
    )


def settled(value: Cell) -> Cell:
    """The value; 0 for a number that is rounding and nothing else, so that it is the same on every machine."""
    return 0.0 if isinstance(value, float) and abs(value) < ROUNDING else value
