"""Another distribution that owns the import name `vesuvius`: one overwrites the other."""

from __future__ import annotations

from collections.abc import Callable


def namesake_problem(version_of: Callable[[str], str] | None = None) -> str:
    """What is installed and what to do; '' where nothing is.  Takes some hundredths of a second.

    Args:
        version_of: as `importlib.metadata.version`, which it is by default.
    """
    import importlib.metadata  # takes as long to import as all else that memcheck needs

    try:
        version = (version_of or importlib.metadata.version)("vesuvius")
    except importlib.metadata.PackageNotFoundError:
        return ""
    return (
        f"the distribution 'vesuvius' {version} is installed alongside ours ('vesuvius-diffusion') and both "
        "use the import name vesuvius; uninstall it and reinstall ours, or use a fresh virtual environment"
    )
