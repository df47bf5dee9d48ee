"""A forward that makes a cache of its own and returns it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

import meshfuse as mf


class Caching(nn.Module):
    """A layer whose keys and values are in a cache that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        cache, keys = DynamicCache(), self.keys(x)[:, None]
        cache.update(keys, keys, 0)
        return keys.sum(), cache


def test_a_cache_that_the_forward_makes_is_refused() -> None:
    model = mf.parallelize(Caching(), mf.DeviceMesh((2,), ("dp",)), inputs={"x": ["dp", None, None]})
    with pytest.raises(mf.ArgumentError) as error:
        model(torch.ones(2, 3, 4))
    assert str(error.value).startswith(
        "the forward of Caching returns a cache that it has made: found use_cache=True, needed a static cache among "
        "the arguments, or none. Pass past_key_values=StaticCache(config, max_cache_len=...), or leave use_cache out."
    )
