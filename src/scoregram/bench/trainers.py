"""One training run in a process of its own: by scoregram or by TRL, with the same policy, prompts and reward.

`python -m scoregram.bench.trainers NAME JOB RESULT` reads a job and writes what the clock saw, both as JSON.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from scoregram.bench.laps import CLOCK, Timed, require_laps, timed
from scoregram.runs import open_run
from scoregram.tasks import Task, load_task, reward_columns
from scoregram.training import TrainConfig, drawn_problems, train

METHOD = "grpo-trl"
"""The advantages and the loss that TRL has by default."""


@dataclass(frozen=True)
class Job:
    """What both trainers are asked to do."""

    model: str
    """Folder."""
    task: str
    reward: str | None
    group_size: int
    batch_size: int
    """Rollouts of one update."""
    max_new_tokens: int
    learning_rate: float
    steps: int
    """Updates that are timed."""
    warmup: int
    """Updates before them."""
    threads: int
    seed: int

    @property
    def all_steps(self) -> int:
        """Updates in all: the clock ticks inside a step, so one more is begun than is timed."""
        return self.warmup + self.steps + 1


def by_scoregram(job: Job, task: Task, out: Path, *, measure_every: int) -> Timed:
    """The trainer of this package as it comes, its writing included; only evaluation is left out."""
    train(
        TrainConfig(
            out=out,
            model=job.model,
            device="cpu",
            prompt="plain",
            task=job.task,
            reward="scoregram.bench.laps:CLOCK",
            method=METHOD,
            steps=job.all_steps,
            batch_size=job.batch_size,
            group_size=job.group_size,
            max_new_tokens=job.max_new_tokens,
            learning_rate=job.learning_rate,
            measure_every=measure_every,
            eval_every=0,
            checkpoint_every=0,
            seed=job.seed,
            threads=job.threads,
        )
    )
    metrics: list[dict[str, Any]] = list(open_run(out).metrics())
    sampling = [line["time/sample"] for line in metrics]
    return timed(CLOCK.laps, sampling, [line["time/update"] for line in metrics], skipped=job.warmup)


def by_trl(job: Job, task: Task, out: Path) -> Timed:
    """TRL's GRPOTrainer with its defaults, but in float32 without recomputation, and with nothing logged or saved."""
    import datasets  # pyright: ignore[reportMissingImports]
    from trl.trainer.grpo_config import GRPOConfig  # pyright: ignore[reportMissingImports]
    from trl.trainer.grpo_trainer import GRPOTrainer  # pyright: ignore[reportMissingImports]

    problems = drawn_problems(task.train, 0, job.all_steps * (job.batch_size // job.group_size), job.seed)
    rows = [{"prompt": task.prompt(problem), "place": place} for place, problem in enumerate(problems)]

    def rewarded(prompts: list[str], completions: list[str], place: list[int], **given: Any) -> list[float | None]:
        columns = reward_columns([problems[index] for index in place])
        return CLOCK(prompts, completions, completion_ids=given["completion_ids"], **columns)

    trainer = GRPOTrainer(
        model=job.model,
        reward_funcs=rewarded,  # pyright: ignore[reportArgumentType]
        args=GRPOConfig(**trl_settings(job, out)),
        train_dataset=datasets.Dataset.from_list(rows),
    )
    begins, ends = [], []
    trainer.add_callback(step_times(begins, ends))
    trainer.train()
    walls = [lap.wall for lap in CLOCK.laps]
    sampling = [wall - begin for wall, begin in zip(walls, begins, strict=True)]
    return timed(CLOCK.laps, sampling, [end - wall for wall, end in zip(walls, ends, strict=True)], skipped=job.warmup)


def trl_settings(job: Job, out: Path) -> dict[str, Any]:
    """Arguments of TRL's config; what is not here is as TRL has it: beta 0, one iteration, AdamW, gradient norm 1."""
    return {
        "output_dir": str(out),
        "max_steps": job.all_steps,
        "per_device_train_batch_size": job.batch_size,
        "gradient_accumulation_steps": 1,
        "num_generations": job.group_size,
        "max_completion_length": job.max_new_tokens,
        "learning_rate": job.learning_rate,
        "lr_scheduler_type": "constant",
        "model_init_kwargs": {"dtype": "float32", "attn_implementation": "sdpa"},
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "shuffle_dataset": False,  # the prompts come in the order in which scoregram draws them
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": job.seed,
    }


def step_times(begins: list[float], ends: list[float]) -> Any:
    """A callback that notes when every step began and ended."""
    from transformers import TrainerCallback

    class StepTimes(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            begins.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    return StepTimes()


TRAINERS: MappingProxyType[str, Callable[[Job, Task, Path], Timed]] = MappingProxyType(
    {
        "trl": by_trl,
        "scoregram": lambda job, task, out: by_scoregram(job, task, out, measure_every=1),
        "unmeasured": lambda job, task, out: by_scoregram(job, task, out, measure_every=0),
    }
)


def run(name: str, job: Job) -> Timed:
    """Train in this process, in a folder that is gone afterwards, and say what the clock saw."""
    torch.set_num_threads(job.threads)
    task = load_task(job.task, seed=job.seed, reward=job.reward)
    CLOCK.start(task.reward)
    with tempfile.TemporaryDirectory() as folder:
        found = TRAINERS[name](job, task, Path(folder) / "run")
    require_laps(CLOCK.laps, steps=job.all_steps, rollouts=job.batch_size)
    return found


def main() -> None:
    """Read the job, train, write the result."""
    name, job, result = sys.argv[1:]
    found = run(name, Job(**json.loads(Path(job).read_text())))
    Path(result).write_text(json.dumps(asdict(found), allow_nan=False))


if __name__ == "__main__":
    main()
