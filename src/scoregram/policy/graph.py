"""Decoding on a GPU by replaying one captured step.

A step of a small model is hundreds of short kernels, and starting them one by one from Python takes longer than running
them. Here a whole step, from the last token to the next one written down, is captured once and then replayed.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from scoregram.policy.config import SamplingConfig
from scoregram.policy.draw import draw
from scoregram.policy.record import Record
from scoregram.policy.ways import Shared

LOOK_EVERY = 16
"""Steps between two looks at whether every rollout has ended: the only times that the host waits for the device."""
COLUMNS = 512
"""A captured step sees a multiple of this many columns; when they are full, a wider step is captured."""


class CaptureWarning(UserWarning):
    """A decoding step could not be captured, so that every kernel is started from Python."""


Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Runs a step once, and returns what repeats it."""


def advance_captured(
    run: Shared,
    token: Tensor,
    record: Record,
    uniforms: Tensor,
    sampling: SamplingConfig,
    *,
    capture: Capture | None = None,
    columns: int = COLUMNS,
) -> None:
    """Draw, from the tokens just drawn on, until every rollout has ended.

    Finished rows stay in the batch: a smaller one is hardly faster on a GPU, and would need a capture of its own.

    Args:
        run: Started, with the prompts in its cache.
        token: `(N,)` first tokens, recorded already.
        record: Where tokens go.
        uniforms: `(M, N)`, one number for every token of every rollout.
        sampling: Temperature and truncation.
        capture: How to capture, by default as a CUDA graph.
        columns: Width by which captured steps grow.
    """
    token, at = token.clone(), torch.tensor([record.steps], device=token.device)

    def step() -> None:
        drawn = draw(run.step(token), uniforms.index_select(0, at)[0], sampling)
        record.write_at(at, drawn)
        token.copy_(drawn.token)
        at.add_(1)

    written = run.use_columns()
    visible, repeat = 0, None
    while record.steps < record.most:
        if written >= visible:
            visible = min(run.capacity, (written // columns + 1) * columns)
            run.cache.visible, repeat = visible, None
        if repeat is None:
            repeat = (capture or cuda_graph)(step)
        else:
            repeat()
        written += 1
        record.steps += 1
        if record.steps % LOOK_EVERY == 0 and len(record.open_places()) == 0:
            return


@dataclass(frozen=True)
class Ground:
    """What every capture on a device takes place in: one stream, one pool of memory.

    torch keeps memory apart by stream and by pool: with a stream and a pool for each capture, what earlier ones have
    left would fill the device. A pool lives as long as a graph in it does, hence one that is never replayed.
    """

    stream: torch.cuda.Stream
    anchor: torch.cuda.CUDAGraph

    @staticmethod
    @cache
    def of(device: int) -> "Ground":
        """That of a device, by its number."""
        with torch.cuda.device(device):
            stream, anchor = torch.cuda.Stream(), torch.cuda.CUDAGraph()
            with torch.cuda.stream(stream):
                anchor.capture_begin(capture_error_mode="thread_local")
                torch.zeros(1, device="cuda")
                anchor.capture_end()
        return Ground(stream, anchor)


def cuda_graph(step: Callable[[], None]) -> Callable[[], None]:
    """Run `step`, capture it as a CUDA graph and return its replay; `step` itself where it cannot be captured.

    Graphs share their memory, so that only the last one captured on a device may be replayed.
    """
    ground = Ground.of(torch.cuda.current_device())
    ground.stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    repeat: Callable[[], None] = graph.replay
    with torch.cuda.stream(ground.stream):
        step()  # also loads what may not be loaded during a capture
        try:
            graph.capture_begin(ground.anchor.pool(), "thread_local")
            try:
                step()
            finally:
                graph.capture_end()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            warnings.warn(f"sample: decoding without a CUDA graph, which is slower. {reason}", CaptureWarning, 2)
            repeat = step
    torch.cuda.current_stream().wait_stream(ground.stream)
    return repeat
