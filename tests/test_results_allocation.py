"""`results/allocation` and `results/influence`: every table follows from the stored files; slopes against autograd."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from scoregram.policy import PolicyConfig, load_policy
from scoregram.tasks import load_task
from tests.training_cases import JUDGE, save_policy

pytestmark = pytest.mark.slow  # runs in `make test-results`

RESULTS = Path(__file__).parent.parent / "results"


def module(folder: str, name: str) -> ModuleType:
    title = f"{folder}_{name}"
    spec = importlib.util.spec_from_file_location(title, RESULTS / folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[title] = loaded  # dataclasses look their module up
    spec.loader.exec_module(loaded)
    return loaded


@pytest.mark.parametrize("folder", ["allocation", "influence"])
def test_every_table_of_the_page_is_computed_from_the_files(folder):
    page = (RESULTS / folder / "README.md").read_text(encoding="utf-8")
    assert module(folder, "summarise").filled(page) == page


def test_slopes_are_products_with_the_score_of_each_solution(tmp_path):
    run, task = module("influence", "run"), load_task("arithmetic:3", seed=0, reward=JUDGE)
    policy = load_policy(PolicyConfig(model=str(save_policy(tmp_path)), prompt="plain"), task)
    held, weights = run.held_out_solutions(policy, task, 3), list(policy.model.parameters())
    direction = torch.randn(sum(w.numel() for w in weights), generator=torch.Generator().manual_seed(0))
    (found,) = held.slopes(policy, [direction])
    for value, slope in zip(held.log_probs(policy), found, strict=True):
        gradient = torch.autograd.grad(value, weights, retain_graph=True)
        expected = torch.cat([part.flatten() for part in gradient]) @ direction
        assert float(slope.detach()) == pytest.approx(float(expected), rel=1e-3)


def test_the_table_of_runs_pairs_seeds_with_the_best_fixed_size():
    run = module("allocation", "run")

    def runs(*finals: float) -> dict[str, dict[str, object]]:
        return {str(seed): {"evaluations": [[0, 0.0], [100, final]]} for seed, final in enumerate(finals)}

    table = run.task_table({"R = 4": runs(0.2, 0.4), "R = 8": runs(0.6, 0.8), "auto": runs(0.7, 0.8)}, ("final",))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert rows[0][3] == "final minus R = 8"
    assert rows[4][:3] == ["auto", "2", rows[4][2]] and rows[4][3].startswith("5.0 [")
    assert rows[3][3] == ""
