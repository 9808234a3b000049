import ml_dtypes
import numpy as np


@np.errstate(all="ignore")
def mixing_bf16_20(
    x_buf,  # bf16 [2, 3, 20], flat
    gamma_buf,  # bf16 [20], flat
    mean_buf,  # out f32 [2, 3], flat
    rstd_buf,  # out f32 [2, 3], flat
    y_buf,  # out bf16 [2, 4, 15], flat
):
    """Layer norm of tokens, then head mixing within a sample."""
    for fixed in range(2):
        # Phase 1: statistics
        col = np.arange(20)[None, :]
        row = np.arange(3)[:, None]
        x_bf16 = x_buf[fixed * 60 + row * 20 + col]
        x = x_bf16.astype(np.float32)
        # mean and variance, two passes over the tile
        sum_x = np.sum(x, axis=1, keepdims=True, dtype=np.float32)
        mean = sum_x * 0.05
        diff = x - mean
        square = diff * diff
        sum_sq = np.sum(square, axis=1, keepdims=True, dtype=np.float32)
        var = sum_sq * 0.05
        var_eps = var + 1e-05
        rstd = 1.0 / np.sqrt(var_eps)
        mean_buf[fixed * 3 + row] = mean
        rstd_buf[fixed * 3 + row] = rstd

        # Phase 2: gather
        col = np.arange(15)[None, :]
        row = np.arange(4)[:, None]
        # src[block.py:40]: mixed = mix(norm(x))
        x_bf16_v2 = x_buf[fixed * 60 + row * 5 + (col // 5) * 20 + col % 5]
        x_v2 = x_bf16_v2.astype(np.float32)
        mean_v2 = mean_buf[fixed * 3 + col // 5]
        rstd_v2 = rstd_buf[fixed * 3 + col // 5]
        gamma_bf16 = gamma_buf[row * 5 + col % 5]
        gamma = gamma_bf16.astype(np.float32)
        diff_v2 = x_v2 - mean_v2
        x_hat = diff_v2 * rstd_v2
        y = x_hat * gamma
        y_out = y.astype(ml_dtypes.bfloat16)
        y_buf[fixed * 60 + row * 15 + col] = y_out
