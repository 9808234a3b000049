"""Functions of fp32 values for kernels with 16-bit types, with errors far below those types' roundings."""

FAST = {
    "_exp": '''
@triton.jit
def _exp(x):
    """e**x = 2**(x * log2(e)) with a relative error below 2**-22 + |x| * 2**-23; below 2**-126 it is 0."""
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * 1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1
    )
''',
    "_sigmoid": '''
@triton.jit
def _sigmoid(x):
    """1 / (1 + e**-x) with the error of e**-x and of two roundings; below 2**-126 it is 0."""
    return tl.inline_asm_elementwise(
        "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000; "
        "rcp.approx.ftz.f32 $0, t; }",
        "=f,f",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )
''',
    "_exp2": '''
@triton.jit
def _exp2(x):
    """2**x with a relative error below 2**-22; below 2**-126 it is 0."""
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
''',
    "_one_plus_erf": '''
@triton.jit
def _one_plus_erf(x):
    """1 + erf(x) = erfc(-x), where erfc(a) = 2**-(a * polynomial) for a >= 0 (minimax on 0 to 3.9).

    From -3.9 on its relative error is below 6e-6, further down its error is below 1e-10.
    """
    a = tl.abs(x)
    p = 1.967189382412471e-05
    p = p * a - 0.00047843370703049004
    p = p * a + 0.005188745446503162
    p = p * a - 0.03383374214172363
    p = p * a + 0.15234699845314026
    p = p * a + 0.9171214699745178
    tail = _exp2((p * a + 1.6280571222305298) * (-a))
    return tl.where(x > 0, 2.0 - tail, tail)
''',
    "_one_plus_tanh": '''
@triton.jit
def _one_plus_tanh(x):
    """1 + tanh(x) = 2 / (1 + e**(-2 x)), with the error of that power and of two roundings."""
    return 2.0 * _sigmoid(2.0 * x)
''',
    "_log1p_unit": '''
@triton.jit
def _log1p_unit(x):
    """log(1 + x) for 0 <= x <= 1 as x times a polynomial (minimax), with a relative error below 1e-5."""
    p = -0.02386915497481823
    p = p * x + 0.10122229903936386
    p = p * x - 0.21004870533943176
    p = p * x + 0.3252066969871521
    p = p * x - 0.4993613660335541
    return (p * x + 0.9999915957450867) * x
''',
    "_tanh": '''
@triton.jit
def _tanh(x):
    """tanh(x) with a relative error below 2e-6: a polynomial (minimax) up to 0.35, and by the sigmoid from there on."""
    s = x * x
    p = -0.04916137456893921
    p = p * s + 0.13300038874149323
    p = p * s - 0.33332669734954834
    return tl.where(tl.abs(x) < 0.35, x * (1.0 + p * s), 2.0 * _sigmoid(2.0 * x) - 1.0)
''',
}
