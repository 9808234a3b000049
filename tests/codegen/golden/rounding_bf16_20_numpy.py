import ml_dtypes
import numpy as np


@np.errstate(all="ignore")
def rounding_bf16_20(
    in_tile_buf,  # f32 [5, 20], flat
    out_tile_buf,  # out f32 [5, 20], flat
    in_row_buf,  # f32 [5], flat
    out_row_buf,  # out f32 [5], flat
    in_col_buf,  # f32 [20], flat
    out_col_buf,  # out f32 [20], flat
    in_scalar_buf,  # f32 [1], flat
    out_scalar_buf,  # out f32 [1], flat
):
    """Through bf16."""
    col = np.arange(20)[None, :]
    for start in range(0, 5, 26214):
        row = np.arange(start, min(start + 26214, 5))[:, None]
        x_tile = in_tile_buf[row * 20 + col]
        y_tile = x_tile.astype(ml_dtypes.bfloat16).astype(np.float32)
        out_tile_buf[row * 20 + col] = y_tile
        x_row = in_row_buf[row]
        y_row = x_row.astype(ml_dtypes.bfloat16).astype(np.float32)
        out_row_buf[row] = y_row
        x_col = in_col_buf[col]
        y_col = x_col.astype(ml_dtypes.bfloat16).astype(np.float32)
        out_col_buf[col] = y_col
        x_scalar = in_scalar_buf[0]
        y_scalar = x_scalar.astype(ml_dtypes.bfloat16).astype(np.float32)
        out_scalar_buf[0] = y_scalar
