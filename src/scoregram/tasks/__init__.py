"""Prompts with verifiable rewards.

`task` tasks, problems and reward functions · `arithmetic` the embedded task · `text_tasks` GSM8K, reasoning-gym, JSON
lines · `answers` whether two answers are equal · `table` every task by name.
"""

from scoregram.tasks.arithmetic import (
    arithmetic,
    careless_solution,
    careless_teacher,
    first_wrong_character,
    number_of_terms,
    solution,
)
from scoregram.tasks.table import TASKS, TaskRow, load_task
from scoregram.tasks.task import (
    MAX_NEW_TOKENS,
    LazyProblems,
    Problem,
    RewardFunction,
    Step,
    Task,
    first_error,
    load_reward,
    reward_columns,
)

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
