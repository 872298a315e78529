"""Problems of evaluations and probes, before they are read."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from scoregram.checks import ScoregramError
from scoregram.policy import load_policy
from scoregram.tasks import Problem, load_task
from scoregram.training.evaluate import held_out_problems
from tests.training_cases import config_for, save_policy


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


def test_prompts_that_leave_no_room_are_refused_where_they_are_read(policy, tmp_path):
    """Those of test problems and held-out splits in runs that evaluate, those of probes in runs that probe."""
    task, long = load_task("arithmetic:3"), Problem("long", "1" * 600, "1")
    optimizer = torch.optim.SGD([torch.zeros(1)])
    loaded = load_policy(config_for(policy, tmp_path).policy, task)
    tested, split = replace(task, test=[long]), replace(task, held_out={"other": [*task.test[:2], long]})
    says = r"must fit into the context of \d+ tokens, got 600 tokens of prompt long"
    for told, changes in ((tested, {}), (split, {}), (tested, {"eval_every": 0, "probe_every": 1})):
        with pytest.raises(ScoregramError, match=says):
            held_out_problems(config_for(policy, tmp_path, **changes), loaded, told, optimizer)
    for told in (tested, split):
        held_out_problems(config_for(policy, tmp_path, eval_every=0), loaded, told, optimizer)
