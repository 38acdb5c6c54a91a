"""The Sinkhorn kernels, under Triton's interpreter, against autograd through the formula."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import torch
from tools.train_nano.sinkhorn import _Sinkhorn, sinkhorn_reference

generator = torch.Generator().manual_seed(0)
logits = (2 * torch.randn(70, 4, 4, generator=generator)).requires_grad_()
weights = torch.randn(70, 4, 4, generator=generator)
expected = sinkhorn_reference(logits, 20, 1e-6)
(expected * weights).sum().backward()
expected_grad, logits.grad = logits.grad, None
comb = _Sinkhorn.apply(logits, 20, 1e-6)
(comb * weights).sum().backward()
print((comb - expected).abs().max().item() < 1e-6, (logits.grad - expected_grad).abs().max().item() < 1e-5)
"""


def test_kernels_give_the_formula_and_its_gradient() -> None:
    """A wrong gradient would train slower and never be seen. 70 matrices: one full and one partial program.

    The interpreter is chosen when Triton is imported, so the kernels run in a process of their own.
    """
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env={"TRITON_INTERPRET": "1", "PYTHONPATH": "."},
        capture_output=True,
        text=True,
    )

    assert done.stdout.split() == ["True", "True"], done.stderr
