"""Runs steps from recordings instead of the model's Python code: CUDA graphs on GPUs, programs of kernels on CPUs.

Every decode step launches the same kernels, and so do, on GPUs, small *mixed* steps, which compute prompts beside decodes; only the
inputs change. So a backend records one forward pass over arrays at fixed addresses. A later step writes its inputs there and
replays the recording:

    decode_replay           what `ForwardPass` asks of a backend; `check_replay` compares a replay with a forward pass
    backends                chooses the backend of a device and its settings
    fixed_inputs            a step in arrays at fixed addresses, which both backends read
    decode_graphs           CUDA: all sizes are captured and checked at start-up; steps are padded to a size (`decode_sizes`)
    decode_programs         CPUs: each number of sequences is recorded when it first occurs, and checked when it occurs again

If a recording fails, or computes something else than the forward pass, the backend logs why, and steps run eagerly: the host
launches their kernels one by one. `transom_decode_steps_total` counts replayed and eager steps.
"""
