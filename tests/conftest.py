"""Settings of the whole suite, and the models that several files share."""

import os

# The suite needs no hub, and would wait for one at every model it builds.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import built_site
import pytest
import torch
import zoo

# Threads gain nothing on tiny models, and lose much where several workers share the cores.
torch.set_num_threads(1)

needs_hooked = pytest.mark.skipif(
    zoo.HookedTransformer is None, reason="this transformer-lens has no HookedTransformer"
)


@pytest.fixture(params=[pytest.param("hooked", marks=needs_hooked), "bridge"])
def host_model(request):
    """A tiny model with a tokenizer, fresh for each test, on each host."""
    if request.param == "bridge":
        return zoo.bridge_of(zoo.hf_model("llama"), "llama")
    model = zoo.hooked(n_key_value_heads=2)
    model.set_tokenizer(zoo.tokenizer())
    return model


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The documentation, built with its tutorials run; once, also where several workers test."""
    own = tmp_path_factory.getbasetemp()
    return built_site.build(own.parent if "PYTEST_XDIST_WORKER" in os.environ else own)
