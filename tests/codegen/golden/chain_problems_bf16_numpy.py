import ml_dtypes
import numpy as np


def _matrix(buffer, start, shape, strides):
    """A strided matrix of a flat buffer, widened to fp32 at least; strides in elements."""
    steps = [step * buffer.itemsize for step in strides]
    return np.lib.stride_tricks.as_strided(buffer[start:], shape, steps).astype(np.result_type(buffer, np.float32))


@np.errstate(all="ignore")
def chain_problems_bf16(
    x_buf,  # bf16 [37, 3, 5], flat
    w1_buf,  # bf16 [3, 20, 5], flat
    b1_buf,  # bf16 [3, 20], flat
    w2_buf,  # bf16 [3, 20, 3], flat
    y_buf,  # out bf16 [3, 37, 3], flat
    dw_buf,  # out f32 [2, 3, 5, 20], flat
    db_buf,  # out f32 [2, 3, 20], flat
):
    """A chain of two products."""
    for pid in range(6):
        fixed, chunk = divmod(pid, 2)
        col = np.arange(5)[None, :]
        row = np.arange(chunk * 32, min((chunk + 1) * 32, 37))[:, None]
        x_v1_bf16 = x_buf[fixed * 5 + row * 15 + col]
        x_v1 = x_v1_bf16.astype(np.float32)
        acc0 = np.matmul(x_v1, _matrix(w1_buf, fixed * 100, (5, 20), (1, 5)))
        col = np.arange(20)[None, :]
        # src[mlp.py:7]: h = relu(x @ w1.T + b1)
        b1_v1_bf16 = b1_buf[fixed * 20 + col]
        b1_v1 = b1_v1_bf16.astype(np.float32)
        z = acc0 + b1_v1
        z0 = z.astype(ml_dtypes.bfloat16).astype(np.float32)
        h = np.maximum(z0, np.float32(0.0))
        h0 = h.astype(ml_dtypes.bfloat16)
        acc_db = np.sum(h, axis=0, keepdims=True, dtype=np.float32)
        db_buf[fixed * 20 + col + chunk * 60] = acc_db
        sums0 = np.matmul(x_v1.T, h0.astype(np.float32))
        dw_buf[(chunk * 3 + fixed) * 100 + np.arange(5)[:, None] * 20 + np.arange(20)] = sums0
        acc1 = np.matmul(h0.astype(np.float32), _matrix(w2_buf, fixed * 60, (20, 3), (3, 1)))
        col = np.arange(3)[None, :]
        row = np.arange(chunk * 32, min((chunk + 1) * 32, 37))[:, None]
        acc1_out = acc1.astype(ml_dtypes.bfloat16)
        y_buf[fixed * 111 + row * 3 + col] = acc1_out
