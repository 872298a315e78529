"""`measure_gram` at random settings against its definition: one backward pass per rollout, alone and unpadded."""

import contextlib
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from scoregram.gram import backward_with_gram, measure_gram, plan_passes
from tests.cases import ARCHITECTURES, VOCABULARY, KeepDouble
from tests.naive import score_rows

pytestmark = pytest.mark.filterwarnings("ignore:scoregram. active dropout")

MODELS = (
    "llama",
    "llama-tied",
    "llama-bias",
    "qwen3",
    "gemma2",
    "gpt2",
    "phi",
    "bloom",
    "cohere",
    "qwen3-moe",
    "mamba",
)
BOUND = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Allowed error, relative to `‖K‖` or to the norm of all scores. In float64 the models' own casts are switched off."""


@dataclass(frozen=True)
class Setting:
    """One draw: rollouts as lists, and everything else that a caller chooses."""

    tokens: list[list[int]]
    counts: list[list[bool]]
    coefficients: list[list[float]]
    model: str
    dtype: torch.dtype
    frozen: float
    temperature: float
    group_size: int | None
    packed: bool
    plan: bool
    training: bool
    verify: bool


def drawn_setting(draw: random.Random) -> Setting:
    """A setting; lengths, masks, duplicates and groups included."""
    group, groups = draw.choice([1, 2, 3]), draw.choice([1, 2, 3])
    tokens = [[draw.randrange(3, VOCABULARY) for _ in range(draw.randint(2, 10))] for _ in range(group * groups)]
    counts = [[False] + [draw.random() < 0.7 for _ in row[1:]] for row in tokens]
    exponent = draw.choice([0, 0, -30, 20])
    coefficients = [[draw.gauss(0, 1) * 2.0**exponent for _ in row] for row in tokens]
    if draw.random() < 0.3:  # two equal rollouts
        tokens[-1], counts[-1], coefficients[-1] = tokens[0], counts[0], coefficients[0]
    if draw.random() < 0.2:  # a rollout without completion
        counts[draw.randrange(len(counts))] = [False] * 10
    counts = [row[: len(ids)] for row, ids in zip(counts, tokens, strict=True)]
    plan = draw.random() < 0.2
    return Setting(
        tokens,
        counts,
        coefficients,
        model=draw.choice(MODELS),
        dtype=draw.choice([torch.float64, torch.float64, torch.float32]),
        frozen=draw.choice([0.0, 0.0, 0.5]),
        temperature=draw.choice([1.0, 0.6, 1.7]),
        group_size=None if plan else draw.choice([None, group]),
        packed=draw.random() < 0.4,
        plan=plan,
        training=draw.random() < 0.3,
        verify=draw.random() < 0.3,
    )


def batch_of(setting: Setting, draw: random.Random) -> tuple[list[Tensor], dict[str, Tensor], Tensor]:
    """Ids, completion mask and, if not packed, attention mask; the rest by keyword; the rollout of every token."""
    order = list(range(len(setting.tokens)))
    rows = [[row] for row in order]
    if setting.packed:
        draw.shuffle(order)
        cuts = sorted(draw.sample(range(1, len(order)), draw.randint(0, min(2, len(order) - 1)))) if order[1:] else []
        rows = [order[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(order)], strict=True)]
    cells: list[list[tuple[int, bool, float, int]]] = []
    for owners in rows:
        row = [
            (setting.tokens[i][t], setting.counts[i][t], setting.coefficients[i][t], i)
            for i in owners
            for t in range(len(setting.tokens[i]))
        ]
        for _ in range(draw.choice([0, 0, 1, 4])):  # padding anywhere, with values that must not be read
            row.insert(draw.choice([0, len(row), draw.randint(0, len(row))]), (0, False, draw.gauss(0, 9), -1))
        cells.append(row)
    width = max(map(len, cells))
    cells = [row + [(0, False, 0.0, -1)] * (width - len(row)) for row in cells]
    ids, counts, owner = (torch.tensor([[cell[k] for cell in row] for row in cells]) for k in (0, 1, 3))
    given = {"coefficients": torch.tensor([[cell[2] for cell in row] for row in cells], dtype=torch.float64)}
    if setting.packed:
        return [ids, counts], given | {"rollout_ids": owner}, owner
    return [ids, counts, (owner >= 0).long()], given, owner


def scores_of(model: Any, setting: Setting) -> Tensor:
    """`(N, D)` scores, one rollout after another."""
    rows = [
        score_rows(
            model,
            torch.tensor([ids]),
            torch.tensor([counts]),
            torch.ones(1, len(ids)),
            torch.tensor([factors], dtype=torch.float64),
            setting.temperature,
        )
        for ids, counts, factors in zip(setting.tokens, setting.counts, setting.coefficients, strict=True)
    ]
    return torch.cat(rows)


def assert_as_defined(seed: int) -> None:
    draw = random.Random(seed)
    setting = drawn_setting(draw)
    args, given, owner = batch_of(setting, draw)
    exact = KeepDouble if setting.dtype is torch.float64 else contextlib.nullcontext
    model = ARCHITECTURES[setting.model]()
    for parameter in list(model.parameters())[1:]:
        parameter.requires_grad_(draw.random() >= setting.frozen)
    with KeepDouble():
        scores = scores_of(model, setting)
    expected = scores @ scores.T
    model.to(setting.dtype).train(setting.training)
    settings: dict[str, Any] = given | {"temperature": setting.temperature}
    with exact():
        longest = max(map(len, setting.tokens))
        plan = plan_passes(model, len(scores), longest, per_pass=draw.randint(1, 4)) if setting.plan else None
        gram = measure_gram(model, *args, **settings, group_size=setting.group_size, plan=plan, verify=setting.verify)
        weights = torch.linspace(-1.0, 2.0, len(scores), dtype=torch.float64)
        step = backward_with_gram(model, *args, **settings, group_size=setting.group_size, weights=weights)
    size, bound = setting.group_size or len(scores), BOUND[setting.dtype]
    same = torch.arange(len(scores)) // size
    inside = same[:, None] == same
    for matrix in (gram.matrix, step.matrix):
        assert bool((matrix.isnan() == ~inside).all())
        assert float((matrix - expected)[inside].norm()) <= bound * float(expected[inside].norm())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradient = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).double().flatten() for p in trained])
    assert float((gradient - weights @ scores).norm()) <= bound * float(scores.norm())
    assert not gram.log_probs[owner < 0].any()


@pytest.mark.parametrize("seed", range(36))
def test_random_settings(seed):
    assert_as_defined(seed)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(12))
def test_more_random_settings(block):
    for seed in range(1000 + 40 * block, 1040 + 40 * block):
        assert_as_defined(seed)
