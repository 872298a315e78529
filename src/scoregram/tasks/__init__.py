"""Prompts with verifiable rewards: one small file per task, and one table of them.

`task` what a task is · `table` every task by name · `arithmetic`, `gsm8k`, `reasoning_gym`, `jsonl` the tasks ·
`answers` when two answers are the same · `reward` a user's own function · `mistakes` what a warm start gets wrong.
"""

from scoregram.tasks.arithmetic import arithmetic, first_wrong_character, number_of_terms, solution
from scoregram.tasks.jsonl import MAX_NEW_TOKENS
from scoregram.tasks.mistakes import careless_solution, careless_teacher
from scoregram.tasks.reward import load_reward
from scoregram.tasks.table import TASKS, TaskRow, load_task
from scoregram.tasks.task import LazyProblems, Problem, RewardFunction, Step, Task, first_error, reward_columns

__all__ = [
    "MAX_NEW_TOKENS",
    "TASKS",
    "LazyProblems",
    "Problem",
    "RewardFunction",
    "Step",
    "Task",
    "TaskRow",
    "arithmetic",
    "careless_solution",
    "careless_teacher",
    "first_error",
    "first_wrong_character",
    "load_reward",
    "load_task",
    "number_of_terms",
    "reward_columns",
    "solution",
]
