"""Operating endpoints: health, readiness, metrics, what is served. None of them starts work or waits for a rank."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import msgspec
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.responses import Response

import dsparkd
from dsparkd.config import Config
from dsparkd.errors import CheckpointError, RequestError
from dsparkd.http.endpoint import Incoming, json_response
from dsparkd.http.intake import Intake
from dsparkd.metrics import Registry
from dsparkd.routing.router import Router

Scalar = str | int | float | bool | None
Geometry = dict[str, Scalar | list[Scalar]]


class Ops:
    """Handlers of the endpoints without a body. created_s: wall clock, printed only."""

    def __init__(self, config: Config, router: Router, registry: Registry, intake: Intake, created_s: int) -> None:
        self._config = config
        self._router = router
        self._registry = registry
        self._intake = intake
        self._created_s = created_s
        self._geometry = read_geometry(Path(config.engine.checkpoint))

    async def health(self, incoming: Incoming) -> Response:
        """GET /health: the front end answers and has not failed."""
        failed = self._router.state == "failed"
        return json_response({"status": "failed" if failed else "ok"}, 503 if failed else 200)

    async def ready(self, incoming: Incoming) -> Response:
        """GET /ready: whether new work is accepted."""
        state = self._router.state
        return json_response({"status": state}, 200 if state == "serving" else 503)

    async def health_scheduler(self, incoming: Incoming) -> Response:
        """GET /health_scheduler: whether the ranks' loops move, from what they last said of themselves."""
        ranks = self._router.health()
        state = self._router.state
        ok = state == "serving" and all(rank.ok for rank in ranks)
        body = {
            "status": "ok" if ok else "unhealthy",
            "server": state,
            "ranks": [dataclasses.asdict(rank) for rank in ranks],
        }
        return json_response(body, 200 if ok else 503)

    async def metrics(self, incoming: Incoming) -> Response:
        """GET /metrics: the Prometheus text format."""
        if not self._config.metrics.enabled:
            raise RequestError("metrics are off (metrics.enabled)", status=404, code="metrics_disabled")
        return Response(self._registry.render(), media_type=CONTENT_TYPE_LATEST)

    async def models(self, incoming: Incoming) -> Response:
        """GET /v1/models."""
        return json_response({"object": "list", "data": [self._model()]})

    async def model(self, incoming: Incoming) -> Response:
        """GET /v1/models/{model}."""
        self._intake.require_model(incoming.request.path_params["model"])
        return json_response(self._model())

    async def server_info(self, incoming: Incoming) -> Response:
        """GET /server_info: version, geometry, and every path with its state and reason."""
        ranks = [
            {
                "dp_rank": ready.dp_rank,
                "device": ready.device,
                "weight_bytes": ready.weight_bytes,
                "kv_bytes": ready.kv_bytes,
                "num_pages": ready.num_pages,
                "num_snapshots": ready.num_snapshots,
                "longest_tick_s": ready.longest_tick_s,
                "gc_frozen_objects": ready.gc_frozen_objects,
                "graph_bytes": ready.graph_bytes,
                "graph_tiers": ready.graph_tiers,
                "paths": [{"path": path.path, "state": path.state, "why": path.why} for path in ready.paths],
            }
            for ready in self._router.rank_ready()
            if ready is not None
        ]
        engine = self._config.engine
        return json_response(
            {
                "version": dsparkd.__version__,
                "model": self._intake.model,
                "state": self._router.state,
                "outstanding_requests": self._router.outstanding(),
                "device": engine.device,
                "dtype": engine.dtype,
                "dp": engine.dp,
                "max_context_tokens": engine.max_context_tokens,
                "tokenizer": {
                    "digest": self._intake.tokenizer.digest,
                    "vocab_size": self._intake.tokenizer.vocab_size,
                },
                "limits": msgspec.to_builtins(self._config.limits),
                "dspark": self._speculation(),
                "geometry": self._geometry,
                "ranks": ranks,
            }
        )

    def _speculation(self) -> dict[str, object]:
        """How drafts are made and verified; why, and by which costs, is among the ranks' paths."""
        config = self._config.dspark
        gamma = self._geometry.get("dspark_block_size")
        return {
            "enabled": config.enabled,
            "gamma": gamma,
            "max_verify": gamma if config.max_verify is None else config.max_verify,
            "verify": config.verify,
            "acceptance": config.acceptance,
            "cost_table": config.cost_table,
        }

    def _model(self) -> dict[str, object]:
        return {
            "id": self._intake.model,
            "object": "model",
            "created": self._created_s,
            "owned_by": "dsparkd",
            "max_model_len": self._intake.max_context_tokens,
        }


def read_geometry(checkpoint: Path) -> Geometry:
    """Read the numbers and names of the checkpoint's config.json, as the file has them. Raises CheckpointError."""
    path = checkpoint / "config.json"
    try:
        members = msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    geometry: Geometry = {}
    for name, raw in members.items():
        with contextlib.suppress(msgspec.ValidationError):  # a member that is an object is no geometry
            geometry[name] = msgspec.json.decode(raw, type=Scalar | list[Scalar])
    return geometry
