"""The committed results: their tables stand in the pages, their records verify, and the shipped copies are the same."""

import ast
import importlib.util
import json
import math
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from scoregram.runs.disk import CHECKSUMS, damaged_files
from scoregram.studies.grpo_rank.claims.discussion import FALL_OVER_TRAINING
from scoregram.studies.grpo_rank.claims.rank import TOP1_OF_FIXED_POLICIES
from scoregram.studies.grpo_rank.evidence import recompute
from scoregram.studies.grpo_rank.verdicts import SHIPPED, measured_verdicts
from scoregram.studies.record import RECORD
from scoregram.studies.verification import recorded_differences, verify

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
RECORDS = sorted(RESULTS.glob(f"*/{RECORD}"))
UNSIGNED = sorted(
    {path.parent for path in RESULTS.glob("*/*") if path.suffix != ".pyc"} - {path.parent for path in RECORDS}
)


def load_script(name: str = "table"):
    spec = importlib.util.spec_from_file_location(f"results_{name}", RESULTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_are_records():
    assert RECORDS


@pytest.mark.parametrize("folder", UNSIGNED, ids=lambda path: path.name)
def test_every_file_of_measurements_is_listed_with_its_hash(folder):
    """A signed record lists its own; `sha256sum --check SHA256SUMS` repeats this for the others."""
    measured = (path for path in folder.rglob("*") if path.is_file() and path.suffix not in {".md", ".py", ".pyc"})
    names = {str(path.relative_to(folder)) for path in measured} - {CHECKSUMS}
    lines = (folder / CHECKSUMS).read_text(encoding="utf-8").splitlines()
    assert {line.split("  ")[1] for line in lines if not line.endswith(".py")} == names
    assert not damaged_files(folder)


INTERVAL = re.compile(r"([-+−]?\d+(?:\.\d+)?) \[([-−]?\d+(?:\.\d+)?), ([-−]?\d+(?:\.\d+)?)\]")
"""A number with its interval, as pages print it."""


def intervals(text: str) -> list[tuple[str, ...]]:
    return INTERVAL.findall(text.replace("−", "-"))


def is_rounded(short: str, long: str) -> bool:
    """Whether a number is another one with fewer digits."""
    digits = len(short.partition(".")[2])
    return abs(float(short) - float(long)) <= 0.5 * 10**-digits + 1e-9


def test_intervals_that_claims_take_from_training_runs_stand_on_the_pages():
    """The ledger decides by enumeration; what it adds from training runs is text, and must be that of the results."""
    pages = [ROOT / "docs" / "methods.md", *RESULTS.glob("*/README.md")]
    shown = {one for path in pages for one in intervals(path.read_text(encoding="utf-8"))}
    quoted = []
    for path in (ROOT / "src/scoregram/studies/grpo_rank/claims").glob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        quoted += [
            found
            for text in texts
            if "docs/methods.md" in text or "results/credit" in text
            for found in intervals(text)
        ]
    assert len(quoted) >= 10
    assert [one for one in quoted if not any(all(map(is_rounded, one, other)) for other in shown)] == []


def names_from_the_package(script: Path) -> list[tuple[str, str]]:
    """Module and name of everything that a script imports from scoregram by name."""
    found = ast.walk(ast.parse(script.read_text(encoding="utf-8")))
    nodes = [node for node in found if isinstance(node, ast.ImportFrom) and node.module]
    return [(n.module or "", one.name) for n in nodes for one in n.names if (n.module or "").startswith("scoregram")]


def test_scripts_import_what_the_package_has():
    """A script that is listed with its hash stays as it ran."""
    hashed = {folder / line.split("  ")[1] for folder in UNSIGNED for line in sums(folder)}
    scripts = [path for folder in ("results", "benchmarks", "docs/figures") for path in (ROOT / folder).rglob("*.py")]
    named = [(path, *pair) for path in scripts if path not in hashed for pair in names_from_the_package(path)]
    lost = [
        f"{path.relative_to(ROOT)}: from {module} import {name}"
        for path, module, name in named
        if find_spec(module) is None or not (hasattr(import_module(module), name) or find_spec(f"{module}.{name}"))
    ]
    assert len(named) > 100 and lost == []


def sums(folder: Path) -> list[str]:
    """The lines of a folder's list of hashes."""
    path = folder / CHECKSUMS
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


def test_the_replication_page_shows_the_recorded_tables():
    text = (ROOT / "docs/replication.md").read_text(encoding="utf-8")
    assert "<!-- smollm2 table-1: begin -->" in text
    assert load_script().filled(text) == text, "run python results/table.py --write"


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.parent.name)
def test_every_figure_is_drawn_from_the_recorded_data(record):
    script = load_script("figures")
    for figure in script.figures(record.parent):
        drawn = (record.parent / "figures" / f"{figure['id']}.svg").read_text(encoding="utf-8")
        assert script.digest(figure) in drawn, "run python results/figures.py"


@pytest.mark.slow
@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.parent.name)
def test_records_verify_down_to_the_grams(record):
    found = verify(record, recompute=recompute)
    assert found.passed, "\n".join(found.lines())


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.parent.name)
def test_the_shipped_copy_is_the_record(record):
    assert (SHIPPED / f"{record.parent.name}.json").read_bytes() == record.read_bytes()
    claims = {one["claim"] for one in json.loads(record.read_text())["content"]["verdicts"]}
    assert claims <= measured_verdicts().keys()


def test_the_page_announces_number_and_key_of_the_signed_record():
    record = json.loads((RESULTS / "smollm2-gsm8k" / RECORD).read_text(encoding="utf-8"))
    page = (ROOT / "docs/replication.md").read_text(encoding="utf-8")
    assert record["signature"]["public_key"] == record["content"]["signer"]
    for announced in (record["number"], record["content"]["signer"], record["content"]["key_id"]):
        assert f"| `{announced}` |" in page
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"`{record['number']}`" in readme and f"`{record['content']['signer']}`" in readme
    assert not [path for path in ROOT.rglob("*.pem") if ".venv" not in path.parts], "no private key is committed"


@pytest.mark.slow  # runs in `make test-results`
def test_the_snippet_of_the_page_redoes_table_1(monkeypatch, capsys):
    page = (ROOT / "docs/replication.md").read_text(encoding="utf-8")
    code = page.split("Table 1 needs nothing but numpy:")[1].split("```python\n")[1].split("```")[0]
    assert len([line for line in code.splitlines() if line]) <= 10
    imports = [node for node in ast.walk(ast.parse(code)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert [ast.unparse(node) for node in imports] == ["import numpy as np"]
    monkeypatch.chdir(ROOT)
    exec(code, {})
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    exhibits = json.loads((RESULTS / "smollm2-gsm8k" / "exhibits.json").read_text(encoding="utf-8"))["exhibits"]
    table = next(one for one in exhibits if one["id"] == "table-1")
    wanted = ("R", "live groups", "effective rank", "top-1 fraction")
    rows = [[row[table["columns"].index(name)] for name in wanted] for row in table["rows"]]
    for (size, live, rank, top), found in zip(rows, printed, strict=True):
        assert found[:2] == [str(size), live.split()[0]]
        assert [float(value) for value in found[2:]] == pytest.approx([rank["value"], top["value"]], abs=1e-4)


@pytest.mark.slow  # runs in `make test-results`
def test_the_tables_of_many_settings_follow_from_their_grams():
    script = load_script("tiny_settings")
    stored = json.loads((script.HERE / "exhibits.json").read_text(encoding="utf-8"))["exhibits"]
    assert recorded_differences(stored, json.loads(json.dumps(script.tables())), "table") == []


@pytest.mark.slow
def test_no_text_of_the_data_set_is_there():
    from scoregram.runs import open_run

    for folder in [path.parent for path in RESULTS.rglob("config.yaml")]:
        run = open_run(folder)
        assert all(group.prompt is None for group in run.groups(layers=False))
        assert not list(run.rollouts())


def top1_fractions(model: str, size: int) -> dict[str, np.ndarray]:
    """Of the live groups at temperature 1: prompt, number of right rollouts, top-1 fraction and that of the null.

    `others`: right rollouts of the eight of the same prompt that the group is not a part of.
    """
    stored = np.load(RESULTS / "fixed-policies" / model / "t1-p1.npz")
    found = []
    for prompt, (gram, rewards) in enumerate(zip(stored["k"].astype(float), stored["rewards"], strict=True)):
        for start in range(0, 16, size):
            block = slice(start, start + size)
            a = rewards[block] - rewards[block].mean()
            if a.any():
                energy = np.linalg.eigvalsh(np.outer(a, a) * gram[block, block])
                alone = a**2 * gram[block, block].diagonal()
                top, null = (each.max() / each.sum() for each in (energy, alone))
                found.append((prompt, rewards[block].sum(), top, null, rewards[8 * (start < 8) :][:8].sum()))
    return dict(zip(("prompt", "right", "top", "null", "others"), np.array(found).T, strict=True))


def top1_difference(
    model: str, sizes: tuple[int, int], name: str = "top", success: float | None = None, others: int | None = None
) -> list[float]:
    """Mean top-1 fraction at the first size minus that at the second, and its 95 % interval over prompts.

    With a success rate, the groups are weighted so that their number of right rollouts is binomial. With `others`, only
    groups with so many right among the other eight rollouts of the prompt count.
    """
    prompts = len(np.load(RESULTS / "fixed-policies" / model / "t1-p1.npz")["k"])
    rng = np.random.default_rng(0)
    draws = [np.arange(prompts), *(rng.integers(prompts, size=prompts) for _ in range(1000))]
    means = []
    for size in sizes:
        found = top1_fractions(model, size)
        values = []
        for draw in draws:
            weight = np.bincount(draw, minlength=prompts)[found["prompt"].astype(int)].astype(float)
            if others is not None:
                weight *= found["others"] == others
            if success is not None:
                for k in range(1, size):
                    chance = math.comb(size, k) * success**k * (1 - success) ** (size - k)
                    weight[found["right"] == k] *= chance / max(weight[found["right"] == k].sum(), 1e-9)
            values.append(weight @ found[name] / weight.sum())
        means.append(np.array(values))
    gap = means[0] - means[1]
    return [gap[0], *np.percentile(gap[1:], [2.5, 97.5])]


@pytest.mark.slow  # runs in `make test-results`
def test_what_the_ledger_says_of_figure_2_follows_from_the_grams():
    small, large = "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"
    text = TOP1_OF_FIXED_POLICIES
    unsigned = [
        top1_difference(small, (2, 8)),
        top1_difference(large, (2, 8)),
        top1_difference(large, (4, 2), success=0.8),
        top1_difference(large, (2, 8), success=0.8),
        top1_difference(large, (2, 4), success=0.5),
    ]
    shown = [f"{value:.3f} [{low:.3f}, {high:.3f}]" for value, low, high in unsigned]
    signed = [top1_difference(model, (4, 2)) for model in (small, large)]
    signed += [top1_difference(large, sizes, others=8) for sizes in ((4, 2), (2, 8))]
    shown += [f"{value:+.3f} [{low:+.3f}, {high:+.3f}]" for value, low, high in signed]
    assert [each for each in shown if each not in text] == []
    assert len(re.findall(r"\[", text)) == len(shown)
    assert all(top1_difference(large, sizes, "null", success=0.8)[1] > 0 for sizes in ((4, 2), (2, 8)))
    assert top1_difference(large, (4, 2), "null", success=0.5)[2] < 0
    halves = np.load(RESULTS / "fixed-policies" / large / "t1-p1.npz")["rewards"].reshape(-1, 2, 8).mean(-1)
    assert f"{100 * halves[halves[:, ::-1] == 1].mean():.0f} % right" in text
    rates = [np.load(RESULTS / "fixed-policies" / model / "t1-p1.npz")["rewards"].mean() for model in (small, large)]
    assert f"{100 * rates[0]:.0f} and {100 * rates[1]:.0f} %" in text


def test_what_the_ledger_says_of_longer_runs_stands_in_their_table():
    page = (RESULTS / "over-training" / "README.md").read_text(encoding="utf-8")
    trend = page.split("<!-- trend: begin -->")[1].split("<!-- trend: end -->")[0]
    over_seeds = [line for line in trend.splitlines() if "over seeds" in line]
    shown = re.findall(r"[-+][\d.]+ \[[-+][\d.]+, [-+][\d.]+\]", FALL_OVER_TRAINING)
    wanted = (("the paper's update", "kept"), ("standardised GRPO", "kept"), ("the paper's update", "removed"))
    for slope, (method, repeats) in zip(shown, wanted, strict=True):
        assert [line for line in over_seeds if f"**{method}," in line and f" {repeats} " in line and slope in line]
    ends = [float(line.split("[")[1].split("]")[0].split(", ")[1]) for line in over_seeds if "random" not in line]
    assert sum(end < 0 for end in ends) == 1  # resolved only there
    runs = [line for line in trend.splitlines() if line.startswith(("| paper-", "| grpo-"))]
    assert all(float(line.split("|")[4].split()[0]) < 0 for line in runs) and len(runs) == 12
    windows = page.split("<!-- windows: begin -->")[1].split("<!-- windows: end -->")[0].splitlines()
    success = [float(line.split("|")[3]) for line in windows if line.startswith(("| paper-", "| grpo-"))]
    assert f"{100 * min(success):.0f} to {100 * max(success):.0f} % right" in FALL_OVER_TRAINING


def test_the_record_tells_its_kind_scale_and_success_rate_and_decides_no_figure_2():
    content = json.loads((RESULTS / "smollm2-gsm8k" / RECORD).read_text(encoding="utf-8"))["content"]
    for text in (content["summary"], content["strongest_claim"]):
        assert "conceptual replication" in text and "135 M parameters against the paper's 4 B" in text
        assert "8 % of rollouts right" in text
    verdicts = {one["claim"]: one for one in content["verdicts"]}
    assert (
        verdicts["fig-2"]["verdict"] == "undecided"
        and "Not decided at this success rate" in verdicts["fig-2"]["sentence"]
    )
    assert verdicts["sec-8-future-2"]["verdict"] == "a question, still open"
    assert "results/over-training" in verdicts["sec-8-future-3"]["sentence"]
