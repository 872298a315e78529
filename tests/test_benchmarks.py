"""The benchmark runs, agrees with itself, and the page on performance shows what was recorded."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from scoregram.bench.gram import random_work, rows_of_one_size, run_gram_bench
from scoregram.bench.harness import random_model
from scoregram.checks import ScoregramError

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.filterwarnings("default")


def test_every_way_gives_the_same_gram_and_gradient():
    model = random_model("llama-tiny", "float32", torch.device("cpu"), 0, caller="test")
    ways = ["plain", "plain-chunked", "gram+gradient", "blocks+gradient", "gram", "n-backwards", "vmap"]
    ways += ["gram-kept", "gram-pairs"]
    rows = {row.way: row for row in rows_of_one_size(random_work(model, 8, 16), ways, 1)}
    assert not any(row.skipped for row in rows.values())
    assert all(error < 1e-5 for row in rows.values() if (error := row.gram_error) is not None)
    assert all(error < 1e-5 for row in rows.values() if (error := row.gradient_error) is not None)
    assert rows["plain"].ratio == rows["plain-chunked"].chunked_ratio == 1.0
    (row,) = [
        row for row in rows_of_one_size(random_work(model, 3, 16), ["plain", "blocks+gradient"], 1) if row.skipped
    ]
    assert "blocks+gradient needs groups of 8, got 3 rollouts" in row.skipped
    (row,) = [row for row in rows_of_one_size(random_work(model, 3, 16), ["plain", "gram-pairs"], 1) if row.skipped]
    assert "gram-pairs needs 8 rollouts, for passes of 2, got 3" in row.skipped


def test_the_record_is_strict_json(tmp_path, capsys):
    path = tmp_path / "record.json"
    status = run_gram_bench(
        shape="llama-tiny", rollouts=(2,), tokens=(16,), dtype="float32", autocast=True, device="cpu", lora=2,
        ways=("gram+gradient",), repeats=1, threads=1, as_json=True, out=path, plot=tmp_path / "ratios.svg",
    )  # fmt: skip
    record = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert status == 0 and json.loads(capsys.readouterr().out) == record
    assert record["settings"]["trained"] < record["settings"]["parameters"]
    assert {row["way"] for row in record["rows"]} == {"plain", "plain-chunked", "gram+gradient"}
    assert record["settings"]["autocast"] and not any(row["skipped"] for row in record["rows"])
    assert (tmp_path / "ratios.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize(("option", "value"), [("shape", "llama-9000"), ("dtype", "float8"), ("ways", ("guess",))])
def test_an_unknown_choice_is_named(option, value):
    options = {"shape": "llama-tiny", "dtype": "float32", "ways": ("gram",)} | {option: value}
    with pytest.raises(ScoregramError, match="must be one of"):
        run_gram_bench(
            rollouts=(2,), tokens=(16,), autocast=False, device="cpu", lora=0, repeats=1, threads=1,
            as_json=True, out=None, plot=None, **options,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("option", "value"),
    [("rollouts", (0,)), ("tokens", (1,)), ("repeats", 0), ("threads", 0), ("lora", -1), ("device", "abacus")],
)
def test_a_size_that_leaves_nothing_to_measure_is_named(option, value):
    options = {"rollouts": (2,), "tokens": (16,), "repeats": 1, "threads": 1, "lora": 0, "device": "cpu"} | {
        option: value
    }
    with pytest.raises(ScoregramError, match=f"bench gram --{option}: must be .*, got"):
        run_gram_bench(
            shape="llama-tiny", dtype="float32", autocast=False, ways=("gram",), as_json=True, out=None, plot=None,
            **options,
        )  # fmt: skip


@pytest.mark.parametrize("name", ["performance", "trl", "training", "sampling", "preset"])
def test_the_page_on_performance_shows_the_recorded_tables(name):
    spec = importlib.util.spec_from_file_location("table", ROOT / "benchmarks" / "table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = module.TABLES[name]()
    assert len(made.splitlines()) > 2
    assert f"<!-- {name}: begin -->\n{made}\n<!-- {name}: end -->" in (ROOT / "docs" / "performance.md").read_text()
