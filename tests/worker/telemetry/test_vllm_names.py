"""With `--metrics-compat vllm` the merged page answers the queries of the Grafana boards that vLLM publishes."""

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.engine_driver import make_request, run
from tests.worker.conftest import Start
from transom_cluster.telemetry.merge_metrics import merge_pages
from transom_cluster.telemetry.router_metrics import RouterMetrics

# Of examples/observability/prometheus_grafana/grafana.json and vllm_overview.json: the series that their queries name.
HISTOGRAMS = {
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
    *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
    *(
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_max_num_generation_tokens",
        "iteration_tokens_total",
    ),
}
WANTED = {
    **{f"vllm:{name}_{end}": 2 for name in HISTOGRAMS for end in ("count", "bucket")},
    **{"vllm:prompt_tokens_total": 80, "vllm:generation_tokens_total": 10, "vllm:request_success_total": 2},
    **{"vllm:prefix_cache_queries_total": 80, "vllm:prefix_cache_hits_total": 32, "vllm:num_preemptions_total": 0},
    **{"vllm:num_requests_running": 0, "vllm:num_requests_waiting": 0, "vllm:kv_cache_usage_perc": 0},
}


@pytest.mark.parametrize("openmetrics", [False, True])
def test_the_queries_of_vllms_boards_find_their_series(start: Start, openmetrics: bool) -> None:
    engine = start(metrics_compat="vllm", max_num_seqs=1, block_size=16)
    run(engine, [make_request(f"r{i}", list(range(5, 45)), max_tokens=5) for i in range(2)])
    router = RouterMetrics("r7", model=engine.config.model.model, compat="vllm")
    for request in ("r0", "r1"):
        router.first_token(0.1, request)
        router.inter_token_s.observe(0.01)
        router.finished("/v1/messages", 200, 1.0)
        router.finished("/metrics", 200, 9.0)
    pages = [router.text(openmetrics=openmetrics), engine.metrics.text(openmetrics=openmetrics).decode()]
    page = merge_pages(pages, openmetrics=openmetrics)
    families: list[Metric] = list((parse_openmetrics if openmetrics else parse_text)(page))
    found: dict[str, float] = {}
    for sample in (sample for family in families for sample in family.samples if sample.name.startswith("vllm:")):
        assert (sample.labels.pop("model_name"), sample.labels.pop("engine")) in {
            (engine.config.model.model, "0"),
            (engine.config.model.model, "r7"),
        }
        if sample.labels.pop("le", "+Inf") == "+Inf":
            found[sample.name] = found.get(sample.name, 0) + sample.value
        assert sample.labels.keys() <= {"finished_reason"}
    steps = found.pop("vllm:iteration_tokens_total_count")
    assert steps == found.pop("vllm:iteration_tokens_total_bucket") > 2
    assert {name: value for name, value in found.items() if not name.endswith("_sum")} == {
        name: value for name, value in WANTED.items() if "iteration" not in name
    }
    assert "vllm:" not in RouterMetrics("r7").text()
