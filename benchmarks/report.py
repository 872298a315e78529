"""Time, memory and size of the page of a long run: 1,000 steps of 64 groups of 8, with texts at every tenth step.

The run is synthetic: 25 steps with random scores and rewards are read once and written again and again under new step
numbers. The page is written in a process of its own, whose peak memory is measured; so is `advise`. Then `view` serves
the run: the slowest answer is measured before its page is made, while it is made, and after. Groups are stored without
the Grams of layers; `--layers N` stores those of N layers, as `scoregram train` does by default.

    python benchmarks/report.py [--steps 1000] [--groups 64] [--size 8] [--layers 0] [--keep FOLDER]
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from dataclasses import replace
from pathlib import Path

import torch

from scoregram.gram import Gram
from scoregram.reading import Step, batch_records, group_records, read_step
from scoregram.rollouts import Rollouts
from scoregram.runs import RolloutRecord, RunWriter

DISTINCT = 25
"""Steps that are really drawn."""
WIDTH = 64
"""Dimensions of a score."""
TOKENS = 128
"""Completion tokens of a rollout."""
TEXT = "First I add the two numbers, then I subtract what was spent, and so the answer follows. " * 6


def drawn_step(number: int, groups: int, size: int, layers: int) -> Step:
    """A step with random scores in `WIDTH` dimensions, divided among the layers, and coin rewards."""
    generator = torch.Generator().manual_seed(number)
    count = groups * size
    scores = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)
    chances = torch.rand(groups, 1, generator=generator, dtype=torch.float64)
    rewards = (torch.rand(groups, size, generator=generator, dtype=torch.float64) < chances).double()
    advantages = (rewards - rewards.mean(dim=1, keepdim=True)).flatten()
    ids = torch.zeros(count, 2, dtype=torch.int64)
    rollouts = Rollouts(
        input_ids=ids,
        attention_mask=torch.ones_like(ids, dtype=torch.bool),
        completion_mask=torch.tensor([False, True]).expand(ids.shape),
        prompt_lengths=torch.ones(count, dtype=torch.int64),
        group_ids=torch.arange(groups).repeat_interleave(size),
        prompt_names=[f"prompt/{number}/{place}" for place in range(groups)],
        rewards=rewards.flatten(),
    )
    parts = scores.tensor_split(layers, dim=1) if layers else ()
    by_layer = {f"model.layers.{place}": part @ part.mT for place, part in enumerate(parts)}
    gram = Gram(scores @ scores.mT, by_layer, torch.zeros(ids.shape))
    return Step(number=number, rollouts=rollouts, advantages=advantages, weights=advantages / count, gram=gram)


def rollout_records(step: Step) -> list[RolloutRecord]:
    """Rollouts of a step with a text of about 500 characters each."""
    ids, log_probs = torch.arange(TOKENS + 8), -torch.linspace(0, 2, TOKENS + 8)
    return [
        RolloutRecord(
            step=step.number,
            prompt_id=step.rollouts.prompt_names[group],
            group=group,
            index=row - here.start,
            prompt=f"Problem {group}: how much is left?",
            completion=f"{TEXT}{row}",
            token_ids=ids,
            prompt_length=8,
            reward=float(step.rollouts.rewards[row]),
            log_probs=log_probs,
            advantage=float(step.advantages[row]),
            finished=row % 9 != 0,
        )
        for group, here in enumerate(step.rollouts.group_slices())
        for row in range(here.start, here.stop)
    ]


def make_run(folder: Path, steps: int, groups: int, size: int, layers: int) -> None:
    """Write the synthetic run."""
    drawn = [drawn_step(number, groups, size, layers) for number in range(DISTINCT)]
    readings = [read_step(step) for step in drawn]
    records = [group_records(step, reading.groups) for step, reading in zip(drawn, readings, strict=True)]
    config = {"model": "synthetic", "task": "coins", "method": "grpo", "group_size": size, "steps": steps, "seed": 0}
    with RunWriter.create(folder, config, environment={}) as writer:
        for number in range(1, steps + 1):
            place = number % DISTINCT
            writer.write_groups(number, [replace(record, step=number) for record in records[place]])
            if number % 10 == 0:
                here = replace(drawn[place], number=number)
                writer.write_rollouts(number, rollout_records(here))
                writer.write_batches(number, batch_records(here))
            writer.write_metrics(number, readings[place].scalars | {"length": 128.0, "finished": 0.9})


def measured_process(code: str) -> dict[str, float]:
    """Run code in a new process; seconds and its peak memory, which it prints itself.

    The peak is Linux's VmHWM: `ru_maxrss` of a new process starts from the memory of the process that started it, here
    the one that made the run.
    """
    told = r"import re; print(re.search(r'VmHWM:\s*(\d+) kB', open('/proc/self/status').read())[1])"
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", f"{code}; {told}"], check=True, capture_output=True, text=True)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "seconds": round(seconds, 1),
        "cpu_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "peak_gib": round(int(done.stdout.split()[-1]) / 2**20, 2),
    }


def measured_report(folder: Path) -> dict[str, float]:
    """Write the page in a new process; seconds, peak memory and size."""
    found = measured_process(f"from scoregram.report import write_report; write_report({str(folder)!r})")
    return found | {"page_mb": round((folder / "report.html").stat().st_size / 1e6, 1)}


def measured_advice(folder: Path) -> dict[str, float]:
    """Diagnose the run in a new process that must not import transformers."""
    return measured_process(
        f"import sys; from scoregram.advice import advise; advise({str(folder)!r}); assert 'transformers' not in "
        "sys.modules"
    )


def measured_view(folder: Path) -> dict[str, float]:
    """Slowest answer of the server, in milliseconds, by what it is doing."""
    command = [sys.executable, "-c", "from scoregram.cli import main; main()", "view", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            root = server.stdout.readline().split()[0].rstrip("/")
            slowest_answer(root)  # imports of the first answer
            start = time.perf_counter()
            cold = 0.0
            while answer(f"{root}/content/.")[1] == 202:
                cold = max(cold, slowest_answer(root))
            made = time.perf_counter() - start
            warm = max(slowest_answer(root) for _ in range(10))
            version = json.loads(urllib.request.urlopen(f"{root}/version/.").read())["version"]
            (folder / "config.yaml").touch()  # another version
            busy = 0.0
            while answer(f"{root}/content/.?have={urllib.parse.quote(version)}")[1] == 202:
                busy = max(busy, slowest_answer(root))
        finally:
            server.terminate()
    return {"cold_ms": round(cold), "made_s": round(made, 1), "while_made_ms": round(busy), "warm_ms": round(warm)}


def slowest_answer(root: str) -> float:
    """Milliseconds of the slowest of the list, the page of the run, its update and its version."""
    return max(answer(f"{root}/{path}")[0] for path in ("", "rows", "run/.", "content/.", "version/."))


def answer(address: str) -> tuple[float, int]:
    """Milliseconds until the whole answer has arrived, and its status."""
    start = time.perf_counter()
    with urllib.request.urlopen(address) as found:
        found.read()
        return 1000 * (time.perf_counter() - start), found.status


def main() -> None:
    """Make the run, write its page, print what it took as JSON."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 1000), ("groups", 64), ("size", 8), ("layers", 0)):
        options.add_argument(f"--{name}", type=int, default=default)
    options.add_argument("--keep", type=Path, help="folder for the run; an existing run there is used as it is")
    given = options.parse_args()
    for name, least in (("steps", 1), ("groups", 1), ("size", 2), ("layers", 0)):
        if getattr(given, name) < least:
            options.error(f"--{name} must be at least {least}, got {getattr(given, name)}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.keep or Path(scratch) / "run"
        if not (folder / "config.yaml").exists():
            make_run(folder, given.steps, given.groups, given.size, given.layers)
        settings = {name: getattr(given, name) for name in ("steps", "groups", "size", "layers")}
        print(json.dumps(settings | {"report": measured_report(folder)}))
        print(json.dumps({"advise": measured_advice(folder)}))
        print(json.dumps({"view": measured_view(folder)}), flush=True)


if __name__ == "__main__":
    main()
