"""A loss for prime-rl that records, for every sequence, the coefficient `c = ∂L/∂log π` of each token.

prime-rl takes a loss per sequence by its import path (`[trainer.loss] type = "custom"`). It gives that loss neither
token ids nor a step number; its token exports have both. A sequence is therefore recorded under a digest of what
stands in the exports too, its sampled log-probabilities and advantages, and `coefficients_of` joins the two. See
`docs/verl.md`.
"""

import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from scoregram.checks import fail, listed, lookup
from scoregram.objectives import OBJECTIVES, Objective, token_coefficients
from scoregram.types import LogProbs, Loss

INTERFACE = ("trainer_logprobs", "inference_logprobs", "advantages", "loss_mask")
"""Fields of prime-rl's `LossInputs` that are relied on; `loss_weights` is used where it is there."""

LOSSES: MappingProxyType[str, Objective] = MappingProxyType(
    {name: OBJECTIVES[name] for name in ("reinforce", "grpo", "dapo", "dual_clip", "gspo", "cispo")}
)
"""Objectives that one sequence at a time can be trained with."""
AGGREGATIONS = ("token_sum", "sequence_mean")
"""What can be said within one sequence; prime-rl divides the sum over sequences by its count of tokens afterwards."""


def recorded_loss(
    inputs: Any,
    *,
    objective: str = "grpo",
    aggregation: str = "token_sum",
    record: str | None = None,
    limit_mb: float | int = 1024,
    **options: float | int,
) -> Any:
    """Loss of one sequence by an objective of our table, its token coefficients recorded on the way.

    Under `token_sum`, prime-rl's division by all tokens of the step makes it the token mean over the batch. Weights
    that an algorithm of prime-rl puts on tokens multiply their advantages: every objective here grows in proportion.

    Args:
        inputs: prime-rl's `LossInputs`, each field `(T,)`.
        objective: A key of `LOSSES`.
        aggregation: `token_sum` or `sequence_mean`.
        record: Folder of the record, one file per rank; None records nothing. Take a new one for every run.
        limit_mb: A file that has grown to this size is left as it is, with a warning; training goes on.
        options: Of the objective, such as `eps_low` and `eps_high`.

    Returns:
        prime-rl's `LossOutputs`, with the mean of `|c|` over the trained tokens as a metric.

    Raises:
        ScoregramError: An unknown name, a `LossInputs` without the fields that are relied on, a negative weight, or
            log-probabilities or gradients that are not finite.
    """
    output = loss_outputs(inputs)
    log_probs = inputs.trainer_logprobs.unsqueeze(0)  # (1, T)
    loss = sequence_loss(log_probs, inputs, objective, aggregation, options)
    c = token_coefficients(loss, log_probs)[0]
    trained = inputs.loss_mask.bool()
    if record is not None and bool(trained.any()):
        write_line(Path(record), line_of(inputs, c, objective), limit_mb)
    size = c.abs()[trained].sum() / trained.sum().clamp(min=1)
    return output(loss=loss, metrics={"scoregram/mean_abs_coefficient": size})


def sequence_loss(
    log_probs: LogProbs, inputs: Any, objective: str, aggregation: str, options: Mapping[str, float | int]
) -> Loss:
    """The objective on a batch of one sequence; its sum over sequences is what prime-rl divides."""
    row = lookup(LOSSES, objective, kind="recorded_loss(objective=…)")
    if aggregation not in AGGREGATIONS:
        remedy = "Others need the whole batch."
        fail("recorded_loss(aggregation=…)", f"must be one of {listed(AGGREGATIONS)}", repr(aggregation), remedy)
    advantages, weights = inputs.advantages, getattr(inputs, "loss_weights", None)
    mask = inputs.loss_mask.bool()
    if weights is not None:
        if bool((weights[mask] < 0).any()):
            fail("recorded_loss", "weights of tokens must not be negative", float(weights[mask].min()), "Check them.")
        advantages = advantages * weights
    known = {
        "log_probs": log_probs,
        "old_log_probs": inputs.inference_logprobs[None],
        "advantages": advantages[None],
        "mask": mask[None],
    }
    return row.fn(**{name: known[name] for name in row.needs}, aggregation=aggregation, **options)


def loss_outputs(inputs: Any) -> Any:
    """prime-rl's class of results, provided that its interface is the one this was written for."""
    if absent := [name for name in INTERFACE if not isinstance(getattr(inputs, name, None), Tensor)]:
        got = f"prime-rl {version()}, in which {listed(absent)} changed or is absent"
        remedy = "Written after the interface of 2026, which was read and not run; use a loss of prime-rl."
        fail("recorded_loss", f"LossInputs must have the tensors {listed(INTERFACE)}", got, remedy)
    try:
        from prime_rl.trainer.rl.loss import LossOutputs  # pyright: ignore[reportMissingImports]
    except ImportError as missing:
        fail("recorded_loss", "needs prime_rl.trainer.rl.loss.LossOutputs", missing, "Run it inside prime-rl.")
    return LossOutputs


def version() -> str:
    """The installed version of prime-rl, as its metadata tells it."""
    from importlib import metadata

    try:
        return metadata.version("prime-rl")
    except metadata.PackageNotFoundError:
        return "of unknown version"


def digest(
    mask: Bool[Tensor, " tokens"], log_probs: Float[Tensor, " tokens"], advantages: Float[Tensor, " tokens"]
) -> str:
    """Name of a sequence: from places, sampled log-probabilities and advantages of its trained tokens, in float32."""
    trained = mask.cpu()
    name = hashlib.sha256(trained.nonzero().numpy().tobytes())
    for values in (log_probs, advantages):
        name.update(values.detach().to("cpu", torch.float32)[trained].numpy().tobytes())
    return name.hexdigest()[:32]


def line_of(inputs: Any, c: Float[Tensor, " tokens"], objective: str) -> dict[str, Any]:
    """What is recorded of a sequence; coefficients of trained tokens alone, in their order."""
    mask = inputs.loss_mask.bool()
    return {
        "schema_version": 1,
        "sequence": digest(mask, inputs.inference_logprobs, inputs.advantages),
        "objective": objective,
        "coefficients": c[mask].to("cpu", torch.float64).tolist(),
    }


def write_line(folder: Path, line: Mapping[str, Any], limit_mb: float | int) -> None:
    """Append a line to the file of this rank; a full file or disk ends the record, never the training."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    path = folder / f"rank_{rank}.jsonl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size >= limit_mb * 1e6:
            warnings.warn(f"scoregram: {path} has reached {limit_mb:g} MB; no more is recorded.", stacklevel=3)
            return
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False, separators=(",", ":")) + "\n")
    except OSError as reason:
        warnings.warn(f"scoregram: coefficients are not recorded, {reason}.", stacklevel=3)


def read_coefficients(folder: str | Path) -> dict[str, Float[Tensor, " trained"]]:
    """Digest of a sequence → coefficients of its trained tokens, from all ranks; the last of several.

    Raises:
        ScoregramError: If there is no record, or a line is not one; a last line that was cut off is passed over.
    """
    files = sorted(Path(folder).glob("rank_*.jsonl"))
    if not files:
        fail("read_coefficients", "needs a folder with rank_*.jsonl", folder, "Pass the record of recorded_loss.")
    return {name: values for path in files for name, values in lines_of(path)}


def lines_of(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Sequences of one file."""
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            if not text.endswith("\n"):
                return  # the process was ended while it wrote
            try:
                line = json.loads(text)
                yield line["sequence"], torch.tensor(line["coefficients"], dtype=torch.float64)
            except (ValueError, KeyError, TypeError) as reason:
                remedy = "Delete the line."
                fail("read_coefficients", f"{path} line {number} must be a recorded sequence", reason, remedy)


def coefficients_of(
    export: Mapping[str, Any], recorded: Mapping[str, Float[Tensor, " trained"]]
) -> Float[Tensor, " tokens"] | None:
    """`(T,)` coefficients beside the `token_ids` of a line of prime-rl's token exports; None if it was not recorded.

    Zero on tokens that the loss did not train. These are derivatives of the loss of the sequence, before prime-rl
    divides by its count of tokens.
    """
    mask = torch.tensor(export["loss_mask"], dtype=torch.bool)
    weights = export.get("rl_weights")
    if weights is not None and any(weight is not None for weight in weights):
        mask &= torch.tensor([bool(weight) for weight in weights])
    coefficients = torch.zeros(len(mask), dtype=torch.float64)
    if not bool(mask.any()):
        return coefficients
    found = recorded.get(digest(mask, floats(export["inference_logprobs"]), floats(export["advantages"])))
    if found is None:
        return None
    coefficients[mask] = found
    return coefficients


def floats(values: Sequence[float | int | None]) -> Float[Tensor, " tokens"]:
    """A column of an export, `nan` where it has none."""
    return torch.tensor([float("nan") if value is None else value for value in values], dtype=torch.float32)
