"""Asked for on a machine without one, these tests fail: a skip would look like a proof."""

import pytest
import torch


@pytest.fixture(autouse=True)
def needs_a_device() -> None:
    """Every test here."""
    if not torch.cuda.is_available():
        pytest.fail("there is no CUDA device on this machine, or this torch was built without CUDA")
