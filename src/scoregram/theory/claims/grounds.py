"""The worlds and policies on which claims are decided, built once for all checks of a run."""

from collections.abc import Iterator
from functools import lru_cache

import torch

from scoregram.theory.lab.exact import GroundTruth, ground_truth
from scoregram.theory.lab.worlds import WORLDS, World, listing, network_policy, tabular_policy
from scoregram.theory.lab.worlds import Transition as Outcome

EXACT = 1e-12
"""What counts as equal: sums over a list in float64 leave about 1e-15."""

MULTI_TURN = ("step_rewards", "user_turns", "stopping")
SINGLE_TURN = ("output_only", "output_only_binary")


@lru_cache
def ground(world: World, policy: str, *, seed: int = 0) -> GroundTruth:
    """Everything that is true of a seeded policy in a world; `uniform` gives all actions the same chance."""
    rows, generator = listing(world), torch.Generator().manual_seed(seed)
    if policy == "network":
        return ground_truth(rows, network_policy(rows, generator=generator))
    return ground_truth(rows, tabular_policy(rows, generator=generator, scale=float(policy == "tabular")))


def grounds(*names: str) -> Iterator[GroundTruth]:
    """The named worlds, each with a policy that shares no parameters between states and one that shares all."""
    for name in names:
        for policy in ("tabular", "network"):
            yield ground(WORLDS[name], policy)


ONE_DECISION = World(
    "one decision",
    (1.0,),
    lambda history: 8,
    lambda history, action: (Outcome(1.0, float(action == 0), ends=True),),
)
"""One answer out of eight, one of them right: a single turn that is a single step."""

INDEPENDENT_TURNS = World(
    "independent turns",
    (1.0,),
    lambda history: 2,
    lambda history, action: (Outcome(1.0, float(action), ends=len(history) // 2 == 7),),
)
"""Eight turns, each paid for itself: `1` for action 1, whatever came before."""

REVERSAL = World(
    "reversal",
    (1.0,),
    lambda history: 2,
    lambda history, action: (
        (Outcome(0.95, 0.0, 0), Outcome(0.05, 0.0, 1))
        if len(history) == 1
        else (Outcome(1.0, 1.0 if history[2] else -1.0, ends=True),)
    ),
)
"""Two turns: chance decides in the first whether the second costs `1`, as it mostly does, or pays `1`."""
