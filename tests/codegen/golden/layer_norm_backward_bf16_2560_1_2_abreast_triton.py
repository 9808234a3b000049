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
def _sum4(a0, a1, a2, a3, b0, b1, b2, b3):
    """4 sums at once: the combine function of a joint reduction."""
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def layer_norm_backward_bf16_2560_1_2_abreast(
    x_ptr,  # bf16 [10, 2560]
    dy_ptr,  # bf16 [10, 2560]
    mean_ptr,  # f32 [10]
    rstd_ptr,  # f32 [10]
    gamma_ptr,  # bf16 [2560]
    dx_ptr,  # out bf16 [10, 2560]
    dgamma_ptr,  # out f32 [3, 2560]
    dbeta_ptr,  # out f32 [3, 2560]
    peak_ptr,  # out f32 [3]
    early: tl.constexpr = False,  # launched while the kernel before may still run
):
    """Backward of layer norm over the columns.

    Grid 3 x 1 (chunks=3); tile 2 abreast of 10 rows (4 a program) x 2560 columns as 2048 + 512; num_warps=8,
    num_stages=2.
    """
    if early:
        _wait_for_kernel_before()
    chunk = tl.program_id(0)
    col_0 = tl.arange(0, 2048)
    col_1 = 2048 + tl.arange(0, 512)
    # src[block.py:31]: y = norm(x)
    gamma_bf16_0 = tl.load(gamma_ptr + col_0)
    gamma_bf16_1 = tl.load(gamma_ptr + col_1)
    gamma_0 = gamma_bf16_0.to(tl.float32)
    gamma_1 = gamma_bf16_1.to(tl.float32)
    dgamma_acc_0 = tl.zeros([2048], tl.float32)
    dgamma_acc_1 = tl.zeros([512], tl.float32)
    dbeta_acc_0 = tl.zeros([2048], tl.float32)
    dbeta_acc_1 = tl.zeros([512], tl.float32)
    peak_acc = tl.full((), float("-inf"), tl.float32)
    for first_row in tl.range(0, 4, 2, num_stages=2):
        row = chunk * 4 + first_row
        row_mask = row < 10
        # src[block.py:31]: y = norm(x)
        x_bf16_0 = tl.load(x_ptr + row * 2560 + col_0, mask=row_mask, other=0.0)
        x_bf16_1 = tl.load(x_ptr + row * 2560 + col_1, mask=row_mask, other=0.0)
        x_bf16_row1_0 = tl.load(x_ptr + row * 2560 + col_0 + 2560, mask=row_mask, other=0.0)
        x_bf16_row1_1 = tl.load(x_ptr + row * 2560 + col_1 + 2560, mask=row_mask, other=0.0)
        x_0 = x_bf16_0.to(tl.float32)
        x_1 = x_bf16_1.to(tl.float32)
        x_row1_0 = x_bf16_row1_0.to(tl.float32)
        x_row1_1 = x_bf16_row1_1.to(tl.float32)
        dy_bf16_0 = tl.load(dy_ptr + row * 2560 + col_0, mask=row_mask, other=0.0)
        dy_bf16_1 = tl.load(dy_ptr + row * 2560 + col_1, mask=row_mask, other=0.0)
        dy_bf16_row1_0 = tl.load(dy_ptr + row * 2560 + col_0 + 2560, mask=row_mask, other=0.0)
        dy_bf16_row1_1 = tl.load(dy_ptr + row * 2560 + col_1 + 2560, mask=row_mask, other=0.0)
        dy_0 = dy_bf16_0.to(tl.float32)
        dy_1 = dy_bf16_1.to(tl.float32)
        dy_row1_0 = dy_bf16_row1_0.to(tl.float32)
        dy_row1_1 = dy_bf16_row1_1.to(tl.float32)
        mean = tl.load(mean_ptr + row, mask=row_mask, other=0.0)
        mean_row1 = tl.load(mean_ptr + row + 1, mask=row_mask, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=row_mask, other=0.0)
        rstd_row1 = tl.load(rstd_ptr + row + 1, mask=row_mask, other=0.0)
        diff_0 = x_0 - mean
        diff_1 = x_1 - mean
        diff_row1_0 = x_row1_0 - mean_row1
        diff_row1_1 = x_row1_1 - mean_row1
        x_hat_0 = diff_0 * rstd
        x_hat_1 = diff_1 * rstd
        x_hat_row1_0 = diff_row1_0 * rstd_row1
        x_hat_row1_1 = diff_row1_1 * rstd_row1
        g_0 = dy_0 * gamma_0
        g_1 = dy_1 * gamma_1
        g_row1_0 = dy_row1_0 * gamma_0
        g_row1_1 = dy_row1_1 * gamma_1
        g_x_hat_0 = g_0 * x_hat_0
        g_x_hat_1 = g_1 * x_hat_1
        g_x_hat_row1_0 = g_row1_0 * x_hat_row1_0
        g_x_hat_row1_1 = g_row1_1 * x_hat_row1_1
        g_all = tl.sum(tl.reshape(g_0, [512, 4]), 1) + g_1
        g_row1_all = tl.sum(tl.reshape(g_row1_0, [512, 4]), 1) + g_row1_1
        g_x_hat_all = tl.sum(tl.reshape(g_x_hat_0, [512, 4]), 1) + g_x_hat_1
        g_x_hat_row1_all = tl.sum(tl.reshape(g_x_hat_row1_0, [512, 4]), 1) + g_x_hat_row1_1
        sum_g, sum_g_row1, sum_gx, sum_gx_row1 = tl.reduce((g_all, g_row1_all, g_x_hat_all, g_x_hat_row1_all), 0, _sum4)
        mean_g = sum_g * 0.000390625
        mean_g_row1 = sum_g_row1 * 0.000390625
        mean_gx = sum_gx * 0.000390625
        mean_gx_row1 = sum_gx_row1 * 0.000390625
        part_0 = x_hat_0 * mean_gx
        part_1 = x_hat_1 * mean_gx
        part_row1_0 = x_hat_row1_0 * mean_gx_row1
        part_row1_1 = x_hat_row1_1 * mean_gx_row1
        rest_0 = g_0 - mean_g
        rest_1 = g_1 - mean_g
        rest_row1_0 = g_row1_0 - mean_g_row1
        rest_row1_1 = g_row1_1 - mean_g_row1
        inner_0 = rest_0 - part_0
        inner_1 = rest_1 - part_1
        inner_row1_0 = rest_row1_0 - part_row1_0
        inner_row1_1 = rest_row1_1 - part_row1_1
        dx_0 = inner_0 * rstd
        dx_1 = inner_1 * rstd
        dx_row1_0 = inner_row1_0 * rstd_row1
        dx_row1_1 = inner_row1_1 * rstd_row1
        dx_out_0 = dx_0.to(tl.bfloat16)
        dx_out_1 = dx_1.to(tl.bfloat16)
        dx_out_row1_0 = dx_row1_0.to(tl.bfloat16)
        dx_out_row1_1 = dx_row1_1.to(tl.bfloat16)
        tl.store(dx_ptr + row * 2560 + col_0, dx_out_0, mask=row_mask)
        tl.store(dx_ptr + row * 2560 + col_1, dx_out_1, mask=row_mask)
        tl.store(dx_ptr + row * 2560 + col_0 + 2560, dx_out_row1_0, mask=row_mask)
        tl.store(dx_ptr + row * 2560 + col_1 + 2560, dx_out_row1_1, mask=row_mask)
        # partial sums for dgamma and dbeta
        dy_x_hat_0 = dy_0 * x_hat_0
        dy_x_hat_1 = dy_1 * x_hat_1
        dy_x_hat_row1_0 = dy_row1_0 * x_hat_row1_0
        dy_x_hat_row1_1 = dy_row1_1 * x_hat_row1_1
        dgamma_acc_0 += tl.where(row_mask, dy_x_hat_0, 0.0)
        dgamma_acc_1 += tl.where(row_mask, dy_x_hat_1, 0.0)
        dgamma_acc_0 += tl.where(row_mask, dy_x_hat_row1_0, 0.0)
        dgamma_acc_1 += tl.where(row_mask, dy_x_hat_row1_1, 0.0)
        dbeta_acc_0 += tl.where(row_mask, dy_0, 0.0)
        dbeta_acc_1 += tl.where(row_mask, dy_1, 0.0)
        dbeta_acc_0 += tl.where(row_mask, dy_row1_0, 0.0)
        dbeta_acc_1 += tl.where(row_mask, dy_row1_1, 0.0)
        peak_acc = _max(peak_acc, tl.where(row_mask, rstd, float("-inf")))
        peak_acc = _max(peak_acc, tl.where(row_mask, rstd_row1, float("-inf")))
    dgamma_acc_total_0 = dgamma_acc_0
    tl.store(dgamma_ptr + chunk * 2560 + col_0, dgamma_acc_total_0)
    dgamma_acc_total_1 = dgamma_acc_1
    tl.store(dgamma_ptr + chunk * 2560 + col_1, dgamma_acc_total_1)
    dbeta_acc_total_0 = dbeta_acc_0
    tl.store(dbeta_ptr + chunk * 2560 + col_0, dbeta_acc_total_0)
    dbeta_acc_total_1 = dbeta_acc_1
    tl.store(dbeta_ptr + chunk * 2560 + col_1, dbeta_acc_total_1)
    peak_acc_total = peak_acc
    tl.store(peak_ptr + chunk, peak_acc_total)
