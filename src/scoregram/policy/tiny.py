"""The embedded policy: a Llama of 0.9 M parameters that reads characters and has learnt sums from a careless teacher.

It is built from a config and warm-started on the training split of the arithmetic task in two stages: first right
solutions, until it can add; then the solutions of a teacher with bad habits (`scoregram.tasks.mistakes`), so that it
begins where there is something to learn. The result is kept in the cache folder of the user and is the same, bit for
bit, for one seed.
"""

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from scoregram.checks import fail
from scoregram.machine import threads
from scoregram.policy.characters import VOCABULARY, character_tokenizer
from scoregram.tasks import Problem, Task, arithmetic, careless_solution, careless_teacher, number_of_terms, solution

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

CONTEXT = 512
IGNORED = -100
"""Label of a token that no loss is taken at."""
THREADS = 2
"""Whatever the machine has, so that sums are taken in one order."""


@dataclass(frozen=True)
class WarmStart:
    """Everything that decides what a warm-started policy is, apart from difficulty and seed."""

    version: int = 2
    """To be raised when the code below changes the result."""
    hidden_size: int = 192
    intermediate_size: int = 512
    layers: int = 2
    heads: int = 6
    batch: int = 32
    learning_rate: float = 1e-3
    """At which it learns to add, after a linear rise over `rise` steps."""
    rise: int = 20
    skilled: float = 0.12
    """It has got the idea when the smoothed loss falls below this …"""
    longest: int = 600
    """… or is taken to after so many steps."""
    polish_steps: int = 130
    """Steps on right solutions after that, while the learning rate falls linearly to `habit_rate`."""
    habit_rate: float = 3e-4
    habit_steps: int = 120
    """Steps on the teacher's solutions, while the learning rate falls linearly from `habit_rate` to zero."""
    right: float = 0.33
    """Share of the teacher's solutions that would be right if it always followed its habits."""
    habit: float = 0.8
    """Chance that it follows one."""
    slip: float = 0.02
    """Chance of a wrong digit in any other step."""


def tiny_policy(
    task: Task | None, seed: int, *, recipe: WarmStart | None = None
) -> "tuple[LlamaForCausalLM, PreTrainedTokenizerFast]":
    """The embedded policy and its tokenizer, from the cache or made now (half a minute to a minute on two cores).

    Args:
        task: The difficulty it was taught at: that of an arithmetic task, else the default one.
        seed: Decides its weights, the problems it saw and the habits of its teacher. No global random state is touched.
        recipe: How it is warm-started; the default is what the benchmarks use.

    Returns:
        A `LlamaForCausalLM` in float32 on the CPU, in evaluation mode, and a character tokenizer.

    Raises:
        ScoregramError: If transformers is not installed.
    """
    recipe = recipe or WarmStart()
    name, _, argument = (task.name if task else "arithmetic").partition(":")
    terms = number_of_terms(argument if name == "arithmetic" else "")
    model = untrained(recipe, seed)
    path = cache_folder() / f"tiny-{cache_key(recipe, terms, seed)}.safetensors"
    weights = read_weights(path, like=model.state_dict())
    if weights is None:
        warm_start(model, recipe, terms, seed)
        write_weights(path, model.state_dict())
    else:
        model.load_state_dict(weights)
    return model.eval(), character_tokenizer(CONTEXT)


def untrained(recipe: WarmStart, seed: int) -> "LlamaForCausalLM":
    """The model with random weights drawn from `seed`; the global generator is as before."""
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
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.inference_mode(False):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPUs as well
        return LlamaForCausalLM(config)


def warm_start(model: "LlamaForCausalLM", recipe: WarmStart, terms: int, seed: int) -> None:
    """Train `model` in place: until it adds rightly, then on the solutions of a careless teacher.

    To stop at a loss and not at a step makes this right for every difficulty and seed: adding is learnt suddenly.
    """
    rng = Random(f"warm start/{terms}/{seed}")
    problems = arithmetic(str(terms), seed).train
    teacher = careless_teacher(terms, seed, right=recipe.right, habit=recipe.habit, slip=recipe.slip)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0, betas=(0.9, 0.98), fused=True)

    def study(learning_rate: float, solve: Callable[[Problem], str]) -> float:
        lessons = [lesson(rng.choice(problems), solve) for _ in range(recipe.batch)]
        return supervised_step(model, optimizer, *padded(lessons), learning_rate=learning_rate)

    with threads(THREADS), torch.inference_mode(False), torch.enable_grad():
        model.train()
        smoothed, step = 1.0, 0
        while smoothed >= recipe.skilled and step < recipe.longest:
            step += 1
            loss = study(recipe.learning_rate * min(1.0, step / recipe.rise), solution)
            smoothed = 0.9 * smoothed + 0.1 * loss
        for rate in falling(recipe.learning_rate, recipe.habit_rate, recipe.polish_steps):
            study(rate, solution)
        for rate in falling(recipe.habit_rate, 0.0, recipe.habit_steps):
            study(rate, lambda problem: careless_solution(problem, teacher, rng))
        model.zero_grad()


def falling(first: float, last: float, steps: int) -> list[float]:
    """Learning rates on a straight line from `first` towards `last`, which the next stage begins with."""
    return [first + (last - first) * step / steps for step in range(steps)]


def lesson(problem: Problem, solve: Callable[[Problem], str]) -> tuple[list[int], int]:
    """Token ids of a solved problem with its stop token, and the length of the prompt."""
    ids = [VOCABULARY[character] for character in problem.prompt + solve(problem)]
    return [*ids, 1], len(problem.prompt)


def padded(lessons: list[tuple[list[int], int]]) -> tuple[Tensor, Tensor]:
    """Token ids and labels, both `(N, T)`, padded on the right; a loss is taken at the solution only."""
    longest = max(len(ids) for ids, _ in lessons)
    rows = [ids + [0] * (longest - len(ids)) for ids, _ in lessons]
    labels = [[IGNORED] * prompt + ids[prompt:] + [IGNORED] * (longest - len(ids)) for ids, prompt in lessons]
    return torch.tensor(rows), torch.tensor(labels)


def supervised_step(
    model: "LlamaForCausalLM", optimizer: torch.optim.Optimizer, ids: Tensor, labels: Tensor, *, learning_rate: float
) -> float:
    """Loss before one step of AdamW on the mean token loss, the gradient clipped to norm 1."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    logits = model(input_ids=ids).logits[:, :-1]  # (N, T-1, V); causal, so padding on the right is never attended to
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def cache_folder() -> Path:
    """`$SCOREGRAM_CACHE`, else `scoregram` in `$XDG_CACHE_HOME` or `~/.cache`."""
    if own := os.environ.get("SCOREGRAM_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "scoregram"


def cache_key(recipe: WarmStart, terms: int, seed: int) -> str:
    """Name of everything that decides the weights, down to the libraries and the kind of processor."""
    import transformers

    decides = {
        "recipe": asdict(recipe),
        "terms": terms,
        "seed": seed,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
    }
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]


def read_weights(path: Path, *, like: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Weights of the cache, or `None` where they are missing, damaged or of another model."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as entry:
            weights = {name: entry.get_tensor(name) for name in entry.keys()}  # noqa: SIM118 (no mapping)
            digest = (entry.metadata() or {}).get("digest")
    except (OSError, SafetensorError):
        return None
    same_shapes = {name: w.shape for name, w in weights.items()} == {name: w.shape for name, w in like.items()}
    return weights if same_shapes and digest == weights_digest(weights) else None


def write_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Put weights into the cache: complete under their name or not there at all.

    A cache that cannot be written costs time at the next start and nothing else, so that is no error.
    """
    from safetensors.torch import save_file

    own = {name: weight.detach().clone() for name, weight in weights.items()}  # tied weights share memory
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
    """SHA-256 over names and bytes: a flipped bit would otherwise go unseen."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].contiguous().numpy().tobytes())
    return digest.hexdigest()
