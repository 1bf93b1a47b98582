"""The 3D U-Net.  In: x_t (B, C, Z, Y, X), t, condition.  Out: a prediction of the same shape."""
