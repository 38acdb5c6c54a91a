"""Router, activation and last sum of a feed-forward layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dsparkd.kernels.cuda.feed_forward import TritonFeedForward
from dsparkd.kernels.cuda.router import TritonRouter
from dsparkd.kernels.feed_forward import FeedForwardKernel, TorchFeedForward
from dsparkd.kernels.router import RouterKernel, RouterRule, TorchRouter
from tools.kernel_cases import Case, Scale

LIMIT = 10.0


def cases(device: torch.device, scale: Scale) -> Iterator[Case]:
    """Scored and hashed routes, activation."""
    small = scale is Scale.SMALL
    experts, top_k, vocabulary, expert_width = (12, 3, 40, 24) if small else (256, 6, 129280, 2048)
    bias = torch.arange(experts, device=device).remainder(2) * 0.25
    table = torch.stack([torch.arange(vocabulary, device=device) * 7 + 5 * j for j in range(top_k)], 1) % experts
    for rows in (40,) if small else (64 * 6, 8192):
        generator = torch.Generator(device).manual_seed(rows)
        # Coarse logits: scores are equal or far apart, so that rounding does not decide a choice.
        logits = torch.randn((rows, experts), generator=generator, device=device).mul(64).round().div(64)
        ids = torch.randint(0, vocabulary, (rows,), generator=generator, device=device)
        live = torch.full((1,), rows, device=device)
        for hashed in (False, True):
            rule = RouterRule(experts, top_k, 1.5, None if hashed else bias, table if hashed else None)

            def route(
                router: RouterKernel, part: slice, logits: Tensor = logits, ids: Tensor = ids, rows: int = rows
            ) -> Tensor:
                """Spread the shares over all experts: [rows, E + 1]."""
                num_live = torch.full((1,), max(rows - 3 - part.start, 0), device=logits.device)
                routes = router(logits[part], ids[part], num_live)
                spread = torch.zeros((len(routes.shares), logits.shape[1] + 1), device=logits.device)
                return spread.scatter_add_(1, routes.expert_ids.long(), routes.shares)

            yield Case(
                name=f"router.{'hashed' if hashed else 'scored'}",
                shape=f"{rows} rows of {experts}",
                num_rows=rows,
                run=lambda part, route=route, rule=rule: route(TritonRouter(rule), part),  # type: ignore[misc]
                reference=lambda part, route=route, rule=rule: route(TorchRouter(rule), part),  # type: ignore[misc]
                tolerance=1e-5,
                floor_bytes=rows * (4 * experts + 8 + 8 * top_k),
                timed=lambda rule=rule, x=logits, ids=ids, live=live: TritonRouter(rule)(x, ids, live),  # type: ignore[misc]
            )
        hidden = torch.randn((rows, 2 * expert_width), generator=generator, device=device).mul(6).bfloat16()

        def activate(kernel: FeedForwardKernel, part: slice, hidden: Tensor = hidden) -> Tensor:
            return kernel.activate(hidden[part], LIMIT)

        yield Case(
            name="feed_forward.activate",
            shape=f"{rows} rows of {expert_width}",
            num_rows=rows,
            run=lambda part, f=activate: f(TritonFeedForward(), part),  # type: ignore[misc]
            reference=lambda part, f=activate: f(TorchFeedForward(), part),  # type: ignore[misc]
            tolerance=1e-2,
            floor_bytes=rows * 6 * expert_width,
        )
