"""Fixed group sizes, a moving one, allocations, draws, shrunk weights, optimal baselines and dynamic sampling.

python run.py OUT [--tasks arithmetic] [--seeds 8] [--workers 6]    train what is missing
python run.py OUT --write                                           write runs.json from the runs that are complete
python run.py OUT --tasks gsm8k --known gsm8k.json [--write gsm8k.json]    the runs in that file count as complete

Every run is an ordinary folder under OUT/TASK/runs, and the same command continues after an interruption. The queue
goes seed by seed, so that whatever is finished has all rows of the table. All rows are REINFORCE with summed tokens and
a baseline from the other rollouts, with the same optimiser, learning rate and rollouts per step. They differ in how
many rollouts a prompt gets, in which prompts are drawn and how they are weighted, in which groups are kept (dynamic
sampling) and in the weights of the baseline. Starting policies of tasks other than the embedded ones must be in
OUT/starts.
"""

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from scoregram.compare import CompareConfig
from scoregram.compare.cells import PlannedCell, planned_cells, run_or_explain, write_comparison_setting
from scoregram.compare.results import RunResult
from scoregram.policy import load_policy
from scoregram.reading import SAMPLED_TEST, read_run
from scoregram.runs import open_run
from scoregram.tasks import load_task
from scoregram.training import run_in_processes

HERE = Path(__file__).parent
FIXED = {f"R = {size}": f"rloo:group_size={size}" for size in (2, 4, 8, 16)}
GRAM_FREE = FIXED | {
    "success": "rloo:allocate=success",
    "dynamic sampling": "dapo:estimator=rloo:objective=reinforce",
}
GRAM_NATIVE = {
    "auto": "rloo:group_size=auto",
    "measured": "rloo:allocate=measured",
    "auto and measured": "rloo:group_size=auto:allocate=measured",
    "drawn by signal": "rloo:draw=measured",
    "shrunk": "rloo:shrink=true",
    "optimal baseline, R = 4": "optimal-loo:group_size=4",
    "optimal baseline, R = 8": "optimal-loo:group_size=8",
    "optimal baseline, auto": "optimal-loo:group_size=auto",
}
ROWS = GRAM_FREE | GRAM_NATIVE
"""Row of the table → method and options of `scoregram compare`."""


@dataclass(frozen=True)
class TaskSetting:
    """One task: where its runs begin and how long they are."""

    task: str
    learning_rate: float
    rollouts: int = 3_200
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_embedded(self) -> bool:
        """Whether each seed begins with the embedded policy of its own."""
        return "model" not in self.options


RATE, SLOW_RATE, LARGE_MODEL_RATE = 1e-4, 3e-5, 3e-6
"""Of 1e-5, 3e-5, 1e-4 and 3e-4, groups of 8 on arithmetic had the largest area at 1e-4; at 3e-4 they collapse."""
GYM = {"prompt": "plain", "max_new_tokens": 40, "eval_problems": 64, "every_rollouts": 320}
ROTATIONS = "reasoning-gym:rotate_matrix:min_n=2,max_n=2,min_rotations=1,max_rotations=1"
QWEN: dict[str, Any] = {
    "model": "starts/qwen",
    "prompt": "chat",
    "autocast": True,
    "device": "cuda",
    "batch_size": 64,
    "micro_batch_size": 16,
    "gradient_checkpointing": True,
    "max_new_tokens": 320,
    "on_not_finite": "skip",
    "train_problems": 256,
    "eval_problems": 660,
    "every_rollouts": 4_096,
    "checkpoint_every": 0,
}
"""A model of 0.5 B parameters, as `methods/start.py folder` writes it; each problem comes back at least twice."""
TASKS = {
    "arithmetic": TaskSetting("arithmetic", RATE),
    "compositions": TaskSetting("arithmetic-compositions", RATE),
    "spell_backward": TaskSetting("reasoning-gym:spell_backward", RATE, 960, GYM | {"model": "starts/spell_backward"}),
    "rotate_matrix": TaskSetting(ROTATIONS, RATE, 960, GYM | {"model": "starts/rotate_matrix"}),
    "arithmetic-slow": TaskSetting("arithmetic", SLOW_RATE),
    "compositions-slow": TaskSetting("arithmetic-compositions", SLOW_RATE),
    "gsm8k": TaskSetting("gsm8k:gsm8k", LARGE_MODEL_RATE, 4_096, QWEN),
}
SHARED: dict[str, Any] = {
    "batch_size": 32,
    "train_problems": 64,
    "eval_problems": 128,
    "eval_samples": 4,
    "credit_truth": "none",
    "push": False,
    "device": "cpu",
    "final_checkpoint": False,
}
"""64 training problems, so that prompts come back: an allocation is decided from earlier visits."""
WITHOUT_EFFECT = {"checkpoint_every": 0}
"""Settings that change no number: a record may have others."""


def comparison_config(
    name: str, out: Path, seeds: int, rollouts: int = 0, rows: Sequence[str] = tuple(ROWS)
) -> CompareConfig:
    """The comparison of some rows on one task; `rollouts` other than 0 is a budget for a trial."""
    setting = TASKS[name]
    options: dict[str, Any] = SHARED | dict(setting.options)
    if "model" in options:
        options["model"] = str(out / options["model"])
    return CompareConfig(
        out=out / name,
        task=setting.task,
        methods=",".join(ROWS[row] for row in rows),
        seeds=seeds,
        rollouts=rollouts or setting.rollouts,
        learning_rate=setting.learning_rate,
        **options,
    )


def build_tiny(place: tuple[CompareConfig, int]) -> None:
    """Build the embedded policy of a task and a seed, so that its runs find it in the cache."""
    config, seed = place
    load_policy(replace(config.policy, seed=seed), load_task(config.task, seed=seed))


def queue_of(configs: Sequence[CompareConfig]) -> list[PlannedCell]:
    """The runs of all tasks, seed by seed."""
    cells = [cell for config in configs for cell in planned_cells(config)]
    return sorted(cells, key=lambda cell: cell.seed)  # stable: tasks keep their order within a seed


def train_missing(
    configs: Mapping[str, CompareConfig], workers: int, first_seed: int = 0, known: Mapping[str, Any] | None = None
) -> None:
    """Build the embedded policies, then train every incomplete run from a seed on, but for those of a record."""
    embedded = [config for name, config in configs.items() if TASKS[name].is_embedded]
    places = [(config, seed) for config in embedded for seed in range(first_seed, config.seeds)]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(build_tiny, places))
    for config in configs.values():
        write_comparison_setting(config)
    stored = {
        (configs[name].out, ROWS[row], int(seed))
        for name, record in (known or {}).items()
        for row, seeds in record["runs"].items()
        for seed in seeds
    }
    cells = [cell for cell in queue_of([*configs.values()]) if cell.seed >= first_seed]
    cells = [cell for cell in cells if (cell.config.out.parents[2], cell.label, cell.seed) not in stored]
    missing = [cell.config for cell in cells if not cell.is_complete]
    print(f"{len(missing)} runs are missing", flush=True)
    run_in_processes(missing, workers, run=run_or_explain)


def run_record(cell: PlannedCell) -> dict[str, Any]:
    """What the tables need of a run.

    `evaluations` are rollouts, mean reward of sampled and accuracy of greedy test rollouts; `moves` are the steps at
    which the group size changed, with the new size.
    """
    run = RunResult(cell.seed, read_run(open_run(cell.config.out)))
    sampled = run.run.tests[SAMPLED_TEST]
    evaluated = [line for line in run.run.lines if "eval/accuracy" in line]
    tested = [[*sampled[int(line["step"])].values()] for line in evaluated]
    means = [sum(rewards) / len(rewards) for rewards in tested]
    sizes = [line for line in run.run.lines if line.get("control/next_group_size")]
    return {
        "evaluations": [
            [line["rollouts"], round(mean, 6), round(line["eval/accuracy"], 6)]
            for line, mean in zip(evaluated, means, strict=True)
        ],
        "moves": [
            [line["step"], line["control/next_group_size"]]
            for line in sizes
            if line["control/next_group_size"] != line["control/group_size"]
        ],
        "steps": run.steps,
        "seconds": round(run.seconds, 1),
    }


def complete_runs(config: CompareConfig) -> dict[str, Any]:
    """Row → seed → record, of the runs that used up their budget."""
    names = {label: name for name, label in ROWS.items()}
    found: dict[str, Any] = {}
    for cell in planned_cells(config):
        row = found.setdefault(names[cell.label], {})
        if cell.is_complete:
            row[str(cell.seed)] = run_record(cell)
    return found


def task_record(name: str, config: CompareConfig, known: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Settings and runs of one task, with those of an earlier record, which must have the same settings."""
    setting = {"task": config.task, "rollouts": config.rollouts, "learning_rate": config.learning_rate}
    setting |= SHARED | dict(TASKS[name].options)
    earlier = (known or {}).get(name, {"setting": setting, "runs": {}})
    if earlier["setting"] | WITHOUT_EFFECT != setting | WITHOUT_EFFECT:
        raise SystemExit(f"{name}: the record has other settings; leave out --known")
    runs = complete_runs(config)
    rows = [row for row in ROWS if row in earlier["runs"] or row in runs]
    return {"setting": setting, "runs": {row: earlier["runs"].get(row, {}) | runs.get(row, {}) for row in rows}}


def main() -> None:
    """Train, or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--rows", default=";".join(ROWS), help="rows of the table, with ; between them")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--first-seed", type=int, default=0, help="leave out the seeds before this one")
    parser.add_argument("--rollouts", type=int, default=0, help="another budget, for a trial")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--write", nargs="?", const=HERE / "runs.json", type=Path, help="write the records, train nothing"
    )
    parser.add_argument("--known", type=Path, help="a record whose runs are not trained again")
    given = parser.parse_args()
    known = json.loads(given.known.read_text(encoding="utf-8")) if given.known else {}
    rows = given.rows.split(";")
    configs = {
        name: comparison_config(name, given.out, given.seeds, given.rollouts, rows) for name in given.tasks.split(",")
    }
    if given.write:
        records = {name: task_record(name, config, known) for name, config in configs.items()}
        given.write.write_text(json.dumps(records, indent=0) + "\n", encoding="utf-8")
    else:
        train_missing(configs, given.workers, given.first_seed, known)


if __name__ == "__main__":
    main()
