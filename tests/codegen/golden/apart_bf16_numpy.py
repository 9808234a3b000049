import ml_dtypes
import numpy as np


@np.errstate(all="ignore")
def apart_bf16(
    a_x_buf,  # bf16 [7, 150], flat
    a_y_buf,  # out bf16 [7, 150], flat
    b_x_buf,  # bf16 [11, 20], flat
    b_dy_buf,  # bf16 [11, 20], flat
    b_mean_buf,  # f32 [11], flat
    b_rstd_buf,  # f32 [11], flat
    b_gamma_buf,  # bf16 [20], flat
    b_dx_buf,  # out bf16 [11, 20], flat
    b_dgamma_buf,  # out f32 [3, 20], flat
    b_dbeta_buf,  # out f32 [3, 20], flat
    b_peak_buf,  # out f32 [3], flat
    c_x_buf,  # bf16 [5, 150], flat
    c_y_buf,  # out bf16 [5, 150], flat
    d_x_buf,  # f32 [2, 2, 6, 11], flat
    d_v_buf,  # f32 [11], flat
    d_s_buf,  # f32 [2], flat
    d_row_sum_buf,  # out f32 [2, 2, 6], flat
    d_vec_sum_buf,  # out f32 [1], flat
    d_one_sum_buf,  # out f32 [2], flat
    d_col_sum_buf,  # out f32 [2, 2, 2, 11], flat
    d_all_sum_buf,  # out f32 [2, 2, 2], flat
    d_row_max_buf,  # out f32 [2, 2, 6], flat
    d_vec_max_buf,  # out f32 [1], flat
    d_one_max_buf,  # out f32 [2], flat
    d_col_max_buf,  # out f32 [2, 2, 2, 11], flat
    d_all_max_buf,  # out f32 [2, 2, 2], flat
    d_row_min_buf,  # out f32 [2, 2, 6], flat
    d_vec_min_buf,  # out f32 [1], flat
    d_one_min_buf,  # out f32 [2], flat
    d_col_min_buf,  # out f32 [2, 2, 2, 11], flat
    d_all_min_buf,  # out f32 [2, 2, 2], flat
    d_row_prod_buf,  # out f32 [2, 2, 6], flat
    d_vec_prod_buf,  # out f32 [1], flat
    d_one_prod_buf,  # out f32 [2], flat
    d_col_prod_buf,  # out f32 [2, 2, 2, 11], flat
    d_all_prod_buf,  # out f32 [2, 2, 2], flat
):
    """Four kernels side by side."""

    # a_softmax
    col = np.arange(150)[None, :]
    for start in range(0, 7, 3495):
        row = np.arange(start, min(start + 3495, 7))[:, None]
        x_bf16 = a_x_buf[row * 150 + col]
        x = x_bf16.astype(np.float32)
        peak = np.max(x, axis=1, keepdims=True)
        x_bf16 = a_x_buf[row * 150 + col]
        x = x_bf16.astype(np.float32)
        shifted = x - peak
        e = np.exp(shifted)
        total = np.sum(e, axis=1, keepdims=True, dtype=np.float32)
        scale = 1.0 / total
        x_bf16 = a_x_buf[row * 150 + col]
        x = x_bf16.astype(np.float32)
        shifted = x - peak
        e = np.exp(shifted)
        y = e * scale
        y_out = y.astype(ml_dtypes.bfloat16)
        a_y_buf[row * 150 + col] = y_out

    # b_backward
    for chunk in range(3):
        col = np.arange(20)[None, :]
        row = np.arange(chunk * 4, min((chunk + 1) * 4, 11))[:, None]
        # src[block.py:31]: y = norm(x)
        x_bf16 = b_x_buf[row * 20 + col]
        x = x_bf16.astype(np.float32)
        dy_bf16 = b_dy_buf[row * 20 + col]
        dy = dy_bf16.astype(np.float32)
        mean = b_mean_buf[row]
        rstd = b_rstd_buf[row]
        gamma_bf16 = b_gamma_buf[col]
        gamma = gamma_bf16.astype(np.float32)
        diff = x - mean
        x_hat = diff * rstd
        g = dy * gamma
        g_x_hat = g * x_hat
        sum_g = np.sum(g, axis=1, keepdims=True, dtype=np.float32)
        sum_gx = np.sum(g_x_hat, axis=1, keepdims=True, dtype=np.float32)
        mean_g = sum_g * 0.05
        mean_gx = sum_gx * 0.05
        part = x_hat * mean_gx
        rest = g - mean_g
        inner = rest - part
        dx = inner * rstd
        dx_out = dx.astype(ml_dtypes.bfloat16)
        b_dx_buf[row * 20 + col] = dx_out
        # partial sums for dgamma and dbeta
        dy_x_hat = dy * x_hat
        dgamma_acc = np.sum(dy_x_hat, axis=0, keepdims=True, dtype=np.float32)
        b_dgamma_buf[col + chunk * 20] = dgamma_acc
        dbeta_acc = np.sum(dy, axis=0, keepdims=True, dtype=np.float32)
        b_dbeta_buf[col + chunk * 20] = dbeta_acc
        peak_acc = np.max(rstd, axis=None)
        b_peak_buf[chunk] = peak_acc

    # c_gelu
    col = np.arange(150)[None, :]
    for start in range(0, 5, 3495):
        row = np.arange(start, min(start + 3495, 5))[:, None]
        x_bf16 = c_x_buf[row * 150 + col]
        x = x_bf16.astype(np.float32)
        x2 = x * x
        x3 = x2 * x
        cubic = x3 * 0.044715
        poly = x + cubic
        arg = poly * 0.7978845608028654
        t = np.tanh(arg)
        t1 = t + 1.0
        half = x * 0.5
        y = half * t1
        y_out = y.astype(ml_dtypes.bfloat16)
        c_y_buf[row * 150 + col] = y_out

    # d_reduce
    for pid in range(8):
        fixed = pid // 2
        chunk = pid % 2
        col = np.arange(11)[None, :]
        row = np.arange(chunk * 4, min((chunk + 1) * 4, 6))[:, None]
        x = d_x_buf[fixed * 66 + row * 11 + col]
        v = d_v_buf[col]
        s = d_s_buf[fixed // 2]
        x_sum = np.sum(x, axis=1, keepdims=True, dtype=np.float32)
        d_row_sum_buf[fixed * 6 + row] = x_sum
        v_sum = np.sum(v, axis=None, dtype=np.float32)
        d_vec_sum_buf[0] = v_sum
        s_sum = s * 11.0
        d_one_sum_buf[fixed // 2] = s_sum
        c_sum = np.sum(x, axis=0, keepdims=True, dtype=np.float32)
        d_col_sum_buf[fixed * 22 + col + chunk * 11] = c_sum
        r_sum = np.sum(x_sum, axis=None, dtype=np.float32)
        d_all_sum_buf[fixed * 2 + chunk] = r_sum
        x_max = np.max(x, axis=1, keepdims=True)
        d_row_max_buf[fixed * 6 + row] = x_max
        v_max = np.max(v, axis=None)
        d_vec_max_buf[0] = v_max
        s_max = s
        d_one_max_buf[fixed // 2] = s_max
        c_max = np.max(x, axis=0, keepdims=True)
        d_col_max_buf[fixed * 22 + col + chunk * 11] = c_max
        r_max = np.max(x_max, axis=None)
        d_all_max_buf[fixed * 2 + chunk] = r_max
        x_min = np.min(x, axis=1, keepdims=True)
        d_row_min_buf[fixed * 6 + row] = x_min
        v_min = np.min(v, axis=None)
        d_vec_min_buf[0] = v_min
        s_min = s
        d_one_min_buf[fixed // 2] = s_min
        c_min = np.min(x, axis=0, keepdims=True)
        d_col_min_buf[fixed * 22 + col + chunk * 11] = c_min
        r_min = np.min(x_min, axis=None)
        d_all_min_buf[fixed * 2 + chunk] = r_min
        x_prod = np.prod(x, axis=1, keepdims=True, dtype=np.float32)
        d_row_prod_buf[fixed * 6 + row] = x_prod
        v_prod = np.prod(v, axis=None, dtype=np.float32)
        d_vec_prod_buf[0] = v_prod
        s_prod = np.prod(np.broadcast_to(s, (1, 11)), axis=None, dtype=np.float32)
        d_one_prod_buf[fixed // 2] = s_prod
        c_prod = np.prod(x, axis=0, keepdims=True, dtype=np.float32)
        d_col_prod_buf[fixed * 22 + col + chunk * 11] = c_prod
        r_prod = np.prod(x_prod, axis=None, dtype=np.float32)
        d_all_prod_buf[fixed * 2 + chunk] = r_prod
