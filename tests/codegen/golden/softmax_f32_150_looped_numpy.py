import numpy as np


@np.errstate(all="ignore")
def softmax_f32_150_looped(
    x_buf,  # f32 [7, 150], flat
    y_buf,  # out f32 [7, 150], flat
):
    """Softmax over the columns."""
    col = np.arange(150)[None, :]
    for start in range(0, 7, 3495):
        row = np.arange(start, min(start + 3495, 7))[:, None]
        x = x_buf[row * 150 + col]
        peak = np.max(x, axis=1, keepdims=True)
        x = x_buf[row * 150 + col]
        shifted = x - peak
        e = np.exp(shifted)
        total = np.sum(e, axis=1, keepdims=True, dtype=np.float32)
        scale = 1.0 / total
        x = x_buf[row * 150 + col]
        shifted = x - peak
        e = np.exp(shifted)
        y = e * scale
        y_buf[row * 150 + col] = y
