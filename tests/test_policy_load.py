"""Policies from folders and files, and every way in which loading one can fail."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from scoregram.checks import ScoregramError
from scoregram.policy import PolicyConfig, SamplingConfig, character_tokenizer, load_policy, sample, token_log_probs
from scoregram.policy.load import PolicyWarning, adopt_end_token, forget_quantisation, stop_tokens
from scoregram.policy.tiny import VOCABULARY
from scoregram.tasks import Problem, Task
from tests.cases import build

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}>>{% endif %}"
)


def task_of(prompt_format: str) -> Task:
    problem = Problem("p", "1+1=", "2")
    return Task("t", [problem], [problem], no_reward, 4, prompt_format)


def no_reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
    return [None] * len(prompts)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved model with a tokenizer that has neither chat template nor missing tokens."""
    build("Llama", vocab_size=len(VOCABULARY)).float().save_pretrained(tmp_path)
    character_tokenizer(64).save_pretrained(tmp_path)
    return tmp_path


def change_tokenizer(folder: Path, **settings: object) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for name, value in settings.items():
        setattr(tokenizer, name, value)
    tokenizer.save_pretrained(folder)


def test_a_folder_is_loaded_as_it_was_saved(folder):
    policy = load_policy(PolicyConfig(str(folder), device="cpu"))
    saved = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert all(torch.equal(a, b) for a, b in zip(policy.model.parameters(), saved.parameters(), strict=True))
    assert all(parameter.requires_grad for parameter in policy.model.parameters())
    assert not policy.model.training and policy.context == 64 and policy.pad_id == 0
    assert policy.stop_ids == (1, 2)  # the tokenizer's own, then the config's
    assert policy.encode_prompt("12+3=") == [VOCABULARY[character] for character in "12+3="]
    assert policy.decode([VOCABULARY["1"], VOCABULARY["5"], 1, 0]) == "15"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_dtype_and_attention_are_as_asked(folder, dtype, attention):
    name = str(dtype).removeprefix("torch.")
    policy = load_policy(PolicyConfig(str(folder), dtype=name, attention=attention, device="cpu"))
    assert {parameter.dtype for parameter in policy.model.parameters()} == {dtype}
    assert policy.model.config._attn_implementation == attention


@pytest.mark.parametrize("targets", [(), ("q_proj", "v_proj")])
def test_adapters_alone_are_trained_and_follow_the_seed(folder, targets):
    state = torch.random.get_rng_state()
    settings = {"lora_rank": 2, "lora_targets": targets, "device": "cpu"}
    first, again, other = (load_policy(PolicyConfig(str(folder), seed=seed, **settings)).model for seed in (3, 3, 4))
    assert torch.equal(state, torch.random.get_rng_state())
    trained = {name for name, parameter in first.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in first.named_parameters() if "lora_" in name} != set()
    layers = {name.split(".lora_")[0].rpartition(".")[2] for name in trained}
    every = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert layers == (set(targets) or every)
    parts = [dict(model.named_parameters()) for model in (first, again, other)]
    drawn = next(name for name in trained if "lora_A" in name)
    assert torch.equal(parts[0][drawn], parts[1][drawn]) and not torch.equal(parts[0][drawn], parts[2][drawn])
    found = sample(first, [[5, 6]], rollouts_per_prompt=2, sampling=SamplingConfig(4), stop_ids=(), pad_id=0)
    loss = token_log_probs(first, found.input_ids, found.attention_mask, found.completion_mask).sum()
    loss.backward()
    assert all((parameter.grad is not None) == parameter.requires_grad for parameter in first.parameters())


def test_chat_or_plain(folder):
    def policy(prompt, task=None):
        return load_policy(PolicyConfig(str(folder), prompt=prompt, device="cpu"), task)

    assert not policy("auto").chat
    with pytest.raises(ScoregramError, match="a chat prompt needs a tokenizer with a chat template, got none"):
        policy("chat")
    change_tokenizer(folder, chat_template=TEMPLATE)
    assert policy("auto").chat and policy("auto", task_of("{prompt}")).chat
    assert not policy("auto", task_of("Question: {prompt}\nAnswer:")).chat
    assert policy("chat", task_of("Question: {prompt}")).chat and not policy("plain").chat
    chat = policy("chat")
    assert chat.tokenizer.decode(chat.encode_prompt("hi")) == "<user>hi>>"
    assert policy("plain").encode_prompt("hi") == [VOCABULARY["h"], VOCABULARY["i"]]


def test_a_missing_pad_token_is_replaced_and_said(folder):
    change_tokenizer(folder, pad_token=None)
    with pytest.warns(PolicyWarning, match="no pad token; '<|end|>' is used"):
        policy = load_policy(PolicyConfig(str(folder), device="cpu"))
    assert policy.pad_id == policy.tokenizer.pad_token_id == 1


def test_end_tokens_are_looked_for_wherever_they_may_be():
    tokenizer = character_tokenizer(8)
    model = SimpleNamespace(
        config=SimpleNamespace(eos_token_id=[5, 1]), generation_config=SimpleNamespace(eos_token_id=7)
    )
    assert stop_tokens(model, tokenizer) == (1, 7, 5)
    tokenizer.eos_token = None
    model = SimpleNamespace(config=SimpleNamespace(eos_token_id=None))
    with pytest.raises(ScoregramError, match="must have a token that ends a completion"):
        stop_tokens(model, tokenizer)
    tokenizer.add_tokens(["</s>", "<|im_end|>"])
    chosen = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert stop_tokens(model, tokenizer) == (chosen,) and tokenizer.eos_token_id == chosen


def test_a_file_knows_its_end_token_better_than_the_tokenizer_made_from_it():
    tokenizer = character_tokenizer(8)
    adopt_end_token(SimpleNamespace(config=SimpleNamespace(eos_token_id=None)), tokenizer)
    assert tokenizer.eos_token_id == 1
    adopt_end_token(SimpleNamespace(config=SimpleNamespace(eos_token_id=2)), tokenizer)
    assert tokenizer.eos_token_id == 2


def test_the_mark_of_a_quantised_file_is_taken_off(tmp_path):
    model = build("Llama")
    model.is_quantized, model.hf_quantizer, model.quantization_method = True, object(), "QuantizationMethod.GGUF"
    model.config.quantization_config = {"quant_method": "gguf"}
    forget_quantisation(model)
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in (tmp_path / "config.json").read_text()


def test_a_gguf_file_is_handed_to_transformers(tmp_path, monkeypatch):
    """A real one takes a minute to load; what it needs from here is its folder and its name."""
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    asked = []
    model, tokenizer = build("Llama"), character_tokenizer(64)
    monkeypatch.setattr(
        transformers.AutoTokenizer, "from_pretrained", lambda **given: (asked.append(given), tokenizer)[1]
    )
    monkeypatch.setattr(
        transformers.AutoModelForCausalLM, "from_pretrained", lambda **given: (asked.append(given), model)[1]
    )
    load_policy(PolicyConfig(str(file), device="cpu"))
    assert all(given["gguf_file"] == "model.gguf" for given in asked) and len(asked) == 2
    assert all(given["pretrained_model_name_or_path"] == str(tmp_path) for given in asked)


def test_tiny_is_taught_for_the_task_and_the_seed(monkeypatch):
    from scoregram.policy import tiny

    asked = []

    def untrained(task, seed, *, note=None):
        asked.append((task, seed))
        return tiny.untrained(tiny.WarmStart(), seed), character_tokenizer(tiny.CONTEXT)

    monkeypatch.setattr(tiny, "tiny_policy", untrained)
    task = task_of("{prompt}")
    policy = load_policy(PolicyConfig(seed=5, device="cpu", attention="eager"), task)
    assert asked == [(task, 5)] and not policy.chat and policy.context == tiny.CONTEXT
    assert policy.model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"model": "./nothing/here"}, "a model given by its path must exist, got './nothing/here'"),
        ({"model": "/nothing/here.gguf"}, "a model given by its path must exist"),
        ({"dtype": "float8"}, "must be one of bfloat16, float16, float32, float64, got 'float8'"),
        ({"device": "tpu9000"}, "device must be auto, cpu, cuda or cuda:N, got 'tpu9000'"),
        ({"device": "cuda:77"}, "cuda:77 needs a GPU that torch can see"),
        ({"lora_rank": -1}, "lora_rank must be 0 or more, got -1"),
    ],
)
def test_what_is_not_there_is_named_before_anything_is_loaded(settings, match):
    with pytest.raises(ScoregramError, match=match):
        load_policy(PolicyConfig(**settings))


def test_what_cannot_be_read_is_named_in_one_sentence(folder, tmp_path_factory, monkeypatch):
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(
        ScoregramError, match=r"the folder .* must hold config.json, or adapter_config.json, got neither"
    ):
        load_policy(PolicyConfig(str(empty), device="cpu"))
    (empty / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ScoregramError, match="must be a causal language model that can be loaded") as caught:
        load_policy(PolicyConfig(str(empty), device="cpu"))
    assert "\n" not in str(caught.value)
    with pytest.raises(ScoregramError, match=r"attention must be an implementation .*, got 'no such kernel' .*sdpa or"):
        load_policy(PolicyConfig(str(folder), attention="no such kernel", device="cpu"))
    with pytest.raises(ScoregramError, match="lora_targets must name modules"):
        load_policy(PolicyConfig(str(folder), lora_rank=2, lora_targets=("nope",), device="cpu"))

    def unreachable(**_):
        raise OSError("We couldn't connect to the hub\nCheck your connection")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", unreachable)
    with pytest.raises(
        ScoregramError, match=r"'someone/model' must be .* got We couldn't connect to the hub Check your"
    ):
        load_policy(PolicyConfig("someone/model", device="cpu"))


@pytest.mark.parametrize(("package", "extra"), [("transformers", "hf"), ("peft", "peft")])
def test_a_missing_package_says_what_to_install(package, extra, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ScoregramError, match=rf"pip install 'scoregram\[{extra}\]'"):
        load_policy(PolicyConfig(str(folder), lora_rank=2, device="cpu"))


@pytest.fixture
def adapter(folder, tmp_path_factory) -> Path:
    """A LoRA checkpoint on the model in `folder`, next to it, without a tokenizer of its own."""
    place = tmp_path_factory.mktemp("adapters") / "adapter"
    policy = load_policy(PolicyConfig(str(folder), lora_rank=2, device="cpu"))
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.5)
    policy.model.save_pretrained(place)
    return place


def set_base(adapter: Path, base: object) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": base}))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_an_adapter_checkpoint_trains_what_the_adapter_trained(adapter, folder, dtype):
    policy = load_policy(PolicyConfig(str(adapter), device="cpu", dtype=dtype))
    trained = {name for name, parameter in policy.model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in policy.model.named_parameters() if "lora_" in name} != set()
    saved = load_file(adapter / "adapter_model.safetensors")
    assert len(saved) == len(trained)
    values = {name.replace(".default", ""): value for name, value in policy.model.named_parameters() if name in trained}
    assert all(torch.equal(values[name], value.to(values[name].dtype)) for name, value in saved.items())
    assert policy.encode_prompt("12+3=") == load_policy(PolicyConfig(str(folder), device="cpu")).encode_prompt("12+3=")


@pytest.mark.parametrize("start", ["adapter", "working directory"])
def test_a_relative_base_starts_at_the_adapter_or_the_working_directory(adapter, folder, start, monkeypatch):
    if start == "adapter":
        set_base(adapter, os.path.relpath(folder, adapter))
    else:
        monkeypatch.chdir(folder.parent)
        set_base(adapter, folder.name)
    assert hasattr(load_policy(PolicyConfig(str(adapter), device="cpu")).model, "peft_config")


@pytest.mark.parametrize("base", ["../gone", "gone", None])
def test_a_base_that_is_not_there_is_one_sentence(adapter, base, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    set_base(adapter, base)
    with pytest.raises(
        ScoregramError, match=r"the base of the adapter .* must be a model at .* or a hub id, got .* Move"
    ):
        load_policy(PolicyConfig(str(adapter), device="cpu"))


def test_new_adapters_on_adapters_are_refused(adapter):
    with pytest.raises(ScoregramError, match=r"lora_rank must be 0 for .*, an adapter, got 4"):
        load_policy(PolicyConfig(str(adapter), device="cpu", lora_rank=4))


def test_code_of_a_model_runs_only_if_asked_for(folder, tmp_path, monkeypatch):
    """The answer of `echo y |` counts for nothing."""
    marker = tmp_path / "ran"
    (folder / "own.py").write_text(
        f"open({str(marker)!r}, 'w').close()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class Own(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    path = folder / "config.json"
    own = {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    monkeypatch.setattr("builtins.input", lambda _="": "y")
    with pytest.raises(ScoregramError, match=r"must load without custom code, got .*Pass --trust-remote-code"):
        load_policy(PolicyConfig(str(folder), device="cpu"))
    assert not marker.exists()
    policy = load_policy(PolicyConfig(str(folder), device="cpu", trust_remote_code=True))
    assert marker.exists() and type(policy.model).__name__ == "Own"
