import ml_dtypes
import numpy as np


@np.errstate(all="ignore")
def layer_norm_bf16_1280(
    x_buf,  # bf16 [7, 1280], flat
    gamma_buf,  # bf16 [1280], flat
    beta_buf,  # bf16 [1280], flat
    y_buf,  # out bf16 [7, 1280], flat
    mean_buf,  # out f32 [7], flat
    rstd_buf,  # out f32 [7], flat
):
    """Layer norm over the columns.

    y = (x - mean) * rstd * gamma + beta
    """
    col = np.arange(1280)[None, :]
    for start in range(0, 7, 409):
        row = np.arange(start, min(start + 409, 7))[:, None]
        # src[block.py:31]: y = norm(x)
        x_bf16 = x_buf[row * 1280 + col]
        x = x_bf16.astype(np.float32)
        # mean and variance, two passes over the tile
        sum_x = np.sum(x, axis=1, keepdims=True, dtype=np.float32)
        mean = sum_x * 0.00078125
        diff = x - mean
        square = diff * diff
        sum_sq = np.sum(square, axis=1, keepdims=True, dtype=np.float32)
        var = sum_sq * 0.00078125
        var_eps = var + 1e-05
        rstd = 1.0 / np.sqrt(var_eps)
        gamma_bf16 = gamma_buf[col]
        gamma = gamma_bf16.astype(np.float32)
        beta_bf16 = beta_buf[col]
        beta = beta_bf16.astype(np.float32)
        x_hat = diff * rstd
        scaled = x_hat * gamma
        y = scaled + beta
        # store
        y_out = y.astype(ml_dtypes.bfloat16)
        y_buf[row * 1280 + col] = y_out
        mean_buf[row] = mean
        rstd_buf[row] = rstd
