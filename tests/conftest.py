"""Fixtures and settings for the whole suite."""

import functools
import gc
import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

from tests import close_checks, shape_checks

if find_spec("hypothesis"):  # a machine with a GPU may lack it, see gpu.py
    from hypothesis import settings

    settings.register_profile("suite", deadline=None, max_examples=50, derandomize=True)
    settings.load_profile("suite")
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start
shape_checks.install()
close_checks.install()


def pytest_collection_finish() -> None:
    """Keep the garbage collector from walking over the collected tests, which live until the end."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def unchecked_shapes() -> Iterator[None]:
    """Shape aliases unchecked, as for a user: our own errors must come through."""
    import jaxtyping

    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True, scope="session")
def one_look_at_the_source() -> Iterator[None]:
    """Every run that a test writes records its environment: the source is hashed, and git asked, once for all runs."""
    from scoregram.runs import writer

    found = functools.cache(writer.this_environment)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "this_environment", lambda: found() | {"threads": torch.get_num_threads()})
        yield


@pytest.fixture(autouse=True)
def same_products_for_every_test() -> Iterator[None]:
    """A product in bfloat16 on a processor that has none changes how torch takes all others, until told otherwise."""
    yield
    if not torch.backends.mkldnn.enabled:
        torch.backends.mkldnn.set_flags(True)
