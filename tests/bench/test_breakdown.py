"""Kernel kinds and gaps of synthetic replays; real ones need a GPU."""

from __future__ import annotations

import importlib

import pytest

from tcdeploy.bench.breakdown import TOP_KERNELS, KernelRun, gap_us, kernel_kind, summarize_replays


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_128x64_64x6_2x1_v_bz_TNN", "gemm"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16>", "gemm"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "gemm"),
        ("triton_red_fused_mm_silu_3", "gemm"),
        ("triton_tem_fused_addmm_1", "gemm"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<argmax>>", "sampling"),
        ("triton_red_fused_argmax_0", "sampling"),
        ("_advance_kernel", "sampling"),
        ("triton_red_fused_add_mean_mul_pow_rsqrt_2", "other"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>>", "other"),
        ("triton_poi_fused_comm_0", "other"),
        ("triton_poi_fused_add_cat_mm_mul_neg_1", "other"),
        ("Memcpy DtoD (Device -> Device)", "other"),
        ("void flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, cutlass::bfloat16_t>>", "attention"),
    ],
)
def test_the_kind_of_a_kernel_follows_from_its_name(name: str, kind: str) -> None:
    assert kernel_kind(name) == kind


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        ("kernels.attention.prefill_kernel", "attention"),
        ("kernels.attention.decode_kernel", "attention"),
        ("kernels.experts.experts_kernel", "gemm"),
        ("kernels.experts.gemv_kernel", "gemm"),
        ("kernels.experts.routing_kernel", "gemm"),
        ("kernels.experts.scheme_gemv_kernel", "gemm"),
        ("kernels.linear.matmul_kernel", "gemm"),
        ("kernels.linear.register_gemm_kernel", "gemm"),
        ("kernels.linear.scheme_gemm_kernel", "gemm"),
        ("kernels.linear.scheme_kernel", "gemm"),
        ("kernels.sampling.advance_kernels", "sampling"),
        ("kernels.sampling.filter_kernels", "sampling"),
        ("kernels.sampling.limit_kernels", "sampling"),
        ("kernels.sampling.logprob_kernels", "sampling"),
        ("kernels.sampling.sample_kernels", "sampling"),
    ],
)
def test_kernels_of_this_package_have_the_kind_of_their_module(module: str, kind: str) -> None:
    pytest.importorskip("triton")
    kernels = [name for name in vars(importlib.import_module(f"tcdeploy.{module}")) if name.endswith("_kernel")]
    assert kernels
    assert {kernel_kind(name) for name in kernels} == {kind}


def test_gaps_are_the_times_in_which_no_kernel_runs() -> None:
    assert gap_us([KernelRun("a", 0, 2), KernelRun("b", 3, 4), KernelRun("c", 9, 10)]) == 1 + 5


def test_overlapping_kernels_leave_no_gap_whatever_their_order() -> None:
    assert gap_us([KernelRun("c", 6, 7), KernelRun("a", 0, 5), KernelRun("b", 1, 2)]) == 1
    assert gap_us([]) == 0


def test_a_breakdown_is_per_step() -> None:
    step = [
        KernelRun("nvjet_a", 0, 4),
        KernelRun("_decode_kernel", 4, 6),
        KernelRun("nvjet_a", 7, 11),
        KernelRun("argmax", 11, 12),
    ]
    later = [KernelRun(name, start + 100, stop + 100) for name, start, stop in step]
    breakdown = summarize_replays([step, later])
    assert (breakdown.replays, breakdown.step_us, breakdown.kernel_us, breakdown.gap_us) == (2, 12, 11, 1)
    assert (breakdown.gemm_us, breakdown.attention_us, breakdown.sampling_us, breakdown.other_us) == (8, 2, 1, 0)
    longest = breakdown.top[0]
    assert (longest.name, longest.kind, longest.count, longest.us) == ("nvjet_a", "gemm", 2, 8)


def test_an_overlapping_kernel_counts_from_the_end_of_its_predecessor() -> None:
    breakdown = summarize_replays(
        [[KernelRun("_linear_kernel", 1, 9), KernelRun("nvjet_a", 0, 6), KernelRun("_decode_kernel", 8, 12)]]
    )
    assert (breakdown.kernel_us, breakdown.gap_us, breakdown.step_us) == (12, 0, 12)
    us_by_name = {kernel.name: kernel.us for kernel in breakdown.top}
    assert us_by_name == {"nvjet_a": 6, "_linear_kernel": 3, "_decode_kernel": 3}


def test_only_the_longest_kernels_are_listed() -> None:
    breakdown = summarize_replays([[KernelRun(f"k{number}", 100 * number, 101 * number) for number in range(1, 30)]])
    assert [kernel.name for kernel in breakdown.top] == [f"k{number}" for number in range(29, 29 - TOP_KERNELS, -1)]
