"""A warm start lowers the loss on solutions, and what it writes can be loaded and trained on."""

import torch

from scoregram.policy import PolicyConfig, load_policy, padded_demonstrations, token_log_probs
from scoregram.tasks import load_task
from scoregram.training.supervised import task_demonstration, warm_start, write_warm_start
from tests.training_cases import save_policy


def loss_on(policy, task) -> float:
    lessons = [task_demonstration(policy, task, problem, task.demonstrate(problem, None)) for problem in task.test[:16]]
    ids, attention, solution = padded_demonstrations(lessons, policy.pad_id, torch.device("cpu"))
    with torch.no_grad():
        return -float(token_log_probs(policy.model, ids, attention, solution).sum() / solution.sum())


def test_a_warm_start_teaches_and_can_be_loaded(tmp_path):
    task = load_task("arithmetic:3")
    policy = load_policy(PolicyConfig(model=str(save_policy(tmp_path / "raw")), prompt="plain", device="cpu"), task)
    before, said = loss_on(policy, task), []
    warm_start(policy, task, epochs=640 / len(task.train), learning_rate=1e-2, tell=said.append)
    after = loss_on(policy, task)
    assert after < 0.6 * before and said
    write_warm_start(policy, tmp_path / "warm")
    again = load_policy(PolicyConfig(model=str(tmp_path / "warm"), prompt="plain", device="cpu"), task)
    assert loss_on(again, task) == after


def test_a_lesson_is_prompt_solution_and_stop_token(tmp_path):
    task = load_task("arithmetic:3")
    policy = load_policy(PolicyConfig(model=str(save_policy(tmp_path / "raw")), prompt="plain", device="cpu"), task)
    problem = task.train[0]
    one = task_demonstration(policy, task, problem, "12.")
    assert policy.decode(one.ids[: one.prompt]) == task.prompt(problem)
    assert policy.decode(one.ids[one.prompt :]) == "12."
    assert one.ids[-1] == policy.stop_ids[0]
    ids, attention, solution = padded_demonstrations(
        [one, task_demonstration(policy, task, problem, "1.")], policy.pad_id, torch.device("cpu")
    )
    assert attention.sum(1).tolist() == [len(one.ids), len(one.ids) - 1]
    assert solution.sum(1).tolist() == [4, 3]
    assert ids[1, -1] == policy.pad_id
