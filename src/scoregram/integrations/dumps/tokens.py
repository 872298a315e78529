"""Token ids of a rollout: those of the dump, or its text tokenised again, which is an approximation."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from scoregram.checks import fail
from scoregram.integrations.dumps.record import DumpedRollout
from scoregram.policy import Policy


@dataclass(frozen=True, eq=False)
class Tokenised:
    """A rollout that can be measured."""

    rollout: DumpedRollout
    token_ids: Int[Tensor, " tokens"]
    """`(T,)`. Prompt, then completion."""
    prompt_length: int
    mask: Bool[Tensor, " tokens"]
    """`(T,)`. The tokens that the policy chose."""
    exact: bool
    """The very tokens that were drawn; false for text that was tokenised again."""
    round_trip: bool | None = None
    """Whether the new tokens decode to the text that they were made from; None where nothing was tokenised."""
    count_agrees: bool | None = None
    """Whether they are as many as the dump counted; None where it did not."""


def tokenised(rollout: DumpedRollout, policy: Policy, *, append_end: bool = False) -> Tokenised:
    """A rollout with its token ids.

    Args:
        rollout: From any format.
        policy: Whose tokenizer is used for text.
        append_end: Put the end token after text that is not known to have been cut off.

    Raises:
        ScoregramError: If the model does not know a token id, or a conversation meets a tokenizer without a template.
    """
    if rollout.prompt_ids is not None and rollout.completion_ids is not None:
        return _exact(rollout, rollout.prompt_ids, rollout.completion_ids, policy)
    prompt = torch.tensor(encode_prompt(rollout, policy), dtype=torch.int64)
    text = rollout.completion or ""
    ids = list(policy.tokenizer(text, add_special_tokens=False)["input_ids"])
    came_back = policy.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) == text
    agrees = None if rollout.tokens is None else rollout.tokens == len(ids)
    if append_end and rollout.finished is not False:
        ids.append(policy.stop_ids[0])
    whole = torch.cat([prompt, torch.tensor(ids, dtype=torch.int64)])
    mask = torch.arange(len(whole)) >= len(prompt)
    return Tokenised(rollout, whole, len(prompt), mask, exact=False, round_trip=came_back, count_agrees=agrees)


def _exact(rollout: DumpedRollout, prompt: Tensor, completion: Tensor, policy: Policy) -> Tokenised:
    whole = torch.cat([prompt, completion])
    known = vocabulary_size(policy)
    if len(whole) and int(whole.max()) >= known:
        fail(
            f"measure {rollout.where}",
            f"token ids must be below {known}, the number of tokens the model knows",
            int(whole.max()),
            "Pass the model that the rollouts were drawn from.",
        )
    every, given = torch.ones(len(completion), dtype=torch.bool), rollout.completion_mask
    mask = torch.cat([torch.zeros(len(prompt), dtype=torch.bool), every if given is None else given])
    return Tokenised(rollout, whole, len(prompt), mask, exact=True)


def encode_prompt(rollout: DumpedRollout, policy: Policy) -> list[int]:
    """Token ids of a prompt that is text or a conversation."""
    if rollout.prompt_ids is not None:
        return rollout.prompt_ids.tolist()
    if isinstance(rollout.prompt, str):
        return policy.encode_prompt(rollout.prompt)
    if getattr(policy.tokenizer, "chat_template", None) is None:
        got, remedy = "a tokenizer without one", "Pass a model whose tokenizer has a chat template."
        fail(f"measure {rollout.where}", "a prompt of messages needs a chat template", got, remedy)
    said = [dict(message) for message in rollout.prompt or ()]
    written = policy.tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    return list(policy.tokenizer(written, add_special_tokens=False)["input_ids"])


def vocabulary_size(policy: Policy) -> int:
    """Token ids that the model has an embedding for."""
    return int(policy.model.get_input_embeddings().weight.shape[0])


def unmeasurable(made: Tokenised, context: int) -> str:
    """Why a rollout cannot be measured, in a few words; empty if it can."""
    if len(made.token_ids) > context:
        return f"has {len(made.token_ids)} tokens, more than the context of {context}"
    if len(made.mask) and bool(made.mask[0]):
        return "has no prompt token before its completion"
    return "" if len(made.token_ids) else "has no tokens"


def padded(
    rollouts: Sequence[Tokenised], pad_id: int, device: torch.device
) -> tuple[Int[Tensor, "batch tokens"], Bool[Tensor, "batch tokens"], Bool[Tensor, "batch tokens"]]:
    """Token ids, completion mask and attention mask, padded on the right."""
    longest = max(len(made.token_ids) for made in rollouts)
    ids = torch.full((len(rollouts), longest), pad_id, dtype=torch.int64)
    mask, attention = torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.bool)
    for row, made in enumerate(rollouts):
        length = len(made.token_ids)
        ids[row, :length], mask[row, :length], attention[row, :length] = made.token_ids, made.mask, True
    return ids.to(device), mask.to(device), attention.to(device)
