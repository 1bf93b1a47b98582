"""The ranks of a run as workers of Ray Train, which starts them, notices their deaths and starts them again."""

import vesuvius.stream.ray  # noqa: F401  sets Ray's environment, which has to be there before Ray is imported
