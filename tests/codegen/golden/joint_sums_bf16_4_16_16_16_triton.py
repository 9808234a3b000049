import triton
import triton.language as tl


@triton.jit
def _wait_for_kernel_before():
    """Wait until the kernel launched before this one has ended, and what it wrote can be read (sm_90 and later)."""
    tl.inline_asm_elementwise("griddepcontrol.wait;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _sum4(a0, a1, a2, a3, b0, b1, b2, b3):
    """4 sums at once: the combine function of a joint reduction."""
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def joint_sums_bf16_4_16_16_16(
    x_ptr,  # bf16 [7, 45]
    s1_ptr,  # out f32 [7]
    s2_ptr,  # out f32 [7]
    s3_ptr,  # out f32 [7]
    s4_ptr,  # out f32 [7]
    early: tl.constexpr = False,  # launched while the kernel before may still run
):
    """Sums of powers.

    Grid 2 x 1 (chunks=2); tile 2 of 7 rows (4 a program) x 45 columns as 16 + 16 + 16; num_warps=2, num_stages=1.
    """
    if early:
        _wait_for_kernel_before()
    chunk = tl.program_id(0)
    col_0 = tl.arange(0, 16)[None, :]
    col_1 = 16 + tl.arange(0, 16)[None, :]
    col_2 = 32 + tl.arange(0, 16)[None, :]
    col_mask_2 = col_2 < 45
    for first_row in range(0, 4, 2):
        row = chunk * 4 + first_row + tl.arange(0, 2)[:, None]
        row_mask = row < 7
        x_bf16_0 = tl.load(x_ptr + row * 45 + col_0, mask=row_mask, other=0.0)
        x_bf16_1 = tl.load(x_ptr + row * 45 + col_1, mask=row_mask, other=0.0)
        x_bf16_2 = tl.load(x_ptr + row * 45 + col_2, mask=row_mask & col_mask_2, other=0.0)
        x_0 = x_bf16_0.to(tl.float32)
        x_1 = x_bf16_1.to(tl.float32)
        x_2 = x_bf16_2.to(tl.float32)
        x2_0 = x_0 * x_0
        x2_1 = x_1 * x_1
        x2_2 = x_2 * x_2
        x3_0 = x2_0 * x_0
        x3_1 = x2_1 * x_1
        x3_2 = x2_2 * x_2
        x4_0 = x3_0 * x_0
        x4_1 = x3_1 * x_1
        x4_2 = x3_2 * x_2
        x_all = x_0 + x_1 + x_2
        x2_all = x2_0 + x2_1 + tl.where(col_mask_2, x2_2, 0.0)
        x3_all = x3_0 + x3_1 + tl.where(col_mask_2, x3_2, 0.0)
        x4_all = x4_0 + x4_1 + tl.where(col_mask_2, x4_2, 0.0)
        sum_x, sum_x2, sum_x3, sum_x4 = tl.reduce((x_all, x2_all, x3_all, x4_all), 1, _sum4, keep_dims=True)
        tl.store(s1_ptr + row, sum_x, mask=row_mask)
        tl.store(s2_ptr + row, sum_x2, mask=row_mask)
        tl.store(s3_ptr + row, sum_x3, mask=row_mask)
        tl.store(s4_ptr + row, sum_x4, mask=row_mask)
