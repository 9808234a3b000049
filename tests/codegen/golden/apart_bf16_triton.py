import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def _wait_for_kernel_before():
    """Wait until the kernel launched before this one has ended, and what it wrote can be read (sm_90 and later)."""
    tl.inline_asm_elementwise("griddepcontrol.wait;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _exp(x):
    """e**x = 2**(x * log2(e)) with a relative error below 2**-22 + |x| * 2**-23; below 2**-126 it is 0."""
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * 1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _sigmoid(x):
    """1 / (1 + e**-x) with the error of e**-x and of two roundings; below 2**-126 it is 0."""
    return tl.inline_asm_elementwise(
        "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000; "
        "rcp.approx.ftz.f32 $0, t; }",
        "=f,f",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _one_plus_tanh(x):
    """1 + tanh(x) = 2 / (1 + e**(-2 x)), with the error of that power and of two roundings."""
    return 2.0 * _sigmoid(2.0 * x)


@triton.jit
def _max(a, b):
    """The larger of two; NaN if either is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _min(a, b):
    """The smaller of two; NaN if either is NaN."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _prod(a, b):
    """Product of two: the combine function of a product reduction."""
    return a * b


@triton.jit
def _sum2(a0, a1, b0, b1):
    """2 sums at once: the combine function of a joint reduction."""
    return a0 + b0, a1 + b1


@triton.jit
def apart_bf16(
    a_x_ptr,  # bf16 [7, 150]
    a_y_ptr,  # out bf16 [7, 150]
    b_x_ptr,  # bf16 [11, 20]
    b_dy_ptr,  # bf16 [11, 20]
    b_mean_ptr,  # f32 [11]
    b_rstd_ptr,  # f32 [11]
    b_gamma_ptr,  # bf16 [20]
    b_dx_ptr,  # out bf16 [11, 20]
    b_dgamma_ptr,  # out f32 [3, 20]
    b_dbeta_ptr,  # out f32 [3, 20]
    b_peak_ptr,  # out f32 [3]
    c_x_ptr,  # bf16 [5, 150]
    c_y_ptr,  # out bf16 [5, 150]
    d_x_ptr,  # f32 [2, 2, 6, 11]
    d_v_ptr,  # f32 [11]
    d_s_ptr,  # f32 [2]
    d_row_sum_ptr,  # out f32 [2, 2, 6]
    d_vec_sum_ptr,  # out f32 [1]
    d_one_sum_ptr,  # out f32 [2]
    d_col_sum_ptr,  # out f32 [2, 2, 2, 11]
    d_all_sum_ptr,  # out f32 [2, 2, 2]
    d_row_max_ptr,  # out f32 [2, 2, 6]
    d_vec_max_ptr,  # out f32 [1]
    d_one_max_ptr,  # out f32 [2]
    d_col_max_ptr,  # out f32 [2, 2, 2, 11]
    d_all_max_ptr,  # out f32 [2, 2, 2]
    d_row_min_ptr,  # out f32 [2, 2, 6]
    d_vec_min_ptr,  # out f32 [1]
    d_one_min_ptr,  # out f32 [2]
    d_col_min_ptr,  # out f32 [2, 2, 2, 11]
    d_all_min_ptr,  # out f32 [2, 2, 2]
    d_row_prod_ptr,  # out f32 [2, 2, 6]
    d_vec_prod_ptr,  # out f32 [1]
    d_one_prod_ptr,  # out f32 [2]
    d_col_prod_ptr,  # out f32 [2, 2, 2, 11]
    d_all_prod_ptr,  # out f32 [2, 2, 2]
    early: tl.constexpr = False,  # launched while the kernel before may still run
):
    """Four kernels side by side.

    Grid 22 x 1, in 4 parts; tiles 2 of 7 rows (4 a program) x 150 columns in blocks of 64; 2 of 11 rows (4 a program) x
    20 columns as 16 + 4; 2 of 5 rows x 64 of 150 columns; 4 of 6 rows x 11 columns as 8 + 4; num_warps=8, num_stages=1.
    """
    if early:
        _wait_for_kernel_before()
    pid = tl.program_id(0)

    # Programs 0 to 1: a_softmax
    if pid < 2:
        chunk = pid
        for first_row in range(0, 4, 2):
            row = chunk * 4 + first_row + tl.arange(0, 2)[:, None]
            row_mask = row < 7
            peak_acc = tl.full([2, 64], float("-inf"), tl.float32)
            for first_col in range(0, 150, 64):
                col = first_col + tl.arange(0, 64)[None, :]
                col_mask = col < 150
                x_bf16 = tl.load(a_x_ptr + row * 150 + col, mask=row_mask & col_mask, other=0.0)
                x = x_bf16.to(tl.float32)
                peak_acc = _max(peak_acc, tl.where(col_mask, x, float("-inf")))
            peak = tl.reduce(peak_acc, 1, _max, keep_dims=True)
            total_acc = tl.zeros([2, 64], tl.float32)
            for first_col in range(0, 150, 64):
                col = first_col + tl.arange(0, 64)[None, :]
                col_mask = col < 150
                x_bf16 = tl.load(a_x_ptr + row * 150 + col, mask=row_mask & col_mask, other=0.0)
                x = x_bf16.to(tl.float32)
                shifted = x - peak
                e = _exp(shifted)
                total_acc += tl.where(col_mask, e, 0.0)
            total = tl.sum(total_acc, 1, keep_dims=True)
            scale = tl.math.div_rn(1.0, total)
            for first_col in range(0, 150, 64):
                col = first_col + tl.arange(0, 64)[None, :]
                col_mask = col < 150
                x_bf16 = tl.load(a_x_ptr + row * 150 + col, mask=row_mask & col_mask, other=0.0)
                x = x_bf16.to(tl.float32)
                shifted = x - peak
                e = _exp(shifted)
                y = e * scale
                y_out = y.to(tl.bfloat16)
                tl.store(a_y_ptr + row * 150 + col, y_out, mask=row_mask & col_mask)

    # Programs 2 to 4: b_backward
    if (pid >= 2) & (pid < 5):
        chunk = pid - 2
        col_0 = tl.arange(0, 16)[None, :]
        col_1 = 16 + tl.arange(0, 4)[None, :]
        # src[block.py:31]: y = norm(x)
        gamma_bf16_0 = tl.load(b_gamma_ptr + col_0)
        gamma_bf16_1 = tl.load(b_gamma_ptr + col_1)
        gamma_0 = gamma_bf16_0.to(tl.float32)
        gamma_1 = gamma_bf16_1.to(tl.float32)
        dgamma_acc_0 = tl.zeros([2, 16], tl.float32)
        dgamma_acc_1 = tl.zeros([2, 4], tl.float32)
        dbeta_acc_0 = tl.zeros([2, 16], tl.float32)
        dbeta_acc_1 = tl.zeros([2, 4], tl.float32)
        peak_acc = tl.full([2, 1], float("-inf"), tl.float32)
        for first_row in range(0, 4, 2):
            row = chunk * 4 + first_row + tl.arange(0, 2)[:, None]
            row_mask = row < 11
            # src[block.py:31]: y = norm(x)
            x_bf16_0 = tl.load(b_x_ptr + row * 20 + col_0, mask=row_mask, other=0.0)
            x_bf16_1 = tl.load(b_x_ptr + row * 20 + col_1, mask=row_mask, other=0.0)
            x_0 = x_bf16_0.to(tl.float32)
            x_1 = x_bf16_1.to(tl.float32)
            dy_bf16_0 = tl.load(b_dy_ptr + row * 20 + col_0, mask=row_mask, other=0.0)
            dy_bf16_1 = tl.load(b_dy_ptr + row * 20 + col_1, mask=row_mask, other=0.0)
            dy_0 = dy_bf16_0.to(tl.float32)
            dy_1 = dy_bf16_1.to(tl.float32)
            mean = tl.load(b_mean_ptr + row, mask=row_mask, other=0.0)
            rstd = tl.load(b_rstd_ptr + row, mask=row_mask, other=0.0)
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
            dx_out_0 = dx_0.to(tl.bfloat16)
            dx_out_1 = dx_1.to(tl.bfloat16)
            tl.store(b_dx_ptr + row * 20 + col_0, dx_out_0, mask=row_mask)
            tl.store(b_dx_ptr + row * 20 + col_1, dx_out_1, mask=row_mask)
            # partial sums for dgamma and dbeta
            dy_x_hat_0 = dy_0 * x_hat_0
            dy_x_hat_1 = dy_1 * x_hat_1
            dgamma_acc_0 += tl.where(row_mask, dy_x_hat_0, 0.0)
            dgamma_acc_1 += tl.where(row_mask, dy_x_hat_1, 0.0)
            dbeta_acc_0 += tl.where(row_mask, dy_0, 0.0)
            dbeta_acc_1 += tl.where(row_mask, dy_1, 0.0)
            peak_acc = _max(peak_acc, tl.where(row_mask, rstd, float("-inf")))
        dgamma_acc_total_0 = tl.sum(dgamma_acc_0, 0, keep_dims=True)
        tl.store(b_dgamma_ptr + chunk * 20 + col_0, dgamma_acc_total_0)
        dgamma_acc_total_1 = tl.sum(dgamma_acc_1, 0, keep_dims=True)
        tl.store(b_dgamma_ptr + chunk * 20 + col_1, dgamma_acc_total_1)
        dbeta_acc_total_0 = tl.sum(dbeta_acc_0, 0, keep_dims=True)
        tl.store(b_dbeta_ptr + chunk * 20 + col_0, dbeta_acc_total_0)
        dbeta_acc_total_1 = tl.sum(dbeta_acc_1, 0, keep_dims=True)
        tl.store(b_dbeta_ptr + chunk * 20 + col_1, dbeta_acc_total_1)
        peak_acc_total = tl.reduce(peak_acc, None, _max)
        tl.store(b_peak_ptr + chunk, peak_acc_total)

    # Programs 5 to 13: c_gelu
    if (pid >= 5) & (pid < 14):
        chunk = (pid - 5) // 3
        col = ((pid - 5) % 3) * 64 + tl.arange(0, 64)[None, :]
        col_mask = col < 150
        row = chunk * 2 + tl.arange(0, 2)[:, None]
        row_mask = row < 5
        x_bf16 = tl.load(c_x_ptr + row * 150 + col, mask=row_mask & col_mask, other=0.0)
        x = x_bf16.to(tl.float32)
        x2 = x * x
        x3 = x2 * x
        cubic = x3 * 0.044715
        poly = x + cubic
        arg = poly * 0.7978845608028654
        t1 = _one_plus_tanh(arg)
        half = x * 0.5
        y = half * t1
        y_out = y.to(tl.bfloat16)
        tl.store(c_y_ptr + row * 150 + col, y_out, mask=row_mask & col_mask)

    # Programs 14 to 21: d_reduce
    if (pid >= 14) & (pid < 22):
        pid_v2 = pid - 14
        chunk = pid_v2 % 2
        fixed = pid_v2 // 2
        f = fixed // 2
        col_0 = tl.arange(0, 8)[None, :]
        col_1 = 8 + tl.arange(0, 4)[None, :]
        col_mask_1 = col_1 < 11
        row = chunk * 4 + tl.arange(0, 4)[:, None]
        row_mask = row < 6
        x_0 = tl.load(d_x_ptr + fixed * 66 + row * 11 + col_0, mask=row_mask, other=0.0)
        x_1 = tl.load(d_x_ptr + fixed * 66 + row * 11 + col_1, mask=row_mask & col_mask_1, other=0.0)
        v_0 = tl.load(d_v_ptr + col_0)
        v_1 = tl.load(d_v_ptr + col_1, mask=col_mask_1, other=0.0)
        s = tl.load(d_s_ptr + f)
        x_sum = tl.sum(x_0, 1, keep_dims=True) + tl.sum(x_1, 1, keep_dims=True)
        tl.store(d_row_sum_ptr + fixed * 6 + row, x_sum, mask=row_mask)
        v_sum = tl.sum(v_0) + tl.sum(v_1)
        tl.store(d_vec_sum_ptr, v_sum)
        s_sum = s * 11.0
        tl.store(d_one_sum_ptr + f, s_sum)
        c_sum_total_0 = tl.sum(tl.where(row_mask, x_0, 0.0), 0, keep_dims=True)
        tl.store(d_col_sum_ptr + fixed * 22 + chunk * 11 + col_0, c_sum_total_0)
        c_sum_total_1 = tl.sum(tl.where(row_mask, x_1, 0.0), 0, keep_dims=True)
        tl.store(d_col_sum_ptr + fixed * 22 + chunk * 11 + col_1, c_sum_total_1, mask=col_mask_1)
        r_sum_total = tl.sum(tl.where(row_mask, x_sum, 0.0))
        tl.store(d_all_sum_ptr + fixed * 2 + chunk, r_sum_total)
        x_max_part_0 = tl.reduce(x_0, 1, _max, keep_dims=True)
        x_max_part_1 = tl.reduce(tl.where(col_mask_1, x_1, float("-inf")), 1, _max, keep_dims=True)
        x_max = _max(x_max_part_0, x_max_part_1)
        tl.store(d_row_max_ptr + fixed * 6 + row, x_max, mask=row_mask)
        v_max = _max(tl.reduce(v_0, None, _max), tl.reduce(tl.where(col_mask_1, v_1, float("-inf")), None, _max))
        tl.store(d_vec_max_ptr, v_max)
        s_max = s
        tl.store(d_one_max_ptr + f, s_max)
        c_max_total_0 = tl.reduce(tl.where(row_mask, x_0, float("-inf")), 0, _max, keep_dims=True)
        tl.store(d_col_max_ptr + fixed * 22 + chunk * 11 + col_0, c_max_total_0)
        c_max_total_1 = tl.reduce(tl.where(row_mask, x_1, float("-inf")), 0, _max, keep_dims=True)
        tl.store(d_col_max_ptr + fixed * 22 + chunk * 11 + col_1, c_max_total_1, mask=col_mask_1)
        r_max_total = tl.reduce(tl.where(row_mask, x_max, float("-inf")), None, _max)
        tl.store(d_all_max_ptr + fixed * 2 + chunk, r_max_total)
        x_min_part_0 = tl.reduce(x_0, 1, _min, keep_dims=True)
        x_min_part_1 = tl.reduce(tl.where(col_mask_1, x_1, float("inf")), 1, _min, keep_dims=True)
        x_min = _min(x_min_part_0, x_min_part_1)
        tl.store(d_row_min_ptr + fixed * 6 + row, x_min, mask=row_mask)
        v_min = _min(tl.reduce(v_0, None, _min), tl.reduce(tl.where(col_mask_1, v_1, float("inf")), None, _min))
        tl.store(d_vec_min_ptr, v_min)
        s_min = s
        tl.store(d_one_min_ptr + f, s_min)
        c_min_total_0 = tl.reduce(tl.where(row_mask, x_0, float("inf")), 0, _min, keep_dims=True)
        tl.store(d_col_min_ptr + fixed * 22 + chunk * 11 + col_0, c_min_total_0)
        c_min_total_1 = tl.reduce(tl.where(row_mask, x_1, float("inf")), 0, _min, keep_dims=True)
        tl.store(d_col_min_ptr + fixed * 22 + chunk * 11 + col_1, c_min_total_1, mask=col_mask_1)
        r_min_total = tl.reduce(tl.where(row_mask, x_min, float("inf")), None, _min)
        tl.store(d_all_min_ptr + fixed * 2 + chunk, r_min_total)
        x_prod_part_0 = tl.reduce(x_0, 1, _prod, keep_dims=True)
        x_prod_part_1 = tl.reduce(tl.where(col_mask_1, x_1, 1.0), 1, _prod, keep_dims=True)
        x_prod = x_prod_part_0 * x_prod_part_1
        tl.store(d_row_prod_ptr + fixed * 6 + row, x_prod, mask=row_mask)
        v_prod = tl.reduce(v_0, None, _prod) * tl.reduce(tl.where(col_mask_1, v_1, 1.0), None, _prod)
        tl.store(d_vec_prod_ptr, v_prod)
        s_prod = libdevice.pow(s, 11.0)
        tl.store(d_one_prod_ptr + f, s_prod)
        c_prod_total_0 = tl.reduce(tl.where(row_mask, x_0, 1.0), 0, _prod, keep_dims=True)
        tl.store(d_col_prod_ptr + fixed * 22 + chunk * 11 + col_0, c_prod_total_0)
        c_prod_total_1 = tl.reduce(tl.where(row_mask, x_1, 1.0), 0, _prod, keep_dims=True)
        tl.store(d_col_prod_ptr + fixed * 22 + chunk * 11 + col_1, c_prod_total_1, mask=col_mask_1)
        r_prod_total = tl.reduce(tl.where(row_mask, x_prod, 1.0), None, _prod)
        tl.store(d_all_prod_ptr + fixed * 2 + chunk, r_prod_total)
