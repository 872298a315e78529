"""What rl-doctor and rlprobe find in the planted faults, from the same scalars under TRL's names.

The table of `docs/advice.md`. It needs their packages and nothing of ours:

    python -m venv rivals && rivals/bin/pip install rldoctor==0.2.0 rlprobe==0.1.0
    rivals/bin/python tests/planted_rivals.py [NAME …]

*Found*: a detector for this fault fired at warning or above; *as info*: it fired below. A twin has a false warning if
any detector fired at warning or above.
"""

import json
import math
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "planted"

TRL_NAMES: Mapping[str, str] = {
    **{name: name for name in ("step", "reward", "reward_std", "loss", "grad_norm", "learning_rate", "kl")},
    "clipped_tokens": "clip_ratio/region_mean",
    "length": "completions/mean_length",
    "time/step": "step_time",
    "eval/accuracy": "eval_reward",
}
"""Scalar of scoregram → the same number in TRL's log."""

DETECTORS: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {
    name: (frozenset(doctor), frozenset(probe))
    for name, doctor, probe in (
        ("dead-verifier", ["advantage_collapse"], ["DEGENERATE_GROUPS", "ADV_COLLAPSE", "REWARD_STD_DEATH"]),
        ("too-easy", ["advantage_collapse"], ["DEGENERATE_GROUPS"]),
        ("too-hard", ["advantage_collapse"], ["DEGENERATE_GROUPS"]),
        ("entropy-collapse", ["entropy_collapse"], ["ENTROPY_COLLAPSE"]),
        ("kl-blow-up", ["kl_drift"], ["KL_BLOWUP"]),
        ("repetition", [], ["REPETITION_SPIRAL"]),
        ("truncation", ["length_pathology"], ["TRUNCATION_STARVE"]),
        ("nan", ["gradient_pathology"], ["GRAD_PATHOLOGY"]),
        ("gradient-spike", ["gradient_pathology"], ["GRAD_PATHOLOGY"]),
        ("throughput-rot", [], ["THROUGHPUT_ROT"]),
        ("reward-hacking", ["reward_hacking"], []),
        ("phantom-reward", ["reward_composition"], ["FORMAT_GAMING"]),
        ("length-gaming", ["length_pathology"], ["REWARD_HACK_LENGTH"]),
    )
}
"""Fault → the detectors of rl-doctor and of rlprobe that are about it; the other faults have none."""


def trl_lines(run: Path) -> list[dict[str, Any]]:
    """The log of a stored run as TRL would have written it: one mapping a step."""
    state = run / "trainer_state.json"
    if state.is_file():
        return json.loads(state.read_text())["log_history"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [dict(_renamed(line)) for line in lines]


def _renamed(line: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    if line.get("skipped"):  # its gradient was not finite
        yield "grad_norm", math.nan
    for key, value in line.items():
        if key in TRL_NAMES:
            yield TRL_NAMES[key], value
    if line.get("groups"):
        yield "frac_reward_zero_std", 1 - line["live_groups"] / line["groups"]
    if "finished" in line:
        yield "completions/clipped_ratio", 1 - line["finished"]
    if "token_log_prob" in line:
        yield "entropy", -line["token_log_prob"]


def rl_doctor_findings(lines: list[dict[str, Any]]) -> dict[str, bool]:
    """Detectors of rl-doctor that fired → whether at warning or above."""
    package = import_module("rl_doctor")
    found = package.diagnose(package.run_from_records(lines)).findings
    level = package.Severity
    return {one.detector: one.severity >= level.WARNING for one in found if one.severity >= level.INFO}


RLPROBE_NAMES: Mapping[str, str] = {
    "reward": "reward_mean",
    "reward_std": "reward_std",
    "frac_reward_zero_std": "zero_variance_group_frac",
    "kl": "kl_mean",
    "entropy": "entropy_mean",
    "clip_ratio/region_mean": "clip_fraction",
    "loss": "loss",
    "learning_rate": "lr",
    "grad_norm": "grad_norm",
    "completions/mean_length": "completion_len_mean",
    "completions/clipped_ratio": "truncation_rate",
    "step_time": "step_time_s",
}
"""Scalar of TRL → the field of rlprobe's record of a step, as in its integration with TRL."""


def rlprobe_findings(lines: list[dict[str, Any]]) -> dict[str, bool]:
    """Detectors of rlprobe that fired → whether at warning or above.

    Its integration with TRL drops NaN; its recorder can count them, so that they are counted here.
    """
    doctor, schemas = import_module("rlprobe.doctor"), import_module("rlprobe.schemas")
    records = []
    for line in lines:
        numbers = {key: value for key, value in line.items() if value is not None and not math.isnan(value)}
        known = {RLPROBE_NAMES[key]: value for key, value in numbers.items() if key in RLPROBE_NAMES}
        parts = {key[8:-5]: value for key, value in numbers.items() if _is_part(key)}
        lost = sum(math.isnan(value) for value in line.values() if value is not None)
        records.append(schemas.StepRecord(step=line["step"], reward_components=parts, nan_count=lost, **known))
    manifest = schemas.RunManifest(run_id="run", created_at="", algorithm="grpo")
    found = doctor.diagnose_view(doctor.RunView(manifest, records))
    return {one.signature_id: one.severity in ("warn", "critical") for one in found}


def _is_part(key: str) -> bool:
    """Whether a scalar of TRL is the mean of one reward function, `rewards/NAME/mean`."""
    return key.startswith("rewards/") and key.endswith("/mean")


def verdict(fired: Mapping[str, bool], about: frozenset[str]) -> str:
    """`found`, `as info` or `missed`, with what else fired at warning or above."""
    others = ", ".join(sorted(name for name, warns in fired.items() if warns and name not in about))
    own = ", ".join(sorted(about & fired.keys()))
    told = f"found by {own}" if warnings(fired) & about else f"as info by {own}" if own else "missed"
    return f"{told}; also {others}" if others else told


def warnings(fired: Mapping[str, bool]) -> set[str]:
    """Detectors that fired at warning or above."""
    return {name for name, warns in fired.items() if warns}


def main(names: list[str]) -> None:
    """Print what both tools find in every pair, then the counts."""
    every = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())
    chosen, found, false = names or every, [0, 0], [0, 0]
    for name in chosen:
        fired = {
            kind: [tool(trl_lines(FOLDER / name / kind)) for tool in (rl_doctor_findings, rlprobe_findings)]
            for kind in ("fault", "healthy")
        }
        abouts = DETECTORS.get(name, (frozenset(), frozenset()))
        for place, (tool, about) in enumerate(zip(("rl-doctor", "rlprobe"), abouts, strict=True)):
            fault, healthy = fired["fault"][place], warnings(fired["healthy"][place])
            found[place] += bool(warnings(fault) & about)
            false[place] += bool(healthy)
            twin = ", ".join(sorted(healthy)) or "nothing"
            print(f"{name:22} {tool:10} {verdict(fault, about)}; in the twin: {twin}")
    for place, tool in enumerate(("rl-doctor", "rlprobe")):
        print(f"{tool}: {found[place]} of {len(chosen)} found, a false warning in {false[place]} twins")


if __name__ == "__main__":
    main(sys.argv[1:])
