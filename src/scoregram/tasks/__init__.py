"""Prompts with verifiable rewards.

`task` tasks, problems, environments, reward functions · `arithmetic` the embedded task · `turn_tasks` the embedded
environments · `forecasts` random outcomes · `text_tasks` GSM8K, reasoning-gym, JSON lines · `answers` equal
answers · `table` every task by name.
"""

from scoregram.tasks.arithmetic import arithmetic as arithmetic
from scoregram.tasks.arithmetic import arithmetic_compositions as arithmetic_compositions
from scoregram.tasks.arithmetic import careless_solution as careless_solution
from scoregram.tasks.arithmetic import careless_teacher as careless_teacher
from scoregram.tasks.arithmetic import number_of_terms as number_of_terms
from scoregram.tasks.arithmetic import solution as solution
from scoregram.tasks.forecasts import coin_forecasts as coin_forecasts
from scoregram.tasks.table import TASKS as TASKS
from scoregram.tasks.table import CountedParts as CountedParts
from scoregram.tasks.table import TaskRow as TaskRow
from scoregram.tasks.table import load_task as load_task
from scoregram.tasks.task import MAX_NEW_TOKENS as MAX_NEW_TOKENS
from scoregram.tasks.task import DemonstratedTurn as DemonstratedTurn
from scoregram.tasks.task import Environment as Environment
from scoregram.tasks.task import LazyProblems as LazyProblems
from scoregram.tasks.task import Problem as Problem
from scoregram.tasks.task import Reply as Reply
from scoregram.tasks.task import RewardFunction as RewardFunction
from scoregram.tasks.task import ScoredStep as ScoredStep
from scoregram.tasks.task import SolutionStep as SolutionStep
from scoregram.tasks.task import StepScoreFunction as StepScoreFunction
from scoregram.tasks.task import Task as Task
from scoregram.tasks.task import TeachingEnvironment as TeachingEnvironment
from scoregram.tasks.task import built_environment as built_environment
from scoregram.tasks.task import demonstrated_episode as demonstrated_episode
from scoregram.tasks.task import load_reward as load_reward
from scoregram.tasks.task import load_step_scores as load_step_scores
from scoregram.tasks.task import raised_by as raised_by
from scoregram.tasks.task import reward_columns as reward_columns
from scoregram.tasks.task import rewarded_by_environment as rewarded_by_environment
