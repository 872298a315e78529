"""The benchmark runs, agrees with itself, and the page on performance shows what was recorded."""

import copy
import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from scoregram.bench import gram, gram_work
from scoregram.bench.gram import rows_of_one_size, run_gram_bench
from scoregram.bench.gram_work import KeepFloat64, gram_by_definition, random_work
from scoregram.bench.harness import random_model
from scoregram.bench.rivals import RIVALS, tied_layers, without_weights
from scoregram.checks import ScoregramError
from tests.cases import KeepDouble
from tests.naive import score_rows

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


def test_the_definition_is_that_of_one_backward_pass_per_rollout_in_float64(monkeypatch):
    model = random_model("llama-tiny", "float32", torch.device("cpu"), 0, caller="test")
    work = random_work(model, 3, 12)
    with KeepDouble():
        mask = torch.ones_like(work.input_ids)
        truth = score_rows(copy.deepcopy(model).double(), work.input_ids, work.completion_mask, mask)
    whole = gram_by_definition(work)
    torch.testing.assert_close(whole, truth @ truth.mT, rtol=1e-11, atol=1e-11)
    monkeypatch.setattr(gram_work, "_KEPT_ON_CPU", 1)  # one parameter at a time
    torch.testing.assert_close(gram_by_definition(work), whole, rtol=1e-12, atol=0)
    assert all(parameter.grad is None and parameter.dtype is torch.float32 for parameter in model.parameters())


def test_errors_are_relative_to_the_definition_on_request():
    model = random_model("llama-tiny", "bfloat16", torch.device("cpu"), 0, caller="test")
    work = random_work(model, 2, 12)
    names = ["plain", "n-backwards"]
    (_, beside), (_, exact) = (rows_of_one_size(work, names, 1, definition=asked) for asked in (False, True))
    assert beside.gram_error == 0 and exact.gram_error is not None and 1e-5 < exact.gram_error < 0.1


def test_a_product_of_float64_and_float32_is_taken_in_float64():
    # transformers 5.17 multiplies the frequencies of its rotary embedding by positions in float32.
    frequencies, positions = torch.tensor([[0.1]], dtype=torch.float64), torch.tensor([[3.0]])
    with KeepFloat64():
        assert frequencies.float().dtype is torch.float64
        assert torch.equal(frequencies.float() @ positions, torch.tensor([[0.1 * 3.0]], dtype=torch.float64))
        assert (positions @ positions).dtype is torch.float32


def test_a_definition_that_fails_leaves_the_times_standing(monkeypatch, tmp_path, capsys):
    def broken(work):
        raise RuntimeError("expected scalar type Double but found Float\nmore")

    monkeypatch.setattr("scoregram.bench.gram.gram_by_definition", broken)
    path = tmp_path / "record.json"
    run_gram_bench(
        shape="llama-tiny", rollouts=(2,), tokens=(16,), dtype="float32", autocast=False, device="cpu", lora=0,
        ways=("gram+gradient",), repeats=1, threads=1, definition=True, as_json=False, out=path, plot=None,
    )  # fmt: skip
    assert "No errors of K: expected scalar type Double but found Float\n" in capsys.readouterr().out
    for row in json.loads(path.read_text())["rows"]:
        assert row["seconds"] > 0 and row["gram_error"] is None
        assert row["unchecked"] == "expected scalar type Double but found Float"


def test_a_size_that_fails_keeps_the_record_of_those_before_it(monkeypatch, tmp_path):
    real = gram.rows_of_one_size

    def second_fails(work, *args, **kwargs):
        if len(work.input_ids) == 3:
            raise KeyboardInterrupt
        return real(work, *args, **kwargs)

    monkeypatch.setattr(gram, "rows_of_one_size", second_fails)
    path = tmp_path / "record.json"
    with pytest.raises(KeyboardInterrupt):
        run_gram_bench(
            shape="llama-tiny", rollouts=(2, 3), tokens=(16,), dtype="float32", autocast=False, device="cpu", lora=0,
            ways=("gram",), repeats=1, threads=1, definition=False, as_json=True, out=path, plot=None,
        )  # fmt: skip
    assert {row["rollouts"] for row in json.loads(path.read_text())["rows"]} == {2}


@pytest.mark.parametrize("name", sorted(name for name, rival in RIVALS.items() if rival.package))
def test_a_library_that_is_not_installed_is_skipped_with_one_sentence(name, monkeypatch):
    monkeypatch.setattr("scoregram.bench.rivals.find_spec", lambda package: None)
    model = random_model("llama-tiny", "float32", torch.device("cpu"), 0, caller="test")
    (row,) = [row for row in rows_of_one_size(random_work(model, 2, 8), ["plain", name], 1) if row.skipped]
    package = RIVALS[name].install
    assert row.skipped == f"bench gram: {name} needs the package {package}, got none. pip install {package}."


@pytest.mark.parametrize("name", ["opacus", "dattri", "dattri-llm", "dattri-llm-tied", "bergson", "bergson-projected"])
def test_a_library_errs_only_by_what_it_leaves_out(name):
    pytest.importorskip(RIVALS[name].package)
    model = random_model("llama-tiny", "float32", torch.device("cpu"), 0, caller="test")
    rows = rows_of_one_size(random_work(model, 4, 16), ["plain", name, "n-backwards"], 1, definition=True)
    row = rows[1]
    assert not row.skipped and row.gram_error is not None and row.gradient_error is not None
    assert row.gradient_error < 1e-5 and row.leaves_out == RIVALS[name].leaves_out
    assert (row.gram_error > 1e-3) if row.leaves_out else (row.gram_error < 1e-5)


def test_dattri_llm_scores_the_two_uses_of_a_tied_weight_as_two_weights():
    dattri_llm = pytest.importorskip("dattri_llm")
    ops = pytest.importorskip("dattri_llm.gradient.ops")
    embedding, head = torch.nn.Embedding(2, 1), torch.nn.Linear(1, 2, bias=False)
    embedding.weight.data.copy_(torch.tensor([[1.0], [0.0]]))
    head.weight = embedding.weight
    model = torch.nn.Sequential(embedding, head)
    capture = dattri_llm.CaptureCallback()
    config = dattri_llm.HookManagerConfig(linear_io=dattri_llm.REGISTER_ALL)
    with dattri_llm.HookManager(model, config=config, callbacks=[capture]).collect(deregister_on_exit=True):
        model(torch.tensor([[0]])).log_softmax(-1)[0, 0, 0].backward()
    # Logits (1, 0), q = σ(-1): the head's use has the gradient (q, -q), the embedding's (q, 0), the weight (2q, -q).
    q = torch.tensor(-1.0).sigmoid()
    assert embedding.weight.grad is not None
    torch.testing.assert_close(embedding.weight.grad.square().sum(), 5 * q**2)
    gradient = capture.record.gradient
    torch.testing.assert_close(ops.layerwise_cross_dot(gradient, gradient)[0, 0], 3 * q**2)


def test_the_weights_of_a_training_step_are_divided_out():
    model = random_model("llama-tiny", "float32", torch.device("cpu"), 0, caller="test")
    work = replace(random_work(model, 2, 8), weights=torch.tensor([2.0, -0.5]))
    # scores (1, 1) and (3, 0), times their weights: (2, 2) and (-1.5, 0)
    weighted = torch.tensor([[8.0, -3.0], [-3.0, 2.25]])
    expected = torch.tensor([[2.0, 3.0], [3.0, 9.0]], dtype=torch.float64)
    torch.testing.assert_close(without_weights(work, weighted), expected, rtol=0, atol=0)


def test_only_an_embedding_that_shares_its_weight_with_the_head_is_tied():
    model = random_model("llama-tiny", "float32", torch.device("cpu"), 0, caller="test")
    assert tied_layers(model) == ("model.embed_tokens", "lm_head")
    model.lm_head.weight.requires_grad_(False)
    assert tied_layers(model) == ()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    assert tied_layers(model) == ()


def test_the_record_is_strict_json(tmp_path, capsys):
    path = tmp_path / "record.json"
    status = run_gram_bench(
        shape="llama-tiny", rollouts=(2,), tokens=(16,), dtype="float32", autocast=True, device="cpu", lora=2,
        ways=("gram+gradient",), repeats=1, threads=1, definition=False, as_json=True, out=path,
        plot=tmp_path / "ratios.svg",
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
            definition=False, as_json=True, out=None, plot=None, **options,
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
            shape="llama-tiny", dtype="float32", autocast=False, ways=("gram",), definition=False, as_json=True,
            out=None, plot=None, **options,
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
