"""The cases that `engine.kernels` measures, one or two operators per file; each file has `cases(scale)`.

A case makes inputs on the device, runs an operator's Triton launcher, and compares some rows of the result with the operator's
specification: the reference in `transom_kernels` that its tests use too. There are cases of operators of which a speed was
promised, and of a few that run beside them; `tests/kernels` checks the others on a device as well.
"""
