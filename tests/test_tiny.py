import os
import random
import stat
import string
import subprocess
import sys
from dataclasses import replace
from io import StringIO

import pytest
import torch
from rich.console import Console

from scoregram.policy import tiny
from scoregram.policy.supervised import padded_demonstrations
from scoregram.policy.tiny import (
    VOCABULARY,
    WarmStart,
    cache_folder,
    cache_key,
    character_demonstration,
    character_tokenizer,
    tiny_policy,
)
from scoregram.tasks import load_task
from scoregram.training import TrainConfig, train

SHORT = WarmStart(hidden_size=32, intermediate_size=48, heads=2, longest=2, polish_steps=1, habit_steps=2, batch=4)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SCOREGRAM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def weights(seed: int = 0, task: str = "arithmetic", recipe: WarmStart = SHORT) -> dict[str, torch.Tensor]:
    return {name: w.clone() for name, w in tiny_policy(load_task(task), seed, recipe=recipe)[0].state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def refuse_to_train(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("trained although the cache has it")

    return lambda: monkeypatch.setattr(tiny, "warm_start_tiny", refuse)


def test_every_printable_character_is_one_token_and_comes_back():
    tokenizer = character_tokenizer(64)
    text = "".join(chr(code) for code in range(32, 127)) + "\n a ,b .c !\n\n"
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text) and tokenizer.decode(ids) == text
    assert ids == [VOCABULARY[character] for character in text]
    assert set(string.printable) - set("\t\r\x0b\x0c") <= VOCABULARY.keys()


def test_special_tokens_have_their_own_ids():
    tokenizer = character_tokenizer(64)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert len(tokenizer) == len(VOCABULARY) == 99
    assert tokenizer("é\t").input_ids == [2, 2]
    assert tokenizer.decode([*tokenizer("7.").input_ids, 2, 1, 0, 0], skip_special_tokens=True) == "7."


def test_it_is_a_transformers_tokenizer_that_is_saved_and_loaded(tmp_path):
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer = character_tokenizer(64)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded("3+8= .").input_ids == tokenizer("3+8= .").input_ids
    assert (loaded.pad_token_id, loaded.eos_token_id, loaded.model_max_length) == (0, 1, 64)
    assert loaded.decode(loaded("a , b").input_ids) == "a , b"


def test_the_default_is_a_llama_of_about_a_million_parameters():
    from transformers import LlamaForCausalLM

    model = tiny.untrained(WarmStart(), seed=0)
    assert isinstance(model, LlamaForCausalLM)
    assert 0.7e6 < sum(p.numel() for p in model.parameters()) < 1.3e6
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert (model.config.pad_token_id, model.config.eos_token_id) == (0, 1)


def test_one_seed_gives_the_same_bits_made_anew_or_from_the_cache(cache, refuse_to_train):
    made = weights()
    (entry,) = cache.iterdir()
    entry.unlink()
    torch.manual_seed(99)
    assert same(weights(), made)
    refuse_to_train()
    assert same(weights(), made)


def test_the_strict_task_starts_from_the_weights_of_the_plain_one(refuse_to_train):
    made = weights(task="arithmetic:3")
    refuse_to_train()
    assert same(weights(task="arithmetic-strict:3"), made)


def test_bits_do_not_depend_on_threads_or_on_gradients_being_off(cache):
    made = weights()
    next(cache.iterdir()).unlink()
    torch.set_num_threads(2)
    try:
        with torch.inference_mode():
            again = weights()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert same(again, made)


@pytest.mark.slow
def test_another_process_makes_the_same_bits(cache):
    code = "import tests.test_tiny as t; print(t.tiny.weights_digest(t.weights()))"
    elsewhere = {**os.environ, "SCOREGRAM_CACHE": str(cache / "elsewhere"), "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=elsewhere)
    assert done.stdout.split()[-1] == tiny.weights_digest(weights())


def test_seed_and_difficulty_change_the_bits():
    assert not same(weights(seed=1), weights(seed=0))
    assert not same(weights(task="arithmetic:3"), weights())
    trained, start = weights(), tiny.untrained(SHORT, 0).state_dict()
    assert not same(trained, dict(start))


@pytest.mark.usefixtures("unchecked_shapes")  # the checks themselves draw from `random`
def test_no_global_random_state_is_touched():
    torch.manual_seed(5)
    random.seed(5)
    before = torch.get_rng_state(), random.getstate()
    weights()
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


def test_a_task_of_another_kind_gets_the_default_difficulty(refuse_to_train):
    made = weights()
    refuse_to_train()
    other = replace(load_task("arithmetic:6"), name="jsonl:sums:6")
    for task in (None, other):
        assert same(dict(tiny_policy(task, 0, recipe=SHORT)[0].state_dict()), made)


def test_a_line_is_printed_only_while_the_policy_is_built():
    lines: list[str] = []
    for _ in range(2):
        tiny_policy(load_task("arithmetic:3"), 4, recipe=SHORT, note=lines.append)
    (line,) = lines
    assert line.startswith("building the policy tiny for arithmetic:3, seed 4")


def test_training_prints_that_it_builds_the_policy(tmp_path, monkeypatch):
    """The line comes before the first step, on the console of the run."""
    console = Console(file=StringIO(), width=40)
    built = TrainConfig(out=tmp_path / "run", task="arithmetic:3", steps=1, batch_size=8, eval_problems=2, device="cpu")
    monkeypatch.setattr(tiny, "warm_start_tiny", lambda *_: None)
    train(built, console=console)
    said = console.file.getvalue()  # type: ignore[union-attr]
    assert said.startswith("building the policy tiny for arithmetic:3, seed 0: about a minute on two cores")


def test_the_model_comes_ready_to_use():
    model, tokenizer = tiny_policy(None, 0, recipe=SHORT)
    assert not model.training and all(p.requires_grad and p.grad is None for p in model.parameters())
    assert model(torch.tensor([tokenizer("1+2=").input_ids])).logits.shape == (1, 4, len(tokenizer))


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "of another shape", "no safetensors"])
def test_a_damaged_entry_is_made_anew(cache, damage, refuse_to_train):
    made = weights()
    (entry,) = cache.iterdir()
    whole = entry.read_bytes()
    if damage == "of another shape":
        weights(recipe=replace(SHORT, hidden_size=16))
        (other,) = set(cache.iterdir()) - {entry}
        other.replace(entry)
    else:
        flipped = whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:]
        entry.write_bytes({"truncated": whole[:-100], "empty": b"", "flipped": flipped}.get(damage, b"text" * 99))
    assert same(weights(), made)
    assert entry.read_bytes() == whole
    refuse_to_train()
    assert same(weights(), made)


def test_an_entry_appears_complete_or_not_at_all(cache, monkeypatch):
    import safetensors.torch

    def full_disk(_, path, **__):
        with open(path, "wb") as part:  # noqa: PTH123
            part.write(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(safetensors.torch, "save_file", full_disk)
    weights()  # costs time at the next start and nothing else
    assert [*cache.iterdir()] == []


@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="root may write anywhere")
def test_a_cache_that_cannot_be_written_is_no_error(cache):
    cache.mkdir()
    cache.chmod(stat.S_IRUSR | stat.S_IXUSR)
    weights()


def test_where_the_cache_is(monkeypatch, tmp_path):
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("SCOREGRAM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "scoregram"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "scoregram"


def test_the_key_changes_with_everything_that_decides_the_weights(monkeypatch):
    keys = [cache_key(SHORT, {"terms": 4}, 0), cache_key(SHORT, {"terms": 4}, 1), cache_key(SHORT, {"terms": 5}, 0)]
    keys.append(cache_key(replace(SHORT, version=SHORT.version + 1), {"terms": 4}, 0))
    keys.append(cache_key(replace(SHORT, habit=0.5), {"terms": 4}, 0))
    assert keys[0] == cache_key(replace(SHORT), {"terms": 4}, 0)
    monkeypatch.setattr(torch, "__version__", "0.0")
    keys.append(cache_key(SHORT, {"terms": 4}, 0))
    monkeypatch.setattr("transformers.__version__", "0.0")
    keys.append(cache_key(SHORT, {"terms": 4}, 0))
    assert len(set(keys)) == len(keys)


def test_a_loss_is_taken_at_the_solution_and_its_stop_token_only():
    problem, longer = load_task("arithmetic:2").test[0], load_task("arithmetic:3").test[0]
    demonstrations = [
        character_demonstration(problem, lambda _: "12."),
        character_demonstration(longer, lambda _: "3,45."),
    ]
    ids, _, solution = padded_demonstrations(demonstrations, 0)
    labels = ids.masked_fill(~solution, tiny.IGNORED)
    tokenizer = character_tokenizer(64)
    for row, label, (asked, said) in zip(ids, labels, [(problem.prompt, "12."), (longer.prompt, "3,45.")], strict=True):
        taught = label != tiny.IGNORED
        assert tokenizer.decode(row[row != 0]) == f"{asked}{said}<|end|>"
        assert torch.equal(label[taught], row[taught]) and tokenizer.decode(label[taught]) == f"{said}<|end|>"


def test_no_test_problem_is_taught(monkeypatch):
    taught = set()
    noted = lambda problem, solve: taught.add(problem.prompt) or character_demonstration(problem, solve)  # noqa: E731
    monkeypatch.setattr(tiny, "character_demonstration", noted)
    weights(task="arithmetic:2", recipe=replace(SHORT, longest=20, habit_steps=20, batch=16))
    every_seed = [load_task("arithmetic:2", seed=seed).test for seed in range(3)]
    assert len(taught) > 200 and not taught & {problem.prompt for test in every_seed for problem in test}


@torch.no_grad()
def completions(model, tokenizer, task, *, greedy: bool, seed: int = 0) -> list[str]:
    """One completion per test problem by the plainest loop: no cache, all prompts of one length."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.tensor([tokenizer(task.prompt(problem)).input_ids for problem in task.test])
    prompt = ids.shape[1]
    for _ in range(task.max_new_tokens):
        chances = model(ids).logits[:, -1].softmax(-1)
        chosen = chances.argmax(-1, keepdim=True) if greedy else torch.multinomial(chances, 1, generator=generator)
        ids = torch.cat([ids, chosen], dim=1)
    return [tokenizer.decode([*row, 1][: [*row, 1].index(1)]) for row in ids[:, prompt:].tolist()]


def accuracy(task, texts: list[str]) -> float:
    return sum(float(reward or 0.0) for reward in task.rewards(task.test, texts)) / len(texts)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_the_warm_started_policy_begins_between_20_and_50_per_cent(seed):
    """On all 512 test problems; four standard errors of a share are below 0.09."""
    task = load_task("arithmetic")
    model, tokenizer = tiny_policy(task, seed)
    sampled = completions(model, tokenizer, task, greedy=False)
    assert 0.2 < accuracy(task, sampled) < 0.5
    by_mode = completions(model, tokenizer, task, greedy=True)
    assert accuracy(task, by_mode) < 0.6  # something is left to learn for it, too
    assert task.steps is not None
    formed = [len(task.steps(problem, text)) == 3 for problem, text in zip(task.test, sampled, strict=True)]
    assert sum(formed) / len(formed) > 0.95
