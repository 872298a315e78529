"""What each of two processes does in the tests of several processes; it writes what it found into a file."""

import copy
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers.models.llama.modeling_llama  # noqa: F401
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from scoregram.checks import ScoregramError
from scoregram.gram import backward_with_gram, measure_gram
from scoregram.integrations.dumps.config import MeasureConfig
from scoregram.integrations.dumps.measure import measure
from tests.cases import ARCHITECTURES, Opaque, Rollouts, rollouts
from tests.forked import START_METHOD

PROCESSES = 2


def in_processes(work: Callable[[int, Path], dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """What `work` found in each of two connected processes."""
    folder.mkdir(parents=True, exist_ok=True)
    mp.start_processes(connected, (work, folder), nprocs=PROCESSES, start_method=START_METHOD)  # pyright: ignore[reportPrivateImportUsage]
    return [torch.load(folder / f"found-{rank}.pt") for rank in range(PROCESSES)]


def connected(rank: int, work: Callable[[int, Path], dict[str, Any]], folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    meeting, patience = f"file://{folder}/meeting", timedelta(minutes=5)  # a process that waits in vain fails
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=PROCESSES, timeout=patience)
    torch.save(work(rank, folder), folder / f"found-{rank}.pt")
    dist.destroy_process_group()


def model_of(name: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    model = ARCHITECTURES["llama" if name == "own function" else name]().to(dtype).eval()
    if name == "own function":
        model.model.embed_tokens = ScaledEmbedding(model.model.embed_tokens, model.config.hidden_size, dtype)
    return model


class ScaledEmbedding(nn.Module):
    """An embedding with a scale in an autograd function of its own, so that the scale is replayed."""

    def __init__(self, embedding: nn.Module, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = embedding
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width, dtype=dtype))

    def forward(self, ids: Tensor) -> Tensor:  # noqa: D102
        return Opaque.apply(self.embedding(ids), self.scale)  # pyright: ignore[reportReturnType]


def batch_of(rank: int) -> Rollouts:
    """Rollouts of a process: others than those of the other, and not as many."""
    return rollouts(3 + rank, tokens=9, seed=rank)


def sharded(model: Any, *, head: bool = False, reshard_root: bool | None = None) -> Any:
    model = copy.deepcopy(model)
    for layer in model.model.layers:
        fully_shard(layer)
    if head:
        fully_shard(model.lm_head)
    return fully_shard(model, reshard_after_forward=reshard_root)


SHARDINGS: dict[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    "untied": ("llama", torch.float64, {}),
    "untied float32": ("llama", torch.float32, {}),
    "tied": ("llama-tied", torch.float64, {}),
    "tied float32": ("llama-tied", torch.float32, {}),
}
"""Architecture, precision and way of sharding."""
OTHERS: dict[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    "head of its own": ("llama", torch.float64, {"head": True}),
    "root sharded after the forward pass": ("llama-tied", torch.float64, {"reshard_root": True}),
    "logits in autograd": ("gemma2", torch.float64, {}),
    "mixture": ("qwen3-moe", torch.float64, {}),
    "attention sinks": ("gpt-oss", torch.float64, {}),
    "replayed": ("own function", torch.float64, {}),
}


class RareToken(nn.Module):
    """An embedding with a further product for one token, which no other token reaches."""

    TOKEN = 60

    def __init__(self, embedding: nn.Module, width: int) -> None:
        super().__init__()
        self.embedding = embedding
        self.turn = nn.Parameter(torch.eye(width, dtype=torch.float64).roll(1, 0))

    def forward(self, ids: Tensor) -> Tensor:
        """Embeddings, those of the token turned."""
        hidden, rare = self.embedding(ids), ids == self.TOKEN
        return torch.where(rare.unsqueeze(2), (hidden.tanh() @ self.turn).cumsum(2), hidden) if rare.any() else hidden


def rare_token_model() -> Any:
    model = model_of("llama", torch.float64)
    model.model.embed_tokens = RareToken(model.model.embed_tokens, model.config.hidden_size)
    return model


def rare_token_batch(rank: int) -> Rollouts:
    """Only the last rollout of the second process has the token, so no probe pass reaches it."""
    batch = batch_of(rank)
    batch.input_ids[batch.input_ids == RareToken.TOKEN] = 1
    if rank == 1:
        batch.input_ids[3, 2] = RareToken.TOKEN
    return batch


def measure_rare_token(rank: int) -> dict[str, Any]:
    """Two Grams: the second starts from what the first has learnt."""
    model = sharded(rare_token_model())
    return {"rare token": [measure_gram(model, *rare_token_batch(rank).arguments).matrix for _ in range(2)]}


def everything(rank: int, folder: Path) -> dict[str, Any]:
    """All that the quick tests look at: processes take longer to start than to do it."""
    found = measure_sharded(rank, folder) | {"left": dict(left_as_it_was(batch_of(rank)))} | measure_dumps(rank, folder)
    return found | measure_rare_token(rank) | {"refused": refused_in_one_process(rank)}


def refused_in_one_process(rank: int) -> tuple[str, Tensor]:
    """The error of a call in which only the second process has a token outside the vocabulary, and a Gram after it."""
    model, batch = sharded(model_of("llama", torch.float64)), batch_of(rank)
    beyond = batch.input_ids.clone()
    beyond[:, 3] = 1000 if rank == 1 else beyond[:, 3]
    try:
        measure_gram(model, beyond, *batch.arguments[1:])
    except ScoregramError as error:
        return str(error), measure_gram(model, *batch.arguments).matrix
    return "", torch.zeros(0)


def the_rest(rank: int, folder: Path) -> dict[str, Any]:
    """All that the slow tests look at."""
    return grams_of(OTHERS, rank) | {"failures": list(failures(batch_of(rank)))}


def grams_of(cases: dict[str, tuple[str, torch.dtype, dict[str, Any]]], rank: int) -> dict[str, Any]:
    """Grams of sharded models, checked by plain backward passes too."""
    found: dict[str, Any] = {}
    for case, (name, dtype, how) in cases.items():
        gram = measure_gram(sharded(model_of(name, dtype), **how), *batch_of(rank).arguments, verify=True)
        found[case] = {"matrix": gram.matrix, "by_layer": dict(gram.by_layer), "replayed": gram.replayed}
    return found


def measure_sharded(rank: int, folder: Path) -> dict[str, Any]:
    """Grams of sharded models and of a data-parallel one."""
    found, batch = grams_of(SHARDINGS, rank), batch_of(rank)
    parallel = nn.parallel.DistributedDataParallel(model_of("llama", torch.float64))
    for _ in range(1 + rank):  # nobody waits for the other
        found["data parallel"] = measure_gram(parallel, *batch.arguments).matrix
    found["data parallel grads"] = [p.grad is None for p in parallel.parameters()]
    return found


def left_as_it_was(batch: Rollouts) -> Iterator[tuple[str, bool]]:
    """Whether a sharded model trains after a measurement as it would have without."""
    plain, measured = (sharded(model_of("llama-tied", torch.float64)) for _ in range(2))
    for step in range(2):
        for model in (plain, measured):
            model(batch.input_ids).logits.double().square().mean().backward()
        kept = [parameter.grad for parameter in measured.parameters()]
        measure_gram(measured, *batch.arguments)
        after = list(measured.parameters())
        yield f"grad kept {step}", all(p.grad is grad for p, grad in zip(after, kept, strict=True))
        pairs = zip(plain.parameters(), after, strict=True)
        yield f"same {step}", all(torch.equal(a.grad.to_local(), b.grad.to_local()) for a, b in pairs)
    yield "no hooks", not any(p._post_accumulate_grad_hooks for p in measured.parameters())


def flattened(model: Any) -> Any:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def split(model: Any) -> Any:
    """A head whose rows lie in different processes, as tensor parallelism leaves it."""
    mesh = init_device_mesh("cpu", (PROCESSES,))
    model.lm_head.weight = nn.Parameter(distribute_tensor(model.lm_head.weight.detach(), mesh, [Shard(0)]))
    return model


def failures(batch: Rollouts) -> Iterator[str]:
    """What is refused, and that it can be measured afterwards."""
    model = sharded(model_of("llama", torch.float64))
    right = measure_gram(model, *batch.arguments).matrix
    beyond = batch.input_ids.clone()
    beyond[:, 3] = 1000
    weights = torch.ones(len(beyond))

    def interrupted() -> None:
        def fail(*_: Any) -> None:
            raise IndexError("in the middle of a pass")

        handle = model.model.layers[1].mlp.register_forward_pre_hook(fail)
        try:
            measure_gram(model, *batch.arguments)
        finally:
            handle.remove()

    trials: list[Callable[[], Any]] = [
        interrupted,
        lambda: measure_gram(model, beyond, *batch.arguments[1:]),
        lambda: backward_with_gram(model, *batch.arguments, weights=weights),
        lambda: backward_with_gram(
            nn.parallel.DistributedDataParallel(model_of("llama", torch.float64)), *batch.arguments, weights=weights
        ),
    ]
    for trial in trials:
        try:
            trial()
        except (ScoregramError, IndexError) as error:
            yield str(error)
        assert torch.equal(measure_gram(model, *batch.arguments).matrix, right)
    for other in (flattened, split):
        try:
            measure_gram(other(model_of("llama", torch.float64)), *batch.arguments)
        except ScoregramError as error:
            yield str(error)
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    try:
        measure_gram(model, *batch.arguments)
    except ScoregramError as error:
        yield str(error)


def measure_dumps(rank: int, folder: Path) -> dict[str, Any]:
    """Run folders of one dump, measured by two processes in several ways."""

    def measured(out: str, **settings: Any) -> dict[str, Any]:
        said = StringIO()
        paths = {"model": str(folder / "model"), "rollouts": folder / "dump.jsonl", "out": folder / out}
        done = measure(MeasureConfig(**paths, device="cpu", **settings), console=Console(file=said, width=500))
        return {"said": said.getvalue(), "counts": (done.groups, done.held, done.rollouts, done.left_out, done.broken)}

    found: dict[str, Any] = {
        "whole": measured("whole"),
        "fsdp": measured("fsdp", fsdp=True, checkpointing=True),
        "steps": measured("steps", between_prompts=True),
        "first": measured("resumed", max_groups=3),
        "rest": measured("resumed", resume=True),
    }
    try:
        measured("whole")
    except ScoregramError as error:
        found["taken"] = str(error)
    return found
