"""The /status document, which the page at / shows: the figures of /metrics, with percentiles and rates.

Percentiles cover the last 2,000 samples; the token rate covers the last 5 seconds. The page itself contains no data
of the model, so it is served without the API key; it asks for the key, and sends it with its requests.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files
from typing import Any

from tcdeploy.host.percentile import percentile
from tcdeploy.planning.bucket_record import BucketRecord
from tcdeploy.server.observe.figures import ModelFigures, ServerFigures
from tcdeploy.server.observe.recent_stats import RecentStats


def page() -> str:
    return files("tcdeploy.server").joinpath("page.html").read_text("utf-8")


def page_headers(page: str) -> dict[str, str]:
    """Headers that forbid the page to run other scripts and to connect to other servers."""
    [script] = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return {"content-security-policy": policy, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}


def status_json(figures: ServerFigures, recent: RecentStats) -> dict[str, Any]:
    model = figures.model
    return {
        "model": figures.model_name,
        "state": figures.state,
        "uptime_seconds": figures.uptime_seconds,
        "running": figures.scheduler.running + figures.scheduler.prefilling,
        "waiting": figures.scheduler.waiting,
        "finished": recent.finished,
        "generation_tokens": recent.tokens,
        "tokens_per_second": recent.tokens_per_second(),
        "rejections": sum(figures.rejections.values()),
        "kv_cache_usage": model.kv_cache_usage if model else 0.0,
        "recompiles": model.recompiles if model else 0,
        "tier": model.tier if model else None,
        "num_buckets": model.num_buckets if model else 0,
        "latency": [
            _latency_json("first token", list(recent.time_to_first_token)),
            _latency_json("between tokens", list(recent.inter_token_latency)),
        ],
        "buckets": [_bucket_json(model, record) for record in model.records] if model else [],
        "stage_seconds": model.stage_seconds if model else {},
        "weights_gb_per_second": model.weights_gb_per_second if model else None,
        "import_seconds": model.import_seconds if model else {},
        "generation_defaults": model.generation_defaults if model else {},
    }


def _latency_json(name: str, seconds: list[float]) -> dict[str, Any]:
    percentiles = {f"p{q}": percentile(seconds, q) if seconds else None for q in (50, 90, 99)}
    return {"name": name, "count": len(seconds), **percentiles}


def _bucket_json(model: ModelFigures, record: BucketRecord) -> dict[str, Any]:
    return {
        "bucket": record.bucket,
        "outcome": record.outcome,
        "steps": model.step_counts.get(record.bucket, 0),
        "padding_tokens": model.padding_tokens.get(record.bucket, 0),
        "max_difference": record.parity.max_difference,
        "eager_max_difference": record.parity.eager_max_difference,
        "kl": record.parity.kl,
        "eager_kl": record.parity.eager_kl,
        "variant": record.variant,
    }
