"""What the README says exists, and its numbers stand in the pages that they come from."""

import ast
import re
from pathlib import Path

import pytest

import scoregram
from scoregram.reading import Trust

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PERFORMANCE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
LONGEST_README = 145


def test_it_is_short():
    assert len(README.splitlines()) <= LONGEST_README


@pytest.mark.parametrize("snippet", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_snippets_parse_and_use_public_names(snippet):
    tree = ast.parse(snippet)
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "scoregram"
    }
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "scoregram"
        for alias in node.names
    }
    assert used | imported <= set(scoregram.__all__)


def test_the_finding_is_that_of_the_stored_grams():
    """`rank [low, high] (null)` of every policy and group size, as the page of the results prints them."""
    page = (ROOT / "results" / "fixed-policies" / "README.md").read_text(encoding="utf-8")
    cells = re.findall(r"(\d+\.\d\d \[\d+\.\d\d, \d+\.\d\d\]) \((\d+\.\d\d)\)", README)
    assert len(cells) == 12
    assert [cell for cell, null in cells if f"| {cell} | {null} |" not in page] == []


RECORDED_COSTS = (
    "| H200 | nemotron-4b bfloat16 | 8 | 1024 | 1.06 |  |  |  | 0.76 |",
    "| H200 | nemotron-4b bfloat16 | 8 | 512 | 1.25 to 1.28 | 1.25 | 1.15 | 1.23 | 0.83 |",
    "| H200 | smollm2-135m float32 under autocast | 64 | 132 | 1.38 to 1.58 | 1.47 to 1.66 | 1.10 | 0.47 | 0.85 |",
    "| 1 CPU core | llama-25m float32 | 16 | 512 | 1.02 |  |  |  | 0.86 |",
)
"""Rows of the page on performance that the README repeats in its own words."""


@pytest.mark.parametrize("row", RECORDED_COSTS)
def test_the_costs_are_recorded(row):
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    time, memory = cells[4], cells[8]
    assert row in (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert f"| {time} | {memory} |" in README


@pytest.mark.parametrize("page", ["README.md", "docs/trl.md"])
def test_the_sentence_on_measured_steps_is_the_one_that_is_printed(page):
    assert Trust(measured=3).sentences()[0] in (ROOT / page).read_text(encoding="utf-8")


def test_the_costs_in_trl_are_recorded():
    """The range in the first sentence is that of fused steps; only a CPU has a record of a separate pass."""
    rows = re.findall(
        r"^\| (.+?) \| \S+ .*? \| (fused|replayed|separate) \| .* ([\d.]+) \|$", PERFORMANCE, re.MULTILINE
    )
    fused = [f"{float(ratio):.1f}" for _, kind, ratio in rows if kind != "separate"]
    assert "[1.0 (CPU) to 1.6 times (H200)]" in README and {min(fused), max(fused)} == {"1.0", "1.6"}
    assert {machine for machine, kind, _ in rows if kind == "separate"} == {"1 CPU core"}
