"""Steps that were not finite.  In: such a step.  Out: a file with its inputs, and where its first NaN comes from."""
