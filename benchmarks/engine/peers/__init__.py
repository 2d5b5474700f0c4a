"""The engines that `cpu_peers` and `cpu_decode` measure, each in processes of its own."""
