"""Random weights in every format, made on the device."""

from __future__ import annotations

import torch

from dsparkd.kernels.weight import FP4_GROUP, FP8_GROUP, Format, Weight, dense


def random_weight(form: Format, outputs: int, inputs: int, seed: int, device: torch.device) -> Weight:
    """A weight [O, I] whose values have a standard deviation of about I ** -1/2, with scales that differ."""
    generator = torch.Generator(device).manual_seed(seed)
    if form is Format.DENSE:
        values = torch.randn((outputs, inputs), generator=generator, device=device)
        return dense((values * inputs**-0.5).bfloat16())
    if form is Format.FP4:
        codes = torch.randint(0, 256, (outputs, inputs // 2), generator=generator, device=device, dtype=torch.uint8)
        spread, groups = 3.0, -(-inputs // FP4_GROUP)  # E2M1 codes, each as likely
    else:
        values = torch.randn((outputs, inputs), generator=generator, device=device) * 64
        codes = values.to(torch.float8_e4m3fn).view(torch.uint8)
        spread, groups = 64.0, -(-inputs // FP8_GROUP)
    exponent = round(-torch.tensor(spread * inputs**0.5).log2().item())
    steps = torch.randint(-1, 2, (outputs, groups), generator=generator, device=device)
    return Weight(form, codes, (127 + exponent + steps).to(torch.uint8))
