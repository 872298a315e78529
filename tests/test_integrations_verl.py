"""Estimators for a labelled batch, and their place in verl's registry.

The registry is played by a module with the interface of verl's own; the numbers are held against the estimators of the
table applied to one group after another.
"""

import importlib
import importlib.machinery
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from scoregram.advantages import ESTIMATORS
from scoregram.errors import NotFiniteError, ScoregramError
from scoregram.integrations import verl
from scoregram.integrations.registries import SERVED_ESTIMATORS, labelled_advantages

WITHIN_GROUPS = [name for name in SERVED_ESTIMATORS if not ESTIMATORS[name].couples_prompts]
OVER_BATCH = [name for name in SERVED_ESTIMATORS if ESTIMATORS[name].couples_prompts]


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Tensor, np.ndarray]:
    """Token rewards `(N, T)`, a mask and the names of scattered groups of unequal sizes."""
    rollouts, tokens = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    labels = draw(st.lists(st.sampled_from("abcd"), min_size=rollouts, max_size=rollouts))
    mask = draw(st.lists(st.integers(0, 1), min_size=rollouts * tokens, max_size=rollouts * tokens))
    scale = draw(st.sampled_from([1e-6, 1.0, 1e6]))
    values = draw(st.lists(st.integers(-2, 2), min_size=rollouts * tokens, max_size=rollouts * tokens))
    rewards = scale * torch.tensor(values, dtype=torch.float64).view(rollouts, tokens)
    return rewards, torch.tensor(mask).view(rollouts, tokens), np.array(labels, dtype=object)


def one_group_after_another(name: str, rewards: Tensor, mask: Tensor, labels: np.ndarray) -> Tensor:
    """The slow reference: a loop over groups, the table's function on each, zeros for a group that is too small."""
    row, result = ESTIMATORS[name], torch.zeros_like(rewards)
    for label in set(labels):
        members = [place for place in range(len(labels)) if labels[place] == label]
        if len(members) < row.min_group:
            continue
        group = torch.stack([rewards[place].sum() for place in members])[None]
        lengths = torch.tensor([[int(mask[place].sum()) for place in members]])
        inputs = {"lengths": lengths, "outcomes": group}
        advantages = row.fn(group, **{need: inputs[need] for need in row.needs})[0]
        for place, advantage in zip(members, advantages, strict=True):
            for token in range(rewards.shape[1]):
                result[place, token] = advantage if mask[place, token] else 0.0
    return result


@pytest.mark.parametrize("name", WITHIN_GROUPS)
@given(batch=batches())
def test_equals_the_table_applied_group_by_group(name, batch):
    rewards, mask, labels = batch
    found, returns = verl.REGISTERED[f"scoregram-{name}"](
        token_level_rewards=rewards, response_mask=mask, index=labels, config=None
    )
    torch.testing.assert_close(found, one_group_after_another(name, rewards, mask, labels), rtol=1e-12, atol=0)
    assert torch.equal(found, returns)


def whitened_by_token(values: Tensor, counts: Tensor) -> Tensor:
    """Every value repeated as often as its rollout has tokens, then minus the mean over the sample deviation."""
    tiled = torch.cat([value.repeat(int(count)) for value, count in zip(values, counts, strict=True)])
    return (values - tiled.mean()) / tiled.std()


@pytest.mark.parametrize("name", OVER_BATCH)
@given(seed=st.integers(0, 100))
def test_whitening_spans_the_batch(name, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = np.array(["a", "b", "alone", "a", "b", "a"])
    rewards = torch.randn(6, 3, dtype=torch.float64, generator=generator)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 1], [1, 1, 0], [0, 1, 1]])
    values, counts = rewards.sum(1), mask.sum(1)
    expected = torch.zeros(6, dtype=torch.float64)
    if name == "reinforce++":
        expected = whitened_by_token(values, counts)
    else:
        several = labels != "alone"
        means = torch.stack([values[torch.from_numpy(labels == label)].mean() for label in labels])
        expected[several] = whitened_by_token((values - means)[several], counts[several])
    torch.testing.assert_close(labelled_advantages(name, rewards, mask, labels), expected[:, None] * mask)


@pytest.mark.parametrize("name", [name for name in WITHIN_GROUPS if ESTIMATORS[name].min_group > 1])
@pytest.mark.parametrize("reward", [0.0, 0.1, 1e6])
def test_dead_groups_and_groups_of_one_give_exact_zeros(name, reward):
    rewards = torch.full((4, 1), reward)
    assert labelled_advantages(name, rewards, torch.ones(4, 1), ["a", "a", "b", "a"]).count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_only_the_result_is_rounded(dtype):
    """The sum of 64 token rewards is exact in the numbers of Python; in bfloat16 it would be off by 1 %."""
    rewards = torch.rand(4, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    sums = [sum(map(Fraction, row)) for row in rewards.tolist()]
    exact = [float(one - (sum(sums) - one) / 3) for one in sums]
    found = labelled_advantages("rloo", rewards, torch.ones(4, 64), ["a"] * 4)
    assert torch.equal(found[:, 0], torch.tensor(exact, dtype=torch.float64).to(dtype))


@pytest.mark.parametrize("name", SERVED_ESTIMATORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("mask_dtype", [torch.int64, torch.bool, torch.float64])
def test_dtype_shape_and_inputs_are_kept(name, dtype, mask_dtype):
    rewards = torch.tensor([[0.0, 1.0], [0.5, 0.0], [0.25, 0.0]], dtype=dtype)
    mask = torch.tensor([[1, 1], [1, 0], [1, 1]]).to(mask_dtype)
    before = rewards.clone()
    found = labelled_advantages(name, rewards, mask, ["a", "a", "a"])
    assert found.dtype == dtype and found.device == rewards.device and found.shape == rewards.shape
    assert found[1, 1] == 0 and torch.equal(rewards, before)


def test_rollouts_left_out_count_nowhere():
    rewards, mask = torch.tensor([[1.0], [0.0], [9.0]]), torch.ones(3, 1)
    found = labelled_advantages("mean", rewards, mask, ["a", "a", "a"], left_out=1)
    assert found.flatten().tolist() == [0.5, -0.5, 0.0]


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index": None}, "every rollout needs a group label"),
        ({"index": ["a"]}, "there must be 2 group labels"),
        ({"response_mask": torch.ones(2, 3)}, "response_mask must have the shape"),
    ],
)
def test_what_cannot_be_used_is_refused(change, message):
    fields: dict[str, Any] = {
        "token_level_rewards": torch.zeros(2, 2),
        "response_mask": torch.ones(2, 2),
        "index": "ab",
    }
    with pytest.raises(ScoregramError, match=message):
        verl.REGISTERED["scoregram-rloo"](**fields | change)


def test_a_reward_that_is_not_finite_is_refused():
    with pytest.raises(NotFiniteError):
        labelled_advantages("rloo", torch.tensor([[float("nan")], [1.0]]), torch.ones(2, 1), ["a", "a"])


def test_verl_is_told_where_to_look():
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["verl.plugins"] == {"scoregram": verl.__name__}


def test_the_documented_estimators_are_the_registered_ones():
    page = (Path(__file__).parent.parent / "docs" / "verl.md").read_text()
    section = page.split("## The estimators")[1].split(". What each is")[0]
    assert set(re.findall(r"`([a-z+-]+)`", section)) - {"scoregram-"} == set(SERVED_ESTIMATORS)
    assert f"{len(SERVED_ESTIMATORS)} advantage estimators" in page


def fake_verl(version: str, *, registry: bool = True) -> dict[str, ModuleType]:
    """Modules with the interface of verl's registry: a decorator that refuses a second function under a name."""
    names = ("verl", "verl.trainer", "verl.trainer.ppo", "verl.trainer.ppo.core_algos")
    modules = {name: ModuleType(name) for name in names}
    for name, module in modules.items():
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        if "." in name:
            setattr(modules[name.rpartition(".")[0]], name.rpartition(".")[2], module)
    held: dict[str, Callable[..., Any]] = {}

    def register_adv_est(name: str) -> Callable[[Callable[..., Any]], None]:
        def add(fn: Callable[..., Any]) -> None:
            if held.setdefault(name, fn) != fn:
                raise ValueError(f"{name} has already been registered")

        return add

    modules["verl"].__dict__["__version__"] = version
    modules["verl.trainer.ppo.core_algos"].__dict__["held"] = held
    if registry:
        modules["verl.trainer.ppo.core_algos"].__dict__["register_adv_est"] = register_adv_est
    return modules


@pytest.fixture
def fresh_import() -> Iterator[None]:
    """The integration as it was before, whatever a test imported it beside."""
    yield
    sys.modules["scoregram.integrations.verl"] = verl


@pytest.mark.usefixtures("fresh_import")
def test_importing_registers_and_registering_again_is_nothing_new(monkeypatch):
    modules = fake_verl(verl.TESTED[-1])
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules.pop("scoregram.integrations.verl")
    again = importlib.import_module("scoregram.integrations.verl")
    held = modules["verl.trainer.ppo.core_algos"].__dict__["held"]
    assert set(held) == {f"scoregram-{name}" for name in SERVED_ESTIMATORS}
    assert again.register() == verl.TESTED[-1]


def test_another_version_is_announced(monkeypatch):
    for name, module in fake_verl("0.1.2").items():
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.warns(UserWarning, match=r"tested with verl .*, this is 0\.1\.2"):
        verl.register()


def test_a_verl_without_a_registry_is_an_error_and_on_import_a_warning(monkeypatch):
    for name, module in fake_verl("0.4.0", registry=False).items():
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(ScoregramError, match=r"needs core_algos\.register_adv_est, got verl 0\.4\.0"):
        verl.register()
    with pytest.warns(UserWarning, match="no estimator was registered"):
        verl.register_on_import()


def test_a_name_that_is_taken_is_an_error(monkeypatch):
    modules = fake_verl(verl.TESTED[-1])
    modules["verl.trainer.ppo.core_algos"].__dict__["held"]["scoregram-rloo"] = print
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(ScoregramError, match="the name scoregram-rloo must be free"):
        verl.register()


def test_without_verl_importing_is_silent_and_registering_an_error(monkeypatch):
    monkeypatch.setattr(verl, "find_spec", lambda name: None)
    verl.register_on_import()
    monkeypatch.setitem(sys.modules, "verl", None)
    with pytest.raises(ScoregramError, match="needs verl"):
        verl.register()
