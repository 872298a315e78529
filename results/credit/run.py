"""Is finer credit worth it? Eight methods and four oracles on short and long chains of reasoning, six seeds each.

python run.py OUT [--seeds 6] [--workers 2] [--known runs.json]    train and measure what is missing
python run.py OUT --write [--known runs.json]                      write runs.json from the runs that are complete
python run.py OUT --fresh [--write]                                the same for fresh-seeds.json
python run.py OUT --warm-up [--seeds 6] [--write]                  the same for warm-up.json

Runs in the file `--known` are not trained again, and `--write` keeps them. `--fresh` repeats the five rows of
`FRESH_ROWS` with 12 terms at 1e-4 on ten further seeds: three contrasts that the first six seeds suggested.
`--warm-up` trains the rows of `WARM_UP` with 4 terms: a critic that learns before the policy does. The rollouts of the
warm-up count in the budget. It adds to the runs that warm-up.json has.

Two kinds of runs. *Training* runs have the same number of sampled rollouts, as in `scoregram compare`, at two learning
rates, of which none is chosen by its result. *Fixed* runs
have the learning rate 0: every method sees the same rollouts of the same policy, so that differences in credit and
noise are those of the estimators and not of the policies they led to. An oracle is a method with exact values
(`--exact-values`), as from a perfect critic. A chain of N terms has N - 1 steps.
"""

import argparse
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from scoregram.compare import CompareConfig
from scoregram.compare.cells import PlannedCell, planned_cells, run_or_explain, write_comparison_setting
from scoregram.compare.results import RunResult
from scoregram.policy import load_policy
from scoregram.reading import SAMPLED_TEST, read_run
from scoregram.runs import last_scalar, open_run
from scoregram.tasks import load_task
from scoregram.training import TrainConfig, run_in_processes

HERE = Path(__file__).parent
METHODS = {
    "group baseline": "rloo:objective=grpo",
    "grpo": "grpo",
    "critic, per rollout": "reinforce-critic:objective=grpo",
    "critic, per token": "ppo-monte-carlo:objective=grpo",
    "critic, λ = 0.95": "ppo:objective=grpo",
    "vineppo": "vineppo",
    "optimal-token": "optimal-token:objective=grpo",
    "process rewards": "grpo-process",
    "exact, per rollout": "reinforce-critic:objective=grpo:exact_values=true",
    "exact, per token, λ = 1": "ppo-monte-carlo:objective=grpo:exact_values=true",
    "exact, per step": "vineppo:exact_values=true",
    "exact, per token": "vineppo:estimator=vineppo:exact_values=true",
}
"""Row of the table → method and options of `scoregram compare`; all have the same loss, the mean over the tokens of a
rollout. Process rewards come from a verifier without errors; the last four rows have exact values."""
ORACLE = "exact, per token"
"""Its gradient is unbiased and has the least noise of the rows: the direction that the others are compared with."""
RATES: Mapping[int, Sequence[float]] = {4: (3e-5, 1e-4), 12: (3e-5, 1e-4)}
"""Number of terms → learning rates."""
FRESH_ROWS = ("group baseline", "exact, per rollout", "exact, per token", "optimal-token", "process rewards")
FRESH_SEEDS, FRESH_TERMS, FRESH_RATE = range(6, 16), 12, 1e-4
"""Repeated on seeds that no table had, after six seeds at this length and rate suggested gains of three rows."""
WARM_UP = {"critic, λ = 0.95, 10 steps of warm-up": "ppo:objective=grpo:critic_warmup=10"}
WARM_UP_TERMS = 4
"""Row → method with a critic that learns alone for the first 10 of the 50 steps, a fifth of the budget."""
FIXED_STEPS = 30
SHARED: dict[str, Any] = {
    "batch_size": 32,
    "group_size": 8,
    "rollouts": 1_600,
    "every_rollouts": 160,
    "max_grad_norm": 0.01,
    "eval_problems": 64,
    "eval_samples": 4,
    "credit_truth": "exact",
    "device": "cpu",
    "final_checkpoint": False,
    "threads": 1,
}
"""A gradient longer than 0.01 is scaled to it, so that the scale of the advantages does not matter."""
MEASURED = (
    *("credit/correlation", "credit/filler_share", "credit/filler_tokens", "push/filler_share"),
    *("group/effective_rank", "group/effective_rank_orthogonal", "live_groups", "groups", "length"),
    *("credit/truth_agreement", "credit/explained_variance", "credit/extra_rollouts", "gram/update_signal"),
    *("gram/update_noise", "grad_norm"),
)
"""Scalars whose means over the measured steps are kept."""


def comparison_config(out: Path, terms: int, *, rate: float, seeds: int, rows: Sequence[str]) -> CompareConfig:
    """The comparison of some rows on chains of one length."""
    methods = ",".join((METHODS | WARM_UP)[row] for row in rows)
    task = f"arithmetic-strict:{terms}"
    return CompareConfig(out=out, task=task, methods=methods, seeds=seeds, learning_rate=rate, **SHARED)


def fixed_run(config: TrainConfig, out: Path) -> TrainConfig:
    """The run of the same method on the policy that it starts from, every step measured."""
    steps = {"rollouts": 0, "every_rollouts": 0, "steps": FIXED_STEPS, "measure_every": 1, "eval_every": 0}
    return replace(config, out=out, learning_rate=0.0, push=False, rollouts_every=0, eval_samples=0, **steps)


def build_policies(lengths: Sequence[int], seeds: Sequence[int]) -> None:
    """Build the embedded policies one after the other, with all cores, so that the runs find them in the cache."""
    for seed in seeds:
        for terms in lengths:
            config = comparison_config(Path("unused"), terms, rate=1.0, seeds=1, rows=("grpo",))
            load_policy(replace(config.policy, seed=seed), load_task(config.task, seed=seed))


def trained_cells(out: Path, seeds: int) -> dict[tuple[int, float], list[PlannedCell]]:
    """Length and learning rate → training runs."""
    configs = {
        (terms, rate): comparison_config(
            out / f"terms-{terms}" / f"rate-{rate:g}", terms, rate=rate, seeds=seeds, rows=tuple(METHODS)
        )
        for terms, of_length in RATES.items()
        for rate in of_length
    }
    for config in configs.values():
        write_comparison_setting(config)
    return {place: planned_cells(config) for place, config in configs.items()}


def fresh_cells(out: Path) -> list[PlannedCell]:
    """The training runs of the fresh seeds."""
    config = comparison_config(
        out / "fresh", FRESH_TERMS, rate=FRESH_RATE, seeds=FRESH_SEEDS.stop, rows=list(FRESH_ROWS)
    )
    write_comparison_setting(config)
    return [cell for cell in planned_cells(config) if cell.seed in FRESH_SEEDS]


def fixed_of(cell: PlannedCell) -> TrainConfig:
    """The fixed run beside a training run."""
    folder = cell.config.out
    return fixed_run(cell.config, folder.parents[3] / "fixed" / folder.parent.name / folder.name)


def missing_runs(
    cells: Mapping[tuple[int, float], Sequence[PlannedCell]], known: Mapping[str, Any]
) -> list[TrainConfig]:
    """The incomplete runs that no record has, seed by seed; training runs before fixed ones."""
    rows = {label: row for row, label in METHODS.items()}
    training: list[tuple[int, TrainConfig]] = []
    fixed: dict[Path, tuple[int, TrainConfig]] = {}
    for (terms, rate), here in cells.items():
        for cell in here:
            stored = known.get(str(terms), {}).get(rows[cell.label], {})
            if not cell.is_complete and str(cell.seed) not in stored.get(f"{rate:g}", {}):
                training.append((cell.seed, cell.config))
            run = fixed_of(cell)
            if not is_measured(run) and str(cell.seed) not in stored.get("fixed", {}):
                fixed[run.out] = (cell.seed, run)
    ordered = sorted([*training, *fixed.values()], key=lambda pair: pair[0])  # stable: training runs stay in front
    return [run for _, run in ordered]


def is_measured(run: TrainConfig) -> bool:
    """Whether a fixed run is complete."""
    return last_scalar(run.out, "step") == FIXED_STEPS


def pooled(lines: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Means over all measured steps; undefined values of a step are left out."""
    found: dict[str, float | None] = {}
    for name in MEASURED:
        values = [float(line[name]) for line in lines if line.get(name) is not None and math.isfinite(line[name])]
        found[name] = float(f"{mean(values):.6g}") if values else None
    return found


def trained_record(config: TrainConfig) -> dict[str, Any]:
    """`evaluations`: rollouts, sampled and greedy accuracy; `steps`; `measured`: means over measured steps."""
    run = RunResult(config.seed, read_run(open_run(config.out)))
    sampled = run.run.tests[SAMPLED_TEST]
    evaluated = [line for line in run.run.lines if "eval/accuracy" in line]
    evaluations = [
        [line["rollouts"], round(mean(sampled[int(line["step"])].values()), 6), round(line["eval/accuracy"], 6)]
        for line in evaluated
    ]
    return {"evaluations": evaluations, "steps": run.steps, "measured": pooled(measured_lines(run))}


def measured_lines(run: RunResult) -> list[Mapping[str, Any]]:
    """The scalars of the measured steps."""
    return [line for line in run.run.lines if "gram/update_signal" in line]


def fixed_record(config: TrainConfig, reference: TrainConfig) -> dict[str, Any]:
    """`measured`, and mean inner products of sketched gradients `ĝ` of the method and `o` of the oracle per token.

    `own` is the mean of `|ĝ_s|²` over steps, `cross` that of `⟨ĝ_s, ĝ_t⟩`, `with_oracle` that of `⟨ĝ_s, o_t⟩` and
    `oracle` that of `⟨o_s, o_t⟩`, each over pairs of different steps, which have different problems.
    """
    mine, theirs = (open_run(one.out).update_sketches()[1].astype(np.float64) for one in (config, reference))
    steps = len(mine)
    pairs = steps * (steps - 1)
    products = {
        "own": np.square(mine).sum() / steps,
        "cross": (np.square(mine.sum(0)).sum() - np.square(mine).sum()) / pairs,
        "with_oracle": (mine.sum(0) @ theirs.sum(0) - (mine * theirs).sum()) / pairs,
        "oracle": (np.square(theirs.sum(0)).sum() - np.square(theirs).sum()) / pairs,
    }
    run = RunResult(config.seed, read_run(open_run(config.out)))
    found = {name: float(f"{value:.8g}") for name, value in products.items()}
    return {"steps": steps, "measured": pooled(measured_lines(run)), "products": found}


def records(cells: Mapping[tuple[int, float], Sequence[PlannedCell]]) -> dict[str, Any]:
    """Length → row → learning rate, or `fixed` → seed → record, of the runs that are complete."""
    rows = {label: row for row, label in METHODS.items()}
    found: dict[str, Any] = {}
    for (terms, rate), here in cells.items():
        for cell in here:
            kinds = found.setdefault(str(terms), {}).setdefault(rows[cell.label], {})
            trained, fixed = kinds.setdefault(f"{rate:g}", {}), kinds.setdefault("fixed", {})
            if cell.is_complete:
                trained[str(cell.seed)] = trained_record(cell.config)
            oracle = next(fixed_of(one) for one in here if one.label == METHODS[ORACLE] and one.seed == cell.seed)
            if is_measured(fixed_of(cell)) and is_measured(oracle) and str(cell.seed) not in fixed:
                fixed[str(cell.seed)] = fixed_record(fixed_of(cell), oracle)
    return found


def write(name: str, runs: Mapping[str, Any], *, methods: Mapping[str, str] = METHODS) -> None:
    """Write records with their setting."""
    setting = {"shared": SHARED, "methods": methods, "fixed_steps": FIXED_STEPS}
    text = json.dumps({"setting": setting, "runs": runs}, indent=0)
    (HERE / name).write_text(text + "\n", encoding="utf-8")


def run_fresh(out: Path, workers: int, *, store: bool) -> None:
    """Train the fresh seeds, or write those that are complete."""
    cells = fresh_cells(out)
    if store:
        rows = {label: row for row, label in METHODS.items()}
        runs: dict[str, Any] = {row: {f"{FRESH_RATE:g}": {}} for row in FRESH_ROWS}
        for cell in cells:
            if cell.is_complete:
                runs[rows[cell.label]][f"{FRESH_RATE:g}"][str(cell.seed)] = trained_record(cell.config)
        write("fresh-seeds.json", {str(FRESH_TERMS): runs})
        return
    build_policies([FRESH_TERMS], FRESH_SEEDS)
    ordered = sorted((cell for cell in cells if not cell.is_complete), key=lambda cell: cell.seed)
    run_in_processes([cell.config for cell in ordered], workers, run=run_or_explain)


def run_warm_up(out: Path, seeds: int, workers: int, *, store: bool) -> None:
    """Train the runs with a critic that learns first, or write those that are complete beside the stored ones."""
    cells: dict[float, list[PlannedCell]] = {}
    for rate in RATES[WARM_UP_TERMS]:
        place = out / "warm-up" / f"rate-{rate:g}"
        cells[rate] = planned_cells(comparison_config(place, WARM_UP_TERMS, rate=rate, seeds=seeds, rows=list(WARM_UP)))
    rows, path = {label: row for row, label in WARM_UP.items()}, HERE / "warm-up.json"
    known = json.loads(path.read_text(encoding="utf-8"))["runs"] if path.is_file() else {}
    if store:
        found: dict[str, Any] = {row: {f"{rate:g}": {} for rate in cells} for row in WARM_UP}
        for rate, here in cells.items():
            for cell in here:
                if cell.is_complete:
                    found[rows[cell.label]][f"{rate:g}"][str(cell.seed)] = trained_record(cell.config)
        write("warm-up.json", merged(known, {str(WARM_UP_TERMS): found}), methods=WARM_UP)
        return
    build_policies([WARM_UP_TERMS], range(seeds))
    missing = [cell for here in cells.values() for cell in here if not cell.is_complete]
    ordered = sorted(missing, key=lambda cell: cell.seed)
    run_in_processes([cell.config for cell in ordered], workers, run=run_or_explain)


def merged(known: Mapping[str, Any], found: Mapping[str, Any], depth: int = 4) -> dict[str, Any]:
    """Length → row → kind → seed → record of both; where both have a run, the record of `found`."""
    if depth == 1:
        return {**known, **found}
    return {name: merged(known.get(name, {}), found.get(name, {}), depth - 1) for name in {**known, **found}}


def main() -> None:
    """Train and measure, or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--known", type=Path, help="a record whose runs are not trained again")
    parser.add_argument("--write", action="store_true", help="write the records, train nothing")
    parser.add_argument("--fresh", action="store_true", help="the five rows of the fresh seeds alone")
    parser.add_argument("--warm-up", action="store_true", help="the runs whose critic learns first alone")
    given = parser.parse_args()
    if given.warm_up:
        run_warm_up(given.out, given.seeds, given.workers, store=given.write)
        return
    if given.fresh:
        run_fresh(given.out, given.workers, store=given.write)
        return
    known = json.loads(given.known.read_text(encoding="utf-8"))["runs"] if given.known else {}
    cells = trained_cells(given.out, given.seeds)
    if given.write:
        complete = sum(cell.is_complete for here in cells.values() for cell in here)
        print(f"{complete} of {sum(map(len, cells.values()))} training runs are complete")
        write("runs.json", merged(known, records(cells)))
        return
    build_policies([*RATES], range(given.seeds))
    missing = missing_runs(cells, known)
    print(f"{len(missing)} runs are missing", flush=True)
    run_in_processes(missing, given.workers, run=run_or_explain)


if __name__ == "__main__":
    main()
