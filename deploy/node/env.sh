# Every command on every node sources this first (see ../*/cluster.yaml). One place for what all nodes must agree on.
export TRANSOM_VENV="${TRANSOM_VENV:-$HOME/transom-venv}"

# Nodes and commands without the cluster's token are refused. Say the mode: unset, it depends on what lies in the home folder.
export RAY_AUTH_MODE=token
export RAY_AUTH_TOKEN_PATH="$HOME/transom/auth_token"
export RAY_USAGE_STATS_ENABLED=0

# A lost host is noticed after period x threshold, 3 to 5 s here; Ray's own 3000 x 5 take 15 s and more, during which its streams
# stand still. It costs one small call per host and second. A host that does not answer for that long (swapping, a network
# that stalls) is given up and joins as a new one: raise the threshold where that happens.
export RAY_health_check_initial_delay_ms=5000
export RAY_health_check_period_ms=1000
export RAY_health_check_timeout_ms=1000
export RAY_health_check_failure_threshold=3
# The same for calls in flight to a host that is gone without a goodbye: pings on connections, every second.
export RAY_grpc_client_keepalive_time_ms=1000
export RAY_grpc_client_keepalive_timeout_ms=3000
# The autoscaler looks for a lost host, to start it again, after 10 s without a sign of it instead of 30.
export AUTOSCALER_HEARTBEAT_TIMEOUT_S=10

# Serve's proxies: one that is gone is replaced after some 6 s instead of 22.
export RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S=2
export RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S=2
export RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S=2

# Routers and workers run on Serve's event loop, so that no message changes threads.
export RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD=0 RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP=0
# Ray gives its workers niceness 15, which leaves the grammar checks that must yield to them nothing to yield with.
export RAY_worker_niceness=0
# glibc gives freed pages back; Python's own allocator only MiB that are wholly free, so that processes grow for hours.
export PYTHONMALLOC=malloc MALLOC_ARENA_MAX=2
# jemalloc, which is in Ray's wheels, grows less than glibc's malloc and is faster.
for jemalloc in "$TRANSOM_VENV"/lib/python3*/site-packages/ray/core/libjemalloc.so; do
    if [ -z "${LD_PRELOAD:-}" ] && [ -r "$jemalloc" ]; then
        export LD_PRELOAD="$jemalloc" MALLOC_CONF=background_thread:true,dirty_decay_ms:5000,muzzy_decay_ms:0,narenas:2
    fi
done
# The production token path, a quarter of the CPU per token: HAProxy instead of Serve's own proxies.
# A client that sends nothing of a request that it has begun, or reads nothing, is disconnected after 60 s; Serve's own have no limit.
# export RAY_SERVE_ENABLE_HA_PROXY=1 RAY_SERVE_THROUGHPUT_OPTIMIZED=1 RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S=60

# What differs from host to host, for hosts that are not alike: TRANSOM_RAY_ARGS for `ray start`, such as --num-gpus=4.
if [ -r /etc/transom/host.sh ]; then . /etc/transom/host.sh; fi
export PATH="$TRANSOM_VENV/bin:$PATH"
