"""Our estimators in SkyRL's registry, played by a class with its interface; the numbers are those of the verl tests."""

import pickle
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from scoregram.errors import ScoregramError
from scoregram.integrations import skyrl
from scoregram.integrations.registries import SERVED_ESTIMATORS, labelled_advantages

ARGUMENTS = {"values": None, "grpo_norm_by_std": True, "gamma": 1.0, "lambd": 1.0, "config": None}
"""What SkyRL passes besides."""


@pytest.mark.parametrize("name", SERVED_ESTIMATORS)
def test_called_as_skyrl_calls_it(name):
    rewards, mask = torch.tensor([[0.0, 1.0], [0.5, 0.0], [0.0, 0.25]]), torch.tensor([[1, 1], [1, 0], [1, 1]])
    labels = ["a", "a", "a"]
    found, returns = skyrl.REGISTERED[f"scoregram-{name}"](
        token_level_rewards=rewards, response_mask=mask, index=labels, **ARGUMENTS
    )
    assert torch.equal(found, labelled_advantages(name, rewards, mask, labels)) and torch.equal(found, returns)


@pytest.mark.parametrize("name", SERVED_ESTIMATORS)
def test_padding_changes_nothing_and_gets_nothing(name):
    rewards, mask = torch.tensor([[0.0, 1.0], [0.5, 0.0], [0.0, 0.25]]), torch.tensor([[1, 1], [1, 0], [1, 1]])
    alone, _ = skyrl.REGISTERED[f"scoregram-{name}"](rewards, mask, ["a", "a", "a"])
    # SkyRL fills up with copies of the first rollout
    filled, _ = skyrl.REGISTERED[f"scoregram-{name}"](
        rewards[[0, 1, 2, 0, 0]], mask[[0, 1, 2, 0, 0]], ["a", "a", "a", "pad0", "pad1"]
    )
    assert torch.equal(filled[:3], alone) and filled[3:].count_nonzero() == 0


@pytest.mark.parametrize(
    ("names", "count"),
    [(["pad0"], 1), (["a"], 0), ([], 0), (["pad0", "pad2"], 0), (["x", "pad"], 0), (["pad0", "a"], 0), (["pad1"], 0)],
)
def test_only_the_names_that_skyrl_gives_are_padding(names, count):
    assert skyrl.padding(names) == count


def test_without_uids_is_refused():
    with pytest.raises(ScoregramError, match="every rollout needs a group label"):
        skyrl.REGISTERED["scoregram-rloo"](torch.zeros(2, 1), torch.ones(2, 1))


@pytest.mark.parametrize("name", SERVED_ESTIMATORS)
def test_an_estimator_travels_by_name(name):
    sent = pickle.loads(pickle.dumps(skyrl.REGISTERED[f"scoregram-{name}"]))
    assert sent.func is skyrl.advantages_and_returns and sent.keywords == {"estimator": name}


def installed(monkeypatch: pytest.MonkeyPatch, version: str, *, registry: bool = True) -> dict[str, Any]:
    """A SkyRL with the interface of its registry, which refuses a name that is taken; returns what is registered."""
    held: dict[str, Any] = {}

    class Registry:
        @staticmethod
        def list_available() -> list[str]:
            return list(held)

        @staticmethod
        def register(name: str, func: Callable[..., Any]) -> None:
            if name in held:
                raise ValueError(f"{name} already registered")
            held[name] = func

    path = ["skyrl", "backends", "skyrl_train", "utils", "ppo_utils"]
    modules = [ModuleType(".".join(path[: depth + 1])) for depth in range(len(path))]
    for above, module in zip([None, *modules], modules, strict=False):
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
        if above is not None:
            setattr(above, module.__name__.rpartition(".")[2], module)
    modules[0].__dict__["__version__"] = version
    if registry:
        modules[-1].__dict__["AdvantageEstimatorRegistry"] = Registry
    return held


def test_registers_once(monkeypatch):
    held = installed(monkeypatch, skyrl.TESTED[-1])
    assert skyrl.register() == skyrl.register() == skyrl.TESTED[-1]
    assert set(held) == {f"scoregram-{name}" for name in SERVED_ESTIMATORS}


def test_another_version_is_announced(monkeypatch):
    installed(monkeypatch, "9.9")
    with pytest.warns(UserWarning, match=r"tested with SkyRL .*, this is 9\.9"):
        skyrl.register()


def test_no_registry_and_no_skyrl_are_errors(monkeypatch):
    installed(monkeypatch, "0.0.1", registry=False)
    with pytest.raises(ScoregramError, match=r"needs AdvantageEstimatorRegistry, got SkyRL 0\.0\.1"):
        skyrl.register()
    monkeypatch.setitem(sys.modules, "skyrl", None)
    with pytest.raises(ScoregramError, match="needs SkyRL and its training backend"):
        skyrl.register()
