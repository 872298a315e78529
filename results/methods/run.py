"""Trains every method on every task of this folder, at equal rollouts: `scoregram compare` for each task, one queue.

python run.py OUT [--tasks arithmetic,stopping] [--methods grpo,rloo] [--seeds 6] [--workers 12] [--known FILE …]
python run.py OUT --fresh [--workers 12]

The same command continues after an interruption. Runs in the records are not trained again (`collect.py` keeps them).
`--methods` names those to train, of all that a task has.
The queue goes seed by seed, so that whatever is finished has all methods of a task. Starting policies of the
reasoning-gym tasks and of GSM8K must be in OUT/starts (`start.py`).
"""

import argparse
import json
import lzma
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from scoregram.compare import CompareConfig
from scoregram.compare.cells import planned_cells, run_or_explain, write_comparison_setting
from scoregram.compare.config import MethodChoice
from scoregram.compare.results import MEAN_RETURN, RunResult
from scoregram.policy import load_policy
from scoregram.policy.tiny import THREADS
from scoregram.reading import read_run
from scoregram.runs import open_run
from scoregram.tasks import load_task
from scoregram.training import METHODS, TrainConfig, run_in_processes

RATES, LARGE_MODEL_RATES = (1e-4, 3e-4), (1e-6, 3e-6)
"""Learning rates to choose from; every method of a task gets the same."""
TUNING_SEED, TUNING_METHODS = 100, "grpo,rloo"
"""The rate with the higher mean return after the last step, over these methods with this seed, which no table has."""
FIRST = "grpo"
"""Method that the others are compared with."""

ONE_TURN = {
    "turn-mean": "a rollout is one turn: the same as grpo-paper",
    "turn-rloo": "a rollout is one turn: the same as rloo",
    "mt-grpo": "a rollout is one turn without a reward of its own: the same as grpo",
    "gigpo": "all first turns follow the prompt: twice the advantages of grpo, which Adam does not see",
    "tl-grpo": "candidates for the only turn are rollouts: the same as grpo",
}
NO_STEPS = {"grpo-process": "the task verifies no steps"}
SEVERAL_TURNS = {
    "vineppo": "Monte-Carlo values of prefixes need a task of one turn",
    "grpo-process": "the task verifies no steps of a text",
    "igrpo": "drafts need a task of one turn",
}
ONE_UPDATE = {
    "gspo": "one update per step: the ratio is 1, the same as grpo",
    "grpo-openrlhf": "one update per step: nothing to clip, the same as grpo",
    "cispo": "one update per step: nothing to clip, the same as grpo-verl",
    "tic": "one update per step: the ratio is 1, the same as rloo",
    "grpo-paper": "the same as rloo up to a scale, which Adam does not see",
}
"""With one update per step and groups of one size."""
TOO_SLOW = dict.fromkeys(
    ("optimal-token-exact", "optimal-token-loo", "delta-exact"),
    "left out for its cost: a row of a Gram for every prefix or token, 3 to 40 times the time of a step of grpo",
)


@dataclass(frozen=True)
class TaskSetting:
    """One task of the table: its budget, the methods that do not apply, and settings of all its runs."""

    task: str
    rollouts: int
    every_rollouts: int
    left_out: Mapping[str, str]
    """Method → why it is not in the table of this task."""
    options: Mapping[str, Any] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    """Method → its name with options of its own."""
    control_rows: Sequence[MethodChoice] = ()
    """Further rows."""
    rate: float = 0.0
    """Learning rate; 0 to choose from `rates`."""
    rates: Sequence[float] = RATES
    """Learning rates to choose from."""
    seeds: int = 6
    """Seeds in the table."""

    @property
    def methods(self) -> str:
        """All methods that apply, the first one first."""
        return self.labelled([FIRST, *(name for name in METHODS if name != FIRST)])

    def labelled(self, names: Sequence[str]) -> str:
        """Those of some methods that apply, with their options."""
        return ",".join(self.labels.get(name, name) for name in names if name not in self.left_out)


@dataclass(frozen=True)
class ControlledComparison(CompareConfig):
    """A comparison with controls, whose options may be those that the methods of a comparison share.

    The reward of the control is random in training alone: its tests are graded as those of all other methods.
    """

    control_rows: Sequence[MethodChoice] = ()

    @cached_property
    def choices(self) -> tuple[MethodChoice, ...]:
        """The methods, then the controls."""
        return (*super().choices, *self.control_rows)


def gym_setting(name: str, settings: str = "", left_out: Mapping[str, str] | None = None) -> TaskSetting:
    """A reasoning-gym task with settings of its generator, from its own starting policy."""
    return TaskSetting(
        task=f"reasoning-gym:{name}{settings}",
        rollouts=480,
        every_rollouts=96,
        left_out={**ONE_TURN, **NO_STEPS, **TOO_SLOW, **(left_out or {})},
        options={"model": f"starts/{name}", "prompt": "plain", "max_new_tokens": 40},
        labels={"vineppo": "vineppo:segments=even"},
        rate=1e-4,
    )


ON_GPU = ("grpo", "dr-grpo", "rloo", "ppo", "optimal-token", "vineppo", "dpo")
FURTHER = (
    *("grpo", "ppo-monte-carlo", "salt", "g2rl", "delta", "igrpo", "awr", "pass-at-k"),
    *("reinforce-baseline", "dapo", "agro", "tic-length", "reinforce-critic", "reinforce"),
    *("ppo-whitened", "grpo-trl", "reinforce++", "remax", "opo", "optimal"),
    *("reinforce++-baseline", "optimal-loo", "opo-loo", "grpo-verl", "grpo-nemo-rl", "grpo-prime-rl"),
    *("salt-exact", "g2rl-exact"),
)
"""Methods on GSM8K: in the first comparisons, and later, with `grpo` again beside them.

The last two lines have no run yet.
"""
FRESH: Mapping[str, Sequence[str]] = {
    "stopping": (
        *("grpo", "grpo-paper", "rloo", "opo-loo", "pass-at-k", "dr-grpo"),
        *("opo", "optimal", "optimal-loo", "grpo-prime-rl"),
    ),
    "compositions": (
        *("grpo", "rloo", "dr-grpo", "optimal", "optimal-loo", "reinforce", "reinforce-baseline", "reinforce-critic"),
        *("grpo-nemo-rl", "grpo-prime-rl", "remax", "reinforce++", "salt", "g2rl", "dapo", "agro", "dpo", "awr"),
        *("tic-length", "pass-at-k", "ppo", "ppo-monte-carlo", "grpo-process", "vineppo", "optimal-token", "delta"),
    ),
    "spell_backward": ("grpo", "ppo", "ppo-whitened"),
}
"""Methods that `--fresh` trains with new seeds, for three comparisons that were chosen after seeing seeds 0 to 5.

Planned before these runs: on `stopping` the mean of the others minus `grpo`; on `compositions` held-out minus known
combinations, the mean of the last six, whose credit is per token or step, minus that of the first twenty (methods that
are nearly the same as one of these are left out); on `spell_backward` `ppo-whitened` minus `ppo`. Paired by seed, 95 %
interval.
"""
REPEATED: Mapping[str, Sequence[str]] = {
    "stopping": ("mt-grpo", "tl-grpo"),
    "compositions": ("vineppo", "igrpo"),
    "arithmetic": ("igrpo",),
    "rotate_matrix": ("vineppo", "dapo", "agro"),
    "spell_backward": ("ppo", "ppo-monte-carlo", "reinforce", "reinforce-critic", "vineppo", "igrpo", "agro"),
}
"""The 15 losses to `grpo` by both criteria with seeds 0 to 5, which `--fresh` repeats with new seeds.

Planned after the runs of `FRESH` for `vineppo` on `compositions` and `ppo` on `spell_backward`, before those of the
other 13.
"""
FRESH_SEEDS = range(6, 18)
OWN_CRITIC = ("ppo-whitened", "ppo-monte-carlo", "reinforce-critic")
"""Further methods whose critic has a learning rate of its own, as that of `ppo` in the first comparison."""


def control(reward: str) -> MethodChoice:
    """`grpo` with a reward of `rewards.py`."""
    return MethodChoice(f"grpo:reward=rewards:{reward}", "grpo", {"reward": f"rewards:{reward}"})


GSM8K_OPTIONS: Mapping[str, Any] = {
    "model": "starts/gsm8k",
    "prompt": "plain",
    "autocast": True,
    "device": "cuda",
    "batch_size": 128,
    "micro_batch_size": 32,
    "max_new_tokens": 200,
    "on_not_finite": "skip",
    "eval_problems": 660,
    "eval_samples": 4,
    "credit_truth": "none",
    "push": False,
    "between_prompts": False,
}
QWEN_OPTIONS: Mapping[str, Any] = {
    **GSM8K_OPTIONS,
    "model": "starts/qwen",
    "prompt": "chat",
    "max_new_tokens": 320,
    "micro_batch_size": 16,
}
TASKS = {
    "arithmetic": TaskSetting("arithmetic", 640, 64, ONE_TURN),
    "calculator": TaskSetting("calculator", 640, 64, {**SEVERAL_TURNS, **TOO_SLOW}),
    "stopping": TaskSetting("stopping", 1280, 128, SEVERAL_TURNS),
    "compositions": TaskSetting("arithmetic-compositions", 640, 64, {**ONE_TURN, **TOO_SLOW}),
    "spell_backward": gym_setting("spell_backward"),
    "rotate_matrix": gym_setting(
        "rotate_matrix",
        ":min_n=2,max_n=2,min_rotations=1,max_rotations=1",
        {"igrpo": "a prompt with a draft does not fit into the 512 tokens of the embedded policy"},
    ),
    "gsm8k": TaskSetting(
        "gsm8k:gsm8k",
        rollouts=6144,
        every_rollouts=6144,
        left_out={name: "not run: GPU time" for name in METHODS if name not in ON_GPU},
        options=GSM8K_OPTIONS,
        labels={"ppo": "ppo:critic_learning_rate=1e-4"},
        control_rows=(control("random_in_training"),),
        rate=8e-5,
        seeds=3,
    ),
    "gsm8k-qwen": TaskSetting(
        "gsm8k:gsm8k",
        rollouts=4096,
        every_rollouts=4096,
        left_out={name: "not run: GPU time" for name in METHODS if name not in ON_GPU},
        options=QWEN_OPTIONS,
        labels={"ppo": "ppo:critic_learning_rate=1e-5"},
        control_rows=(control("random_in_training_qwen"),),
        rates=LARGE_MODEL_RATES,
        seeds=3,
    ),
    "gsm8k-qwen-further": TaskSetting(
        "gsm8k:gsm8k",
        rollouts=4096,
        every_rollouts=4096,
        left_out={
            **{name: "in the first comparison" for name in ON_GPU if name not in FURTHER},
            **ONE_TURN,
            **NO_STEPS,
            **TOO_SLOW,
            **ONE_UPDATE,
        },
        options=QWEN_OPTIONS,
        labels={name: f"{name}:critic_learning_rate=1e-5" for name in OWN_CRITIC},
        rate=3e-6,
        seeds=3,
    ),
}
SHARED: Mapping[str, Any] = {"batch_size": 32, "eval_problems": 128, "device": "cpu", "final_checkpoint": False}


def comparison_config(name: str, out: Path, *, seeds: int, rate: float, methods: str = "") -> CompareConfig:
    """The comparison of one task."""
    setting = TASKS[name]
    options = {**SHARED, **setting.options}
    return ControlledComparison(
        methods=methods or setting.methods,
        control_rows=() if methods else setting.control_rows,
        task=setting.task,
        seeds=seeds,
        rollouts=setting.rollouts,
        every_rollouts=setting.every_rollouts,
        learning_rate=rate,
        out=out,
        **options,
    )


def tuning_runs(name: str) -> dict[float, list[TrainConfig]]:
    """Learning rate → its runs with the seed that no table has."""
    runs = {}
    for rate in TASKS[name].rates:
        config = comparison_config(
            name, Path("tuning") / f"{name}-{rate:g}", seeds=1, rate=rate, methods=TUNING_METHODS
        )
        runs[rate] = [
            replace(config.run_config(choice, TUNING_SEED), every_rollouts=config.rollouts, measure_every=0, push=False)
            for choice in config.choices
        ]
    return runs


def final_return(config: TrainConfig) -> float:
    """Mean return of the greedy rollouts after the last step; minus infinity for a run that failed."""
    if not (config.out / "metrics.jsonl").is_file():
        return float("-inf")
    evaluations = RunResult(0, read_run(open_run(config.out))).evaluations(MEAN_RETURN)
    return evaluations[-1][1] if evaluations and evaluations[-1][0] >= config.rollouts else float("-inf")


def build_tiny(place: tuple[str, int]) -> None:
    """Build the embedded policy of a task and a seed, so that its runs find it in the cache."""
    name, seed = place
    config = comparison_config(name, Path("unused"), seeds=1, rate=1.0)
    load_policy(replace(config.policy, seed=seed), load_task(config.task, seed=seed))


def in_pool(work: Any, items: Sequence[Any], workers: int) -> None:
    """Call `work` for every item, in processes of their own."""
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(work, items))


def chosen_rates(names: Sequence[str], workers: int) -> dict[str, float]:
    """Task → learning rate; those known from an earlier call stay."""
    path = Path("rates.json")
    known = json.loads(path.read_text()) if path.is_file() else {}
    open_tasks = [name for name in names if name not in known and not TASKS[name].rate]
    plans = {name: tuning_runs(name) for name in open_tasks}
    queue = [run for plan in plans.values() for runs in plan.values() for run in runs]
    if queue:
        run_in_processes(queue, workers, run=run_or_explain)
    for name, plan in plans.items():
        returns = {rate: sum(map(final_return, runs)) / len(runs) for rate, runs in plan.items()}
        known[name] = {"returns": {f"{rate:g}": value for rate, value in returns.items()}}
        known[name]["rate"] = max(returns, key=returns.__getitem__)
    path.write_text(json.dumps(known, indent=1))
    return {name: TASKS[name].rate or known[name]["rate"] for name in names}


def stored_runs(files: Sequence[Path]) -> set[tuple[str, str, int]]:
    """Table, label and seed of the runs in the records."""
    found = set()
    for path in files:
        with lzma.open(path, "rt", encoding="utf-8") as lines:
            found |= {(run["table"], run["label"], run["seed"]) for run in map(json.loads, lines)}
    return found


def fresh_methods(task: str) -> list[str]:
    """Methods with fresh seeds on a task, `grpo` first."""
    return list(dict.fromkeys((FIRST, *FRESH.get(task, ()), *REPEATED[task])))


def main() -> None:
    """Train what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tasks", default="arithmetic,calculator,stopping,compositions")
    parser.add_argument("--methods", default="", help="methods to train; all that apply if not given")
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--fresh", action="store_true", help="the methods of FRESH and REPEATED, with FRESH_SEEDS")
    parser.add_argument("--prepare", action="store_true", help="build starting policies, choose rates, then stop")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--known", type=Path, nargs="*", default=[], help="records whose runs are not trained again")
    given = parser.parse_args()
    known = stored_runs(given.known)
    os.chdir(given.out)
    names = [*REPEATED] if given.fresh else given.tasks.split(",")
    seeds = FRESH_SEEDS if given.fresh else range(given.seeds)
    tiny = [name for name in names if "model" not in TASKS[name].options]
    tuning = [] if Path("rates.json").is_file() else [TUNING_SEED]
    in_pool(build_tiny, [(name, seed) for seed in (*tuning, *seeds) for name in tiny], max(1, given.workers // THREADS))
    rates = chosen_rates(names, given.workers)
    if given.prepare:
        return
    cells = []
    for name in names:
        chosen = fresh_methods(name) if given.fresh else given.methods.split(",") if given.methods else []
        methods, out = TASKS[name].labelled(chosen), Path("compare") / name
        config = comparison_config(name, out, seeds=seeds.stop, rate=rates[name], methods=methods)
        write_comparison_setting(config)
        planned = [cell for cell in planned_cells(config) if cell.seed in seeds]
        cells += [(cell.seed, cell) for cell in planned if (name, cell.label, cell.seed) not in known]
    cells.sort(key=lambda pair: pair[0])  # stable: tasks keep their order within a seed
    missing = [cell.config for _, cell in cells if not cell.is_complete]
    print(f"{len(cells)} runs, {len(missing)} missing, rates {rates}", flush=True)
    run_in_processes(missing, given.workers, run=run_or_explain)


if __name__ == "__main__":
    main()
