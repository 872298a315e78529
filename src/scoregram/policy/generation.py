"""The decoding loop: draw one token per rollout and step until every rollout has ended, then assemble the rollouts.

On a GPU a decoding step of a small model is hundreds of short kernels, and launching them one by one from Python takes
longer than running them. There a whole step, from the last token to the next one recorded, is captured once as a CUDA
graph and then replayed.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from scoregram.checks import not_finite
from scoregram.policy.config import SamplingConfig
from scoregram.policy.draw import DrawnTokens, draw_tokens
from scoregram.rollouts import Rollouts

if TYPE_CHECKING:
    from scoregram.policy.decoders import Decoder, SharedCacheDecoder

CHECK_STEPS = 4
"""Steps between two checks for ended rollouts, on a device where a check makes the host wait."""
GRAPH_CHECK_STEPS = 16
"""The same while a CUDA graph is replayed."""
DROP_SHARE = 0.25
"""Share of rows that must have ended before the other rows are copied into a smaller batch."""
GRAPH_COLUMNS = 512
"""A captured step attends to a multiple of this many cache columns; when they are full, a wider step is captured."""


class CaptureWarning(UserWarning):
    """A decoding step could not be captured as a CUDA graph, so every kernel is launched from Python."""


@dataclass(frozen=True)
class Completions:
    """`(N, M)` drawn tokens and their log-probabilities; entries after the first stop token of a row are not used."""

    tokens: Tensor
    log_probs: Tensor
    behaviour: Tensor


class CompletionRecord:
    """`(M, N)` tokens of all rollouts of a request with their log-probabilities, written one step at a time.

    Rollouts are written batch after batch; `rows` are the rollouts that the next step writes, in order. Steps keep
    writing a rollout past its stop token, so that no step has to check; `assemble_rollouts` cuts it there.
    """

    def __init__(self, rollouts: int, most: int, stop_ids: Tensor, *, has_behaviour: bool) -> None:
        device = stop_ids.device
        self.most = most
        dtypes = (torch.int64, torch.float32, torch.float32)[: 2 + has_behaviour]
        self._blocks = [torch.zeros(most, rollouts, device=device, dtype=dtype) for dtype in dtypes]
        self._stops = frozenset(stop_ids.tolist())
        self.start_batch(torch.arange(rollouts, device=device))

    def start_batch(self, rows: Tensor) -> None:
        """Write these rollouts from their first token on."""
        self.rows, self.steps, self._checked = rows, 0, 0
        self._ended: set[int] = set()

    def write(self, drawn: DrawnTokens, step: Tensor | None = None) -> None:
        """Add one token to every row in `rows`.

        A captured step passes its index as a `(1,)` tensor and writes all rows; its caller counts `steps`.
        """
        for block, values in zip(self._blocks, (drawn.token, drawn.log_prob, drawn.behaviour), strict=False):
            if step is None:
                block[self.steps, self.rows] = values.to(block.dtype)
            else:
                block.index_copy_(0, step, values.to(block.dtype)[None])
        self.steps += step is None

    def open_places(self) -> list[int]:
        """Indices into `rows` of the rollouts that have not drawn a stop token."""
        since, self._checked = self._checked, self.steps
        for tokens in self._blocks[0][since : self.steps, self.rows].tolist():
            self._ended.update(place for place, token in enumerate(tokens) if token in self._stops)
        return [place for place in range(len(self.rows)) if place not in self._ended]

    def keep(self, places: Tensor) -> None:
        """From now on write only the rollouts at these indices into `rows`, none of which has ended."""
        self.rows, self._ended = self.rows[places], set()

    def finish(self) -> Completions:
        """All completions, as written."""
        blocks = [block.T for block in self._blocks]
        return Completions(blocks[0], blocks[1], blocks[-1])


def generate(
    decoder: "Decoder",
    prompts: Sequence[Sequence[int]],
    repeats: int,
    record: CompletionRecord,
    uniforms: Tensor,
    sampling: SamplingConfig,
) -> None:
    """Draw tokens until every rollout of a batch has ended."""
    logits = decoder.start(prompts, repeats)
    check_steps = 1 if logits.device.type == "cpu" else CHECK_STEPS
    with decoder.decoding():
        while True:
            drawn = draw_tokens(logits, uniforms[record.steps], sampling)
            record.write(drawn)
            if record.steps == record.most:
                return
            token = drawn.token
            if token.is_cuda and decoder.is_capturable:
                replay_steps(cast("SharedCacheDecoder", decoder), token, record, uniforms, sampling)
                return
            if record.steps % check_steps == 0:
                still_open = record.open_places()
                if not still_open:
                    return
                if len(still_open) <= (1 - DROP_SHARE) * len(token):
                    places = torch.tensor(still_open, device=token.device)
                    record.keep(places)
                    decoder.keep(places)
                    token, uniforms = token[places], uniforms[:, places]
            logits = decoder.step(token)


def replay_steps(
    decoder: "SharedCacheDecoder",
    token: Tensor,
    record: CompletionRecord,
    uniforms: Tensor,
    sampling: SamplingConfig,
    *,
    capture: Callable[[Callable[[], None]], Callable[[], None]] | None = None,
    columns: int = GRAPH_COLUMNS,
) -> None:
    """Draw tokens until every rollout has ended, by replaying a captured step.

    Ended rollouts stay in the batch: a smaller batch is hardly faster on a GPU, and would need another capture.

    Args:
        decoder: Started, with the prompts in its cache.
        token: `(N,)` first tokens, recorded already.
        record: Receives the tokens.
        uniforms: `(M, N)`, one number for every token of every rollout.
        sampling: Temperature and truncation.
        capture: Runs a step once and returns a function that repeats it; by default `cuda_graph`.
        columns: The number of visible cache columns grows by this many.
    """
    # A captured step may read nothing from the host, so its inputs are tensors that the step itself updates.
    token, at = token.clone(), torch.tensor([record.steps], device=token.device)

    def step() -> None:
        drawn = draw_tokens(decoder.step(token), uniforms.index_select(0, at)[0], sampling)
        record.write(drawn, at)
        token.copy_(drawn.token)
        at.add_(1)

    written = decoder.use_column_tensor()
    visible, repeat = 0, None
    while record.steps < record.most:
        if written >= visible:
            visible = min(decoder.capacity, (written // columns + 1) * columns)
            decoder.cache.visible, repeat = visible, None
        if repeat is None:
            repeat = (capture or cuda_graph)(step)
        else:
            repeat()
        written += 1
        record.steps += 1
        if record.steps % GRAPH_CHECK_STEPS == 0 and len(record.open_places()) == 0:
            return


@cache
def capture_resources(device: int) -> tuple[torch.cuda.Stream, torch.cuda.CUDAGraph]:
    """The stream and the memory pool that all captures on a device share; the pool is that of the returned graph.

    torch keeps the memory of streams and pools apart: with one of each per capture, the memory of earlier captures
    would fill the device. A pool lives as long as a graph in it, hence this graph, which is never replayed.
    """
    with torch.cuda.device(device):
        stream, anchor = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            anchor.capture_begin(capture_error_mode="thread_local")
            torch.zeros(1, device="cuda")
            anchor.capture_end()
    return stream, anchor


def cuda_graph(step: Callable[[], None]) -> Callable[[], None]:
    """Run `step`, capture it as a CUDA graph and return its replay; `step` itself if the capture fails.

    Graphs share their memory, so only the graph captured last on a device may be replayed.
    """
    stream, anchor = capture_resources(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    repeat: Callable[[], None] = graph.replay
    with torch.cuda.stream(stream):
        step()  # also loads libraries and kernels, which is not allowed during a capture
        try:
            graph.capture_begin(anchor.pool(), "thread_local")
            try:
                step()
            finally:
                graph.capture_end()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            warnings.warn(f"sample: decoding without a CUDA graph, which is slower. {reason}", CaptureWarning, 2)
            repeat = step
    torch.cuda.current_stream().wait_stream(stream)
    return repeat


def assemble_rollouts(prompts: Sequence[Sequence[int]], drawn: Completions, stop_ids: Tensor, pad_id: int) -> Rollouts:
    """Every prompt followed by each of its completions, cut after the first stop token, padded on the right."""
    tokens, device = drawn.tokens, drawn.tokens.device
    repeats = len(tokens) // len(prompts)
    stops = torch.isin(tokens, stop_ids)
    finished = stops.any(1)
    lengths = torch.where(finished, stops.int().argmax(1) + 1, tokens.shape[1])
    starts = torch.tensor([len(prompt) for prompt in prompts], device=device).repeat_interleave(repeats)
    total = int((starts + lengths).max())
    padded = torch.tensor([[*prompt, *[pad_id] * (total - len(prompt))] for prompt in prompts], device=device)
    place = torch.arange(total, device=device) - starts[:, None]  # of every column in the completion
    attention = place < lengths[:, None]
    completion = attention & (place >= 0)
    place = place.clamp(0, tokens.shape[1] - 1)
    log_probs = torch.where(completion, drawn.log_probs.gather(1, place), 0.0)
    _require_finite(log_probs, starts)
    same = drawn.behaviour is drawn.log_probs
    return Rollouts(
        input_ids=torch.where(completion, tokens.gather(1, place), padded.repeat_interleave(repeats, 0)),
        attention_mask=attention,
        completion_mask=completion,
        log_probs=log_probs,
        behaviour_log_probs=log_probs if same else torch.where(completion, drawn.behaviour.gather(1, place), 0.0),
        prompt_lengths=starts,
        group_ids=torch.arange(len(prompts)).repeat_interleave(repeats),
        finished=finished,
    )


def _require_finite(log_probs: Tensor, prompt_lengths: Tensor) -> None:
    """Raise if a token was drawn from logits that are NaN or infinite."""
    wrong = (~log_probs.isfinite()).nonzero()
    if len(wrong):
        row, column = wrong[0].tolist()
        at = f"{log_probs[row, column].item()} at rollout {row}, token {column - int(prompt_lengths[row])}"
        remedy = "After updates, lower the learning rate; else look for infinite weights or a dtype that is too narrow."
        not_finite("sample", "the log-probabilities of sampled tokens must be finite", at, remedy)
