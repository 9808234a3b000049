import numpy as np


def _matrix(buffer, start, shape, strides):
    """A strided matrix of a flat buffer, widened to fp32 at least; strides in elements."""
    steps = [step * buffer.itemsize for step in strides]
    return np.lib.stride_tricks.as_strided(buffer[start:], shape, steps).astype(np.result_type(buffer, np.float32))


@np.errstate(all="ignore")
def chain_rows_f32(
    x_buf,  # f32 [5, 12], flat
    w1_buf,  # f32 [16, 12], flat
    b1_buf,  # f32 [16], flat
    w2_buf,  # f32 [16, 9], flat
    y_buf,  # out f32 [5, 9], flat
    dw_buf,  # out f32 [3, 12, 16], flat
    db_buf,  # out f32 [3, 16], flat
):
    """A chain of two products."""
    for chunk in range(3):
        col = np.arange(12)[None, :]
        row = np.arange(chunk * 2, min((chunk + 1) * 2, 5))[:, None]
        x_v1 = x_buf[row * 12 + col]
        acc0 = np.matmul(x_v1, _matrix(w1_buf, 0, (12, 16), (1, 12)))
        col = np.arange(16)[None, :]
        # src[mlp.py:7]: h = relu(x @ w1.T + b1)
        b1_v1 = b1_buf[col]
        z = acc0 + b1_v1
        z0 = z
        h = np.maximum(z0, np.float32(0.0))
        h0 = h
        acc_db = np.sum(h, axis=0, keepdims=True, dtype=np.float32)
        db_buf[col + chunk * 16] = acc_db
        sums0 = np.matmul(x_v1.T, h0)
        dw_buf[chunk * 192 + np.arange(12)[:, None] * 16 + np.arange(16)] = sums0
        acc1 = np.matmul(h0, _matrix(w2_buf, 0, (16, 9), (9, 1)))
        col = np.arange(9)[None, :]
        row = np.arange(chunk * 2, min((chunk + 1) * 2, 5))[:, None]
        y_buf[row * 9 + col] = acc1
