"""Every causal language model class of transformers: the Gram and the gradient are exact, or the model is refused.

The reference is one backward pass per rollout, alone and unpadded. The types that are refused, or cannot be built, are
listed in `docs/trust.md`; a listed type that works is a failure too, so that the list can only shrink.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from scoregram.errors import ScoregramError
from scoregram.gram import backward_with_gram, leaves, measure_gram
from tests.cases import KeepDouble
from tests.naive import score_rows
from tests.sweep_cases import MODEL_NAMES, SIDE, packed_batch, padded_batch, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")

PAGE = (Path(__file__).parent.parent / "docs" / "trust.md").read_text(encoding="utf-8")
LISTED = dict(re.findall(r"^\| `([\w-]+)` \| (not built|refused) \|", PAGE, re.MULTILINE))
TYPES = sorted(MODEL_NAMES)
EXACT = 1e-9
ROUNDED = 1e-5  # where norms and routers compute in float32


@contextmanager
def float64(*, casts: bool = False) -> Iterator[None]:
    """No cast to float32, and constants in float64: some models write the least float64 into a new tensor."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with nullcontext() if casts else KeepDouble():
            yield
    finally:
        torch.set_default_dtype(before)


def distance(measured: Tensor, reference: Tensor) -> float:
    return float((measured.detach().double() - reference).norm() / reference.norm())


@lru_cache(maxsize=1)
def model_and_scores(model_type: str) -> tuple[Any, Tensor]:
    """The model and the scores of its eight rollouts, one backward pass each."""
    transformers.logging.set_verbosity_error()
    with float64():
        model = tiny_model(model_type)
        scores = score_rows(model, *padded_batch(SIDE))
    assert bool(torch.isfinite(scores).all()) and bool((scores.norm(dim=1) > 0).all())
    return model, scores


def assert_exact(model: Any, scores: Tensor, *batch: Tensor, casts: bool = False, **given: Any) -> None:
    weights = torch.linspace(-1.0, 2.0, len(scores), dtype=torch.float64)
    model.zero_grad(set_to_none=True)
    with float64(casts=casts):
        gram = backward_with_gram(model, *batch, weights=weights, **given)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradient = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in trained])
    model.zero_grad(set_to_none=True)
    bound = ROUNDED if casts else EXACT
    assert distance(gram.matrix, scores @ scores.T) <= bound
    assert distance(gradient, weights @ scores) <= bound


def assert_exact_or_listed(model_type: str, *batch: Tensor, **given: Any) -> None:
    model, scores = model_and_scores(model_type)
    count = len(batch[0]) if "rollout_ids" not in given else int(given["rollout_ids"].max()) + 1
    if LISTED.get(model_type) == "refused":
        with pytest.raises(ScoregramError):
            assert_exact(model, scores[:count], *batch, **given)
    else:
        assert_exact(model, scores[:count], *batch, **given)


BUILT = [name for name in TYPES if LISTED.get(name) != "not built"]
QUICK = {
    "bloom",
    "cpmant",  # refused
    "deepseek_v3",
    "gemma2",
    "gemma3_text",
    "glm4_moe",
    "gpt2",
    "gpt_neox",
    "llama",
    "mamba",
    "mistral",
    "mixtral",
    "olmo2",
    "opt",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
}
"""Types that `make test` runs: each takes less than a second. `make test-sweep`, also in CI, runs the others."""


def in_sweep(names: Iterable[str]) -> list[Any]:
    """Parameters of a test: the types, those of the sweep marked as slow."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in names]


built = pytest.mark.parametrize("model_type", BUILT)


@pytest.mark.parametrize("model_type", in_sweep(BUILT))
def test_every_axis_has_the_length_of_the_batch(model_type):
    """Rollouts, tokens, heads, experts, groups and head width are 8; padding on the left, which is moved."""
    assert_exact_or_listed(model_type, *padded_batch(SIDE, padding="left"))


FAST_ROUTE = {
    "dbrx",
    "deepseek_v3",
    "ernie4_5_moe",
    "glm4_moe",
    "gpt_oss",
    "granitemoe",
    "hunyuan_v1_moe",
    "inkling_text",
    "jetmoe",
    "lfm2_moe",
    "llama4_text",
    "minimax",
    "mixtral",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
}
"""Types with fused experts, attention sinks or gated norms, all of whose parameters are measured in one pass."""


@pytest.mark.parametrize("model_type", in_sweep(sorted(FAST_ROUTE)))
def test_no_parameter_is_replayed(model_type, monkeypatch):
    monkeypatch.setattr(leaves, "KEPT_ELEMENTS", 0)
    with float64():
        assert measure_gram(tiny_model(model_type), *padded_batch(5, padding="left")).replayed == ()


@pytest.mark.parametrize("model_type", sorted(name for name, why in LISTED.items() if why == "not built"))
def test_what_is_listed_as_not_built_cannot_be_built(model_type):
    with pytest.raises(Exception):  # noqa: B017, PT011
        model_and_scores(model_type)


def test_the_list_names_types_that_exist():
    assert set(LISTED) <= set(TYPES) and set(BUILT) >= QUICK and set(BUILT) >= FAST_ROUTE
    counts = re.search(r"(\d+) types: (\d+) exact, (\d+) refused, (\d+) cannot be built", PAGE)
    assert counts is not None
    listed = [list(LISTED.values()).count(kind) for kind in ("refused", "not built")]
    assert [int(count) for count in counts.groups()] == [len(TYPES), len(TYPES) - sum(listed), *listed]


# The settings of a whole run, `make test-all`.


@pytest.mark.slow
@built
def test_other_sizes_and_paddings(model_type):
    for count, tokens, padding in ((5, 8, "right"), (5, 11, "right"), (2, 8, "left"), (SIDE, 11, "left")):
        assert_exact_or_listed(model_type, *padded_batch(count, tokens, padding=padding))


@pytest.mark.slow
@built
def test_weights_streamed_and_rollouts_packed(model_type, monkeypatch):
    """No weight is small enough for copies; all rollouts lie in one row."""
    monkeypatch.setattr(leaves, "KEPT_ELEMENTS", 0)
    *batch, owners = packed_batch(SIDE)
    assert_exact_or_listed(model_type, *batch, rollout_ids=owners)


@pytest.mark.slow
@built
def test_checkpointing(model_type):
    """Within float32 rounding: no mode reaches the second forward pass, so norms and routers stay in float32."""
    model, scores = model_and_scores(model_type)
    if not model.supports_gradient_checkpointing:
        pytest.skip("transformers has no checkpointing for this type")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    try:
        with float64(casts=True):
            scores = score_rows(model, *padded_batch(5))  # some types behave differently in training mode
            again = score_rows(model, *padded_batch(5))
        if not torch.equal(scores, again):
            pytest.skip("random in training mode")
        if LISTED.get(model_type) == "refused":
            with pytest.raises(ScoregramError):
                assert_exact(model, scores, *padded_batch(5), casts=True)
        else:
            assert_exact(model, scores, *padded_batch(5), casts=True)
    finally:
        model.eval()
        model.gradient_checkpointing_disable()


@pytest.mark.slow
@built
def test_lora(model_type):
    """Adapters on every linear layer, with random weights; padding on the left."""
    import peft

    with float64():
        base = tiny_model(model_type)
        try:
            model: Any = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules="all-linear"))
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(2))
            scores = score_rows(model.double().eval(), *padded_batch(5))
        except (ValueError, TypeError, AttributeError, NotImplementedError, RuntimeError) as error:
            pytest.skip(f"PEFT cannot wrap this type: {error}"[:200])
    try:
        assert_exact(model, scores, *padded_batch(5, padding="left"))
    except ScoregramError:
        assert LISTED.get(model_type) == "refused"


FUSED_EXPERTS = [
    "afmoe",
    "aria_text",
    "axk1",
    "axk2",
    "bailing_hybrid",
    "beam",
    "cohere2_moe",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
    "dots1",
    "ernie4_5_moe",
    "exaone_moe",
    "flex_olmo",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "gpt_oss",
    "granitemoe",
    "granitemoe_swa",
    "granitemoehybrid",
    "granitemoeshared",
    "hunyuan_v1_moe",
    "hy_v3",
    "hy_v4",
    "inkling_text",
    "jamba",
    "jetmoe",
    "kimi_linear",
    "kolibri1",
    "laguna",
    "lfm2_moe",
    "llama4",
    "llama4_text",
    "longcat_flash",
    "mellum",
    "mimo_v2_flash",
    "minimax",
    "minimax_m2",
    "minimax_m3_vl_text",
    "mixtral",
    "nemotron_h",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "qwen3_next",
    "qwen4_exp",
    "qwen4_exp_text",
    "solar_open",
    "zaya",
]
"""Every type with the weights of all experts in one tensor `(experts, …)`."""


def fused_experts(model: Any) -> list[str]:
    """Names of the weights that hold all experts in one tensor."""
    experts = [(name, module) for name, module in model.named_modules() if "Experts" in type(module).__name__]
    return [f"{name}.{key}" for name, module in experts for key, p in module._parameters.items() if p.ndim == 3]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", FUSED_EXPERTS)
def test_lora_on_fused_experts(model_type):
    """Adapters on the weights of all experts (`target_parameters`) are exact, and none is replayed."""
    import peft

    with float64():
        base = tiny_model(model_type)
        config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=[], target_parameters=fused_experts(base))
        model: Any = peft.get_peft_model(base, config).double().eval()
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(2))
        scores = score_rows(model, *padded_batch(5))
        assert measure_gram(model, *padded_batch(5, padding="left")).replayed == ()
    assert_exact(model, scores, *padded_batch(5, padding="left"))


@pytest.mark.slow
def test_every_type_with_fused_experts_is_listed():
    found = []
    for model_type in BUILT:
        with float64():
            found += [model_type] * bool(fused_experts(tiny_model(model_type)))
    assert found == FUSED_EXPERTS


@pytest.mark.slow
@built
def test_autocast_stays_at_its_noise_floor(model_type):
    """In bfloat16 the Gram is no further from float64 than that of plain backward passes, up to a factor."""
    _, scores = model_and_scores(model_type)
    exact = scores[:5] @ scores[:5].T
    low = tiny_model(model_type).float()
    with torch.autocast("cpu", torch.bfloat16):
        try:
            plain = score_rows(low, *padded_batch(5))
        except RuntimeError as error:
            pytest.skip(f"the model itself does not run under autocast: {error}"[:200])
        try:
            gram = backward_with_gram(low, *padded_batch(5), weights=torch.ones(5))
        except ScoregramError:
            assert LISTED.get(model_type) == "refused"
            return
    assert distance(gram.matrix, exact) <= 3 * distance(plain @ plain.T, exact) + 0.02
