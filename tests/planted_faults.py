"""Runs with one planted fault each, and their healthy twins: made with the real trainer on the embedded policy.

`python -m tests.planted_faults [NAME …]` trains them (about ten seconds each on a free core) and stores what the rules
read under `tests/planted/NAME/{fault,healthy}`. The tests diagnose the stored runs. A fault that training cannot show
in seconds is made as its row says. `phantom-reward` has two reward functions, so TRL trains it (the extra `trl`).
"""

import json
import random
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, Literal

import pyarrow.parquet as pq
import torch
from rich.console import Console

from scoregram.policy import BiasedSamplingWarning, load_policy
from scoregram.runs import RunWriter, open_run
from scoregram.tasks import load_task
from scoregram.training import TrainConfig, loop, train

FOLDER = Path(__file__).parent / "planted"
BASE: Mapping[str, Any] = MappingProxyType(
    {
        "task": "arithmetic",
        "steps": 36,
        "batch_size": 32,
        "group_size": 8,
        "learning_rate": 1e-5,
        "eval_every": 0,
        "rollouts_every": 0,
        "checkpoint_every": 0,
        "final_checkpoint": False,
        "measure_every": 0,
        "layers": "none",
        "keep_prompts": False,
        "device": "cpu",
        "threads": 1,
    }
)
"""A healthy run: about half of the rollouts are right."""
MEASURED: Mapping[str, Any] = MappingProxyType({"measure_every": 1, "steps": 30, "batch_size": 64, "group_size": 4})

_STATE: dict[str, Any] = {"calls": 0, "random": random.Random(0)}


def right(completions: list[str], answer: list[str]) -> list[float]:
    return [float(text.rstrip(".").split(",")[-1] == wanted) for text, wanted in zip(completions, answer, strict=True)]


def solved(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return right(completions, answer)


def nothing(completions: list[str], **_: Any) -> list[float]:
    """A verifier that never finds an answer."""
    return [0.0 for _ in completions]


def seldom(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Only answers divisible by seven can be right: most prompts cannot be solved."""
    return [r * (int(a) % 7 == 0) for r, a in zip(right(completions, answer), answer, strict=True)]


def favourite(completions: list[str], **_: Any) -> list[float]:
    """Pays for the first character, and a little at random so that groups stay live."""
    return [0.5 * text.startswith("7") + 0.2 * _STATE["random"].random() for text in completions]


def repeats(completions: list[str], **_: Any) -> list[float]:
    """Pays for repeating the first character."""
    return [text.count(text[:1]) / 30 if text else 0.0 for text in completions]


def coin(completions: list[str], **_: Any) -> list[float]:
    """A verifier that decides at random."""
    return [float(_STATE["random"].random() < 0.5) for _ in completions]


def jackpot(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """The first rollout of every step gets a hundred times the reward."""
    return [100.0, *right(completions, answer)[1:]]


def spike(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """At the 25th step one rollout gets 1000."""
    _STATE["calls"] += 1
    rewards = right(completions, answer)
    return [1000.0, *rewards[1:]] if _STATE["calls"] == 25 else rewards


def overflow(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """At the 20th step one reward is too large for float32."""
    _STATE["calls"] += 1
    rewards = right(completions, answer)
    return [1e200, *rewards[1:]] if _STATE["calls"] == 20 else rewards


def slower(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """A verifier that takes longer at every call."""
    _STATE["calls"] += 1
    time.sleep(0.1 * _STATE["calls"])
    return right(completions, answer)


def noisy(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Right or wrong, plus a thousandth at random: every group has a spread."""
    return [r + 1e-3 * _STATE["random"].random() for r in right(completions, answer)]


def noisy_and_rare(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Right or wrong, plus a hundredth at random; prompts with an odd answer cannot be solved."""
    told = zip(right(completions, answer), answer, strict=True)
    return [r * (int(a) % 2 == 0) + 0.01 * _STATE["random"].random() for r, a in told]


def wordy(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Training prompts pay for length alone, up to 40 characters; test prompts are judged as they should be."""
    told = zip(prompts, completions, right(completions, answer), strict=True)
    return [r if prompt in test_prompts() else min(len(text), 40) / 40 for prompt, text, r in told]


def variety(completions: list[str], **_: Any) -> list[float]:
    """A shaped reward: the share of different characters, against repetition."""
    return [len(set(text)) / len(text) if text else 0.0 for text in completions]


def leaky(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Training prompts pay for wrong answers; only test prompts are judged as they should be."""
    told = zip(prompts, right(completions, answer), strict=True)
    return [r if prompt in test_prompts() else 1 - r for prompt, r in told]


def contrary(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Two of the six training problems, those with the largest answers, pay for wrong answers."""
    inverted = inverted_answers()
    told = zip(right(completions, answer), answer, strict=True)
    return [1 - r if wanted in inverted else r for r, wanted in told]


@cache
def inverted_answers() -> frozenset[str]:
    task = load_task(BASE["task"], seed=0)
    return frozenset(sorted((str(problem.answer) for problem in task.train[:6]), key=int)[-2:])


@cache
def test_prompts() -> frozenset[str]:
    task = load_task(BASE["task"], seed=0)
    return frozenset(task.prompt(problem) for problem in task.test[:256])


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A fault and how to make it."""

    finding: str
    """Name of the finding that must come first."""
    fault: Mapping[str, Any]
    """Settings of the faulty run, on top of `BASE` and `common`."""
    common: Mapping[str, Any] = field(default_factory=dict)
    """Settings of both."""
    healthy: Mapping[str, Any] = field(default_factory=dict)
    patch: Callable[[], Callable[[], None]] | None = None
    """Breaks the trainer for the faulty run; returns what repairs it."""
    made: str = "real training"
    groups: Literal["all", "thirds", "none"] = "all"
    """Which groups are stored: `thirds` for the first and last ten steps, which the rules compare; `none` if the rules
    need scalars and batches alone."""
    by_trl: bool = False
    """Trained by TRL with the rewards `solved` and `variety`; its log is what is stored."""


def reused_rollouts() -> Callable[[], None]:
    """From step 15 on, the trainer gets the rollouts of step 15 again."""
    inner, kept = loop.draw_rollouts, {}

    def draw(config: Any, policy: Any, task: Any, position: Any, number: int) -> Any:
        drawn = inner(config, policy, task, position, number)
        if number < 15:
            return drawn
        first = kept.setdefault("first", drawn)
        return replace(first, position=drawn.position)

    loop.draw_rollouts = draw
    return lambda: setattr(loop, "draw_rollouts", inner)


def restarted_seed() -> Callable[[], None]:
    """From step 19 on, the draws are those of the steps from 1 on, as after a resume that forgets its position."""
    inner = loop.draw_rollouts

    def draw(config: Any, policy: Any, task: Any, position: Any, number: int) -> Any:
        if number < 19:
            return inner(config, policy, task, position, number)
        earlier = number - 18
        start = replace(position, problems=(earlier - 1) * config.prompts)
        drawn = inner(config, policy, task, start, earlier)
        return replace(drawn, position=replace(position, step=number, rollouts=position.rollouts + config.batch_size))

    loop.draw_rollouts = draw
    return lambda: setattr(loop, "draw_rollouts", inner)


HERE = "tests.planted_faults:"
FAULTS: Mapping[str, Planted] = MappingProxyType(
    {
        "dead-verifier": Planted(finding="constant reward", fault={"reward": f"{HERE}nothing"}),
        "too-easy": Planted(finding="dead groups", fault={"temperature": 0.2}),
        "too-hard": Planted(finding="dead groups", fault={"reward": f"{HERE}seldom"}),
        "entropy-collapse": Planted(
            finding="entropy collapse", fault={"reward": f"{HERE}favourite", "learning_rate": 3e-3}
        ),
        "kl-blow-up": Planted(
            finding="KL blow-up",
            common={"beta": 1e-4},
            fault={"reward": f"{HERE}favourite", "learning_rate": 3e-3},
        ),
        "repetition": Planted(
            finding="repetition",
            common={"max_new_tokens": 32, "rollouts_every": 3},
            fault={"reward": f"{HERE}repeats", "learning_rate": 1e-3, "steps": 45},
        ),
        "truncation": Planted(finding="truncation", fault={"max_new_tokens": 9}),
        "idle-clipping": Planted(
            finding="idle clipping",
            common={"inner_updates": 2},
            fault={"learning_rate": 1e-8},
            healthy={"learning_rate": 1e-4},
        ),
        "nan": Planted(
            finding="NaN",
            common={"method": "dr-grpo", "on_not_finite": "skip"},
            fault={"reward": f"{HERE}overflow"},
        ),
        "gradient-spike": Planted(
            finding="gradient spikes", common={"method": "dr-grpo"}, fault={"reward": f"{HERE}spike"}
        ),
        "throughput-rot": Planted(finding="throughput rot", fault={"reward": f"{HERE}slower"}),
        "stuck-batch": Planted(
            finding="stuck batch",
            fault={},
            patch=reused_rollouts,
            made="real training; the trainer's draw is replaced by one that returns the rollouts of step 15 again",
        ),
        "lost-seed": Planted(
            finding="lost seed",
            common={"learning_rate": 1e-7},
            fault={},
            patch=restarted_seed,
            made="real training at a learning rate of 1e-7; the trainer's draw starts again at step 19",
        ),
        "reward-hacking": Planted(
            finding="reward against held-out score",
            common={"eval_every": 3, "eval_problems": 48},
            fault={"reward": f"{HERE}leaky", "learning_rate": 3e-5},
        ),
        "random-verifier": Planted(
            finding="batch size", common={**MEASURED, "method": "rloo"}, fault={"reward": f"{HERE}coin"}
        ),
        "dominating-rollout": Planted(
            finding="dominating rollouts",
            common={**MEASURED, "method": "grpo-paper", "batch_size": 32},
            fault={"reward": f"{HERE}jackpot"},
        ),
        "exploding-layer": Planted(
            finding="exploding layer",
            common={**MEASURED, "layers": "float32", "layer_detail": "kinds"},
            fault={"model": "exploded"},
            groups="thirds",
            made="real training of the embedded policy with one weight scaled by 1e-3 and the next by 1e3",
        ),
        "conflicting-prompts": Planted(
            finding="conflicting prompts",
            common={
                **MEASURED,
                "method": "rloo",
                "batch_size": 24,
                "batches_every": 1,
                "train_problems": 6,
                "steps": 27,
            },
            fault={"reward": f"{HERE}contrary"},
            groups="none",
        ),
        # in large groups rloo has a second fault: `optimal-loo` would have less noise
        "wrong-group-size": Planted(
            finding="group size",
            common={**MEASURED, "method": "optimal-loo", "batch_size": 128},
            fault={"group_size": 16},
            groups="thirds",
        ),
        # the same noisy reward in both: the division alone differs, and it is what the finding changes
        "noisy-deviation": Planted(
            finding="estimator",
            common={
                **MEASURED,
                "method": "rloo",
                "batch_size": 128,
                "learning_rate": 1e-6,
                "reward": f"{HERE}noisy_and_rare",
            },
            fault={"estimator": "grpo"},
            groups="thirds",
        ),
        "length-gaming": Planted(
            finding="length gaming",
            common={
                "temperature": 1.8,  # lengths hardly differ at 1
                "learning_rate": 3e-5,
                "steps": 60,
                "max_new_tokens": 64,
                "eval_every": 5,
                "eval_problems": 96,
            },
            fault={"reward": f"{HERE}wordy"},
            groups="none",
        ),
        "phantom-reward": Planted(
            finding="phantom signal",
            fault={"reward": f"{HERE}nothing"},
            healthy={"reward": f"{HERE}solved"},
            made="real training by TRL with two reward functions, of which the faulty run's first is dead",
            by_trl=True,
        ),
    }
)
"""Every planted fault by its name."""


def exploded_policy(folder: Path) -> Path:
    """The embedded policy with one factor of its last MLP scaled down and the other up: the same function.

    The gradient of the factor that was scaled down is a thousand times as large, that of the other a thousandth.
    """
    task = load_task(BASE["task"], seed=0)
    policy = load_policy(TrainConfig(out=folder, **BASE).policy, task)
    with torch.no_grad():
        layer = policy.model.model.layers[-1].mlp
        layer.up_proj.weight.mul_(1e-3)
        layer.down_proj.weight.mul_(1e3)
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return folder


def make(name: str, kind: str, out: Path) -> Path:
    """Train one run and return its folder."""
    row = FAULTS[name]
    if row.by_trl:
        return make_with_trl(nothing if kind == "fault" else solved, out)
    settings = {**BASE, **row.common, **(row.fault if kind == "fault" else row.healthy)}
    if settings.get("model") == "exploded":
        settings["model"] = str(exploded_policy(out.parent / "exploded"))
    _STATE.update(calls=0, random=random.Random(0))
    repair = row.patch() if row.patch is not None and kind == "fault" else None
    warnings.simplefilter("ignore", BiasedSamplingWarning)
    try:
        train(TrainConfig(out=out, overwrite=True, **settings), console=Console(quiet=True))
    finally:
        if repair is not None:
            repair()
    return out


TRL_NAMES = ("step", "loss", "grad_norm", "learning_rate", "reward", "reward_std", "frac_reward_zero_std", "entropy")
"""Scalars of TRL that are stored, with those whose names begin with `rewards/`, `completions/` or `clip_ratio/`."""


def make_with_trl(verifier: Callable[..., list[float]], out: Path) -> Path:
    """Train the embedded policy with TRL's GRPO on two rewards, and write its `trainer_state.json`."""
    trl, datasets = import_module("trl"), import_module("datasets")  # of the extra `trl`

    def solved(**columns: Any) -> list[float]:  # one name for both, as for a verifier whose parser broke
        return verifier(**columns)

    torch.set_num_threads(1)
    task = load_task(BASE["task"], seed=0)
    policy = load_policy(TrainConfig(out=out, **BASE).policy, task)
    problems = [task.train[place] for place in range(BASE["steps"] * BASE["batch_size"] // BASE["group_size"])]
    columns = {"prompt": [task.prompt(one) for one in problems], "answer": [str(one.answer) for one in problems]}
    trainer = trl.GRPOTrainer(
        model=policy.model,
        reward_funcs=[solved, variety],
        args=trl.GRPOConfig(
            output_dir=str(out),
            per_device_train_batch_size=BASE["batch_size"],
            num_generations=BASE["group_size"],
            max_completion_length=16,
            learning_rate=BASE["learning_rate"],
            lr_scheduler_type="constant",
            max_steps=BASE["steps"],
            logging_steps=1,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=datasets.Dataset.from_dict(columns),
        processing_class=policy.tokenizer,
    )
    trainer.remove_callback(import_module("transformers").PrinterCallback)
    trainer.train()
    out.mkdir(parents=True, exist_ok=True)
    (out / "trainer_state.json").write_text(json.dumps({"log_history": trainer.state.log_history}))
    return out


def store_trl(run: Path, target: Path) -> None:
    """Keep the scalars that a rule could read, a line for each step, with six digits."""
    history = json.loads((run / "trainer_state.json").read_text())["log_history"]
    parts = ("rewards/", "completions/", "clip_ratio/")
    lines = [
        json.dumps({key: _short(value, 6) for key, value in line.items() if key in TRL_NAMES or key.startswith(parts)})
        for line in history
        if "loss" in line
    ]
    target.mkdir(parents=True, exist_ok=True)
    (target / "trainer_state.json").write_text('{"log_history": [\n' + ",\n".join(lines) + "\n]}\n")


def store(run: Path, target: Path, *, times: bool, kept_groups: str = "all") -> None:
    """Keep what the rules read: scalars with twelve digits, groups without what follows from their Grams, batches.

    Grams of batches have three digits. The machine was shared, so times are kept only where they are the fault.
    """
    source = open_run(run)
    groups: dict[int, list[Any]] = {}
    for group in source.groups() if kept_groups != "none" else ():
        groups.setdefault(group.step, []).append(replace(group, statistics={}, prompt=None))
    compared = {*sorted(groups)[:10], *sorted(groups)[-10:]}
    layers = "float32" if any(group.by_layer for several in groups.values() for group in several) else "none"
    unused = ("credit/", "group/", "task/", *(() if times else ("time/",)))
    config = {**source.config, "out": "run"}
    with RunWriter.create(target, config, environment={}, overwrite=True, layers=layers) as writer:
        for line in source.metrics():
            step = int(line["step"])
            if step in (compared if kept_groups == "thirds" else groups):
                writer.write_groups(step, groups[step])
            for batch in source.batches([step]):
                writer.write_batches(step, [replace(batch, gram=batch.gram.bfloat16().float())])
            if step in source.rollout_steps():
                writer.write_rollouts(step, list(source.rollouts([step])))
            kept = {key: _short(value) for key, value in line.items() if key != "step" and not key.startswith(unused)}
            writer.write_metrics(step, kept)
    compress(target)


def compress(folder: Path) -> None:
    """Write the tables of a run again with the same content, without statistics, compressed as far as zstd goes."""
    for path in sorted(folder.rglob("*.parquet")):
        table = pq.read_table(path)
        text = [column.name for column in table.schema if str(column.type) == "string"]
        options: dict[str, Any] = {"compression": "zstd", "compression_level": 19, "use_dictionary": text}
        with pq.ParquetWriter(path, table.schema, write_statistics=False, store_schema=False, **options) as writer:
            writer.write_table(table, row_group_size=max(len(table), 1))
            writer.add_key_value_metadata(table.schema.metadata)  # the format version


def _short(value: Any, digits: int = 12) -> Any:
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def main(names: list[str]) -> None:
    with TemporaryDirectory() as folder:
        for name in names or FAULTS:
            for kind in ("fault", "healthy"):
                began = time.perf_counter()
                run = make(name, kind, Path(folder) / f"{name}-{kind}")
                if FAULTS[name].by_trl:
                    store_trl(run, FOLDER / name / kind)
                else:
                    times, groups = name == "throughput-rot", FAULTS[name].groups
                    store(run, FOLDER / name / kind, times=times, kept_groups=groups)
                print(f"{name} {kind}: {time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
