"""Settings of the process inside a block are the ones before it afterwards."""

from typing import Any

import pytest
import torch

from scoregram.machine import plain_products, threads, without_cudnn_attention
from scoregram.training.loop import train
from tests.training_cases import config_for, judge, save_policy


@pytest.fixture
def before():
    """Number of threads that every test starts from, whatever the machine has."""
    kept = torch.get_num_threads()
    torch.set_num_threads(2)
    yield 2
    torch.set_num_threads(kept)


@pytest.mark.parametrize(("count", "inside"), [(1, 1), (3, 3), (0, 2), (None, 2)])
def test_threads_are_set_inside_the_block_and_restored_after_it(count, inside, before):
    with threads(count):
        assert torch.get_num_threads() == inside
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("count", [1, 0, None])
def test_threads_are_restored_after_an_exception_and_after_a_change_inside(count, before):
    def change_and_raise() -> None:
        with threads(count):
            torch.set_num_threads(3)
            raise KeyError

    with pytest.raises(KeyError):
        change_and_raise()
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("is_on", [True, False])
def test_cudnn_attention_is_off_inside_the_block_and_as_before_after_an_exception(is_on):
    def look_and_raise() -> None:
        with without_cudnn_attention():
            assert not torch.backends.cuda.cudnn_sdp_enabled()
            raise KeyError

    kept = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(is_on)
    try:
        with pytest.raises(KeyError):
            look_and_raise()
        assert torch.backends.cuda.cudnn_sdp_enabled() == is_on
    finally:
        torch.backends.cuda.enable_cudnn_sdp(kept)


def test_blocks_of_threads_nest(before):
    with threads(3):
        with threads(0), threads(1):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == before


def test_blas_is_chosen_inside_the_block_alone():
    was = torch._C._get_mkldnn_enabled()
    with plain_products():
        assert not torch._C._get_mkldnn_enabled()
    assert torch._C._get_mkldnn_enabled() == was


def test_no_step_runs_with_the_attention_of_cudnn(tmp_path, monkeypatch):
    seen: list[bool] = []

    def told(*given: Any, **columns: Any) -> list[float]:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return judge(*given, **columns)

    monkeypatch.setattr("tests.training_cases.judge", told)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    train(config_for(save_policy(tmp_path / "policy"), tmp_path / "run"))
    assert before and seen and not any(seen) and torch.backends.cuda.cudnn_sdp_enabled()
