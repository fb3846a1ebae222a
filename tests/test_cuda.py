"""On a GPU all is as on the CPU: captures, in float32 and in bfloat16, and reports."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from report_fixtures import saved_model

import lens_rope as lr
from lens_rope.reporting.gather import gather

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return str(saved_model("llama", tmp_path_factory.mktemp("models")))


@pytest.fixture(autouse=True)
def _whole_float32():
    """No TF32, which keeps 10 bits of a product's factors."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


def ids(n: int) -> torch.Tensor:
    return torch.randint(5, 60, (n,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("dtype", "tolerance", "attention"),
    [("float32", 1e-4, "eager"), ("float32", 1e-4, "fused"), ("bfloat16", 5e-2, "eager")],
)
def test_capture_is_that_of_the_cpu(path, dtype, tolerance, attention) -> None:
    here, there = (
        lr.capture(
            lr.load_model(path, "bridge", device=device, dtype=dtype), ids(80), attention=attention
        )
        for device in ("cpu", "cuda")
    )
    for layer in here.layer_indices:
        a, b = here.layer(layer), there.layer(layer)
        assert b.q.device.type == b.k.device.type == "cpu"
        torch.testing.assert_close(a.q, b.q, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(a.k, b.k, atol=tolerance, rtol=tolerance)
        np.testing.assert_allclose(a.rope.inv_freq, b.rope.inv_freq, rtol=1e-6)
        assert a.rope.same_rotation(b.rope)


def test_report_is_that_of_the_cpu(path) -> None:
    here, there = (
        gather(lr.load_model(path, "bridge", device=device), ids(96)) for device in ("cpu", "cuda")
    )
    for a, b in zip(here.layers, there.layers, strict=True):
        np.testing.assert_allclose(a.usage.query, b.usage.query, rtol=1e-4)
        np.testing.assert_allclose(a.usage.key, b.usage.key, rtol=1e-4)
        np.testing.assert_allclose(a.shares.previous_share, b.shares.previous_share, atol=1e-4)
    for a, b in zip(here.spectra, there.spectra, strict=True):
        np.testing.assert_allclose(a.pre.eigenvalues, b.pre.eigenvalues, rtol=1e-3, atol=1e-5)
    assert [head.pattern for head in here.heads] == [head.pattern for head in there.heads]
    if here.ablation is not None:
        assert there.ablation is not None
        assert there.ablation.loss_before == pytest.approx(here.ablation.loss_before, rel=1e-4)
