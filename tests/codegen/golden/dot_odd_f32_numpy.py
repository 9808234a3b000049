import numpy as np


def _matrix(buffer, start, shape, strides):
    """A strided matrix of a flat buffer, widened to fp32 at least; strides in elements."""
    steps = [step * buffer.itemsize for step in strides]
    return np.lib.stride_tricks.as_strided(buffer[start:], shape, steps).astype(np.result_type(buffer, np.float32))


@np.errstate(all="ignore")
def dot_odd_f32(
    a_buf,  # f32 [2146], flat
    b_buf,  # f32 [3538], flat
    bias_buf,  # f32 [2, 61], flat
    residual_buf,  # f32 [4514], flat
    y_buf,  # out f32 [4514], flat
):
    """h = a @ b and what follows."""
    for fixed in range(2):
        acc = np.matmul(
            _matrix(a_buf, fixed * 1073, (37, 29), (29, 1)), _matrix(b_buf, fixed * 1769, (29, 61), (61, 1))
        )
        col = np.arange(61)[None, :]
        row = np.arange(37)[:, None]
        # src[block.py:7]: h = x @ w + b
        product = acc
        bias_x = bias_buf[fixed * 61 + col]
        h = product + bias_x
        residual_x = residual_buf[fixed * 2257 + row * 61 + col]
        y = h + residual_x
        y_buf[fixed * 2257 + row * 61 + col] = y
