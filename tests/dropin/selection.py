"""Which of DeepSpeed's own unit tests are run: those that pass with plain DeepSpeed on a CPU."""

from __future__ import annotations

FIRST = (
    "unit/ops/adam/test_cpu_adam.py::TestCPUAdam",
    "unit/ops/adam/test_hybrid_adam.py",
    "unit/v1/zero/test_zero2_offload_multi_backward.py",
    "unit/v1/zero/test_zero_cpu_offload_grad_accum.py",
    "unit/v1/zero/test_zero_coalesce_grad_reduction.py::TestCoalesceCpuOffload",
    "unit/v1/zero/test_zero.py::TestZeroOffloadOptim",
    "unit/v1/zero/test_zero.py::TestZeroToFP32",
    "unit/runtime/zero/test_zero_grad_clip.py",
    "unit/runtime/half_precision/test_zero_optim_overflow.py::TestZeROBFloat16",
    "unit/checkpoint/test_zero_optimizer.py::TestZeROCheckpoint::test_load_optimizer_state",
    "unit/checkpoint/test_zero_optimizer.py::TestZeROSaveLoadEdgeCase",
    "unit/checkpoint/test_latest_checkpoint.py",
    "unit/runtime/test_ds_initialize.py",
)
"""The first tier."""

REST = (
    "unit/v1/zero/test_zero_coalesce_grad_reduction.py",
    "unit/v1/zero/test_zero.py::TestZeroOffloadStage1",
    "unit/v1/zero/test_zero.py::TestZeroAdamOptimizerStepCount",
    "unit/v1/zero/test_zero.py::TestZeroUnbalancedGradients",
    "unit/v1/zero/test_zero.py::TestIncorectAllgatherBucketSize",
    "unit/v1/zero/test_zero.py::TestPartitionNcclAlignment",
    "unit/v1/zero/test_zero.py::TestEmptyParameterGroup",
    "unit/v1/zero/test_zero.py::TestZeroFrozenWeights",
    "unit/v1/zero/test_zero.py::TestBF16OptimizerGradReduction",
    "unit/v1/zero/test_stage2_flatten_on_gpu.py",
    "unit/runtime/zero/test_ignore_unused_parameters.py",
    "unit/runtime/zero/test_zero_tensor_fragment.py",
    "unit/runtime/zero/test_zero_leaf_module.py",
    "unit/v1/half_precision/test_gradient_clipping_default.py",
    "unit/v1/half_precision/test_mixed_precision_dtype.py",
    "unit/checkpoint/test_zero_optimizer.py",
    "unit/checkpoint/test_universal_checkpoint.py",
    "unit/checkpoint/test_tag_validation.py",
    "unit/checkpoint/test_convert_checkpoint.py",
    "unit/checkpoint/test_shared_weights.py",
    "unit/checkpoint/test_other_optimizer.py",
    "unit/runtime/test_no_sync_ctxt.py",
    "unit/runtime/test_multiple_models.py",
    "unit/runtime/test_multi_output_model.py",
    "unit/runtime/test_lr_schedulers.py",
    "unit/runtime/test_ds_config_dict.py",
    "unit/monitor/test_monitor.py",
)
"""The second tier; tests that are also in the first one are run once."""

HANGS = ("TestCPUAdamGPUError",)
"""Tests that are left out: on a CPU they do not end."""
