"""Prompts with verifiable rewards: one small file per task, and one table of them.

`task` what a task is · `table` every task by name · `reward` a user's own reward function as `module:function`.
"""

from scoregram.tasks.task import LazyProblems, Problem, RewardFunction, Step, Task, first_error, reward_columns

__all__ = ["LazyProblems", "Problem", "RewardFunction", "Step", "Task", "first_error", "reward_columns"]
