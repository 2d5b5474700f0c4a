"""The engines that `cpu_peers` measures, each in processes of its own."""
