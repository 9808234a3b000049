import triton
import triton.language as tl


@triton.jit
def _wait_for_kernel_before():
    """Wait until the kernel launched before this one has ended, and what it wrote can be read (sm_90 and later)."""
    tl.inline_asm_elementwise("griddepcontrol.wait;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _max(a, b):
    """The larger of two; NaN if either is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _sum2(a0, a1, b0, b1):
    """2 sums at once: the combine function of a joint reduction."""
    return a0 + b0, a1 + b1


@triton.jit
def layer_norm_backward_f32_20_2_last_first(
    x_ptr,  # f32 [11, 20]
    dy_ptr,  # f32 [11, 20]
    mean_ptr,  # f32 [11]
    rstd_ptr,  # f32 [11]
    gamma_ptr,  # f32 [20]
    dx_ptr,  # out f32 [11, 20]
    dgamma_ptr,  # out f32 [3, 20]
    dbeta_ptr,  # out f32 [3, 20]
    peak_ptr,  # out f32 [3]
    early: tl.constexpr = False,  # launched while the kernel before may still run
):
    """Backward of layer norm over the columns.

    Grid 3 x 1 (chunks=3), the last rows first; tile 2 of 11 rows (4 a program) x 20 columns as 16 + 4; num_warps=8,
    num_stages=1.
    """
    if early:
        _wait_for_kernel_before()
    chunk = tl.num_programs(0) - 1 - tl.program_id(0)
    col_0 = tl.arange(0, 16)[None, :]
    col_1 = 16 + tl.arange(0, 4)[None, :]
    # src[block.py:31]: y = norm(x)
    gamma_0 = tl.load(gamma_ptr + col_0)
    gamma_1 = tl.load(gamma_ptr + col_1)
    dgamma_acc_0 = tl.zeros([2, 16], tl.float32)
    dgamma_acc_1 = tl.zeros([2, 4], tl.float32)
    dbeta_acc_0 = tl.zeros([2, 16], tl.float32)
    dbeta_acc_1 = tl.zeros([2, 4], tl.float32)
    peak_acc = tl.full([2, 1], float("-inf"), tl.float32)
    for first_row in range(0, 4, 2):
        row = chunk * 4 + first_row + tl.arange(0, 2)[:, None]
        row_mask = row < 11
        # src[block.py:31]: y = norm(x)
        x_0 = tl.load(x_ptr + row * 20 + col_0, mask=row_mask, other=0.0)
        x_1 = tl.load(x_ptr + row * 20 + col_1, mask=row_mask, other=0.0)
        dy_0 = tl.load(dy_ptr + row * 20 + col_0, mask=row_mask, other=0.0)
        dy_1 = tl.load(dy_ptr + row * 20 + col_1, mask=row_mask, other=0.0)
        mean = tl.load(mean_ptr + row, mask=row_mask, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=row_mask, other=0.0)
        diff_0 = x_0 - mean
        diff_1 = x_1 - mean
        x_hat_0 = diff_0 * rstd
        x_hat_1 = diff_1 * rstd
        g_0 = dy_0 * gamma_0
        g_1 = dy_1 * gamma_1
        g_x_hat_0 = g_0 * x_hat_0
        g_x_hat_1 = g_1 * x_hat_1
        sum_g_part, sum_gx_part = tl.reduce((g_0, g_x_hat_0), 1, _sum2, keep_dims=True)
        sum_g_part_v2, sum_gx_part_v2 = tl.reduce((g_1, g_x_hat_1), 1, _sum2, keep_dims=True)
        sum_g = sum_g_part + sum_g_part_v2
        sum_gx = sum_gx_part + sum_gx_part_v2
        mean_g = sum_g * 0.05
        mean_gx = sum_gx * 0.05
        part_0 = x_hat_0 * mean_gx
        part_1 = x_hat_1 * mean_gx
        rest_0 = g_0 - mean_g
        rest_1 = g_1 - mean_g
        inner_0 = rest_0 - part_0
        inner_1 = rest_1 - part_1
        dx_0 = inner_0 * rstd
        dx_1 = inner_1 * rstd
        tl.store(dx_ptr + row * 20 + col_0, dx_0, mask=row_mask)
        tl.store(dx_ptr + row * 20 + col_1, dx_1, mask=row_mask)
        # partial sums for dgamma and dbeta
        dy_x_hat_0 = dy_0 * x_hat_0
        dy_x_hat_1 = dy_1 * x_hat_1
        dgamma_acc_0 += tl.where(row_mask, dy_x_hat_0, 0.0)
        dgamma_acc_1 += tl.where(row_mask, dy_x_hat_1, 0.0)
        dbeta_acc_0 += tl.where(row_mask, dy_0, 0.0)
        dbeta_acc_1 += tl.where(row_mask, dy_1, 0.0)
        peak_acc = _max(peak_acc, tl.where(row_mask, rstd, float("-inf")))
    dgamma_acc_total_0 = tl.sum(dgamma_acc_0, 0, keep_dims=True)
    tl.store(dgamma_ptr + chunk * 20 + col_0, dgamma_acc_total_0)
    dgamma_acc_total_1 = tl.sum(dgamma_acc_1, 0, keep_dims=True)
    tl.store(dgamma_ptr + chunk * 20 + col_1, dgamma_acc_total_1)
    dbeta_acc_total_0 = tl.sum(dbeta_acc_0, 0, keep_dims=True)
    tl.store(dbeta_ptr + chunk * 20 + col_0, dbeta_acc_total_0)
    dbeta_acc_total_1 = tl.sum(dbeta_acc_1, 0, keep_dims=True)
    tl.store(dbeta_ptr + chunk * 20 + col_1, dbeta_acc_total_1)
    peak_acc_total = tl.reduce(peak_acc, None, _max)
    tl.store(peak_ptr + chunk, peak_acc_total)
