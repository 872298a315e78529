"""`results/fixed-policies`: the files are intact and hold no prompt, and every number of the page follows from them."""

import ast
import hashlib
import importlib.util
import json
import re
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from scoregram.policy import PolicyConfig, load_policy
from scoregram.spectra import orthogonal_null, spectrum_summary
from scoregram.tasks import load_task
from tests.training_cases import JUDGE, save_policy

pytestmark = pytest.mark.slow  # runs in `make test-results`

FOLDER = Path(__file__).parent.parent / "results" / "fixed-policies"
PAGE = FOLDER / "README.md"
MODELS = ("qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b", "smollm2-135m-taught")
FILES = [path for path in sorted(FOLDER.glob("*/*.parquet")) if "layers" not in path.stem]
LAYERS = sorted(FOLDER.glob("*/*-layers.parquet"))
COLUMNS = {
    *("prompt_index", "prompt_sha256", "rewards", "rewards_math_verify", "lengths", "truncated", "same_text_as"),
    *("measured_in", "k", "log_prob", "sampled_log_prob", "completion_tokens"),
}
TEMPERED_COLUMNS = {"k_plain", "log_prob_plain"}
FLOAT32_EPS = float(np.finfo(np.float32).eps)
TIED_EPS = 1e-4
"""Bound for the part of SmolLM2's tied embedding, measured in bfloat16: in one group at temperature 0.3 its lowest
eigenvalue is -5e-5 of its trace."""


@cache
def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"fixed_policies_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def summarise() -> ModuleType:
    return script("summarise")


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def list_column(path: Path, name: str) -> np.ndarray:
    """`(groups, length)` from a column of lists of one length."""
    values = pq.read_table(path, columns=[name])[name].combine_chunks()
    return values.flatten().to_numpy(zero_copy_only=False).reshape(len(values), -1)


@cache
def stored_grams(path: Path) -> dict[str, np.ndarray]:
    """Every `(groups, 16, 16)` Gram of a file, by column."""
    names = [name for name in pq.read_schema(path).names if name == "k" or name.startswith("k_")]
    grams = {}
    for name in names:
        entries = list_column(path, name)
        if path in LAYERS:
            k = np.zeros((len(entries), 16, 16), entries.dtype)
            k[:, *np.triu_indices(16)] = entries
            grams[name] = k + np.triu(k, 1).transpose(0, 2, 1)
        else:
            grams[name] = entries.reshape(-1, 16, 16)
    return grams


def test_every_model_has_its_files():
    assert {path.parent.name for path in FILES} == {path.parent.name for path in FOLDER.glob("*/setting.json")}
    assert {path.parent.name for path in FILES} == set(MODELS)
    assert [name_of(path) for path in LAYERS] == [f"{name_of(path)}-layers" for path in FILES]
    for model in MODELS:
        settings = json.loads((FOLDER / model / "setting.json").read_text(encoding="utf-8"))["settings"]
        rows = {path.stem: pq.read_metadata(path).num_rows for path in FILES if path.parent.name == model}
        assert rows == {name: setting["groups"] for name, setting in settings.items()}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_column_holds_a_prompt(path):
    """Columns are the known ones; the only strings are a dtype and a hash, the only tokens those of completions."""
    schema = pq.read_schema(path)
    tempered = not path.stem.startswith("t1-")
    assert set(schema.names) == (COLUMNS | TEMPERED_COLUMNS if tempered else COLUMNS)
    texts = {field.name for field in schema if pa.types.is_string(field.type) or pa.types.is_binary(field.type)}
    assert texts == {"measured_in", "prompt_sha256"}
    table = pq.read_table(path)
    assert set(table["measured_in"].to_pylist()) <= {"bfloat16", "float32"}
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in table["prompt_sha256"].to_pylist())
    rollouts = table["completion_tokens"].combine_chunks().flatten()
    np.testing.assert_array_equal(rollouts.value_lengths().to_numpy(), list_column(path, "lengths").ravel())
    assert not any("prompt" in key.decode() for key in schema.metadata or {})


@pytest.mark.parametrize("path", LAYERS, ids=name_of)
def test_layer_files_hold_grams_alone(path):
    assert pq.read_schema(path).names == ["prompt_index", "k_embed", "k_head", "k_last"]
    whole = pq.read_table(path.with_name(path.name.replace("-layers", "")), columns=["prompt_index"])
    assert pq.read_table(path, columns=["prompt_index"]).equals(whole)


@pytest.mark.parametrize("model", MODELS)
def test_settings_of_a_model_are_paired_by_prompt(model):
    prompts = [
        list(zip(*pq.read_table(path, columns=["prompt_index", "prompt_sha256"]).to_pydict().values(), strict=True))
        for path in FILES
        if path.parent.name == model
    ]
    longest = max(prompts, key=len)
    assert len(set(longest)) == len(longest)
    assert all(rows == longest[: len(rows)] for rows in prompts)


def snippet() -> str:
    found = re.search(r"<!-- snippet: begin -->\n```python\n(.*?)```\n<!-- snippet: end -->", PAGE.read_text(), re.S)
    assert found is not None
    return found[1]


def printed_rank_rows(model: str) -> list[list[str]]:
    """The table "rank by R" of the page, without its intervals."""
    text = PAGE.read_text(encoding="utf-8")
    table = text.partition("<!-- rank by R: begin -->")[2].partition("<!-- rank by R: end -->")[0]
    rows = [line.strip("| ").split(" | ")[1:] for line in table.splitlines() if line.startswith(f"| {model} |")]
    return [re.sub(r" of | \[.*?\] ?", " ", " ".join(row)).split() for row in rows]


def test_the_ten_lines_redo_the_table_with_numpy_alone(monkeypatch, capsys):
    code = snippet()
    assert len([line for line in code.splitlines() if line]) == 10
    imports = [node for node in ast.walk(ast.parse(code)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert [ast.unparse(node) for node in imports] == ["import numpy as np"]
    monkeypatch.chdir(FOLDER)
    exec(compile(code, "snippet", "exec"), {})
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert printed == printed_rank_rows("qwen2.5-coder-1.5b")
    assert [row[0] for row in printed] == ["2", "4", "8", "16"]


@pytest.mark.parametrize("model", MODELS)
def test_the_numpy_copy_is_the_parquet_file(model):
    path = FOLDER / model / "t1-p1.parquet"
    with np.load(path.with_suffix(".npz")) as stored:
        np.testing.assert_array_equal(stored["k"].reshape(-1, 256), list_column(path, "k"))
        np.testing.assert_array_equal(stored["rewards"], list_column(path, "rewards"))


@pytest.mark.parametrize("path", [path for path in LAYERS if path.stem == "t1-p1-layers"], ids=name_of)
def test_parts_are_those_of_the_layer_files(path):
    for name, k in stored_grams(path).items():
        np.testing.assert_array_equal(summarise().part_grams(path.parent.name, name), k)
    whole = summarise().part_grams(path.parent.name, "k")
    energies = [np.trace(k, axis1=1, axis2=2) for k in (whole, *stored_grams(path).values())]
    assert (sum(energies[1:]) <= energies[0] * (1 + FLOAT32_EPS)).all()  # parts share no parameter


def test_the_page_shows_the_tables():
    text = PAGE.read_text(encoding="utf-8")
    assert summarise().filled(text) == text, "run python results/fixed-policies/summarise.py --write"


def test_prompts_are_chosen_by_the_half_that_is_not_measured():
    stored = np.load(FOLDER / "qwen2.5-coder-1.5b" / "t1-p1.npz")
    ranks = []
    for k, rewards in zip(stored["k"].astype(float), stored["rewards"].astype(float), strict=True):
        for chooser, measured in ((slice(0, 8), slice(8, 16)), (slice(8, 16), slice(0, 8))):
            a = rewards[measured] - rewards[measured].mean()
            if rewards[chooser].sum() in (6, 7) and a.any():
                energy = np.linalg.svd(a[:, None] * k[measured, measured] * a, compute_uv=False)
                ranks.append(np.sqrt(energy).sum() ** 2 / energy.sum())
    row = next(line for line in summarise().chosen_table().splitlines() if "1.5b | 6 to 7" in line)
    assert f"| {np.mean(ranks):.2f} [" in row and f"{len(ranks)} live" in row.split("|")[-2]


def test_counts_in_the_text_of_the_page():
    columns = ["rewards", "rewards_math_verify"]
    rewards = [[list_column(path, name) for name in columns] for path in FILES]
    assert sum(len(plain) for plain, _ in rewards) == 2688
    assert sum(plain.size for plain, _ in rewards) == 43008
    assert sum(int((verified > plain).sum()) for plain, verified in rewards) == 33
    assert all(bool((verified >= plain).all()) for plain, verified in rewards)


def test_fifty_groups_agree_with_the_library():
    script, rng = summarise(), np.random.default_rng(0)
    for _ in range(50):
        path = FILES[rng.integers(len(FILES))]
        grams, rewards = stored_grams(path), list_column(path, "rewards").astype(float)
        live = np.flatnonzero((rewards.sum(1) > 0) & (rewards.sum(1) < 16))
        group, column = rng.choice(live), rng.choice(sorted(grams))
        k, a = grams[column][group], rewards[group] - rewards[group].mean()
        sigma, null = script.spectra(k[None].astype(float), a[None])
        gram, advantages = torch.tensor(k), torch.tensor(a)
        assert abs(spectrum_summary(gram, advantages).effective_rank - script.effective_rank(sigma)[0]) < 1e-9
        assert abs(orthogonal_null(gram, advantages).effective_rank - script.effective_rank(null)[0]) < 1e-9


@pytest.mark.parametrize("path", [*FILES, *LAYERS], ids=name_of)
def test_every_gram_is_symmetric_and_positive(path):
    for name, k in stored_grams(path).items():
        assert np.isfinite(k).all()
        np.testing.assert_array_equal(k, k.transpose(0, 2, 1))
        trace = np.trace(k.astype(float), axis1=1, axis2=2)
        # Rounding each entry to float32 moves an eigenvalue by at most ε/2 · |K|_F ≤ ε/2 · trace.
        bound = TIED_EPS if name == "k_embed" and path.parent.name == "smollm2-135m-taught" else FLOAT32_EPS
        assert (np.linalg.eigvalsh(k.astype(float))[:, 0] >= -bound * trace).all()


def test_a_stored_gram_is_measured_again_from_its_tokens(tmp_path):
    """A group of four rollouts of a small policy, whose Gram comes from one backward pass per rollout."""
    task = load_task("arithmetic:3", seed=0, reward=JUDGE)
    policy = load_policy(PolicyConfig(model=str(save_policy(tmp_path)), prompt="plain"), task)
    prompt = policy.encode_prompt(task.prompt(task.train[5]))
    draw = torch.Generator().manual_seed(0)
    completions = [torch.randint(4, 12, (size,), generator=draw).tolist() for size in (2, 5, 3, 5)]
    scores = []
    for completion in completions:
        row = torch.tensor([[*prompt, *completion]])
        log_probs = policy.model(row).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        chosen = log_probs[torch.arange(len(completion)), torch.tensor(completion)].sum()
        gradient = torch.autograd.grad(chosen, list(policy.model.parameters()))
        scores.append(torch.cat([part.flatten() for part in gradient]).double())
    stacked = torch.stack(scores)
    group = {
        "prompt_index": 5,
        "prompt_sha256": hashlib.sha256(b"".join(token.to_bytes(4, "little") for token in prompt)).hexdigest(),
        "completion_tokens": completions,
        "k": (stacked @ stacked.T).flatten().tolist(),
    }
    difference = script("remeasure").difference
    assert difference(policy, task, group, 1.0) < 1e-5
    assert difference(policy, task, group | {"completion_tokens": [*completions[:3], [4, 4, 4, 4, 4]]}, 1.0) > 0.01
    with pytest.raises(SystemExit, match="prompt 6 has other tokens"):
        difference(policy, task, group | {"prompt_index": 6}, 1.0)
