"""A policy: a language model and its tokenizer, from the hub, a folder, a `.gguf` file, or the embedded one."""

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
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

DTYPES = MappingProxyType(
    {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
)
END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<end_of_turn>", "</s>", "<eos>")
"""End tokens to look for, in this order, if a tokenizer has no `eos_token`; the first ends a chat message."""
QUANTISED = ("quantization_config", "_is_quantized", "quantization_method", "is_quantized", "hf_quantizer")
"""Attributes that a quantised file leaves on a model and on its config."""
UNREADABLE = (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError)
"""Exceptions of transformers for a model that it cannot load."""
MODEL_REMEDY = "Pass a hub id, a folder with config.json, a .gguf file, or tiny."


@dataclass(frozen=True)
class Policy:
    """A causal language model with its tokenizer, and the token ids and limits that sampling needs."""

    model: Any
    """A `PreTrainedModel`, or a `PeftModel` around one, in evaluation mode."""
    tokenizer: Any
    config: PolicyConfig
    stop_ids: tuple[int, ...]
    """Tokens that end a completion."""
    pad_id: int
    context: int
    """Longest text in tokens, prompt and completion together."""
    chat: bool = False
    """Whether the tokenizer's chat template is applied to prompts."""

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a prompt, up to the place where the completion begins.

        With `chat` the text is a user message in the tokenizer's chat template. Otherwise it is encoded as it is, with
        the special tokens that the tokenizer adds.
        """
        if not self.chat:
            return list(self.tokenizer(text)["input_ids"])
        messages = [{"role": "user", "content": text}]
        rendered = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(rendered, add_special_tokens=False)["input_ids"])

    def encode_observation(self, text: str) -> list[int]:
        """Token ids of what an environment writes after a turn, up to the place where the next turn begins.

        The policy's stop token is already there. With `chat` the text is the next user message in the tokenizer's chat
        template; otherwise it is encoded as it is, without special tokens.
        """
        if self.chat:
            text = self._next_message(text)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _next_message(self, text: str) -> str:
        """What the chat template writes between the stop token of a turn and the start of the next one."""
        spoken = "a turn of the policy"
        roles = (("user", "a prompt"), ("assistant", spoken), ("user", text))
        messages = [{"role": role, "content": content} for role, content in roles]
        rendered = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        after = rendered.partition(spoken)[2]
        stops = (self.tokenizer.decode([stop]) for stop in self.stop_ids)
        return next((after.removeprefix(stop) for stop in stops if stop and after.startswith(stop)), after)

    def computing(self) -> AbstractContextManager[Any]:
        """Context in which the policy is sampled and trained: autocast to bfloat16 if the config asks for it."""
        if not self.config.autocast:
            return nullcontext()
        return torch.autocast(next(self.model.parameters()).device.type, dtype=torch.bfloat16)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of completion tokens, without special tokens."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)


def load_policy(config: PolicyConfig, task: Task | None = None, *, note: Callable[[str], None] | None = None) -> Policy:
    """The policy that `config` describes, ready to be sampled from and trained.

    Every parameter requires a gradient; with `lora_rank`, or for the checkpoint of an adapter, only those that the
    adapter trains. Global random state is not touched.

    Args:
        config: Model, precision, device, adapters.
        task: Sets the difficulty that `tiny` is trained on; `prompt="auto"` depends on its prompt format.
        note: Called with one line if `tiny` has to be built first, which takes about a minute.

    Raises:
        ScoregramError: A model that does not exist or cannot be read, one with custom code but without
            `trust_remote_code`, a missing package or device, a chat prompt without a template, a vocabulary without an
            end token.
    """
    dtype = lookup(DTYPES, config.dtype, kind="load_policy dtype")
    device = chosen_device(config.device)
    model, tokenizer = _load_model(config, task, dtype, note)
    stop_ids = stop_tokens(model, tokenizer)
    pad_id = pad_token(model, tokenizer, stop_ids[0])
    chat = reads_as_chat(config, tokenizer, task)
    if config.lora_rank:
        model = with_adapters(model, config)
    elif not hasattr(model, "peft_config"):
        model.requires_grad_(True)
    model = model.to(device).eval()
    return Policy(model, tokenizer, config, stop_ids, pad_id, context_of(model), chat)


def chosen_device(name: str) -> torch.device:
    """The device of that name; `auto` is a GPU if there is one."""
    has_gpu = torch.cuda.is_available()
    if name == "auto":
        return torch.device("cuda" if has_gpu else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        fail("load_policy", "device must be auto, cpu, cuda or cuda:N", repr(name), "Check the spelling.")
    if device.type == "cuda" and not (has_gpu and (device.index or 0) < torch.cuda.device_count()):
        visible = f"{torch.cuda.device_count() if has_gpu else 0} GPUs"
        fail("load_policy", f"{name} needs a GPU that torch can see", visible, "Pass cpu, or auto.")
    return device


def _load_model(
    config: PolicyConfig, task: Task | None, dtype: torch.dtype, note: Callable[[str], None] | None
) -> tuple[Any, Any]:
    """Model and tokenizer, on the CPU."""
    try:
        import transformers
    except ImportError as missing:
        fail("load_policy", "needs transformers", str(missing), "Install it: pip install 'scoregram[hf]'.")
    if config.model == "tiny":
        from scoregram.policy.tiny import tiny_policy

        tiny: Any
        tiny, tokenizer = tiny_policy(task, config.seed, note=note)
        if config.attention != "sdpa":
            with _load_errors(config):
                tiny.set_attn_implementation(config.attention)
        return tiny.to(dtype), tokenizer
    from transformers.utils.peft_utils import find_adapter_config_file

    where = _model_arguments(config.model)
    name = where["pretrained_model_name_or_path"]
    shared: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    weights = shared | {"dtype": dtype, "attn_implementation": config.attention}
    with without_bars(), _load_errors(config):
        # For a hub id the tokenizer comes first: the search for an adapter does not raise if the hub is unreachable.
        is_folder = Path(name).is_dir()
        tokenizer = None if is_folder else transformers.AutoTokenizer.from_pretrained(**where, **shared)
        adapter = None if "gguf_file" in where else find_adapter_config_file(name)
        if adapter is not None:
            return _load_adapters(config, name, Path(adapter), shared, weights)
        if tokenizer is None:
            tokenizer = transformers.AutoTokenizer.from_pretrained(**where, **shared)
        model = transformers.AutoModelForCausalLM.from_pretrained(**where, **weights)
    forget_quantisation(model)
    if "gguf_file" in where:
        adopt_end_token(model, tokenizer)
    return model, tokenizer


def _load_adapters(
    config: PolicyConfig, name: str, adapter_config: Path, shared: dict[str, Any], weights: dict[str, Any]
) -> tuple[Any, Any]:
    """The checkpoint of an adapter on its base; only the parameters that the adapter trained require a gradient.

    A relative path of the base is resolved against the adapter's folder, then against the working directory.
    """
    import transformers
    from transformers.utils.hub import cached_file

    if config.lora_rank:
        remedy = "Pass lora_rank 0 to continue with its adapters, or merge them into their base first."
        fail("load_policy", f"lora_rank must be 0 for {config.model!r}, an adapter", config.lora_rank, remedy)
    try:
        import peft
    except ImportError as missing:
        fail("load_policy", "an adapter needs peft", str(missing), "Install it: pip install 'scoregram[peft]'.")
    base = json.loads(adapter_config.read_text(encoding="utf-8")).get("base_model_name_or_path")
    places = (adapter_config.parent / str(base), Path(str(base)).expanduser())
    found = next((str(place) for place in places if (place / "config.json").is_file()), str(base))
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(found, **weights)
    except UNREADABLE as error:
        if _needs_code(error):
            raise
        where = " or ".join(dict.fromkeys(str(place.absolute()) for place in places))
        requirement = f"the base of the adapter {config.model!r} must be a model at {where}, or a hub id"
        remedy = "Move the base there, or change base_model_name_or_path in adapter_config.json."
        fail("load_policy", requirement, f"{base!r} ({' '.join(str(error).split())[:100]})", remedy)
    has_tokenizer = cached_file(name, "tokenizer_config.json", _raise_exceptions_for_missing_entries=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(name if has_tokenizer else found, **shared)
    return peft.PeftModel.from_pretrained(model, name, is_trainable=True), tokenizer


def _needs_code(error: Exception) -> bool:
    """Whether transformers refused a model because its repository has custom code."""
    return "trust_remote_code" in str(error)


@contextmanager
def without_bars() -> Iterator[None]:
    """Inside, transformers shows no progress bars."""
    from transformers.utils import logging

    was_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            logging.enable_progress_bar()


def adopt_end_token(model: Any, tokenizer: Any) -> None:
    """Set the end token of a tokenizer from a `.gguf` file to that of the model's config.

    The config has the file's end token; some versions of transformers build the tokenizer with another one.
    """
    end = model.config.eos_token_id
    if isinstance(end, int) and tokenizer.eos_token_id != end:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)


@contextmanager
def _load_errors(config: PolicyConfig) -> Iterator[None]:
    """Inside, an exception of transformers becomes one sentence that gives the reason."""
    try:
        yield
    except ScoregramError:
        raise
    except UNREADABLE as error:
        if _needs_code(error) and not config.trust_remote_code:
            remedy = "Pass --trust-remote-code to train or measure if you trust its author: the code runs on loading."
            fail("load_policy", f"{config.model!r} must load without custom code", "a model with custom code", remedy)
        reason = " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
        if "attn_implementation" in reason or "ttention implementation" in reason:
            requirement = f"attention must be an implementation that {config.model!r} has here"
            fail("load_policy", requirement, f"{config.attention!r} ({reason})", "Choose sdpa or eager.")
        fail(
            "load_policy", f"{config.model!r} must be a causal language model that can be loaded", reason, MODEL_REMEDY
        )


def _model_arguments(model: str) -> dict[str, str]:
    """Arguments of `from_pretrained` for a hub id, a folder or a `.gguf` file."""
    path = Path(model).expanduser()
    if path.suffix == ".gguf" or model.startswith((".", "/", "~")):
        if not path.exists():
            fail("load_policy", "a model given by its path must exist", repr(model), "Check the path.")
        if path.is_file():
            return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    if not model.strip():
        fail("load_policy", "a model must be named", repr(model), MODEL_REMEDY)
    if path.is_dir() and not any((path / name).is_file() for name in ("config.json", "adapter_config.json")):
        requirement = f"the folder {model} must hold config.json, or adapter_config.json"
        fail("load_policy", requirement, "neither", MODEL_REMEDY)
    return {"pretrained_model_name_or_path": str(path) if path.exists() else model}


def forget_quantisation(model: Any) -> None:
    """Remove the quantisation attributes of a `.gguf` model, whose weights are dequantised, so that it can be saved."""
    if str(getattr(model, "quantization_method", "")).lower().rpartition(".")[2] != "gguf":
        return
    for holder in (model, model.config):
        for name in set(QUANTISED) & vars(holder).keys():
            delattr(holder, name)


def stop_tokens(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every token that ends a completion, the tokenizer's own first."""
    found: list[int] = []
    if tokenizer.eos_token_id is None:  # then the config's end token may be wrong too: known names come first
        vocabulary = tokenizer.get_vocab()
        found = [vocabulary[name] for name in END_TOKENS if name in vocabulary][:1]
    generation = getattr(model, "generation_config", None)
    for given in (tokenizer.eos_token_id, getattr(generation, "eos_token_id", None), model.config.eos_token_id):
        found += [] if given is None else [given] if isinstance(given, int) else list(given)
    if not found:
        remedy = "Set its eos_token and save it."
        fail("load_policy", "the tokenizer must have a token that ends a completion", "none", remedy)
    if tokenizer.eos_token_id is None:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(found[0])
    return tuple(dict.fromkeys(found))


def pad_token(model: Any, tokenizer: Any, end: int) -> int:
    """The token that fills shorter rollouts; the end token, with a warning, for a tokenizer without a pad token."""
    pad_id = tokenizer.pad_token_id
    if pad_id is None:
        name = tokenizer.convert_ids_to_tokens(end)
        message = f"load_policy: the tokenizer has no pad token; padding uses {name!r} and is masked."
        warnings.warn(message, PolicyWarning, 3)
        tokenizer.pad_token, pad_id = name, end
    if model.config.pad_token_id is None:
        model.config.pad_token_id = pad_id
    return pad_id


def reads_as_chat(config: PolicyConfig, tokenizer: Any, task: Task | None) -> bool:
    """Whether the chat template is applied to prompts."""
    has_template = getattr(tokenizer, "chat_template", None) is not None
    if config.prompt == "chat" and not has_template:
        remedy = "Choose --prompt plain."
        fail("load_policy", "a chat prompt needs a tokenizer with a chat template", "none", remedy)
    if config.prompt == "auto":
        return has_template and (task is None or task.prompt_format == "{prompt}")
    return config.prompt == "chat"


def with_adapters(model: Any, config: PolicyConfig) -> Any:
    """The model with new adapters, initialised from the seed, on a frozen base."""
    try:
        import peft
    except ImportError as missing:
        fail("load_policy", "lora_rank needs peft", str(missing), "Install it: pip install 'scoregram[peft]'.")
    targets = list(config.lora_targets) or "all-linear"
    scale: Any = config.lora_alpha  # peft annotates an int but accepts any number
    settings = peft.LoraConfig(
        r=config.lora_rank, lora_alpha=scale, target_modules=targets, task_type=peft.TaskType.CAUSAL_LM
    )
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(config.seed)
        try:
            return peft.get_peft_model(model, settings)
        except ValueError as error:
            reason = str(error).splitlines()[0].rstrip(".")
            fail("load_policy", f"lora_targets must name modules of {config.model!r}", reason, "Omit it for all.")
