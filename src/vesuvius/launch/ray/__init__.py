"""The ranks of a run as workers of Ray Train, which starts them, notices their deaths and starts them again.

In: what `vesuvius train` was asked for.  Out: the run, trained by all ranks, and the exit code of rank 0.
"""

import vesuvius.stream.ray  # noqa: F401  sets Ray's environment, which has to be there before Ray is imported
