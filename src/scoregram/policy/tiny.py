"""The embedded policy: a Llama of 0.9 M parameters that reads characters and has learnt sums from a careless teacher.

It is built from a config and warm-started on the training split of the arithmetic task in two stages: first on correct
solutions, until it can add; then on the solutions of a teacher with bad habits (`scoregram.tasks.careless_teacher`), so
that reinforcement learning has something left to improve. The weights are the same, bit for bit, for one seed, and are
cached in the user's cache folder.
"""

import hashlib
import json
import os
import platform
import string
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from scoregram.checks import fail
from scoregram.machine import threads
from scoregram.policy.supervised import (
    Demonstration,
    episode_demonstration,
    padded_demonstrations,
    supervised_losses,
)
from scoregram.tasks import (
    Problem,
    Task,
    arithmetic,
    arithmetic_compositions,
    careless_solution,
    careless_teacher,
    demonstrated_episode,
    number_of_terms,
    solution,
)

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

PAD, EOS, UNKNOWN_CHARACTER = "<|pad|>", "<|end|>", "<|unknown|>"
CHARACTERS = "\n" + "".join(sorted(set(string.printable) - set(string.whitespace) | {" "}))
"""Printable ASCII and the line feed."""
VOCABULARY = {token: index for index, token in enumerate((PAD, EOS, UNKNOWN_CHARACTER, *CHARACTERS))}
CONTEXT = 512
IGNORED = -100
"""Label of a token that the loss leaves out."""
SUM_TASKS = MappingProxyType({"arithmetic": arithmetic, "arithmetic-compositions": arithmetic_compositions})
"""Tasks on whose own training split the policy is warm-started, so that it has not seen what they hold out."""
SAME_SUMS = MappingProxyType({"arithmetic-strict": "arithmetic"})
"""Tasks with the problems of another one, which is taught in their place."""
THREADS = 2
"""Threads of the warm start on any machine, so that sums are taken in one order."""


@dataclass(frozen=True)
class WarmStart:
    """Everything that determines the warm-started weights, apart from difficulty and seed."""

    version: int = 2
    """Raise it when a change to the code below changes the weights."""
    hidden_size: int = 192
    intermediate_size: int = 512
    layers: int = 2
    heads: int = 6
    batch: int = 32
    learning_rate: float = 1e-3
    """Learning rate of the first stage, after a linear warmup over `rise` steps."""
    rise: int = 20
    skilled: float = 0.12
    """The first stage ends when the smoothed loss falls below this: the policy can add."""
    longest: int = 600
    """Most steps of the first stage."""
    polish_steps: int = 130
    """Further steps on correct solutions, while the learning rate falls linearly to `habit_rate`."""
    habit_rate: float = 3e-4
    habit_steps: int = 120
    """Steps on the teacher's solutions, while the learning rate falls linearly from `habit_rate` to zero."""
    right: float = 0.33
    """Share of the teacher's solutions that would be correct if it always followed its habits."""
    habit: float = 0.8
    """Probability that the teacher follows a habit where it applies."""
    slip: float = 0.02
    """Probability of a wrong digit in any other step."""


@dataclass(frozen=True)
class TurnWarmStart:
    """The same for a task with an environment, which it learns from the episodes of the environment's teacher."""

    version: int = 1
    batch: int = 32
    learning_rate: float = 1e-3
    """After a linear warmup over `rise` steps, constant for half of the task's `teaching_steps`, then falling linearly
    to zero."""
    rise: int = 20


def character_tokenizer(context: int) -> "PreTrainedTokenizerFast":
    """A transformers tokenizer with one token per character, for texts of up to `context` tokens.

    A character outside the vocabulary becomes the unknown token, which decodes to nothing when special tokens are
    skipped. The tokenizer adds no special token to a text.

    Raises:
        ScoregramError: If transformers is not installed.
    """
    try:
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast
    except ImportError as missing:
        fail("character_tokenizer", "needs transformers", str(missing), "Install it: pip install 'scoregram[hf]'.")
    characters = Tokenizer(models.WordLevel(VOCABULARY, unk_token=UNKNOWN_CHARACTER))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN_CHARACTER,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def tiny_policy(
    task: Task | None, seed: int, *, recipe: WarmStart | None = None, note: Callable[[str], None] | None = None
) -> "tuple[LlamaForCausalLM, PreTrainedTokenizerFast]":
    """The embedded policy and its tokenizer, from the cache or trained now (half a minute to a minute on two cores).

    Args:
        task: Sets the difficulty of the warm start if it is an arithmetic task. A task with an environment is learnt
            from the environment's teacher. Any other task gets the arithmetic of the default difficulty.
        seed: Seed of the initial weights, the problems and the teacher's habits. Global random state is not touched.
        recipe: How it is warm-started; the benchmarks use the default.
        note: Called with one line before the policy is trained; not called if it comes from the cache.

    Returns:
        A `LlamaForCausalLM` in float32 on the CPU, in evaluation mode, and a character tokenizer.

    Raises:
        ScoregramError: If transformers is not installed.
    """
    recipe = recipe or WarmStart()
    name, _, argument = (task.name if task else "arithmetic").partition(":")
    name = SAME_SUMS.get(name, name)
    terms = number_of_terms(argument if name in SUM_TASKS else "")
    split = name if name in SUM_TASKS else "arithmetic"
    has_turns = task is not None and task.environment is not None
    learnt: Mapping[str, object] = {"terms": terms} | ({} if split == "arithmetic" else {"split": split})
    if task and has_turns:
        learnt = {"turns": asdict(TurnWarmStart()), "task": task.name, "steps": task.teaching_steps}
    model = untrained(recipe, seed)
    path = cache_folder() / f"tiny-{cache_key(recipe, learnt, seed)}.safetensors"
    weights = read_weights(path, like=model.state_dict())
    if weights is None:
        if note is not None:
            what = task.name if task else "arithmetic"
            note(f"building the policy tiny for {what}, seed {seed}: about a minute on two cores, then it is cached")
        if task and has_turns:
            warm_start_turns(model, TurnWarmStart(), task, seed)
        else:
            warm_start_tiny(model, recipe, terms, seed, split)
        write_weights(path, model.state_dict())
    else:
        model.load_state_dict(weights)
    return model.eval(), character_tokenizer(CONTEXT)


def untrained(recipe: WarmStart, seed: int) -> "LlamaForCausalLM":
    """The model with random weights drawn from `seed`; the global generator is not changed."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as missing:
        fail("tiny", "needs transformers", missing, "Install it: pip install 'scoregram[hf]'.")
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        pad_token_id=VOCABULARY[PAD],
        bos_token_id=None,
        eos_token_id=VOCABULARY[EOS],
    )
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.inference_mode(False):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPUs as well
        return LlamaForCausalLM(config)


def warm_start_tiny(
    model: "LlamaForCausalLM", recipe: WarmStart, terms: int, seed: int, split: str = "arithmetic"
) -> None:
    """Train `model` in place: until it adds correctly, then on the solutions of a careless teacher.

    The first stage ends at a loss, not at a step: addition is learnt suddenly, at a step that depends on difficulty and
    seed.
    """
    rng = Random(f"warm start/{terms}/{seed}")
    problems = SUM_TASKS[split](str(terms), seed).train
    teacher = careless_teacher(terms, seed, right=recipe.right, habit=recipe.habit, slip=recipe.slip)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0, betas=(0.9, 0.98), fused=True)

    def losses(rates: Iterable[float], solve: Callable[[Problem], str]) -> Iterator[Tensor]:
        def batch_loss(_: int) -> Tensor:
            return solution_loss(
                model, [character_demonstration(rng.choice(problems), solve) for _ in range(recipe.batch)]
            )

        return supervised_losses(model, optimizer, batch_loss, rates)

    def rising_rates() -> Iterator[float]:
        step = 0
        while smoothed >= recipe.skilled and step < recipe.longest:  # `smoothed` is updated after every step
            step += 1
            yield recipe.learning_rate * min(1.0, step / recipe.rise)

    with threads(THREADS), torch.inference_mode(False), torch.enable_grad():
        model.train()
        smoothed = 1.0
        for loss in losses(rising_rates(), solution):
            smoothed = 0.9 * smoothed + 0.1 * loss.item()
        for _ in losses(falling_rates(recipe.learning_rate, recipe.habit_rate, recipe.polish_steps), solution):
            pass
        habit_rates = falling_rates(recipe.habit_rate, 0.0, recipe.habit_steps)
        for _ in losses(habit_rates, lambda problem: careless_solution(problem, teacher, rng)):
            pass


def warm_start_turns(model: "LlamaForCausalLM", recipe: TurnWarmStart, task: Task, seed: int) -> None:
    """Train `model` in place on episodes that the teacher of the task's environment plays."""
    rng = Random(f"warm start/{task.name}/{seed}")
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0, betas=(0.9, 0.98), fused=True)

    def batch_loss(_: int) -> Tensor:
        problems = [rng.choice(task.train) for _ in range(recipe.batch)]
        episodes = [demonstrated_episode(task, problem, rng) for problem in problems]
        read, written = character_ids, lambda text: [*character_ids(text), VOCABULARY[EOS]]
        demonstrations = [
            episode_demonstration(turns, prompt=read, observation=read, turn=written) for turns in episodes
        ]
        return solution_loss(model, demonstrations)

    half = task.teaching_steps // 2
    rising = [recipe.learning_rate * min(1.0, step / recipe.rise) for step in range(1, half + 1)]
    falling = falling_rates(recipe.learning_rate, 0.0, task.teaching_steps - half)
    with threads(THREADS), torch.inference_mode(False), torch.enable_grad():
        model.train()
        for _ in supervised_losses(model, optimizer, batch_loss, [*rising, *falling]):
            pass


def character_ids(text: str) -> list[int]:
    """One token per character of a text in the vocabulary."""
    return [VOCABULARY[character] for character in text]


def falling_rates(first: float, last: float, steps: int) -> list[float]:
    """Learning rates on a straight line from `first` towards `last`, at which the next stage begins."""
    return [first + (last - first) * step / steps for step in range(steps)]


def character_demonstration(problem: Problem, solve: Callable[[Problem], str]) -> Demonstration:
    """A solved problem with its stop token, one token per character."""
    ids = character_ids(problem.prompt + solve(problem))
    return Demonstration((*ids, VOCABULARY[EOS]), len(problem.prompt))


def solution_loss(model: "LlamaForCausalLM", demonstrations: list[Demonstration]) -> Tensor:
    """Mean cross-entropy of the solution tokens, stop token included."""
    ids, _, solution = padded_demonstrations(demonstrations, VOCABULARY[PAD])
    labels = ids.masked_fill(~solution, IGNORED)
    logits = model(input_ids=ids).logits[:, :-1]  # (N, T-1, V); causal, so padding on the right is never attended to
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)


def cache_folder() -> Path:
    """`$SCOREGRAM_CACHE`, else `scoregram` in `$XDG_CACHE_HOME` or `~/.cache`."""
    if own := os.environ.get("SCOREGRAM_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "scoregram"


def cache_key(recipe: WarmStart, learnt: Mapping[str, object], seed: int) -> str:
    """Hash of everything that determines the weights, down to the libraries and the kind of processor.

    `learnt` is what the warm start teaches: the number of terms and their split, or a task with an environment.
    """
    import transformers

    determinants = {
        "recipe": asdict(recipe),
        **learnt,
        "seed": seed,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
    }
    return hashlib.sha256(json.dumps(determinants, sort_keys=True).encode()).hexdigest()[:16]


def read_weights(path: Path, *, like: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Weights from the cache; None if the file is missing, damaged or of another model."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as entry:
            weights = {name: entry.get_tensor(name) for name in entry.keys()}  # noqa: SIM118 (not a mapping)
            digest = (entry.metadata() or {}).get("digest")
    except (OSError, SafetensorError):
        return None
    same_shapes = {name: w.shape for name, w in weights.items()} == {name: w.shape for name, w in like.items()}
    return weights if same_shapes and digest == weights_digest(weights) else None


def write_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write weights into the cache, by renaming a complete temporary file.

    A cache that cannot be written is no error: it costs time at the next start and nothing else.
    """
    from safetensors.torch import save_file

    own = {name: weight.detach().clone() for name, weight in weights.items()}  # safetensors refuses tied weights
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=".tmp")
        os.close(handle)
        try:
            save_file(own, temporary, metadata={"digest": weights_digest(own)})
            Path(temporary).replace(path)
        finally:
            Path(temporary).unlink(missing_ok=True)
    except OSError:
        return


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 over names and bytes, so that a damaged file is recognised."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].contiguous().numpy().tobytes())
    return digest.hexdigest()
