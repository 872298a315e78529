"""When is the effective rank near 2? The embedded policy in many settings: width, length of the task, temperature.

python results/tiny_settings.py            run the settings that results/tiny-settings lacks (minutes on a CPU)
python results/tiny_settings.py --tables   only recompute the tables, from the stored Grams
"""

import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean

import numpy as np

from scoregram.exhibits import Cell, Table, to_plain
from scoregram.policy import Policy, PolicyConfig, load_policy
from scoregram.policy.tiny import WarmStart, tiny_policy
from scoregram.reading import StoredGroup, group_readings, group_records
from scoregram.runs import FIXED_PROBE, GroupRecord, RunWriter, open_run
from scoregram.studies.grpo_rank.cause_exhibits import NULL_LADDER, share_explained, spearman
from scoregram.studies.grpo_rank.rank_exhibits import mean_of
from scoregram.studies.grpo_rank.readings import Reading, Trial, has_spectrum, readings_of
from scoregram.tasks import Task, arithmetic
from scoregram.training import TrainConfig, seeded_generator
from scoregram.training.collect import collect
from scoregram.training.evaluate import probe_step

HERE = Path(__file__).parent / "tiny-settings"
WIDTHS, TERMS, TEMPERATURES = (96, 192, 384), (2, 4, 8), (0.7, 1.0, 1.4)
PROBLEMS, SIZE = 96, 8
ABOUT = ("parameters", "terms", "temperature", "right", "live groups", "tokens", "surprise", "texts")
"""Columns that describe a setting."""


@dataclass(frozen=True)
class Setting:
    """One policy, one task and one sampling temperature."""

    width: int
    terms: int
    temperature: float

    @property
    def name(self) -> str:
        """Name of its run."""
        return f"width{self.width}-terms{self.terms}-temperature{self.temperature:g}"


SETTINGS = tuple(Setting(*each) for each in product(WIDTHS, TERMS, TEMPERATURES))


def measure() -> None:
    """Run every setting that is missing, with one warm-started policy for each width and number of terms."""
    for width, terms in product(WIDTHS, TERMS):
        wanted = [setting for setting in SETTINGS if (setting.width, setting.terms) == (width, terms)]
        missing = [setting for setting in wanted if not (HERE / "runs" / setting.name).exists()]
        if not missing:
            continue
        task = arithmetic(str(terms))
        policy = policy_of(width, task)
        for setting in missing:
            write(setting, policy, task)
            print(setting.name, flush=True)


def policy_of(width: int, task: Task) -> Policy:
    """The embedded policy at another width, warm-started by the same recipe."""
    recipe = replace(WarmStart(), hidden_size=width, intermediate_size=width * 8 // 3, longest=1500)
    model, tokenizer = tiny_policy(task, 0, recipe=recipe)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return load_policy(PolicyConfig(model=folder, device="cpu", prompt="plain"), task)


def write(setting: Setting, policy: Policy, task: Task) -> None:
    """Sample groups for the test problems, measure them, and write them as a run."""
    config = TrainConfig(
        task=task.name, group_size=SIZE, batch_size=SIZE, temperature=setting.temperature, between_prompts=False
    )
    problems = task.test[:PROBLEMS]
    sampling = config.sampling(task.max_new_tokens)
    stream = seeded_generator(0, setting.name, 0)
    rollouts = collect(policy, task, problems, group_size=SIZE, sampling=sampling, generator=stream)
    step = probe_step(policy, rollouts, number=0, kind=FIXED_PROBE, temperature=setting.temperature, blocks=SIZE)
    assert rollouts.log_probs is not None
    surprise = (-rollouts.log_probs * rollouts.completion_mask).sum(1) / rollouts.lengths
    records = []
    groups = group_records(step, group_readings(step), keep_prompts=False, layers="none")
    for here, record in zip(rollouts.group_slices(), groups, strict=True):
        more = {"surprise": float(surprise[here].mean()), "distinct": len(set(rollouts.completions[here]))}
        records.append(replace(record, statistics={**record.statistics, **more}))
    parameters = sum(parameter.numel() for parameter in policy.model.parameters())
    about = {**vars(setting), "group_size": SIZE, "problems": PROBLEMS, "parameters": parameters}
    with RunWriter.create(HERE / "runs" / setting.name, about) as writer:
        writer.write_groups(0, records)
        writer.write_metrics(0, {"reward": float(rollouts.rewards.mean())})


@dataclass(frozen=True)
class SettingGroup:
    """One live group, with its setting."""

    setting: Setting
    reading: Reading
    record: GroupRecord

    def of_record(self, name: str) -> float:
        """A statistic that was stored with the group."""
        return float(self.record.statistics[name])


def live_groups() -> Iterator[SettingGroup]:
    """All live groups of all settings."""
    for setting in SETTINGS:
        run = open_run(HERE / "runs" / setting.name)
        trial = Trial(setting.name, SIZE, 0, "none", run)
        live = [g for g in run.groups() if StoredGroup(g).is_live and has_spectrum(g)]
        for reading, record in zip(readings_of(trial, live), live, strict=True):
            yield SettingGroup(setting, reading, record)


VARIABLES: tuple[tuple[str, Callable[[SettingGroup], float]], ...] = (
    ("parameters", lambda s: float(s.setting.width)),
    ("temperature", lambda s: s.setting.temperature),
    ("tokens", lambda s: s.reading.length),
    ("surprise of a token", lambda s: s.of_record("surprise")),
    ("different texts", lambda s: s.of_record("distinct")),
    ("balance of right and wrong: k(R-k)", lambda s: float(s.reading.right * (SIZE - s.reading.right))),
    ("evenness of norms: null over shape", lambda s: s.reading.orthogonal / s.reading.shape),
    ("mean cosine", lambda s: s.reading.cosine),
)


def settings_table(groups: list[SettingGroup]) -> Table:
    """Description and effective rank of every setting."""
    rows: list[tuple[Cell, ...]] = []
    for setting in SETTINGS:
        here = [one for one in groups if one.setting == setting]
        run = open_run(HERE / "runs" / setting.name)
        reward = next(iter(run.metrics()))["reward"]
        readings = [one.reading for one in here]
        shown = (
            mean_of(readings, lambda r: r.rank),
            fmean(r.shape for r in readings),
            fmean(r.orthogonal for r in readings),
            fmean(r.cosine for r in readings),
        )
        alike = (fmean(one.of_record("surprise") for one in here), fmean(one.of_record("distinct") for one in here))
        size = int(run.config["parameters"])
        where = (size, setting.terms, setting.temperature, float(reward), len(here))
        rows.append((*where, fmean(r.length for r in readings), *alike, *shown))
    return Table(
        "settings",
        f"The embedded policy in many settings, R = {SIZE}",
        "Means over the live groups of 96 test problems. Surprise: mean of -log π over the tokens. Texts: how many of "
        "the 8 rollouts differ. |A| alone and orthogonal are null models of the effective rank.",
        (*ABOUT, "effective rank", "|A| alone", "null: orthogonal", "mean cosine"),
        tuple(rows),
    )


def variables_table(groups: list[SettingGroup]) -> Table:
    """Correlation of each variable with the effective rank, over groups and over settings."""
    ranks = [one.reading.rank for one in groups]
    clusters = [(one.setting.name, one.reading.prompt_id) for one in groups]
    rows: list[tuple[Cell, ...]] = []
    for name, value in VARIABLES:
        values = [value(one) for one in groups]
        means = [fmean(value(one) for one in groups if one.setting == setting) for setting in SETTINGS]
        over = [fmean(one.reading.rank for one in groups if one.setting == setting) for setting in SETTINGS]
        rows.append((name, spearman(values, ranks, clusters=clusters), spearman(means, over)))
    return Table(
        "variables",
        "What the effective rank goes with",
        "Spearman correlations with the effective rank: over all live groups, and over the means of the settings.",
        ("variable", f"over {len(groups)} groups", f"over {len(SETTINGS)} settings"),
        tuple(rows),
    )


def explained_table(groups: list[SettingGroup]) -> Table:
    """Share of the variance between groups that each null model explains."""
    measured = np.array([math.log(one.reading.rank) for one in groups])
    rows: list[tuple[Cell, ...]] = []
    for name, value in NULL_LADDER[:-1]:
        predicted = np.array([math.log(value(one.reading)) for one in groups])
        factor = math.exp(float((measured - predicted).mean()))
        rows.append((name, share_explained(measured, predicted), factor))
    return Table(
        "explained",
        "What explains the effective rank, over all settings",
        "Share of the variance of its logarithm between groups that a null model explains, and the measured rank "
        "relative to it (geometric mean). Each model knows what those above it know, and one thing more.",
        ("knowing also", "share explained", "measured / model"),
        tuple(rows),
    )


def tables() -> list[dict[str, object]]:
    """All tables, from the stored Grams."""
    groups = list(live_groups())
    return to_plain([settings_table(groups), variables_table(groups), explained_table(groups)])


if __name__ == "__main__":
    if "--tables" not in sys.argv:
        measure()
    (HERE / "exhibits.json").write_text(json.dumps({"exhibits": tables()}, indent=1, allow_nan=False) + "\n")
