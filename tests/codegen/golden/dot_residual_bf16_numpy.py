import ml_dtypes
import numpy as np


def _matrix(buffer, start, shape, strides):
    """A strided matrix of a flat buffer, widened to fp32 at least; strides in elements."""
    steps = [step * buffer.itemsize for step in strides]
    return np.lib.stride_tricks.as_strided(buffer[start:], shape, steps).astype(np.result_type(buffer, np.float32))


@np.errstate(all="ignore")
def dot_residual_bf16(
    a_buf,  # bf16 [43200], flat
    b_buf,  # bf16 [29376], flat
    bias_buf,  # bf16 [3, 136], flat
    residual_buf,  # bf16 [81600], flat
    y_buf,  # out bf16 [81600], flat
):
    """h = a @ b and what follows."""
    for fixed in range(3):
        acc = np.matmul(
            _matrix(a_buf, fixed * 72, (200, 72), (216, 1)), _matrix(b_buf, fixed * 9792, (72, 136), (136, 1))
        )
        col = np.arange(136)[None, :]
        row = np.arange(200)[:, None]
        # src[block.py:7]: h = x @ w + b
        product = acc.astype(ml_dtypes.bfloat16).astype(np.float32)
        bias_x_bf16 = bias_buf[fixed * 136 + col]
        bias_x = bias_x_bf16.astype(np.float32)
        h = product + bias_x
        h_r = h.astype(ml_dtypes.bfloat16).astype(np.float32)
        residual_x_bf16 = residual_buf[fixed * 136 + row * 408 + col]
        residual_x = residual_x_bf16.astype(np.float32)
        y = h_r + residual_x
        y_r = y.astype(ml_dtypes.bfloat16).astype(np.float32)
        y_r_out = y_r.astype(ml_dtypes.bfloat16)
        y_buf[fixed * 136 + row * 408 + col] = y_r_out
