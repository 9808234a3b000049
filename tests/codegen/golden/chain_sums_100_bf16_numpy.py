import numpy as np


@np.errstate(all="ignore")
def chain_sums_100_bf16(
    x_buf,  # bf16 [100, 20], flat
    g_buf,  # bf16 [33, 100], flat
    dw_buf,  # out f32 [3, 20, 33], flat
):
    """Sums alone."""
    for chunk in range(3):
        col = np.arange(20)[None, :]
        row = np.arange(chunk * 48, min((chunk + 1) * 48, 100))[:, None]
        x_v1 = x_buf[row * 20 + col]
        col = np.arange(33)[None, :]
        row = np.arange(chunk * 48, min((chunk + 1) * 48, 100))[:, None]
        g_v1 = g_buf[row + col * 100]
        sums0 = np.matmul(x_v1.astype(np.float32).T, g_v1.astype(np.float32))
        dw_buf[chunk * 660 + np.arange(20)[:, None] * 33 + np.arange(33)] = sums0
