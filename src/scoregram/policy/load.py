"""Load a language model and its tokenizer as a policy: from a hub, a folder, a `.gguf` file, or the embedded one."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from scoregram.checks import ScoregramError, fail, lookup
from scoregram.policy.config import PolicyConfig
from scoregram.policy.models import PolicyWarning as PolicyWarning
from scoregram.policy.models import context_of
from scoregram.tasks import Task

CALLER = "load_policy"
DTYPES = MappingProxyType(
    {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
)
END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<end_of_turn>", "</s>", "<eos>")
"""Names under which vocabularies hide an end token that nothing else tells of; chats end with the first."""
QUANTISED = ("quantization_config", "_is_quantized", "quantization_method", "is_quantized", "hf_quantizer")
"""What a quantised file leaves on a model and on its config."""
UNREADABLE = (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError)
"""What transformers raises for a model that it cannot load."""


@dataclass(frozen=True)
class Policy:
    """A causal language model with its tokenizer and what is needed to sample from it."""

    model: Any
    """A `PreTrainedModel`, or a `PeftModel` around one, in evaluation mode."""
    tokenizer: Any
    config: PolicyConfig
    stop_ids: tuple[int, ...]
    """Tokens that end a completion."""
    pad_id: int
    context: int
    """Positions the model knows: prompt and completion together."""
    chat: bool = False
    """Whether prompts go through the tokenizer's chat template."""

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a prompt, up to where the policy begins to write.

        With `chat` the text is what the user says and the ids end where the answer begins; without, the text is
        encoded as it is, with the special tokens that the tokenizer puts in front.
        """
        if not self.chat:
            return list(self.tokenizer(text)["input_ids"])
        said = [{"role": "user", "content": text}]
        written = self.tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(written, add_special_tokens=False)["input_ids"])

    def computing(self) -> AbstractContextManager[Any]:
        """The precision that the policy computes in; sampling and training belong inside alike."""
        if not self.config.autocast:
            return nullcontext()
        return torch.autocast(next(self.model.parameters()).device.type, dtype=torch.bfloat16)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of completion tokens, without special tokens."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)


def load_policy(config: PolicyConfig, task: Task | None = None) -> Policy:
    """The policy that `config` describes, ready to be sampled from and trained.

    Every parameter requires a gradient, or with `lora_rank` those of the adapters alone. Global random state is not
    touched.

    Args:
        config: What to load and how to hold it.
        task: What it is for: `tiny` is taught at its difficulty, and `prompt="auto"` heeds its prompt format.

    Raises:
        ScoregramError: A model that is not found or cannot be read, a package that is missing, a device that is not
            there, a chat without a template, a vocabulary without an end token.
    """
    dtype = lookup(DTYPES, config.dtype, kind=f"{CALLER} dtype")
    device = chosen_device(config.device)
    model, tokenizer = sources(config, task, dtype)
    stop_ids = stop_tokens(model, tokenizer)
    pad_id = pad_token(model, tokenizer, stop_ids[0])
    chat = reads_as_chat(config, tokenizer, task)
    if config.lora_rank:
        model = with_adapters(model, config)
    else:
        model.requires_grad_(True)
    model = model.to(device).eval()
    return Policy(model, tokenizer, config, stop_ids, pad_id, context_of(model), chat)


def chosen_device(name: str) -> torch.device:
    """The device of that name; `auto` is a GPU if there is one."""
    found = torch.cuda.is_available()
    if name == "auto":
        return torch.device("cuda" if found else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        fail(CALLER, "device must be auto, cpu, cuda or cuda:N", repr(name), "Check the spelling.")
    if device.type == "cuda" and not (found and (device.index or 0) < torch.cuda.device_count()):
        there = f"{torch.cuda.device_count() if found else 0} of them"
        fail(CALLER, f"{name} needs a GPU that torch can see", there, "Pass cpu, or auto.")
    return device


def sources(config: PolicyConfig, task: Task | None, dtype: torch.dtype) -> tuple[Any, Any]:
    """Model and tokenizer, on the CPU."""
    try:
        import transformers
    except ImportError as missing:
        fail(CALLER, "needs transformers", str(missing), "Install it: pip install 'scoregram[hf]'.")
    if config.model == "tiny":
        from scoregram.policy.tiny import tiny_policy

        built: tuple[Any, Any] = tiny_policy(task, config.seed)
        if config.attention != "sdpa":
            refused(config, lambda: built[0].set_attn_implementation(config.attention))
        return built[0].to(dtype), built[1]
    where = located(config.model)
    load = transformers.AutoModelForCausalLM.from_pretrained
    with without_bars():
        tokenizer = refused(config, lambda: transformers.AutoTokenizer.from_pretrained(**where))
        model = refused(config, lambda: load(**where, dtype=dtype, attn_implementation=config.attention))
    forget_quantisation(model)
    if "gguf_file" in where:
        believe_file(model, tokenizer)
    return model, tokenizer


@contextmanager
def without_bars() -> Iterator[None]:
    """Inside, transformers shows no progress bars of its own."""
    from transformers.utils import logging

    was_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            logging.enable_progress_bar()


def believe_file(model: Any, tokenizer: Any) -> None:
    """Give a tokenizer read from a `.gguf` file the end token that the file names.

    The model's config has it from there; some versions of transformers build the tokenizer with another one.
    """
    end = model.config.eos_token_id
    if isinstance(end, int) and tokenizer.eos_token_id != end:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)


def refused(config: PolicyConfig, load: Any) -> Any:
    """What `load` returns; if it cannot, one sentence that says why."""
    try:
        return load()
    except ScoregramError:
        raise
    except UNREADABLE as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        remedy = "Pass a hub id, a folder with config.json, a .gguf file, or tiny."
        fail(CALLER, f"{config.model!r} must be a causal language model that can be loaded", reason, remedy)


def located(model: str) -> dict[str, str]:
    """Arguments under which transformers finds a model."""
    path = Path(model).expanduser()
    if path.suffix == ".gguf" or model.startswith((".", "/", "~")):
        if not path.exists():
            fail(CALLER, "a model given by its path must exist", repr(model), "Check the path.")
        if path.is_file():
            return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    return {"pretrained_model_name_or_path": str(path) if path.exists() else model}


def forget_quantisation(model: Any) -> None:
    """Take the mark of a quantised file off a model whose weights are plain numbers by now, so that it can be saved."""
    if str(getattr(model, "quantization_method", "")).lower().rpartition(".")[2] != "gguf":
        return
    for holder in (model, model.config):
        for name in set(QUANTISED) & vars(holder).keys():
            delattr(holder, name)


def stop_tokens(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every token that ends a completion, the tokenizer's own first."""
    found: list[int] = []
    if tokenizer.eos_token_id is None:  # a config may be wrong where the tokenizer says nothing: ask by name first
        vocabulary = tokenizer.get_vocab()
        found = [vocabulary[name] for name in END_TOKENS if name in vocabulary][:1]
    generation = getattr(model, "generation_config", None)
    for given in (tokenizer.eos_token_id, getattr(generation, "eos_token_id", None), model.config.eos_token_id):
        found += [] if given is None else [given] if isinstance(given, int) else list(given)
    if not found:
        fail(CALLER, "the tokenizer must have a token that ends a completion", "none", "Set its eos_token and save it.")
    if tokenizer.eos_token_id is None:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(found[0])
    return tuple(dict.fromkeys(found))


def pad_token(model: Any, tokenizer: Any, end: int) -> int:
    """The token that fills shorter rollouts; the end token where a tokenizer has none, which is said."""
    pad_id = tokenizer.pad_token_id
    if pad_id is None:
        name = tokenizer.convert_ids_to_tokens(end)
        warnings.warn(f"{CALLER}: the tokenizer has no pad token; {name!r} is used, and masked.", PolicyWarning, 3)
        tokenizer.pad_token, pad_id = name, end
    if model.config.pad_token_id is None:
        model.config.pad_token_id = pad_id
    return pad_id


def reads_as_chat(config: PolicyConfig, tokenizer: Any, task: Task | None) -> bool:
    """Whether prompts go through the chat template."""
    has_template = getattr(tokenizer, "chat_template", None) is not None
    if config.prompt == "chat" and not has_template:
        fail(CALLER, "a chat prompt needs a tokenizer with a chat template", "none", "Pass prompt plain, or auto.")
    if config.prompt == "auto":
        return has_template and (task is None or task.prompt_format == "{prompt}")
    return config.prompt == "chat"


def with_adapters(model: Any, config: PolicyConfig) -> Any:
    """The model with fresh adapters, drawn from the seed, on a frozen base."""
    try:
        import peft
    except ImportError as missing:
        fail(CALLER, "lora_rank needs peft", str(missing), "Install it: pip install 'scoregram[peft]'.")
    targets = list(config.lora_targets) or "all-linear"
    scale: Any = config.lora_alpha  # any number, although annotated as an int
    settings = peft.LoraConfig(
        r=config.lora_rank, lora_alpha=scale, target_modules=targets, task_type=peft.TaskType.CAUSAL_LM
    )
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(config.seed)
        try:
            return peft.get_peft_model(model, settings)
        except ValueError as error:
            reason = str(error).splitlines()[0]
            fail(CALLER, f"lora_targets must name modules of {config.model!r}", reason, "Leave it out for all.")
