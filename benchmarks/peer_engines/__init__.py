"""The engines that `benchmarks/cpu_peers.py` and `benchmarks/cpu_decode.py` measure, each in processes of its own."""
