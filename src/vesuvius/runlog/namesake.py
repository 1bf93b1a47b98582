"""Another distribution that owns the import name `vesuvius`: one overwrites the other."""

from __future__ import annotations


def namesake_problem() -> str:
    """What is installed and what to do; '' where nothing is.  Takes some hundredths of a second."""
    import importlib.metadata  # takes as long to import as all else that memcheck needs

    try:
        version = importlib.metadata.version("vesuvius")
    except importlib.metadata.PackageNotFoundError:
        return ""
    return (
        f"the distribution 'vesuvius' {version} is installed alongside ours ('vesuvius-diffusion') and both "
        "use the import name vesuvius; uninstall it and reinstall ours, or use a fresh virtual environment"
    )
