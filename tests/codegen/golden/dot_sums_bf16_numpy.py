import ml_dtypes
import numpy as np


def _matrix(buffer, start, shape, strides):
    """A strided matrix of a flat buffer, widened to fp32 at least; strides in elements."""
    steps = [step * buffer.itemsize for step in strides]
    return np.lib.stride_tricks.as_strided(buffer[start:], shape, steps).astype(np.result_type(buffer, np.float32))


@np.errstate(all="ignore")
def dot_sums_bf16(
    a_buf,  # bf16 [28800], flat
    b_buf,  # bf16 [19584], flat
    bias_buf,  # bf16 [2, 136], flat
    hidden_buf,  # out bf16 [2, 200, 136], flat
    y_buf,  # out bf16 [54400], flat
    sums_buf,  # out f32 [2, 4, 136], flat
):
    """h = a @ b and what follows."""
    for fixed in range(2):
        whole = np.matmul(
            _matrix(a_buf, fixed * 72, (200, 72), (144, 1)), _matrix(b_buf, fixed * 9792, (72, 136), (136, 1))
        )
        for chunk in range(4):
            acc = whole[chunk * 64 : (chunk + 1) * 64]
            col = np.arange(136)[None, :]
            row = np.arange(chunk * 64, min((chunk + 1) * 64, 200))[:, None]
            # src[block.py:7]: h = x @ w + b
            product = acc.astype(ml_dtypes.bfloat16).astype(np.float32)
            bias_x_bf16 = bias_buf[fixed * 136 + col]
            bias_x = bias_x_bf16.astype(np.float32)
            h = product + bias_x
            h_r = h.astype(ml_dtypes.bfloat16).astype(np.float32)
            h_r_out = h_r.astype(ml_dtypes.bfloat16)
            hidden_buf[fixed * 27200 + row * 136 + col] = h_r_out
            gate = 1.0 / (1.0 + np.exp(-h_r))
            gate_r = gate.astype(ml_dtypes.bfloat16).astype(np.float32)
            active = h_r * gate_r
            active_r = active.astype(ml_dtypes.bfloat16).astype(np.float32)
            active_r_out = active_r.astype(ml_dtypes.bfloat16)
            y_buf[fixed * 136 + row * 272 + col] = active_r_out
            acc_sums = np.sum(active_r, axis=0, keepdims=True, dtype=np.float32)
            sums_buf[fixed * 544 + col + chunk * 136] = acc_sums
