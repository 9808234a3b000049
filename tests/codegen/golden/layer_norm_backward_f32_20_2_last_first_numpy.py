import numpy as np


@np.errstate(all="ignore")
def layer_norm_backward_f32_20_2_last_first(
    x_buf,  # f32 [11, 20], flat
    dy_buf,  # f32 [11, 20], flat
    mean_buf,  # f32 [11], flat
    rstd_buf,  # f32 [11], flat
    gamma_buf,  # f32 [20], flat
    dx_buf,  # out f32 [11, 20], flat
    dgamma_buf,  # out f32 [3, 20], flat
    dbeta_buf,  # out f32 [3, 20], flat
    peak_buf,  # out f32 [3], flat
):
    """Backward of layer norm over the columns."""
    for chunk in range(3):
        col = np.arange(20)[None, :]
        row = np.arange(chunk * 4, min((chunk + 1) * 4, 11))[:, None]
        # src[block.py:31]: y = norm(x)
        x = x_buf[row * 20 + col]
        dy = dy_buf[row * 20 + col]
        mean = mean_buf[row]
        rstd = rstd_buf[row]
        gamma = gamma_buf[col]
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
        dx_buf[row * 20 + col] = dx
        # partial sums for dgamma and dbeta
        dy_x_hat = dy * x_hat
        dgamma_acc = np.sum(dy_x_hat, axis=0, keepdims=True, dtype=np.float32)
        dgamma_buf[col + chunk * 20] = dgamma_acc
        dbeta_acc = np.sum(dy, axis=0, keepdims=True, dtype=np.float32)
        dbeta_buf[col + chunk * 20] = dbeta_acc
        peak_acc = np.max(rstd, axis=None)
        peak_buf[chunk] = peak_acc
