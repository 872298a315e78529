"""One timed training run, by scoregram or by TRL, with the same policy, prompts and reward."""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from scoregram.checks import fail
from scoregram.machine import threads
from scoregram.runs import open_run
from scoregram.tasks import RewardFunction, Task, load_task, reward_columns
from scoregram.training import TrainConfig, drawn_problems, train

TRAIN_BENCH = "bench train"
TRL_METHOD = "grpo-trl"
"""The method with TRL's default advantages and loss."""


@dataclass(frozen=True)
class Lap:
    """One call of the reward function; exactly one step lies between two calls."""

    wall: float
    """Wall-clock time in seconds, when the rewards were computed."""
    processor: float
    """CPU time in seconds, of all threads."""
    rollouts: int
    completion_tokens: float
    """Mean length of the completions, with the stop token."""
    reward: float
    """Mean over the rollouts with a reward."""


@dataclass
class Clock:
    """A reward function that records when it was called and with what.

    Every trainer calls its reward function once per step, so none of them needs a patch to be timed.
    """

    reward: RewardFunction | None = None
    """The function that computes the rewards."""
    laps: list[Lap] = field(default_factory=list)

    def start(self, reward: RewardFunction) -> None:
        """Delete the laps, and compute rewards with `reward` from now on."""
        self.reward, self.laps = reward, []

    def __call__(
        self, prompts: list[str], completions: list[str], completion_ids: list[list[int]], **columns: Any
    ) -> list[float | None]:
        """The rewards; records a lap."""
        if self.reward is None:
            fail(TRAIN_BENCH, "the clock must be started before a call", "a call", "This is a bug; please report it.")
        rewards = self.reward(prompts=prompts, completions=completions, completion_ids=completion_ids, **columns)
        known = [reward for reward in rewards if reward is not None]
        self.laps.append(
            Lap(
                wall=time.perf_counter(),
                processor=time.process_time(),
                rollouts=len(completions),
                completion_tokens=statistics.fmean(len(ids) for ids in completion_ids),
                reward=statistics.fmean(known) if known else 0.0,
            )
        )
        return rewards


CLOCK = Clock()
"""The clock of this process; at module level, because scoregram's trainer imports its reward function by name."""


@dataclass(frozen=True)
class TimedTraining:
    """Times of a training run, without its warmup steps."""

    seconds: float
    """Wall-clock time of one step."""
    processor_seconds: float
    """CPU time of one step."""
    sampling: float
    """Share of the wall-clock time from the prompts to the rewards."""
    updating: float
    """Share of the wall-clock time from the rewards to the new weights; the rest is bookkeeping and writing."""
    completion_tokens: float
    reward: float


def timed_training(
    laps: Sequence[Lap], sampling: Sequence[float], updating: Sequence[float], *, skipped: int
) -> TimedTraining:
    """Means over the periods from one reward to the next, after the first `skipped` steps.

    Args:
        laps: One for each of `n` steps.
        sampling: `n` times in seconds.
        updating: `n` times in seconds.
        skipped: Warmup steps; `n - 1 - skipped` periods remain.
    """
    first, last, periods = laps[skipped], laps[-1], len(laps) - 1 - skipped
    wall = last.wall - first.wall
    return TimedTraining(
        seconds=wall / periods,
        processor_seconds=(last.processor - first.processor) / periods,
        sampling=sum(sampling[skipped + 1 :]) / wall,
        updating=sum(updating[skipped:-1]) / wall,
        completion_tokens=statistics.fmean(lap.completion_tokens for lap in laps[skipped + 1 :]),
        reward=statistics.fmean(lap.reward for lap in laps[skipped + 1 :]),
    )


def require_laps(laps: Sequence[Lap], *, steps: int, rollouts: int) -> None:
    """Raise unless every step had one call with the same number of rollouts; other runs are not comparable."""
    sizes = sorted({lap.rollouts for lap in laps})
    if len(laps) != steps or sizes != [rollouts]:
        fail(
            TRAIN_BENCH,
            f"a trainer must reward {rollouts} rollouts in each of {steps} steps",
            f"{len(laps)} calls with {', '.join(map(str, sizes)) or 'no'} rollouts",
            "This is a bug; please report it.",
        )


@dataclass(frozen=True)
class TrainingJob:
    """Settings of one training run, the same for every trainer."""

    model: str
    """Folder with the weights and the tokenizer."""
    task: str
    reward: str | None
    group_size: int
    batch_size: int
    """Rollouts per update."""
    max_new_tokens: int
    learning_rate: float
    steps: int
    """Timed updates."""
    warmup: int
    """Updates before the timed ones."""
    threads: int
    seed: int

    @property
    def all_steps(self) -> int:
        """All updates: laps are recorded inside steps, so `n` timed periods need `n + 1` steps."""
        return self.warmup + self.steps + 1


def train_by_scoregram(job: TrainingJob, task: Task, out: Path, *, measure_every: int) -> TimedTraining:
    """Train with scoregram, which writes its run folder but does not evaluate."""
    train(
        TrainConfig(
            out=out,
            model=job.model,
            device="cpu",
            prompt="plain",
            task=job.task,
            reward="scoregram.bench.trainers:CLOCK",
            method=TRL_METHOD,
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
    return timed_training(CLOCK.laps, sampling, [line["time/update"] for line in metrics], skipped=job.warmup)


def train_by_trl(job: TrainingJob, task: Task, out: Path) -> TimedTraining:
    """Train with TRL's GRPOTrainer; `trl_arguments` lists what differs from its defaults."""
    import datasets  # pyright: ignore[reportMissingImports]
    from trl.trainer.grpo_config import GRPOConfig  # pyright: ignore[reportMissingImports]
    from trl.trainer.grpo_trainer import GRPOTrainer  # pyright: ignore[reportMissingImports]

    problems = drawn_problems(task.train, 0, job.all_steps * (job.batch_size // job.group_size), job.seed)
    rows = [{"prompt": task.prompt(problem), "place": place} for place, problem in enumerate(problems)]

    def timed_reward(prompts: list[str], completions: list[str], place: list[int], **given: Any) -> list[float | None]:
        columns = reward_columns([problems[index] for index in place])
        return CLOCK(prompts, completions, completion_ids=given["completion_ids"], **columns)

    trainer = GRPOTrainer(
        model=job.model,
        reward_funcs=timed_reward,  # pyright: ignore[reportArgumentType]
        args=GRPOConfig(**trl_arguments(job, out)),
        train_dataset=datasets.Dataset.from_list(rows),
    )
    begins, ends = [], []
    trainer.add_callback(step_times(begins, ends))
    trainer.train()
    walls = [lap.wall for lap in CLOCK.laps]
    sampling = [wall - begin for wall, begin in zip(walls, begins, strict=True)]
    updating = [end - wall for wall, end in zip(walls, ends, strict=True)]
    return timed_training(CLOCK.laps, sampling, updating, skipped=job.warmup)


def trl_arguments(job: TrainingJob, out: Path) -> dict[str, Any]:
    """Arguments of `GRPOConfig`: float32, no gradient checkpointing, constant learning rate, nothing logged or saved.

    All others keep TRL's defaults: beta 0, one iteration, AdamW, gradient norm 1.
    """
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
        "shuffle_dataset": False,  # scoregram trains on the prompts in this order
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": job.seed,
    }


def step_times(begins: list[float], ends: list[float]) -> Any:
    """A callback that records when every step begins and ends."""
    from transformers import TrainerCallback

    class StepTimes(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            begins.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    return StepTimes()


TRAINERS: MappingProxyType[str, Callable[[TrainingJob, Task, Path], TimedTraining]] = MappingProxyType(
    {
        "trl": train_by_trl,
        "scoregram": lambda job, task, out: train_by_scoregram(job, task, out, measure_every=1),
        "unmeasured": lambda job, task, out: train_by_scoregram(job, task, out, measure_every=0),
    }
)
"""Every trainer by its name in `--ways`; scoregram measures every step, or none."""


def train_under_clock(name: str, job: TrainingJob) -> TimedTraining:
    """Train in this process, in a temporary folder, and return the times."""
    with threads(job.threads), tempfile.TemporaryDirectory() as folder:
        task = load_task(job.task, seed=job.seed, reward=job.reward)
        CLOCK.start(task.reward)
        timed = TRAINERS[name](job, task, Path(folder) / "run")
    require_laps(CLOCK.laps, steps=job.all_steps, rollouts=job.batch_size)
    return timed


def train_from_files() -> None:
    """Entry point of a process: read the job from `argv[2]`, train with `argv[1]`, write the times to `argv[3]`."""
    name, job, result = sys.argv[1:]
    timed = train_under_clock(name, TrainingJob(**json.loads(Path(job).read_text())))
    Path(result).write_text(json.dumps(asdict(timed), allow_nan=False))
