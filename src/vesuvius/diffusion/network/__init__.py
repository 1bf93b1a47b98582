"""The 3D U-Net.  In: x_t and the condition, [B, C, Z, Y, X] and t.  Out: a prediction, [B, 1, Z, Y, X]."""
