"""Every metric by the name that Prometheus shows, with its labels: the contract between code, dashboards and alerts."""

from __future__ import annotations

_WORKER = """
transom_requests_total: finish_reason
transom_requests_running:
transom_requests_waiting:
transom_prompt_tokens_total:
transom_output_tokens_total:
transom_computed_tokens_total: phase
transom_prefix_tokens_total: outcome reason
transom_prefix_requests_total: outcome
transom_kv_repairs_total:
transom_kv_repair_tokens_total:
transom_preemptions_total: mode
transom_preempted_tokens_total: mode
transom_request_seconds: finish_reason
transom_queue_seconds:
transom_prefill_seconds:
transom_first_token_seconds:
transom_decode_seconds:
transom_inter_token_seconds:
transom_step_seconds: part
transom_steps_total:
transom_step_tokens:
transom_step_sequences:
transom_step_rows_total: kind
transom_rank_restarts_total:
transom_rank_memory_bytes: rank kind
transom_rank_forward_seconds_total: rank
transom_rank_busy_seconds_total: rank
transom_rank_info: rank device pid host
transom_kv_pages: state
transom_kv_fragmentation_ratio:
transom_kv_waste_ratio:
transom_kv_compacted_blocks_total:
transom_kv_checkpoints: kind
transom_kv_checkpoint_changes_total: kind change
transom_kv_blocks: group state
transom_kv_bytes: group state
transom_kv_held_blocks: group
transom_kv_utilization_ratio: group
transom_kv_evicted_blocks_total: group reason
transom_kv_residency_seconds: group
transom_kv_reuse_interval_seconds: group
transom_kv_pool_bytes:
transom_kv_headroom_requests: length
transom_load_waiting_tokens:
transom_load_used_ratio:
transom_load_prefill_tokens_per_second:
transom_load_decode_step_seconds:
transom_load_first_token_seconds:
transom_worker_start_seconds:
transom_worker_config_info: dtype device tensor_parallel_size block_size max_model_len max_num_seqs \
    max_num_batched_tokens scheduling_policy prefix_caching hybrid_kv_cache
transom_process_cpu_seconds_total:
transom_process_resident_bytes:
"""
_ROUTER = """
transom_router_requests_total: endpoint status
transom_router_request_seconds: endpoint
transom_router_first_token_seconds:
transom_router_inter_token_seconds:
transom_router_open_streams:
transom_router_failovers_total: outcome
transom_router_drains_total: outcome
transom_router_waiting_requests:
transom_router_workers: state
transom_router_dropped_scrapes_total: target
transom_router_prompt_tokens_total:
transom_router_output_tokens_total:
transom_router_in_flight_requests: worker
transom_router_placements_total: policy worker
transom_router_predicted_hit_tokens_total:
transom_router_actual_hit_tokens_total:
transom_router_hit_error_tokens:
transom_router_resyncs_total: worker
transom_router_mirror_blocks: worker
transom_router_mirror_version: worker
transom_router_placement_seconds:
transom_router_worker_changes_total: change
transom_router_desired_workers:
transom_router_process_cpu_seconds_total:
transom_router_process_resident_bytes:
"""
_BOTH = {"transom_build_info": {"model", "worker", "router", "version", "python", "torch", "triton", "ray"}}


def declared() -> dict[str, set[str]]:
    """Name and labels of every metric; a histogram by the name without `_bucket`."""
    return {**_table(_WORKER, {"model", "worker"}), **_table(_ROUTER, {"model", "router"}), **_BOTH}


def _table(text: str, always: set[str]) -> dict[str, set[str]]:
    rows = (line.split(":") for line in text.strip().splitlines())
    return {name: {*always, *labels.split()} for name, labels in rows}
